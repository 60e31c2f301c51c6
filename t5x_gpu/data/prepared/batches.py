"""Reads batches of rows packed by `python -m t5x_gpu.prepare`: `prepared:DIR`, through Grain.

The global batch at step t is a function of (data, rates, seed, t): `mixed_rows` orders the rows, so
seeking to any step is immediate. Every process has the global batch, but `LazyBatch` reads only the
rows for its devices. `check_model` refuses rows that do not fit the model or the config. Imports
neither TensorFlow nor SeqIO.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import grain
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

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
from t5x_gpu.data.prepared.index import INDEX, Index, check_shards, read_index
from t5x_gpu.data.prepared.shard_writer import decode_into
from t5x_gpu.data.same_data import LIBRARIES, resumed_step
from t5x_gpu.errors import DataError, Problem, did_you_mean, first_line, task_error
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.runtime.machine import versions
from t5x_gpu.storage.json_schema import Fields, Json, JsonObject, Whole
from t5x_gpu.storage.user_paths import expanded_path

_log = logging.getLogger(__name__)

_NAME = 'DatasetConfig.mixture_or_task_name'


def check_model(
  index: Index, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  """Raises DataError, with all differences, unless the rows fit this model and config.

  Args:
    index: index of the prepared split.
    config: dataset config of the run.
    spec: the batches that the model accepts.
    feature_converter: the model's feature converter.
  """
  asked = {
    'feature_converter': feature_converter,
    'pack': config.pack,
    'task_feature_lengths': dict(config.task_feature_lengths),
    'loss_on_targets_only': config.loss_on_targets_only,
  }
  problems = [
    f'{name}: prepared with {getattr(index, name)!r}, the run has {value!r}.'
    for name, value in asked.items()
    if getattr(index, name) != value
  ]
  if spec.class_names and tuple(index.class_names or ()) != spec.class_names:
    problems.append(
      f'EncoderModel.class_names: prepared with {index.class_names}, the model has '
      f'{list(spec.class_names)}.'
    )
  problems += _text_problems(index, config, feature_converter=feature_converter)
  lengths = {name: shape[1] if len(shape) > 1 else 0 for name, shape in spec.shapes.items()}
  older = {name: length for name, length in lengths.items() if name not in row_masks(lengths)}
  if not problems and dict(index.features) not in (lengths, older):
    problems.append(
      f'features: prepared with {", ".join(index.features)}, the run has '
      f'{", ".join(spec.shapes)}, or other lengths.'
    )
  if not problems:
    sizes = _largest_ids(index, feature_converter)
    problems += [
      f'{name}: the rows have ids up to {size - 1:,}, the model has {spec.vocab_sizes[name]:,} ids.'
      for name, size in sizes.items()
      if size > spec.vocab_sizes.get(name, size)
    ]
  if problems:
    folder = config.mixture_or_task_name.removeprefix(PREPARED)
    raise DataError(
      f'{folder} was prepared for another model',
      problems=[Problem(problem) for problem in problems],
      fix='Prepare it for this model: python -m t5x_gpu.prepare --gin_file=MY.gin '
      '--output=OTHER_DIR'
      f"\n(with MIXTURE_OR_TASK_NAME = '{index.source_config['mixture_or_task_name']}'"
      '), or set the values that DIR was prepared with (VOCABULARY = None uses its vocabulary).',
      parameters=(
        _NAME,
        'DatasetConfig.task_feature_lengths',
        'DatasetConfig.pack',
        'DatasetConfig.vocabulary',
      ),
      docs='data.md',
    )


def _text_problems(index: Index, config: DatasetConfig, *, feature_converter: str) -> Iterator[str]:
  """Yields differences between the tokenization of the rows and the run's config."""
  variables = json.loads(json.dumps(config.chat_template_variables))
  prepared_with = index.source_config.get('chat_template_variables')
  if variables and variables != prepared_with:
    yield f'chat_template_variables: prepared with {prepared_with}, the run has {variables}.'
  names = {v['name'] for v in index.vocabularies.values() if v['name'] != 'classes'}
  if config.vocabulary is not None and _located(config.vocabulary) not in map(_located, names):
    known = ', '.join(sorted(names))
    yield f'vocabulary: prepared with {known}, the run has {config.vocabulary!r}.'
  for parts in features.layout(feature_converter).tokens.values():
    for part in parts:
      if part not in index.vocabularies:
        yield f'vocabulary: prepared without a vocabulary for {part!r}.'


def _located(vocabulary: str) -> str:
  """Returns the name of a vocabulary with the path of its file as the system sees it."""
  kind, _, path = vocabulary.partition(':')
  if kind not in ('sentencepiece', 'huggingface') or '://' in path:
    return vocabulary
  path = os.path.expanduser(path).removesuffix('/tokenizer.json')  # of huggingface:, in a folder
  return f'{kind}:{os.path.realpath(path)}'


def _largest_ids(index: Index, feature_converter: str) -> dict[str, int]:
  """Returns model feature -> exclusive bound of its ids, in the rows and in the vocabulary."""
  bounds: dict[str, int] = collections.defaultdict(int)
  for member in index.members.values():
    for shard in member.shards:
      for name, value in shard.largest.items():
        bounds[name] = max(bounds[name], value + 1)
  kind = features.layout(feature_converter)
  for name, parts in kind.tokens.items():
    bounds[name] = max(bounds[name], *(index.vocabularies[part]['size'] for part in parts))
  if index.class_names:
    count = len(index.class_names) + (kind.classes == features.LABELS)
    bounds[kind.classes] = max(bounds[kind.classes], count)
  return dict(bounds)


# Reads the rows with these numbers into the arrays of the batch.
ReadRows = Callable[[Sequence[int], dict[str, np.ndarray]], None]


class LazyBatch:
  """The rows of one global batch, read on access.

  A process accesses only the rows for its devices (`Layout.put_batch`), so other rows are never
  read. Using an array as a whole reads all rows.

  Args:
    spec: shapes and dtypes.
    read: reads rows into the arrays of all features.
  Attributes:
    asked: row numbers that were accessed by index, not as part of a whole array.
  """

  def __init__(self, spec: BatchSpec, *, read: ReadRows):
    # The pages of np.zeros use memory only after a write.
    self._arrays = {name: np.zeros(spec.shapes[name], spec.dtypes[name]) for name in spec.shapes}
    self._have = np.zeros(spec.batch_size, bool)
    self._read = read
    self._lock = threading.Lock()
    self.asked: set[int] = set()
    self.features = {name: LazyArray(self, name) for name in spec.shapes}

  def need(self, rows: Sequence[int]) -> None:
    """Reads the rows among `rows` that have not been read yet."""
    with self._lock:
      missing = [row for row in rows if not self._have[row]]
      if missing:
        self._read(missing, self._arrays)
        self._have[missing] = True

  def array(self, name: str) -> np.ndarray:
    """Returns a feature; unread rows are zeros."""
    return self._arrays[name]


class LazyArray(NDArrayOperatorsMixin):
  """One feature of a LazyBatch; it behaves like a numpy array [batch, ...]."""

  def __init__(self, batch: LazyBatch, name: str):
    self._batch, self._name = batch, name
    array = batch.array(name)
    self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

  def __len__(self) -> int:
    return self.shape[0]

  def __getitem__(self, index: object) -> np.ndarray:
    """Returns part of the array; a row or a slice of rows reads only these rows."""
    rows = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(rows, (slice, int, np.integer)):
      return self.__array__()[index]
    numbers = range(len(self))[rows]
    numbers = [numbers] if isinstance(numbers, int) else numbers
    self._batch.asked.update(numbers)
    self._batch.need(numbers)
    return self._batch.array(self._name)[index]

  def __array__(
    self, dtype: Optional[np.typing.DTypeLike] = None, copy: Optional[bool] = None
  ) -> np.ndarray:
    self._batch.need(range(len(self)))
    return np.array(self._batch.array(self._name), dtype=dtype, copy=copy)

  def __array_ufunc__(
    self, ufunc: np.ufunc, method: str, *inputs: object, **options: object
  ) -> object:
    whole = [x.__array__() if isinstance(x, LazyArray) else x for x in inputs]
    return getattr(ufunc, method)(*whole, **options)

  def __getattr__(self, name: str) -> Any:
    if name.startswith('__'):  # copy and pickle probe for optional methods
      raise AttributeError(name)
    return getattr(self.__array__(), name)


ENDLESS = 2**62
_UNITS = 2**40  # rates are multiples of 1 / _UNITS
_RATES = 'DatasetConfig.mixture_rates'


class EvenMixture(grain.transforms.DatasetSelectionMap):
  """Maps row k of a mixture to (task, row number in the task).

  Task i gets n * rate[i] of the first n rows, give or take one per task. The first task takes its
  share of all rows, the second task its share of the rest, and so on.

  Args:
    rates: rates of the tasks, positive; they need not sum to 1.
  """

  def __init__(self, rates: Sequence[float]):
    total = sum(rates)
    self._units = [max(1, round(rate / total * _UNITS)) for rate in rates]

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> tuple[int, int]:
    # `before` rows reached this task; `passed` of them continue to the next tasks.
    left, before = sum(self._units), index
    for task, units in enumerate(self._units):
      left -= units
      passed = before * left // (left + units)
      if (before + 1) * left // (left + units) == passed:
        return task, before - passed
      before = passed
    raise AssertionError('the last task takes every row that reaches it')


def mixed_rows(
  tasks: Mapping[str, grain.MapDataset],
  *,
  rates: Mapping[str, float],
  seed: Optional[int],
  repeat: bool,
) -> grain.MapDataset:
  """Returns the rows in training order (endless) or evaluation order (each row once).

  Tasks are interleaved as evenly as their rates allow. In training, each task starts over, in
  another order, when it is exhausted, independently of the others.

  Args:
    tasks: name -> its rows, in the order of the files.
    rates: name -> share; training leaves out tasks with rate 0.
    seed: seed of the order; None for the order of the files. Training shuffles each epoch of each
      task separately. Evaluation shuffles the rows of all tasks together and ignores the rates.
    repeat: True for training.
  """
  if not repeat:
    rows = grain.MapDataset.concatenate(list(tasks.values()))
    return rows if seed is None else rows.shuffle(_seed(seed, 'all tasks'))
  names = [name for name in tasks if rates[name] > 0]
  endless = [
    (tasks[name] if seed is None else tasks[name].shuffle(_seed(seed, name))).repeat()
    for name in names
  ]
  return grain.MapDataset.select_from_datasets(endless, EvenMixture([rates[n] for n in names]))


def _seed(seed: int, name: str) -> int:
  # Grain shuffles epoch e with seed + e, so consecutive seeds would share epochs.
  return int.from_bytes(hashlib.sha256(f'{seed} {name}'.encode()).digest()[:4], 'big')


def checked_rates(
  given: Optional[Mapping[str, float]],
  *,
  own: Mapping[str, float],
  rows: Optional[Mapping[str, int]],
) -> dict[str, float]:
  """Returns task -> rate, summing to 1.

  Args:
    given: DatasetConfig.mixture_rates; missing tasks get rate 0. None for `own`.
    own: rates of the mixture.
    rows: task -> number of rows; None if a task may have none.
  Raises:
    DataError: unknown tasks, negative rates, only rates of 0, or a task without rows.
  """
  rates = dict(own if given is None else given)
  unknown = [name for name in rates if name not in own]
  if unknown:
    raise DataError(
      f'mixture_rates names {unknown[0]!r}, which is not in the prepared data.'
      + did_you_mean(unknown[0], own),
      fix=f'It has: {", ".join(own)}.',
      parameters=(_RATES,),
    )
  wrong = {
    name: rate
    for name, rate in rates.items()
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1e18
  }
  total = 0 if wrong else sum(rates.values())
  if not total:
    what = wrong or rates
    raise DataError(
      f'mixture_rates = {what}: rates are numbers of at least 0, and at least one is above 0.',
      fix=f'Set {_RATES} = {dict(own)}, the rates of the mixture, or others.',
      parameters=(_RATES,),
    )
  empty = [name for name, rate in rates.items() if rate > 0 and not rows[name]] if rows else []
  if empty:
    rest = {name: rate for name, rate in rates.items() if rows[name]}
    raise DataError(
      f'{empty[0]!r} has no rows but a rate of {rates[empty[0]] / total:.3g}.',
      fix=f'Leave it out: {_RATES} = {rest}.' if rest else 'Prepare a split that has examples.',
      parameters=(_RATES,),
    )
  return {name: rates.get(name, 0) / total for name in own}


GUARANTEE = (
  'prepared: the global batch at step t depends on (data, rates, seed, t) alone; each '
  'process reads its rows of it'
)
_PREFETCH_BATCHES = 2
_STATE = Fields({'prepared': Whole(1, 1), 'batches_taken': Whole(), 'data': dict})
_PACKAGES = ('grain', 'array-record', 'numpy')  # they determine order and content


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
    fingerprint: Json,
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
        fix=f'python -m t5x_gpu.data check {shlex.quote(self._name)} '
        'names the shards that have changed.',
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

  def describe(self) -> Json:
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
  return expanded_path(config.mixture_or_task_name.removeprefix(PREPARED))


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
  rows = {name: member.rows for name, member in index.members.items()}
  # An evaluation reads each row once, regardless of the rates.
  rates = checked_rates(config.mixture_rates, own=own, rows=rows if repeat else None)
  seed = config.seed if config.shuffle else None
  rows = mixed_rows(task_rows(folder, index), rates=rates, seed=seed, repeat=repeat)
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


@dataclasses.dataclass(frozen=True)
class _AllRows:
  """All rows of a shard, as ArrayRecord takes it: it does not open a file to count its rows.

  (A row range in the text of a path, `FILE[0:10]`, may have no line break before it.)
  """

  filename: str
  take: int
  examples_in_shard: int
  skip: int = 0


def task_rows(folder: pathlib.Path, index: Index) -> dict[str, grain.MapDataset]:
  """Returns task -> its records in the order of the files; leaves out tasks without rows."""
  found = {}
  for name, member in index.members.items():
    shards = [
      _AllRows(str(folder / index.split / shard.file), shard.rows, shard.rows)
      for shard in member.shards
      if shard.rows
    ]
    if shards:
      found[name] = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(shards))
  return found


def _fingerprint(
  index: Index, config: DatasetConfig, *, rates: Mapping[str, float], repeat: bool
) -> JsonObject:
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
