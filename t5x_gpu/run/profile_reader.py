"""Reads the traces of a run in a thread: writes anatomy.json and prints what it says."""

import collections
import dataclasses
import datetime
import functools
import json
import logging
import pathlib
import queue
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

from t5x_gpu.analysis.profile.anatomy import Anatomy, anatomy
from t5x_gpu.analysis.profile.anatomy_text import anatomy_text
from t5x_gpu.analysis.profile.program_ops import ProgramOps
from t5x_gpu.analysis.profile.trace import read_trace
from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.errors import first_line
from t5x_gpu.metrics.speed import ModelSpeed
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.coordination import Store, within
from t5x_gpu.runtime.main_log import log

_log = logging.getLogger(__name__)

FILE = 'anatomy.json'
_KEY = 't5x_gpu_monitor/profiles'
_ASK_SECONDS = 3.0
_RANKS_SECONDS = 30.0  # for the profiles of other processes
_CLOSE_SECONDS = 120.0
MODULE = 'jit_train_step'


@dataclasses.dataclass
class Request:
  """A trace to read.

  Attributes:
    folder: of the trace.
    kept: whether it stays.
    first_step, last_step, reason: of the trace.
    totals: seconds of this process by name.
    seconds_per_step: of the traced steps.
    parts: seconds per step by name, as the host measured them.
  """

  folder: pathlib.Path
  kept: bool
  first_step: int
  last_step: int
  reason: str
  totals: Mapping[str, float]
  seconds_per_step: float = 0.0
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)


class ProfileReader:
  """Reads traces one after the other; a trace that cannot be read costs a warning.

  Args:
    step_text: returns the compiled step as HLO text.
    mesh_shape: mesh axis -> size.
    speed: what a step costs.
    device: one of them, for its kind.
    num_devices: of the run.
    shown: MODEL_DIR/profiles as the user wrote it.
    store: that all processes share; None for a single process.
  """

  def __init__(
    self,
    *,
    step_text: Callable[[], str],
    mesh_shape: Mapping[str, int],
    speed: ModelSpeed,
    device: Any,
    num_devices: int,
    shown: str,
    store: Optional[Store],
  ):
    self._ops = functools.cache(lambda: ProgramOps(step_text(), mesh_shape))
    self._speed, self._device, self._num_devices = speed, device, num_devices
    self._shown, self._store = shown, store
    self._requests: queue.SimpleQueue[Optional[Request]] = queue.SimpleQueue()
    self._finished: collections.deque[dict[str, float]] = collections.deque()
    self._thread: Optional[threading.Thread] = None

  def read(self, request: Request) -> None:
    """Starts to read a trace."""
    if self._thread is None:
      self._thread = threading.Thread(target=self._work, name='profiles', daemon=True)
      self._thread.start()
    self._requests.put(request)

  def finished(self) -> Iterator[dict[str, float]]:
    """Yields the metrics of each trace that has been read since the last call."""
    while self._finished:
      yield self._finished.popleft()

  def close(self) -> None:
    """Waits until all traces are read."""
    self._requests.put(None)
    if self._thread is not None:
      self._thread.join(_CLOSE_SECONDS)

  def _work(self) -> None:
    while (request := self._requests.get()) is not None:
      try:
        self._read(request)
      except Exception as e:  # the run is worth more than its profile
        _log.warning('The profile of step %d cannot be read: %s', request.first_step, first_line(e))
      finally:
        if not request.kept:
          shutil.rmtree(request.folder, ignore_errors=True)

  def _read(self, request: Request) -> None:
    found = anatomy(
      read_trace(request.folder, module=MODULE),
      self._ops(),
      num_steps=request.last_step - request.first_step + 1,
      seconds_per_step=request.seconds_per_step,
    )
    ranks = self._ranks(request, found)
    if not request.kept:
      return
    content = found.to_json(parts=request.parts, facts=self._facts(request), ranks=ranks)
    with atomic_write(request.folder / FILE) as new:
      new.write_text(json.dumps(content, indent=1) + '\n')
    log(anatomy_text(content, where=f'{self._shown}/{request.folder.name}'))
    step = request.seconds_per_step
    if step:
      self._finished.append(
        {
          f'anatomy/{name}_fraction': seconds / step
          for name, seconds in content['parts'].items()
          if name not in ('save', 'eval')
        }
      )

  def _facts(self, request: Request) -> dict[str, Any]:
    step = request.seconds_per_step
    return {
      'first_step': request.first_step,
      'last_step': request.last_step,
      'reason': request.reason,
      'written': datetime.datetime.now(datetime.UTC).isoformat(timespec='seconds'),
      'platform': self._device.platform,
      'device_kind': self._device.device_kind,
      'num_devices': self._num_devices,
      'process_index': distributed.process_index(),
      'num_processes': distributed.process_count(),
      'tokens_per_second_per_device': self._speed.tokens / step if step else 0.0,
      'tflops_per_second_per_device': self._speed.tflops_per_second(step) if step else 0.0,
      'mfu': self._speed.mfu(step) if step else None,
    }

  def _ranks(self, request: Request, found: Anatomy) -> list[dict[str, Any]]:
    """Publishes this process's device time; returns those of all processes on process 0."""
    rank = distributed.process_index()
    own = {'rank': rank, 'host': socket.gethostname(), **dataclasses.asdict(found.device_time)}
    if self._store is None:
      return [own]
    key = f'{_KEY}/{request.first_step}'
    text = json.dumps(own)
    within(
      _ASK_SECONDS, lambda: self._store.key_value_set(f'{key}/{rank}', text, allow_overwrite=True)
    )
    if rank:
      return [own]
    deadline = time.monotonic() + _RANKS_SECONDS
    while True:
      pairs = within(_ASK_SECONDS, lambda: self._store.key_value_dir_get(key)) or []
      ranks = sorted((json.loads(text) for _, text in pairs), key=lambda r: r['rank'])
      if len(ranks) >= distributed.process_count() or time.monotonic() > deadline:
        return ranks or [own]
      time.sleep(0.2)
