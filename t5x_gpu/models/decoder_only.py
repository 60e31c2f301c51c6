"""Decoder-only language model: a batch in, sums over target tokens out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.features import batch_spec
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.attention_backends import Attention, decoder_attention
from t5x_gpu.layers.dropout import DropoutRng, dropout
from t5x_gpu.layers.embedding import Embedding
from t5x_gpu.layers.masks import token_info
from t5x_gpu.layers.norm import RMSNorm
from t5x_gpu.layers.positions import RelativeBuckets
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.heads import TokenLogits
from t5x_gpu.models.losses import Sums, cross_entropy
from t5x_gpu.models.transformer import DecoderLayer, init_layers, relative_table, scan_layers
from t5x_gpu.partitioning import fsdp

Params = Any
# A batch on devices: feature name -> [batch, length]; 'rows' [batch], which dropout needs; and
# 'positions' [length] where rows are split.
DeviceBatch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel:
  """A causal or prefix language model.

  `loss` is `embed`, `run_layers` and `head` in a row; a pipeline runs each where it belongs.

  Attributes:
    config: sizes of the decoder.
    z_loss: coefficient of log(Z)^2 in the loss.
    label_smoothing: probability given to the other tokens.
    inputs_bidirectional_attention: let inputs see each other both ways (prefix LM); takes effect
      for tasks that have 'inputs'.
  """
  config: TransformerConfig
  z_loss: float = 0.0
  label_smoothing: float = 0.0
  inputs_bidirectional_attention: bool = False

  def __post_init__(self) -> None:
    for name, good in (('z_loss', self.z_loss >= 0.0),
                       ('label_smoothing', 0.0 <= self.label_smoothing < 1.0)):
      if not good:
        raise ModelError(f'{name} = {getattr(self, name)} is out of range.',
                         fix='Set z_loss to 0 or more (1e-4 is usual), label_smoothing to 0 or '
                             'more and below 1.', parameters=(f'DecoderOnlyModel.{name}',))

  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns how SeqIO features become the model's: 'prefix_lm' with inputs, else 'lm'."""
    return 'prefix_lm' if 'inputs' in task_feature_lengths else 'lm'

  def batch_spec(self, task_feature_lengths: Mapping[str, int], *, batch_size: int,
                 pack: bool) -> BatchSpec:
    """Returns the features that `loss` takes from a batch of this size."""
    return batch_spec(self.feature_converter(task_feature_lengths),
                      task_feature_lengths=task_feature_lengths,
                      batch_size=batch_size, pack=pack, vocab_size=self.config.vocab_size)

  def logical_sizes(self) -> dict[str, int]:
    """Returns axis name -> size of everything that a mesh may split."""
    c = self.config
    sizes = {'vocab': c.vocab_size, 'embed': c.embed_dim, 'heads': c.num_heads, 'mlp': c.mlp_dim,
             'layers': c.num_layers}
    return {**sizes, 'experts': c.num_experts} if c.num_experts else sizes

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    return transformer_flops_per_token(self.config, length)

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns freshly drawn parameters, boxed with their axis names (`NamedParam`)."""
    del spec  # of what fits any length
    c = self.config
    keys = dict(zip(('token_embedder', 'relpos_bias', 'layers', 'decoder_norm', 'logits_dense'),
                    jax.random.split(rng, 5)))
    tokens, x = jnp.zeros((1, 1), jnp.int32), jnp.zeros((1, 1, c.embed_dim), c.compute_dtype)
    params = {
        'token_embedder': self._embedding.init(keys['token_embedder'], tokens)['params'],
        'layers': init_layers(DecoderLayer(c), keys['layers'], x, self._attention(
            {'decoder_target_tokens': tokens}), None, None, num_layers=c.num_layers),
        'decoder_norm': self._norm.init(keys['decoder_norm'], x)['params']}
    if c.relative_bias == 'shared':
      params['relpos_bias'] = relative_table(c).init(keys['relpos_bias'])['params']
    if not c.logits_via_embedding:
      params['logits_dense'] = TokenLogits(c).init(keys['logits_dense'], x, None)['params']
    return params

  @property
  def _embedding(self) -> Embedding:
    return Embedding(self.config.vocab_size, self.config.embed_dim, dtype=self.config.compute_dtype)

  @property
  def _norm(self) -> RMSNorm:
    return RMSNorm(dtype=self.config.compute_dtype)

  def embed(self, params: Params, batch: DeviceBatch, *,
            dropout_key: Optional[jax.Array] = None) -> jax.Array:
    """Returns [batch, length, embed], what the first layer gets."""
    table = fsdp.whole(params['token_embedder'], self.config.compute_dtype)
    x = self._embedding.apply({'params': table}, batch['decoder_input_tokens'])
    return dropout(x, self.config.dropout_rate, _dropout_rng(dropout_key, batch, 'embed'))

  def run_layers(self, params: Params, x: jax.Array, batch: DeviceBatch, *,
                 dropout_key: Optional[jax.Array] = None, first_layer: Any = 0) -> jax.Array:
    """Returns `x` after the layers of `params['layers']`, the first of which is `first_layer`."""
    c = self.config
    attention, bias = self._attention(batch), None
    if c.relative_bias == 'shared':
      bias = attention.bias(relative_table(c).apply({'params': params['relpos_bias']}))
    return scan_layers(DecoderLayer(c), params['layers'], x, attention, bias, config=c,
                       dropout_rng=_dropout_rng(dropout_key, batch, 'layers'),
                       first_layer=first_layer)

  def _attention(self, batch: DeviceBatch) -> Attention:
    c = self.config
    prefix = batch['decoder_causal_attention'] if self.uses_prefix(batch) else None
    info = token_info(batch['decoder_target_tokens'], prefix=prefix,
                      segment_ids=batch.get('decoder_segment_ids'),
                      positions=batch.get('positions'))
    return decoder_attention(info, RelativeBuckets(c.num_relpos_buckets, c.max_relpos_distance))

  def _logits(self, params: Params, x: jax.Array, batch: DeviceBatch,
              dropout_key: Optional[jax.Array]) -> jax.Array:
    c = self.config
    x = self._norm.apply({'params': fsdp.whole(params['decoder_norm'], c.compute_dtype)}, x)
    x = dropout(x, c.dropout_rate, _dropout_rng(dropout_key, batch, 'head'))
    own = fsdp.whole(params.get('logits_dense', {}), c.compute_dtype)
    table = None
    if c.logits_via_embedding:
      table = fsdp.whole(params['token_embedder'], c.compute_dtype)['embedding']
    return TokenLogits(c).apply({'params': own}, x, table)

  def head(self, params: Params, x: jax.Array, batch: DeviceBatch, *,
           dropout_key: Optional[jax.Array] = None) -> Sums:
    """Returns sums over target tokens from `x`, what the last layer returned."""
    logits = self._logits(params, x, batch, dropout_key)
    return cross_entropy(logits, batch['decoder_target_tokens'], batch['decoder_loss_weights'],
                         z_loss=self.z_loss, label_smoothing=self.label_smoothing)

  def logits(self, params: Params, batch: DeviceBatch, *,
             dropout_key: Optional[jax.Array] = None) -> jax.Array:
    """Returns [batch, length, vocab] in float32; dropout only with a key for it."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    x = self.run_layers(params, x, batch, dropout_key=dropout_key)
    return self._logits(params, x, batch, dropout_key)

  def uses_prefix(self, batch: DeviceBatch) -> bool:
    return self.inputs_bidirectional_attention and 'decoder_causal_attention' in batch

  def loss(self, params: Params, batch: DeviceBatch, *,
           dropout_key: Optional[jax.Array] = None) -> Sums:
    """Returns sums over target tokens; 'loss' is what training minimises, per token."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    x = self.run_layers(params, x, batch, dropout_key=dropout_key)
    return self.head(params, x, batch, dropout_key=dropout_key)


def _dropout_rng(key: Optional[jax.Array], batch: DeviceBatch, part: str) -> Optional[DropoutRng]:
  if key is None:
    return None
  return DropoutRng(key, batch['rows'], batch.get('positions')).at(part)
