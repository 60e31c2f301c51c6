"""The sizes of a step on one device, the input of every formula of a plan."""

import dataclasses
import math
from typing import Optional

from t5x_gpu.layers import embedding
from t5x_gpu.layers.backends.choose import Choice, Hardware, choose
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.dpo import policy_of
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.heads import num_loss_chunks
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import Model, config_of, encodes_texts
from t5x_gpu.models.remat import REPEATS_MATMULS, num_full
from t5x_gpu.models.transformer import attention_need, layers_per_iteration
from t5x_gpu.tools.planning.gpu_targets import GpuTarget
from t5x_gpu.training.program import Program
from t5x_gpu.training.train_step import loss_takes_all_rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackShape:
  """The layers of one kind on one device.

  Attributes:
    name: 'encoder', 'decoder', or 'layers' for a model with one stack.
    num_layers: layers of this device.
    length: positions of a row, on all devices.
    causal: whether positions attend only to earlier ones.
    cross_length: encoder positions that the layers attend to; 0 without cross-attention.
    has_loop: whether the layers run in a loop, which stores what it keeps in stacked arrays.
    stores_all: whether layers without remat store every residual of JAX's backward pass. They do in
      a loop, and behind the barrier of layers that gather weights again in the backward pass
      (`parameters.over_layers`) or add gradients in place (in_place.py). Otherwise XLA computes
      cheap residuals again.
    full_layers: layers that store only their input (`full_remat_layers`).
    choice: backend of the self-attention on the GPU.
  """

  name: str
  num_layers: int
  length: int
  causal: bool
  cross_length: int = 0
  has_loop: bool = True
  stores_all: bool = True
  full_layers: int = 0
  choice: Choice

  @property
  def full_share(self) -> float:
    """Share of the layers that store only their input, regardless of the policy."""
    return self.full_layers / self.num_layers

  @property
  def attention(self) -> str:
    """Name of the backend (layers/backends)."""
    return self.choice.name


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepShape:
  """A training step on one device.

  Attributes:
    config: the model's config; None for a custom model without a TransformerConfig.
    stacks: the model's layers; () without a config.
    rows: rows of this device in a step.
    passes: parts in which the rows go through a layer: microbatches times pipeline microbatches.
    head_passes: parts in which the rows go through the head.
    model, context, stage: sizes of these mesh axes.
    recomputes: what the backward pass recomputes: '', 'attention', or 'layers'.
    keeps: `remat_policy` that decides what is stored.
    by_layer: whether a layer takes all microbatches before the next layer, and is recomputed.
    fills_stacks: whether the arrays that layers keep move once more: into zeros, or in a pipeline's
      ticks.
    sequence_parallel: whether norms and residuals are split over `model`.
    head_rows: rows whose logits the busiest device computes.
    loss_chunks: parts of the length in which it computes logits; 0 for all logits at once.
    num_outcomes: outcomes of the head; 0 if it has no logits per token.
    trains_kernels: whether the backward pass computes gradients of the layers' kernels.
    references: forward passes of a frozen reference model: 1 for DPO, else 0.
    ids_in_parts: ids per pass of each use of the token table, if its rows are looked up in parts
      (layers/embedding.py).
  """

  config: Optional[TransformerConfig]
  stacks: tuple[StackShape, ...]
  rows: int
  passes: int
  head_passes: int
  model: int
  context: int
  stage: int
  recomputes: str
  keeps: str
  by_layer: bool
  fills_stacks: bool
  sequence_parallel: bool
  head_rows: int
  loss_chunks: int
  num_outcomes: int
  trains_kernels: bool
  references: int = 0
  ids_in_parts: tuple[int, ...] = ()

  @property
  def head_length(self) -> int:
    """Positions of a row on this device that the head reads."""
    return self.stacks[-1].length // self.context if self.stacks else 0

  @property
  def item_bytes(self) -> int:
    """Bytes of one activation."""
    return 2 if self.config is None or self.config.dtype in ('bfloat16', 'fp8') else 4

  def repeats(self, stack: StackShape) -> float:
    """How often the backward pass repeats the forward pass of the layers' matmuls, on average.

    A pipeline repeats a stage to keep the activations of one microbatch at a time. Under 'full' and
    'attention', it does not keep the results of matmuls then, and repeats each layer once more.
    """
    twice = self._repeats_twice('full', 'attention')
    return self._average(stack, int(self.recomputes == 'layers') + twice)

  def repeats_attention(self, stack: StackShape) -> float:
    """How often the backward pass repeats the forward pass of attention, on average."""
    twice = self._repeats_twice('full', 'attention', 'offload', 'minimal')
    of_policy = int(bool(self.recomputes)) + twice
    if self.config is not None and self.config.remat_policy == 'attention':
      if stack.attention != 'dense':  # whose backward pass reads all logits
        of_policy = int(self.stage > 1)
    return self._average(stack, of_policy)

  def _average(self, stack: StackShape, of_policy: int) -> float:
    of_full = 2 if self.stage > 1 else 1
    return of_policy + stack.full_share * (of_full - of_policy)

  def _repeats_twice(self, *policies: str) -> int:
    return int(self.stage > 1 and self.config is not None and self.config.remat_policy in policies)

  def tokens(self, stack: StackShape) -> int:
    """Positions of a stack on this device, in a step."""
    return self.rows * stack.length // self.context


def step_shape(
  program: Program, model: Model, *, num_microbatches: int, gpu: GpuTarget
) -> StepShape:
  """Returns the sizes of a step of `program`, whose model is `model`, on `gpu`."""
  layout, mesh = program.layout, program.layout.mesh.shape
  region = layout.region
  policy = policy_of(model)
  inner = policy.model if isinstance(policy, LoraModel) else policy
  config, pipeline = config_of(model), layout.pipeline
  rows = program.step_spec.batch_size // layout.batch_parts
  passes = num_microbatches * (pipeline.num_microbatches if pipeline else 1)
  stacks = () if config is None else _stacks(program, inner, config, gpu, max(rows // passes, 1))
  by_layer = region.by_layer(num_microbatches)
  if by_layer:  # which has one policy for all layers
    stacks = tuple(dataclasses.replace(stack, full_layers=0) for stack in stacks)
  remat = config.remat_policy if config else 'none'
  in_place = num_microbatches > 1 and not region.splits_gradients(num_microbatches)
  recomputes = '' if remat in ('none', 'dots') else 'attention'
  if pipeline or by_layer or remat in REPEATS_MATMULS:
    recomputes = 'layers'
  head_rows = rows
  if pipeline and pipeline.schedule != '1f1b':
    head_rows = math.ceil(rows / mesh['stage'])
  head_passes = 1 if by_layer and loss_takes_all_rows(model) else passes
  token_logits = config is not None and not encodes_texts(model)
  chunks = 0
  if token_logits:
    chunks = num_loss_chunks(
      config,
      max(head_rows // head_passes, 1),
      stacks[-1].length // mesh['context'],
      vocab_parts=mesh['model'],
    )
  shape = StepShape(
    config=config,
    stacks=stacks,
    rows=rows,
    passes=passes,
    head_passes=head_passes,
    model=mesh['model'],
    context=mesh['context'],
    stage=mesh['stage'],
    recomputes=recomputes,
    keeps='full' if pipeline or (by_layer and remat != 'attention') else remat,
    by_layer=by_layer,
    fills_stacks=(in_place and remat == 'none')
    or (not region.layers_ahead and (by_layer or pipeline is not None or passes == 1)),
    sequence_parallel='model' in layout.rules.activations.get('residual_length', ()),
    head_rows=head_rows,
    loss_chunks=chunks,
    num_outcomes=config.vocab_size if token_logits else 0,
    trains_kernels=not isinstance(policy, LoraModel),
    references=int(policy is not model),
  )
  return dataclasses.replace(shape, ids_in_parts=_ids_in_parts(program, shape))


def _ids_in_parts(program: Program, shape: StepShape) -> tuple[int, ...]:
  c, layout = shape.config, program.layout
  ways = layout.mesh.shape['fsdp']
  if c is None or ways == 1 or layout.zero_stage < 3 or layout.pipeline:
    return ()
  if shape.by_layer or shape.model > 1 or c.embed_dim % ways:
    return ()
  ids = [shape.tokens(stack) // shape.passes for stack in shape.stacks]
  size = dict(vocab_size=c.vocab_size, dtype_bytes=shape.item_bytes)
  return tuple(n for n in ids if embedding.sends_less_in_parts(n, **size))


def _stacks(
  program: Program, model: Model, config: TransformerConfig, gpu: GpuTarget, rows: int
) -> tuple[StackShape, ...]:
  mesh = program.layout.mesh.shape
  number, region = program.config.num_microbatches, program.layout.region
  by_layer = region.by_layer(number)
  in_place = number > 1 and not by_layer and not region.splits_gradients(number)
  repeats = program.layout.pipeline.repeats if program.layout.pipeline else 1
  gathers_again = (
    region.reduces_in_backward and program.layout.zero_stage == 3 and not region.layers_ahead
  )
  lengths = {
    name.split('_')[0]: shape[1] for name, shape in program.spec.shapes.items() if len(shape) > 1
  }

  def stack(
    name: str, num_layers: int, length: int, causal: bool, cross_length: int = 0
  ) -> StackShape:
    has_loop = by_layer or num_layers > layers_per_iteration(
      config,
      num_layers,
      num_devices=program.layout.mesh.size,
      platform='gpu',
      is_block=program.layout.pipeline is not None,
      adds_in_place=in_place,
    )
    return StackShape(
      name=name,
      num_layers=num_layers // mesh['stage'],
      full_layers=repeats
      * num_full(
        config.full_remat_layers,
        num_layers=num_layers // mesh['stage'] // repeats,
        of_stack=num_layers,
      ),
      length=length,
      causal=causal,
      cross_length=cross_length,
      has_loop=has_loop,
      stores_all=has_loop or gathers_again,
      choice=_backend(program, config, length, gpu, rows),
    )

  if isinstance(model, EncoderDecoderModel):
    layers = model.num_encoder_layers or config.num_layers
    return (
      stack('encoder', layers, lengths['encoder'], False),
      stack('decoder', config.num_layers, lengths['decoder'], True, lengths['encoder']),
    )
  is_encoder = isinstance(model, EncoderModel)
  length = max(lengths.values(), default=1)
  return (stack('layers', config.num_layers, length, not is_encoder),)


def _backend(
  program: Program, config: TransformerConfig, length: int, gpu: GpuTarget, rows: int
) -> Choice:
  """Returns the attention backend that a stack gets on `gpu`."""
  need, ways = attention_need(config), program.layout.mesh.shape['context']
  method = program.layout.rules.context_method if ways > 1 else None
  need = dataclasses.replace(
    need,
    q_length=length // ways,
    kv_length=length if method == 'gather' else length // ways,
    rows=rows,
    rows_and_heads=rows * (need.rows_and_heads or 1) // program.layout.mesh.shape['model'],
    context=method,
  )
  device = Hardware('gpu', gpu.device_kind, float(gpu.compute_capability), has_packages=True)
  return choose(config.attention, need, device)
