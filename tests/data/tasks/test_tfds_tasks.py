"""Tasks from prepared TensorFlow datasets."""

import pytest
import tensorflow_datasets as tfds

from t5x_gpu.data import batches
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf


@pytest.fixture(name='mine', autouse=True)
def _mine(tmp_path):
  """A prepared dataset with two columns of text and one of numbers."""
  folder = tmp_path / 'mine' / '1.0.0'
  folder.mkdir(parents=True)
  features = tfds.features.FeaturesDict(
    {'body': tfds.features.Text(), 'text': tfds.features.Text(), 'label': tf.int64}
  )
  identity = tfds.core.dataset_info.DatasetIdentity(
    name='mine', version=tfds.core.Version('1.0.0'), data_dir=str(folder), module_name='mine'
  )
  writer = tfds.core.SequentialWriter(tfds.core.DatasetInfo(builder=identity, features=features), 9)
  writer.initialize_splits(['train', 'test'])
  writer.add_examples(
    {
      split: [{'body': f'b{i}', 'text': f't{i}', 'label': i} for i in range(count)]
      for split, count in (('train', 30), ('test', 5))
    }
  )
  writer.close_all()
  seqio.set_tfds_data_dir_override(str(tmp_path))
  yield
  seqio.set_tfds_data_dir_override(None)


@pytest.mark.parametrize(
  'name, begins', [('mine', 't'), ('mine:1.0.0', 't'), ('mine#text=body', 'b')]
)
def test_tfds_gives_the_texts_of_a_column(name, begins):
  config = batches.DatasetConfig(f'tfds:{name}', {'targets': 8}, 'test', 1, shuffle=False)
  task = task_lookup.lookup(config)
  rows = task_lookup.examples(task, config, shuffle=False, num_epochs=1).as_numpy_iterator()
  vocabulary = task.output_features['targets'].vocabulary
  assert sorted(
    vocabulary.decode([i for i in row['targets'].tolist() if i > 1]) for row in rows
  ) == [f'{begins}{i}' for i in range(5)]


@pytest.mark.parametrize('name', ['mine#text=label', 'mine:2.0.0', 'yours'])
def test_tfds_that_cannot_be_read_names_the_fix(name):
  with raises(DataError) as e:
    task_lookup.lookup(batches.DatasetConfig(f'tfds:{name}', {'targets': 8}, 'test', 1))
  assert e.value.fix


def test_files_of_a_prepared_dataset_are_named_to_compare_hosts():
  task = task_lookup.lookup(batches.DatasetConfig('tfds:mine', {'targets': 8}, 'train', 1))
  facts = seqio_sources.file_facts(task.source, split='train')
  assert len(facts) == 4  # of nine examples at most
  assert all('tfrecord' in name and ' bytes, ' in shown for name, (_, shown) in facts.items())
