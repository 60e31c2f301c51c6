"""Processes that disagree in code, data or MODEL_DIR stop before the first step and say why.

Each rank has its own working folder, like hosts without a shared file system.
"""

import os
import pathlib
import shutil
import socket
from unittest import mock

import pytest

from t5x_gpu import launch
from tests.helpers_prepared import prepare_here
from tests.helpers_train import REPOSITORY, TINY_GIN, Project

pytestmark = pytest.mark.cluster

HOST = socket.gethostname()
# A schedule of the user's own, which gin imports.
SCHEDULES = '''"""A learning rate of my own."""

import os


def mine(factor=1.0):
  return lambda step: factor * float(os.environ.get('MY_RATE', 1e-2)) * (step >= 0)
'''
GIN = (
  TINY_GIN
  + """
import my_schedules
train_script.train.learning_rate = @my_schedules.mine()
"""
)
# A user's own data module: synthetic batches, and one file of text.
DATA = '''"""Synthetic batches that belong to corpus.txt."""

from t5x_gpu.data import same_on_hosts, synthetic


class MyBatches:

  def __init__(self, batches):
    self._batches = batches

  def __getattr__(self, name):
    return getattr(self._batches, name)

  def __iter__(self):
    return self

  def __next__(self):
    return next(self._batches)

  def file_facts(self):
    return same_on_hosts.file_facts(['corpus.txt'])


def open_batches(config, **options):
  return MyBatches(synthetic.open_batches(config, **options))
'''
# As `python -m t5x_gpu.train`, with little patience.
IMPATIENT = """
from t5x_gpu import cli, train
from t5x_gpu.checkpoint import model_dir
model_dir.LOOK_SECONDS = 0.5
cli.run_main(train.main)
"""


class TwoHosts:
  """A project on each of two hosts; `folders` are their working folders."""

  def __init__(self, folder: pathlib.Path, *, warm, gin: str = GIN):
    self.folders = [folder / name for name in ('a', 'b')]
    self.projects = []
    for own in self.folders:
      own.mkdir()
      (own / 'my_schedules.py').write_text(SCHEDULES)
      (own / 'my_data.py').write_text(DATA)
      (own / 'corpus.txt').write_text('the same text\n' * 1000)
      self.projects.append(Project(own, gin=gin, warm=warm))
    self.model_dir = folder / 'model'

  def run(self, *flags: str, **settings) -> list[tuple[int, str]]:
    """Returns exit code and all output of both ranks."""
    address = launch.free_address()
    script = settings.pop('script', None)
    settings = {'MODEL_DIR': self.model_dir, 'TRAIN_STEPS': 2, **settings}
    with self._start(0, address, flags, script, settings) as one:
      with self._start(1, address, flags, script, settings) as two:
        codes = one.finish(), two.finish()
        return [(code, run.out + run.err) for code, run in zip(codes, (one, two))]

  def _start(self, index: int, address: str, flags: tuple[str, ...], script, settings):
    with mock.patch.dict(os.environ, T5X_GPU_DOMAIN=f'host {index}'):  # they share a machine
      return self.projects[index].start(
        *flags,
        '--process_count=2',
        f'--process_index={index}',
        f'--coordinator_address={address}',
        script=script,
        **settings,
      )


@pytest.fixture
def hosts(tmp_path, warm):
  return TwoHosts(tmp_path, warm=warm)


def refused(ended: list[tuple[int, str]], *parts: str) -> None:
  """Fails unless both ranks ended with an error that contains all `parts`."""
  for code, text in ended:
    assert code == 1, text
    for part in parts:
      assert part in text, f'{part!r} is not in:\n{text}'
    assert 'Traceback' not in text and 'step 1' not in text


@pytest.mark.slow
def test_equal_hosts_train(hosts):
  ended = hosts.run(DATA_MODULE='my_data')
  assert [code for code, _ in ended] == [0, 0], ended
  assert not list(hosts.model_dir.glob('.shared*'))


@pytest.mark.slow
def test_another_module_of_the_user_on_one_host_is_named_before_anything_compiles(hosts):
  other = hosts.folders[1] / 'my_schedules.py'
  other.write_text(SCHEDULES.replace('1e-2', '2e-2'))
  ended = hosts.run()
  refused(
    ended,
    'ClusterError: The processes do not run the same code',
    'module my_schedules: ',
    f'on process 0 ({HOST})',
    f'{other} (',
    f'on process 1 ({HOST})',
  )
  assert not any('mesh:' in text for _, text in ended)
  assert not hosts.model_dir.exists()


@pytest.mark.slow
def test_an_environment_variable_that_changes_the_step_is_found(hosts, monkeypatch):
  # The second process is started with another one.
  start = hosts._start

  def started(index, *args):
    monkeypatch.setenv('MY_RATE', str(0.01 * (index + 1)))
    return start(index, *args)

  monkeypatch.setattr(hosts, '_start', started)
  refused(
    hosts.run(),
    'The lowered training step is not the same on all 2 processes',
    f'process 1 ({HOST}): ',
    '2.000000e-02',
  )


@pytest.mark.slow
def test_a_changed_byte_in_a_file_of_one_host_is_named(hosts):
  path = hosts.folders[1] / 'corpus.txt'
  path.write_bytes(path.read_bytes()[:-2] + b'!\n')
  refused(
    hosts.run(DATA_MODULE='my_data'),
    'DataError: The hosts do not read the same data',
    'training data, corpus.txt: ',
    f'on process 1 ({HOST})',
    '(14,000 bytes',
  )


@pytest.mark.slow
def test_a_data_module_that_differs_is_named(hosts):
  # Nothing but the data's opening imports it.
  with open(hosts.folders[1] / 'my_data.py', 'a') as f:
    f.write('# changed\n')
  refused(hosts.run(DATA_MODULE='my_data'), 'do not run the same code', 'module my_data: ')


def test_a_model_dir_that_hosts_do_not_share_is_reported_at_the_start(hosts):
  ended = hosts.run(script=IMPATIENT, MODEL_DIR='model')  # each below its own working folder
  refused(
    ended,
    f'CheckpointError: MODEL_DIR = {str(hosts.folders[0] / "model")!r} is not one '
    'folder for all processes',
    '1 of 2 processes do not see it',
    f'process 1 ({HOST}): {hosts.folders[1] / "model"}',
    'docs/slurm.md#what-hosts-must',
  )
  assert not (hosts.folders[1] / 'model').exists()


@pytest.mark.slow
def test_a_dry_run_looks_for_model_dir_and_leaves_no_trace(hosts):
  ended = hosts.run('--dry_run', DATA_MODULE='my_data')
  assert [code for code, _ in ended] == [0, 0], ended
  assert not hosts.model_dir.exists()
  refused(hosts.run('--dry_run', script=IMPATIENT, MODEL_DIR='model'), 'do not see it')
  assert not any((folder / 'model').exists() for folder in hosts.folders)


@pytest.mark.slow
def test_an_older_checkout_of_this_package_on_one_host_is_named(tmp_path, monkeypatch):
  """The measured case: one schedule changed, both ranks exited with 0 and another loss."""
  checkout = tmp_path / 'checkout'
  for name in ('t5x_gpu', 'gin_configs'):
    shutil.copytree(REPOSITORY / name, checkout / name)
  changed = checkout / 't5x_gpu' / 'training' / 'schedules.py'
  changed.write_text(changed.read_text() + '\n_FACTOR = 2\n')
  hosts = TwoHosts(tmp_path, warm=None)
  start, interpreter = hosts._start, f'import sys; sys.path.insert(0, {str(checkout)!r})\n'

  def started(index, address, flags, script, settings):
    run = interpreter + 'from t5x_gpu import cli, train\ncli.run_main(train.main)'
    return start(index, address, flags, run if index else None, settings)

  monkeypatch.setattr(hosts, '_start', started)
  refused(hosts.run(), 't5x_gpu/training/schedules.py: ', str(changed))


@pytest.mark.slow
@pytest.mark.tf
@pytest.mark.parametrize('kind', ['text_files', 'prepared'])
def test_real_data_that_differs_is_named(tmp_path, warm, kind):
  hosts = TwoHosts(tmp_path, warm=warm)
  settings = {'DATA_MODULE': 't5x_gpu.data.seqio_batches', 'train.train_eval_dataset_cfg': None}
  if kind == 'text_files':
    name, changed = 'text_files:corpus.txt', 'corpus.txt'
    (hosts.folders[1] / changed).write_text('another text\n' * 1000)
  else:
    name, changed = 'prepared:rows', '00000-of-00001.arrayrecord'
    for seed, folder in enumerate(hosts.folders):
      prepare_here('mixed', folder / 'rows', num_parts=1, seed=seed)
  refused(hosts.run(MIXTURE_OR_TASK_NAME=name, **settings), 'do not read the same data', changed)
