"""Rotary positions in config.json, read and written.

Most families have the same for all layers. Gemma-3 has other positions for layers with a window,
and some layers of SmolLM-3 have none.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.convert.hf.keys import Json
from t5x_gpu.checkpoint.convert.hf.layer_kinds import FULL, SLIDING, layers_with_rope
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding

Ropes = Sequence[Optional[RotaryEmbedding]]  # of each layer

# RotaryEmbedding -> rope_parameters, for scaling = 'llama3'.
_LLAMA3 = {
  'factor': 'factor',
  'low_freq_factor': 'low_freq_factor',
  'high_freq_factor': 'high_freq_factor',
  'original_length': 'original_max_position_embeddings',
}
_SCALINGS = {'linear': {'factor': 'factor'}, 'llama3': _LLAMA3}
_KEYS = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor', *_LLAMA3.values())
# Keys of config.json that most families have.
READ = ('rope_theta', 'rope_scaling', 'rope_parameters')


@dataclasses.dataclass(frozen=True)
class Rotary:
  """How a family names the rotary positions of its layers.

  Attributes:
    read: (config.json, window of each layer) -> the positions of each layer.
    write: (positions of each layer, window of each layer) -> the keys of config.json.
    keys: the keys that `read` reads.
    defaults: those of transformers.
  """

  read: Callable[[Json, Sequence[int]], Ropes]
  write: Callable[[Ropes, Sequence[int]], dict[str, Any]]
  keys: tuple[str, ...] = (*READ, 'original_max_position_embeddings')
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {'rope_theta': 10000.0})


def _read(config: Json, **options: Any) -> RotaryEmbedding:
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`.

  Raises:
    CheckpointError: they contradict each other, or are of a kind that our models do not have.
  """
  old, new = (
    _one(config, config.get(key), **options) for key in ('rope_scaling', 'rope_parameters')
  )
  if config.get('rope_scaling') and config.get('rope_parameters') and old != new:
    raise CheckpointError(
      f'config.json says rope_scaling = {config["rope_scaling"]} and rope_parameters = '
      f'{config["rope_parameters"]}, which differ.',
      fix='Remove the one that does not belong to the weights; transformers uses rope_scaling.',
      docs='convert.md#families',
    )
  return old if config.get('rope_scaling') else new


def _one(
  config: Json,
  rope: Optional[Json],
  *,
  kinds: Sequence[str] = ('default', *_SCALINGS),
  partial: bool = False,
) -> RotaryEmbedding:
  """Returns the positions of one object of `config`.

  Args:
    config: config.json, with 'rope_theta'.
    rope: the object; None or {} for unscaled positions.
    kinds: the `rope_type`s that the family supports.
    partial: whether the family rotates only `partial_rotary_factor` of the features.
  """
  rope = rope or {}
  fraction = rope.get('partial_rotary_factor', config.get('partial_rotary_factor', 1.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  theta = float(rope.get('rope_theta', config['rope_theta']))
  unknown = [f'{k} = {v!r}' for k, v in rope.items() if k not in _KEYS]
  if fraction != 1.0 and not partial:
    unknown.append(f'partial_rotary_factor = {fraction!r}')
  if kind not in kinds or unknown:
    raise CheckpointError(
      f'config.json says rope_type = {kind!r}.'
      if kind not in kinds
      else f'config.json says {" and ".join(unknown)} of rotary positions.',
      fix=f'Supported in this family: rope_type {", ".join(map(repr, kinds))}, with the keys that '
      'belong to it' + ('.' if partial else ', for all features of a head.'),
      docs='convert.md#families',
    )
  if kind == 'default':
    return RotaryEmbedding(theta=theta, fraction=fraction)
  if kind == 'llama3':  # transformers prefers the number outside, and has this default
    rope = {
      'original_max_position_embeddings': config['max_position_embeddings'],
      **rope,
      **{k: config[k] for k in ('original_max_position_embeddings',) if k in config},
    }
  return RotaryEmbedding(
    theta=theta, scaling=kind, **{ours: rope[theirs] for ours, theirs in _SCALINGS[kind].items()}
  )


def _scaling(rope: RotaryEmbedding) -> Optional[dict[str, Any]]:
  if rope.scaling not in _SCALINGS:
    return None
  names = _SCALINGS[rope.scaling]
  return {
    'rope_type': rope.scaling,
    **{theirs: getattr(rope, ours) for ours, theirs in names.items()},
  }


def _parameters(rope: RotaryEmbedding) -> dict[str, Any]:
  return {'rope_theta': rope.theta, **(_scaling(rope) or {'rope_type': 'default'})}


def _write(rope: Optional[RotaryEmbedding]) -> dict[str, Any]:
  """Returns the keys for the same positions in all layers."""
  if rope is None:
    return {}
  # transformers 4 reads the first two, transformers 5 the last.
  return {
    'rope_theta': rope.theta,
    'rope_scaling': _scaling(rope),
    'rope_parameters': _parameters(rope),
  }


ONE = Rotary(
  lambda config, windows: [_read(config)] * len(windows), lambda ropes, windows: _write(ropes[0])
)


def _read_local_and_global(config: Json, windows: Sequence[int]) -> Ropes:
  """Returns Gemma-3's positions; transformers adds `rope_scaling` to those of full attention."""
  given = config.get('rope_parameters') or {}
  scaling = config.get('rope_scaling') or {}
  unknown = sorted(given.keys() - {FULL, SLIDING}) + (['type'] if 'type' in scaling else [])
  if unknown:
    raise CheckpointError(
      f'config.json has {", ".join(unknown)} in rope_parameters or rope_scaling of a Gemma-3.',
      fix=f'rope_parameters must have {FULL} and {SLIDING}; rope_scaling has rope_type.',
      docs='convert.md#families',
    )
  full = {**(given.get(FULL) or {}), **scaling}
  ours = {
    FULL: _one(config, full),
    SLIDING: _one({**config, 'rope_theta': config['rope_local_base_freq']}, given.get(SLIDING)),
  }
  return [ours[SLIDING if window else FULL] for window in windows]


def _write_local_and_global(ropes: Ropes, windows: Sequence[int]) -> dict[str, Any]:
  """Returns Gemma-3's keys; a kind of layer that the model lacks has transformers' positions."""

  def of(kind: bool, theta: float) -> RotaryEmbedding:
    found = [rope for rope, window in zip(ropes, windows) if bool(window) == kind and rope]
    return found[0] if found else RotaryEmbedding(theta=theta)

  full, local = of(False, 1e6), of(True, 1e4)
  return {
    'rope_theta': full.theta,
    'rope_local_base_freq': local.theta,
    'rope_scaling': _scaling(full),
    'rope_parameters': {FULL: _parameters(full), SLIDING: _parameters(local)},
  }


LOCAL_AND_GLOBAL = Rotary(
  _read_local_and_global,
  _write_local_and_global,
  keys=(*READ, 'rope_local_base_freq'),
  defaults={'rope_theta': 1e6, 'rope_local_base_freq': 10000.0},
)


def _read_some(config: Json, windows: Sequence[int]) -> Ropes:
  del windows
  rope = _read(config)
  return [rope if has else None for has in layers_with_rope(config)]


def _write_some(ropes: Ropes, windows: Sequence[int]) -> dict[str, Any]:
  del windows
  return {
    **_write(next((rope for rope in ropes if rope), None)),
    'no_rope_layers': [int(rope is not None) for rope in ropes],
  }


IN_SOME_LAYERS = Rotary(
  _read_some,
  _write_some,
  keys=(*ONE.keys, 'no_rope_layers'),
  defaults={'rope_theta': 2000000.0, 'no_rope_layer_interval': 4},
)


def _write_partial(ropes: Ropes, windows: Sequence[int]) -> dict[str, Any]:
  del windows
  keys, fraction = (
    _write(ropes[0]),
    {'partial_rotary_factor': ropes[0].fraction if ropes[0] else 1.0},
  )
  return {**keys, **fraction, 'rope_parameters': {**keys.get('rope_parameters', {}), **fraction}}


PARTIAL = Rotary(
  lambda config, windows: [_read(config, kinds=('default',), partial=True)] * len(windows),
  _write_partial,
  keys=READ,
  defaults={'rope_theta': 10000.0, 'partial_rotary_factor': 1.0},
)
