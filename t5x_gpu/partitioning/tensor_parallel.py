"""Tensor parallelism: the heads, the MLP's hidden features and the vocabulary are split.

What is split: `heads`, `kv_heads`, `mlp` and `vocab` of parameters and activations over `model`
(T5X's num_partitions). The first map of a pair is split by columns, the second by rows, so that a
block needs one all-reduce of its output, forward and backward. Fewer `kv_heads` (grouped queries)
than devices are kept on all of them, each of which computes the one that its queries meet. What
moves: activations, twice per layer each way; keep it on NVLink. When: a layer does not fit, or the
batch per GPU gets too small.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.partitioning.axis_rules import AxisRules
from t5x_gpu.partitioning.mesh.mesh_problems import any_of

SPLIT = dict.fromkeys(('heads', 'kv_heads', 'mlp', 'vocab'), ('model',))


def rules(*, shares_kv_heads: bool = False) -> AxisRules:
  """Returns what tensor parallelism adds to the table.

  Args:
    shares_kv_heads: there are fewer key and value heads than devices: parameters of them are whole
      on each, activations are split after each device has computed one.
  """
  whole = ('kv_heads',) if shares_kv_heads else ()
  return AxisRules(
    parameters={name: axes for name, axes in SPLIT.items() if name not in whole}, activations=SPLIT
  )


def devices_per_kv_head(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> int:
  """Returns how many devices along `model` keep each key and value head; 1 if they are split.

  Args:
    sizes: array axis -> size; 'kv_heads' is read.
    mesh_shape: mesh axis -> size.
  """
  model, kv_heads = mesh_shape.get('model', 1), sizes.get('kv_heads', 0)
  return model // kv_heads if kv_heads and model > kv_heads and model % kv_heads == 0 else 1


def check(
  sizes: Mapping[str, int],
  mesh_shape: Mapping[str, int],
  *,
  legal_sizes: Optional[Mapping[str, Sequence[int]]] = None,
) -> list[str]:
  """Returns one sentence with its fix if key and value heads can be neither split nor shared.

  All other axes need only be divisible, which is checked for all parallelisms at once.

  Args:
    sizes: array axis -> size; 'heads' and 'kv_heads' are read.
    mesh_shape: mesh axis -> size.
    legal_sizes: mesh axis -> sizes that it could have, for the fix.
  """
  model, heads, kv_heads = (
    mesh_shape.get('model', 1),
    sizes.get('heads', 0),
    sizes.get('kv_heads', 0),
  )
  if kv_heads in (0, heads) or kv_heads % model == 0 or model % kv_heads == 0:
    return []

  def fits(kv_heads: int, model: int) -> bool:
    return kv_heads % model == 0 or model % kv_heads == 0

  fixes = [
    'TransformerConfig.num_kv_heads = '
    + any_of([n for n in range(1, heads + 1) if heads % n == 0 and fits(n, model)])
  ]
  possible = [n for n in (legal_sizes or {}).get('model', ()) if fits(kv_heads, n)]
  if possible:
    fixes.append(f'Partitioner.num_partitions = {any_of(possible)}')
  return [
    f'kv_heads = {kv_heads} neither divides over model={model} nor divides it: they cannot '
    f'be split evenly, nor shared by as many devices each. Set {", or ".join(fixes)}.'
  ]


def shared_kv_heads_note(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> Optional[str]:
  """Returns what it costs that key and value heads are fewer than devices; None if they are not.

  Args:
    sizes: array axis -> size; 'kv_heads', 'kv', 'embed' and 'layers' are read.
    mesh_shape: mesh axis -> size.
  """
  devices = devices_per_kv_head(sizes, mesh_shape)
  if devices == 1:
    return None
  model, kv_heads = mesh_shape['model'], sizes['kv_heads']
  layers = sizes['layers'] // mesh_shape.get('stage', 1)
  kernels = 2 * layers * sizes['embed'] * kv_heads * sizes['kv'] * 4
  return (
    f'kv_heads = {kv_heads} < model = {model}: each device keeps all of them and computes '
    f'one, which {devices} devices share: {kernels * (model - 1) / model / 2**20:,.3g} MiB '
    f'of parameters more than if split, their gradients ({kernels / 2**20:,.3g} MiB) '
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
  shared_kv_size: int = 0,
) -> dict[str, float]:
  """Returns the bytes that a device sends over `model` in one training step, all by all-reduce.

  A layer sums its two outputs forward and the gradients of its two inputs backward. Besides: the
  embedding's vectors and the gradient of the logits' input, in float32; and three numbers per
  token for the cross entropy, never the logits: the largest logit, the sum of exponentials and the
  target's logit.

  Args:
    batch, length: positions of one device in one step, all microbatches together.
    embed_dim: features of the residual stream.
    num_layers: that one device holds.
    model: size of the axis.
    dtype_bytes: of activations.
    recomputed: outputs of a layer that are summed again in the backward pass: 1 under remat_policy
      'full', whose second one nobody needs; 2 in a pipeline, which computes whole stages again.
    shared_kv_size: elements of the kernels of keys and values that all devices keep, whose
      gradients are summed.
  """
  tokens = batch * length
  of_layers = (4 + recomputed) * num_layers * tokens * embed_dim * dtype_bytes
  of_ends = 2 * tokens * embed_dim * 4
  return {
    'all-reduce': 2
    * (model - 1)
    / model
    * (of_layers + of_ends + 3 * tokens * 4 + 4 * shared_kv_size)
  }
