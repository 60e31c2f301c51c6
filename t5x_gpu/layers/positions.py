"""Position encodings: T5's bucketed relative bias, rotary positions, learned tables.

The frequencies of rotary positions may be scaled for longer rows than in the original training.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Optional, Union

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from t5x_gpu.errors import ModelError, Problem, bad_setting, did_you_mean
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import context_method, shard, with_axes
from t5x_gpu.partitioning.context_parallel import gather_info


@flax.struct.dataclass
class Rotation:
  """Cosines and sines of each position's angles, [batch or 1, length, 1, rotated / 2]."""

  cos: jax.Array
  sin: jax.Array

  def __call__(self, x: jax.Array, *, after_norm: bool = False) -> jax.Array:
    """Returns rotated queries or keys [batch, length, heads, kv].

    Rotates the first `rotated` features, in pairs that are rotated / 2 apart.

    Args:
      x: queries or keys.
      after_norm: whether `x` is the output of a norm; chooses the kernels, not the numbers.
    """
    half, wide = self.cos.shape[-1], x.astype(jnp.float32)
    if after_norm:
      # XLA computes a flip of the halves inside the kernels of the norm's gradient. It runs a
      # concatenation as a separate kernel (8.5 of 234 GB per step of Qwen-3 1.7B on 8 H100), which
      # without a norm also adds up the gradients of shared keys (0.8 of 122 GB of Llama-3.2 1B).
      turned, rest = jnp.split(wide, (2 * half,), axis=-1)
      halves = turned.reshape(*x.shape[:-1], 2, half)
      cos = self.cos[..., None, :]
      sin = self.sin[..., None, :] * np.array([[-1.0], [1.0]], np.float32)
      rotated = [(halves * cos + jnp.flip(halves, -2) * sin).reshape(turned.shape)]
    else:
      first, second, rest = jnp.split(wide, (half, 2 * half), axis=-1)
      rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
    rotated += [rest] if rest.shape[-1] else []
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

  def of_layer(self, number: ArrayLike) -> 'Rotation':
    """Returns the rotation of a layer, which is the same for all layers."""
    del number
    return self


@flax.struct.dataclass
class LayerRotations:
  """Rotations that differ by layer.

  Attributes:
    cos, sin: [kinds, batch or 1, length, 1, rotated / 2].
    kinds: layer i has the rotation kinds[i % len(kinds)].
  """

  cos: jax.Array
  sin: jax.Array
  kinds: tuple[int, ...] = flax.struct.field(pytree_node=False)

  def of_layer(self, number: ArrayLike) -> Rotation:
    """Returns the rotation of layer `number`, which may be traced."""
    kind = jnp.asarray(self.kinds)[number % len(self.kinds)]
    return Rotation(*(jax.lax.dynamic_index_in_dim(x, kind, keepdims=False) for x in self._both))

  @property
  def _both(self) -> tuple[jax.Array, jax.Array]:
    return self.cos, self.sin


def rotations(
  ropes: Sequence[Optional['RotaryEmbedding']],
  positions: jax.Array,
  head_dim: int,
  *,
  lengths: Optional[jax.Array] = None,
) -> Optional[Union[Rotation, LayerRotations]]:
  """Returns the rotations of `positions` in layers with these embeddings; None without rotation.

  Args:
    ropes: layer i has the RotaryEmbedding ropes[i % len(ropes)], None for no rotation; all with the
      same `fraction`.
    positions: [length] or [batch, length].
    head_dim: features of a head.
    lengths: as in `RotaryEmbedding.rotation`.
  """
  different = list(dict.fromkeys(ropes))
  some = [rope for rope in different if rope is not None]
  if not some:
    return None
  if len(different) == 1:
    return some[0].rotation(positions, head_dim, lengths=lengths)
  turns = {rope: rope.rotation(positions, head_dim, lengths=lengths) for rope in different if rope}
  # A layer without rotation rotates by an angle of 0, which is exact.
  first = turns[some[0]]
  turns[None] = Rotation(jnp.ones_like(first.cos), jnp.zeros_like(first.sin))
  return LayerRotations(
    jnp.stack(jnp.broadcast_arrays(*(turns[rope].cos for rope in different))),
    jnp.stack(jnp.broadcast_arrays(*(turns[rope].sin for rope in different))),
    tuple(different.index(rope) for rope in ropes),
  )


# The scaling functions below take unscaled frequencies, float32 [rotated / 2] in radians per
# position, and return frequencies of the same shape.


def plain_frequencies(theta: float, rotated: int) -> np.ndarray:
  """Returns the frequencies without scaling.

  Args:
    theta: base of the frequencies.
    rotated: number of rotated features, two per frequency.
  Source: Su et al. 2021 (RoFormer), section 3.2.
  """
  return (1.0 / theta ** _exponents(rotated)).astype(np.float32)


def llama3_frequencies(
  frequencies: np.ndarray, *, factor: float, low: float, high: float, original_length: int
) -> np.ndarray:
  """Returns `frequencies` with slow frequencies divided by `factor`.

  Frequencies with fewer than `low` turns over `original_length` are slow; frequencies with more
  than `high` turns are fast. Between them, the weight of the division falls linearly with the
  number of turns.
  Source: Llama 3.1's reference code.
  """
  turns = original_length * frequencies / (2 * math.pi)
  fast = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return ((1.0 - fast) * frequencies / factor + fast * frequencies).astype(np.float32)


def yarn_frequencies(
  frequencies: np.ndarray,
  *,
  theta: float,
  factor: float,
  original_length: int,
  beta_fast: float,
  beta_slow: float,
  truncate: bool,
) -> np.ndarray:
  """Returns `frequencies` with slow frequencies divided by `factor`.

  Frequencies with fewer than `beta_slow` turns over `original_length` are slow; frequencies with
  more than `beta_fast` turns are fast. Between them, the weight of the division rises linearly with
  the index.

  Args:
    frequencies: unscaled frequencies of `theta`, in descending order.
    truncate: round the indices where the transition begins and ends, outwards.
  Source: Peng et al. 2023 (YaRN), section 3.2; rounding as in its reference code.
  """
  rotated = 2 * len(frequencies)

  def index(turns: float) -> float:
    """Returns the index that a frequency with `turns` would have."""
    return rotated * math.log(original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

  start, end = index(beta_fast), index(beta_slow)
  if truncate:
    start, end = math.floor(start), math.ceil(end)
  start, end = max(start, 0), min(end, rotated - 1)
  width = np.float32(end - start or 0.001)
  slow = np.clip((np.arange(len(frequencies), dtype=np.float32) - start) / width, 0.0, 1.0)
  return (slow * frequencies / factor + (1.0 - slow) * frequencies).astype(np.float32)


def longrope_frequencies(theta: float, factors: Sequence[float]) -> np.ndarray:
  """Returns the frequencies of `theta`, each divided by its own factor.

  Source: Ding et al. 2024 (LongRoPE), section 3.
  """
  powers = theta ** _exponents(2 * len(factors))
  return (1.0 / (np.asarray(factors, np.float32) * powers)).astype(np.float32)


def yarn_attention_factor(factor: float) -> float:
  """Returns the multiplier of queries and keys (YaRN, equation 22)."""
  return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def longrope_attention_factor(factor: float, original_length: int) -> float:
  """Returns the multiplier of queries and keys, as in Phi-3's code."""
  if factor <= 1.0:
    return 1.0
  return math.sqrt(1.0 + math.log(factor) / math.log(original_length))


def example_lengths(info: TokenInfo, positions: jax.Array) -> jax.Array:
  """Returns int32 [batch, length], the length of each token's example; 0 on padding.

  A row that is split over `context` is gathered: two integers per token.

  Args:
    info: examples of the tokens.
    positions: [length] or [batch, length], position of each token in its example.
  """
  ends = jnp.where(info.segments > 0, positions + 1, 0)
  segments = info.segments
  if context_method() is not None:
    segments, ends = gather_info((segments, ends))
  same = info.segments[:, :, None] == segments[:, None, :]
  # XLA fuses comparison and maximum: no array [batch, length, length] is stored.
  return jnp.where(same, ends[:, None, :], 0).max(-1)


def _exponents(rotated: int) -> np.ndarray:
  return np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)


ROPE_SCALINGS = ('none', 'linear', 'llama3', 'yarn', 'longrope', 'dynamic')


def bucket_problem(
  *, bidirectional: bool, num_buckets: int, max_distance: int
) -> Optional[Problem]:
  """Returns the problem with relative buckets, settings of TransformerConfig; None if valid.

  Arguments as for `relative_position_buckets`. If `max_distance` is not above the number of exact
  buckets, the logarithm of their ratio is 0 or negative: larger distances would share bucket 0, or
  bucket numbers would decrease.
  """
  stack, least = ('an encoder', 4) if bidirectional else ('a decoder', 2)
  if num_buckets < least:
    return Problem(
      f'num_relpos_buckets = {num_buckets!r} must be at least {least} in {stack}.',
      parameters=('TransformerConfig.num_relpos_buckets',),
    )
  num_exact = num_buckets // least
  if max_distance <= num_exact:
    return Problem(
      f'max_relpos_distance = {max_distance!r} must be above {num_exact}: in {stack}, '
      f'num_relpos_buckets = {num_buckets} has a separate bucket for each distance below '
      f'{num_exact}.',
      parameters=('TransformerConfig.max_relpos_distance',),
    )
  return None


def relative_position_buckets(
  q_length: int, kv_length: int, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Returns int32 bucket numbers [q_length, kv_length] of key position minus query position.

  Half of the buckets are exact distances; the other half grow logarithmically up to `max_distance`.
  Larger distances share the last bucket. Without `bidirectional`, keys after the query share bucket
  0. Raises ModelError for invalid buckets.
  Source: Raffel et al. 2020, section 2.1.
  """
  problem = bucket_problem(
    bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
  )
  if problem is not None:
    raise ModelError(
      f'The relative positions are impossible: {problem.what}',
      fix=f'Set {problem.parameters[0]}; T5 has 32 buckets up to distance 128.',
      docs='models.md#settings',
      parameters=problem.parameters,
    )
  distance = np.arange(q_length)[:, None] - np.arange(kv_length)[None, :]  # > 0: key before query
  buckets = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    buckets += (distance < 0) * num_buckets
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  num_exact = num_buckets // 2
  # float32, so that the boundaries of the logarithmic buckets are the same as in T5X.
  log_ratio = np.log(distance.astype(np.float32) / num_exact + np.finfo(np.float32).eps) / np.log(
    max_distance / num_exact
  )
  logarithmic = num_exact + (log_ratio * (num_buckets - num_exact)).astype(np.int32)
  logarithmic = np.minimum(logarithmic, num_buckets - 1)
  return (buckets + np.where(distance < num_exact, distance, logarithmic)).astype(np.int32)


@dataclasses.dataclass(frozen=True)
class RelativeBuckets:
  """Relative distances as buckets, and the bias that they select.

  Attributes:
    num_buckets, max_distance, bidirectional: as in `relative_position_buckets`.
  """

  num_buckets: int = 32
  max_distance: int = 128
  bidirectional: bool = False

  def bias(self, table: jax.Array, length: int) -> jax.Array:
    """Returns [1, heads, length, length] for whole rows, from `table` [heads, relpos_buckets]."""
    return self._look_up(table, self._buckets(length))

  def bias_between(
    self, table: jax.Array, q_positions: jax.Array, kv_positions: jax.Array, *, length: int
  ) -> jax.Array:
    """Returns [1, heads, q_length, kv_length] for any positions in a row of `length` tokens."""
    whole = self._buckets(length)
    by_distance = np.concatenate([whole[0, :0:-1], whole[:, 0]])  # key after, then before query
    distance = q_positions[:, None] - kv_positions[None, :]
    return self._look_up(table, jnp.asarray(by_distance)[distance + length - 1])

  def _buckets(self, length: int) -> np.ndarray:
    return relative_position_buckets(
      length,
      length,
      bidirectional=self.bidirectional,
      num_buckets=self.num_buckets,
      max_distance=self.max_distance,
    )

  def _look_up(self, table: jax.Array, buckets: ArrayLike) -> jax.Array:
    # A one-hot matmul, whose gradient is also a matmul; the gradient of a gather is a slow scatter.
    one_hot = jax.nn.one_hot(buckets, self.num_buckets, dtype=table.dtype)
    return shard(jnp.einsum('hb,qkb->hqk', table, one_hot)[None], None, 'heads', None, None)


class RelativePositionTable(nn.Module):
  """A learned bias per head and bucket of relative distance.

  Attributes:
    num_heads: number of rows.
    num_buckets: number of columns.
    dtype: dtype of the result.
  """

  num_heads: int
  num_buckets: int = 32
  dtype: DTypeLike = jnp.float32

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns [heads, relpos_buckets]."""
    init = with_axes(
      nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'), ('heads', 'relpos_buckets')
    )
    table = self.param('rel_embedding', init, (self.num_heads, self.num_buckets), jnp.float32)
    return table.astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
  """Positions as rotations of queries and keys, so that logits depend only on distances.

  Attributes:
    theta: base of the frequencies; larger for longer sequences.
    scaling: how frequencies change for longer sequences than in the original training. 'none';
      'linear' divides all frequencies by `factor`; 'llama3' and 'yarn' divide only slow
      frequencies, with a smooth transition to fast ones; 'longrope' divides each frequency by its
      own factor, which depends on the length of the example; 'dynamic' has no effect up to
      `original_length`, which is then the maximum row length (docs/models.md#longer-contexts).
    factor: ratio of the new sequence length to the original.
    low_freq_factor, high_freq_factor: for 'llama3', frequencies with fewer or more turns than these
      over `original_length` are slow or fast.
    original_length: sequence length in the original training.
    fraction: share of a head's features to rotate, the first features (Phi-4-mini: 0.75).
    beta_slow, beta_fast: for 'yarn', like low_freq_factor and high_freq_factor.
    truncate: for 'yarn', whether the transition begins and ends at whole indices of frequencies.
    attention_factor: for 'yarn' and 'longrope', a multiplier of the rotated features of queries and
      keys; None to compute it from `factor`.
    short_factors, long_factors: for 'longrope', the divisor of each frequency in examples of up to
      `original_length` tokens, and in longer examples.
  Source: Su et al. 2021 (RoFormer); Chen et al. 2023 (linear); Llama 3.1's reference code; Peng et
    al. 2023 (YaRN); Ding et al. 2024 (LongRoPE).
  """

  theta: float = 10000.0
  scaling: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
  fraction: float = 1.0
  beta_slow: float = 1.0
  beta_fast: float = 32.0
  truncate: bool = True
  attention_factor: Optional[float] = None
  short_factors: tuple[float, ...] = ()
  long_factors: tuple[float, ...] = ()

  def __post_init__(self) -> None:
    for name in ('short_factors', 'long_factors'):
      object.__setattr__(self, name, tuple(getattr(self, name)))
    problems = list(self._problems())
    if problems:
      raise ModelError(
        'The rotary positions are impossible',
        problems=problems,
        fix='Set them in the model file or with --gin.RotaryEmbedding.NAME=VALUE.',
      )

  def _problems(self) -> Iterator[Problem]:
    bad_value = functools.partial(bad_setting, self)
    if self.scaling not in ROPE_SCALINGS:
      yield bad_value(
        'scaling',
        f'is not one of {", ".join(ROPE_SCALINGS)}.'
        + did_you_mean(str(self.scaling), ROPE_SCALINGS),
      )
    numbers = ('theta', 'factor', 'low_freq_factor', 'high_freq_factor', 'original_length')
    numbers += ('fraction', 'beta_slow', 'beta_fast')
    numbers += () if self.attention_factor is None else ('attention_factor',)
    bad = [name for name in numbers if not _is_positive(getattr(self, name))]
    yield from (bad_value(name, 'must be a number above 0.') for name in bad)
    for name in ('short_factors', 'long_factors'):
      if not all(map(_is_positive, getattr(self, name))):
        yield bad_value(name, 'must be numbers above 0.')
    if bad:
      return
    if self.fraction > 1.0:
      yield bad_value('fraction', 'must be at most 1.')
    if self.low_freq_factor >= self.high_freq_factor:
      yield bad_value(
        'low_freq_factor', f'must be below high_freq_factor = {self.high_freq_factor!r}.'
      )
    if self.beta_slow >= self.beta_fast:
      yield bad_value('beta_slow', f'must be below beta_fast = {self.beta_fast!r}.')
    if self.scaling == 'yarn' and self.theta <= 1.0:
      yield bad_value('theta', 'must be above 1 for yarn.')
    if self.scaling == 'longrope' and self.original_length < 2:
      yield bad_value('original_length', 'must be at least 2 for longrope.')
    if self.scaling not in ('yarn', 'longrope') and self.attention_factor is not None:
      yield bad_value('attention_factor', "has no effect: only 'yarn' and 'longrope' have one.")
    if (self.scaling == 'longrope') != bool(self.short_factors) or (
      len(self.short_factors) != len(self.long_factors)
    ):
      yield bad_value(
        'short_factors',
        f'must have as many numbers as long_factors, which has {len(self.long_factors)}: one for '
        "each frequency with scaling = 'longrope', else none.",
      )

  @property
  def depends_on_length(self) -> bool:
    """Whether frequencies depend on the length of the example."""
    return self.scaling == 'longrope'

  @property
  def amplitude(self) -> float:
    """Multiplier of rotated features."""
    if self.attention_factor is not None:
      return self.attention_factor
    if self.scaling == 'yarn':
      return yarn_attention_factor(self.factor)
    if self.scaling == 'longrope':
      return longrope_attention_factor(self.factor, self.original_length)
    return 1.0

  def rotated(self, head_dim: int) -> int:
    """Returns the number of features that are rotated."""
    return int(head_dim * self.fraction)

  def frequencies(self, head_dim: int, *, is_long: bool = False) -> np.ndarray:
    """Returns float32 [rotated / 2], radians per position.

    Args:
      head_dim: features of a head.
      is_long: whether the example has more than `original_length` tokens; only for 'longrope'.
    """
    plain = plain_frequencies(self.theta, self.rotated(head_dim))
    if self.scaling == 'linear':
      return (plain / self.factor).astype(np.float32)
    if self.scaling == 'llama3':
      return llama3_frequencies(
        plain,
        factor=self.factor,
        low=self.low_freq_factor,
        high=self.high_freq_factor,
        original_length=self.original_length,
      )
    if self.scaling == 'yarn':
      return yarn_frequencies(
        plain,
        theta=self.theta,
        factor=self.factor,
        original_length=self.original_length,
        beta_fast=self.beta_fast,
        beta_slow=self.beta_slow,
        truncate=self.truncate,
      )
    if self.scaling == 'longrope':
      return longrope_frequencies(self.theta, self.long_factors if is_long else self.short_factors)
    return plain

  def rotation(
    self, positions: jax.Array, head_dim: int, *, lengths: Optional[jax.Array] = None
  ) -> Rotation:
    """Returns the rotation of `positions` [length] or [batch, length].

    Args:
      positions: positions of the tokens in their examples.
      head_dim: features of a head.
      lengths: [batch, length] or [batch, 1], length of each token's example; None if all examples
        have at most `original_length` tokens.
    """
    frequencies = self.frequencies(head_dim)
    if self.depends_on_length and lengths is not None:
      is_long = lengths[..., None] > self.original_length
      frequencies = jnp.where(is_long, self.frequencies(head_dim, is_long=True), frequencies)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    angles = angles.reshape(-1, *angles.shape[-2:])[:, :, None]
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (
      Rotation(cos, sin)
      if self.amplitude == 1.0
      else Rotation(cos * self.amplitude, sin * self.amplitude)
    )


def _is_positive(value: object) -> bool:
  return isinstance(value, (int, float)) and 0.0 < value < math.inf


class PositionTable(nn.Module):
  """A learned vector per position or token type; every device holds all rows.

  Attributes:
    size: number of rows.
    embed_dim: number of columns.
    dtype: dtype of the result.
    stddev: standard deviation of the initial values.
  """

  size: int
  embed_dim: int
  dtype: DTypeLike = jnp.float32
  stddev: float = 0.02

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns [..., embed] from ids [...]; ids beyond the table use the last row."""
    init = with_axes(nn.initializers.normal(stddev=self.stddev), (None, 'embed'))
    table = self.param('embedding', init, (self.size, self.embed_dim), jnp.float32)
    return jnp.take(table.astype(self.dtype), ids, axis=0, mode='clip')
