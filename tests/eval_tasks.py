"""A user's module of tasks with metrics, for tests of evaluation."""

import functools

import jax

from t5x_gpu.data.tf_runtime import seqio, tf

# What the last call of each metric function got.
seen = {}


def exact_match(targets, predictions):
  seen['exact_match'] = targets, predictions
  return {
    'exact_match': sum(map(str.__eq__, targets, predictions)) / len(targets),
    'examples': seqio.metrics.Scalar(len(targets)),
    'first': seqio.metrics.Text(predictions[0]),
  }


def mean_score(targets, scores):
  seen['mean_score'] = targets, scores
  return {'mean_score': float(sum(scores) / len(scores))}


def marked(text, *, example, is_target):
  """A postprocessor that returns its arguments."""
  assert 'inputs' in example
  return ('target: ' if is_target else 'prediction: ') + text


def broken(targets, predictions):
  raise ZeroDivisionError('no prediction is right')


def fails_at_the_third_call(targets, predictions):
  seen['calls'] = seen.get('calls', 0) + 1
  if seen['calls'] == 3:  # after the check with the targets, and the evaluation before step 1
    raise IndexError('no such word')
  return {'calls': seen['calls']}


def grows_on_process_zero(targets, predictions):
  seen['calls'] = seen.get('calls', 0) + 1
  return {'rank': seen['calls'] * (1 if jax.process_index() == 0 else -1)}


def _rows(words, split, shuffle_files=False, seed=None):
  del shuffle_files, seed
  chosen = [w for i, w in enumerate(words) if (i % 3 == 0) == (split == 'validation')]
  return tf.data.Dataset.from_tensor_slices(
    {
      'inputs': tf.constant(chosen, tf.string),
      'targets': tf.constant([w[::-1] for w in chosen], tf.string),
    }
  )


def _add(name, words, **options):
  feature = seqio.Feature(vocabulary=seqio.ByteVocabulary(), add_eos=True)
  seqio.TaskRegistry.add(
    name,
    output_features={'inputs': feature, 'targets': feature},
    source=seqio.FunctionDataSource(
      functools.partial(_rows, words), splits=('train', 'validation')
    ),
    preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
    **options,
  )


# 5 and 11 examples for validation: neither fills batches of 8.
_add(
  'turned',
  [
    'abc',
    'bcd',
    'cde',
    'def',
    'efg',
    'fgh',
    'ghi',
    'hij',
    'ijk',
    'jkl',
    'klm',
    'lmn',
    'mno',
    'nop',
    'opq',
  ],
  metric_fns=[exact_match, mean_score],
  postprocess_fn=marked,
)
_add('turned_more', [f'{a}{b}' for a in 'abcdef' for b in 'uvwxy'][:31], metric_fns=[mean_score])
_add('turned_without_metrics', ['ab', 'cd', 'ef', 'gh'])
_add('turned_broken', ['ab', 'cd', 'ef', 'gh'], metric_fns=[broken])
_add('turned_fails', ['ab', 'cd', 'ef', 'gh'], metric_fns=[fails_at_the_third_call])
_add('turned_by_process', ['ab', 'cd', 'ef', 'gh'], metric_fns=[grows_on_process_zero])
_add('turned_none', [], metric_fns=[mean_score])
seqio.MixtureRegistry.add('turned_and_none', [('turned', 1.0), ('turned_none', 1.0)])
seqio.MixtureRegistry.add('all_turned', [('turned', 1.0), ('turned_more', 1.0)])
