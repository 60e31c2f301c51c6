"""Sizes of a model that must fit the mesh and the batch."""

from collections.abc import Mapping
from typing import Optional

from t5x_gpu.data.batches import BatchSpec
from t5x_gpu.data.features import batch_spec
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig


def transformer_sizes(config: TransformerConfig) -> dict[str, int]:
  """Returns axis name -> size, of all axes that a mesh may split."""
  c = config
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


def transformer_batch_spec(
  config: TransformerConfig,
  feature_converter: str,
  task_feature_lengths: Mapping[str, int],
  *,
  batch_size: int,
  pack: bool,
  num_classes: Optional[int] = None,
) -> BatchSpec:
  """Returns shapes and dtypes of the features of a model; arguments as in `features.batch_spec`.

  Raises:
    ModelError: rows are longer than the model's limit.
  """
  spec = batch_spec(
    feature_converter,
    task_feature_lengths=task_feature_lengths,
    batch_size=batch_size,
    pack=pack,
    vocab_size=config.vocab_size,
    num_classes=num_classes,
  )
  _check_length(config, spec)
  return spec


def _check_length(config: TransformerConfig, spec: BatchSpec) -> None:
  limit = config.length_limit
  too_long = {
    name: shape[1]
    for name, shape in spec.shapes.items()
    if limit is not None and len(shape) > 1 and shape[1] > limit
  }
  if too_long:
    name, length = max(too_long.items(), key=lambda item: item[1])
    learned = config.num_positions > 0
    parameter = f'TransformerConfig.{"num_positions" if learned else "max_length"}'
    raise ModelError(
      f'{name} has {length} positions, but the model '
      + (f'has learned vectors for {limit}.' if learned else f'was made for {limit}.'),
      fix=f'Set TASK_FEATURE_LENGTHS so that rows have at most {limit} tokens, or, '
      + ('for a model that starts from scratch, ' if learned else 'to train it for longer ones, ')
      + f'{parameter} = {length}.',
      parameters=('TASK_FEATURE_LENGTHS', parameter),
    )
