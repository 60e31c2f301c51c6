"""Model FLOPs: the matmuls of the model, without what the hardware recomputes."""

import dataclasses

from t5x_gpu.models.config import TransformerConfig


def transformer_flops_per_token(
  config: TransformerConfig, length: int, *, token_logits: bool = True
) -> float:
  """Returns FLOPs of forward and backward per position of a row of `length` tokens.

  2 FLOPs per weight and position in the forward pass, twice that in the backward pass. Attention
  counts length x length pairs, also if causal. The output projection counts, the embedding lookup
  does not. Of the experts, only those that a token uses count, and no empty slots.

  Args:
    config: sizes of the stack.
    length: tokens of a row.
    token_logits: whether there are logits over the vocabulary.
  Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T.
  """
  c = config
  attention_weights = 2 * c.embed_dim * (c.num_heads + c.kv_heads) * c.head_dim
  mlp_weights = (len(c.mlp_activations) + 1) * c.embed_dim * c.mlp_dim
  if c.num_experts:
    mlp_weights = c.num_experts_per_token * mlp_weights + c.embed_dim * c.num_experts
  weights = c.num_layers * (attention_weights + mlp_weights)
  weights += c.embed_dim * c.vocab_size if token_logits else 0
  attention = 12 * c.num_layers * c.num_heads * c.head_dim * length
  return 6.0 * weights + attention


def encoder_decoder_flops_per_token(
  config: TransformerConfig, length: int, *, num_encoder_layers: int
) -> float:
  """Returns FLOPs of forward and backward per input token.

  Args:
    config: sizes of the decoder; the encoder has the same width.
    length: tokens of the inputs, and of the targets.
    num_encoder_layers: layers of the encoder.
  """
  c = config
  encoder = transformer_flops_per_token(
    dataclasses.replace(c, num_layers=num_encoder_layers), length, token_logits=False
  )
  cross_weights = 2 * c.embed_dim * (c.num_heads + c.kv_heads) * c.head_dim
  cross = c.num_layers * (6.0 * cross_weights + 12 * c.num_heads * c.head_dim * length)
  return encoder + transformer_flops_per_token(c, length) + cross
