"""Model FLOPs: the matmuls of the model, without recomputation."""

import dataclasses
from collections.abc import Mapping, Sequence

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.layer_stacks import ONLY


def seen_keys(window: int, length: float, *, causal: bool = True) -> float:
  """Returns the number of keys that a query attends to in a layer with a window.

  The count is for a query far from both ends of the row. Without a window it is `length`, also for
  causal attention.

  Args:
    window: number of positions back, including the query's own; 0 for no window.
    length: number of keys of the row.
    causal: whether the window only reaches back; otherwise it reaches equally far ahead.
  """
  if window == 0:
    return length
  return min(window if causal else 2 * window - 1, length)


def transformer_flops_per_token(
  config: TransformerConfig, length: float, *, token_logits: bool = True, causal: bool = True
) -> float:
  """Returns FLOPs of forward and backward per position of a row of `length` tokens.

  Counts 2 FLOPs per weight and position in the forward pass, and twice as many in the backward
  pass. Attention of a layer counts length x length pairs, also if causal, although a kernel may
  skip future pairs. A layer with a window counts length x min(window, length) pairs. The output
  projection counts, the embedding lookup does not. Only the experts that a token uses count; empty
  slots do not.

  Args:
    config: sizes of the stack, and the windows of its layers.
    length: tokens of a row.
    token_logits: whether there are logits over the vocabulary.
    causal: whether windows reach back only, as in a decoder; see `seen_keys`.
  Source: Chowdhery et al. 2022 (PaLM), appendix B: 6 N + 12 L H Q T, which has no windows.
  """
  c = config
  attention_weights = 2 * c.embed_dim * (c.num_heads + c.kv_heads) * c.head_dim
  mlp_weights = (len(c.mlp_activations) + 1) * c.embed_dim * c.mlp_dim
  if c.num_experts:
    mlp_weights = c.num_experts_per_token * mlp_weights + c.embed_dim * c.num_experts
  weights = c.num_layers * (attention_weights + mlp_weights)
  weights += c.embed_dim * c.vocab_size if token_logits else 0
  windows = (c.windows[i % len(c.windows)] for i in range(c.num_layers))
  keys = sum(seen_keys(window, length, causal=causal) for window in windows)
  attention = 12 * c.num_heads * c.head_dim * keys
  return 6.0 * weights + attention


def encoder_decoder_flops_per_row(
  config: TransformerConfig,
  encoder_length: float,
  decoder_length: float,
  *,
  num_encoder_layers: int,
) -> float:
  """Returns FLOPs of forward and backward of a row; windows do not limit cross attention.

  Args:
    config: sizes of the decoder; the encoder has the same width.
    encoder_length: tokens of the inputs.
    decoder_length: tokens of the targets.
    num_encoder_layers: layers of the encoder.
  """
  c = config
  of_encoder = dataclasses.replace(c, num_layers=num_encoder_layers)
  encoder = transformer_flops_per_token(
    of_encoder, encoder_length, token_logits=False, causal=False
  )
  decoder = transformer_flops_per_token(c, decoder_length)
  # Cross attention computes keys and values of the inputs.
  kernels = c.kv_heads * encoder_length + c.num_heads * decoder_length
  pairs = c.num_heads * encoder_length * decoder_length
  cross = c.num_layers * c.head_dim * (12.0 * c.embed_dim * kernels + 12 * pairs)
  return encoder_length * encoder + decoder_length * decoder + cross


def row_lengths(model: Model, shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
  """Returns stack -> number of tokens per row that the stack reads.

  Args:
    model: if it has several stacks, its features begin with the stack names, such as
      'encoder_input_tokens'; for other models, the first feature counts.
    shapes: feature -> [batch, length] or [batch].
  """
  stacks = model.stacks
  sides = {name.split('_')[0]: shape[1] for name, shape in shapes.items() if len(shape) > 1}
  if all(stack in sides for stack in stacks):
    return {stack: sides[stack] for stack in stacks}
  first = next(iter(shapes.values()))
  return {ONLY: first[1] if len(first) > 1 else 1}


def step_tokens(model: Model, shapes: Mapping[str, Sequence[int]]) -> int:
  """Returns the number of tokens of a step with padding, in all stacks together.

  Args:
    model: the model.
    shapes: feature -> [batch, length] or [batch] of the global batch.
  """
  return next(iter(shapes.values()))[0] * sum(row_lengths(model, shapes).values())


def step_flops(model: Model, shapes: Mapping[str, Sequence[int]]) -> float:
  """Returns model FLOPs of a step, without recomputation; arguments as in `step_tokens`."""
  flops_per_row = model.flops_per_row
  return next(iter(shapes.values()))[0] * flops_per_row(row_lengths(model, shapes))
