"""Finds the SeqIO Task or Mixture that a DatasetConfig names (`lookup`), and checks it (`check`).

`examples` opens its examples. `class_names` and `class_numbers` describe its classes, which a model
may number differently.
"""

import dataclasses
import glob
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional, TypeVar, Union

import numpy as np

from t5x_gpu.config.gin_names import install_fix
from t5x_gpu.data import prepare_tfds
from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.data_module import Survey
from t5x_gpu.data.features import LABELS, layout
from t5x_gpu.data.sources import labelled, seqio_sources
from t5x_gpu.data.tasks import (
  builtin,
  chat,
  classification,
  multiple_choice,
  preference,
  pretraining,
  tables,
  tfds_tasks,
)
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import (
  ClassVocabulary,
  check_loads,
  end_id,
  named_vocabulary,
  vocabulary_name,
)
from t5x_gpu.errors import (
  ConfigError,
  DataError,
  NoExamplesError,
  did_you_mean,
  first_line,
  listed,
  task_error,
)

TaskOrMixture = Union[seqio.Task, seqio.Mixture]
Example = Mapping[str, np.ndarray]
_NAME = 'DatasetConfig.mixture_or_task_name'
_T = TypeVar('_T')


def class_names(task: TaskOrMixture, of_model: Sequence[str] = ()) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes in batches; None without labels or without names.

  Args:
    task: a task with labels.
    of_model: names of the model's classes, which take precedence.
  """
  for feature in task.output_features.values():
    if isinstance(feature.vocabulary, ClassVocabulary):
      return tuple(of_model) or feature.vocabulary.names
  return None


def class_numbers(task: TaskOrMixture, of_model: Sequence[str]) -> Optional[list[int]]:
  """Returns class number in the task -> class number in the model; None if they are equal.

  Classes are matched by name, or, if all names in the task are whole numbers, by position.

  Raises:
    DataError: the model does not have a class of the task.
  """
  names = class_names(task)
  if names is None or not of_model or names == tuple(of_model):
    return None
  if not set(names) & set(of_model) and all(name.isdecimal() for name in names):
    if max(map(int, names)) < len(of_model):
      return list(map(int, names))
  if missing := [name for name in names if name not in of_model]:
    raise DataError(
      f'{task.name!r} has the class {missing[0]!r}, which is not in EncoderModel.class_names: '
      f'{", ".join(listed(of_model, 12))}.' + did_you_mean(missing[0], of_model),
      fix=f'Correct the labels, or set EncoderModel.class_names = {names}.',
      parameters=('EncoderModel.class_names', _NAME),
    )
  return [list(of_model).index(name) for name in names]


def check_classes(
  task: TaskOrMixture, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  """Raises DataError if the model cannot have the classes of the task."""
  kind = layout(feature_converter)
  names, num_classes = class_names(task), spec.vocab_sizes.get(kind.classes)
  if not kind.label or not names or num_classes is None:
    return
  num_classes -= kind.classes == LABELS
  if len(names) > num_classes:
    raise DataError(
      f'{config.mixture_or_task_name!r} has {len(names)} classes ({", ".join(listed(names, 6))}); '
      f'the model has num_classes = {num_classes}.',
      fix=f"Set the model's num_classes to {len(names)}.",
      parameters=('EncoderModel.num_classes', _NAME),
    )
  class_numbers(task, spec.class_names)


# A copy with another vocabulary is named TASK.MARK; SeqIO then names the tasks of a mixture
# MIXTURE.MARK.TASK.
_MARK = '.with_vocabulary'
_LISTED = 12
_OWN_TASKS = (*builtin.OWN_TASKS, *classification.OWN_TASKS, *pretraining.OWN_TASKS)
_PATTERN_TASKS = {
  **builtin.PATTERN_TASKS,
  **tables.PATTERN_TASKS,
  **tfds_tasks.PATTERN_TASKS,
  **classification.PATTERN_TASKS,
  **pretraining.PATTERN_TASKS,
  **multiple_choice.PATTERN_TASKS,
}
# Removed sources of earlier versions -> what to do instead.
_REMOVED = {
  'hdf5': 'Convert the files to Parquet or JSON lines, and name them as parquet:PATTERN or '
  'jsonl:PATTERN.'
}


def lookup(config: DatasetConfig) -> TaskOrMixture:
  """Returns the Task or Mixture of `config`, with the vocabulary that `config` names.

  Raises:
    ConfigError: a module of `mixture_or_task_module` cannot be imported.
    DataError: the task, a file or the vocabulary does not exist.
  """
  for module in config.task_modules:
    _import(module)
  name = config.mixture_or_task_name
  before, colon, pattern = name.partition(':')
  if colon and before in _PATTERN_TASKS:
    found = _PATTERN_TASKS[before](pattern)
  else:
    found = _registered(name)
  _allow_damage(found, config.max_corrupt_fraction)
  chat.set_variables(found, config.chat_template_variables)
  if config.vocabulary is None:
    for feature in found.output_features.values():
      check_loads(feature.vocabulary, task=name)
    return found
  return seqio.helpers.mixture_or_task_with_new_vocab(
    found,
    f'{found.name}{_MARK}',
    new_output_features={
      feature_name: _with_vocabulary(feature, config.vocabulary)
      for feature_name, feature in found.output_features.items()
    },
    add_to_seqio_registry=False,
  )


def own_name(name: str) -> str:
  """Returns the name under which the task was registered, without the mark of its vocabulary."""
  return name.removesuffix(_MARK).rpartition(f'{_MARK}.')[2]


def _allow_damage(task: TaskOrMixture, fraction: float) -> None:
  if not 0 <= fraction <= 1:
    raise DataError(
      f'DatasetConfig.max_corrupt_fraction = {fraction} is not between 0 and 1.',
      fix='Set it to a share of the records; 0.0 tolerates no damaged record.',
      parameters=('DatasetConfig.max_corrupt_fraction',),
    )
  found = [seqio_sources.damage_of(part.source) for part in seqio.get_subtasks(task)]
  for damage in found:
    if damage is not None:
      damage.max_fraction = fraction
  if fraction and not any(found):
    raise DataError(
      f'{task.name!r} does not count damaged records, so max_corrupt_fraction = '
      f'{fraction:g} would do nothing.',
      fix=f'Remove it. Sources that count: {", ".join(tables.PATTERN_TASKS)}.',
      parameters=('DatasetConfig.max_corrupt_fraction',),
    )


def _with_vocabulary(feature: seqio.Feature, name: str) -> seqio.Feature:
  """Returns `feature` with vocabulary `name` and the same number of sentinels; keeps classes."""
  if isinstance(feature.vocabulary, seqio.PassThroughVocabulary):
    return feature
  vocabulary = named_vocabulary(name, extra_ids=feature.vocabulary.extra_ids)
  if feature.add_eos:
    end_id(vocabulary)
  return dataclasses.replace(feature, vocabulary=vocabulary)


def kind(config: DatasetConfig) -> str:
  """Returns the task's name, or 'text_files', 'jsonl', ... without the path."""
  before, colon, _ = config.mixture_or_task_name.partition(':')
  return before if colon and before in _PATTERN_TASKS else config.mixture_or_task_name


def _import(module: str) -> None:
  try:
    importlib.import_module(module)
  except ModuleNotFoundError as e:
    # Distinguish a missing task module from a missing module that it imports.
    is_own = bool(e.name) and f'{module}.'.startswith(f'{e.name}.')
    missing = e.name if not is_own or e.name == 't5' else None
    raise ConfigError(
      f'DatasetConfig.mixture_or_task_module = {module!r} cannot be imported: '
      + (
        f'it needs {missing!r}, which is not installed.' if missing else 'there is no such module.'
      ),
      fix=(
        install_fix(module, missing=missing)
        if missing
        else 'Write it as in an import statement (my_project.tasks), and run where that import '
        'works, or install the project.'
      ),
      parameters=('DatasetConfig.mixture_or_task_module',),
    ) from e


def _registered(name: str) -> TaskOrMixture:
  registered = {
    **dict.fromkeys(seqio.MixtureRegistry.names(), seqio.MixtureRegistry),
    **dict.fromkeys(seqio.TaskRegistry.names(), seqio.TaskRegistry),
  }
  if name not in registered:
    name = builtin.ALIASES.get(name, name)
  if name in registered:
    return registered[name].get(name)
  removed = name.partition(':')[0]
  if removed in _REMOVED:
    raise DataError(
      f'{name!r}: {removed}: is no longer supported.', fix=_REMOVED[removed], parameters=(_NAME,)
    )
  others = sorted(set(registered) - set(_OWN_TASKS))
  names = [*_OWN_TASKS, *listed(others, _LISTED)]
  after = dict.fromkeys(pretraining.PATTERN_TASKS, 'TEXT')
  after |= dict.fromkeys(labelled.KINDS, 'FORM:PATTERN')
  patterns = ', '.join(f'{kind}:{after.get(kind, "PATTERN")}' for kind in _PATTERN_TASKS)
  raise task_error(
    f'There is no SeqIO Task or Mixture {name!r}.'
    + did_you_mean(name, [*registered, *builtin.ALIASES, *_PATTERN_TASKS])
    + '\n'
    f'  {len(registered)} are registered: {", ".join(names)}'
    + f'. For files, no task is needed: {patterns}.',
    fix='Set MIXTURE_OR_TASK_NAME to one of these, or DatasetConfig.mixture_or_task_module to '
    'the module that registers yours.',
  )


def check_split(task: TaskOrMixture, config: DatasetConfig) -> None:
  """Raises DataError unless `task` has the split, its cache, and prepared TensorFlow datasets."""
  if config.use_cached:
    _check_cached(task, config.split)
  try:
    prepare_tfds.check_prepared(task, config)
  except DataError as e:
    files = classification.FROM_FILES.get(config.mixture_or_task_name)
    if not files:
      raise
    fix = f"{e.fix}\nOr give its files: MIXTURE_OR_TASK_NAME = '{files}'."
    raise DataError(
      e.what, fix=fix, parameters=e.parameters, docs='tasks.md#tensorflow-datasets'
    ) from e
  splits = sorted(task.splits)
  if config.split not in splits:
    raise NoExamplesError(
      f'{config.mixture_or_task_name!r} has no split {config.split!r}.'
      + did_you_mean(config.split, splits)
      + f' It has {", ".join(repr(split) for split in splits) or "none"}.',
      fix='Set DatasetConfig.split to one of these.',
      parameters=('DatasetConfig.split',),
    )


def _may_have(task: seqio.Task, split: str) -> bool:
  try:
    return split in task.splits
  except Exception:  # a TensorFlow dataset that is not prepared
    return True


def _check_cached(task: TaskOrMixture, split: str) -> None:
  """Raises DataError if a task with the split reads SeqIO's cache and has none."""
  missing = [
    own_name(part.name)
    for part in seqio.get_subtasks(task)
    if part.supports_caching and not part.cache_dir and _may_have(part, split)
  ]
  if missing:
    folders = ', '.join(map(repr, seqio.utils.get_global_cache_dirs()))
    raise DataError(
      f'use_cached = True, but SeqIO has no cache of {", ".join(map(repr, missing))}; its cache '
      f'folders: {folders or "none"}.',
      fix='Set USE_CACHED_TASKS = False (DatasetConfig.use_cached) to read the source itself, or '
      'call seqio.add_global_cache_dirs in the module of the task.',
      parameters=('DatasetConfig.use_cached',),
      docs='from_t5x.md#data',
    )


def check(
  task: TaskOrMixture, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  """Raises DataError unless `task` has the split, and features and ids that the model accepts."""
  check_split(task, config)
  preference.check_pairs(
    task, name=config.mixture_or_task_name, feature_converter=feature_converter
  )
  kind_of_batch = layout(feature_converter)
  wanted = (*kind_of_batch.task_features, *([kind_of_batch.label] if kind_of_batch.label else []))
  wanted += kind_of_batch.other_features
  missing = [name for name in wanted if name not in task.output_features]
  is_set = 'segments' in task.output_features and 'segments' not in wanted
  if missing or (kind_of_batch.scored and is_set):
    have = sorted(task.output_features)
    hint = {
      ('targets',): " For a language-model task (only 'targets') use 'lm'.",
      ('inputs', 'label'): " For a task with labels use 'encoder_classification', an "
      "encoder with the head 'classification'.",
      ('inputs', 'labels'): ' For a task with several labels per row set EncoderModel.problem_type '
      "= 'multi_label_classification'.",
      ('inputs', 'score'): " For a task with numbers set EncoderModel.head_type = 'regression'.",
      ('inputs', 'places', 'score', 'segments'): ' For texts that belong together set '
      "EncoderModel.head_type = 'embedding'.",
    }.get(tuple(have), '')
    before = config.mixture_or_task_name.partition(':')[0]
    if have == ['targets'] and before in pretraining.TEXTS:
      hint += (
        f' To mask parts of the same text, set MIXTURE_OR_TASK_NAME = '
        f"'span_corruption:{config.mixture_or_task_name}' (encoder-decoder) or "
        f"'mlm:{config.mixture_or_task_name}' (encoder)."
      )
    raise task_error(
      f'Feature converter {feature_converter!r} needs '
      + ' and '.join(repr(name) for name in wanted)
      + f'; {config.mixture_or_task_name!r} gives only '
      + ', '.join(repr(name) for name in have)
      + '.',
      fix='Use another task, or a model and feature converter that fit this one.' + hint,
    )
  _check_vocabulary(task, config, spec=spec, feature_converter=feature_converter)


def _check_vocabulary(
  task: TaskOrMixture, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  kind_of_batch = layout(feature_converter)
  check_classes(task, config, spec=spec, feature_converter=feature_converter)
  for model_feature, parts in kind_of_batch.tokens.items():
    bound = spec.vocab_sizes.get(model_feature)
    for part in parts:
      vocabulary = task.output_features[part].vocabulary
      size = vocabulary.vocab_size
      if bound is not None and size > bound:
        rounded = -(-size // 128) * 128
        raise DataError(
          f'{config.mixture_or_task_name!r} has {size:,} token ids in {part!r} '
          f'({vocabulary_name(vocabulary)}); the model has a vocabulary of {bound:,}, so ids '
          f'{bound:,} to {size - 1:,} would be lost.',
          fix=f"Set the model's vocab_size to at least {size} ({rounded} is the next multiple of "
          '128), or DatasetConfig.vocabulary to a smaller one.',
          parameters=('DatasetConfig.vocabulary', _NAME),
        )


def examples(
  task: TaskOrMixture,
  config: DatasetConfig,
  *,
  shuffle: bool,
  num_epochs: Optional[int],
  part: Optional[seqio.ShardInfo] = None,
) -> tf.data.Dataset:
  """Returns the examples of `config`'s split, before packing; `num_epochs=None` repeats forever.

  With `part`, returns only every n-th file or example: see seqio.Task.get_dataset.

  Functions are traced without AutoGraph first: rewriting their source takes 0.5 to 2 s at every
  start, and most functions do not need it. TensorFlow raises an error for functions that do.
  """

  def build() -> tf.data.Dataset:
    # No in-memory cache: it would freeze the first epoch's order and enlarge the saved state.
    return task.get_dataset(
      config.task_feature_lengths and dict(config.task_feature_lengths),
      split=config.split,
      use_cached=config.use_cached,
      shuffle=shuffle,
      seed=config.seed,
      num_epochs=num_epochs,
      shard_info=part,
      try_in_mem_cache=False,
    )

  try:
    return tf.autograph.experimental.do_not_convert(build)()
  except tf.errors.OperatorNotAllowedInGraphError:
    return build()


def source_paths(
  task: TaskOrMixture, config: DatasetConfig, *, in_memory: bool = False
) -> dict[str, list[str]]:
  """Returns task -> the files with its examples: SeqIO's cache, or the source.

  Args:
    task, config: the task or mixture, and its split.
    in_memory: include the files of sources that hold their examples in memory.
  """
  found, split = {}, config.split
  for subtask in seqio.get_subtasks(task):
    if config.use_cached and subtask.cache_dir:
      prefix = seqio.utils.get_cached_tfrecord_prefix(subtask.cache_dir, split)
      found[subtask.name] = sorted(tf.io.gfile.glob(f'{glob.escape(prefix)}*'))
    elif split in subtask.splits:
      found[subtask.name] = seqio_sources.source_paths(
        subtask.source, split=split, in_memory=in_memory
      )
  return found


def reading_problem(task: TaskOrMixture) -> Optional[DataError]:
  """Returns the DataError that a reader of `task` raised inside tf.data, if any."""
  found = (seqio_sources.reading_problem(part.source) for part in seqio.get_subtasks(task))
  return next((problem for problem in found if problem is not None), None)


def numpy_examples(
  task: TaskOrMixture, config: DatasetConfig, *, shuffle: bool = False
) -> Iterator[Example]:
  """Yields the examples of `config`'s split as numpy, one epoch, in order unless shuffled.

  Raises:
    DataError: an example cannot be read.
  """
  number = 0
  try:
    for example in examples(task, config, shuffle=shuffle, num_epochs=1).as_numpy_iterator():
      yield example
      number += 1
  except tf.errors.OpError as e:
    raise reading_problem(task) or DataError(
      f'{config.mixture_or_task_name!r}, split {config.split!r}: reading example {number} failed: '
      f'{first_line(e)}',
      fix='Check that the files of the task are complete and readable.',
    ) from e


def survey(config: DatasetConfig, *, num_measured: int) -> Survey:
  """Returns the size of `config`'s split; see `data_module.DataModule.survey`."""
  task = lookup(config)
  check_split(task, config)
  config = dataclasses.replace(config, task_feature_lengths=None)
  lengths: dict[str, list[int]] = {name: [] for name in task.output_features}
  found = 0
  for example in numpy_examples(task, config, shuffle=True):
    found += 1
    if found > num_measured:
      break
    for name, sizes in lengths.items():
      sizes.append(np.size(example[name]))
  if found > num_measured:  # reading the others without tokenizing them is fast
    sources = (part.source for part in seqio.get_subtasks(task) if config.split in part.splits)
    found = sum(_num_records(source, config.split) for source in sources)
  return Survey(tuple(lengths), {name: np.array(x) for name, x in lengths.items()}, found)


class _TextKeeper(seqio.ByteVocabulary):
  """Bytes as ids; keeps the texts that it encodes, in the order in which threads encode them."""

  def __init__(self, kept: list[bytes], *, extra_ids: int):
    super().__init__(extra_ids=extra_ids)
    self._kept = kept

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    def keep(texts: bytes | np.ndarray) -> bytes | np.ndarray:
      self._kept.extend(np.reshape(texts, -1))
      return texts

    return super()._encode_tf(tf.ensure_shape(tf.numpy_function(keep, [s], tf.string), s.shape))


def texts(config: DatasetConfig) -> Iterator[str]:
  """Yields the texts that the task encodes; see `data_module.DataModule.texts`."""
  task, kept = lookup(dataclasses.replace(config, vocabulary=None)), []
  check_split(task, config)

  def keeping(feature: seqio.Feature) -> seqio.Feature:
    if isinstance(feature.vocabulary, seqio.PassThroughVocabulary):
      return feature
    keeper = _TextKeeper(kept, extra_ids=feature.vocabulary.extra_ids)
    return dataclasses.replace(feature, vocabulary=keeper)

  task = seqio.helpers.mixture_or_task_with_new_vocab(
    task,
    f'{task.name}{_MARK}',
    new_output_features={name: keeping(f) for name, f in task.output_features.items()},
    add_to_seqio_registry=False,
  )
  for _ in numpy_examples(task, dataclasses.replace(config, task_feature_lengths=None)):
    yield from (kept.pop().decode(errors='replace') for _ in range(len(kept)))
  yield from (text.decode(errors='replace') for text in kept)


def _num_records(source: seqio.DataSource, split: str) -> int:
  records = source.get_dataset(split=split, shuffle=False)
  return int(records.reduce(np.int64(0), tf.autograph.experimental.do_not_convert(_next_number)))


def _next_number(number: tf.Tensor, record: Example) -> tf.Tensor:
  del record
  return number + 1


def check_not_empty(task: TaskOrMixture, config: DatasetConfig) -> None:
  """Raises DataError if the split has no example after preprocessing.

  Repeating an empty dataset would hang, so this function first reads one unshuffled example.
  """

  def has_example() -> bool:
    one_epoch = examples(task, config, shuffle=False, num_epochs=1)
    return any(True for _ in one_epoch.take(1))

  if not readable(task, config, has_example):
    raise no_examples(task, config)


def readable(task: TaskOrMixture, config: DatasetConfig, read: Callable[[], _T]) -> _T:
  """Returns the result of `read`, or raises the DataError that says why `task` cannot be read."""
  try:
    return read()
  except (tf.errors.OpError, ValueError, AssertionError) as e:
    failure = first_line(e)
  # Not in `except`: the frames of `e` would keep an iterator, whose threads hang at exit.
  raise reading_problem(task) or task_error(
    f'{config.mixture_or_task_name!r}, split {config.split!r}, cannot be read: {failure}',
    fix='Check the files and the preprocessors of the task.',
  )


def no_examples(task: TaskOrMixture, config: DatasetConfig) -> NoExamplesError:
  """Returns the error of a split without examples."""
  splits = ', '.join(repr(split) for split in sorted(task.splits))
  return NoExamplesError(
    f'{config.mixture_or_task_name!r} has no example in split {config.split!r} '
    f'(its splits: {splits}).',
    fix='Set DatasetConfig.split to one with data, or give the task more text. Sources without '
    'splits assign documents by hash; with few documents one split may be empty.',
    parameters=('DatasetConfig.split', _NAME),
  )
