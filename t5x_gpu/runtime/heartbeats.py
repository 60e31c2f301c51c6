"""What each process of a run reports every second, and which process is behind.

    heartbeats:
      process 2 on gpu-07 (pid 4711): step 41, phase 'step' for 301 s, in my_data.py:27 (__next__)
      process 0 on gpu-06 (pid 812): step 41, phase 'step' for 301 s, waits in reduce.py:48 (...)
    Behind the others: process 2 on gpu-07 (pid 4711).

When one process is stuck after a step, all report the same step. The stuck one differs in where its
main thread is: in Python, while the others wait inside JAX for the devices.
"""

import dataclasses
import json
import os
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Optional, Self

import jax
import jaxlib

from t5x_gpu.errors import listed

SHOWN = 32  # processes in a report; in a run of thousands, every process prints a report
# Errors of a collective whose other end is gone, bare or wrapped, without names.
_BROKEN = re.compile(
  '(jax|xla)runtimeerror:.*(gloo|nccl|connection (closed|reset|refused)|broken pipe|'
  'socket closed|coordination|barrier|deadline_exceeded|unavailable)',
  re.IGNORECASE | re.DOTALL,
)
_LIBRARIES = tuple(os.path.dirname(module.__file__) + os.sep for module in (jax, jaxlib))


@dataclasses.dataclass(frozen=True)
class Beat:
  """One heartbeat.

  Attributes:
    rank: process index.
    host, pid: host and process id.
    count: number of this heartbeat.
    step: the last finished step.
    phase: the current phase, which began `seconds` ago.
    where: file, line and function of the main thread.
    waits: whether the main thread is inside JAX: it waits for devices, so for other processes.
    broken: whether one of its collectives failed because another process is gone.
    left: whether this is the process's last heartbeat.
  """

  rank: int
  host: str
  pid: int
  count: int
  step: int
  phase: str
  seconds: float
  where: str
  waits: bool
  broken: bool = False
  left: bool = False

  @classmethod
  def now(cls, *, thread: int, **values: object) -> Self:
    """Returns a heartbeat of this process, with the place of its `thread`."""
    where, waits = place(thread)
    return cls(host=socket.gethostname(), pid=os.getpid(), where=where, waits=waits, **values)

  @property
  def state(self) -> str:
    if self.broken:
      return 'has lost a connection to another process'
    return f'{"waits in" if self.waits else "in"} {self.where}'

  @classmethod
  def from_json(cls, text: str) -> Self:
    return cls(**json.loads(text))

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self))

  @property
  def name(self) -> str:
    return f'process {self.rank} on {self.host} (pid {self.pid})'

  @property
  def last_seen(self) -> str:
    return f'{self.name}, last seen at step {self.step} in phase {self.phase!r}'


def place(thread: int) -> tuple[str, bool]:
  """Returns a thread's place outside JAX, 'file.py:27 (function)', and whether it is inside JAX."""
  frame = sys._current_frames().get(thread)
  inside = bool(frame) and frame.f_code.co_filename.startswith(_LIBRARIES)
  while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
    frame = frame.f_back
  if frame is None:
    return 'nowhere', inside
  code = frame.f_code
  return f'{os.path.basename(code.co_filename)}:{frame.f_lineno} ({code.co_name})', inside


def error_text(error: Optional[BaseException]) -> str:
  """Returns 'ValueError: message'."""
  return f'{type(error).__name__}: {error}'.rstrip(': ')


def is_broken(error: Optional[BaseException]) -> bool:
  """Returns whether a collective failed because its other end is gone."""
  return bool(_BROKEN.search(error_text(error)))


def behind(beats: Sequence[Beat]) -> list[Beat]:
  """Returns the processes that the others wait for; [] if unknown."""
  least = min((beat.step for beat in beats), default=0)
  late = [beat for beat in beats if beat.step == least]
  late = [beat for beat in late if not (beat.waits or beat.broken)] or late
  return late if len(late) < len(beats) else []


def table(beats: Mapping[int, Beat], *, process_count: int) -> str:
  """Returns a line per process, those behind first, then a list of the processes behind.

  Args:
    beats: the last heartbeat of each process.
    process_count: number of processes in the run.
  """
  late = behind(list(beats.values()))
  order = late + [beat for _, beat in sorted(beats.items()) if beat not in late]
  text = '{0.name}: step {0.step}, phase {0.phase!r} for {0.seconds:.0f} s, {0.state}'
  lines = [f'  {line}' for line in listed([text.format(beat) for beat in order], SHOWN)]
  if late:
    names = listed([beat.name for beat in late], SHOWN)
    lines.append(f'Behind the others: {", ".join(names)}.')
  missing = [str(rank) for rank in range(process_count) if rank not in beats]
  if missing:
    lines.append(f'Never heard from: process {", ".join(listed(missing, SHOWN))}.')
  return '\n'.join(['Heartbeats:', *lines])
