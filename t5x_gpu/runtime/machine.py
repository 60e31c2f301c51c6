"""Facts about this machine and process, found without starting jax or CUDA.

Memory, boot and versions come from Linux. `find_gpus` needs only files and nvidia-smi, which
`run_with_deadline` leaves behind if it hangs. `physical_gpus` uses NVML, the library behind
nvidia-smi: it sees the GPUs that the container or the scheduler's cgroup allows, in the order of
their PCI addresses, which is CUDA's order with CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import tempfile
import time
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, Optional

from t5x_gpu.runtime.cluster.launchers import Environment

_log = logging.getLogger(__name__)

ROOT = pathlib.Path('/')
_MOST_AGE_SECONDS = 24 * 3600  # above it, the kernel's clocks are not comparable (containers)
_is_command = False


def read_text(path: pathlib.Path) -> str:
  """Returns the text of a system file, '' if it cannot be read."""
  try:
    return path.read_text(encoding='utf-8', errors='replace')
  except OSError:
    return ''


def boot_id() -> str:
  """Returns an id that changes with every boot; '' where the system has none."""
  return read_text(pathlib.Path('/proc/sys/kernel/random/boot_id')).strip()


def available_memory() -> Optional[int]:
  """Returns how many bytes programs can still allocate; None if the system does not report it."""
  return memory_bytes('MemAvailable')


def memory_bytes(field: str, *, root: pathlib.Path = ROOT) -> Optional[int]:
  """Returns a field of /proc/meminfo, such as 'MemTotal', in bytes; None if it is missing."""
  for line in read_text(root / 'proc/meminfo').splitlines():
    if line.startswith(f'{field}:'):
      return int(line.split()[1]) * 1024
  return None


def allow_open_files() -> None:
  """Lets this process and its children open as many files as the system allows.

  The usual limit of 1,024 is for programs that call select(2). Process 0 holds a connection to
  every other process, and checkpoints and data readers open thousands of files.
  """
  _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
  with contextlib.suppress(OSError, ValueError):  # a system that has no such number
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_files_limit() -> int:
  """Returns how many files and connections this process may have open."""
  return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def this_is_a_command() -> None:
  """Records that this whole process, including its imports, serves one command."""
  global _is_command
  _is_command = True


def seconds_since_start() -> float:
  """Returns the age of this process; 0 if unknown, or if it also does other work (a notebook)."""
  if not _is_command:
    return 0.0
  try:
    fields = read_text(pathlib.Path('/proc/self/stat')).rpartition(')')[2].split()
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf('SC_CLK_TCK')
  except (OSError, ValueError, IndexError, AttributeError):  # not Linux
    return 0.0
  return age if 0 <= age < _MOST_AGE_SECONDS else 0.0


def versions(packages: Iterable[str]) -> dict[str, str]:
  """Returns package -> version of the installed `packages`."""
  found = {}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


@dataclasses.dataclass(frozen=True)
class CommandResult:
  """The result of a command.

  Attributes:
    code: exit code; None if the command was not found or its deadline passed.
    output: standard output so far.
    errors: standard error so far.
    problem: why there is no exit code, or ''.
  """

  code: Optional[int]
  output: str
  errors: str
  problem: str = ''


def _output_file() -> BinaryIO:
  """Returns a file for the output of a child; in memory, since the disk may be full."""
  if not hasattr(os, 'memfd_create'):  # not Linux
    return tempfile.TemporaryFile()
  return open(os.memfd_create('output'), 'w+b')


def run_with_deadline(
  command: Sequence[str], *, seconds: float, environ: Optional[Mapping[str, str]] = None
) -> CommandResult:
  """Returns the result of `command`, shortly after `seconds` at the latest.

  SIGKILL does not end a process that waits in the kernel, for a broken GPU or an unreachable file
  server. `subprocess.run` would wait for it; this function leaves it behind.

  Args:
    command: program and arguments.
    seconds: deadline.
    environ: the environment, this process's by default.
  """
  with _output_file() as output, _output_file() as errors:
    try:
      child = subprocess.Popen(
        command,
        stdout=output,
        stderr=errors,
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
      )
    except OSError as error:
      return CommandResult(None, '', '', f'{command[0]}: {error.strerror}')
    problem = ''
    try:
      child.wait(seconds)
    except subprocess.TimeoutExpired:
      problem = f'no answer within {seconds:g} s'
    finally:  # also after Ctrl-C, which the child's separate session does not receive
      if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)
        for _ in range(10):
          if child.poll() is not None:
            break
          time.sleep(0.05)
    texts = []
    for file in (output, errors):
      file.seek(0)
      texts.append(file.read().decode(errors='replace'))
    return CommandResult(None if problem else child.returncode, *texts, problem)


PROC = pathlib.Path('/proc/driver/nvidia')
PCI = pathlib.Path('/sys/bus/pci/devices')
NVIDIA_VENDOR = '0x10de'
# A GPU that fell off its bus makes nvidia-smi wait for minutes.
NVIDIA_SMI_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class MachineGpus:
  """GPUs of this machine that a process may use.

  Attributes:
    kind: name of the first GPU, as in `jax.Device.device_kind`; None without GPU.
    count: number of GPUs on the machine; ignores CUDA_VISIBLE_DEVICES unless it hides all GPUs.
    reason: source of the count, or why there are none.
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
  """Returns the GPUs of this machine; none if the environment hides them all.

  Args:
    environ: the environment, `os.environ` by default.
    proc: folder of the driver.
    nvidia_smi: command, run only if that folder is missing (in some containers).
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
    if (match := re.search(r'^Model:\s*(.+?)\s*$', read_text(path), re.MULTILINE))
  ]
  if kinds:
    return MachineGpus(kinds[0], len(kinds), str(proc))
  done = _ask('name', nvidia_smi)
  if done.code is None and not shutil.which(nvidia_smi):
    return MachineGpus(None, 0, 'no NVIDIA driver on this machine')
  if done.code != 0:
    problem = done.problem or ' '.join((done.output + done.errors).split())
    return MachineGpus(None, 0, f'nvidia-smi failed: {problem}')
  kinds = [line.strip() for line in done.output.splitlines() if line.strip()]
  return MachineGpus(kinds[0] if kinds else None, len(kinds), 'nvidia-smi')


def _ask(field: str, nvidia_smi: str) -> CommandResult:
  return run_with_deadline(
    [nvidia_smi, f'--query-gpu={field}', '--format=csv,noheader'], seconds=NVIDIA_SMI_SECONDS
  )


def driver_version(proc: pathlib.Path = PROC, *, nvidia_smi: str = 'nvidia-smi') -> Optional[str]:
  """Returns the version of the driver, '580.95.05'; None if it is not loaded."""
  match = re.search(r'Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s', read_text(proc / 'version'))
  if match:
    return match.group(1)
  done = _ask('driver_version', nvidia_smi)  # WSL and some containers lack the folder.
  match = re.match(r'\d+\.\d+(\.\d+)?', done.output) if done.code == 0 else None
  return match.group() if match else None


def pci_numa_nodes(pci: pathlib.Path = PCI) -> dict[str, int]:
  """Returns PCI address -> NUMA node of each NVIDIA GPU; -1 if the firmware does not give it."""
  found = {}
  for device in sorted(pci.glob('*')):
    # 0x0300 and 0x0302: VGA and 3D controllers. NVSwitches and bridges have other classes.
    if read_text(device / 'vendor').strip() == NVIDIA_VENDOR and (
      read_text(device / 'class').startswith(('0x0300', '0x0302'))
    ):
      node = read_text(device / 'numa_node').strip()
      found[device.name] = int(node) if node.lstrip('-').isdigit() else -1
  return found


@dataclasses.dataclass(frozen=True)
class PhysicalGpu:
  """One GPU: its UUID and its PCI address as in /sys/bus/pci/devices."""

  uuid: str
  pci_address: str


def physical_gpus() -> list[PhysicalGpu]:
  """Returns the GPUs in PCI order; [] without a driver, or without the package nvidia-ml-py."""
  try:
    import pynvml
  except ImportError:
    _log.warning('The GPUs cannot be listed without nvidia-ml-py: pip install nvidia-ml-py.')
    return []
  try:
    pynvml.nvmlInit()
  except pynvml.NVMLError:
    return []
  try:
    found = [_physical_gpu(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
  except pynvml.NVMLError as e:
    _log.warning('NVML does not list the GPUs: %s.', e)
    found = []
  finally:
    pynvml.nvmlShutdown()
  return [gpu for gpu in found if gpu is not None]


def _physical_gpu(pynvml: types.ModuleType, index: int) -> Optional[PhysicalGpu]:
  try:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    uuid, pci = pynvml.nvmlDeviceGetUUID(handle), pynvml.nvmlDeviceGetPciInfo(handle)
  except pynvml.NVMLError as e:
    _log.warning('NVML does not describe GPU %d: %s.', index, e)
    return None
  # 32-bit domain in NVML ('00000000:1B:00.0'), 16-bit in sysfs ('0000:1b:00.0').
  domain, _, rest = pci.busId.lower().partition(':')
  return PhysicalGpu(uuid, f'{domain[-4:]}:{rest}')


def own_gpus(
  gpus: Sequence[PhysicalGpu], env: Environment, local_device_ids: Optional[Sequence[int]]
) -> tuple[str, ...]:
  """Returns the UUIDs of the GPUs that a process will use; () if unknown.

  Args:
    gpus: GPUs of this machine, in CUDA's order.
    env: the process's environment: CUDA_VISIBLE_DEVICES and JAX_PLATFORMS matter.
    local_device_ids: which of the visible GPUs it uses; None for all.
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
