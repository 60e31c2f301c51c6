"""Runs that must stop by themselves: a loss that is not finite, a full disk, a bad batch."""

import importlib
import re
import sys

import pytest

from t5x_gpu.errors import CheckpointError, DataError
from t5x_gpu.run import live
from tests.helpers_disk import small_disk
from tests.helpers_train import Project

# A user's own model and schedule, in a module next to the gin file.
MY_MODULE = '''"""A decoder whose loss is doubled, and a schedule that goes wrong at one step."""

import dataclasses

import jax.numpy as jnp

from t5x_gpu.models import decoder_only


@dataclasses.dataclass(frozen=True)
class Doubled(decoder_only.DecoderOnlyModel):

  def loss(self, params, batch, *, dropout_key=None):
    sums = dict(super().loss(params, batch, dropout_key=dropout_key))
    total, weight = sums['loss']
    return {**sums, 'loss': (2 * total, weight)}


def burst(*, at: int, learning_rate: float = 1e-3):
  return lambda step: jnp.where(step + 1 == at, jnp.nan, learning_rate)
'''

MY_GIN = """
import my_module
train_script.train.model = @my_module.Doubled()
my_module.Doubled.config = @config.TransformerConfig()
train_script.train.learning_rate = @my_module.burst()
my_module.burst.at = 7
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  return Project(tmp_path)


def test_a_huge_learning_rate_stops_the_run_at_its_step(project):
  """The loss of step 1 is fine, the parameters after it are not: they must not be saved."""
  result = project.run(LEARNING_RATE='1e30', WARMUP_STEPS=0, SAVE_PERIOD=1, num_devices=1)
  assert result.code == 1 and 'Traceback' not in result.err
  assert 'TrainingError: Step 1: param_norm is not finite' in result.err
  assert 'No checkpoint exists yet.' in result.err
  assert 'Lower the learning rate' in result.err
  assert not project.steps() and not project.metrics()


@pytest.mark.slow
def test_a_model_and_a_schedule_of_the_users_own_module_work_and_stop_at_the_bad_step(project):
  """The step before the bad one has just been saved, in the background: it must get there."""
  (project.folder / 'my_module.py').write_text(MY_MODULE)
  gin = project.gin_file.read_text() + MY_GIN
  gin = gin.replace(
    'from t5x_gpu.models import config\n',
    'from t5x_gpu.models import config\nfrom t5x_gpu.models import decoder_only\n',
  )
  for line in ('WARMUP_STEPS = 2\n', 'LEARNING_RATE = 1e-2\n'):
    gin = gin.replace(line, '')
  project.gin_file.write_text(gin)
  result = project.run(SAVE_PERIOD=6)
  assert result.code == 1 and 'Traceback' not in result.err, result.err
  assert 'TrainingError: Step 7: learning_rate, param_norm is not finite' in result.err
  assert 'checkpoint_6 is intact.' in result.err
  assert project.steps() == [6] and list(project.metrics()) == [1, 2, 3, 4, 5, 6]
  assert project.metrics()[1] > 10, "twice ln(264) = 11.2: the loss was not the user's"
  again = project.run(SAVE_PERIOD=6, **{'my_module.burst.at': 0})
  assert again.code == 0, again.err
  assert 'checkpoint_6' in again.out and list(project.metrics()) == list(range(1, 21))


def test_a_full_disk_ends_the_run_with_its_name_and_the_last_good_checkpoint(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with small_disk(project.folder / 'disk', size='1m') as disk:
    with project.start(
      MODEL_DIR=disk / 'model', SAVE_PERIOD=2, TRAIN_STEPS=40, **{'CheckpointConfig.keep': None}
    ) as run:
      code = run.finish()
    assert code == 1, run.out
    # On a full disk tensorboardX's threads may print stacks of their own as well.
    assert not re.search('Event loop is closed|/orbax/checkpoint/', run.err), run.err
    assert re.search('^(Checkpoint|Training)Error: ', run.err, re.MULTILINE), run.err
    assert 'No space left on device' in run.err and 'MODEL_DIR is set at' in run.err
    project.model_dir = disk / 'model'
    last = project.steps()[-1]
    assert f'The last good one is checkpoint_{last}' in run.err
    assert not list(project.model_dir.glob('*.orbax-checkpoint-tmp*')), 'it would fill the disk'


# __next__ or peek fails at one batch, or the second evaluation fails.
FAILING_DATA = """
from t5x_gpu.data import synthetic

bad, error = None, None  # number of the batch that fails
evaluation_error = None


class FailingBatches(synthetic.SyntheticBatches):

  def peek(self):
    if self._step + 1 == bad:
      raise error
    return super().peek()


class FailingEvaluation(synthetic.SyntheticBatches):

  def set_state(self, state):
    if evaluation_error is not None and self._step:
      raise evaluation_error
    super().set_state(state)


def open_batches(config, *, spec, feature_converter, repeat=True):
  if not repeat:
    return FailingEvaluation(spec, seed=0, num_batches=2)
  return FailingBatches(spec, seed=0, num_batches=None)
"""


@pytest.fixture
def failing(project, monkeypatch):
  """Returns the module `failing_data`, whose attributes set which batch fails, and how."""
  (project.folder / 'failing_data.py').write_text(FAILING_DATA)
  monkeypatch.delitem(sys.modules, 'failing_data', raising=False)
  return importlib.import_module('failing_data')


@pytest.mark.parametrize('save_period', [100, 6], ids=['between_saves', 'at_a_save'])
def test_a_batch_that_cannot_be_read_ends_the_run_after_a_save_of_the_step_before(
  project, failing, save_period
):
  macros = {'DATA_MODULE': 'failing_data', 'TRAIN_STEPS': 8, 'SAVE_PERIOD': save_period}
  macros['num_devices'] = 1
  whole = project.folder / 'whole'
  assert project.run(MODEL_DIR=whole, **macros).code == 0
  failing.bad, failing.error = 7, OSError(5, 'Input/output error', 'corpus.jsonl')
  result = project.run(**macros)
  assert 'Input/output error' in result.err and result.code == 1
  assert 'checkpoint_6 has all steps before it' in result.err
  assert project.steps() == [6]
  failing.error = DataError('Row 7 is not text.', fix='Mend it.')
  result = project.run(**macros)
  assert result.code == 1 and 'DataError: Row 7 is not text.' in result.err
  assert project.steps() == [6]
  assert project.run(**{**macros, 'TRAIN_STEPS': 6}).code == 0
  failing.bad = None
  assert project.run(**macros).code == 0
  assert project.metrics() == project.metrics(model_dir=whole)


def test_a_batch_that_the_run_does_not_need_does_not_fail_its_last_save(project, failing):
  failing.bad, failing.error = 4, DataError('Row 4 is not text.', fix='Mend it.')
  result = project.run(DATA_MODULE='failing_data', TRAIN_STEPS=3, num_devices=1)
  assert result.code == 0 and project.steps() == [3], result.err


def test_a_batch_that_a_run_does_not_need_after_early_stopping_does_not_fail_its_last_save(
  project, failing
):
  project.gin_file.write_text(
    project.gin_file.read_text()
    + 'from t5x_gpu.run import early_stopping\n'
    + 'train_script.train.early_stopping = @early_stopping.EarlyStopping()\n'
    + 'early_stopping.EarlyStopping.atol = 100.0\n'
  )
  failing.bad, failing.error = 7, DataError('Row 7 is not text.', fix='Mend it.')
  result = project.run(DATA_MODULE='failing_data', EVAL_PERIOD=2, num_devices=1)
  assert result.code == 0 and 'Stopping early at step 6' in result.out, result.err
  assert project.steps() == [6] and 'Row 7 is not text' in result.err


def test_an_evaluation_that_fails_in_any_way_ends_the_run_after_a_save_of_its_step(
  project, failing
):
  macros = {'DATA_MODULE': 'failing_data', 'EVAL_PERIOD': 2, 'SAVE_PERIOD': 100, 'TRAIN_STEPS': 6}
  macros['num_devices'] = 1
  whole = project.folder / 'whole'
  assert project.run(MODEL_DIR=whole, **macros).code == 0
  failing.evaluation_error = RuntimeError('the device is lost')
  result = project.run(**macros)
  assert result.code == 1 and project.steps() == [4], result.err
  assert 'The evaluation after step 4 has failed: the device is lost' in result.err
  assert 'RuntimeError: the device is lost' in result.err
  failing.evaluation_error = None
  assert project.run(**macros).code == 0
  assert project.metrics() == project.metrics(model_dir=whole)


def test_a_last_save_that_fails_fails_the_run_whatever_the_next_batch(
  project, failing, monkeypatch
):
  def fails(*args, **options):
    raise CheckpointError('There is no room.', fix='Make room.')

  monkeypatch.setattr(live.LiveRun, '_save_last', fails)
  failing.bad, failing.error = 4, DataError('Row 4 is not text.', fix='Mend it.')
  result = project.run(DATA_MODULE='failing_data', TRAIN_STEPS=3, num_devices=1)
  assert result.code == 1 and 'There is no room' in result.err
