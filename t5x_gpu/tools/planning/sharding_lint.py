"""Finds probable mistakes in the layout of a compiled step: needless copies and collectives.

The compiler gathers an array rather than raise an error, so a wrong layout is only slow or out of
memory. `purpose` guesses the purpose of a collective from its shape and its place in the program.
`lint` reports collectives that none of the parallelisms in use explains.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.compiled.collectives import Collective, inventory, partitioned_hlo
from t5x_gpu.partitioning.array_layout import ArrayLayout, state_layouts
from t5x_gpu.partitioning.axis_rules import Table
from t5x_gpu.partitioning.manual_collectives import SCOPE
from t5x_gpu.terminal.console import show
from t5x_gpu.training.program import Program

PARAMETER, GRADIENT, ACTIVATION = 'parameter gather', 'gradient reduction', 'activation'
OPTIMIZER, OTHER = 'optimizer', 'other'
PURPOSES = (PARAMETER, GRADIENT, ACTIVATION, OPTIMIZER, OTHER)
# An array counts as large above this share of the state and this many bytes.
LARGE_SHARE, LARGE_BYTES = 0.01, 2**20
# Gathers below this share of all bytes that a step sends are ignored.
TRAFFIC_SHARE = 0.01


@dataclasses.dataclass(frozen=True)
class ParameterMatch:
  """A parameter with the shape of a collective's array.

  Attributes:
    parameter: layout of the parameter.
    is_layer: whether the array is one layer rather than the whole stack.
    copies: number of arrays of this shape per device: the parameter's layers, or 1.
  """

  parameter: ArrayLayout
  is_layer: bool
  copies: int


class ParameterShapes:
  """Finds the parameters that an array may be: whole or split, all layers or one, transposed.

  Args:
    parameters: all parameters of the model.
    mesh_shape: mesh axis -> size.
  """

  def __init__(self, parameters: Sequence[ArrayLayout], mesh_shape: Mapping[str, int]):
    self._matches: dict[tuple[int, ...], dict[tuple[str, bool], ParameterMatch]] = {}
    for parameter in parameters:
      sizes = [
        sorted(
          {
            size // math.prod(mesh_shape[a] for a in axes)
            for n in range(len(split) + 1)
            for axes in itertools.combinations(split, n)
          }
        )
        for size, split in zip(parameter.shape, parameter.split)
      ]
      layers = parameter.names.index('layers') if 'layers' in parameter.names else None
      self._add(ParameterMatch(parameter, False, 1), sizes)
      if layers is not None:
        copies = parameter.shape[layers] // parameter.parts[layers]
        self._add(ParameterMatch(parameter, True, copies), sizes[:layers] + sizes[layers + 1 :])

  def _add(self, match: ParameterMatch, sizes: Sequence[Sequence[int]]) -> None:
    for shape in itertools.product(*sizes):
      found = self._matches.setdefault(key(shape), {})
      # The first match stays: a stack of one layer is not one layer of a stack.
      found.setdefault((match.parameter.name, match.is_layer), match)

  def find(self, shape: Sequence[int]) -> list[ParameterMatch]:
    """Returns the parameters with this shape, in any order of dimensions."""
    return list(self._matches.get(key(shape), {}).values())


def key(shape: Sequence[int]) -> tuple[int, ...]:
  """Returns the shape up to transposition and dimensions of size 1."""
  return tuple(sorted(size for size in shape if size > 1))


def purpose(collective: Collective, shapes: ParameterShapes) -> str:
  """Returns the most probable of PURPOSES.

  The guess can be wrong in toy models, where an activation may have the shape of a parameter.
  """
  name = collective.op_name
  backward = 'transpose(' in name
  in_loss = 'jvp(' in name or backward
  in_step = in_loss or 'shard_map' in name  # otherwise it is in the update
  if math.prod(collective.shape) == 1:
    return OTHER if in_step else OPTIMIZER
  if SCOPE in name:
    return GRADIENT
  if collective.kind == 'all-gather' and shapes.find(collective.shape):
    return PARAMETER
  if (
    in_step
    and collective.kind in ('all-reduce', 'reduce-scatter')
    and (backward or not in_loss)
    and shapes.find(collective.shape)
    and (
      # Tensor parallelism sums activations, and only the gradients of norms.
      collective.axes != ('model',) or len(key(collective.shape)) < 3
    )
  ):
    return GRADIENT
  return ACTIVATION if in_step else OPTIMIZER


@dataclasses.dataclass(frozen=True)
class Finding:
  """A probable mistake in the layout.

  Attributes:
    rule: 'replicated', 'gathered' or 'repeated'.
    what: the problem, with numbers and the name of the parameter or operation.
    fix: advice.
    num_bytes: bytes that each device holds or sends needlessly.
  """

  rule: str
  what: str
  fix: str
  num_bytes: int

  def __str__(self) -> str:
    return f'{self.rule}: {self.what}\n  {self.fix}'


def lint(program: Program, *, collectives: Optional[Sequence[Collective]] = None) -> list[Finding]:
  """Returns the findings for the training step of a program, most expensive first.

  Args:
    program: program on simulated devices.
    collectives: collectives of its training step; None compiles the step here.
  """
  mesh_shape = program.layout.mesh.shape
  if collectives is None:
    collectives = inventory(
      partitioned_hlo(program.train_step.lower(program.abstract_state, program.abstract_batch)),
      mesh_shape,
    )
  parameters, optimizer = state_layouts(program.abstract_state, program.names)
  rules = program.layout.rules
  found = [
    *replicated(
      parameters,
      optimizer,
      mesh_shape,
      rules={'parameter': _axes_of(rules.parameters), 'optimizer state': _axes_of(rules.state)},
    ),
    *gathered(collectives, parameters, optimizer, mesh_shape),
    *repeated(collectives, parameters, mesh_shape),
  ]
  return sorted(found, key=lambda finding: -finding.num_bytes)


def replicated(
  parameters: Sequence[ArrayLayout],
  optimizer: Sequence[ArrayLayout],
  mesh_shape: Mapping[str, int],
  *,
  rules: Mapping[str, Mapping[str, Sequence[str]]],
) -> list[Finding]:
  """Returns large arrays that every device holds whole although the rules could split them.

  Args:
    parameters, optimizer: layouts of parameters and optimizer state.
    mesh_shape: mesh axis -> size.
    rules: 'parameter' and 'optimizer state' -> mesh axis -> the array axes that it splits.
  """
  total = sum(a.num_bytes for a in (*parameters, *optimizer))
  found = []
  for kind, arrays in (('parameter', parameters), ('optimizer state', optimizer)):
    for array in arrays:
      if not array.is_whole or array.num_bytes <= max(LARGE_BYTES, LARGE_SHARE * total):
        continue
      axis = next(
        (
          a
          for a in rules[kind]
          if mesh_shape[a] > 1 and any(n % mesh_shape[a] == 0 for n in array.shape)
        ),
        None,
      )
      if axis:
        names = ' or '.join(map(repr, rules[kind][axis]))
        found.append(
          Finding(
            'replicated',
            f'{kind} {array.name} [{_by(array.shape)}] ({_mib(array.num_bytes)}, '
            f'{array.num_bytes / total:.0%} of the state) is whole on every device, although '
            f'{axis} = {mesh_shape[axis]} could split it.',
            f'{axis} splits dimensions named {names}, but the array has the dimensions '
            f'{", ".join(str(n or "-") for n in array.names)}. Rename one in with_axes.',
            array.num_bytes - array.num_bytes // mesh_shape[axis],
          )
        )
  return found


def _axes_of(table: Table) -> dict[str, list[str]]:
  """Returns mesh axis -> array axes that it splits, except 'layers' and 'experts'."""
  found: dict[str, list[str]] = {}
  for name in table.keys() - {'layers', 'experts'}:
    for axis in table[name]:
      found.setdefault(axis, []).append(name)
  return found


def gathered(
  collectives: Sequence[Collective],
  parameters: Sequence[ArrayLayout],
  optimizer: Sequence[ArrayLayout],
  mesh_shape: Mapping[str, int],
) -> list[Finding]:
  """Returns the all-gathers that no parallelism explains, one finding per reason."""
  shapes = ParameterShapes(parameters, mesh_shape)
  vocab = {size for p in parameters for name, size in zip(p.names, p.shape) if name == 'vocab'}
  split_axes = {axis for array in (*parameters, *optimizer) for axis in array.mesh_axes}
  groups: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
  for c in collectives:
    reason = _unexplained(c.axes, c.shape, shapes.find(c.shape), vocab, split_axes)
    if c.kind == 'all-gather' and reason and SCOPE not in c.op_name:
      groups[reason].append(c)
  found = []
  for (what, fix), members in groups.items():
    num_bytes = sum(c.bytes_per_call for c in members)
    if num_bytes >= TRAFFIC_SHARE * sum(c.bytes_per_call for c in collectives):
      largest = max(members, key=lambda c: c.bytes_per_call)
      found.append(
        Finding(
          'gathered',
          f'{what}: {sum(c.count for c in members)} all-gathers over '
          f'{" and ".join(largest.axes)} per step send {_mib(num_bytes)} per device; the largest '
          f'is [{_by(largest.shape)}] at {_place(largest)}.',
          fix,
          num_bytes,
        )
      )
  return found


def _unexplained(
  axes: Sequence[str],
  shape: Sequence[int],
  matches: Sequence[ParameterMatch],
  vocab: set[int],
  split_axes: set[str],
) -> Optional[tuple[str, str]]:
  """Returns (what, fix), or None if one of the parallelisms explains the gather."""
  if (
    'model' in axes
    and vocab & set(shape)
    and not any('vocab' not in m.parameter.names for m in matches)
  ):
    tables = [m for m in matches if 'vocab' in m.parameter.names]
    if tables:
      return (
        f'The vocabulary of {tables[0].parameter.name} is gathered',
        'Keep the table split for lookups and logits: shard the result by vocab.',
      )
    return (
      'Logits (or one-hot labels) are gathered over the vocabulary',
      "Keep them split with shard(logits, 'batch', 'length', 'vocab'), and compute the loss with "
      'models/losses.py, which sums over the parts.',
    )
  if 'model' in axes and matches:
    return (
      f'Parts of {matches[0].parameter.name} are gathered, although tensor parallelism should use '
      'them in place',
      # The partitioner replicates its operand over every automatic axis (jaxlib 0.10.2, 0.11.2).
      'Constrain the activations around it with shard(x, *names). An explicit all_gather or '
      "psum_scatter also causes this, unless it is in a jax.shard_map over {'model'}.",
    )
  stacks = [
    m
    for m in matches
    if not m.is_layer and 'layers' in m.parameter.names and set(axes) & set(m.parameter.mesh_axes)
  ]
  if stacks and not any(m.is_layer for m in matches):
    return (
      f'All layers of {stacks[0].parameter.name} are gathered at once',
      'Gather one layer at a time, inside the scan over layers (parameters.whole).',
    )
  if 'data' in axes and 'data' not in split_axes:
    return (
      'Only the batch is split over data',
      'An operation uses all rows at once; constrain it with shard(x, "batch", ...).',
    )
  return None


def repeated(
  collectives: Sequence[Collective],
  parameters: Sequence[ArrayLayout],
  mesh_shape: Mapping[str, int],
) -> list[Finding]:
  """Returns reductions that run more often than gradients of that shape exist."""
  shapes = ParameterShapes(parameters, mesh_shape)
  groups: dict[tuple[object, ...], list[Collective]] = collections.defaultdict(list)
  for c in collectives:
    if purpose(c, shapes) == GRADIENT:
      groups[c.axes, c.kind, key(c.shape)].append(c)
  wasted: dict[tuple[object, ...], list[tuple[int, str, Collective]]]
  wasted = collections.defaultdict(list)
  for (axes, kind, _), members in groups.items():
    matches = shapes.find(members[0].shape)
    times = sum(c.count for c in members) / sum(m.copies for m in matches)
    if times > 1 and any(c.count > 1 for c in members):
      num_bytes = sum(c.bytes_per_call for c in members)
      largest = max(matches, key=lambda m: m.parameter.num_bytes).parameter.name
      wasted[axes, kind, round(times, 1)].append(
        (int(num_bytes * (1 - 1 / times)), largest, members[0])
      )
  found = []
  for (axes, kind, times), losses in wasted.items():
    num_bytes = sum(loss for loss, _, _ in losses)
    _, name, example = max(losses, key=lambda loss: loss[0])
    more = f' and of {len(losses) - 1} other shapes' if len(losses) > 1 else ''
    found.append(
      Finding(
        'repeated',
        f'Gradients with the shape of {name}{more} are reduced ({kind} over '
        f'{" and ".join(axes)}) {times:g} times per step, which wastes {_mib(num_bytes)} per '
        f'device, at {_place(example)}.',
        'A loop repeats the reduction: microbatches (NUM_MICROBATCHES), chunks of the loss or '
        'pipeline ticks. Sum the gradients over the loop and reduce once after it.',
        num_bytes,
      )
    )
  return found


def _by(shape: Sequence[int]) -> str:
  return ' x '.join(map(str, shape)) or 'scalar'


def _mib(num_bytes: int) -> str:
  return show(num_bytes, GiB='.3g', MiB='.3g')


def _place(collective: Collective) -> str:
  source = f' ({collective.source})' if collective.source else ''
  return (collective.op_name or 'an unnamed operation') + source
