"""Files and labelled texts as SeqIO data sources: a stable order, resumable at any point.

SeqIO's FileDataSource shuffles *paths*, which become part of the saved iterator state and tie it to
one machine. `DocumentSource` shuffles indices into a sorted list, so a state can be restored on any
machine that has the same files.
"""

import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import tensorflow_datasets as tfds

from t5x_gpu.data import same_on_hosts
from t5x_gpu.data.sources import discovery
from t5x_gpu.data.sources.corrupt_records import Damage
from t5x_gpu.data.sources.labelled import LabelledTexts
from t5x_gpu.data.sources.readers import BlockReader
from t5x_gpu.data.sources.source_files import SourceFile
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.storage.json_schema import JsonObject

# Number of files open at once. The stream takes a span from each file in turn, so that consecutive
# spans come from many files.
FILES_AT_ONCE = 32
# Shuffle buffer for rows of a table; the saved state contains their numbers.
SHUFFLED_ROWS = 65536

Reader = Callable[[tf.Tensor, tf.Tensor], tf.data.Dataset]


class DocumentSource(seqio.DataSource):
  """A SeqIO source over files, parsed by `reader(path, file_number)`.

  Args:
    files: returns split -> paths in a stable order; called once, when the data is opened. Or a list
      of paths: then a hash of each document's text assigns it to train or validation.
    reader: makes examples from one file.
    splits: the keys of the result of `files`.
  """

  def __init__(
    self,
    files: Callable[[], Mapping[str, Sequence[str]]] | Sequence[str],
    *,
    reader: Reader,
    splits: Sequence[str] = ('train', 'validation'),
  ):
    self._by_hash = not callable(files)
    self._list_files = functools.cache(files) if callable(files) else lambda: {'all': files}
    self._reader = reader
    super().__init__(splits=tuple(splits))

  @property
  def supports_arbitrary_sharding(self) -> bool:
    return False

  def list_shards(self, split: str) -> Sequence[str]:
    return list(self._list_files()['all' if self._by_hash else split])

  def get_dataset(
    self,
    split: str = 'train',
    shuffle: bool = True,
    seed: Optional[int] = None,
    shard_info: Optional[seqio.ShardInfo] = None,
    **unused: object,
  ) -> tf.data.Dataset:
    del unused  # Task applies them.
    files = self.list_shards(split)
    paths = tf.constant(files, dtype=tf.string)
    numbers = tf.data.Dataset.range(len(files))
    if shard_info is not None:
      numbers = numbers.shard(shard_info.num_shards, shard_info.index)
    if shuffle:
      numbers = numbers.shuffle(max(1, len(files)), seed=seed)
    documents = numbers.interleave(
      lambda i: self._reader(tf.gather(paths, i), i), cycle_length=FILES_AT_ONCE, block_length=1
    )
    if not self._by_hash:
      return documents
    return documents.filter(lambda x: _is_validation(x) == (split == 'validation'))

  def fingerprint(self, split: str) -> JsonObject:
    """Returns facts that identify the data of `split`."""
    return self._facts(self.list_shards(split))

  def fingerprint_by_hash(self) -> JsonObject:
    """Returns the fingerprint of any split, as if a hash assigned the documents to splits."""
    return self._facts(sorted(itertools.chain.from_iterable(self._list_files().values())))

  def _facts(self, files: Sequence[str]) -> JsonObject:
    facts = discovery.fingerprint(files)
    if isinstance(self._reader, BlockReader) and self._reader.chosen:
      facts['columns'] = dict(self._reader.columns)
    if isinstance(self._reader, BlockReader) and self._reader.form.errors != 'strict':
      facts['errors'] = self._reader.form.errors
    return facts

  @property
  def damage(self) -> Optional[Damage]:
    """Counts damaged records; None if the reader does not count them."""
    return getattr(self._reader, 'damage', None)

  @property
  def problem(self) -> Optional[DataError]:
    """The error that stopped the reader, if the reader records it."""
    return getattr(self._reader, 'problem', None)


def file_source(
  files: Sequence[str], by_split: Optional[Mapping[str, Sequence[str]]], *, reader: Reader
) -> DocumentSource:
  """Returns the source of `files`; without `by_split` a hash assigns documents to splits."""
  if by_split is None:
    return DocumentSource(files, reader=reader)
  return DocumentSource(lambda: by_split, reader=reader, splits=tuple(by_split))


def _is_validation(example: Mapping[str, tf.Tensor]) -> tf.Tensor:
  text = tf.strings.join(
    [example[name] for name in ('inputs', 'targets') if name in example], separator='\t'
  )
  return tf.strings.to_hash_bucket_fast(text, discovery.VALIDATION_ONE_IN) == 0


class LabelledSource(seqio.DataSource):
  """Labelled texts in memory: {'inputs': text, 'label': class number}, for pairs also 'text2'.

  Args:
    texts: returns the texts; called once, when the data is opened.
    splits: splits of the texts.
    files: source files of the texts.
    label: name of the feature with the class number, or with a list of class numbers.
  """

  def __init__(
    self,
    texts: Callable[[], LabelledTexts],
    *,
    splits: Sequence[str],
    files: Sequence[str] = (),
    label: str = 'label',
  ):
    self._label = label
    self._texts = functools.cache(texts)
    self.files_in_memory = tuple(files)
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
    **unused: object,
  ) -> tf.data.Dataset:
    del unused
    table = self._texts()
    # The function below captures the columns, so they are not part of the saved state.
    columns = {
      'inputs': _column(table.texts[split], tf.string),
      self._label: _column(table.labels[split], tf.int32),
    }
    if table.texts2 is not None:
      columns['text2'] = tf.constant(table.texts2[split], dtype=tf.string)
    numbers = tf.data.Dataset.range(len(table.labels[split]))
    if shard_info is not None:
      numbers = numbers.shard(shard_info.num_shards, shard_info.index)
    if shuffle:
      numbers = numbers.shuffle(min(len(table.labels[split]), SHUFFLED_ROWS), seed=seed)
    return numbers.map(lambda i: {name: tf.gather(x, i) for name, x in columns.items()})

  def fingerprint(self, split: str) -> JsonObject:
    """Returns facts that identify the rows of `split`."""
    table, digest = self._texts(), hashlib.sha256()
    for text, label in zip(table.texts[split], table.labels[split]):
      digest.update(f'{label}\0{text}\0'.encode(errors='replace'))
    for text in table.texts2[split] if table.texts2 is not None else ():
      digest.update(f'{text}\0'.encode(errors='replace'))
    return {'examples': len(table.labels[split]), 'hash': digest.hexdigest()[:16]}


def _column(values: Sequence[object], dtype: tf.DType) -> tf.Tensor:
  """Returns a tensor of values, or of lists of values."""
  if values and isinstance(values[0], (list, tuple)):
    return tf.ragged.constant(values, dtype=dtype, ragged_rank=1)
  return tf.constant(values, dtype=dtype)


_FILE_SOURCES = (DocumentSource, seqio.FileDataSource, seqio.TfdsDataSource)


def tfds_builder(source: seqio.TfdsDataSource, split: str) -> tfds.core.DatasetBuilder:
  """Returns the dataset of `split`; a source may name a different dataset for each split."""
  loader = source.tfds_dataset
  if loader.tfds_splits is None:
    return loader.builder
  name, data_dir = loader.get_split_params(split)
  return tfds.builder(name, data_dir=data_dir) if name else tfds.builder_from_directory(data_dir)


def source_fingerprint(source: seqio.DataSource, *, split: str) -> JsonObject:
  """Returns JSON-ready facts that identify the data of any SeqIO source."""
  if isinstance(source, (DocumentSource, LabelledSource)):
    return source.fingerprint(split)
  if isinstance(source, seqio.TfdsDataSource):
    info = tfds_builder(source, split).info
    if source.tfds_dataset.tfds_splits is not None:
      split = source.tfds_dataset.tfds_splits[split].split  # may be a slice, 'train[:1%]'
      return {'tfds': info.full_name, 'examples': info.splits[split].num_examples}
    return {
      'tfds': info.full_name,
      'examples': info.splits[split].num_examples if split in info.splits else None,
    }
  if isinstance(source, seqio.FileDataSource):
    paths = sorted(source.list_shards(split))
    if paths and all(os.path.isfile(path) for path in paths):
      return discovery.fingerprint(paths)
    # Remote files: only names and sizes are known without reading them.
    sizes = [(os.path.basename(path), tf.io.gfile.stat(path).length) for path in paths]
    return {
      'files': len(paths),
      'bytes': sum(size for _, size in sizes),
      'hash': hashlib.sha256(repr(sizes).encode()).hexdigest()[:16],
    }
  return {'kind': type(source).__name__, 'examples': source.num_input_examples(split)}


def file_facts(source: seqio.DataSource, *, split: str) -> Facts:
  """Returns facts about the files of any SeqIO source; without local files, its fingerprint."""
  paths = []
  if isinstance(source, LabelledSource):
    paths = source.files_in_memory
  elif isinstance(source, _FILE_SOURCES):
    paths = sorted(source.list_shards(split))
  if paths and all(os.path.isfile(path) for path in paths):
    return same_on_hosts.file_facts(paths)
  text = json.dumps(source_fingerprint(source, split=split), sort_keys=True)
  return {'source': (text, text)}


def source_paths(source: seqio.DataSource, *, split: str, in_memory: bool = False) -> list[str]:
  """Returns the files of `split`; [] if the source has none.

  Args:
    source, split: the source and its split.
    in_memory: include the files of a source that holds its examples in memory.
  """
  if not isinstance(source, _FILE_SOURCES):
    return list(getattr(source, 'files_in_memory', ())) if in_memory else []
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
  """Returns the DataError that a reader of `source` raised inside tf.data, if any."""
  return getattr(source, 'problem', None)


def damage_of(source: seqio.DataSource) -> Optional[Damage]:
  """Returns the counter of damaged records of `source`; None if it does not have one."""
  return getattr(source, 'damage', None)
