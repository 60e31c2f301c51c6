"""Checks that the shards of a prepared split are still the files that `prepare` wrote."""

import concurrent.futures
import os
import pathlib
from typing import Optional

from t5x_gpu.config.set_aside import is_missing
from t5x_gpu.data.prepared.index import Index, Shard, unopened
from t5x_gpu.data.sources.file_digests import sample_digest, sha256_of
from t5x_gpu.errors import listed, task_error

_SAMPLED_SHARDS = 32  # number of shards whose samples are compared when training opens the data
_THREADS = 16


def shard_problem(folder: pathlib.Path, shard: Shard, *, content: Optional[str]) -> str:
  """Returns how a shard has changed; '' if it is unchanged.

  Args:
    folder: folder of the split.
    shard: its entry in the index.
    content: what to compare in addition to the size: None, 'sample' (a few blocks) or 'all'.
  Raises:
    DataError: the shard cannot be opened; its rows may be intact.
  """
  if not shard.rows:
    return ''
  path = folder / shard.file
  try:
    size = path.stat().st_size
    if size != shard.bytes:
      cut = 'truncated' if size < shard.bytes else 'changed'
      return f'{path} is {cut}: it has {size:,} bytes, the index says {shard.bytes:,}.'
    if content == 'sample' and sample_digest(path) != shard.sample:
      return f'{path} has changed: the sha256 of sampled blocks differs from the index.'
    if content == 'all' and sha256_of(path) != shard.sha256:
      return f'{path} has changed: its sha256 differs from the index.'
  except FileNotFoundError:
    return f'{path} is missing.'
  except OSError as e:
    if not is_missing(e):
      raise unopened(e, path) from e
    return f'{path} cannot be read: {e.strerror or e}.'
  return ''


def check_shards(
  folder: str | os.PathLike, index: Index, *, content: Optional[str] = 'sample'
) -> None:
  """Raises DataError if shards differ from the index.

  Args:
    folder: DIR of `prepare`.
    index: index of the split.
    content: 'sample' compares sizes, and some blocks of at most 32 shards; 'all' compares every
      byte.
  """
  split = pathlib.Path(folder).expanduser() / index.split
  shards = [shard for member in index.members.values() for shard in member.shards if shard.rows]
  step = max(1, len(shards) // _SAMPLED_SHARDS)

  def problem(number: int) -> str:
    what = None if content == 'sample' and number % step else content
    return shard_problem(split, shards[number], content=what)

  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    problems = list(filter(None, pool.map(problem, range(len(shards)))))
  if problems:
    raise task_error(
      f'{len(problems)} of {len(shards)} shards of the prepared data have changed:\n  '
      + '\n  '.join(listed(problems, 5)),
      fix='Copy them again from where they were prepared, or run the same command python -m '
      't5x_gpu.prepare again: it rebuilds the shards that changed.',
      docs='data.md',
    )
