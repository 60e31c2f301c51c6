"""Data parallelism: every replica takes its own rows of the global batch.

What is split: `batch` of activations over `data`. Parameters and optimizer state are whole on each
replica. What moves: one all-reduce of all gradients per step. When: the model fits on one GPU.
Source: Dean et al. 2012; Goyal et al. 2017 for large batches.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns what data parallelism adds to the table."""
  return AxisRules(activations={'batch': ('data',)})


def traffic_per_step(*, gradient_bytes: int, replicas: int) -> dict[str, float]:
  """Returns the bytes that a device sends in one training step to sum gradients, as a ring.

  Once per step, however many microbatches, in one collective over all axes at once.

  Args:
    gradient_bytes: of the parts of parameters that one device holds, in float32.
    replicas: devices that hold the same parts: the product of `data`, `context` and what else does
      not split these parameters.
  """
  return {'all-reduce': 2.0 * (replicas - 1) / replicas * gradient_bytes}
