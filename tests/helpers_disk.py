"""Disks that are soon full, and files that the system does not open."""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest


def mount(folder: pathlib.Path, *, size: str, inodes: int = 0) -> str:
  """Mounts `folder`, created if missing, as a file system of `size` ('2m'); returns any problem.

  `inodes` is the number of inodes; 0 for many.

  Mounting takes root. CI and containers have it, some users' machines do not.
  """
  folder.mkdir(exist_ok=True)
  done = subprocess.run(
    ['mount', '-t', 'tmpfs', '-o', f'size={size},nr_inodes={inodes}', 'tmpfs', str(folder)],
    capture_output=True,
    text=True,
    check=False,
  )
  return done.stderr.strip() if done.returncode else ''


def unmount(folder: pathlib.Path) -> None:
  subprocess.run(['umount', str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: pathlib.Path, *, size: str, inodes: int = 0) -> Iterator[pathlib.Path]:
  """Yields `folder`, mounted as a file system of `size`; skips the test without the right to."""
  problem = mount(folder, size=size, inodes=inodes)
  if problem:
    pytest.skip(f'a full disk cannot be tried here, mount says: {problem}')
  try:
    yield folder
  finally:
    unmount(folder)


def fill(disk: pathlib.Path, *, leave_bytes: int = 0) -> pathlib.Path:
  """Returns a file on the disk that leaves this much room, to within 4 KiB."""
  filler = disk / 'filler'
  with open(filler, 'ab', buffering=0) as f, contextlib.suppress(OSError):
    while True:
      stats = os.statvfs(disk)
      if stats.f_bavail * stats.f_frsize <= leave_bytes or not f.write(bytes(4096)):
        break
  return filler


# Before the C library's own functions: reading a file fails if its path contains REFUSED_PATH.
_REFUSING = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static int is_refused(const char *path, int flags) {
  const char *part = getenv("REFUSED_PATH"), *number = getenv("REFUSED_ERRNO");
  if (!part || !*part || !path || !strstr(path, part) || (flags & O_ACCMODE) != O_RDONLY) return 0;
  errno = number ? atoi(number) : EIO;
  return 1;
}
#define REPLACE(name, parameters, arguments)                                   \\
  int name parameters {                                                        \\
    int (*next) parameters = dlsym(RTLD_NEXT, #name);                          \\
    va_list rest;                                                              \\
    va_start(rest, flags);                                                     \\
    int mode = va_arg(rest, int);                                              \\
    va_end(rest);                                                              \\
    return is_refused(path, flags) ? -1 : next arguments;                      \\
  }
REPLACE(open, (const char *path, int flags, ...), (path, flags, mode))
REPLACE(open64, (const char *path, int flags, ...), (path, flags, mode))
REPLACE(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode))
REPLACE(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode))
"""


def refusing_library(folder: pathlib.Path) -> str:
  """Returns the library to set as LD_PRELOAD for `refused`; skips the test without a compiler."""
  if not shutil.which('cc'):
    pytest.skip('no C compiler')
  library = str(folder / 'refusing.so')
  subprocess.run(
    ['cc', '-shared', '-fPIC', '-o', library, '-xc', '-', '-ldl'],
    input=_REFUSING,
    text=True,
    check=True,
  )
  return library


@contextlib.contextmanager
def refused(part: str, number: int) -> Iterator[None]:
  """Within, to open a file for reading fails if its path has `part`, in a process with the library.

  Args:
    part: part of the path; '' for none.
    number: number of the error.
  """
  with mock.patch.dict(os.environ, REFUSED_PATH=part, REFUSED_ERRNO=str(number)):
    yield


@contextlib.contextmanager
def refused_to_python(part: str, number: int) -> Iterator[None]:
  """As `refused`, without the library, for files that Python code of this process opens."""

  def failing(real_open: Callable[..., Any]) -> Callable[..., Any]:
    def fail(path: Any, *args: Any, **kwargs: Any) -> Any:
      if not isinstance(path, int) and part in str(path):
        raise OSError(number, os.strerror(number), str(path))
      return real_open(path, *args, **kwargs)

    return fail

  with mock.patch.object(os, 'open', failing(os.open)), mock.patch('builtins.open', failing(open)):
    yield
