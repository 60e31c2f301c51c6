"""Stacks of layers: one layer's wiring, scanned over all of them."""

from typing import Any, Optional

import flax.linen as nn
import jax

from t5x_gpu.layers.attention import MultiHeadAttention
from t5x_gpu.layers.masks import decoder_mask
from t5x_gpu.layers.mlp import Mlp
from t5x_gpu.layers.norm import RMSNorm
from t5x_gpu.layers.embedding import Embedding
from t5x_gpu.layers.positions import RelativePositionBias
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.heads import TokenLogits


def dropout(config: TransformerConfig, x: jax.Array, *, deterministic: bool) -> jax.Array:
  """Returns `x` with T5's dropout: one mask [batch, 1, embed] for all positions."""
  return nn.Dropout(config.dropout_rate, broadcast_dims=(-2,))(x, deterministic=deterministic)


def relative_bias(config: TransformerConfig, length: int, *, bidirectional: bool) -> jax.Array:
  """Returns the learned bias [1, heads, length, length] of the enclosing module."""
  return RelativePositionBias(
      num_heads=config.num_heads, num_buckets=config.num_relpos_buckets,
      max_distance=config.max_relpos_distance, dtype=config.compute_dtype, name='relpos_bias')(
          length, length, bidirectional=bidirectional)


class DecoderLayer(nn.Module):
  """Norm, causal self-attention, residual; norm, MLP, residual (pre-norm, as T5)."""
  config: TransformerConfig
  deterministic: bool

  @nn.compact
  def __call__(self, x: jax.Array, mask: jax.Array,
               shared_bias: Optional[jax.Array]) -> tuple[jax.Array, None]:
    """Returns [batch, length, embed] (and None, for the scan over layers)."""
    c, dtype = self.config, self.config.compute_dtype
    bias = shared_bias
    if c.relative_bias == 'per_layer':
      bias = relative_bias(c, x.shape[1], bidirectional=False)
    h = RMSNorm(dtype=dtype, name='pre_self_attention_layer_norm')(x)
    h = MultiHeadAttention(c.num_heads, c.head_dim, dropout_rate=c.dropout_rate, dtype=dtype,
                           name='self_attention')(h, h, mask=mask, bias=bias,
                                                  deterministic=self.deterministic)
    x = x + dropout(c, h, deterministic=self.deterministic)
    h = RMSNorm(dtype=dtype, name='pre_mlp_layer_norm')(x)
    h = Mlp(c.mlp_dim, c.mlp_activations, dropout_rate=c.dropout_rate, dtype=dtype, name='mlp')(
        h, deterministic=self.deterministic)
    return x + dropout(c, h, deterministic=self.deterministic), None


def scan_layers(layer: type[nn.Module], config: TransformerConfig) -> Any:
  """Returns `layer` repeated `num_layers` times, its parameters stacked on a `layers` axis."""
  policy = {'none': None, 'minimal': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            'full': jax.checkpoint_policies.nothing_saveable}[config.remat_policy]
  unroll = min(config.scan_unroll, config.num_layers)
  if policy is not None:
    # A loop keeps forward and backward apart; unrolled whole, XLA would merge the recomputation
    # with what it was to replace, and save nothing.
    layer = nn.remat(layer, policy=policy, prevent_cse=unroll == config.num_layers)
  return nn.scan(layer, variable_axes={'params': 0}, split_rngs={'params': True, 'dropout': True},
                 in_axes=nn.broadcast, length=config.num_layers,
                 unroll=unroll,
                 metadata_params={nn.PARTITION_NAME: 'layers'})


class Decoder(nn.Module):
  """Token ids to next-token logits: embedding, layers, norm, output projection."""
  config: TransformerConfig

  @nn.compact
  def __call__(self, input_tokens: jax.Array, target_tokens: jax.Array, *,
               segment_ids: Optional[jax.Array] = None, prefix: Optional[jax.Array] = None,
               deterministic: bool) -> jax.Array:
    """Returns logits [batch, length, vocab] in float32.

    Args:
      input_tokens: [batch, length], the targets shifted right.
      target_tokens: [batch, length]; 0 is padding.
      segment_ids: [batch, length] when rows are packed.
      prefix: [batch, length], non-zero on inputs that attend to each other both ways.
      deterministic: no dropout.
    """
    c = self.config
    embedding = Embedding(c.vocab_size, c.embed_dim, dtype=c.compute_dtype, name='token_embedder')
    mask = decoder_mask(target_tokens, segment_ids=segment_ids, prefix=prefix)
    shared_bias = None
    if c.relative_bias == 'shared':
      shared_bias = relative_bias(c, input_tokens.shape[1], bidirectional=False)
    x = dropout(c, embedding(input_tokens), deterministic=deterministic)
    x, _ = scan_layers(DecoderLayer, c)(c, deterministic, name='layers')(x, mask, shared_bias)
    x = RMSNorm(dtype=c.compute_dtype, name='decoder_norm')(x)
    x = dropout(c, x, deterministic=deterministic)
    return TokenLogits(c, name='logits_dense')(x, embedding)
