"""Checks that training, evaluation or inference fits into the memory of devices and hosts.

Before compiling, the estimate is a lower bound from shapes. A step has state, gradients, the inputs
of every layer for one microbatch, in 16 bits, and the logits live at one time; gradients may later
reuse the logits' memory. Evaluation and inference have the parameters, their copy if a run stores
them in a different form from checkpoints, and keys and values of the prompts in a batch. A run that
exceeds the bound cannot work. After compiling a step, XLA reports the actual size.
See docs/parallelism.md#memory.
"""

import dataclasses
import math
from typing import Optional, Self

import jax

from t5x_gpu.errors import OutOfMemoryError
from t5x_gpu.models.heads import num_loss_chunks
from t5x_gpu.models.inference.generation import Generator
from t5x_gpu.models.model import config_of, encodes_texts
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.trees import Params, Tree
from t5x_gpu.runtime.hardware import RunLimits, run_limits
from t5x_gpu.terminal.console import show
from t5x_gpu.training.program import Program, bytes_per_device, gradient_bytes


@dataclasses.dataclass(frozen=True)
class StepMemory:
  """Memory of a training step on one device, in bytes.

  Attributes:
    params, opt_state, gradients: bytes of the state and of the gradients.
    activations: everything else.
    is_compiled: whether XLA reported these sizes; otherwise they are a lower bound.
  """

  params: int
  opt_state: int
  gradients: int
  activations: int
  is_compiled: bool = False

  @property
  def total(self) -> int:
    return self.params + self.opt_state + self.gradients + self.activations

  def __str__(self) -> str:
    return (
      f'{show(self.params + self.opt_state)} of parameters and optimizer state, '
      f'{show(self.gradients)} of gradients, {show(self.activations)} of activations'
    )


def estimate(program: Program) -> StepMemory:
  """Returns a lower bound of the memory of a step, from shapes."""
  layout, mesh = program.layout, program.layout.mesh.shape
  model, state = program.config.model, program.abstract_state
  splits = layout.region.splits_gradients(program.config.num_microbatches)
  table = layout.rules.state if splits else layout.rules.parameters
  sizes = model.logical_sizes()
  layers = sizes.get('layers', 0) + sizes.get('encoder_layers', 0)
  length = min((shape[1] for shape in program.spec.shapes.values() if len(shape) > 1), default=1)
  parts = layout.batch_parts * program.config.num_microbatches * mesh['context']
  if layout.pipeline is not None:
    parts *= layout.pipeline.num_microbatches
  tokens = program.step_spec.batch_size * length // parts
  inputs = 2 * tokens * sizes.get('embed', 0) * layers // (mesh['stage'] * mesh['model'])
  predictions, config = tokens // length if model.classifies else tokens, config_of(model)
  if config is not None and not encodes_texts(model):
    length //= mesh['context']
    rows = max(tokens // length, 1)
    chunks = num_loss_chunks(config, rows, length, vocab_parts=mesh['model'])
    predictions //= max(chunks, 1)
  logits = 4 * predictions * model.num_outcomes // mesh['model']
  gradients = gradient_bytes(program, table)
  return StepMemory(
    params=bytes_per_device(state.params),
    opt_state=bytes_per_device(state.opt_state),
    gradients=gradients,
    # The logits are freed before most gradients are computed.
    activations=inputs + max(logits - gradients, 0),
  )


@dataclasses.dataclass(frozen=True)
class RunMemory:
  """The memory that a run needs, and the memory that it has.

  Attributes:
    need: memory needed on each device.
    limits: memory of devices and hosts.
    program: the run's program.
  """

  need: StepMemory
  limits: RunLimits
  program: Program

  @property
  def on_cpu(self) -> bool:
    """Whether the devices use the memory of their host."""
    return self.program.layout.mesh.devices.flat[0].platform == 'cpu'

  def compiled(self, step: jax.stages.Compiled) -> Self:
    """Returns a copy with the sizes that XLA reports for the compiled `step`.

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
    result.check()
    return result

  def line(self) -> str:
    """Returns `memory: 1.52 GiB on each device of 79.20 GiB (...): ...` for the log."""
    of = f' of {self.limits.device}' if self.limits.device else ''
    least = '' if self.need.is_compiled else 'at least '
    return f'memory: {least}{show(self.need.total)} on each device{of}: {self.need}'

  def check(self) -> None:
    """Raises OutOfMemoryError unless the run fits."""
    need, limit, host = self.need, self.limits.device, self.limits.host
    topology = self.program.layout.topology
    if limit is not None and need.total > limit.bytes:
      source = 'as compiled' if need.is_compiled else 'by a lower bound, before compiling'
      raise OutOfMemoryError(
        f'A step on {topology.count(topology.num_devices)} needs {show(need.total)} on each '
        f'({source}): {need}. Each has {limit}.',
        fix=f'{self._fix()}\nTo compare what fits and its cost: python -m t5x_gpu.plan',
        parameters=('Partitioner.fsdp', 'train.num_microbatches', 'BATCH_SIZE'),
        docs='parallelism.md#memory',
      )
    self._check_padding()
    # Hosts with the same state may share the work of a save.
    copies = tree_bytes(self.program.abstract_saved) // self.limits.num_machines
    if host is not None and not self.on_cpu and copies > host.bytes:
      raise OutOfMemoryError(
        f'Each save copies at least {show(copies)} of the state to the memory of each host, which '
        f'has {host}.',
        fix='Give the job more host memory, or split the state over more hosts with '
        'Partitioner.fsdp.',
        parameters=('Partitioner.fsdp',),
        docs='parallelism.md#memory',
      )

  def _fix(self) -> str:
    """Returns the fix: the setting that shrinks the largest part of a step."""
    need, layout = self.need, self.program.layout
    num_microbatches = self.program.config.num_microbatches
    rows = self.program.step_spec.batch_size // (layout.batch_parts * num_microbatches)
    if need.total - need.activations > self.limits.device.bytes:
      return (
        'Parameters, optimizer state and gradients alone are too large: split them over more '
        f'devices, with Partitioner.fsdp above {layout.mesh.shape["fsdp"]} and zero_stage = 3.'
      )
    if rows > 1:
      return (
        f'Set train.num_microbatches (now {num_microbatches}) to a larger number that divides '
        f'{num_microbatches * rows}, the rows of a device: fewer are then in memory at a time.'
      )
    return (
      'Each device has one row at a time: split it with Partitioner.context or num_partitions, or '
      'recompute more of it (TransformerConfig.remat_policy).'
    )

  def _check_padding(self) -> None:
    """Raises OutOfMemoryError if a state that is padded in memory cannot be saved or restored.

    A save and a restore temporarily hold the state twice on a device: as the run stores it, and
    without the padding, split over fewer devices (partitioning/fsdp.py).
    """
    program, limit = self.program, self.limits.device
    stored, saved = map(bytes_per_device, (program.abstract_state, program.abstract_saved))
    if not program.is_padded or limit is None or stored + saved <= limit.bytes:
      return
    ways = program.layout.mesh.shape['fsdp']
    sizes = {n.fsdp.size for n in jax.tree.leaves(program.names) if n.fsdp and n.fsdp.size % ways}
    raise OutOfMemoryError(
      f'fsdp = {ways} does not divide {", ".join(map(str, sorted(sizes)))}, so the state is padded '
      f'in memory: {show(stored)} on each device. A save and a restore also take {show(saved)} '
      f'there for the state without padding. Each device has {limit}.',
      fix='Set Partitioner.fsdp to a number that divides them.',
      parameters=('Partitioner.fsdp',),
      docs='parallelism.md#any-fsdp',
    )


def check_memory(program: Program) -> RunMemory:
  """Returns the memory that the run needs and has. Collective: all processes must call it.

  Raises:
    OutOfMemoryError: the run does not fit; raised on all processes.
  """
  layout = program.layout
  limits = run_limits(layout.mesh.local_devices, num_devices=layout.topology.num_devices)
  memory = RunMemory(estimate(program), limits, program)
  memory.check()
  return memory


def tree_bytes(tree: Tree) -> int:
  """Returns the bytes of all arrays of a tree, on all devices together, each once."""
  return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(tree))


def check_evaluation_memory(program: Program) -> None:
  """Raises OutOfMemoryError unless the parameters fit; all processes must call it."""
  stored, saved = program.abstract_state.params, program.abstract_saved.params
  is_copied = program.is_padded or program.layout.reorders_layers
  _check_fits(program.layout, saved, copy=bytes_per_device(stored) if is_copied else 0)


def check_inference_memory(
  params: Params, layout: Layout, *, generator: Optional[Generator] = None
) -> None:
  """Raises OutOfMemoryError unless parameters and prompts fit; all processes must call it.

  Args:
    params: shapes and shardings of the parameters.
    layout: mesh and rules.
    generator: continues prompts; None if no text is generated.
  """
  if generator is None:
    _check_fits(layout, params)
  else:
    prompts = generator.batch_size // layout.batch_parts
    _check_fits(layout, params, prompts=prompts, prompt_bytes=generator.prompt_bytes)


def _check_fits(
  layout: Layout, params: Params, *, copy: int = 0, prompts: int = 0, prompt_bytes: int = 0
) -> None:
  """Raises OutOfMemoryError unless a device has room.

  Args:
    layout: mesh and rules.
    params: shapes and shardings of the parameters.
    copy: bytes of a second copy of `params` on a device.
    prompts, prompt_bytes: number of prompts on a device at a time, and bytes per prompt.
  """
  limits = run_limits(layout.mesh.local_devices, num_devices=layout.topology.num_devices)
  size, limit, more = bytes_per_device(params) + copy, limits.device, prompts * prompt_bytes
  if limit is None or size + more <= limit.bytes:
    return
  devices = layout.topology.count(layout.mesh.size)
  cache = f', keys and values of {prompts:,} prompts at least {show(more)}' if more else ''
  raise OutOfMemoryError(
    f'The parameters take {show(size)} on each of {devices}{cache}. Each has {limit}.',
    fix=_how_to_fit(layout, limit.bytes - size, prompt_bytes),
    parameters=('Partitioner.fsdp', *(('DecodingConfig.batch_size',) if more else ())),
    docs='parallelism.md#memory',
  )


def _how_to_fit(layout: Layout, room: int, prompt_bytes: int) -> str:
  """Returns how to make room: fewer prompts at a time, or parameters split further.

  Args:
    layout: mesh and rules.
    room: bytes that the parameters leave on a device.
    prompt_bytes: keys and values of one prompt.
  """
  if room < 0 or not prompt_bytes:
    return (
      'Split the parameters over more devices: Partitioner.fsdp above '
      f'{layout.mesh.shape["fsdp"]}, with zero_stage = 3.'
    )
  if room < prompt_bytes:
    return 'Set DecodingConfig.max_decode_length lower: not even one prompt fits.'
  return f'Set DecodingConfig.batch_size = {room // prompt_bytes * layout.batch_parts} or less.'
