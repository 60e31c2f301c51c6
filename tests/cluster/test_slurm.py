"""scripts/train.slurm on a real Slurm of two nodes: it trains, is requeued, and continues."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest

from tests.cluster.slurm_lab import SlurmLab
from tests.helpers_train import REPOSITORY, Project
from tests.helpers_xla import xla_flags

pytestmark = pytest.mark.cluster

SCRIPT = str(REPOSITORY / 'scripts' / 'train.slurm')
TWO_BY_TWO = (
  '--nodes=2',
  '--ntasks-per-node=2',
  '--gpus-per-node=2',
  '--cpus-per-task=1',
  '--time=10',
)
RUN_SECONDS = 150


def environment(project: Project) -> dict[str, str]:
  return {
    'PYTHON': sys.executable,
    'PYTHONPATH': str(REPOSITORY),
    'JAX_PLATFORMS': 'cpu',
    # One device per process: the fake eight of the test session are not meant here.
    'XLA_FLAGS': xla_flags(),
    'JAX_COMPILATION_CACHE_DIR': str(project.folder.parent / 'compiled'),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'PYTHONUNBUFFERED': '1',
  }


def submit(
  slurm,
  project: Project,
  *,
  sbatch: tuple[str, ...] = TWO_BY_TWO,
  variables: dict[str, str] | None = None,
  **macros,
) -> int:
  return slurm.sbatch(
    *sbatch,
    SCRIPT,
    *(str(project.gin_file), *project.argv(**macros)[1:]),
    cwd=project.folder,
    **{**environment(project), **(variables or {})},
  )


def python_of_hosts(folder: pathlib.Path) -> str:
  """Returns a python for which the nodes, all of them this machine, are different hosts."""
  path = folder / 'python'
  path.write_text(f'#!/bin/sh\nT5X_GPU_DOMAIN=$SLURMD_NODENAME exec {sys.executable} "$@"\n')
  path.chmod(0o755)
  return str(path)


def wait_for(slurm, project: Project, job: int, text: str) -> None:
  """Returns once the job has printed `text`."""
  deadline = time.monotonic() + RUN_SECONDS
  while text not in output(project, job):
    assert time.monotonic() < deadline, output(project, job)
    assert slurm.job(job)['JobState'] in ('PENDING', 'RUNNING'), output(project, job)
    time.sleep(0.05)


def output(project: Project, job: int) -> str:
  path = project.folder / f't5x_gpu-{job}.out'
  return path.read_text() if path.exists() else ''


@pytest.mark.slow
@pytest.mark.parametrize('restarts', ['0', '20'])
def test_two_nodes_with_two_tasks_train_are_requeued_and_give_the_losses_of_one_process(
  restarts, slurm, tmp_path, alone
):
  project = Project(tmp_path)
  python = python_of_hosts(tmp_path)
  job = submit(slurm, project, variables={'RESTARTS': restarts, 'PYTHON': python})
  wait_for(slurm, project, job, 'step 4/20')
  # What --signal=B:USR1@120 does two minutes before the time limit.
  slurm.signal_batch(job, 'USR1')
  ended = slurm.wait(job, seconds=RUN_SECONDS)
  text = output(project, job)
  assert ended['JobState'] == 'COMPLETED' and ended['Restarts'] == '1', text

  first, _, second = text.partition('back into the queue')
  assert 'mesh: 2 hosts x 2 CPU devices' in first
  assert 'Stopped by SIGUSR1 at step' in first and 'Exited with exit code 85' in first
  assert 'restart 1' in second and 'Continuing from' in second
  assert 'Traceback' not in text and 'TaskEpilog' not in text
  losses = project.metrics()
  assert list(losses) == list(range(1, 21))
  assert losses == pytest.approx(alone, rel=1e-5)
  assert not list(tmp_path.glob('.t5x_gpu_*'))


@pytest.mark.slow
def test_a_killed_process_and_a_lost_node_cost_a_restart_inside_the_job(slurm, tmp_path, alone):
  project = Project(tmp_path)
  python = python_of_hosts(tmp_path)
  job = submit(slurm, project, variables={'PYTHON': python})
  wait_for(slurm, project, job, 'step 4/20')
  pids = subprocess.check_output(['pgrep', '-f', f't5x_gpu[.]train .*{tmp_path}'], text=True)
  os.kill(int(pids.split()[-1]), signal.SIGKILL)
  wait_for(slurm, project, job, 'launch: training again')
  lost = slurm.nodes[-1]
  slurm.scontrol('update', f'nodename={lost}', 'state=down', 'reason=test')
  ended = slurm.wait(job, seconds=RUN_SECONDS)
  text = output(project, job)
  assert (ended['JobState'], ended['Restarts'], ended['NumNodes']) == ('COMPLETED', '0', '1'), text
  assert 'failed (SIGKILL) after step' in text and 'restart 1 of at most 20 on host 0' in text, text
  assert 'was lost after step' in text and f'srun: error: Node failure on {lost}' in text
  assert 'train.slurm: exit code 0' in text  # srun's is 137
  assert project.metrics() == pytest.approx(alone, rel=1e-5)


# In the place of python, as launch and train after the loss of the first node: the others continue,
# and end once the file `lost` is there. After the requeue, all are done.
AGENT = """#!/bin/bash
[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && exit 0
echo "$SLURMD_NODENAME" >> started
while [ ! -e lost ]; do sleep 0.05; done
for flag; do case $flag in --code_file=*) echo 85 > "${flag#*=}";; esac; done
exit 85
"""


@pytest.mark.slow
@pytest.mark.parametrize('restarts', ['0', '20'])
def test_a_job_that_has_lost_the_node_of_its_script_is_requeued_by_another_node(restarts, tmp_path):
  python = tmp_path / 'python'
  python.write_text(AGENT)
  python.chmod(0o755)
  with tempfile.TemporaryDirectory(prefix='t5x_gpu_slurm_') as folder:
    os.chmod(folder, 0o755)
    with SlurmLab(pathlib.Path(folder) / 'lab', num_nodes=3) as lab:
      flags = ('--nodes=3', *TWO_BY_TWO[1:])
      variables = {'PYTHON': str(python), 'RESTARTS': restarts}
      job = lab.sbatch(*flags, SCRIPT, 'my.gin', cwd=tmp_path, **variables)
      deadline = time.monotonic() + RUN_SECONDS
      while not (started := tmp_path / 'started').exists() or len(started.read_text()) < 30:
        assert time.monotonic() < deadline
        time.sleep(0.05)
      lab.lose_node(lab.nodes[0])
      (tmp_path / 'lost').touch()  # before Slurm has noticed
      deadline = time.monotonic() + RUN_SECONDS
      while lab.job(job)['JobState'] == 'RUNNING':
        assert time.monotonic() < deadline, lab.job(job)
        time.sleep(0.1)
      lab.scontrol('update', f'nodename={lab.nodes[0]}', 'state=down', 'reason=lost')
      lab.start_node(lab.nodes[0])
      ended = lab.wait(job, seconds=RUN_SECONDS)
  assert [ended[key] for key in ('JobState', 'Restarts', 'NumNodes')] == ['COMPLETED', '1', '3']
  assert not list(tmp_path.glob('.t5x_gpu_*'))


@pytest.mark.slow
def test_slurm_requeues_a_job_that_has_lost_a_node_and_may_not_run_without(slurm, tmp_path, alone):
  project = Project(tmp_path)
  python = python_of_hosts(tmp_path)
  job = submit(slurm, project, sbatch=(*TWO_BY_TWO, '--no-kill=off'), variables={'PYTHON': python})
  wait_for(slurm, project, job, 'step 4/20')
  slurm.scontrol('update', f'nodename={slurm.nodes[-1]}', 'state=down', 'reason=test')
  ended = slurm.wait(job, seconds=RUN_SECONDS)
  text = output(project, job)
  assert (ended['JobState'], ended['Restarts'], ended['NumNodes']) == ('COMPLETED', '1', '2'), text
  assert 'DUE TO NODE FAILURE' in text
  assert project.metrics() == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
def test_the_doctor_looks_at_all_tasks_and_measures_the_links_between_the_nodes(slurm, tmp_path):
  script = tmp_path / 'doctor.sh'
  script.write_text(f'#!/bin/bash\nsrun {sys.executable} -m t5x_gpu.doctor\n')
  job = slurm.sbatch(
    *TWO_BY_TWO, '--output=out.txt', str(script), cwd=tmp_path, **environment(Project(tmp_path))
  )
  ended = slurm.wait(job, seconds=RUN_SECONDS)
  text = (tmp_path / 'out.txt').read_text()
  assert re.search(
    r'^ok    all-reduce  \S+ GB/s in host, \S+ GB/s across hosts '
    r'\(2 hosts x 2 CPU devices\)$',
    text,
    re.MULTILINE,
  ), text
  assert text.count('ok    matmul') == 1  # of process 0
  assert ended['ExitCode'] == f'{int("FAIL" in text)}:0', text


@pytest.mark.slow
def test_what_slurm_shows_to_tasks_gives_each_its_own_gpus(slurm):
  """The trap of --gpus-per-task, with the variables of a real Slurm and fake devices."""
  if not all((slurm.folder / 'dev' / f'nvidia{i}').is_char_device() for i in range(2)):
    pytest.skip('without root there are no device files, and Slurm sets no CUDA_VISIBLE_DEVICES')
  program = (
    'import os; from t5x_gpu.runtime.cluster.cluster import detect; '
    'os.environ.pop("JAX_PLATFORMS", None); c = detect(os.environ); '
    'print(c.process_index, os.environ["CUDA_VISIBLE_DEVICES"], c.local_device_ids, '
    'c.coordinator_address)'
  )

  def seen(*flags: str) -> list[str]:
    lines = slurm.srun(*flags, f'--chdir={REPOSITORY}', sys.executable, '-c', program)
    return sorted(line for line in lines if not line.startswith('srun:'))  # queued, allocated

  shared = seen('-N2', '--ntasks-per-node=2', '--gpus-per-node=2')
  assert [line.rsplit(' ', 1)[0] for line in shared] == [
    '0 0,1 (0,)',
    '1 0,1 (1,)',
    '2 0,1 (0,)',
    '3 0,1 (1,)',
  ]
  assert len({line.rsplit(' ', 1)[1] for line in shared}) == 1
  bound = seen('-N2', '-n4', '--ntasks-per-node=2', '--gpus-per-task=1')
  assert [line.rsplit(' ', 1)[0] for line in bound] == [
    '0 0 None',
    '1 1 None',
    '2 0 None',
    '3 1 None',
  ]
  whole = seen('-N2', '--ntasks-per-node=1', '--gpus-per-node=2')
  assert [line.rsplit(' ', 1)[0] for line in whole] == ['0 0,1 None', '1 0,1 None']


@pytest.mark.slow
def test_two_steps_of_one_job_do_not_meet_each_other(slurm, tmp_path):
  program = (
    'import os; from t5x_gpu.runtime.cluster.cluster import detect; c = detect(os.environ); '
    'print("STEP", c.run_id, c.coordinator_address)'
  )
  script = tmp_path / 'two_steps.sh'
  step = f"srun --ntasks=2 --overlap {sys.executable} -c '{program}'"
  script.write_text(f'#!/bin/bash\n{step} & {step} & wait\n')
  job = slurm.sbatch(
    '--nodes=1',
    '--ntasks=2',
    '--output=out.txt',
    str(script),
    cwd=tmp_path,
    PYTHONPATH=str(REPOSITORY),
  )
  slurm.wait(job, seconds=60)
  lines = [line for line in (tmp_path / 'out.txt').read_text().splitlines() if 'STEP' in line]
  assert len(lines) == 4 and len(set(lines)) == 2
  assert len({line.split()[2] for line in lines}) == 2


def test_stale_ranks_are_refused_in_a_step_of_two_tasks_and_one_process_still_runs(slurm, tmp_path):
  program = tmp_path / 'who.py'
  program.write_text(
    'import os, sys\nfrom t5x_gpu.errors import ClusterError\n'
    'from t5x_gpu.runtime.cluster.cluster import detect\n'
    'try:\n  c = detect(os.environ)\n'
    '  print(sys.argv[1], c.kind, c.process_index, c.process_count)\n'
    'except ClusterError as e:\n  print(sys.argv[1], "refused", e)\n'
  )
  who = f'{sys.executable} {program}'
  script = tmp_path / 'stale.sh'
  script.write_text(
    f'#!/bin/bash\n{who} SHELL\nsrun -n2 {who} STEP\nsrun -n1 {who} TASK\n'
    f'export RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost\n'
    f'{who} STALE_SHELL\nsrun -n2 {who} STALE_STEP\nsrun -n1 {who} STALE_TASK\n'
  )
  job = slurm.sbatch(
    '--nodes=1',
    '--ntasks=2',
    '--output=out.txt',
    str(script),
    cwd=tmp_path,
    PYTHONPATH=str(REPOSITORY),
  )
  slurm.wait(job, seconds=RUN_SECONDS)
  lines = (tmp_path / 'out.txt').read_text().splitlines()
  # srun: the step before may still be ending ("step creation temporarily disabled, retrying").
  lines = [line for line in lines if not line.startswith('srun: ')]
  assert sorted(line for line in lines if not line.startswith(('STALE', ' '))) == [
    'SHELL single 0 1',
    'STEP slurm 0 2',
    'STEP slurm 1 2',
    'TASK slurm 0 1',
  ], lines
  assert 'STALE_SHELL torchrun 0 1' in lines and 'STALE_TASK torchrun 0 1' in lines, lines
  refused = sorted(line for line in lines if line.startswith('STALE_STEP'))
  assert len(refused) == 2 and all('RANK=0, WORLD_SIZE=1' in line for line in refused), lines
  assert [f'Slurm numbers this process {i} of 2' in refused[i] for i in range(2)] == [True] * 2


@pytest.mark.slow
def test_a_mistake_ends_the_job_at_once_and_is_not_requeued(slurm, tmp_path):
  project = Project(tmp_path)
  job = submit(
    slurm,
    project,
    sbatch=(
      '--nodes=1',
      '--ntasks-per-node=2',
      '--gpus-per-node=2',
      '--cpus-per-task=1',
      '--time=10',
    ),
    BATCH_SIZE=7,
  )
  ended = slurm.wait(job, seconds=RUN_SECONDS)
  text = output(project, job)
  assert (ended['JobState'], ended['Restarts']) == ('FAILED', '0'), text
  # 87: the other process heard of the error before it met it.
  assert ended['ExitCode'] in ('1:0', '87:0'), text
  assert 'BATCH_SIZE is set at --gin.BATCH_SIZE' in text and 'Traceback' not in text


# In the place of python: the task that has the array's number waits for its signal and asks to be
# requeued, another ends at once, and the third continues until the file `go` is there.
ARRAY_TASK = """#!/bin/bash
echo "$SLURM_ARRAY_TASK_ID" >> starts
if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]; then exit 0; fi
if [ "$SLURM_JOB_ID" = "$SLURM_ARRAY_JOB_ID" ]; then
  trap 'exit 85' USR1; echo "$SLURM_ARRAY_TASK_ID" > waits
  while :; do sleep 0.05; done
fi
mkdir first 2>/dev/null && exit 0
while [ ! -e go ]; do sleep 0.05; done
"""


@pytest.mark.slow
def test_a_signalled_task_of_an_array_is_requeued_and_the_others_are_left_alone(slurm, tmp_path):
  python = tmp_path / 'python'
  python.write_text(ARRAY_TASK)
  python.chmod(0o755)
  array = slurm.sbatch(
    '--array=0-2',
    '--nodes=1',
    '--ntasks-per-node=1',
    '--gpus-per-node=1',
    '--cpus-per-task=1',
    '--time=10',
    SCRIPT,
    'my.gin',
    cwd=tmp_path,
    PYTHON=str(python),
  )

  def starts() -> list[str]:
    path = tmp_path / 'starts'
    return sorted(path.read_text().split()) if path.exists() else []

  deadline = time.monotonic() + RUN_SECONDS
  while not (tmp_path / 'waits').exists() or len(starts()) < 3:
    assert time.monotonic() < deadline, starts()
    time.sleep(0.02)
  signalled = (tmp_path / 'waits').read_text().strip()
  others = [f'{array}_{i}' for i in range(3) if str(i) != signalled]
  while 'COMPLETED' not in [slurm.job(task)['JobState'] for task in others]:
    assert time.monotonic() < deadline
    time.sleep(0.1)
  slurm.signal_batch(f'{array}_{signalled}', 'USR1')
  again = slurm.wait(f'{array}_{signalled}', seconds=60)
  assert (again['JobState'], again['Restarts']) == ('COMPLETED', '1')
  assert sorted(slurm.job(task)['JobState'] for task in others) == ['COMPLETED', 'RUNNING']
  (tmp_path / 'go').touch()
  for task in others:
    ended = slurm.wait(task, seconds=60)
    assert (ended['JobState'], ended['Restarts']) == ('COMPLETED', '0')
  assert starts() == sorted(['0', '1', '2', signalled])


def test_the_script_says_how_it_is_used(slurm, tmp_path):
  job = slurm.sbatch(
    '--nodes=1',
    '--ntasks-per-node=1',
    '--gpus-per-node=1',
    '--cpus-per-task=1',
    SCRIPT,
    cwd=tmp_path,
    PATH=os.environ['PATH'],
  )
  assert slurm.wait(job, seconds=60)['ExitCode'] == '2:0'
  assert 'usage: sbatch scripts/train.slurm' in (tmp_path / f't5x_gpu-{job}.out').read_text()
