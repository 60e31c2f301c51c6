"""Matrix products of rows in groups, with a separate kernel per group, for dropless experts.

Rows of a group follow each other, and every group starts at a multiple of `block` rows. On Hopper
and Ampere GPUs, Tokamax's kernels (`ragged_dot`) compute the products. Elsewhere a loop takes one
block at a time and skips empty blocks. XLA's `ragged_dot` would multiply every row with every
kernel.
Source: Gale et al. 2022 (MegaBlocks), section 5.
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from typing import Optional, Union

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from t5x_gpu.layers.backends.choose import Hardware, hardware
from t5x_gpu.layers.backends.tokamax_internals import has_ragged_dot, library
from t5x_gpu.partitioning.axis_rules import split_axis, unmarked, varying
from t5x_gpu.runtime.main_log import log_once

# Compute capabilities for which Tokamax's kernels compile: Hopper; A100, A10, L4 and L40S.
MOSAIC = 9.0
TRITON = (8.0, 8.6, 8.9)


@flax.struct.dataclass
class Groups:
  """How rows are divided into groups.

  Attributes:
    sizes: int32 [groups], number of rows of each group, padding included: multiples of `block`.
    block: number of rows of a block.
  """

  sizes: jax.Array
  block: int = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class _Blocks:
  """Blocks of rows, for the loops.

  Attributes:
    sizes: as in `Groups`.
    group: uint32 [blocks], group of each block; arbitrary for an empty block.
    used: [blocks], whether a block has rows.
    zero: 0 in float32.
  """

  sizes: jax.Array
  group: jax.Array
  used: jax.Array
  zero: jax.Array


def grouped_matmul(
  rows: jax.Array, kernels: jax.Array, groups: Groups, *, split: str = 'last'
) -> jax.Array:
  """Returns [rows, ...features], each row times the kernel of its group; 0 after the last group.

  Args:
    rows: [rows, inputs], a multiple of `groups.block`; 0 after the last group.
    kernels: [groups, inputs, ...features].
    groups: groups of the rows.
    split: dimension of the kernels that tensor parallelism splits, 'last' or 'inputs'.
  """
  axes = _axes(rows, kernels, groups.sizes)
  rows, kernels, sizes = (varying(x, axes) for x in (rows, kernels, groups.sizes))
  first_rows = groups.block * jnp.arange(rows.shape[0] // groups.block)
  group = jnp.sum(first_rows[:, None] >= jnp.cumsum(sizes), axis=1)
  used = group < sizes.shape[0]
  blocks = _Blocks(
    sizes,
    jnp.where(used, group, 0).astype(jnp.uint32),
    used,
    (sizes[0] - sizes[0]).astype(jnp.float32),
  )
  return _product(_Split(split_axis('mlp'), split == 'inputs'), rows, kernels, blocks)


@dataclasses.dataclass(frozen=True)
class _Split:
  """How tensor parallelism splits the kernels.

  Attributes:
    axis: mesh axis, `model`; None without tensor parallelism.
    inputs: whether it splits the contracted dimension; otherwise the last dimension.
  """

  axis: Optional[str]
  inputs: bool

  @property
  def rows(self) -> PartitionSpec:
    return PartitionSpec(None, self.axis if self.inputs else None)

  def kernels(self, rank: int) -> PartitionSpec:
    if self.inputs:
      return PartitionSpec(None, self.axis)
    return PartitionSpec(*(None,) * (rank - 1), self.axis)

  def features(self, rank: int) -> PartitionSpec:
    """Returns the split of products with kernels of `rank` dimensions."""
    return PartitionSpec() if self.inputs else PartitionSpec(*(None,) * (rank - 2), self.axis)


_Residuals = tuple[jax.Array, jax.Array, _Blocks]  # rows, kernels, blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(split: _Split, rows: jax.Array, kernels: jax.Array, blocks: _Blocks) -> jax.Array:
  rank = kernels.ndim
  out = _beside(
    split,
    _rows_times_kernels,
    (rows, kernels, blocks),
    (split.rows, split.kernels(rank), PartitionSpec()),
    split.features(rank),
    summed=split.inputs,
  )
  return _masked(out, blocks)


def _forward(
  split: _Split, rows: jax.Array, kernels: jax.Array, blocks: _Blocks
) -> tuple[jax.Array, _Residuals]:
  return _product(split, rows, kernels, blocks), (rows, kernels, blocks)


def _backward(
  split: _Split, residuals: _Residuals, gradient: jax.Array
) -> tuple[Optional[jax.Array], ...]:
  rows, kernels, blocks = residuals
  rank = kernels.ndim
  of_rows = _beside(
    split,
    functools.partial(_rows_times_kernels, transposed=True),
    (gradient, kernels, blocks),
    (split.features(rank), split.kernels(rank), PartitionSpec()),
    split.rows,
    summed=not split.inputs,
  )
  of_kernels = _beside(
    split,
    _kernel_gradients,
    (rows, gradient, blocks),
    (split.rows, split.features(rank), PartitionSpec()),
    split.kernels(rank),
  )
  return _masked(of_rows, blocks), of_kernels.astype(kernels.dtype), None


_product.defvjp(_forward, _backward)


def _masked(out: jax.Array, blocks: _Blocks) -> jax.Array:
  """Returns `out` with zeros after the last group, where the kernels do not write."""
  if hardware().platform != 'gpu':
    return out
  used = jnp.arange(out.shape[0]) < jnp.sum(blocks.sizes)
  return jnp.where(used.reshape(-1, *(1,) * (out.ndim - 1)), out, 0)


def _beside(
  split: _Split,
  function: Callable[..., jax.Array],
  arrays: tuple[Union[jax.Array, _Blocks], ...],
  specs: tuple[PartitionSpec, ...],
  out: PartitionSpec,
  *,
  summed: bool = False,
) -> jax.Array:
  """Applies `function` to each device's part along `split.axis`; `summed` adds the results up."""
  axes, manual = {split.axis} - {None}, ()
  # Results of kernels are not marked as varying, and kernels may refuse marked arguments.
  has_marks = hardware().platform != 'gpu'
  if not has_marks:
    mesh = jax.sharding.get_abstract_mesh()
    manual = tuple(mesh.manual_axes)
    axes = set(mesh.axis_names) - set(manual)
  if not axes:
    return function(*arrays)

  def local(*parts: Union[jax.Array, _Blocks]) -> jax.Array:
    result = function(*(parts if has_marks else unmarked(parts)))
    if not summed or split.axis is None:
      return result
    # In float32: XLA on CPUs aborts on a bfloat16 sum here.
    return jax.lax.psum(result.astype(jnp.float32), split.axis).astype(result.dtype)

  # A scan over layers hoists layer-independent computations out of its loop, also from a nested
  # region, whose results then have shardings that XLA refuses. So all arguments are tied together,
  # and varying constants are derived from arguments.
  region = jax.shard_map(local, in_specs=specs, out_specs=out, axis_names=axes, check_vma=has_marks)
  return varying(region(*jax.lax.optimization_barrier(arrays)), manual)


def _rows_times_kernels(
  rows: jax.Array, kernels: jax.Array, blocks: _Blocks, *, transposed: bool = False
) -> jax.Array:
  """Returns local rows times kernels; with `transposed`, features times transposed kernels.

  Args:
    rows: [rows, inputs]; with `transposed`, [rows, ...features].
    kernels: [groups, inputs, ...features].
    blocks: blocks of the rows.
  """
  features = kernels.shape[2:]
  kernels = kernels.reshape(*kernels.shape[:2], -1)
  if transposed:
    rows, features = rows.reshape(rows.shape[0], -1), kernels.shape[1:2]
  kernel = _kernel(rows.dtype, *kernels.shape[1:])
  if kernel:
    out = _ragged_dot(kernel, rows, kernels.mT if transposed else kernels, blocks.sizes)
    out = varying(out, _axes(rows, kernels))
  else:
    out = _by_block(rows, kernels, blocks, contracted=2 if transposed else 1)
  return out.reshape(-1, *features)


def _by_block(
  rows: jax.Array, kernels: jax.Array, blocks: _Blocks, *, contracted: int
) -> jax.Array:
  size = rows.shape[0] // blocks.group.shape[0]
  num_features = kernels.shape[3 - contracted]
  zeros = _zeros((size, num_features), rows.dtype, blocks, _axes(rows, kernels))

  def of_block(of: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    rows, group, used = of

    def product() -> jax.Array:
      kernel = _at(kernels, group, blocks)
      dims = (((1,), (contracted - 1,)), ((), ()))
      out = jax.lax.dot_general(rows, kernel, dims, preferred_element_type=jnp.float32)
      return out.astype(rows.dtype)

    return jax.lax.cond(used, product, lambda: zeros)

  out = jax.lax.map(of_block, (rows.reshape(-1, size, rows.shape[-1]), blocks.group, blocks.used))
  return out.reshape(-1, num_features)


def _kernel_gradients(rows: jax.Array, gradient: jax.Array, blocks: _Blocks) -> jax.Array:
  """Returns float32 [groups, inputs, ...features], sums of products over the rows of each group."""
  features, axes = gradient.shape[1:], _axes(rows, gradient)
  gradient = gradient.reshape(gradient.shape[0], -1)
  shape = (blocks.sizes.shape[0], rows.shape[1], gradient.shape[1])
  kernel = _kernel(rows.dtype, *shape[1:])
  if kernel:
    out = varying(_ragged_sums(kernel, rows, gradient, blocks.sizes), axes)
    return out.reshape(*shape[:2], *features)

  def add_block(sums: jax.Array, of_block: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
    rows, gradient, group, used = of_block

    def added() -> jax.Array:
      dims = (((0,), (0,)), ((), ()))
      more = jax.lax.dot_general(rows, gradient, dims, preferred_element_type=jnp.float32)
      start = _start(group, blocks)
      return jax.lax.dynamic_update_slice(
        sums, (_at(sums, group, blocks) + more)[None], start, allow_negative_indices=False
      )

    return jax.lax.cond(used, added, lambda: sums), None

  num_blocks = blocks.group.shape[0]
  parts = [x.reshape(num_blocks, -1, x.shape[-1]) for x in (rows, gradient)]
  sums = _zeros(shape, jnp.float32, blocks, axes)
  sums, _ = jax.lax.scan(add_block, sums, (*parts, blocks.group, blocks.used))
  return sums.reshape(*shape[:2], *features)


def _start(group: jax.Array, blocks: _Blocks) -> tuple[jax.Array, ...]:
  zero = blocks.zero.astype(jnp.uint32)
  return group, zero, zero


def _at(kernels: jax.Array, group: jax.Array, blocks: _Blocks) -> jax.Array:
  """Returns the kernel of a group. Indexing with [] would add constants (`_beside`)."""
  return jax.lax.dynamic_slice(
    kernels, _start(group, blocks), (1, *kernels.shape[1:]), allow_negative_indices=False
  )[0]


def _axes(*arrays: jax.Array) -> list[str]:
  """Returns the manual mesh axes along which any of the arrays varies."""
  return sorted(frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in arrays)))


def _zeros(shape: tuple[int, ...], dtype: DTypeLike, blocks: _Blocks, axes: list[str]) -> jax.Array:
  return varying(jnp.broadcast_to(blocks.zero.astype(dtype), shape), axes)


def _kernel(dtype: DTypeLike, *sizes: int) -> Optional[str]:
  """Returns the Tokamax kernel for operands of these sizes; None for the loop.

  Logs the choice, once per reason.
  """
  device = hardware()
  kernel, reason = None, device.kind
  if device.platform == 'gpu':
    kernel, reason = kernel_for(device, dtype, sizes)
    if kernel and importlib.util.find_spec('tokamax') is None:
      kernel, reason = None, f'{reason}; tokamax is not installed'
    elif kernel and not has_ragged_dot(kernel):
      version = importlib.metadata.version('tokamax')
      kernel, reason = None, f'{reason}; tokamax {version} has no Triton kernel of Pallas for it'
  name = f"Tokamax's {kernel} kernel" if kernel else 'a loop over blocks'
  log_once(f'experts: grouped matmuls by {name} ({reason})')
  return kernel


def kernel_for(
  device: Hardware, dtype: DTypeLike, sizes: Sequence[int]
) -> tuple[Optional[str], str]:
  """Returns (kernel of Tokamax for a GPU, or None; the reason in a few words).

  Args:
    device: the GPU.
    dtype: dtype of the operands.
    sizes: features of the operands on one device.
  """
  of = f'{device.kind}, {jnp.dtype(dtype).name}'
  if jnp.dtype(dtype) != jnp.bfloat16:
    return None, f'{of}; kernels take bfloat16'
  if device.capability == MOSAIC:
    if all(size % 64 == 0 for size in sizes):
      return 'mosaic', of
    return None, f'{of}; kernels take multiples of 64 features, not {min(sizes)}'
  if device.capability in TRITON:
    return 'triton', of
  return None, f'{of}; no kernel serves this GPU'


def _ragged_dot(kernel: str, rows: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  return library().ragged_dot(rows, kernels, sizes, implementation=kernel)


def _ragged_sums(kernel: str, rows: jax.Array, gradient: jax.Array, sizes: jax.Array) -> jax.Array:
  sums = library().ragged_dot_general(
    rows,
    gradient,
    sizes,
    jax.lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=(([0], [0]), ([], [])),
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[],
    ),
    preferred_element_type=jnp.float32,
    implementation=kernel,
  )
  # Tokamax 0.0.12: for an empty group, the Triton kernel returns the end of the previous group.
  return jnp.where(sizes[:, None, None] > 0, sums, 0)
