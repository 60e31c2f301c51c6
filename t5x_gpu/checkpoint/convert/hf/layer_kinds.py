"""Reads and writes which layers of a Hugging Face model use sliding-window attention.

Mistral has one window for all layers. Qwen and Gemma name a kind for each layer in `layer_types`,
or follow the pattern of their family.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Optional, TypeVar

from t5x_gpu.checkpoint.convert.hf.keys import Json
from t5x_gpu.errors import CheckpointError

FULL, SLIDING = 'full_attention', 'sliding_attention'
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class LayerKinds:
  """How a family stores the windows of its layers.

  Attributes:
    read: (config.json) -> the window of each layer, 0 for none.
    write: (window of each layer) -> the keys of config.json.
  """

  read: Callable[[Json], Sequence[int]]
  write: Callable[[Sequence[int]], dict[str, Any]]


def shortest_period(values: Sequence[T]) -> tuple[T, ...]:
  """Returns the shortest tuple whose repetition gives `values`; () if `values` is empty."""
  sizes = range(1, len(values) + 1)
  n = next((n for n in sizes if all(v == values[i % n] for i, v in enumerate(values))), 0)
  return tuple(values[:n])


def kind_of_each(
  config: Json, *, default: Callable[[Json], Sequence[str]], window: Optional[int]
) -> Sequence[str]:
  """Returns `layer_types`, or the result of `default` if config.json has no `layer_types`.

  Raises:
    CheckpointError: a kind is not supported, the number of kinds is not the number of layers, or
      layers have a window but config.json does not set its size.
  """
  given, layers = config.get('layer_types'), config['num_hidden_layers']
  kinds = default(config) if given is None else given
  unknown = sorted(set(kinds) - {FULL, SLIDING})
  problem = None
  if unknown:
    problem = f'of {", ".join(unknown)}, which our models do not have'
  elif len(kinds) != layers:
    problem = f'of {len(kinds)} layers, but num_hidden_layers = {layers}'
  elif SLIDING in kinds and not window:
    problem = (
      f'of {SLIDING}, but no window (sliding_window = {config.get("sliding_window")}, '
      f'use_sliding_window = {config.get("use_sliding_window")})'
    )
  if problem:
    raise CheckpointError(
      f'config.json has layer_types {problem}.',
      fix=f'It must name {FULL} or {SLIDING} for each layer.',
      docs='convert.md#families',
    )
  return kinds


def by_type(*, default: Callable[[Json], Sequence[str]], switched: bool = False) -> LayerKinds:
  """Returns windows for the layers of kind 'sliding_attention'.

  Args:
    default: (config.json) -> the kind of each layer if `layer_types` is missing.
    switched: whether windows count only if `use_sliding_window` is true.
  """

  def read(config: Json) -> Sequence[int]:
    window = config['sliding_window'] if config.get('use_sliding_window') or not switched else None
    kinds = kind_of_each(config, default=default, window=window)
    return [window if kind == SLIDING else 0 for kind in kinds]

  def write(windows: Sequence[int]) -> dict[str, Any]:
    return {
      **({'sliding_window': max(windows)} if any(windows) else {}),
      **({'use_sliding_window': any(windows)} if switched else {}),
      'layer_types': [SLIDING if window else FULL for window in windows],
    }

  return LayerKinds(read, write)


def every_second(config: Json) -> Sequence[str]:
  """Returns the kinds of Gemma-2's layers: every second layer attends to all positions."""
  return by_sliding_window_pattern({**config, 'sliding_window_pattern': 2})


def by_sliding_window_pattern(config: Json) -> Sequence[str]:
  """Returns the kinds of Gemma-3's layers: every n-th layer attends to all positions."""
  n, layers = config['sliding_window_pattern'], config['num_hidden_layers']
  return [SLIDING if (i + 1) % n else FULL for i in range(layers)]


def windows_without_rope(config: Json) -> Sequence[str]:
  """Returns the kinds of SmolLM-3's layers: layers without rotary positions have the window."""
  uses = config['use_sliding_window'] and config['sliding_window'] is not None
  return [SLIDING if uses and not has_rope else FULL for has_rope in layers_with_rope(config)]


def layers_with_rope(config: Json) -> Sequence[bool]:
  """Returns whether each layer of a SmolLM-3 has rotary positions."""
  layers, given = config['num_hidden_layers'], config.get('no_rope_layers')
  if given is None:
    interval = config['no_rope_layer_interval']
    return [(i + 1) % interval != 0 for i in range(layers)]
  if len(given) != layers:
    raise CheckpointError(
      f'config.json has no_rope_layers for {len(given)} layers, but num_hidden_layers = {layers}.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  return [bool(value) for value in given]


def from_max_window_layers(config: Json) -> Sequence[str]:
  """Returns the kinds of Qwen's layers: the first `max_window_layers` attend to all positions."""
  uses = config['use_sliding_window'] and config['sliding_window'] is not None
  return [
    SLIDING if uses and i >= config['max_window_layers'] else FULL
    for i in range(config['num_hidden_layers'])
  ]


def _of_every_layer(config: Json) -> Sequence[int]:
  """Returns the same window for all layers; transformers ignores `layer_types`."""
  window, layers = config['sliding_window'] or 0, config['num_hidden_layers']
  if config['sliding_window'] == 0:
    raise CheckpointError(
      'config.json says sliding_window = 0: no layer could attend to any token.',
      fix='Use null for no window.',
      docs='convert.md#families',
    )
  types = config.get('layer_types')
  if types is not None and list(types) != [SLIDING if window else FULL] * layers:
    raise CheckpointError(
      f'config.json has sliding_window = {config["sliding_window"]}, which applies to every '
      f'layer of this family, but layer_types lists other kinds: {types}.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  return [window] * layers


ALL_SEE_ALL = LayerKinds(lambda config: [0] * config['num_hidden_layers'], lambda windows: {})
ONE_WINDOW = LayerKinds(
  _of_every_layer, lambda windows: {'sliding_window': max(windows) if any(windows) else None}
)
# The same window for all layers if `use_sliding_window` is true; otherwise no window.
ONE_SWITCHED_WINDOW = LayerKinds(
  lambda config: _of_every_layer(
    config if config['use_sliding_window'] else {**config, 'sliding_window': None}
  ),
  lambda windows: {**ONE_WINDOW.write(windows), 'use_sliding_window': any(windows)},
)
