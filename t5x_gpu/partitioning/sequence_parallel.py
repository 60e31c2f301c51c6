"""Sequence parallelism: the regions between tensor-parallel matmuls are split by position.

What is split: `residual_length` of activations over `model`: norms, dropout and residuals, which
tensor parallelism alone computes and stores on every device of a replica. What moves: an all-gather
before and a reduce-scatter after each pair of matmuls, in place of one all-reduce: as many bytes.
When: always together with tensor parallelism, if the length divides; it saves activation memory.
Source: Korthikanti et al. 2022, section 4.2.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns what sequence parallelism adds to the table."""
  return AxisRules(activations={'residual_length': ('model',)})
