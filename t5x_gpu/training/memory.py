"""Checks that a run fits into the memory of its devices and hosts; if not, names what would fit.

Before the compile the estimate is a lower bound from shapes: state, gradients, and the activations
that no setting avoids. Those are the inputs of every layer for one microbatch, in 16 bits, and the
logits in memory at one time, whose memory gradients may reuse. A run that exceeds the bound cannot
work. After the compile, XLA reports the actual size. See docs/parallelism.md#memory.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Optional, Self

import jax

from t5x_gpu.errors import OutOfMemoryError
from t5x_gpu.models.heads import num_loss_chunks
from t5x_gpu.models.model import Model, classifies, config_of, encodes_texts
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.runtime.memory import Limit, run_limits, show
from t5x_gpu.training.program import Program
from t5x_gpu.training.summary import bytes_per_device


@dataclasses.dataclass(frozen=True)
class StepMemory:
  """What a training step takes on one device, in bytes.

  Attributes:
    params, opt_state, gradients: of the state and the step.
    activations: everything else.
    is_compiled: whether XLA reported these sizes; else they are a lower bound.
    inputs, matmuls: lower bounds of what layers store for the backward pass: their inputs, and
      outputs of matmuls with weights.
  """

  params: int
  opt_state: int
  gradients: int
  activations: int
  is_compiled: bool = False
  inputs: int = 0
  matmuls: int = 0

  @property
  def total(self) -> int:
    return self.params + self.opt_state + self.gradients + self.activations

  def __str__(self) -> str:
    return (
      f'{show(self.params + self.opt_state)} of parameters and optimizer state, '
      f'{show(self.gradients)} of gradients, {show(self.activations)} of activations'
    )


def estimate(program: Program, model: Model, *, num_microbatches: int) -> StepMemory:
  """Returns a lower bound of the memory of a step, from shapes."""
  layout, mesh = program.layout, program.layout.mesh.shape
  state, names = program.abstract_state, program.names
  trained, trained_names = (
    program.trained.split(tree)[0] for tree in (program.abstract_saved.params, names.params)
  )
  table = layout.rules.state if layout.zero_stage > 1 else layout.rules.parameters
  gradients = layout.stored(trained, trained_names, table)
  sizes = model.logical_sizes()
  layers = sizes.get('layers', 0) + sizes.get('encoder_layers', 0)
  length = min((shape[1] for shape in program.spec.shapes.values() if len(shape) > 1), default=1)
  parts = layout.batch_parts * num_microbatches * mesh['context']
  if layout.pipeline is not None:
    parts *= layout.pipeline.num_microbatches
  tokens = program.spec.batch_size * length // parts
  inputs = 2 * tokens * sizes.get('embed', 0) * layers // (mesh['stage'] * mesh['model'])
  predictions, config = tokens // length if classifies(model) else tokens, config_of(model)
  if config is not None and not encodes_texts(model):
    length //= mesh['context']
    rows = max(tokens // length, 1)
    chunks = num_loss_chunks(config, rows, length, vocab_parts=mesh['model'])
    predictions //= max(chunks, 1)
  logits = 4 * predictions * model.num_outcomes // mesh['model']
  need = StepMemory(
    params=bytes_per_device(state.params),
    opt_state=bytes_per_device(state.opt_state),
    gradients=bytes_per_device(gradients),
    activations=inputs,
    inputs=inputs,
    matmuls=inputs * config.matmul_width // config.embed_dim if config is not None else 0,
  )
  # The logits are gone before most gradients are computed.
  return dataclasses.replace(need, activations=inputs + max(logits - need.gradients, 0))


@dataclasses.dataclass(frozen=True)
class RunMemory:
  """What a run needs and has.

  Attributes:
    need: on each device.
    limit: of the device with the least memory; None if unknown.
    host: of the host with the least memory; None if unknown.
    program: of the run.
    num_microbatches: of the run.
    remat_policy: of the model, if it has one.
    num_machines: of the run; a host of the topology may be a rack of machines.
  """

  need: StepMemory
  limit: Optional[Limit]
  host: Optional[Limit]
  program: Program
  num_microbatches: int
  remat_policy: Optional[str] = None
  num_machines: int = 1

  @property
  def on_cpu(self) -> bool:
    """Whether the devices use the memory of their host."""
    return self.program.layout.mesh.devices.flat[0].platform == 'cpu'

  def compiled(self, step: Any) -> Self:
    """Returns this with the sizes that XLA reports for the compiled `step`.

    Raises:
      OutOfMemoryError: as `check`.
    """
    stats = step.memory_analysis()
    if stats is None:  # some platforms do not support it
      return self
    total = (
      stats.argument_size_in_bytes
      + stats.output_size_in_bytes
      - stats.alias_size_in_bytes
      + stats.temp_size_in_bytes
    )
    rest = total - (self.need.total - self.need.activations)
    need = dataclasses.replace(self.need, activations=max(rest, 0), is_compiled=True)
    result = dataclasses.replace(self, need=need)
    result.check(least=self.need)
    return result

  def line(self) -> str:
    """Returns `memory: 1.52 GiB on each device of 79.20 GiB (...): ...` for the log."""
    of = f' of {self.limit}' if self.limit else ''
    least = '' if self.need.is_compiled else 'at least '
    return f'memory: {least}{show(self.need.total)} on each device{of}: {self.need}'

  def check(self, *, least: Optional[StepMemory] = None) -> None:
    """Raises OutOfMemoryError, with settings that would fit, unless the run fits.

    Args:
      least: the lower bound, if `need` is exact.
    """
    need, limit = self.need, self.limit
    topology = self.program.layout.topology
    if limit is not None and need.total > limit.bytes:
      source = 'as compiled' if need.is_compiled else 'by a lower bound, before compiling'
      options = list(_what_fits(self, least or need))
      raise OutOfMemoryError(
        f'A step on {topology.count(topology.num_devices)} needs {show(need.total)} on each '
        f'({source}): {need}. Each has {limit}.',
        fix='These fit:\n' + '\n'.join(f'  {option}' for option in options)
        if options
        else 'Splitting the batch over more devices of this size is not enough. Split each row as '
        'well: Partitioner.num_partitions (model) or Partitioner.context.',
        parameters=('Partitioner.fsdp', 'train.num_microbatches', 'BATCH_SIZE'),
        docs='parallelism.md#memory',
      )
    self._check_padding()
    # Hosts with the same state may share the work of a save.
    copies = _bytes(self.program.abstract_saved) // self.num_machines
    if self.host is not None and not self.on_cpu and copies > self.host.bytes:
      hosts = self.num_machines * math.ceil(copies / self.host.bytes)
      devices = hosts * topology.num_devices // self.num_machines
      raise OutOfMemoryError(
        f'Each save copies at least {show(copies)} of the state to the memory of each host, which '
        f'has {self.host}.',
        fix=f'Split the state over {hosts} hosts (Partitioner.fsdp = {devices}), or give the job '
        f'more host memory: at least {show(copies)}.',
        parameters=('Partitioner.fsdp',),
        docs='parallelism.md#memory',
      )

  def _check_padding(self) -> None:
    """Raises OutOfMemoryError if a state that is padded in memory cannot be saved or restored.

    Both hold the state twice on a device for a while: as a run stores it, and without the padding,
    split over fewer devices (partitioning/arrays/fsdp_dims.py).
    """
    program, limit = self.program, self.limit
    stored, saved = map(bytes_per_device, (program.abstract_state, program.abstract_saved))
    if not program.is_padded or limit is None or stored + saved <= limit.bytes:
      return
    ways = program.layout.mesh.shape['fsdp']
    sizes = {n.fsdp.size for n in jax.tree.leaves(program.names) if n.fsdp and n.fsdp.size % ways}
    fits = max(n for n in range(1, ways) if all(size % n == 0 for size in sizes))
    raise OutOfMemoryError(
      f'fsdp = {ways} does not divide {", ".join(map(str, sorted(sizes)))}, so the state is padded '
      f'in memory: {show(stored)} on each device. A save and a restore also take {show(saved)} '
      f'there for the state without padding. Each device has {limit}.',
      fix=f'Set Partitioner.fsdp = {fits}, which divides'
      + (f', and data = {ways // fits}.' if ways % fits == 0 else '.'),
      parameters=('Partitioner.fsdp',),
      docs='parallelism.md#any-fsdp',
    )


def check_memory(program: Program, model: Model, *, num_microbatches: int) -> RunMemory:
  """Returns the memory that the run needs and has; all processes must call it.

  Raises:
    OutOfMemoryError: the run does not fit; raised on all processes.
  """
  layout, config = program.layout, config_of(model)
  limits = run_limits(layout.mesh.local_devices, num_devices=layout.topology.num_devices)
  memory = RunMemory(
    estimate(program, model, num_microbatches=num_microbatches),
    limits.device,
    limits.host,
    program,
    num_microbatches,
    None if config is None else config.remat_policy,
    limits.num_machines,
  )
  memory.check()
  return memory


def _bytes(tree: Any) -> int:
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def _remat_that_fits(memory: RunMemory, least: StepMemory) -> Iterator[str]:
  """Yields remat policies that keep less on the device than the current one, by lower bounds."""
  if memory.remat_policy is None or not memory.need.is_compiled:
    return
  current = BY_MEMORY.index(memory.remat_policy)
  for policy, more in (('minimal', least.matmuls), ('full', 0), ('offload', -least.inputs)):
    size = least.total + more
    if BY_MEMORY.index(policy) > current and size <= memory.limit.bytes:
      yield f'TransformerConfig.remat_policy = {policy!r}: at least {show(size)}'


def _what_fits(memory: RunMemory, least: StepMemory) -> Iterator[str]:
  """Yields settings with which a step fits and its size then, the smallest change first."""
  need, limit = memory.need, memory.limit.bytes
  layout, num_microbatches = memory.program.layout, memory.num_microbatches
  mesh, stage = layout.mesh.shape, layout.zero_stage
  fixed = need.total - need.activations
  rows = memory.program.spec.batch_size // (layout.batch_parts * num_microbatches)
  factors = [f for f in range(2, rows + 1) if rows % f == 0]
  by_row = need.activations / max(rows, 1)  # with one row per device and microbatch

  smaller = next((f for f in factors if fixed + need.activations / f <= limit), None)
  if smaller:
    of_layers = mesh['fsdp'] > 1 and stage > 1 and layout.accumulate_by == 'layer'
    also = " with Partitioner.accumulate_by = 'microbatch'" if of_layers else ''
    size = show(fixed + need.activations / smaller)
    yield f'train.num_microbatches = {num_microbatches * smaller}{also}: about {size}'
    yield f'BATCH_SIZE = {memory.program.spec.batch_size // smaller}: about {size}'
  yield from _remat_that_fits(memory, least)

  # Without FSDP, and split over `ways` devices by each stage of ZeRO.
  params, opt_state, gradients = (
    need.params * (mesh['fsdp'] if stage == 3 else 1),
    need.opt_state * mesh['fsdp'],
    need.gradients * (mesh['fsdp'] if stage > 1 else 1),
  )

  def split(zero_stage: int, ways: int) -> float:
    parts = (opt_state, gradients, params)
    return sum(part / ways if i < zero_stage else part for i, part in enumerate(parts))

  ways = mesh['data'] * mesh['fsdp']
  for activations, rest in (
    (need.activations, ''),
    (by_row, f' and train.num_microbatches = {num_microbatches * rows}'),
  ):
    stages = [
      z
      for z in (1, 2, 3)
      if split(z, ways) + activations <= limit and (ways, z) != (mesh['fsdp'], stage) and ways > 1
    ]
    if stages:
      yield (
        f'Partitioner.fsdp = {ways} with Partitioner.zero_stage = {stages[0]}{rest}: about '
        f'{show(split(stages[0], ways) + activations)}'
      )
      return
  if by_row < limit and not smaller:
    more = 2
    while split(3, ways * more) + by_row > limit:
      more *= 2
    activations = (
      need.activations if (split(3, ways * more) + need.activations <= limit) else by_row
    )
    few = '' if activations == need.activations else ', one row at a time'
    yield (
      f'{layout.mesh.size * more} devices with as much memory each, Partitioner.fsdp = '
      f'{ways * more}{few}: about {show(split(3, ways * more) + activations)}'
    )
