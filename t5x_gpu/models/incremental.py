"""The decoding state between two tokens."""

from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp

from t5x_gpu.errors import ModelError
from t5x_gpu.layers.attention import KVCache, empty_cache
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.transformer import LayerCaches
from t5x_gpu.partitioning.axis_rules import shard, split_ways


@flax.struct.dataclass
class DecodingState:
  """Caches of all layers, and the contents of their slots.

  All rows write to the same slot: shorter prompts are padded on the left.

  Attributes:
    caches: keys and values of all layers.
    first: [batch], slot of each row's first token.
    prefix: [batch, slots], 1 on prompt tokens with bidirectional attention, or None.
    encoder_segments: [batch, kv_length], 1 on the encoder's tokens, 0 on padding; or None.
    tokens: [batch, slots] ids so far, if keys and values may have to be recomputed; or None.
  """

  caches: LayerCaches
  first: jax.Array
  prefix: Optional[jax.Array] = None
  encoder_segments: Optional[jax.Array] = None
  tokens: Optional[jax.Array] = None

  @property
  def slot(self) -> jax.Array:
    """Slot of the next token."""
    return self.caches.own.slot

  def of_next(self, count: int) -> tuple[TokenInfo, jax.Array, TokenInfo]:
    """Returns (info of the next `count` tokens, their positions, info of all slots).

    Positions [batch, count] count from each row's first token, without padding.
    """
    slots = self.caches.own.num_slots
    all_slots = jnp.arange(slots)
    next_slots = self.slot + jnp.arange(count)
    written = (all_slots >= self.first[:, None]) & (all_slots < self.slot + count)
    cached = TokenInfo(all_slots, written.astype(jnp.int32), self.prefix)
    prefix = self.prefix
    if prefix is not None:
      prefix = jax.lax.dynamic_slice_in_dim(prefix, self.slot, count, axis=1)
    valid = next_slots >= self.first[:, None]
    info = TokenInfo(next_slots, valid.astype(jnp.int32), prefix)
    return info, jnp.maximum(next_slots - self.first[:, None], 0), cached

  def encoder_info(self) -> Optional[TokenInfo]:
    """Returns positions and segments of the encoder's tokens; None without an encoder."""
    if self.encoder_segments is None:
      return None
    return TokenInfo(jnp.arange(self.encoder_segments.shape[1]), self.encoder_segments)

  def repeat(self, count: int) -> 'DecodingState':
    """Returns the state with every row repeated `count` times, copies adjacent."""

    def rows(x: Optional[jax.Array], axis: int = 0) -> Optional[jax.Array]:
      return None if x is None else jnp.repeat(x, count, axis=axis)

    def of_cache(cache: Optional[KVCache]) -> Optional[KVCache]:
      return cache and cache.of_rows(lambda x: rows(x, axis=1))

    return DecodingState(
      LayerCaches(of_cache(self.caches.own), of_cache(self.caches.encoder)),
      *map(rows, (self.first, self.prefix, self.encoder_segments, self.tokens)),
    )

  def beams(self, index: jax.Array) -> 'DecodingState':
    """Returns the state in which beam b of a prompt continues beam `index[:, b]`.

    Beams of a prompt have the same length and encoder output, which therefore do not move.

    Args:
      index: [batch, beams]; the rows of the state are ordered by prompt, then beam.
    """

    def chosen(x: jax.Array) -> jax.Array:
      by_prompt = x.reshape(x.shape[0], *index.shape, *x.shape[2:])
      taken = jax.vmap(lambda x, i: jnp.take(x, i, axis=1), in_axes=(1, 0), out_axes=1)(
        by_prompt, index
      )
      return taken.reshape(x.shape)

    return self.replace(
      caches=self.caches.replace(own=self.caches.own.of_rows(chosen)),
      tokens=None if self.tokens is None else chosen(self.tokens[None])[0],
    )

  def of_rows(self, are_new: jax.Array, new: 'DecodingState') -> 'DecodingState':
    """Returns the state with the decoder's keys and values of `new` where `are_new` [batch]."""
    own, other = self.caches.own, new.caches.own
    mask = are_new[None, :, None, None, None]
    own = own.replace(
      key=jnp.where(mask, other.key, own.key), value=jnp.where(mask, other.value, own.value)
    )
    return self.replace(caches=self.caches.replace(own=own))


def begin(
  config: TransformerConfig,
  *,
  num_layers: int,
  lengths: jax.Array,
  prompt_length: int,
  slots: int,
  bidirectional_prompt: bool = False,
  encoder_segments: Optional[jax.Array] = None,
  keeps_tokens: bool = False,
) -> DecodingState:
  """Returns the state before the first token.

  Args:
    config: sizes of the decoder.
    num_layers: layers of the decoder.
    lengths: [batch] number of tokens of each prompt.
    prompt_length: length of the padded prompts.
    slots: number of tokens that the caches can hold, prompt included.
    bidirectional_prompt: whether tokens of a prompt attend to each other in both directions.
    encoder_segments: [batch, kv_length], 1 on the encoder's tokens.
    keeps_tokens: whether the model recomputes keys and values of earlier tokens when an example
      exceeds `config.rope_switch`.
  Raises:
    ModelError: the model does not recompute them, but an example may exceed `config.rope_switch`.
  """
  batch, ways = lengths.shape[0], split_ways('kv_heads')
  # The same number as in `MultiHeadAttention`: at least one per device.
  kv_heads = config.kv_heads if config.kv_heads % ways == 0 else ways

  def cache(slots: int) -> KVCache:
    return empty_cache(
      num_layers=num_layers,
      batch=batch,
      slots=slots,
      num_kv_heads=kv_heads,
      head_dim=config.head_dim,
      dtype=config.compute_dtype,
    )

  tokens = None
  if config.rope_switch is not None and slots > config.rope_switch:
    if not keeps_tokens:
      raise ModelError(
        f'This model cannot decode more than original_length = {config.rope_switch} tokens of '
        f"rotary positions with scaling = 'longrope'; {slots} were requested.",
        fix='Set DecodingConfig.max_decode_length lower, or use a DecoderOnlyModel.',
        parameters=('DecodingConfig.max_decode_length', 'RotaryEmbedding.scaling'),
      )
    tokens = shard(jnp.zeros((batch, slots), jnp.int32), 'batch', None)
  first, prefix = prompt_length - lengths, None
  if bidirectional_prompt:
    all_slots = jnp.arange(slots)
    prefix = ((all_slots >= first[:, None]) & (all_slots < prompt_length)).astype(jnp.int32)
  of_encoder = None if encoder_segments is None else cache(encoder_segments.shape[1])
  caches = LayerCaches(cache(slots), of_encoder)
  return DecodingState(caches, first, prefix, encoder_segments, tokens)


def advance(state: DecodingState, caches: LayerCaches, tokens: jax.Array) -> DecodingState:
  """Returns the state after new `tokens` [batch, new], whose keys and values are in `caches`."""
  slot, kept = caches.own.slot, state.tokens
  if kept is not None:
    kept = shard(jax.lax.dynamic_update_slice(kept, tokens, (0, slot)), 'batch', None)
  own = caches.own.replace(slot=slot + tokens.shape[1])
  return state.replace(caches=caches.replace(own=own), tokens=kept)
