"""Batches from SeqIO Tasks and Mixtures through tf.data, resumable at any batch.

The global batch at step t is a function of (data, seed, t). Every process builds the whole global
stream and puts its share of the rows on its devices, so the order does not depend on the number of
hosts; but every host reads all of the text. `SeqioBatches` is the iterator; `open_batches` and the
names at the end are the functions of a data module.
"""

import contextlib
import itertools
import json
import logging
import re
import time
import zlib
from collections.abc import Iterator
from typing import Optional

import numpy as np

from t5x_gpu.data import features
from t5x_gpu.data.batches import (
  CLASS_NAMES,
  Batch,
  BatchSpec,
  DatasetConfig,
  batch_hash,
  row_masks,
  with_masks,
)
from t5x_gpu.data.same_data import LIBRARIES, STREAMING, check_same_data, foreign_state
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.data.streaming import evaluated_tasks as evaluated_tasks_lib
from t5x_gpu.data.streaming import preparation as preparation_lib
from t5x_gpu.data.streaming import task_lookup, task_prompts
from t5x_gpu.data.streaming.feature_converters import feature_converter as make_converter
from t5x_gpu.data.streaming.feature_converters import gets_ids_plus_one, model_rows
from t5x_gpu.data.tasks import chat, preference
from t5x_gpu.data.tf_runtime import deterministic_options, seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import (
  TextVocabulary,
  named_vocabulary,
  text_vocabulary,
  vocabulary_fingerprint,
)
from t5x_gpu.errors import DataError, first_line, task_error
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.runtime.machine import versions
from t5x_gpu.storage.json_schema import Fields, Json, JsonObject, Whole, parse_json

_MAGIC = b't5x_gpu data state 1\n'
_HEADER = Fields(
  {
    'batches_taken': Whole(),
    'data': dict,
    'tensorflow': str,
    'position_bytes': Whole(),
    'has_pending': bool,
  },
  optional={'pipeline': Whole()},
)
# Files of TensorFlow's iterator checkpoint.
_FILES = ('position.index', 'position.data-00000-of-00001')
_COMPRESSION = 3  # level 6 is 2% smaller and takes 2.5 times as long
_folder_numbers = itertools.count()
# Number of batches to read twice at startup, if a restart would have to read batches again.
_COMPARED = 3
# These packages determine order and content.
_PACKAGES = ('tensorflow', 'seqio', 'tensorflow-text', 'sentencepiece', 'tokenizers')
log = logging.getLogger(__name__)


class SeqioBatches:
  """A resumable `BatchIterator` over the batches of a task, the same stream every time.

  Its state is the position of tf.data and its buffers, as bytes. TensorFlow cannot save the
  position of a pipeline that runs Python code (`from_generator`, `py_function`) or draws random
  numbers without a stateless seed. The state of such a pipeline is the number of batches taken, and
  a restart reads those batches again.

  Args:
    task: the checked task or mixture.
    config, spec, feature_converter: as for `open_batches`.
    repeat: whether the data start over; otherwise the last batch is padded with rows of zeros.
  """

  def __init__(
    self,
    task: task_lookup.TaskOrMixture,
    config: DatasetConfig,
    *,
    spec: BatchSpec,
    feature_converter: str,
    repeat: bool,
  ):
    self._task, self._config, self._spec = task, config, spec
    self._feature_converter, self._repeat = feature_converter, repeat
    self._name = config.mixture_or_task_name
    self._fingerprint = _fingerprint(
      task, config, feature_converter=feature_converter, repeat=repeat
    )
    class_names = task_lookup.class_names(task, spec.class_names)
    self._classes = {} if class_names is None else {CLASS_NAMES: list(class_names)}
    # Version of the dataset's operations; buffers of another version cannot be continued.
    self._pipeline = 2 if gets_ids_plus_one(feature_converter, task.output_features) else 1
    self._stateful_op = ''  # an operation whose position TensorFlow cannot save
    self._start()

  def _start(self) -> None:
    """Starts over, with a new dataset: a second iterator over a shuffled dataset changes order."""
    self._iterator = iter(self._dataset())
    self._names = sorted(self._iterator.element_spec)  # `with_masks` adds the other features
    self._pending: Optional[Batch] = None
    self._batches_taken = 0
    self._first_state: Optional[bytes] = None  # of an evaluation that has taken no batch
    self._saved_position: Optional[bytes] = None  # until the iterator moves

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    batch = self.peek()
    self._pending = self._first_state = None
    self._batches_taken += 1
    return batch

  def peek(self) -> Batch:
    """Returns the next batch without consuming it. Raises StopIteration at the end."""
    if self._pending is None:
      if self._iterator is None:
        raise StopIteration
      failure = ''
      self._saved_position = None
      try:
        batch = next(self._iterator)
      except StopIteration:
        if not self._repeat:
          raise
        failure = 'the source has no example when it is read again'
      except tf.errors.OpError as e:
        failure = first_line(e)
      # Not in `except`: the frames of `e` would keep the iterator, whose threads hang at exit.
      if failure:
        raise task_lookup.reading_problem(self._task) or DataError(
          f'Reading batch {self._batches_taken} of {self._name!r} failed: {failure}',
          fix='Check that the files of the task are complete and readable.',
        )
      self._pending = self._checked({name: x.numpy() for name, x in batch.items()})
    return self._pending

  def _checked(self, batch: Batch) -> Batch:
    if not self._repeat:
      missing = self._spec.batch_size - len(next(iter(batch.values())))
      # Rows of zeros: padding tokens, loss or label weight 0, segment 0.
      batch = {
        name: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1)) for name, x in batch.items()
      }
    batch = with_masks(batch, self._spec.shapes)
    self._spec.check(batch)
    for name, bound in self._spec.vocab_sizes.items():
      largest = int(batch[name].max(initial=0))
      if name == features.LABEL and (largest >= bound or batch[name].min(initial=0) < 0):
        raise DataError(
          f'Batch {self._batches_taken} of {self._name!r} has labels from '
          f'{int(batch[name].min())} to {largest}; the model has {bound} classes, 0 to '
          f'{bound - 1}.',
          fix="Set the model's num_classes to the number of classes, or use a split whose labels "
          'are known (the test splits of GLUE have -1 for all).',
          parameters=('EncoderModel.num_classes', 'DatasetConfig.split'),
        )
      if largest >= bound:
        raise task_error(
          f'Batch {self._batches_taken} of {self._name!r} has token id '
          f'{largest:,} in {name!r}; the model has a vocabulary of {bound:,}.',
          fix=f"Set the model's vocab_size to at least {largest + 1}, or correct the task: its "
          'vocabulary has fewer ids than its preprocessors emit.',
        )
    return batch

  def prepare_to_resume(self) -> None:
    """Finds out whether the position can be saved; call it before consuming a batch.

    Raises:
      DataError: the position cannot be saved, and reading the pipeline again gives other batches.
    """
    self._position()
    if not self._stateful_op:
      return
    # Otherwise parallel calls would assign their random numbers to examples in any order.
    tf.config.experimental.enable_op_determinism()
    first, _ = self._read_some()
    second, seconds = self._read_some()
    self._start()
    if first != second or not first:
      raise task_error(
        f'{self._name!r} gives other batches when it is read again, so a run could not be resumed '
        f'with the same data. Its pipeline calls {self._stateful_op}, whose position TensorFlow '
        'cannot save.',
        fix='Make the Python code of the task return the same examples in the same order each time '
        'that it is called: a new iterator for each call, and random numbers from a fixed seed '
        '(in preprocessors, seqio.map_over_dataset(num_seeds=1)).',
        docs='data.md#python-code-in-a-task',
      )
    if self._repeat:
      log.warning(
        'data: the pipeline of %r calls %s, whose position TensorFlow cannot save. So a restart '
        'reads all earlier batches again: the same batches, after about %.3g s per 1,000 steps.',
        self._name,
        self._stateful_op,
        1000 * seconds,
      )

  def _read_some(self) -> tuple[list[str], float]:
    """Returns hashes of the first batches, and the seconds for each batch after the first."""
    self._start()
    hashes: list[str] = []
    start = 0.0
    with contextlib.suppress(DataError):  # the source is exhausted
      for batch in itertools.islice(self, _COMPARED):
        start = start or time.perf_counter()
        hashes.append(batch_hash(batch))
    return hashes, (time.perf_counter() - start) / max(1, len(hashes) - 1)

  def _position(self) -> bytes:
    """Returns the position of the iterator, buffers included; b'' if it cannot be saved.

    TensorFlow saves only parts of the pipeline that have begun, so a failure may come late: at the
    second part of `concatenate`, for example.
    """
    if not self._stateful_op:
      try:
        if self._saved_position is None:
          self._saved_position = _to_bytes(self._iterator)
        return self._saved_position
      except tf.errors.FailedPreconditionError as e:
        found = re.search(r'(\w+) is stateful', str(e))
        if found is None:
          raise
        self._stateful_op = found[1]
    return b''

  def get_state(self) -> bytes:
    """Returns position and buffers, compressed, with a fingerprint of the data.

    The position is empty if it cannot be saved; then `set_state` reads the batches again.
    """
    position = self._position()
    state = self._state(self._batches_taken, position, (position and self._pending) or {})
    if not (self._repeat or self._batches_taken):
      self._first_state = state
    return state

  def counted_state(self, *, ago: int = 0) -> bytes:
    """Returns a state without position or buffers; see `FileBatchIterator`."""
    return self._state(self._batches_taken - ago, b'', {})

  def _state(self, batches_taken: int, position: bytes, pending: Batch) -> bytes:
    names = self._names if pending else ()
    tail = b''.join(np.ascontiguousarray(pending[name]).tobytes() for name in names)
    header = {
      'batches_taken': batches_taken,
      'data': self._fingerprint,
      'tensorflow': tf.__version__,
      'position_bytes': len(position),
      'has_pending': bool(pending),
      'pipeline': self._pipeline,
    }
    return _MAGIC + json.dumps(header).encode() + b'\n' + position + tail

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called.

    A state from another version of TensorFlow or t5x_gpu may have a different meaning, and the
    position of some pipelines cannot be saved. In these cases, reads the earlier batches again and
    drops them, which is exact but slower, and is logged.

    Raises:
      DataError: the state is not of this module, or the data differ; the message lists differences.
    """
    if state == self._first_state:  # already there
      return
    header, position, tail = _parse_state(state)
    now = json.loads(json.dumps(self._fingerprint))
    check_same_data(header['data'], now, by_hash=self._sources_by_hash)
    taken = header['batches_taken']
    if not position:
      self._start()
      self._read_again(taken)
      return
    try:
      if header['tensorflow'] != tf.__version__:
        raise ValueError(f'written by TensorFlow {header["tensorflow"]}, this is {tf.__version__}')
      if header.get('pipeline', 1) != self._pipeline:
        raise ValueError(
          'written by a version of t5x_gpu that read these tokens in another way, so its buffers '
          'cannot be continued'
        )
      self._move(position)
      self._batches_taken, self._first_state = taken, None
      self._pending = self._read_pending(tail) if header['has_pending'] else None
    except ValueError as e:
      log.warning('data state: %s; reading %d batches again to get to the same place', e, taken)
      self._start()
      self._read_again(taken)

  def _move(self, position: bytes) -> None:
    """Moves the iterator; a new dataset takes a second to build, so it is built only if needed.

    TensorFlow cannot move an iterator that has filled `Dataset.cache` to a position before its end.

    Raises:
      ValueError: the position cannot be read for this dataset.
    """
    self._saved_position = None
    with contextlib.suppress(ValueError):
      if self._iterator is not None:
        _from_bytes(position, self._iterator)
        return
    self._start()
    _from_bytes(position, self._iterator)

  def _read_again(self, number: int) -> None:
    """Consumes batches up to an earlier position."""
    start = time.monotonic()
    for _ in range(number):
      next(self)
    if number:
      log.info('data: read %d batches again in %.3g s', number, time.monotonic() - start)

  def _read_pending(self, tail: bytes) -> Batch:
    pending, offset = {}, 0
    for name in self._names:
      shape, dtype = self._spec.shapes[name], np.dtype(self._spec.dtypes[name])
      size = int(np.prod(shape)) * dtype.itemsize
      pending[name] = np.frombuffer(tail[offset : offset + size], dtype).reshape(shape).copy()
      offset += size
    return with_masks(pending, self._spec.shapes)

  def describe(self) -> Json:
    """Returns the facts that identify the data, and the guarantee about its order."""
    return {
      'mixture_or_task_name': self._name,
      **self._fingerprint,
      **self._classes,
      LIBRARIES: versions(_PACKAGES),
      'guarantee': STREAMING,
    }

  def _dataset(self) -> tf.data.Dataset:
    """Returns a new dataset of the batches."""
    config = self._config
    # Preprocessors of user tasks may use random operations without a seed.
    tf.random.set_seed(config.seed)
    examples = task_lookup.examples(
      self._task, config, shuffle=config.shuffle, num_epochs=None if self._repeat else 1
    )
    rows = model_rows(
      examples,
      converter=make_converter(
        self._feature_converter, pack=config.pack, loss_on_targets_only=config.loss_on_targets_only
      ),
      name=self._feature_converter,
      task_feature_lengths=config.task_feature_lengths,
      output_features=self._task.output_features,
      class_numbers=task_lookup.class_numbers(self._task, self._spec.class_names),
      masks=row_masks(self._spec.shapes),
    )
    batches = rows.batch(config.batch_size, drop_remainder=self._repeat)
    return batches.prefetch(_PREFETCH_BATCHES).with_options(deterministic_options(_THREADS))

  def _sources_by_hash(self) -> Json:
    return {
      f'source of {subtask.name}': subtask.source.fingerprint_by_hash()
      for subtask in seqio.get_subtasks(self._task)
      if isinstance(subtask.source, seqio_sources.DocumentSource)
    }

  def file_facts(self) -> Facts:
    """Returns facts about the source files, to compare them between hosts."""
    found, split = {}, self._config.split
    for subtask in seqio.get_subtasks(self._task):
      if split in subtask.splits:
        facts = seqio_sources.file_facts(subtask.source, split=split)
        found |= {f'{subtask.name}: {name}': fact for name, fact in facts.items()}
    return found

  def watched_files(self) -> list[str]:
    """Returns the source files, except of tables in memory."""
    paths = task_lookup.source_paths(self._task, self._config)
    return [path for some in paths.values() for path in some]

  def source_files(self) -> SourceFiles:
    """Returns the current state of the source files.

    The files of tables in memory count only for an evaluation: for training, `set_state` compares
    their rows.
    """
    paths = task_lookup.source_paths(self._task, self._config, in_memory=not self._repeat)
    return SourceFiles(paths, stat_remote=seqio_sources.remote_file)

  def close(self) -> None:
    """Drops the tf.data pipeline and its threads."""
    self._iterator = None
    self._pending = self._first_state = self._saved_position = None


def _parse_state(state: bytes) -> tuple[JsonObject, bytes, bytes]:
  try:
    if not state.startswith(_MAGIC):
      raise ValueError('its first bytes differ')
    head, _, rest = state[len(_MAGIC) :].partition(b'\n')
    header = parse_json(head, _HEADER)
    size = header['position_bytes']
  except ValueError as e:
    raise foreign_state(state, module='t5x_gpu.data.seqio_batches', reason=str(e)) from e
  return header, rest[:size], rest[size:]


@contextlib.contextmanager
def _folder_in_memory() -> Iterator[str]:
  """Yields a folder for TensorFlow's files: a save must not fail because TMPDIR is full."""
  folder = f'ram://t5x_gpu_position_{next(_folder_numbers)}'
  tf.io.gfile.makedirs(folder)
  try:
    yield folder
  finally:
    tf.io.gfile.rmtree(folder)


def _to_bytes(iterator: tf.data.Iterator) -> bytes:
  """Returns the position of `iterator`, buffers included."""
  with _folder_in_memory() as folder:
    tf.train.Checkpoint(iterator=iterator).write(f'{folder}/position')
    parts = []
    for name in _FILES:
      with tf.io.gfile.GFile(f'{folder}/{name}', 'rb') as f:
        data = f.read()
      parts += [len(data).to_bytes(8, 'big'), data]
  return zlib.compress(b''.join(parts), _COMPRESSION)


def _from_bytes(state: bytes, iterator: tf.data.Iterator) -> None:
  """Moves an `iterator` over the same dataset to the position in `state`.

  Raises:
    ValueError: `_to_bytes` did not write these bytes, or this TensorFlow cannot read them for this
      dataset.
  """
  try:
    data = zlib.decompress(state)
  except zlib.error as e:
    raise ValueError(f'damaged: {e}') from e
  with _folder_in_memory() as folder:
    for name in _FILES:
      size = int.from_bytes(data[:8], 'big')
      if len(data) < 8 + size:
        raise ValueError('cut short')
      with tf.io.gfile.GFile(f'{folder}/{name}', 'wb') as f:
        f.write(data[8 : 8 + size])
      data = data[8 + size :]
    try:
      tf.train.Checkpoint(iterator=iterator).read(f'{folder}/position').assert_consumed()
    except (tf.errors.OpError, AssertionError) as e:
      raise ValueError(first_line(e)) from e


# The same on every machine: the saved state contains the results of parallel maps, and hosts with
# different numbers of cores must be able to restore it. 2 x 256 rows of packing are in flight.
_THREADS = 2
_PREFETCH_BATCHES = 2


def _fingerprint(
  task: task_lookup.TaskOrMixture, config: DatasetConfig, *, feature_converter: str, repeat: bool
) -> JsonObject:
  subtasks = seqio.get_subtasks(task)
  facts = {
    'task': task_lookup.kind(config),
    **config.facts(feature_converter=feature_converter, repeat=repeat),
    'use_cached': config.use_cached,
  }
  for name, feature in sorted(task.output_features.items()):
    facts[f'vocabulary of {name}'] = vocabulary_fingerprint(feature.vocabulary)
  facts |= chat.template_facts(task) | preference.template_facts(task)
  if isinstance(task, seqio.Mixture):
    facts['rates'] = {subtask.name: float(task.get_rate(subtask)) for subtask in subtasks}
  for subtask in subtasks:
    if config.split in subtask.splits:
      facts[f'source of {subtask.name}'] = seqio_sources.source_fingerprint(
        subtask.source, split=config.split
      )
  return facts


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> SeqioBatches:
  """Returns the batches of `config`. Reads the first batch, so that bad data is an error here.

  Args:
    config: what to open.
    spec: the batches that the model accepts, `features.batch_spec(...)`.
    feature_converter: a key of `features.LAYOUTS`.
    repeat: reshuffle and start over at the end of the data. Otherwise stop there, and pad the last
      batch with rows of loss weight 0.
  Raises:
    ConfigError: the feature converter is unknown, or a task module cannot be imported.
    DataError: the task cannot provide these batches, or has none (NoExamplesError).
  """
  features.check_batch_size(config.batch_size)
  if config.mixture_rates is not None:
    raise DataError(
      'DatasetConfig.mixture_rates works only for prepared:DIR; '
      f'{config.mixture_or_task_name!r} has the rates that it was registered with.',
      fix='Remove it, or prepare the mixture once (docs/data.md) and train on prepared:DIR.',
      parameters=('DatasetConfig.mixture_rates',),
    )
  features.check_lengths(feature_converter, task_feature_lengths=config.task_feature_lengths)
  features.check_pack(feature_converter, pack=config.pack)
  task = task_lookup.lookup(config)
  task_lookup.check(task, config, spec=spec, feature_converter=feature_converter)
  if repeat:  # otherwise the first batch shows it, without a second pipeline
    task_lookup.check_not_empty(task, config)
  options = dict(spec=spec, feature_converter=feature_converter, repeat=repeat)
  batches = task_lookup.readable(task, config, lambda: SeqioBatches(task, config, **options))
  is_empty = False
  try:
    batches.peek()
    batches.prepare_to_resume()
  except StopIteration:
    is_empty = True
  except BaseException:
    batches.close()
    raise
  if is_empty:
    batches.close()
    raise task_lookup.no_examples(task, config)
  return batches


def vocabulary(config: DatasetConfig, *, feature_converter: str) -> TextVocabulary:
  """Returns the vocabulary of the task's targets, to encode prompts and decode samples.

  The targets of classification are not text, so its result is the vocabulary of the inputs. A
  config without a task names its vocabulary.
  """
  if not config.mixture_or_task_name:
    found = named_vocabulary(config.vocabulary)
  else:
    given = task_lookup.lookup(config).output_features
    found = given['targets' if 'targets' in given else 'inputs'].vocabulary
  return text_vocabulary(found)


def class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes of the task's labels in order, or None without labels."""
  return task_lookup.class_names(task_lookup.lookup(config))


# See t5x_gpu.data.data_module.DataModule.
task_names = evaluated_tasks_lib.task_names
evaluated_tasks = evaluated_tasks_lib.open_tasks
prompt_text = task_prompts.prompt_text
class_text = task_prompts.class_text
preparation = preparation_lib.preparation
survey = task_lookup.survey
texts = task_lookup.texts
