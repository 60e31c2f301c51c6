"""A custom data module is checked against the `DataModule` protocol before the first step."""

import contextlib
import io
import sys

import pytest

from t5x_gpu import cli, data_tools
from t5x_gpu.config import gin_loader
from t5x_gpu.data import batches, data_module, features
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.run.check import check, plan_run
from t5x_gpu.run.config import Run
from t5x_gpu.runtime.watchdog import Watchdog, WatchdogConfig
from tests.helpers_train import TINY_GIN, Project, devices
from tests.messages import raises

COMPLETE = """
import json
import numpy as np
from t5x_gpu.errors import DataError

class Counting:
  '''Batch t is a function of t.'''

  def __init__(self, spec, num_batches):
    self.spec, self.num_batches, self.step = spec, num_batches, 0

  def __iter__(self):
    return self

  def __next__(self):
    batch = self.peek()
    self.step += 1
    return batch

  def peek(self):
    if self.step == self.num_batches:
      raise StopIteration
    return {
      name: np.full(shape, 1 + self.step % 7, self.spec.dtypes[name])
      for name, shape in self.spec.shapes.items()
    }

  def get_state(self):
    return json.dumps(self.step).encode()

  def set_state(self, state):
    self.step = json.loads(state)

  def describe(self):
    return {'task': 'counting'}

def open_batches(config, *, spec, feature_converter, repeat=True):
  return Counting(spec, None if repeat else 2)
"""
WITHOUT_OPEN_BATCHES = COMPLETE.replace('def open_batches(', 'def open_batch(')
WITHOUT_REPEAT = COMPLETE.replace('feature_converter, repeat=True', 'feature_converter').replace(
  'None if repeat else 2', 'None'
)


@pytest.fixture(name='write')
def _write(tmp_path, monkeypatch, request):
  """Writes a module; returns the name under which it can be imported."""
  monkeypatch.syspath_prepend(str(tmp_path))

  def write(text):
    name = f'my_batches_{abs(hash((text, request.node.name)))}'
    (tmp_path / f'{name}.py').write_text(text)
    return name

  return write


def opened(module, function=data_module.open_batches, **options):
  config = batches.DatasetConfig('counting', {'targets': 8}, 'train', 2, module=module)
  spec = features.batch_spec(
    'lm', task_feature_lengths={'targets': 8}, batch_size=2, pack=True, vocab_size=64
  )
  return function(config, spec=spec, feature_converter='lm', **options)


@pytest.mark.parametrize(
  'text', [WITHOUT_OPEN_BATCHES, WITHOUT_REPEAT, COMPLETE + 'def vocabulary(config):\n  pass\n']
)
def test_what_is_missing_or_cannot_be_called_is_named(write, text):
  name = write(text)
  with raises(ConfigError):
    opened(name)


def test_an_iterator_that_lacks_methods_is_refused(write):
  name = write(COMPLETE.replace('def peek', 'def _peek').replace('self.peek', 'self._peek'))
  with raises(ConfigError):
    opened(name)


@pytest.mark.parametrize('ids', ['64', '1 + 63 * self.step'], ids=['first', 'later'])
def test_ids_that_the_model_does_not_have_are_refused(write, ids):
  name = write(COMPLETE.replace('1 + self.step % 7', ids))
  with raises(DataError):
    list(opened(name))


def test_functions_that_are_left_out_are_errors_only_where_they_are_needed(write):
  name = write(COMPLETE)
  assert next(opened(name))['decoder_target_tokens'].shape == (2, 8)
  config = batches.DatasetConfig('counting', {'targets': 8}, 'train', 2, module=name)
  assert data_module.open_class_names(config) is None
  assert data_module.open_task_names(config) == ('counting',)
  with raises(ConfigError):
    data_module.open_vocabulary(config, feature_converter='lm')
  with raises(ConfigError):
    data_module.open_text(config, 'prompt_text')
  with raises(ConfigError):
    opened(name, data_module.open_preparation)


def test_names_of_optional_functions_are_judged_where_they_are_needed(write):
  name = write(COMPLETE + 'vocabulary = {"a": 1}\nclass_text = max\n')
  assert next(opened(name))['decoder_target_tokens'].shape == (2, 8)
  config = batches.DatasetConfig('counting', {'targets': 8}, 'train', 2, module=name)
  with raises(ConfigError):
    data_module.open_vocabulary(config, feature_converter='lm')


def test_the_speed_of_an_iterator_without_close_is_measured(write):
  assert data_tools.measure(opened(write(COMPLETE)), seconds=0).batches == 1


def test_our_modules_have_the_functions_of_the_protocol():
  for module in ('seqio_batches', 'synthetic', 'prepared.batches'):
    config = batches.DatasetConfig('x', {}, 'train', 1, module=f't5x_gpu.data.{module}')
    data_module.import_modules(config)


def test_tensorflow_is_shared_by_processes_whose_data_need_it():
  ours, text = (
    batches.DatasetConfig('x', {}, 'train', 1, module=f't5x_gpu.data.{module}')
    for module in ('synthetic', 'seqio_batches')
  )
  assert data_module.quiet_imports(ours, None, texts=(None,)) == []
  assert data_module.quiet_imports(ours, text) == ['t5x_gpu.data.tf_import']
  assert data_module.quiet_imports(ours, texts=(text,)) == ['t5x_gpu.data.tf_import']


SAMPLE = """
train_script.train.sample_cfg = @decoding.SampleConfig()
decoding.SampleConfig.prompt = 'a'
"""


def test_the_module_of_a_text_is_imported_before_a_thread_opens_the_data(
  write, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  inner = write(COMPLETE)
  outer = write(
    'import dataclasses\nfrom t5x_gpu.data.synthetic import open_batches\n'
    'def source_config(config):\n'
    f'  return dataclasses.replace(config, module={inner!r})\n'
  )
  gin = TINY_GIN.replace(
    'from t5x_gpu.models', 'from t5x_gpu.models import decoding\nfrom t5x_gpu.models', 1
  )
  imported = []
  for sample in ('', SAMPLE):
    project = Project(tmp_path, gin=gin + sample)
    args = cli.parse_args('train', '', project.argv(DATA_MODULE=outer))
    with devices(1), contextlib.redirect_stdout(io.StringIO()):
      run = gin_loader.configured(gin_loader.load(args.gin_files, bindings=args.bindings), Run)
      plan_run(check(run), watchdog=Watchdog(WatchdogConfig(), process_index=0, process_count=1))
      imported.append(inner in sys.modules)
  assert imported == [False, True]


@pytest.mark.slow
def test_a_run_is_refused_at_the_start_and_a_complete_module_trains(write, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  project = Project(tmp_path)
  refused = project.run(DATA_MODULE=write(WITHOUT_OPEN_BATCHES))
  assert refused.code == 1 and 'it has no function open_batches(' in refused.err
  assert 'Traceback' not in refused.err and 'step' not in refused.out
  assert not project.model_dir.exists()
  trained = project.run(DATA_MODULE=write(COMPLETE), TRAIN_STEPS=2)
  assert trained.code == 0, trained.err
  assert (project.model_dir / 'checkpoint_2').is_dir()
