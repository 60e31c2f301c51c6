"""Finds the fastest way to compute a run on some GPUs: predicts all by formula, compiles the best.

    search(found, config, task, num_processes=2, compiles=True)
    found.best('bfloat16').variant

Compiled variants correct the formulas of related ones. The search of a precision ends when no other
variant promises a faster step, or after `limit` compiles.
"""

import concurrent.futures
import dataclasses
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Optional

import rich.console
import rich.progress

from t5x_gpu.planning.prediction import PlanConfig, Prediction
from t5x_gpu.planning.remedies import ALMOST, EQUAL
from t5x_gpu.planning.screen import seconds
from t5x_gpu.planning.search import workers
from t5x_gpu.planning.search.variants import (
  Variant,
  layouts,
  microbatches,
  precisions,
  with_overlap,
)
from t5x_gpu.planning.search.workers import Score, SearchTask
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.xla.gpu_targets import find_target

# Number of compiles for the run's own precision, and for each other precision.
LIMIT, LIMIT_OF_OTHERS = 8, 3
# Number compiled before the next are chosen; a constant, so that all machines choose the same.
_ROUND = 4


@dataclasses.dataclass
class SearchState:
  """The variants of a run, and their results so far.

  Attributes:
    scores: legal variants, predicted by formula.
    compiled: variant -> prediction from the compiled step.
    refused: variant -> why it does not compile.
    given: prediction of the run's own variant, or why it does not work.
    seconds: duration of the search.
    is_complete: whether the search ended by itself.
  """

  scores: list[Score] = dataclasses.field(default_factory=list)
  compiled: dict[Variant, Prediction] = dataclasses.field(default_factory=dict)
  refused: dict[Variant, str] = dataclasses.field(default_factory=dict)
  given: Optional[Prediction | str] = None
  seconds: float = 0.0
  is_complete: bool = False
  _ratios: dict[Any, list[float]] = dataclasses.field(default_factory=dict)

  def add(self, score: Score, outcome: Prediction | str) -> None:
    """Adds the result of compiling a variant: a prediction, or why it does not compile."""
    if isinstance(outcome, str):
      self.refused[score.variant] = outcome
      return
    self.compiled[score.variant] = outcome
    ratio = outcome.seconds_per_step / score.seconds
    for relatives in (score.family, score.variant.dtype):
      self._ratios.setdefault(relatives, []).append(ratio)

  def estimate(self, score: Score) -> float:
    """Returns seconds per step: as compiled, or by formula and corrected by compiled relatives.

    The correction is the family's average ratio of compiled to formula, else the precision's
    smallest.
    """
    if score.variant in self.compiled:
      return self.compiled[score.variant].seconds_per_step
    of_family = self._ratios.get(score.family)
    if of_family:
      return score.seconds * math.fsum(of_family) / len(of_family)
    return score.seconds * min(self._ratios.get(score.variant.dtype, [1.0]))

  def needed_bytes(self, score: Score) -> float:
    """Returns the memory that a GPU needs: as compiled, or by formula."""
    if score.variant in self.compiled:
      return self.compiled[score.variant].memory.needed_bytes
    return score.needed_bytes

  def fits(self, score: Score) -> bool:
    """Returns whether a variant fits; by formula if it was not compiled."""
    return score.variant not in self.refused and self.needed_bytes(score) <= score.pool_bytes

  def best(self, dtype: Optional[str]) -> Optional[Score]:
    """Returns the fastest variant that fits: among the compiled ones, if there are any."""
    fitting = [s for s in self.scores if s.variant.dtype == dtype and self.fits(s)]
    fitting = [s for s in fitting if s.variant in self.compiled] or fitting
    fastest = min(map(self.estimate, fitting), default=0.0)
    equal = [s for s in fitting if self.estimate(s) <= EQUAL * fastest]
    return min(equal, key=lambda s: (self.needed_bytes(s), self.estimate(s)), default=None)

  def next(self, dtype: Optional[str], number: int) -> list[Score]:
    """Returns variants that may be faster than the best, at most `number`, fastest first.

    From a family with compiled variants: all whose estimate is faster. From any other family: one,
    if it would be faster with every collective hidden.
    """
    best = self.best(dtype)
    limit = self.estimate(best) if best and best.variant in self.compiled else math.inf
    chosen: list[Score] = []
    for score in sorted(self.scores, key=lambda s: (self.estimate(s), s.needed_bytes)):
      if len(chosen) == number:
        break
      tried = score.variant in self.compiled or score.variant in self.refused
      if score.variant.dtype != dtype or tried:
        continue
      if score.needed_bytes > ALMOST * score.pool_bytes:
        continue
      is_known = score.family in self._ratios
      if (self.estimate(score) if is_known else score.least_seconds) >= limit:
        continue
      if is_known or score.family not in {c.family for c in chosen}:
        chosen.append(score)
    return chosen


def search(
  found: SearchState, config: PlanConfig, task: SearchTask, *, num_processes: int, compiles: bool
) -> None:
  """Fills `found`; after Ctrl-C it holds the results so far.

  Args:
    found: the search state to fill.
    config: the run.
    task: how a process gets the run, and the GPUs.
    num_processes: number of processes that predict at the same time.
    compiles: whether to compile; otherwise all predictions are by formula.
  Raises:
    ConfigError: a process was killed.
  """

  def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)

  begin = time.monotonic()
  own, *others = precisions(config, find_target(task.gpu))
  limits = {own: LIMIT, **dict.fromkeys(others, LIMIT_OF_OTHERS)} if compiles else {}
  with workers.processes(task, num_processes) as pool, _progress() as bar:
    given = pool.submit(workers.compiled, None) if compiles else None
    _score_all(found, config, task.topology, pool, bar)
    as_it_is = next((s for s in found.scores if s.variant.is_of(config, task.topology)), None)
    started = {given: as_it_is} if given and as_it_is else {}
    found.seconds = time.monotonic() - begin
    say(f'{len(found.scores):,} variants predicted by formula: {found.seconds:.0f} s')
    while chosen := [s for d, left in limits.items() for s in found.next(d, min(_ROUND, left))]:
      for score in chosen:
        limits[score.variant.dtype] -= 1
      futures = {pool.submit(workers.compiled, s.variant): s for s in chosen if s != as_it_is}
      _compile(found, futures | started, bar)
      started = {}
      found.seconds = time.monotonic() - begin
      best = [
        f'; the best{f" in {dtype}" if dtype else ""} takes {seconds(found.estimate(score))}'
        for dtype in limits
        if (score := found.best(dtype))
      ]
      say(f'{len(found.compiled)} variants compiled{"".join(best)}')
    if given:
      found.given = given.result()
  found.seconds, found.is_complete = time.monotonic() - begin, True


def _score_all(
  found: SearchState,
  config: PlanConfig,
  topology: Topology,
  pool: concurrent.futures.Executor,
  bar: rich.progress.Progress,
) -> None:
  tasks = [m for layout in layouts(config, topology) for m in microbatches(layout)]
  line = bar.add_task('predicting layouts by formula', total=len(tasks))
  for scores in pool.map(workers.scores, *zip(*tasks), chunksize=8):
    for score in scores:
      found.scores.append(score)
      if (other := with_overlap(score.variant)) is not None:
        family = (*score.family, 'overlap_layers')
        found.scores.append(dataclasses.replace(score, variant=other, family=family))
    bar.advance(line)
  bar.remove_task(line)


def _compile(
  found: SearchState,
  futures: Mapping[concurrent.futures.Future, Score],
  bar: rich.progress.Progress,
) -> None:
  line = bar.add_task(f'compiling: {len(found.compiled)} done', total=len(futures))
  for future in concurrent.futures.as_completed(futures):
    found.add(futures[future], future.result())
    bar.advance(line)
  bar.remove_task(line)


def _progress() -> rich.progress.Progress:
  console = rich.console.Console(stderr=True)
  return rich.progress.Progress(
    rich.progress.SpinnerColumn(),
    rich.progress.TextColumn('{task.description}'),
    rich.progress.BarColumn(),
    rich.progress.MofNCompleteColumn(),
    rich.progress.TimeElapsedColumn(),
    console=console,
    transient=True,
    disable=not console.is_terminal,
  )
