"""Eight fake CPU devices for every test, chosen before jax starts a backend."""

import os

import pytest

os.environ['JAX_PLATFORMS'] = os.environ.get('T5X_GPU_TEST_PLATFORM', 'cpu')
os.environ.setdefault('XLA_FLAGS', '--xla_force_host_platform_device_count=8')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')


def pytest_addoption(parser):
  parser.addoption('--update_golden', action='store_true',
                   help='rewrite tests/golden/ with what the code gives now; look at git diff after')


@pytest.fixture
def golden(request):
  """Returns check(path, text), which fails with a diff where text is not what `path` holds."""
  from tests.golden import check
  return lambda path, text: check(path, text, update=request.config.getoption('update_golden'))
