"""TensorFlow datasets that are missing: which, where, and the command that prepares them."""

import pytest
import tensorflow_datasets as tfds

from t5x_gpu.data import batches, prepare_tfds
from t5x_gpu.data.sources.seqio_sources import source_fingerprint
from t5x_gpu.data.streaming import evaluated_tasks, task_lookup
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError
from tests.helpers_tfds import tfds_data_dir, write_glue
from tests.messages import raises

pytestmark = pytest.mark.tf
MODULE = 'tests.t5_like_tasks'


def config(name, split='train', **kwargs):
  return batches.DatasetConfig(
    name, {'inputs': 64, 'targets': 16}, split, 4, mixture_or_task_module=MODULE, **kwargs
  )


def check(cfg):
  task_lookup.check_split(task_lookup.lookup(cfg), cfg)


def refused(folder, cfg):
  with tfds_data_dir(folder), raises(DataError) as e:
    check(cfg)
  return str(e.value)


def test_a_task_of_a_registry_names_dataset_folder_and_command(tmp_path):
  refused(tmp_path, config('like_cola'))


def test_a_mixture_names_what_it_lacks_of_the_split(tmp_path):
  refused(tmp_path, config('like_glue'))
  write_glue(tmp_path / 'some', ['cola'])
  refused(tmp_path / 'some', config('like_glue'))


def test_evaluation_of_a_mixture_names_what_it_lacks(tmp_path):
  with tfds_data_dir(tmp_path), raises(DataError):
    evaluated_tasks.task_names(config('like_glue', 'validation'))


def test_a_dataset_that_is_prepared_is_not_missing(tmp_path):
  write_glue(tmp_path, ['cola', 'stsb'])
  with tfds_data_dir(tmp_path):
    check(config('like_glue'))
    with raises(DataError):
      check(config('like_cola', 'test'))
    for vocabulary in (None, 'byte'):
      names = evaluated_tasks.task_names(config('like_glue', 'validation', vocabulary=vocabulary))
      assert names == ('like_cola', 'like_stsb')


def test_the_newer_version_stands_in_for_an_old_one_that_tfds_cannot_build(tmp_path, capsys):
  write_glue(tmp_path, ['cola'], version='2.0.0')
  with raises(DataError):
    prepare_tfds.main(['glue/cola:1.0.0', f'--data_dir={tmp_path}'])
  prepare_tfds.main(['glue/cola:1.0.0', f'--data_dir={tmp_path}', '--from_version=2.0.0'])
  assert f'{tmp_path}/glue/cola/1.0.0' in capsys.readouterr().out
  with tfds_data_dir(tmp_path):
    check(config('like_cola'))
    task = task_lookup.lookup(config('like_cola'))
    rows = list(task.source.get_dataset('train', shuffle=False).as_numpy_iterator())
  assert len(rows) == 16 and rows[0]['sentence'].startswith(b'The small dog')


def test_a_vocabulary_of_a_task_that_cannot_be_read_is_named():
  with raises(DataError):
    task_lookup.lookup(config('like_unreadable'))
  task_lookup.lookup(config('like_unreadable', vocabulary='byte'))


class OwnDataset(tfds.core.GeneratorBasedBuilder):
  """A dataset whose builder downloads nothing."""

  VERSION = tfds.core.Version('1.0.0')

  def _info(self):
    return tfds.core.DatasetInfo(
      builder=self, features=tfds.features.FeaturesDict({'text': tfds.features.Text()})
    )

  def _split_generators(self, dl_manager):
    return {'train': ((i, {'text': f'text {i}'}) for i in range(3))}

  def _generate_examples(self):
    raise NotImplementedError


def test_the_command_builds_what_can_be_built_and_names_what_cannot(tmp_path, capsys):
  for _ in range(2):  # the second call finds it
    prepare_tfds.main(['own_dataset', f'--data_dir={tmp_path}'])
  assert capsys.readouterr().out.count(f'own_dataset: {tmp_path}/own_dataset/1.0.0') == 2
  with tfds_data_dir(tmp_path):
    assert set(task_lookup.lookup(config('tfds:own_dataset')).splits) == {'train'}
  with raises(DataError):
    prepare_tfds.main(['nosuch:1.0.0', f'--data_dir={tmp_path}'])


def test_a_dataset_that_tfds_does_not_know_is_named(tmp_path):
  with tfds_data_dir(tmp_path), raises(DataError):
    task_lookup.lookup(config('tfds:nosuch'))


def of_two_datasets(folder, *, data_dir='named'):
  """A task whose splits come from two datasets, in a folder that it names or the usual folder."""
  options = {'data_dir': str(folder)} if data_dir == 'named' else {}
  source = seqio.TfdsDataSource(
    splits={
      'train': seqio.TfdsSplit('glue/cola:1.0.0', 'train[:50%]', **options),
      'validation': seqio.TfdsSplit('glue/sst2:1.0.0', 'validation', **options),
    }
  )
  return seqio.Task('two', source=source, preprocessors=[], output_features={}, metric_fns=[])


def test_a_task_with_a_dataset_for_each_split_names_the_one_it_lacks(tmp_path):
  task = of_two_datasets(tmp_path)
  for split in ('train', 'validation'):
    with raises(DataError):
      task_lookup.check_split(task, config('two', split))
  with raises(DataError):
    task_lookup.check_split(task, config('two', 'test'))
  with raises(DataError):
    task_lookup.check_split(of_two_datasets(tmp_path, data_dir=None), config('two'))


def test_a_task_with_a_dataset_for_each_split_is_read_once_that_is_prepared(tmp_path):
  write_glue(tmp_path, ['cola'])
  task = of_two_datasets(tmp_path)
  task_lookup.check_split(task, config('two'))
  facts = source_fingerprint(task.source, split='train')
  assert facts['tfds'] == 'glue/cola/1.0.0' and 0 < facts['examples'] < 16
