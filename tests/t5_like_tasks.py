"""A registry in the way of T5's: TFDS sources without splits, labels as words, T5's metrics.

T5's own package pins what t5x_gpu must not; `make test-t5` runs the same on its tasks.
"""

import functools

import scipy.stats

from t5x_gpu.data.tf_runtime import seqio, tf

# The last targets and predictions that a metric got.
seen = {}


def _cola(dataset):
  return dataset.map(
    lambda x: {
      'inputs': 'cola sentence: ' + x['sentence'],
      'targets': tf.gather(['unacceptable', 'acceptable'], x['label']),
      'idx': x['idx'],
    }
  )


def _stsb(dataset):
  return dataset.map(
    lambda x: {
      'inputs': 'stsb sentence1: ' + x['sentence1'] + ' sentence2: ' + x['sentence2'],
      'targets': tf.strings.as_string(tf.round(x['label'] * 5) / 5, precision=1),
      'idx': x['idx'],
    }
  )


def class_number(text, label_classes, default=-1, **unused):
  return label_classes.index(text) if text in label_classes else default


def to_float(text, default=-1.0, **unused):
  try:
    return float(text)
  except ValueError:
    return default


def accuracy(targets, predictions):
  seen['like_cola'] = targets, predictions
  return {'accuracy': 100 * sum(map(int.__eq__, targets, predictions)) / len(targets)}


def spearman(targets, predictions):
  seen['like_stsb'] = targets, predictions
  spread = len(set(predictions)) > 1
  return {
    'spearman_corrcoef': (100 * scipy.stats.spearmanr(targets, predictions)[0] if spread else 0.0)
  }


_FEATURES = {
  name: seqio.Feature(seqio.ByteVocabulary(), add_eos=True) for name in ('inputs', 'targets')
}
for _name, _to_text, _postprocess, _metric in (
  (
    'cola',
    _cola,
    functools.partial(class_number, label_classes=['unacceptable', 'acceptable']),
    accuracy,
  ),
  ('stsb', _stsb, to_float, spearman),
):
  seqio.TaskRegistry.add(
    f'like_{_name}',
    source=seqio.TfdsDataSource(f'glue/{_name}:1.0.0'),
    preprocessors=[
      _to_text,
      seqio.preprocessors.tokenize,
      seqio.CacheDatasetPlaceholder(),
      seqio.preprocessors.append_eos_after_trim,
    ],
    output_features=_FEATURES,
    postprocess_fn=_postprocess,
    metric_fns=[_metric],
  )
seqio.TaskRegistry.add(
  'like_ax',
  source=seqio.TfdsDataSource('glue/ax:1.0.0', splits=['test']),
  preprocessors=[seqio.preprocessors.tokenize],
  output_features=_FEATURES,
  metric_fns=[],
)
seqio.TaskRegistry.add(
  'like_unreadable',
  source=seqio.TfdsDataSource('glue/cola:1.0.0'),
  preprocessors=[seqio.preprocessors.tokenize],
  metric_fns=[],
  output_features={
    'targets': seqio.Feature(seqio.SentencePieceVocabulary('nosuch/sentencepiece.model'))
  },
)
seqio.MixtureRegistry.add(
  'like_glue', [('like_cola', 8551.0), ('like_stsb', 5749.0), ('like_ax', 0.0)]
)
