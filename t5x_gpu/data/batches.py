"""The contract between data and training: what a batch holds, how batches are taken and resumed.

Nothing here imports TensorFlow. A `DatasetConfig` names the module that opens it (`module`), and
`open_batches` imports that module only then: a synthetic run or a benchmark needs no TF.
"""

import dataclasses
import hashlib
import importlib
import re
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Optional, Protocol

import numpy as np

from t5x_gpu.errors import ConfigError, ShapeError

# One batch: feature name (SeqIO's model feature names) -> numpy array [batch, length], or [batch]
# for labels and their weights; maybe one that reads rows when they are asked for (lazy_rows.py).
Batch = dict[str, np.ndarray]

# 'prepared:DIR': rows that `python -m t5x_gpu.prepare` has packed, whatever the module for text is.
PREPARED = 'prepared:'
# What `describe` calls the names of the classes, in the order of their numbers.
CLASS_NAMES = 'class_names'
_PREPARED_MODULE = 't5x_gpu.data.prepared.batches'
_TEXT_MODULE = 't5x_gpu.data.seqio_batches'
_OUR_MODULES = 't5x_gpu.data.'


@dataclasses.dataclass(frozen=True)
class BatchSpec:
  """Shapes and dtypes of the global batch, by feature name.

  Attributes:
    shapes: feature name -> (batch, length), or (batch,).
    dtypes: feature name -> numpy dtype name.
    vocab_sizes: feature name -> exclusive upper bound of the token ids or class numbers, for
      features that hold them.
  """

  shapes: Mapping[str, tuple[int, ...]]
  dtypes: Mapping[str, str]
  vocab_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

  @property
  def batch_size(self) -> int:
    return next(iter(self.shapes.values()))[0]

  def check(self, batch: Batch) -> None:
    """Raises ShapeError unless `batch` has exactly these features, shapes and dtypes."""
    got = {name: (tuple(x.shape), str(x.dtype)) for name, x in batch.items()}
    want = {name: (tuple(shape), self.dtypes[name]) for name, shape in self.shapes.items()}
    wrong = [
      f'{name}: the model takes {want.get(name, "nothing")}, the data gives '
      f'{got.get(name, "nothing")}'
      for name in sorted(got.keys() | want.keys())
      if got.get(name) != want.get(name)
    ]
    if wrong:
      raise ShapeError(
        'The batch is not what the model takes (shape, dtype):\n  ' + '\n  '.join(wrong),
        fix='Set TASK_FEATURE_LENGTHS, BATCH_SIZE and the feature converter alike.',
      )


class BatchIterator(Protocol):
  """Global batches in an order that depends on the data and the seed alone, never on the hosts.

  Every process sees the same global batch and puts only its own part on its devices.
  """

  def __next__(self) -> Batch: ...
  def __iter__(self) -> Iterator[Batch]: ...
  def peek(self) -> Batch:
    """The batch that `next` will return, without taking it. Raises StopIteration at the end."""

  def get_state(self) -> bytes:
    """What `set_state` needs to make `next` continue from here, on any number of hosts."""

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called. Raises DataError if the data is not the same."""

  def describe(self) -> Mapping[str, Any]:
    """JSON-ready facts for logs and manifests: task, split, seed, examples, guarantees."""


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """Which batches to open. Field names are T5X's where T5X has them.

  Attributes:
    mixture_or_task_name: a registered SeqIO Task or Mixture, or a source spelled as
      `text_files:PATTERN`, `jsonl:PATTERN`, ..., which needs no Python (docs/tasks.md); or
      `prepared:DIR` (docs/data.md).
    task_feature_lengths: task feature -> length in tokens, {'inputs': 512, 'targets': 114}.
    split: 'train', 'validation', ...
    batch_size: examples in the global batch (after packing).
    shuffle: shuffle files and examples with `seed`.
    seed: of the data order. The same seed gives the same batches on any topology.
    pack: put several examples into one row, told apart by segment ids.
    use_cached: read SeqIO's offline cache.
    mixture_or_task_module: module to import first, which registers the task.
    vocabulary: 'byte', 'sentencepiece:MODEL_FILE', 'huggingface:FOLDER' (or its tokenizer.json),
      'words:8192' (words hashed into that many ids), or None for the task's own.
    mixture_rates: of `prepared:DIR`: task -> rate, in place of those of the mixture.
    loss_on_targets_only: with feature converter 'prefix_lm', give the inputs weight 0 in the loss.
    max_corrupt_fraction: share of the records of files that may be damaged: they are left out,
      counted and reported. 0.0: the first one is an error that names file and place.
    module: what opens this: it has `open_batches(config, feature_converter, ...)`.
  """

  mixture_or_task_name: str
  task_feature_lengths: Mapping[str, int]
  split: str
  batch_size: int
  shuffle: bool = True
  seed: int = 0
  pack: bool = True
  use_cached: bool = False
  mixture_or_task_module: Optional[str] = None
  vocabulary: Optional[str] = None
  loss_on_targets_only: bool = True
  mixture_rates: Optional[Mapping[str, float]] = None
  max_corrupt_fraction: float = 0.0
  module: str = _TEXT_MODULE


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> BatchIterator:
  """Returns the iterator of `config`, opened by the module that it names.

  Args:
    config: what to open.
    spec: the model's contract; a task whose vocabulary exceeds `spec.vocab_sizes` is refused.
    feature_converter: 'lm', 'prefix_lm', ...: how task features become model features.
    repeat: start over at the end of the data (training), or stop (evaluation).
  Raises:
    ConfigError: no such module.
    DataError: the task cannot give these batches.
  """
  return _module(config).open_batches(
    config, spec=spec, feature_converter=feature_converter, repeat=repeat
  )


def open_vocabulary(config: DatasetConfig, *, feature_converter: str) -> Any:
  """Returns what turns text into ids and back: `encode`, `decode`, `size`, `eos_id`.

  Args:
    config: the task; without a name, the vocabulary alone.
    feature_converter: of the model, whose ids they are.
  Raises:
    ConfigError: no such module, or its batches have no text.
  """
  config = _with(config, 'text_of')
  vocabulary = _module(config).vocabulary(config, feature_converter=feature_converter)
  if vocabulary is None:
    raise ConfigError(
      f'The batches of {config.module} have no text, so none can be sampled.',
      fix='Remove train.sample_cfg, or train on a task with a vocabulary.',
      parameters=('train.sample_cfg', 'DatasetConfig.module'),
    )
  return vocabulary


def open_class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes of `config`'s labels, in the order of their numbers.

  None: the task has no labels, or its module cannot name them (synthetic batches).

  Raises:
    ConfigError, DataError: no such module, task or file.
  """
  names = getattr(_module(config), 'class_names', None)
  return None if names is None else names(config)


def open_prompt_text(
  config: DatasetConfig, *, may_import: Optional[Collection[str]] = None, **options: Any
) -> Any:
  """Returns a `prompts.PromptText`: text <-> ids, and the examples of the task.

  Args:
    config: the task; without a name, the vocabulary alone.
    may_import: the modules that may be imported besides our own; None for any.
    **options: see `task_prompts.prompt_text`.
  Raises:
    ConfigError: no such module, or its batches have no text, or it must not be imported.
    DataError: no such task or vocabulary, or more ids than the model has.
  """
  _check_imports(config, may_import)
  config = _with(config, 'made_from')
  _check_imports(config, may_import)  # prepared rows name the modules of their text
  make = getattr(_module(config), 'prompt_text', None)
  if make is None:
    raise ConfigError(
      f'The batches of {config.module} have no text.',
      fix="Set DatasetConfig.module to 't5x_gpu.data.seqio_batches', its default.",
      parameters=('DatasetConfig.module',),
    )
  return make(config, **options)


def open_class_text(
  config: DatasetConfig, *, model_vocab_size: int, may_import: Optional[Collection[str]] = None
) -> Any:
  """Returns a `class_prompts.ClassText`: text -> ids for a classifier, and the task's examples.

  Args:
    config: the task.
    model_vocab_size: ids that the model has.
    may_import: as for `open_prompt_text`.
  Raises:
    ConfigError: no such module, or its batches have no text, or it must not be imported.
    DataError: no such vocabulary, or more ids than the model has.
  """
  _check_imports(config, may_import)
  config = _with(config, 'made_from')
  _check_imports(config, may_import)  # prepared rows name the modules of their text
  make = getattr(_module(config), 'class_text', None)
  if make is None:
    raise ConfigError(
      f'The batches of {config.module} have no text.',
      fix="Set DatasetConfig.module to 't5x_gpu.data.seqio_batches', its default.",
      parameters=('DatasetConfig.module',),
    )
  return make(config, model_vocab_size=model_vocab_size)


@dataclasses.dataclass(frozen=True)
class ModelOutputs:
  """What a model made of the examples of a task, in their order; lists not asked for are empty.

  Attributes:
    predictions: token ids, the best continuation of each example's inputs.
    prediction_scores: their log-probabilities.
    scores: log-probabilities of the targets.
  """

  predictions: Sequence[Sequence[int]] = ()
  prediction_scores: Sequence[float] = ()
  scores: Sequence[float] = ()


class EvaluatedTask(Protocol):
  """A task with metrics, and its examples.

  Attributes:
    name: of the task.
    inputs, targets: token ids of each example; inputs are empty where the task has none.
    eos_id: id that ends a text, or None.
    zero_is_a_word: id 0 is no padding.
    needs_predictions, needs_scores: what the metrics are computed from.
  """

  name: str
  inputs: Sequence[Sequence[int]]
  targets: Sequence[Sequence[int]]
  eos_id: Optional[int]
  zero_is_a_word: bool
  needs_predictions: bool
  needs_scores: bool

  def metrics(self, outputs: ModelOutputs) -> dict[str, float]:
    """Returns metric -> value."""


def open_task_names(config: DatasetConfig) -> tuple[str, ...]:
  """Returns the tasks that a mixture mixes, as far as they have the split; else its own name."""
  names = getattr(_module(config), 'task_names', None)  # prepared rows are evaluated all together
  return (config.mixture_or_task_name,) if names is None else names(config)


def open_evaluated_tasks(
  config: DatasetConfig,
  *,
  feature_converter: str,
  num_examples: Optional[int] = None,
  required: bool = True,
) -> Sequence[EvaluatedTask]:
  """Returns the tasks of `config` that have metrics, with all examples (or the first few).

  Args:
    config: a task or mixture, its split and lengths; batches and packing do not matter.
    feature_converter: of the model, whose ids the examples are to have.
    num_examples: the first ones of each task; None for all.
    required: whether it is an error that there are none.
  Raises:
    ConfigError: no such module, or its batches come from no tasks.
    DataError: no task has metrics, or the split, or an example.
  """
  config = _with(config, 'made_from')
  open_tasks = getattr(_module(config), 'evaluated_tasks', None)
  if open_tasks is None:
    if not required:
      return ()
    raise ConfigError(
      f'The batches of {config.module} come from no task, so they have no metrics but the loss.',
      fix='Remove train.infer_eval_dataset_cfg (for python -m t5x_gpu.eval: '
      '--metrics=loss), or take a task with metrics.',
      parameters=('DatasetConfig.module',),
    )
  return open_tasks(
    config, feature_converter=feature_converter, num_examples=num_examples, required=required
  )


def open_preparation(config: DatasetConfig, *, spec: BatchSpec, feature_converter: str) -> Any:
  """Returns what makes the rows that `prepare` writes; see `preparation.Preparation`.

  Args:
    config, spec, feature_converter: as for `open_batches`.
  Raises:
    ConfigError: no such module, or one whose batches are not made of text.
    DataError: the task cannot give these rows.
  """
  make = getattr(_module(config), 'preparation', None)
  if make is None:
    raise ConfigError(
      f'{config.mixture_or_task_name!r} is opened by {module_of(config)}, whose batches are not '
      'made of text: there is nothing to prepare.',
      fix='Set MIXTURE_OR_TASK_NAME to a task, and DatasetConfig.module to its default, '
      f'{_TEXT_MODULE!r}.',
      parameters=('DatasetConfig.mixture_or_task_name', 'DatasetConfig.module'),
    )
  return make(config, spec=spec, feature_converter=feature_converter)


def _check_imports(config: DatasetConfig, may_import: Optional[Collection[str]]) -> None:
  """Raises ConfigError if opening `config` would run code of somebody else."""
  if may_import is None:
    return
  modules = {name: getattr(config, name) for name in ('module', 'mixture_or_task_module')}
  foreign = [
    name
    for name, module in modules.items()
    if module and module not in may_import and not str(module).startswith(_OUR_MODULES)
  ]
  # A community dataset of TFDS, tfds:NAMESPACE:NAME, comes with code that is downloaded.
  _, is_tfds, dataset = config.mixture_or_task_name.partition('tfds:')
  if is_tfds and not re.fullmatch(r'[\w/.-]+(:[\d*]+\.[\d*]+\.[\d*]+)?(#[^#]*)?', dataset):
    foreign.append('mixture_or_task_name')
  if foreign:
    raise ConfigError(
      'The task of this checkpoint would run code from outside t5x_gpu: '
      + ', '.join(f'DatasetConfig.{name} = {getattr(config, name)!r}' for name in foreign)
      + '.',
      fix='The gin file of a checkpoint folder is read as data, because the folder may come from '
      'elsewhere.\nIf you trust it, add --trust_gin. Or do without the task: give '
      '--vocabulary=NAME and --prompts=FILE.\nOr name a gin file of yours: --gin_file=FILE.',
      parameters=[f'DatasetConfig.{name}' for name in foreign],
      docs='infer.md#trust',
    )


def _with(config: DatasetConfig, function: str) -> DatasetConfig:
  """Returns what `function` of the module makes of `config`; itself if there is no such function.

  Prepared rows have no text: text comes from what they were made from.
  """
  change = getattr(_module(config), function, None)
  return config if change is None else change(config)


def module_of(config: DatasetConfig) -> str:
  """Returns the name of the module that opens `config`."""
  is_prepared = (config.mixture_or_task_name or '').startswith(PREPARED)
  return _PREPARED_MODULE if is_prepared and config.module == _TEXT_MODULE else config.module


def import_modules(*configs: Optional[DatasetConfig]) -> None:
  """Imports what opens these datasets; to be called before a thread opens them.

  TensorFlow Datasets' modules replace `builtins.__import__` while they list what they import
  lazily. A `from jax... import` that another thread runs at that moment gets a lazy module in the
  place of a class.

  Raises:
    ConfigError: a module cannot be imported.
  """
  for config in configs:
    if config is not None:
      _module(config)


def _module(config: DatasetConfig) -> types.ModuleType:
  name = module_of(config)
  try:
    return importlib.import_module(name)
  except ModuleNotFoundError as e:
    raise ConfigError(
      f'DatasetConfig.module = {name!r} cannot be imported: {e}.',
      fix="Install what is missing (pip install 't5x_gpu' brings SeqIO and TensorFlow), or set "
      "DatasetConfig.module = 't5x_gpu.data.synthetic' for random batches without them.",
      parameters=('DatasetConfig.module',),
    ) from e


def batch_hash(batch: Batch) -> str:
  """Returns 16 hex digits that identify the content of `batch`; kept in checkpoints."""
  digest = hashlib.sha256()
  for name in sorted(batch):
    x = np.ascontiguousarray(batch[name])
    digest.update(f'{name}{x.shape}{x.dtype}'.encode())
    digest.update(x.tobytes())
  return digest.hexdigest()[:16]
