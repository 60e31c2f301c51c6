"""Worker processes that write shards, one after the other, and report their progress.

We avoid concurrent.futures: it reports neither the shard a killed worker was writing nor the signal
that killed it, nor progress within a shard. When the parent ends for any reason, the pipe breaks
and the workers end.
"""

import contextlib
import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import pathlib
import signal
import traceback
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Self, Union

from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.data_module import open_preparation
from t5x_gpu.data.prepared.index import Shard
from t5x_gpu.data.prepared.shard_writer import write_shard
from t5x_gpu.errors import DataError, UserError
from t5x_gpu.storage.json_schema import JsonObject


@dataclasses.dataclass(frozen=True)
class ShardJob:
  """A shard to write.

  Attributes:
    config, spec, feature_converter: as for `data_module.open_preparation`.
    folder: folder of the split.
    task: name of the task.
    part, num_parts: index of the shard, number of shards.
  """

  config: DatasetConfig
  spec: BatchSpec
  feature_converter: str
  folder: pathlib.Path
  task: str
  part: int
  num_parts: int


@dataclasses.dataclass(frozen=True)
class RowsWritten:
  """Rows and tokens that a worker has written since its last report."""

  rows: int
  tokens: int


class Workers:
  """Up to `number` processes, each started for its first shard. They end with the block."""

  def __init__(self, number: int):
    self._number = number
    self._processes: dict[Connection, BaseProcess] = {}
    self._idle: list[Connection] = []

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._end(self._processes)

  def write(self, jobs: Sequence[ShardJob]) -> Iterator[tuple[ShardJob, Union[RowsWritten, Shard]]]:
    """Yields progress and finished shards until all jobs are done.

    If it is closed before, it ends the workers that write.

    Raises:
      UserError: a worker failed. Finished shards are kept.
    """
    todo = list(reversed(jobs))
    current: dict[Connection, ShardJob] = {}
    try:
      while todo or current:
        while todo and len(current) < self._number:
          connection = self._idle.pop() if self._idle else self._start()
          current[connection] = todo.pop()
          with self._alive(connection, current[connection]):
            connection.send(current[connection])
        for connection in multiprocessing.connection.wait(list(current)):
          job = current[connection]
          with self._alive(connection, job):
            message = connection.recv()
          if isinstance(message, Exception):
            raise message
          yield job, message
          if isinstance(message, Shard):
            del current[connection]
            self._idle.append(connection)
    finally:
      self._end(current)

  def _start(self) -> Connection:
    context = multiprocessing.get_context('spawn')  # TensorFlow does not survive a fork
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    self._processes[ours] = process
    return ours

  def _end(self, connections: Iterable[Connection]) -> None:
    ended = {connection: self._processes.pop(connection) for connection in list(connections)}
    for process in ended.values():
      process.kill()
    for connection, process in ended.items():
      process.join()
      connection.close()

  @contextlib.contextmanager
  def _alive(self, connection: Connection, job: ShardJob) -> Iterator[None]:
    try:
      yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
      raise _died(self._processes[connection], job) from None


def _died(process: BaseProcess, job: ShardJob) -> DataError:
  process.join()
  code = process.exitcode
  how = (
    f'was killed by {signal.Signals(-code).name}' if code and code < 0 else f'exited with {code}'
  )
  return DataError(
    f'A worker {how} while it wrote shard {job.part} of {job.task!r}.'
    + (' The machine may have run out of memory.' if code == -signal.SIGKILL else ''),
    fix='Run the same command again, with fewer --workers if memory is short; finished shards '
    'are kept.',
    docs='data.md',
  )


def _work(connection: Connection) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers

  def report(rows: int, tokens: int) -> None:
    try:
      connection.send(RowsWritten(rows, tokens))
    except OSError:
      raise SystemExit from None  # the parent has ended

  preparations: JsonObject = {}
  while True:
    try:
      job: ShardJob = connection.recv()
    except (EOFError, OSError):
      return
    try:
      if job.config.split not in preparations:
        preparations[job.config.split] = open_preparation(
          job.config, spec=job.spec, feature_converter=job.feature_converter
        )
      preparation = preparations[job.config.split]
      which = {'part': job.part, 'num_parts': job.num_parts}
      answer: Shard | Exception = write_shard(
        preparation.rows(job.task, **which),
        split=job.folder,
        task=job.task,
        **which,
        names=tuple(preparation.lengths),
        report=report,
        records=functools.partial(preparation.records, job.task, **which),
      )
    except UserError as e:
      answer = e
    except Exception:  # a bug, or a preprocessor of the user: show the whole traceback
      answer = RuntimeError(f'Shard {job.part} of {job.task!r}:\n{traceback.format_exc()}')
    try:
      connection.send(answer)
    except OSError:
      return
