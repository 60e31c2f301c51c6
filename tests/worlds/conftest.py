"""The process that forks the commands of all flows, and the sessions of a test file."""

import contextlib
import os
import shutil
from unittest import mock

import pytest

from tests.helpers_disk import refusing_library
from tests.helpers_warm import WarmStart
from tests.worlds.sessions import Sessions

IMPORTS = (
  *(
    f't5x_gpu.{name}'
    for name in ('data.seqio_batches', 'eval', 'infer', 'convert', 'prepare', 'reshard', '__main__')
  ),
  'transformers.models.auto.tokenization_auto',  # convert reads back the tokenizer that it wrote
)


@pytest.fixture(scope='module')
def warm(tmp_path_factory):
  with contextlib.ExitStack() as stack:
    if shutil.which('cc'):  # for worlds with REFUSED_PATH
      library = refusing_library(tmp_path_factory.mktemp('refusing'))
      stack.enter_context(mock.patch.dict(os.environ, LD_PRELOAD=library))
    started = WarmStart(tmp_path_factory.mktemp('compiled'), imports=IMPORTS)
  with started:
    yield started


@pytest.fixture(scope='module')
def sessions(warm):
  with contextlib.closing(Sessions(warm)) as opened:
    yield opened
