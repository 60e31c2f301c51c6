"""Cross entropy as sums and weights; nobody divides before all tokens are counted."""

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning.axis_rules import is_manual

# Metric name -> (sum, weight), float32 scalars. Divided once, over the global batch and log window.
# 'confusion' alone has a matrix of counts for a sum.
Sums = dict[str, tuple[jax.Array, jax.Array]]


def check_loss_options(model: str, *, z_loss: float, label_smoothing: float) -> None:
  """Raises ModelError if `z_loss` or `label_smoothing` of the model class `model` is impossible."""
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
  """Raises ModelError for router losses of a model class whose tokens are not all targets."""
  if config.charges_routers:
    raise ModelError(
      f'{model} cannot train routers of experts with losses of their own: these are averaged over '
      'target tokens, and not all of its tokens are targets.',
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
  vocab_size = logits.shape[-1]
  weights = weights.astype(jnp.float32)
  largest = jax.lax.stop_gradient(jnp.max(logits, axis=-1))
  log_z = largest + jnp.log(jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1))
  # Compare and sum in place of a gather: stays local when `vocab` is split.
  is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
  target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  if label_smoothing:
    on, off = 1.0 - label_smoothing, label_smoothing / (vocab_size - 1)
    entropy = -(on * np.log(on) + (vocab_size - 1) * off * np.log(off))
    expected_logit = (on - off) * target_logit + off * jnp.sum(logits, axis=-1)
    nll = log_z - expected_logit - entropy
  else:
    nll = log_z - target_logit
  z = z_loss * jax.lax.square(log_z)
  # No argmax: where `vocab` is split it would gather the logits.
  correct = (target_logit >= largest).astype(jnp.float32)
  weight = jnp.sum(weights)
  total = {'loss': nll + z, 'cross_entropy': nll, 'z_loss': z, 'accuracy': correct}
  return {name: (jnp.sum(value * weights), weight) for name, value in total.items()}


def with_router_losses(
  sums: Sums, charges: jax.Array, weights: jax.Array, *, num_layers: int, balance: float, z: float
) -> Sums:
  """Returns `sums` with what routers of experts are charged: in 'loss', and as metrics per layer.

  Args:
    sums: of `cross_entropy`.
    charges: [batch, length, 2] `moe.router_charges`, summed over layers.
    weights: [batch, length] of the loss: charges of tokens are averaged as their losses are.
    num_layers: that were charged.
    balance, z: coefficients of the two.
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

  Where the length of rows is split, each device has the logits of whole rows: one of them counts.

  Args:
    logits: [batch, classes], float32.
    labels: [batch].
    weights: [batch]; 0 leaves an example out.
    with_confusion: adds 'confusion', the weights of examples by [true class, predicted class].
    **options: as in `cross_entropy`.
  """
  if is_manual('context'):
    weights = jnp.where(jax.lax.axis_index('context') == 0, weights, 0)
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
