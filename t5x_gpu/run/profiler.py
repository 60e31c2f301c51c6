"""Profiles that a run takes of itself, and their findings.

A trace starts before a step and ends after its last step, or before an evaluation. All processes
trace the steps of `PROFILE_STEPS`, each into its own folder; process 0 keeps its trace and compares
the device times of all (`ProfileRanks`). A thread, `ProfileReader`, reads the traces and prints the
findings (`anatomy_text`).
"""

import collections
import contextlib
import dataclasses
import datetime
import functools
import json
import logging
import os
import pathlib
import queue
import shlex
import shutil
import signal
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Optional, Self

import jax

from t5x_gpu.compiled.trace import DeviceTime, ProgramOps, anatomy, read_trace
from t5x_gpu.errors import first_line
from t5x_gpu.metrics.monitor import ModelSpeed, model_speed
from t5x_gpu.metrics.recorder import Recorder
from t5x_gpu.metrics.throughput import PROFILED_PAUSES, pauses_that_took_time
from t5x_gpu.run.live import LiveRun
from t5x_gpu.run.profile_config import ProfileConfig
from t5x_gpu.runtime import distributed, process_exit
from t5x_gpu.runtime.cluster.coordination import Store, coordination_store, within
from t5x_gpu.runtime.main_log import log
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.json_schema import Json, JsonObject

_log = logging.getLogger(__name__)

_SHOWN = 8
_LONGEST = 70  # characters of a place in the model
_PARTS = (
  ('compute', 'compute'),
  ('exposed_communication', 'exposed communication'),
  ('idle', 'idle'),
  ('input_wait', 'input wait'),
  ('dispatch', 'dispatch'),
)


def anatomy_text(anatomy: Json, *, where: str) -> str:
  """Returns the contents of anatomy.json, on one screen.

  Args:
    anatomy: contents of anatomy.json.
    where: the folder of the profile, as the user wrote it.
  """
  step = anatomy['seconds_per_step']
  lines = [
    f'profile of steps {anatomy["first_step"]}-{anatomy["last_step"]} ({anatomy["reason"]}): '
    f'{step:.4g} s per step on {anatomy["num_devices"]} x {anatomy["device_kind"]}',
    '  ' + ', '.join(f'{text} {_percent(anatomy["parts"][name], step)}' for name, text in _PARTS),
  ]
  pauses = pauses_that_took_time(anatomy['parts'])
  if pauses:
    shares = ', '.join(f'{text} {_percent(seconds, step)}' for text, seconds in pauses.items())
    lines.append(f'  between steps, on average since the start: {shares} of a step')
  lines += [
    f'  {_speed(anatomy)}',
    '  longest operations (ms per step and device, share of the step):',
  ]
  for o in anatomy['operations'][:_SHOWN]:
    place = f'  {_short(o["op_name"])}' if o['op_name'] else ''
    lines.append(
      f'    {1e3 * o["seconds"]:9.3f}  {o["share"]:6.1%}  {o["name"]} ({o["kind"]}){place}'
    )
  if anatomy['collectives']:
    lines.append('  collectives (ms and MB sent per step and device):')
  for c in anatomy['collectives'][:_SHOWN]:
    speed = '' if c['gb_per_second'] is None else f'  {c["gb_per_second"]:.3g} GB/s'
    over = f' over {" + ".join(c["axes"])}' if c['axes'] else ''
    lines.append(
      f'    {1e3 * c["seconds"]:9.3f}  {c["bytes"] / 1e6:8.2f}  {c["kind"]}{over}{speed}'
    )
  if len(anatomy['ranks']) > 1:
    last = max(anatomy['ranks'], key=lambda r: r['compute'])
    lines.append(
      f'  process {last["rank"]} on {last["host"]} computes longest: {last["compute"]:.4f} s'
    )
  command = f'tensorboard --logdir {shlex.quote(str(where))}'
  lines.append(f'  {where}: anatomy.json; trace for Perfetto and `{command}`')
  return '\n'.join(lines)


def _percent(seconds: float, step: float) -> str:
  return f'{seconds / step:.1%}' if step else '-'


def _speed(anatomy: Json) -> str:
  mfu = '' if anatomy['mfu'] is None else f', MFU {anatomy["mfu"]:.1%}'
  return (
    f'{anatomy["tokens_per_second_per_device"]:,.0f} tokens/s and '
    f'{anatomy["tflops_per_second_per_device"]:.4g} TFLOP/s per device{mfu}'
  )


def _short(op_name: str) -> str:
  """Returns the last parts of a path in the traced program."""
  parts = op_name.split('/')
  short = op_name if len(parts) <= 4 else '.../' + '/'.join(parts[-4:])
  return short if len(short) <= _LONGEST else '...' + short[-_LONGEST:]


# A process announces its trace when it begins and publishes the device time when it ends, so
# process 0 knows which processes to wait for. A signal reaches processes at steps that differ by
# one or two; traces that overlap count as one profile.
_KEY = 't5x_gpu_monitor/profiles'
_ASK_SECONDS = 3.0
_WAIT_SECONDS = 30.0


class ProfileRanks:
  """Exchanges device times.

  Args:
    store: store that all processes share; None for a single process.
  """

  def __init__(self, store: Optional[Store]):
    self._store = store
    self._rank = distributed.process_index()
    self._own = {'rank': self._rank, 'host': socket.gethostname()}

  def announce(self, *, first_step: int, last_step: int) -> None:
    """Announces that this process takes a trace of these steps."""
    self._publish(first_step, last_step, None)

  def collect(
    self, *, first_step: int, last_step: int, time_of_devices: DeviceTime, of_all: bool
  ) -> list[JsonObject]:
    """Returns rank, host and device time: of every process on process 0, of this process elsewhere.

    Args:
      first_step, last_step: steps of this process's trace.
      time_of_devices: device time of this process.
      of_all: whether every process takes this trace; otherwise only processes that announced one
        do.
    """
    times = dataclasses.asdict(time_of_devices)
    self._publish(first_step, last_step, times)
    own = {**self._own, **times}
    if self._store is None or self._rank:
      return [own]
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
      found = self._overlapping(first_step, last_step)
      known = {r: trace['device_time'] for r, trace in found.items() if trace['device_time']}
      known[self._rank] = own
      wanted = distributed.process_count() if of_all else len({*found, self._rank})
      if len(known) >= wanted or time.monotonic() > deadline:
        return [known[rank] for rank in sorted(known)]
      time.sleep(0.2)

  def _publish(self, first: int, last: int, times: Optional[Mapping[str, float]]) -> None:
    if self._store is None:
      return
    content = {'first_step': first, 'last_step': last, 'device_time': times and self._own | times}
    within(
      _ASK_SECONDS,
      lambda: self._store.key_value_set(
        f'{_KEY}/{self._rank}/{first}', json.dumps(content), allow_overwrite=True
      ),
    )

  def _overlapping(self, first: int, last: int) -> dict[int, JsonObject]:
    """Returns rank -> published contents of its latest trace that overlaps these steps."""
    pairs = within(_ASK_SECONDS, lambda: self._store.key_value_dir_get(_KEY)) or []
    found = {}
    for key, text in pairs:
      trace = json.loads(text)
      rank = int(key.split('/')[-2])
      if trace['first_step'] <= last and trace['last_step'] >= first:
        if rank not in found or trace['first_step'] > found[rank]['first_step']:
          found[rank] = trace
    return found


FILE = 'anatomy.json'
_CLOSE_SECONDS = 120.0
MODULE = 'jit_train_step'


@dataclasses.dataclass
class TraceRequest:
  """A trace to read.

  Attributes:
    folder: folder of the trace.
    kept: whether to keep the trace after reading it.
    first_step, last_step, reason: traced steps, and why; until the trace ends, `last_step` is the
      planned last step.
    of_all: whether all processes take the trace.
    totals: seconds of this process by name.
    seconds_per_step: mean duration of the traced steps.
    parts: seconds per step by name, as the host measured them.
  """

  folder: pathlib.Path
  kept: bool
  first_step: int
  last_step: int
  reason: str
  of_all: bool
  totals: Mapping[str, float]
  seconds_per_step: float = 0.0
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class ProfileReader:
  """Reads traces one after the other; warns about a trace that it cannot read.

  Args:
    step_text: returns the compiled step as HLO text.
    mesh_shape: mesh axis -> size.
    speed: cost of a step.
    device: one of the devices, for its kind.
    num_devices: devices of the run.
    shown: MODEL_DIR/profiles as the user wrote it.
    store: store that all processes share; None for a single process.
  """

  def __init__(
    self,
    *,
    step_text: Callable[[], str],
    mesh_shape: Mapping[str, int],
    speed: ModelSpeed,
    device: jax.Device,
    num_devices: int,
    shown: str,
    store: Optional[Store],
  ):
    self._ops = functools.cache(lambda: ProgramOps(step_text(), mesh_shape))
    self._speed, self._device, self._num_devices = speed, device, num_devices
    self._shown, self._ranks = shown, ProfileRanks(store)
    self._queue: queue.SimpleQueue[Optional[Callable[[], None]]] = queue.SimpleQueue()
    self._finished: collections.deque[dict[str, float]] = collections.deque()
    self._thread: Optional[threading.Thread] = None

  def announce(self, request: TraceRequest) -> None:
    """Informs the other processes that a trace has begun."""
    first, last = request.first_step, request.last_step
    self._do(lambda: self._ranks.announce(first_step=first, last_step=last))

  def read(self, request: TraceRequest) -> None:
    """Starts to read a trace."""
    self._do(lambda: self._read_or_warn(request))

  def _do(self, work: Callable[[], None]) -> None:
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name='profiles', daemon=True)
      self._thread.start()
    self._queue.put(work)

  def finished(self) -> Iterator[dict[str, float]]:
    """Yields the metrics of each trace that has been read since the last call."""
    while self._finished:
      yield self._finished.popleft()

  def close(self) -> None:
    """Waits until all traces are read."""
    self._queue.put(None)
    if self._thread is not None:
      self._thread.join(_CLOSE_SECONDS)

  def _work(self) -> None:
    while (work := self._queue.get()) is not None:
      work()

  def _read_or_warn(self, request: TraceRequest) -> None:
    try:
      self._read(request)
    except Exception as e:  # a failed profile must not end the run
      _log.warning('The profile of step %d cannot be read: %s', request.first_step, first_line(e))
    finally:
      if not request.kept:
        shutil.rmtree(request.folder, ignore_errors=True)

  def _read(self, request: TraceRequest) -> None:
    found = anatomy(
      read_trace(request.folder, module=MODULE),
      self._ops(),
      num_steps=request.last_step - request.first_step + 1,
      seconds_per_step=request.seconds_per_step,
    )
    ranks = self._ranks.collect(
      first_step=request.first_step,
      last_step=request.last_step,
      time_of_devices=found.device_time,
      of_all=request.of_all,
    )
    if not request.kept:
      return
    content = found.to_json(parts=request.parts, facts=self._facts(request), ranks=ranks)
    write_atomically(request.folder / FILE, json.dumps(content, indent=1) + '\n')
    log(anatomy_text(content, where=f'{self._shown}/{request.folder.name}'))
    step = request.seconds_per_step
    if step:
      self._finished.append(
        {
          f'anatomy/{name}_fraction': seconds / step
          for name, seconds in content['parts'].items()
          if seconds > 0 or name not in PROFILED_PAUSES
        }
      )

  def _facts(self, request: TraceRequest) -> JsonObject:
    step = request.seconds_per_step
    return {
      'first_step': request.first_step,
      'last_step': request.last_step,
      'reason': request.reason,
      'written': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'platform': self._device.platform,
      'device_kind': self._device.device_kind,
      'num_devices': self._num_devices,
      'host': socket.gethostname(),
      'process_index': distributed.process_index(),
      'num_processes': distributed.process_count(),
      'tokens_per_second_per_device': self._speed.tokens / step if step else 0.0,
      'tflops_per_second_per_device': self._speed.tflops_per_second(step) if step else 0.0,
      'mfu': self._speed.mfu(step) if step else None,
    }


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
    self._previous: process_exit.SignalHandler = None

  def __enter__(self) -> Self:
    self._previous = signal.signal(SIGNAL, self._on_signal)
    return self

  def __exit__(self, *exc_info: object) -> None:
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
    self._reader.announce(self._request)

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
