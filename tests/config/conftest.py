"""`project`: a user's project in the working directory; `load`: loads its gin files."""

import functools
import sys

import pytest

from t5x_gpu.config import gin_loader
from tests.config import project as project_lib


@pytest.fixture
def project(tmp_path, monkeypatch):
  before = set(sys.modules)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  yield project_lib.make(tmp_path)
  for name in set(sys.modules) - before:
    if getattr(sys.modules[name], '__file__', None) and str(tmp_path) in sys.modules[name].__file__:
      del sys.modules[name]


@pytest.fixture
def load(project):
  return functools.partial(gin_loader.load, entry=project_lib.ENTRY)
