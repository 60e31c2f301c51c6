"""Pipeline parallelism: every stage holds some of the layers, and the batch passes through them.

What is split: `layers` of parameters and optimizer state over `stage`, and each device's rows into
microbatches, so that stages work on different microbatches at the same time. What moves: one
microbatch's activation per tick to the next stage, and its gradient back. No other way to split a
model has less traffic per step, so use it for the slowest link. When: layers do not fit even with
fsdp x model, or the network between hosts is too slow for fsdp. The price is the bubble, in which
stages wait (`bubble_fraction`): use several times more microbatches than stages.

Schedules: 'gpipe' keeps the input of every stage for every microbatch. '1f1b' keeps 2S-1 inputs for
any number of microbatches. 'circular' gives each stage R blocks of layers, for a bubble R
times smaller and R times the traffic. All recompute a stage's forward pass in the backward pass.

A model with two stacks (encoder and decoder) passes the stages twice: each stage has layers of
both, and microbatches run all encoder layers first. This needs 'gpipe' or 'circular', and at least
as many microbatches as stages.

The functions below run inside `jax.shard_map` with `stage` manual and every array varying over
`varying_axes`. Source: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (PipeDream-flush as 1F1B,
and interleaved stages), arXiv:2104.04473.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.axis_rules import AxisRules
from t5x_gpu.partitioning.pipeline.layer_sums import LayerSums, first_tick, last_tick
from t5x_gpu.partitioning.pipeline.pipeline_checks import check
from t5x_gpu.partitioning.pipeline.pipeline_run import (
  AXIS,
  Pieces,
  PipelineRun,
  Tree,
  add,
  at,
  put,
  where,
)
from t5x_gpu.partitioning.pipeline.pipeline_schedules import (
  SCHEDULES,
  Timetable,
  bubble_fraction,
  layer_order,
  traffic_per_step,
)

__all__ = [
  'SCHEDULES',
  'Pieces',
  'bubble_fraction',
  'check',
  'forward',
  'layer_order',
  'rules',
  'traffic_per_step',
  'value_and_grad',
]


def rules() -> AxisRules:
  """Returns the rules of pipeline parallelism."""
  return AxisRules(parameters={'layers': (AXIS,)})


def value_and_grad(
  pieces: Pieces,
  params: Tree,
  microbatches: Tree,
  *,
  schedule: str,
  num_stages: int,
  num_microbatches: int,
  varying_axes: Sequence[str],
  repeats: int = 1,
  num_stacks: int = 1,
  skip_idle: bool = True,
  complete: Callable[[Tree], Tree] = lambda params: params,
  layer_sums: Optional[LayerSums] = None,
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
    schedule: one of SCHEDULES.
    num_stages: size of `stage`.
    num_microbatches: at least num_stages for 'circular' and for several stacks.
    varying_axes: all manual mesh axes, including `stage`.
    repeats: blocks of layers per stage and stack, for 'circular'.
    num_stacks: stacks of the model; 1 for '1f1b' and without skip_idle.
    skip_idle: whether a stage without work skips its layers; otherwise it computes and discards.
    complete: `params` -> all parameters, including those without gradients.
    layer_sums: reduces the gradients of layers in the last backward tick; None if the caller
      reduces them. Requires one block per stage.
    earlier: gradients to add, for example of earlier microbatches.
  """
  table = Timetable(schedule, num_stages, num_microbatches, repeats, num_stacks)
  run = PipelineRun(pieces, microbatches, table, tuple(varying_axes), skip_idle, complete)
  if schedule == '1f1b':
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
  pieces: Pieces,
  params: Tree,
  microbatches: Tree,
  *,
  schedule: str,
  num_stages: int,
  num_microbatches: int,
  varying_axes: Sequence[str],
  repeats: int = 1,
  num_stacks: int = 1,
  skip_idle: bool = True,
) -> Tree:
  """Returns sums, local; for evaluation. Arguments as in `value_and_grad`."""
  table = Timetable(schedule, num_stages, num_microbatches, repeats, num_stacks)
  run = PipelineRun(pieces, microbatches, table, tuple(varying_axes), skip_idle)
  return _forward(run, params)


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
    if run.skip_idle:
      enters &= works
    x = jax.lax.cond(
      enters,
      lambda x: run.embed(params, run.microbatch(unit % table.num_microbatches)),
      lambda x: x,
      x,
    )

    def block(x: Tree) -> Tree:
      return run.run_block(params, x, unit, stage)

    return jax.lax.cond(works, block, lambda x: x, x) if run.skip_idle else block(x)

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
    y = jax.lax.cond(works & ~is_last, block, lambda x: x, x) if run.skip_idle else block(x)
    y = run.shift(y)  # during the backward pass

    works, unit = inside(table.backward_unit(t, stage))
    x = at(kept, (unit + stage) % table.kept_inputs)
    state = (dy, grads, sums)
    back = functools.partial(_backward, run, params, x, unit, stage)
    if run.skip_idle:
      dx, grads, sums = jax.lax.cond(
        works, lambda state: back(state, True), lambda state: state, state
      )
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
  works: Any,
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

  def head(dy: Tree, grads: Tree, sums: Tree) -> Tree:
    (_, new_sums), (dp, dy) = jax.value_and_grad(run.head, (0, 1), has_aux=True)(
      params, y, microbatch
    )
    return dy, add(grads, dp), add(sums, new_sums)

  dy, grads, sums = jax.lax.cond(
    (stage == run.table.num_stages - 1) & works, head, lambda *state: state, dy, grads, sums
  )
  dp, dx = transpose(dy)
  grads = where(works, add(grads, dp), grads)

  def embed(grads: Tree) -> Tree:
    return add(grads, jax.vjp(lambda p: run.embed(p, microbatch), params)[1](dx)[0])

  return dx, jax.lax.cond((stage == 0) & works, embed, lambda grads: grads, grads), sums


def _plus(grads: Tree, earlier: Optional[Tree]) -> Tree:
  return grads if earlier is None else add(grads, earlier)
