"""The interface of a model. Any object with the members of `Model` is a model, without inheritance.

The other protocols add members for some features. A model has all or none of their members:
  LayeredModel: pipelines, accumulation by layer, and the table of layers of `parity`.
  TextModel: `infer`, samples and task metrics. ScoringModel: `infer --score`, too.
  PreferenceModel: DpoModel.
  ClassifierModel: `infer` of classes.
A model may have any of `OptionalMembers`, which also has their defaults. decoder_only.py and
encoder_decoder.py are examples.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Optional, Protocol, TypeGuard

import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.incremental import DecodingState
from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning.layer_stacks import ONLY

# Nested dictionaries of arrays. The layers of a stack are one subtree, `layers`, whose arrays have
# a leading axis [layers, ...].
Params = Any
_ABSENT = object()
# A batch on devices: feature name -> [batch, length] or [batch]; 'rows' [batch], row numbers for
# dropout; and 'encoder_places', 'decoder_places' [length], positions of tokens in split rows.
DeviceBatch = Mapping[str, jax.Array]


class Model(Protocol):
  """The members that every model must have."""

  @property
  def num_outcomes(self) -> int:
    """Number of tokens or classes that the model chooses from; its log is the initial loss."""

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the name of the feature converter (data/features.py) that makes the model's batches.

    Args:
      task_feature_lengths: task feature -> tokens.
    """

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns shape [batch, length] or [batch] and dtype of each feature in a global batch.

    Args:
      task_feature_lengths: task feature -> tokens.
      batch_size: rows of the global batch.
      pack: whether a row holds several examples.
    """

  def logical_sizes(self) -> dict[str, int]:
    """Returns logical axis -> size, of all axes that a mesh may split (partitioning/axis_rules.py).

    Includes 'layers', and 'encoder_layers' if the encoder has a different number of layers.
    """

  def flops_per_token(self, length: int) -> float:
    """Returns FLOPs of forward and backward per position of a row of `length` tokens."""

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns new float32 parameters, each a `NamedParam` with a logical name per dimension."""

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns metric -> (sum, weight), float32 scalars over the rows of `batch`.

    The trainer adds them over devices and microbatches, then divides; it minimizes 'loss'.

    Args:
      params: arrays of `init`, without the boxes; a device may hold a part of each, see
        docs/parallelism.md.
      batch: the features of `batch_spec`, this device's rows.
      dropout_key: None for no dropout, as in evaluation.
    """


class LayeredModel(Model, Protocol):
  """A model whose `loss` is `head(run_layers(embed(...)))`.

  If it has several stacks (`OptionalMembers.stacks`), `run_layers` also takes the name of a stack.
  """

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Any:
    """Returns the input of the first layer, [batch, length, embed]; a tuple with one per stack."""

  def run_layers(
    self,
    params: Params,
    x: Any,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
    first_layer: Any = 0,
  ) -> Any:
    """Returns `x` after the layers in `params['layers']`.

    Args:
      params: parameters of the model; 'layers' may hold only some consecutive layers of the stack.
      x: output of `embed` or of earlier layers.
      batch: as for `loss`.
      dropout_key: None for no dropout.
      first_layer: index in the stack of the first of these layers.
    """

  def head(
    self, params: Params, x: Any, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns the sums of `loss` from `x`, the output of the last layer."""


class TextModel(Model, Protocol):
  """A model that continues prompts."""

  def start_decoding(
    self, params: Params, prompts: jax.Array, lengths: jax.Array, *, slots: int
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] of the token after each prompt, and the state.

    If `feature_converter` is 'encoder_decoder', the method also takes `encoder_tokens` [batch,
    length] and `encoder_segments` [batch, length], 1 on tokens and 0 on padding.

    Args:
      params: parameters of the model.
      prompts: [batch, prompt_length] decoder inputs, padded on the left.
      lengths: [batch] number of tokens of each prompt.
      slots: number of tokens that the caches must hold, prompt included.
    """

  def decode_step(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] after `tokens` [batch], and the next state."""


class ScoringModel(TextModel, Protocol):
  """A model that also scores given targets."""

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 logits [batch, length, vocab] of the targets in `batch`."""


class PreferenceModel(Model, Protocol):
  """A model that DpoModel can train."""

  def token_log_probs(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 log-probabilities [batch, length] of the targets in `batch`."""


class ClassifierModel(Model, Protocol):
  """A model that may have one label per row."""

  @property
  def classifies(self) -> bool:
    """True if rows have one label: `logits` are then [batch, classes]."""

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 logits [batch, classes]."""


class OptionalMembers:
  """Members that a model may have, with the defaults for models without them.

  `OptionalMembers(model).tags` is the model's `tags`, or False. A base class with these defaults
  would hide the members of a model that LoraModel or DpoModel wraps.

  Attributes:
    config: sizes; makes decoding, plans and hints more precise (see `config_of`).
    stacks: names of several stacks of layers in the order in which they run, as in ('encoder',
      'decoder').
    gathers_layers: `run_layers` runs layers with `scan_layers`. Data parallelism then sums a
      layer's gradients as soon as they are known.
    couples_rows: the loss of a row depends on other rows, so microbatches would change the loss.
    classifies: each row has one label, rather than a target per token.
    tags: each word has a label: `logits` are [batch, length, classes].
    regresses: each row has a number.
    embeds: each text becomes a vector.
    class_names: names of the classes or tags, in the order of their numbers.
    label_smoothing, z_loss: coefficients of the loss per token.
    is_trained: predicate on the parameter path; None trains everything. Frozen parameters do not
      have gradients or optimizer state.
  """

  config: Any = None
  stacks: tuple[str, ...] = (ONLY,)
  gathers_layers: bool = False
  couples_rows: bool = False
  classifies: bool = False
  tags: bool = False
  regresses: bool = False
  embeds: bool = False
  class_names: tuple[str, ...] = ()
  label_smoothing: float = 0.0
  z_loss: float = 0.0
  is_trained: Optional[Callable[[str], bool]] = None

  def __init__(self, model: Model) -> None:
    self._model = model

  def __getattribute__(self, name: str) -> Any:
    if name.startswith('_'):
      return super().__getattribute__(name)
    getattr(type(self), name)  # raises AttributeError for undeclared names
    value = getattr(self._model, name, _ABSENT)
    return super().__getattribute__(name) if value is _ABSENT else value

  @property
  def guess_loss(self) -> Optional[float]:
    """The loss of a model that guesses uniformly; None if it depends on the data."""
    return math.log(self._model.num_outcomes) if self._model.num_outcomes > 1 else None

  def flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns FLOPs of forward and backward of a row; `lengths` is stack -> number of tokens."""
    length = next(iter(lengths.values()))
    return self._model.flops_per_token(length) * length

  def is_adapter(self, path: str) -> bool:
    """Returns whether a checkpoint to start from may lack the parameter at `path`."""
    del path
    return False

  def source_of(self, path: str) -> str:
    """Returns the path in a checkpoint to start from of the parameter at `path`."""
    return path


def missing_members(model: Any, protocol: type) -> list[str]:
  """Returns the members of `protocol`, including inherited ones, that `model` does not have."""

  def is_missing(name: str) -> bool:
    # A class that derives from a protocol inherits the protocol's empty members.
    owner = next((base for base in type(model).__mro__ if name in vars(base)), None)
    return not hasattr(model, name) or getattr(owner, '_is_protocol', False)

  return [name for name in _members(protocol) if is_missing(name)]


def is_layered(model: Model) -> TypeGuard[LayeredModel]:
  return not missing_members(model, LayeredModel)


def writes_text(model: Model) -> TypeGuard[TextModel]:
  return not missing_members(model, TextModel)


def classifies(model: Model) -> TypeGuard[ClassifierModel]:
  """Returns whether each row has one label, rather than a target per token."""
  return OptionalMembers(model).classifies


def encodes_texts(model: Model) -> bool:
  """Whether `infer` returns classes, tags, numbers or vectors instead of text."""
  has = OptionalMembers(model)
  return has.classifies or has.tags or has.regresses or has.embeds


def config_of(model: Model) -> Optional[TransformerConfig]:
  """Returns the model's `config`; None for a custom model without a TransformerConfig.

  The config limits the length of prompts, sets expert capacity in decoding, and makes hints more
  precise.
  """
  config = OptionalMembers(model).config
  return config if isinstance(config, TransformerConfig) else None


def uses_fp8(model: Model) -> bool:
  """Returns whether the matmuls of the layers are in FP8; False without a TransformerConfig."""
  config = config_of(model)
  return config is not None and config.fp8


def compute_dtype(model: Model) -> Any:
  """Returns the dtype of the model's matmuls; float32 without a TransformerConfig."""
  config = config_of(model)
  return jnp.float32 if config is None else config.compute_dtype


def check_model(model: Any) -> None:
  """Raises ModelError unless `model` has all members of `Model`, with the expected signatures."""
  name = model.__name__ if isinstance(model, type) else type(model).__name__
  if isinstance(model, type):
    raise ModelError(
      f'{name} is a class; the trainer needs an instance of it.',
      fix=f'Write MODEL = @{name}() in gin, with parentheses.',
      parameters=('train.model',),
    )
  missing = missing_members(model, Model)
  wrong = [] if missing else [m for m in _methods(Model) if not _can_be_called(model, m)]
  if missing or wrong:
    declared = [f'{method}{inspect.signature(getattr(model, method))}' for method in wrong]
    raise ModelError(
      f'{name} lacks {", ".join(missing)}, which every model must have.'
      if missing
      else f'{name} does not take the arguments that the trainer passes: {", ".join(declared)}.',
      fix='Declare\n  ' + '\n  '.join(map(_declaration, missing or wrong)),
      parameters=('train.model',),
      docs='add_a_model.md#when-the-layer-is-not-enough',
    )


def _members(protocol: type) -> list[str]:
  return [
    name
    for base in reversed(protocol.__mro__)
    if getattr(base, '_is_protocol', False)
    for name in vars(base)
    if not name.startswith('_')
  ]


def _methods(protocol: type) -> list[str]:
  return [name for name in _members(protocol) if inspect.isfunction(getattr(protocol, name))]


def _declaration(name: str) -> str:
  member = getattr(Model, name)
  if isinstance(member, property):
    return f'{name}: int'
  signature = inspect.signature(member)
  plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
  return f'def {name}{inspect.Signature(plain)}'


def _can_be_called(model: Any, name: str) -> bool:
  """Returns whether a method of `model` accepts the parameters that `Model` declares."""
  _, *parameters = inspect.signature(getattr(Model, name)).parameters.values()
  positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
  keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
  try:
    inspect.signature(getattr(model, name)).bind(*positional, **keywords)
  except TypeError:
    return False
  return True
