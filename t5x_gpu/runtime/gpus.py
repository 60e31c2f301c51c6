"""Which GPUs this machine has, without jax, CUDA or NVML: before a backend may be chosen.

The GPUs that the NVIDIA driver shows to this process, without jax and without allocating.

NVML, the library behind nvidia-smi, sees what the container or the scheduler's cgroup allows, in
the order of PCI addresses: CUDA's own numbering with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import ctypes
import dataclasses
import logging
import os
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.runtime import run_with_deadline
from t5x_gpu.runtime.cluster.schedulers import Environment

_log = logging.getLogger(__name__)


PROC = pathlib.Path('/proc/driver/nvidia')
PCI = pathlib.Path('/sys/bus/pci/devices')
NVIDIA_VENDOR = '0x10de'
# A GPU that fell off its bus makes nvidia-smi wait for minutes.
NVIDIA_SMI_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class MachineGpus:
  """GPUs of this machine that a process may use.

  Attributes:
    kind: name of the first, as the driver and `jax.Device.device_kind` say it; None without GPU.
    count: on the machine, whichever of them CUDA_VISIBLE_DEVICES names.
    reason: where that is from, or why there is none.
  """

  kind: Optional[str]
  count: int
  reason: str


def find_gpus(
  environ: Optional[Mapping[str, str]] = None,
  *,
  proc: pathlib.Path = PROC,
  nvidia_smi: str = 'nvidia-smi',
) -> MachineGpus:
  """Returns the GPUs of this machine, none if the environment hides them all.

  Args:
    environ: the environment, `os.environ` by default.
    proc: folder of the driver.
    nvidia_smi: asked only where the driver shows no such folder (some containers).
  """
  environ = os.environ if environ is None else environ
  platforms = environ.get('JAX_PLATFORMS', '')
  if platforms and not {'cuda', 'gpu'} & set(platforms.split(',')):
    return MachineGpus(None, 0, f'JAX_PLATFORMS={platforms}')
  visible = environ.get('CUDA_VISIBLE_DEVICES')
  if visible is not None and (not visible.strip() or visible.startswith(('-1', 'NoDevFiles'))):
    return MachineGpus(None, 0, f'CUDA_VISIBLE_DEVICES={visible!r}')
  kinds = [
    match.group(1)
    for path in sorted(proc.glob('gpus/*/information'))
    if (match := re.search(r'^Model:\s*(.+?)\s*$', _read(path), re.MULTILINE))
  ]
  if kinds:
    return MachineGpus(kinds[0], len(kinds), str(proc))
  done = _ask('name', nvidia_smi)
  if done.code is None and not shutil.which(nvidia_smi):
    return MachineGpus(None, 0, 'no NVIDIA driver on this machine')
  if done.code != 0:
    said = done.problem or ' '.join((done.output + done.errors).split())
    return MachineGpus(None, 0, f'nvidia-smi failed: {said}')
  kinds = [line.strip() for line in done.output.splitlines() if line.strip()]
  return MachineGpus(kinds[0] if kinds else None, len(kinds), 'nvidia-smi')


def _ask(field: str, nvidia_smi: str) -> run_with_deadline.Finished:
  return run_with_deadline.run(
    [nvidia_smi, f'--query-gpu={field}', '--format=csv,noheader'], seconds=NVIDIA_SMI_SECONDS
  )


def driver_version(proc: pathlib.Path = PROC, *, nvidia_smi: str = 'nvidia-smi') -> Optional[str]:
  """Returns the version of the driver, '580.95.05'; None if none is loaded."""
  match = re.search(r'Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s', _read(proc / 'version'))
  if match:
    return match.group(1)
  done = _ask('driver_version', nvidia_smi)  # WSL and some containers have no such folder.
  match = re.match(r'\d+\.\d+(\.\d+)?', done.output) if done.code == 0 else None
  return match.group() if match else None


def pci_numa_nodes(pci: pathlib.Path = PCI) -> dict[str, int]:
  """Returns PCI address -> NUMA node of each NVIDIA GPU; -1 where the firmware does not say."""
  found = {}
  for device in sorted(pci.glob('*')):
    # 0x0300 and 0x0302: VGA and 3D controllers. NVSwitches and bridges have other classes.
    if _read(device / 'vendor').strip() == NVIDIA_VENDOR and (
      _read(device / 'class').startswith(('0x0300', '0x0302'))
    ):
      node = _read(device / 'numa_node').strip()
      found[device.name] = int(node) if node.lstrip('-').isdigit() else -1
  return found


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''


@dataclasses.dataclass(frozen=True)
class PhysicalGpu:
  """One GPU: its UUID and its PCI address as in /sys/bus/pci/devices."""

  uuid: str
  pci_address: str


class _PciInfo(ctypes.Structure):
  # nvmlPciInfo_t, https://docs.nvidia.com/deploy/nvml-api/structnvmlPciInfo__t.html
  _fields_ = [
    ('busIdLegacy', ctypes.c_char * 16),
    ('domain', ctypes.c_uint),
    ('bus', ctypes.c_uint),
    ('device', ctypes.c_uint),
    ('pciDeviceId', ctypes.c_uint),
    ('pciSubSystemId', ctypes.c_uint),
    ('busId', ctypes.c_char * 32),
  ]


def physical_gpus(library: str = 'libnvidia-ml.so.1') -> list[PhysicalGpu]:
  """Returns the GPUs in PCI order; [] without a driver."""
  try:
    nvml = ctypes.CDLL(library)
    if nvml.nvmlInit_v2() != 0:
      return []
  except (OSError, AttributeError):
    return []
  count = ctypes.c_uint()
  nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
  gpus = []
  for index in range(count.value):
    handle, uuid, pci = ctypes.c_void_p(), ctypes.create_string_buffer(96), _PciInfo()
    codes = (
      nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
      nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)),
      nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)),
    )
    if any(codes):
      _log.warning('NVML does not describe GPU %d (codes %s).', index, codes)
      continue
    # 32-bit domain in NVML ('00000000:1B:00.0'), 16-bit in sysfs ('0000:1b:00.0').
    domain, _, rest = pci.busId.decode().lower().partition(':')
    gpus.append(PhysicalGpu(uuid.value.decode(), f'{domain[-4:]}:{rest}'))
  nvml.nvmlShutdown()
  return gpus


def own_gpus(
  gpus: Sequence[PhysicalGpu], env: Environment, local_device_ids: Optional[Sequence[int]]
) -> tuple[str, ...]:
  """Returns the UUIDs of the GPUs that a process will use; () if they cannot be told.

  Args:
    gpus: of this machine, in CUDA's order.
    env: CUDA_VISIBLE_DEVICES and JAX_PLATFORMS are looked at.
    local_device_ids: which of the visible ones; None for all.
  """
  if env.get('JAX_PLATFORMS') == 'cpu' or not gpus:
    return ()
  visible = [gpu.uuid for gpu in gpus]
  if env.get('CUDA_VISIBLE_DEVICES') is not None:
    visible = []
    for entry in (entry.strip() for entry in env['CUDA_VISIBLE_DEVICES'].split(',')):
      if entry.isdigit() and int(entry) < len(gpus):
        visible.append(gpus[int(entry)].uuid)
      elif entry.startswith('MIG-'):
        visible.append(entry)
      else:
        matches = [gpu.uuid for gpu in gpus if entry and gpu.uuid.startswith(entry)]
        if len(matches) != 1:
          break
        visible += matches
  chosen = range(len(visible)) if local_device_ids is None else local_device_ids
  return tuple(visible[i] for i in chosen) if all(i < len(visible) for i in chosen) else ()
