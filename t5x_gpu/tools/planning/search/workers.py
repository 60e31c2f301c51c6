"""Processes that predict the variants of a run: by formula, and by compiling with XLA."""

import concurrent.futures
import contextlib
import dataclasses
import gc
import itertools
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Optional

from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.models.model import config_of
from t5x_gpu.partitioning.layout import Layout as RunLayout
from t5x_gpu.runtime.hardware import host_limit
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.devices import simulated_devices
from t5x_gpu.tools.planning.formulas.step_shape import step_shape
from t5x_gpu.tools.planning.gpu_targets import GpuTarget, find_target
from t5x_gpu.tools.planning.prediction import PlanConfig, Planner, predict
from t5x_gpu.tools.planning.remat_costs import with_config
from t5x_gpu.tools.planning.remedies import EQUAL
from t5x_gpu.tools.planning.search.variants import (
  Layout,
  Variant,
  fewer_chunks,
  full_layers,
  policies,
  precisions,
  with_overlap,
)
from t5x_gpu.training.program import Program

# Memory of a process that compiles a large model.
_BYTES = 3 * 2**30

# In the families of variants with overlap_layers.
OVERLAPS = 'overlap_layers'

# Number of layers, and twice as many, that are compiled in place of all layers. Without a loop over
# its layers, a step with 32 of them takes 140 CPU seconds to compile; these two take 40.
_FEW = 2


@dataclasses.dataclass(frozen=True)
class Score:
  """A variant, predicted by formula.

  Attributes:
    variant: variant of the run.
    mesh: (axis, size) of the axes larger than 1.
    seconds: seconds per step.
    least_seconds: seconds per step if all collectives were hidden.
    needed_bytes, pool_bytes: memory that a GPU needs, and the part of its memory that XLA manages.
    family: properties shared by variants whose collectives XLA schedules alike.
    tokens_per_second, mfu: speed of all GPUs; model FLOPs utilization, 0 to 1.
    few_layers: numbers of layers to compile in place of all of them; () to compile all.
  """

  variant: Variant
  mesh: tuple[tuple[str, int], ...]
  seconds: float
  least_seconds: float
  needed_bytes: int
  pool_bytes: int
  family: tuple[object, ...]
  tokens_per_second: float
  mfu: Optional[float]
  few_layers: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A variant, predicted from the compiled step.

  Attributes:
    seconds: seconds per step.
    needed_bytes, pool_bytes: as in `Score`.
    layers: numbers of layers that were compiled in place of all of them; () if all were.
  """

  seconds: float
  needed_bytes: int
  pool_bytes: int
  layers: tuple[int, ...] = ()

  @property
  def fits(self) -> bool:
    return self.needed_bytes <= self.pool_bytes


@dataclasses.dataclass(frozen=True)
class CompiledPart:
  """A variant with few layers: seconds per step and bytes, compiled and by formula."""

  seconds: float
  needed_bytes: int
  formula_seconds: float
  formula_bytes: int


# What a compile gives: all layers, few of them, or why it failed.
Result = Compiled | CompiledPart | str


def joined(results: Sequence[Result], score: Score) -> Compiled | str:
  """Returns the prediction of a variant from what was compiled of it; or why that failed.

  With few layers, it starts from the most. Each further layer adds its seconds and bytes by
  formula, times the ratio of compiled to formula between the two. Few layers may need less memory
  than the loss, so memory is at least the formula's.

  Args:
    results: a finished prediction; or parts with `score.few_layers`, in this order.
    score: the variant, by formula.
  """
  for result in results:
    if not isinstance(result, CompiledPart):
      return result
  less, more = results
  slower = (more.seconds - less.seconds) / (more.formula_seconds - less.formula_seconds)
  larger = (more.needed_bytes - less.needed_bytes) / (more.formula_bytes - less.formula_bytes)
  needed_bytes = more.needed_bytes + (score.needed_bytes - more.formula_bytes) * larger
  return Compiled(
    more.seconds + (score.seconds - more.formula_seconds) * slower,
    max(int(needed_bytes), score.needed_bytes),
    score.pool_bytes,
    score.few_layers,
  )


@dataclasses.dataclass(frozen=True)
class SearchTask:
  """The input of a process.

  Attributes:
    configure: returns the run as configured by gin; importable, because each process calls it.
    gpu: name of the GPU.
    topology: hosts and GPUs.
    assumed: efficiencies and links, calibrated.
  """

  configure: Callable[[], tuple[PlanConfig, Assumptions]]
  gpu: str
  topology: Topology
  assumed: Assumptions


class Worker:
  """The run of a `SearchTask`, and its predictions."""

  def __init__(self, task: SearchTask) -> None:
    devices = simulated_devices(task.topology.num_devices)
    self.topology = task.topology
    self.planner = Planner(find_target(task.gpu), task.assumed, devices)
    self.config, _ = task.configure()

  def scores(self, layout: Layout, num_microbatches: int) -> list[Score]:
    """Returns a layout with and without overlap_layers, with every policy and precision.

    Returns [] if the run does not allow the layout.
    """
    plain = Variant(layout, num_microbatches)
    ahead = with_overlap(plain)
    return [*self._scores(plain), *(self._scores(ahead) if ahead else ())]

  def _scores(self, first: Variant) -> list[Score]:
    config, planner = self.config, self.planner
    try:
      program = planner.program(first.applied(config), self.topology)
    except UserError:
      return []
    found: list[Score] = []
    by_layer = program.layout.region.by_layer(first.num_microbatches)
    for dtype in precisions(config, planner.gpu):
      of_policies = [
        [*self._with_chunks(program, dataclasses.replace(variant, dtype=dtype))]
        for variant in _with_policies(config, first)
      ]
      found += itertools.chain(*of_policies)
      if program.layout.pipeline is None and not by_layer:
        found += self._with_full_layers(program, [plain for plain, *_ in of_policies])
    return found

  def _with_full_layers(self, program: Program, scores: Sequence[Score]) -> Iterator[Score]:
    """Yields policies that do not fit, with some layers under 'full'."""
    of_model = config_of(self.config.model)
    full = next((s for s in scores if s.variant.remat_policy == 'full'), None)
    if of_model is None or full is None:
      return
    for score in scores:
      for number in full_layers(
        of_model.num_layers, score.needed_bytes, full.needed_bytes, score.pool_bytes
      ):
        yield self._score(program, dataclasses.replace(score.variant, full_remat_layers=number))

  def _with_chunks(self, program: Program, variant: Variant) -> Iterator[Score]:
    """Yields `variant` as it is and, if it fits, with fewer chunks of the loss."""
    plain = self._score(program, variant)
    yield plain
    if plain.needed_bytes > plain.pool_bytes:
      return
    shape = step_shape(
      program,
      variant.applied(self.config).model,
      num_microbatches=variant.num_microbatches,
      gpu=self.planner.gpu,
    )
    for chunks in fewer_chunks(self.config, shape.loss_chunks):
      yield self._score(program, dataclasses.replace(variant, loss_chunks=chunks))

  def without_loop(self, score: Score) -> Optional[Score]:
    """Returns a variant without a loop over layers; None if that is impossible or not faster."""
    of_model = config_of(self.config.model)
    if of_model is None or of_model.scan_unroll is not None:
      return None
    program = self.planner.program(score.variant.applied(self.config), self.topology)
    layout = program.layout
    if layout.pipeline is not None or layout.region.by_layer(score.variant.num_microbatches):
      return None  # a stage's and a microbatch's layers run in a loop
    sizes = self.config.model.logical_sizes()
    layers = max(sizes.get(name, 0) for name in ('layers', 'encoder_layers'))
    variant = dataclasses.replace(score.variant, scan_unroll=layers)
    found = self._score(program, variant)
    return found if EQUAL * found.seconds < score.seconds else None

  def _score(self, program: Program, variant: Variant) -> Score:
    return self._scored(program, variant.applied(self.config), variant)

  def _scored(self, program: Program, config: PlanConfig, variant: Variant) -> Score:
    planner = self.planner
    p = predict(program, config, gpu=planner.gpu, assumed=planner.assumed)
    return Score(
      variant,
      tuple(p.mesh.items()),
      p.seconds_per_step,
      p.time.compute_seconds + p.time.bubble_seconds,
      p.memory.needed_bytes,
      p.memory.pool_bytes,
      _family(program.layout, variant),
      p.tokens_per_second,
      p.mfu,
      few_layers(program, config, planner.gpu) if planner.compiles else (),
    )

  def given(self) -> Compiled | str:
    """Returns the prediction of the current run, compiled; or why it does not compile."""
    try:
      program = self.planner.program(self.config, self.topology)
      score = self._scored(program, self.config, Variant(()))
    except UserError as e:
      return str(e)
    results: list[Result] = []
    for number in score.few_layers or (None,):
      results.append(self._part(self.config, number))
      if isinstance(results[-1], str):
        break
    return joined(results, score)

  def part(self, variant: Variant, num_layers: Optional[int]) -> Result:
    """Returns a compiled variant, or few layers of it; or why it does not compile.

    Args:
      variant: variant of the run.
      num_layers: number of layers; None for the run's number.
    """
    return self._part(variant.applied(self.config), num_layers)

  def _part(self, config: PlanConfig, num_layers: Optional[int]) -> Result:
    if num_layers is not None:
      unroll = None if config_of(config.model).scan_unroll is None else num_layers
      model = with_config(config.model, num_layers=num_layers, scan_unroll=unroll)
      config = dataclasses.replace(config, model=model)
    try:
      p = self.planner.silently(config, self.topology)
      if num_layers is None:
        return Compiled(p.seconds_per_step, p.memory.needed_bytes, p.memory.pool_bytes)
      f = self.planner.by_formula(config, self.topology)
    except UserError as e:
      return str(e) if num_layers is None else f'with {num_layers} layers: {e}'
    return CompiledPart(
      p.seconds_per_step, p.memory.needed_bytes, f.seconds_per_step, f.memory.needed_bytes
    )


def few_layers(program: Program, config: PlanConfig, gpu: GpuTarget) -> tuple[int, ...]:
  """Returns numbers of layers to compile in place of many that run without a loop; otherwise ()."""
  of_model = config_of(config.model)
  if of_model is None or of_model.full_remat_layers or program.layout.pipeline is not None:
    return ()
  if 'encoder_layers' in config.model.logical_sizes():
    return ()  # the encoder's number of layers is its own
  kinds = math.lcm(len(of_model.windows), len(of_model.ropes) or 1)
  least = math.ceil(_FEW / kinds) * kinds
  shape = step_shape(program, config.model, num_microbatches=config.num_microbatches, gpu=gpu)
  if any(stack.has_loop or stack.num_layers < 8 * least for stack in shape.stacks):
    return ()
  return least, 2 * least


def _with_policies(config: PlanConfig, variant: Variant) -> Iterator[Variant]:
  for policy in policies(config, variant.layout, variant.num_microbatches):
    full = None if policy is None else 0
    yield dataclasses.replace(variant, remat_policy=policy, full_remat_layers=full)


def _family(layout: RunLayout, variant: Variant) -> tuple[object, ...]:
  sizes = layout.sizes
  axes = tuple((axis, sizes.crosses_hosts(axis)) for axis, n in sizes.total.items() if n > 1)
  accumulates = layout.accumulate_by if variant.num_microbatches > 1 else ''
  overlaps = (OVERLAPS,) if OVERLAPS in dict(variant.layout) else ()
  return axes, layout.zero_stage, accumulates, variant.dtype, *overlaps


_worker: Optional[Worker] = None


def _start(task: SearchTask) -> None:
  global _worker
  # Ctrl-C in a terminal reaches all processes. The main process ends the others; if they ended by
  # themselves, it might notice that first, and say that memory ran out.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  _worker = Worker(task)
  gc.freeze()  # every later collection skips the modules
  gc.set_threshold(100_000, 50, 10)  # traces and parsed programs are objects by the million


def scores(layout: Layout, num_microbatches: int) -> list[Score]:
  """Calls `Worker.scores` of the process."""
  return _worker.scores(layout, num_microbatches)


def without_loop(score: Score) -> Optional[Score]:
  """Calls `Worker.without_loop` of the process."""
  return _worker.without_loop(score)


def given() -> Compiled | str:
  """Calls `Worker.given` of the process."""
  return _worker.given()


def part(variant: Variant, num_layers: Optional[int]) -> Result:
  """Calls `Worker.part` of the process."""
  return _worker.part(variant, num_layers)


def default_number() -> int:
  """Returns how many processes this machine has cores and memory for."""
  cores, memory = len(os.sched_getaffinity(0)), host_limit()
  return max(1, min(cores, memory.bytes // _BYTES if memory else 1))


@contextlib.contextmanager
def processes(task: SearchTask, number: int) -> Iterator[concurrent.futures.Executor]:
  """Context with processes that compute `scores` and `part`; ends them in any case.

  Raises:
    ConfigError: a process was killed.
  """
  pool = concurrent.futures.ProcessPoolExecutor(
    number, multiprocessing.get_context('spawn'), _start, (task,)
  )
  try:
    yield pool
  except concurrent.futures.process.BrokenProcessPool as e:
    raise ConfigError(
      f'One of the {number} processes of the search was killed, probably because memory ran out.',
      fix=f'--search_processes={max(number // 2, 1)} needs less memory.',
      docs='plan.md#search',
    ) from e
  finally:
    for process in multiprocessing.active_children():
      process.terminate()
    pool.shutdown(cancel_futures=True)
