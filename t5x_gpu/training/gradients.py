"""Gradients of the summed loss over the global batch, and the loss alone.

Losses are sums over target tokens, so accumulation, parallelism and padding cannot change them.
Gradients are accumulated on each device and summed over devices once per step: a layer's in the
backward pass of the last microbatch, as soon as they are known, so that the network works while
other layers compute. If `fsdp` splits parameters or gradients, all microbatches go through a layer
before the next one. A pipeline and ZeRO-1 sum at the end.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from t5x_gpu.errors import ModelError
from t5x_gpu.models.losses import Sums
from t5x_gpu.models.model import LayeredModel, Model, missing_members
from t5x_gpu.partitioning.layer_stacks import ONLY, run_layers, stacks_of
from t5x_gpu.partitioning.manual_region import Pipeline, Region, is_places
from t5x_gpu.partitioning.pipeline import pipeline_parallel
from t5x_gpu.training import breadth_first
from t5x_gpu.training.trainable import Trained

Batch = Mapping[str, jax.Array]
# (params, batch, dropout key) -> (gradients of the summed loss, sums).
GradientsFn = Callable[[Any, Batch, jax.Array], tuple[Any, Sums]]


def make_gradients(
  *,
  model: Model,
  region: Region,
  names: Any,
  num_microbatches: int = 1,
  trained: Trained = Trained(),
) -> GradientsFn:
  """Returns the function (params, batch, dropout_key) -> (gradients, sums) of global arrays.

  `params` are as stored, with padding; `gradients` has a leaf per trained parameter, without.

  Args:
    model: a LayeredModel for a pipeline or accumulation by layer.
    region: how the step is split.
    names: tree of AxisNames of the parameters.
    num_microbatches: parts into which each device's rows are cut and computed in turn.
    trained: which parameters are trained.
  Raises:
    ModelError: the model lacks parts that a pipeline or accumulation by layer needs.
  """
  in_parts = region.reduces_in_backward or region.sums_in_backward
  in_layers = not missing_members(model, LayeredModel) and (
    region.reduces_in_backward or getattr(model, 'gathers_layers', False)
  )
  by_layer = region.reduces_in_backward and num_microbatches > 1 and region.accumulate_by == 'layer'
  _check_parts(model, pipeline=region.pipeline is not None, by_layer=by_layer)
  trained_names, frozen_names = trained.split(names)

  def local(parts: Any, kept: Any, batch: Batch, dropout_key: jax.Array) -> tuple[Any, Sums]:
    kept, batch, dropout_key = jax.tree.map(region.varying, (kept, batch, dropout_key))
    kept, frozen = trained.split(kept)
    frozen = region.frozen(frozen, frozen_names)

    def grads_and_sums(parts: Any, batch: Batch, **reduction: Any) -> tuple[Any, Sums]:
      def loss_sum(parts: Any) -> tuple[jax.Array, Sums]:
        params = region.parameters(parts, kept, trained_names, in_layers=in_layers, **reduction)
        params = trained.join(params, frozen)
        sums = _loss(model, params, batch, dropout_key, num_microbatches if by_layer else None)
        return sums['loss'][0], jax.tree.map(region.varying, sums)

      if region.pipeline is None:
        return jax.grad(loss_sum, has_aux=True)(parts)
      pieces, microbatches = _pipeline_input(model, batch, region.pipeline, dropout_key)
      options = dict(
        complete=lambda params: trained.join(params, frozen), **region.pipeline.options
      )
      return pipeline_parallel.value_and_grad(
        pieces, parts, microbatches, varying_axes=region.axes, **options
      )

    parts = parts if in_parts else region.whole(kept, trained_names)
    count = 1 if by_layer else num_microbatches
    return _summed(grads_and_sums, parts, batch, count, region, trained_names)

  def gradients(params: Any, batch: Batch, dropout_key: jax.Array) -> tuple[Any, Sums]:
    batch = region.with_rows(batch)
    specs = (region.part_specs(trained_names), region.kept_specs(names))
    local_to_global = region.map(
      local,
      in_specs=(*specs, region.batch_specs(batch), PartitionSpec()),
      out_specs=(region.gradient_specs(trained_names), PartitionSpec()),
      marked=False,
    )
    parts = region.padded_parts(trained.split(params)[0], trained_names)
    grads, sums = local_to_global(parts, params, batch, dropout_key)
    return region.unpadded_gradients(grads, trained_names), sums

  return gradients


def make_eval_step(*, model: Model, region: Region, names: Any) -> Callable[[Any, Batch], Sums]:
  """Returns the function (params, batch) -> sums, without dropout."""

  def local(params: Any, batch: Batch) -> Sums:
    if region.pipeline is None:
      return region.total(model.loss(region.parameters(params, params, names), batch))
    pipeline = region.pipeline.for_rows(batch['rows'].shape[0])
    pieces, microbatches = _pipeline_input(model, batch, pipeline, None)
    return region.total(
      pipeline_parallel.forward(
        pieces,
        region.whole(params, names),
        microbatches,
        varying_axes=region.axes,
        **pipeline.options,
      )
    )

  def eval_step(params: Any, batch: Batch) -> Sums:
    batch = region.with_rows(batch)
    return region.map(
      local,
      in_specs=(region.kept_specs(names), region.batch_specs(batch)),
      out_specs=PartitionSpec(),
    )(params, batch)

  return eval_step


def _check_parts(model: Model, *, pipeline: bool, by_layer: bool) -> None:
  """Raises ModelError if the model lacks parts that a pipeline or accumulation by layer needs."""
  missing = missing_members(model, LayeredModel) if pipeline or by_layer else []
  if by_layer and not hasattr(getattr(model, 'config', None), 'compute_dtype'):
    missing.append('config.compute_dtype')
  if missing:
    instead = 'stage = 1' if pipeline else "accumulate_by = 'microbatch'"
    raise ModelError(
      f'{"A pipeline" if pipeline else "Accumulation by layer"} needs a model in three parts; '
      f'{type(model).__name__} lacks {", ".join(missing)}.',
      fix=f'Set Partitioner.{instead}, or add them to the model (LayeredModel in models/model.py).',
      docs='add_a_model.md#when-the-layer-is-not-enough',
    )


def _loss(
  model: Model, params: Any, batch: Batch, dropout_key: jax.Array, count: Optional[int]
) -> Sums:
  """Returns the sums of local rows; with a `count`, of that many microbatches layer by layer."""
  if count is None:
    return model.loss(params, batch, dropout_key=dropout_key)
  same, microbatches = _split_rows(batch, count)
  return breadth_first.loss(model, params, batch, microbatches, same, dropout_key=dropout_key)


@dataclasses.dataclass(frozen=True)
class _Pieces:
  """A model for the pipeline, with the arguments bound that all microbatches share."""

  model: LayeredModel
  same: Batch
  dropout_key: Optional[jax.Array]

  @property
  def stacks(self) -> tuple[str, ...]:
    return stacks_of(self.model)

  def embed(self, params: Any, microbatch: Batch) -> Any:
    return self.model.embed(params, {**microbatch, **self.same}, dropout_key=self.dropout_key)

  def run_layers(
    self, params: Any, x: Any, microbatch: Batch, first_layer: Any, stack: str = ONLY
  ) -> Any:
    return run_layers(
      self.model,
      params,
      x,
      {**microbatch, **self.same},
      stack=stack,
      dropout_key=self.dropout_key,
      first_layer=first_layer,
    )

  def head(self, params: Any, x: Any, microbatch: Batch) -> Sums:
    return self.model.head(params, x, {**microbatch, **self.same}, dropout_key=self.dropout_key)


def _pipeline_input(
  model: LayeredModel, batch: Batch, pipeline: Pipeline, dropout_key: Optional[jax.Array]
) -> tuple[_Pieces, Batch]:
  """Returns the model in parts and the microbatches of the local rows."""
  same, microbatches = _split_rows(batch, pipeline.num_microbatches)
  return _Pieces(model, same, dropout_key), microbatches


def _split_rows(batch: Batch, count: int) -> tuple[Batch, Batch]:
  """Returns (features without rows, features with rows as [count, rows / count, ...])."""
  same = {name: x for name, x in batch.items() if is_places(name)}
  return same, {
    name: x.reshape(count, x.shape[0] // count, *x.shape[1:])
    for name, x in batch.items()
    if name not in same
  }


def _summed(
  grads_and_sums: Callable[..., tuple[Any, Sums]],
  parts: Any,
  batch: Batch,
  num_microbatches: int,
  region: Region,
  names: Any,
) -> tuple[Any, Sums]:
  """Returns (gradients, sums) over all microbatches and devices."""
  copies = region.copies(parts, names)
  if region.sums_in_backward:
    grads, sums = _accumulate_then_sum(grads_and_sums, copies, batch, num_microbatches, region)
    return region.sum_copies(grads, parts, names), region.total(sums)
  copies = jax.tree.map(region.varying, copies)
  grads, sums = _accumulate(grads_and_sums, copies, batch, num_microbatches, region)
  grads = region.sum_copies(grads, parts, names)
  return region.reduce_gradients(grads, names), region.total(sums)


def _accumulate_then_sum(
  grads_and_sums: Callable[..., tuple[Any, Sums]],
  parts: Any,
  batch: Batch,
  num_microbatches: int,
  region: Region,
) -> tuple[Any, Sums]:
  """Returns (gradients, sums) over all microbatches; the last one sums gradients over devices.

  Its backward pass adds those of the earlier microbatches before it sums.
  """
  if num_microbatches == 1:
    return grads_and_sums(parts, batch, sums=True)
  same, microbatches = _split_rows(batch, num_microbatches)
  first, last = ({name: x[part] for name, x in microbatches.items()} for part in (slice(-1), -1))
  earlier, sums = _accumulated(
    grads_and_sums, jax.tree.map(region.varying, parts), first, same, region
  )
  grads, of_last = grads_and_sums(parts, {**last, **same}, sums=True, earlier=earlier)
  return grads, jax.tree.map(jnp.add, sums, of_last)


def _accumulate(
  grads_and_sums: Callable[[Any, Batch], tuple[Any, Sums]],
  parts: Any,
  batch: Batch,
  num_microbatches: int,
  region: Region,
) -> tuple[Any, Sums]:
  """Returns (gradients, sums) over all microbatches of local rows."""
  if num_microbatches == 1:
    return grads_and_sums(parts, batch)
  same, microbatches = _split_rows(batch, num_microbatches)
  return _accumulated(grads_and_sums, parts, microbatches, same, region)


def _accumulated(
  grads_and_sums: Callable[[Any, Batch], tuple[Any, Sums]],
  parts: Any,
  microbatches: Batch,
  same: Batch,
  region: Region,
) -> tuple[Any, Sums]:
  """Returns (gradients, sums) over `microbatches` [count, rows, ...]."""

  def body(carry: Any, microbatch: Batch) -> tuple[Any, None]:
    return jax.tree.map(jnp.add, carry, grads_and_sums(parts, {**microbatch, **same})), None

  first = jax.tree.map(lambda x: x[0], microbatches)
  zeros = jax.tree.map(
    lambda x: region.varying(jnp.zeros(x.shape, x.dtype)),
    jax.eval_shape(grads_and_sums, parts, {**first, **same}),
  )
  return jax.lax.scan(body, zeros, microbatches)[0]
