"""Which devices share a host: the value from which meshes are built.

A *host* here is a group of devices with fast links (NVLink): one machine, or one rack-wide NVLink
domain. It is not a process: Slurm starts one process per GPU, so `jax.local_device_count()` is 1 on
a machine with eight GPUs, and a mesh made from it cannot distinguish NVLink from the network.
"""

import collections
import contextlib
import dataclasses
import operator
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.errors import MeshError, listed
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.members import DOMAIN_VARIABLE

# A `jax.Device`, or any object with its `id`, `process_index` and `platform`.
Device = Any


@dataclasses.dataclass(frozen=True)
class Topology:
  """The number of hosts, and of devices on each host.

  Attributes:
    num_hosts: hosts, or NVLink domains.
    devices_per_host: the same on every host.
    device_word: name of one device in messages. Ignored in comparisons: meshes do not depend on it.
    reason: how the hosts were identified, for the log. Ignored in comparisons.
  """

  num_hosts: int
  devices_per_host: int
  device_word: str = dataclasses.field(default='GPU', compare=False)
  reason: str = dataclasses.field(default='given', compare=False)

  def __post_init__(self):
    if self.num_hosts < 1 or self.devices_per_host < 1:
      raise MeshError(
        f'A topology needs at least one host with one {self.device_word}, not '
        f'{self.num_hosts} hosts with {self.devices_per_host}.',
        fix='Give two numbers of 1 or more, such as 2 hosts with 8 each.',
      )

  @property
  def num_devices(self) -> int:
    return self.num_hosts * self.devices_per_host

  def count(self, number: int) -> str:
    """Returns '1 GPU', '16 GPUs' or '8 CPU devices'."""
    return f'{number} {self.device_word}{"" if number == 1 else "s"}'

  def __str__(self) -> str:
    hosts = '1 host' if self.num_hosts == 1 else f'{self.num_hosts} hosts'
    return f'{hosts} x {self.count(self.devices_per_host)}'


_only: list[Sequence[Device]] = []


@contextlib.contextmanager
def only_on(devices: Sequence[Device]) -> Iterator[None]:
  """Context in which `discover` returns these devices by default: a run on some of them."""
  _only.append(devices)
  try:
    yield
  finally:
    _only.pop()


def discover(devices: Optional[Sequence[Device]] = None) -> tuple[Topology, list[Device]]:
  """Returns the topology of `devices` and the devices in host-major order.

  The order is the same on every process, and the same whether a host runs one process or one per
  GPU. Processes that joined by `distributed.join` know each other's hosts. Otherwise JAX
  numbers the machines of a run (`device.partition_index`, formerly `slice_index`) by the boot ids
  of their kernels; devices without such a number are grouped by process.

  Args:
    devices: all devices of the run; by default the devices of `only_on`, or all.
  Raises:
    MeshError: the hosts do not have the same number of devices.
  Source: https://github.com/jax-ml/jax/issues/13021 (why slice_index exists on GPUs).
  """
  if devices is None:
    devices = _only[-1] if _only else jax.devices()
  devices = list(devices)
  if len({device.process_index for device in devices}) == 1:
    return group_by_host(devices, lambda device: 0, reason='one process')
  members = distributed.members()
  if members:
    by_domain = any(member.domain != member.host_key for member in members)
    return group_by_host(
      devices,
      lambda device: members[device.process_index].domain,
      name_of=lambda device: members[device.process_index].hostname,
      reason=f'hosts identified by {DOMAIN_VARIABLE}'
      if by_domain
      else 'hosts identified by host name and boot id',
    )
  # Old and new name of the same number; JAX 0.10 and 0.11 have both.
  for attribute in ('partition_index', 'slice_index'):
    if all(getattr(device, attribute, None) is not None for device in devices):
      return group_by_host(
        devices, operator.attrgetter(attribute), reason=f'hosts identified by device.{attribute}'
      )
  return group_by_host(
    devices,
    lambda device: device.process_index,
    reason='each process counts as a host: these devices have no slice_index',
  )


def group_by_host(
  devices: Sequence[Device],
  host_of: Callable[[Device], Hashable],
  *,
  name_of: Callable[[Device], str] = lambda device: '',
  reason: str = 'given',
) -> tuple[Topology, list[Device]]:
  """Returns the topology that `host_of` describes, and the devices in host-major order.

  The host of process 0 comes first. Within a host, devices are ordered by process, then id: the
  order of the local ranks, for both block and cyclic distribution of Slurm processes.

  Args:
    devices: all devices of the run.
    host_of: device -> a key that is equal for devices of one host.
    name_of: device -> the name of its host, for messages; '' if unknown.
    reason: stored in the topology.
  Raises:
    MeshError: the hosts do not have the same number of devices.
  """
  hosts = collections.defaultdict(list)
  for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
    hosts[host_of(device)].append(device)
  device_word = (
    'GPU' if devices[0].platform in ('gpu', 'cuda') else (f'{devices[0].platform.upper()} device')
  )
  counts = [len(group) for group in hosts.values()]
  if len(set(counts)) > 1:
    usual = collections.Counter(counts).most_common(1)[0][0]
    odd = [
      f'{len(group)} on the host of process {group[0].process_index}'
      + (f' ({name_of(group[0])})' if name_of(group[0]) else '')
      for group in hosts.values()
      if len(group) != usual
    ]
    raise MeshError(
      f'The {len(hosts)} hosts do not have the same number of devices: {usual} on most of them, '
      f'but {", ".join(listed(odd, 4))}. A mesh needs equal hosts '
      f'({reason}).',
      fix=f'Start the same number of processes and {device_word}s on every host '
      '(Slurm: --gpus-per-node and --ntasks-per-node), or leave the odd hosts out.',
    )
  topology = Topology(len(hosts), counts[0], device_word=device_word, reason=reason)
  return topology, [device for group in hosts.values() for device in group]
