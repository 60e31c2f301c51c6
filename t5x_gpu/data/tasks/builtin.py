"""Tasks that come with t5x_gpu, and tasks made from a path with no Python at all.

  python_source        the running interpreter's standard library: real text, on every machine
  wmt_ende             WMT English-German as Tensor2Tensor cut it, through TFDS
  text_files:PATTERN   a document per file, line breaks kept
  text_lines:PATTERN   a document per line; both take #errors=replace for text that is not UTF-8
  jsonl:PATTERN        a JSON object per line: 'text', or 'inputs' and 'targets'
  csv:PATTERN, ...     columns of tables: see table_tasks
  text_pairs:PATTERN   .tsv with inputs, a tab and targets per line, or .jsonl with these keys

Language-model documents longer than the sequence are cut into pieces, not thrown away; the
end-of-sequence id stands at the end of a document only. In tasks made from a path a hash of the
text (of each span of 64 lines in `text_files`) puts about 1 in 20 into the validation split.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, labelled_tables, seqio_sources
from t5x_gpu.data.sources.block_reader import DOCUMENT_END, BlockReader
from t5x_gpu.data.sources.line_formats import (
  JSON_LINES,
  LINES,
  PAIRS,
  REPAIRED_LINES,
  REPAIRED_SPANS,
  SPANS,
)
from t5x_gpu.data.sources.rows import COMPRESSED, FileForm, head, pattern_and_columns
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import DataError, did_you_mean

# Examples in the shuffle buffer, which is part of the saved state: 1000 x 256 tokens are 1 MB
# before compression.
SHUFFLE_BUFFER = 1000
# T5X's name for the same data -> ours, used where no module has registered T5X's own.
ALIASES = {'wmt_t2t_ende_v003': 'wmt_ende'}
log = logging.getLogger(__name__)


def chunk_documents(
  dataset: tf.data.Dataset,
  sequence_length: Optional[Mapping[str, int]],
  output_features: Mapping[str, seqio.Feature],
) -> tf.data.Dataset:
  """Yields pieces of at most `sequence_length['targets']` tokens; the last ends in EOS.

  Takes {'targets': token ids, 'document_end': bool}: a document may come in several spans, and
  only the one with `document_end` gets the EOS.
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


def _features(vocabulary: seqio.Vocabulary, names: Sequence[str]) -> dict[str, seqio.Feature]:
  return {name: seqio.Feature(vocabulary=vocabulary, add_eos=True) for name in names}


_LM_PREPROCESSORS = (
  functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
  chunk_documents,
)
_SUPERVISED_PREPROCESSORS = (
  functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=False),
  seqio.preprocessors.append_eos_after_trim,
)


seqio.TaskRegistry.add(
  'python_source',
  source=seqio_sources.DocumentSource(
    discovery.standard_library_files,
    splits=('train', 'validation'),
    reader=seqio_sources.Utf8Reader(seqio_sources.read_spans),
  ),
  preprocessors=_LM_PREPROCESSORS,
  output_features=_features(named_vocabulary('byte'), ['targets']),
  shuffle_buffer_size=SHUFFLE_BUFFER,
)


def text_task(name: str, source: seqio.DataSource) -> seqio.Task:
  """Returns a language-model task over {'targets': text, 'document_end': bool}."""
  return seqio.Task(
    name,
    source=source,
    preprocessors=_LM_PREPROCESSORS,
    output_features=_features(named_vocabulary('byte'), ['targets']),
    shuffle_buffer_size=SHUFFLE_BUFFER,
  )


def _texts(
  name: str, spelled: str, *, plain: seqio_sources.Reader, form: FileForm, repaired: FileForm
) -> seqio.Task:
  pattern, errors = _pattern_and_errors(spelled)
  files = discovery.matching_files(pattern)
  heads = [(True, False) if path.endswith(COMPRESSED) else head(path) for path in files]
  if errors == 'replace' or any(is_marked for is_marked, _ in heads):
    columns = {'targets': 'text', **({DOCUMENT_END: 'end'} if name == 'text_files' else {})}
    plain = BlockReader(
      repaired if errors == 'replace' else form, columns=columns, num_files=len(files)
    )
  elif with_returns := [path for path, (_, has_returns) in zip(files, heads) if has_returns]:
    log.warning(
      '%d of %d files have carriage returns (\\r), which are left out of the text: %s',
      len(with_returns),
      len(files),
      ', '.join(with_returns[:3]),
    )
  return text_task(name, seqio_sources.HashSplitSource(files, reader=plain))


def _pattern_and_errors(spelled: str) -> tuple[str, str]:
  """Returns the pattern, and 'replace' if #errors=replace is behind it, else 'strict'."""
  pattern, mark, errors = spelled.rpartition('#errors=')
  if not mark:
    return spelled, 'strict'
  if errors not in ('strict', 'replace'):
    raise DataError(
      f'#errors={errors} is not known.' + did_you_mean(errors, ('strict', 'replace')),
      fix='Write #errors=replace, or nothing (strict).',
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  return pattern, errors


def text_files(pattern: str) -> seqio.Task:
  """Returns a task with a document per file. Raises DataError if no file matches."""
  return _texts(
    'text_files',
    pattern,
    form=SPANS,
    repaired=REPAIRED_SPANS,
    plain=seqio_sources.Utf8Reader(seqio_sources.read_spans),
  )


def text_lines(pattern: str) -> seqio.Task:
  """Returns a task with a document per non-blank line. Raises DataError if no file matches."""
  return _texts(
    'text_lines',
    pattern,
    form=LINES,
    repaired=REPAIRED_LINES,
    plain=seqio_sources.Utf8Reader(seqio_sources.read_lines),
  )


def jsonl(pattern: str) -> seqio.Task:
  """Returns a task with a JSON object per line, its form judged by the first line of all.

  Raises:
    DataError: no file matches, or the first line (named file:line) is not such an object. Later
      lines raise when they are read.
  """
  pattern, chosen = pattern_and_columns(pattern)
  files = discovery.matching_files(pattern)
  judged = next((path for path in files if discovery.first_line(path)[1]), files[0])
  columns = chosen or {feature: key for key, feature in discovery.jsonl_keys(judged).items()}
  source = seqio_sources.HashSplitSource(
    files,
    reader=BlockReader(
      JSON_LINES, columns=columns, num_files=len(files), chosen=chosen is not None
    ),
  )
  return (text_task if set(columns) == {'targets'} else supervised_task)('jsonl', source)


def supervised_task(name: str, source: seqio.DataSource) -> seqio.Task:
  """Returns a task over {'inputs': text, 'targets': text}, judged by exact matches."""
  return seqio.Task(
    name,
    source=source,
    preprocessors=_SUPERVISED_PREPROCESSORS,
    output_features=_features(named_vocabulary('byte'), ['inputs', 'targets']),
    metric_fns=[exact_match],
    shuffle_buffer_size=SHUFFLE_BUFFER,
  )


def exact_match(targets: Sequence[str], predictions: Sequence[str]) -> dict[str, float]:
  """Returns the share of predictions that are the target, white space around them aside."""
  right = [t.strip() == p.strip() for t, p in zip(targets, predictions, strict=True)]
  return {'exact_match': sum(right) / max(len(right), 1)}


def text_pairs(pattern: str) -> seqio.Task:
  """Returns a supervised task from .tsv or .jsonl files.

  The words train, dev, test in the file names say the split; without them a hash does.

  Raises:
    DataError: no file matches; files of both forms, or of neither. Lines that are no pair raise
      when they are read, naming file:line.
  """
  files = discovery.matching_files(pattern)
  forms = sorted({os.path.splitext(path)[1] for path in files})
  if forms not in (['.tsv'], ['.jsonl']):
    found = ', '.join(form or 'without one' for form in forms)
    raise DataError(
      f'text_pairs reads .tsv files or .jsonl files; {pattern!r} matches '
      f'{len(files)} of the form {found}.',
      fix='Narrow the pattern to files of one form, such as text_pairs:FOLDER/*.tsv.',
      parameters=('DatasetConfig.mixture_or_task_name',),
    )
  reader = BlockReader(
    JSON_LINES if forms == ['.jsonl'] else PAIRS,
    num_files=len(files),
    columns={name: name for name in ('inputs', 'targets')},
  )
  by_split = labelled_tables.files_by_split(files)
  if by_split is None:
    return supervised_task('text_pairs', seqio_sources.HashSplitSource(files, reader=reader))
  return supervised_task(
    'text_pairs',
    seqio_sources.DocumentSource(lambda: by_split, reader=reader, splits=tuple(by_split)),
  )


def _translate_english_to_german(dataset: tf.data.Dataset) -> tf.data.Dataset:
  return dataset.map(
    lambda x: {'inputs': 'translate English to German: ' + x['en'], 'targets': x['de']},
    num_parallel_calls=tf.data.AUTOTUNE,
  )


# europarl_v7, commoncrawl, newscommentary_v13 -> train, newstest2013 -> validation, newstest2014 ->
# test, as TFDS cuts it. `read_only`: a training run on many hosts must not start many downloads.
seqio.TaskRegistry.add(
  'wmt_ende',
  source=seqio.TfdsDataSource(
    'wmt_t2t_translate/de-en:1.0.0', splits=('train', 'validation', 'test'), read_only=True
  ),
  preprocessors=(_translate_english_to_german, *_SUPERVISED_PREPROCESSORS),
  output_features=_features(named_vocabulary('byte'), ['inputs', 'targets']),
  shuffle_buffer_size=SHUFFLE_BUFFER,
)

OWN_TASKS = ('python_source', 'wmt_ende')
# Names (before a colon, if they have one) of tasks that may give one text per example.
TEXTS = ('python_source', 'text_files', 'text_lines', 'jsonl')
# What stands before the colon -> the maker from a path pattern.
PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  'text_files': text_files,
  'text_lines': text_lines,
  'jsonl': jsonl,
  'text_pairs': text_pairs,
}
