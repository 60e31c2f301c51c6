"""Which CPU cores are near a GPU (from sysfs), and binding a process to them.

A process on the other socket reaches its GPU, and the memory that Linux allocates for it, over the
link between the sockets.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator, Sequence

from t5x_gpu.errors import ConfigError, number_ranges

ROOT = pathlib.Path('/')


@dataclasses.dataclass(frozen=True)
class CoreBinding:
  """The cores of a process (None: not bound) and the reason, for the log."""

  cpus: frozenset[int] | None
  reason: str


def bind_to_gpus(
  pci_addresses: Sequence[str], *, allowed: frozenset[int], root: pathlib.Path = ROOT
) -> CoreBinding:
  """Returns the cores near these GPUs.

  Args:
    pci_addresses: addresses as in /sys/bus/pci/devices, '0000:1b:00.0'.
    allowed: cores that the container or scheduler lets this process use (os.sched_getaffinity).
    root: root of the file system.
  """
  if not pci_addresses:
    return CoreBinding(None, 'not bound: no GPU')
  nodes = {numa_node(address, root=root) for address in pci_addresses}
  if min(nodes) < 0:
    return CoreBinding(None, f'not bound: sysfs has no NUMA node for GPU {pci_addresses[0]}')
  cpus = frozenset().union(*(node_cpus(node, root=root) for node in nodes)) & allowed
  where = f'NUMA node {", ".join(map(str, sorted(nodes)))}'
  if not cpus:
    return CoreBinding(None, f'not bound: none of the cores of {where} is allowed here')
  return CoreBinding(cpus, f'{where}, cores {number_ranges(sorted(cpus))}')


def numa_node(pci_address: str, *, root: pathlib.Path = ROOT) -> int:
  """Returns the NUMA node of a PCI device, -1 if unknown."""
  path = root / 'sys/bus/pci/devices' / pci_address / 'numa_node'
  return int(path.read_text()) if path.exists() else -1


def node_cpus(node: int, *, root: pathlib.Path = ROOT) -> frozenset[int]:
  """Returns the cores of a NUMA node."""
  path = root / f'sys/devices/system/node/node{node}/cpulist'
  return parse_cpus(path.read_text()) if path.exists() else frozenset()


def read_bindings(file: str, *, num_processes: int) -> list[CoreBinding]:
  """Returns the cores of each local process from a file with lines like `0: 0-15,128-143`.

  Raises:
    ConfigError: the file cannot be read, or does not give every process its cores.
  """
  try:
    lines = pathlib.Path(file).read_text().splitlines()
  except OSError as e:
    raise ConfigError(
      f'--numa={file} cannot be read: {e.strerror}.',
      fix='Give auto, off or a file of lines like 0: 0-15,128-143',
    ) from e
  cpus = {}
  for number, line in enumerate(lines, 1):
    line = line.split('#')[0].strip()
    if line:
      found = re.fullmatch(r'(\d+)\s*:\s*([\d,\s-]+)', line)
      if not found:
        raise ConfigError(
          f'{file}:{number}: {line!r} is not PROCESS: CORES.',
          fix='Write lines like 0: 0-15,128-143',
        )
      cpus[int(found[1])] = parse_cpus(found[2])
  missing = [i for i in range(num_processes) if not cpus.get(i)]
  if missing:
    raise ConfigError(
      f'{file} has no cores for process {missing[0]} of {num_processes}.',
      fix=f'Add a line such as {missing[0]}: 0-15',
    )
  return [
    CoreBinding(cpus[i], f'cores {number_ranges(sorted(cpus[i]))} by {file}')
    for i in range(num_processes)
  ]


def parse_cpus(text: str) -> frozenset[int]:
  """Returns {0, 1, 2, 8} for the kernel's '0-2,8'."""
  cpus: set[int] = set()
  for part in text.split(','):
    if part.strip():
      first, _, last = part.strip().partition('-')
      cpus.update(range(int(first), int(last or first) + 1))
  return frozenset(cpus)


@contextlib.contextmanager
def running_on(cpus: frozenset[int] | None) -> Iterator[None]:
  """Binds the calling thread, and threads and processes it starts, to `cpus`; None does nothing.

  Raises:
    ConfigError: this machine does not have these cores, or this process may not use them.
  """
  before = os.sched_getaffinity(0)
  if cpus is not None:
    try:
      os.sched_setaffinity(0, cpus)
    except OSError as e:
      raise ConfigError(
        f'Cores {number_ranges(sorted(cpus))} cannot be used: {e.strerror}; allowed are '
        f'{number_ranges(sorted(before))}.',
        fix='Correct the file of --numa, or set --numa=off.',
      ) from e
  try:
    yield
  finally:
    os.sched_setaffinity(0, before)
