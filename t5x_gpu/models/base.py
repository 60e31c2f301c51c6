"""Base classes of the models: sizes, batches, and running one stack of layers."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Optional

import jax

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.features import batch_spec
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.dropout import DropoutRng
from t5x_gpu.layers.embedding import is_looked_up_in_parts
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.losses import Sums
from t5x_gpu.models.model import DeviceBatch, Params
from t5x_gpu.models.stack import Activation, Embeddings, Stack, dropout_rng
from t5x_gpu.partitioning.loop import layer_loop


class TransformerModel(abc.ABC):
  """A model of transformer layers.

  Attributes:
    config: sizes of the model.
    layer: module class of a layer; docs/add_a_model.md writes a custom one.
  """

  config: TransformerConfig
  layer: Callable[[TransformerConfig], Any]
  gathers_layers: ClassVar[bool] = True

  @property
  def num_outcomes(self) -> int:
    """Number of tokens that the model chooses from."""
    return self.config.vocab_size

  @property
  def _num_label_classes(self) -> Optional[int]:
    """Number of classes of the labels in a batch; None without labels."""
    return None

  @property
  def _predicts_tokens(self) -> bool:
    """Whether logits are over the vocabulary."""
    return True

  @property
  def _texts_in_row(self) -> int:
    """Minimum number of texts in a row; the positions of each text start at 0."""
    return 1

  @property
  def _label_names(self) -> tuple[str, ...]:
    """Names of the label classes; () to use the data's names."""
    return ()

  @abc.abstractmethod
  def feature_converter(self, task_feature_lengths: Mapping[str, int]) -> str:
    """Returns the feature converter's name."""

  def batch_spec(
    self, task_feature_lengths: Mapping[str, int], *, batch_size: int, pack: bool
  ) -> BatchSpec:
    """Returns shapes and dtypes of the features that `loss` reads.

    Raises:
      ModelError: rows are longer than the model's limit.
    """
    spec = batch_spec(
      self.feature_converter(task_feature_lengths),
      task_feature_lengths=task_feature_lengths,
      batch_size=batch_size,
      pack=pack,
      vocab_size=self.config.vocab_size,
      num_classes=self._num_label_classes,
      class_names=self._label_names,
    )
    _check_length(self.config, spec, self._texts_in_row)
    return spec

  def logical_sizes(self) -> dict[str, int]:
    """Returns axis name -> size, of all axes that a mesh may split."""
    c = self.config
    sizes = {
      'vocab': c.vocab_size,
      'embed': c.embed_dim,
      'heads': c.num_heads,
      'kv_heads': c.kv_heads,
      'kv': c.head_dim,
      'mlp': c.mlp_dim,
      'layers': c.num_layers,
    }
    return {**sizes, 'experts': c.num_experts} if c.num_experts else sizes

  @property
  def _embeddings(self) -> Embeddings:
    return Embeddings(self.config)


class OneStackModel(TransformerModel):
  """A model whose layers are one stack.

  `loss` calls `embed`, `run_layers` and `head`; a pipeline runs them on different stages.

  Attributes:
    side: 'encoder' or 'decoder', the prefix of its features; decoders are causal.
  """

  side: ClassVar[str]

  @property
  def _stack(self) -> Stack:
    return Stack(
      self.config,
      self.config.num_layers,
      causal=self.side == 'decoder',
      final_norm=f'{self.side}_norm',
      layer=self.layer,
    )

  def flops_per_token(self, length: int) -> float:
    """Returns model FLOPs of one training step per position of a row of `length`."""
    return transformer_flops_per_token(
      self.config, length, token_logits=self._predicts_tokens, causal=self._stack.causal
    )

  def embed(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Activation:
    """Returns [batch, length, embed], the input of the first layer."""
    return self._embeddings(
      params,
      batch[f'{self.side}_input_tokens'],
      self._positions(batch),
      token_types=batch.get(f'{self.side}_token_types'),
      rng=self._rng(dropout_key, batch, 'embed'),
    )

  def run_layers(
    self,
    params: Params,
    x: Activation,
    batch: DeviceBatch,
    *,
    dropout_key: Optional[jax.Array] = None,
    first_layer: Any = 0,
  ) -> Activation:
    """Returns `x` after the layers of `params['layers']`, which start at number `first_layer`."""
    return self._stack.run(
      params,
      x,
      self._info(batch),
      self._positions(batch),
      rng=self._rng(dropout_key, batch, 'layers'),
      first_layer=first_layer,
    )

  @abc.abstractmethod
  def head(
    self, params: Params, x: Activation, batch: DeviceBatch, *, dropout_key: Optional[jax.Array]
  ) -> Sums:
    """Returns sums over the predictions from `x`, the output of the last layer."""

  def _after_layers(
    self, params: Params, batch: DeviceBatch, dropout_key: Optional[jax.Array]
  ) -> Activation:
    x = self.embed(params, batch, dropout_key=dropout_key)
    return self.run_layers(params, x, batch, dropout_key=dropout_key)

  def loss(
    self, params: Params, batch: DeviceBatch, *, dropout_key: Optional[jax.Array] = None
  ) -> Sums:
    """Returns sums; training minimizes 'loss' per example or target token."""
    x = self.embed(params, batch, dropout_key=dropout_key)
    with layer_loop.used_after(self._logits_kernel(params, batch)) as after:
      x = self.run_layers(params, x, batch, dropout_key=dropout_key)
    return self.head({**params, **after.params}, x, batch, dropout_key=dropout_key)

  def _logits_kernel(self, params: Params, batch: DeviceBatch) -> Params:
    """Returns the subset of `params` that only the logits gather."""
    if 'logits_dense' in params:
      return {'logits_dense': params['logits_dense']}
    table = params.get('token_embedder', {})
    ids = batch[f'{self.side}_input_tokens']
    in_parts = is_looked_up_in_parts(table.get('embedding'), ids, self.config.compute_dtype)
    return {'token_embedder': table} if in_parts else {}

  @abc.abstractmethod
  def _info(self, batch: DeviceBatch) -> TokenInfo:
    """Returns the segments and positions that attention needs."""

  def _positions(self, batch: DeviceBatch) -> jax.Array:
    """Returns the position of each token in its example; a packed row holds several examples."""
    return batch.get(f'{self.side}_positions', self._info(batch).positions)

  def _rng(self, key: Optional[jax.Array], batch: DeviceBatch, part: str) -> Optional[DropoutRng]:
    return dropout_rng(key, batch, part, side=self.side)


def _check_length(config: TransformerConfig, spec: BatchSpec, texts_in_row: int) -> None:
  limit = config.length_limit
  too_long = {
    name: -(-shape[1] // texts_in_row)
    for name, shape in spec.shapes.items()
    if limit is not None and len(shape) > 1 and shape[1] > limit * texts_in_row
  }
  if too_long:
    name, length = max(too_long.items(), key=lambda item: item[1])
    learned = config.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise ModelError(
      f'{name} has {length} positions{" per text" * (texts_in_row > 1)}, but the model '
      + (f'has learned vectors for {limit}.' if learned else f'was made for {limit}.'),
      fix=f'Set TASK_FEATURE_LENGTHS so that rows have at most {limit * texts_in_row} tokens, or, '
      + ('for a model that starts from scratch, ' if learned else 'to train it for longer rows, ')
      + f'{parameter} = {length}.',
      parameters=('TASK_FEATURE_LENGTHS', parameter),
    )
