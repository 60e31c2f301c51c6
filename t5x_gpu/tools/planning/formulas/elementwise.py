"""What kernels other than matmuls and attention read and write on one device in a step.

A fused kernel reads and writes whole arrays. How often it does was counted in steps compiled for
GPUs (tests/aot/recorded.json), and is a constant here; sizes follow from the model and the layout.
"""

import dataclasses

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.runtime.xla.presets import LARGE_LAYER_BYTES
from t5x_gpu.tools.planning.formulas.step_memory import bytes_of_all_layers, kept_features
from t5x_gpu.tools.planning.formulas.step_shape import StackShape, StepShape
from t5x_gpu.training.program import Program, bytes_per_device, gradient_bytes, layer_bytes


@dataclasses.dataclass(frozen=True)
class Passes:
  """How often the kernels of a step read or write an array, or the bytes of all these passes.

  Attributes:
    forward, backward: in the forward and the backward pass.
    again: in the backward pass, for parts of the forward pass that it repeats.
  """

  forward: float = 0.0
  backward: float = 0.0
  again: float = 0.0

  def __add__(self, other: 'Passes') -> 'Passes':
    return Passes(*map(sum, zip(dataclasses.astuple(self), dataclasses.astuple(other))))

  def __mul__(self, factor: float) -> 'Passes':
    return Passes(*(factor * number for number in dataclasses.astuple(self)))

  @property
  def total(self) -> float:
    return self.forward + self.backward + self.again


# Passes over the residual stream by the sum and the norm of a block, by its second norm, and by the
# second sum of a LayerNorm.
_BLOCK, _SECOND_NORM, _LAYER_NORM = Passes(3.5, 9.5, 3.5), Passes(1, 6, 1), Passes(0, 2, 0)
# Passes over the residual stream gathered over `model`, by the sum of the gradients of the inputs
# of queries, keys and values.
_GATHERED = Passes(0, 3, 0)
# Passes over queries and keys by rotary positions, by their norms, and by the sums over the query
# heads that share a key.
_ROTARY, _HEAD_NORM, _GROUPED = Passes(2, 3.6, 2), Passes(2, 4, 2), Passes(0, 2, 0)
# Passes over an MLP's hidden features by an activation with one input, by one with a gate, and by
# XLA's second kernel for the gradient of GELU.
_ACTIVATION, _GATED, _GELU = Passes(2, 3, 2), Passes(3, 5, 1), Passes(0, 2, 0)
# Passes over queries, keys and values with a bias; and over all results with one, by the sum of its
# gradient.
_BIASED_HEADS, _BIAS = Passes(2, 0, 2), Passes(0, 1, 0)
# Passes over what layers keep for the backward pass: copies into a loop's stacks, and out of them;
# and zeros in stacks of a loop that JAX differentiates.
_IN, _OUT, _ZEROS = 2.0, 1.4, 1.0
# Passes over what layers without a loop store behind a barrier (`StackShape.stores_all`): in steps
# of eight models, compiled with and without overlap_layers, 1.9 to 3.7.
_BEHIND_BARRIER = 2.5
# Passes over a layer's inputs, outputs and their gradients by its loop over microbatches.
_MICROBATCH = 10.0
# Bytes per parameter: to convert it; to write its gradient into the stack of all layers; or to add
# it there to earlier microbatches' gradients; and to copy it, gathered, forward and backward.
_CONVERTED, _GRADIENT, _ADDED, _COPIED = 6.0, 6.0, 12.0, 16.0
# Copies of a kernel out of the stack of a pipeline's stage in a tick, each a read and a write.
_COPIES_OF_TICK = 3
# Passes over an operand in 16 bits by its largest value and its conversion to 8 bits: over inputs;
# over inputs again in the backward pass, which knows their scales; and over gradients, most of
# whose largest values the kernels that compute them find.
_CONVERSION = Passes(forward=2.3, again=0.7, backward=1.1)


def of_layers(shape: StepShape, c: TransformerConfig, stack: StackShape) -> Passes:
  """Returns the bytes of norms, residuals, activations, rotary positions and biases of a stack."""
  residual, queries, keys, hidden = _features(shape, c)
  blocks, inputs = 3 if stack.cross_length else 2, len(c.mlp_activations)
  has_bias = c.attention_bias != 'none'
  norm = _BLOCK + _SECOND_NORM * (c.norm_position == 'sandwich') + _LAYER_NORM * (c.norm == 'layer')
  heads = _ROTARY * any(c.rope_of_layers) + _HEAD_NORM * c.qk_norm + _GROUPED * (keys < queries)
  mlp = _GATED if inputs > 1 else _ACTIVATION
  mlp += _GELU * any('gelu' in name for name in c.mlp_activations)
  biased = (queries + 2 * keys) * has_bias + residual * (c.attention_bias == 'all')
  biased += (inputs * hidden + residual) * c.mlp_bias
  of_token = (
    norm * (blocks * residual)
    + heads * (queries + keys)
    + mlp * hidden
    + _BIASED_HEADS * ((queries + 2 * keys) * has_bias)
    + _BIAS * biased
    + _GATHERED * (c.embed_dim * shape.sequence_parallel)
  )
  tokens = shape.tokens(stack) * stack.num_layers
  sums = Passes()
  if c.relative_bias != 'none' and stack.attention not in ('dense', 'chunked'):
    # The kernel's gradient of the bias has all rows, in float32.
    pairs = shape.tokens(stack) * stack.length * stack.num_layers
    sums = Passes(0, 4.0 * pairs * c.num_heads / shape.model, 0)
  found = of_token * (shape.item_bytes * tokens) + sums
  if shape.keeps == 'none':
    return dataclasses.replace(found, again=stack.full_share * found.again)
  # A pipeline repeats a stage, and then what the policy does not keep.
  twice = shape.stage > 1 and (1.0 if c.remat_policy != 'none' else stack.full_share)
  return dataclasses.replace(found, again=(1 + twice) * found.again)


def of_stored(shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  """Returns the bytes that move because layers store arrays for the backward pass.

  A loop over layers copies them into stacks, and out of them. Without a loop, a barrier makes XLA
  write and read arrays that it would otherwise compute again.
  """
  tokens = shape.tokens(stack) * stack.num_layers
  if not stack.has_loop:
    left = dataclasses.replace(stack, stores_all=False)
    stored = kept_features(shape, c, stack) - kept_features(shape, c, left)
    return shape.item_bytes * tokens * _BEHIND_BARRIER * stored
  if shape.stage > 1:  # a tick keeps what the backward pass of its microbatch reads
    shape = dataclasses.replace(shape, keeps=c.remat_policy)
  kept, (_, _, _, hidden) = kept_features(shape, c, stack), _features(shape, c)
  copied_out = kept
  if shape.keeps in ('dots', 'minimal') and len(c.mlp_activations) > 1:
    # Read where they are (layers/dense.py).
    copied_out -= (1 - stack.full_share) * len(c.mlp_activations) * hidden
  found = (_IN + _ZEROS * shape.fills_stacks) * kept + _OUT * copied_out
  if shape.by_layer:  # each layer takes its microbatches out of an array of all
    found += _MICROBATCH * c.embed_dim
  return shape.item_bytes * tokens * found


def of_conversions(shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  """Returns the bytes of conversions to FP8: of inputs, forward and backward, and of gradients."""
  if not c.fp8:
    return 0.0
  residual, queries, keys, hidden = _features(shape, c)
  blocks = 3 if stack.cross_length else 2
  inputs = blocks * residual + (blocks - 1) * queries + hidden
  gradients = blocks * residual + (blocks - 1) * (queries + 2 * keys)
  gradients += len(c.mlp_activations) * hidden
  tokens = shape.tokens(stack) * stack.num_layers
  of_input, of_gradient = _CONVERSION.forward + _CONVERSION.again, _CONVERSION.backward
  return shape.item_bytes * tokens * (of_input * inputs + of_gradient * gradients)


def _features(shape: StepShape, c: TransformerConfig) -> tuple[float, float, float, float]:
  """Returns features per token on one device: residual stream, queries, keys, MLP's hidden."""
  residual = c.embed_dim / (shape.model if shape.sequence_parallel else 1)
  queries = c.num_heads * c.head_dim / shape.model
  keys = c.kv_heads * c.head_dim / min(shape.model, c.kv_heads)
  hidden = c.mlp_dim / shape.model * (c.num_experts_per_token if c.num_experts else 1)
  return residual, queries, keys, hidden


def of_logits(tokens: float, columns: float) -> float:
  """Returns the bytes of the loss: float32 logits read twice, their gradient in bfloat16."""
  return 10.0 * tokens * columns


def of_embedding(shape: StepShape, c: TransformerConfig) -> float:
  """Returns the bytes of rows, read and written; of their gradients, added in float32."""
  embedded = sum(shape.tokens(stack) for stack in shape.stacks) * c.embed_dim
  return embedded * (4 + shape.item_bytes + 3 * 4)


def of_weights(program: Program, shape: StepShape) -> float:
  """Returns the bytes of weights converted for the matmuls, and of gradients for the optimizer."""
  layout = program.layout
  held = bytes_per_device(program.abstract_state.params) / 4
  gathers = layout.mesh.shape['fsdp'] > 1 and layout.zero_stage == 3
  passes = 1 if shape.by_layer else shape.passes
  if layout.pipeline:
    of_layers = bytes_of_all_layers(program) / 4
    copied = 2 * _COPIES_OF_TICK * (1 if shape.config.fp8 else shape.item_bytes)
    others = _CONVERTED + _ADDED if layout.pipeline.schedule == '1f1b' else _CONVERTED
    in_ticks = (copied + _ADDED) * of_layers + others * (held - of_layers)
    return in_ticks * passes + _CONVERTED * of_layers
  layers = sum(stack.num_layers for stack in shape.stacks if stack.has_loop)
  of_layers = layer_bytes(program) / 2 * layers / max(len(shape.stacks), 1)
  adds = passes > 1 or shape.by_layer
  of_pass = _ADDED + _GRADIENT * shape.by_layer if adds else _GRADIENT
  share = max((stack.full_share for stack in shape.stacks), default=0.0)
  again = 1.0 if gathers or shape.recomputes == 'layers' else share
  converted = _CONVERTED * (1 + again)
  found = of_pass * held * passes
  found += converted * held * (1 if shape.config is not None and shape.config.fp8 else passes)
  if gathers and layout.region.layers_ahead and layer_bytes(program) < LARGE_LAYER_BYTES:
    # Without double buffering, each iteration copies the layer's gathered weights.
    found += _COPIED * of_layers * passes
  return found


def of_optimizer(program: Program) -> float:
  """Returns the bytes of the update, and of the norms of gradients and parameters."""
  state = program.abstract_state
  params, opt_state = bytes_per_device(state.params), bytes_per_device(state.opt_state)
  gradients = gradient_bytes(program, program.layout.rules.state)
  trained = program.num_trained / max(program.num_params, 1)
  return 1.5 * gradients + 2.0 * opt_state + 3.0 * params * trained
