"""Lists the parts of local checkpoints that the processes of a run find; equal on all processes."""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from t5x_gpu.checkpoint.local.file_format import FILE_NAME, LocalFile, open_local_file
from t5x_gpu.checkpoint.schemas import LOCAL_FACTS
from t5x_gpu.checkpoint.storage.chunks import Shape
from t5x_gpu.checkpoint.storage.paths import access_errors
from t5x_gpu.checkpoint.storage.storage_errors import system_error
from t5x_gpu.config.json_schema import check
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.host import boot_id

Box = tuple[int, Shape, Shape]  # index of the array among the sorted names, start, shape
Holder = tuple[int, int]  # process, index of the file among the files it found

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class LocalFiles:
  """The files that this process found, and what all processes found.

  Attributes:
    files: files of this process.
    of_all: for every process, {'step', 'attempt', 'process', 'parts'} of each of its files.
    damaged: (step, reason) of truncated or garbled files on any process.
    refused: (step, reason) of files that their process cannot open, which may be intact.
  """

  files: tuple[LocalFile, ...]
  of_all: Sequence[Sequence[Mapping[str, Any]]]
  damaged: Sequence[tuple[int, str]]
  refused: Sequence[tuple[int, str]]


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A local checkpoint, or the remaining parts of one.

  Attributes:
    step: updates done.
    attempt: attempt of the run; parts of different attempts do not fit together.
    files: holders of its files.
    processes: the writing run's processes whose files were found.
    holders: box -> its holders.
    damaged: why some of its files cannot be read.
  """

  step: int
  attempt: str
  files: Sequence[Holder]
  processes: frozenset[int]
  holders: Mapping[Box, Sequence[Holder]]
  damaged: list[str]


def find_local_files(folder: pathlib.Path, *, run: str, newer_than: int) -> LocalFiles:
  """Returns the files of a run, each found by one process.

  Args:
    folder: folder of the run on this host; need not exist.
    run: name of the run, which its files also contain.
    newer_than: a step; files of this and older steps are not opened.
  Raises:
    AccessError: the folder cannot be listed; raised on all processes.
  """
  # Processes of one host see the same folder: each opens a share of its files.
  folders = distributed.gather_json(_identity(folder))
  same = [i for i, other in enumerate(folders) if other == folders[distributed.process_index()]]
  names: list[str] = []
  with distributed.errors_together(), access_errors(folder), contextlib.suppress(FileNotFoundError):
    names = sorted(os.listdir(folder))
  paths = [
    folder / name
    for name in names
    if (match := FILE_NAME.fullmatch(name)) and int(match[1]) > newer_than
  ]
  files: list[LocalFile] = []
  unusable: dict[str, list[Any]] = {'damaged': [], 'refused': []}
  for path in paths[same.index(distributed.process_index()) :: len(same)]:
    step = int(FILE_NAME.fullmatch(path.name)[1])
    try:
      file = open_local_file(path)
      _check_facts(file, step)
      if file.facts['run'] == run:
        files.append(file)
    except (OSError, ValueError) as e:
      kind = 'refused' if system_error(e) else 'damaged'
      unusable[kind].append([step, f'{path}: {e}'])
  reported = distributed.gather_json({'files': [_summary(file) for file in files], **unusable})
  return LocalFiles(
    tuple(files),
    [each['files'] for each in reported],
    *(
      [(step, what) for each in reported for step, what in each[kind]]
      for kind in ('damaged', 'refused')
    ),
  )


def _identity(folder: pathlib.Path) -> str:
  try:
    stat = folder.stat()
  except OSError:
    return ''
  return f'{boot_id()}:{stat.st_dev}:{stat.st_ino}'


def _check_facts(file: LocalFile, step: int) -> None:
  """Raises ValueError unless the file contains its step, and all parts lie inside their arrays."""
  check(file.facts, LOCAL_FACTS)
  if file.facts['step'] != step:
    raise ValueError(f'it is of step {file.facts["step"]}')
  arrays = file.facts['manifest']['arrays']
  for part in file.parts:
    shape, dtype = arrays.get(part.name, ([], ''))
    if (
      part.dtype != dtype
      or not len(part.start) == len(part.shape) == len(shape)
      or any(begin + size > whole for begin, size, whole in zip(part.start, part.shape, shape))
    ):
      raise ValueError(f'{part} is not a part of one of its arrays')


def _summary(file: LocalFile) -> dict[str, Any]:
  """Returns the summary of a file for other processes, with array indices instead of names."""
  number = {name: i for i, name in enumerate(sorted(file.facts['manifest']['arrays']))}
  return {
    **{key: file.facts[key] for key in ('step', 'attempt', 'process')},
    'parts': [[number[part.name], part.start, part.shape] for part in file.parts],
  }


def candidates(found: LocalFiles) -> list[Candidate]:
  """Returns the local checkpoints, newest first; the same on all processes."""
  groups: dict[tuple[int, str], list[tuple[Holder, Mapping[str, Any]]]] = {}
  for process, files in enumerate(found.of_all):
    for number, file in enumerate(files):
      groups.setdefault((file['step'], file['attempt']), []).append(((process, number), file))
  out = []
  for (step, attempt), files in sorted(groups.items(), reverse=True):
    holders: dict[Box, list[Holder]] = collections.defaultdict(list)
    for holder, file in files:
      for array, start, shape in file['parts']:
        holders[array, tuple(start), tuple(shape)].append(holder)
    out.append(
      Candidate(
        step,
        attempt,
        [holder for holder, _ in files],
        frozenset(file['process'] for _, file in files),
        dict(holders),
        [what for s, what in found.damaged if s == step],
      )
    )
  return out


def missing_words(candidate: Candidate, hosts: Sequence[str]) -> str:
  """Returns a sentence such as 'the parts of process 1 on gpu-002 are missing'.

  Args:
    candidate: the local checkpoint.
    hosts: hosts of the processes that wrote it.
  """
  by_host = collections.defaultdict(list)
  for process, host in enumerate(hosts):
    if process not in candidate.processes:
      by_host[host].append(process)
  words = [
    f'process{"es" * (len(p) > 1)} {", ".join(map(str, p))} on {host}'
    for host, p in by_host.items()
  ]
  found = [f'the parts of {" and ".join(words)} are missing'] if words else []
  return '; '.join([*found, *candidate.damaged]) or 'parts are missing'
