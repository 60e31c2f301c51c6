"""Profiles that a run takes of itself, and their findings.

A trace starts before a step and ends after its last step, or before an evaluation. All processes
trace the steps of `PROFILE_STEPS`; process 0 keeps its trace and compares the others. Each process
writes to its own folder.
"""

import contextlib
import logging
import os
import pathlib
import shutil
import signal
import statistics
import tempfile
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Optional, Self

import jax

from t5x_gpu.analysis.profile.profile_config import ProfileConfig
from t5x_gpu.errors import first_line
from t5x_gpu.metrics.recorder import Recorder
from t5x_gpu.metrics.speed import model_speed
from t5x_gpu.metrics.throughput import PROFILED_PAUSES
from t5x_gpu.run.live import LiveRun
from t5x_gpu.run.profile_reader import ProfileReader, TraceRequest
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.coordination import coordination_store

_log = logging.getLogger(__name__)

FOLDER = 'profiles'
SIGNAL = signal.SIGUSR2
STEPS, PERIOD, SIGNALLED, SLOW = 'PROFILE_STEPS', 'period', SIGNAL.name, 'slow step'

_early: list[int] = []


def catch_early() -> None:
  """Remembers SIGUSR2 until the steps begin; otherwise the signal would end the process."""
  _early.clear()
  signal.signal(SIGNAL, lambda number, frame: _early.append(number))


class Profiler:
  """Takes traces. Use it as a context manager around the steps.

  Args:
    config: when to take traces.
    recorder: its timer measures the steps; it gets the metrics of a profile.
    folder: MODEL_DIR/profiles.
    reader: reads traces in a thread.
    ends_before: whether a step is followed by long work, which a trace must not include.
    first_step: number of steps taken before this process started.
  """

  def __init__(
    self,
    config: ProfileConfig,
    *,
    recorder: Recorder,
    folder: pathlib.Path,
    reader: ProfileReader,
    ends_before: Callable[[int], bool],
    first_step: int,
  ):
    self._config, self._recorder, self._folder = config, recorder, folder
    self._reader, self._ends_before, self._first_step = reader, ends_before, first_step
    self._request: Optional[TraceRequest] = None  # for the trace in progress
    self._last = 0  # last step of this trace
    self._signalled = bool(_early)
    self._slow_taken = self._broken = False
    self._previous: Any = None

  def __enter__(self) -> Self:
    self._previous = signal.signal(SIGNAL, self._on_signal)
    return self

  def __exit__(self, *exc_info: Any) -> None:
    signal.signal(SIGNAL, self._previous)
    if self._request is not None:  # the run ends during a trace
      self._stop(self._request.last_step, drain=exc_info[0] is None)
    self._reader.close()
    self._collect()

  def _on_signal(self, number: int, frame: Optional[FrameType]) -> None:
    del number, frame
    self._signalled = True

  @contextlib.contextmanager
  def step(self, step: int) -> Iterator[None]:
    """Context of one step; starts and ends traces that are due."""
    self._collect()
    if self._request is None:
      reason = self._due(step)
      if reason:
        self._start(step, reason)
    if self._request is None:
      yield
      return
    with jax.profiler.StepTraceAnnotation('train', step_num=step):
      yield
    if self._request is not None:
      self._request.last_step = step
      if step >= self._last or self._ends_before(step):
        self._stop(step, drain=True)

  def _due(self, step: int) -> str:
    """Returns the reason to begin a trace with `step`, or ''."""
    config = self._config
    if self._broken:
      return ''
    if config.steps is not None and step == max(config.steps[0], self._first_step + 1):
      if step <= config.steps[1]:
        return STEPS
    if self._signalled:
      self._signalled = False
      return SIGNALLED
    if config.period is not None and step % config.period == 0:
      return PERIOD
    if config.slow_factor is None or self._slow_taken:
      return ''
    self._slow_taken = self._recorder.timer.last_is_slow(config.slow_factor)
    return SLOW if self._slow_taken else ''

  def _start(self, step: int, reason: str) -> None:
    self._recorder.finish()
    is_main = distributed.is_main_process()
    kept = is_main or reason == SIGNALLED
    name = str(step) if is_main else f'{step}_process_{distributed.process_index()}'
    try:
      with self._recorder.timer.pause('profile'):
        folder = self._folder / name
        if kept:
          shutil.rmtree(folder, ignore_errors=True)  # left by an earlier start of this run
          folder.mkdir(parents=True)
        else:
          folder = pathlib.Path(tempfile.mkdtemp(prefix='t5x_gpu_profile_'))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # it would slow the steps down
        jax.profiler.start_trace(os.fspath(folder), profiler_options=options)
    except (OSError, RuntimeError, ValueError) as e:
      self._give_up(e)
      return
    self._last = self._config.steps[1] if reason == STEPS else step + self._config.num_steps - 1
    self._request = TraceRequest(
      folder=folder,
      kept=kept,
      first_step=step,
      last_step=self._last,
      reason=reason,
      of_all=reason in (STEPS, PERIOD),
      totals=dict(self._recorder.timer.totals),
    )
    self._reader.begins(self._request)

  def _stop(self, step: int, *, drain: bool) -> None:
    """Ends the trace after `step` and starts to read it."""
    request, self._request = self._request, None
    try:
      if drain:
        self._recorder.finish()
      with self._recorder.timer.pause('profile'):
        jax.profiler.stop_trace()
    except (OSError, RuntimeError, ValueError) as e:
      self._give_up(e)
      return
    timer, count = self._recorder.timer, step - request.first_step + 1
    before, request.totals = request.totals, dict(timer.totals)
    request.seconds_per_step = statistics.fmean(timer.recent_seconds[-count:] or [0.0])
    request.parts = {
      name: (request.totals.get(name, 0.0) - before.get(name, 0.0)) / count
      for name in ('input_wait', 'dispatch')
    } | {
      name: request.totals.get(name, 0.0) / max(1, step - self._first_step)
      for name in PROFILED_PAUSES
    }
    if drain:
      self._reader.read(request)

  def _collect(self) -> None:
    """Passes the numbers of finished profiles to the recorder."""
    for values in self._reader.finished():
      self._recorder.add(values)

  def _give_up(self, e: Exception) -> None:
    self._broken = True
    self._request = None
    _log.warning('No more profiles of this run: %s', first_line(e))


def open_profiler(live: LiveRun, recorder: Recorder) -> Profiler:
  """Returns the profiler of a run."""
  run, program = live.plan.run, live.plan.program
  devices = list(program.layout.mesh.devices.flat)
  files = live.checkpointer.files
  return Profiler(
    run.profile_cfg,
    recorder=recorder,
    folder=pathlib.Path(files.folder) / FOLDER,
    reader=ProfileReader(
      step_text=live.train_step.as_text,
      mesh_shape=dict(program.layout.mesh.shape),
      speed=model_speed(run.model, program.spec.shapes, devices),
      device=devices[0],
      num_devices=len(devices),
      shown=f'{str(run.model_dir).rstrip("/")}/{FOLDER}',
      store=coordination_store(),
    ),
    ends_before=live.data.evaluations.due,
    first_step=live.first_step,
  )
