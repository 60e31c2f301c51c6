"""Worker processes that write shards, one after the other, and report their progress.

We avoid concurrent.futures: it reports neither the shard a killed worker was writing nor the signal
that killed it, nor progress within a shard. When the parent ends for any reason, the pipe breaks
and the workers end.
"""

import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import pathlib
import signal
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Union

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


def write_shards(
  jobs: Sequence[ShardJob], *, num_workers: int
) -> Iterator[tuple[ShardJob, Union[RowsWritten, Shard]]]:
  """Yields progress and finished shards until all jobs are done; always ends the workers.

  Raises:
    UserError: a worker failed. Finished shards are kept.
  """
  context = multiprocessing.get_context('spawn')  # TensorFlow does not survive a fork
  todo = list(reversed(jobs))
  workers: dict[Connection, BaseProcess] = {}
  current: dict[Connection, ShardJob] = {}
  try:
    for _ in range(min(num_workers, len(jobs))):
      ours, theirs = context.Pipe()
      process = context.Process(target=_work, args=(theirs,), daemon=True)
      process.start()
      theirs.close()
      workers[ours] = process
      current[ours] = todo.pop()
      ours.send(current[ours])
    while current:
      for connection in multiprocessing.connection.wait(list(current)):
        job = current[connection]
        try:
          message = connection.recv()
        except (EOFError, ConnectionResetError):
          raise _died(workers[connection], job) from None
        if isinstance(message, Exception):
          raise message
        yield job, message
        if isinstance(message, Shard):
          del current[connection]
          if todo:
            current[connection] = todo.pop()
            connection.send(current[connection])
  finally:
    for process in workers.values():
      process.kill()
    for connection, process in workers.items():
      process.join()
      connection.close()


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
