"""Tensor parallelism: the heads, the MLP's hidden features and the vocabulary are split.

What is split: `heads`, `kv_heads`, `mlp` and `vocab` of parameters and activations over `model`
(T5X's num_partitions). The first map of a pair is split by columns, the second by rows, so that a
block needs one all-reduce of its output, forward and backward. What moves: activations, twice per
layer each way; keep it on NVLink. When: a layer does not fit, or the batch per GPU gets too small.
Source: Shoeybi et al. 2019 (Megatron-LM), section 3.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules

SPLIT = {name: ('model',) for name in ('heads', 'kv_heads', 'mlp', 'vocab')}


def rules() -> AxisRules:
  """Returns what tensor parallelism adds to the table."""
  return AxisRules(parameters=SPLIT, activations=SPLIT)


def traffic_per_step(*, batch: int, length: int, embed_dim: int, num_layers: int, model: int,
                     dtype_bytes: int, recomputed: int = 0) -> dict[str, float]:
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
  """
  tokens = batch * length
  of_layers = (4 + recomputed) * num_layers * tokens * embed_dim * dtype_bytes
  of_ends = 2 * tokens * embed_dim * 4
  return {'all-reduce': 2 * (model - 1) / model * (of_layers + of_ends + 3 * tokens * 4)}
