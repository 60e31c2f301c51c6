"""The gin configuration of parallelism: how many ways each kind splits a run.

Adds up the rules of all parallelisms and checks all sizes against them before anything compiles.
`Partitioner.lay_out` returns the `Layout` on the devices of a run.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Optional, Self

from t5x_gpu.errors import MeshError, Problem, did_you_mean
from t5x_gpu.partitioning import (
  context_parallel,
  data_parallel,
  expert_parallel,
  fsdp,
  sequence_parallel,
  tensor_parallel,
)
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.axis_rules import AxisRules, Table
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.mesh import build_mesh
from t5x_gpu.partitioning.mesh_sizes import (
  MESH_AXES,
  OUTER_AXES,
  SET_BY,
  SIZE_PARAMETERS,
  MeshSizes,
  any_of,
  divisors,
  legal_partitions,
  product_words,
  resolve_mesh_sizes,
)
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.runtime.topology import Device, Topology


@dataclasses.dataclass(frozen=True)
class SizeHint:
  """How a problem describes one model size.

  Attributes:
    set_by: the gin parameter or macro that sets it.
    words: its name in the problem; the axis name by default.
    each_of: number of equal parts, computed in turn, that are each split.
    multiple_of: another number that the size must be a multiple of.
    rule: what to do with `set_by`, up to the number.
    is_width: another size would make another model, so the fix is another mesh.
  """

  set_by: str
  words: str = ''
  each_of: int = 1
  multiple_of: int = 1
  rule: str = 'to a multiple of'
  is_width: bool = False


def check_model_sizes(
  sizes: MeshSizes,
  logical_sizes: Mapping[str, int],
  rules: Mapping[str, tuple[str, ...]],
  *,
  hints: Optional[Mapping[str, SizeHint]] = None,
) -> list[Problem]:
  """Returns a problem for every model size that its mesh axes do not divide.

  Args:
    sizes: sizes of the mesh.
    logical_sizes: array axis -> size, {'heads': 12, 'batch': 128}.
    rules: array axis -> mesh axes that split it, () for none.
    hints: array axis -> how to describe it; its name by default.
  """
  problems = []
  for name, size in logical_sizes.items():
    if name not in rules:
      missing = f'{name} = {size} has no sharding rule.{did_you_mean(name, rules)}'
      problems.append(Problem(missing))
      continue
    unknown = [axis for axis in rules[name] if axis not in MESH_AXES]
    if unknown:
      problems.append(
        Problem(
          f'{name} is split over {any_of(unknown)}, which no mesh has. The axes are '
          f'{", ".join(MESH_AXES)}.{did_you_mean(unknown[0], MESH_AXES)}'
        )
      )
      continue
    hint = (hints or {}).get(name) or SizeHint(name)
    ways = {axis: sizes.total[axis] for axis in rules[name] if sizes.total[axis] > 1}
    if size % (math.prod(ways.values()) * hint.each_of):
      each = f' in each of {hint.each_of} microbatches' if hint.each_of > 1 else ''
      problems.append(
        Problem(
          f'{hint.words or name} = {size} does not divide over {product_words(ways)}{each}.',
          _size_fix(sizes, hint, size, ways),
          (hint.set_by, *(f'Partitioner.{SIZE_PARAMETERS[axis]}' for axis in ways)),
        )
      )
  return problems


def _size_fix(sizes: MeshSizes, hint: SizeHint, size: int, ways: Mapping[str, int]) -> str:
  """Returns the rule for a size that does not divide over the mesh axes `ways`."""
  if hint.is_width and list(ways) == ['model']:
    hosts = Topology(math.prod(sizes.dcn.values()), math.prod(sizes.ici.values()))
    legal = [n for n in sum(legal_partitions(hosts), ()) if size % n == 0]
    return f'Set Partitioner.num_partitions = {any_of(legal)}.'
  unit = math.lcm(math.prod(ways.values()) * hint.each_of, hint.multiple_of)
  return f'Set {hint.set_by} {hint.rule} {unit}.'


# Sizes that make another model: errors suggest another mesh instead.
WIDTHS = ('heads', 'mlp', 'embed', 'vocab')
# Axes that other functions check.
OWN_CHECKS = ('layers', 'encoder_layers', 'stacks', 'length', 'experts', 'kv_heads', 'kv')


@dataclasses.dataclass(frozen=True)
class Partitioner:
  """How many ways each kind of parallelism splits the run. Sizes multiply to the device count.

  Attributes:
    num_partitions: size of the `model` axis (tensor parallelism); divides the devices of a host,
      or is a whole multiple of them.
    model_parallel_submesh: T5X's other way to set it; not together with num_partitions.
    data: replicas; -1 for all remaining devices.
    fsdp: parts of parameters and optimizer state.
    zero_stage: what `fsdp` splits: 1 the optimizer state, 2 gradients as well, 3 parameters too.
    accumulate_by: under ZeRO-2 and 3, 'layer' takes all microbatches through a layer before the
      next one: parameters are gathered and gradients reduced once per step; layers are recomputed.
      'microbatch' gathers and reduces for each microbatch, and keeps the activations of one.
    overlap_layers: communicate for a layer while another one computes (overlap.py).
    gradient_dtype: 'bfloat16' sends gradients with half the bytes and still adds in float32.
    sequence_parallel: split norms, dropout and residuals over `model`, by row or by position.
    context: parts of the length of a sequence.
    context_attention: 'ring' sends keys and values around, 'gather' collects them.
    stage: pipeline stages, each with some of the layers.
    pipeline_schedule: '1f1b', 'gpipe' or 'circular'; not '1f1b' for encoder-decoders.
    num_pipeline_microbatches: parts of a device's rows that pass through the stages in turn; None
      for four per stage, or one per row if there are fewer rows.
    pipeline_repeats: blocks of layers per stage (for each of encoder and decoder) in 'circular'.
    expert: parts of the experts of a mixture-of-experts MLP; also splits the batch.
    ici_mesh_shape: axis -> size inside a host, one may be -1; replaces the sizes above.
    dcn_mesh_shape: axis -> size across hosts, one may be -1.
    uneven_batch: 'refuse' makes a batch that the mesh does not divide an error. 'fill' adds rows of
      weight 0, which change no loss but cost as much as other rows.
  """

  num_partitions: Optional[int] = None
  model_parallel_submesh: Optional[Sequence[int]] = None
  data: int = -1
  fsdp: int = 1
  zero_stage: int = 3
  accumulate_by: str = 'layer'
  overlap_layers: bool = False
  gradient_dtype: str = 'float32'
  sequence_parallel: bool = False
  context: int = 1
  context_attention: str = 'ring'
  stage: int = 1
  pipeline_schedule: str = '1f1b'
  num_pipeline_microbatches: Optional[int] = None
  pipeline_repeats: int = 1
  expert: int = 1
  ici_mesh_shape: Optional[Mapping[str, int]] = None
  dcn_mesh_shape: Optional[Mapping[str, int]] = None
  uneven_batch: str = 'refuse'

  def __post_init__(self) -> None:
    for name, legal in (
      ('zero_stage', (1, 2, 3)),
      ('accumulate_by', ('layer', 'microbatch')),
      ('gradient_dtype', ('float32', 'bfloat16')),
      ('context_attention', context_parallel.METHODS),
      ('pipeline_schedule', pipeline_lib.SCHEDULES),
      ('uneven_batch', ('refuse', 'fill')),
    ):
      value = getattr(self, name)
      if value not in legal:
        is_word = isinstance(value, str) and isinstance(legal[0], str)
        hint = did_you_mean(value, legal) if is_word else ''
        raise MeshError(
          f'Partitioner.{name} = {value!r} is not one of {", ".join(map(repr, legal))}.{hint}',
          fix=f'Set Partitioner.{name} to one of them.',
          parameters=(f'Partitioner.{name}',),
          docs='parallelism.md',
        )

  def mesh_sizes(self, topology: Topology) -> MeshSizes:
    """Returns the mesh sizes on `topology`; raises MeshError with legal sizes."""
    return resolve_mesh_sizes(
      topology,
      num_partitions=self.num_partitions,
      model_parallel_submesh=self.model_parallel_submesh,
      ici_mesh_shape=self.ici_mesh_shape,
      dcn_mesh_shape=self.dcn_mesh_shape,
      **{axis: getattr(self, axis) for axis in OUTER_AXES},
    )

  def rules(self, *, shares_kv_heads: bool = False) -> AxisRules:
    """Returns the sum of the rules of every parallelism.

    Args:
      shares_kv_heads: see `tensor_parallel.rules`.
    """
    rules = (
      pipeline_lib.rules()
      + data_parallel.rules()
      + fsdp.rules(self.zero_stage)
      + context_parallel.rules(self.context_attention)
      + expert_parallel.rules()
      + tensor_parallel.rules(shares_kv_heads=shares_kv_heads)
    )
    return rules + sequence_parallel.rules() if self.sequence_parallel else rules

  def lay_out(
    self,
    topology: Topology,
    devices: Sequence[Device],
    *,
    logical_sizes: Mapping[str, int],
    num_microbatches: int = 1,
  ) -> Layout:
    """Returns the layout over `devices` (host-major, as `topology.discover` gives them).

    Args:
      topology: hosts and devices per host.
      devices: as many as the topology says.
      logical_sizes: array axis -> size, of all axes that the mesh may split, including 'batch';
        and 'stacks', the number of stacks of layers, if it is not 1.
      num_microbatches: parts of the batch that are computed in turn; each is split.
    Raises:
      MeshError: sizes that do not fit the topology, or that do not divide `logical_sizes`.
    """
    sizes = self.mesh_sizes(topology)
    logical_sizes, filled = self._with_filled_batch(sizes, logical_sizes, num_microbatches)
    problems = self._problems(sizes, logical_sizes, num_microbatches)
    if problems:
      raise MeshError(
        'The model does not fit the mesh',
        problems=problems,
        fix='To find a layout that fits: python -m t5x_gpu.plan --search',
        docs='mesh.md#sizes',
      )
    shares_kv_heads = tensor_parallel.devices_per_kv_head(logical_sizes, sizes.total) > 1
    shared = tensor_parallel.shared_kv_heads_note(logical_sizes, sizes.total)
    layout = Layout(
      mesh=build_mesh(sizes, topology, devices),
      sizes=sizes,
      topology=topology,
      rules=self.rules(shares_kv_heads=shares_kv_heads),
      notes=tuple(note for note in (shared, filled) if note),
      zero_stage=self.zero_stage,
      accumulate_by=self.accumulate_by,
      overlap_layers=self.overlap_layers,
      gradient_dtype=self.gradient_dtype,
      fills_batch=self.uneven_batch == 'fill',
      pipeline=self._pipeline(sizes, logical_sizes, num_microbatches),
    )
    by_layer = layout.region.by_layer(num_microbatches)
    return dataclasses.replace(layout, overlap_layers=self.overlap_layers and not by_layer)

  def on_fewer_hosts(self) -> Self:
    """Returns the partitioner of a run that has lost hosts: whole replicas are gone.

    `data` takes the remaining devices unless another axis does, and the batch is filled. All other
    sizes stay as they are set.
    """
    is_flat = self.ici_mesh_shape is None and self.dcn_mesh_shape is None
    is_open = any(getattr(self, axis) == -1 for axis in OUTER_AXES)
    data = self.data if is_open or not is_flat else -1
    return dataclasses.replace(self, data=data, uneven_batch='fill')

  def fits(
    self, topology: Topology, *, logical_sizes: Mapping[str, int], num_microbatches: int = 1
  ) -> bool:
    """Returns whether `lay_out` accepts these sizes."""
    try:
      sizes = self.mesh_sizes(topology)
    except MeshError:
      return False
    logical_sizes, _ = self._with_filled_batch(sizes, logical_sizes, num_microbatches)
    return not self._problems(sizes, logical_sizes, num_microbatches)

  def _with_filled_batch(
    self, sizes: MeshSizes, logical_sizes: Mapping[str, int], num_microbatches: int
  ) -> tuple[Mapping[str, int], Optional[str]]:
    """Returns the sizes with the rows of weight 0 that fill the batch, and a note about them."""
    if self.uneven_batch == 'refuse':
      return logical_sizes, None
    in_turn = num_microbatches
    if sizes.total['stage'] > 1:
      in_turn *= self.num_pipeline_microbatches or 1
    unit, rows = self._batch_parts(sizes) * in_turn, logical_sizes['batch']
    filled = -(-rows // unit) * unit
    if filled == rows:
      return logical_sizes, None
    more = filled - rows
    note = (
      f'batch: {rows} rows + {more} of weight 0 to fill a multiple of {unit} '
      f'(uneven_batch = {self.uneven_batch!r}): {more / filled:.1%} of the work of a step is idle'
    )
    return {**logical_sizes, 'batch': filled}, note

  def _pipeline(
    self, sizes: MeshSizes, logical_sizes: Mapping[str, int], num_microbatches: int
  ) -> Optional[Timetable]:
    stages = sizes.total['stage']
    if stages == 1:
      return None
    count = self.num_pipeline_microbatches
    if count is None:
      rows = logical_sizes['batch'] // num_microbatches // self._batch_parts(sizes)
      legal = divisors(max(rows, 1))
      count = next((n for n in legal if n >= 4 * stages), legal[-1])
    # A ring needs all devices in every step, including devices of an idle stage.
    ring = sizes.total['context'] > 1 and self.context_attention == 'ring'
    return Timetable(
      self.pipeline_schedule,
      stages,
      count,
      self.pipeline_repeats,
      logical_sizes.get('stacks', 1),
      skip_idle=not ring,
    )

  def _batch_parts(self, sizes: MeshSizes) -> int:
    return math.prod(sizes.total[axis] for axis in self.rules().activations['batch'])

  def _problems(
    self, sizes: MeshSizes, logical_sizes: Mapping[str, int], num_microbatches: int
  ) -> list[Problem]:
    """Returns everything in the model that does not fit a mesh of `sizes`."""
    rules, total = self.rules(), sizes.total
    pipeline = self._pipeline(sizes, logical_sizes, num_microbatches)
    between = math.prod(total[axis] for axis in rules.activations.get('residual_length', ()))
    generic = {name: size for name, size in logical_sizes.items() if name not in OWN_CHECKS}
    if 'length' in logical_sizes and self.sequence_parallel:
      generic['residual_length'] = logical_sizes['length']
    problems = [
      problem
      for table in (rules.activations, _without_fsdp(rules.state))
      for problem in check_model_sizes(
        sizes,
        generic,
        {name: table.get(name, ()) for name in generic},
        hints=self._hints(sizes, num_microbatches, pipeline),
      )
    ]
    problems += context_parallel.check(
      logical_sizes,
      total,
      method=self.context_attention,
      multiple_of=between if self.sequence_parallel else 1,
    )
    problems += tensor_parallel.check(logical_sizes, total)
    problems += expert_parallel.check(logical_sizes, total)
    if pipeline is not None:
      problems += pipeline_lib.check(
        logical_sizes,
        total,
        schedule=pipeline.schedule,
        repeats=pipeline.repeats,
        num_pipeline_microbatches=pipeline.num_microbatches,
        batch_parts=self._batch_parts(sizes),
        num_microbatches=num_microbatches,
        skip_idle=pipeline.skip_idle,
      )
    return list(dict.fromkeys(problems))  # both tables may split an axis in the same way

  def _hints(
    self, sizes: MeshSizes, num_microbatches: int, pipeline: Optional[Timetable]
  ) -> dict[str, SizeHint]:
    """Returns array axis -> how a problem describes its size."""
    rows = 1  # a device's rows must be a multiple of this
    if pipeline is not None:
      rows = self.num_pipeline_microbatches or (
        pipeline.num_stages if pipeline.schedule == 'circular' else pipeline.least_rows
      )
    context = sizes.total['context']
    return {
      **{name: SizeHint(by, is_width=name in WIDTHS) for name, by in SET_BY.items()},
      'batch': SizeHint(
        'BATCH_SIZE',
        each_of=num_microbatches,
        multiple_of=num_microbatches * max(rows, 1) * self._batch_parts(sizes),
      ),
      'residual_length': SizeHint(
        'TASK_FEATURE_LENGTHS',
        'With Partitioner.sequence_parallel, length',
        multiple_of=2 * context if context > 1 else 1,
        rule='so that their sum is a multiple of',
      ),
    }


def _without_fsdp(table: Table) -> Table:
  """Returns `table` without `fsdp`, which splits arrays of any size (`fsdp.choose_dim`)."""
  return {name: tuple(axis for axis in axes if axis != 'fsdp') for name, axes in table.items()}
