"""Sequence parallelism: everything between tensor-parallel matmuls is split by token.

What is split: norms, dropout and residuals over `model`, by row if the rows divide, otherwise by
position (`axis_rules.splits_rows`). Tensor parallelism alone computes and stores them on every
device of a replica. What moves: an all-gather before and a reduce-scatter after each pair of
matmuls, instead of one all-reduce with the same bytes. When: always with tensor parallelism, if the
length divides; it saves activation memory.
Source: Korthikanti et al. 2022, section 4.2.
"""

from t5x_gpu.partitioning.axis_rules import AxisRules


def rules() -> AxisRules:
  """Returns the rules of sequence parallelism."""
  return AxisRules(activations={'residual_length': ('model',)})


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
  chunked_loss: bool = False,
) -> dict[str, float]:
  """Returns collective -> bytes that a device sends over `model` per training step.

  A layer sends the same bytes as under tensor parallelism alone: each all-reduce of an activation
  becomes a reduce-scatter and an all-gather. Around the layers, the logits' input is gathered and
  its gradient scattered; the embedding's sum is scattered and its gradient gathered. In addition,
  gradients of the norms' scales are summed once, because each device computes them from its own
  tokens only (layers/dense.py).

  Args:
    batch, length, embed_dim, num_layers, model, dtype_bytes, recomputed, references: as in
      `tensor_parallel.traffic_per_step`. With `recomputed`, both inputs of a layer are gathered
      again.
    chunked_loss: whether the loss takes the length in chunks, which all devices compute. The
      gradient of its input is then summed on all devices instead of scattered.
  """
  share, tokens = (model - 1) / model, batch * length
  activation, in_float32 = tokens * embed_dim * dtype_bytes, tokens * embed_dim * 4
  gathered = (4 + (2 if recomputed else 0) + 2 * references) * num_layers * activation
  gathered += (2 + references) * activation
  scattered = (4 + recomputed + 2 * references) * num_layers * activation
  scattered += (references + (1 if chunked_loss else 2)) * in_float32
  summed = in_float32 if chunked_loss else 0
  scales = (2 * num_layers + 1) * embed_dim * 4
  return {
    'all-gather': share * gathered,
    'reduce-scatter': share * scattered,
    'all-reduce': 2 * share * (summed + 3 * (1 + references) * tokens * 4 + scales),
  }
