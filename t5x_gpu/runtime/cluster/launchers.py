"""Reads the environment variables of each scheduler and launcher about a process.

One function per scheduler; each returns the variables' values, or None if that scheduler did not
start this process. `cluster.detect` calls them in order and fills in the rest. `job_end` finds the
time limit of the job; `refuse_conflicts` refuses launchers that disagree about this process.
"""

import contextlib
import dataclasses
import functools
import pathlib
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.errors import ClusterError, ConfigError
from t5x_gpu.runtime.cluster import addresses

Environment = Mapping[str, str]

# For schedulers that do not report the end of a job: seconds since 1970.
END_TIME_VARIABLE = 'T5X_GPU_JOB_END_TIME'
_ASK_SECONDS = 10


@dataclasses.dataclass(frozen=True)
class LauncherVariables:
  """Values of a scheduler's variables; None for missing values.

  Attributes:
    kind: 'slurm', 'openmpi', ...
    process_index, process_count: index and number of processes in the run.
    local_index, local_count: index and number of processes on this host.
    hosts: names or addresses of the host of process 0, best first.
    address: 'host:port' of process 0, if the launcher also names the port.
    job: job, step and attempt; differs between any two runs that may overlap in time.
    node: the scheduler's name for this host.
    gpus_per_process, gpus_on_host: as requested from the scheduler.
    attempt: how often the scheduler has restarted this job.
    evidence: the variables that decided, for the log.
  """

  kind: str
  process_index: Optional[int] = None
  process_count: Optional[int] = None
  local_index: Optional[int] = None
  local_count: Optional[int] = None
  hosts: tuple[str, ...] = ()
  address: Optional[str] = None
  job: str = ''
  node: str = ''
  gpus_per_process: Optional[int] = None
  gpus_on_host: Optional[int] = None
  attempt: int = 0
  evidence: str = ''


def number(env: Environment, *names: str) -> Optional[int]:
  """Returns the first of these variables that is set, as a number; None if all are unset.

  Raises:
    ConfigError: the value is not a number.
  """
  for name in names:
    if env.get(name, ''):
      try:
        return int(env[name])
      except ValueError as e:
        raise ConfigError(
          f'The environment variable {name} = {env[name]!r} is not a number.',
          fix=f'Unset {name}, or set it to a number.',
        ) from e
  return None


def slurm(env: Environment) -> Optional[LauncherVariables]:
  """Reads srun's variables; None in the batch shell itself, which is not a step.

  Source: https://slurm.schedmd.com/srun.html, "Output environment variables".
  """
  step = ('SLURM_JOB_ID', 'SLURM_STEP_NODELIST', 'SLURM_PROCID', 'SLURM_LOCALID')
  if not all(env.get(name) for name in step):
    return None
  attempt = number(env, 'SLURM_RESTART_COUNT') or 0
  per_node = _repeated(env.get('SLURM_STEP_TASKS_PER_NODE', ''))
  node_index = number(env, 'SLURM_NODEID')
  known = node_index is not None and node_index < len(per_node)
  return LauncherVariables(
    kind='slurm',
    process_index=number(env, 'SLURM_PROCID'),
    # The step's count: SLURM_NTASKS may be the whole job's.
    process_count=number(env, 'SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS', 'SLURM_NPROCS'),
    local_index=number(env, 'SLURM_LOCALID'),
    local_count=per_node[node_index] if known else None,
    hosts=(first_host(env['SLURM_STEP_NODELIST']),),
    # A requeued job keeps its id. The attempt prevents leftovers of the old attempt, on a host that
    # was disconnected, from joining the new one.
    job=f'{env["SLURM_JOB_ID"]}.{env.get("SLURM_STEP_ID", "0")}.{attempt}',
    node=env.get('SLURMD_NODENAME', ''),
    gpus_per_process=_gpu_count(env.get('SLURM_GPUS_PER_TASK', '')),
    gpus_on_host=number(env, 'SLURM_GPUS_ON_NODE'),
    attempt=attempt,
    evidence=f'Slurm step {env["SLURM_JOB_ID"]}.{env.get("SLURM_STEP_ID", "0")}',
  )


def openmpi(env: Environment) -> Optional[LauncherVariables]:
  """Reads the variables of Open MPI's mpirun.

  Source: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
  """
  index = number(env, 'OMPI_COMM_WORLD_RANK')
  if index is None:
    return None
  count = number(env, 'OMPI_COMM_WORLD_SIZE')
  local_count = number(env, 'OMPI_COMM_WORLD_LOCAL_SIZE')
  uri, namespace = env.get('OMPI_MCA_orte_hnp_uri', ''), env.get('PMIX_NAMESPACE', '')
  if count is not None and count == local_count:
    hosts: tuple[str, ...] = ('127.0.0.1',)
  else:
    hosts = _mpirun_hosts(uri, namespace)
  return LauncherVariables(
    kind='openmpi',
    process_index=index,
    process_count=count,
    local_index=number(env, 'OMPI_COMM_WORLD_LOCAL_RANK'),
    local_count=local_count,
    hosts=hosts,
    job=namespace or uri.split(';', 1)[0],
    evidence='OMPI_COMM_WORLD_RANK of mpirun',
  )


def _mpirun_hosts(uri: str, namespace: str) -> tuple[str, ...]:
  """Returns the host of mpirun itself, where it starts process 0 by default."""
  # Open MPI 4: '1531576320.0;tcp://10.96.0.1,10.148.0.1:34911': all interfaces of that host.
  found = re.search(r'tcp://([^:;]+):\d+|tcp6://\[([^\]]+)\]', uri)
  if found:
    return tuple((found[1] or found[2]).split(','))
  # Open MPI 5: 'prterun-HOST-PID@1'.
  found = re.fullmatch(r'prterun-(.+)-\d+@\d+', namespace)
  return (found[1],) if found else ()


def flux(env: Environment) -> Optional[LauncherVariables]:
  """Reads the variables of `flux run`. With several hosts they do not name the first one.

  Source: flux-environment(7) at https://flux-framework.readthedocs.io/projects/flux-core
  """
  index = number(env, 'FLUX_TASK_RANK')
  if index is None:
    return None
  count, is_one_host = number(env, 'FLUX_JOB_SIZE'), number(env, 'FLUX_JOB_NNODES') == 1
  return LauncherVariables(
    kind='flux',
    process_index=index,
    process_count=count,
    local_index=number(env, 'FLUX_TASK_LOCAL_ID'),
    local_count=count if is_one_host else None,
    hosts=('127.0.0.1',) if is_one_host else (),
    job=env.get('FLUX_JOB_ID', ''),
    evidence=f'FLUX_TASK_RANK of job {env.get("FLUX_JOB_ID", "?")}',
  )


def jsrun(env: Environment) -> Optional[LauncherVariables]:
  """Reads the variables of LSF's jsrun. They do not name the first host.

  Source: https://docs.olcf.ornl.gov/systems/summit_user_guide.html#job-launcher-jsrun
  """
  index = number(env, 'JSM_NAMESPACE_RANK')
  if index is None:
    return None
  return LauncherVariables(
    kind='jsrun',
    process_index=index,
    process_count=number(env, 'JSM_NAMESPACE_SIZE'),
    local_index=number(env, 'JSM_NAMESPACE_LOCAL_RANK'),
    local_count=number(env, 'JSM_NAMESPACE_LOCAL_SIZE'),
    job=env.get('LSB_JOBID', ''),
    evidence=f'JSM_NAMESPACE_RANK of jsrun in job {env.get("LSB_JOBID", "?")}',
  )


def pmi(env: Environment, *, read: Callable[[str], str]) -> Optional[LauncherVariables]:
  """Reads the variables of mpiexec (HPE's PALS on Polaris, MPICH, Intel MPI), with or without PBS.

  Without PBS the host of process 0 is unknown.

  Source: https://docs.alcf.anl.gov/polaris/ and the header pals.h of Cray MPICH.
  """
  index = number(env, 'PALS_RANKID', 'PMI_RANK')
  if index is None:
    return None
  kind = 'pals' if 'PALS_RANKID' in env else 'pbs' if 'PBS_JOBID' in env else 'mpiexec'
  job = f' in job {env["PBS_JOBID"]}' if 'PBS_JOBID' in env else ''
  return LauncherVariables(
    kind=kind,
    process_index=index,
    process_count=number(env, 'PMI_SIZE', 'PALS_SIZE'),
    local_index=number(env, 'PALS_LOCAL_RANKID', 'PMI_LOCAL_RANK', 'MPI_LOCALRANKID'),
    local_count=number(env, 'PALS_LOCAL_SIZE', 'PMI_LOCAL_SIZE', 'MPI_LOCALNRANKS'),
    hosts=pbs_hosts(env, read=read)[:1],
    job=f'{env.get("PBS_JOBID", "")}.{env.get("PALS_APID", "")}',
    evidence=('PALS_RANKID' if kind == 'pals' else 'PMI_RANK') + job,
  )


def pbs_hosts(env: Environment, *, read: Callable[[str], str]) -> tuple[str, ...]:
  """Returns the hosts of a PBS job, each once, the first one first; () outside PBS."""
  file = env.get('PBS_NODEFILE', '')
  return tuple(dict.fromkeys(read(file).split())) if file else ()


def torchrun(env: Environment) -> Optional[LauncherVariables]:
  """Reads the variables of torchrun and similar scripts: RANK, WORLD_SIZE, MASTER_ADDR.

  Source: https://docs.pytorch.org/docs/stable/elastic/run.html
  """
  if not all(env.get(name) for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')):
    return None
  # torchrun's own store listens on MASTER_PORT, so process 0 takes the port after it.
  taken = 'TORCHELASTIC_RUN_ID' in env
  port = (number(env, 'MASTER_PORT') or 29500) + taken
  return LauncherVariables(
    kind='torchrun',
    process_index=number(env, 'RANK'),
    process_count=number(env, 'WORLD_SIZE'),
    local_index=number(env, 'LOCAL_RANK'),
    local_count=number(env, 'LOCAL_WORLD_SIZE'),
    address=addresses.join(env['MASTER_ADDR'].strip('[]'), port),
    evidence='RANK, WORLD_SIZE and MASTER_ADDR',
    attempt=number(env, 'TORCHELASTIC_RESTART_COUNT') or 0,
    job=f'{env.get("TORCHELASTIC_RUN_ID", "")}.{env.get("TORCHELASTIC_RESTART_COUNT", "0")}',
  )


def jax_variables(env: Environment) -> Optional[LauncherVariables]:
  """Reads JAX_PROCESS_INDEX and JAX_PROCESS_COUNT, or JAX_PROCESS_ID and JAX_NUM_PROCESSES.

  JAX has no variables for the local index and count; t5x_gpu.launch sets torchrun's variables.
  """
  index = number(env, 'JAX_PROCESS_INDEX', 'JAX_PROCESS_ID')
  if index is None:
    return None
  return LauncherVariables(
    kind='jax',
    process_index=index,
    process_count=number(env, 'JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES'),
    local_index=number(env, 'LOCAL_RANK'),
    local_count=number(env, 'LOCAL_WORLD_SIZE'),
    job=env.get('JAX_COORDINATOR_ADDRESS', ''),
    evidence='JAX_PROCESS_INDEX or JAX_PROCESS_ID',
  )


def kubernetes(env: Environment) -> Optional[LauncherVariables]:
  """Returns the index of a pod in an indexed job; its variables do not give count or address.

  Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode
  """
  index = number(env, 'JOB_COMPLETION_INDEX')
  if index is None or 'KUBERNETES_SERVICE_HOST' not in env:
    return None
  return LauncherVariables(
    kind='kubernetes',
    process_index=index,
    process_count=number(env, 'JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES'),
    local_index=0,
    local_count=1,
    evidence='JOB_COMPLETION_INDEX',
  )


def job_end(env: Environment) -> Optional[float]:
  """Returns when the job's time limit ends, in seconds since 1970; None if no variable has it.

  The limit applies to the whole job, with any launcher or none.
  """
  end = number(env, END_TIME_VARIABLE, 'SLURM_JOB_END_TIME')
  return float(end) if end else None


def ask_for_job_end(env: Environment, *, now: float) -> Optional[float]:
  """Asks Slurm (salloc, and old versions) or PBS, which set no variable, when the job ends.

  This queries the controller of the whole cluster, so only one process of a run should call it.
  """
  if env.get('SLURM_JOB_ID'):
    left = _seconds(_output_of('squeue', '-h', '-j', env['SLURM_JOB_ID'], '-o', '%L').strip())
    return None if left is None else now + left
  if env.get('PBS_JOBID'):
    # Attributes of a job: PBS Professional Reference Guide, section "Job Attributes".
    attributes = dict(
      re.findall(r'^\s*(\S+) = (.*)$', _output_of('qstat', '-f', env['PBS_JOBID']), re.MULTILINE)
    )
    limit = _seconds(attributes.get('Resource_List.walltime', ''))
    started = attributes.get('stime') or attributes.get('start_time', '')  # OpenPBS, Torque
    with contextlib.suppress(ValueError):
      if limit is not None:
        return time.mktime(time.strptime(started, '%a %b %d %H:%M:%S %Y')) + limit
  return None


def _seconds(text: str) -> Optional[int]:
  """Returns the seconds of '1-02:03:04', '02:03:04' or '03:04'; None for 'UNLIMITED'."""
  found = re.fullmatch(r'(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)', text)
  if found is None:
    return None
  days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
  return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def _output_of(*command: str) -> str:
  """Returns the output of a scheduler's program; '' if it is not installed, as in containers."""
  try:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_ASK_SECONDS)
  except (OSError, subprocess.TimeoutExpired):
    return ''
  return done.stdout if done.returncode == 0 else ''


def read_text(path: str) -> str:
  """Returns the text of a file that a scheduler names; raises ConfigError if it is missing."""
  try:
    return pathlib.Path(path).read_text()
  except OSError as e:
    raise ConfigError(
      f'The scheduler names a file {path} that cannot be read: {e.strerror}.',
      fix='Set --coordinator_address=HOST:PORT, which replaces that file.',
    ) from e


def first_host(node_list: str) -> str:
  """Returns 'gpu-001' for Slurm's 'gpu-[001-004,7],login1'."""
  prefix, bracket, rest = re.match(r'([^\[,]*)(\[?)(.*)', node_list).groups()
  if not bracket:
    return prefix
  inside, _, after = rest.partition(']')
  return prefix + re.split(r'[-,]', inside)[0] + re.split(r',', after)[0]


def _repeated(text: str) -> list[int]:
  """Returns [2, 2, 1] for Slurm's '2(x2),1'."""
  counts: list[int] = []
  for value, times in re.findall(r'(\d+)(?:\(x(\d+)\))?', text):
    counts += [int(value)] * int(times or 1)
  return counts


def _gpu_count(text: str) -> Optional[int]:
  """Returns 2 for '2', 'h100:2' or 'gres/gpu:h100:2'."""
  found = re.search(r'(\d+)$', text)
  return int(found[1]) if found else None


# Launchers that disagree: a shell profile, a container image or an earlier job leaves RANK=0
# WORLD_SIZE=1 behind, and four Slurm tasks train four models into one MODEL_DIR. The innermost
# launcher's variables number a process, so they must agree with the schedulers around it.
#
# kind -> name, variables that number a process.
_LAUNCHERS = {
  'jax': ('JAX', ('JAX_PROCESS_INDEX', 'JAX_PROCESS_ID', 'JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES')),
  'torchrun': ('torchrun', ('RANK', 'WORLD_SIZE', 'MASTER_ADDR')),
  'openmpi': ('Open MPI', ('OMPI_COMM_WORLD_RANK', 'OMPI_COMM_WORLD_SIZE')),
  'flux': ('Flux', ('FLUX_TASK_RANK', 'FLUX_JOB_SIZE')),
  'jsrun': ('jsrun', ('JSM_NAMESPACE_RANK', 'JSM_NAMESPACE_SIZE')),
  'slurm': ('Slurm', ('SLURM_PROCID', 'SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS')),
  'kubernetes': ('Kubernetes', ('JOB_COMPLETION_INDEX',)),
  'pals': ('PALS', ('PALS_RANKID', 'PMI_RANK', 'PMI_SIZE', 'PALS_SIZE')),
  'pbs': ('mpiexec', ('PMI_RANK', 'PMI_SIZE')),
  'mpiexec': ('mpiexec', ('PMI_RANK', 'PMI_SIZE')),
}
_EXPORTED = ('jax', 'torchrun')  # often set by hand; only programs set the other variables
# These never contradict an inner launcher: Kubernetes numbers the pods of one job, and JAX's
# variables give the process count. A pod may start several processes, a run may span several jobs.
_NEVER_OUTER = (*_EXPORTED, 'kubernetes')
# Ranks of launchers that give neither a count nor an address: PRRTE (prun), ALPS (aprun).
_LONE_RANKS = ('PMIX_RANK', 'ALPS_APP_PE')
_error = functools.partial(ClusterError, docs='slurm.md#launchers-that-disagree')


def refuse_conflicts(
  found: Sequence[LauncherVariables], env: Environment, *, is_counted: bool
) -> None:
  """Raises ClusterError if launchers contradict each other, or none gives the process index.

  Args:
    found: variables of each launcher; the first launcher decides.
    env: `os.environ`.
    is_counted: whether --process_count is given.
  """
  if not is_counted:
    _check_count(found, env)
    if not found:
      _check_ranks(env)
  nested = [
    each
    for i, each in enumerate(found)
    if (i == 0 or each.kind not in _NEVER_OUTER) and each.process_count is not None
  ]
  for inner, outer in zip(nested, nested[1:]):
    if not _agree(inner, outer, env):
      raise _error(
        f'{_shown(inner, env)}, but {_shown(outer, env)}. They contradict each other: several '
        'processes would get the same number, or each would train alone.',
        fix=f'If {_name(outer)} started the processes, clear the other variables first: unset '
        f'{" ".join(_set_variables(inner, env))}. If not, pass --process_index, '
        '--process_count and --coordinator_address, which win over all variables.\n'
        'To start separate runs inside one allocation, give each its own step with one task '
        '(srun --ntasks=1 --exact ...).',
      )


def starter_of_several(
  found: Sequence[LauncherVariables], env: Environment
) -> Optional[LauncherVariables]:
  """Returns the scheduler that started this program several times; None if none did."""
  return next(
    (
      each
      for each in found
      if each.kind not in _EXPORTED
      and (each.process_count or 1) > 1
      and not _is_terminal(each, env)
    ),
    None,
  )


def refuse_several_launches(found: Sequence[LauncherVariables], env: Environment) -> None:
  """Raises ClusterError if a scheduler started this launcher several times, as separate runs."""
  outer = starter_of_several(found, env)
  if outer is not None:
    raise _error(
      f't5x_gpu.launch runs {outer.process_count} times: {_shown(outer, env)}. Each would start '
      'a separate run, all in the same MODEL_DIR.',
      fix=f'Let {_name(outer)} start python -m t5x_gpu.train directly, one task per GPU; or let it '
      'start launch once per host, with --restarts=N, for one run that survives the loss of a '
      'host (docs/never_down.md). To start separate runs, give each its own step with one task '
      '(srun --ntasks=1 --exact ...).',
    )


def without_numbers(env: Environment, found: Sequence[LauncherVariables]) -> dict[str, str]:
  """Returns `env` without the variables in which launchers number this process.

  For its children, which have other numbers.
  """
  names = {name for each in found for name in _LAUNCHERS[each.kind][1]}
  return {name: value for name, value in env.items() if name not in names}


def _check_count(found: Sequence[LauncherVariables], env: Environment) -> None:
  """Raises ClusterError if JAX's variables give a count that contradicts the other variables."""
  names = ('JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES')
  count = number(env, *names)
  if count is None or (found and found[0].kind in ('jax', 'kubernetes')):
    return
  name = next(name for name in names if env.get(name))
  if not found and count > 1:
    raise _error(
      f'{name}={count}, but JAX_PROCESS_INDEX is not set: each process would train alone.',
      fix=f'Give each process its own JAX_PROCESS_INDEX, from 0 to {count - 1}, and all of them '
      f'JAX_COORDINATOR_ADDRESS=HOST:PORT. For a single process unset {name}.',
    )
  if found and found[0].process_count not in (None, count):
    raise _error(
      f'{name}={count}, but {_shown(found[0], env)}.',
      fix=f'Unset {name}, or set it to {found[0].process_count}.',
    )


def _check_ranks(env: Environment) -> None:
  """Raises ClusterError if variables number this process, but do not say how to find the others."""
  count = number(env, 'WORLD_SIZE') or 1
  if count > 1:
    raise _error(
      f'WORLD_SIZE={count}, but RANK and MASTER_ADDR are not both set: each process would train '
      'alone.',
      fix=f'Give each process its own RANK, from 0 to {count - 1}, and all of them MASTER_ADDR. '
      'For a single process unset WORLD_SIZE.',
    )
  for name in _LONE_RANKS:
    if env.get(name):
      raise _error(
        f'{name}={env[name]} numbers this process, but no variable says how many there are: each '
        'would train alone.',
        fix='Pass --process_index, --process_count and --coordinator_address. For a single process '
        f'unset {name}.',
      )


def _agree(inner: LauncherVariables, outer: LauncherVariables, env: Environment) -> bool:
  """Returns whether `outer` can have started the processes that `inner` describes."""
  if (
    outer.process_count == 1
    or _is_terminal(outer, env)
    or (inner.process_index, inner.process_count) == (outer.process_index, outer.process_count)
  ):
    return True
  if inner.kind == 'slurm':  # PMI's numbers come from srun, or from an mpiexec inside the step
    return False
  if inner.kind not in _EXPORTED:
    # mpirun starts one daemon per host with srun; its processes see the daemon's variables.
    return inner.process_count > 1
  if 'TORCHELASTIC_RUN_ID' in env and inner.kind == 'torchrun':  # has its own order of hosts
    agents = number(env, 'GROUP_WORLD_SIZE') or inner.process_count // (inner.local_count or 1)
    return agents == outer.process_count
  # Each task may have started and numbered one process per GPU, with or without LOCAL_WORLD_SIZE.
  local_count = inner.local_count or max(1, inner.process_count // outer.process_count)
  task, local_index = divmod(inner.process_index, local_count)
  return (
    inner.process_count == outer.process_count * local_count
    and task == outer.process_index
    and inner.local_index in (None, local_index)
  )


def _is_terminal(found: LauncherVariables, env: Environment) -> bool:
  """Returns whether this is the shell of `srun --ntasks=8 --pty bash`.

  It is the first task. The other tasks' shells have ended, since they have no terminal.
  """
  return found.kind == 'slurm' and found.process_index == 0 and 'SLURM_PTY_PORT' in env


def _name(found: LauncherVariables) -> str:
  return _LAUNCHERS[found.kind][0]


def _set_variables(found: LauncherVariables, env: Environment) -> list[str]:
  return [name for name in _LAUNCHERS[found.kind][1] if env.get(name)]


def _shown(found: LauncherVariables, env: Environment) -> str:
  """Returns 'Slurm numbers this process 2 of 4 (SLURM_PROCID=2, SLURM_STEP_NUM_TASKS=4)'."""
  values = ', '.join(f'{name}={env[name]}' for name in _set_variables(found, env))
  of = '' if found.process_count is None else f' of {found.process_count}'
  return f'{_name(found)} numbers this process {found.process_index}{of} ({values})'
