"""The computation of one device in a step: FLOPs and bytes of memory traffic, by part of the model.

FLOPs are counted as run: causal attention counts the pairs that a kernel computes, and
recomputation in the backward pass counts again. Bytes are counted for kernels that are not matrix
products; each of their arrays is read and written once, as XLA fuses them.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import jax

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import seen_keys, step_flops
from t5x_gpu.models.model import Model
from t5x_gpu.tools.planning.formulas import elementwise
from t5x_gpu.tools.planning.formulas.step_shape import StackShape, StepShape
from t5x_gpu.training.program import Program

ATTENTION_PROJECTIONS = 'attention projections'
ATTENTION = 'attention'
MLP = 'MLP'
EXPERTS = 'experts'
LOGITS = 'logits and loss'
ELEMENTWISE = 'norms, activations, residuals'
STORED = 'stored activations'
CONVERSIONS = 'conversions to FP8'
EMBEDDING = 'embedding'
WEIGHTS_AND_GRADIENTS = 'weights and gradients'
OPTIMIZER = 'optimizer'
MODEL = 'model'
# Backward attention kernels compute five matrix products, including the forward pass's logits.
_ATTENTION_BACKWARD = 2.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
  """Kernels of one kind for one part of the model, on one device in a step.

  Attributes:
    part: one of the names above.
    kind: 'gemm', 'fp8_gemm', 'attention' or 'memory'.
    flops: FLOPs of all runs.
    num_bytes: bytes read and written by all runs.
    runs: number of kernel runs.
    recomputed_flops: the part of `flops` that repeats the forward pass.
    recomputed_bytes: the part of `num_bytes` that repeats the forward pass.
    size: (rows, inner, columns) of a matrix product; () for other kinds.
    backend: attention backend (layers/backends).
    in_layers: whether a pipeline's bubble makes it longer.
  """

  part: str
  kind: str
  flops: float = 0.0
  num_bytes: float = 0.0
  runs: float = 1
  recomputed_flops: float = 0.0
  recomputed_bytes: float = 0.0
  size: tuple[int, ...] = ()
  backend: str = ''
  in_layers: bool = True


def step_work(shape: StepShape, program: Program, model: Model) -> list[Work]:
  """Returns the whole computation of the busiest device in a step."""
  found: list[Work] = []
  if shape.config is None:
    flops = step_flops(model, program.step_spec.shapes)
    found.append(Work(part=MODEL, kind='gemm', flops=flops / program.layout.mesh.size))
  for stack in shape.stacks:
    found += _layers(shape, shape.config, stack)
  if shape.config is not None:
    found += _ends(shape, shape.config)
  return [*found, *_update(program, shape)]


def elementwise_bytes(work: Sequence[Work]) -> dict[str, float]:
  """Returns part -> bytes of its kernels other than matrix products and attention kernels."""
  found: dict[str, float] = {}
  for w in filter(_is_elementwise, work):
    found[w.part] = found.get(w.part, 0.0) + w.num_bytes
  return {part: num_bytes for part, num_bytes in found.items() if num_bytes}


def with_elementwise_bytes(work: Sequence[Work], num_bytes: Mapping[str, float]) -> list[Work]:
  """Returns `work` with `num_bytes` as its `elementwise_bytes`."""
  formula = elementwise_bytes(work)

  def scaled(w: Work) -> Work:
    if not _is_elementwise(w) or w.part not in formula:
      return w
    ratio = num_bytes.get(w.part, 0.0) / formula[w.part]
    return dataclasses.replace(
      w, num_bytes=ratio * w.num_bytes, recomputed_bytes=ratio * w.recomputed_bytes
    )

  others = [
    Work(part=part, kind='memory', num_bytes=size, in_layers=part in (ELEMENTWISE, STORED))
    for part, size in num_bytes.items()
    if part not in formula
  ]
  return [*map(scaled, work), *others]


def _is_elementwise(w: Work) -> bool:
  return w.kind in ('memory', 'attention')  # attention with a kernel counts no elementwise bytes


def _layers(shape: StepShape, c: TransformerConfig, stack: StackShape) -> Iterator[Work]:
  """Yields the work of the layers of a stack."""
  queries, keys = c.num_heads * c.head_dim // shape.model, c.kv_heads * c.head_dim
  keys //= min(shape.model, c.kv_heads)  # fewer heads than devices: each computes one
  tokens = shape.tokens(stack)
  yield from _gemms(
    shape, stack, ATTENTION_PROJECTIONS, tokens, [(c.embed_dim, queries + 2 * keys, 1)]
  )
  yield from _gemms(shape, stack, ATTENTION_PROJECTIONS, tokens, [(queries, c.embed_dim, 1)])
  if stack.cross_length:
    of_encoder = shape.rows * stack.cross_length // shape.context
    ends = [(c.embed_dim, queries, 1), (queries, c.embed_dim, 1)]
    yield from _gemms(shape, stack, ATTENTION_PROJECTIONS, tokens, ends)
    of_keys = [(c.embed_dim, 2 * keys, 1)]
    yield from _gemms(shape, stack, ATTENTION_PROJECTIONS, of_encoder, of_keys)
  yield from _attention(shape, c, stack)
  yield from _mlp(shape, c, stack, tokens)
  moved, stored = elementwise.of_layers(shape, c, stack), elementwise.of_stored(shape, c, stack)
  # `dots` repeats cheap operations everywhere, and 'none' only in layers under 'full'.
  of_policy = 1.0 if shape.recomputes or shape.keeps == 'none' else stack.full_share
  repeats = 1 + shape.references
  runs = stack.num_layers * shape.passes
  yield Work(
    part=ELEMENTWISE,
    kind='memory',
    num_bytes=moved.total + shape.references * moved.forward + (not stack.has_loop) * stored,
    recomputed_bytes=moved.again * of_policy,
    runs=runs * (12 * (repeats + bool(moved.again)) + 18),
  )
  for part, num_bytes in (
    (STORED, stack.has_loop * stored),
    (CONVERSIONS, elementwise.of_conversions(shape, c, stack)),
  ):
    if num_bytes:
      yield Work(part=part, kind='memory', num_bytes=num_bytes, runs=12 * runs)


def _gemms(
  shape: StepShape,
  stack: StackShape,
  part: str,
  tokens: float,
  sizes: list[tuple[int, int, int]],
  *,
  fp8: bool = True,
) -> Iterator[Work]:
  """Yields products of `tokens` rows with kernels of `sizes`, (inner, columns, how many)."""
  config = shape.config
  times = 1 + 1 + shape.trains_kernels + shape.repeats(stack) + shape.references
  for inner, columns, number in sizes:
    forward = 2.0 * tokens * inner * columns * number * stack.num_layers
    rows = max(int(tokens // shape.passes), 1)
    yield Work(
      part=part,
      kind='fp8_gemm' if fp8 and config.fp8 else 'gemm',
      flops=forward * times,
      recomputed_flops=forward * shape.repeats(stack),
      num_bytes=times
      * stack.num_layers
      * number
      * shape.item_bytes
      * (tokens * (inner + columns) + shape.passes * inner * columns),
      runs=round(times * stack.num_layers * number * shape.passes),
      size=(rows, inner, columns),
    )


def _mlp(shape: StepShape, c: TransformerConfig, stack: StackShape, tokens: int) -> Iterator[Work]:
  hidden, inputs = c.mlp_dim // shape.model, len(c.mlp_activations)
  sizes = [(c.embed_dim, hidden, inputs), (hidden, c.embed_dim, 1)]
  if not c.num_experts:
    yield from _gemms(shape, stack, MLP, tokens, sizes)
    return
  # With a capacity, experts compute their empty slots too.
  factor = c.expert_capacity_factor
  chosen = tokens * c.num_experts_per_token * (1 if factor is None else factor)
  chosen = min(chosen, tokens * c.num_experts)
  yield from _gemms(shape, stack, EXPERTS, tokens, [(c.embed_dim, c.num_experts, 1)], fp8=False)
  yield from _gemms(shape, stack, EXPERTS, chosen, sizes, fp8=False)


def _attention(shape: StepShape, c: TransformerConfig, stack: StackShape) -> Iterator[Work]:
  """Yields the products of queries with keys and of weights with values."""
  heads = c.num_heads / shape.model
  layers = stack.num_layers
  for length, causal, backend in (
    (stack.length, stack.causal, stack.attention),
    (stack.cross_length, False, stack.attention),
  ):
    if not length:
      continue
    kernel = backend not in ('dense', 'chunked')
    pairs = stack.length * length  # chunks and kernels skip pairs in the future
    if backend != 'dense':
      pairs = _pairs(c, stack.length, length, causal=causal)
    forward = 4.0 * shape.rows * pairs * heads * c.head_dim * layers / shape.context
    repeats = shape.repeats_attention(stack)
    again = forward * repeats
    backward = (_ATTENTION_BACKWARD if kernel else 2.0) * forward
    num_bytes = 0.0
    if not kernel:  # logits and weights in float32 go through memory
      logits = 4.0 * shape.rows * pairs * heads * layers / shape.context
      num_bytes = _LOGIT_PASSES * logits * (1.0 + 0.5 * (repeats + shape.references))
    yield Work(
      part=ATTENTION,
      kind='attention',
      flops=(1 + shape.references) * forward + backward + again,
      recomputed_flops=again,
      num_bytes=num_bytes,
      runs=round(layers * shape.passes * ((2 if kernel else 8) + repeats + shape.references)),
      backend=backend,
    )


# Times that attention without a kernel reads or writes its logits, forward and backward.
_LOGIT_PASSES = 10


def _pairs(c: TransformerConfig, queries: int, keys: int, *, causal: bool) -> float:
  """Returns the (query, key) pairs per row that attention computes, averaged over layers."""
  if not causal:
    return queries * keys
  total = 0.0
  for window in c.windows:
    seen = seen_keys(window, keys)
    total += seen * (seen + 1) / 2 + (queries - seen) * seen
  return total / len(c.windows)


def _ends(shape: StepShape, c: TransformerConfig) -> Iterator[Work]:
  """Yields the work outside of the layers: embedding, logits and loss."""
  yield Work(
    part=EMBEDDING,
    kind='memory',
    num_bytes=elementwise.of_embedding(shape, c),
    runs=4 * shape.passes,
    in_layers=False,
  )
  if not shape.num_outcomes:
    return
  tokens = shape.head_rows * shape.head_length
  columns = shape.num_outcomes // shape.model
  forward = 2.0 * tokens * c.embed_dim * columns
  chunks, times = max(shape.loss_chunks, 1) * shape.head_passes, 3 + shape.references
  yield Work(
    part=LOGITS,
    kind='gemm',
    flops=times * forward,
    runs=times * chunks,
    # Each chunk adds to the gradient of the kernel, in float32.
    num_bytes=times * 2.0 * (tokens * (c.embed_dim + columns) + chunks * c.embed_dim * columns)
    + 8.0 * chunks * c.embed_dim * columns,
    size=(max(tokens // chunks, 1), c.embed_dim, columns),
    in_layers=False,
  )
  yield Work(
    part=LOGITS,
    kind='memory',
    num_bytes=elementwise.of_logits(tokens, columns),
    runs=6 * chunks,
    in_layers=False,
  )


def _update(program: Program, shape: StepShape) -> Iterator[Work]:
  """Yields the conversion of weights, the accumulation of gradients, and the optimizer."""
  yield Work(
    part=WEIGHTS_AND_GRADIENTS,
    kind='memory',
    num_bytes=elementwise.of_weights(program, shape),
    runs=2 * (1 if shape.by_layer else shape.passes),
    in_layers=False,
  )
  yield Work(
    part=OPTIMIZER,
    kind='memory',
    num_bytes=elementwise.of_optimizer(program),
    runs=2 * len(jax.tree.leaves(program.abstract_state.params)),
    in_layers=False,
  )
