"""Model FLOPs: the matmuls that the mathematics needs, whatever the hardware recomputes."""

from t5x_gpu.models.config import TransformerConfig


def transformer_flops_per_token(config: TransformerConfig, length: int) -> float:
  """Returns FLOPs of forward and backward per position of a row of `length`.

  2 FLOPs per weight and position in the forward pass, twice that in the backward pass; attention
  counts the full length x length square, without a discount for the causal half. Looking up
  embeddings counts nothing, the output projection does. Of experts, those that a token uses count,
  without the slots that stay empty.
  Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T.
  """
  c = config
  attention_weights = 4 * c.embed_dim * c.num_heads * c.head_dim
  mlp_weights = (len(c.mlp_activations) + 1) * c.embed_dim * c.mlp_dim
  if c.num_experts:
    mlp_weights = c.num_experts_per_token * mlp_weights + c.embed_dim * c.num_experts
  weights = c.num_layers * (attention_weights + mlp_weights) + c.embed_dim * c.vocab_size
  attention = 12 * c.num_layers * c.num_heads * c.head_dim * length
  return 6.0 * weights + attention
