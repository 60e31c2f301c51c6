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
from t5x_gpu.partitioning.in_place import InPlace
from t5x_gpu.partitioning.layer_stacks import (
  has_layers,
  layers_of,
  member_of,
  num_layers,
  run_layers,
  with_layers,
  with_member,
  without_layers,
)
from t5x_gpu.partitioning.overlap import Ahead
from t5x_gpu.partitioning.parameters import Dims, Parameter, Split, as_parameter, is_parameter
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

  @property
  def gathers_layers(self) -> bool:
    """Whether `run_layers` runs layers by `over_layers`, which takes `Parameter`s."""

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
  grads = run.zeros(params) if earlier is None else earlier
  if table.schedule == '1f1b':
    return _one_forward_one_backward(run, params, grads, layer_sums)
  return _forward_then_backward(run, params, grads, layer_sums)


def forward(
  pieces: Pieces, params: Tree, microbatches: Tree, table: Timetable, *, varying_axes: Sequence[str]
) -> Tree:
  """Returns sums, local; for evaluation. Arguments as in `value_and_grad`."""
  run = PipelineRun(pieces, microbatches, table, tuple(varying_axes))
  return _heads(run, params, _deal_out(run, _forward(run, params, keeps_inputs=False)[0]))


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
      lambda dims, port, param, before: Ahead(Split(port, param, dims, before), in_tick=True),
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

  @property
  def adds_in_place(self) -> bool:
    """Whether a block adds its layers' gradients to earlier gradients, in place.

    Not with a ring: under 1f1b, gradients then differ from run to run on CPUs (0.10.2, with dropout
    and a relative bias), as if XLA mixed up independent hops of the forward and the backward loop.
    """
    return self.pieces.gathers_layers and self.table.skip_idle

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

  def run_block(
    self,
    params: Tree,
    x: Tree,
    unit: jax.Array,
    stage: jax.Array,
    stack: Optional[str] = None,
    earlier: Optional[Tree] = None,
  ) -> Tree:
    """Returns x after the block of layers of `unit`.

    Args:
      params: differentiated parameters.
      x: input of the block.
      unit: the unit.
      stage: index of this stage.
      stack: the stack of the block; None if the unit decides.
      earlier: gradients of earlier units, which the gradients of this stack's layers will contain.
    """
    if stack is None and len(self.stacks) > 1:
      runs = [functools.partial(self.run_block, params, x, unit, stage, s) for s in self.stacks]
      return jax.lax.switch(self.stack_index(unit), runs)
    stack, table = stack or self.stacks[0], self.table
    if earlier is not None:
      params = self._on_layers(lambda p, e: Split(p, earlier=e), stack, params, earlier)
    params = self.complete(params)
    block = unit // table.num_microbatches % table.repeats
    size = num_layers(params, stack) // table.repeats
    if self.adds_in_place:
      params = self._on_layers(lambda p: _in_place(p, block * size, size), stack, params)
    elif table.repeats > 1:
      of_block = functools.partial(
        jax.tree.map, lambda w: jax.lax.dynamic_slice_in_dim(w, block * size, size)
      )
      params = self._on_layers(of_block, stack, params)
    return self.varying(
      run_layers(
        self.pieces,
        params,
        x,
        self.microbatch(unit % table.num_microbatches),
        stack=stack,
        first_layer=(block * table.num_stages + stage) * size,
      )
    )

  def stack_index(self, unit: jax.Array) -> jax.Array:
    """Returns the index of the stack of `unit`'s block."""
    return unit // self.table.num_microbatches // self.table.repeats

  def rest(self, tree: Tree) -> Tree:
    """Returns parameters, or their gradients, without the layers."""
    return without_layers(tree, self.stacks)

  def with_rest(self, tree: Tree, rest: Tree) -> Tree:
    """Returns `tree` with everything outside of the layers replaced by `rest`."""
    for stack in self.stacks:
      if has_layers(tree, stack):
        rest = with_layers(rest, stack, layers_of(tree, stack))
    return rest

  def _on_layers(self, function: TreeFn, stack: str, params: Tree, *others: Tree) -> Tree:
    """Returns `params` with `function` applied to the parameters of a stack's layers."""
    if not has_layers(params, stack):
      return params
    layers = (layers_of(tree, stack) for tree in (params, *others))
    return with_layers(params, stack, jax.tree.map(function, *layers, is_leaf=is_parameter))

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
    if self.table.num_blocks > 1:
      pairs.append((last, 0))
    if back:
      pairs = [(to, source) for source, to in pairs]
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


def _in_place(param: Union[jax.Array, Parameter], start: jax.Array, size: int) -> Parameter:
  """Returns a parameter of a block of layers; the last tick's, which communicate, are unchanged."""
  if isinstance(param, Ahead):
    return param
  return InPlace(as_parameter(param), start, size, in_tick=True)


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


def _forward(run: PipelineRun, params: Tree, *, keeps_inputs: bool) -> tuple[Tree, Optional[Tree]]:
  """Returns (outputs [stages * head_share, ...] of the last stage, inputs [ticks, ...]).

  Args:
    run: the pipeline.
    params: parameters of the model.
    keeps_inputs: whether to return the inputs.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)
  delay = _delay(table)

  def tick(carry: Tree, t: jax.Array) -> tuple[Tree, Optional[Tree]]:
    x, waiting, outputs = carry
    works, unit = _inside(table, table.forward_unit(t, stage))
    if delay:
      waiting = put(waiting, x, t % (delay + 1))
      x = where(stage == 0, at(waiting, (t - delay) % (delay + 1)), x)
    enters = _enters(table, unit, stage)
    x = jax.lax.cond(
      enters & works if table.skip_idle else enters,
      lambda x: run.embed(params, run.microbatch(unit % table.num_microbatches)),
      lambda x: x,
      x,
    )

    def block(x: Tree) -> Tree:
      return run.run_block(params, x, unit, stage)

    y = jax.lax.cond(works, block, lambda x: x, x) if table.skip_idle else block(x)
    # The first output overwrites earlier writes.
    outputs = put(outputs, run.output(y), _output_index(table, unit)[1])
    return (run.shift(y), waiting, outputs), x if keeps_inputs else None

  x = run.first_activation(params)
  waiting = run.zeros(x, stack=delay + 1) if delay else ()
  # Padded so that the shares of the head are equal.
  outputs = run.zeros(run.output(x), stack=table.head_share * table.num_stages)
  ticks = jnp.arange(table.forward_ticks)
  (_, _, outputs), inputs = jax.lax.scan(tick, (x, waiting, outputs), ticks)
  return outputs, inputs


def _forward_then_backward(
  run: PipelineRun, params: Tree, grads: Tree, layer_sums: Optional[LayerSums]
) -> tuple[Tree, Tree]:
  """Returns (gradients, sums): all units forward, the heads, and all units backward in reverse.

  Args:
    run: the pipeline.
    params: parameters of the model.
    grads: earlier gradients.
    layer_sums: reduces the gradients of layers in the last tick, or None.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)
  delay = _delay(table)
  outputs, inputs = _forward(run, params, keeps_inputs=True)
  mine, to_outputs = jax.vjp(functools.partial(_deal_out, run), outputs)
  sums, grads, d_mine = _heads_backward(run, params, grads, mine)
  (d_outputs,) = to_outputs(d_mine)

  def tick(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
    dx, waiting, grads = carry  # of the input that the stage received in the tick after this one
    works, unit = _inside(table, table.forward_unit(t, stage))
    dy = run.shift(dx, back=True)
    is_output, index = _output_index(table, unit)
    dy = with_member(
      dy,
      run.stacks,
      run.stacks[-1],
      jax.tree.map(
        lambda x, more: x + jnp.where(is_output & works, more, jnp.zeros_like(more)),
        run.output(dy),
        at(d_outputs, index),
      ),
    )
    x = at(inputs, t)
    dx = jax.tree.map(jnp.zeros_like, dy)  # of a stage without work
    for i, stack in enumerate(run.stacks):

      def back(state: Tree, works: Union[bool, jax.Array], stack: str = stack) -> Tree:
        _, pull = _block_vjp(run, params, x, unit, stage, stack, state[1])
        return pull(dy, state[1], works)

      if not table.skip_idle:
        dx, grads = back((dx, grads), works)
        continue
      runs = works & (run.stack_index(unit) == i) if len(run.stacks) > 1 else works
      dx, grads = update_if(runs, lambda state, back=back: back(state, True), (dx, grads))
    enters = _enters(table, unit, stage) & works
    grads = _embed_backward(run, params, dx, unit % table.num_microbatches, grads, enters)
    if delay:
      waiting = put(waiting, dx, t % (delay + 1))
      dx = where(stage == 0, at(waiting, (t + delay) % (delay + 1)), dx)
    return (dx, waiting, grads), None

  dx = jax.tree.map(jnp.zeros_like, at(inputs, 0))
  waiting = run.zeros(dx, stack=delay + 1) if delay else ()
  ticks = jnp.arange(0 if layer_sums is None else 1, table.forward_ticks)
  (dx, _, grads), _ = jax.lax.scan(tick, (dx, waiting, grads), ticks, reverse=True)
  if layer_sums is not None:
    grads = last_tick(run, params, dx, 0, grads, layer_sums)
  return grads, sums


def _delay(table: Timetable) -> int:
  """Returns the ticks that an activation waits at stage 0 until all microbatches have started."""
  return table.num_microbatches - table.num_stages if table.num_blocks > 1 else 0


def _inside(table: Timetable, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (whether there is such a unit, `unit` or the nearest one)."""
  return (0 <= unit) & (unit < table.num_units), jnp.clip(unit, 0, table.num_units - 1)


def _enters(table: Timetable, unit: jax.Array, stage: jax.Array) -> jax.Array:
  """Returns whether the input of `unit` comes from the embeddings."""
  return (stage == 0) & (unit < table.num_microbatches)


def _output_index(table: Timetable, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (whether `unit` ends the model's layers on the last stage, index of its output)."""
  index = unit - (table.num_blocks - 1) * table.num_microbatches
  return index >= 0, jnp.clip(index, 0, table.num_microbatches - 1)


def _deal_out(run: PipelineRun, outputs: Tree) -> Tree:
  """Returns this stage's share of the last stage's outputs, [head_share, ...].

  If the last stage computed all heads, the others would wait for it.

  Args:
    run: the pipeline.
    outputs: [stages * head_share, ...]; only the last stage's are valid.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)
  last = table.num_stages - 1

  def share_of(y: jax.Array) -> jax.Array:
    # A psum_scatter would send the same bytes, but in bfloat16 with an automatic `model` axis it
    # aborts XLA on CPUs (0.10.2, 0.11.2): "Invalid binary instruction opcode copy".
    shares = y.reshape(table.num_stages, table.head_share, *y.shape[1:])
    mine = shares[last]
    for to in range(last):
      mine = jnp.where(stage == to, jax.lax.ppermute(shares[to], AXIS, [(last, to)]), mine)
    return mine

  return jax.tree.map(share_of, outputs)


def _over_share(run: PipelineRun, head: TreeFn, state: Tree, mine: Tree) -> tuple[Tree, Tree]:
  """Returns (state, results [head_share, ...]) after `head` of each microbatch of this stage.

  Args:
    run: the pipeline.
    head: (state, output, microbatch) -> (state, result like the output, or None).
    state: the first state.
    mine: outputs [head_share, ...] of this stage's share of the microbatches.
  """
  table, stage = run.table, jax.lax.axis_index(AXIS)

  def one(state: Tree, k: jax.Array) -> tuple[Tree, Tree]:
    index = stage * table.head_share + k
    output = at(mine, k)
    microbatch = run.microbatch(jnp.minimum(index, table.num_microbatches - 1))
    if table.num_microbatches % table.num_stages == 0:
      return head(state, output, microbatch)
    shapes = jax.eval_shape(head, state, output, microbatch)[1]
    return update_if(
      index < table.num_microbatches,
      lambda carry: head(carry[0], output, microbatch),
      (state, run.zeros(shapes)),
    )

  return jax.lax.scan(one, state, jnp.arange(table.head_share))


def _heads(run: PipelineRun, params: Tree, mine: Tree) -> Tree:
  """Returns the sums of this stage's share of the microbatches."""

  def counted(sums: Tree, output: Tree, microbatch: Tree) -> tuple[Tree, None]:
    return add(sums, run.head(params, output, microbatch)[1]), None

  return _over_share(run, counted, _no_sums(run, params, at(mine, 0)), mine)[0]


def _heads_backward(
  run: PipelineRun, params: Tree, grads: Tree, mine: Tree
) -> tuple[Tree, Tree, Tree]:
  """Returns (sums, gradients, gradients of `mine`) of this stage's share of the microbatches."""

  def one(state: Tree, output: Tree, microbatch: Tree) -> tuple[Tree, Tree]:
    sums, rest = state
    more, dy, of_rest = _head_backward(run, params, output, microbatch)
    return (add(sums, more), add(rest, of_rest)), dy

  first = _no_sums(run, params, at(mine, 0)), run.rest(grads)
  (sums, rest), d_mine = _over_share(run, one, first, mine)
  return sums, run.with_rest(grads, rest), d_mine


def _no_sums(run: PipelineRun, params: Tree, output: Tree) -> Tree:
  return run.zeros(jax.eval_shape(run.head, params, output, run.microbatch(0))[1])


def _one_forward_one_backward(
  run: PipelineRun, params: Tree, grads: Tree, layer_sums: Optional[LayerSums]
) -> tuple[Tree, Tree]:
  """Returns (gradients, sums). Each tick runs one unit forward and another backward."""
  table, stage = run.table, jax.lax.axis_index(AXIS)
  is_first, is_last = stage == 0, stage == table.num_stages - 1
  (stack,) = run.stacks

  def tick(carry: Tree, t: jax.Array) -> tuple[Tree, None]:
    x, dx, kept, grads, sums = carry
    dy = run.shift(dx, back=True)  # during this tick's forward pass
    works, unit = _inside(table, table.forward_unit(t, stage))
    x = jax.lax.cond(
      works & is_first, lambda x: run.embed(params, run.microbatch(unit)), lambda x: x, x
    )
    kept = put(kept, x, t % table.kept_inputs)

    def block(x: Tree) -> Tree:
      return run.run_block(params, x, unit, stage)

    # The last stage runs a unit backward at once, which recomputes its forward pass anyway.
    y = jax.lax.cond(works & ~is_last, block, lambda x: x, x) if run.table.skip_idle else block(x)
    y = run.shift(y)  # during the backward pass

    works, unit = _inside(table, table.backward_unit(t, stage))
    x = at(kept, (unit + stage) % table.kept_inputs)

    def back(state: Tree, works: Union[bool, jax.Array]) -> Tree:
      dy, grads, sums = state
      y, pull = _block_vjp(run, params, x, unit, stage, stack, grads)

      def head(state: Tree) -> Tree:
        _, rest, sums = state
        more, dy, of_rest = _head_backward(run, params, y, run.microbatch(unit))
        return dy, add(rest, of_rest), add(sums, more)

      dy, rest, sums = update_if(is_last & works, head, (dy, run.rest(grads), sums))
      dx, grads = pull(dy, run.with_rest(grads, rest), works)
      return dx, _embed_backward(run, params, dx, unit, grads, is_first & works), sums

    state = (dy, grads, sums)
    if table.skip_idle:
      dx, grads, sums = update_if(works, lambda state: back(state, True), state)
    else:
      dx, grads, sums = back(state, works)
    return (y, dx, kept, grads, sums), None

  x = run.first_activation(params)
  carry = (
    x,
    jax.tree.map(jnp.zeros_like, x),
    # Copies of a real activation: a stage without work computes on a slot that is not yet written.
    jax.tree.map(lambda a: jnp.broadcast_to(a, (table.kept_inputs, *a.shape)), x),
    grads,
    _no_sums(run, params, x),
  )
  ticks = table.interleaved_ticks - (layer_sums is not None)
  (_, dx, _, grads, sums), _ = jax.lax.scan(tick, carry, jnp.arange(ticks))
  if layer_sums is not None:
    grads = last_tick(run, params, dx, table.num_microbatches - 1, grads, layer_sums)
  return grads, sums


def _block_vjp(
  run: PipelineRun,
  params: Tree,
  x: Tree,
  unit: jax.Array,
  stage: jax.Array,
  stack: str,
  grads: Tree,
) -> tuple[Tree, Callable[[Tree, Tree, Union[bool, jax.Array]], tuple[Tree, Tree]]]:
  """Returns (output, pull) of the block of `unit`; pull(dy, grads, works) is (dx, gradients).

  Args:
    run: the pipeline.
    params: parameters of the model.
    x: input of the block.
    unit: the unit.
    stage: index of this stage.
    stack: the stack of the block.
    grads: gradients so far; `pull` gets them again, with the same gradients of layers.
  """
  earlier = grads if run.adds_in_place else None
  y, transpose = jax.vjp(
    lambda params, x: run.run_block(params, x, unit, stage, stack, earlier), params, x
  )

  def pull(dy: Tree, grads: Tree, works: Union[bool, jax.Array]) -> tuple[Tree, Tree]:
    # Without work, all gradients are 0.
    more, dx = transpose(where(works, dy, jax.tree.map(jnp.zeros_like, dy)))
    if earlier is None:
      return dx, add(grads, more)
    total = run.with_rest(grads, add(run.rest(grads), run.rest(more)))
    if has_layers(grads, stack):
      total = with_layers(total, stack, layers_of(more, stack))
    return dx, total

  return y, pull


def _head_backward(
  run: PipelineRun, params: Tree, output: Tree, microbatch: Tree
) -> tuple[Tree, Tree, Tree]:
  """Returns (sums, gradient of the output, gradients of the parameters outside of layers)."""

  def loss(rest: Tree, output: Tree) -> tuple[jax.Array, Tree]:
    return run.head(run.with_rest(params, rest), output, microbatch)

  (_, sums), (of_rest, dy) = jax.value_and_grad(loss, (0, 1), has_aux=True)(
    run.rest(params), output
  )
  return sums, dy, of_rest


def _embed_backward(
  run: PipelineRun, params: Tree, dx: Tree, index: jax.Array, grads: Tree, condition: jax.Array
) -> Tree:
  """Returns `grads` plus the gradients of the embeddings of a microbatch, if `condition`."""

  def embedded(rest: Tree) -> Tree:
    return run.embed(run.with_rest(params, rest), run.microbatch(index))

  def update(rest: Tree) -> Tree:
    return add(rest, jax.vjp(embedded, run.rest(params))[1](dx)[0])

  return run.with_rest(grads, update_if(condition, update, run.rest(grads)))
