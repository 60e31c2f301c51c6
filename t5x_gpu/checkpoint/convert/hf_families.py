"""config.json of T5, BERT and GPT-2 as the fields of our models, and back.

A family has a table for the keys that hold one of our fields unchanged, a function that reads the
rest, and one that writes it. `hf_llama` has the families derived from Llama.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Union

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.models.config import TransformerConfig

# Their names -> ours. Their 'gelu' is exact; ours is the tanh approximation.
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
INIT_STDDEV = 0.02  # the default of initializer_range

Json = Mapping[str, Any]
HasTensor = Callable[[str], bool]
# Field of TransformerConfig -> key of config.json, or (key, default).
Keys = Mapping[str, Union[str, tuple[str, Any]]]


@dataclasses.dataclass(frozen=True)
class ConfigFamily:
  """How to read and write the config.json of a family.

  Attributes:
    architectures: the supported ones; errors suggest the first.
    read: (config.json, has_tensor) -> the model. `has_tensor(name)` returns whether the files hold
      a tensor that is not a copy of another.
    write: the model -> the keys that describe it.
    fixed: key -> the only values that our models support, if the key is present.
  """

  architectures: tuple[str, ...]
  read: Callable[[Json, HasTensor], ModelFields]
  write: Callable[[ModelFields], dict[str, Any]]
  fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)


def read_keys(config: Json, keys: Keys) -> dict[str, Any]:
  """Returns our fields; raises KeyError for a missing key that has no default."""
  return {
    field: config[key] if isinstance(key, str) else config.get(*key) for field, key in keys.items()
  }


def write_keys(c: TransformerConfig, keys: Keys) -> dict[str, Any]:
  """Returns the keys of config.json for the same fields."""
  return {key if isinstance(key, str) else key[0]: getattr(c, f) for f, key in keys.items()}


def activation(name: str) -> str:
  """Returns our name of an activation; raises CheckpointError for an unknown one."""
  if name not in ACTIVATIONS:
    raise CheckpointError(
      f'config.json says activation {name!r}.{did_you_mean(name, ACTIVATIONS)}',
      fix=f'Supported activations: {", ".join(ACTIVATIONS)}.',
      docs='convert.md#families',
    )
  return ACTIVATIONS[name]


def their_activation(c: TransformerConfig) -> str:
  return THEIR_ACTIVATIONS.get(c.mlp_activations[0], c.mlp_activations[0])


def dtype(config: Json) -> str:
  name = config.get('dtype', config.get('torch_dtype'))
  return 'bfloat16' if name in ('bfloat16', 'float16') else 'float32'


def head_dim(config: Json) -> int:
  return config.get('head_dim') or divided(config, 'hidden_size', 'num_attention_heads')


def divided(config: Json, size: str, parts: str) -> int:
  """Returns one key divided by another; raises CheckpointError if it is not a whole number."""
  if not config[parts] or config[size] % config[parts]:
    raise CheckpointError(
      f'config.json says {size} = {config[size]}, which {parts} = {config[parts]} does not divide.',
      fix='Take the config.json that belongs to the weights.',
    )
  return config[size] // config[parts]


_T5: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'd_model',
  'head_dim': 'd_kv',
  'num_heads': 'num_heads',
  'mlp_dim': 'd_ff',
  'num_relpos_buckets': ('relative_attention_num_buckets', 32),
  'max_relpos_distance': ('relative_attention_max_distance', 128),
  'norm_epsilon': ('layer_norm_epsilon', 1e-6),
  'dropout_rate': ('dropout_rate', 0.0),
}


def _read_t5(config: Json, has_tensor: HasTensor) -> ModelFields:
  """T5 1.0 ties its logits and scales them; T5.1.1, mT5 and ByT5 have an output layer.

  transformers 5 writes tie_word_embeddings = True for all of them, so only the tensors show which.
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
      'config.json says that logits are tied to the token table (tie_word_embeddings), but the '
      'files have a separate output layer, lm_head.weight.',
      fix='Set "tie_word_embeddings": false in config.json (T5.1.1, mT5, ByT5), or take the '
      'weights that belong to it.',
    )
  decoder = config.get('num_decoder_layers')
  c = TransformerConfig(
    **read_keys(config, _T5),
    num_layers=config['num_layers'] if decoder is None else decoder,
    mlp_activations=(activation(act), *(('linear',) if gated else ())),
    relative_bias='shared',
    logits_via_embedding=tied,
    scale_tied_logits=bool(scaled) if tied else True,
    dtype=dtype(config),
  )
  return ModelFields('encoder_decoder', c, {'num_encoder_layers': config['num_layers']})


def _write_t5(model: ModelFields) -> dict[str, Any]:
  c = model.config
  gated = len(c.mlp_activations) > 1
  theirs = 'gelu' if gated and c.mlp_activations[0] == 'gelu' else their_activation(c)
  encoder = model.options.get('num_encoder_layers')
  scaled = c.logits_via_embedding and c.scale_tied_logits
  return {
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    'is_encoder_decoder': True,
    **write_keys(c, _T5),
    'num_layers': c.num_layers if encoder is None else encoder,
    'num_decoder_layers': c.num_layers,
    'feed_forward_proj': f'gated-{theirs}' if gated else theirs,
    'tie_word_embeddings': scaled,
    'scale_decoder_outputs': scaled,
    'pad_token_id': 0,
    'decoder_start_token_id': 0,
  }


_BERT: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'mlp_dim': 'intermediate_size',
  'num_positions': 'max_position_embeddings',
  'num_token_types': 'type_vocab_size',
  'norm_epsilon': 'layer_norm_eps',
  'dropout_rate': ('hidden_dropout_prob', 0.0),
}


def _read_bert(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  c = TransformerConfig(
    **read_keys(config, _BERT),
    head_dim=head_dim(config),
    query_pre_attn_scalar=head_dim(config),
    mlp_activations=(activation(config['hidden_act']),),
    mlp_bias=True,
    attention_bias='all',
    relative_bias='none',
    norm='layer',
    norm_position='post',
    embedding_norm=True,
    init_stddev=config.get('initializer_range', INIT_STDDEV),
    dtype=dtype(config),
  )
  if 'BertForMaskedLM' in config['architectures']:
    return ModelFields('encoder', c, {'head_type': 'mlm'})
  classes = config.get('num_labels', len(config.get('id2label', {})) or 2)
  return ModelFields(
    'encoder',
    c,
    {'head_type': 'classification', 'num_classes': classes, 'pooling': 'first_token_tanh'},
  )


def _write_bert(model: ModelFields) -> dict[str, Any]:
  c = model.config
  out = {
    'model_type': 'bert',
    **write_keys(c, _BERT),
    'hidden_act': their_activation(c),
    'attention_probs_dropout_prob': c.dropout_rate,
    'initializer_range': c.init_stddev or INIT_STDDEV,
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


_GPT2: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'n_embd',
  'num_layers': 'n_layer',
  'num_heads': 'n_head',
  'norm_epsilon': ('layer_norm_epsilon', 1e-5),
  'dropout_rate': ('resid_pdrop', 0.0),
}


def _read_gpt2(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  features = divided(config, 'n_embd', 'n_head')
  c = TransformerConfig(
    **read_keys(config, _GPT2),
    head_dim=features,
    query_pre_attn_scalar=features,
    mlp_dim=config.get('n_inner') or 4 * config['n_embd'],
    mlp_bias=True,
    attention_bias='all',
    mlp_activations=(activation(config.get('activation_function', 'gelu_new')),),
    relative_bias='none',
    num_positions=config.get('n_positions', config.get('n_ctx', 1024)),
    norm='layer',
    logits_via_embedding=True,
    scale_tied_logits=False,
    init_stddev=config.get('initializer_range', INIT_STDDEV),
    dtype=dtype(config),
  )
  return ModelFields('decoder_only', c)


def _write_gpt2(model: ModelFields) -> dict[str, Any]:
  c = model.config
  return {
    'architectures': ['GPT2LMHeadModel'],
    'model_type': 'gpt2',
    **write_keys(c, _GPT2),
    'n_inner': None if c.mlp_dim == 4 * c.embed_dim else c.mlp_dim,
    'activation_function': their_activation(c),
    'n_positions': c.num_positions,
    'initializer_range': c.init_stddev or INIT_STDDEV,
    'embd_pdrop': c.dropout_rate,
    'attn_pdrop': c.dropout_rate,
  }


T5 = ConfigFamily(
  ('T5ForConditionalGeneration', 'MT5ForConditionalGeneration', 'T5WithLMHeadModel'),
  _read_t5,
  _write_t5,
  {'is_decoder': (False,)},
)
BERT = ConfigFamily(
  ('BertForSequenceClassification', 'BertForMaskedLM'),
  _read_bert,
  _write_bert,
  {
    'is_decoder': (False,),
    'add_cross_attention': (False,),
    'position_embedding_type': ('absolute', None),
  },
)
GPT2 = ConfigFamily(
  ('GPT2LMHeadModel',),
  _read_gpt2,
  _write_gpt2,
  {
    'scale_attn_weights': (True,),
    'add_cross_attention': (False,),
    'scale_attn_by_inverse_layer_idx': (False,),
  },
)
