"""One update: (state, batch) -> (state, metrics). A pure function, jitted by the layout.

Losses are sums over target tokens, so accumulation, parallelism and padding cannot change them.
Gradients of the *summed* loss are accumulated on each device and summed over devices once per step:
each layer's as soon as the backward pass of the last microbatch has them, so that the network works
while other layers compute. If `fsdp` splits parameters or gradients, all microbatches go through a
layer before the next layer (`breadth_first_loss`). A pipeline sums at the end, unless its last tick
does (`pipeline.LayerSums`). The sum is divided once, by the weight of the whole global batch.
`StepConfig` holds the settings, which plan, bench and parity read, too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Optional, Union

import flax.struct
import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec

from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.errors import ConfigError, ModelError, did_you_mean
from t5x_gpu.layers import fp8
from t5x_gpu.models.losses import Sums, averaged_per_sequence, checked_sums
from t5x_gpu.models.model import (
  PIECES,
  Model,
  compute_dtype,
  config_of,
  fp8_scaling_of,
  is_layered,
  owner_of_loss,
)
from t5x_gpu.models.precision import in_8_bits, kernels_converted_once, rounded_once
from t5x_gpu.models.remat import POLICIES, REPEATS_MATMULS
from t5x_gpu.partitioning import pipeline as pipeline_lib
from t5x_gpu.partitioning.layer_stacks import (
  ONLY,
  layers_of,
  member_of,
  num_layers,
  prefix_of,
  run_layers,
  with_layers,
  with_member,
  without_layers,
)
from t5x_gpu.partitioning.parameters import is_parameter, whole
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.partitioning.pipeline_schedules import Timetable
from t5x_gpu.partitioning.region import Reduction, Region, is_places
from t5x_gpu.partitioning.trees import Batch, Gradients, Index, ParamNames, Params, Path, Tree
from t5x_gpu.runtime.distributed import DistributedConfig
from t5x_gpu.training.optimizers import Optimizer, checked_update
from t5x_gpu.training.schedules import Schedule, checked_rate, replica_factor
from t5x_gpu.training.spikes import SpikeConfig, group_norms
from t5x_gpu.training.state import (
  RunForm,
  Trained,
  TrainState,
  history_of,
  trained_of,
  with_kernel_amaxes,
)

# Divisors that depend on the batch -> the loss whose gradients the step takes.
_REAL, _TOTAL, _SEQUENCES = (
  'NUM_REAL_TARGET_TOKENS',
  'NUM_TOTAL_TARGET_TOKENS',
  'AVERAGE_PER_SEQUENCE',
)
NORMALIZERS = {
  _REAL: 'the mean over target tokens, as None',
  _TOTAL: 'the sum over target tokens, divided by the positions of the batch, padding included',
  _SEQUENCES: 'the mean over sequences of the mean over their target tokens',
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig:
  """Settings of a training step and of the processes that compute it, named as `train.NAME` in gin.

  Attributes:
    model: a model from models/, or a custom Model.
    train_dataset_cfg: training data; its lengths and batch size are the shapes of the step.
    partitioner: how to split the run over the devices.
    optimizer: from training/optimizers or training/adafactor.
    learning_rate: schedule, a function of the step.
    random_seed: for initialization and dropout; DatasetConfig.seed sets the order of the data.
    num_microbatches: parts of the batch that are computed one after the other, to save memory.
    max_grad_norm: global norm to which gradients are clipped; None for no clipping.
    loss_normalizing_factor: divisor of the summed loss and its gradients: a number, or one of
      `NORMALIZERS` (T5X's names). None divides by the number of target tokens. 1.0, which is T5X's
      None, keeps the sum: batches with more tokens weigh more.
    learning_rate_scaling: 'linear' or 'sqrt' in the number of replicas; None for no scaling.
    spike_cfg: which steps to skip.
    distributed_cfg: how long the processes wait for each other.
    xla_preset: preset of XLA and NCCL settings (docs/xla_flags.md).
  """

  model: Model
  train_dataset_cfg: DatasetConfig
  partitioner: Partitioner
  optimizer: Optimizer
  learning_rate: Schedule
  random_seed: int = 0
  num_microbatches: int = 1
  max_grad_norm: Optional[float] = None
  loss_normalizing_factor: Union[float, str, None] = None
  learning_rate_scaling: Optional[str] = None
  spike_cfg: SpikeConfig = SpikeConfig()
  distributed_cfg: DistributedConfig = DistributedConfig()
  xla_preset: str = 'default'


# Metric name -> (sum, weight); norms and the learning rate have weight 1.
StepFn = Callable[[TrainState, Batch], tuple[TrainState, Sums]]


def make_train_step(config: StepConfig, form: RunForm, spec: BatchSpec) -> StepFn:
  """Returns the function that makes one update.

  The key of dropout is fold_in(random_seed, step), on any topology and after a resume.

  Args:
    config: the run's configuration.
    form: how the state is stored between steps.
    spec: the batch of the data; the batch of a step may have more rows, of weight 0.
  Raises:
    ModelError: as `make_gradients` and `history_of`.
    ConfigError: as `replica_factor`.
  """
  gradients, layout, spikes = make_gradients(config, form), form.layout, config.spike_cfg
  factor = replica_factor(config.learning_rate_scaling, layout.batch_parts)
  history, trained = history_of(config.model, layout.region), trained_of(config.model)
  names, _ = trained.split(form.names.params)

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Sums]:
    dropout_key = jax.random.fold_in(jax.random.key(config.random_seed), state.step)
    amaxes = {} if history is None else history.amaxes(state.fp8_history)
    grads, sums, amaxes = gradients(state.params, amaxes, _weighted(config, batch), dropout_key)
    divisor = config.loss_normalizing_factor
    if divisor == _TOTAL:
      divisor = max(math.prod(s) for name, s in spec.shapes.items() if _has_loss_weights(name))
    elif divisor is None or isinstance(divisor, str):
      divisor = jnp.maximum(sums['loss'][1], 1.0)  # a batch of padding gives zeros, not NaN
    grads = jax.tree.map(lambda g: g / divisor, grads)
    grad_norm = _global_norm(grads)
    groups = group_norms(grads, spikes.group_depth)
    if config.max_grad_norm is not None:
      clip = jnp.minimum(1.0, config.max_grad_norm / jnp.maximum(grad_norm, 1e-12))
      grads = jax.tree.map(lambda g: g * clip, grads)
    rate = checked_rate(config.learning_rate, state.step)
    learning_rate = jnp.asarray(factor * rate, jnp.float32)
    state = form.unpadded(state)  # `grads` have the true shapes, which optimizers see
    params, frozen = trained.split(state.params)
    old = params, state.opt_state, state.fp8_history
    updated = config.optimizer.update(
      grads, state.opt_state, params, names=names, learning_rate=learning_rate, step=state.step
    )
    params, opt_state = checked_update(
      config.optimizer, updated, params=params, state=state.opt_state
    )
    new = params, opt_state, old[2] if history is None else history.after(old[2], amaxes)
    (params, opt_state, fp8_history), norms, skipped = spikes.chosen(
      old, new, loss=sums['loss'][0], grad_norm=grad_norm, norms=state.grad_norms
    )
    # Norm of the new parameters, so that an update that ruins them is noticed before it is saved.
    # Without the barrier, XLA on GPUs adds it up in the kernel that computes the parameters, and
    # AdamW's moments need another kernel: 36 instead of 32 bytes per parameter.
    param_norm = _global_norm(jax.lax.optimization_barrier(params))
    norms_now = {'grad_norm': grad_norm, 'param_norm': param_norm}
    numbers = {**norms_now, 'learning_rate': learning_rate, **groups, **skipped}
    sums = {**sums, **{name: (value, jnp.ones(())) for name, value in numbers.items()}}
    params = trained.join(params, frozen)
    new = TrainState(state.step + 1, params, opt_state, fp8_history, norms)
    return form.padded(new), sums

  return train_step


def _weighted(config: StepConfig, batch: Batch) -> Batch:
  if config.loss_normalizing_factor == _SEQUENCES:
    return averaged_per_sequence(batch)
  return batch


def _has_loss_weights(feature: str) -> bool:
  return feature.endswith('_loss_weights')


def _global_norm(tree: Tree) -> jax.Array:
  return jnp.sqrt(sum(jnp.sum(jax.lax.square(x)) for x in jax.tree.leaves(tree)))


# (params, amaxes, batch, dropout key) -> (gradients of the summed loss, sums, largest values).
GradientsFn = Callable[[Params, Tree, Batch, jax.Array], tuple[Gradients, Sums, Tree]]


@flax.struct.dataclass
class _Results:
  """The results of a pass over some rows.

  Attributes:
    grads: gradients of the summed loss.
    sums: sums of the loss and other metrics.
    amaxes: gradients of `amaxes`: the largest values of FP8 operands.
  """

  grads: Gradients
  sums: Sums
  amaxes: Tree

  def before(self, later: '_Results') -> '_Results':
    """Returns the results of both passes; `later.grads` already contain `self.grads`."""
    sums = jax.tree.map(jnp.add, self.sums, later.sums)
    return _Results(later.grads, sums, jax.tree.map(jnp.maximum, self.amaxes, later.amaxes))


# (parts, local rows, how gradients are reduced) -> the results of a pass over these rows.
_Pass = Callable[[Params, Batch, Reduction], _Results]


def make_gradients(config: StepConfig, form: RunForm) -> GradientsFn:
  """Returns (params, amaxes, batch, dropout_key) -> (gradients, sums, amaxes) of global arrays.

  `params` are as stored, with padding; `gradients` has a leaf per trained parameter, without
  padding. The input `amaxes` set the scales of FP8 operands (`state.Fp8History`); the output
  `amaxes` are from this step.

  Args:
    config: the run's configuration; its model has `PIECES` for a pipeline or accumulation by layer.
    form: how the state is stored and the step is split.
  Raises:
    ModelError: the model lacks pieces that a pipeline or accumulation by layer needs.
  """
  model, num_microbatches, trained = config.model, config.num_microbatches, trained_of(config.model)
  region, names = form.layout.region, form.names.params
  by_layer = region.by_layer(num_microbatches)
  _check_pieces(model, pipeline=region.pipeline is not None, by_layer=by_layer)
  if region.sums_in_last_tick and not model.gathers_layers:  # the model does not call `whole`
    region = dataclasses.replace(region, overlap_layers=False)
  trained_names, frozen_names = trained.split(names)
  dtype = compute_dtype(model)
  reduction = _reduction(model, region, trained_names, by_layer=by_layer)
  is_fp8 = fp8_scaling_of(model) is not None
  last = reduction  # in the last microbatch
  if region.sums_in_backward or region.sums_in_last_tick:
    last = dataclasses.replace(reduction, over_all_axes=True)

  def local(parts: Params, *others: Tree) -> tuple[Gradients, Sums, Tree]:
    # `parts` are differentiated; `kept` are the same parameters as stored, and the frozen ones.
    kept, amaxes, batch, dropout_key = jax.tree.map(region.varying, others)
    kept, frozen = trained.split(kept)
    frozen = region.frozen(frozen, frozen_names, dtype)

    def model_params(parts: Params, amaxes: Tree, reduction: Reduction) -> Params:
      params = region.parameters(parts, kept, trained_names, reduction)
      return with_kernel_amaxes(trained.join(params, frozen), amaxes)

    def one_pass(parts: Params, batch: Batch, reduction: Reduction) -> _Results:
      def loss_sum(parts: Params, amaxes: Tree) -> tuple[jax.Array, Sums]:
        params = model_params(parts, amaxes, reduction)
        if convert is not None:
          params = convert(params)
        if by_layer:
          sums = breadth_first_loss(model, params, batch, num_microbatches, dropout_key=dropout_key)
        else:
          sums = checked_sums(model.loss(params, batch, dropout_key=dropout_key), model)
        return sums['loss'][0], jax.tree.map(region.varying, sums)

      if region.pipeline is None:
        (grads, largest), sums = jax.grad(loss_sum, (0, 1), has_aux=True)(parts, amaxes)
        return _Results(grads, sums, largest)
      return _pass_in_pipeline(
        model,
        parts,
        batch,
        region,
        dropout_key,
        complete=_completed(model, trained, parts, frozen),
        layer_sums=region.layer_sums(trained_names) if reduction.over_all_axes else None,
        earlier=reduction.earlier,
      )

    if not region.sums_in_backward:
      parts = jax.tree.map(region.varying, region.gathered(kept, trained_names, dtype))
    copies = region.copies(parts, trained_names)
    early = region.copies(kept, trained_names) if region.scatters_once else copies
    passes, convert = 1 if by_layer else num_microbatches, None
    if is_fp8 and passes > 1 and model.gathers_layers and region.pipeline is None and not amaxes:
      params = model_params(jax.tree.map(region.varying, early), amaxes, reduction)
      convert = _converted_once(model, params, rounds=False)
    results = _over_microbatches(one_pass, reduction, last, early, copies, batch, passes, region)
    grads = region.sum_copies(results.grads, parts, trained_names)
    if not region.sums_in_backward:
      grads = region.reduce_gradients(grads, trained_names)
    return grads, region.total(results.sums), region.largest(results.amaxes)

  def gradients(
    params: Params, amaxes: Tree, batch: Batch, dropout_key: jax.Array
  ) -> tuple[Gradients, Sums, Tree]:
    batch = region.with_rows(batch)
    specs = (region.part_specs(trained_names), region.kept_specs(names))
    local_to_global = region.map(
      local,
      in_specs=(*specs, PartitionSpec(), region.batch_specs(batch), PartitionSpec()),
      out_specs=(region.gradient_specs(trained_names), PartitionSpec(), PartitionSpec()),
      marked=False,
    )
    parts = region.padded_parts(trained.split(params)[0], trained_names)
    grads, sums, amaxes = local_to_global(parts, params, amaxes, batch, dropout_key)
    return region.unpadded_gradients(grads, trained_names), sums, amaxes

  return gradients


def _reduction(model: Model, region: Region, names: ParamNames, *, by_layer: bool) -> Reduction:
  """Returns how the model's backward pass reduces gradients, before the last microbatch."""
  gathers = model.gathers_layers
  in_layers = is_layered(model) and (region.reduces_in_backward or gathers)
  if by_layer or not gathers or not region.layers_ahead:
    return Reduction(in_layers=in_layers)
  prefix = prefix_of(model.stacks[0])

  def is_first(path: Path, _: Any) -> bool:
    return jax.tree_util.keystr(path, simple=True, separator='/').startswith(f'{prefix}/')

  first_stack = jax.tree_util.tree_map_with_path(is_first, names)
  return Reduction(in_layers=in_layers, first_stack=first_stack)


def _over_microbatches(
  one_pass: _Pass,
  reduction: Reduction,
  last: Reduction,
  early_parts: Params,
  parts: Params,
  batch: Batch,
  num_microbatches: int,
  region: Region,
) -> _Results:
  """Returns the results of all microbatches of local rows.

  If `last`, the reduction in the last microbatch, is over all axes, the backward pass of that
  microbatch first adds the gradients of the earlier ones, of `early_parts`.
  """
  if num_microbatches == 1:
    return one_pass(parts, batch, last)
  same, microbatches = _split_rows(batch, num_microbatches)
  if not last.over_all_axes:
    return _scan_microbatches(one_pass, reduction, parts, microbatches, same, region)
  first, final = ({name: x[part] for name, x in microbatches.items()} for part in (slice(-1), -1))
  earlier = _scan_microbatches(
    one_pass, reduction, jax.tree.map(region.varying, early_parts), first, same, region
  )
  # Otherwise XLA on GPUs computes activations of this microbatch before the others are done with
  # theirs; they then do not fit, or leave no memory to hide collectives.
  final, grads = jax.lax.optimization_barrier((final, earlier.grads))
  last = dataclasses.replace(last, earlier=grads)
  return earlier.before(one_pass(parts, {**final, **same}, last))


def _scan_microbatches(
  one_pass: _Pass,
  reduction: Reduction,
  parts: Params,
  microbatches: Batch,
  same: Batch,
  region: Region,
) -> _Results:
  """Returns the results of `microbatches` [count, rows, ...]."""

  def body(carry: _Results, microbatch: Batch) -> tuple[_Results, None]:
    carry, microbatch = jax.lax.optimization_barrier((carry, microbatch))  # one after the other
    adding = dataclasses.replace(reduction, earlier=carry.grads)
    return carry.before(one_pass(parts, {**microbatch, **same}, adding)), None

  first = jax.tree.map(lambda x: x[0], microbatches)
  zeros = jax.tree.map(
    lambda x: region.varying(jnp.zeros(x.shape, x.dtype)),
    jax.eval_shape(functools.partial(one_pass, reduction=reduction), parts, {**first, **same}),
  )
  return jax.lax.scan(body, zeros, microbatches)[0]


def _split_rows(batch: Batch, count: int) -> tuple[Batch, Batch]:
  """Returns (features without rows, features with rows as [count, rows / count, ...])."""
  same = {name: x for name, x in batch.items() if is_places(name)}
  return same, {
    name: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    for name, x in batch.items()
    if name not in same
  }


def breadth_first_loss(
  model: Model, params: Params, batch: Batch, num_microbatches: int, *, dropout_key: jax.Array
) -> Sums:
  """Returns the sums of `model.loss`; takes all microbatches through a layer before the next layer.

  If each microbatch went through all layers first, split parameters (ZeRO-3) would be gathered, and
  their gradients reduced, for every microbatch. Here both happen once per layer and step, for any
  number of microbatches. Memory holds every layer's input for all rows, and one layer's activations
  for one microbatch: the backward pass recomputes layers.
  Source: Lamy-Poirier 2023 (Breadth-First Pipeline Parallelism), section 4.2.

  Args:
    model: the model; parameters are gathered in its `compute_dtype`.
    params: parameters in the region; leaves of 'layers' are stacked.
    batch: all local rows.
    num_microbatches: number of parts that the rows are split into.
    dropout_key: key of the step.
  """
  same, microbatches = _split_rows(batch, num_microbatches)
  parted = _parted(microbatches)
  recomputed = functools.partial(
    jax.checkpoint, policy=POLICIES[_policy_by_layer(model)], prevent_cse=False
  )

  def in_float32(params: Params) -> Params:
    # So that the gradients of the microbatches add up in float32.
    return whole(params, compute_dtype(model), wide=True)

  stacks = tuple(model.stacks)
  rest = in_float32(without_layers(params, stacks))

  # The scan carries, and so stores for each layer, only the stack's own part of the activation. The
  # loop over microbatches leaves the first one out: XLA hides a layer's gathers and reductions
  # behind the first one's kernels one after the other, but only one of them behind a whole loop.
  def layer(
    stack: str, x: _Parted, part: _Parted, of_layer: tuple[Params, jax.Array]
  ) -> tuple[_Parted, None]:
    weights, number = in_float32(of_layer[0]), of_layer[1]
    if model.takes_rounded_kernels:
      weights = rounded_once(weights, compute_dtype(model))
    stacked = jax.tree.map(lambda w: w[None], weights)
    amaxes = [fp8.copies(a, num_microbatches) for a in fp8.amaxes_of(stacked)]

    @recomputed
    def one(of_microbatch: tuple[Tree, Batch, list[jax.Array]]) -> Tree:
      x, microbatch, amaxes = of_microbatch
      y = run_layers(
        model,
        with_layers(rest, stack, fp8.with_amaxes(stacked, amaxes)),
        jax.tree.map(_row_major, x),
        {**microbatch, **same},
        stack=stack,
        dropout_key=dropout_key,
        first_layer=number,
      )
      return jax.tree.map(_row_major, member_of(y, stacks, stack))

    first, others = (
      (with_member(x, stacks, stack, part), microbatches, amaxes)
      for x, part, microbatches, amaxes in zip(x, part, parted, _parted(amaxes), strict=True)
    )
    return (one(first), jax.lax.map(one, others)), None

  def head(of_microbatch: tuple[Tree, Batch]) -> Sums:
    x, microbatch = of_microbatch
    sums = model.head(rest, x, {**microbatch, **same}, dropout_key=dropout_key)
    return checked_sums(sums, model)

  x = model.embed(rest, batch, dropout_key=dropout_key)
  x = _parted(jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), x))
  for stack in stacks:
    body = recomputed(functools.partial(layer, stack, x))
    layers, count = layers_of(params, stack), num_layers(params, stack)
    scaling = fp8_scaling_of(model)
    if scaling is not None:
      layers = in_8_bits(layers, scaling)
    part = tuple(member_of(group, stacks, stack) for group in x)
    part, _ = jax.lax.scan(body, part, (layers, jnp.arange(count)))
    x = tuple(with_member(group, stacks, stack, new) for group, new in zip(x, part, strict=True))
  x = jax.tree.map(lambda first, others: jnp.concatenate([first[None], others]), *x)
  if loss_takes_all_rows(model):
    x = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), x)
    return checked_sums(model.head(rest, x, batch, dropout_key=dropout_key), model)
  sums = jax.lax.map(jax.checkpoint(head, prevent_cse=False), (x, microbatches))
  return jax.tree.map(lambda s: s.sum(0), sums)


def _policy_by_layer(model: Model) -> str:
  config = config_of(model)
  return config.remat_policy if config and config.remat_policy in REPEATS_MATMULS else 'full'


def _row_major(x: jax.Array) -> jax.Array:
  """Returns `x`, in row-major order in memory.

  XLA may choose another order for a loop's arrays, and then transposes the stored inputs of all
  layers in front of the backward pass: 30 GiB twice, for Llama-3 8B with 131,072 tokens per GPU.
  """
  return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


# Trees of the first microbatch, without the leading dimension, and of the others.
_Parted = tuple[Tree, Tree]


def _parted(tree: Tree) -> _Parted:
  return jax.tree.map(lambda x: x[0], tree), jax.tree.map(lambda x: x[1:], tree)


def loss_takes_all_rows(model: Model) -> bool:
  """Returns whether the loss of accumulation by layer takes all rows at once.

  A loss that chooses its own number of chunks limits its logits for any number of rows, and
  computes its gradients in the forward pass. Otherwise the loss is computed per microbatch.
  """
  config = config_of(model)
  return config is not None and config.loss_chunks is None


def _pass_in_pipeline(
  model: Model,
  parts: Params,
  batch: Batch,
  region: Region,
  dropout_key: jax.Array,
  *,
  complete: Callable[[Params], Params],
  layer_sums: Optional[pipeline_lib.LayerSums],
  earlier: Optional[Gradients],
) -> _Results:
  """Returns the results of the local rows; keyword arguments as in `pipeline.value_and_grad`."""
  pieces, microbatches = _pipeline_input(model, batch, region.pipeline, dropout_key)
  grads, of_rows = pipeline_lib.value_and_grad(
    pieces,
    parts,
    microbatches,
    region.pipeline,
    varying_axes=region.axes,
    complete=complete,
    layer_sums=layer_sums,
    earlier=earlier,
  )
  return _Results(grads, of_rows, {})


def _completed(
  model: Model, trained: Trained, parts: Params, frozen: Params
) -> Callable[[Params], Params]:
  """Returns the function from differentiated to all parameters, for the ticks of a pipeline.

  Its kernels are converted for the matmuls here, not in each tick.

  Args:
    model: the model.
    trained: which parameters are trained.
    parts: whole trained parameters.
    frozen: the other parameters.
  """
  if not model.gathers_layers:
    return functools.partial(trained.join, frozen=frozen)
  convert = _converted_once(model, trained.join(parts, frozen), rounds=True)
  return lambda parts: convert(trained.join(parts, frozen))


def _converted_once(model: Model, params: Params, *, rounds: bool) -> Callable[[Params], Params]:
  """Returns a function that adds the kernels of `params`, converted for the matmuls, to `params`.

  Call it before a loop in which layers run several times; call the function inside.

  Args:
    model: the model; it `gathers_layers`.
    params: all parameters in the region.
    rounds: whether kernels that are not in 8 bits are rounded to the compute dtype.
  """
  options = dict(scaling=fp8_scaling_of(model), rounds=rounds and model.takes_rounded_kernels)
  params = jax.tree.map(lambda p: p.split if is_parameter(p) else p, params, is_leaf=is_parameter)
  added = {
    stack: kernels_converted_once(layers_of(params, stack), compute_dtype(model), **options)
    for stack in model.stacks
  }

  def convert(params: Params) -> Params:
    for stack, of_stack in added.items():
      params = with_layers(params, stack, of_stack(layers_of(params, stack)))
    return params

  return convert


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """A model for the pipeline, with the arguments that all microbatches share already bound."""

  model: Model
  same: Batch
  dropout_key: Optional[jax.Array]

  @property
  def stacks(self) -> tuple[str, ...]:
    return tuple(self.model.stacks)

  @property
  def gathers_layers(self) -> bool:
    return self.model.gathers_layers

  def embed(self, params: Params, microbatch: Batch) -> Tree:
    return self.model.embed(params, {**microbatch, **self.same}, dropout_key=self.dropout_key)

  def run_layers(
    self, params: Params, x: Tree, microbatch: Batch, first_layer: Index, stack: str = ONLY
  ) -> Tree:
    return run_layers(
      self.model,
      params,
      x,
      {**microbatch, **self.same},
      stack=stack,
      dropout_key=self.dropout_key,
      first_layer=first_layer,
    )

  def head(self, params: Params, x: Tree, microbatch: Batch) -> Sums:
    batch = {**microbatch, **self.same}
    return checked_sums(self.model.head(params, x, batch, dropout_key=self.dropout_key), self.model)


def _pipeline_input(
  model: Model, batch: Batch, pipeline: Timetable, dropout_key: Optional[jax.Array]
) -> tuple[_Pieces, Batch]:
  """Returns the model in parts and the microbatches of the local rows."""
  same, microbatches = _split_rows(batch, pipeline.num_microbatches)
  return _Pieces(model, same, dropout_key), microbatches


def make_eval_step(config: StepConfig, form: RunForm) -> Callable[[Params, Batch], Sums]:
  """Returns the function (params, batch) -> sums, without dropout."""
  model, region, names = config.model, form.layout.region, form.names.params

  def local(params: Params, batch: Batch) -> Sums:
    if region.pipeline is None:
      sums = model.loss(region.parameters(params, params, names), batch)
      return region.total(checked_sums(sums, model))
    pipeline = region.pipeline.for_rows(batch['rows'].shape[0])
    pieces, microbatches = _pipeline_input(model, batch, pipeline, None)
    return region.total(
      pipeline_lib.forward(
        pieces,
        region.gathered(params, names, compute_dtype(model)),
        microbatches,
        pipeline,
        varying_axes=region.axes,
      )
    )

  def eval_step(params: Params, batch: Batch) -> Sums:
    batch = region.with_rows(_weighted(config, batch))
    return region.map(
      local,
      in_specs=(region.kept_specs(names), region.batch_specs(batch)),
      out_specs=PartitionSpec(),
    )(params, batch)

  return eval_step


def _check_pieces(model: Model, *, pipeline: bool, by_layer: bool) -> None:
  """Raises ModelError if the model lacks pieces that a pipeline or accumulation by layer needs."""
  missing = model.missing(*PIECES) if pipeline or by_layer else []
  if missing:
    owner, parts = owner_of_loss(model), ', '.join(missing)
    what = 'A pipeline' if pipeline else 'Accumulation by layer'
    instead = 'stage = 1' if pipeline else "accumulate_by = 'microbatch'"
    raise ModelError(
      f'{what} needs a model in three parts; {type(model).__name__} lacks {parts}.'
      if owner is None
      else f'{what} computes the loss in three parts, and {owner}.loss replaces {parts}.',
      fix=f'Set Partitioner.{instead}, or add them to the model (Model in models/model.py).'
      if owner is None
      else f'Set Partitioner.{instead}. A loss that runs each layer once can be the three parts.',
      docs='add_a_model.md#when-the-layer-is-not-enough',
    )


def check_normalizer(config: StepConfig, spec: BatchSpec) -> None:
  """Raises ConfigError for an unknown `loss_normalizing_factor`, or one the loss does not have."""
  name = config.loss_normalizing_factor
  if not isinstance(name, str):
    return
  parameters = ('train.loss_normalizing_factor',)
  if name not in NORMALIZERS:
    raise ConfigError(
      f'train.loss_normalizing_factor = {name!r} is neither a number nor one of '
      f'{", ".join(NORMALIZERS)}.{did_you_mean(name, NORMALIZERS)}',
      fix='Set one of them, or None for the number of target tokens.',
      parameters=parameters,
    )
  lengths = config.train_dataset_cfg.task_feature_lengths
  pairs = config.model.feature_converter(lengths) == 'preference'
  if name != _REAL and (pairs or not any(map(_has_loss_weights, spec.shapes))):
    raise ConfigError(
      f'train.loss_normalizing_factor = {name!r} counts target tokens, and the loss of a '
      f'{type(config.model).__name__} is not one of target tokens.',
      fix='Set train.loss_normalizing_factor = None, the mean over what the model counts.',
      parameters=parameters,
    )


def check_microbatches(batch_size: int, num_microbatches: int) -> None:
  """Raises ConfigError unless the batch divides into microbatches."""
  if num_microbatches < 1 or batch_size % num_microbatches:
    raise ConfigError(
      f'BATCH_SIZE = {batch_size} cannot be divided into num_microbatches = {num_microbatches}.',
      fix=f'Set train.num_microbatches to a number that divides {batch_size}.',
      parameters=('BATCH_SIZE', 'train.num_microbatches'),
    )
