"""Checks of the machine and the installation, each a function that returns a `Check`.

`quick_checks` only reads files and package metadata, so it cannot hang; every run makes these
checks. The doctor also checks GPUs, speeds and disks: these functions take the output of child
processes, so all can be tested without a GPU.
"""

import dataclasses
import json
import logging
import os
import pathlib
import re
import resource
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.runtime import hardware, machine
from t5x_gpu.runtime.hardware import GIB
from t5x_gpu.runtime.xla.presets import generation
from t5x_gpu.storage.json_schema import Json, JsonObject
from t5x_gpu.terminal.console import show

_log = logging.getLogger(__name__)

OK, WARN, FAIL = 'ok', 'warn', 'FAIL'
OLDEST_PYTHON = (3, 11)
# Smallest driver per CUDA major version: https://docs.jax.dev/en/latest/installation.html
OLDEST_DRIVER = {12: 525, 13: 580}
LEAST_OPEN_FILES = 4096
LEAST_SHM_BYTES = GIB
INFINIBAND = pathlib.Path('/sys/class/infiniband')


@dataclasses.dataclass(frozen=True)
class Check:
  """One line of the doctor's report.

  Attributes:
    name: name of the check.
    status: 'ok', 'warn' (avoidably slow or risky) or 'FAIL' (a run would break or mislead).
    value: the finding, with units.
    fix: advice; '' if ok.
  """

  name: str
  status: str
  value: str
  fix: str = ''


def check_python(version: Optional[tuple[int, ...]] = None) -> Check:
  """Checks that Python is new enough."""
  version = tuple(sys.version_info[:3]) if version is None else version
  found = f'{".".join(map(str, version))} ({sys.executable})'
  if version[:2] < OLDEST_PYTHON:
    fix = 'Install Python 3.11 or newer and create a new virtual environment with it.'
    return Check('python', FAIL, found, fix)
  return Check('python', OK, found)


def installed_versions() -> dict[str, str]:
  """Returns package -> version of jax, jaxlib, the CUDA plugins and NVIDIA's packages."""
  return machine.versions(
    (
      'jax',
      'jaxlib',
      'nvidia-ml-py',
      *(f'jax-cuda{cuda}-{part}' for cuda in OLDEST_DRIVER for part in ('plugin', 'pjrt')),
      *(f'nvidia-{part}-cu{cuda}' for cuda in OLDEST_DRIVER for part in ('cudnn', 'nccl')),
    )
  )


def check_packages(versions: Optional[Mapping[str, str]] = None, *, gpus: int = 0) -> Check:
  """Checks that jax, jaxlib and the CUDA plugin match, and that the package of pynvml is there.

  Args:
    versions: package -> version, the installed ones by default.
    gpus: GPUs present or expected; if not 0, a plugin must be installed.
  """
  versions = installed_versions() if versions is None else versions
  value = ', '.join(
    f'{name} {version}' for name, version in versions.items() if name.startswith('jax')
  )
  jax, jaxlib = versions.get('jax'), versions.get('jaxlib')
  if jax is None or jaxlib is None:
    return Check('packages', FAIL, value or 'no jax', 'pip install t5x_gpu, or: pip install jax')
  cudas = [cuda for cuda in OLDEST_DRIVER if f'jax-cuda{cuda}-plugin' in versions]
  again = f"pip install -U 'jax[cuda{cudas[-1] if cudas else 13}]=={jax}'"
  if jax != jaxlib:
    # jax runs with slightly older jaxlibs, never with a newer one.
    newer = _numbers(jaxlib) > _numbers(jax)
    return Check('packages', FAIL if newer else WARN, value, f"pip install -U 'jaxlib=={jax}'")
  if len(cudas) > 1:
    fix = 'Two CUDA plugins: pip uninstall the jax-cuda12-plugin and jax-cuda12-pjrt packages.'
    return Check('packages', WARN, value, fix)
  for cuda in cudas:
    for part in ('plugin', 'pjrt'):
      version = versions.get(f'jax-cuda{cuda}-{part}')
      if version is None:
        return Check('packages', FAIL, f'{value}, no jax-cuda{cuda}-{part}', again)
      if version != jaxlib:
        different = _numbers(version)[:2] != _numbers(jaxlib)[:2]
        return Check('packages', FAIL if different else WARN, value, again)
  if gpus and not cudas:
    return Check('packages', FAIL, f'{value}, no CUDA plugin: jax will run on the CPU', again)
  if gpus and 'nvidia-ml-py' not in versions:
    return Check('packages', WARN, f'{value}, no pynvml to list GPUs', 'pip install nvidia-ml-py')
  return Check('packages', OK, value)


def _numbers(version: str) -> tuple[int, ...]:
  return tuple(int(part) for part in re.findall(r'\d+', version))


def check_driver(
  driver: Optional[str], versions: Mapping[str, str], *, on_bus: int, expected: Optional[int] = None
) -> Check:
  """Checks that the kernel driver is loaded and new enough for the CUDA plugin.

  Args:
    driver: its version, None if it is not loaded.
    versions: from `installed_versions`.
    on_bus: NVIDIA GPUs on the PCI bus.
    expected: GPUs that the user expects.
  """
  if driver is None and on_bus:
    fix = 'Install the NVIDIA driver; in a container, start it with GPUs (docker run --gpus all, '
    fix += 'apptainer --nv).'
    return Check('driver', FAIL, f'none, but {on_bus} NVIDIA GPUs are on the PCI bus', fix)
  if driver is None and expected:
    fix = 'This machine has no NVIDIA GPU: request GPUs from the scheduler (Slurm: '
    fix += '--gpus-per-node), or do not expect any.'
    return Check('driver', FAIL, f'none, {expected} GPUs expected', fix)
  if driver is None:
    return Check('driver', OK, 'none (no GPU here)')
  cuda = max((c for c in OLDEST_DRIVER if f'jax-cuda{c}-plugin' in versions), default=None)
  if cuda and int(driver.split('.')[0]) < OLDEST_DRIVER[cuda]:
    older = [c for c in OLDEST_DRIVER if int(driver.split('.')[0]) >= OLDEST_DRIVER[c]]
    fix = 'Update the NVIDIA driver'
    if older:
      fix += f", or install the plugin for CUDA {older[-1]}: pip install 'jax[cuda{older[-1]}]'"
    value = f'{driver}, CUDA {cuda} needs {OLDEST_DRIVER[cuda]} or newer'
    return Check('driver', FAIL, value, f'{fix}.')
  return Check('driver', OK, driver)


def check_numa(nodes: Mapping[str, int], *, num_nodes: int) -> Check:
  """Returns the NUMA node of each GPU.

  Args:
    nodes: PCI address -> node, from `machine.pci_numa_nodes`.
    num_nodes: NUMA nodes of the machine.
  """
  if not nodes:
    return Check('numa', OK, f'{num_nodes} node{"s" * (num_nodes != 1)}, no GPU on the PCI bus')
  text = ', '.join(f'{address} on {"?" if node < 0 else node}' for address, node in nodes.items())
  if num_nodes > 1 and min(nodes.values()) < 0:
    fix = 'Bind processes by hand (--numa=FILE): the firmware or virtual machine hides the layout.'
    return Check('numa', WARN, f'{num_nodes} nodes, but unknown for some GPUs: {text}', fix)
  return Check('numa', OK, f'{num_nodes} node{"s" * (num_nodes != 1)}: {text}')


def count_numa_nodes(root: pathlib.Path = pathlib.Path('/sys/devices/system/node')) -> int:
  """Returns the number of NUMA nodes of this machine, at least 1."""
  return max(1, len(list(root.glob('node[0-9]*'))))


def check_library(
  part: str,
  versions: Mapping[str, str],
  *,
  gpus: int,
  loaded: Optional[int] = None,
  built: Optional[int] = None,
) -> Check:
  """Checks that 'cudnn' or 'nccl' is installed and not older than what jax was built with.

  Args:
    part: 'cudnn' or 'nccl'.
    versions: from `installed_versions`.
    gpus: number of GPUs on this machine.
    loaded: version of the library that jax loaded (91200 for 9.12.0), if known.
    built: version that the plugin was built with, if known.
  """
  packages = {name: version for name, version in versions.items() if f'nvidia-{part}-' in name}
  value = ', '.join(f'{name} {version}' for name, version in packages.items())
  if loaded and built and loaded // 100 < built // 100:
    value = f'{value or "system"}, {loaded} loaded, jax was built with {built}'
    install = f'pip install -U {" ".join(packages) or f"nvidia-{part}-cu13"}'
    return Check(part, FAIL, value, f'{install}, and remove older copies from LD_LIBRARY_PATH.')
  if loaded:
    value = f'{value or "system library"} ({loaded} loaded)'
  if not gpus:
    return Check(part, OK, value or 'none (no GPU here)')
  if not value:
    fix = "pip install 'jax[cuda13]' brings the version that was tested."
    return Check(part, WARN, 'no wheel installed: uses the system library', fix)
  return Check(part, OK, value)


def check_ulimits(
  limits: Optional[Mapping[str, int]] = None, *, infiniband: pathlib.Path = INFINIBAND
) -> Check:
  """Checks the limits of open files, processes and locked memory.

  Args:
    limits: 'nofile', 'nproc', 'memlock' -> limit, -1 for none; this process's by default. A run
      raises its limit of open files to the hard limit.
    infiniband: a folder with entries where there is RDMA hardware.
  """
  if limits is None:
    limits = {
      name: resource.getrlimit(getattr(resource, f'RLIMIT_{name.upper()}'))[name == 'nofile']
      for name in ('nofile', 'nproc', 'memlock')
    }
  shown = ', '.join(
    f'{name} {"unlimited" if limit == resource.RLIM_INFINITY else limit}'
    for name, limit in limits.items()
  )

  has_rdma = infiniband.is_dir() and any(infiniband.iterdir())
  for name, least, fix in (
    ('nofile', LEAST_OPEN_FILES, '-n 65536: checkpoints and data readers open thousands of files.'),
    (
      'nproc',
      LEAST_OPEN_FILES,
      '-u unlimited: XLA, NCCL and TensorFlow start hundreds of threads per process.',
    ),
    (
      'memlock',
      float('inf') if has_rdma else 0,
      '-l unlimited (Slurm: PropagateResourceLimitsExcept=MEMLOCK): NCCL registers its buffers '
      'with the network card.',
    ),
  ):
    if limits[name] != resource.RLIM_INFINITY and limits[name] < least:
      return Check('ulimits', WARN, shown, f'ulimit {fix}')
  return Check('ulimits', OK, shown)


def check_shared_memory(folder: str = '/dev/shm', *, gpus: int = 0) -> Check:
  """Checks that /dev/shm is large enough; a container gets 64 MiB by default.

  Args:
    folder: mount point of shared memory.
    gpus: number of GPUs on this machine; NCCL uses shared memory between several GPUs.
  """
  bad, fix = FAIL if gpus > 1 else WARN, 'Start the container with --ipc=host or --shm-size=16g.'
  try:
    stat = os.statvfs(folder)
  except OSError:
    return Check('/dev/shm', bad, 'not there', fix)
  size, free = stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize
  value = f'{show(size, GiB=".2g")}, {show(free, GiB=".2g")} free'
  if size < LEAST_SHM_BYTES:
    return Check('/dev/shm', bad, value, fix)
  if free < LEAST_SHM_BYTES:
    return Check('/dev/shm', bad, value, 'Remove files that crashed jobs left: ls -la /dev/shm')
  return Check('/dev/shm', OK, value)


def check_host() -> Check:
  """Returns the CPUs and memory that this process may use."""
  cpus, limit = len(os.sched_getaffinity(0)), hardware.host_limit()
  total = show(limit.bytes, GiB='.0f') if limit else 'an unknown amount'
  return Check('host', OK, f'{cpus} CPUs, {total} of memory for this process')


def quick_checks(*, expect_gpus: Optional[int] = None) -> list[Check]:
  """Returns the checks that take milliseconds; every run makes these before it starts.

  Args:
    expect_gpus: GPUs that must be on this machine; None for any number.
  """
  versions, nodes = installed_versions(), machine.pci_numa_nodes()
  driver = machine.driver_version()
  gpus = len(nodes) or expect_gpus or 0
  return [
    check_python(),
    check_packages(versions, gpus=gpus),
    check_driver(driver, versions, on_bus=len(nodes), expected=expect_gpus),
    check_numa(nodes, num_nodes=count_numa_nodes()),
    check_host(),
    check_ulimits(),
    check_shared_memory(gpus=gpus),
  ]


def log_problems() -> None:
  """Logs problems of this host, on every process, so that one bad node of many is visible."""
  for check in quick_checks():
    if check.status != OK:
      _log.warning(
        '%s: %s %s: %s %s', socket.gethostname(), check.status, check.name, check.value, check.fix
      )


# Share of the datasheet: a healthy GPU reaches 65 to 85% on large bfloat16 matmuls.
LEAST_MATMUL_SHARE = 0.55
# Allowed spread between the GPUs of one host; the slowest GPU sets the pace of all.
MOST_SPREAD = 0.1
# One direction, bytes/s: half of the total that the data sheets print.
NVLINK = {'a100': 300e9, 'h100': 450e9, 'h200': 450e9, 'b200': 900e9}
LEAST_LINK_SHARE = 0.5
LEAST_DISK = 100e6
LEAST_FREE = 20 * GIB
# Bits of NVML's clock event reasons: hardware slowdown, by heat, by power brake;
# software slowdown by heat. Every healthy GPU reaches its power cap (4) under load.
# https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
SLOWDOWNS = {0x8: 'hardware slowdown', 0x40: 'heat', 0x80: 'power brake', 0x20: 'heat'}


def json_lines(text: str) -> JsonObject:
  """Merges the objects that a measuring child printed into one dictionary."""
  found = {}
  for line in text.splitlines():
    try:
      found |= json.loads(line)
    except (ValueError, TypeError):
      continue  # a line printed by a library
  return found


def check_devices(
  found: Optional[Json],
  *,
  on_machine: int,
  problem: str = '',
  expected: Optional[int] = None,
  environ: Mapping[str, str],
) -> Check:
  """Checks that jax sees the expected GPUs.

  Args:
    found: 'devices' of the measuring child; None if it failed before that.
    on_machine: GPUs that the driver or the PCI bus shows.
    problem: the child's last line.
    expected: GPUs that the user expects.
    environ: JAX_PLATFORMS and CUDA_VISIBLE_DEVICES in it may hide GPUs.
  """
  if found is None:
    fix = 'Read the whole message: python -c "import jax; print(jax.devices())"'
    return Check('devices', FAIL, f'jax did not start: {problem or "no answer"}', fix)
  seen = 0 if found['platform'] == 'cpu' else found['count']
  kinds = ', '.join(found['kinds'])
  value = f'{seen} x {kinds}' if seen else f'jax runs on {found["platform"]}'
  hiding = {
    name: environ[name] for name in ('JAX_PLATFORMS', 'CUDA_VISIBLE_DEVICES') if name in environ
  }
  hidden = ', '.join(f'{name}={text}' for name, text in hiding.items())
  unhide = (
    f'{hidden} is set: unset it to see all GPUs.'
    if hidden
    else ('JAX_PLATFORMS=cuda python -c "import jax; jax.devices()" shows why.')
  )
  reason = f': {problem}' if problem and not seen else ''
  if expected is not None and seen != expected:
    if on_machine < expected:
      unhide = f'This machine shows {on_machine} GPUs: request {expected} from the scheduler.'
    return Check('devices', FAIL, f'{value}, {expected} expected{reason}', unhide)
  if on_machine and not seen:
    # A warning if the user asked for the CPU; otherwise a mistake.
    status = WARN if environ.get('JAX_PLATFORMS') == 'cpu' else FAIL
    return Check('devices', status, f'{value}, though {on_machine} GPUs are here{reason}', unhide)
  if seen < on_machine and not hidden:
    return Check('devices', FAIL, f'{value}, though {on_machine} GPUs are here', unhide)
  if not on_machine and not seen:
    return Check('devices', OK, f'{value}, no GPU on this machine')
  return Check('devices', OK, value + (f' ({hidden})' if hidden else ''))


def check_matmul(
  rates: Optional[Sequence[float]], *, devices: Optional[Json], problem: str = ''
) -> Check:
  """Compares the speed of a large matmul with the datasheet.

  Args:
    rates: FLOP/s per device; None if not measured.
    devices: 'devices' of the measuring child.
    problem: why `rates` is missing.
  """
  if not rates or devices is None:
    fix = 'If it hangs: nvidia-smi, dmesg | grep -i xid'
    return Check('matmul', FAIL, problem or 'not measured', fix)
  if devices['platform'] == 'cpu':
    return Check('matmul', OK, f'{rates[0] / 1e9:.0f} GFLOP/s float32 on the CPU')
  slowest, fastest = min(rates), max(rates)
  each = f'{slowest / 1e12:.0f}' + (f' to {fastest / 1e12:.0f}' if len(rates) > 1 else '')
  peak = hardware.peak_flops(devices['kinds'][0], 'bfloat16')
  share = f', {slowest / peak:.0%} of {peak / 1e12:.0f}' if peak else ', peak unknown'
  value = f'{each} TFLOP/s bfloat16{share}'
  if slowest < fastest * (1 - MOST_SPREAD):
    fix = f'GPU {list(rates).index(slowest)} is slower than the others, and all will wait for it: '
    return Check('matmul', WARN, value, fix + 'is it hot, throttled, or in use?')
  if peak and slowest < peak * LEAST_MATMUL_SHARE:
    fix = 'nvidia-smi shows other jobs on it; nvidia-smi -q -d CLOCK,PERFORMANCE, what slows it.'
    return Check('matmul', WARN, value, fix)
  return Check('matmul', OK, value)


def check_all_reduce(found: Json, *, problem: str = '') -> Check:
  """Checks the bus bandwidth of an all-reduce, per tier of links.

  Args:
    found: from the measuring child: 'all_reduce', tier -> bytes/s; 'together', the devices; or a
      'problem' and its fix.
    problem: why the child ended early.
  """
  together, rates = found.get('together'), found.get('all_reduce')
  if 'problem' in found:
    return Check('all-reduce', FAIL, found['problem']['what'], found['problem']['fix'])
  if rates is None:
    came = f'{together["topology"]} were ready, then' if together else 'did not start'
    fix = (
      'If one of several processes prints another error, that is the cause. NCCL_DEBUG=INFO '
      'shows where it stops; check /dev/shm, the network and the driver first.'
    )
    return Check('all-reduce', FAIL, f'{came}: {problem or "no answer"}', fix)
  value = (
    ', '.join(f'{show(rate, GB=".3g")}/s {tier.replace("_", " ")}' for tier, rate in rates.items())
    + f' ({together["topology"]})'
  )
  kind = together['kind']
  link = None if 'PCI' in kind.upper() else NVLINK.get(generation(kind) or '')
  if link and rates.get('in_host', link) < LEAST_LINK_SHARE * link:
    fix = (
      'nvidia-smi topo -m shows the links: without NVLink, prefer data or fsdp to tensor '
      'parallelism. NCCL_DEBUG=INFO shows which transport it chose; P2P may be off (IOMMU, ACS), '
      'or nvidia-fabricmanager is not running.'
    )
    return Check('all-reduce', WARN, f'{value}, NVLink reaches {link / 1e9:.0f}', fix)
  return Check('all-reduce', OK, value)


def check_disk(found: Optional[Mapping[str, float]], *, folder: str, problem: str = '') -> Check:
  """Checks how fast checkpoints can be written to a folder.

  Args:
    found: 'disk' of the measuring child; None if it failed.
    folder: the measured folder.
    problem: why the child failed.
  """
  if found is None:
    fix = 'Choose a folder that you can write to: --model_dir=FOLDER'
    return Check('disk', FAIL, f'{folder}: {problem or "no answer"}', fix)
  value = (
    f'{folder}: write {show(found["write"], MB=".0f")}/s, '
    f'read {show(found["read"], MB=".0f")}/s, {found["sync_seconds"] * 1e3:.0f} ms per sync, '
    f'{show(found["free"], GiB=".0f")} free'
  )
  if found['write'] < LEAST_DISK:
    minutes = 12e9 / found['write'] / 60
    fix = f'Checkpoints will be slow: a model of 1 billion parameters with Adam takes {minutes:.0f}'
    return Check('disk', WARN, value, fix + ' min here. Use a local or parallel file system.')
  if found['free'] < LEAST_FREE:
    return Check('disk', WARN, value, 'Free some space, or keep fewer checkpoints.')
  return Check('disk', OK, value)
