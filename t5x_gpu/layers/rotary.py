"""Rotations of queries and keys, and the frequencies of rotary positions.

The scaling functions take unscaled frequencies, float32 [rotated / 2] in radians per position, and
return frequencies of the same shape, for longer rows than in the original training.
"""

import math
from collections.abc import Sequence
from typing import Any, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import context_method
from t5x_gpu.partitioning.context_parallel import gather_info


@flax.struct.dataclass
class Rotation:
  """Cosines and sines of each position's angles, [batch or 1, length, 1, rotated / 2]."""

  cos: jax.Array
  sin: jax.Array

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns rotated queries or keys [batch, length, heads, kv].

    Rotates the first `rotated` features, in pairs that are rotated / 2 apart.
    """
    half = self.cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
    rotated += [rest] if rest.shape[-1] else []
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

  def of_layer(self, number: Any) -> 'Rotation':
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

  def of_layer(self, number: Any) -> Rotation:
    """Returns the rotation of layer `number`, which may be traced."""
    kind = jnp.asarray(self.kinds)[number % len(self.kinds)]
    return Rotation(*(jax.lax.dynamic_index_in_dim(x, kind, keepdims=False) for x in self._both))

  @property
  def _both(self) -> tuple[jax.Array, jax.Array]:
    return self.cos, self.sin


def rotations(
  ropes: Sequence[Any], positions: jax.Array, head_dim: int, *, lengths: Optional[jax.Array] = None
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


def plain(theta: float, rotated: int) -> np.ndarray:
  """Returns the frequencies without scaling.

  Args:
    theta: base of the frequencies.
    rotated: number of rotated features, two per frequency.
  Source: Su et al. 2021 (RoFormer), section 3.2.
  """
  return (1.0 / theta ** _exponents(rotated)).astype(np.float32)


def llama3(
  frequencies: np.ndarray, *, factor: float, low: float, high: float, original_length: int
) -> np.ndarray:
  """Returns `frequencies` with slow frequencies divided by `factor`.

  Frequencies with fewer than `low` turns over `original_length` are slow, with more than `high`
  fast; between them, the weight of the division falls linearly with the number of turns.
  Source: Llama 3.1's reference code.
  """
  turns = original_length * frequencies / (2 * math.pi)
  fast = np.clip((turns - low) / (high - low), 0.0, 1.0)
  return ((1.0 - fast) * frequencies / factor + fast * frequencies).astype(np.float32)


def yarn(
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

  Frequencies with fewer than `beta_slow` turns over `original_length` are slow, with more than
  `beta_fast` fast; between them, the weight of the division rises linearly with the index.

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


def longrope(theta: float, factors: Sequence[float]) -> np.ndarray:
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
