"""Mistakes of users: an error that names the fix, and not a byte in MODEL_DIR.

Most mistakes are found by `check` or `open_data`, which these tests call. A few go through the
command: there, run and dry run end with exit code 1 and print the same words.
"""

import copy
import os
import re
import shutil
import sys

import pytest

from t5x_gpu import cli
from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.errors import UserError
from tests.helpers_train import Project, listing, without_ledger
from tests.messages import record_message, record_stderr


@pytest.fixture
def project(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  return Project(tmp_path)


def assert_refused(project: Project, **macros) -> None:
  """`check` or `open_data` raises a UserError, and changes no file anywhere."""
  before = listing(project.folder)
  with pytest.raises(UserError) as caught:
    project.check(**macros)
  record_message(cli.describe_error(caught.value))
  assert_untouched(project, before)


def assert_command_refuses(project: Project, *flags: str, **macros) -> None:
  """Run and dry run leave with 1 and the same words on stderr, and change no file anywhere."""
  before = listing(project.folder)
  errors = []
  for extra in ((), ('--dry_run',)):
    result = project.run(*flags, *extra, **macros)
    assert result.code == 1, result.out
    assert 'Traceback' not in result.err
    assert re.match(r'(\d.* WARNING .*\n)*[A-Z]\w+Error: ', result.err), result.err
    errors.append(result.err[re.search(r'[A-Z]\w+Error: ', result.err).start() :])
  assert errors[0] == errors[1]
  record_stderr(errors[0])
  assert_untouched(project, before)


def assert_untouched(project: Project, before: dict[str, tuple[int, int]]) -> None:
  assert without_ledger(listing(project.folder)) == without_ledger(before)
  if not any(name.startswith('model/') for name in before):
    assert not project.model_dir.exists()


def test_a_missing_gin_file_is_named(project):
  assert_command_refuses(project, '--gin_file=no_such.gin')


def test_an_unknown_macro_is_named_with_the_closest_one(project):
  assert_refused(project, BATCH_SZIE=8)


@pytest.mark.parametrize('macro', ['LOG_PERIOD', 'SAVE_PERIOD', 'EVAL_PERIOD', 'EVAL_STEPS'])
def test_zero_periods_are_refused(project, macro):
  assert_refused(project, **{macro: 0})


def test_the_best_of_what_is_never_evaluated_is_refused(project):
  assert_refused(
    project, SAVE_PERIOD=2, EVAL_PERIOD=3, TRAIN_STEPS=6, **{'CheckpointConfig.keep_best': 1}
  )
  assert_refused(
    project,
    SAVE_PERIOD=2,
    EVAL_PERIOD=2,
    TRAIN_STEPS=6,
    **{'CheckpointConfig.keep_best': 1, 'train.train_eval_dataset_cfg': None},
  )
  assert_refused(
    project,
    SAVE_PERIOD=2,
    EVAL_PERIOD=2,
    TRAIN_STEPS=6,
    **{'CheckpointConfig.keep_best': 1, 'CheckpointConfig.best_metric': 'eval/los'},
  )


def test_zero_steps_are_refused(project):
  assert_refused(project, TRAIN_STEPS=0)


def test_sequences_of_length_zero_are_refused(project):
  assert_refused(project, TASK_FEATURE_LENGTHS="{'targets': 0}")


def test_a_batch_that_the_data_axis_does_not_divide_is_refused(project):
  assert_command_refuses(project, BATCH_SIZE=12)


def test_an_evaluation_batch_that_the_mesh_does_not_divide_is_refused(project):
  assert_refused(project, **{'train_eval/DatasetConfig.batch_size': 12})


def test_a_batch_that_the_microbatches_do_not_divide_is_refused(project):
  assert_refused(project, NUM_MICROBATCHES=3)


def test_three_partitions_of_eight_devices_are_refused_with_the_legal_numbers(project):
  assert_refused(project, NUM_PARTITIONS=3)


def test_an_unwritable_model_dir_is_refused(project):
  (project.folder / 'file').write_text('not a folder')
  assert_refused(project, MODEL_DIR=project.folder / 'file' / 'model')


def test_a_model_dir_of_an_unknown_kind_is_refused(project):
  # A local folder called "hdfs:" would be made silently.
  assert_refused(project, MODEL_DIR='hdfs://bucket/run')


def test_a_data_module_that_is_not_there_is_refused(project):
  assert_refused(project, DATA_MODULE='t5x_gpu.data.synthetics')


UNSAVABLE = """
from t5x_gpu.data import synthetic


class Batches(synthetic.SyntheticBatches):

  def __init__(self, batches):
    self.__dict__.update(batches.__dict__)

  def {method}


def open_batches(config, *, spec, feature_converter, repeat=True):
  return Batches(synthetic.open_batches(config, spec=spec, feature_converter=feature_converter,
                                        repeat=repeat))
"""


@pytest.mark.parametrize(
  'method',
  [
    'get_state(self): return {"place": 3}',
    'get_state(self): raise OSError("no such server")',
    'describe(self): return {"files": {1, 2}}',
    'set_state(self, state): self._step = 7',
    'set_state(self, state): raise KeyError("place")',
  ],
)
def test_batches_whose_position_cannot_be_saved_are_refused(project, monkeypatch, method):
  (project.folder / 'unsavable.py').write_text(UNSAVABLE.format(method=method))
  monkeypatch.delitem(sys.modules, 'unsavable', raising=False)
  assert_refused(project, DATA_MODULE='unsavable')


@pytest.mark.tf
@pytest.mark.parametrize(
  'task, keep',
  [
    ('turned_broken', {}),
    pytest.param(
      'turned',
      {'CheckpointConfig.keep_best': 1, 'CheckpointConfig.best_metric': 'infer_eval/turned/exact'},
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_metric_that_fails_or_does_not_exist_is_refused_before_the_first_step(
  project, task, keep
):
  project.gin_file.write_text(
    project.gin_file.read_text()
    + """
train_script.train.infer_eval_dataset_cfg = @infer_eval/batches.DatasetConfig()
train_script.train.infer_eval_period = 2
infer_eval/batches.DatasetConfig:
  mixture_or_task_name = %EVALUATED
  mixture_or_task_module = 'tests.eval_tasks'
  module = 't5x_gpu.data.seqio_batches'
  task_feature_lengths = {'inputs': 8, 'targets': 8}
  split = 'validation'
  batch_size = 8
"""
  )
  assert_refused(project, EVALUATED=task, TRAIN_STEPS=6, SAVE_PERIOD=2, **keep)


@pytest.fixture
def sampling(project):
  """A project whose runs end with a sample."""
  project.gin_file.write_text(
    project.gin_file.read_text()
    + (
      'from t5x_gpu.models import decoding\n'
      'train_script.train.sample_cfg = @decoding.SampleConfig()\n'
      "decoding.SampleConfig.prompt = 'def '\n"
    )
  )
  return project


def test_a_sample_of_batches_without_text_is_refused_before_the_first_step(sampling):
  assert_refused(sampling)


@pytest.mark.tf
@pytest.mark.parametrize(
  'sample',
  [{'num_tokens': 29}, {'num_tokens': 0}, {'prompt': 'x' * 32}],
  ids=['too_long', 'nothing', 'prompt_too_long'],
)
def test_a_sample_that_does_not_fit_is_refused_before_the_first_step(sampling, sample):
  assert_refused(
    sampling,
    DATA_MODULE='t5x_gpu.data.seqio_batches',
    **{f'SampleConfig.{name}': value for name, value in sample.items()},
  )


@pytest.mark.tf
@pytest.mark.parametrize(
  'macros',
  [
    {'MIXTURE_OR_TASK_NAME': 'python_sauce'},
    {'MIXTURE_OR_TASK_NAME': 'text_files:empty*.txt'},
    {'MIXTURE_OR_TASK_NAME': 'text_files:none*.txt'},
    {'TransformerConfig.vocab_size': 128},
    {'MIXTURE_OR_TASK_NAME': 'wmt_ende', 'TASK_FEATURE_LENGTHS': "{'inputs': 32, 'targets': 32}"},
  ],
  ids=['no_such_task', 'empty_task', 'no_such_file', 'vocabulary_too_large', 'no_tfds_data'],
)
def test_data_that_cannot_be_read_is_refused(project, monkeypatch, macros):
  monkeypatch.setenv('TFDS_DATA_DIR', str(project.folder / 'tfds'))
  for i in range(20):
    (project.folder / f'empty{i}.txt').touch()
  assert_refused(project, DATA_MODULE='t5x_gpu.data.seqio_batches', **macros)


@pytest.mark.slow
@pytest.mark.tf
def test_the_folder_of_tfds_data_is_that_of_the_flag(project):
  data = project.folder / 'tfds_of_mine'
  with project.start(
    f'--tfds_data_dir={data}',
    '--dry_run',
    held_module='unused',
    DATA_MODULE='t5x_gpu.data.seqio_batches',
    MIXTURE_OR_TASK_NAME='wmt_ende',
    TASK_FEATURE_LENGTHS="{'inputs': 32, 'targets': 32}",
  ) as run:
    assert run.finish() == 1
  assert f'{data}/wmt_t2t_translate/de-en/1.0.0 does not exist' in run.err


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Two steps, saved."""
  project = Project(tmp_path_factory.mktemp('trained'))
  result = project.run(TRAIN_STEPS=2, WARMUP_STEPS=1)
  assert result.code == 0, result.err
  return project


def test_a_checkpoint_of_another_size_is_refused_by_array_names(trained):
  assert_refused(trained, TRAIN_STEPS=4, **{'TransformerConfig.embed_dim': 32})


def test_a_checkpoint_of_another_optimizer_is_refused_by_array_names(trained):
  adafactor = copy.copy(trained)
  adafactor.gin_file = trained.folder / 'adafactor.gin'
  adafactor.gin_file.write_text(
    trained.gin_file.read_text().replace('pretrain.gin', 'pretrain_t5.gin')
  )
  assert_refused(adafactor, TRAIN_STEPS=4)


def test_other_data_on_resume_is_refused_by_what_differs_before_anything_compiles(trained):
  compiled = trained.folder.parent / 'compiled'
  before = listing(compiled)
  assert_command_refuses(trained, TRAIN_STEPS=4, RANDOM_SEED=1)
  assert not listing(compiled).keys() - before.keys()


def test_a_next_batch_that_is_not_the_one_saved_is_refused(trained, monkeypatch):
  """The data has the same description and other tokens."""
  (trained.folder / 'other_data.py').write_text(
    'from t5x_gpu.data import synthetic\n'
    'class Other(synthetic.SyntheticBatches):\n'
    '  def _batch(self, step):\n    return super()._batch(step + 7)\n'
    'def open_batches(config, *, spec, feature_converter, repeat=True):\n'
    '  return Other(spec, seed=config.seed, num_batches=None if repeat else 8)\n'
  )
  monkeypatch.syspath_prepend(str(trained.folder))
  assert_refused(trained, TRAIN_STEPS=4, DATA_MODULE='other_data')


def test_checkpoints_of_which_no_array_is_whole_are_refused(trained):
  folder = trained.folder / 'damaged'
  folder.mkdir()
  damaged = Project(folder)
  shutil.copytree(trained.model_dir, damaged.model_dir)
  (damaged.model_dir / LOCK).unlink(missing_ok=True)
  for path in damaged.model_dir.glob('checkpoint_*/state/**/d/*'):
    os.truncate(path, path.stat().st_size // 2)
  assert_command_refuses(damaged, TRAIN_STEPS=4)


@pytest.mark.slow
def test_steps_already_done_exit_0_say_so_and_change_nothing(trained):
  before = listing(trained.folder)
  for flags in ((), ('--dry_run',)):
    result = trained.run(*flags, TRAIN_STEPS=2, WARMUP_STEPS=1)
    assert result.code == 0, result.err
    assert 'is already at step 2; nothing to do up to TRAIN_STEPS = 2' in result.out
  assert listing(trained.folder) == before


@pytest.mark.slow
@pytest.mark.tf
def test_an_empty_validation_split_is_an_error_only_where_it_is_evaluated(tmp_path):
  project = Project(tmp_path)  # one text, one hash: all of it goes to the training split
  (tmp_path / 'a.txt').write_text('the same\n' * 100)
  macros = {
    'DATA_MODULE': 't5x_gpu.data.seqio_batches',
    'TRAIN_STEPS': 1,
    'WARMUP_STEPS': 1,
    'MIXTURE_OR_TASK_NAME': f'text_lines:{tmp_path}/a.txt',
  }
  assert_refused(project, **macros, EVAL_PERIOD=1)
  result = project.run(**macros)
  assert result.code == 0, result.err
  assert "Not evaluated: 'text_lines:" in result.err
  assert project.metrics() and not project.metrics('eval/loss')
