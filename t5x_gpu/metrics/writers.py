"""Writers for metrics: JSON lines, TensorBoard event files, or several at once.

Only the main process writes; other processes use `MultiWriter([])`, which does nothing.
Keys: `train/loss`, `train/accuracy`, `train/grad_norm`, `train/learning_rate`,
`train/step_seconds`, `train/tokens_per_second`, `train/input_wait_fraction`, `eval/loss`, ...
"""

import contextlib
import importlib
import json
import logging
import math
import numbers
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Optional, Protocol, Union

from t5x_gpu.errors import AccessError, ConfigError, DataError
from t5x_gpu.storage.files import (
  atomic_write,
  free_name,
  remedy,
  set_aside,
  set_aside_unless_file,
  write_problem,
)
from t5x_gpu.storage.json_schema import Fields, Whole, parse_json

_log = logging.getLogger(__name__)

METRICS = 'metrics.jsonl'

# JSON has no NaN or infinity, so NaN is `"train/loss": null` and `"train/loss_nonfinite": "nan"`.
_NONFINITE = '_nonfinite'
_NONFINITE_VALUES = ('nan', 'inf', '-inf')
_RECORD = Fields({'step': Whole()})
Record = dict[str, Union[int, float]]  # 'step' and the metrics
_FLUSH_SECONDS = 10  # a kill may lose this many seconds of TensorBoard's curves
_RETRY_SECONDS = 60  # until TensorBoard files are tried again; each try starts a file
_MOST_WAITING_BYTES = 16 << 20  # lines that cannot be written; some ten thousand


class MetricWriter(Protocol):
  """Takes numbers by step. Steps never decrease, except after `truncate_after`."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records `values` (Python, numpy or jax scalars) at `step`."""

  def truncate_after(self, step: int) -> None:
    """Removes records of an earlier attempt at steps above `step`."""

  def flush(self) -> None:
    """Makes all records so far durable."""

  def close(self) -> None:
    """Flushes and closes the files. Writing afterwards is an error; closing again is not."""


def check_names(names: Iterable[str]) -> None:
  """Raises DataError for metric names that a file cannot contain."""
  for name in names:
    problem = 'is reserved' if _is_reserved(name) else ''
    try:
      name.encode()
    except UnicodeEncodeError:
      problem = 'has half of a surrogate pair, which is not a character'
    if problem:
      raise DataError(
        f'The metric name {name!r} {problem}.',
        fix='Rename it in the dictionary that the metric function returns.',
        docs='eval.md#metrics-of-tasks',
      )


def _is_reserved(name: str) -> bool:
  return name == 'step' or name.endswith(_NONFINITE)


def to_json_line(step: int, values: Mapping[str, float]) -> str:
  """Returns one line of valid JSON, ending in a newline, with `step` first.

  Integers stay integers; floats keep all digits, so that two runs can be compared bit for bit. A
  value that is not finite becomes null, and `KEY_nonfinite` is 'nan', 'inf' or '-inf'.
  """
  record: dict[str, Union[int, float, str, None]] = {'step': int(step)}
  for key, value in values.items():
    if _is_reserved(key):
      raise ValueError(f'{key!r} is a reserved metric name.')
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    if math.isfinite(number):
      record[key] = number
    else:
      record[key] = None
      record[key + _NONFINITE] = str(number)
  return json.dumps(record, allow_nan=False) + '\n'


def parse_line(line: bytes) -> Optional[Record]:
  """Returns the record of one line, with NaN and infinity restored; None for a damaged line."""
  try:
    record = parse_json(line, _RECORD)
  except ValueError:
    return None
  for key in [k for k in record if k.endswith(_NONFINITE)]:
    value = record.pop(key)
    if value not in _NONFINITE_VALUES:
      return None
    record[key.removesuffix(_NONFINITE)] = float(value)
  is_number = [isinstance(value, (int, float)) for value in record.values()]
  return record if all(is_number) else None


def read_json_lines(path: str | os.PathLike) -> list[Record]:
  """Returns the records of a metrics file in order, with NaN and infinity; skips damaged lines."""
  records = (parse_line(line) for line in pathlib.Path(path).read_bytes().splitlines())
  return [record for record in records if record is not None]


class JsonLinesWriter:
  """Appends one JSON object to `path` per `write`.

  Each line is one system call, so kill -9 loses at most one line. Opening the file again removes an
  incomplete last line. Anything at `path` that is not a file is renamed.

  Lines that cannot be written do not end the run: they wait in memory, and each write tries again.
  If the disk of the checkpoints is full, too, the next save ends the run.

  Args:
    path: the file; it and its folder are created if missing.
    waits: False to raise AccessError for a line that cannot be written: the lines are the result.
  Raises:
    ConfigError: the file cannot be opened for writing.
  """

  def __init__(self, path: str | os.PathLike, *, waits: bool = True):
    self.path, self._waits = pathlib.Path(path), waits
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      set_aside_unless_file(self.path)
      self._file = open(self.path, 'ab', buffering=0)
      self._waiting = bytearray()  # may begin in the middle of a line
      self._num_lost = 0
      self._has_failed = False
      self._mend_last_line()
    except OSError as e:
      raise ConfigError(
        f'The metrics file {self.path} cannot be opened for writing: {e.strerror or e}.',
        fix=f'{remedy(e)} MODEL_DIR must be a folder with write permission.',
        parameters=('train.model_dir',),
      ) from e

  def _mend_last_line(self) -> None:
    content = self.path.read_bytes()
    if not content or content.endswith(b'\n'):
      return
    end = content.rfind(b'\n') + 1
    if parse_line(content[end:]) is None:
      self._file.truncate(end)
    else:  # only the newline is missing
      self._file.write(b'\n')

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends one line, after the lines that wait."""
    line = to_json_line(step, values).encode()
    if len(self._waiting) + len(line) <= _MOST_WAITING_BYTES:
      self._waiting += line
    else:
      self._num_lost += 1
    self._write_waiting()

  def _write_waiting(self) -> None:
    try:
      if self._has_failed:  # a stale handle of a file server never recovers
        with contextlib.suppress(OSError):
          self._file.close()
        self._file = open(self.path, 'ab', buffering=0)
      while self._waiting:  # an unbuffered write may be partial, on a full or remote disk
        del self._waiting[: self._file.write(self._waiting)]
    except OSError as e:
      if not self._waits:
        self._waiting.clear()
        raise AccessError(
          f'{self.path} cannot be written: {write_problem(e, self.path.parent)}.',
          fix=f'{remedy(e)} Then run the command again, which adds the missing lines.',
        ) from e
      if not self._has_failed:
        _log.warning(
          '%s cannot be written: %s. Training continues; its lines wait in memory.',
          self.path,
          write_problem(e, self.path.parent),
        )
      self._has_failed = True
    else:
      if self._has_failed:
        lost = f'; {self._num_lost} lines are lost' if self._num_lost else ''
        _log.warning('%s can be written again%s.', self.path, lost)
      self._has_failed, self._num_lost = False, 0

  def truncate_after(self, step: int) -> None:
    """Removes lines above `step` and damaged lines.

    If lines are damaged, the old file is kept under another name.
    """
    lines = self.path.read_bytes().splitlines()
    records = [parse_line(line) for line in lines]
    kept = [line for line, r in zip(lines, records) if r is not None and r['step'] <= step]
    if len(kept) == len(lines):
      return
    if None in records:
      aside = free_name(self.path.with_name(f'corrupt_{self.path.name}'))
      shutil.copy2(self.path, aside)
      _log.warning(
        '%s: removed %d of %d lines, which are damaged. The old file is kept as %s.',
        self.path,
        records.count(None),
        len(lines),
        aside.name,
      )
    with atomic_write(self.path, sync=True) as new:
      new.write_bytes(b''.join(line + b'\n' for line in kept))
    self._file.close()
    self._file = open(self.path, 'ab', buffering=0)

  def flush(self) -> None:
    """Makes the records survive a crash of the machine, not only of the process."""
    if not self._file.closed:
      os.fsync(self._file.fileno())

  def close(self) -> None:
    if self._file.closed and not self._waiting:
      return
    self._write_waiting()
    lost = self._num_lost + self._waiting.count(b'\n')
    if lost:
      _log.error('%s lacks the last %d lines: it cannot be written.', self.path, lost)
    self._waiting.clear()
    self.flush()
    self._file.close()


@contextlib.contextmanager
def _hidden(*names: str) -> Iterator[None]:
  """Makes modules look as if they were not installed, unless they are already imported."""
  hidden = [name for name in names if name not in sys.modules]
  sys.modules.update(dict.fromkeys(hidden))
  try:
    yield
  finally:
    for name in hidden:
      del sys.modules[name]


class TensorBoardWriter:
  """Writes scalars as TensorBoard event files, without TensorFlow.

  Does not use tensorboardX's SummaryWriter, which writes in a thread: on a full disk the thread
  dies, and the run then waits forever for it to take the next event.

  Args:
    log_dir: folder of the event files; `tensorboard --logdir LOG_DIR` shows them.
  Raises:
    ConfigError: tensorboardX is not installed.
  """

  def __init__(self, log_dir: str | os.PathLike):
    self.log_dir = pathlib.Path(log_dir)
    try:
      with _hidden('torch', 'boto3'):  # importing them takes seconds, for parts not used here
        importlib.import_module('tensorboardX')
        self._records, self._protos, self._scalars = (
          importlib.import_module(f'tensorboardX.{name}')
          for name in ('record_writer', 'proto.event_pb2', 'summary')
        )
    except ModuleNotFoundError as e:
      raise ConfigError(
        f'TensorBoard files need {e.name}, which is not installed.',
        fix="Run: pip install 'tensorboardX>=2.6.4,<3'",
      ) from e
    self._path: Optional[pathlib.Path] = None  # the last file
    self._file: Optional[IO[bytes]] = None  # the first write opens it: an empty run leaves none
    self._purge_step: Optional[int] = None
    self._flushed = 0.0
    self._next_try = 0.0
    self._has_failed = False

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records scalars. If they cannot be written, drops them, and tries again after a minute."""
    if time.monotonic() < self._next_try:
      return
    try:
      if self._file is None:
        self._open()
      for key, value in values.items():
        self._add(step, summary=self._scalars.scalar(key, float(value)))
      if time.monotonic() > self._flushed + _FLUSH_SECONDS:
        self.flush()
    except OSError as e:
      self._failed(e)

  def _failed(self, e: OSError) -> None:
    """Gives up the open file, whose last record may be incomplete; the next write starts a file."""
    if not self._has_failed:
      _log.warning(
        'TensorBoard files in %s cannot be written: %s. The run continues without their points.',
        self.log_dir,
        write_problem(e, self.log_dir),
      )
    self._has_failed = True
    self._next_try = time.monotonic() + _RETRY_SECONDS
    with contextlib.suppress(OSError):
      self._close_file()
    with contextlib.suppress(OSError):
      if self._path is not None and not self._path.stat().st_size:
        self._path.unlink()

  def _open(self) -> None:
    if os.path.lexists(self.log_dir) and not self.log_dir.is_dir():
      set_aside(self.log_dir, 'it is not a folder')
    self.log_dir.mkdir(parents=True, exist_ok=True)
    # TensorBoard recognizes an event file by this name and first event.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f'events.out.tfevents.{seconds}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09}'
    self._path = self.log_dir / name
    self._file = self._records.RecordWriter(str(self._path))
    self._add(0, file_version='brain.Event:2')
    if self._purge_step is not None:
      start = self._protos.SessionLog(status=self._protos.SessionLog.START)
      self._add(self._purge_step, session_log=start)

  def _add(self, step: int, **what: object) -> None:
    event = self._protos.Event(wall_time=time.time(), step=step, **what)
    self._file.write(event.SerializeToString())

  def truncate_after(self, step: int) -> None:
    """Marks later steps as outdated, so that TensorBoard hides them."""
    self.close()
    # Needed only if an earlier attempt may have written something.
    self._purge_step = step + 1 if any(self.log_dir.glob('events.out.tfevents.*')) else None

  def flush(self) -> None:
    try:
      if self._file is not None:
        self._file.flush()
        self._flushed = time.monotonic()
    except OSError as e:
      self._failed(e)

  def close(self) -> None:
    try:
      self._close_file()
    except OSError as e:
      self._failed(e)

  def _close_file(self) -> None:
    if self._file is not None:
      file, self._file = self._file, None
      try:
        file.flush()
      finally:
        file.close()


class MultiWriter:
  """Forwards all calls to each of `writers`."""

  def __init__(self, writers: Sequence[MetricWriter]):
    self.writers = tuple(writers)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    for writer in self.writers:
      writer.write(step, values)

  def truncate_after(self, step: int) -> None:
    for writer in self.writers:
      writer.truncate_after(step)

  def flush(self) -> None:
    for writer in self.writers:
      writer.flush()

  def close(self) -> None:
    for writer in self.writers:
      writer.close()
