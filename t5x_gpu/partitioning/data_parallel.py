"""Data parallelism: every replica processes its own rows of the global batch.

What is split: `batch` of activations over `data`. Parameters and optimizer state are whole on each
replica. What moves: all gradients are all-reduced once per step, a layer's as soon as the backward
pass has them. When: the model fits on one GPU.
Source: Dean et al. 2012; Goyal et al. 2017 for large batches.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns the rules of data parallelism."""
  return AxisRules(activations={'batch': ('data',)})


def traffic_per_step(
  *, gradient_bytes: int, replicas: int, in_bfloat16: bool = False
) -> dict[str, float]:
  """Returns the bytes that a device sends per training step to sum gradients, in a ring.

  Gradients are sent once per step for any number of microbatches, in one collective over all axes.

  Args:
    gradient_bytes: bytes of the gradients of one device, in float32.
    replicas: devices with the same parameters: the product of `data`, `context` and every other
      axis that does not split them.
    in_bfloat16: whether gradients are sent in bfloat16: half the bytes, in two collectives.
  """
  once = (replicas - 1) / replicas * gradient_bytes
  if in_bfloat16:
    return {'all-to-all': once / 2, 'all-gather': once / 2}
  return {'all-reduce': 2.0 * once}
