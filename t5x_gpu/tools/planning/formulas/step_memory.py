"""Memory of a step on one GPU, by component: formulas, next to XLA's allocation when it compiles.

Parameters, optimizer state and batch are exact. The rest is the peak of the backward pass: stored
activations, the working set of one layer, gradients, and the loss. XLA chooses which arrays are
live at the same time, so these formulas are within 10% of the total (docs/plan.md#checks).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Optional

import jax

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.runtime.xla import flags
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas.step_shape import StackShape, StepShape
from t5x_gpu.tools.planning.gpu_compile import CompiledMemory
from t5x_gpu.tools.planning.gpu_targets import GpuTarget
from t5x_gpu.training.program import Program, bytes_per_device, gradient_bytes

PARAMETERS, OPTIMIZER, BATCH = 'parameters', 'optimizer state', 'batch'
GRADIENTS, ACTIVATIONS, LAYER = 'gradients', 'stored activations', 'working set of a layer'
MICROBATCHES = 'inputs and gradients of a layer'
WEIGHTS, STACK, LOSS = 'weights of a layer', 'copy of the largest stack', 'logits and loss'
FRAGMENTATION = 'fragmentation'
_ARGUMENTS = (PARAMETERS, OPTIMIZER, BATCH)
# Share of the GPU's memory if no preset sets it: XLA's default.
_DEFAULT_FRACTION = 0.75
# Gradients of a layer in float32 that accumulation by layer keeps: of the first microbatch; the sum
# of the others, and the zeros that it starts from; of the layer before, which are being reduced.
_GRADIENTS_BY_LAYER = 4


@dataclasses.dataclass(frozen=True)
class MemoryUse:
  """The memory of a step on one GPU, in bytes.

  Attributes:
    components: name -> bytes by formula; XLA's pool holds all of them.
    compiled: XLA's allocation; None if the step was not compiled for the GPU.
    gpu_bytes: memory of the GPU.
    pool_bytes: the part that XLA manages; CUDA, cuBLAS and NCCL's buffers use the rest.
  """

  components: Mapping[str, int]
  compiled: Optional[CompiledMemory]
  gpu_bytes: int
  pool_bytes: int

  @property
  def argument_bytes(self) -> int:
    """Bytes of parameters, optimizer state and batch."""
    return sum(self.components[name] for name in _ARGUMENTS)

  @property
  def formula_bytes(self) -> int:
    """Bytes of all components except the reserve for fragmentation."""
    return sum(self.components.values()) - self.components[FRAGMENTATION]

  @property
  def step_bytes(self) -> int:
    """Bytes of the arrays of a step: as compiled, if it was compiled."""
    return self.formula_bytes if self.compiled is None else self.compiled.total_bytes

  @property
  def needed_bytes(self) -> int:
    """Bytes that XLA's pool must have, with the reserve for fragmentation."""
    return self.step_bytes + self.components[FRAGMENTATION]

  @property
  def left_bytes(self) -> int:
    """Bytes left in XLA's pool; negative if the step does not fit."""
    return self.pool_bytes - self.needed_bytes

  @property
  def fits(self) -> bool:
    return self.left_bytes >= 0


def memory_use(
  program: Program,
  shape: StepShape,
  *,
  gpu: GpuTarget,
  preset: str,
  assumed: Assumptions,
  compiled: Optional[CompiledMemory] = None,
) -> MemoryUse:
  """Returns the memory of a step.

  Args:
    program, shape: the step.
    gpu: the GPU whose memory is used.
    preset: `train.xla_preset`, which sets XLA's share of the memory.
    assumed: the reserve for fragmentation.
    compiled: XLA's allocation for this GPU.
  """
  components = _components(program, shape)
  temporary = sum(components.values()) - sum(components[name] for name in _ARGUMENTS)
  if compiled is not None:
    temporary = compiled.temporary_bytes
  components[FRAGMENTATION] = int(assumed.fragmentation * temporary)
  topology = program.layout.topology
  fraction = pool_fraction(
    preset, gpu=gpu, num_hosts=topology.num_hosts, num_gpus=topology.num_devices
  )
  return MemoryUse(components, compiled, gpu.memory_bytes, int(fraction * gpu.memory_bytes))


def pool_fraction(preset: str, *, gpu: GpuTarget, num_hosts: int, num_gpus: int) -> float:
  """Returns XLA's share of a GPU's memory in a run with `preset`."""
  applied = flags.prepare_environment(
    preset, gpu=gpu.device_kind, num_hosts=num_hosts, num_gpus=num_gpus, environ={}
  )
  return float(applied.env.get('XLA_CLIENT_MEM_FRACTION', _DEFAULT_FRACTION))


def _components(program: Program, shape: StepShape) -> dict[str, int]:
  """Returns all components except the reserve: arguments, and what the largest peak holds."""
  state, layout = program.abstract_state, program.layout
  table = layout.rules.state if _splits_early(program) else layout.rules.parameters
  gradients = gradient_bytes(program, table)
  if layout.pipeline and layout.zero_stage > 1:
    gradients *= layout.mesh.shape['fsdp']
  found = {
    PARAMETERS: bytes_per_device(state.params),
    OPTIMIZER: bytes_per_device(state.opt_state) + bytes_per_device(state.step),
    BATCH: bytes_per_device(program.abstract_batch),
    GRADIENTS: gradients,
  }
  if shape.config is None:
    return found
  if shape.by_layer:
    found[MICROBATCHES] = _of_all_microbatches(shape, shape.config)
  peaks = (_in_ticks,) if layout.pipeline else (_in_layers, _in_loss)
  held = [peak(program, shape, shape.config, gradients) for peak in peaks]
  return found | max(held, key=lambda components: sum(components.values()))


def _in_ticks(
  program: Program, shape: StepShape, c: TransformerConfig, gradients: int
) -> dict[str, int]:
  """Returns what a pipeline's ticks hold: each computes layers and loss, from converted kernels."""
  of_layers = bytes_of_all_layers(program)
  of_layer, stack = _weights(program, shape)
  return {
    ACTIVATIONS: _activations(program, shape, c),
    GRADIENTS: gradients + of_layers * program.layout.region.sums_in_last_tick,
    LAYER: _working_set(shape, c),
    WEIGHTS: of_layer + stack + _converted(program, shape),
    LOSS: sum(_head(program, shape, c)),
  }


def _in_layers(
  program: Program, shape: StepShape, c: TransformerConfig, gradients: int
) -> dict[str, int]:
  """Returns what the backward pass of the last layer holds."""
  layout = program.layout
  of_layer, stack = _weights(program, shape)
  _, head = _head(program, shape, c)
  if shape.ids_in_parts or shape.by_layer:
    # The logits' gathered kernel is freed, its gradient not yet sent.
    head = head * 4 // (shape.item_bytes + 4)
  summed = 0
  if _loops_in_loop(program, shape) and (layout.region.layers_ahead or _splits_early(program)):
    # A loop over layers that sums gradients over devices writes the sums to a second stack.
    params = bytes_per_device(program.abstract_state.params)
    summed = gradients * bytes_of_all_layers(program) // max(params, 1)
  return {
    ACTIVATIONS: _activations(program, shape, c),
    GRADIENTS: gradients + summed,
    LAYER: _working_set(shape, c),
    WEIGHTS: of_layer + _kept_kernels(program, shape),
    STACK: stack,
    LOSS: head if layout.mesh.shape['fsdp'] > 1 else 0,
  }


def _in_loss(
  program: Program, shape: StepShape, c: TransformerConfig, gradients: int
) -> dict[str, int]:
  """Returns what the loss holds, with the gradients of earlier microbatches."""
  logits, kernel = _head(program, shape, c)
  if not _by_microbatch(program, shape):
    split = program.layout.mesh.shape['fsdp'] > 1
    gradients = 0 if split else min(4 * kernel // shape.item_bytes, gradients)  # the kernel's
  weights, stack = _kept_kernels(program, shape), 0
  if shape.by_layer:
    weights, stack = _gathered(program, shape), _weights(program, shape)[1]
  return {
    ACTIVATIONS: _activations(program, shape, c, in_loss=True),
    GRADIENTS: gradients,
    LAYER: 0,
    WEIGHTS: weights,
    STACK: stack,
    LOSS: logits + kernel,
  }


def _splits_early(program: Program) -> bool:
  """Returns whether the sum over microbatches has the optimizer's layout."""
  return program.layout.region.splits_gradients(program.config.num_microbatches)


def _by_microbatch(program: Program, shape: StepShape) -> bool:
  return shape.passes > 1 and not shape.by_layer and not program.layout.pipeline


def _loops_in_loop(program: Program, shape: StepShape) -> bool:
  """Returns whether a loop over microbatches contains a loop over layers."""
  return _by_microbatch(program, shape) and any(stack.has_loop for stack in shape.stacks)


def _activations(
  program: Program, shape: StepShape, c: TransformerConfig, *, in_loss: bool = False
) -> int:
  """Returns the bytes that all layers keep for the backward pass, at a peak.

  XLA allocates stacks without values at the start of a step. So it holds the stacks of the loop
  over microbatches and of the last microbatch at once: without overlap_layers always, but for
  stacks that start as zeros (in_place.py); with it, until the loop has computed its losses.
  """
  layout = program.layout
  found = int(sum(_stored(program, shape, c, stack) for stack in shape.stacks))
  if not _loops_in_loop(program, shape):
    return found
  if layout.region.layers_ahead:
    return found * (2 if in_loss and not _splits_early(program) else 1)
  return found * (2 if layout.mesh.size > 1 and c.remat_policy != 'none' else 1)


def _converted(program: Program, shape: StepShape) -> int:
  """Returns the bytes of all layers' kernels, converted for the matmuls."""
  return bytes_of_all_layers(program) // 2 if shape.item_bytes < 4 else 0


def _kept_kernels(program: Program, shape: StepShape) -> int:
  """Returns the bytes of converted kernels that the backward pass reads again.

  With microbatches and without a loop over layers, XLA does not convert them twice.
  """
  has_loop = any(stack.has_loop for stack in shape.stacks)
  keeps = _by_microbatch(program, shape) and not has_loop and not _splits_early(program)
  return _converted(program, shape) if keeps else 0


def bytes_of_all_layers(program: Program) -> int:
  """Returns the bytes of the layers' parameters on one device."""
  pairs = zip(jax.tree.leaves(program.abstract_state.params), jax.tree.leaves(program.names.params))
  return bytes_per_device([array for array, names in pairs if 'layers' in names.names])


def _width(shape: StepShape, c: TransformerConfig) -> tuple[float, float, float]:
  """Returns features per token on one device: residual stream, queries with keys, MLP's hidden."""
  residual = c.embed_dim / (shape.model if shape.sequence_parallel else 1)
  keys = 2 * c.kv_heads / min(shape.model, c.kv_heads)
  heads = (c.num_heads / shape.model + keys) * c.head_dim
  hidden = c.mlp_dim / shape.model
  if c.num_experts:
    factor = c.expert_capacity_factor
    hidden *= min(c.num_experts_per_token * (1 if factor is None else factor), c.num_experts)
  return residual, heads, hidden


def kept_features(shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  """Returns the features per token that a layer of a stack keeps for the backward pass."""
  residual, heads, hidden = _width(shape, c)
  inputs, blocks = len(c.mlp_activations), 3 if stack.cross_length else 2
  queries = c.num_heads / shape.model * c.head_dim
  matmuls = (blocks - 1) * (heads + residual) + inputs * hidden
  kept = {
    'full': residual,
    'attention': residual + (blocks - 1) * queries,
    'offload': 0.0,
    'minimal': residual + matmuls,
    'dots': residual + matmuls + (blocks - 1) * queries,
    'none': _all_of_a_layer(c, residual, heads, queries, hidden, blocks, _stores_all(c, stack)),
  }[shape.keeps]
  return kept + stack.full_share * (residual - kept)


def _stored(program: Program, shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  """Returns the bytes that the layers of a stack keep for the backward pass."""
  width, tokens = kept_features(shape, c, stack), shape.tokens(stack)
  pipeline = program.layout.pipeline
  if pipeline:
    of_microbatch = shape.item_bytes * tokens / pipeline.num_microbatches
    in_tick = kept_features(dataclasses.replace(shape, keeps=c.remat_policy), c, stack)
    in_tick *= stack.num_layers / pipeline.num_blocks
    return (pipeline.kept_inputs * width + in_tick) * of_microbatch
  if shape.passes > 1 and not shape.by_layer:
    tokens /= shape.passes
  bytes_ = shape.item_bytes * stack.num_layers * tokens * width
  if stack.attention == 'dense' and shape.keeps in ('none', 'dots'):
    layers = stack.num_layers - stack.full_layers
    bytes_ += layers * _attention_logits(shape, c, stack)
  elif _keeps_bias_gradients(shape, c, stack):
    heads = shape.rows / shape.passes * c.num_heads / shape.model
    bytes_ += stack.num_layers / 2 * shape.item_bytes * heads * stack.length**2 / shape.context
  return bytes_


def _stores_all(c: TransformerConfig, stack: StackShape) -> bool:
  return stack.stores_all or c.num_experts > 0  # with experts, this counts more than XLA keeps


def _keeps_bias_gradients(shape: StepShape, c: TransformerConfig, stack: StackShape) -> bool:
  """Returns whether about half of the layers keep each row's gradients of the relative bias.

  A kernel writes them, and XLA adds the rows late; of two stacks, the last one is at the peak.
  """
  is_kernel = stack.attention not in ('dense', 'chunked')
  has_bias = c.relative_bias != 'none'
  return has_bias and is_kernel and not _stores_all(c, stack) and stack is shape.stacks[-1]


# Hidden features that the backward pass of an activation reads, its input included; and their
# number where XLA computes cheap ones again from the input.
_STORED_BY_ACTIVATION = {'gelu': 6, 'gelu_exact': 4, 'silu': 3, 'relu': 2, 'linear': 1}
_LEFT_BY_ACTIVATION = {**_STORED_BY_ACTIVATION, 'gelu': 2, 'silu': 1, 'relu': 1}


def _all_of_a_layer(
  c: TransformerConfig,
  residual: float,
  heads: float,
  queries: float,
  hidden: float,
  blocks: int,
  stores_all: bool,
) -> float:
  """Returns the features per token that a layer without remat keeps, float32 ones twice."""
  if stores_all:
    by_activation, of_block = _STORED_BY_ACTIVATION, 2.5
    rotated = 2 / 3 * heads if any(c.rope_of_layers) else 0.0
  else:  # the inputs of norms, and their outputs
    by_activation, of_block = _LEFT_BY_ACTIVATION, 2.0
    rotated = 0.0
  kept = sum(by_activation.get(name, 4) for name in c.mlp_activations)
  if not stores_all and tuple(c.mlp_activations) == ('gelu',):
    kept += 1  # its output; a gated MLP keeps the product
  mlp = hidden * (kept + (len(c.mlp_activations) > 1))
  return blocks * of_block * residual + (blocks - 1) * (heads + queries + rotated) + mlp


def _attention_logits(shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  """Returns the bytes of a layer's attention logits in float32, for one pass.

  Without a kernel, a ring over `context` computes blocks of 1024 positions; XLA keeps all logits of
  one hop twice, their masks, and some arrays of the size of a block.
  """
  if stack.attention != ('dense' if shape.context == 1 else 'chunked'):
    return 0.0
  rows, heads = shape.rows / shape.passes, c.num_heads / shape.model
  if shape.context == 1:
    return 4 * rows * heads * stack.length**2
  local = stack.length / shape.context
  return rows * heads * (10 * local**2 + 20 * min(local, 1024) ** 2)


def _working_set(shape: StepShape, c: TransformerConfig) -> int:
  """Returns the bytes of activations and their gradients in the backward pass of one layer."""
  return int(max(_working_set_of(shape, c, stack) for stack in shape.stacks))


def _working_set_of(shape: StepShape, c: TransformerConfig, stack: StackShape) -> float:
  residual, heads, hidden = _width(shape, c)
  tokens = shape.tokens(stack) / shape.passes
  width = 5 * residual + 2 * heads + (len(c.mlp_activations) + 2) * hidden
  if shape.sequence_parallel:  # gathered inputs, and sums in float32 before they are scattered
    splits_rows = shape.rows // shape.passes % shape.model == 0
    width += (4.5 if splits_rows else 7) * c.embed_dim  # positions: transposed, too
  return shape.item_bytes * tokens * width + _attention_logits(shape, c, stack)


def _of_all_microbatches(shape: StepShape, c: TransformerConfig) -> int:
  """Returns the bytes of a layer's inputs and gradients under accumulation by layer.

  The other layers' inputs are stored activations.
  """
  bytes_of_token = shape.item_bytes * _width(shape, c)[0]
  tokens = max(shape.tokens(stack) for stack in shape.stacks)
  rows = bytes_of_token * tokens
  encoded = shape.rows * max(stack.cross_length for stack in shape.stacks) // shape.context
  # A loop over all microbatches but the first reads the layer's inputs and the gradients of its
  # outputs, and writes gradients of its inputs into zeros, which XLA keeps; where layers read an
  # encoder's output, the same again for it. XLA computes the gradient of the last norm's scale
  # after the layers, from the norm's inputs and the gradients of its outputs. The loss has computed
  # these gradients, which no sequence parallelism splits.
  in_loop = 4 * (1 - 1 / shape.passes) * (rows + bytes_of_token * encoded)
  return int(in_loop + rows + shape.item_bytes * c.embed_dim * tokens)


def _weights(program: Program, shape: StepShape) -> tuple[int, int]:
  """Returns the bytes of (weights and gradients of layers, a copy of the largest stack of weights).

  The copy has the order in which fsdp gathers; without a loop, there is none.
  """
  gradients = int(_splits_early(program))
  if shape.by_layer:
    gradients = _GRADIENTS_BY_LAYER * shape.trains_kernels
  parameters, stack = _of_a_layer(program)
  has_loop = any(each.has_loop for each in shape.stacks)
  return _gathered(program, shape) + int(parameters * 4 * gradients), stack * has_loop


def _gathered(program: Program, shape: StepShape) -> int:
  """Returns the bytes of two layers' weights, gathered over fsdp."""
  return int(_of_a_layer(program)[0] * 2 * shape.item_bytes)


def _of_a_layer(program: Program) -> tuple[float, int]:
  """Returns (a layer's parameters, the bytes of a copy of the largest stack of parameters).

  The layer is whole over fsdp. The copy has the order in which fsdp gathers.
  """
  layout = program.layout
  ways = layout.mesh.shape['fsdp'] if layout.zero_stage == 3 else 1
  of_layer, largest = 0.0, 0
  for array, axis_names in zip(
    jax.tree.leaves(program.abstract_state.params), jax.tree.leaves(program.names.params)
  ):
    if 'layers' in axis_names.names:
      local = array.sharding.shard_shape(array.shape)
      number = local[axis_names.names.index('layers')]
      of_layer += ways * math.prod(local) / number
      largest = max(largest, 4 * math.prod(local))
  return of_layer, int(largest * (ways > 1))


def _head(program: Program, shape: StepShape, c: TransformerConfig) -> tuple[int, int]:
  """Returns (logits of one chunk with their gradient, the head's kernel and its gradient)."""
  if not shape.num_outcomes:
    return 0, 0
  tokens = shape.head_rows / shape.head_passes * shape.head_length
  columns = shape.num_outcomes / shape.model
  logits = 2.5 * 4 * tokens * columns / max(shape.loss_chunks, 1)
  split = program.layout.mesh.shape['fsdp'] > 1  # a whole gradient in addition to the stored part
  return int(logits), int(c.embed_dim * columns * (shape.item_bytes + 4 * split))
