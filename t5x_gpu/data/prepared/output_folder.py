"""The folder of a split while `prepare` is at work on it: begun, gone on with, finished.

What is finished stays, whatever happens: each shard appears whole, `.unfinished` notes what there
is to know of it, and index.json, which makes all of it one, comes last.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import json
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any, Optional

from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.config.json_schema import Fields, MapOf, read_bytes, read_json
from t5x_gpu.data.prepared.index import (
  INDEX,
  SHARD,
  UNFINISHED,
  Index,
  Shard,
  from_json,
  shard_problem,
)
from t5x_gpu.data.prepared.shard_writer import PARTIAL, facts_path
from t5x_gpu.data.sources.corrupt_records import check_share
from t5x_gpu.errors import DataError

_PLAN, _LOCK = 'plan.json', 'lock'
_PLAN_SCHEMA = Fields({'members': MapOf(dict)})
_THREADS = 8

Parts = dict[tuple[str, int], Shard]  # (task, part) -> what is written


@dataclasses.dataclass(frozen=True)
class SplitFolder:
  """Folder of a split that this process alone writes to.

  Attributes:
    path: DIR/SPLIT.
    plan: its index, without shards.
    finished: what is there and as it was written.
  """

  path: pathlib.Path
  plan: Index
  finished: Parts

  @property
  def todo(self) -> list[tuple[str, int]]:
    """(task, part) of what is missing."""
    return [
      (name, part)
      for name, member in self.plan.members.items()
      for part in range(member.num_shards)
      if (name, part) not in self.finished
    ]

  def finish(self, written: Parts, *, max_corrupt_fraction: float = 0.0) -> Index:
    """Returns the index, once it is on the disk.

    Args:
      written: the rest of the shards.
      max_corrupt_fraction: share of the records of each task's source that may be damaged.
    Raises:
      DataError: a task without a row, or too much damage in its source; or the disk is full.
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
    if empty:
      raise DataError(
        f'{", ".join(empty)}: no example in split {self.plan.split!r}; nothing to train on.',
        fix='Leave the task out of the mixture, take another --split, or give it more text: if a '
        'hash deals the documents, a handful may all go to one.',
        parameters=('DatasetConfig.mixture_or_task_name',),
      )
    index = dataclasses.replace(self.plan, members=members)
    try:
      _write(self.path / INDEX, index.to_json())
    except OSError as e:
      raise DataError(
        f'{self.path / INDEX} could not be written: {e.strerror or e}.',
        fix='Make room and run the same command again; all shards are kept.',
      ) from e
    return index


@contextlib.contextmanager
def open_split(path: pathlib.Path, plan: Index) -> Iterator[SplitFolder]:
  """Yields the folder, with what an earlier run has finished; other processes are kept out.

  Args:
    path: DIR/SPLIT; made if it is not there.
    plan: what is to be prepared.
  Raises:
    DataError: something else lies there, other data is prepared there, or a process is at work.
  """
  with contextlib.ExitStack() as stack:
    try:
      folder = _begin(path, plan, stack)
    except OSError as e:
      raise DataError(
        f'{path} cannot be written: {e.strerror or e}.',
        fix='Give a folder of yours with free space: --output=DIR.',
      ) from e
    try:
      yield folder
    finally:
      _remove_partial(path)
      if (path / INDEX).exists():
        shutil.rmtree(path / UNFINISHED, ignore_errors=True)


def _begin(path: pathlib.Path, plan: Index, stack: contextlib.ExitStack) -> SplitFolder:
  """Returns the folder, locked until `stack` is left."""
  unfinished = path / UNFINISHED
  if (
    path.exists()
    and not (path / INDEX).exists()
    and not unfinished.exists()
    and any(path.iterdir())
  ):
    raise DataError(
      f'{path} exists, is not empty, and was not made by prepare.',
      fix='Give another --output; nothing is overwritten.',
    )
  before = _plan_of(path)
  if before is not None:
    _check_same(before, plan.plan(), path)
  unfinished.mkdir(parents=True, exist_ok=True)
  lock = stack.enter_context(open(unfinished / _LOCK, 'w', encoding='utf-8'))
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as e:
    raise DataError(
      f'Another process prepares {path} right now.', fix='Wait for it, or give another --output.'
    ) from e
  _remove_partial(path)  # what a killed run has left
  finished = _finished(path, plan)
  complete = len(finished) == sum(m.num_shards for m in plan.members.values())
  if not ((path / INDEX).exists() and complete):
    _write(unfinished / _PLAN, json.dumps(plan.plan()))
    for (name, part), shard in finished.items():
      facts = facts_path(path, name, part)
      facts.parent.mkdir(exist_ok=True)
      _write(facts, json.dumps(dataclasses.asdict(shard)))
    (path / INDEX).unlink(missing_ok=True)
  return SplitFolder(path, plan, finished)


def _remove_partial(path: pathlib.Path) -> None:
  for partial in path.rglob(f'*{PARTIAL}'):
    partial.unlink(missing_ok=True)


def _write(path: pathlib.Path, text: str) -> None:
  """Writes a file that is there whole or not at all."""
  with atomic_write(path, sync=True, suffix=PARTIAL) as new:
    new.write_text(text, 'utf-8')


def _plan_of(path: pathlib.Path) -> Optional[dict[str, Any]]:
  """Returns the plan by which the folder was written, None if it has no shard of it yet."""
  with contextlib.suppress(FileNotFoundError, ValueError):
    return from_json(read_bytes(path / INDEX)).plan()
  if any((path / UNFINISHED).glob('*/*.json')):
    with contextlib.suppress(FileNotFoundError, ValueError):
      return read_json(path / UNFINISHED / _PLAN, _PLAN_SCHEMA)
  return None


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], path: pathlib.Path) -> None:
  def flat(facts: Mapping[str, Any]) -> dict[str, Any]:
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
      f'{path} was prepared, or begun, from other data or with other settings:\n  '
      + '\n  '.join(wrong),
      fix='Give another --output, or remove that folder to prepare it anew.',
      docs='data.md',
    )


def _finished(path: pathlib.Path, plan: Index) -> Parts:
  """Returns the shards that are whole, every byte of them checked."""
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
