"""Tasks from prepared TensorFlow datasets, named in gin: tfds:NAME[:VERSION][#text=COLUMN]."""

import functools
from collections.abc import Callable, Mapping

from t5x_gpu.data import prepare_tfds
from t5x_gpu.data.sources.rows import feature_columns, pattern_and_columns
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError, first_line, task_error

_ANY_VERSION = '*.*.*'  # TFDS uses the highest prepared version


def _select(dataset: tf.data.Dataset, columns: Mapping[str, str]) -> tf.data.Dataset:
  return dataset.map(
    lambda row: {**{name: row[column] for name, column in columns.items()}, 'document_end': True}
  )


def tfds(spelled: str) -> seqio.Task:
  """Returns a task over text columns of a prepared dataset, with the dataset's splits.

  Raises:
    DataError: the dataset is not prepared, or does not have these columns.
  """
  name, chosen = pattern_and_columns(spelled)
  if ':' not in name:
    name = f'{name}:{_ANY_VERSION}'
  # `read_only`: a training run on many hosts must not start many downloads.
  source = seqio.TfdsDataSource(name, read_only=True)
  try:
    info = source.tfds_dataset.info
    splits = sorted(info.splits)
  except prepare_tfds.TFDS_ERRORS as e:
    raise _not_prepared(name, first_line(e)) from e
  if not splits:
    raise _not_prepared(name, f'{info.full_name} has no split in {info.data_dir}')
  texts = [
    column
    for column, feature in sorted(info.features.items())
    if feature.dtype in (tf.string.as_numpy_dtype, str, object)
  ]
  columns = feature_columns(texts, chosen=chosen, where=f'tfds:{info.full_name}')
  made = builtin.task_for(columns)('tfds', source)
  return builtin.make_task(
    'tfds',
    source=source,
    output_features=made.output_features,
    preprocessors=(functools.partial(_select, columns=columns), *made.preprocessors),
    metric_fns=made.metric_fns,
  )


def _not_prepared(name: str, reason: str) -> DataError:
  return task_error(
    f'tfds:{name} is not prepared: {reason[:200]}',
    fix=f'Prepare it once: {prepare_tfds.prepare_command([name])}\n'
    'and give every run --tfds_data_dir=DIR (runs download nothing).',
    docs='tasks.md#tensorflow-datasets',
  )


PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {'tfds': tfds}
