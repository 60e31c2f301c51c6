"""Which process this is, from the variables that launchers really set. Nothing is started here."""

import os
import time

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.cluster import cluster, launchers
from t5x_gpu.runtime.cluster.cluster import detect
from t5x_gpu.runtime.cluster.launchers import first_host
from tests.messages import raises


def slurm_step(
  rank: int,
  *,
  local: int = 0,
  tasks: int = 4,
  per_node: str = '2(x2)',
  node: int = 0,
  **variables: str,
) -> dict[str, str]:
  """The variables of an srun task, as Slurm 22.05 sets them."""
  return {
    'SLURM_JOB_ID': '310',
    'SLURM_STEP_ID': '0',
    'SLURM_STEP_NODELIST': 'gpu-[001-002]',
    'SLURM_PROCID': str(rank),
    'SLURM_LOCALID': str(local),
    'SLURM_NTASKS': str(tasks),
    'SLURM_STEP_NUM_TASKS': str(tasks),
    'SLURM_STEP_TASKS_PER_NODE': per_node,
    'SLURM_NODEID': str(node),
    'SLURMD_NODENAME': f'gpu-00{node + 1}',
    **variables,
  }


def openmpi_task(
  rank: int, *, size: int = 4, local_size: int = 2, **variables: str
) -> dict[str, str]:
  return {
    'OMPI_COMM_WORLD_RANK': str(rank),
    'OMPI_COMM_WORLD_SIZE': str(size),
    'OMPI_COMM_WORLD_LOCAL_RANK': str(rank % local_size),
    'OMPI_COMM_WORLD_LOCAL_SIZE': str(local_size),
    'PMIX_NAMESPACE': '1314324481',
    'OMPI_MCA_orte_hnp_uri': '1314324480.0;tcp://192.0.2.2,10.0.0.2:52071;tcp6://[fd00::2]:5',
    **variables,
  }


def test_nothing_set_is_one_process():
  info = detect({})
  assert (info.kind, info.process_index, info.process_count) == ('single', 0, 1)
  assert info.coordinator_address is None and info.warnings == ()


def test_a_slurm_task_knows_rank_count_and_the_first_host():
  info = detect(slurm_step(3, local=1, node=1))
  assert (info.kind, info.process_index, info.process_count) == ('slurm', 3, 4)
  assert (info.local_process_index, info.local_process_count) == (1, 2)
  assert info.coordinator_address.startswith('gpu-001:')
  assert info.node == 'gpu-002' and 'Slurm step 310.0' in str(info)


def test_attempt_and_time_limit_come_from_slurm():
  info = detect(slurm_step(0, SLURM_RESTART_COUNT='2', SLURM_JOB_END_TIME='1790000000'))
  assert (info.attempt, info.end_time) == (2, 1790000000.0)


OTHER_LAUNCHERS = {
  'batch shell': {'SLURM_JOB_ID': '310'},
  'launch or JAX': {'JAX_PROCESS_INDEX': '0', 'JAX_PROCESS_COUNT': '1'},
  'torchrun': {'RANK': '0', 'WORLD_SIZE': '1', 'MASTER_ADDR': 'a', 'MASTER_PORT': '1'},
  'mpirun': {'OMPI_COMM_WORLD_RANK': '0', 'OMPI_COMM_WORLD_SIZE': '1'},
}


@pytest.mark.parametrize('variables', OTHER_LAUNCHERS.values(), ids=OTHER_LAUNCHERS)
def test_the_time_limit_of_a_slurm_job_holds_for_every_launcher_inside(variables):
  assert detect({**variables, 'SLURM_JOB_END_TIME': '1790000000'}).end_time == 1790000000.0


def test_a_variable_gives_the_end_where_no_scheduler_does():
  assert detect({'T5X_GPU_JOB_END_TIME': '1790000000'}).end_time == 1790000000.0
  assert detect({}).end_time is None


def test_an_end_that_has_passed_is_another_jobs_and_is_ignored_with_a_warning():
  info = detect({'SLURM_JOB_ID': '310', 'SLURM_JOB_END_TIME': '1000'})
  old = cluster.without_old_end(info, now=1120.0)
  assert old.end_time is None and 'ended 2 minutes ago' in old.warnings[-1]
  assert cluster.without_old_end(info, now=999.0) == info


def scheduler(folder, name, lines):
  program = folder / name
  program.write_text(f'#!/bin/sh\n[ "$*" ] && cat <<END\n{lines}\nEND\n')
  program.chmod(0o755)


@pytest.mark.process
@pytest.mark.parametrize(
  'left, seconds', [('1-02:03:04', 93784), ('59:30', 3570), ('UNLIMITED', None), ('', None)]
)
def test_without_a_variable_slurm_is_asked_how_much_time_is_left(
  tmp_path, monkeypatch, left, seconds
):
  scheduler(tmp_path, 'squeue', left)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  end = launchers.ask_for_job_end({'SLURM_JOB_ID': '310'}, now=1e9)
  assert end == (None if seconds is None else 1e9 + seconds)


QSTAT = """Job Id: 7.pbs
    Job_Name = t5x_gpu
    Resource_List.walltime = 01:00:00
    stime = Wed Nov 25 10:00:00 2026"""


@pytest.mark.process
@pytest.mark.parametrize('lines', [QSTAT, QSTAT.replace('stime', 'start_time')])
def test_pbs_is_asked_for_start_and_limit(tmp_path, monkeypatch, lines):
  scheduler(tmp_path, 'qstat', lines)
  monkeypatch.setenv('PATH', str(tmp_path), prepend=os.pathsep)
  end = launchers.ask_for_job_end({'PBS_JOBID': '7.pbs'}, now=0.0)
  assert time.strftime('%d %H:%M', time.localtime(end)) == '25 11:00'


@pytest.mark.process
def test_the_end_is_unknown_if_the_program_of_the_scheduler_is_missing_or_fails(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('PATH', str(tmp_path))
  assert launchers.ask_for_job_end({'SLURM_JOB_ID': '310'}, now=0.0) is None
  (tmp_path / 'squeue').write_text('#!/bin/sh\necho 10:00\nexit 1\n')
  (tmp_path / 'squeue').chmod(0o755)
  assert launchers.ask_for_job_end({'SLURM_JOB_ID': '310'}, now=0.0) is None
  assert launchers.ask_for_job_end({}, now=0.0) is None


def test_two_steps_and_two_attempts_of_one_job_have_other_ports():
  same = {'SLURM_PROCID': '1', 'SLURM_LOCALID': '1'}
  infos = [
    detect({**slurm_step(0), **more})
    for more in ({}, {'SLURM_STEP_ID': '1'}, {'SLURM_RESTART_COUNT': '1'})
  ]
  addresses = [(info.coordinator_address, *info.other_addresses) for info in infos]
  assert len({address for group in addresses for address in group}) == 3 * cluster.PORT_CHOICES
  assert len({info.run_id for info in infos}) == 3
  # All processes of one run compute the same.
  other = detect({**slurm_step(0), **same})
  assert (other.coordinator_address, *other.other_addresses) == addresses[0]


def test_ports_lie_above_those_that_linux_hands_out():
  for job in ('1.0.0', 'abc', '999999.3.2'):
    ports = cluster.ports(job)
    assert len(set(ports)) == cluster.PORT_CHOICES
    assert all(61440 <= port < 65536 for port in ports)


@pytest.mark.parametrize(
  'visible, on_host, per_task, local, want',
  [
    # --gpus-per-node=8 --ntasks-per-node=8: everybody sees all.
    ('0,1,2,3,4,5,6,7', '8', None, 3, (3,)),
    # --gpus-per-task=1: task 3 sees one GPU, and it has number 0 for CUDA (JAX would ask for 3).
    ('3', '8', None, 3, None),
    ('3', '8', '1', 3, None),
    # --gpus-per-task=2 on four tasks: its own two.
    ('6,7', '8', '2', 3, None),
    # --gpus-per-task=1 --gpu-bind=none: all are visible again.
    ('0,1,2,3,4,5,6,7', '8', '1', 3, (3,)),
    # Two GPUs per task, all visible.
    ('0,1,2,3,4,5,6,7', '8', None, 1, (1,)),
    # GPUs that CUDA calls by UUID.
    ('GPU-a,GPU-b,GPU-c,GPU-d,GPU-e,GPU-f,GPU-g,GPU-h', '8', None, 7, (7,)),
  ],
)
def test_a_task_takes_its_share_of_the_gpus_that_it_sees(visible, on_host, per_task, local, want):
  env = slurm_step(
    local,
    local=local,
    tasks=8,
    per_node='8',
    CUDA_VISIBLE_DEVICES=visible,
    SLURM_GPUS_ON_NODE=on_host,
  )
  if per_task:
    env['SLURM_GPUS_PER_TASK'] = per_task
  assert detect(env).local_device_ids == want


def test_tasks_fewer_than_gpus_get_blocks():
  env = slurm_step(
    1,
    local=1,
    tasks=2,
    per_node='2',
    CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7',
    SLURM_GPUS_ON_NODE='8',
  )
  assert detect(env).local_device_ids == (4, 5, 6, 7)


def test_one_task_per_host_takes_all_gpus_not_the_first():
  env = slurm_step(
    1,
    tasks=2,
    per_node='1(x2)',
    node=1,
    CUDA_VISIBLE_DEVICES='0,1,2,3,4,5,6,7',
    SLURM_GPUS_ON_NODE='8',
  )
  info = detect(env)
  assert info.local_device_ids is None and info.devices_reason == 'all 8 visible GPUs'


def test_gpus_are_counted_where_the_launcher_hides_none():
  info = detect(openmpi_task(3), num_gpus=8)
  assert info.local_device_ids == (4, 5, 6, 7)


def test_gpus_that_do_not_divide_are_an_error_that_names_the_numbers():
  env = slurm_step(
    1, local=1, tasks=3, per_node='3', CUDA_VISIBLE_DEVICES='0,1,2,3', SLURM_GPUS_ON_NODE='4'
  )
  with raises(ConfigError):
    detect(env)


def test_four_tasks_with_one_gpu_in_common_are_an_error():
  env = slurm_step(
    1, local=1, tasks=4, per_node='4', CUDA_VISIBLE_DEVICES='0', SLURM_GPUS_ON_NODE='1'
  )
  with raises(ConfigError):
    detect(env)


def test_jax_local_device_ids_win():
  env = slurm_step(1, local=1, CUDA_VISIBLE_DEVICES='0,1,2,3', JAX_LOCAL_DEVICE_IDS='2,3')
  assert detect(env).local_device_ids == (2, 3)
  with raises(ConfigError):
    detect({'JAX_LOCAL_DEVICE_IDS': 'two', 'JAX_PROCESS_INDEX': '0', 'JAX_PROCESS_COUNT': '1'})


@pytest.mark.parametrize(
  'text, count',
  [('0,1', 2), ('', 0), ('NoDevFiles', 0), ('-1', 0), ('0,-1,2', 1), ('MIG-x,MIG-y', 2)],
)
def test_visible_gpus_are_counted_as_cuda_does(text, count):
  assert cluster.visible_gpus({'CUDA_VISIBLE_DEVICES': text}, 8) == count


def test_a_batch_shell_without_srun_runs_alone_and_is_warned():
  info = detect({'SLURM_JOB_ID': '7', 'SLURM_NTASKS': '16', 'SLURM_JOB_NUM_NODES': '2'})
  assert info.kind == 'single'
  assert '16 tasks on 2 hosts' in info.warnings[0] and 'srun' in info.warnings[0]


def test_mpirun_inside_a_slurm_job_is_open_mpi():
  # Open MPI's daemon is the one srun task of its host; its children inherit that task's variables.
  info = detect({**slurm_step(0, tasks=2, per_node='1(x2)'), **openmpi_task(5, size=8)})
  assert (info.kind, info.process_index, info.process_count) == ('openmpi', 5, 8)


def test_open_mpi_on_several_hosts_offers_all_addresses_of_mpirun():
  info = detect(openmpi_task(3))
  hosts = {a.rpartition(':')[0] for a in (info.coordinator_address, *info.other_addresses)}
  assert hosts == {'192.0.2.2', '10.0.0.2'}


def test_open_mpi_on_one_host_works_without_a_name():
  assert detect(openmpi_task(1, size=2)).coordinator_address.startswith('127.0.0.1:')


def test_open_mpi_5_names_its_host_in_the_namespace():
  env = openmpi_task(3, PMIX_NAMESPACE='prterun-gpu-01-4711@1')
  del env['OMPI_MCA_orte_hnp_uri']
  assert detect(env).coordinator_address.startswith('gpu-01:')


def test_pals_on_polaris_takes_the_first_host_of_the_nodefile():
  env = {
    'PALS_RANKID': '5',
    'PALS_LOCAL_RANKID': '1',
    'PALS_NODEID': '1',
    'PALS_APID': 'x',
    'PMI_SIZE': '8',
    'PMI_LOCAL_SIZE': '4',
    'PBS_JOBID': '12.polaris',
    'PBS_NODEFILE': '/n',
  }
  info = detect(env, num_gpus=4, read=lambda path: 'x3006c0s1b0n0\nx3006c0s1b1n0\n')
  assert (info.kind, info.process_index, info.process_count) == ('pals', 5, 8)
  assert info.coordinator_address.startswith('x3006c0s1b0n0:')
  assert info.local_device_ids == (1,)


def test_pals_without_a_size_takes_the_flag():
  env = {'PALS_RANKID': '5', 'PBS_NODEFILE': '/n'}
  read = lambda path: 'a\nb\n'
  with raises(ConfigError):
    detect(env, read=read)
  assert detect(env, process_count=8, read=read).process_count == 8


def test_a_pbs_script_without_mpiexec_is_warned():
  info = detect({'PBS_JOBID': '1', 'PBS_NODEFILE': '/n'}, read=lambda path: 'a\na\nb\nb\n')
  assert info.kind == 'single' and '2 hosts' in info.warnings[0]


def test_torchrun_variables_work_with_its_own_port_left_free():
  env = {
    'RANK': '3',
    'WORLD_SIZE': '4',
    'MASTER_ADDR': 'node1',
    'MASTER_PORT': '29500',
    'LOCAL_RANK': '1',
    'LOCAL_WORLD_SIZE': '2',
    'CUDA_VISIBLE_DEVICES': '0,1',
  }
  info = detect(env)
  assert (info.kind, info.process_index, info.coordinator_address) == ('torchrun', 3, 'node1:29500')
  assert info.local_device_ids == (1,)
  assert detect({**env, 'TORCHELASTIC_RUN_ID': 'x'}).coordinator_address == 'node1:29501'


def test_jax_variables_work_in_both_spellings():
  for index, count in (
    ('JAX_PROCESS_INDEX', 'JAX_PROCESS_COUNT'),
    ('JAX_PROCESS_ID', 'JAX_NUM_PROCESSES'),
  ):
    info = detect({index: '1', count: '2', 'JAX_COORDINATOR_ADDRESS': 'h:1234'})
    assert (info.kind, info.process_index, info.process_count) == ('jax', 1, 2)
    assert info.coordinator_address == 'h:1234'


def test_a_kubernetes_pod_takes_its_index_and_the_rest_from_flags():
  env = {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': '1'}
  info = detect(env, process_count=2, coordinator_address='job-0.job:62000')
  assert (info.kind, info.process_index, info.process_count) == ('kubernetes', 1, 2)
  with raises(ConfigError):
    detect(env, process_count=2)


def test_flags_win_over_the_launcher():
  info = detect(slurm_step(3), coordinator_address='other:62000', process_count=8, process_index=5)
  assert (info.process_index, info.process_count) == (5, 8)
  assert info.coordinator_address == 'other:62000'
  assert '--process_index' in info.reason


@pytest.mark.parametrize(
  'flags',
  [
    ('h:1', None, None),
    (None, 2, 0),
    ('h', 2, 0),
    ('h:x', 2, 0),
    ('h:70000', 2, 0),
    (':1', 2, 0),
    ('h:1', 2, 2),
    ('h:1', 2, -1),
    ('h:1', 0, 0),
  ],
)
def test_flags_that_cannot_work_are_refused_before_any_waiting(flags):
  address, count, index = flags
  with raises(ConfigError):
    detect({}, coordinator_address=address, process_count=count, process_index=index)


def test_a_variable_that_is_not_a_number_is_named():
  with raises(ConfigError):
    detect({**slurm_step(0), 'SLURM_PROCID': 'x'})


@pytest.mark.parametrize(
  'nodes, first',
  [
    ('node1', 'node1'),
    ('node[1-4]', 'node1'),
    ('node[3,5-7],other', 'node3'),
    ('gpu-[001-128]', 'gpu-001'),
    ('a,b', 'a'),
    ('rack[1-2]-gpu', 'rack1-gpu'),
    ('127.0.0.[1-2]', '127.0.0.1'),
  ],
)
def test_the_first_host_of_slurms_notation(nodes, first):
  assert first_host(nodes) == first
