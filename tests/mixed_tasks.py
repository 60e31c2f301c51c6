"""A user's module of tasks and a mixture of them, for tests of prepared data."""

import functools

from t5x_gpu.data.tf_runtime import seqio, tf


def _rows(letter, number, split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  number = number if split == 'train' else number // 4
  texts = [f'{letter}{i} ' + letter * (i * 7 % 23) for i in range(number)]
  return tf.data.Dataset.from_tensor_slices({'targets': tf.constant(texts, tf.string)})


def _add(letter, number, splits=('train', 'validation'), cache=()):
  name = f'mixed_{letter}'
  feature = seqio.Feature(vocabulary=seqio.ByteVocabulary(), add_eos=True)
  seqio.TaskRegistry.add(
    name,
    output_features={'targets': feature},
    source=seqio.FunctionDataSource(functools.partial(_rows, letter, number), splits=splits),
    preprocessors=[seqio.preprocessors.tokenize, *cache, seqio.preprocessors.append_eos],
  )
  return name


_add('a', 300)
_add('b', 80)
_add('c', 20)
_add('t', 40, splits=('train',))
_add('none', 0)
_add('cached', 40, cache=[seqio.CacheDatasetPlaceholder()])
_add('cached_t', 40, splits=('train',), cache=[seqio.CacheDatasetPlaceholder()])
RATES = {'mixed_a': 6.0, 'mixed_b': 3.0, 'mixed_c': 1.0}
seqio.MixtureRegistry.add('mixed', list(RATES.items()))
seqio.MixtureRegistry.add('mixed_one_split', [('mixed_a', 1.0), ('mixed_t', 1.0)])
seqio.MixtureRegistry.add('mixed_one_cached', [('mixed_a', 1.0), ('mixed_cached_t', 1.0)])
seqio.MixtureRegistry.add('mixed_with_none', [('mixed_a', 1.0), ('mixed_none', 1.0)])
