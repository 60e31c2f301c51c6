"""Cross entropy as sums and weights, divided only after all tokens are counted.

`linear_cross_entropy` and `linear_log_probs` never store the logits of a linear map to the
vocabulary; `cross_entropy` and `of_examples` take logits.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from t5x_gpu.errors import ModelError, array_text
from t5x_gpu.layers.fp8 import E4M3, E5M2, largest_value, scale_of, to_8_bits
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning.axis_rules import is_manual, shard, split_ways, varying

# Logits [batch, length, vocab] in float32 are the largest array of most language models: 8 GiB for
# 8,192 tokens and 256k entries, and several times that with their gradient. Here a loop takes a few
# positions of every row, computes their logits, adds up the loss, and immediately multiplies the
# gradient of the logits into the gradients of `x` and of the kernel. Only one chunk of logits is
# live at a time. Nothing is computed twice: there are three matmuls, as without chunks.
#
# The forward pass already computes the gradients of the summed loss; the backward pass multiplies
# them by the cotangent of the loss. This works because the loss is a scalar.

# Limits for the logits of one chunk on one device; the larger one counts. Each chunk reads and
# writes the kernel's gradient in float32, which takes longer than its matmul for fewer than about
# 900 tokens (8 bytes at 2.9 TB/s against 2 FLOPs per token at 650 TFLOP/s, on an H100).
CHUNK_BYTES = 256 * 2**20
CHUNK_TOKENS = 1024
# Below this size, storing the logits costs little, and one large matmul is faster than a loop.
PLAIN_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class TokenLoss:
  """The loss of one token, and its gradient.

  Attributes:
    z_loss: coefficient of log(Z)^2.
    label_smoothing: probability spread evenly over the other tokens.
    softcap: logits become softcap * tanh(logits / softcap); None leaves them unchanged.
  """

  z_loss: float = 0.0
  label_smoothing: float = 0.0
  softcap: Optional[float] = None

  def __call__(
    self, logits: jax.Array, targets: jax.Array, *, with_gradient: bool = False
  ) -> tuple[dict[str, jax.Array], Optional[jax.Array]]:
    """Returns ({'loss', 'cross_entropy', 'z_loss', 'accuracy'}, d loss / d logits).

    Uses only comparisons and sums over `vocab`, no gather or argmax: if `vocab` is split over
    devices, only three numbers per token are communicated.

    Args:
      logits: [batch, length, vocab] in float32, before the softcap; may be split over `vocab`.
      targets: [batch, length] token ids.
      with_gradient: whether to compute the second result; otherwise it is None.
    Returns:
      Arrays [batch, length], and [batch, length, vocab].
    Source: Szegedy et al. 2016 (smoothing); Chowdhery et al. 2022, section 5 (z-loss).
    """
    bent = logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)
    vocab_size = logits.shape[-1]
    is_target = jax.lax.broadcasted_iota(targets.dtype, bent.shape, 2) == targets[..., None]
    one_read = with_gradient and split_ways('vocab') == 1
    statistics = _in_one_read if one_read else _in_two_reads
    target_logit, largest_other, total = statistics(bent, is_target)
    largest = jax.lax.stop_gradient(jnp.maximum(target_logit, largest_other))
    log_z = largest + jnp.log(total)
    on, off = 1.0 - self.label_smoothing, self.label_smoothing / max(vocab_size - 1, 1)
    nll = log_z - target_logit
    if self.label_smoothing:
      # Subtract the entropy of the smoothed target, so that a perfect prediction costs 0.
      entropy = -(on * np.log(on) + (vocab_size - 1) * off * np.log(off))
      nll = log_z - (on - off) * target_logit - off * jnp.sum(bent, axis=-1) - entropy
    z = self.z_loss * jax.lax.square(log_z)
    sums = {
      'loss': nll + z,
      'cross_entropy': nll,
      'z_loss': z,
      'accuracy': (target_logit > largest_other).astype(jnp.float32),
    }
    if not with_gradient:
      return sums, None
    probabilities = jnp.exp(bent - largest[..., None]) / total[..., None]
    gradient = probabilities * (1.0 + 2.0 * self.z_loss * log_z)[..., None]
    gradient = gradient - jnp.where(is_target, on, off)
    if self.softcap is not None:
      gradient = gradient * (1.0 - jax.lax.square(bent / self.softcap))
    return sums, gradient


# [batch, length]: the logit of a token's target, its largest other logit, and the sum of the
# exponentials of its logits, relative to the largest logit.
_Statistics = tuple[jax.Array, jax.Array, jax.Array]


def _in_two_reads(logits: jax.Array, is_target: jax.Array) -> _Statistics:
  """Returns the statistics; can be differentiated, and communicates little if `vocab` is split."""
  target_logit = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
  largest_other = jnp.max(jnp.where(is_target, -jnp.inf, logits), axis=-1)
  largest = jax.lax.stop_gradient(jnp.maximum(target_logit, largest_other))
  return target_logit, largest_other, jnp.sum(jnp.exp(logits - largest[..., None]), axis=-1)


def _in_one_read(logits: jax.Array, is_target: jax.Array) -> _Statistics:
  """Returns the statistics in one pass over the logits.

  The sum of the exponentials is relative to the largest logit so far.
  Source: Milakov and Gimelshein 2018 (arXiv:1805.02867), algorithm 3.
  """

  def joined(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    (target_a, largest_a, total_a), (target_b, largest_b, total_b) = a, b
    smaller = jnp.exp(-jnp.abs(largest_a - largest_b))
    total = jnp.where(
      largest_a >= largest_b, total_a + total_b * smaller, total_a * smaller + total_b
    )
    return target_a + target_b, jnp.maximum(largest_a, largest_b), total

  lowest = jnp.finfo(logits.dtype).min  # -inf - -inf is NaN
  target_logit, largest_other, total = jax.lax.reduce(
    (
      jnp.where(is_target, logits, 0.0),
      jnp.where(is_target, lowest, logits),
      jnp.where(is_target, 0.0, 1.0),
    ),
    (0.0, lowest, 0.0),
    joined,
    (2,),
  )
  largest = jnp.maximum(target_logit, largest_other)
  total = total * jnp.exp(largest_other - largest) + jnp.exp(target_logit - largest)
  return target_logit, largest_other, total


def choose_num_chunks(batch: int, length: int, *, vocab_size: int) -> int:
  """Returns the number of chunks that keep a chunk's logits within the limits; 0 to store all.

  Args:
    batch, length: positions on one device.
    vocab_size: entries of the vocabulary on one device.
  """
  bytes_per_position = 4 * batch * vocab_size
  if bytes_per_position * length <= PLAIN_BYTES:
    return 0
  most = max(CHUNK_BYTES, CHUNK_TOKENS * 4 * vocab_size)
  return min(length, math.ceil(bytes_per_position * length / most))


def linear_cross_entropy(
  terms: Sequence[tuple[jax.Array, jax.Array]],
  bias: Optional[jax.Array],
  targets: jax.Array,
  weights: jax.Array,
  *,
  token_loss: TokenLoss,
  num_chunks: int,
  vocab_first: bool = False,
  fp8: bool = False,
) -> dict[str, jax.Array]:
  """Returns sums over tokens: 'loss', 'cross_entropy', 'z_loss', 'accuracy'.

  Differentiate 'loss'. 'cross_entropy' has a gradient only without z-loss, where it equals 'loss';
  with a z-loss its gradient is NaN rather than wrong (store the logits instead:
  TransformerConfig.loss_chunks = 0). 'accuracy' has no gradient.

  Args:
    terms: pairs (x [batch, length, features], kernel [features, vocab]); the logits are the sum of
      their products: the map to the vocabulary, and the low-rank update of an adapter. `x` is in
      the dtype of the matmuls. If the gradient of a kernel is unused, its matmul is skipped.
    bias: [vocab] added to the logits, or None.
    targets: [batch, length] token ids.
    weights: [batch, length], weights of the tokens, 0 to leave a token out; without gradient.
    token_loss: the loss of one token.
    num_chunks: number of chunks of the length, computed one after the other; at least 1. The length
      is padded to a multiple.
    vocab_first: whether kernels are [vocab, features], like a token table. (XLA's CPU compiler
      refuses the gradient of a transposed kernel in bfloat16: jax 0.10.)
    fp8: multiply 8-bit operands, with one scale per kernel, and one per chunk for other operands.
  """
  length = targets.shape[1]
  chunk = math.ceil(length / num_chunks)
  pad = chunk * math.ceil(length / chunk) - length
  weights = weights.astype(jnp.float32)
  inputs, kernels = zip(*terms)
  if pad:
    inputs = [jnp.pad(x, ((0, 0), (0, pad), (0, 0))) for x in inputs]
    targets, weights = (jnp.pad(a, ((0, 0), (0, pad))) for a in (targets, weights))
  axes = ('vocab', 'embed') if vocab_first else ('embed', 'vocab')
  sweep = _Sweep(token_loss, chunk, axes, fp8)
  return _sums(sweep, tuple(inputs), tuple(kernels), bias, targets, weights)


def linear_log_probs(
  terms: Sequence[tuple[jax.Array, jax.Array]],
  targets: jax.Array,
  *,
  softcap: Optional[float],
  num_chunks: int,
  vocab_first: bool = False,
) -> jax.Array:
  """Returns the log-probability of each target token, float32 [batch, length].

  For losses that are not sums over tokens, so that the gradients of the logits are known only after
  all tokens. The backward pass therefore recomputes the logits of each chunk; there are four
  matmuls.

  Args:
    terms, targets, num_chunks, vocab_first: as in `linear_cross_entropy`.
    softcap: as in `TokenLoss`.
  """
  batch, length = targets.shape
  chunk = math.ceil(length / num_chunks)
  count = math.ceil(length / chunk)
  equation = 'ble,ve->blv' if vocab_first else 'ble,ev->blv'

  def parts(a: jax.Array) -> jax.Array:
    """Returns [chunks, batch, chunk, ...] of [batch, length, ...]."""
    a = jnp.pad(a, ((0, 0), (0, count * chunk - length), *((0, 0),) * (a.ndim - 2)))
    return jnp.moveaxis(a.reshape(batch, count, chunk, *a.shape[2:]), 1, 0)

  # Converted outside of the loop, so that the loop adds up kernel gradients in float32.
  kernels = [kernel.astype(jnp.float32) for _, kernel in terms]

  @jax.checkpoint
  def of_chunk(chunk_of: tuple[list[jax.Array], jax.Array]) -> jax.Array:
    inputs, chunk_targets = chunk_of
    logits = sum(
      jnp.einsum(equation, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
      for x, kernel in zip(inputs, kernels)
    )
    logits = shard(logits, 'batch', 'length', 'vocab')
    return -TokenLoss(softcap=softcap)(logits, chunk_targets)[0]['cross_entropy']

  found = jax.lax.map(of_chunk, ([parts(x) for x, _ in terms], parts(targets)))
  return jnp.moveaxis(found, 0, 1).reshape(batch, count * chunk)[:, :length]


# An operand of a matmul, and its scale; None if the operand is not in 8 bits.
_Operand = tuple[jax.Array, Optional[jax.Array]]
_Arrays = tuple[jax.Array, ...]
# Arguments of a sweep: inputs, kernels, bias, targets, weights.
_Arguments = tuple[_Arrays, _Arrays, Optional[jax.Array], jax.Array, jax.Array]
# Gradients of inputs, kernels and bias.
_Gradients = tuple[_Arrays, _Arrays, Optional[jax.Array]]
_TokenSums = dict[str, jax.Array]  # metric -> sum
_Totals = tuple[_TokenSums, Optional[_Gradients]]
# Gradients of all inputs, so far of these chunks; and sums and gradients of kernels and bias.
_OfChunk = tuple[Optional[_Arrays], tuple[_TokenSums, Optional[_Arrays], Optional[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class _Sweep:
  """One pass over the chunks of `chunk` positions each; `axes` names the kernels' dimensions."""

  token_loss: TokenLoss
  chunk: int
  axes: tuple[str, str]
  fp8: bool

  @property
  def _letters(self) -> str:
    return ''.join(name[0] for name in self.axes)

  def __call__(self, operands: _Arguments, *, with_gradients: bool) -> _Totals:
    """Returns (sums, gradients of inputs, kernels and bias); None instead of unwanted gradients."""
    inputs, kernels, bias, targets, weights = operands
    in_dtype = [self._operand(kernel.astype(x.dtype)) for x, kernel in zip(inputs, kernels)]

    def of_chunk(dinputs: Optional[_Arrays], start: ArrayLike) -> _OfChunk:
      def part(a: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice_in_dim(a, start, self.chunk, axis=1)

      parts = [self._operand(part(x)) for x in inputs]
      logits = self._logits(parts, in_dtype, bias)
      per_token, dlogits = self.token_loss(logits, part(targets), with_gradient=with_gradients)
      sums = {name: jnp.sum(values * part(weights)) for name, values in per_token.items()}
      if not with_gradients:
        return dinputs, (sums, None, None)
      dlogits = dlogits * part(weights)[..., None]
      of_inputs, dkernels = self._gradients(dlogits, parts, in_dtype, dinputs)
      dinputs = tuple(
        jax.lax.dynamic_update_slice_in_dim(dx, of_part, start, axis=1)
        for dx, of_part in zip(dinputs, of_inputs)
      )
      return dinputs, (sums, dkernels, None if bias is None else jnp.sum(dlogits, axis=(0, 1)))

    def body(carry: _OfChunk, start: jax.Array) -> tuple[_OfChunk, None]:
      dinputs, total = carry
      dinputs, more = of_chunk(dinputs, start)
      return (dinputs, jax.tree.map(jnp.add, total, more)), None

    dinputs = None
    if with_gradients:
      dinputs = tuple(_zeros_like(x, operands=(*inputs, *kernels)) for x in inputs)
    # Outside of the loop, so that the first, large gradient of the kernels is not added to zeros.
    found = of_chunk(dinputs, 0)
    starts = jnp.arange(self.chunk, targets.shape[1], self.chunk)
    if starts.size:
      found, _ = jax.lax.scan(body, found, starts)
    dinputs, (sums, dkernels, dbias) = found
    return sums, (dinputs, dkernels, dbias) if with_gradients else None

  def _operand(self, x: jax.Array, dtype: DTypeLike = E4M3) -> _Operand:
    if not self.fp8:
      return x, None
    scale = scale_of(largest_value(x), dtype)
    return to_8_bits(x, scale, dtype), scale

  def _logits(
    self, inputs: Sequence[_Operand], kernels: Sequence[_Operand], bias: Optional[jax.Array]
  ) -> jax.Array:
    """Returns [batch, chunk, vocab] in float32."""
    equation = f'ble,{self._letters}->blv'
    logits = sum(_product(equation, x, kernel) for x, kernel in zip(inputs, kernels))
    if bias is not None:
      logits = logits + bias.astype(jnp.float32)
    return shard(logits, 'batch', 'length', 'vocab')

  def _gradients(
    self,
    dlogits: jax.Array,
    inputs: Sequence[_Operand],
    kernels: Sequence[_Operand],
    like: Sequence[jax.Array],
  ) -> tuple[list[jax.Array], _Arrays]:
    """Returns the gradients of a chunk's inputs, in the dtypes of `like`, and of the kernels."""
    letters = self._letters
    dinputs, dkernels = [], []
    for x, kernel, dx in zip(inputs, kernels, like):
      values, scale = self._operand(dlogits.astype(dx.dtype), E5M2)
      d = shard(values, 'batch', 'length', 'vocab'), scale
      part = shard(_product(f'blv,{letters}->ble', d, kernel), 'batch', 'length', None)
      dinputs.append(part.astype(dx.dtype))
      dkernels.append(shard(_product(f'ble,blv->{letters}', x, d), *self.axes))
    return dinputs, tuple(dkernels)


def _product(equation: str, a: _Operand, b: _Operand) -> jax.Array:
  """Returns the einsum of two operands, accumulated in float32."""
  product = jnp.einsum(equation, a[0], b[0], preferred_element_type=jnp.float32)
  return product if a[1] is None else product * (a[1] * b[1])


def _zeros_like(x: jax.Array, *, operands: Sequence[jax.Array]) -> jax.Array:
  """Returns zeros like `x` that vary over the same manual axes as any of `operands`."""
  axes = dict.fromkeys(a for x in operands for a in jax.typeof(x).manual_axis_type.varying)
  return varying(jnp.zeros(x.shape, x.dtype), tuple(axes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sums(sweep: _Sweep, *operands: *_Arguments) -> _TokenSums:
  return sweep(operands, with_gradients=False)[0]


def _forward(sweep: _Sweep, *operands: *_Arguments) -> tuple[_TokenSums, _Gradients]:
  sums, gradients = sweep(operands, with_gradients=True)
  like = operands[:3]
  return sums, jax.tree.map(
    lambda gradient, operand: gradient.astype(operand.dtype), gradients, like
  )


def _backward(
  sweep: _Sweep, gradients: _Gradients, cotangents: _TokenSums
) -> tuple[Optional[jax.Array], ...]:
  if sweep.token_loss.z_loss:
    wrong = (cotangents['cross_entropy'] != 0.0) | (cotangents['z_loss'] != 0.0)
    scale = cotangents['loss'] + jnp.where(wrong, jnp.nan, 0.0)
  else:
    scale = cotangents['loss'] + cotangents['cross_entropy']
  scaled = jax.tree.map(lambda g: (scale * g.astype(jnp.float32)).astype(g.dtype), gradients)
  return (*scaled, None, None)


_sums.defvjp(_forward, _backward)


# Metric name -> (sum, weight), float32 scalars. The division is over the whole global batch and log
# window. 'confusion' and 'hits' are matrices of counts; 'pairs' has a row per example.
Sums = dict[str, tuple[jax.Array, jax.Array]]
_COUNTS = ('confusion', 'hits', 'pairs')


def checked_sums(sums: object, model: object) -> Sums:
  """Returns what `loss` or `head` of `model` returned; raises ModelError unless it is `Sums`."""
  if not isinstance(sums, Mapping):
    found = array_text(sums)
  elif 'loss' not in sums:
    found = f"{', '.join(map(repr, sums)) or 'nothing'}, without 'loss'"
  else:
    wrong = next((name for name in sums if not _is_sum(name, sums[name])), None)
    if wrong is None:
      return sums
    pair = sums[wrong]
    parts = f'({", ".join(map(array_text, pair))})' if isinstance(pair, (tuple, list)) else None
    found = f'{wrong!r}: {parts or array_text(pair)}'
  raise ModelError(
    f'The loss of {type(model).__name__} returned {found}. A loss is a dictionary: metric -> '
    "(sum, sum of the weights), scalars; training minimizes the metric 'loss'.",
    fix="For example: return weighted_sums({'loss': jnp.sum(per_token * weights)}, weights)",
    docs='add_an_optimizer.md#the-loss',
  )


def _is_sum(name: str, pair: object) -> bool:
  if not isinstance(pair, (tuple, list)) or len(pair) != 2:
    return False
  shapes = [jnp.shape(x) for x in pair if hasattr(x, 'shape')]
  if name == 'loss':
    return not any(shapes)
  return name in _COUNTS or all(math.prod(shape) == 1 for shape in shapes)


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


def averaged_per_sequence(batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns `batch` with loss weights that add up to 1 in each sequence of each row.

  A packed row has several sequences: the values of `STACK_segment_ids`. A sequence without loss
  weights keeps zeros.

  Args:
    batch: [batch, length] features; loss weights are named `STACK_loss_weights`.
  """
  out = dict(batch)
  for name, weights in batch.items():
    stack, _, kind = name.partition('_')
    if kind != 'loss_weights':
      continue
    weights = weights.astype(jnp.float32)
    segments = batch.get(f'{stack}_segment_ids')
    if segments is None:
      total = jnp.sum(weights, axis=1, keepdims=True)
    else:
      segment_sums = functools.partial(jax.ops.segment_sum, num_segments=weights.shape[1] + 1)
      total = jnp.take_along_axis(jax.vmap(segment_sums)(weights, segments), segments, axis=1)
    out[name] = jnp.where(total > 0, weights / jnp.where(total > 0, total, 1.0), 0.0)
  return out


def weighted_sums(sums: Mapping[str, jax.Array], weights: jax.Array) -> Sums:
  """Returns `sums`, each paired with the sum of all `weights`, of any shape."""
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
