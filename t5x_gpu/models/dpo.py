"""Direct preference optimization: a model learns which of two answers people prefer.

A row of a batch holds pairs of texts: chosen and rejected answers to the same prompt, alternating.
The log-probability of an answer is the sum over its tokens. The loss compares how much more likely
each answer has become than under a reference model, which is the model before training: a frozen
copy of the initial parameters. With adapters (lora.py) no copy is needed: the reference is the
model without adapters.
Source: Rafailov et al. 2023 (arXiv:2305.18290), equation 7.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import ClassVar, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.data import features
from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.models.lora import LoraModel, without_factors
from t5x_gpu.models.losses import Sums, counted_once, refuse_router_losses
from t5x_gpu.models.model import DeviceBatch, Model, ModelWrapper, Params, check_model, config_of
from t5x_gpu.partitioning.axis_rules import local_ways, sum_over
from t5x_gpu.partitioning.layer_stacks import REFERENCE, is_reference


def sums_of_pairs(values: jax.Array, segments: jax.Array) -> jax.Array:
  """Returns the sums of `values` over the two texts of each pair, float32 [batch, pairs, 2].

  The number of pairs is the maximum for the length, with a token per text; sums of absent pairs are
  0. If the length is split, the sums cover whole rows.

  Args:
    values: [batch, length].
    segments: [batch, length]: 1 and 2 in the first pair, 3 and 4 in the second; 0 for padding.
  """
  pairs = max(segments.shape[1] * local_ways('length') // 2, 1)
  # XLA fuses this comparison and sum. A scatter could add in a varying order.
  is_in = segments[:, :, None] == jnp.arange(1, 2 * pairs + 1)
  sums = jnp.sum(jnp.where(is_in, values.astype(jnp.float32)[:, :, None], 0.0), axis=1)
  sums = sum_over(sums, 'length')
  return sums.reshape(*sums.shape[:-1], pairs, 2)


_error = functools.partial(ModelError, docs='finetune.md#preferences')


def _sigmoid(difference: jax.Array, beta: float, label_smoothing: float) -> jax.Array:
  """Rafailov et al. 2023, equation 7; with smoothing, equation 3 of Mitchell's note on cDPO."""
  x = beta * difference
  return -(
    (1.0 - label_smoothing) * jax.nn.log_sigmoid(x) + label_smoothing * jax.nn.log_sigmoid(-x)
  )


def _hinge(difference: jax.Array, beta: float, label_smoothing: float) -> jax.Array:
  """Zhao et al. 2023 (SLiC, arXiv:2305.10425), with the rewards of DPO."""
  del label_smoothing
  return jax.nn.relu(1.0 - beta * difference)


def _ipo(difference: jax.Array, beta: float, label_smoothing: float) -> jax.Array:
  """Azar et al. 2023 (arXiv:2310.12036), equation 17; beta is its tau."""
  del label_smoothing
  return jnp.square(difference - 1.0 / (2.0 * beta))


# (log-ratio of the chosen minus log-ratio of the rejected answer, beta, label_smoothing) -> loss.
LOSSES: Mapping[str, Callable[[jax.Array, float, float], jax.Array]] = {
  'sigmoid': _sigmoid,
  'hinge': _hinge,
  'ipo': _ipo,
}


@dataclasses.dataclass(frozen=True)
class DpoModel(ModelWrapper):
  """A decoder-only model, or a LoraModel of one, that is trained on preferences.

  Reports the metrics of TRL's DPOTrainer, averaged over pairs. The parameters of the model keep
  their paths. Without adapters, there is a second, frozen parameter tree, 'reference_model', which
  has no optimizer state and is part of checkpoints.

  Attributes:
    model: the model to train.
    beta: strength of the pull toward the reference; more is closer.
    loss_type: a key of `LOSSES`. With 'ipo', log-ratios are divided by the tokens of the answer, as
      in TRL.
    label_smoothing: probability that a pair is labelled the wrong way round (cDPO); for 'sigmoid'.
  """

  model: Model
  beta: float = 0.1
  loss_type: str = 'sigmoid'
  label_smoothing: float = 0.0
  stacks: ClassVar[tuple[str, ...]] = Model.stacks
  gathers_layers: ClassVar[bool] = False

  def __post_init__(self) -> None:
    check_model(self.model)
    self._check_options()
    self._check_model()

  def _check_options(self) -> None:
    if not self.beta > 0:
      raise _error(
        f'DpoModel.beta = {self.beta} must be above 0.',
        fix='Set DpoModel.beta = 0.1.',
        parameters=('DpoModel.beta',),
      )
    if self.loss_type not in LOSSES:
      raise _error(
        f'DpoModel.loss_type = {self.loss_type!r}.' + did_you_mean(str(self.loss_type), LOSSES),
        fix=f'Set it to one of {", ".join(map(repr, LOSSES))}.',
        parameters=('DpoModel.loss_type',),
      )
    if not 0 <= self.label_smoothing < 0.5:
      raise _error(
        f'DpoModel.label_smoothing = {self.label_smoothing} is not between 0 and 0.5: half of the '
        'labels would be wrong.',
        fix='Set DpoModel.label_smoothing = 0.0, or the share of wrong labels.',
        parameters=('DpoModel.label_smoothing',),
      )
    if self.label_smoothing and self.loss_type != 'sigmoid':
      raise _error(
        f'DpoModel.label_smoothing = {self.label_smoothing} does nothing with loss_type = '
        f'{self.loss_type!r}.',
        fix="Set DpoModel.label_smoothing = 0.0, or DpoModel.loss_type = 'sigmoid'.",
        parameters=('DpoModel.label_smoothing', 'DpoModel.loss_type'),
      )

  def _check_model(self) -> None:
    plain, config = self._plain, config_of(self.model)
    if plain.missing('token_log_probs'):
      raise _error(
        f'DpoModel cannot train a {type(plain).__name__}: it has no method token_log_probs.',
        fix='Set DpoModel.model to a DecoderOnlyModel, or a LoraModel of one.',
        parameters=('DpoModel.model',),
      )
    if self._has_adapters and self.model.also_train is not None:
      raise _error(
        f'LoraModel.also_train = {self.model.also_train!r}: these parameters would change, and '
        'with them the reference, which is the model without its adapters.',
        fix='Remove LoraModel.also_train, or train all parameters: DpoModel.model = %MODEL.',
        parameters=('LoraModel.also_train', 'DpoModel.model'),
      )
    for name, value in (('z_loss', plain.z_loss), ('label_smoothing', plain.label_smoothing)):
      if value:
        raise _error(
          f'{type(plain).__name__}.{name} = {value} is part of the loss per token, which '
          'DpoModel does not compute.',
          fix=f'Set {type(plain).__name__}.{name} = 0.0.',
        )
    if config is not None:
      refuse_router_losses('DpoModel', config)
    if config is not None and config.fp8:
      raise _error(
        f'DpoModel does not support dtype = {config.dtype!r}.',
        fix="Set PRECISION (TransformerConfig.dtype) = 'bfloat16'.",
        parameters=('TransformerConfig.dtype',),
      )

  def params_of_model(self, params: Params) -> Params:
    """Returns the parameters of the trained model."""
    return {name: value for name, value in params.items() if name != REFERENCE}

  @property
  def _has_adapters(self) -> bool:
    return isinstance(self.model, LoraModel)

  @property
  def _plain(self) -> Model:
    """The model without adapters, which computes the reference."""
    return self.model.model if self._has_adapters else self.model

  @property
  def guess_loss(self) -> float:
    """The loss if the model equals the reference, as at the start."""
    return float(LOSSES[self.loss_type](jnp.zeros(()), self.beta, self.label_smoothing))

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns 'preference'."""
    del task_feature_lengths
    return 'preference'

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns the features of packed rows: even a single pair is two texts."""
    del pack
    features.check_lengths('preference', task_feature_lengths=task_feature_lengths)
    return self.model.batch_spec(task_feature_lengths, batch_size=batch_size, pack=True)

  def init(self, rng: jax.Array, spec: Optional[BatchSpec]) -> Params:
    """Returns new parameters; without adapters, also the reference, which is equal to them."""
    params = self.model.init(rng, spec)
    return params if self._has_adapters else {**params, REFERENCE: params}

  def is_trained(self, path: str) -> bool:
    """Returns whether a parameter is trained."""
    if is_reference(path):
      return False
    is_trained = self.model.is_trained
    return is_trained is None or is_trained(path)

  def source_of(self, path: str) -> str:
    """Returns a parameter's path in a checkpoint to start from; the reference begins as a copy."""
    return path.removeprefix(f'{REFERENCE}/')

  def flops_per_token(self, length: int) -> float:
    """Returns FLOPs of a training step per position, with the forward pass of the reference."""
    return self.model.flops_per_token(length) + self._plain.flops_per_token(length) / 3

  def flops_per_row(self, lengths: Mapping[str, int]) -> float:
    """Returns FLOPs of a training step per row; `lengths` is stack -> number of tokens."""
    return self.model.flops_per_row(lengths) + self._plain.flops_per_row(lengths) / 3

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns sums over pairs: 'loss' and the metrics of TRL.

    Args:
      params: result of `init`.
      batch: 'decoder_segment_ids' are 1 and 2 for the chosen and the rejected answer of the first
        pair in a row, 3 and 4 for the next pair.
      dropout_key: key for the trained model; the reference has no dropout.
    """
    policy = self.params_of_model(params)
    frozen = without_factors(policy) if self._has_adapters else params[REFERENCE]
    reference = jax.lax.stop_gradient(self._plain.token_log_probs(frozen, batch))
    log_probs = self.model.token_log_probs(policy, batch, dropout_key=dropout_key)
    return self.sums(log_probs, reference, batch)

  def sums(self, log_probs: jax.Array, reference: jax.Array, batch: DeviceBatch) -> Sums:
    """Returns the sums of `loss` from log-probabilities of the target tokens, [batch, length].

    Args:
      log_probs: log-probabilities under the trained model.
      reference: log-probabilities under the reference model.
      batch: as for `loss`.
    """
    weights, segments = batch['decoder_loss_weights'], batch['decoder_segment_ids']
    logps, reference, counts = (
      sums_of_pairs(x, segments) for x in (log_probs * weights, reference * weights, weights)
    )
    # All devices along `context` have sums of whole rows.
    is_pair = counted_once((counts > 0).all(-1).astype(jnp.float32))
    ratios = logps - reference
    scores = ratios / jnp.maximum(counts, 1.0) if self.loss_type == 'ipo' else ratios
    losses = LOSSES[self.loss_type](
      scores[..., 0] - scores[..., 1], self.beta, self.label_smoothing
    )
    chosen, rejected = jnp.moveaxis(self.beta * ratios, -1, 0)
    found = {
      'loss': losses,
      'rewards/chosen': chosen,
      'rewards/rejected': rejected,
      'rewards/accuracies': (chosen > rejected).astype(jnp.float32),
      'rewards/margins': chosen - rejected,
      'logps/chosen': logps[..., 0],
      'logps/rejected': logps[..., 1],
    }
    return {name: (jnp.sum(x * is_pair), jnp.sum(is_pair)) for name, x in found.items()}


def policy_of(model: Model) -> Model:
  """Returns the model that a DpoModel trains; any other model unchanged."""
  return model.model if isinstance(model, DpoModel) else model
