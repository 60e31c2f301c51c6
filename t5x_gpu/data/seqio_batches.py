"""Batches from SeqIO Tasks and Mixtures through tf.data, resumable at any batch.

What is guaranteed: the global batch at step t is a function of (data, seed, t). Every process
builds the whole global stream and puts only its own rows on its devices, so the order does not
depend on how many hosts there are; each host pays for reading all of it.
"""

import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.config.json_schema import Fields, Whole, parse_json
from t5x_gpu.data import features
from t5x_gpu.data.batches import CLASS_NAMES, Batch, BatchSpec, DatasetConfig
from t5x_gpu.data.same_data import LIBRARIES, STREAMING, check_same_data, versions
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.data.streaming import class_prompts, task_lookup, task_prompts
from t5x_gpu.data.streaming import evaluated_tasks as evaluated_tasks_lib
from t5x_gpu.data.streaming import preparation as preparation_lib
from t5x_gpu.data.streaming.feature_converters import feature_converter as make_converter
from t5x_gpu.data.streaming.feature_converters import model_rows
from t5x_gpu.data.streaming.iterator_state import bytes_to_iterator, iterator_to_bytes
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import (
  TextVocabulary,
  named_vocabulary,
  text_vocabulary,
  vocabulary_fingerprint,
)
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.runtime.cluster.agreement import Facts

_MAGIC = b't5x_gpu data state 1\n'
_HEADER = Fields(
  {
    'batches_taken': Whole(),
    'data': dict,
    'tensorflow': str,
    'position_bytes': Whole(),
    'has_pending': bool,
  }
)
# A fixed number on every machine: parallel maps hold that many results, which the saved state
# contains, and it must restore on a host with other cores. 2 x 256 rows of packing are in flight.
_THREADS = 2
_PREFETCH_BATCHES = 2
# They decide about order and content.
_PACKAGES = ('tensorflow', 'seqio', 'tensorflow-text', 'sentencepiece', 'tokenizers')
log = logging.getLogger(__name__)


class SeqioBatches:
  """A `BatchIterator` over `make_dataset()`, whose every call gives the same stream."""

  def __init__(
    self,
    make_dataset: Callable[[], tf.data.Dataset],
    *,
    name: str,
    spec: BatchSpec,
    fingerprint: Mapping[str, Any],
    problem: Callable[[], Optional[DataError]],
    pad_last: bool,
    file_facts: Callable[[], Facts] = dict,
    paths: Callable[[], Mapping[str, Sequence[str]]] = dict,
    class_names: Optional[Sequence[str]] = None,
  ):
    self._make_dataset = make_dataset
    self.file_facts = file_facts  # of the source files, to compare them between hosts
    self._name = name
    self._spec = spec
    self._fingerprint = dict(fingerprint)
    self._problem = problem
    self._pad_last = pad_last
    self._paths = paths
    self._classes = {} if class_names is None else {CLASS_NAMES: list(class_names)}
    self._start()

  def _start(self) -> None:
    """Begins anew. A second iterator over one shuffled dataset would give another order, so the
    dataset is built anew as well."""
    self._iterator = iter(self._make_dataset())
    self._pending: Optional[Batch] = None
    self._batches_taken = 0

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = self.peek()
    self._pending = None
    self._batches_taken += 1
    return batch

  def peek(self) -> Batch:
    """Returns the next batch without taking it. Raises StopIteration at the end."""
    if self._pending is None:
      if self._iterator is None:
        raise StopIteration
      failure = ''
      try:
        batch = next(self._iterator)
      except tf.errors.OpError as e:
        failure = first_line(e)
      if failure:  # outside: the frames of `e` would keep the iterator, whose threads hang at exit
        raise self._problem() or DataError(
          f'Reading batch {self._batches_taken} of {self._name!r} failed: {failure}',
          fix='Check that the files of the task are complete and readable.',
        )
      self._pending = self._checked({name: x.numpy() for name, x in batch.items()})
    return self._pending

  def _checked(self, batch: Batch) -> Batch:
    if self._pad_last:
      missing = self._spec.batch_size - len(next(iter(batch.values())))
      # Rows of zeros: padding tokens, loss or label weight 0, segment 0.
      batch = {
        name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()
      }
    self._spec.check(batch)
    for name, bound in self._spec.vocab_sizes.items():
      largest = int(batch[name].max(initial=0))
      if name == features.LABEL and (largest >= bound or batch[name].min(initial=0) < 0):
        raise DataError(
          f'Batch {self._batches_taken} of {self._name!r} has labels from '
          f'{int(batch[name].min())} to {largest}; the model tells {bound} classes apart, which '
          f'are 0 to {bound - 1}.',
          fix="Set the model's num_classes to the number of classes, or take a split whose "
          'labels are known (the test splits of GLUE have -1 for all).',
          parameters=('EncoderModel.num_classes', 'DatasetConfig.split'),
        )
      if largest >= bound:
        raise DataError(
          f'Batch {self._batches_taken} of {self._name!r} has token id '
          f'{largest:,} in {name!r}; the model has a vocabulary of {bound:,}.',
          fix=f"Set the model's vocab_size to at least {largest + 1}, or mend the task: its "
          'vocabulary claims fewer ids than its preprocessors emit.',
          parameters=('DatasetConfig.mixture_or_task_name',),
        )
    return batch

  def get_state(self) -> bytes:
    """Returns position and buffers, compressed, with a fingerprint of the data."""
    pending = self._pending or {}
    position = iterator_to_bytes(self._iterator)
    tail = b''.join(np.ascontiguousarray(pending[name]).tobytes() for name in sorted(pending))
    header = {
      'batches_taken': self._batches_taken,
      'data': self._fingerprint,
      'tensorflow': tf.__version__,
      'position_bytes': len(position),
      'has_pending': bool(pending),
    }
    return _MAGIC + json.dumps(header).encode() + b'\n' + position + tail

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called.

    A state of another TensorFlow cannot be trusted to mean the same: then, as said in the log, the
    batches already taken are read once more and dropped, which is as exact and slower.

    Raises:
      DataError: not a state of this module, or of other data; the message names what differs.
    """
    header, position, tail = _parse_state(state)
    check_same_data(header['data'], json.loads(json.dumps(self._fingerprint)))
    self._start()
    taken = header['batches_taken']
    try:
      if header['tensorflow'] != tf.__version__:
        raise ValueError(f'written by TensorFlow {header["tensorflow"]}, this is {tf.__version__}')
      bytes_to_iterator(position, self._iterator)
      self._batches_taken = taken
      self._pending = self._read_pending(tail) if header['has_pending'] else None
    except ValueError as e:
      log.warning('data state: %s; reading %d batches again to get to the same place', e, taken)
      self._start()
      for _ in range(taken):
        next(self)

  def _read_pending(self, tail: bytes) -> Batch:
    pending, offset = {}, 0
    for name in sorted(self._spec.shapes):
      shape, dtype = self._spec.shapes[name], np.dtype(self._spec.dtypes[name])
      size = int(np.prod(shape)) * dtype.itemsize
      pending[name] = np.frombuffer(tail[offset : offset + size], dtype).reshape(shape).copy()
      offset += size
    return pending

  def describe(self) -> Mapping[str, Any]:
    """Returns what the batches are made from, and what is guaranteed about their order."""
    return {
      'mixture_or_task_name': self._name,
      **self._fingerprint,
      **self._classes,
      LIBRARIES: versions(_PACKAGES),
      'guarantee': STREAMING,
    }

  def source_files(self) -> SourceFiles:
    """Returns the files that the text comes from, as they are now."""
    return SourceFiles(self._paths(), stat_remote=seqio_sources.remote_file)

  def close(self) -> None:
    """Drops the tf.data pipeline and its threads."""
    self._iterator = None
    self._pending = None


def _parse_state(state: bytes) -> tuple[dict[str, Any], bytes, bytes]:
  try:
    if not state.startswith(_MAGIC):
      raise ValueError('it does not begin like one')
    head, _, rest = state[len(_MAGIC) :].partition(b'\n')
    header = parse_json(head, _HEADER)
    size = header['position_bytes']
  except ValueError as e:
    raise DataError(
      f'This data state ({len(state)} bytes) was not written by t5x_gpu.data.seqio_batches: {e}.',
      fix='Set DatasetConfig.module to the module that the checkpoint was trained with.',
      parameters=('DatasetConfig.module',),
    ) from e
  return header, rest[:size], rest[size:]


def _options() -> tf.data.Options:
  options = tf.data.Options()
  options.deterministic = True
  # With autotune a process hung 2 to 40 s at exit in the iterator's destructor; without, 2 s.
  options.autotune.enabled = False
  options.threading.private_threadpool_size = _THREADS
  options.threading.max_intra_op_parallelism = 1
  return options


def _fingerprint(
  task: task_lookup.TaskOrMixture, config: DatasetConfig, *, feature_converter: str, repeat: bool
) -> dict[str, Any]:
  subtasks = seqio.get_subtasks(task)
  facts = {
    'task': task_lookup.kind(config),
    'split': config.split,
    'seed': config.seed,
    'shuffle': config.shuffle,
    'pack': config.pack,
    'batch_size': config.batch_size,
    'task_feature_lengths': dict(config.task_feature_lengths),
    'repeat': repeat,
    'feature_converter': feature_converter,
    'use_cached': config.use_cached,
    'loss_on_targets_only': config.loss_on_targets_only,
  }
  for name, feature in sorted(task.output_features.items()):
    facts[f'vocabulary of {name}'] = vocabulary_fingerprint(
      feature.vocabulary, feature_converter=feature_converter
    )
  if isinstance(task, seqio.Mixture):
    facts['rates'] = {subtask.name: float(task.get_rate(subtask)) for subtask in subtasks}
  for subtask in subtasks:
    if config.split in subtask.splits:
      facts[f'source of {subtask.name}'] = seqio_sources.source_fingerprint(
        subtask.source, split=config.split
      )
  return facts


def _file_facts(task: task_lookup.TaskOrMixture, split: str) -> Facts:
  found = {}
  for subtask in seqio.get_subtasks(task):
    if split in subtask.splits:
      facts = seqio_sources.file_facts(subtask.source, split=split)
      found |= {f'{subtask.name}: {name}': fact for name, fact in facts.items()}
  return found


def _paths(task: task_lookup.TaskOrMixture, config: DatasetConfig) -> dict[str, list[str]]:
  """Returns task -> files that its examples are read from: SeqIO's cache, or its source."""
  found = {}
  for subtask in seqio.get_subtasks(task):
    if config.use_cached and subtask.cache_dir:
      prefix = seqio.utils.get_cached_tfrecord_prefix(subtask.cache_dir, config.split)
      found[subtask.name] = sorted(tf.io.gfile.glob(f'{prefix}*'))
    elif config.split in subtask.splits:
      found[subtask.name] = seqio_sources.source_paths(subtask.source, split=config.split)
  return found


def _dataset(
  task: task_lookup.TaskOrMixture,
  config: DatasetConfig,
  *,
  converter: seqio.FeatureConverter,
  feature_converter: str,
  repeat: bool,
) -> tf.data.Dataset:
  # Preprocessors of user tasks may use random operations without a seed of their own.
  tf.random.set_seed(config.seed)
  examples = task_lookup.examples(
    task, config, shuffle=config.shuffle, num_epochs=None if repeat else 1
  )
  rows = model_rows(
    examples,
    converter=converter,
    name=feature_converter,
    task_feature_lengths=config.task_feature_lengths,
    output_features=task.output_features,
  )
  batches = rows.batch(config.batch_size, drop_remainder=repeat)
  return batches.prefetch(_PREFETCH_BATCHES).with_options(_options())


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> SeqioBatches:
  """Returns the batches of `config`; the first one is already read, so that bad data shows here.

  Args:
    config: what to open.
    spec: what the model takes, `features.batch_spec(...)`.
    feature_converter: a key of `features.LAYOUTS`.
    repeat: reshuffle and start over at the end of the data. Otherwise stop there, the last batch
      filled up with rows of loss weight 0.
  Raises:
    ConfigError: no such feature converter, or a task module that cannot be imported.
    DataError: the task cannot give these batches.
  """
  features.check_batch_size(config.batch_size)
  if config.mixture_rates is not None:
    raise DataError(
      'DatasetConfig.mixture_rates is for prepared:DIR; '
      f'{config.mixture_or_task_name!r} is mixed as it was registered.',
      fix='Remove it, or prepare the mixture once (docs/data.md) and train on prepared:DIR.',
      parameters=('DatasetConfig.mixture_rates',),
    )
  features.check_lengths(feature_converter, task_feature_lengths=config.task_feature_lengths)
  features.check_pack(feature_converter, pack=config.pack)
  converter = make_converter(
    feature_converter, pack=config.pack, loss_on_targets_only=config.loss_on_targets_only
  )
  task = task_lookup.lookup(config)
  task_lookup.check(task, config, spec=spec, feature_converter=feature_converter)

  def problem() -> Optional[DataError]:
    found = (seqio_sources.reading_problem(t.source) for t in seqio.get_subtasks(task))
    return next((p for p in found if p is not None), None)

  task_lookup.check_not_empty(task, config, problem=problem)
  batches = SeqioBatches(
    lambda: _dataset(
      task, config, converter=converter, feature_converter=feature_converter, repeat=repeat
    ),
    name=config.mixture_or_task_name,
    spec=spec,
    fingerprint=_fingerprint(task, config, feature_converter=feature_converter, repeat=repeat),
    problem=problem,
    pad_last=not repeat,
    file_facts=functools.partial(_file_facts, task, config.split),
    paths=functools.partial(_paths, task, config),
    class_names=task_lookup.class_names(task),
  )
  try:
    batches.peek()
  except BaseException:
    batches.close()
    raise
  return batches


def vocabulary(config: DatasetConfig, *, feature_converter: str) -> TextVocabulary:
  """Returns the vocabulary of the task's targets, to encode prompts and decode samples.

  A task of classification has no targets in words: then it is that of the inputs. A config without
  a task names its vocabulary.
  """
  if not config.mixture_or_task_name:
    found = named_vocabulary(config.vocabulary)
  else:
    given = task_lookup.lookup(config).output_features
    found = given['targets' if 'targets' in given else 'inputs'].vocabulary
  return text_vocabulary(found, feature_converter=feature_converter)


def class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes of the task's labels in order, or None without labels."""
  return task_lookup.class_names(task_lookup.lookup(config))


# See the functions of t5x_gpu.data.batches that call these.
task_names = evaluated_tasks_lib.task_names
evaluated_tasks = evaluated_tasks_lib.open_tasks
prompt_text = task_prompts.prompt_text
class_text = class_prompts.class_text
preparation = preparation_lib.preparation
