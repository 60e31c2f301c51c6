"""Positions: T5's bucketed relative bias, rotary positions, learned tables."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.errors import ModelError, all_problems, did_you_mean
from t5x_gpu.partitioning.axis_rules import shard, with_axes

ROPE_SCALINGS = ('none', 'linear', 'llama3')


def relative_position_buckets(
  q_length: int, kv_length: int, *, bidirectional: bool, num_buckets: int, max_distance: int
) -> np.ndarray:
  """Returns int32 bucket numbers [q_length, kv_length] of key position minus query position.

  Half of the buckets are exact distances; the other half grow logarithmically up to `max_distance`.
  Larger distances share the last bucket. Without `bidirectional`, keys after the query share bucket
  0.
  Source: Raffel et al. 2020, section 2.1.
  """
  distance = np.arange(q_length)[:, None] - np.arange(kv_length)[None, :]  # > 0: key before query
  buckets = np.zeros_like(distance)
  if bidirectional:
    num_buckets //= 2
    buckets += (distance < 0) * num_buckets
    distance = np.abs(distance)
  else:
    distance = np.maximum(distance, 0)
  num_exact = num_buckets // 2
  # float32 as in T5X: the boundaries of the logarithmic buckets fall the same way.
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

  def _look_up(self, table: jax.Array, buckets: Any) -> jax.Array:
    # A one-hot matmul: its gradient is a matmul too, while a gather's is a slow scatter.
    one_hot = jax.nn.one_hot(buckets, self.num_buckets, dtype=table.dtype)
    return shard(jnp.einsum('hb,qkb->hqk', table, one_hot)[None], None, 'heads', None, None)


class RelativePositionTable(nn.Module):
  """A learned bias per head and bucket of relative distance.

  Attributes:
    num_heads: rows.
    num_buckets: columns.
    dtype: of the result.
  """

  num_heads: int
  num_buckets: int = 32
  dtype: Any = jnp.float32

  @nn.compact
  def __call__(self) -> jax.Array:
    """Returns [heads, relpos_buckets]."""
    init = with_axes(
      nn.initializers.variance_scaling(1.0, 'fan_avg', 'uniform'), ('heads', 'relpos_buckets')
    )
    table = self.param('rel_embedding', init, (self.num_heads, self.num_buckets), jnp.float32)
    return table.astype(self.dtype)


@flax.struct.dataclass
class Rotation:
  """Cosines and sines of each position's angles, [batch or 1, length, 1, rotated / 2]."""

  cos: jax.Array
  sin: jax.Array

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns rotated queries or keys [batch, length, heads, kv].

    The first `rotated` features are turned, in pairs that are rotated / 2 apart.
    """
    half = self.cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
    rotated += [rest] if rest.shape[-1] else []
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

  def of_layer(self, number: Any) -> 'Rotation':
    """Returns the rotation of one layer: the same for all."""
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

  def of_layer(self, number: Any) -> Rotation:
    """Returns the rotation of layer `number`, which may be traced."""
    kind = jnp.asarray(self.kinds)[number % len(self.kinds)]
    return Rotation(*(jax.lax.dynamic_index_in_dim(x, kind, keepdims=False) for x in self._both))

  @property
  def _both(self) -> tuple[jax.Array, jax.Array]:
    return self.cos, self.sin


@dataclasses.dataclass(frozen=True)
class RotaryEmbedding:
  """Positions as rotations of queries and keys, so that logits depend on distances only.

  Attributes:
    theta: base of the frequencies; larger for longer sequences.
    scaling: 'none'; 'linear' divides positions by `factor`; 'llama3' divides only slow frequencies,
      with a smooth transition to fast ones.
    factor: how many times longer sequences are than in the original training.
    low_freq_factor, high_freq_factor: for 'llama3', frequencies with fewer or more turns than these
      over `original_length` are slow or fast.
    original_length: positions in the original training.
    fraction: share of a head's features that is rotated, the first ones (Phi-4-mini: 0.75).
  Source: Su et al. 2021 (RoFormer); Chen et al. 2023 (linear); Llama 3.1's reference code.
  """

  theta: float = 10000.0
  scaling: str = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_length: int = 8192
  fraction: float = 1.0

  def __post_init__(self) -> None:
    problems, parameters = [], []

    def refuse(parameter: str, text: str) -> None:
      problems.append(f'{parameter} = {getattr(self, parameter)!r} {text}')
      parameters.append(f'RotaryEmbedding.{parameter}')

    if self.scaling not in ROPE_SCALINGS:
      refuse(
        'scaling',
        f'is not one of {", ".join(ROPE_SCALINGS)}.'
        + did_you_mean(str(self.scaling), ROPE_SCALINGS),
      )
    for parameter in (
      'theta',
      'factor',
      'low_freq_factor',
      'high_freq_factor',
      'original_length',
      'fraction',
    ):
      value = getattr(self, parameter)
      if not (isinstance(value, (int, float)) and 0.0 < value < math.inf):
        refuse(parameter, 'must be a number above 0.')
    if not problems and self.fraction > 1.0:
      refuse('fraction', 'must be at most 1.')
    if not problems and self.low_freq_factor >= self.high_freq_factor:
      refuse('low_freq_factor', f'must be below high_freq_factor = {self.high_freq_factor!r}.')
    if problems:
      raise ModelError(
        all_problems(problems, title='The rotary positions are impossible'),
        fix='Set them in the model file or with --gin.RotaryEmbedding.NAME=VALUE.',
        parameters=parameters,
      )

  def rotated(self, head_dim: int) -> int:
    """Returns the number of features that are rotated."""
    return int(head_dim * self.fraction)

  def frequencies(self, head_dim: int) -> np.ndarray:
    """Returns float32 [rotated / 2], radians per position."""
    rotated = self.rotated(head_dim)
    plain = 1.0 / self.theta ** (np.arange(0, rotated, 2, dtype=np.float32) / rotated)
    if self.scaling == 'none':
      return plain.astype(np.float32)
    if self.scaling == 'linear':
      return (plain / self.factor).astype(np.float32)
    turns = self.original_length * plain / (2 * math.pi)
    fast = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
    fast = np.clip(fast, 0.0, 1.0)
    return ((1.0 - fast) * plain / self.factor + fast * plain).astype(np.float32)

  def rotation(self, positions: jax.Array, head_dim: int) -> Rotation:
    """Returns the rotation of `positions` [length] or [batch, length]."""
    angles = positions[..., None].astype(jnp.float32) * self.frequencies(head_dim)
    angles = angles.reshape(-1, *angles.shape[-2:])[:, :, None]
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def rotations(
  ropes: Sequence[Optional[RotaryEmbedding]], positions: jax.Array, head_dim: int
) -> Optional[Union[Rotation, LayerRotations]]:
  """Returns the rotation of `positions` in layers with these embeddings; None without any.

  Args:
    ropes: layer i has ropes[i % len(ropes)], None for no rotation; all of one `fraction`.
    positions: [length] or [batch, length].
    head_dim: features of a head.
  """
  different = list(dict.fromkeys(ropes))
  some = [rope for rope in different if rope is not None]
  if not some:
    return None
  if len(different) == 1:
    return some[0].rotation(positions, head_dim)
  # A layer without rotation turns by an angle of 0, which changes no digit.
  turns = [
    (rope or some[0]).rotation(positions * (rope is not None), head_dim) for rope in different
  ]
  return LayerRotations(
    jnp.stack([turn.cos for turn in turns]),
    jnp.stack([turn.sin for turn in turns]),
    tuple(different.index(rope) for rope in ropes),
  )


class PositionTable(nn.Module):
  """A learned vector per position or token type; every device holds all rows.

  Attributes:
    size: rows.
    embed_dim: columns.
    dtype: of the result.
    stddev: of the initial values.
  """

  size: int
  embed_dim: int
  dtype: Any = jnp.float32
  stddev: float = 0.02

  @nn.compact
  def __call__(self, ids: jax.Array) -> jax.Array:
    """Returns [..., embed] from ids [...]; ids beyond the end use the last row."""
    init = with_axes(nn.initializers.normal(stddev=self.stddev), (None, 'embed'))
    table = self.param('embedding', init, (self.size, self.embed_dim), jnp.float32)
    return jnp.take(table.astype(self.dtype), ids, axis=0, mode='clip')
