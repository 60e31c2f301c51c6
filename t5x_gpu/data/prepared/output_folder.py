"""The folder of a split while `prepare` works on it: starts, continues and finishes a split.

Finished shards survive any interruption: a shard appears only when it is complete, `.unfinished`
records it, and index.json comes last.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Optional

from t5x_gpu.data.prepared.index import (
  INDEX,
  SHARD,
  UNFINISHED,
  Index,
  Shard,
  from_json,
  shard_problem,
)
from t5x_gpu.data.prepared.shard_writer import PARTIAL, facts_path, write_whole
from t5x_gpu.data.sources.corrupt_records import check_share
from t5x_gpu.errors import DataError, NoExamplesError
from t5x_gpu.storage.files import lock_file
from t5x_gpu.storage.json_schema import Fields, Json, JsonObject, MapOf, read_bytes, read_json

_PLAN, _LOCK = 'plan.json', 'lock'
_PLAN_SCHEMA = Fields({'members': MapOf(dict)})
_THREADS = 8

Parts = dict[tuple[str, int], Shard]  # (task, part) -> shard


@dataclasses.dataclass(frozen=True)
class SplitFolder:
  """Folder of a split, locked by this process.

  Attributes:
    path: DIR/SPLIT.
    plan: its index, without shards.
    finished: shards that exist and are unchanged.
  """

  path: pathlib.Path
  plan: Index
  finished: Parts

  @property
  def todo(self) -> list[tuple[str, int]]:
    """(task, part) of the missing shards."""
    return [
      (name, part)
      for name, member in self.plan.members.items()
      for part in range(member.num_shards)
      if (name, part) not in self.finished
    ]

  def finish(
    self, written: Parts, *, max_corrupt_fraction: float = 0.0, trains: bool = True
  ) -> Index:
    """Writes index.json and returns the index.

    Args:
      written: the shards written by this call.
      max_corrupt_fraction: share of the records of each task's source that may be damaged.
      trains: the split is for training, so that each task needs rows; else one of them does.
    Raises:
      NoExamplesError: a task has no rows.
      DataError: a task has too many damaged records, or the disk is full.
    """
    parts = {**self.finished, **written}
    members = {
      name: dataclasses.replace(
        member, shards=tuple(parts[name, part] for part in range(member.num_shards))
      )
      for name, member in self.plan.members.items()
    }
    for name, member in members.items():
      check_share(member.records, max_fraction=max_corrupt_fraction, of=f' for {name}')
    empty = [name for name, member in members.items() if not member.rows]
    if empty and (trains or len(empty) == len(members)):
      raise NoExamplesError(
        f'{", ".join(empty)}: no example in split {self.plan.split!r}.',
        fix='Leave the task out of the mixture, use another --split, or give it more text. Sources '
        'without splits assign documents by hash; with few documents one split may be empty.',
        parameters=('DatasetConfig.mixture_or_task_name',),
      )
    index = dataclasses.replace(self.plan, members=members)
    try:
      write_whole(self.path / INDEX, index.to_json())
    except OSError as e:
      raise DataError(
        f'{self.path / INDEX} could not be written: {e.strerror or e}.',
        fix='Free some space and run the same command again; all shards are kept.',
      ) from e
    return index

  def remove(self) -> None:
    """Removes the folder of a split without rows."""
    shutil.rmtree(self.path)


@contextlib.contextmanager
def open_split(path: pathlib.Path, plan: Index) -> Iterator[SplitFolder]:
  """Yields the folder, with the shards of an earlier run, locked against other processes.

  Args:
    path: DIR/SPLIT; created if it does not exist.
    plan: the split to prepare.
  Raises:
    DataError: the folder holds other files or other prepared data, or another process uses it.
  """
  with contextlib.ExitStack() as stack:
    try:
      folder = _begin(path, plan, stack)
    except OSError as e:
      raise DataError(
        f'{path} cannot be written: {e.strerror or e}.',
        fix='Give a writable folder with free space: --output=DIR.',
      ) from e
    try:
      yield folder
    finally:
      _remove_partial(path)
      if (path / INDEX).exists():
        shutil.rmtree(path / UNFINISHED, ignore_errors=True)


def _begin(path: pathlib.Path, plan: Index, stack: contextlib.ExitStack) -> SplitFolder:
  """Returns the folder, locked until `stack` closes."""
  unfinished = path / UNFINISHED
  if (
    path.exists()
    and not (path / INDEX).exists()
    and not unfinished.exists()
    and any(path.iterdir())
  ):
    raise DataError(
      f'{path} exists, is not empty, and was not made by prepare.',
      fix='Give another --output; prepare overwrites nothing.',
    )
  before = _plan_of(path)
  if before is not None:
    _check_same(before, plan.plan(), path)
  unfinished.mkdir(parents=True, exist_ok=True)
  lock = stack.enter_context(open(unfinished / _LOCK, 'w', encoding='utf-8'))
  try:
    lock_file(lock)
  except BlockingIOError as e:
    raise DataError(
      f'Another process is preparing {path}.', fix='Wait for it, or give another --output.'
    ) from e
  _remove_partial(path)  # left by a killed run
  finished = _finished(path, plan)
  complete = len(finished) == sum(m.num_shards for m in plan.members.values())
  if not ((path / INDEX).exists() and complete):
    write_whole(unfinished / _PLAN, json.dumps(plan.plan()))
    for (name, part), shard in finished.items():
      facts = facts_path(path, name, part)
      facts.parent.mkdir(exist_ok=True)
      write_whole(facts, json.dumps(dataclasses.asdict(shard)))
    (path / INDEX).unlink(missing_ok=True)
  return SplitFolder(path, plan, finished)


def _remove_partial(path: pathlib.Path) -> None:
  for partial in path.rglob(f'*{PARTIAL}'):
    partial.unlink(missing_ok=True)


def _plan_of(path: pathlib.Path) -> Optional[JsonObject]:
  """Returns the plan of the shards in the folder; None if there are no shards yet."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    return from_json(read_bytes(path / INDEX)).plan()
  if any((path / UNFINISHED).glob('*/*.json')):
    with contextlib.suppress(FileNotFoundError, ValueError):
      return read_json(path / UNFINISHED / _PLAN, _PLAN_SCHEMA)
  return None


def _check_same(before: Json, now: Json, path: pathlib.Path) -> None:
  def flat(facts: Json) -> JsonObject:
    members = facts.get('members', {})
    return {
      **{k: v for k, v in facts.items() if k != 'members'},
      'tasks': sorted(members),
      **{
        f'{key} of {name}': value
        for name, member in members.items()
        for key, value in member.items()
      },
    }

  old, new = flat(before), flat(now)
  wrong = [
    f'{key}: it has {old.get(key)!r}, this run {new.get(key)!r}'
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key)
  ]
  if wrong:
    raise DataError(
      f'{path} was prepared (or started) from other data or with other settings:\n  '
      + '\n  '.join(wrong),
      fix='Give another --output, or remove that folder to prepare it again.',
      docs='data.md',
    )


def _finished(path: pathlib.Path, plan: Index) -> Parts:
  """Returns the unchanged shards, after checking every byte."""
  found: Parts = {}
  with contextlib.suppress(FileNotFoundError, ValueError):
    index = from_json(read_bytes(path / INDEX))
    found = {
      (name, part): shard
      for name, member in index.members.items()
      for part, shard in enumerate(member.shards)
    }
  if not found:
    for name, member in plan.members.items():
      for part in range(member.num_shards):
        with contextlib.suppress(FileNotFoundError, ValueError):
          found[name, part] = Shard(**read_json(facts_path(path, name, part), SHARD))
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    problems = list(
      pool.map(lambda shard: shard_problem(path, shard, content='all'), found.values())
    )
  return {key: shard for (key, shard), problem in zip(found.items(), problems) if not problem}
