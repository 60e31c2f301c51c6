"""The functions of a data module, and how the trainer calls them. No TensorFlow.

`DatasetConfig.module` names a data module. Included are `t5x_gpu.data.seqio_batches` (SeqIO tasks,
the default), `t5x_gpu.data.synthetic` (random ids) and `t5x_gpu.data.prepared.batches`
(prepared:DIR). `DataModule` declares the functions, with `EvaluatedTask`, `Vocabulary` and
`PromptText` for their results; `open_batches` and the other functions here call them. A module is
imported only when it is needed, so a synthetic run does not import TensorFlow.
docs/add_a_data_source.md shows how to write another module.
"""

import contextlib
import dataclasses
import importlib
import inspect
import re
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Protocol

import numpy as np

from t5x_gpu.data.batches import (
  PREPARED,
  Batch,
  BatchIterator,
  BatchSpec,
  DatasetConfig,
  optional_method,
  with_masks,
)
from t5x_gpu.errors import ConfigError, DataError, did_you_mean
from t5x_gpu.storage.json_schema import Json


class HasBatches(Protocol):
  """What data has to know of a model (`models.model.Model`)."""

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str: ...

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec: ...


def spec_for(model: HasBatches, dataset: DatasetConfig) -> BatchSpec:
  """Returns the features of the batches of `dataset` for `model`."""
  return model.batch_spec(
    dataset.task_feature_lengths, batch_size=dataset.batch_size, pack=dataset.pack
  )


def batches_for(model: HasBatches, dataset: DatasetConfig, *, repeat: bool) -> BatchIterator:
  """Returns the batches of `dataset` for `model`; errors as for `open_batches`."""
  spec = spec_for(model, dataset)
  batches = open_batches(
    dataset,
    spec=spec,
    repeat=repeat,
    feature_converter=model.feature_converter(dataset.task_feature_lengths),
  )
  with contextlib.suppress(StopIteration):
    spec.check(batches.peek())
  return batches


@dataclasses.dataclass(frozen=True)
class ModelOutputs:
  """Model outputs for the examples of a task, in order; lists that were not requested are empty.

  Attributes:
    predictions: token ids, the best continuation of each example's inputs.
    prediction_scores: log-probabilities of the predictions.
    scores: log-probabilities of the targets.
  """

  predictions: Sequence[Sequence[int]] = ()
  prediction_scores: Sequence[float] = ()
  scores: Sequence[float] = ()


@dataclasses.dataclass(frozen=True)
class Survey:
  """The size of a task's split.

  Attributes:
    features: features of the task; they show whether it has labels, conversations or preferences.
    lengths: feature -> tokens of each measured example, uncut [number of measured examples].
    num_examples: examples of the split; records of its source if only some were measured.
  """

  features: tuple[str, ...]
  lengths: Mapping[str, np.ndarray]
  num_examples: int

  @property
  def num_measured(self) -> int:
    return max((len(x) for x in self.lengths.values()), default=0)


class EvaluatedTask(Protocol):
  """A task with metrics, and its examples.

  Attributes:
    name: name of the task.
    inputs, targets: token ids of each example; inputs are empty if the task has no inputs.
    eos_id: id that ends a text, or None.
    zero_is_a_word: id 0 is a word, not padding.
    needs_predictions, needs_scores: whether the metrics need predictions or scores.
  Optional:
    texts(outputs, number) -> records with the texts of the first `number` examples, None for all;
      for train.num_predictions.
    source_files() -> `SourceFiles`, whose changes between two starts of a run are reported.
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


class Vocabulary(Protocol):
  """Text <-> token ids. `zero_is_padding` and `decode_all` handle missing optional members.

  Optional:
    zero_is_a_word: id 0 is a token of texts, so samples may contain it.
    spelled(ids) -> str: as `decode`, with special tokens.
  """

  def encode(self, text: str) -> list[int]: ...
  def decode(self, ids: list[int]) -> str: ...


def zero_is_padding(vocabulary: Vocabulary) -> bool:
  """Returns whether id 0 is padding, rather than a word."""
  return not getattr(vocabulary, 'zero_is_a_word', False)


def decode_all(vocabulary: Vocabulary, ids: list[int]) -> str:
  """Returns the text of `ids`, with special tokens if the vocabulary can spell them."""
  return getattr(vocabulary, 'spelled', vocabulary.decode)(ids)


@dataclasses.dataclass(frozen=True)
class EncodedRow:
  """A row of an encoder.

  Attributes:
    tokens: their ids, special ones included.
    num_second: number of tokens at the end that belong to the second text of a pair.
    words: position of the first token of each word that gets a tag; -1 for a word without a token,
      or beyond the end of the row.
  """

  tokens: tuple[int, ...]
  num_second: int = 0
  words: tuple[int, ...] = ()

  def __len__(self) -> int:
    return len(self.tokens)

  def __iter__(self) -> Iterator[int]:
    return iter(self.tokens)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A text to continue.

  Attributes:
    where: source of the prompt, 'file:line' or 'TASK, split SPLIT, example 3'.
    inputs: the text.
    targets: a continuation to score, or None.
    tokens, target_tokens: their ids if the source has them, else None.
    extra: other fields of a JSON line; they are copied to the result.
    number: line number in the file, from 0, blank lines counted; None for examples of a task, which
      are numbered in order.
    messages: a conversation to continue, checked; None if `inputs` is the prompt.
    tools: tools of the conversation, for the chat template.
    num_second: number of `tokens` at the end that belong to the second text of a pair.
  """

  where: str
  inputs: str
  targets: Optional[str] = None
  tokens: Optional[tuple[int, ...]] = None
  target_tokens: Optional[tuple[int, ...]] = None
  extra: Json = dataclasses.field(default_factory=dict)
  number: Optional[int] = None
  messages: Optional[Sequence[Json]] = None
  tools: Optional[Sequence[Json]] = None
  num_second: int = 0


RECORDS = 'tfrecord:'  # prompts in files of tf.train.Examples


class PromptText(Protocol):
  """Text <-> ids, with a task's vocabularies and end marks.

  Attributes:
    name: name of the vocabulary, for messages.
    size: number of ids of its vocabulary.
    eos_id: id that ends the model's answer, or None.
    start_id: precedes a prompt in the tokenizer's own template (<bos>), or None.
    zero_is_a_word: id 0 is a word of the tokenizer and the model, not padding.

  Optional, for exports to Hugging Face:
    inputs_name: name of the vocabulary of prompts; by default `name`.
    is_chat: whether the chat template writes the task's texts; by default False.
  Optional:
    records(files) -> the prompts of 'tfrecord:PATTERN#inputs=FEATURE,targets=FEATURE'.
    chat_text(messages, continues=..., where=...) -> the text that `encode_chat` turns to ids; with
      `continues`, up to the end of the last message, which begins the answer.
  """

  name: str
  size: int
  eos_id: Optional[int]
  start_id: Optional[int]
  zero_is_a_word: bool

  def encode_inputs(self, text: str) -> list[int]:
    """Returns the ids of a prompt, with the end mark of the task's inputs."""

  def encode_targets(self, text: str) -> list[int]:
    """Returns the ids of a text to score, with the end mark of the task's targets."""

  def encode_chat(
    self, messages: Sequence[Json], *, tools: Optional[list] = None, where: str
  ) -> list[int]:
    """Returns the ids of a conversation and of the start of the answer. Raises DataError."""

  def chat_ends(self) -> list[int]:
    """Returns the id that ends an answer in the chat template, if the end is one token."""

  def decode(self, ids: Sequence[int]) -> str:
    """Returns the text that a model wrote, without its end mark."""

  def examples(self) -> Iterable[Prompt]:
    """Yields the examples of the task's split in order. Raises DataError if there are none."""


class EncoderText(Protocol):
  """Text -> rows of an encoder; `PromptText` is the equivalent for models that write text.

  Attributes:
    name, size: as in `PromptText`.
    length: tokens of a row; longer texts are cut.
    fingerprint: identifies the vocabulary, as in manifests.
  """

  name: str
  size: int
  length: int
  fingerprint: str

  def encode(self, prompt: Prompt) -> EncodedRow:
    """Returns the row of a prompt's text, or pair of texts, as in training."""


_OUR_MODULES = 't5x_gpu.data.'


def check_trusted(config: DatasetConfig, may_import: Optional[Collection[str]]) -> None:
  """Raises ConfigError if opening `config` would run code from outside t5x_gpu.

  Args:
    config: read from the gin file of a checkpoint folder.
    may_import: modules that may be imported in addition to t5x_gpu's; None for any.
  """
  if may_import is None:
    return
  modules = {'module': (config.module,), 'mixture_or_task_module': config.task_modules}
  foreign = [
    name
    for name, imported in modules.items()
    if not all(m in may_import or str(m).startswith(_OUR_MODULES) for m in imported)
  ]
  # TFDS downloads code for a community dataset, tfds:NAMESPACE:NAME.
  _, is_tfds, dataset = config.mixture_or_task_name.partition('tfds:')
  if is_tfds and not re.fullmatch(r'[\w/.-]+(:[\d*]+\.[\d*]+\.[\d*]+)?(#[^#]*)?', dataset):
    foreign.append('mixture_or_task_name')
  if foreign:
    raise ConfigError(
      'The task of this checkpoint would run code from outside t5x_gpu: '
      + ', '.join(f'DatasetConfig.{name} = {getattr(config, name)!r}' for name in foreign)
      + '.',
      fix='The gin file of a checkpoint folder is read as data, because the folder may come from '
      'elsewhere.\nIf you trust it, add --trust_gin. Or leave the task out: give '
      '--vocabulary=NAME and --prompts=FILE.\nOr name your own gin file: --gin_file=FILE.',
      parameters=[f'DatasetConfig.{name}' for name in foreign],
      docs='infer.md#trust',
    )


_PREPARED_MODULE = 't5x_gpu.data.prepared.batches'
_TEXT_MODULE = 't5x_gpu.data.seqio_batches'
_MODULE = ('DatasetConfig.module',)


class _OwnBatches:
  """Batches of a user's data module: checks their ids and adds row masks (`batches.with_masks`)."""

  def __init__(self, batches: BatchIterator, spec: BatchSpec, module: str):
    self._batches, self._spec, self._module = batches, spec, module

  def __iter__(self) -> Iterator[Batch]:
    return self

  def __next__(self) -> Batch:
    return self._checked(next(self._batches))

  def peek(self) -> Batch:
    """Returns the next batch without consuming it. Raises StopIteration at the end."""
    return self._checked(self._batches.peek())

  def _checked(self, batch: Batch) -> Batch:
    for name, bound in self._spec.vocab_sizes.items():
      # XLA would take the last id in place of a larger one.
      if name in batch and (largest := int(np.max(batch[name], initial=0))) >= bound:
        raise DataError(
          f'{name} of {self._module} has the id {largest:,}; the model has ids from 0 to '
          f'{bound - 1:,}.',
          fix="Correct the module, or enlarge the model's vocab_size or num_classes.",
          parameters=_MODULE,
          docs='add_a_data_source.md',
        )
    return with_masks(batch, self._spec.shapes)

  def __getattr__(self, name: str) -> Any:
    return getattr(self._batches, name)


class DataModule(Protocol):
  """The functions of a data module. Only `open_batches` is required.

  The other functions are optional, and their names are reserved. A run that needs a missing
  function stops before its first step, with an error that names the function or the parameter to
  remove. All functions raise ConfigError or DataError for a config that they cannot open.
  """

  def open_batches(
    self, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool
  ) -> BatchIterator:
    """Returns the global batches of `config`.

    Args:
      config: what to open.
      spec: features, shapes, dtypes and largest ids that the model accepts.
      feature_converter: 'lm', 'prefix_lm', ...: how task features become model features.
      repeat: start over at the end of the data (training), or stop (evaluation).
    """

  # ---- Optional -----------------------------------------------------------------------------

  def vocabulary(self, config: DatasetConfig, *, feature_converter: str) -> Optional[Vocabulary]:
    """Returns the vocabulary of the batches (text <-> ids); None if they have no text.

    Needed by train.sample_cfg and `python -m t5x_gpu.data preview`.
    """

  def class_names(self, config: DatasetConfig) -> Optional[Sequence[str]]:
    """Returns the names of the label classes, in the order of their numbers; None without labels.

    Without this function, tables and pictures show class numbers.
    """

  def task_names(self, config: DatasetConfig) -> Sequence[str]:
    """Returns the tasks of a mixture that have the split; for a single task, its name.

    Without this function, `python -m t5x_gpu.eval` evaluates a mixture as a whole.
    """

  def evaluated_tasks(
    self,
    config: DatasetConfig,
    *,
    feature_converter: str,
    num_examples: Optional[int],
    required: bool,
  ) -> Sequence[EvaluatedTask]:
    """Returns the tasks that have metrics, with their examples.

    Needed by train.infer_eval_dataset_cfg and task metrics of `python -m t5x_gpu.eval`.

    Args:
      config: a task or mixture, its split and lengths; batch size and packing do not matter.
      feature_converter: the model's feature converter; it determines the ids of the examples.
      num_examples: take only this many examples of each task; None for all.
      required: raise DataError if no task or example is found.
    """

  def survey(self, config: DatasetConfig, *, num_measured: int) -> Survey:
    """Returns the size of the split. Needed by `python -m t5x_gpu.config from_hf`.

    Args:
      config: a task or mixture, its split and vocabulary; its lengths do not matter.
      num_measured: tokenize at most this many examples, a random sample.
    """

  def texts(self, config: DatasetConfig) -> Iterator[str]:
    """Yields the texts of the split, uncut. Needed by `python -m t5x_gpu.data words`.

    Args:
      config: a task or mixture, and its split; its vocabulary and lengths do not matter.
    """

  def prompt_text(
    self, config: DatasetConfig, *, feature_converter: str, model_vocab_size: int, has_inputs: bool
  ) -> PromptText:
    """Returns text <-> ids, and the examples of the task. Needed by `python -m t5x_gpu.infer`.

    Args:
      config: the task; with an empty name, only a vocabulary.
      feature_converter: the model's feature converter.
      model_vocab_size: number of ids of the model.
      has_inputs: the model reads prompts in an encoder, or was trained on inputs before targets.
    """

  def class_text(self, config: DatasetConfig, *, model_vocab_size: int) -> EncoderText:
    """Returns the texts of the task. Needed by `infer` with a classifier."""

  def preparation(self, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str) -> Any:
    """Returns a `preparation.Preparation`. Needed by `python -m t5x_gpu.prepare`."""

  def source_config(self, config: DatasetConfig) -> DatasetConfig:
    """Returns the config of the text source of these batches, for prompts and task metrics.

    Prepared rows have no text; the result is the config of the task they were prepared from.
    """

  def text_config(self, config: DatasetConfig) -> DatasetConfig:
    """Returns a config that is sufficient for `vocabulary`; may contain only a vocabulary."""


_FUNCTIONS = {
  name: inspect.signature(function)
  for name, function in vars(DataModule).items()
  if inspect.isfunction(function) and not name.startswith('_')
}
_ITERATOR = ('__next__', '__iter__', 'peek', 'get_state', 'set_state', 'describe')


def _check(module: types.ModuleType) -> None:
  """Raises ConfigError unless `open_batches` exists and all functions have the declared signature.

  `_optional` refuses other objects with the name of an optional function, when it is needed.
  """
  problems = []
  for name, signature in _FUNCTIONS.items():
    parameters = [p for p in signature.parameters.values() if p.name != 'self']
    shown = str(inspect.Signature([p.replace(annotation=p.empty) for p in parameters]))
    function = getattr(module, name, None)
    if not callable(function):
      if name == 'open_batches':
        problems.append(f'it has no function {name}{shown}.' + did_you_mean(name, vars(module)))
      continue
    by_name = {p.name: None for p in parameters if p.kind == p.KEYWORD_ONLY}
    try:
      inspect.signature(function).bind(*[None] * (len(parameters) - len(by_name)), **by_name)
    except TypeError as e:
      problems.append(f'{name} cannot be called as {name}{shown}: {e}.')
    except ValueError:
      pass  # a builtin without a signature
  if problems:
    raise ConfigError(
      f'DatasetConfig.module = {module.__name__!r} is not a data module: ' + '\n  '.join(problems),
      fix='Define the missing functions, or name another module.',
      parameters=('DatasetConfig.module',),
      docs='add_a_data_source.md',
    )


def module_of(config: DatasetConfig) -> str:
  """Returns the name of the module that opens `config`."""
  is_prepared = (config.mixture_or_task_name or '').startswith(PREPARED)
  return _PREPARED_MODULE if is_prepared and config.module == _TEXT_MODULE else config.module


def _module(config: DatasetConfig) -> DataModule:
  """Returns the checked `DataModule` of `config`."""
  name = module_of(config)
  try:
    module = importlib.import_module(name)
  except ModuleNotFoundError as e:
    if e.name == name.partition('.')[0]:  # the user's own module
      fix = 'Put the module into the working folder or a folder of PYTHONPATH, or correct its name.'
    else:
      fix = (
        "Install what is missing (pip install 't5x_gpu' brings SeqIO and TensorFlow), or set "
        "DatasetConfig.module = 't5x_gpu.data.synthetic' for random batches, which needs neither."
      )
    raise ConfigError(
      f'DatasetConfig.module = {name!r} cannot be imported: {e}.',
      fix=fix,
      parameters=('DatasetConfig.module',),
    ) from e
  _check(module)
  return module


def _optional(config: DatasetConfig, name: str) -> Optional[Callable[..., object]]:
  """Returns an optional function of the module, or None. Raises ConfigError for other objects."""
  function = getattr(_module(config), name, None)
  if function is not None and not callable(function):
    raise ConfigError(
      f'{name} of {module_of(config)} is a {type(function).__name__}, not a function.',
      fix=f'Rename it: data modules may use the name {name} only for the function.',
      parameters=_MODULE,
      docs='add_a_data_source.md',
    )
  return function


def import_modules(
  *configs: Optional[DatasetConfig], texts: Iterable[Optional[DatasetConfig]] = ()
) -> None:
  """Imports and checks the data modules of these datasets; call it before a thread opens them.

  TensorFlow Datasets' modules replace `builtins.__import__` while they declare lazy imports. A
  concurrent `from jax... import` in another thread would get a lazy module instead of a class.

  Args:
    *configs: datasets whose batches are opened.
    texts: datasets whose text is also used; another module reads the text of prepared rows.
  Raises:
    ConfigError: a module cannot be imported, or lacks a function.
    DataError: prepared rows cannot be read.
  """
  for config in _used(configs, texts):
    _module(config)


def quiet_imports(
  *configs: Optional[DatasetConfig], texts: Iterable[Optional[DatasetConfig]] = ()
) -> list[str]:
  """Returns what `import_modules` imports that starts no threads and touches no GPU.

  Raises:
    DataError: prepared rows cannot be read.
  """
  names = [module_of(config) for config in _used(configs, texts)]
  return ['t5x_gpu.data.tf_import'] if _TEXT_MODULE in names else []


def _used(
  configs: Iterable[Optional[DatasetConfig]], texts: Iterable[Optional[DatasetConfig]]
) -> list[DatasetConfig]:
  sources = [_text_of(config, 'source_config') for config in filter(None, texts)]
  return [*filter(None, configs), *sources]


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> BatchIterator:
  """Returns the batches of `config`; arguments and errors as for `DataModule.open_batches`."""
  batches = _module(config).open_batches(
    config, spec=spec, feature_converter=feature_converter, repeat=repeat
  )
  if missing := [name for name in _ITERATOR if not callable(getattr(batches, name, None))]:
    raise ConfigError(
      f'open_batches of {module_of(config)} returned a {type(batches).__name__}, which lacks '
      f'{", ".join(missing)}.',
      fix='Define these methods: see t5x_gpu.data.batches.BatchIterator.',
      parameters=_MODULE,
      docs='add_a_data_source.md',
    )
  module = module_of(config)
  return batches if module.startswith('t5x_gpu.') else _OwnBatches(batches, spec, module)


@contextlib.contextmanager
def batches_to_close(config: DatasetConfig, **options: object) -> Iterator[BatchIterator]:
  """Context that opens batches, with arguments as for `open_batches`, and closes them."""
  batches = open_batches(config, **options)
  try:
    yield batches
  finally:
    if close := optional_method(batches, 'close'):
      close()


def open_vocabulary(config: DatasetConfig, *, feature_converter: str) -> Vocabulary:
  """Returns the vocabulary of `config`; see `DataModule.vocabulary`. Raises ConfigError."""
  config = _text_of(config, 'text_config')
  make = _optional(config, 'vocabulary')
  found = make and make(config, feature_converter=feature_converter)
  if found is None:
    raise ConfigError(
      f'The batches of {config.module} have no text, so there is no vocabulary for samples.',
      fix='Remove train.sample_cfg, or train on a task with a vocabulary.',
      parameters=('train.sample_cfg', *_MODULE),
    )
  return found


def open_class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the class names of `config`'s labels in order; None without labels or names."""
  names = _optional(config, 'class_names')
  return None if names is None else names(config)


def open_task_names(config: DatasetConfig) -> tuple[str, ...]:
  """Returns the tasks of a mixture that have the split; otherwise the config's name."""
  names = _optional(config, 'task_names')  # prepared rows are evaluated as a whole
  return (config.mixture_or_task_name,) if names is None else names(config)


def has_text(config: DatasetConfig) -> bool:
  """Returns whether the data module of `config` has text for `infer`; imports it."""
  config = _text_of(config, 'source_config')
  return any(_optional(config, name) is not None for name in ('prompt_text', 'class_text'))


def open_text(
  config: DatasetConfig,
  function: str,
  *,
  may_import: Optional[Collection[str]] = None,
  **options: object,
) -> PromptText | EncoderText:
  """Calls a function of the data module for text <-> ids and the task's examples.

  Args:
    config, **options: arguments of the function.
    function: 'prompt_text', or 'class_text' for a classifier; see `DataModule`.
    may_import: modules that may be imported in addition to t5x_gpu's; None for any.
  Raises:
    ConfigError: the module does not exist or must not be imported, or its batches have no text.
    DataError: the task or vocabulary does not exist, or has more ids than the model.
  """
  check_trusted(config, may_import)
  config = _text_of(config, 'source_config')
  check_trusted(config, may_import)  # prepared rows name the modules of their text
  make = _optional(config, function)
  if make is None:
    raise ConfigError(
      f'The batches of {config.module} have no text: the module has no function {function!r}.',
      fix='Give a vocabulary and a file of prompts, as in --vocabulary=byte --prompts=prompts.txt, '
      'or define the function.',
      parameters=('DatasetConfig.module',),
      docs='add_a_data_source.md#batches-from-code-my_batchespy',
    )
  return make(config, **options)


def open_survey(config: DatasetConfig, *, num_measured: int) -> Survey:
  """Returns the size of `config`'s split; see `DataModule.survey`."""
  return _needed(config, 'survey')(config, num_measured=num_measured)


def open_texts(config: DatasetConfig) -> Iterator[str]:
  """Returns the texts of `config`'s split; see `DataModule.texts`."""
  return _needed(config, 'texts')(config)


def _needed(config: DatasetConfig, name: str) -> Callable[..., Any]:
  """Returns a function of the data module; raises ConfigError without it."""
  function = _optional(config, name)
  if function is None:
    raise ConfigError(
      f'{config.mixture_or_task_name!r} is opened by {module_of(config)}, which has no function '
      f'{name!r}.',
      fix='Name a task or files of text, such as jsonl:data/*.jsonl.',
      parameters=_MODULE,
      docs='add_a_data_source.md',
    )
  return function


def open_evaluated_tasks(
  config: DatasetConfig,
  *,
  feature_converter: str,
  num_examples: Optional[int] = None,
  required: bool = True,
) -> Sequence[EvaluatedTask]:
  """Returns the tasks of `config` that have metrics; see `DataModule.evaluated_tasks`."""
  config = _text_of(config, 'source_config')
  open_tasks = _optional(config, 'evaluated_tasks')
  if open_tasks is None:
    if not required:
      return ()
    raise ConfigError(
      f'The batches of {config.module} do not come from a task, so the loss is their only metric.',
      fix='Remove train.infer_eval_dataset_cfg (for python -m t5x_gpu.eval: '
      '--metrics=loss), or use a task with metrics.',
      parameters=_MODULE,
    )
  return open_tasks(
    config, feature_converter=feature_converter, num_examples=num_examples, required=required
  )


def open_preparation(config: DatasetConfig, *, spec: BatchSpec, feature_converter: str) -> Any:
  """Returns the `Preparation` for the rows that `prepare` writes; see `DataModule.preparation`."""
  make = _optional(config, 'preparation')
  if make is None:
    raise ConfigError(
      f'{config.mixture_or_task_name!r} is opened by {module_of(config)}, which does not '
      'produce text batches: there is nothing to prepare.',
      fix='Set MIXTURE_OR_TASK_NAME to a task, and DatasetConfig.module to its default, '
      f'{_TEXT_MODULE!r}.',
      parameters=('DatasetConfig.mixture_or_task_name', *_MODULE),
    )
  return make(config, spec=spec, feature_converter=feature_converter)


def _text_of(config: DatasetConfig, function: str) -> DatasetConfig:
  """Returns `function(config)`; `config` if the module has no such function."""
  change = _optional(config, function)
  return config if change is None else change(config)
