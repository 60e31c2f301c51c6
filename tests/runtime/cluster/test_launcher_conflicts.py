"""Stale variables and nested launchers: processes that would each train alone are refused."""

import pytest

from t5x_gpu import launch
from t5x_gpu.errors import ClusterError, ConfigError
from t5x_gpu.runtime.cluster import launchers
from t5x_gpu.runtime.cluster.cluster import ask_all, detect
from tests.messages import raises
from tests.runtime.cluster.test_cluster import openmpi_task, slurm_step

STALE = {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': 'localhost'}
HYDRA = {'PMI_RANK': '3', 'PMI_SIZE': '8', 'MPI_LOCALRANKID': '3', 'MPI_LOCALNRANKS': '8'}
FLUX = {
  'FLUX_TASK_RANK': '3',
  'FLUX_JOB_SIZE': '4',
  'FLUX_TASK_LOCAL_ID': '1',
  'FLUX_JOB_NNODES': '2',
  'FLUX_JOB_ID': 'f1',
}
JSRUN = {
  'JSM_NAMESPACE_RANK': '3',
  'JSM_NAMESPACE_SIZE': '4',
  'JSM_NAMESPACE_LOCAL_RANK': '1',
  'JSM_NAMESPACE_LOCAL_SIZE': '2',
  'LSB_JOBID': '9',
}


def refusal(env: dict[str, str]) -> str:
  with raises(ClusterError) as e:
    detect(env)
  return str(e.value)


@pytest.mark.parametrize(
  'stale',
  [
    STALE,
    {**STALE, 'WORLD_SIZE': '4'},
    {'JAX_PROCESS_INDEX': '0', 'JAX_PROCESS_COUNT': '1'},
    {'JAX_PROCESS_ID': '0', 'JAX_NUM_PROCESSES': '4', 'JAX_COORDINATOR_ADDRESS': 'h:1'},
    {'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '1'},
  ],
)
@pytest.mark.parametrize('rank', [1, 2])
def test_stale_variables_in_a_step_of_several_tasks_are_refused(stale, rank):
  refusal(slurm_step(rank, local=rank % 2, node=rank // 2, **stale))


def test_a_stale_world_of_one_is_refused_by_every_task_of_the_step():
  for rank in range(4):
    refusal(slurm_step(rank, **STALE))


def test_process_flags_win_over_stale_variables():
  info = detect(
    slurm_step(2, **STALE), coordinator_address='h:62000', process_count=4, process_index=2
  )
  assert (info.process_index, info.process_count) == (2, 4)


@pytest.mark.parametrize('count', ['JAX_PROCESS_COUNT', 'JAX_NUM_PROCESSES'])
def test_a_count_without_an_index_is_refused(count):
  refusal({count: '2', 'JAX_COORDINATOR_ADDRESS': 'h:62000'})
  refusal(slurm_step(1, **{count: '3'}))
  assert detect(slurm_step(1, **{count: '4'})).process_index == 1
  assert detect({count: '1'}).kind == 'single'


@pytest.mark.parametrize(
  'env',
  [
    {'RANK': '1', 'WORLD_SIZE': '4'},
    {'MASTER_ADDR': 'h', 'WORLD_SIZE': '4'},
    {'PMIX_RANK': '0'},
    {'ALPS_APP_PE': '3'},
  ],
)
def test_ranks_that_do_not_lead_to_the_other_processes_are_refused(env):
  refusal(env)
  flags = dict(coordinator_address='h:62000', process_count=4, process_index=2)
  assert detect(env, **flags).process_index == 2


def test_a_world_of_one_is_a_single_process():
  assert detect({'RANK': '0', 'WORLD_SIZE': '1'}).kind == 'single'


def test_mpiexec_outside_pbs_numbers_the_processes_and_needs_an_address():
  with raises(ConfigError):
    detect(HYDRA)
  info = detect(HYDRA, coordinator_address='n1:62000', num_gpus=8)
  assert (info.kind, info.process_index, info.process_count) == ('mpiexec', 3, 8)
  assert info.local_device_ids == (3,)


def test_mpiexec_inside_a_slurm_task_is_refused():
  # Its proxy is a step of one task, whose variables all eight processes inherit.
  refusal({**slurm_step(0, tasks=1, per_node='1'), **HYDRA})
  assert detect(slurm_step(1, PMI_RANK='1', PMI_SIZE='4')).kind == 'slurm'  # srun --mpi=pmi2


@pytest.mark.parametrize('kind, env', [('flux', FLUX), ('jsrun', JSRUN)])
def test_flux_and_jsrun_number_the_processes_and_need_an_address(kind, env):
  with raises(ConfigError):
    detect(env)
  info = detect({**env, 'JAX_COORDINATOR_ADDRESS': 'n1:62000'})
  assert (info.kind, info.process_index, info.process_count) == (kind, 3, 4)
  assert info.local_process_index == 1
  assert kind == 'jsrun' or info.run_id == 'flux/f1'
  refusal({**env, **STALE})


def test_flux_on_one_host_needs_nothing():
  info = detect({**FLUX, 'FLUX_JOB_NNODES': '1'})
  assert info.coordinator_address.startswith('127.0.0.1:') and info.local_process_count == 4


def test_flux_inside_a_slurm_job_is_flux():
  # All tasks inherit the Slurm variables of the shell that submitted them.
  info = detect(
    {**slurm_step(0, tasks=2, per_node='1(x2)'), **FLUX, 'JAX_COORDINATOR_ADDRESS': 'n1:62000'}
  )
  assert (info.kind, info.process_index) == ('flux', 3)


TORCHRUN = {
  'RANK': '5',
  'WORLD_SIZE': '8',
  'MASTER_ADDR': 'n1',
  'LOCAL_RANK': '1',
  'LOCAL_WORLD_SIZE': '4',
  'GROUP_WORLD_SIZE': '2',
  'TORCHELASTIC_RUN_ID': 'x',
}


def test_torchrun_as_one_task_per_host_is_torchrun():
  # It numbers its hosts in the order in which they came, so RANK need not follow SLURM_PROCID.
  info = detect(slurm_step(0, tasks=2, per_node='1(x2)', **TORCHRUN))
  assert (info.kind, info.process_index, info.process_count) == ('torchrun', 5, 8)


def test_torchrun_alone_in_each_of_several_tasks_is_refused():
  alone = {**TORCHRUN, 'WORLD_SIZE': '4', 'RANK': '1', 'GROUP_WORLD_SIZE': '1'}
  refusal(slurm_step(0, tasks=2, per_node='1(x2)', **alone))


def test_tasks_that_number_their_own_processes_are_accepted():
  fan_out = {
    'RANK': '5',
    'WORLD_SIZE': '8',
    'MASTER_ADDR': 'n1',
    'LOCAL_RANK': '1',
    'LOCAL_WORLD_SIZE': '4',
  }
  task = slurm_step(1, tasks=2, per_node='1(x2)', node=1)
  assert detect({**task, **fan_out}).process_index == 5
  refusal({**task, **fan_out, 'RANK': '1'})
  same = {'RANK': '1', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'n1'}
  assert detect({**task, **same}).process_index == 1


@pytest.mark.parametrize(
  'ranks',
  [
    {'JAX_PROCESS_INDEX': '5', 'JAX_PROCESS_COUNT': '8', 'JAX_COORDINATOR_ADDRESS': 'n1:62000'},
    {'RANK': '5', 'WORLD_SIZE': '8', 'MASTER_ADDR': 'n1', 'LOCAL_RANK': '1'},
  ],
  ids=['JAX', 'RANK'],
)
def test_tasks_that_number_their_own_processes_need_not_say_how_many(ranks):
  assert detect({**slurm_step(1, tasks=2, per_node='1(x2)', node=1), **ranks}).process_index == 5
  refusal({**slurm_step(0, tasks=2, per_node='1(x2)'), **ranks})


def test_a_script_that_copies_the_ranks_of_mpirun_is_accepted_inside_slurm():
  env = {
    **slurm_step(0, tasks=2, per_node='1(x2)'),
    **openmpi_task(5, size=8),
    'RANK': '5',
    'WORLD_SIZE': '8',
    'MASTER_ADDR': 'n1',
  }
  assert detect(env).process_index == 5


@pytest.mark.parametrize(
  'shell',
  [
    {},  # a plain salloc: the shell is not a step
    slurm_step(0, tasks=1, per_node='1', SLURM_NTASKS='8', PMI_RANK='0', PMI_SIZE='1'),
  ],
  ids=['salloc', 'interactive step'],
)
def test_one_process_in_an_allocation_still_runs(shell):
  env = {'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '8', 'SLURM_JOB_NUM_NODES': '1', **shell}
  assert detect(env).process_count == 1
  assert detect({**env, **STALE}).process_count == 1
  from_launch = {
    'JAX_PROCESS_INDEX': '1',
    'JAX_PROCESS_COUNT': '2',
    'LOCAL_RANK': '1',
    'LOCAL_WORLD_SIZE': '2',
    'JAX_COORDINATOR_ADDRESS': '127.0.0.1:62000',
  }
  assert detect({**env, **from_launch}).process_index == 1


FROM_LAUNCH = {
  'JAX_PROCESS_INDEX': '5',
  'JAX_PROCESS_COUNT': '8',
  'LOCAL_RANK': '5',
  'LOCAL_WORLD_SIZE': '8',
  'JAX_COORDINATOR_ADDRESS': '127.0.0.1:62000',
}
POD = {'JOB_COMPLETION_INDEX': '1', 'KUBERNETES_SERVICE_HOST': '10.0.0.1'}


@pytest.mark.parametrize(
  'ranks',
  [
    FROM_LAUNCH,
    {**FROM_LAUNCH, 'JAX_PROCESS_COUNT': '16', 'JAX_PROCESS_INDEX': '13'},
    # Pod 1 of the second job of a JobSet.
    {'JAX_PROCESS_INDEX': '5', 'JAX_PROCESS_COUNT': '8', 'JAX_COORDINATOR_ADDRESS': 'h:62000'},
  ],
  ids=['launch in a pod', 'eight processes per pod', 'JobSet'],
)
def test_pods_may_number_their_processes_themselves(ranks):
  assert detect({**POD, **ranks}).process_index == int(ranks['JAX_PROCESS_INDEX'])


def test_launch_works_in_the_terminal_of_a_step_of_several_tasks():
  shell = slurm_step(0, tasks=8, per_node='8', SLURM_PTY_PORT='40123')  # srun -n8 --pty bash
  assert detect({**shell, **FROM_LAUNCH}).process_index == 5
  launchers.refuse_several_launches(ask_all(shell), shell)
  # srun inside of it: the variable is inherited.
  refusal(slurm_step(1, SLURM_PTY_PORT='40123', **STALE))


def test_launch_in_a_step_of_several_tasks_is_refused(monkeypatch):
  for name, value in slurm_step(1, tasks=2, per_node='1(x2)').items():
    monkeypatch.setenv(name, value)
  with raises(ClusterError):
    launch.main(['--nproc', '2', '--no_gpu', '--', '--gin_file=x.gin'])
