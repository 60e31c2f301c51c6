"""GPUs by the name that the driver gives them, and how much memory a process may use.

The table has dense peaks: vendors also print figures "with sparsity", twice the dense figures,
which matmuls here do not reach. A device that is not in it is unknown (None): an MFU against a
guessed peak would be a wrong number that looks right. `device_limit` and `host_limit` return the
limits of this process, which may be below the table's.
"""

import dataclasses
import os
import pathlib
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

from t5x_gpu.runtime import distributed, machine
from t5x_gpu.runtime.topology import Device
from t5x_gpu.terminal.console import show
from t5x_gpu.terminal.flag_types import GIB

_NVIDIA = 'https://www.nvidia.com/'
_PRODUCTS = _NVIDIA + 'en-us/data-center/'
_AMPERE = _NVIDIA + (
  'content/dam/en-zz/Solutions/Data-Center/a100/pdf/'
  'nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf'
)
# Table "NVIDIA H100 Tensor Core GPU preliminary performance specs": dense and sparse.
_HOPPER = 'https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper'
# Table of per-GPU figures, dense and sparse, for HGX B200 and GB200.
_BLACKWELL = 'https://resources.nvidia.com/en-us-blackwell-architecture'

# Other spellings of the dtypes in the table.
_DTYPES = {
  'bfloat16': 'bfloat16',
  'bf16': 'bfloat16',
  'float16': 'float16',
  'fp16': 'float16',
  'f16': 'float16',
  'fp8': 'fp8',
  'float8_e4m3fn': 'fp8',
  'float8_e5m2': 'fp8',
  'tf32': 'tf32',
  'tensorfloat32': 'tf32',
  'float32': 'float32',
  'fp32': 'float32',
  'f32': 'float32',
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One row: a kind of GPU.

  Attributes:
    kind: regular expression for the whole of `jax.Device.device_kind`.
    teraflops: dtype -> dense peak in 1e12 FLOP/s. float32 is the peak of the CUDA cores; matmuls of
      float32 arrays may use 'tf32' (`jax_default_matmul_precision`).
    memory_bytes: nominal; a program gets slightly less.
    source: URL or document of the figures.
  """

  kind: str
  teraflops: Mapping[str, float]
  memory_bytes: int
  source: str


# Dtypes of the peaks in a row, in this order. 0: not supported by the GPU, or unknown.
_COLUMNS = ('bfloat16', 'float16', 'fp8', 'tf32', 'float32')
_A100 = (312, 312, 0, 156, 19.5)
_H100_SXM = (989.4, 989.4, 1978.9, 494.7, 66.9)
_V100 = _PRODUCTS + 'v100/'

GPUS = tuple(
  Gpu(kind, {dtype: peak for dtype, peak in zip(_COLUMNS, peaks) if peak}, gib * GIB, source)
  for kind, peaks, gib, source in (
    (r'NVIDIA A100(-SXM4|-PCIE|-PCIe)-40GB', _A100, 40, _AMPERE),
    (r'NVIDIA A100(-SXM4-80GB| 80GB PCIe)', _A100, 80, _AMPERE),
    (r'NVIDIA H100 80GB HBM3', _H100_SXM, 80, _HOPPER),
    (r'NVIDIA H100 PCIe', (756, 756, 1513, 378, 51.2), 80, _HOPPER),
    # The die and clocks of the H100 SXM, with more memory.
    (r'NVIDIA H200', _H100_SXM, 141, _PRODUCTS + 'h200/'),
    # No float32 for the next two: NVIDIA's brief and data sheets disagree (75 or 80, 80 or 90).
    (r'NVIDIA B200', (2250, 2250, 4500, 1100, 0), 180, _BLACKWELL),
    (r'NVIDIA GB200', (2500, 2500, 5000, 1250, 0), 186, _BLACKWELL),
    (r'NVIDIA L40S', (362.05, 362.05, 733, 183, 91.6), 48, _PRODUCTS + 'l40s/'),
    (r'NVIDIA L4', (121, 121, 242.5, 60, 30.3), 24, _PRODUCTS + 'l4/'),
    # Not Amazon's A10G, which is another chip configuration.
    (r'NVIDIA A10', (125, 125, 0, 62.5, 31.2), 24, _PRODUCTS + 'products/a10-gpu/'),
    # No bfloat16 tensor cores before Ampere.
    (r'(NVIDIA |)Tesla T4', (0, 65, 0, 0, 8.1), 16, _PRODUCTS + 'tesla-t4/'),
    (r'(NVIDIA |)Tesla V100-SXM2-16GB', (0, 125, 0, 0, 15.7), 16, _V100),
    (r'(NVIDIA |)Tesla V100-SXM[23]-32GB', (0, 125, 0, 0, 15.7), 32, _V100),
    (r'(NVIDIA |)Tesla V100-PCIE-16GB', (0, 112, 0, 0, 14), 16, _V100),
    (r'(NVIDIA |)Tesla V100-PCIE-32GB', (0, 112, 0, 0, 14), 32, _V100),
  )
)


def find_gpu(device_kind: str) -> Optional[Gpu]:
  """Returns the row for `device_kind` (`jax.Device.device_kind`), None if unknown."""
  return next((gpu for gpu in GPUS if re.fullmatch(gpu.kind, device_kind)), None)


def peak_flops(device_kind: str, dtype: str) -> Optional[float]:
  """Returns the dense peak in FLOP/s of one device, None if unknown.

  Args:
    device_kind: `jax.Device.device_kind`, 'NVIDIA H100 80GB HBM3'.
    dtype: 'bfloat16', 'float16', 'fp8', 'tf32' or 'float32', or numpy's name for one.
  Raises:
    ValueError: the dtype is not in the table.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'No peak is tabulated for dtype {dtype!r}, only for {", ".join(_DTYPES)}.')
  gpu = find_gpu(device_kind)
  teraflops = gpu.teraflops.get(_DTYPES[dtype]) if gpu else None
  # Rounded to whole GFLOP/s: 66.9 * 1e12 is not 66.9e12.
  return None if teraflops is None else round(teraflops * 1e3) * 1e9


def memory_bytes(device_kind: str) -> Optional[int]:
  """Returns the nominal memory of one device in bytes, None if unknown."""
  gpu = find_gpu(device_kind)
  return gpu.memory_bytes if gpu else None


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


def host_limit(root: pathlib.Path = machine.ROOT) -> Optional[Limit]:
  """Returns the memory of this host, or of its control group if that is less; None if unknown.

  Swap does not count: a training run that swaps makes no progress.

  Args:
    root: root of the file system.
  """
  limits = list(_cgroups(root))
  if total := machine.memory_bytes('MemTotal', root=root):
    limits.append(Limit(total, "the host's memory"))
  return min(limits, key=lambda limit: limit.bytes, default=None)


def _cgroups(root: pathlib.Path) -> Iterator[Limit]:
  """Yields the limit of each control group that this process is in, versions 1 and 2."""
  for line in machine.read_text(root / 'proc/self/cgroup').splitlines():
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
      text = machine.read_text(file).strip()
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
  nominal = memory_bytes(devices[0].device_kind)
  return None if nominal is None else Limit(nominal, f'nominal, {devices[0].device_kind}')


@dataclasses.dataclass(frozen=True)
class RunLimits:
  """The memory that each device and each host of a run may use.

  Attributes:
    device: limit of the device with the least memory; None if unknown.
    host: limit of the host with the least memory; None if unknown.
    num_machines: number of machines of the run; a host of the topology may be a rack of them.
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
