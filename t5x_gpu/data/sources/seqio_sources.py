"""Documents from files, as SeqIO data sources: read in a stable order, resumable at any point.

SeqIO's own FileDataSource shuffles *paths*, which then sit in the saved iterator state and tie it
to one machine. `DocumentSource` shuffles indices into a sorted list, so a state restores wherever
the same files lie.
"""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.data import same_on_hosts
from t5x_gpu.data.sources import discovery
from t5x_gpu.data.sources.block_reader import BlockReader
from t5x_gpu.data.sources.corrupt_records import Records
from t5x_gpu.data.sources.labelled_tables import LabelledTexts
from t5x_gpu.data.sources.line_formats import LINES_PER_SPAN
from t5x_gpu.data.sources.rows import not_utf8
from t5x_gpu.data.sources.source_files import SourceFile
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from t5x_gpu.runtime.cluster.agreement import Facts

# Files open at once, a span from each in turn: neighbours in the stream come from many files.
FILES_AT_ONCE = 32
# Rows of a table among which the next is drawn: their numbers are part of the saved state.
SHUFFLED_ROWS = 65536
# Matches exactly what `bytes.decode` accepts: RE2 knows no surrogates and no overlong forms.
_UTF8 = r'[\x{0}-\x{d7ff}\x{e000}-\x{10ffff}]*'

Reader = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


class DocumentSource(seqio.DataSource):
  """A SeqIO source over files, parsed by `reader(path, file_number)`.

  Args:
    files: returns split -> paths in a stable order; called once, when the data is opened.
    reader: makes examples from one file.
    splits: the keys of what `files` returns.
  """

  def __init__(
    self, files: Callable[[], Mapping[str, Sequence[str]]], *, reader: Reader, splits: Sequence[str]
  ):
    self._list_files = functools.cache(files)
    self._reader = reader
    super().__init__(splits=tuple(splits))

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> Sequence[str]:
    return list(self._list_files()[split])

  def get_dataset(
    self,
    split: str = 'train',
    shuffle: bool = True,
    seed: Optional[int] = None,
    shard_info: Optional[seqio.ShardInfo] = None,
    *,
    sequence_length: Optional[Mapping[str, int]] = None,
    use_cached: bool = False,
    num_epochs: Optional[int] = 1,
  ) -> tf.data.Dataset:
    del sequence_length, use_cached, num_epochs  # Task applies them.
    files = self.list_shards(split)
    paths = tf.constant(files, dtype=tf.string)
    numbers = tf.data.Dataset.range(len(files))
    if shard_info is not None:
      numbers = numbers.shard(shard_info.num_shards, shard_info.index)
    if shuffle:
      numbers = numbers.shuffle(max(1, len(files)), seed=seed)
    return numbers.interleave(
      lambda i: self._reader(tf.gather(paths, i), i), cycle_length=FILES_AT_ONCE, block_length=1
    )

  def fingerprint(self, split: str) -> dict[str, Any]:
    """Returns what identifies the data of `split`."""
    facts = discovery.fingerprint(self.list_shards(split))
    if isinstance(self._reader, BlockReader) and self._reader.chosen:
      facts['columns'] = dict(self._reader.columns)
    if isinstance(self._reader, BlockReader) and self._reader.form.errors != 'strict':
      facts['errors'] = self._reader.form.errors
    return facts

  @property
  def block_reader(self) -> Optional[BlockReader]:
    """What reads the files, if it counts their damage."""
    return self._reader if isinstance(self._reader, BlockReader) else None

  @property
  def problem(self) -> Optional[DataError]:
    """What stopped the reader, if it says so."""
    return getattr(self._reader, 'problem', None)


class HashSplitSource(seqio.DataSource):
  """All documents of `files`, dealt to train and validation by a hash of their text."""

  def __init__(self, files: Sequence[str], *, reader: Reader):
    self._documents = DocumentSource(lambda: {'all': files}, reader=reader, splits=('all',))
    super().__init__(splits=('train', 'validation'))

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> Sequence[str]:
    del split  # Both splits read all files.
    return self._documents.list_shards('all')

  def get_dataset(
    self,
    split: str = 'train',
    shuffle: bool = True,
    seed: Optional[int] = None,
    shard_info: Optional[seqio.ShardInfo] = None,
    **unused: Any,
  ) -> tf.data.Dataset:
    del unused
    documents = self._documents.get_dataset(
      'all', shuffle=shuffle, seed=seed, shard_info=shard_info
    )
    return documents.filter(lambda x: _is_validation(x) == (split == 'validation'))

  def fingerprint(self, split: str) -> dict[str, Any]:
    """Returns what identifies the data of both splits."""
    del split
    return self._documents.fingerprint('all')

  @property
  def block_reader(self) -> Optional[BlockReader]:
    """What reads the files, if it counts their damage."""
    return self._documents.block_reader

  @property
  def problem(self) -> Optional[DataError]:
    """What stopped the reader, if it says so."""
    return self._documents.problem


def _is_validation(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
  text = tf.strings.join(
    [example[name] for name in ('inputs', 'targets') if name in example], separator='\t'
  )
  return tf.strings.to_hash_bucket_fast(text, discovery.VALIDATION_ONE_IN) == 0


def source_fingerprint(source: seqio.DataSource, *, split: str) -> dict[str, Any]:
  """Returns JSON-ready facts that identify the data behind any SeqIO source."""
  if isinstance(source, (DocumentSource, HashSplitSource, LabelledSource)):
    return source.fingerprint(split)
  if isinstance(source, seqio.TfdsDataSource):
    info = source.tfds_dataset.info
    return {
      'tfds': info.full_name,
      'examples': info.splits[split].num_examples if split in info.splits else None,
    }
  if isinstance(source, seqio.FileDataSource):
    paths = sorted(source.list_shards(split))
    if paths and all(os.path.isfile(path) for path in paths):
      return discovery.fingerprint(paths)
    # Not local files: names and sizes are what can be had without reading them.
    sizes = [(os.path.basename(path), tf.io.gfile.stat(path).length) for path in paths]
    return {
      'files': len(paths),
      'bytes': sum(size for _, size in sizes),
      'hash': hashlib.sha256(repr(sizes).encode()).hexdigest()[:16],
    }
  return {'kind': type(source).__name__, 'examples': source.num_input_examples(split)}


def file_facts(source: seqio.DataSource, *, split: str) -> Facts:
  """Returns facts of the files behind any SeqIO source; without files, what identifies its data."""
  paths = []
  if isinstance(source, LabelledSource):
    paths = source.files
  elif isinstance(
    source, (DocumentSource, HashSplitSource, seqio.FileDataSource, seqio.TfdsDataSource)
  ):
    paths = sorted(source.list_shards(split))
  if paths and all(os.path.isfile(path) for path in paths):
    return same_on_hosts.file_facts(paths)
  text = json.dumps(source_fingerprint(source, split=split), sort_keys=True)
  return {'source': (text, text)}


def source_paths(source: seqio.DataSource, *, split: str) -> list[str]:
  """Returns the files that `split` is read from; none where its fingerprint covers all of them."""
  if not isinstance(
    source, (DocumentSource, HashSplitSource, seqio.FileDataSource, seqio.TfdsDataSource)
  ):
    return []
  return [
    path
    for path in map(os.fspath, source.list_shards(split))
    if '://' in path or os.path.isfile(path)
  ]


def remote_file(path: str) -> SourceFile:
  """Returns size and modification time of an object in remote storage."""
  stat = tf.io.gfile.stat(path)
  return SourceFile(stat.length, stat.mtime_nsec)


def reading_problem(source: seqio.DataSource) -> Optional[DataError]:
  """Returns the DataError that a reader of `source` met inside tf.data, if it did."""
  return getattr(source, 'problem', None)


def allow_damage(source: seqio.DataSource, max_corrupt_fraction: float) -> bool:
  """Sets how much of `source` may be damaged; returns whether its reader counts damage at all."""
  reader = getattr(source, 'block_reader', None)
  if reader is not None:
    reader.damage.max_fraction = max_corrupt_fraction
  return reader is not None


def begin_part(source: seqio.DataSource) -> None:
  """Counts the records of `source` anew, for one part of it: see `Damage.begin_part`."""
  if (reader := getattr(source, 'block_reader', None)) is not None:
    reader.damage.begin_part()


def records_read(source: seqio.DataSource) -> Records:
  """Returns how many records were read and were damaged; none if its reader does not count."""
  reader = getattr(source, 'block_reader', None)
  return Records() if reader is None else reader.damage.records


class Utf8Reader:
  """A reader for `DocumentSource` that refuses text that is not UTF-8.

  A tokenizer would turn such bytes into U+FFFD without a word.

  Args:
    read: `read_spans` or `read_lines`.

  Attributes:
    problem: the DataError that stopped the reading; see `BlockReader`.
  """

  def __init__(self, read: Callable[..., tf.data.Dataset]):
    self._read = read
    self.problem: Optional[DataError] = None

  def __call__(self, path: tf.Tensor, file_number: tf.Tensor) -> tf.data.Dataset:
    def checked(text: tf.Tensor) -> tf.Tensor:
      return tf.cond(tf.strings.regex_full_match(text, _UTF8), lambda: text, refuse)

    def refuse() -> tf.Tensor:
      never = tf.numpy_function(self._refuse, [path], tf.string, stateful=False)
      return tf.ensure_shape(never, [])

    return self._read(path, file_number, checked=checked)

  def _refuse(self, path: bytes) -> bytes:
    """Raises DataError for the first line of the file that is not UTF-8."""
    name = path.decode('utf-8', 'surrogateescape')
    with open(name, 'rb') as f:
      for number, line in enumerate(f, 1):
        try:
          line.decode()
        except UnicodeDecodeError as e:
          self.problem = not_utf8(f'{name}:{number}', e)
          raise self.problem from e
    raise DataError(f'{name} has changed while it was read.', fix='Start again.')


def _unchecked(text: tf.Tensor) -> tf.Tensor:
  return text


def read_spans(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': up to 64 lines of the file, 'document_end': is it its last span}."""
  del file_number
  lines = tf.data.TextLineDataset(path).map(lambda line: line + '\n')
  spans = lines.batch(LINES_PER_SPAN).map(lambda some: checked(tf.strings.reduce_join(some)))
  nothing = tf.constant('')
  # One behind: whether a span is the last is known from what follows it.
  return (
    spans.concatenate(tf.data.Dataset.from_tensors(nothing))
    .scan(
      nothing,
      lambda span, following: (
        following,
        {'targets': span, 'document_end': tf.strings.length(following) == 0},
      ),
    )
    .skip(1)
  )


def read_lines(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': line, 'document_end': True} for each line that is not blank."""
  del file_number
  lines = tf.data.TextLineDataset(path).filter(
    lambda line: tf.strings.length(tf.strings.strip(line)) > 0
  )
  return lines.map(lambda line: {'targets': checked(line), 'document_end': True})


class LabelledSource(seqio.DataSource):
  """Labelled texts, held in memory: {'inputs': text, 'label': class number}, pairs with 'text2'.

  Args:
    texts: returns them; called once, when the data is opened.
    splits: the splits that they have.
    files: that they come from.
  """

  def __init__(
    self, texts: Callable[[], LabelledTexts], *, splits: Sequence[str], files: Sequence[str] = ()
  ):
    self._texts = functools.cache(texts)
    self.files = tuple(files)
    super().__init__(splits=tuple(splits))

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> Sequence[str]:
    return [split]

  def num_input_examples(self, split: str) -> int:
    return len(self._texts().labels[split])

  def get_dataset(
    self,
    split: str = 'train',
    shuffle: bool = True,
    seed: Optional[int] = None,
    shard_info: Optional[seqio.ShardInfo] = None,
    **unused: Any,
  ) -> tf.data.Dataset:
    del unused
    table = self._texts()
    # Captured by the function below, not elements of the dataset: they stay out of its saved state.
    columns = {
      'inputs': tf.constant(table.texts[split], dtype=tf.string),
      'label': tf.constant(table.labels[split], dtype=tf.int32),
    }
    if table.texts2 is not None:
      columns['text2'] = tf.constant(table.texts2[split], dtype=tf.string)
    numbers = tf.data.Dataset.range(len(table.labels[split]))
    if shard_info is not None:
      numbers = numbers.shard(shard_info.num_shards, shard_info.index)
    if shuffle:
      numbers = numbers.shuffle(min(len(table.labels[split]), SHUFFLED_ROWS), seed=seed)
    return numbers.map(lambda i: {name: tf.gather(x, i) for name, x in columns.items()})

  def fingerprint(self, split: str) -> dict[str, Any]:
    """Returns what identifies the rows of `split`."""
    table, digest = self._texts(), hashlib.sha256()
    for text, label in zip(table.texts[split], table.labels[split]):
      digest.update(f'{label}\0{text}\0'.encode(errors='replace'))
    for text in table.texts2[split] if table.texts2 is not None else ():
      digest.update(f'{text}\0'.encode(errors='replace'))
    return {'examples': len(table.labels[split]), 'hash': digest.hexdigest()[:16]}
