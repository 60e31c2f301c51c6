"""Pipeline parallelism: every stage holds some of the layers, and the batch passes through them.

What is split: `layers` of parameters and optimizer state over `stage`, and each device's rows into
microbatches, so that stages work on different microbatches at the same time. What moves: one
microbatch's activation per tick to the next stage, and its gradient back. No other way to split a
model has less traffic per step, so use it for the slowest link. When: layers do not fit even with
fsdp x model, or the network between hosts is too slow for fsdp. The price is the bubble, in which
stages wait (`Timetable.bubble_fraction`): use several times more microbatches than stages.

Schedules: 'gpipe' keeps the input of every stage for every microbatch. '1f1b' keeps 2S-1 inputs for
any number of microbatches. 'circular' gives each stage R blocks of layers, for a bubble R
times smaller and R times the traffic. All recompute a stage's forward pass in the backward pass.

A model with two stacks (encoder and decoder) passes the stages twice: each stage has layers of
both, and microbatches run all encoder layers first. This needs 'gpipe' or 'circular', and at least
as many microbatches as stages.

`value_and_grad` and `forward` run inside `jax.shard_map` with `stage` manual and every array
varying over `varying_axes`. Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021
(PipeDream-flush as 1F1B, and interleaved stages), arXiv:2104.04473.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Optional, Protocol, Union

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisRules, varying
from t5x_gpu.partitioning.layer_stacks import (
  layers_of,
  member_of,
  num_layers,
  run_layers,
  with_layers,
  with_member,
)
from t5x_gpu.partitioning.overlap import Ahead
from t5x_gpu.partitioning.parameters import Dims, Split
from t5x_gpu.partitioning.pipeline_schedules import (
  SCHEDULES,
  Timetable,
  check,
  layer_order,
  traffic_per_step,
)
from t5x_gpu.partitioning.trees import Tree, TreeFn

__all__ = [
  'SCHEDULES',
  'Pieces',
  'check',
  'forward',
  'layer_order',
  'rules',
  'traffic_per_step',
  'value_and_grad',
]

AXIS = 'stage'


class Pieces(Protocol):
  """A model in three parts; the caller has bound the arguments of dropout.

  Its collectives stay inside one stage (`model`, `fsdp`, ...), never over `stage`. A
  collective-permute (ring attention) needs all devices at once: use `skip_idle=False`.
  """

  @property
  def stacks(self) -> tuple[str, ...]:
    """Names of the stacks of layers in the order in which they run; (ONLY,) for one stack."""

  def embed(self, params: Tree, microbatch: Tree) -> Tree:
    """Returns the activation that enters the first layer."""

  def run_layers(self, params: Tree, x: Tree, microbatch: Tree, first_layer: jax.Array) -> Tree:
    """Returns x after params['layers'], which start at layer `first_layer` of the model.

    With several stacks it also takes `stack`, and `first_layer` counts within that stack.
    """

  def head(self, params: Tree, x: Tree, microbatch: Tree) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns name -> (sum, weight); the sum of 'loss' is differentiated."""


def rules() -> AxisRules:
  """Returns the rules of pipeline parallelism."""
  return AxisRules(parameters={'layers': (AXIS,)})


def value_and_grad(
  pieces: Pieces,
  params: Tree,
  microbatches: Tree,
  table: Timetable,
  *,
  varying_axes: Sequence[str],
  complete: Callable[[Tree], Tree] = lambda params: params,
  layer_sums: Optional['LayerSums'] = None,
  earlier: Optional[Tree] = None,
) -> tuple[Tree, Tree]:
  """Returns (gradients of the summed loss, sums), both local and not yet reduced.

  With `layer_sums`, the gradients of layers are reduced.

  Args:
    pieces: the model.
    params: dict; leaves of 'layers' (of each stack, see layer_stacks.py) are this stage's
      [layers / stages, ...], in `layer_order`. Other parameters are whole on every stage; the
      caller sums their gradients over `stage`.
    microbatches: arrays [num_microbatches, rows, ...], the same on all stages.
    table: the schedule.
    varying_axes: all manual mesh axes, including `stage`.
    complete: `params` -> all parameters, including those without gradients.
    layer_sums: reduces the gradients of layers in the last backward tick; None if the caller
      reduces them. Requires one block per stage.
    earlier: gradients to add, for example of earlier microbatches.
  """
  run = PipelineRun(pieces, microbatches, table, tuple(varying_axes), complete)
  if table.schedule == '1f1b':
    return _one_forward_one_backward(run, params, earlier, layer_sums)

  def loss(params: Tree, first: Optional[Tree] = None) -> tuple[jax.Array, Tree]:
    sums = _forward(run, params, first)
    return sums['loss'][0], sums

  # The transpose of a scan whose ticks end in a permute is the backward pipeline.
  if layer_sums is None:
    grads, sums = jax.grad(loss, has_aux=True)(params)
    return _plus(grads, earlier), sums
  first = run.shift(first_tick(run, params))
  (grads, dx), sums = jax.grad(loss, (0, 1), has_aux=True)(params, first)
  return last_tick(run, params, dx, 0, _plus(grads, earlier), layer_sums), sums


def forward(
  pieces: Pieces, params: Tree, microbatches: Tree, table: Timetable, *, varying_axes: Sequence[str]
) -> Tree:
  """Returns sums, local; for evaluation. Arguments as in `value_and_grad`."""
  return _forward(PipelineRun(pieces, microbatches, table, tuple(varying_axes)), params)


@dataclasses.dataclass(frozen=True)
class LayerSums:
  """How the last backward tick sums the gradients of layers over devices while it computes.

  Every tick contributes to the gradients of layers. After the last tick, in which stage 0 works
  alone, the network would sum all gradients with no computation left to hide it. So the last tick
  adds the gradients of earlier ticks, and sums each layer's gradients while it computes the next
  layer (overlap.py). All stages compute the last tick, so that all send the same arrays at the same
  time. The other stages discard their results; they would wait for stage 0 anyway.

  Attributes:
    dims: per parameter: how a layer's gradient is split and summed; None for parameters outside of
      layers, whose gradients the caller reduces.
    axes: all manual mesh axes.
  """

  dims: Sequence[Optional[Dims]]
  axes: Sequence[str]

  def inputs(self, params: Tree) -> Tree:
    """Returns the arrays to differentiate: ports for layers, the parameters themselves elsewhere.

    A port has the shape of a reduced gradient and takes it; its value is never read.
    """

    def port(dims: Dims, param: jax.Array) -> jax.Array:
      shape = jax.eval_shape(dims.reduced, param)
      axes = tuple(a for a in self.axes if a not in dims.sum_axes)
      return varying(jnp.zeros(shape.shape, shape.dtype), axes)

    return self._on_layers(port, lambda param: param, params)

  def parameters(self, inputs: Tree, params: Tree, earlier: Tree) -> Tree:
    """Returns parameters whose gradients reach `inputs`.

    Args:
      inputs: from `inputs`.
      params: whole parameters.
      earlier: gradients of earlier ticks; they are added to the gradients of layers.
    """
    return self._on_layers(
      lambda dims, port, param, before: Ahead(Split(port, param, dims, before)),
      lambda param, *_: param,
      inputs,
      params,
      earlier,
    )

  def total(self, grads: Tree, earlier: Tree) -> Tree:
    """Returns the gradients of `inputs`, plus earlier ticks' gradients outside of layers."""
    return self._on_layers(lambda dims, own, before: own, jnp.add, grads, earlier)

  def _on_layers(self, of_layer: TreeFn, of_other: TreeFn, *trees: Tree) -> Tree:
    leaves, treedefs = zip(*map(jax.tree.flatten, trees))
    return jax.tree.unflatten(
      treedefs[0],
      [
        of_other(*of_leaf) if dims is None else of_layer(dims, *of_leaf)
        for dims, *of_leaf in zip(self.dims, *leaves, strict=True)
      ],
    )


@dataclasses.dataclass(frozen=True)
class PipelineRun:
  """Everything that stays the same from tick to tick.

  Attributes:
    pieces: the model.
    microbatches: arrays [num_microbatches, rows, ...].
    table: the schedule.
    varying_axes: all manual mesh axes.
    complete: differentiated parameters -> all parameters.
  """

  pieces: Pieces
  microbatches: Tree
  table: Timetable
  varying_axes: tuple[str, ...]
  complete: Callable[[Tree], Tree] = lambda params: params

  def __post_init__(self) -> None:
    table = self.table
    assert table.schedule in SCHEDULES, table
    assert table.num_stages > 1 and table.num_microbatches > 0 and table.repeats > 0, table
    assert table.repeats == 1 or table.schedule == 'circular', table
    assert table.num_stacks == 1 or table.schedule != '1f1b', table
    assert table.num_blocks == 1 or table.num_microbatches >= table.num_stages, table
    assert len(self.stacks) == table.num_stacks, (self.stacks, table)
    # The stack to run is chosen by a branch, which must not contain a collective-permute.
    assert len(self.stacks) == 1 or table.skip_idle, self.stacks

  @property
  def stacks(self) -> tuple[str, ...]:
    return self.pieces.stacks

  def microbatch(self, index: jax.Array) -> Tree:
    """Returns the microbatch [rows, ...]."""
    return at(self.microbatches, index)

  def varying(self, tree: Tree) -> Tree:
    """Returns `tree` marked as varying, so that loop carries and branches of a cond agree."""
    return jax.tree.map(lambda x: varying(x, self.varying_axes), tree)

  def zeros(self, like: Tree, *, stack: Optional[int] = None) -> Tree:
    """Returns zeros in the shapes of `like`, with a leading dimension `stack` if given."""
    count = () if stack is None else (stack,)
    return self.varying(jax.tree.map(lambda a: jnp.zeros((*count, *a.shape), a.dtype), like))

  def embed(self, params: Tree, microbatch: Tree) -> Tree:
    """Returns the activation that enters the first layer."""
    return self.varying(self.pieces.embed(self.complete(params), microbatch))

  def output(self, x: Tree) -> Tree:
    """Returns the part of the activation that the head reads: the last stack's."""
    return member_of(x, self.stacks, self.stacks[-1])

  def head(self, params: Tree, output: Tree, microbatch: Tree) -> tuple[jax.Array, Tree]:
    """Returns (summed loss, sums)."""
    x = with_member([None] * len(self.stacks), self.stacks, self.stacks[-1], output)
    sums = self.varying(self.pieces.head(self.complete(params), x, microbatch))
    return sums['loss'][0], sums

  def run_block(self, params: Tree, x: Tree, unit: jax.Array, stage: jax.Array) -> Tree:
    """Returns x after the block of layers of `unit`."""
    table, params = self.table, self.complete(params)
    microbatch = self.microbatch(unit % table.num_microbatches)
    block = unit // table.num_microbatches
    block_of_stack = block if len(self.stacks) == 1 else block % table.repeats

    def of_stack(stack: str) -> Tree:
      size, own = num_layers(params, stack) // table.repeats, params
      if table.repeats > 1:
        own = with_layers(
          params,
          stack,
          jax.tree.map(
            lambda w: jax.lax.dynamic_slice_in_dim(w, block_of_stack * size, size),
            layers_of(params, stack),
          ),
        )
      return self.varying(
        run_layers(
          self.pieces,
          own,
          x,
          microbatch,
          stack=stack,
          first_layer=(block_of_stack * table.num_stages + stage) * size,
        )
      )

    runs = [functools.partial(of_stack, stack) for stack in self.stacks]
    return runs[0]() if len(runs) == 1 else jax.lax.switch(block // table.repeats, runs)

  def first_activation(self, params: Tree) -> Tree:
    """Returns the activation that stages hold before they have received one."""
    microbatch = self.microbatch(0)
    if self.table.skip_idle:
      return self.zeros(jax.eval_shape(self.embed, params, microbatch))
    # Discarded work runs on a real activation: on zeros, layers have huge derivatives (a norm's is
    # 1/sqrt(epsilon)), and a discarded 0 * inf is NaN.
    return jax.lax.stop_gradient(self.embed(params, microbatch))

  def shift(self, x: Tree, *, back: bool = False) -> Tree:
    """Returns the `x` of the previous stage (of the next stage if `back`)."""
    last = self.table.num_stages - 1
    pairs = [(s, s + 1) for s in range(last)]
    if back:
      pairs = [(to, source) for source, to in pairs]
    elif self.table.num_blocks > 1:
      pairs.append((last, 0))
    return jax.tree.map(lambda a: jax.lax.ppermute(a, AXIS, pairs), x)


def at(tree: Tree, index: jax.Array) -> Tree:
  """Returns entry `index` of every leaf [count, ...]."""
  return jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, index, keepdims=False), tree)


def put(tree: Tree, entry: Tree, index: jax.Array) -> Tree:
  """Returns `tree` with entry `index` of every leaf replaced."""
  return jax.tree.map(lambda a, x: jax.lax.dynamic_update_index_in_dim(a, x, index, 0), tree, entry)


def add(a: Tree, b: Tree) -> Tree:
  """Returns a + b."""
  return jax.tree.map(jnp.add, a, b)


def update_if(condition: jax.Array, update: TreeFn, state: Tree) -> Tree:
  """Returns `update(state)` if `condition`, else `state`; not differentiable.

  It is a loop of one iteration or none: XLA updates a loop's arrays in place, but copies the arrays
  that pass through a conditional. In a pipeline these are all gradients of a stage.
  """
  axes = tuple(jax.typeof(condition).manual_axis_type.varying)

  def body(carry: Tree) -> Tree:
    return varying(jnp.array(False), axes), update(carry[1])

  return jax.lax.while_loop(lambda carry: carry[0], body, (condition, state))[1]


def where(condition: Union[bool, jax.Array], a: Tree, b: Tree) -> Tree:
  """Returns `a` if `condition`, a Python bool or a traced one, else `b`."""
  if condition is True:
    return a
  return jax.tree.map(functools.partial(jnp.where, condition), a, b)


def first_tick(run: PipelineRun, params: Tree) -> Tree:
  """Returns the output of the first tick, in which stage 0 works alone."""
  stage = jax.lax.axis_index(AXIS)

  def block(_: Tree) -> Tree:
    return run.run_block(params, run.embed(params, run.microbatch(0)), 0, stage)

  x = run.first_activation(params)
  return jax.lax.cond(stage == 0, block, lambda x: x, x) if run.table.skip_idle else block(x)


def last_tick(
  run: PipelineRun, params: Tree, dx: Tree, unit: int, grads: Tree, layer_sums: LayerSums
) -> Tree:
  """Returns the gradients after the last backward tick, in which stage 0 works alone.

  Args:
    run: the pipeline.
    params: parameters of the model.
    dx: gradients of the stages' inputs in the previous tick.
    unit: the microbatch of stage 0.
    grads: gradients of earlier ticks.
    layer_sums: reduces the gradients of layers.
  """
  stage, dy = jax.lax.axis_index(AXIS), run.shift(dx, back=True)
  # Otherwise XLA computes these activations before the other ticks, and keeps them.
  microbatch, _ = jax.lax.optimization_barrier((run.microbatch(unit), dx))

  def output(inputs: Tree) -> Tree:
    summing = layer_sums.parameters(inputs, params, grads)
    return run.run_block(summing, run.embed(summing, microbatch), unit, stage)

  _, transpose = jax.vjp(output, layer_sums.inputs(params))
  found = transpose(where(stage == 0, dy, jax.tree.map(jnp.zeros_like, dy)))[0]
  return layer_sums.total(found, grads)


def _forward(run: PipelineRun, params: Tree, first: Optional[Tree] = None) -> Tree:
  """Returns sums: runs layers tick by tick, then an equal share of the heads on every stage.

  Args:
    run: the pipeline.
    params: parameters of the model.
    first: activation that stages hold after the first tick; None computes it here.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)
  first_output = (table.num_blocks - 1) * table.num_microbatches
  # Activations that return to stage 0 wait there until all microbatches have started.
  delay = table.num_microbatches - table.num_stages if table.num_blocks > 1 else 0

  @functools.partial(jax.checkpoint, prevent_cse=False)
  def work(params: Tree, x: Tree, unit: jax.Array) -> Tree:
    works = (0 <= unit) & (unit < table.num_units)
    unit = jnp.clip(unit, 0, table.num_units - 1)
    enters = (stage == 0) & (unit < table.num_microbatches)
    if run.table.skip_idle:
      enters &= works
    x = jax.lax.cond(
      enters,
      lambda x: run.embed(params, run.microbatch(unit % table.num_microbatches)),
      lambda x: x,
      x,
    )

    def block(x: Tree) -> Tree:
      return run.run_block(params, x, unit, stage)

    return jax.lax.cond(works, block, lambda x: x, x) if run.table.skip_idle else block(x)

  def tick(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
    x, waiting, outputs = carry
    unit = table.forward_unit(t, stage)
    if delay:
      waiting = put(waiting, x, t % (delay + 1))
      x = where(stage == 0, at(waiting, (t - delay) % (delay + 1)), x)
    y = work(params, x, unit)
    # The first output overwrites earlier writes.
    outputs = put(
      outputs, run.output(y), jnp.clip(unit - first_output, 0, table.num_microbatches - 1)
    )
    return (run.shift(y), waiting, outputs), None

  x = run.first_activation(params) if first is None else first
  waiting = run.zeros(x, stack=delay + 1) if delay else ()
  # Padded so that the shares of the head are equal.
  outputs = run.zeros(run.output(x), stack=table.head_share * table.num_stages)
  ticks = jnp.arange(0 if first is None else 1, table.forward_ticks)
  (_, _, outputs), _ = jax.lax.scan(tick, (x, waiting, outputs), ticks)
  return _shared_head(run, params, outputs)


def _shared_head(run: PipelineRun, params: Tree, outputs: Tree) -> Tree:
  """Returns the sums of this stage's share of the microbatches.

  If the last stage computed all heads, the others would wait for it.

  Args:
    run: the pipeline.
    params: parameters of the model.
    outputs: [stages * head_share, ...]; only the last stage's are valid.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)
  share, last = table.head_share, table.num_stages - 1

  def deal_out(y: jax.Array) -> jax.Array:
    # A psum_scatter would send the same bytes, but in bfloat16 with an automatic `model` axis it
    # aborts XLA on CPUs (0.10.2, 0.11.2): "Invalid binary instruction opcode copy".
    shares = y.reshape(table.num_stages, share, *y.shape[1:])
    mine = shares[last]
    for to in range(last):
      mine = jnp.where(stage == to, jax.lax.ppermute(shares[to], AXIS, [(last, to)]), mine)
    return mine

  mine = jax.tree.map(deal_out, outputs)
  head = jax.checkpoint(run.head, prevent_cse=False)

  def one(sums: Tree, k: jax.Array) -> tuple[Tree, None]:
    index = stage * share + k

    def counted(sums: Tree) -> Tree:
      microbatch = run.microbatch(jnp.minimum(index, table.num_microbatches - 1))
      return add(sums, head(params, at(mine, k), microbatch)[1])

    if table.num_microbatches % table.num_stages == 0:
      return counted(sums), None
    return jax.lax.cond(index < table.num_microbatches, counted, lambda sums: sums, sums), None

  shapes = jax.eval_shape(run.head, params, at(mine, 0), run.microbatch(0))[1]
  return jax.lax.scan(one, run.zeros(shapes), jnp.arange(share))[0]


def _one_forward_one_backward(
  run: PipelineRun, params: Tree, earlier: Optional[Tree], layer_sums: Optional[LayerSums]
) -> tuple[Tree, Tree]:
  """Returns (gradients, sums). Each tick runs one unit forward and another backward."""
  table, stage = run.table, jax.lax.axis_index(AXIS)
  is_first, is_last = stage == 0, stage == table.num_stages - 1

  def inside(unit: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (0 <= unit) & (unit < table.num_units), jnp.clip(unit, 0, table.num_units - 1)

  def tick(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
    x, dx, kept, grads, sums = carry
    dy = run.shift(dx, back=True)  # during this tick's forward pass
    works, unit = inside(table.forward_unit(t, stage))
    x = jax.lax.cond(
      works & is_first, lambda x: run.embed(params, run.microbatch(unit)), lambda x: x, x
    )
    kept = put(kept, x, t % table.kept_inputs)

    def block(x: Tree) -> Tree:
      return run.run_block(params, x, unit, stage)

    # The last stage runs a unit backward at once, which recomputes its forward pass anyway.
    y = jax.lax.cond(works & ~is_last, block, lambda x: x, x) if run.table.skip_idle else block(x)
    y = run.shift(y)  # during the backward pass

    works, unit = inside(table.backward_unit(t, stage))
    x = at(kept, (unit + stage) % table.kept_inputs)
    state = (dy, grads, sums)
    back = functools.partial(_backward, run, params, x, unit, stage)
    if run.table.skip_idle:
      dx, grads, sums = update_if(works, lambda state: back(state, True), state)
    else:
      dx, grads, sums = back(state, works)
    return (y, dx, kept, grads, sums), None

  x = run.first_activation(params)
  shapes = jax.eval_shape(run.head, params, x, run.microbatch(0))[1]
  carry = (
    x,
    jax.tree.map(jnp.zeros_like, x),
    run.zeros(x, stack=table.kept_inputs),
    run.zeros(params) if earlier is None else earlier,
    run.zeros(shapes),
  )
  ticks = table.interleaved_ticks - (layer_sums is not None)
  (_, dx, _, grads, sums), _ = jax.lax.scan(tick, carry, jnp.arange(ticks))
  if layer_sums is not None:
    grads = last_tick(run, params, dx, table.num_microbatches - 1, grads, layer_sums)
  return grads, sums


def _backward(
  run: PipelineRun,
  params: Tree,
  x: Tree,
  unit: jax.Array,
  stage: jax.Array,
  state: Tree,
  works: Union[bool, jax.Array],
) -> Tree:
  """Returns (dx, grads, sums) after the backward pass of `unit` in this stage.

  Args:
    run: the pipeline.
    params: parameters of the model.
    x: input of the stage.
    unit: the microbatch.
    stage: index of this stage.
    state: (gradient of the stage's output, gradients so far, sums so far).
    works: whether the unit counts; otherwise gradients and sums are unchanged.
  """
  dy, grads, sums = state
  microbatch = run.microbatch(unit)
  y, transpose = jax.vjp(lambda p, x: run.run_block(p, x, unit, stage), params, x)

  def head(state: Tree) -> Tree:
    dy, grads, sums = state
    (_, new_sums), (dp, dy) = jax.value_and_grad(run.head, (0, 1), has_aux=True)(
      params, y, microbatch
    )
    return dy, add(grads, dp), add(sums, new_sums)

  dy, grads, sums = update_if((stage == run.table.num_stages - 1) & works, head, (dy, grads, sums))
  dp, dx = transpose(dy)
  grads = where(works, add(grads, dp), grads)

  def embed(grads: Tree) -> Tree:
    return add(grads, jax.vjp(lambda p: run.embed(p, microbatch), params)[1](dx)[0])

  return dx, update_if((stage == 0) & works, embed, grads), sums


def _plus(grads: Tree, earlier: Optional[Tree]) -> Tree:
  return grads if earlier is None else add(grads, earlier)
