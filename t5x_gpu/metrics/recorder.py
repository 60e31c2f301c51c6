"""Records the measurements of the training loop, in files and on the screen.

A step counts only when the devices have finished it.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Mapping
from typing import Optional, Self

import jax
import numpy as np

from t5x_gpu.metrics import logging_config, reduce
from t5x_gpu.metrics.goodput import Goodput
from t5x_gpu.metrics.loggers import open_loggers
from t5x_gpu.metrics.logging_config import LoggingConfig
from t5x_gpu.metrics.monitor import Monitor
from t5x_gpu.metrics.throughput import StepTimer
from t5x_gpu.metrics.writers import MultiWriter
from t5x_gpu.terminal.progress import ProgressLine

_log = logging.getLogger(__name__)


class Recorder(contextlib.ExitStack):
  """Keeps one step in flight, so that the devices are busy while numbers are read.

      with Recorder(model_dir, total_steps=100, ...) as recorder:
        for step in ...:
          with recorder.timer.input_wait(): ...
          state, sums = train_step(state, batch)
          recorder.dispatched(step, sums)
          if log: recorder.log(step)

  Args:
    model_dir: folder of the metric files. Removes records of an earlier attempt after `first_step`.
    total_steps, first_step: the last step of the run, and the step at which this process starts.
    tokens_per_step: tokens of the global batch, including padding.
    is_main: True on the one process that writes and prints.
    step_done: called with (step, sums as numbers) for every finished step.
    goodput: records the phases of the loop.
    loggers: destinations of the metrics.
    run_name: name for services; None for the last folder of `model_dir`.
    monitor: adds the speed per device and reports of other processes; None for neither.
  """

  def __init__(
    self,
    model_dir: str | os.PathLike,
    *,
    total_steps: int,
    first_step: int,
    tokens_per_step: int,
    is_main: bool,
    step_done: Callable[[int, reduce.Sums], None],
    goodput: Goodput,
    loggers: LoggingConfig = LoggingConfig(),
    run_name: Optional[str] = None,
    monitor: Optional[Monitor] = None,
  ):
    super().__init__()
    self.timer = StepTimer(
      total_steps, tokens_per_step=tokens_per_step, first_step=first_step, phase=self._phase
    )
    self._goodput = goodput
    self._model_dir = model_dir
    self._first_step = first_step
    self._is_main = is_main
    self._step_done = step_done
    self._loggers = loggers
    self._monitor = monitor
    self._run_name = run_name or os.path.basename(os.path.abspath(model_dir))
    shown = is_main and loggers.has(logging_config.TERMINAL)
    self._progress = ProgressLine(total_steps, first_step=first_step, enabled=shown)
    self.show = self._progress.part  # for work that the steps wait for
    self._writer = MultiWriter([])
    self._window = reduce.Accumulator()
    self._in_flight: Optional[tuple[int, reduce.Sums]] = None
    self._extra: dict[str, float] = {}

  def __enter__(self) -> Self:
    super().__enter__()
    if self._is_main:
      files, services = open_loggers(self._loggers, self._model_dir, run_name=self._run_name)
      self._writer = MultiWriter([*files, *services])
      self.push(self._close_writer)
      for service in services:
        self.enter_context(service)
      self._writer.truncate_after(self._first_step)
    if self._monitor:
      self.enter_context(self._monitor)
    self.enter_context(self._progress)
    self.enter_context(self._goodput.phase('productive'))
    self.timer.restart()
    return self

  def _phase(self, name: str) -> contextlib.AbstractContextManager[None]:
    # A wait for input costs nothing while the devices still work on the step in flight.
    is_free = self._is_busy if name == 'input_wait' else lambda: False
    return self._goodput.phase(name, unless=is_free)

  def _is_busy(self) -> bool:
    sums = self._in_flight[1] if self._in_flight else ()
    return not all(x.is_ready() for x in jax.tree.leaves(sums) if isinstance(x, jax.Array))

  def _close_writer(self, *error: object) -> None:
    try:
      self._writer.close()
    except OSError as e:  # all checkpoints are saved: the run has not failed
      _log.error('The last metrics may be lost: %s', e)

  def dispatched(self, step: int, sums: reduce.Sums) -> None:
    """Keeps the sums of a step that was just dispatched; finishes the previous one."""
    self.finish()
    self._in_flight = step, sums

  def finish(self) -> None:
    """Waits for the step in flight, if any, and counts it."""
    if self._in_flight is None:
      return
    step, sums = self._in_flight
    self._in_flight = None
    with self.timer.device_wait():
      jax.block_until_ready(sums)  # on all local devices: to_host fetches only one copy
      numbers = reduce.to_host(sums)
    self.timer.step_done()
    self._goodput.step_done(step)
    self._step_done(step, numbers)
    self._window.add(_counted(numbers))
    self._progress.advance(step)

  def add(self, values: Mapping[str, float]) -> None:
    """Adds numbers to the next record."""
    self._extra.update(values)

  def log(
    self, step: int, evaluation: Optional[Mapping[str, float]] = None, *, evaluated: str = ''
  ) -> None:
    """Writes one record: means since the last record, and an evaluation's metrics if given.

    Args:
      step: the last step.
      evaluation: metrics of an evaluation.
      evaluated: data of the evaluation, '18 rows', for the terminal.
    """
    self.finish()
    times = self.timer.window()
    values = {
      **self._window.means(prefix='train/').values,
      **times.metrics(prefix='train/'),
      **(self._monitor.window(step, times) if self._monitor else {}),
      **self._extra,
    }
    self._extra = {}
    self._window.reset()
    self._writer.write(step, {**values, **(evaluation or {})})
    if times.step_seconds is not None:  # None before the first step
      self._progress.update(step, values, eta_seconds=times.eta_seconds)
    if evaluation:
      self._progress.note(
        f'eval  step {step} | {evaluated}{" | " * bool(evaluated)}'
        + ' | '.join(
          f'{name.removeprefix("eval/")} {value:.4f}' for name, value in evaluation.items()
        )
      )


def _counted(numbers: reduce.Sums) -> reduce.Sums:
  """Returns the sums that count in means; for a skipped step, only the finite sums."""
  if not numbers.get('skipped', (0.0, 1.0))[0]:
    return numbers
  return {name: pair for name, pair in numbers.items() if np.all(np.isfinite(pair[0]))}
