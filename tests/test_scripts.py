"""The launch scripts parse, quote and forward their arguments; schedulers are simulated."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml

from scripts import draw_report
from t5x_gpu import cli, train
from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED, EXIT_USAGE
from tests.helpers_train import Project, run_here

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / 'scripts'

# In the place of python: shows its arguments and what cluster.detect makes of its variables.
PYTHON = f"""#!{sys.executable}
import dataclasses, json, os, sys
from t5x_gpu import cli
from t5x_gpu.runtime.cluster import cluster
args = cli.parse_args('x', '', sys.argv[3:], extra=cluster.add_flags)
info = cluster.detect(os.environ, num_gpus=4, **vars(args.extra))
print(json.dumps(dict(module=sys.argv[1:3], gin=args.gin_files, bindings=args.bindings,
                      secret=os.environ['T5X_GPU_JOB_SECRET'], info=dataclasses.asdict(info))))
"""
# In the place of PALS's mpiexec: -n N --ppn M ... COMMAND, all processes one after the other.
MPIEXEC = """#!/bin/bash
count=$2 per_host=$4; shift 4
while [[ $1 == --* ]]; do case $1 in --cpu-bind) shift 2;; *) shift;; esac; done
for ((i = 0; i < count; i++)); do
  PALS_RANKID=$i PALS_LOCAL_RANKID=$((i % per_host)) PALS_LOCAL_SIZE=$per_host PALS_APID=1 "$@"
done
"""


def executable(path: pathlib.Path, text: str) -> str:
  path.write_text(text)
  path.chmod(0o755)
  return str(path)


@pytest.mark.parametrize('name', ['train.slurm', 'train.pbs', 'train_mpi.sh', 'bench_gpu.sh'])
def test_scripts_are_bash(name):
  done = subprocess.run(['bash', '-n', SCRIPTS / name], capture_output=True, text=True)
  assert (done.returncode, done.stderr) == (0, '')


def start_in_pbs(folder: pathlib.Path, **variables: str) -> list[str]:
  """Returns the lines of train.pbs on two hosts."""
  bin_folder = folder / 'bin'
  bin_folder.mkdir(exist_ok=True)
  executable(bin_folder / 'mpiexec', MPIEXEC)
  (folder / 'nodes').write_text('x3006c0\nx3006c1\n')
  environ = {k: v for k, v in os.environ.items() if k != 'JAX_PLATFORMS'}
  done = subprocess.run(
    ['bash', SCRIPTS / 'train.pbs'],
    text=True,
    stdout=subprocess.PIPE,
    env={
      **environ,
      'PATH': f'{bin_folder}:{os.environ["PATH"]}',
      'PYTHONPATH': str(ROOT),
      'PBS_O_WORKDIR': str(folder),
      'PBS_JOBID': '12.polaris',
      'PBS_NODEFILE': str(folder / 'nodes'),
      'GIN_FILE': 'my.gin',
      **variables,
    },
  )
  return done.stdout.splitlines()


def test_the_pbs_script_starts_one_process_per_gpu_that_know_who_they_are(tmp_path):
  lines = start_in_pbs(
    tmp_path, PYTHON=executable(tmp_path / 'python', PYTHON), FLAGS='--gin.A=1 --gin.B=x'
  )
  reported = [json.loads(line) for line in lines]
  infos = [each['info'] for each in reported]
  assert [info['process_index'] for info in infos] == list(range(8))
  assert {info['process_count'] for info in infos} == {8}
  assert [info['local_device_ids'] for info in infos] == [[i % 4] for i in range(8)]
  assert len({info['coordinator_address'] for info in infos}) == 1
  assert infos[0]['coordinator_address'].startswith('x3006c0:')
  assert reported[3]['module'] == ['-m', 't5x_gpu.train']
  (secret,) = {each['secret'] for each in reported}
  assert len(bytes.fromhex(secret)) == 32
  assert reported[3]['gin'] == ['my.gin'] and reported[3]['bindings'] == ['A=1', 'B=x']


# In the place of python: shows its arguments, and this process's number among the hosts.
SHOW = """#!/bin/bash
echo "$PALS_RANKID $PALS_LOCAL_SIZE $*"
"""


def test_the_pbs_script_starts_an_agent_per_host(tmp_path):
  python = executable(tmp_path / 'python', SHOW)
  assert start_in_pbs(tmp_path, PYTHON=python, RESTARTS='20') == [
    f'{host} 1 -m t5x_gpu.launch --restarts=20 --nproc=4 -- --gin_file=my.gin' for host in range(2)
  ]


@pytest.mark.parametrize(
  'restarts, start',
  [
    ('0', '-np 16 --hostfile hosts --bind-to none -x TERM=dumb python -m t5x_gpu.train'),
    (
      '20',
      '-np 2 --map-by ppr:1:node --hostfile hosts --bind-to none -x TERM=dumb python -m '
      't5x_gpu.launch --restarts=20 --nproc=8 --',
    ),
  ],
)
def test_the_script_for_mpirun_starts_a_process_per_gpu_or_an_agent_per_host(
  restarts, start, tmp_path
):
  (tmp_path / 'hosts').write_text('# two\nnode1 slots=8\n\nnode2 slots=8\n')
  executable(tmp_path / 'mpirun', '#!/bin/bash\necho "$@"\n')
  env = {'PATH': f'{tmp_path}:{os.environ["PATH"]}', 'PYTHON': 'python', 'HOSTFILE': 'hosts'}
  script = [SCRIPTS / 'train_mpi.sh', '16', 'my.gin', '--gin.A=1']
  shown = subprocess.check_output(
    script, env={**env, 'RESTARTS': restarts}, cwd=tmp_path, text=True
  )
  assert shown.replace('-x T5X_GPU_JOB_SECRET ', '') == f'{start} --gin_file=my.gin --gin.A=1\n'


def test_the_kubernetes_job_gives_each_pod_what_it_needs():
  service, job = yaml.safe_load_all((SCRIPTS / 'train_k8s.yaml').read_text())
  spec, pod = job['spec'], job['spec']['template']['spec']
  (container,) = pod['containers']
  split = container['args'].index('--')
  args = cli.parse_args('x', '', container['args'][split + 1 :])
  assert (ROOT / args.gin_files[0]).exists()
  assert container['command'] == ['python', '-m', 't5x_gpu.launch']
  count = spec['completions']
  assert spec['completionMode'] == 'Indexed' and spec['parallelism'] == count
  flags = dict(flag.split('=') for flag in container['args'][:split])
  assert flags['--host_count'] == str(count) and int(flags['--restarts']) > 0
  # A pod of an indexed job is called JOB-INDEX, and has its subdomain's address.
  assert service['spec']['clusterIP'] == 'None' and pod['subdomain'] == service['metadata']['name']
  names = [f'{job["metadata"]["name"]}-{i}.{pod["subdomain"]}:62000' for i in range(count)]
  assert flags['--coordinator_address'].split(',') == names
  assert service['spec']['selector'] == {'job-name': job['metadata']['name']}


@pytest.mark.parametrize('version', ['1.31', '1.33', '1.37'])
def test_the_kubernetes_file_fits_the_schema_of_kubernetes(version):
  for resource in yaml.safe_load_all((SCRIPTS / 'train_k8s.yaml').read_text()):
    kubernetes_validate.validate(resource, version, strict=True)


def test_the_kubernetes_job_acts_on_our_exit_codes():
  _, job = yaml.safe_load_all((SCRIPTS / 'train_k8s.yaml').read_text())
  spec, (container,) = job['spec'], job['spec']['template']['spec']['containers']
  rules = spec['podFailurePolicy']['rules']
  action = {
    code: rule['action']
    for rule in rules
    if 'onExitCodes' in rule
    for code in rule['onExitCodes']['values']
  }
  assert all(
    rule.get('onExitCodes', {}).get('containerName', 'train') == container['name'] for rule in rules
  )
  environment = {each['name']: each.get('value') for each in container['env']}
  assert action == {
    EXIT_PREEMPTED: 'Ignore',
    128 + signal.SIGTERM: 'Ignore',
    EXIT_USAGE: 'FailJob',
    int(environment[cli.CONFIG_ERROR_CODE]): 'FailJob',
    128 + signal.SIGINT: 'FailJob',
  }
  # Counted for each pod: a limit for all of them would shrink as pods are added.
  assert 'backoffLimit' not in spec and spec['backoffLimitPerIndex']
  # A pod that cannot take part, on a bad node, leaves the run of the others alone.
  assert spec['maxFailedIndexes'] == spec['completions'] - 1
  # A pod exits with 0 only if the run is done; one that is lost then would wait for the others.
  assert spec['successPolicy'] == {'rules': [{'succeededCount': 1}]}


@pytest.mark.parametrize('flags, code', [(['--gin_file=nowhere.gin'], 78), (['--help'], 0)])
def test_a_mistake_in_the_configuration_leaves_with_the_code_that_is_asked_for(
  flags, code, monkeypatch
):
  monkeypatch.setenv(cli.CONFIG_ERROR_CODE, '78')
  assert run_here(lambda: train.main(flags)).code == code


def test_the_slurm_script_asks_for_one_task_per_gpu():
  options = dict(
    line.removeprefix('#SBATCH --').partition('=')[::2]
    for line in (SCRIPTS / 'train.slurm').read_text().splitlines()
    if line.startswith('#SBATCH')
  )
  assert options['ntasks-per-node'] == options['gpus-per-node']
  assert options['signal'] == 'B:USR1@120' and options['open-mode'] == 'append'
  assert 'requeue' in options and 'gpus-per-task' not in options


def end_in_slurm(
  folder: pathlib.Path, code: int, *, srun: str = '', **variables: str
) -> tuple[str, str]:
  """Returns the lines of train.slurm after an srun with this exit code, and calls of scontrol.

  `srun` is a program in the place of srun.
  """
  bin_folder = folder / 'bin'
  bin_folder.mkdir(exist_ok=True)
  executable(bin_folder / 'srun', srun or f'#!/bin/bash\nexit {code}\n')
  # In the place of Slurm, which would end the script.
  executable(bin_folder / 'scontrol', '#!/bin/bash\necho "$@" >> calls\nkill "$PPID"\n')
  (folder / 'calls').write_text('')
  done = subprocess.run(
    ['bash', SCRIPTS / 'train.slurm', 'my.gin'],
    cwd=folder,
    text=True,
    stdout=subprocess.PIPE,
    env={
      'PATH': f'{bin_folder}:{os.environ["PATH"]}',
      'SLURM_JOB_ID': '7',
      'SLURM_JOB_NODELIST': 'n1',
      **variables,
    },
  )
  return done.stdout, (folder / 'calls').read_text()


# In the place of srun: shows its arguments, ends with 137, and the run with 85, as one that saved
# without a node that was lost.
LOST_NODE = """#!/bin/bash
printf '%s\\n' "$@"
for flag; do case $flag in --code_file=*) echo 85 > "${flag#*=}";; esac; done
exit 137
"""


def test_slurm_goes_by_the_code_of_the_run_which_a_lost_node_does_not_share(tmp_path):
  said, calls = end_in_slurm(tmp_path, 137, srun=LOST_NODE)
  assert 'saved; back into the queue' in said and calls == 'requeue 7\n'
  assert not list(tmp_path.glob('.t5x_gpu_*'))
  said, calls = end_in_slurm(tmp_path, 137, srun=LOST_NODE, RESTARTS='0')
  assert 'exit code 137' in said and not calls


@pytest.mark.parametrize('cpus, each', [('96(x2)', '96'), ('96,64', '64')])
def test_slurm_starts_an_agent_per_node_with_all_gpus_and_the_cores_that_each_node_has(
  cpus, each, tmp_path
):
  said, _ = end_in_slurm(
    tmp_path,
    137,
    srun=LOST_NODE,
    LAUNCH_FLAGS='--spares=1 --numa=off',
    SLURM_JOB_NUM_NODES='2',
    SLURM_NTASKS_PER_NODE='8',
    SLURM_CPUS_PER_TASK='8',
    SLURM_CPUS_ON_NODE='96',
    SLURM_JOB_CPUS_PER_NODE=cpus,
  )
  flags = said.splitlines()
  srun, launch = flags[1 : flags.index('-m')], flags[flags.index('-m') + 2 : flags.index('--')]
  assert srun[:-1] == [
    '--no-kill',
    '--kill-on-bad-exit=0',
    '--wait=0',
    '--gpu-bind=none',
    '--ntasks=2',
    '--ntasks-per-node=1',
    f'--cpus-per-task={each}',
    f'--task-epilog={tmp_path}/.t5x_gpu_epilog_7',
  ]
  assert launch == ['--restarts=20', *launch[1:2], '--nproc=8', '--spares=1', '--numa=off']
  assert launch[1].startswith('--code_file=')


@pytest.mark.parametrize('code', [1, 86, 87, 134, 137])
def test_slurm_starts_a_crashed_run_again_at_most_three_times(code, tmp_path):
  for crash in (1, 2, 3):
    said, calls = end_in_slurm(tmp_path, code, CRASH_MINUTES='0')
    assert f'crash {crash} of at most 3 (exit code {code}' in said and calls == 'requeue 7\n'
  said, calls = end_in_slurm(tmp_path, code, CRASH_MINUTES='0')
  assert 'not requeued: crash 4 of at most 3' in said and not calls
  assert f'exit code {code}' in said and sorted(p.name for p in tmp_path.iterdir()) == [
    'bin',
    'calls',
  ]


@pytest.mark.parametrize('code', [0, 2, 78, 130])
def test_slurm_does_not_start_a_run_again_that_is_done_or_cannot_work(code, tmp_path):
  said, calls = end_in_slurm(tmp_path, code, CRASH_MINUTES='0')
  assert f'exit code {code}' in said and not calls


def test_slurm_takes_an_early_failure_for_a_mistake(tmp_path):
  said, calls = end_in_slurm(tmp_path, 87)
  assert 'exit code 87' in said and not calls


def test_slurm_starts_again_after_an_early_crash_of_a_run_that_has_worked(tmp_path):
  said, calls = end_in_slurm(tmp_path, 87, SLURM_RESTART_COUNT='1')
  assert 'crash 1 of at most 3' in said and calls == 'requeue 7\n'


def test_a_save_ends_the_crashes_in_a_row(tmp_path):
  for code, words in ((137, 'crash 1 of'), (137, 'crash 2 of'), (85, 'saved'), (137, 'crash 1 of')):
    said, calls = end_in_slurm(tmp_path, code, CRASH_MINUTES='0')
    assert words in said and calls == 'requeue 7\n'


def test_restarts_of_slurm_count_saves_and_crashes(tmp_path):
  for code in (85, 137):
    said, calls = end_in_slurm(tmp_path, code, CRASH_MINUTES='0', SLURM_RESTART_COUNT='50')
    assert 'not requeued: restart 50 of at most 50' in said and not calls


@pytest.mark.slow
@pytest.mark.process
def test_the_run_of_the_report_picture_is_killed_once_and_ends(tmp_path):
  project = Project(tmp_path)
  draw_report.train_and_kill_once(
    project.model_dir, f'--gin_file={project.gin_file}', '--gin.TRAIN_STEPS=200', after=15
  )
  ledger = (project.model_dir / 'goodput.jsonl').read_text().splitlines()
  starts = {json.loads(line)['run'] for line in ledger}
  assert len(starts) == 2 and max(project.metrics()) == 200
