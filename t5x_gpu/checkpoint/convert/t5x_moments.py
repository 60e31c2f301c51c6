"""Converts T5X's Adafactor state: v_row, v_col and v become `row`, `column` and `full`.

For a plain matrix, T5X's v_row is the moment that keeps the smaller dimension; t5x_gpu's Adafactor
chooses by the names of the dimensions. Otherwise the name table works as for parameters.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import flax.traverse_util
import jax
import numpy as np

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Rule, Shape, Table
from t5x_gpu.checkpoint.convert.t5x_files import T5xCheckpoint
from t5x_gpu.checkpoint.convert.t5x_names import t5x_rules
from t5x_gpu.checkpoint.convert.tensor_copy import ForeignWeights, Names
from t5x_gpu.checkpoint.manifest import describe_arrays
from t5x_gpu.errors import CheckpointError
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.training.adafactor import (
  LAYERS,
  Adafactor,
  FactoredMoment,
  standard_logical_factor_rules,
)

ABSENT = (1,)  # the shape of a moment that a parameter does not have
# Adafactor settings here that a T5X run may correspond to; the last is `factored = False`.
_SETTINGS = (
  *({'layers': layers} for layers in LAYERS),
  {'layers': 'joined_heads', 'min_dim_size_to_factor': 2**31 - 1},
)
_FIX = 'Continue from the parameters: train.initialize_from with RestoreConfig.mode = warm_start.'


@dataclasses.dataclass(frozen=True)
class T5xMoments:
  """The second moments of a T5X checkpoint.

  Attributes:
    weights: T5X's arrays, with the table that maps them to 'layers/mlp/wo/kernel/row', ...
    settings: the Adafactor settings that give the same arrays; None if `min_dim_size_to_factor`
      was not 128.
  """

  weights: ForeignWeights
  settings: Optional[Mapping[str, Any]]

  @property
  def shapes(self) -> Mapping[str, Shape]:
    """Returns path -> shape of the converted arrays."""
    return self.weights.table.our_shapes

  @property
  def opt_state(self) -> Any:
    """Returns the tree of shapes of the converted optimizer state."""
    return _tree(self.shapes)

  def __str__(self) -> str:
    shapes = self.shapes
    factored = sum(name.endswith('/row') for name in shapes)
    count = factored + sum(name.endswith('/full') for name in shapes)
    needs = (
      'Adafactor.min_dim_size_to_factor of the T5X run'
      if self.settings is None
      else ', '.join(f'Adafactor.{name} = {value!r}' for name, value in self.settings.items())
    )
    return (
      f'second moments of {count} parameters, {factored} of them factored. To continue: '
      f"RestoreConfig.mode = 'new_data', {needs}"
    )


def t5x_moments(model: ModelFields, checkpoint: T5xCheckpoint) -> T5xMoments:
  """Returns the second moments of a checkpoint, for the optimizer state of `model`.

  Raises:
    CheckpointError: the checkpoint has no moments, or they do not match t5x_gpu's Adafactor.
  """
  arrays = checkpoint.moments()
  if not arrays.shapes:
    raise CheckpointError('the checkpoint has no optimizer state', fix=_FIX)
  rules, names = [], {name: name for name in arrays.shapes}
  for rule in t5x_rules(model, checkpoint.shapes):
    rules += _rules(rule, checkpoint.shapes, arrays.shapes)
  table = Table(rules, model.sizes())
  for name, shape in arrays.shapes.items():
    path, _, kind = name.rpartition('/')
    if path not in checkpoint.shapes or kind not in ('m', 'v', 'v_col', 'v_row'):
      raise CheckpointError(
        f'the optimizer is not Adafactor: it has an array {name} {list(shape)}', fix=_FIX
      )
    if kind == 'm' and shape != ABSENT:
      raise CheckpointError(
        f'it has momentum (beta1), which ours does not: {name} {list(shape)}', fix=_FIX
      )
    if name not in table.their_shapes and shape == ABSENT:
      del names[name]
  weights = ForeignWeights(table, arrays, Names(names))
  weights.check(what='the arrays of the optimizer do not match T5X', fix=_FIX)
  return T5xMoments(weights, _settings(model, table.our_shapes))


def _rules(rule: Rule, params: Mapping[str, Shape], moments: Mapping[str, Shape]) -> Sequence[Rule]:
  """Returns the rules for the moments of the parameter that `rule` maps."""
  first = rule.theirs.format(0) if rule.is_stacked else rule.theirs
  if moments.get(f'{first}/v_row', ABSENT) == ABSENT == moments.get(f'{first}/v_col', ABSENT):
    return [dataclasses.replace(rule, ours=f'{rule.ours}/full', theirs=f'{rule.theirs}/v')]
  rows, columns = _factored_dims(rule, params[first])

  def without(dims: Sequence[int], name: str) -> Rule:
    theirs = [d for i, d in enumerate(rule.their_axes) if i not in dims]
    kept = {axis for d in theirs for axis in d}
    before = ' '.join('.'.join(d) for d in theirs)
    after = ' '.join(axis for axis in rule.our_axes if axis in kept)
    dropped = [axis for i in dims for axis in rule.their_axes[i]]
    ours = 'column' if _keeps_columns(rule, kept, dropped) else 'row'
    return dataclasses.replace(
      rule, ours=f'{rule.ours}/{ours}', theirs=f'{rule.theirs}/{name}', axes=f'{before} -> {after}'
    )

  return [without(columns, 'v_row'), without(rows, 'v_col')]


def _factored_dims(rule: Rule, shape: Shape) -> tuple[Sequence[int], Sequence[int]]:
  """Returns T5X's (row dimensions, column dimensions) of a factored parameter.

  Source: t5x/adafactor.py, `_parse_rule`, `_factored_dims`.
  """
  is_scanned = not rule.is_stacked and (rule.stack,) in rule.their_axes
  if len(rule.their_axes) <= 2 and not is_scanned:
    smaller, larger = (int(i) for i in np.argsort(shape, kind='stable'))
    return (smaller,), (larger,)
  roles = [_role(axes[0]) for axes in rule.their_axes]
  rows, columns = (
    [i for i, role in enumerate(roles) if role == wanted] for wanted in ('row', 'column')
  )
  return rows, columns


def _keeps_columns(rule: Rule, kept: set[str], dropped: Sequence[str]) -> bool:
  """Returns whether a moment that keeps these axes is `column` in t5x_gpu."""
  roles = {_role(axis) for axis in (*kept, *dropped)}
  if {'row', 'column'} <= roles:
    return 'column' in {_role(axis) for axis in kept}
  return rule.our_axes[0] in dropped  # without roles, t5x_gpu's row is the first dimension


def _role(axis: str) -> str:
  return standard_logical_factor_rules().get(axis, 'none')


def _tree(shapes: Mapping[str, Shape]) -> Any:
  of: dict[str, dict[str, Any]] = {}
  for name, shape in shapes.items():
    path, _, kind = name.rpartition('/')
    of.setdefault(path, {})[kind] = jax.ShapeDtypeStruct(shape, np.float32)
  moments = {path: FactoredMoment(**parts) for path, parts in of.items()}
  return flax.traverse_util.unflatten_dict(moments, sep='/')


def _settings(model: ModelFields, shapes: Mapping[str, Shape]) -> Optional[Mapping[str, Any]]:
  """Returns the first of `_SETTINGS` that gives Adafactor these arrays, or None."""
  want = describe_arrays(_tree(shapes))
  params, names = split_names(jax.eval_shape(lambda: model.build().init(jax.random.key(0), None)))
  for settings in _SETTINGS:
    init = functools.partial(Adafactor(**settings).init, names=names)
    if describe_arrays(jax.eval_shape(init, params)) == want:
      return settings
  return None
