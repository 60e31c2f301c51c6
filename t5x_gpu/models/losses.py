"""Cross entropy as sums and weights, divided only after all tokens are counted."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.linear_cross_entropy import TokenLoss
from t5x_gpu.partitioning.axis_rules import is_manual

# Metric name -> (sum, weight), float32 scalars. The division is over the whole global batch and log
# window. 'confusion' and 'hits' are matrices of counts; 'pairs' has a row per example.
Sums = dict[str, tuple[jax.Array, jax.Array]]


def check_loss_options(model: str, *, z_loss: float, label_smoothing: float) -> None:
  """Raises ModelError if `z_loss` or `label_smoothing` of the model class `model` is invalid."""
  for name, value, is_good in (
    ('z_loss', z_loss, z_loss >= 0.0),
    ('label_smoothing', label_smoothing, 0.0 <= label_smoothing < 1.0),
  ):
    if not is_good:
      raise ModelError(
        f'{name} = {value} is out of range.',
        fix='Set z_loss to 0 or more (1e-4 is usual), label_smoothing to 0 or more and below 1.',
        parameters=(f'{model}.{name}',),
      )


def refuse_router_losses(model: str, config: TransformerConfig) -> None:
  """Raises ModelError for router losses if not all tokens of the model class are targets."""
  if config.charges_routers:
    raise ModelError(
      f'{model} does not support router losses: they are averaged over target tokens, and not all '
      'of its tokens are targets.',
      fix='Set TransformerConfig.router_balance_loss = 0.0 and router_z_loss = 0.0; without them '
      'give experts room: TransformerConfig.expert_capacity_factor = 2.0 or more.',
      parameters=('TransformerConfig.router_balance_loss', 'TransformerConfig.router_z_loss'),
    )


def cross_entropy(
  logits: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  z_loss: float = 0.0,
  label_smoothing: float = 0.0,
) -> Sums:
  """Returns sums over target tokens: 'loss' (with z-loss), 'cross_entropy', 'z_loss', 'accuracy'.

  Args:
    logits: [batch, length, vocab], float32; may be split over `vocab`.
    targets: [batch, length] token ids.
    weights: [batch, length]; 0 leaves a position out.
    z_loss: coefficient of log(Z)^2, which keeps the logits from drifting.
    label_smoothing: probability spread evenly over the other tokens; the entropy of the smoothed
      target is subtracted, so that a perfect prediction costs 0.
  Source: Szegedy et al. 2016 (smoothing); Chowdhery et al. 2022, section 5 (z-loss).
  """
  weights = weights.astype(jnp.float32)
  per_token, _ = TokenLoss(z_loss, label_smoothing)(logits, targets)
  return weighted_sums({name: jnp.sum(x * weights) for name, x in per_token.items()}, weights)


def weighted_sums(sums: Mapping[str, jax.Array], weights: jax.Array) -> Sums:
  """Returns `sums`, each paired with the sum of all `weights` [batch, length]."""
  weight = jnp.sum(weights.astype(jnp.float32))
  return {name: (value, weight) for name, value in sums.items()}


def with_router_losses(
  sums: Sums, charges: jax.Array, weights: jax.Array, *, num_layers: int, balance: float, z: float
) -> Sums:
  """Returns `sums` with router losses: added to 'loss', and as metrics averaged over layers.

  Args:
    sums: from `cross_entropy`.
    charges: [batch, length, 2], `moe.router_charges` summed over layers.
    weights: [batch, length] loss weights; charges are averaged over tokens like losses.
    num_layers: layers with routers.
    balance, z: coefficients of the two charges.
  """
  total = jnp.einsum('blc,bl->c', charges, weights.astype(jnp.float32))
  loss, weight = sums['loss']
  return {
    **sums,
    'loss': (loss + balance * total[0] + z * total[1], weight),
    'router_balance': (total[0] / num_layers, weight),
    'router_z': (total[1] / num_layers, weight),
  }


def of_examples(
  logits: jax.Array,
  labels: jax.Array,
  weights: jax.Array,
  *,
  with_confusion: bool,
  **options: float,
) -> Sums:
  """Returns the sums of `cross_entropy` over examples.

  If the length is split, every device along `context` has the logits of whole rows; only one
  device counts them.

  Args:
    logits: [batch, classes], float32.
    labels: [batch] class numbers.
    weights: [batch]; 0 leaves an example out.
    with_confusion: add 'confusion', the sum of weights by [true class, predicted class].
    **options: as in `cross_entropy`.
  """
  weights = counted_once(weights)
  sums = cross_entropy(logits[:, None], labels[:, None], weights[:, None], **options)
  if with_confusion:
    true, predicted = (jax.nn.one_hot(x, logits.shape[-1]) for x in (labels, logits.argmax(-1)))
    counts = jnp.einsum(
      'bt,bp,b->tp',
      true,
      predicted,
      weights.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
    )
    sums['confusion'] = counts, counts.sum()
  return sums


def counted_once(weights: jax.Array) -> jax.Array:
  """Returns `weights`, zero except on one of the devices along `context`."""
  if is_manual('context'):
    return jnp.where(jax.lax.axis_index('context') == 0, weights, 0)
  return weights
