"""Tensor parallelism: the heads, the MLP's hidden features and the vocabulary are split.

What is split: `heads`, `kv_heads`, `mlp` and `vocab` of parameters and activations over `model`
(T5X's num_partitions). The first matmul of a pair is split by columns, the second by rows, so a
block needs one all-reduce of its output, forward and backward. If there are fewer `kv_heads`
(grouped queries) than devices, every device holds all of them and computes only the head that its
queries need. What moves: activations, twice per layer each way; keep it on NVLink. When: a layer
does not fit, or the batch per GPU gets too small.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from collections.abc import Mapping
from typing import Optional

from t5x_gpu.errors import Problem
from t5x_gpu.partitioning.axis_rules import AxisRules
from t5x_gpu.terminal.console import show

SPLIT = dict.fromkeys(('heads', 'kv_heads', 'mlp', 'vocab'), ('model',))


def rules(*, shares_kv_heads: bool = False) -> AxisRules:
  """Returns the rules of tensor parallelism.

  Args:
    shares_kv_heads: whether there are fewer key and value heads than devices. Their parameters are
      then whole on every device; activations are split after each device has computed one head.
  """
  whole = ('kv_heads',) if shares_kv_heads else ()
  return AxisRules(
    parameters={name: axes for name, axes in SPLIT.items() if name not in whole}, activations=SPLIT
  )


def devices_per_kv_head(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> int:
  """Returns the number of devices along `model` that share a key and value head; 1 if split.

  Args:
    sizes: array axis -> size; reads 'kv_heads'.
    mesh_shape: mesh axis -> size.
  """
  model, kv_heads = mesh_shape.get('model', 1), sizes.get('kv_heads', 0)
  return model // kv_heads if kv_heads and model > kv_heads and model % kv_heads == 0 else 1


def check(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> list[Problem]:
  """Returns the problem if key and value heads can be neither split nor shared, else [].

  The other axes only have to be divisible, which `check_model_sizes` checks.

  Args:
    sizes: array axis -> size; reads 'heads' and 'kv_heads'.
    mesh_shape: mesh axis -> size.
  """
  model, kv_heads = mesh_shape.get('model', 1), sizes.get('kv_heads', 0)
  if kv_heads in (0, sizes.get('heads', 0)) or kv_heads % model == 0 or model % kv_heads == 0:
    return []
  return [
    Problem(
      f'kv_heads = {kv_heads} neither divides over model={model} nor divides it: key and value '
      'heads can be neither split evenly nor shared evenly.',
      f'Set Partitioner.num_partitions to a number that divides {kv_heads}, or to a multiple.',
      ('TransformerConfig.num_kv_heads', 'Partitioner.num_partitions'),
    )
  ]


def shared_kv_heads_note(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> Optional[str]:
  """Returns the cost of having fewer key and value heads than devices; None if there are enough.

  Args:
    sizes: array axis -> size; reads 'kv_heads', 'kv', 'embed' and 'layers'.
    mesh_shape: mesh axis -> size.
  """
  devices = devices_per_kv_head(sizes, mesh_shape)
  if devices == 1:
    return None
  model, kv_heads = mesh_shape['model'], sizes['kv_heads']
  layers = sizes['layers'] // mesh_shape.get('stage', 1)
  kernels = 2 * layers * sizes['embed'] * kv_heads * sizes['kv'] * 4
  return (
    f'kv_heads = {kv_heads} < model = {model}: every device holds all heads and computes one, '
    f'shared by {devices} devices: {show(kernels * (model - 1) / model, MiB=",.3g")} '
    f'of parameters more than if split, and their gradients ({show(kernels, MiB=",.3g")}) are '
    'all-reduced over model once per step'
  )


def traffic_per_step(
  *,
  batch: int,
  length: int,
  embed_dim: int,
  num_layers: int,
  model: int,
  dtype_bytes: int,
  recomputed: int = 0,
  references: int = 0,
  shared_kv_size: int = 0,
) -> dict[str, float]:
  """Returns the bytes that a device sends over `model` per training step, by all-reduce.

  A layer sums its two outputs forward and the gradients of its two inputs backward. In addition:
  the embedding's vectors and the gradient of the logits' input, in float32; and per token three
  numbers for the cross entropy instead of the logits: the largest logit, the sum of exponentials
  and the target's logit.

  Args:
    batch, length: rows of one device per step, over all microbatches, and their positions.
    embed_dim: features of the residual stream.
    num_layers: layers of one device.
    model: size of the axis.
    dtype_bytes: bytes per value of activations.
    recomputed: outputs per layer that the backward pass sums again: 1 under remat_policy 'full',
      which does not need the second output; 2 in a pipeline, which recomputes whole stages.
    references: additional forward passes without a backward pass (DPO).
    shared_kv_size: elements of key and value kernels that all devices hold, whose gradients are
      summed.
  """
  tokens = batch * length
  of_layers = (4 + recomputed + 2 * references) * num_layers * tokens * embed_dim * dtype_bytes
  of_ends = (2 + references) * tokens * embed_dim * 4
  return {
    'all-reduce': 2
    * (model - 1)
    / model
    * (of_layers + of_ends + 3 * (1 + references) * tokens * 4 + 4 * shared_kv_size)
  }
