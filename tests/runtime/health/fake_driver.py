"""Builds a library that answers as NVIDIA's management library (NVML) does."""

import pathlib
import shutil
import subprocess

import pytest


def build(source: str, library: pathlib.Path) -> None:
  """Compiles the C `source` into `library`; skips the test on a machine without a compiler."""
  if not shutil.which('cc'):
    pytest.skip('no C compiler')
  subprocess.run(
    ['cc', '-shared', '-fPIC', '-o', library, '-xc', '-'], input=source, text=True, check=True
  )
