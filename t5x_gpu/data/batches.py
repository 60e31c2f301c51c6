"""The contract between data and training: contents of a batch, iteration, and resuming.

`BatchSpec` and `BatchIterator` are the contract; `DatasetConfig` names the batches that
`data_module.open_batches` opens. Nothing here imports TensorFlow.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, Optional, Protocol, Union

import numpy as np

from t5x_gpu.errors import DataError, ShapeError
from t5x_gpu.runtime.cluster.agreement import Facts
from t5x_gpu.storage.json_schema import Json, JsonObject

# One batch: feature name (SeqIO's model feature names) -> numpy array [batch, length], or [batch]
# for labels and their weights. Prepared batches read their rows on access.
Batch = dict[str, np.ndarray]

# 'prepared:DIR': rows packed by `python -m t5x_gpu.prepare`.
PREPARED = 'prepared:'
# Key of `describe()`: the class names, in the order of their numbers.
CLASS_NAMES = 'class_names'
# Variables that every chat template has.
_OF_TEMPLATES = ('messages', 'tools', 'documents', 'add_generation_prompt')


@dataclasses.dataclass(frozen=True)
class BatchSpec:
  """Shapes and dtypes of the global batch, by feature name.

  Attributes:
    shapes: feature name -> (batch, length), or (batch,).
    dtypes: feature name -> numpy dtype name.
    vocab_sizes: feature name -> exclusive upper bound of its token ids or class numbers.
    class_names: class names of the model, in the order of its class numbers; empty to use the
      data's class names.
  """

  shapes: Mapping[str, tuple[int, ...]]
  dtypes: Mapping[str, str]
  vocab_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)
  class_names: tuple[str, ...] = ()

  @property
  def batch_size(self) -> int:
    return next(iter(self.shapes.values()))[0]

  def with_rows(self, rows: int) -> 'BatchSpec':
    """Returns the spec of a batch with another number of rows."""
    shapes = {name: (rows, *shape[1:]) for name, shape in self.shapes.items()}
    return dataclasses.replace(self, shapes=shapes)

  def check(self, batch: Batch) -> None:
    """Raises ShapeError unless `batch` has exactly these features, shapes and dtypes."""
    got = {name: (tuple(x.shape), str(x.dtype)) for name, x in batch.items()}
    want = {name: (tuple(shape), self.dtypes[name]) for name, shape in self.shapes.items()}
    wrong = [
      f'{name}: the model expects {want.get(name, "nothing")}, the data has '
      f'{got.get(name, "nothing")}'
      for name in sorted(got.keys() | want.keys())
      if got.get(name) != want.get(name)
    ]
    if wrong:
      raise ShapeError(
        'The batch does not match the model (shape, dtype):\n  ' + '\n  '.join(wrong),
        fix='Make TASK_FEATURE_LENGTHS, BATCH_SIZE and the feature converter agree.',
        parameters=('TASK_FEATURE_LENGTHS', 'BATCH_SIZE'),
      )


class BatchIterator(Protocol):
  """Global batches in an order that depends on the data and the seed, never on the hosts.

  Every process sees the same global batch and puts only its own part on its devices.

  It may also have the methods of `FileBatchIterator`.
  """

  def __next__(self) -> Batch: ...
  def __iter__(self) -> Iterator[Batch]: ...
  def peek(self) -> Batch:
    """Returns the next batch without consuming it. Raises StopIteration at the end."""

  def get_state(self) -> bytes:
    """Returns the state for `set_state` to continue from here, on any number of hosts.

    After `__next__` has failed, the state is still the position of the batch that failed: the run
    saves its last step before it ends. `counted_state`, if there is one, is called instead.
    """

  def set_state(self, state: bytes) -> None:
    """Continues where `get_state` was called. Raises DataError if the data has changed."""

  def describe(self) -> Json:
    """Returns JSON-ready facts for logs and manifests: task, split, seed, examples, guarantees."""


class FileBatchIterator(BatchIterator, Protocol):
  """A BatchIterator that reads files. Each of the additional methods is optional."""

  def close(self) -> None:
    """Releases files and threads."""

  def file_facts(self) -> Facts:
    """Returns facts about the source files, which hosts compare at startup (same_on_hosts.py).

    Without this method, hosts compare only `describe()` and the next batch.
    """

  def source_files(self) -> object:
    """Returns the `SourceFiles`, which are checked for changes when a run resumes."""

  def watched_files(self) -> Sequence[str]:
    """Returns the files that must not change while the run reads them."""

  def counted_state(self, *, ago: int = 0) -> bytes:
    """Returns a state without buffers; `set_state` then reads the batches again.

    A run saves it when a watched file has changed, because buffers may hold the new content.

    Args:
      ago: number of batches to go back.
    """


FileMethod = Literal['close', 'file_facts', 'source_files', 'watched_files', 'counted_state']


def optional_method(batches: BatchIterator, name: FileMethod) -> Optional[Callable[..., object]]:
  """Returns a method of `FileBatchIterator`; None if `batches` does not have it."""
  method = getattr(batches, name, None)
  return method if callable(method) else None


@dataclasses.dataclass(frozen=True)
class DatasetConfig:
  """Which batches to open. Field names are the same as in T5X, where it has the field.

  Attributes:
    mixture_or_task_name: a registered SeqIO Task or Mixture; a source such as
      `text_files:PATTERN` or `jsonl:PATTERN`, which needs no Python (docs/tasks.md); or
      `prepared:DIR` (docs/data.md).
    task_feature_lengths: task feature -> length in tokens, {'inputs': 512, 'targets': 114}. None,
      for train.infer_eval_dataset_cfg alone: examples are not cut.
    split: 'train', 'validation', ...
    batch_size: rows of the global batch (after packing).
    shuffle: shuffle files and examples with `seed`.
    seed: seed of the data order. The same seed gives the same batches on any topology.
    pack: put several examples into one row, separated by segment ids.
    use_cached: read SeqIO's offline cache.
    mixture_or_task_module: module that registers the task, or several; imported first.
    vocabulary: 'byte', 'sentencepiece:MODEL_FILE', 'huggingface:FOLDER' (or its tokenizer.json),
      'words:8192' (words hashed into that many ids), or None for the task's vocabulary.
    mixture_rates: for `prepared:DIR`: task -> rate, replaces the rates of the mixture.
    loss_on_targets_only: give inputs weight 0 in the loss: the inputs of feature converter
      'prefix_lm', and in conversations all messages except the assistant's.
    max_corrupt_fraction: share of damaged records to tolerate; they are skipped, counted and
      reported. 0.0: the first damaged record is an error that names file and position.
    chat_template_variables: name -> value, for the tokenizer's chat template (`enable_thinking`).
    module: the data module that opens the data; see `data_module.DataModule`.
  """

  mixture_or_task_name: str
  task_feature_lengths: Optional[Mapping[str, int]]
  split: str
  batch_size: int
  shuffle: bool = True
  seed: int = 0
  pack: bool = True
  use_cached: bool = False
  mixture_or_task_module: Union[str, Sequence[str], None] = None
  vocabulary: Optional[str] = None
  loss_on_targets_only: bool = True
  mixture_rates: Optional[Mapping[str, float]] = None
  max_corrupt_fraction: float = 0.0
  chat_template_variables: Optional[Json] = None
  module: str = 't5x_gpu.data.seqio_batches'

  def __post_init__(self) -> None:
    variables = self.chat_template_variables or {}
    taken = [name for name in variables if name in _OF_TEMPLATES or not str(name).isidentifier()]
    try:
      json.dumps(dict(variables))
      problem = f'{", ".join(map(repr, taken))} cannot be set' if taken else ''
    except (TypeError, ValueError) as e:
      problem = str(e)
    if problem:
      raise DataError(
        f'DatasetConfig.chat_template_variables = {dict(variables)!r}: {problem}.',
        fix='Set names that the template reads to texts, numbers or booleans, as in '
        "{'enable_thinking': False}.",
        parameters=('DatasetConfig.chat_template_variables',),
        docs='finetune.md#chat',
      )

  @property
  def task_modules(self) -> tuple[str, ...]:
    """The modules that register the task."""
    modules = self.mixture_or_task_module or ()
    return (modules,) if isinstance(modules, str) else tuple(modules)

  def facts(self, *, feature_converter: str, repeat: bool) -> JsonObject:
    """Returns the settings that identify the batches in addition to the task, for `same_data`."""
    names = ('split', 'seed', 'shuffle', 'pack', 'batch_size', 'loss_on_targets_only')
    return {
      **{name: getattr(self, name) for name in names},
      'task_feature_lengths': dict(self.task_feature_lengths),
      'repeat': repeat,
      'feature_converter': feature_converter,
    }


# Stack -> the feature with its tokens.
STACK_TOKENS = {'encoder': 'encoder_input_tokens', 'decoder': 'decoder_target_tokens'}


def row_masks(names: Collection[str]) -> dict[str, str]:
  """Returns mask -> stack for the masks among the features `names`, if rows hold one example.

  Such rows have `encoder_segment_ids` or `decoder_segment_ids`, 1 on tokens and 0 on padding, and
  no positions. In packed rows, segment ids number the examples.
  """
  return {
    f'{stack}_segment_ids': stack
    for stack in STACK_TOKENS
    if f'{stack}_segment_ids' in names and f'{stack}_positions' not in names
  }


def assumed_mask(batch: Mapping[str, Any], stack: str) -> np.ndarray:
  """Returns the mask [..., length] for a batch, or row, that lacks one: id 0 is padding.

  An id 0 counts as a token if its loss weight is above 0, or if it is in the prefix.
  """
  marks = (STACK_TOKENS[stack], f'{stack}_loss_weights', f'{stack}_causal_attention')
  return np.any([np.asarray(batch[name]) > 0 for name in marks if name in batch], axis=0)


def with_masks(batch: Batch, names: Collection[str]) -> Batch:
  """Returns a batch, or row, with missing row masks among `names` added; see `assumed_mask`."""
  missing = {mask: stack for mask, stack in row_masks(names).items() if mask not in batch}
  made = {mask: assumed_mask(batch, stack).astype('int32') for mask, stack in missing.items()}
  return {**batch, **made} if made else batch


def batch_hash(batch: Batch) -> str:
  """Returns 16 hex digits that identify the content of `batch`; stored in checkpoints.

  Masks count only where they differ from `assumed_mask`: earlier versions did not have masks.
  """
  digest, masks = hashlib.sha256(), row_masks(batch)
  for name in sorted(batch):
    x = np.ascontiguousarray(batch[name])
    if name in masks and np.array_equal(x, assumed_mask(batch, masks[name])):
      continue
    digest.update(f'{name}{x.shape}{x.dtype}'.encode())
    digest.update(x.tobytes())
  return digest.hexdigest()[:16]
