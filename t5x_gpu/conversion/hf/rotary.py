"""Reads and writes the rotary positions in config.json.

Most families have the same positions for all layers. Gemma-3 has different positions for layers
with a window, and some layers of SmolLM-3 do not use any.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.conversion.hf.keys import FULL, SLIDING, layers_with_rope
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding, yarn_attention_factor
from t5x_gpu.storage.json_schema import Json, JsonObject

Ropes = Sequence[Optional[RotaryEmbedding]]  # one per layer

# Field of RotaryEmbedding -> key of rope_parameters. For these kinds, transformers moves the length
# into rope_parameters, or uses max_position_embeddings.
_LENGTH = {'original_length': 'original_max_position_embeddings'}
_SCALINGS: Mapping[str, Mapping[str, str]] = {
  'linear': {'factor': 'factor'},
  'llama3': {
    'factor': 'factor',
    'low_freq_factor': 'low_freq_factor',
    'high_freq_factor': 'high_freq_factor',
    **_LENGTH,
  },
  'yarn': {
    'factor': 'factor',
    'beta_fast': 'beta_fast',
    'beta_slow': 'beta_slow',
    'truncate': 'truncate',
    'attention_factor': 'attention_factor',
    **_LENGTH,
  },
  'longrope': {
    'factor': 'factor',
    'short_factors': 'short_factor',
    'long_factors': 'long_factor',
    'attention_factor': 'attention_factor',
    **_LENGTH,
  },
  'dynamic': {'factor': 'factor'},
}
# Kinds that all families except Phi-3 support. Only Phi-3 supports 'longrope': in the
# other families, transformers decodes with other frequencies than it scores with.
_KINDS = ('default', 'linear', 'llama3', 'yarn', 'dynamic')
# Keys of rope_parameters: for all kinds, and per kind. Keys of other kinds have no effect.
KEYS_OF_ALL = ('rope_type', 'type', 'rope_theta', 'partial_rotary_factor')
KEYS_OF_KIND: Mapping[str, Sequence[str]] = {
  kind: sorted((*names.values(), *(('mscale', 'mscale_all_dim') if kind == 'yarn' else ())))
  for kind, names in _SCALINGS.items()
}
_KEYS = {*KEYS_OF_ALL, *(key for keys in KEYS_OF_KIND.values() for key in keys)}
# Names in the first releases. LlamaYarn also wrote `finetuned`, which is true of all YaRN models.
_OLD_KINDS = {'su': 'longrope'}
_OLD_KEYS = {'finetuned': (True, None)}
# Keys of config.json that most families have.
READ = ('rope_theta', 'rope_scaling', 'rope_parameters')


@dataclasses.dataclass(frozen=True)
class Rotary:
  """How a family stores the rotary positions of its layers.

  Attributes:
    read: (config.json, window of each layer) -> the positions of each layer.
    write: (positions of each layer, window of each layer) -> the keys of config.json.
    keys: the keys that `read` reads.
    defaults: transformers' defaults.
  """

  read: Callable[[Json, Sequence[int]], Ropes]
  write: Callable[[Ropes, Sequence[int]], JsonObject]
  keys: tuple[str, ...] = (*READ, 'original_max_position_embeddings')
  defaults: Json = dataclasses.field(default_factory=lambda: {'rope_theta': 10000.0})


def _read(config: Json, **options: float | bool) -> RotaryEmbedding:
  """Returns the rotary positions of `rope_parameters` (transformers 5) or `rope_scaling`.

  Raises:
    CheckpointError: the keys contradict each other, or the kind is not supported.
  """
  old, new = (
    _one(config, config.get(key), **options) for key in ('rope_scaling', 'rope_parameters')
  )
  if config.get('rope_scaling') and config.get('rope_parameters') and old != new:
    raise CheckpointError(
      f'config.json says rope_scaling = {config["rope_scaling"]} and rope_parameters = '
      f'{config["rope_parameters"]}, which differ.',
      fix='Remove the key that does not belong to the weights; transformers uses rope_scaling.',
      docs='convert.md#families',
    )
  return old if config.get('rope_scaling') else new


def _one(
  config: Json, rope: Optional[Json], *, kinds: Sequence[str] = _KINDS, partial: bool = False
) -> RotaryEmbedding:
  """Returns the rotary positions that one object of `config` describes.

  Args:
    config: config.json, with 'rope_theta'.
    rope: the object; None or {} for unscaled positions.
    kinds: the `rope_type`s that the family supports.
    partial: whether the family rotates only `partial_rotary_factor` of the features.
  """
  rope = rope or {}
  fraction = rope.get('partial_rotary_factor', config.get('partial_rotary_factor', 1.0))
  kind = rope.get('rope_type', rope.get('type', 'default'))
  kind = _OLD_KINDS.get(kind, kind)
  theta = float(rope.get('rope_theta', config['rope_theta']))
  unknown = [
    f'{k} = {v!r}' for k, v in rope.items() if k not in _KEYS and v not in _OLD_KEYS.get(k, ())
  ]
  if fraction != 1.0 and not partial:
    unknown.append(f'partial_rotary_factor = {fraction!r}')
  if kind not in kinds or unknown:
    what = f'config.json says {" and ".join(unknown)} of rotary positions.'
    if kind not in kinds:
      what = f'config.json says rope_type = {kind!r}.'
    if kind == 'longrope':
      what += ' With a cache, transformers would mix keys of short and of long factors.'
    raise CheckpointError(
      what,
      fix=f'Supported in this family: rope_type {", ".join(map(repr, kinds))}, with the keys that '
      'belong to it' + ('.' if partial else ', for all features of a head.'),
      docs='convert.md#families',
    )
  if kind == 'default':
    return RotaryEmbedding(theta=theta, fraction=fraction)
  rope = _with_defaults(kind, rope, config)
  values = {ours: rope[theirs] for ours, theirs in _SCALINGS[kind].items()}
  if kind == 'dynamic':
    values['original_length'] = config['max_position_embeddings']
  return RotaryEmbedding(theta=theta, scaling=kind, fraction=fraction, **values)


def _with_defaults(kind: str, rope: Json, config: Json) -> JsonObject:
  """Returns `rope` with transformers' values for missing keys of this kind."""
  rope, longest = dict(rope), config['max_position_embeddings']
  key = _LENGTH['original_length']
  if key in _SCALINGS[kind].values():
    rope[key] = config.get(key, rope.get(key, longest))  # the top-level key comes first
  if kind == 'longrope':
    rope.setdefault('factor', None)
  if kind in ('yarn', 'longrope'):
    if rope['factor'] is None:
      rope['factor'] = longest / rope[key]
    rope.setdefault('attention_factor', None)
  if kind == 'yarn':
    rope.update(
      beta_fast=rope.get('beta_fast') or 32.0,
      beta_slow=rope.get('beta_slow') or 1.0,
      truncate=rope.get('truncate', True),
    )
    ours, theirs = (rope.get(key) or 0.0 for key in ('mscale', 'mscale_all_dim'))
    if rope['attention_factor'] is None and ours and theirs:
      rope['attention_factor'] = _mscale(rope['factor'], ours) / _mscale(rope['factor'], theirs)
  return rope


def _mscale(factor: float, weight: float) -> float:
  """Returns YaRN's multiplier of queries and keys, with DeepSeek's weight."""
  return 1.0 + weight * (yarn_attention_factor(factor) - 1.0)


def _scaling(rope: RotaryEmbedding) -> Optional[JsonObject]:
  if rope.scaling not in _SCALINGS:
    return None
  values = {theirs: getattr(rope, ours) for ours, theirs in _SCALINGS[rope.scaling].items()}
  return {
    'rope_type': rope.scaling,
    **{
      key: list(value) if isinstance(value, tuple) else value
      for key, value in values.items()
      if value is not None
    },
  }


def _parameters(rope: RotaryEmbedding) -> JsonObject:
  return {'rope_theta': rope.theta, **(_scaling(rope) or {'rope_type': 'default'})}


def _write(rope: Optional[RotaryEmbedding]) -> JsonObject:
  """Returns the keys if all layers have the same positions."""
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
  """Returns Gemma-3's positions; `rope_scaling` applies only to full-attention layers."""
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
  if not all(rope.get('truncate', True) for rope in (full, given.get(SLIDING) or {})):
    raise CheckpointError(
      'config.json says truncate = false of the rotary positions of a Gemma-3: transformers '
      'ignores it there.',
      fix='Remove truncate if the weights were trained with transformers.',
      docs='convert.md#families',
    )
  ours = {
    FULL: _one(config, full),
    SLIDING: _one({**config, 'rope_theta': config['rope_local_base_freq']}, given.get(SLIDING)),
  }
  return [ours[SLIDING if window else FULL] for window in windows]


def _write_local_and_global(ropes: Ropes, windows: Sequence[int]) -> JsonObject:
  """Returns Gemma-3's keys; kinds of layers that the model lacks get transformers' defaults."""

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


def _write_some(ropes: Ropes, windows: Sequence[int]) -> JsonObject:
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


def _write_partial(ropes: Ropes, windows: Sequence[int]) -> JsonObject:
  del windows
  keys, fraction = (
    _write(ropes[0]),
    {'partial_rotary_factor': ropes[0].fraction if ropes[0] else 1.0},
  )
  length = _LENGTH['original_length']
  if ropes[0] and ropes[0].scaling == 'longrope':
    fraction[length] = ropes[0].original_length
  return {**keys, **fraction, 'rope_parameters': {**keys.get('rope_parameters', {}), **fraction}}


PARTIAL = Rotary(
  lambda config, windows: (
    [_read(config, kinds=('default', 'longrope'), partial=True)] * len(windows)
  ),
  _write_partial,
  defaults={
    'rope_theta': 10000.0,
    'partial_rotary_factor': 1.0,
    'original_max_position_embeddings': 4096,
  },
)
