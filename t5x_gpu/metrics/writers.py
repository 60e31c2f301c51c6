"""Where metrics go: JSON lines, TensorBoard event files, or several at once.

Only the main process writes; the others use `MultiWriter([])`, which writes nowhere.
Keys: `train/loss`, `train/accuracy`, `train/grad_norm`, `train/learning_rate`,
`train/step_seconds`, `train/tokens_per_second`, `train/input_wait_fraction`, `eval/loss`, ...
"""

import importlib
import json
import logging
import math
import numbers
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Protocol

from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.config.json_schema import Fields, Whole, parse_json
from t5x_gpu.config.set_aside import free_name, set_aside, set_aside_unless_file
from t5x_gpu.errors import ConfigError, TrainingError

_log = logging.getLogger(__name__)

# JSON has no NaN or infinity: `"train/loss": null` stands beside `"train/loss_nonfinite": "nan"`.
_NONFINITE = '_nonfinite'
_NONFINITE_VALUES = ('nan', 'inf', '-inf')
_RECORD = Fields({'step': Whole()})
_FLUSH_SECONDS = 10  # of TensorBoard's curves: what a kill may cost


class MetricWriter(Protocol):
  """Takes numbers by step. Steps do not decrease, except through `truncate_after`."""

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records `values` (scalars of Python, numpy or jax) at `step`."""

  def truncate_after(self, step: int) -> int:
    """Forgets what an earlier attempt wrote at steps above `step`; returns how many lines went."""

  def flush(self) -> None:
    """Makes everything written so far durable."""

  def close(self) -> None:
    """Flushes and releases the files. Writing afterwards is an error; closing again is not."""


def to_json_line(step: int, values: Mapping[str, float]) -> str:
  """Returns one line of valid JSON, ending in a newline, with `step` first.

  Whole numbers stay whole; floats keep all their digits, so that two runs can be compared bitwise.
  A value that is not finite becomes null, and `KEY_nonfinite` says 'nan', 'inf' or '-inf'.
  """
  record: dict[str, Any] = {'step': int(step)}
  for key, value in values.items():
    if key == 'step' or key.endswith(_NONFINITE):
      raise ValueError(f'{key!r} is a reserved metric name.')
    number = int(value) if isinstance(value, numbers.Integral) else float(value)
    if math.isfinite(number):
      record[key] = number
    else:
      record[key] = None
      record[key + _NONFINITE] = str(number)
  return json.dumps(record, allow_nan=False) + '\n'


def _parse_line(line: bytes) -> Optional[dict[str, Any]]:
  """Returns the record of one line with NaN and infinity put back, or None for a damaged line."""
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


def read_json_lines(path: str | os.PathLike) -> list[dict[str, Any]]:
  """Returns the records of a metrics file in order; damaged lines are left out.

  Values that were not finite come back as float NaN or infinity.
  """
  records = (_parse_line(line) for line in pathlib.Path(path).read_bytes().splitlines())
  return [record for record in records if record is not None]


class JsonLinesWriter:
  """One JSON object per `write`, appended to `path`.

  Each line reaches the operating system in one call, so kill -9 loses at most the line in flight.
  A torn last line, left by such a kill, is removed when the file is opened again. What is not a
  file is renamed.

  Args:
    path: the file, created with its folder when missing.
  Raises:
    ConfigError: the file cannot be opened for writing.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      set_aside_unless_file(self.path)
      self._file = open(self.path, 'ab', buffering=0)
      self._mend_last_line()
    except OSError as e:
      raise ConfigError(
        f'The metrics file {self.path} cannot be opened for writing: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder that you may write to.',
        parameters=('train.model_dir',),
      ) from e

  def _mend_last_line(self) -> None:
    content = self.path.read_bytes()
    if not content or content.endswith(b'\n'):
      return
    end = content.rfind(b'\n') + 1
    if _parse_line(content[end:]) is None:
      self._file.truncate(end)
    else:  # only the newline is missing
      self._file.write(b'\n')

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Appends one line. Raises TrainingError when the disk refuses it."""
    line = memoryview(to_json_line(step, values).encode())
    try:
      while line:  # an unbuffered write may take only a part, on a full or remote disk
        line = line[self._file.write(line) :]
    except OSError as e:
      raise TrainingError(
        f'Step {step}: the metrics file {self.path} cannot be written: {e.strerror or e}.',
        fix='Make room on that disk and start the same command again: it resumes from the last '
        'checkpoint.',
        parameters=('train.model_dir',),
      ) from e

  def truncate_after(self, step: int) -> int:
    """Drops lines above `step`, and damaged ones; returns how many.

    The file is replaced, all or nothing. If lines are damaged, it stays under another name.
    """
    lines = self.path.read_bytes().splitlines()
    records = [_parse_line(line) for line in lines]
    kept = [line for line, r in zip(lines, records) if r is not None and r['step'] <= step]
    if len(kept) == len(lines):
      return 0
    if None in records:
      aside = free_name(self.path.with_name(f'corrupt_{self.path.name}'))
      shutil.copy2(self.path, aside)
      _log.warning(
        '%s: %d of %d lines are damaged and left out. The file as it was is kept as %s.',
        self.path,
        records.count(None),
        len(lines),
        aside.name,
      )
    with atomic_write(self.path, sync=True) as new:
      new.write_bytes(b''.join(line + b'\n' for line in kept))
    self._file.close()
    self._file = open(self.path, 'ab', buffering=0)
    return len(lines) - len(kept)

  def flush(self) -> None:
    """Survives a crash of the machine as well, not only of the process."""
    if not self._file.closed:
      os.fsync(self._file.fileno())

  def close(self) -> None:
    self.flush()
    self._file.close()


class TensorBoardWriter:
  """Scalars as TensorBoard event files, without TensorFlow.

  tensorboardX's own SummaryWriter leaves the writing to a thread. On a full disk that thread ends,
  and the run then waits for ever for it to take the next event: here the run writes.

  Args:
    log_dir: folder of the event files; `tensorboard --logdir LOG_DIR` shows them.
  Raises:
    ConfigError: tensorboardX is not installed.
  """

  def __init__(self, log_dir: str | os.PathLike):
    self.log_dir = pathlib.Path(log_dir)
    try:
      importlib.import_module('tensorboardX')
      self._records, self._protos, self._scalars = (
        importlib.import_module(f'tensorboardX.{name}')
        for name in ('record_writer', 'proto.event_pb2', 'summary')
      )
    except ModuleNotFoundError as e:
      raise ConfigError(
        f'TensorBoard files were asked for, but {e.name} is not installed.',
        fix="Run: pip install 'tensorboardX>=2.6.4,<3'",
      ) from e
    self._file: Any = None  # opened by the first write, so that an empty run leaves no empty file
    self._purge_step: Optional[int] = None
    self._flushed = 0.0

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Records scalars. Raises TrainingError when the disk refuses them."""
    try:
      if self._file is None:
        self._open()
      for key, value in values.items():
        self._add(step, summary=self._scalars.scalar(key, float(value)))
      if time.monotonic() > self._flushed + _FLUSH_SECONDS:
        self.flush()
    except OSError as e:
      raise TrainingError(
        f'Step {step}: TensorBoard files in {self.log_dir} cannot be written: {e.strerror or e}.',
        fix='Make room on that disk and start the same command again: it '
        'resumes from the last checkpoint.',
        parameters=('train.model_dir',),
      ) from e

  def _open(self) -> None:
    if os.path.lexists(self.log_dir) and not self.log_dir.is_dir():
      set_aside(self.log_dir, 'it is no folder')
    self.log_dir.mkdir(parents=True, exist_ok=True)
    # The name and the first event by which TensorBoard knows such a file.
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    name = f'events.out.tfevents.{seconds}.{socket.gethostname()}.{os.getpid()}.{nanoseconds:09}'
    self._file = self._records.RecordWriter(str(self.log_dir / name))
    self._add(0, file_version='brain.Event:2')
    if self._purge_step is not None:
      start = self._protos.SessionLog(status=self._protos.SessionLog.START)
      self._add(self._purge_step, session_log=start)

  def _add(self, step: int, **what: Any) -> None:
    event = self._protos.Event(wall_time=time.time(), step=step, **what)
    self._file.write(event.SerializeToString())

  def truncate_after(self, step: int) -> int:
    """Marks later steps as outdated: TensorBoard hides them. Returns 0, as no line is removed."""
    self.close()
    # The mark belongs only where an earlier attempt could have left something.
    self._purge_step = step + 1 if any(self.log_dir.glob('events.out.tfevents.*')) else None
    return 0

  def flush(self) -> None:
    if self._file is not None:
      self._file.flush()
      self._flushed = time.monotonic()

  def close(self) -> None:
    if self._file is not None:
      file, self._file = self._file, None
      try:
        file.flush()
      finally:
        file.close()


class MultiWriter:
  """Passes everything on to each of `writers`; with none, writes nowhere."""

  def __init__(self, writers: Sequence[MetricWriter]):
    self.writers = tuple(writers)

  def write(self, step: int, values: Mapping[str, float]) -> None:
    for writer in self.writers:
      writer.write(step, values)

  def truncate_after(self, step: int) -> int:
    """Returns the largest number of lines that one of the writers dropped."""
    return max((writer.truncate_after(step) for writer in self.writers), default=0)

  def flush(self) -> None:
    for writer in self.writers:
      writer.flush()

  def close(self) -> None:
    for writer in self.writers:
      writer.close()
