"""How much memory this process may use on a device and on its host."""

import dataclasses
import os
import pathlib
import socket
from collections.abc import Iterator, Sequence
from typing import Optional

from t5x_gpu.runtime import distributed, hardware
from t5x_gpu.runtime import host as host_lib
from t5x_gpu.runtime.cluster.topology import Device

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Limit:
  """A bound on memory.

  Attributes:
    bytes: the bound.
    source: where the number comes from: "the host's memory".
  """

  bytes: int
  source: str

  def __str__(self) -> str:
    return f'{show(self.bytes)} ({self.source})'


def show(num_bytes: float) -> str:
  """Returns '1.50 GiB' or '3.7 MiB'."""
  return f'{num_bytes / GIB:,.2f} GiB' if num_bytes >= GIB else f'{num_bytes / 2**20:.1f} MiB'


def host_limit(root: pathlib.Path = host_lib.ROOT) -> Optional[Limit]:
  """Returns the memory of this host, or of its control group if that is less; None if unknown.

  Swap does not count: a training run that swaps makes no progress.

  Args:
    root: root of the file system.
  """
  limits = list(_cgroups(root))
  if total := host_lib.memory_bytes('MemTotal', root=root):
    limits.append(Limit(total, "the host's memory"))
  return min(limits, key=lambda limit: limit.bytes, default=None)


def _cgroups(root: pathlib.Path) -> Iterator[Limit]:
  """Yields the limit of each control group that this process is in, versions 1 and 2."""
  for line in host_lib.read(root / 'proc/self/cgroup').splitlines():
    _, controllers, path = line.split(':', 2)
    if not controllers:
      folder, name = root / 'sys/fs/cgroup', 'memory.max'
    elif 'memory' in controllers.split(','):
      folder, name = root / 'sys/fs/cgroup/memory', 'memory.limit_in_bytes'
    else:
      continue
    # In a container this may be the host's path: then only the top folder exists.
    parts = pathlib.PurePosixPath(path).relative_to('/').parts
    for depth in range(len(parts), -1, -1):
      file = folder.joinpath(*parts[:depth], name)
      text = host_lib.read(file).strip()
      if text.isdecimal():
        yield Limit(int(text), f'limit of {file}')


def device_limit(
  devices: Sequence[Device], *, devices_per_host: int, host: Optional[Limit]
) -> Optional[Limit]:
  """Returns the memory that each of this process's `devices` may use; None if unknown.

  Args:
    devices: devices of one platform.
    devices_per_host: number of CPU devices that share their host's memory.
    host: from `host_limit`.
  """
  if devices[0].platform == 'cpu':
    if host is None:
      return None
    source = (
      host.source
      if devices_per_host == 1
      else (f'{show(host.bytes)} shared by {devices_per_host} CPU devices; {host.source}')
    )
    return Limit(host.bytes // devices_per_host, source)
  limits = [(device.memory_stats() or {}).get('bytes_limit') for device in devices]
  # The cuda_async allocator may exceed `bytes_limit`, which only limits the memory it reserves.
  is_bound = os.environ.get('XLA_PYTHON_CLIENT_ALLOCATOR', '').lower() != 'cuda_async'
  if all(limits) and is_bound:
    return Limit(min(limits), "bytes_limit of the device's memory_stats")
  nominal = hardware.memory_bytes(devices[0].device_kind)
  return None if nominal is None else Limit(nominal, f'nominal, {devices[0].device_kind}')


@dataclasses.dataclass(frozen=True)
class RunLimits:
  """The memory that each device and each host of a run may use.

  Attributes:
    device: limit of the device with the least memory; None if unknown.
    host: limit of the host with the least memory; None if unknown.
    num_machines: number of machines of the run.
  """

  device: Optional[Limit]
  host: Optional[Limit]
  num_machines: int


def run_limits(devices: Sequence[Device], *, num_devices: int) -> RunLimits:
  """Returns the limits of the run. Collective: all processes must call it.

  Args:
    devices: devices of this process.
    num_devices: number of devices of all processes.
  """
  machines, host = distributed.num_machines(), host_limit()
  own = device_limit(devices, host=host, devices_per_host=max(num_devices // machines, 1))
  name = f' of {socket.gethostname()}' if distributed.process_count() > 1 else ''
  everywhere = distributed.gather_json(
    [limit and [limit.bytes, f'{limit.source}{name}'] for limit in (own, host)]
  )

  def least(of_process: Sequence[Optional[Sequence]]) -> Optional[Limit]:
    known = [Limit(*limit) for limit in of_process if limit]
    return min(known, key=lambda limit: limit.bytes, default=None)

  return RunLimits(*map(least, zip(*everywhere)), machines)
