"""The base class of models: required members, optional members, and their defaults.

`ModelWrapper` is the base class of models that change another model: LoraModel and DpoModel.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from t5x_gpu.data import features
from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.incremental import DecodingState
from t5x_gpu.models.losses import Sums
from t5x_gpu.partitioning.axis_rules import NamedParam
from t5x_gpu.partitioning.layer_stacks import ONLY, run_layers

# Nested dictionaries of arrays. The layers of a stack are one subtree, `layers`, whose arrays have
# a leading axis [layers, ...].
Params = Any
# A batch on devices: feature name -> [batch, length] or [batch]; 'rows' [batch], row numbers for
# dropout; and 'encoder_places', 'decoder_places' [length], positions of tokens in split rows.
DeviceBatch = Mapping[str, jax.Array]
# What layers pass on: [batch, length, embed]; of several stacks a tuple; or a tree of the model's.
LayerOutput = Any
# What every model must have, with `loss` or the three parts of the loss.
REQUIRED = ('num_outcomes', 'feature_converter', 'init')
# Parts of the loss, for pipelines, accumulation by layer, and the table of layers of `parity`.
PIECES = ('embed', 'run_layers', 'head')
# Methods of a model that writes text: `infer`, samples and task metrics.
DECODING = ('start_decoding', 'decode_step')


class Model:
  """A model that the trainer can train. Subclasses need `REQUIRED`, and `loss` or `PIECES`.

  Attributes:
    num_outcomes: number of tokens or classes that the model chooses from; 1 for a number.
    config: sizes, if the model has a TransformerConfig (see `config_of`).
    stacks: names of several stacks of layers in the order in which they run, as in ('encoder',
      'decoder').
    gathers_layers: `run_layers` runs layers with `scan_layers`. Data parallelism then sums a
      layer's gradients as soon as they are known.
    takes_rounded_kernels: kernels of the layers may be `RoundedKernel`s (layers/rounded.py).
      Modules of Flax, for example, take arrays only.
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

  # Without a default here, a dataclass that declares these two as fields still requires them.
  num_outcomes: int
  config: object
  stacks: ClassVar[tuple[str, ...]] = (ONLY,)
  gathers_layers: ClassVar[bool] = False
  takes_rounded_kernels: ClassVar[bool] = False
  couples_rows: ClassVar[bool] = False
  classifies: ClassVar[bool] = False
  tags: ClassVar[bool] = False
  regresses: ClassVar[bool] = False
  embeds: ClassVar[bool] = False
  class_names: tuple[str, ...] = ()
  label_smoothing: float = 0.0
  z_loss: float = 0.0
  is_trained: ClassVar[Optional[Callable[[str], bool]]] = None

  def missing(self, *names: str) -> list[str]:
    """Returns which of the `names` only `Model` defines, or are None, or `loss` replaces."""

    def is_missing(name: str) -> bool:
      member = getattr(self, name, None)
      only_here = getattr(member, '__func__', member) is getattr(Model, name, None)
      return member is None or only_here or (name in PIECES and _replaces_pieces(self))

    return [name for name in names if is_missing(name)]

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the name of the feature converter (data/features.py) that makes the model's batches.

    Args:
      task_feature_lengths: task feature -> tokens.
    """
    raise NotImplementedError

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns shape [batch, length] or [batch] and dtype of each feature in a global batch.

    Args:
      task_feature_lengths: task feature -> tokens.
      batch_size: rows of the global batch.
      pack: whether a row holds several examples.
    """
    return features.batch_spec(
      self.feature_converter(task_feature_lengths),
      task_feature_lengths=task_feature_lengths,
      batch_size=batch_size,
      pack=pack,
      vocab_size=self.num_outcomes,
    )

  def init(self, rng: jax.Array, spec: Optional[BatchSpec]) -> Params:
    """Returns new float32 parameters, each a `NamedParam` with a logical name per dimension.

    Args:
      rng: key.
      spec: the global batch; None where only the shapes of the parameters are used.
    """
    raise NotImplementedError

  def logical_sizes(self) -> dict[str, int]:
    """Returns logical axis -> size, of all axes that a mesh may split (partitioning/axis_rules.py).

    Includes 'layers', and 'encoder_layers' if the encoder has a different number of layers. The
    default has the axes of the parameters; for several sizes, a number that divides each.
    """
    sizes: dict[str, int] = {}
    for param in self._shapes():
      for name, size in zip(param.names, param.value.shape):
        if name is not None:
          sizes[name] = math.gcd(size, sizes.get(name, 0))
    return sizes

  def flops_per_token(self, length: int) -> float:
    """Returns FLOPs of forward and backward per position of a row of `length` tokens.

    The default is 6 per parameter, without attention.
    Source: Kaplan et al. 2020 (arXiv:2001.08361), section 2.1.
    """
    del length
    return 6.0 * sum(param.value.size for param in self._shapes())

  def _shapes(self) -> list[NamedParam]:
    params = jax.eval_shape(lambda: self.init(jax.random.key(0), None))
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, NamedParam))
    return [leaf for leaf in leaves if isinstance(leaf, NamedParam)]

  def flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns FLOPs of forward and backward of a row; `lengths` is stack -> number of tokens."""
    length = next(iter(lengths.values()))
    return self.flops_per_token(length) * length

  @property
  def sees_order(self) -> bool:
    """Whether the order of the tokens may matter."""
    config = config_of(self)
    return config is None or config.sees_order

  @property
  def guess_loss(self) -> Optional[float]:
    """The loss of a model that guesses uniformly; None if it depends on the data."""
    return math.log(self.num_outcomes) if self.num_outcomes > 1 else None

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns metric -> (sum, weight), float32 scalars over the rows of `batch`.

    The trainer adds them over devices and microbatches, then divides; it minimizes 'loss'. The
    default is `head` of all layers.

    Args:
      params: arrays of `init`, without the boxes; a device may hold a part of each, see
        docs/parallelism.md.
      batch: the features of `batch_spec`, this device's rows.
      dropout_key: None for no dropout, as in evaluation.
    """
    x = self._after_layers(params, batch, dropout_key)
    return self.head(params, x, batch, dropout_key=dropout_key)

  def _after_layers(
    self, params: Params, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> LayerOutput:
    x = self.embed(params, batch, dropout_key=dropout_key)
    for stack in self.stacks:
      x = run_layers(self, params, x, batch, stack=stack, dropout_key=dropout_key)
    return x

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> LayerOutput:
    """Returns the input of the first layer, [batch, length, embed]; a tuple with one per stack."""
    raise NotImplementedError

  def run_layers(
    self,
    params: Params,
    x: LayerOutput,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
    first_layer: ArrayLike = 0,
  ) -> LayerOutput:
    """Returns `x` after the layers in `params['layers']`.

    Args:
      params: parameters of the model; 'layers' may hold only some consecutive layers of the stack.
      x: output of `embed` or of earlier layers.
      batch: as for `loss`.
      dropout_key: None for no dropout.
      first_layer: index in the stack of the first of these layers.

    A model with several `stacks` also takes `stack`, the name of one of them.
    """
    raise NotImplementedError

  def head(
    self,
    params: Params,
    x: LayerOutput,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
  ) -> Sums:
    """Returns the sums of `loss` from `x`, the output of the last layer."""
    raise NotImplementedError

  def logits(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 logits [batch, length, vocab] of the targets in `batch`, for scores.

    If the model `classifies`, the logits are [batch, classes].
    """
    raise NotImplementedError

  def token_log_probs(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> jax.Array:
    """Returns float32 log-probabilities [batch, length] of the targets, for DpoModel."""
    raise NotImplementedError

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
    raise NotImplementedError

  def decode_step(
    self, params: Params, tokens: jax.Array, state: DecodingState
  ) -> tuple[jax.Array, DecodingState]:
    """Returns float32 logits [batch, vocab] after `tokens` [batch], and the next state."""
    raise NotImplementedError

  def is_adapter(self, path: str) -> bool:
    """Returns whether a checkpoint to start from may lack the parameter at `path`."""
    del path
    return False

  def source_of(self, path: str) -> str:
    """Returns the path in a checkpoint to start from of the parameter at `path`."""
    return path


def _of_model(name: str) -> property:
  return property(operator.attrgetter(f'model.{name}'))


def _with_params_of_model(name: str) -> Callable[..., Any]:
  @functools.wraps(getattr(Model, name))
  def method(self: 'ModelWrapper', params: Params, *args: Any, **options: Any) -> Any:
    return getattr(self.model, name)(self.params_of_model(params), *args, **options)

  return method


class ModelWrapper(Model):
  """A model that changes another model: a subclass has `params_of_model`, and what differs.

  Attributes:
    model: the other model.
  """

  model: Model

  num_outcomes = _of_model('num_outcomes')
  config = _of_model('config')
  stacks = _of_model('stacks')
  gathers_layers = _of_model('gathers_layers')
  takes_rounded_kernels = _of_model('takes_rounded_kernels')
  couples_rows = _of_model('couples_rows')
  classifies = _of_model('classifies')
  tags = _of_model('tags')
  regresses = _of_model('regresses')
  embeds = _of_model('embeds')
  sees_order = _of_model('sees_order')
  class_names = _of_model('class_names')
  label_smoothing = _of_model('label_smoothing')
  z_loss = _of_model('z_loss')
  guess_loss = _of_model('guess_loss')
  feature_converter = _of_model('feature_converter')
  batch_spec = _of_model('batch_spec')
  logical_sizes = _of_model('logical_sizes')
  flops_per_token = _of_model('flops_per_token')
  flops_per_row = _of_model('flops_per_row')
  is_trained = _of_model('is_trained')
  is_adapter = _of_model('is_adapter')
  source_of = _of_model('source_of')

  def missing(self, *names: str) -> list[str]:
    """Returns which of the `names` the model lacks, or the `loss` of this class replaces."""
    replaced = PIECES if _replaces_pieces(self) else ()
    return [name for name in names if name in replaced or self.model.missing(name)]

  def params_of_model(self, params: Params) -> Params:
    """Returns the parameters that `model` gets."""
    raise NotImplementedError

  loss = _with_params_of_model('loss')
  embed = _with_params_of_model('embed')
  run_layers = _with_params_of_model('run_layers')
  head = _with_params_of_model('head')
  logits = _with_params_of_model('logits')
  token_log_probs = _with_params_of_model('token_log_probs')
  start_decoding = _with_params_of_model('start_decoding')
  decode_step = _with_params_of_model('decode_step')


def _replaces_pieces(model: Model) -> bool:
  """Returns whether the class that defines the `loss` of `model` inherits one of the parts."""
  owners = [vars(model), *map(vars, type(model).__mro__)]
  inherited = [p for p in PIECES if getattr(type(model), p) is not getattr(Model, p)]
  owner = next(members for members in owners if 'loss' in members)
  return len(inherited) == len(PIECES) and not all(piece in owner for piece in PIECES)


def owner_of_loss(model: Model) -> Optional[str]:
  """Returns the name of the class whose `loss` replaces the three parts; None for no such class."""
  while not _replaces_pieces(model):
    if not isinstance(model, ModelWrapper):
      return None
    model = model.model
  owners = (base.__name__ for base in type(model).__mro__ if 'loss' in vars(base))
  return type(model).__name__ if 'loss' in vars(model) else next(owners)


def is_layered(model: Model) -> bool:
  """Returns whether the loss of the model is `head(run_layers(embed(...)))`."""
  return not model.missing(*PIECES)


def writes_text(model: Model) -> bool:
  """Returns whether the model continues prompts."""
  return not model.missing(*DECODING)


def encodes_texts(model: Model) -> bool:
  """Returns whether `infer` returns classes, tags, numbers or vectors instead of text."""
  return model.classifies or model.tags or model.regresses or model.embeds


def config_of(model: Model) -> Optional[TransformerConfig]:
  """Returns the model's `config`; None for a custom model without a TransformerConfig.

  The config limits the length of prompts, sets expert capacity in decoding, and makes plans and
  hints more precise.
  """
  config = getattr(model, 'config', None)
  return config if isinstance(config, TransformerConfig) else None


def uses_fp8(model: Model) -> bool:
  """Returns whether the matmuls of the layers are in FP8; False without a TransformerConfig."""
  return fp8_scaling_of(model) is not None


def fp8_scaling_of(model: Model) -> Optional[str]:
  """Returns the scaling of FP8 operands; None for a model that does not multiply in FP8."""
  config = config_of(model)
  return config.fp8_scaling if config is not None and config.fp8 else None


def compute_dtype(model: Model) -> DTypeLike:
  """Returns the dtype of the model's matmuls; float32 without a TransformerConfig."""
  config = config_of(model)
  return jnp.float32 if config is None else config.compute_dtype


def check_model(model: object) -> None:
  """Raises ModelError unless `model` is a Model with the required members and their signatures."""
  error = functools.partial(
    ModelError, parameters=('train.model',), docs='add_a_model.md#when-the-layer-is-not-enough'
  )
  while isinstance(model, ModelWrapper):
    if type(model).params_of_model is ModelWrapper.params_of_model:
      raise error(
        f'{type(model).__name__} lacks params_of_model, which every ModelWrapper must have.',
        fix=f'Declare\n  {_declaration("params_of_model", ModelWrapper)}',
      )
    model = model.model
  if isinstance(model, type):
    raise ModelError(
      f'{model.__name__} is a class; the trainer needs an instance of it.',
      fix=f'Write MODEL = @{model.__name__}() in gin, with parentheses.',
      parameters=('train.model',),
    )
  name = type(model).__name__
  if not isinstance(model, Model):
    raise error(
      f'{name} is not a model: it does not derive from t5x_gpu.models.model.Model.',
      fix=f'If it is your model, import Model from t5x_gpu.models.model and write '
      f'class {name}(Model).',
    )
  missing = model.missing(*REQUIRED)
  if model.missing('loss') and model.missing(*PIECES):
    missing.append('loss')
  methods = ('feature_converter', 'batch_spec', 'init', 'logical_sizes', 'flops_per_token', 'loss')
  wrong = [] if missing else [method for method in methods if not _can_be_called(model, method)]
  if missing or wrong:
    declared = [f'{method}{inspect.signature(getattr(model, method))}' for method in wrong]
    raise error(
      f'{name} lacks {", ".join(missing)}, which every model must have.'
      if missing
      else f'{name} does not take the arguments that the trainer passes: {", ".join(declared)}.',
      fix='Declare\n  ' + '\n  '.join(map(_declaration, missing or wrong)),
    )


def _declaration(name: str, base: type[Model] = Model) -> str:
  if name == 'num_outcomes':
    return f'{name}: int'
  signature = inspect.signature(getattr(base, name))
  plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
  return f'def {name}{inspect.Signature(plain)}'


def _can_be_called(model: Model, name: str) -> bool:
  """Returns whether a method of `model` accepts the parameters that `Model` declares."""
  _, *parameters = inspect.signature(getattr(Model, name)).parameters.values()
  positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
  keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
  try:
    inspect.signature(getattr(model, name)).bind(*positional, **keywords)
  except TypeError:
    return False
  return True
