"""Collectives along manual mesh axes, for arrays that `model` may also split.

`model` is automatic in the region (region.py): XLA would first gather all parts on every device;
here each part is sent alone. Call these only where they are not differentiated: in the two
functions of a `jax.custom_vjp`.

A `Reducer` sums gradients: `InFloat32`, or `InBfloat16`, which sends half the bytes.
"""

import abc
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Optional

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec


def all_gather(x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None) -> jax.Array:
  """Returns the parts of all devices of `axis`, concatenated along a dimension.

  Args:
    x: this device's part.
    axis: a manual mesh axis.
    dim: the dimension, counted from the last one (-1).
    model_dim: the dimension that `model` splits, counted the same way, or None.
  """
  return _on_each_part(
    lambda part: jax.lax.all_gather(part, axis, axis=part.ndim + dim, tiled=True), x, model_dim
  )


class Reducer(abc.ABC):
  """How gradients are summed over devices."""

  @abc.abstractmethod
  def psum_scatter(
    self, x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None
  ) -> jax.Array:
    """Returns this device's part of the sum of `x` over `axis`, float32 for float32 terms.

    Args:
      x: a term of the sum.
      axis, dim, model_dim: as in `all_gather`.
    """

  @abc.abstractmethod
  def psum(
    self, x: jax.Array, axes: tuple[str, ...], *, model_dim: Optional[int] = None
  ) -> jax.Array:
    """Returns the sum of `x` over manual mesh `axes`, the same on all devices.

    Args:
      x: a term of the sum.
      axes: manual mesh axes; () for `x` itself.
      model_dim: as in `all_gather`.
    """


@dataclasses.dataclass(frozen=True)
class InFloat32(Reducer):
  """Sends and adds in the dtype of the terms."""

  def psum_scatter(
    self, x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None
  ) -> jax.Array:
    def scatter(part: jax.Array) -> jax.Array:
      return jax.lax.psum_scatter(part, axis, scatter_dimension=part.ndim + dim, tiled=True)

    return _on_each_part(scatter, x, model_dim)

  def psum(
    self, x: jax.Array, axes: tuple[str, ...], *, model_dim: Optional[int] = None
  ) -> jax.Array:
    return jax.lax.psum(x, axes) if axes else x


# Part of the names of operations that send gradients in bfloat16.
SCOPE = 'gradients_in_bfloat16'


@dataclasses.dataclass(frozen=True)
class InBfloat16(Reducer):
  """Sends in bfloat16 and adds in float32.

  NCCL adds bfloat16 data in bfloat16, and rounds at each hop of a ring (ncclAllReduce takes one
  datatype, https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api/colls.html). Here an
  all-to-all brings the terms of a device's part together, and the device adds them in float32. An
  all-reduce then gathers the rounded sums. This sends as many values as a ring. Each term is
  rounded once, by at most 2^-8 of its value; the sum of an all-reduce is rounded once too, equally
  on all devices. Over several hosts, the devices of a host first add their terms, so that as many
  values cross the network as in a ring; the hosts' sums are rounded once more.

  Attributes:
    inside: (mesh axis, size of its part inside a host) for each axis that crosses hosts.
  """

  inside: tuple[tuple[str, int], ...] = ()

  def psum_scatter(
    self, x: jax.Array, axis: str, *, dim: int, model_dim: Optional[int] = None
  ) -> jax.Array:
    def scatter(part: jax.Array) -> jax.Array:
      at, size = part.ndim + dim, jax.lax.axis_size(axis)
      shape = (*part.shape[:at], size, part.shape[at] // size, *part.shape[at + 1 :])
      return self._own_sum(jnp.moveaxis(part.reshape(shape), at, 0), (axis,))

    with jax.named_scope(SCOPE):
      return _on_each_part(scatter, x, model_dim)

  def psum(
    self, x: jax.Array, axes: tuple[str, ...], *, model_dim: Optional[int] = None
  ) -> jax.Array:
    def total(part: jax.Array) -> jax.Array:
      size = math.prod(map(jax.lax.axis_size, axes))
      flat = jnp.pad(part.reshape(-1), (0, -part.size % size))
      own = self._own_sum(flat.reshape(size, -1), axes)
      whole = jax.lax.all_gather(_rounded(own), axes, tiled=True, to='invarying')
      return whole[: part.size].reshape(part.shape).astype(jnp.float32)

    if not axes:
      return x
    with jax.named_scope(SCOPE):
      return _on_each_part(total, x, model_dim)

  def _own_sum(self, parts: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the sum over `axes` of this device's part [...] of `parts` [devices, ...]."""
    hosts = self.hosts(axes, tuple(map(jax.lax.axis_size, axes)))
    exchange = functools.partial(
      jax.lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0, tiled=True
    )
    if len(hosts) == 1 or len(hosts[0]) == 1:
      return exchange(_rounded(parts)).astype(jnp.float32).sum(0)
    order = [host[i] for i in range(len(hosts[0])) for host in hosts]
    parts = _rounded(parts[jnp.asarray(order)]).reshape(len(hosts[0]), len(hosts), *parts.shape[1:])
    of_host = exchange(parts, axis_index_groups=hosts).astype(jnp.float32).sum(0)
    across = [list(places) for places in zip(*hosts)]
    return exchange(_rounded(of_host), axis_index_groups=across).astype(jnp.float32).sum(0)

  def hosts(self, axes: Sequence[str], sizes: Sequence[int]) -> list[list[int]]:
    """Returns, for each host, the flat indices of its devices along `axes`.

    Args:
      axes: mesh axes.
      sizes: sizes of the axes.
    """
    inside = dict(self.inside)
    by_host: dict[tuple[int, ...], list[int]] = {}
    for place, of_axes in enumerate(itertools.product(*map(range, sizes))):
      host = tuple(i // inside.get(axis, n) for i, axis, n in zip(of_axes, axes, sizes))
      by_host.setdefault(host, []).append(place)
    return list(by_host.values())


def _rounded(x: jax.Array) -> jax.Array:
  """Returns `x` rounded to bfloat16. XLA may drop a pair of conversions, but not this rounding."""
  return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7).astype(jnp.bfloat16)


def _on_each_part(
  collective: Callable[[jax.Array], jax.Array], x: jax.Array, model_dim: Optional[int]
) -> jax.Array:
  if model_dim is None:
    return collective(x)
  spec = PartitionSpec(*('model' if i == x.ndim + model_dim else None for i in range(x.ndim)))
  return jax.shard_map(collective, in_specs=spec, out_specs=spec, axis_names={'model'})(x)
