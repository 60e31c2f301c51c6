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
