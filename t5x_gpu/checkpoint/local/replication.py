"""Decides which host keeps which part of a state, so that any one host may be lost.

Every box of every array is kept on two hosts. If two hosts hold a box anyway (data parallelism),
each writes its copy. If only one host holds it (fsdp over all hosts), its values are sent to the
next host, array by array, by a collective permute, which needs the memory of one shard and no
additional ports.

This is a pure function of shardings and hosts: all processes compute the same.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning.trees import Array, Shape, Tree
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.topology import Device
from t5x_gpu.terminal.console import show

Pairs = tuple[tuple[int, int], ...]  # (from, to), positions in the flat mesh
Send = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Hosts:
  """Maps devices to processes, and processes to hosts.

  Attributes:
    names: host name of each process.
    keys: failure domain of each process; equal for processes that fail together.
    process_of: device -> index of its process.
  """

  names: tuple[str, ...]
  keys: tuple[str, ...]
  process_of: Callable[[Device], int]

  @property
  def num_hosts(self) -> int:
    return len(set(self.keys))

  def is_first_of_host(self, process: int) -> bool:
    """Returns whether the process has the lowest index on its host."""
    return self.keys.index(self.keys[process]) == process


def hosts_of_run() -> Hosts:
  """Returns the hosts of this run: machines, or racks (T5X_GPU_DOMAIN) where there are several."""
  members = distributed.members()
  if members:
    domains = tuple(member.domain for member in members)
    keys = domains if len(set(domains)) > 1 else tuple(member.host_key for member in members)
    names = tuple(member.hostname for member in members)
  else:
    names = keys = tuple(f'host {i}' for i in range(jax.process_count()))
  return Hosts(names, keys, lambda device: device.process_index)


@dataclasses.dataclass(frozen=True)
class KeptBox:
  """A box that a process keeps.

  Attributes:
    array: index of the array in the state.
    start: first index of the box.
    shape: shape of the box.
    device: position in the flat mesh of the device that provides the box.
    is_sent: whether that device receives the box from another host.
  """

  array: int
  start: Shape
  shape: Shape
  device: int
  is_sent: bool


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
  """Which process keeps which parts.

  Attributes:
    by_process: the parts that each process keeps.
    bytes_of: size of the parts that each process keeps.
    sent: array -> how its shards move; only arrays that must move.
    sent_bytes: bytes sent for one local checkpoint, over all processes.
    num_copies: number of copies of each box, each on a different host.
  """

  by_process: tuple[tuple[KeptBox, ...], ...]
  bytes_of: tuple[int, ...]
  sent: Mapping[int, Pairs]
  sent_bytes: int
  num_copies: int

  def bytes_on_host(self, hosts: Hosts, process: int) -> int:
    """Returns the size of one local checkpoint on the host of a process."""
    return sum(size for size, key in zip(self.bytes_of, hosts.keys) if key == hosts.keys[process])

  def words(self, hosts: Hosts) -> str:
    """Returns how much of each local checkpoint a host keeps, and how many hosts may be lost."""
    most = gigabytes(max(self.bytes_on_host(hosts, i) for i in range(len(hosts.keys))))
    if hosts.num_hosts == 1:
      return f'{most} on the only host: they survive killed processes, but not the loss of the host'
    if self.num_copies == 1:
      return (
        f'{most} on a host, each part once, because one host has more than half of the devices: '
        'losing a host loses its parts'
      )
    sent = (
      f'{gigabytes(self.sent_bytes)} are sent to another host'
      if self.sent
      else 'nothing is sent, because two hosts already hold every part'
    )
    return (
      f'{most} on a host, each part on two of {hosts.num_hosts}, so any one may be lost; {sent}'
    )


def gigabytes(num_bytes: int) -> str:
  """Returns '1.23 GB', '4.56 MB'."""
  return show(num_bytes, **({'GB': '.3g'} if num_bytes >= 1e8 else {'MB': '.3g'}))


def plan_copies(state: Tree, hosts: Hosts) -> ReplicaPlan:
  """Returns the boxes that each process keeps, so that two hosts have each part.

  Args:
    state: tree of arrays or shapes with NamedShardings of one mesh.
    hosts: hosts of the devices.
  """
  arrays = jax.tree.leaves(state)
  devices = list(arrays[0].sharding.mesh.devices.flat)
  process_of = [hosts.process_of(device) for device in devices]
  host_of = [hosts.keys[process] for process in process_of]
  to_next = _to_next_host(host_of)
  kept: list[list[KeptBox]] = [[] for _ in hosts.keys]
  loads = [0] * len(hosts.keys)
  sent: dict[int, Pairs] = {}
  sent_bytes, num_copies = 0, 2 if hosts.num_hosts > 1 else 1

  def keep(process: int, part: KeptBox, num_bytes: int) -> None:
    kept[process].append(part)
    loads[process] += num_bytes

  # Large arrays first: small arrays then even out the loads.
  for i in sorted(range(len(arrays)), key=lambda i: -_bytes(arrays[i], arrays[i].shape)):
    pairs = []
    for (start, shape), holders in _boxes(arrays[i], devices).items():
      num_bytes = _bytes(arrays[i], shape)
      own = min(holders, key=lambda d: (loads[process_of[d]], d))
      others = [d for d in holders if host_of[d] != host_of[own]]
      keep(process_of[own], KeptBox(i, start, shape, own, is_sent=False), num_bytes)
      if others:
        other = min(others, key=lambda d: (loads[process_of[d]], d))
        keep(process_of[other], KeptBox(i, start, shape, other, is_sent=False), num_bytes)
      elif to_next is not None:
        other = to_next[own]
        keep(process_of[other], KeptBox(i, start, shape, other, is_sent=True), num_bytes)
        pairs.append((own, other))
        sent_bytes += num_bytes
      elif hosts.num_hosts > 1:
        num_copies = 1
    if pairs:
      sent[i] = tuple(sorted(pairs))
  return ReplicaPlan(tuple(map(tuple, kept)), tuple(loads), sent, sent_bytes, num_copies)


def _bytes(array: Array, shape: Sequence[int]) -> int:
  return math.prod(shape) * array.dtype.itemsize


def _boxes(array: Array, devices: Sequence[Device]) -> dict[tuple[Shape, Shape], list[int]]:
  """Returns (start, shape) of each box -> the positions in the mesh of the devices that hold it."""
  indices = array.sharding.devices_indices_map(tuple(array.shape))
  found = collections.defaultdict(list)
  for place, device in enumerate(devices):
    bounds = [s.indices(n)[:2] for s, n in zip(indices[device], array.shape)]
    found[tuple(a for a, _ in bounds), tuple(b - a for a, b in bounds)].append(place)
  return found


def _to_next_host(host_of: Sequence[str]) -> Optional[list[int]]:
  """Returns for each mesh position its partner on another host.

  Returns None if a host has more than half of the devices.
  """
  order = list(dict.fromkeys(host_of))
  by_host = sorted(range(len(host_of)), key=lambda d: (order.index(host_of[d]), d))
  shift = max(collections.Counter(host_of).values())
  to_next = [0] * len(host_of)
  for i, place in enumerate(by_host):
    to_next[place] = by_host[(i + shift) % len(by_host)]
  if any(host_of[a] == host_of[b] for a, b in enumerate(to_next)):
    return None
  return to_next


def send(array: jax.Array, pairs: Pairs) -> jax.Array:
  """Returns the shard that every device received, [devices, ...]; zeros if it received none.

  All processes must call it. Floats are sent as unsigned integers: some links round floats.
  """
  return _sending(array.sharding.mesh, array.sharding.spec, pairs)(array)


@functools.cache
def _sending(
  mesh: jax.sharding.Mesh, spec: jax.P, pairs: Pairs
) -> Callable[[jax.Array], jax.Array]:
  def moved(shard: jax.Array) -> jax.Array:
    return jax.lax.ppermute(_bits(shard), mesh.axis_names, pairs)[None]

  return jax.jit(
    jax.shard_map(
      moved, mesh=mesh, in_specs=spec, out_specs=jax.P(mesh.axis_names), check_vma=False
    )
  )


def _bits(x: jax.Array) -> jax.Array:
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned)
