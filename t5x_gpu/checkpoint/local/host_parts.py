"""Copies the parts of a state that a process keeps to host memory."""

from collections.abc import Mapping
from typing import Any, Optional

import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.checkpoint.local.replication import KeptBox, ReplicaPlan, send
from t5x_gpu.checkpoint.storage.chunks import Shape, by_name

HostPart = tuple[str, Shape, Shape, np.ndarray]  # name, shape of the array, start, values


def copy_parts(state: Any, copies: ReplicaPlan, *, process: int) -> Optional[list[HostPart]]:
  """Returns the parts of `state` that `process` keeps.

  Returns None if the host lacks the memory; other hosts still receive their parts from it. All
  processes must call this function.

  Args:
    state: the state, with the shardings of the plan; may be overwritten afterwards.
    copies: which process keeps which parts.
    process: index of this process.
  """
  names, arrays = zip(*by_name(state).items())
  places = {d: i for i, d in enumerate(arrays[0].sharding.mesh.devices.flat)}
  own = [part for part in copies.by_process[process] if not part.is_sent]
  sent = [part for part in copies.by_process[process] if part.is_sent]
  shards: dict[int, dict[int, jax.Array]] = {}
  for part in own:
    if part.array not in shards:
      shards[part.array] = _shards(arrays[part.array], places)
    shards[part.array][part.device].copy_to_host_async()
  found: Optional[list[HostPart]] = []

  def take(part: KeptBox, shard: jax.Array) -> None:
    nonlocal found
    array = arrays[part.array]
    try:
      if found is not None:
        values = _on_host(shard, part, array.dtype)
        found.append((names[part.array], array.shape, part.start, values))
    except MemoryError:
      found = None

  for part in own:
    take(part, shards[part.array][part.device])
  del shards
  # One array at a time: device memory fits one extra shard, not a copy of the neighbor's state.
  for i, pairs in sorted(copies.sent.items()):
    received = _shards(send(arrays[i], pairs), places)
    for part in sent:
      if part.array == i:
        take(part, received[part.device])
    jax.block_until_ready(list(received.values()))
  return found


def _shards(array: jax.Array, places: Mapping[Any, int]) -> dict[int, jax.Array]:
  """Returns position in the flat mesh -> shard of the device at that position."""
  return {places[shard.device]: shard.data for shard in array.addressable_shards}


def _on_host(shard: jax.Array, part: KeptBox, dtype: Any) -> np.ndarray:
  """Returns the values of a part, in memory that no device uses."""
  values = np.asarray(shard)
  if next(iter(shard.devices())).platform == 'cpu':
    values = values.copy()  # otherwise a view of a buffer that the step reuses
  if part.is_sent:  # sent as integers, with an axis for devices
    values = np.ascontiguousarray(values).reshape(-1).view(jnp.dtype(dtype))
  return values.reshape(part.shape)
