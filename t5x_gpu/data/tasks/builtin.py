"""Tasks that come with t5x_gpu, and tasks over text files, which need no Python.

  python_source        the running interpreter's standard library: real text, on every machine
  wmt_ende             WMT English-German as Tensor2Tensor cut it, through TFDS
  text_files:PATTERN   a document per file, line breaks kept
  text_lines:PATTERN   a document per line; both take #errors=replace for text that is not UTF-8

tables.py has csv:PATTERN, jsonl:PATTERN and the like. Documents that are longer than the sequence
are cut into pieces, not dropped; only the end of a document has the end-of-sequence id. A hash of
the text (of each span of 64 lines in `text_files`) assigns about 1 in 20 to the validation split.
"""

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, readers, seqio_sources
from t5x_gpu.data.sources.labelled import warn_of_splits
from t5x_gpu.data.sources.line_formats import LINES, REPAIRED_LINES, REPAIRED_SPANS, SPANS
from t5x_gpu.data.sources.readers import DOCUMENT_END, BlockReader
from t5x_gpu.data.sources.rows import FileForm, check_line_lengths, head, is_compressed
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import did_you_mean, task_error

# In examples. The buffer is part of the saved state: 1000 x 256 tokens are 1 MB uncompressed.
SHUFFLE_BUFFER = 1000
# T5X's task name -> built-in task with the same data; T5X's task takes precedence if registered.
ALIASES = {'wmt_t2t_ende_v003': 'wmt_ende'}
log = logging.getLogger(__name__)


def chunk_documents(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields pieces of at most `sequence_length['targets']` tokens; the last piece ends in EOS.

  Takes {'targets': token ids, 'document_end': bool}: a document may consist of several spans, and
  only the span with `document_end` gets the EOS.
  """
  feature = output_features['targets']
  length = (sequence_length or {}).get('targets')

  def pieces(example: Mapping[str, tf.Tensor]) -> tf.data.Dataset:
    tokens = example['targets']
    if feature.add_eos:
      eos = tf.fill(
        [tf.cast(example['document_end'], tf.int32)],
        tf.cast(feature.vocabulary.eos_id, tokens.dtype),
      )
      tokens = tf.concat([tokens, eos], axis=0)
    if length is None:
      return tf.data.Dataset.from_tensors({'targets': tokens})
    starts = tf.data.Dataset.range(0, tf.size(tokens, tf.int64), length)
    return starts.map(lambda start: {'targets': tokens[start : start + length]})

  return dataset.flat_map(pieces)


def features(*names: str, extra_ids: int = 0) -> dict[str, seqio.Feature]:
  """Returns text features with these names, all with the byte vocabulary."""
  vocabulary = named_vocabulary('byte', extra_ids=extra_ids)
  return {name: seqio.Feature(vocabulary=vocabulary, add_eos=True) for name in names}


TOKENIZE = functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False)
_LM_PREPROCESSORS = (TOKENIZE, chunk_documents)
_SUPERVISED_PREPROCESSORS = (TOKENIZE, seqio.preprocessors.append_eos_after_trim)
# seqio.Task with the shuffle buffer of all built-in tasks.
make_task = functools.partial(seqio.Task, shuffle_buffer_size=SHUFFLE_BUFFER)


def register(task: seqio.Task) -> None:
  """Registers `task` with SeqIO under its name."""
  seqio.TaskRegistry.add_provider(task.name, task)


def text_task(name: str, source: seqio.DataSource) -> seqio.Task:
  """Returns a language-model task over {'targets': text, 'document_end': bool}."""
  return make_task(
    name, source=source, preprocessors=_LM_PREPROCESSORS, output_features=features('targets')
  )


register(
  text_task(
    'python_source',
    seqio_sources.DocumentSource(
      discovery.standard_library_files,
      splits=('train', 'validation'),
      reader=readers.Utf8Reader(readers.read_spans),
    ),
  )
)


def _texts(
  name: str, read: seqio_sources.Reader, form: FileForm, repaired: FileForm, spelled: str
) -> seqio.Task:
  """Returns a task over text files, read by `read`, or by a `BlockReader` if they need decoding."""
  pattern, errors = _pattern_and_errors(spelled)
  files = discovery.matching_files(pattern)
  reader: seqio_sources.Reader = readers.Utf8Reader(read)
  warn_of_splits(files)
  for path in files:
    if not is_compressed(path):
      check_line_lengths(path)
  heads = [(True, False) if is_compressed(path) else head(path) for path in files]
  if errors == 'replace' or any(is_marked for is_marked, _ in heads):
    columns = {'targets': 'text', **({DOCUMENT_END: 'end'} if name == 'text_files' else {})}
    reader = BlockReader(
      repaired if errors == 'replace' else form, columns=columns, num_files=len(files)
    )
  elif with_returns := [path for path, (_, has_returns) in zip(files, heads) if has_returns]:
    log.warning(
      '%d of %d files have carriage returns (\\r), which are dropped from the text: %s',
      len(with_returns),
      len(files),
      ', '.join(with_returns[:3]),
    )
  return text_task(name, seqio_sources.DocumentSource(files, reader=reader))


def _pattern_and_errors(spelled: str) -> tuple[str, str]:
  """Returns the pattern, and 'replace' if #errors=replace follows it, else 'strict'."""
  pattern, mark, errors = spelled.rpartition('#errors=')
  if not mark:
    return spelled, 'strict'
  if errors not in ('strict', 'replace'):
    raise task_error(
      f'Unknown #errors={errors}.' + did_you_mean(errors, ('strict', 'replace')),
      fix='Write #errors=replace, or nothing (strict).',
    )
  return pattern, errors


def supervised_task(name: str, source: seqio.DataSource) -> seqio.Task:
  """Returns a task over {'inputs': text, 'targets': text} with the metric `exact_match`."""
  return make_task(
    name,
    source=source,
    preprocessors=_SUPERVISED_PREPROCESSORS,
    output_features=features('inputs', 'targets'),
    metric_fns=[exact_match],
  )


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns the share of predictions that equal their target, after stripping white space."""
  right = [t.strip() == p.strip() for t, p in zip(targets, predictions, strict=True)]
  return {'exact_match': sum(right) / max(len(right), 1)}


def task_for(features: Collection[str]) -> Callable[[str, seqio.DataSource], seqio.Task]:
  """Returns the function that makes a task of a source with these features.

  `text_task` if targets are the only feature, else `supervised_task`.
  """
  return text_task if set(features) == {'targets'} else supervised_task


def _translate_english_to_german(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(
    lambda x: {'inputs': 'translate English to German: ' + x['en'], 'targets': x['de']},
    num_parallel_calls=tf.data.AUTOTUNE,
  )


# europarl_v7, commoncrawl, newscommentary_v13 -> train, newstest2013 -> validation, newstest2014 ->
# test, as in TFDS. `read_only`: a training run on many hosts must not start many downloads.
register(
  make_task(
    'wmt_ende',
    source=seqio.TfdsDataSource(
      'wmt_t2t_translate/de-en:1.0.0', splits=('train', 'validation', 'test'), read_only=True
    ),
    preprocessors=(_translate_english_to_german, *_SUPERVISED_PREPROCESSORS),
    output_features=features('inputs', 'targets'),
  )
)

OWN_TASKS = ('python_source', 'wmt_ende')
# Names (without the part after a colon) of tasks that may have one text per example.
TEXTS = ('python_source', 'text_files', 'text_lines')
# The name before the colon -> function that makes the task from the part after it.
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'text_files': functools.partial(_texts, 'text_files', readers.read_spans, SPANS, REPAIRED_SPANS),
  'text_lines': functools.partial(_texts, 'text_lines', readers.read_lines, LINES, REPAIRED_LINES),
}
