"""Data parallelism: every replica takes its own rows of the global batch.

What is split: `batch` of activations over `data`. Parameters and optimizer state are whole on each
replica. What moves: one all-reduce of all gradients per step. When: the model fits on one GPU.
Source: Dean et al. 2012; Goyal et al. 2017 for large batches.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns what data parallelism adds to the table."""
  return AxisRules(activations={'batch': ('data',)})
