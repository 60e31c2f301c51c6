"""`Prediction`: the needs and speed of a run on GPUs that are not there, by formula or compiled.

    prediction = predict(program, config, gpu=find_target('h100'), assumed=Assumptions())
    prediction.memory.fits, prediction.seconds_per_step, prediction.mfu, prediction.days

    planner = Planner(gpu, Assumptions(), devices=simulated_devices(64))    # also variants of a run
    planner.by_formula(config, Topology(8, 8)).seconds_per_step
    planner.exactly(config, Topology(8, 8)).memory.fits                     # compiles

By formula alone it takes milliseconds. A compiled step replaces the memory, the bytes that
elementwise kernels read and write, the bytes sent, and the share of them that is hidden.
"""

import collections
import contextlib
import dataclasses
import itertools
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional, Union

import flax.traverse_util
import rich.console
import rich.progress

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.layers.backends.choose import Choice
from t5x_gpu.metrics.throughput import mfu
from t5x_gpu.models.flops import step_flops, step_tokens
from t5x_gpu.models.model import Model, config_of, fp8_scaling_of
from t5x_gpu.models.precision import check_devices
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.partitioning.trees import Shapes
from t5x_gpu.runtime.main_log import silent
from t5x_gpu.runtime.topology import Device, Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas.step_memory import MemoryUse, memory_use
from t5x_gpu.tools.planning.formulas.step_shape import StepShape, step_shape
from t5x_gpu.tools.planning.formulas.step_time import StepTime, step_time
from t5x_gpu.tools.planning.formulas.traffic import (
  CollectiveTraffic,
  busy_share,
  compiled_traffic,
  formula_traffic,
)
from t5x_gpu.tools.planning.formulas.work import (
  elementwise_bytes,
  step_work,
  with_elementwise_bytes,
)
from t5x_gpu.tools.planning.gpu_compile import CompiledStep, compile_step
from t5x_gpu.tools.planning.gpu_targets import GpuTarget, can_compile, described_gpus
from t5x_gpu.tools.planning.kernel_parts import PartKernels, kernels_by_part
from t5x_gpu.training.memory import tree_bytes
from t5x_gpu.training.program import Program, build_program, initial_params
from t5x_gpu.training.train_step import StepConfig

Setting = Union[None, bool, int, float, str]  # the value of a gin parameter
SECONDS_PER_DAY = 86400
# Sources of memory and traffic, from the least to the most exact.
FORMULA, PARTITIONED, COMPILED = 'formula', 'partitioned', 'compiled'
# Reasons for recomputing layers in the backward pass. The last two apply with every remat_policy.
REMAT, PIPELINE, MICROBATCHES = 'remat_policy', 'pipeline', 'microbatches by layer'


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig(StepConfig):
  """The settings of a run that a plan reads.

  Attributes:
    total_steps: total number of updates.
  """

  total_steps: int


@dataclasses.dataclass(frozen=True)
class CheckpointCost:
  """One checkpoint of the run.

  Attributes:
    num_bytes: bytes of all its arrays.
    seconds: time to write it, while the run continues.
  """

  num_bytes: int
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
  """A run on GPUs that are not there.

  Attributes:
    gpu: the kind of GPU.
    num_gpus, num_hosts: number of GPUs and hosts.
    mesh: mesh axis -> size, of axes larger than 1.
    num_params: parameters of the model.
    params_by_part: part of the model, 'layers/mlp' -> its parameters.
    recomputes_for: why the backward pass recomputes layers: REMAT, PIPELINE or MICROBATCHES; '' if
      it does not.
    dtype: dtype of the matrix products.
    attention: the backend of each stack of layers, and why.
    tokens_per_step: tokens of the global batch, padding included; inputs and targets.
    model_flops_per_step: FLOPs of the model on the global batch, without recomputation.
    peak_flops: dense FLOP/s of one GPU in `dtype`.
    total_steps: steps of the run.
    memory: memory on each GPU.
    formula_sent: traffic of each GPU by formula.
    time: time of a step.
    checkpoint: size and duration of a save.
    elementwise_bytes: bytes that kernels other than matrix kernels read and write on a GPU in a
      step, as compiled, which `time` follows; None if it was not compiled for the GPU.
    formula_elementwise_bytes: the same by formula.
    elementwise_kernels: the same by part of the model, with the largest kernels, if compiled.
    source: FORMULA, PARTITIONED (traffic of the program that XLA splits for CPUs) or COMPILED.
    assumed: efficiencies and links.
  """

  gpu: GpuTarget
  num_gpus: int
  num_hosts: int
  mesh: Mapping[str, int]
  num_params: int
  params_by_part: Mapping[str, int]
  recomputes_for: str
  dtype: str
  attention: tuple[Choice, ...]
  tokens_per_step: int
  model_flops_per_step: float
  peak_flops: float
  total_steps: int
  memory: MemoryUse
  formula_sent: tuple[CollectiveTraffic, ...]
  time: StepTime
  checkpoint: CheckpointCost
  elementwise_bytes: Optional[int] = None
  formula_elementwise_bytes: int = 0
  elementwise_kernels: tuple[PartKernels, ...] = ()
  source: str
  assumed: Assumptions

  @property
  def seconds_per_step(self) -> float:
    return self.time.seconds

  @property
  def tokens_per_second(self) -> float:
    return self.tokens_per_step / self.time.seconds

  @property
  def flops_per_gpu(self) -> float:
    """Model FLOP/s of one GPU."""
    return self.model_flops_per_step / self.time.seconds / self.num_gpus

  @property
  def mfu(self) -> Optional[float]:
    """Model FLOPs utilization by the trainer's formula, 0 to 1."""
    return mfu(
      self.model_flops_per_step / self.num_gpus,
      step_seconds=self.time.seconds,
      peak_flops=self.peak_flops,
    )

  @property
  def total_tokens(self) -> int:
    return self.tokens_per_step * self.total_steps

  @property
  def days(self) -> float:
    """Days of steps until the end of the run, without evaluations and restarts."""
    return self.total_steps * self.time.seconds / SECONDS_PER_DAY


def predict(
  program: Program,
  config: PlanConfig,
  *,
  gpu: GpuTarget,
  assumed: Assumptions,
  compiled: Optional[CompiledStep] = None,
  partitioned: Optional[str] = None,
) -> Prediction:
  """Returns the prediction for a run.

  Args:
    program: the run's program, on devices of any kind.
    config: the run's settings.
    gpu: the GPU to predict for.
    assumed: efficiencies and links.
    compiled: the step, compiled for `gpu`.
    partitioned: `partitioned_hlo` of the step, if it is not compiled for `gpu`.
  """
  layout, model = program.layout, config.model
  shape = step_shape(program, model, num_microbatches=config.num_microbatches, gpu=gpu)
  by_formula = formula_traffic(program, shape)
  sent, source = by_formula, FORMULA
  if compiled is not None:
    sent, source = _sent(program, compiled.hlo, compiled), COMPILED
  elif partitioned is not None:
    sent, source = _sent(program, partitioned), PARTITIONED
  work = step_work(shape, program, model)
  model_config = config_of(model)
  dtype = 'float32' if model_config is None else model_config.dtype
  formula_bytes, compiled_bytes, by_part = sum(elementwise_bytes(work).values()), None, []
  if compiled is not None:
    busy = busy_share(program)  # branches of a pipeline's ticks
    kernels = [
      dataclasses.replace(k, num_bytes=int(k.num_bytes * busy)) if k.in_branch else k
      for k in compiled.kernel_traffic
    ]
    by_part = kernels_by_part(kernels, work, dtype=dtype)
    compiled_bytes = sum(row.num_bytes for row in by_part)
    work = with_elementwise_bytes(work, {row.part: row.num_bytes for row in by_part})
  topology = layout.topology
  return Prediction(
    gpu=gpu,
    num_gpus=topology.num_devices,
    num_hosts=topology.num_hosts,
    mesh={axis: size for axis, size in layout.sizes.total.items() if size > 1},
    num_params=program.num_params,
    params_by_part=_params_by_part(program, model),
    recomputes_for=_recomputes_for(shape, layout.pipeline),
    dtype=dtype,
    attention=tuple(stack.choice for stack in shape.stacks),
    tokens_per_step=step_tokens(model, program.spec.shapes),
    model_flops_per_step=step_flops(model, program.spec.shapes),
    peak_flops=gpu.peak_flops(dtype),
    total_steps=config.total_steps,
    memory=memory_use(
      program,
      shape,
      gpu=gpu,
      preset=config.xla_preset,
      assumed=assumed,
      compiled=compiled and compiled.memory,
    ),
    formula_sent=tuple(by_formula),
    time=step_time(
      work,
      sent,
      sizes=layout.sizes,
      gpu=gpu,
      dtype=dtype,
      assumed=assumed,
      bubble_fraction=layout.pipeline.bubble_fraction if layout.pipeline else 0.0,
    ),
    checkpoint=_checkpoint(program, assumed),
    elementwise_bytes=compiled_bytes,
    formula_elementwise_bytes=int(formula_bytes),
    elementwise_kernels=tuple(by_part),
    source=source,
    assumed=assumed,
  )


def _checkpoint(program: Program, assumed: Assumptions) -> CheckpointCost:
  num_bytes = tree_bytes(program.abstract_saved)
  of_host = num_bytes / program.layout.topology.num_hosts
  return CheckpointCost(num_bytes, of_host / 1e9 / assumed.save_gigabytes)


def _sent(
  program: Program, hlo: str, compiled: Optional[CompiledStep] = None
) -> list[CollectiveTraffic]:
  return compiled_traffic(
    inventory(hlo, program.layout.mesh.shape),
    compiled.overlaps if compiled else (),
    busy=busy_share(program),
  )


def _params_by_part(program: Program, model: Model) -> dict[str, int]:
  """Returns part of the model -> its parameters, the largest first."""
  stacks = model.stacks
  found: collections.Counter[str] = collections.Counter()
  for path, array in flax.traverse_util.flatten_dict(program.abstract_saved.params).items():
    within = path.index('layers') + 2 if 'layers' in path else 1 + (path[0] in stacks)
    found['/'.join(path[:within])] += math.prod(array.shape)
  return dict(found.most_common())


def _recomputes_for(shape: StepShape, pipeline: Optional[Timetable]) -> str:
  if not shape.recomputes and not any(stack.full_layers for stack in shape.stacks):
    return ''
  if pipeline:
    return PIPELINE
  return MICROBATCHES if shape.by_layer else REMAT


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
  """Context that shows `what` and its seconds on a terminal; elsewhere prints it when done.

  Args:
    what: 'compiling the step for 64 x H100'.
  """
  begin = time.monotonic()
  console = rich.console.Console(stderr=True)
  columns = (
    rich.progress.SpinnerColumn(),
    rich.progress.TextColumn('{task.description}'),
    rich.progress.TimeElapsedColumn(),
  )
  with rich.progress.Progress(
    *columns, console=console, transient=True, disable=not console.is_terminal
  ) as bar:
    bar.add_task(what, total=None)
    yield
  print(f'{what}: {time.monotonic() - begin:.0f} s', file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Planner:
  """Predicts runs.

  Attributes:
    gpu: the kind of GPU.
    assumed: efficiencies and links.
    devices: simulated devices, as many as the largest topology has.
  """

  gpu: GpuTarget
  assumed: Assumptions
  devices: Sequence[Device]
  # (model, data, parameters) of the last run: most of its variants share them.
  _known: list[tuple[Model, DatasetConfig, Shapes]] = dataclasses.field(
    default_factory=list, compare=False, repr=False
  )

  @property
  def compiles(self) -> bool:
    """Whether `exactly` compiles for the GPU; else it splits the step for simulated devices."""
    return can_compile()

  @silent()  # it would name kernels of simulated devices
  def program(self, config: PlanConfig, topology: Topology) -> Program:
    """Returns the run on simulated devices.

    Raises:
      MeshError, ConfigError, ShapeError, ModelError: sizes that contradict each other, or a model
        in FP8 for a GPU without it (simulated devices emulate it).
    """
    check_devices(fp8_scaling_of(config.model), [self.gpu])
    devices = list(self.devices[: topology.num_devices])
    return build_program(config, topology=topology, devices=devices, params=self._params)

  def _params(self, config: StepConfig) -> Shapes:
    """Returns `initial_params`."""
    for model, dataset, found in self._known:
      if model is config.model and dataset == config.train_dataset_cfg:
        return found
    found = initial_params(config)
    self._known[:] = [(config.model, config.train_dataset_cfg, found)]
    return found

  def by_formula(self, config: PlanConfig, topology: Topology) -> Prediction:
    """Returns a prediction from formulas alone; errors as `program`.

    Formulas only read sizes, so the topology may have more GPUs than there are simulated devices.
    """
    enough = itertools.islice(itertools.cycle(self.devices), topology.num_devices)
    program = dataclasses.replace(self, devices=list(enough)).program(config, topology)
    return predict(program, config, gpu=self.gpu, assumed=self.assumed)

  def exactly(self, config: PlanConfig, topology: Topology) -> Prediction:
    """Returns a prediction from the compiled step, with progress; errors as `program`."""
    what = f'splitting the step over {topology.num_devices} simulated devices'
    if self.compiles:
      what = f'compiling the step for {topology.num_devices} x {self.gpu.device_kind}'
    with doing(what):
      return self.silently(config, topology)

  @silent()
  def silently(self, config: PlanConfig, topology: Topology) -> Prediction:
    """Returns the result of `exactly`, without showing progress."""
    of_plan = dict(gpu=self.gpu, assumed=self.assumed)
    if not self.compiles:
      program = self.program(config, topology)
      lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
      return predict(program, config, **of_plan, partitioned=partitioned_hlo(lowered))
    gpus = described_gpus(
      self.gpu.name, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
    )
    step = compile_step(config, gpus)
    return predict(step.program, config, **of_plan, compiled=step)
