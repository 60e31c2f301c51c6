"""Finds the fastest way to compute a run on some GPUs: predicts all by formula, compiles the best.

    search(found, config, task, num_processes=2, compiles=True)
    found.best('bfloat16').variant

Compiled variants correct the formulas of related ones. The search of a precision ends when no
other variant promises a faster step (`SearchState.next`), or after `limit` compiles. A step without
a loop over its layers takes minutes to compile: the search compiles few of many such layers. It
predicts the best variant without its loop by formula alone.
`search_text` and `search_json` show the variants; `gin_text` gives the best one as a gin file, with
the reason for each choice.
"""

import concurrent.futures
import dataclasses
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Optional

import rich.console
import rich.progress

from t5x_gpu.models.model import config_of
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.terminal.console import show, table
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import PlanConfig, Setting
from t5x_gpu.tools.planning.remedies import ALMOST, EQUAL, layout_settings
from t5x_gpu.tools.planning.screen import seconds
from t5x_gpu.tools.planning.search import workers
from t5x_gpu.tools.planning.search.variants import Variant, layouts, microbatches, precisions
from t5x_gpu.tools.planning.search.workers import OVERLAPS, Compiled, Score, SearchTask

# Number of compiles for the run's own precision, and for each other precision.
LIMIT, LIMIT_OF_OTHERS = 6, 3
# On another mesh than the best's: a gain, with every collective hidden, below which no family is
# compiled whose estimate is slower.
WORTH = 1.02
# Number compiled before the next are chosen; a constant, so that all machines choose the same.
_ROUND = 3


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
  compiled: dict[Variant, Compiled] = dataclasses.field(default_factory=dict)
  refused: dict[Variant, str] = dataclasses.field(default_factory=dict)
  given: Optional[Compiled | str] = None
  seconds: float = 0.0
  is_complete: bool = False
  # family or precision -> ratios of compiled to formula; memory: (family, few layers) or precision
  _ratios: dict[object, list[float]] = dataclasses.field(default_factory=dict)
  _memory_ratios: dict[object, list[float]] = dataclasses.field(default_factory=dict)

  def add(self, score: Score, outcome: Compiled | str) -> None:
    """Adds the result of compiling a variant: a prediction, or why it does not compile."""
    if isinstance(outcome, str):
      self.refused[score.variant] = outcome
      return
    self.compiled[score.variant] = outcome
    ratio = outcome.needed_bytes / score.needed_bytes
    few_layers = bool(score.few_layers)
    for relatives in ((score.family, few_layers), *(() if few_layers else (score.variant.dtype,))):
      self._memory_ratios.setdefault(relatives, []).append(ratio)
    if outcome.fits:  # the time of a variant that is too large is void
      ratio = outcome.seconds / score.seconds
      for relatives in (score.family, score.variant.dtype):
        self._ratios.setdefault(relatives, []).append(ratio)

  def estimate(self, score: Score) -> float:
    """Returns seconds per step: as compiled, or by formula and corrected by compiled relatives.

    The correction is the average ratio of compiled to formula in the family, or in its twin with or
    without overlap_layers, else the precision's smallest.
    """
    if score.variant in self.compiled:
      return self.compiled[score.variant].seconds
    of_family = self._ratios.get(score.family) or self._ratios.get(_twin(score.family))
    if of_family:
      return score.seconds * math.fsum(of_family) / len(of_family)
    return score.seconds * min(self._ratios.get(score.variant.dtype, [1.0]))

  def needed_bytes(self, score: Score) -> float:
    """Returns the memory that a GPU needs: as compiled, or by formula and corrected.

    The correction is the largest ratio of compiled to formula in the family, else in its twin with
    or without overlap_layers: among variants without a loop over layers, or among the others. Else
    it is 1 without a loop, and the precision's smallest ratio with one.
    """
    if score.variant in self.compiled:
      return self.compiled[score.variant].needed_bytes
    for relatives in (score.family, _twin(score.family)):
      if ratios := self._memory_ratios.get((relatives, bool(score.few_layers))):
        return score.needed_bytes * max(ratios)
    if score.few_layers:
      return score.needed_bytes
    return score.needed_bytes * min(self._memory_ratios.get(score.variant.dtype, [1.0]))

  def fits(self, score: Score) -> bool:
    """Returns whether a variant fits; by `needed_bytes` if it was not compiled."""
    return score.variant not in self.refused and self.needed_bytes(score) <= score.pool_bytes

  def best(self, dtype: Optional[str]) -> Optional[Score]:
    """Returns the fastest variant that fits: among the compiled ones, if there are any.

    Never one without a loop over layers that was only predicted: it may take minutes to compile.
    """
    fitting = [s for s in self.scores if s.variant.dtype == dtype and self.fits(s)]
    fitting = [s for s in fitting if s.variant in self.compiled] or [
      s for s in fitting if s.variant.scan_unroll is None
    ]
    fastest = min(map(self.estimate, fitting), default=0.0)
    equal = [s for s in fitting if self.estimate(s) <= EQUAL * fastest]
    return min(equal, key=lambda s: (self.needed_bytes(s), self.estimate(s)), default=None)

  def next(self, dtype: Optional[str], number: int) -> list[Score]:
    """Returns variants that may be faster than the best, at most `number`, fastest first.

    From a family with compiled variants: all whose estimate is faster. From any other family: one,
    if its estimate is faster, or if it would be with every collective hidden, on another mesh by
    2%: families differ in what they hide, which the formula does not know. Of variants that differ
    only in overlap_layers, the variant with it comes first: it hides more of the same bytes. The
    other variant follows if the first is the best, or did not fit.
    """
    best = self.best(dtype)
    limit = self.estimate(best) if best and best.variant in self.compiled else math.inf
    chosen: list[Score] = []
    of_pair: dict[Variant, float] = {}
    for score in self.scores:
      plain = _without_overlap_layers(score.variant)
      of_pair[plain] = min(self.estimate(score), of_pair.get(plain, math.inf))
    for score in sorted(
      self.scores,
      key=lambda s: (
        of_pair[_without_overlap_layers(s.variant)],
        OVERLAPS not in s.family,
        s.needed_bytes,
      ),
    ):
      if len(chosen) == number:
        break
      tried = score.variant in self.compiled or score.variant in self.refused
      if score.variant.dtype != dtype or tried:
        continue
      # The first compiles may correct a formula that is a little too large; few layers never do.
      most = 1 if self.compiled or score.few_layers else ALMOST
      if self.needed_bytes(score) > most * score.pool_bytes:
        continue
      twin = _twin(score.family)
      if score.family in self._ratios:
        is_promising = self.estimate(score) < limit
      else:
        is_open = twin not in self._ratios or (best is not None and best.family == twin)
        gain = 1 if best is not None and score.mesh == best.mesh else WORTH
        is_faster = self.estimate(score) < limit or gain * score.least_seconds < limit
        is_promising = is_open and is_faster
        is_promising &= not any(c.family in (score.family, twin) for c in chosen)
      if is_promising:
        chosen.append(score)
    return chosen


def _without_overlap_layers(variant: Variant) -> Variant:
  layout = tuple((name, value) for name, value in variant.layout if name != OVERLAPS)
  return dataclasses.replace(variant, layout=layout)


def _twin(family: tuple[object, ...]) -> tuple[object, ...]:
  """Returns the family that differs in overlap_layers alone."""
  plain = tuple(property for property in family if property != OVERLAPS)
  return plain if plain != family else (*plain, OVERLAPS)


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
    given = pool.submit(workers.given) if compiles else None
    _score_all(found, config, task.topology, pool, bar)
    as_it_is = next((s for s in found.scores if s.variant.is_of(config, task.topology)), None)
    started = [(as_it_is, [given])] if given and as_it_is else []
    found.seconds = time.monotonic() - begin
    say(f'{len(found.scores):,} variants predicted by formula: {found.seconds:.0f} s')
    while chosen := [s for d, left in limits.items() for s in found.next(d, min(_ROUND, left))]:
      for score in chosen:
        limits[score.variant.dtype] -= 1
      _compile(found, [*started, *((s, _parts(pool, s)) for s in chosen if s != as_it_is)], bar)
      started = []
      found.seconds = time.monotonic() - begin
      best = [
        f'; the best{f" in {dtype}" if dtype else ""} takes {seconds(found.estimate(score))}'
        for dtype in limits
        if (score := found.best(dtype))
      ]
      say(f'{len(found.compiled)} variants compiled{"".join(best)}')
    found.scores += filter(None, pool.map(workers.without_loop, _best_of_each(found)))
    if given:
      found.given = given.result()
  found.seconds, found.is_complete = time.monotonic() - begin, True


def _best_of_each(found: SearchState) -> list[Score]:
  dtypes = dict.fromkeys(score.variant.dtype for score in found.scores)
  return [score for dtype in dtypes if (score := found.best(dtype))]


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
    found.scores += scores
    bar.advance(line)
  bar.remove_task(line)


# A variant, and what is compiled for it.
_Job = tuple[Score, Sequence[concurrent.futures.Future]]


def _parts(pool: concurrent.futures.Executor, score: Score) -> list[concurrent.futures.Future]:
  numbers = score.few_layers or (None,)
  return [pool.submit(workers.part, score.variant, number) for number in numbers]


def _compile(found: SearchState, jobs: Sequence[_Job], bar: rich.progress.Progress) -> None:
  """Adds the results of `jobs`, each once all its parts are there."""
  line = bar.add_task(f'compiling: {len(found.compiled)} done', total=len(jobs))
  job_of = {future: job for job in jobs for future in job[1]}
  for future in concurrent.futures.as_completed(job_of):
    score, parts = job_of[future]
    is_new = score.variant not in found.compiled and score.variant not in found.refused
    if is_new and all(part.done() for part in parts):
      found.add(score, workers.joined([part.result() for part in parts], score))
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


_ROWS, _OTHER_LAYOUTS = 8, 4
# Parameters of Partitioner that may differ between layouts with the same mesh.
_MORE = ('zero_stage', 'overlap_layers', 'accumulate_by', 'pipeline_schedule', 'pipeline_repeats')


def search_text(found: SearchState, gpus: str) -> str:
  """Returns the findings of a search, as a table and in sentences.

  Args:
    found: the result of a search.
    gpus: '64 x NVIDIA H200'.
  """
  layouts = len({s.variant.layout for s in found.scores})
  lines = [
    f'{len(found.scores):,} variants of this run on {gpus}: {layouts} layouts, with microbatches, '
    f'remat and precision. {len(found.compiled)} of them compiled; {found.seconds:,.0f} s.'
  ]
  if not found.is_complete:
    lines.append('The search was interrupted: others may be faster.')
  own = found.scores[0].variant.dtype
  lines.append(table([_HEAD, *(_row(found, s) for s in ranked(found, own))], right=_RIGHT))
  if isinstance(found.given, str):
    lines.append(f'The current run does not work on these GPUs: {found.given.splitlines()[0]}')
  best = found.best(own)
  if isinstance(found.given, Compiled):
    lines.append(_beside(found.given, best and found.estimate(best)))
  for dtype in dict.fromkeys(s.variant.dtype for s in found.scores):
    other = found.best(dtype) if dtype != own else None
    if other and best:
      faster = found.estimate(best) / found.estimate(other)
      lines.append(
        f"With PRECISION = '{dtype}' ({_words(other)}) a step takes "
        f'{screen.seconds(found.estimate(other))}, {faster:.2f}x as fast. It changes the numerics, '
        'so the search leaves this choice to you (docs/precision.md).'
      )
  return '\n'.join(lines)


def ranked(found: SearchState, dtype: Optional[str]) -> list[Score]:
  """Returns the best variant, then the fastest others that fit, compiled ones first."""
  fitting = [s for s in found.scores if s.variant.dtype == dtype and found.fits(s)]
  best = found.best(dtype)
  return sorted(
    fitting,
    key=lambda s: (
      s is not best,
      s.variant not in found.compiled,
      found.estimate(s),
      found.needed_bytes(s),
    ),
  )[:_ROWS]


_HEAD = ('layout', 'microbatches', 'remat_policy', 'loss_chunks', 's/step', 'per GPU', 'predicted')
_RIGHT = (1, 3, 4, 5)


def _row(found: SearchState, score: Score) -> tuple[str, ...]:
  v = score.variant
  return (
    _layout_words(score),
    str(v.num_microbatches),
    _remat_words(v) or '-',
    str(v.loss_chunks or '-'),
    screen.seconds(found.estimate(score)),
    show(found.needed_bytes(score)),
    _how(found, v),
  )


def _how(found: SearchState, variant: Variant) -> str:
  if variant not in found.compiled:
    return 'by formula'
  layers = found.compiled[variant].layers
  numbers = ' and '.join(map(str, layers))
  return f'from {numbers} layers' if layers else 'as compiled'


def _beside(given: Compiled, best: Optional[float]) -> str:
  needed = show(given.needed_bytes)
  if not given.fits:
    return f'The current run does not fit: {needed} of {show(given.pool_bytes)}.'
  factor = f', {given.seconds / best:.2f}x the best' if best else ''
  return f'The current run takes {screen.seconds(given.seconds)}{factor}, and {needed}.'


def _layout_words(score: Score) -> str:
  sizes = dict(score.variant.layout)
  mesh = ' x '.join(f'{axis} {size}' for axis, size in score.mesh) or 'one device'
  more = [f'{name}={sizes[name]}' for name in _MORE if name in sizes]
  if number := sizes.get('num_pipeline_microbatches'):
    more.append(f'{number} pipeline microbatches')
  return ', '.join([mesh, *more])


def _words(score: Score) -> str:
  v = score.variant
  parts = [_layout_words(score)]
  if v.num_microbatches > 1:
    parts.append(f'{v.num_microbatches} microbatches')
  if v.remat_policy:
    parts.append(f'remat {_remat_words(v)}')
  if v.loss_chunks:
    parts.append(f'{v.loss_chunks} loss chunks')
  return ', '.join(parts)


def _remat_words(variant: Variant) -> str:
  full = variant.full_remat_layers
  words = (variant.remat_policy or '') + (f' ({full} layers full)' if full else '')
  return words + (', no loop' if variant.scan_unroll else '')


_SCALED_RATE = (
  '# The number of replicas changes the learning rate: train.learning_rate_scaling is set.'
)


def gin_text(
  found: SearchState, best: Score, *, given: PlanConfig, gpus: str, files: Sequence[str]
) -> str:
  """Returns the best variant as a gin file, with the reason for each choice.

  Args:
    found: the result of a search.
    best: the variant to write.
    given: the run's own variant, whose layout is replaced.
    gpus: '64 x NVIDIA H200'.
    files: the gin files of the run.
  """
  v = best.variant
  wanted = v.applied(given).partitioner
  wanted = dataclasses.replace(wanted, num_partitions=wanted.num_partitions or 1)
  layout = _for_any_hosts(layout_settings(wanted, given.partitioner))
  faster = best.seconds / found.estimate(best)
  is_compiled = v in found.compiled
  speed = f', {best.tokens_per_second * faster:,.0f} tokens/s' if is_compiled else ''
  speed += f', MFU {best.mfu * faster:.1%}' if is_compiled and best.mfu else ''
  memory = f'{show(found.needed_bytes(best))} of {show(best.pool_bytes)} per GPU'
  lines = [
    f'# The fastest that `t5x_gpu.plan --search` found for {gpus}: {_words(best)}.',
    *(f'#   of {name}' for name in files),
    f'# {screen.seconds(found.estimate(best))} per step{speed}; {memory}, {_how(found, v)}.',
    '# Give this file as the last --gin_file. A size of -1 takes the GPUs that others leave.',
    *([_SCALED_RATE] if given.learning_rate_scaling else []),
    'from __gin__ import dynamic_registration',
    'from t5x_gpu import train as train_script',
    *(['from t5x_gpu.models import config'] if v.remat_policy else []),
    'from t5x_gpu.partitioning import partitioner',
    '',
    *_comment('Other layouts, a step', _other_layouts(found, best)),
    'partitioner.Partitioner:',
    *(f'  {name} = {value!r}' for name, value in layout.items()),
    '',
    *_comment('Other values, all else equal', _others(found, best, 'num_microbatches')),
    f'train_script.train.num_microbatches = {v.num_microbatches}',
  ]
  if v.remat_policy:
    lines += [
      '',
      *_comment('Other values, all else equal', _other_policies(found, best)),
      f'config.TransformerConfig.remat_policy = {v.remat_policy!r}',
    ]
  of_model = config_of(given.model)
  if of_model and v.full_remat_layers not in (None, of_model.full_remat_layers):
    lines.append(f'config.TransformerConfig.full_remat_layers = {v.full_remat_layers}')
  unrolled = _others(found, best, 'scan_unroll')
  lines += _comment(
    'No loop over layers (TransformerConfig.scan_unroll), slow to compile', unrolled
  )
  if v.loss_chunks:
    lines += [
      '',
      *_comment('Other values, all else equal', _others(found, best, 'loss_chunks')),
      f'config.TransformerConfig.loss_chunks = {v.loss_chunks}',
    ]
  return '\n'.join(lines) + '\n'


def _for_any_hosts(layout: Mapping[str, Setting]) -> dict[str, Setting]:
  """Returns `layout` with -1 for the axis that spans hosts.

  The result gives the same mesh on the searched GPUs, and also works on other numbers of hosts.
  """
  spans_hosts = next((axis for axis in ('data', 'fsdp') if layout.get(axis, 1) > 1), 'data')
  return {**layout, spans_hosts: -1}


def _other_layouts(found: SearchState, best: Score) -> Iterable[str]:
  """Yields the fastest variant of other meshes, and of this mesh with other parameters."""
  seen = set()
  fastest = sorted(_of_dtype(found, best), key=lambda s: (found.estimate(s), found.needed_bytes(s)))
  for score in fastest:
    if found.fits(score) and score.variant.layout != best.variant.layout and score.mesh not in seen:
      seen.add(score.mesh)
      yield _compared(found, best, score, _words(score))
    if len(seen) == _OTHER_LAYOUTS:
      return


def _others(found: SearchState, best: Score, name: str) -> Iterable[str]:
  """Yields variants that differ from the best in one setting alone."""
  for score in _near(found, best, name):
    yield _compared(found, best, score, repr(getattr(score.variant, name)))


def _other_policies(found: SearchState, best: Score) -> Iterable[str]:
  for score in _near(found, best, 'remat_policy', 'full_remat_layers'):
    yield _compared(found, best, score, _remat_words(score.variant))


def _near(found: SearchState, best: Score, *names: str) -> Sequence[Score]:
  """Returns variants that differ from the best in these settings alone, fastest first."""

  def rest(variant: Variant) -> Variant:
    return dataclasses.replace(variant, **dict.fromkeys(names))

  near = [s for s in _of_dtype(found, best) if rest(s.variant) == rest(best.variant)]
  return sorted((s for s in near if s is not best), key=found.estimate)


def _of_dtype(found: SearchState, best: Score) -> Sequence[Score]:
  return [s for s in found.scores if s.variant.dtype == best.variant.dtype]


def _compared(found: SearchState, best: Score, other: Score, words: str) -> str:
  needed = show(found.needed_bytes(other))
  if not found.fits(other):
    return f'{words}: {found.refused.get(other.variant) or f"does not fit, {needed}"}'
  seconds = found.estimate(other)
  how = '' if other.variant in found.compiled else ', by formula'
  change = seconds / found.estimate(best) - 1
  return f'{words}: {screen.seconds(seconds)} ({change:+.1%}{how}), {needed}'


def _comment(what: str, reasons: Iterable[str]) -> list[str]:
  lines = [f'#   {reason}' for reason in reasons]
  return [f'# {what}:', *lines] if lines else []


def search_json(found: SearchState) -> JsonObject:
  """Returns every variant that fits, the fastest first; seconds and bytes."""
  fitting = sorted((s for s in found.scores if found.fits(s)), key=found.estimate)
  return {
    'seconds': found.seconds,
    'is_complete': found.is_complete,
    'num_variants': len(found.scores),
    'num_compiled': len(found.compiled),
    'variants': [
      dataclasses.asdict(s.variant)
      | {
        'layout': dict(s.variant.layout),
        'seconds_per_step': found.estimate(s),
        'needed_bytes': found.needed_bytes(s),
        'is_compiled': s.variant in found.compiled,
        'compiled_layers': list(found.compiled[s.variant].layers)
        if s.variant in found.compiled
        else [],
      }
      for s in fitting
    ],
  }
