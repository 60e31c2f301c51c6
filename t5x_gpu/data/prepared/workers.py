"""Processes that make shards, one after the other, and tell how far they are.

They end when the process that started them does, however that ends: their pipe breaks.
"""

import dataclasses
import functools
import multiprocessing
import multiprocessing.connection
import pathlib
import signal
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Union

from t5x_gpu.data.batches import BatchSpec, DatasetConfig, open_preparation
from t5x_gpu.data.prepared.index import Shard
from t5x_gpu.data.prepared.shard_writer import write_shard
from t5x_gpu.errors import DataError, UserError


@dataclasses.dataclass(frozen=True)
class Job:
  """One shard.

  Attributes:
    config, spec, feature_converter: as for `batches.open_preparation`.
    folder: of the split.
    task: name of the task.
    part, num_parts: which shard of how many.
  """

  config: DatasetConfig
  spec: BatchSpec
  feature_converter: str
  folder: pathlib.Path
  task: str
  part: int
  num_parts: int


@dataclasses.dataclass(frozen=True)
class Progress:
  """Rows and tokens that a worker has made since it last said so."""

  rows: int
  tokens: int


@dataclasses.dataclass(frozen=True)
class Finished:
  """A shard that is there."""

  job: Job
  shard: Shard


def make_shards(jobs: Sequence[Job], *, num_workers: int) -> Iterator[Union[Progress, Finished]]:
  """Yields what happens until all jobs are done; ends the workers however it is left.

  Args:
    jobs: shards to make.
    num_workers: processes.
  Raises:
    UserError: what a worker met. Shards that are finished stay.
  """
  context = multiprocessing.get_context('spawn')  # TensorFlow does not survive a fork
  todo = list(reversed(jobs))
  workers: dict[Any, Any] = {}  # connection -> process
  doing: dict[Any, Job] = {}
  try:
    for _ in range(min(num_workers, len(jobs))):
      ours, theirs = context.Pipe()
      process = context.Process(target=_work, args=(theirs,), daemon=True)
      process.start()
      theirs.close()
      workers[ours] = process
      doing[ours] = todo.pop()
      ours.send(doing[ours])
    while doing:
      for connection in multiprocessing.connection.wait(list(doing)):
        try:
          message = connection.recv()
        except (EOFError, ConnectionResetError):
          raise _died(workers[connection], doing[connection]) from None
        if isinstance(message, Exception):
          raise message
        if isinstance(message, Shard):
          yield Finished(doing.pop(connection), message)
          if todo:
            doing[connection] = todo.pop()
            connection.send(doing[connection])
        else:
          yield message
  finally:
    for process in workers.values():
      process.kill()
    for connection, process in workers.items():
      process.join()
      connection.close()


def _died(process: Any, job: Job) -> DataError:
  process.join()
  code = process.exitcode
  how = f'was killed by {signal.Signals(-code).name}' if code and code < 0 else f'left with {code}'
  return DataError(
    f'A worker {how} while it made shard {job.part} of {job.task!r}.'
    + (' The machine may have run out of memory.' if code == -signal.SIGKILL else ''),
    fix='Run the same command again, with fewer --workers if memory is short; finished shards '
    'are kept.',
    docs='data.md',
  )


def _work(connection: Any) -> None:
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers

  def report(rows: int, tokens: int) -> None:
    try:
      connection.send(Progress(rows, tokens))
    except OSError:
      raise SystemExit from None  # the parent is gone

  preparations: dict[str, Any] = {}
  while True:
    try:
      job: Job = connection.recv()
    except (EOFError, OSError):
      return
    try:
      if job.config.split not in preparations:
        preparations[job.config.split] = open_preparation(
          job.config, spec=job.spec, feature_converter=job.feature_converter
        )
      made = preparations[job.config.split]
      which = {'part': job.part, 'num_parts': job.num_parts}
      answer: Any = write_shard(
        made.rows(job.task, **which),
        split=job.folder,
        task=job.task,
        **which,
        names=tuple(made.lengths),
        report=report,
        records=functools.partial(made.records, job.task, **which),
      )
    except UserError as e:
      answer = e
    except Exception:  # not the user's doing, or a preprocessor of theirs: show all of it
      answer = RuntimeError(f'Shard {job.part} of {job.task!r}:\n{traceback.format_exc()}')
    try:
      connection.send(answer)
    except OSError:
      return
