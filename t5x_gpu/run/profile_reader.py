"""Reads the traces of a run in a thread: writes anatomy.json and prints the findings."""

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

from t5x_gpu.analysis.profile.anatomy import anatomy
from t5x_gpu.analysis.profile.anatomy_text import anatomy_text
from t5x_gpu.analysis.profile.program_ops import ProgramOps
from t5x_gpu.analysis.profile.trace import read_trace
from t5x_gpu.config.atomic_write import write_atomically
from t5x_gpu.errors import first_line
from t5x_gpu.metrics.speed import ModelSpeed
from t5x_gpu.metrics.throughput import PROFILED_PAUSES
from t5x_gpu.run.profile_ranks import ProfileRanks
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.coordination import Store
from t5x_gpu.runtime.main_log import log

_log = logging.getLogger(__name__)

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
    device: Any,
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

  def begins(self, request: TraceRequest) -> None:
    """Informs the other processes that a trace has begun."""
    first, last = request.first_step, request.last_step
    self._do(lambda: self._ranks.begins(first_step=first, last_step=last))

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

  def _facts(self, request: TraceRequest) -> dict[str, Any]:
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
