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
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime.preemption import EXIT_PREEMPTED
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


def test_the_pbs_script_starts_one_process_per_gpu_that_know_who_they_are(tmp_path):
  bin_folder = tmp_path / 'bin'
  bin_folder.mkdir()
  executable(bin_folder / 'mpiexec', MPIEXEC)
  (tmp_path / 'nodes').write_text('x3006c0\nx3006c1\n')
  environ = {k: v for k, v in os.environ.items() if k != 'JAX_PLATFORMS'}
  done = subprocess.run(
    ['bash', SCRIPTS / 'train.pbs'],
    text=True,
    stdout=subprocess.PIPE,
    env={
      **environ,
      'PATH': f'{bin_folder}:{os.environ["PATH"]}',
      'PYTHONPATH': str(ROOT),
      'PYTHON': executable(tmp_path / 'python', PYTHON),
      'PBS_O_WORKDIR': str(tmp_path),
      'PBS_JOBID': '12.polaris',
      'PBS_NODEFILE': str(tmp_path / 'nodes'),
      'GIN_FILE': 'my.gin',
      'FLAGS': '--gin.A=1 --gin.B=x',
    },
  )
  reported = [json.loads(line) for line in done.stdout.splitlines()]
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


def test_the_kubernetes_job_gives_each_pod_what_it_needs():
  service, job = yaml.safe_load_all((SCRIPTS / 'train_k8s.yaml').read_text())
  spec, pod = job['spec'], job['spec']['template']['spec']
  (container,) = pod['containers']
  args = cli.parse_args('x', '', container['args'], extra=cluster.add_flags)
  assert (ROOT / args.gin_files[0]).exists()
  assert container['command'] == ['python', '-m', 't5x_gpu.train']
  count = spec['completions']
  assert spec['completionMode'] == 'Indexed' and spec['parallelism'] == count
  infos = [
    cluster.detect(
      {'KUBERNETES_SERVICE_HOST': '10.0.0.1', 'JOB_COMPLETION_INDEX': str(i)}, **vars(args.extra)
    )
    for i in range(count)
  ]
  assert [info.process_index for info in infos] == list(range(count))
  # A pod of an indexed job is called JOB-INDEX, and has its subdomain's address.
  assert service['spec']['clusterIP'] == 'None' and pod['subdomain'] == service['metadata']['name']
  first = f'{job["metadata"]["name"]}-0.{pod["subdomain"]}:'
  assert infos[0].coordinator_address.startswith(first)
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
    int(environment[cli.CONFIG_ERROR_CODE]): 'FailJob',
    128 + signal.SIGINT: 'FailJob',
  }
  # Counted for each pod: a limit for all of them would shrink as pods are added.
  assert (
    'backoffLimit' not in spec and spec['backoffLimitPerIndex'] and (spec['maxFailedIndexes'] == 0)
  )


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


def end_in_slurm(folder: pathlib.Path, code: int, **variables: str) -> tuple[str, str]:
  """Returns the lines of train.slurm after an srun with this exit code, and calls of scontrol."""
  bin_folder = folder / 'bin'
  bin_folder.mkdir(exist_ok=True)
  executable(bin_folder / 'srun', f'#!/bin/bash\nexit {code}\n')
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
