"""Writes small datasets in the on-disk format of TensorFlow Datasets; nothing is downloaded."""

import contextlib

import tensorflow_datasets as tfds

from t5x_gpu.data.tf_runtime import seqio

WORDS = ('small', 'red', 'quick', 'old', 'green', 'late', 'loud', 'warm')


def write_tfds(data_dir, name, rows, *, features=None):
  """Prepares a dataset.

  Args:
    data_dir: the folder of all datasets, as of --tfds_data_dir.
    name: 'glue/cola:1.0.0'.
    rows: split -> examples.
    features: features of the dataset; None for TFDS's features.
  Returns:
    The folder of the dataset.
  """
  path, _, version = name.partition(':')
  folder = data_dir / path / version
  folder.mkdir(parents=True)
  features = features or tfds.builder(name, data_dir=str(data_dir / 'empty')).info.features
  dataset, _, config = path.partition('/')
  identity = tfds.core.dataset_info.DatasetIdentity(
    name=dataset,
    config_name=config or None,
    version=tfds.core.Version(version),
    data_dir=str(folder),
    module_name=dataset,
  )
  info = tfds.core.DatasetInfo(builder=identity, features=features)
  writer = tfds.core.SequentialWriter(info, 9)
  writer.initialize_splits(list(rows))
  writer.add_examples(rows)
  writer.close_all()
  return folder


def _value(feature, name, number):
  if isinstance(feature, tfds.features.ClassLabel):
    return number % feature.num_classes
  if isinstance(feature, tfds.features.Text):
    return f'The {WORDS[number % 8]} dog {"sleeps" if number % 2 else "sleep"} ({name}).'
  return number % 6 if feature.dtype == 'float32' else number


def write_glue(data_dir, configs, *, version='1.0.0', train=16, validation=6):
  """Prepares tasks of GLUE with made-up sentences: `train` and `validation` rows of each."""
  for config in configs:
    name = f'glue/{config}:{version}'
    features = tfds.builder(name, data_dir=str(data_dir / 'empty')).info.features
    rows = [
      {key: _value(feature, key, i) for key, feature in features.items()}
      for i in range(train + validation)
    ]
    held_back = (
      ['validation_matched', 'validation_mismatched'] if config == 'mnli' else ['validation']
    )
    splits = dict.fromkeys(held_back, rows[train:])
    if not config.startswith('mnli_'):
      splits['train'] = rows[:train]
    write_tfds(data_dir, name, splits, features=features)


@contextlib.contextmanager
def tfds_data_dir(folder):
  """Within, SeqIO's tasks look for TensorFlow datasets in `folder`."""
  _look_in(str(folder))
  try:
    yield
  finally:
    _look_in(None)


def _look_in(folder):
  seqio.set_tfds_data_dir_override(folder)
  for name in seqio.TaskRegistry.names():  # a source keeps the folder that it looked in first
    source = seqio.TaskRegistry.get(name).source
    if isinstance(source, seqio.TfdsDataSource):
      source.tfds_dataset.override_data_dir(folder)
