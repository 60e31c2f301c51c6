"""Decoder-only language model: a batch in, sums over target tokens out."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.features import batch_spec
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.losses import Sums, cross_entropy
from t5x_gpu.models.transformer import Decoder

Params = Any
# A batch on devices: feature name -> [batch, length].
DeviceBatch = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class DecoderOnlyModel:
  """A causal or prefix language model.

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

  @property
  def decoder(self) -> Decoder:
    return Decoder(self.config)

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
    return {'vocab': c.vocab_size, 'embed': c.embed_dim, 'heads': c.num_heads, 'mlp': c.mlp_dim,
            'layers': c.num_layers}

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    return transformer_flops_per_token(self.config, length)

  def init(self, rng: jax.Array, spec: BatchSpec) -> Params:
    """Returns freshly drawn parameters, boxed with their axis names (`NamedParam`)."""
    tokens = jnp.zeros(spec.shapes['decoder_target_tokens'], jnp.int32)
    return self.decoder.init(rng, tokens, tokens, deterministic=True)['params']

  def logits(self, params: Params, batch: DeviceBatch, *,
             dropout_rng: Optional[jax.Array] = None) -> jax.Array:
    """Returns [batch, length, vocab] in float32; dropout only with a key for it."""
    prefix = batch['decoder_causal_attention'] if self.uses_prefix(batch) else None
    return self.decoder.apply(
        {'params': params}, batch['decoder_input_tokens'], batch['decoder_target_tokens'],
        segment_ids=batch.get('decoder_segment_ids'), prefix=prefix,
        deterministic=dropout_rng is None,
        rngs={} if dropout_rng is None else {'dropout': dropout_rng})

  def uses_prefix(self, batch: DeviceBatch) -> bool:
    return self.inputs_bidirectional_attention and 'decoder_causal_attention' in batch

  def loss(self, params: Params, batch: DeviceBatch, *,
           dropout_rng: Optional[jax.Array] = None) -> Sums:
    """Returns sums over target tokens; 'loss' is what training minimises, per token."""
    logits = self.logits(params, batch, dropout_rng=dropout_rng)
    return cross_entropy(logits, batch['decoder_target_tokens'], batch['decoder_loss_weights'],
                         z_loss=self.z_loss, label_smoothing=self.label_smoothing)
