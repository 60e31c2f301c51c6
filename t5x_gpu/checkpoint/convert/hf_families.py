"""config.json of each family, read as the fields of our models and written from them.

One pair of functions per family; Llama, Qwen-3 and Gemma-2 share theirs.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig

# Their names -> ours. 'gelu' is exact there and the approximation by tanh here.
ACTIVATIONS = {
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu_exact',
  'gelu_new': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_fast': 'gelu',
}
THEIR_ACTIVATIONS = {'relu': 'relu', 'silu': 'silu', 'gelu_exact': 'gelu', 'gelu': 'gelu_new'}

Json = Mapping[str, Any]
HasTensor = Callable[[str], bool]


@dataclasses.dataclass(frozen=True)
class ConfigFamily:
  """How a family's config.json is read and written.

  Attributes:
    architectures: those converted; the first is the one to suggest.
    read: (config.json, whether the files have a tensor that is no copy) -> the model.
    write: the model -> the keys that describe it.
    fixed: key -> the values it may have if it is there.
  """

  architectures: tuple[str, ...]
  read: Callable[[Json, HasTensor], ModelFields]
  write: Callable[[ModelFields], dict[str, Any]]
  fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def _activation(name: str) -> str:
  if name not in ACTIVATIONS:
    raise CheckpointError(
      f'config.json says activation {name!r}.{did_you_mean(name, ACTIVATIONS)}',
      fix=f'Converted are {", ".join(ACTIVATIONS)}.',
      docs='convert.md#families',
    )
  return ACTIVATIONS[name]


def _dtype(config: Json) -> str:
  dtype = config.get('dtype', config.get('torch_dtype'))
  return 'bfloat16' if dtype in ('bfloat16', 'float16') else 'float32'


def _t5(config: Json, has_tensor: HasTensor) -> ModelFields:
  """T5 1.0 ties its logits and scales them; T5.1.1, mT5 and ByT5 have an output layer.

  transformers 5 writes tie_word_embeddings = True for all of them, so that the tensors must tell.
  """
  gated, _, act = config.get('feed_forward_proj', 'relu').rpartition('-')
  if gated not in ('', 'gated'):
    raise CheckpointError(
      f'config.json says feed_forward_proj = {config["feed_forward_proj"]!r}.',
      fix="It must be 'relu', 'gated-gelu' or another 'gated-' activation.",
    )
  act = 'gelu_new' if (gated, act) == ('gated', 'gelu') else act
  tied = not has_tensor('lm_head.weight')
  scaled = config.get('scale_decoder_outputs', config.get('tie_word_embeddings', True)) and (
    config['model_type'] == 't5'
  )
  if scaled and not tied:
    raise CheckpointError(
      'config.json says that logits are tied to the token table (tie_word_embeddings), and the '
      'files have an output layer of their own, lm_head.weight.',
      fix='Set "tie_word_embeddings": false in config.json (T5.1.1, mT5, ByT5), or take the '
      'weights that belong to it.',
    )
  decoder = config.get('num_decoder_layers')
  c = TransformerConfig(
    vocab_size=config['vocab_size'],
    embed_dim=config['d_model'],
    head_dim=config['d_kv'],
    num_layers=config['num_layers'] if decoder is None else decoder,
    num_heads=config['num_heads'],
    mlp_dim=config['d_ff'],
    mlp_activations=(_activation(act), *(('linear',) if gated else ())),
    relative_bias='shared',
    num_relpos_buckets=config.get('relative_attention_num_buckets', 32),
    max_relpos_distance=config.get('relative_attention_max_distance', 128),
    norm_epsilon=config.get('layer_norm_epsilon', 1e-6),
    logits_via_embedding=tied,
    scale_tied_logits=bool(scaled) if tied else True,
    dtype=_dtype(config),
    dropout_rate=config.get('dropout_rate', 0.0),
  )
  return ModelFields('encoder_decoder', c, {'num_encoder_layers': config['num_layers']})


def _to_t5(model: ModelFields) -> dict[str, Any]:
  c = model.config
  act, gated = c.mlp_activations[0], len(c.mlp_activations) > 1
  theirs = 'gelu' if gated and act == 'gelu' else THEIR_ACTIVATIONS.get(act, act)
  encoder = model.options.get('num_encoder_layers')
  scaled = c.logits_via_embedding and c.scale_tied_logits
  return {
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    'is_encoder_decoder': True,
    'vocab_size': c.vocab_size,
    'd_model': c.embed_dim,
    'd_kv': c.head_dim,
    'd_ff': c.mlp_dim,
    'num_heads': c.num_heads,
    'num_layers': c.num_layers if encoder is None else encoder,
    'num_decoder_layers': c.num_layers,
    'feed_forward_proj': f'gated-{theirs}' if gated else theirs,
    'relative_attention_num_buckets': c.num_relpos_buckets,
    'relative_attention_max_distance': c.max_relpos_distance,
    'layer_norm_epsilon': c.norm_epsilon,
    'dropout_rate': c.dropout_rate,
    'tie_word_embeddings': scaled,
    'scale_decoder_outputs': scaled,
    'pad_token_id': 0,
    'decoder_start_token_id': 0,
  }


def _bert(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  c = TransformerConfig(
    vocab_size=config['vocab_size'],
    embed_dim=config['hidden_size'],
    num_layers=config['num_hidden_layers'],
    num_heads=config['num_attention_heads'],
    head_dim=_head_dim(config),
    mlp_dim=config['intermediate_size'],
    query_pre_attn_scalar=_head_dim(config),
    mlp_activations=(_activation(config['hidden_act']),),
    mlp_bias=True,
    attention_bias='all',
    relative_bias='none',
    num_positions=config['max_position_embeddings'],
    num_token_types=config['type_vocab_size'],
    norm='layer',
    norm_epsilon=config['layer_norm_eps'],
    norm_position='post',
    embedding_norm=True,
    init_stddev=config.get('initializer_range', 0.02),
    dtype=_dtype(config),
    dropout_rate=config.get('hidden_dropout_prob', 0.0),
  )
  if 'BertForMaskedLM' in config['architectures']:
    return ModelFields('encoder', c, {'head_type': 'mlm'})
  classes = config.get('num_labels', len(config.get('id2label', {})) or 2)
  return ModelFields(
    'encoder',
    c,
    {'head_type': 'classification', 'num_classes': classes, 'pooling': 'first_token_tanh'},
  )


def _to_bert(model: ModelFields) -> dict[str, Any]:
  c = model.config
  out = {
    'model_type': 'bert',
    'vocab_size': c.vocab_size,
    'hidden_size': c.embed_dim,
    'num_hidden_layers': c.num_layers,
    'num_attention_heads': c.num_heads,
    'intermediate_size': c.mlp_dim,
    'hidden_act': THEIR_ACTIVATIONS.get(c.mlp_activations[0], c.mlp_activations[0]),
    'max_position_embeddings': c.num_positions,
    'type_vocab_size': c.num_token_types,
    'layer_norm_eps': c.norm_epsilon,
    'hidden_dropout_prob': c.dropout_rate,
    'attention_probs_dropout_prob': c.dropout_rate,
    'initializer_range': c.init_stddev or 0.02,
    'pad_token_id': 0,
  }
  if model.options.get('head_type') == 'mlm':
    return {**out, 'architectures': ['BertForMaskedLM']}
  classes = range(model.options.get('num_classes', 2))
  return {
    **out,
    'architectures': ['BertForSequenceClassification'],
    'id2label': {str(i): f'LABEL_{i}' for i in classes},
    'label2id': {f'LABEL_{i}': i for i in classes},
  }


def _gpt2(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  head_dim = _divided(config, 'n_embd', 'n_head')
  c = TransformerConfig(
    vocab_size=config['vocab_size'],
    embed_dim=config['n_embd'],
    num_layers=config['n_layer'],
    num_heads=config['n_head'],
    head_dim=head_dim,
    query_pre_attn_scalar=head_dim,
    mlp_dim=config.get('n_inner') or 4 * config['n_embd'],
    mlp_bias=True,
    attention_bias='all',
    mlp_activations=(_activation(config.get('activation_function', 'gelu_new')),),
    relative_bias='none',
    num_positions=config.get('n_positions', config.get('n_ctx', 1024)),
    norm='layer',
    norm_epsilon=config.get('layer_norm_epsilon', 1e-5),
    logits_via_embedding=True,
    scale_tied_logits=False,
    init_stddev=config.get('initializer_range', 0.02),
    dtype=_dtype(config),
    dropout_rate=config.get('resid_pdrop', 0.0),
  )
  return ModelFields('decoder_only', c)


def _to_gpt2(model: ModelFields) -> dict[str, Any]:
  c = model.config
  return {
    'architectures': ['GPT2LMHeadModel'],
    'model_type': 'gpt2',
    'vocab_size': c.vocab_size,
    'n_embd': c.embed_dim,
    'n_layer': c.num_layers,
    'n_head': c.num_heads,
    'n_inner': None if c.mlp_dim == 4 * c.embed_dim else c.mlp_dim,
    'activation_function': THEIR_ACTIVATIONS.get(c.mlp_activations[0], c.mlp_activations[0]),
    'n_positions': c.num_positions,
    'layer_norm_epsilon': c.norm_epsilon,
    'initializer_range': c.init_stddev or 0.02,
    'resid_pdrop': c.dropout_rate,
    'embd_pdrop': c.dropout_rate,
    'attn_pdrop': c.dropout_rate,
  }


def _llama(config: Json, has_tensor: HasTensor) -> ModelFields:
  """Llama, Qwen-3 and Gemma-2."""
  del has_tensor
  family = config['model_type']
  gemma = family == 'gemma2'
  head_dim = _head_dim(config)
  act = (config.get('hidden_activation') or 'gelu_pytorch_tanh') if gemma else config['hidden_act']
  c = TransformerConfig(
    vocab_size=config['vocab_size'],
    embed_dim=config['hidden_size'],
    num_layers=config['num_hidden_layers'],
    num_heads=config['num_attention_heads'],
    num_kv_heads=config.get('num_key_value_heads') or config['num_attention_heads'],
    head_dim=head_dim,
    mlp_dim=config['intermediate_size'],
    query_pre_attn_scalar=config['query_pre_attn_scalar'] if gemma else head_dim,
    mlp_activations=(_activation(act), 'linear'),
    mlp_bias=bool(config.get('mlp_bias')),
    attention_bias='all' if config.get('attention_bias') else 'none',
    relative_bias='none',
    rope=_rope(config),
    windows=_windows(config),
    qk_norm=family == 'qwen3',
    norm='rms_plus_one' if gemma else 'rms',
    norm_position='sandwich' if gemma else 'pre',
    scale_embedding=gemma,
    norm_epsilon=config.get('rms_norm_eps', 1e-6),
    scale_tied_logits=False,
    attention_softcap=config.get('attn_logit_softcapping') if gemma else None,
    logits_softcap=config.get('final_logit_softcapping') if gemma else None,
    logits_via_embedding=config.get('tie_word_embeddings', gemma),
    init_stddev=config.get('initializer_range', 0.02),
    dtype=_dtype(config),
    dropout_rate=config.get('attention_dropout', 0.0),
    max_length=config.get('max_position_embeddings') or 0,
  )
  return ModelFields('decoder_only', c)


def _to_llama(model: ModelFields, family: str, architecture: str) -> dict[str, Any]:
  c = model.config
  out = {
    'architectures': [architecture],
    'model_type': family,
    'vocab_size': c.vocab_size,
    'hidden_size': c.embed_dim,
    'num_hidden_layers': c.num_layers,
    'num_attention_heads': c.num_heads,
    'num_key_value_heads': c.kv_heads,
    'head_dim': c.head_dim,
    'intermediate_size': c.mlp_dim,
    'attention_bias': c.attention_bias == 'all',
    'mlp_bias': c.mlp_bias,
    'rms_norm_eps': c.norm_epsilon,
    'tie_word_embeddings': c.logits_via_embedding,
    'initializer_range': c.init_stddev or 0.02,
    'attention_dropout': c.dropout_rate,
    **_to_rope(c.rope),
  }
  if c.max_length:
    out['max_position_embeddings'] = c.max_length
  act = THEIR_ACTIVATIONS.get(c.mlp_activations[0], c.mlp_activations[0])
  out['hidden_activation' if family == 'gemma2' else 'hidden_act'] = (
    'gelu_pytorch_tanh' if act == 'gelu_new' else act
  )
  if family == 'gemma2':
    out.update(
      query_pre_attn_scalar=c.query_pre_attn_scalar,
      attn_logit_softcapping=c.attention_softcap,
      final_logit_softcapping=c.logits_softcap,
    )
  if family in ('gemma2', 'qwen3') and any(c.windows):
    windows = [c.windows[i % len(c.windows)] for i in range(c.num_layers)]
    out.update(
      sliding_window=max(windows),
      use_sliding_window=True,
      layer_types=['sliding_attention' if w else 'full_attention' for w in windows],
    )
  elif family == 'gemma2':
    out.update(layer_types=['full_attention'] * c.num_layers)
  return out


def _head_dim(config: Json) -> int:
  return config.get('head_dim') or _divided(config, 'hidden_size', 'num_attention_heads')


def _divided(config: Json, size: str, parts: str) -> int:
  if not config[parts] or config[size] % config[parts]:
    raise CheckpointError(
      f'config.json says {size} = {config[size]}, which {parts} = {config[parts]} does not divide.',
      fix='Take the config.json that belongs to the weights.',
    )
  return config[size] // config[parts]


def _rope(config: Json) -> RotaryEmbedding:
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`."""
  rope = dict(config.get('rope_parameters') or config.get('rope_scaling') or {})
  kind = rope.get('rope_type', rope.get('type', 'default'))
  theta = float(rope.get('rope_theta', config.get('rope_theta', 10000.0)))
  if kind == 'default':
    return RotaryEmbedding(theta=theta)
  if kind == 'linear':
    return RotaryEmbedding(theta=theta, scaling='linear', factor=rope['factor'])
  if kind == 'llama3':
    return RotaryEmbedding(
      theta=theta,
      scaling='llama3',
      factor=rope['factor'],
      low_freq_factor=rope['low_freq_factor'],
      high_freq_factor=rope['high_freq_factor'],
      original_length=rope['original_max_position_embeddings'],
    )
  raise CheckpointError(
    f'config.json says rope_type = {kind!r}.',
    fix="Converted are 'default', 'linear' and 'llama3'.",
    docs='convert.md#families',
  )


def _to_rope(rope: Optional[RotaryEmbedding]) -> dict[str, Any]:
  if rope is None:
    return {}
  scaling: Optional[dict[str, Any]] = None
  if rope.scaling == 'linear':
    scaling = {'rope_type': 'linear', 'factor': rope.factor}
  elif rope.scaling == 'llama3':
    scaling = {
      'rope_type': 'llama3',
      'factor': rope.factor,
      'low_freq_factor': rope.low_freq_factor,
      'high_freq_factor': rope.high_freq_factor,
      'original_max_position_embeddings': rope.original_length,
    }
  # transformers 4 reads the first two, transformers 5 the last.
  return {
    'rope_theta': rope.theta,
    'rope_scaling': scaling,
    'rope_parameters': {'rope_theta': rope.theta, **(scaling or {'rope_type': 'default'})},
  }


def _windows(config: Json) -> tuple[int, ...]:
  """Returns the shortest tuple that, repeated, gives every layer its window."""
  layers, window = config['num_hidden_layers'], config.get('sliding_window')
  gemma = config['model_type'] == 'gemma2'
  if not window or not (gemma or config.get('use_sliding_window')):
    return (0,)
  types = config.get('layer_types')
  if types is None and gemma:
    types = ['full_attention' if i % 2 else 'sliding_attention' for i in range(layers)]
  elif types is None:
    types = [
      'sliding_attention' if i >= config['max_window_layers'] else 'full_attention'
      for i in range(layers)
    ]
  windows = tuple(window if kind == 'sliding_attention' else 0 for kind in types)
  return next(
    windows[:n]
    for n in range(1, layers + 1)
    if all(windows[i] == windows[i % n] for i in range(layers))
  )


CONFIG_FAMILIES: dict[str, ConfigFamily] = {
  't5': ConfigFamily(
    ('T5ForConditionalGeneration', 'MT5ForConditionalGeneration', 'T5WithLMHeadModel'),
    _t5,
    _to_t5,
    {'is_decoder': (False,)},
  ),
  'bert': ConfigFamily(
    ('BertForSequenceClassification', 'BertForMaskedLM'),
    _bert,
    _to_bert,
    {
      'is_decoder': (False,),
      'add_cross_attention': (False,),
      'position_embedding_type': ('absolute', None),
    },
  ),
  'gpt2': ConfigFamily(
    ('GPT2LMHeadModel',),
    _gpt2,
    _to_gpt2,
    {
      'scale_attn_weights': (True,),
      'add_cross_attention': (False,),
      'scale_attn_by_inverse_layer_idx': (False,),
    },
  ),
  'llama': ConfigFamily(
    ('LlamaForCausalLM',),
    _llama,
    lambda m: _to_llama(m, 'llama', 'LlamaForCausalLM'),
    {'partial_rotary_factor': (1.0,)},
  ),
  'gemma2': ConfigFamily(
    ('Gemma2ForCausalLM',),
    _llama,
    lambda m: _to_llama(m, 'gemma2', 'Gemma2ForCausalLM'),
    {'use_bidirectional_attention': (None, False)},
  ),
  'qwen3': ConfigFamily(
    ('Qwen3ForCausalLM',), _llama, lambda m: _to_llama(m, 'qwen3', 'Qwen3ForCausalLM')
  ),
}
