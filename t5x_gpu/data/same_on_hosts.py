"""Checks before the first step that all hosts read the same data.

With a different file on one host a run would train without an error: every process takes its rows
from its version of the global batch. The processes compare the result of `describe()`, and the hash
of the next batch, which the task's code affects; the hosts compare size and sampled blocks of each
file, which one process per host reads.
"""

import concurrent.futures
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data.batches import Batch, BatchIterator, batch_hash, optional_method
from t5x_gpu.data.data_module import EvaluatedTask
from t5x_gpu.data.sources.discovery import relative_names, sample_digest
from t5x_gpu.errors import task_error
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.storage.json_schema import JsonObject

_THREADS = 16
_SAMPLED_FILES = 2048  # limited because every host opens them, perhaps on one file server
_SAMPLED_BLOCKS = 4096  # blocks of 4 KiB, over all files; at least two per file
_SHOWN_CHARACTERS = 100
# Facts of `describe()` that depend on where and when files were copied; file contents are compared
# instead.
_OF_FILES = ('source of ', 'rows of ')


def check_same_on_hosts(
  batches: Mapping[str, Optional[BatchIterator]], tasks: Sequence[EvaluatedTask] = ()
) -> None:
  """Raises DataError, on all processes, unless all of them read the same data.

  All processes must call it, from the thread that runs their collectives.

  Args:
    batches: purpose ('training') -> an open iterator, or None.
    tasks: tasks with metrics.
  Raises:
    ClusterError: modules imported to open the data differ.
  """
  if distributed.process_count() == 1:
    return
  distributed.check_same_modules()

  def facts(of: Callable[[BatchIterator], Facts]) -> Facts:
    return {
      f'{purpose} data, {name}': fact
      for purpose, iterator in batches.items()
      if iterator is not None
      for name, fact in of(iterator).items()
    }

  me = distributed.process_index()
  lines = distributed.differences(
    facts(_files) if distributed.first_on_host(me) == me else None
  ) + distributed.differences(
    {**facts(_described), **{f'examples of {task.name}': _of_task(task) for task in tasks}}
  )
  if lines:
    raise task_error(
      'The hosts do not read the same data:\n  ' + '\n  '.join(lines),
      fix='Copy the files again to the hosts that differ, or read them from a folder that all '
      'hosts share. If only the next batch differs, the code of the task does not give every '
      'process the same batches.',
      docs='slurm.md#hosts-that-disagree',
    )


def _files(batches: BatchIterator) -> Facts:
  files = optional_method(batches, 'file_facts')
  return {} if files is None else files()


def _described(batches: BatchIterator) -> Facts:
  has_files = optional_method(batches, 'file_facts') is not None
  found = {}
  for name, value in batches.describe().items():
    if not has_files or not name.startswith(_OF_FILES):
      text = json.dumps(value, sort_keys=True, default=str)
      found[name] = (hashlib.sha256(text.encode()).hexdigest(), text[:_SHOWN_CHARACTERS])
  batch = _peek(batches)
  if all(isinstance(x, np.ndarray) for x in batch.values()):  # would read all prepared rows
    value = batch_hash(batch)
    found['next batch'] = (value, value)
  return found


def _peek(batches: BatchIterator) -> Batch:
  try:
    return batches.peek()
  except StopIteration:
    return {}


def _of_task(task: EvaluatedTask) -> tuple[str, str]:
  ids = [[list(map(int, ids)) for ids in part] for part in (task.inputs, task.targets)]
  value = hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]
  return value, f'{len(task.targets)} examples ({value})'


def file_facts(paths: Sequence[str]) -> JsonObject:
  """Returns facts about local files: all names, and size and blocks of `_SAMPLED_FILES` files.

  Names are relative to the folder common to all files.
  """
  names = relative_names(paths)
  # Sampled by the hash of the name, so that all hosts choose the same files.
  sampled = sorted(names, key=_hash)[:_SAMPLED_FILES]
  blocks = max(2, min(16, _SAMPLED_BLOCKS // max(1, len(sampled))))

  def fact(name: str) -> tuple[str, tuple[str, str]]:
    path = names[name]
    size, sample = os.path.getsize(path), sample_digest(path, num_blocks=blocks)[:12]
    return name, (f'{size} {sample}', f'{path} ({size:,} bytes, {sample})')

  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    found = dict(pool.map(fact, sampled))
  if len(sampled) < len(names):
    found['names of all files'] = (_hash('\n'.join(sorted(names))), f'{len(names):,} files')
  return found


def _hash(text: str) -> str:
  return hashlib.sha256(os.fsencode(text)).hexdigest()
