"""Identifies this process: its run, its number, the address of process 0, and its GPUs.

`detect` is a function of environment variables: it works on a laptop, under Slurm, Open MPI, PALS,
torchrun and Kubernetes, and is testable without any of them. Flags override all variables.
"""

import argparse
import dataclasses
import os
import pathlib
import time
import zlib
from collections.abc import Callable
from typing import Optional

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.cluster import addresses, launchers
from t5x_gpu.runtime.cluster.launchers import Environment, LauncherVariables, number

# Above the ports that Linux assigns (net.ipv4.ip_local_port_range ends at 60999).
FIRST_PORT, NUM_PORTS = 61440, 4096
# Number of ports, derived from the scheduler's job id, that process 0 tries in turn.
PORT_CHOICES = 4

# mpirun, torchrun and Flux also run inside Slurm jobs. Their processes then see the variables of
# the single srun task that started the launcher, so Slurm comes after them.
_READERS = (
  launchers.jax_variables,
  launchers.torchrun,
  launchers.flux,
  launchers.jsrun,
  launchers.openmpi,
  launchers.slurm,
  launchers.kubernetes,
)


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
  """This process among the processes of its run.

  Attributes:
    kind: 'single', 'flags', or a launcher's kind: see `launchers`.
    process_index, process_count: index and number of processes over all hosts, from 0.
    coordinator_address: 'host:port' where process 0 listens; None for one process.
    other_addresses: alternatives, if that address is taken or not reachable.
    bind_address: 'host:port' where process 0 listens instead, behind NAT for instance.
    local_process_index, local_process_count: index and number of processes on this host, or None.
    local_device_ids: which of the visible GPUs this process uses; None for all GPUs.
    reason: why this `kind` was chosen.
    devices_reason: why these GPUs were chosen.
    warnings: settings that look like a mistake but may be intended.
    run_id: the same on all processes of a run, and different for every other run.
    node: the scheduler's name for this host.
    attempt: how often the scheduler has restarted this job.
    end_time: when the job's time limit ends, in seconds since 1970; None if unknown.
  """

  kind: str
  process_index: int = 0
  process_count: int = 1
  coordinator_address: Optional[str] = None
  other_addresses: tuple[str, ...] = ()
  bind_address: Optional[str] = None
  local_process_index: Optional[int] = None
  local_process_count: Optional[int] = None
  local_device_ids: Optional[tuple[int, ...]] = None
  reason: str = ''
  devices_reason: str = 'all visible GPUs'
  warnings: tuple[str, ...] = ()
  run_id: str = ''
  node: str = ''
  attempt: int = 0
  end_time: Optional[float] = None

  def __str__(self) -> str:
    if self.process_count == 1:
      return f'one process ({self.reason}); {self.devices_reason}'
    return (
      f'process {self.process_index} of {self.process_count} ({self.reason}), process 0 at '
      f'{self.coordinator_address}; {self.devices_reason}'
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
  """Adds the flags for a run of several processes without a supported launcher."""
  group = parser.add_argument_group('several processes (not needed with srun, mpirun, ...)')
  group.add_argument('--coordinator_address', metavar='HOST:PORT', help='where process 0 listens')
  group.add_argument(
    '--process_count', type=int, metavar='N', help='number of processes of the run'
  )
  group.add_argument(
    '--process_index', type=int, metavar='I', help='number of this process, from 0'
  )


def as_flags(flags: argparse.Namespace) -> tuple[str, ...]:
  """Returns the flags of `add_flags` that were given, for a child process."""
  names = ('coordinator_address', 'process_count', 'process_index')
  return tuple(f'--{name}={value}' for name in names if (value := getattr(flags, name)) is not None)


def detect_here(flags: argparse.Namespace) -> ClusterInfo:
  """Returns which process this is, from its `flags` (see `add_flags`) and environment."""
  found = detect(
    os.environ,
    num_gpus=count_gpus(),
    coordinator_address=flags.coordinator_address,
    process_count=flags.process_count,
    process_index=flags.process_index,
  )
  now = time.time()
  if found.end_time is None and found.process_index == 0:
    found = dataclasses.replace(found, end_time=launchers.ask_for_job_end(os.environ, now=now))
  return without_old_end(found, now=now)


def without_old_end(found: ClusterInfo, *, now: float) -> ClusterInfo:
  """Returns `found` without an end time in the past, which belongs to an earlier job.

  A shell or tmux that was started inside a job keeps the job's variables.
  """
  if found.end_time is None or found.end_time > now:
    return found
  warning = (
    f'The job of the environment variables ended {(now - found.end_time) / 60:.0f} minutes ago: '
    'ignoring its time limit. Start the run in a new shell.'
  )
  return dataclasses.replace(found, end_time=None, warnings=(*found.warnings, warning))


def detect(
  env: Environment,
  *,
  coordinator_address: Optional[str] = None,
  process_count: Optional[int] = None,
  process_index: Optional[int] = None,
  num_gpus: Optional[int] = None,
  read: Callable[[str], str] = launchers.read_text,
) -> ClusterInfo:
  """Returns which process this is: a single one unless flags or a launcher say otherwise.

  Args:
    env: `os.environ`.
    coordinator_address, process_count, process_index: the flags of these names. A flag that is
      given overrides the launcher's value.
    num_gpus: GPUs of this machine (`count_gpus()`), for launchers that do not set
      CUDA_VISIBLE_DEVICES; None if unknown.
    read: returns the text of a file (PBS_NODEFILE).
  Raises:
    ConfigError: flags or variables are impossible or incomplete.
    ClusterError: launchers contradict each other (`launchers.refuse_conflicts`).
  Source: flag names of T5X's training script, https://github.com/google-research/t5x.
  """
  answers = ask_all(env, read=read)
  if process_index is None:
    launchers.refuse_conflicts(answers, env, is_counted=process_count is not None)
  flags = {
    '--coordinator_address': coordinator_address,
    '--process_count': process_count,
    '--process_index': process_index,
  }
  given = {flag: value for flag, value in flags.items() if value is not None}
  if not answers and not given:
    return _single(env, num_gpus, read)
  if not answers and len(given) < len(flags):
    missing = ' and '.join(flag for flag in flags if flag not in given)
    raise ConfigError(
      f'{", ".join(f"{f}={v}" for f, v in given.items())} without {missing}: to join processes, '
      'all three must be set.',
      fix=f'Set {missing} too, or remove the others to run one process.',
    )
  found = (
    answers[0]
    if answers
    else LauncherVariables(kind='flags', evidence='flags', job=coordinator_address or '')
  )
  index, count = _number_of(found, env, process_index=process_index, process_count=process_count)
  known = _addresses(coordinator_address or env.get('JAX_COORDINATOR_ADDRESS'), found, count)
  ids, devices_reason = _local_devices(env, found, num_gpus)
  return ClusterInfo(
    kind=found.kind,
    process_index=index,
    process_count=count,
    coordinator_address=known[0] if known else None,
    other_addresses=known[1:],
    bind_address=env.get(addresses.BIND_VARIABLE) or None,
    local_process_index=found.local_index,
    local_process_count=found.local_count,
    local_device_ids=ids,
    devices_reason=devices_reason,
    reason=found.evidence
    + (f', and {", ".join(given)}' if given and found.evidence != 'flags' else ''),
    run_id=f'{found.kind}/{found.job}',
    node=found.node,
    attempt=found.attempt,
    end_time=launchers.job_end(env),
  )


def _single(env: Environment, num_gpus: Optional[int], read: Callable[[str], str]) -> ClusterInfo:
  ids, devices_reason = _local_devices(env, LauncherVariables(kind='single'), num_gpus)
  return ClusterInfo(
    kind='single',
    reason='no launcher and no flags',
    local_device_ids=ids,
    devices_reason=devices_reason,
    warnings=_idle_tasks(env, read),
    attempt=number(env, 'SLURM_RESTART_COUNT') or 0,
    end_time=launchers.job_end(env),
  )


def _number_of(
  found: LauncherVariables,
  env: Environment,
  *,
  process_index: Optional[int],
  process_count: Optional[int],
) -> tuple[int, int]:
  """Returns index and count of this process; the flags win over `found`."""
  index = process_index if process_index is not None else found.process_index
  count = process_count if process_count is not None else found.process_count
  if count is None:
    count = number(env, 'JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES')
  if count is None:
    raise ConfigError(
      f'{found.evidence} says that this is process {index}, but not how many there are.',
      fix='Set --process_count=N (or JAX_PROCESS_COUNT); 1 for a separate run.',
    )
  if count < 1 or not 0 <= index < count:
    raise ConfigError(
      f'--process_index={index} is not one of --process_count={count} processes '
      f'(from {found.evidence}).',
      fix='Number the processes from 0'
      + (f' to {count - 1}.' if count > 0 else ' and start at least one.'),
    )
  return index, count


def ask_all(
  env: Environment, *, read: Callable[[str], str] = launchers.read_text
) -> list[LauncherVariables]:
  """Returns the variables of each launcher that started this process; the first one decides."""
  found = [reader(env) for reader in _READERS] + [launchers.pmi(env, read=read)]
  return [each for each in found if each is not None]


def _idle_tasks(env: Environment, read: Callable[[str], str]) -> tuple[str, ...]:
  """Returns a warning if this single process runs in a job with more tasks or hosts."""
  tasks, hosts = number(env, 'SLURM_NTASKS') or 1, number(env, 'SLURM_JOB_NUM_NODES') or 1
  if 'SLURM_JOB_ID' in env and max(tasks, hosts) > 1:
    return (
      f'This Slurm job has {tasks} tasks on {hosts} hosts, but this process was started '
      'without srun and runs alone. Start it with srun; see docs/slurm.md.',
    )
  hosts = len(launchers.pbs_hosts(env, read=read)) if 'PBS_JOBID' in env else 1
  if hosts > 1:
    return (
      f'This PBS job has {hosts} hosts, but this process was started without mpiexec and '
      'runs alone. Start it with mpiexec; see docs/slurm.md.',
    )
  return ()


def _addresses(explicit: Optional[str], found: LauncherVariables, count: int) -> tuple[str, ...]:
  """Returns addresses where process 0 may listen, best first; () for one process."""
  if count == 1:
    return ()
  address = explicit or found.address
  if address:
    addresses.split(address, '--coordinator_address')
    return (address,)
  if not found.hosts:
    raise ConfigError(
      f'{found.evidence} does not say on which host process 0 runs.',
      fix='Set --coordinator_address=HOST:PORT (or JAX_COORDINATOR_ADDRESS) to the '
      'first host and a free port.',
      docs='slurm.md#by-hand-and-other-launchers',
    )
  return tuple(addresses.join(host, port) for port in ports(found.job) for host in found.hosts)


def ports(job: str) -> tuple[int, ...]:
  """Returns the ports that process 0 of `job` tries, best first.

  They come from a hash of job, step and attempt. JAX's own choice, job id modulo 4096, gives two
  steps of one allocation the same port.
  """
  start = zlib.crc32(job.encode())
  # A stride of 1021 (coprime to 4096) gives jobs with similar hashes different ports.
  return tuple(FIRST_PORT + (start + 1021 * i) % NUM_PORTS for i in range(PORT_CHOICES))


def count_gpus(root: pathlib.Path = pathlib.Path('/')) -> Optional[int]:
  """Returns the number of GPUs that the NVIDIA driver shows in /dev; None if it is not loaded."""
  devices = [p for p in (root / 'dev').glob('nvidia*') if p.name.removeprefix('nvidia').isdigit()]
  return len(devices) or None


def visible_gpus(env: Environment, num_gpus: Optional[int]) -> Optional[int]:
  """Returns the number of GPUs that CUDA will show to this process, None if unknown.

  CUDA stops reading CUDA_VISIBLE_DEVICES at the first entry that is not a GPU.
  """
  text = env.get('CUDA_VISIBLE_DEVICES')
  if text is None:
    return num_gpus
  entries = [entry.strip() for entry in text.split(',')]
  valid = [entry.isdigit() or entry.startswith(('GPU-', 'MIG-')) for entry in entries]
  return valid.index(False) if False in valid else len(entries)


def _local_devices(
  env: Environment, found: LauncherVariables, num_gpus: Optional[int]
) -> tuple[Optional[tuple[int, ...]], str]:
  """Returns which of the visible GPUs this process uses (None: all), and the reason.

  JAX takes visible GPU number SLURM_LOCALID. That is wrong if each task sees only its own GPU
  (--gpus-per-task), and leaves seven of eight idle if one task sees them all.
  """
  explicit = env.get('JAX_LOCAL_DEVICE_IDS', '')
  if explicit:
    try:
      ids = tuple(int(i) for i in explicit.split(','))
    except ValueError as e:
      raise ConfigError(
        f'JAX_LOCAL_DEVICE_IDS = {explicit!r} is not a list of numbers.', fix='Write it as 0,1,2.'
      ) from e
    return ids, f'GPUs {explicit} from JAX_LOCAL_DEVICE_IDS'
  visible, local_count, local_index = (
    visible_gpus(env, num_gpus),
    found.local_count,
    found.local_index,
  )
  if not visible or env.get('JAX_PLATFORMS', '') == 'cpu':
    return None, 'no GPU visible'
  if local_count is None or local_index is None or local_count == 1:
    return None, f'all {visible} visible GPUs'
  own = found.gpus_per_process
  bound = (
    visible == own if own else (found.gpus_on_host is not None and visible < found.gpus_on_host)
  )
  if bound or (visible == 1 and found.gpus_on_host != 1):
    return None, f'the {visible} GPUs that the scheduler shows to this process alone'
  if visible % local_count:
    raise ConfigError(
      f'{visible} GPUs are visible to each of {local_count} processes on this host '
      f'(CUDA_VISIBLE_DEVICES={env.get("CUDA_VISIBLE_DEVICES", "unset")}): they cannot be divided '
      'evenly.',
      fix=_sharing_fix(found.kind, visible),
    )
  each = visible // local_count
  ids = tuple(range(local_index * each, (local_index + 1) * each))
  return ids, (
    f'GPU{"s" if each > 1 else ""} {",".join(map(str, ids))} of {visible} visible '
    f'(process {local_index} of {local_count} on this host)'
  )


def _sharing_fix(kind: str, visible: int) -> str:
  if kind == 'slurm':
    return (
      f'Slurm: set --ntasks-per-node={visible} with --gpus-per-node={visible}, one task per '
      'GPU, or --ntasks-per-node=1 for one task with all of them.'
    )
  return f'Start {visible} processes per host, one per GPU, or 1 with all of them.'
