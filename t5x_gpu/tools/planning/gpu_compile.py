"""The training step of a run, compiled for GPUs that this machine does not need to have.

    gpus = described_gpus('h100', num_hosts=1, gpus_per_host=8)
    step = compile_step(config, gpus)
    step.memory.total_bytes, step.kernels['fp8_gemm'].runs, step.overlaps

The result is XLA's own for that GPU: buffers, kernels and schedule. Autotuning is missing (a real
run may tile a matmul differently, or use cuBLAS where this has Triton), and so are durations:
`overlaps` sums up which bytes are hidden behind matrix kernels in the order of XLA's schedule.
"""

import collections
import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping

import jax

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.collectives import NEVER_RUNS, Collective, collectives_of, inventory
from t5x_gpu.compiled.hlo_text import Computation
from t5x_gpu.compiled.kernels import (
  KernelCount,
  Kernels,
  check_fp8_gemms,
  count_kernels,
  workspace_bytes,
)
from t5x_gpu.compiled.traffic import KernelTraffic, Traffic, kernel_traffic, traffic
from t5x_gpu.models.model import fp8_scaling_of
from t5x_gpu.models.precision import check_devices
from t5x_gpu.runtime.xla import flags
from t5x_gpu.runtime.xla.presets import Value
from t5x_gpu.runtime.xla.programs import compile_errors
from t5x_gpu.tools.planning import gpu_targets
from t5x_gpu.tools.planning.gpu_targets import DescribedGpus
from t5x_gpu.training.program import Program, build_program, compile_options
from t5x_gpu.training.train_step import StepConfig

# A collective counts as hidden if a matrix kernel, or a loop with one in it, stands between its
# start and its done. That is an order, not a duration: the kernel may be shorter than the transfer.


@dataclasses.dataclass(frozen=True)
class Scheduled:
  """A collective and the number of matrix kernels (or loops with some) that run during it."""

  collective: Collective
  kernels_during: int


@dataclasses.dataclass(frozen=True)
class Overlap:
  """All collectives of one kind over the same mesh axes.

  Attributes:
    kind, axes: as in `Collective`.
    num_bytes: bytes that each device sends per step.
    hidden_bytes: bytes of collectives during which a matrix kernel runs.
  """

  kind: str
  axes: tuple[str, ...]
  num_bytes: int
  hidden_bytes: int

  @property
  def share(self) -> float:
    return self.hidden_bytes / self.num_bytes


def overlaps(hlo: str, mesh_shape: Mapping[str, int]) -> list[Overlap]:
  """Returns the sums per kind and mesh axes, the largest first.

  Args:
    hlo: `compiled.as_text()` of a program for a GPU; its instructions are in scheduled order.
    mesh_shape: mesh axis -> size, in the order of the mesh.
  """
  total, hidden = collections.Counter(), collections.Counter()
  for scheduled in schedule(hlo, mesh_shape):
    collective = scheduled.collective
    key = collective.kind, collective.axes
    total[key] += collective.bytes_per_call
    hidden[key] += collective.bytes_per_call if scheduled.kernels_during else 0
  return [Overlap(*key, num_bytes, hidden[key]) for key, num_bytes in total.most_common()]


def schedule(hlo: str, mesh_shape: Mapping[str, int]) -> list[Scheduled]:
  """Returns every collective of a scheduled program, in program order; arguments as `overlaps`."""
  module = hlo_text.parse(hlo)
  kernels = Kernels(module)
  during: dict[str, dict[str, int]] = {}  # computation -> start -> kernels until its done
  found = []
  for visit in module.walk():
    collectives = collectives_of(module, visit, mesh_shape)
    if collectives:
      name = visit.computation.name
      if name not in during:
        during[name] = _kernels_during(visit.computation, kernels)
      number = during[name].get(visit.instruction.name, 0)
      found += [Scheduled(collective, number) for collective in collectives]
  return found


def _kernels_during(computation: Computation, kernels: Kernels) -> dict[str, int]:
  """Returns the name of each `...-start` -> matrix kernels between it and its `...-done`."""
  running: set[str] = set()
  during: collections.Counter[str] = collections.Counter()
  for name, instruction in computation.instructions.items():
    if kernels.kind(computation, instruction) or kernels.multiplies(instruction):
      during.update(running)
    if instruction.opcode.endswith('-start'):
      running.add(name)
    elif instruction.opcode.endswith('-done'):
      running.discard(instruction.operands[0])
  return during


@dataclasses.dataclass(frozen=True)
class CompiledMemory:
  """Bytes on one GPU.

  Attributes:
    argument_bytes: parameters, optimizer state and batch.
    output_bytes: results that do not reuse the memory of an argument.
    temporary_bytes: activations, gradients, logits and workspaces, at their peak.
    host_bytes: activations in the host's memory (remat_policy 'offload').
    workspace_bytes: largest workspace of a cuBLAS or cuDNN call; part of the temporaries.
  """

  argument_bytes: int
  output_bytes: int
  temporary_bytes: int
  host_bytes: int = 0
  workspace_bytes: int = 0

  @property
  def total_bytes(self) -> int:
    """Bytes that the step needs, without NCCL's buffers and fragmentation."""
    return self.argument_bytes + self.output_bytes + self.temporary_bytes


@dataclasses.dataclass(frozen=True)
class CompiledStep:
  """A training step compiled for described GPUs.

  Attributes:
    program: the program that was compiled.
    gpus: the GPUs that it was compiled for.
    hlo: the scheduled program of one GPU, as text.
    memory: bytes on one GPU.
    compile_options: options of the run's XLA preset.
    trace_seconds, compile_seconds: durations on this machine.
  """

  program: Program
  gpus: DescribedGpus
  hlo: str
  memory: CompiledMemory
  compile_options: Mapping[str, Value]
  trace_seconds: float
  compile_seconds: float

  @functools.cached_property
  def kernels(self) -> Mapping[str, KernelCount]:
    """Kind of matrix kernel -> its number (`kernels.KERNEL_KINDS`)."""
    return count_kernels(self.hlo)

  @functools.cached_property
  def kernel_traffic(self) -> list[KernelTraffic]:
    """Bytes that each kernel of a step reads and writes."""
    return kernel_traffic(self.hlo)

  @property
  def traffic(self) -> Traffic:
    """Bytes that the kernels of a step read and write."""
    return traffic(self.kernel_traffic)

  @property
  def collectives(self) -> list[Collective]:
    return inventory(self.hlo, self.program.layout.mesh.shape)

  @functools.cached_property
  def overlaps(self) -> list[Overlap]:
    """Bytes per kind of collective and mesh axes, with the hidden part."""
    return overlaps(self.hlo, self.program.layout.mesh.shape)


def compile_step(config: StepConfig, gpus: DescribedGpus) -> CompiledStep:
  """Returns the training step of a run as XLA compiles it for `gpus`, with the run's XLA preset.

  Raises:
    MeshError, ConfigError, ShapeError, ModelError: as `build_program` and `compile_errors`; for a
      model in FP8 also if the GPU has no FP8, or the step has no FP8 matmul.
  """
  scaling = fp8_scaling_of(config.model)
  check_devices(scaling, [gpus.target])
  with gpu_targets.kernels_for(gpus.target), _preset(config.xla_preset, gpus) as preset:
    program = build_program(config, topology=gpus.topology, devices=list(gpus.devices))
    options = compile_options(program, preset) or {}
    start = time.monotonic()
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    with compile_errors(gpus.target.device_kind):
      lowered = traced.lower()
      lowered_at = time.monotonic()
      compiled = lowered.compile(compiler_options={**options, **NEVER_RUNS})
    compiled_at = time.monotonic()
  hlo = compiled.as_text()
  if scaling is not None:
    check_fp8_gemms(hlo, scaling)
  return CompiledStep(
    program=program,
    gpus=gpus,
    hlo=hlo,
    memory=memory_of(compiled, hlo),
    compile_options=options,
    trace_seconds=lowered_at - start,
    compile_seconds=compiled_at - lowered_at,
  )


def memory_of(compiled: jax.stages.Compiled, hlo: str) -> CompiledMemory:
  """Returns the memory of a compiled function on one device; `hlo` is its text.

  Donated arguments share their memory with outputs. XLA's own peak counts the arguments alone
  (jaxlib 0.10 to 0.12, compiled without the GPU).
  """
  m = compiled.memory_analysis()
  return CompiledMemory(
    argument_bytes=m.argument_size_in_bytes,
    output_bytes=m.output_size_in_bytes - m.alias_size_in_bytes,
    temporary_bytes=m.temp_size_in_bytes,
    host_bytes=m.host_temp_size_in_bytes,
    workspace_bytes=workspace_bytes(hlo),
  )


@contextlib.contextmanager
def _preset(name: str, gpus: DescribedGpus) -> Iterator[flags.Applied]:
  """Context with the settings of an XLA preset that the compiler reads, as in a run."""
  applied = flags.prepare_environment(
    name,
    gpu=gpus.target.device_kind,
    num_hosts=gpus.topology.num_hosts,
    num_gpus=gpus.topology.num_devices,
    environ=dict(os.environ),
  )
  before = {option: getattr(jax.config, option) for option in applied.jax_config}
  for option, value in applied.jax_config.items():
    jax.config.update(option, value)
  try:
    yield applied
  finally:
    for option, value in before.items():
      jax.config.update(option, value)
