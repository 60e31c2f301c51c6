"""Output projections on top of a stack."""

import functools
from typing import Optional

import flax.linen as nn
import jax
import jax.numpy as jnp

from t5x_gpu.layers.dense import FACTORS, DenseGeneral
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.embedding import is_gathered_by_embed
from t5x_gpu.layers.mlp import Mlp, MlpConfig, activation
from t5x_gpu.layers.norm import make_norm
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.losses import (
  Sums,
  TokenLoss,
  choose_num_chunks,
  cross_entropy,
  linear_cross_entropy,
  linear_log_probs,
  weighted_sums,
)
from t5x_gpu.models.model import Params
from t5x_gpu.partitioning.axis_rules import shard, split_ways, with_axes
from t5x_gpu.partitioning.parameters import whole

# In the `op_name` of the kernels of the logits and the loss.
LOSS_SCOPE = 'loss'


class TokenLogits(nn.Module):
  """Logits over the vocabulary, from the token table (tied) or a separate kernel."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x: jax.Array, table: Optional[jax.Array]) -> jax.Array:
    """Returns [batch, length, vocab] in float32 from [batch, length, embed].

    Args:
      x: output of the last norm.
      table: [vocab, embed] token table, for tied logits only.
    """
    c, x = self.config, shard(x, 'batch', 'length', 'embed')
    if c.logits_via_embedding:
      x = _scaled(c, x)
      logits = _table_logits(x, table)
    else:
      # Accumulated and stored in float32: the softmax over the vocabulary needs the precision.
      dot_general = functools.partial(jax.lax.dot_general, preferred_element_type=jnp.float32)
      logits = DenseGeneral(
        (c.vocab_size,),
        ('embed', 'vocab'),
        name='projection',
        dtype=c.compute_dtype,
        dot_general=dot_general,
        kernel_init=c.kernel_init,
      )(x)
    logits = logits.astype(jnp.float32)
    if c.logits_softcap is not None:
      logits = c.logits_softcap * jnp.tanh(logits / c.logits_softcap)
    return shard(logits, 'batch', 'length', 'vocab')


def init_token_logits(config: TransformerConfig, key: jax.Array) -> dict[str, Params]:
  """Returns {'logits_dense': parameters}; empty if logits are tied to the token table."""
  if config.logits_via_embedding:
    return {}
  x = jnp.zeros((1, 1, config.embed_dim), config.compute_dtype)
  return {'logits_dense': TokenLogits(config).init(key, x, None)['params']}


def token_logits(
  config: TransformerConfig, params: Params, x: jax.Array, token_embedder: Params
) -> jax.Array:
  """Returns [batch, length, vocab] in float32.

  Args:
    config: sizes of the decoder.
    params: has 'logits_dense', unless the logits are tied.
    x: [batch, length, embed] after the last norm.
    token_embedder: parameters of the token table.
  """
  own, table = {}, None
  if config.logits_via_embedding:
    table = whole(token_embedder, config.compute_dtype)['embedding']
  else:
    own = whole(params['logits_dense'], config.compute_dtype)
  return TokenLogits(config).apply({'params': own}, x, table)


@jax.named_scope(LOSS_SCOPE)
def token_loss(
  config: TransformerConfig,
  params: Params,
  x: jax.Array,
  token_embedder: Params,
  targets: jax.Array,
  weights: jax.Array,
  *,
  z_loss: float,
  label_smoothing: float,
) -> Sums:
  """Returns sums over target tokens, as `cross_entropy` of `token_logits`.

  Large logits are not stored (TransformerConfig.loss_chunks).

  Args:
    config, params, x, token_embedder: see `token_logits`.
    targets, weights, z_loss, label_smoothing: see `cross_entropy`.
  """
  options = dict(z_loss=z_loss, label_smoothing=label_smoothing)
  chunks = num_loss_chunks(config, *x.shape[:2], vocab_parts=split_ways('vocab'))
  if not chunks:
    logits = token_logits(config, params, x, token_embedder)
    return cross_entropy(logits, targets, weights, **options)
  terms, vocab_first = _logit_terms(config, params, x, token_embedder)
  sums = linear_cross_entropy(
    terms,
    None,
    targets,
    weights,
    token_loss=TokenLoss(**options, softcap=config.logits_softcap),
    num_chunks=chunks,
    vocab_first=vocab_first,
    fp8=config.multiplies_logits_in_fp8,
  )
  return weighted_sums(sums, weights)


@jax.named_scope(LOSS_SCOPE)
def token_log_probs(
  config: TransformerConfig,
  params: Params,
  x: jax.Array,
  token_embedder: Params,
  targets: jax.Array,
) -> jax.Array:
  """Returns the log-probability of each target token, float32 [batch, length].

  Large logits are not stored (TransformerConfig.loss_chunks).

  Args:
    config, params, x, token_embedder: see `token_logits`.
    targets: [batch, length] token ids.
  """
  chunks = num_loss_chunks(config, *x.shape[:2], vocab_parts=split_ways('vocab'))
  if not chunks:
    logits = token_logits(config, params, x, token_embedder)
    return -TokenLoss()(logits, targets)[0]['cross_entropy']
  terms, vocab_first = _logit_terms(config, params, x, token_embedder)
  return linear_log_probs(
    terms, targets, softcap=config.logits_softcap, num_chunks=chunks, vocab_first=vocab_first
  )


def _logit_terms(
  config: TransformerConfig, params: Params, x: jax.Array, token_embedder: Params
) -> tuple[list[tuple[jax.Array, jax.Array]], bool]:
  """Returns `terms` and `vocab_first` of `linear_cross_entropy`; arguments as in `token_logits`."""
  x = shard(x, 'batch', 'length', 'embed').astype(config.compute_dtype)
  if config.logits_via_embedding:
    x, table = _scaled(config, x), token_embedder['embedding']
    # A table is gathered, and its gradient scattered, with the split dimension first. In this
    # order, XLA need not transpose them.
    vocab_first = not is_gathered_by_embed(table)
    table = whole(table, config.compute_dtype, wide=True)
    return [(x, table if vocab_first else table.T)], vocab_first
  own = whole(params['logits_dense'], config.compute_dtype, wide=True)['projection']
  if FACTORS[0] not in own:
    return [(x, own['kernel'])], False
  down, up = (own[name].astype(x.dtype) for name in FACTORS)
  return [(x, own['kernel']), (x @ down, up)], False  # x (W + AB) = x W + (x A) B


def _table_logits(x: jax.Array, table: jax.Array) -> jax.Array:
  """Returns x [batch, length, embed] times table [vocab, embed], accumulated in float32."""
  table = table.astype(x.dtype)
  return jnp.einsum('ble,ve->blv', x, table, preferred_element_type=jnp.float32)


def num_loss_chunks(config: TransformerConfig, batch: int, length: int, *, vocab_parts: int) -> int:
  """Returns the number of chunks of the length for the loss; 0 to store all logits.

  Args:
    config: config of the decoder.
    batch, length: positions on one device.
    vocab_parts: number of shards of the vocabulary.
  """
  if config.loss_chunks is not None:
    return min(config.loss_chunks, length)
  chunks = choose_num_chunks(batch, length, vocab_size=config.vocab_size // vocab_parts)
  return max(chunks, 1) if config.multiplies_logits_in_fp8 else chunks


def _scaled(config: TransformerConfig, x: jax.Array) -> jax.Array:
  """Returns the scaled input of tied logits; the table has unit variance, so they would grow."""
  if not config.scale_tied_logits:
    return x
  return x / jnp.sqrt(jnp.asarray(x.shape[-1], x.dtype))


class ClassifierHead(nn.Module):
  """Class logits from one vector per row, or per token.

  Attributes:
    config: sizes of the encoder.
    num_classes: number of outputs.
    tanh_layer: start with a linear map and tanh (BERT's pooler).
    mlp_dim: hidden features of an MLP before the classes, sharded like the layers' MLP; 0 for no
      MLP.
    mlp_activation: activation of the MLP; None for the first of the layers' MLP.
    flat_length: for input [batch, length, embed] of one row each, whose features the MLP reads as
      one vector: positions of the longest row; 0 for other input.
  """

  config: TransformerConfig
  num_classes: int
  tanh_layer: bool
  mlp_dim: int = 0
  mlp_activation: Optional[str] = None
  flat_length: int = 0

  @property
  def parameter_names(self) -> tuple[str, ...]:
    """Top-level names of its parameters."""
    return (
      *(('pooler',) if self.tanh_layer else ()),
      *(('classifier_mlp',) if self.mlp_dim else ()),
      'classifier',
    )

  @nn.compact
  def __call__(self, row: jax.Array, dropout_rng: Optional[DropoutRng] = None) -> jax.Array:
    """Returns [batch, classes] in float32 from [batch, embed]; or the same with a length axis.

    Args:
      row: pooled output of the last norm, or [batch, length, embed] of all tokens, which
        `flat_length` turns into one vector per row.
      dropout_rng: drops the output of the pooler, as in BERT; None for no dropout.
    """
    c = self.config
    options = dict(dtype=c.compute_dtype, kernel_init=c.kernel_init, use_bias=True)
    if self.tanh_layer:
      row = jnp.tanh(DenseGeneral((row.shape[-1],), ('embed', None), name='pooler', **options)(row))
    tokens = row if row.ndim == 3 else row[:, None]
    tokens = dropout(tokens, c.dropout('classifier'), dropout_rng)
    if self.mlp_dim:
      mlp = MlpConfig(
        mlp_dim=self.mlp_dim,
        mlp_activations=(self.mlp_activation or c.mlp_activations[0],),
        mlp_bias=True,
        dtype=c.dtype,
        init_stddev=c.init_stddev,
      )
      kind = functools.partial(FlatMlp, length=self.flat_length) if self.flat_length else Mlp
      tokens = kind(mlp, name='classifier_mlp')(tokens)
    tokens = tokens if row.ndim == 3 else tokens[:, 0]
    return DenseGeneral((self.num_classes,), ('embed', None), name='classifier', **options)(
      tokens
    ).astype(jnp.float32)


class FlatMlp(nn.Module):
  """An MLP that reads the features of all positions of a row as one vector.

  Attributes:
    config: hidden features, activation.
    length: positions of the longest row. A shorter row counts as one that ends with zeros.
  """

  config: MlpConfig
  length: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns [batch, embed] from [batch, length, embed], zero on padding."""
    c = self.config
    options = dict(dtype=c.compute_dtype, kernel_init=c.kernel_init, use_bias=c.mlp_bias)
    x = jnp.pad(x, ((0, 0), (0, self.length - x.shape[1]), (0, 0)))
    wi = DenseGeneral((c.mlp_dim,), (None, 'embed', 'mlp'), num_in=2, name='wi', **options)
    hidden = shard(activation(c.mlp_activations[0])(wi(x)), 'batch', 'mlp')
    out = DenseGeneral((x.shape[-1],), ('mlp', 'embed'), name='wo', **options)(hidden)
    return shard(out, 'batch', 'embed')


class MaskedTokenHead(nn.Module):
  """The linear map and norm before the token table in masked language modelling (BERT)."""

  config: TransformerConfig
  parameter_names = ('mlm_transform', 'mlm_norm', 'mlm_bias')

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns [batch, length, embed] from the same shape, and the bias [vocab] of the logits."""
    c, x = self.config, shard(x, 'batch', 'residual_length', 'embed')
    x = DenseGeneral(
      (x.shape[-1],),
      ('embed', None),
      name='mlm_transform',
      use_bias=True,
      dtype=c.compute_dtype,
      kernel_init=c.kernel_init,
      along='residual_length',
      bias_along='residual_length',
    )(x)
    x = make_norm(c, name='mlm_norm')(activation(c.mlp_activations[0])(x))
    x = shard(x, 'batch', 'length', 'embed')
    bias = self.param(
      'mlm_bias', with_axes(nn.initializers.zeros, ('vocab',)), (c.vocab_size,), jnp.float32
    )
    return x, bias


def masked_token_logits(x: jax.Array, bias: jax.Array, table: jax.Array) -> jax.Array:
  """Returns logits [batch, length, vocab] in float32 from the result of `MaskedTokenHead`.

  Args:
    x, bias: result of the head.
    table: [vocab, embed] token table.
  """
  return shard(_table_logits(x, table) + bias, 'batch', 'length', 'vocab')


@jax.named_scope(LOSS_SCOPE)
def masked_token_loss(
  config: TransformerConfig,
  x: jax.Array,
  bias: jax.Array,
  table: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  **options: float,
) -> Sums:
  """Returns the sums of `cross_entropy` of `masked_token_logits`; see `token_loss`."""
  chunks = num_loss_chunks(config, *x.shape[:2], vocab_parts=split_ways('vocab'))
  if not chunks:
    return cross_entropy(masked_token_logits(x, bias, table), targets, weights, **options)
  sums = linear_cross_entropy(
    [(x, table)],
    bias,
    targets,
    weights,
    token_loss=TokenLoss(**options),
    num_chunks=chunks,
    vocab_first=True,
    fp8=config.multiplies_logits_in_fp8,
  )
  return weighted_sums(sums, weights)
