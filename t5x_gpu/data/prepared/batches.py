"""Reads batches of rows packed by `python -m t5x_gpu.prepare`: `prepared:DIR`, through Grain.

The global batch at step t is a function of (data, rates, seed, t). Seeking to any step is
immediate, and each process reads only the rows for its devices. Imports neither TensorFlow nor
SeqIO.
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import grain
import numpy as np

from t5x_gpu.config.json_schema import Fields, Whole
from t5x_gpu.data import features
from t5x_gpu.data.batches import (
  CLASS_NAMES,
  PREPARED,
  Batch,
  BatchSpec,
  DatasetConfig,
  assumed_mask,
  row_masks,
)
from t5x_gpu.data.prepared import row_order
from t5x_gpu.data.prepared.compatibility import check_model
from t5x_gpu.data.prepared.index import INDEX, Index, read_index
from t5x_gpu.data.prepared.lazy_batch import LazyBatch
from t5x_gpu.data.prepared.shard_checks import check_shards
from t5x_gpu.data.prepared.shard_writer import decode_into
from t5x_gpu.data.same_data import LIBRARIES, resumed_step
from t5x_gpu.errors import first_line, task_error
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.runtime.host import versions

GUARANTEE = (
  'prepared: the global batch at step t depends on (data, rates, seed, t) alone; each '
  'process reads its rows of it'
)
_PREFETCH_BATCHES = 2
_STATE = Fields({'prepared': Whole(1, 1), 'batches_taken': Whole(), 'data': dict})
_PACKAGES = ('grain', 'array-record', 'numpy')  # they determine order and content
_log = logging.getLogger(__name__)


class PreparedBatches:
  """A `BatchIterator` over rows that can be read by number.

  Args:
    rows: row number -> record.
    num_rows: number of rows; None if endless.
    names: order of the features in a record.
    spec: spec of the batches.
    name: name of the data, for messages.
    fingerprint: facts that identify the data, its order and its batches.
    files: facts about the source files, to compare them between hosts.
    class_names: class names of the labels, or None.
  Attributes:
    rows_read: number of rows decoded so far.
  """

  def __init__(
    self,
    rows: grain.MapDataset,
    *,
    num_rows: Optional[int],
    names: Sequence[str],
    spec: BatchSpec,
    name: str,
    fingerprint: Mapping[str, Any],
    files: Facts,
    watched: Sequence[pathlib.Path] = (),
    class_names: Optional[Sequence[str]] = None,
  ):
    self._watched = tuple(watched)
    self._rows, self._num_rows, self._names, self._spec = rows, num_rows, tuple(names), spec
    self._name, self._fingerprint, self._files = name, dict(fingerprint), files
    # Rows of earlier versions lack masks.
    self._missing_masks = {m: s for m, s in row_masks(spec.shapes).items() if m not in names}
    self._classes = {} if class_names is None else {CLASS_NAMES: list(class_names)}
    self._reader = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='prepared_rows')
    self._ahead: dict[int, tuple[LazyBatch, concurrent.futures.Future]] = {}
    self._last: Optional[LazyBatch] = None
    self._step = 0
    self._closed = False
    self.rows_read = 0

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = self._batch()
    self._ahead.pop(self._step)
    self._step += 1
    self._read_ahead()
    self._last = batch
    return batch.features

  def peek(self) -> Batch:
    """Returns the next batch without consuming it. Raises StopIteration at the end."""
    return self._batch().features

  def _batch(self) -> LazyBatch:
    size = self._spec.batch_size
    if self._closed or (self._num_rows is not None and self._step * size >= self._num_rows):
      raise StopIteration
    if self._step not in self._ahead:
      self._ahead[self._step] = self._started(self._step, rows=())
    batch, done = self._ahead[self._step]
    done.result()
    return batch

  def _read_ahead(self) -> None:
    """Prefetches the next batches, only the rows that this process accessed in the last batch."""
    rows = tuple(sorted(self._last.asked)) if self._last is not None else ()
    size = self._spec.batch_size
    for step in range(self._step, self._step + _PREFETCH_BATCHES):
      if step not in self._ahead and (self._num_rows is None or step * size < self._num_rows):
        self._ahead[step] = self._started(step, rows=rows)

  def _started(
    self, step: int, *, rows: Sequence[int]
  ) -> tuple[LazyBatch, concurrent.futures.Future]:
    first = step * self._spec.batch_size

    def read(numbers: Sequence[int], arrays: dict[str, np.ndarray]) -> None:
      for number in numbers:
        # The last batch of an evaluation is padded with zeros, which have weight 0.
        if self._num_rows is None or first + number < self._num_rows:
          self._decode(first + number, arrays, number)

    batch = LazyBatch(self._spec, read=read)
    return batch, self._reader.submit(batch.need, rows)

  def _decode(self, row: int, arrays: dict[str, np.ndarray], number: int) -> None:
    try:
      decode_into(self._rows[row], {name: arrays[name] for name in self._names}, number)
      for mask, stack in self._missing_masks.items():
        stored = {name: arrays[name][number] for name in self._names}
        arrays[mask][number] = assumed_mask(stored, stack)
      self.rows_read += 1
    except Exception as e:  # ArrayRecord raises IndexError, RuntimeError and ValueError
      raise task_error(
        f'Row {row:,} of {self._name!r} cannot be read: {first_line(e)[:300]}',
        fix=f'python -m t5x_gpu.data check {self._name} names the shards that have changed.',
        docs='data.md',
      ) from e

  def get_state(self) -> bytes:
    """Returns the number of the next batch, and the facts that identify the data."""
    return self.counted_state()

  def counted_state(self, *, ago: int = 0) -> bytes:
    """Returns the state `ago` batches earlier; see `FileBatchIterator`."""
    return json.dumps(
      {
        'prepared': 1,
        'batches_taken': self._step - ago,
        'data': self._fingerprint,
        LIBRARIES: versions(_PACKAGES),
      }
    ).encode()

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called, immediately. Raises DataError if the data differ."""
    self._step = resumed_step(state, _STATE, module=__name__, now=self._fingerprint)
    self._ahead.clear()

  def describe(self) -> Mapping[str, Any]:
    """Returns the facts that identify the data, and the guarantee about its order."""
    return {
      'mixture_or_task_name': self._name,
      **self._fingerprint,
      **self._classes,
      LIBRARIES: versions(_PACKAGES),
      'guarantee': GUARANTEE,
    }

  def file_facts(self) -> Facts:
    """Returns facts about the source files, to compare them between hosts."""
    return self._files

  def watched_files(self) -> list[str]:
    """Returns the index and the shards."""
    return [os.fspath(path) for path in self._watched]

  def close(self) -> None:
    """Stops reading ahead."""
    self._closed = True
    self._ahead.clear()
    self._reader.shutdown(cancel_futures=True)


def folder_of(config: DatasetConfig) -> pathlib.Path:
  """Returns DIR of 'prepared:DIR'."""
  return pathlib.Path(config.mixture_or_task_name.removeprefix(PREPARED)).expanduser()


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> PreparedBatches:
  """Returns the batches of 'prepared:DIR'.

  Args:
    config: what to open. Packing, lengths and vocabulary must be the same as in DIR.
    spec: the batches that the model accepts, `features.batch_spec(...)`.
    feature_converter: a key of `features.LAYOUTS`.
    repeat: start over at the end of each task, in another order. Otherwise take every row once, and
      pad the last batch with rows of weight 0.
  Raises:
    DataError: DIR was not prepared for this model, is not finished, or has changed.
  """
  features.check_batch_size(config.batch_size)
  folder = folder_of(config)
  index = read_index(folder, split=config.split)
  check_model(index, config, spec=spec, feature_converter=feature_converter)
  check_shards(folder, index)
  own = {name: member.rate for name, member in index.members.items()}
  rates = row_order.checked_rates(
    config.mixture_rates,
    own=own,
    rows={name: member.rows for name, member in index.members.items()},
  )
  seed = config.seed if config.shuffle else None
  rows = row_order.mixed_rows(task_rows(folder, index), rates=rates, seed=seed, repeat=repeat)
  if repeat and index.rows < config.batch_size:
    _log.warning(
      '%s has %d rows, fewer than the %d of a batch: every batch repeats some rows.',
      folder,
      index.rows,
      config.batch_size,
    )
  return PreparedBatches(
    rows,
    num_rows=None if repeat else index.rows,
    names=tuple(index.features),
    spec=spec,
    name=config.mixture_or_task_name,
    fingerprint=_fingerprint(index, config, rates=rates, repeat=repeat),
    files=_file_facts(index, folder / config.split),
    watched=[folder / config.split / name for name in (INDEX, *_shard_files(index))],
    class_names=index.class_names,
  )


def task_rows(folder: pathlib.Path, index: Index) -> dict[str, grain.MapDataset]:
  """Returns task -> its records in the order of the files; leaves out tasks without rows."""
  found = {}
  for name, member in index.members.items():
    # With the row ranges, Grain does not open every file to count its rows.
    paths = [
      f'{folder / index.split / shard.file}[0:{shard.rows}]'
      for shard in member.shards
      if shard.rows
    ]
    if paths:
      found[name] = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths))
  return found


def _fingerprint(
  index: Index, config: DatasetConfig, *, rates: Mapping[str, float], repeat: bool
) -> dict[str, Any]:
  facts = {
    'task': index.source_config['mixture_or_task_name'].partition(':')[0],
    **config.facts(feature_converter=index.feature_converter, repeat=repeat),
    'rates': {name: round(rate, 12) for name, rate in rates.items()},
  }
  for name, vocabulary in sorted(index.vocabularies.items()):
    facts[f'vocabulary of {name}'] = vocabulary['fingerprint']
  for name, member in index.members.items():
    digest = hashlib.sha256(''.join(f'{s.rows} {s.sha256} ' for s in member.shards).encode())
    facts[f'rows of {name}'] = {'rows': member.rows, 'hash': digest.hexdigest()[:16]}
  return facts


def _file_facts(index: Index, folder: pathlib.Path) -> Facts:
  """Returns facts about index.json and the shards, from the digests in the index."""
  plan = hashlib.sha256(json.dumps(index.plan(), sort_keys=True).encode()).hexdigest()
  found = {INDEX: (plan, f'{folder / INDEX} ({plan[:12]})')}
  for member in index.members.values():
    for shard in member.shards:
      if shard.rows:
        found[shard.file] = shard.sha256, f'{folder / shard.file} ({shard.sha256[:12]})'
  return found


def _shard_files(index: Index) -> list[str]:
  return [shard.file for member in index.members.values() for shard in member.shards if shard.rows]


def _any_index(config: DatasetConfig) -> Index:
  """Returns the index of the split, or of another split of the same preparation."""
  splits = sorted(path.parent.name for path in folder_of(config).glob(f'*/{INDEX}'))
  split = config.split if config.split in splits or not splits else splits[0]
  return read_index(folder_of(config), split=split)


def source_config(config: DatasetConfig) -> DatasetConfig:
  """Returns the config of the prepared task or mixture; opening it may need the source files."""
  given = _any_index(config).source_config
  own = {**given, 'vocabulary': config.vocabulary or given['vocabulary']}
  return dataclasses.replace(config, **own, mixture_rates=None)


def text_config(config: DatasetConfig) -> DatasetConfig:
  """Returns a config for `vocabulary`: only the vocabulary, if its name suffices to open it."""
  index = _any_index(config)
  given = index.vocabularies.get('targets', next(iter(index.vocabularies.values())))
  if not given['by_name']:
    return source_config(config)
  return dataclasses.replace(
    config,
    mixture_or_task_name='',
    mixture_or_task_module=None,
    mixture_rates=None,
    vocabulary=given['name'],
    module=index.source_config['module'],
  )


def class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the class names of the labels, or None without labels."""
  index = _any_index(config)
  return None if index.class_names is None else tuple(index.class_names)
