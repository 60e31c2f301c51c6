"""Eight fake CPU devices for every test, chosen before jax starts a backend."""

import gc
import os
import sys

import pytest

from t5x_gpu.runtime import process_exit
from tests.helpers_signals import start_programs_with_default_signals
from tests.helpers_tiers import BUDGET, NOT_QUICK, Tiers, only_for_other_tiers
from tests.helpers_xla import QUICK_COMPILES, set_default_flags
from tests.messages import Messages

_MOST_MAPS = '/proc/sys/vm/max_map_count'
# On a GPU machine: T5X_GPU_TEST_PLATFORM=cuda python -m pytest tests/gpu
PLATFORM = os.environ.get('T5X_GPU_TEST_PLATFORM', 'cpu')
# T5X_GPU_TESTS_ON=cpu runs the same tests with small sizes on the CPU.
GPU_TESTS_ON = os.environ.get('T5X_GPU_TESTS_ON', 'cuda')

# With a GPU, tests compare it with the CPU.
os.environ['JAX_PLATFORMS'] = 'cuda,cpu' if PLATFORM == 'cuda' else PLATFORM
if PLATFORM == 'cpu':
  set_default_flags()  # `make test-optimized` compiles as users do
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')
start_programs_with_default_signals()
# Images of containers set it. Then each of the hundreds of processes compiles the package again.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
sys.dont_write_bytecode = False


def pytest_addoption(parser):
  parser.addoption(
    '--update_golden',
    action='store_true',
    help='rewrite tests/golden/ with what the code gives now; look at git diff after',
  )
  parser.addoption(
    '--quick',
    action='store_true',
    help='only tests that start no process, import no TensorFlow and take little time',
  )


def pytest_configure(config):
  budget = BUDGET if QUICK_COMPILES[0] in os.environ.get('XLA_FLAGS', '').split() else None
  config.pluginmanager.register(Tiers(budget=budget, quick=config.option.quick))
  config.pluginmanager.register(Messages(update=config.option.update_golden), 'messages')


def pytest_ignore_collect(collection_path, config):
  if config.option.quick and collection_path.suffix == '.py':
    return only_for_other_tiers(collection_path.read_text(encoding='utf-8')) or None  # not imported
  return None


# These files run first. Started last, one of them would keep a single worker busy for minutes.
LONGEST = (
  'worlds/test_all_worlds.py',
  'worlds/test_worlds.py',
  'parity/test_layouts.py',
  'parity/test_fp8_layouts.py',
  'property/test_layouts.py',
  'parity/test_hf_layouts.py',
  'property/test_damaged_files.py',
  'property/test_nothing_is_lost.py',
  'cluster/test_parallel_processes.py',
  'cluster/test_faults.py',
  'training/test_precision_curves.py',
  'test_benchmarks.py',
  'test_bench_gpu.py',
  'test_gpu_tests.py',
  'test_lowering.py',
  'test_old_runs.py',
  'models/test_decoder_only.py',
  'data/test_seqio_batches.py',
  'test_eval.py',
  'test_train_resume.py',
  'training/test_train_step.py',
  'tools/planning/search/test_search.py',
  'tools/planning/test_prediction.py',
  'parity/test_hf_generation.py',
  'parity/test_hf_logits.py',
  'test_plan.py',
)


def pytest_collection_modifyitems(config, items):
  first = {os.path.join(os.path.dirname(__file__), name): i for i, name in enumerate(LONGEST)}
  items.sort(key=lambda item: first.get(str(item.path), len(first)))
  if config.option.quick:
    quick = [i for i in items if not any(map(i.get_closest_marker, NOT_QUICK))]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(quick)])
    items[:] = quick
  if PLATFORM == 'cpu' and GPU_TESTS_ON != 'cpu':
    for item in items:
      if item.get_closest_marker('gpu'):
        item.add_marker(pytest.mark.skip(reason='needs an NVIDIA GPU: T5X_GPU_TEST_PLATFORM=cuda'))


def pytest_collection_finish():
  gc.freeze()  # every later collection skips the modules and tests: millions of objects
  gc.set_threshold(100_000, 50, 1000)  # traces and TensorFlow's graphs are garbage by the million


@pytest.fixture(scope='session', autouse=True)
def shared_folder(tmp_path_factory):
  """A folder of all workers of this session (tests/helpers_layouts.py).

  It also takes what runs keep in the user's ~/.cache, such as compiled programs.
  """
  base = tmp_path_factory.getbasetemp()
  share = base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base
  os.environ['T5X_GPU_TESTS_SHARE'] = str(share)
  os.environ['XDG_CACHE_HOME'] = str(share / 'cache')


@pytest.fixture(autouse=True)
def no_threads_left_behind():
  """A failed save of one test must not let the next failing run end this process."""
  yield
  process_exit._left_behind.clear()


@pytest.fixture(scope='module', autouse=True)
def few_compiled_programs():
  """Each keeps three mappings of memory; XLA crashes at the most that Linux allows a process."""
  yield
  with (
    open('/proc/self/maps', encoding='utf-8') as maps,
    open(_MOST_MAPS, encoding='utf-8') as most,
  ):
    if sum(1 for _ in maps) > int(most.read()) / 4:
      sys.modules['jax'].clear_caches()
      gc.collect()  # programs in cycles; pytest_collection_finish makes this rare


@pytest.fixture(scope='module')
def server(tmp_path_factory):
  """A server of object storage with the bucket `runs`, which this process uses."""
  from tests.helpers_storage import StorageServer

  with StorageServer(tmp_path_factory.mktemp('s3')) as started:
    started.bucket('runs')
    with started.used():
      yield started


@pytest.fixture(scope='session')
def warm(tmp_path_factory):
  """A process that has imported everything and forks runs: Project(folder, warm=warm)."""
  from tests.helpers_warm import WarmStart

  with WarmStart(tmp_path_factory.mktemp('compiled')) as started:
    yield started


@pytest.fixture(scope='session')
def mixed_rows(tmp_path_factory):
  """A prepared mixture of 6 : 3 : 1 with packed rows of 32 tokens; tests must not change it."""
  from tests.helpers_prepared import prepare_here

  folder = tmp_path_factory.mktemp('mixed_rows')
  prepare_here('mixed', folder, num_parts=2)
  prepare_here('mixed', folder, num_parts=1, split='validation')
  return folder


@pytest.fixture
def golden(request):
  """Returns check(path, text), which fails with a diff where text is not what `path` holds."""
  from tests.golden import check

  return lambda path, text: check(path, text, update=request.config.getoption('update_golden'))
