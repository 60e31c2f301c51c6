"""Digests of files, and file names relative to a common folder. No TF."""

import hashlib
import os
from collections.abc import Iterable

_BLOCK_BYTES = 4096


def relative_names(paths: Iterable[str]) -> dict[str, str]:
  """Returns name -> path; names are relative to the common folder, so that copies have equal names.

  Objects in remote storage (`gs://...`) keep their full names.
  """
  paths = list(paths)
  if any('://' in path for path in paths):
    return {path: path for path in paths}
  root = os.path.commonpath([os.path.dirname(os.path.abspath(path)) for path in paths] or ['/'])
  return {os.path.relpath(path, root): path for path in paths}


def sha256_of(path: str | os.PathLike) -> str:
  """Returns the sha256 of all bytes of a file."""
  with open(path, 'rb', buffering=0) as f:
    return hashlib.file_digest(f, 'sha256').hexdigest()


def sample_digest(path: str | os.PathLike, *, num_blocks: int = 16) -> str:
  """Returns the sha256 of evenly spaced 4 KiB blocks of a file, including the first and last."""
  size, digest = os.path.getsize(path), hashlib.sha256()
  starts = {max(0, size - _BLOCK_BYTES) * i // (num_blocks - 1) for i in range(num_blocks)}
  with open(path, 'rb') as f:
    for start in sorted(starts):
      f.seek(start)
      digest.update(f.read(_BLOCK_BYTES))
  return digest.hexdigest()
