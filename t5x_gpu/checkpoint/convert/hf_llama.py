"""config.json of Llama, Qwen-3 and Gemma-2 as the fields of our models, and back."""

import functools
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf_families import (
  INIT_STDDEV,
  ConfigFamily,
  HasTensor,
  Json,
  Keys,
  activation,
  dtype,
  head_dim,
  read_keys,
  their_activation,
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
  'norm_epsilon': ('rms_norm_eps', 1e-6),
  'dropout_rate': ('attention_dropout', 0.0),
}
# RotaryEmbedding -> rope_parameters, for scaling = 'llama3'.
_LLAMA3 = {
  'factor': 'factor',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
}
_SCALINGS = {'linear': {'factor': 'factor'}, 'llama3': _LLAMA3}


def _read(config: Json, has_tensor: HasTensor) -> ModelFields:
  del has_tensor
  family = config['model_type']
  gemma = family == 'gemma2'
  act = (config.get('hidden_activation') or 'gelu_pytorch_tanh') if gemma else config['hidden_act']
  c = TransformerConfig(
    **read_keys(config, _LLAMA),
    num_kv_heads=config.get('num_key_value_heads') or config['num_attention_heads'],
    head_dim=head_dim(config),
    query_pre_attn_scalar=config['query_pre_attn_scalar'] if gemma else head_dim(config),
    mlp_activations=(activation(act), 'linear'),
    mlp_bias=bool(config.get('mlp_bias')),
    attention_bias='all' if config.get('attention_bias') else 'none',
    relative_bias='none',
    rope=_read_rope(config),
    windows=_windows(config),
    qk_norm=family == 'qwen3',
    norm='rms_plus_one' if gemma else 'rms',
    norm_position='sandwich' if gemma else 'pre',
    scale_embedding=gemma,
    scale_tied_logits=False,
    attention_softcap=config.get('attn_logit_softcapping') if gemma else None,
    logits_softcap=config.get('final_logit_softcapping') if gemma else None,
    logits_via_embedding=config.get('tie_word_embeddings', gemma),
    init_stddev=config.get('initializer_range', INIT_STDDEV),
    dtype=dtype(config),
    max_length=config.get('max_position_embeddings') or 0,
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
    'mlp_bias': c.mlp_bias,
    'tie_word_embeddings': c.logits_via_embedding,
    'initializer_range': c.init_stddev or INIT_STDDEV,
    **_write_rope(c.rope),
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
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`."""
  rope = dict(config.get('rope_parameters') or config.get('rope_scaling') or {})
  kind = rope.get('rope_type', rope.get('type', 'default'))
  theta = float(rope.get('rope_theta', config.get('rope_theta', 10000.0)))
  if kind == 'default':
    return RotaryEmbedding(theta=theta)
  if kind not in _SCALINGS:
    raise CheckpointError(
      f'config.json says rope_type = {kind!r}.',
      fix="Supported values: 'default', 'linear' and 'llama3'.",
      docs='convert.md#families',
    )
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


def _family(name: str, architecture: str, **fixed: tuple[Any, ...]) -> ConfigFamily:
  write = functools.partial(_write, family=name, architecture=architecture)
  return ConfigFamily((architecture,), _read, write, fixed)


LLAMA = _family('llama', 'LlamaForCausalLM', partial_rotary_factor=(1.0,))
GEMMA2 = _family('gemma2', 'Gemma2ForCausalLM', use_bidirectional_attention=(None, False))
QWEN3 = _family('qwen3', 'Qwen3ForCausalLM')
