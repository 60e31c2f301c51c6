"""config.json of Llama, Qwen-3 and Gemma-2 as the fields of our models, and back."""

import functools
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf.keys import (
  INIT_STDDEV,
  ConfigFamily,
  HasTensor,
  Json,
  Keys,
  activation,
  dtype,
  head_dim,
  read_dropout,
  read_keys,
  their_activation,
  used,
  write_dropout,
  write_keys,
)
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig

_LLAMA: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'mlp_dim': 'intermediate_size',
  'norm_epsilon': 'rms_norm_eps',
}
_DROPOUT: Keys = {'attention_dropout': 'attention_dropout'}
# RotaryEmbedding -> rope_parameters, for scaling = 'llama3'.
_LLAMA3 = {
  'factor': 'factor',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
}
_SCALINGS = {'linear': {'factor': 'factor'}, 'llama3': _LLAMA3}
_ROPE_KEYS = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor', *_LLAMA3.values())
_WINDOWS = frozenset({'sliding_window', 'use_sliding_window', 'max_window_layers', 'layer_types'})


def _read(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  family = config['model_type']
  gemma = family == 'gemma2'
  act = config['hidden_activation' if gemma else 'hidden_act']
  c = TransformerConfig(
    **read_keys(config, _LLAMA),
    **read_dropout(config, _DROPOUT),
    num_kv_heads=config['num_key_value_heads'] or config['num_attention_heads'],
    head_dim=head_dim(config),
    query_pre_attn_scalar=config['query_pre_attn_scalar'] if gemma else head_dim(config),
    mlp_activations=(activation(act), 'linear'),
    mlp_bias=config.get('mlp_bias', False),
    attention_bias='all' if config['attention_bias'] else 'none',
    relative_bias='none',
    rope=_read_rope(config),
    windows=_windows(config),
    qk_norm=family == 'qwen3',
    norm='rms_plus_one' if gemma else 'rms',
    norm_position='sandwich' if gemma else 'pre',
    scale_embedding=gemma,
    scale_tied_logits=False,
    attention_softcap=config['attn_logit_softcapping'] if gemma else None,
    logits_softcap=config['final_logit_softcapping'] if gemma else None,
    logits_via_embedding=config['tie_word_embeddings'],
    init_stddev=config['initializer_range'],
    dtype=dtype(config),
    max_length=config['max_position_embeddings'] or 0,
  )
  return ModelFields('decoder_only', c)


def _write(model: ModelFields, *, family: str, architecture: str) -> dict[str, Any]:
  c = model.config
  out = {
    'architectures': [architecture],
    'model_type': family,
    **write_keys(c, _LLAMA),
    'num_key_value_heads': c.kv_heads,
    'head_dim': c.head_dim,
    'attention_bias': c.attention_bias == 'all',
    **({'mlp_bias': c.mlp_bias} if family == 'llama' else {}),
    'tie_word_embeddings': c.logits_via_embedding,
    'initializer_range': c.init_stddev or INIT_STDDEV,
    **_write_rope(c.rope),
    **write_dropout(c, _DROPOUT),
  }
  if c.max_length:
    out['max_position_embeddings'] = c.max_length
  act = their_activation(c)
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


def _read_rope(config: Json) -> RotaryEmbedding:
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`.

  Raises:
    CheckpointError: they contradict each other, or are of a kind that our models do not have.
  """
  old, new = (_one_rope(config, config.get(key)) for key in ('rope_scaling', 'rope_parameters'))
  if config.get('rope_scaling') and config.get('rope_parameters') and old != new:
    raise CheckpointError(
      f'config.json says rope_scaling = {config["rope_scaling"]} and rope_parameters = '
      f'{config["rope_parameters"]}, which differ.',
      fix='Remove the one that does not belong to the weights; transformers uses rope_scaling.',
      docs='convert.md#families',
    )
  return old if config.get('rope_scaling') else new


def _one_rope(config: Json, rope: Optional[Json]) -> RotaryEmbedding:
  rope = rope or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  theta = float(rope.get('rope_theta', config['rope_theta']))
  unknown = [f'{k} = {v!r}' for k, v in rope.items() if k not in _ROPE_KEYS]
  if rope.get('partial_rotary_factor', 1.0) != 1.0:
    unknown.append(f'partial_rotary_factor = {rope["partial_rotary_factor"]!r}')
  if kind not in ('default', *_SCALINGS) or unknown:
    raise CheckpointError(
      f'config.json says {" and ".join(unknown)} of rotary positions.'
      if unknown
      else f'config.json says rope_type = {kind!r}.',
      fix="Supported: rope_type 'default', 'linear' and 'llama3', the same for all layers and all "
      'features of a head.',
      docs='convert.md#families',
    )
  if kind == 'default':
    return RotaryEmbedding(theta=theta)
  if kind == 'llama3':  # transformers prefers the number outside, and has this default
    rope = {
      'original_max_position_embeddings': config['max_position_embeddings'],
      **rope,
      **{k: config[k] for k in ('original_max_position_embeddings',) if k in config},
    }
  return RotaryEmbedding(
    theta=theta, scaling=kind, **{ours: rope[theirs] for ours, theirs in _SCALINGS[kind].items()}
  )


def _write_rope(rope: Optional[RotaryEmbedding]) -> dict[str, Any]:
  if rope is None:
    return {}
  scaling: Optional[dict[str, Any]] = None
  if rope.scaling in _SCALINGS:
    names = _SCALINGS[rope.scaling]
    scaling = {
      'rope_type': rope.scaling,
      **{theirs: getattr(rope, ours) for ours, theirs in names.items()},
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
  family = config['model_type']
  gemma = family == 'gemma2'
  if family == 'llama' or not window or not (gemma or config['use_sliding_window']):
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


def _family(
  name: str,
  architecture: str,
  defaults: Json,
  *,
  uses: frozenset[str] = frozenset(),
  no_effect: frozenset[str] = frozenset(),
  **fixed: tuple[Any, ...],
) -> ConfigFamily:
  return ConfigFamily(
    (architecture,),
    _read,
    functools.partial(_write, family=name, architecture=architecture),
    used(_LLAMA, 'rope_scaling', 'rope_parameters', 'original_max_position_embeddings', *uses),
    {**_DEFAULTS, **defaults},
    {'partial_rotary_factor': (1.0,), 'is_decoder': (False, True), 'pruned_heads': ({}, None)}
    | fixed,
    no_effect | {'id2label', 'problem_type', 'add_cross_attention'},
  )


_DEFAULTS: Json = {
  'attention_dropout': 0.0,
  'rms_norm_eps': 1e-6,
  'attention_bias': False,
  'rope_theta': 10000.0,
  'initializer_range': INIT_STDDEV,
}
LLAMA = _family(
  'llama',
  'LlamaForCausalLM',
  {
    'hidden_act': 'silu',
    'mlp_bias': False,
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': None,  # num_attention_heads
    'max_position_embeddings': 2048,
    'tie_word_embeddings': False,
  },
  no_effect=_WINDOWS | {'pretraining_tp'},  # transformers ignores windows of a Llama
)
GEMMA2 = _family(
  'gemma2',
  'Gemma2ForCausalLM',
  {
    'hidden_activation': 'gelu_pytorch_tanh',
    'head_dim': 256,
    'num_key_value_heads': 4,
    'query_pre_attn_scalar': 256,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
    'sliding_window': 4096,
    'max_position_embeddings': 8192,
    'tie_word_embeddings': True,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'hidden_act', 'use_sliding_window'}),
  use_bidirectional_attention=(None, False),
)
QWEN3 = _family(
  'qwen3',
  'Qwen3ForCausalLM',
  {
    'hidden_act': 'silu',
    'head_dim': 128,
    'num_key_value_heads': 32,
    'max_position_embeddings': 32768,
    'use_sliding_window': False,
    'sliding_window': 4096,
    'max_window_layers': 28,
    'tie_word_embeddings': False,
  },
  uses=frozenset({'layer_types'}),
)
