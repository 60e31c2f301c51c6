"""What a result was measured on: card, driver, versions, commit."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any, Optional

ROOT = pathlib.Path(__file__).parents[2]
PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'tokamax', 'qwix', 'torch', 'nvidia-cudnn-cu13')
COMMIT = 'T5X_GPU_COMMIT'  # for a copy of the tree without its .git


def describe() -> dict[str, Any]:
  """Returns card, driver, versions and commit; None for what is unknown."""
  return {'card': _smi('name'), 'driver': _smi('driver_version'), **software()}


def software() -> dict[str, Any]:
  """Returns versions and commit."""
  return {
    'python': platform.python_version(),
    'versions': {name: _version(name) for name in PACKAGES},
    'commit': commit(),
  }


def clocks() -> Optional[str]:
  """Returns 'SM clock, memory clock, power, temperature' of the first GPU now; None without one."""
  return _smi('clocks.sm,clocks.mem,power.draw,temperature.gpu')


def commit() -> Optional[str]:
  """Returns the commit of the tree, marked '+' if files differ from it; None if unknown."""
  if given := os.environ.get(COMMIT):
    return given
  head = _output('git', 'rev-parse', '--short=12', 'HEAD')
  return head and head + ('+' if _output('git', 'status', '--porcelain', '-uno') else '')


def _smi(query: str) -> Optional[str]:
  found = _output('nvidia-smi', f'--query-gpu={query}', '--format=csv,noheader')
  return found.splitlines()[0] if found else None


def _output(*command: str) -> Optional[str]:
  try:
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=30, check=True)
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()


def _version(package: str) -> Optional[str]:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None
