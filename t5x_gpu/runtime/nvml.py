"""The GPUs that the NVIDIA driver shows to this process, without jax and without allocating.

NVML, the library behind nvidia-smi, sees what the container or the scheduler's cgroup allows, in
the order of PCI addresses: CUDA's own numbering with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import ctypes
import dataclasses
import logging
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.runtime.cluster.schedulers import Environment

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class PhysicalGpu:
  """One GPU: its UUID and its PCI address as in /sys/bus/pci/devices."""
  uuid: str
  pci_address: str


class _PciInfo(ctypes.Structure):
  # nvmlPciInfo_t, https://docs.nvidia.com/deploy/nvml-api/structnvmlPciInfo__t.html
  _fields_ = [('busIdLegacy', ctypes.c_char * 16), ('domain', ctypes.c_uint),
              ('bus', ctypes.c_uint), ('device', ctypes.c_uint), ('pciDeviceId', ctypes.c_uint),
              ('pciSubSystemId', ctypes.c_uint), ('busId', ctypes.c_char * 32)]


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
    codes = (nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)),
             nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid)),
             nvml.nvmlDeviceGetPciInfo_v3(handle, ctypes.byref(pci)))
    if any(codes):
      _log.warning('NVML does not describe GPU %d (codes %s).', index, codes)
      continue
    # 32-bit domain in NVML ('00000000:1B:00.0'), 16-bit in sysfs ('0000:1b:00.0').
    domain, _, rest = pci.busId.decode().lower().partition(':')
    gpus.append(PhysicalGpu(uuid.value.decode(), f'{domain[-4:]}:{rest}'))
  nvml.nvmlShutdown()
  return gpus


def own_gpus(gpus: Sequence[PhysicalGpu], env: Environment,
             local_device_ids: Optional[Sequence[int]]) -> tuple[str, ...]:
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
