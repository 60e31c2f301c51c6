"""Which GPUs this machine has, without jax, CUDA or NVML: before a backend may be chosen."""

import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Mapping
from typing import Optional

from t5x_gpu.runtime import run_with_deadline

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


def find_gpus(environ: Optional[Mapping[str, str]] = None, *, proc: pathlib.Path = PROC,
              nvidia_smi: str = 'nvidia-smi') -> MachineGpus:
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
  kinds = [match.group(1) for path in sorted(proc.glob('gpus/*/information'))
           if (match := re.search(r'^Model:\s*(.+?)\s*$', _read(path), re.MULTILINE))]
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
  return run_with_deadline.run([nvidia_smi, f'--query-gpu={field}', '--format=csv,noheader'],
                               seconds=NVIDIA_SMI_SECONDS)


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
        _read(device / 'class').startswith(('0x0300', '0x0302'))):
      node = _read(device / 'numa_node').strip()
      found[device.name] = int(node) if node.lstrip('-').isdigit() else -1
  return found


def _read(path: pathlib.Path) -> str:
  try:
    return path.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''
