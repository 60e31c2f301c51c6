"""Cross entropy of a linear map to the vocabulary, without ever storing the logits.

Logits [batch, length, vocab] in float32 are the largest array of most language models: 8 GiB for
8,192 tokens and 256k entries, several times over with their gradient. Here a loop takes a few
positions of every row, computes their logits, adds up the loss, and multiplies the gradient of
the logits into the gradients of `x` and of the kernel right away. Only one chunk of logits is alive
at a time. Nothing is computed twice: there are three matmuls, as without chunks.

The forward pass already computes the gradients of the summed loss; the backward pass scales them by
its cotangent. This works because the loss is one scalar. The other sums are metrics and carry no
gradient.
"""

import dataclasses
import functools
import math
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.partitioning.axis_rules import shard, varying

# At most this for the logits of one chunk on one device. Each chunk reads and writes the gradient
# of the kernel once: with chunks of 128 tokens that would take longer than the matmuls.
CHUNK_BYTES = 256 * 2**20
# Below this, storing the logits costs little, and one large matmul is faster than a loop.
PLAIN_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """The loss of one token, and its gradient.

  Attributes:
    z_loss: coefficient of log(Z)^2.
    label_smoothing: probability spread evenly over the other tokens.
    softcap: logits become softcap * tanh(logits / softcap); None leaves them.
  """

  z_loss: float = 0.0
  label_smoothing: float = 0.0
  softcap: Optional[float] = None

  def __call__(
    self, logits: jax.Array, targets: jax.Array, *, with_gradient: bool = False
  ) -> tuple[dict[str, jax.Array], Optional[jax.Array]]:
    """Returns ({'loss', 'cross_entropy', 'z_loss', 'accuracy'}, d loss / d logits).

    Everything is a comparison and a sum over `vocab`, no gather and no argmax: where `vocab` is
    split over devices, only three numbers per token travel.

    Args:
      logits: [batch, length, vocab] in float32, before the softcap; may be split over `vocab`.
      targets: [batch, length] token ids.
      with_gradient: computes the second result; else it is None.
    Returns:
      Arrays [batch, length], and [batch, length, vocab].
    Source: Szegedy et al. 2016 (smoothing); Chowdhery et al. 2022, section 5 (z-loss).
    """
    bent = logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)
    vocab_size = logits.shape[-1]
    largest = jax.lax.stop_gradient(jnp.max(bent, axis=-1))
    exponentials = jnp.exp(bent - largest[..., None])
    total = jnp.sum(exponentials, axis=-1)
    log_z = largest + jnp.log(total)
    is_target = jax.lax.broadcasted_iota(targets.dtype, bent.shape, 2) == targets[..., None]
    target_logit = jnp.sum(jnp.where(is_target, bent, 0.0), axis=-1)
    on, off = 1.0 - self.label_smoothing, self.label_smoothing / max(vocab_size - 1, 1)
    nll = log_z - target_logit
    if self.label_smoothing:
      # The entropy of the smoothed target is subtracted: a perfect prediction costs 0.
      entropy = -(on * np.log(on) + (vocab_size - 1) * off * np.log(off))
      nll = log_z - (on - off) * target_logit - off * jnp.sum(bent, axis=-1) - entropy
    z = self.z_loss * jax.lax.square(log_z)
    sums = {
      'loss': nll + z,
      'cross_entropy': nll,
      'z_loss': z,
      'accuracy': (target_logit >= largest).astype(jnp.float32),
    }
    if not with_gradient:
      return sums, None
    probabilities = exponentials / total[..., None]
    gradient = probabilities * (1.0 + 2.0 * self.z_loss * log_z)[..., None]
    gradient = gradient - jnp.where(is_target, on, off)
    if self.softcap is not None:
      gradient = gradient * (1.0 - jax.lax.square(bent / self.softcap))
    return sums, gradient


def choose_num_chunks(batch: int, length: int, *, vocab_size: int) -> int:
  """Returns how many chunks keep the logits of one within CHUNK_BYTES; 0 to store them all.

  Args:
    batch, length: positions on one device.
    vocab_size: entries of the vocabulary on one device.
  """
  bytes_per_position = 4 * batch * vocab_size
  if bytes_per_position * length <= PLAIN_BYTES:
    return 0
  return min(length, math.ceil(bytes_per_position * length / CHUNK_BYTES))


def linear_cross_entropy(
  x: jax.Array,
  kernel: jax.Array,
  bias: Optional[jax.Array],
  targets: jax.Array,
  weights: jax.Array,
  *,
  token_loss: TokenLoss,
  num_chunks: int,
  vocab_first: bool = False,
) -> dict[str, jax.Array]:
  """Returns sums over tokens: 'loss', and without a gradient 'cross_entropy', 'z_loss', 'accuracy'.

  Args:
    x: [batch, length, embed] in the dtype of the matmuls.
    kernel: [embed, vocab], or [vocab, embed] with `vocab_first` (a token table).
    bias: [vocab] added to the logits, or None.
    targets: [batch, length] token ids.
    weights: [batch, length] of the tokens; 0 leaves one out. They get no gradient.
    token_loss: what one token costs.
    num_chunks: parts of the length computed one after the other, at least 1. A length that they do
      not divide is padded.
    vocab_first: see `kernel`. (XLA's CPU compiler refuses the gradient of a transposed kernel in
      bfloat16: jax 0.10.)
  """
  length = x.shape[1]
  chunk = math.ceil(length / num_chunks)
  pad = chunk * math.ceil(length / chunk) - length
  weights = weights.astype(jnp.float32)
  if pad:
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)))
    targets, weights = (jnp.pad(a, ((0, 0), (0, pad))) for a in (targets, weights))
  axes = ('vocab', 'embed') if vocab_first else ('embed', 'vocab')
  sums = _sums(_Sweep(token_loss, chunk, axes), x, kernel, bias, targets, weights)
  return {'loss': sums['loss'], **jax.lax.stop_gradient({k: sums[k] for k in sums if k != 'loss'})}


@dataclasses.dataclass(frozen=True)
class _Sweep:
  """One pass over the chunks of `chunk` positions each; `axes` names the kernel's dimensions."""

  token_loss: TokenLoss
  chunk: int
  axes: tuple[str, str]

  @property
  def _letters(self) -> str:
    return ''.join(name[0] for name in self.axes)

  def __call__(self, operands: Any, *, with_gradients: bool) -> tuple[Any, Any]:
    """Returns (sums, gradients of x, kernel and bias); None for gradients nobody wants."""
    x, kernel, bias, targets, weights = operands
    kernel_in_dtype = kernel.astype(x.dtype)
    zero = functools.partial(_zeros_like, operands=(x, kernel))

    def body(carry: Any, start: jax.Array) -> tuple[Any, None]:
      sums, gradients = carry
      x_part, target_part, weight_part = (
        jax.lax.dynamic_slice_in_dim(a, start, self.chunk, axis=1) for a in (x, targets, weights)
      )
      logits = jnp.einsum(
        f'ble,{self._letters}->blv', x_part, kernel_in_dtype, preferred_element_type=jnp.float32
      )
      if bias is not None:
        logits = logits + bias.astype(jnp.float32)
      logits = shard(logits, 'batch', 'length', 'vocab')
      per_token, dlogits = self.token_loss(logits, target_part, with_gradient=with_gradients)
      sums = {name: sums[name] + jnp.sum(per_token[name] * weight_part) for name in sums}
      if with_gradients:
        dlogits = dlogits * weight_part[..., None]
        gradients = self._add(gradients, dlogits, x_part, kernel_in_dtype, start)
      return (sums, gradients), None

    sums = {name: zero((), jnp.float32) for name in ('loss', 'cross_entropy', 'z_loss', 'accuracy')}
    gradients = None
    if with_gradients:
      gradients = (
        zero(x.shape, x.dtype),
        shard(zero(kernel.shape, jnp.float32), *self.axes),
        None if bias is None else zero(bias.shape, jnp.float32),
      )
    starts = jnp.arange(0, x.shape[1], self.chunk)
    return jax.lax.scan(body, (sums, gradients), starts)[0]

  def _add(self, gradients: Any, dlogits: Any, x: Any, kernel: Any, start: Any) -> Any:
    """Returns `gradients` with those of one chunk, whose logits have the gradient `dlogits`."""
    dx, dkernel, dbias = gradients
    if dbias is not None:
      dbias = dbias + jnp.sum(dlogits, axis=(0, 1))
    dlogits = shard(dlogits.astype(x.dtype), 'batch', 'length', 'vocab')
    part = jnp.einsum(f'blv,{self._letters}->ble', dlogits, kernel).astype(dx.dtype)
    dx = jax.lax.dynamic_update_slice_in_dim(dx, part, start, axis=1)
    part = jnp.einsum(f'ble,blv->{self._letters}', x, dlogits, preferred_element_type=jnp.float32)
    return dx, dkernel + shard(part, *self.axes), dbias


def _zeros_like(shape: Any, dtype: Any, *, operands: Any) -> jax.Array:
  """Returns zeros that vary over the manual axes over which any of `operands` does."""
  axes = dict.fromkeys(a for x in operands for a in jax.typeof(x).manual_axis_type.varying)
  return varying(jnp.zeros(shape, dtype), tuple(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(sweep: _Sweep, *operands: Any) -> dict[str, jax.Array]:
  return sweep(operands, with_gradients=False)[0]


def _forward(sweep: _Sweep, *operands: Any) -> Any:
  sums, gradients = sweep(operands, with_gradients=True)
  kernel, bias = operands[1:3]
  dx, dkernel, dbias = gradients
  return sums, (
    dx,
    dkernel.astype(kernel.dtype),
    None if bias is None else dbias.astype(bias.dtype),
  )


def _backward(sweep: _Sweep, gradients: Any, cotangents: dict[str, jax.Array]) -> Any:
  del sweep
  scale = cotangents['loss']
  scaled = (
    None if g is None else (scale * g.astype(jnp.float32)).astype(g.dtype) for g in gradients
  )
  return (*scaled, None, None)


_sums.defvjp(_forward, _backward)
