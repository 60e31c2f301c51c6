"""Rotary positions in config.json, read and written."""

from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf.keys import Json
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding

# RotaryEmbedding -> rope_parameters, for scaling = 'llama3'.
_LLAMA3 = {
  'factor': 'factor',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
}
_SCALINGS = {'linear': {'factor': 'factor'}, 'llama3': _LLAMA3}
_KEYS = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor', *_LLAMA3.values())
# Keys of config.json that `read_rope` reads.
READ = ('rope_theta', 'rope_scaling', 'rope_parameters', 'original_max_position_embeddings')


def read_rope(config: Json) -> RotaryEmbedding:
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`.

  Raises:
    CheckpointError: they contradict each other, or are of a kind that our models do not have.
  """
  old, new = (_one(config, config.get(key)) for key in ('rope_scaling', 'rope_parameters'))
  if config.get('rope_scaling') and config.get('rope_parameters') and old != new:
    raise CheckpointError(
      f'config.json says rope_scaling = {config["rope_scaling"]} and rope_parameters = '
      f'{config["rope_parameters"]}, which differ.',
      fix='Remove the one that does not belong to the weights; transformers uses rope_scaling.',
      docs='convert.md#families',
    )
  return old if config.get('rope_scaling') else new


def _one(config: Json, rope: Optional[Json]) -> RotaryEmbedding:
  rope = rope or {}
  kind = rope.get('rope_type', rope.get('type', 'default'))
  theta = float(rope.get('rope_theta', config['rope_theta']))
  unknown = [f'{k} = {v!r}' for k, v in rope.items() if k not in _KEYS]
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


def write_rope(rope: Optional[RotaryEmbedding]) -> dict[str, Any]:
  """Returns the keys of config.json for rotary positions, as transformers 4 and 5 read them."""
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
