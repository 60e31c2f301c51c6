"""A disk that is soon full."""

import contextlib
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, *, size: str) -> Iterator[pathlib.Path]:
  """Yields `folder`, made and mounted as a file system of `size` ('2m'); skips without the right.

  Mounting takes root. CI and containers have it, some users' machines do not.
  """
  folder.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)],
                           capture_output=True, text=True, check=False)
  if mounted.returncode:
    pytest.skip(f'a full disk cannot be tried here, mount says: {mounted.stderr.strip()}')
  try:
    yield folder
  finally:
    subprocess.run(['umount', str(folder)], check=True)
