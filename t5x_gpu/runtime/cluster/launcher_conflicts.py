"""Finds launchers that disagree about a process: stale variables make each task seem alone.

A shell profile, a container image or an earlier job leaves RANK=0 WORLD_SIZE=1 behind, and four
Slurm tasks train four models into one MODEL_DIR. The innermost launcher's variables number a
process (`cluster.detect`), so they must agree with the variables of the schedulers around it.
"""

import functools
from collections.abc import Sequence

from t5x_gpu.errors import ClusterError
from t5x_gpu.runtime.cluster.schedulers import Environment, LauncherVariables, number

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


def check(found: Sequence[LauncherVariables], env: Environment, *, is_counted: bool) -> None:
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


def refuse_several_launches(found: Sequence[LauncherVariables], env: Environment) -> None:
  """Raises ClusterError if a scheduler started this launcher several times, as separate runs."""
  outer = next(
    (
      each
      for each in found
      if each.kind not in _EXPORTED
      and (each.process_count or 1) > 1
      and not _is_terminal(each, env)
    ),
    None,
  )
  if outer is not None:
    raise _error(
      f't5x_gpu.launch runs {outer.process_count} times: {_shown(outer, env)}. Each would start '
      'a separate run, all in the same MODEL_DIR.',
      fix=f'Let {_name(outer)} start python -m t5x_gpu.train directly, one task per GPU. To start '
      'separate runs, give each its own step with one task (srun --ntasks=1 --exact ...).',
    )


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
