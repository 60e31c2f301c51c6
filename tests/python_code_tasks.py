"""A user's tasks whose pipelines TensorFlow cannot save: Python code, or random numbers."""

import functools

import numpy as np

from t5x_gpu.data.tf_runtime import seqio, tf


def _texts(split, *, number=60):
  for i in range(number if split == 'train' else 20):
    yield {'targets': f'{i} ' + 'abcdefg'[i % 7] * (i * 7 % 23)}


def _generated(split, shuffle_files=False, seed=None, *, rows=_texts):
  del shuffle_files, seed
  return tf.data.Dataset.from_generator(
    lambda: rows(split), output_signature={'targets': tf.TensorSpec((), tf.string)}
  )


def _plain(split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  return tf.data.Dataset.from_tensor_slices(
    {'targets': tf.constant([row['targets'] for row in _texts(split)])}
  )


@seqio.map_over_dataset
def _in_python(example):
  text = tf.numpy_function(lambda text: text + b' read', [example['targets']], tf.string)
  return {'targets': tf.ensure_shape(text, ())}


@seqio.map_over_dataset
def _with_noise(example):  # by T5's preprocessors, in parallel and without a seed
  noise = tf.strings.as_string(tf.random.uniform((), 0, 10**6, tf.int32))
  return {'targets': tf.strings.join([example['targets'], noise])}


def _other_rows_each_time(split):
  for row in _texts(split):
    yield {'targets': f'{row["targets"]} {np.random.default_rng().integers(10**6)}'}


# More than a shuffle buffer, so that the pipeline does not have all of it at once.
_only_iterator = {split: _texts(split, number=2000) for split in ('train', 'validation')}


def _add(name, source, *preprocessors):
  seqio.TaskRegistry.add(
    name,
    source=seqio.FunctionDataSource(source, splits=['train', 'validation']),
    preprocessors=[*preprocessors, seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    output_features={'targets': seqio.Feature(seqio.ByteVocabulary(), add_eos=True)},
  )


_add('generated', _generated)
_add('in_python', _plain, _in_python)
_add('with_noise', _plain, _with_noise)
_add('other_rows_each_time', functools.partial(_generated, rows=_other_rows_each_time))
_add('one_iterator', functools.partial(_generated, rows=_only_iterator.get))
seqio.MixtureRegistry.add('generated_and_plain', [('generated', 3.0), ('in_python', 1.0)])
