"""A disk that is soon full."""

import contextlib
import os
import pathlib
import subprocess
from collections.abc import Iterator

import pytest


def mount(folder: pathlib.Path, *, size: str) -> str:
  """Mounts `folder`, made if need be, as a file system of `size` ('2m'); returns why it cannot be.

  Mounting takes root. CI and containers have it, some users' machines do not.
  """
  folder.mkdir(exist_ok=True)
  done = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stderr.strip() if done.returncode else ''


def unmount(folder: pathlib.Path) -> None:
  subprocess.run(['umount', str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, *, size: str) -> Iterator[pathlib.Path]:
  """Yields `folder`, mounted as a file system of `size`; skips the test without the right to."""
  problem = mount(folder, size=size)
  if problem:
    pytest.skip(f'a full disk cannot be tried here, mount says: {problem}')
  try:
    yield folder
  finally:
    unmount(folder)


def fill(disk: pathlib.Path, *, leave_bytes: int = 0) -> pathlib.Path:
  """Returns a file on the disk that leaves so much room, to within 4 KiB."""
  filler = disk / 'filler'
  with open(filler, 'ab', buffering=0) as f, contextlib.suppress(OSError):
    while True:
      stats = os.statvfs(disk)
      if stats.f_bavail * stats.f_frsize <= leave_bytes or not f.write(bytes(4096)):
        break
  return filler
