"""The doctor's report is useful without a GPU, its exit code can be trusted, it never hangs."""

import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time

import jax
import pytest

from t5x_gpu import __main__, launch
from t5x_gpu import doctor as doctor_lib
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.health import checks as checks_lib
from t5x_gpu.runtime.health.checks import FAIL, OK, WARN
from t5x_gpu.tools.doctor import measure, measure_disk
from tests.messages import raises

ROOT = pathlib.Path(__file__).parents[3]
DEADLINE_SECONDS = 180
H100 = {'platform': 'gpu', 'count': 8, 'kinds': ['NVIDIA H100 80GB HBM3']}
CPU = {'platform': 'cpu', 'count': 1, 'kinds': ['cpu']}


def start_doctor(*flags, cwd, **env):
  env = {'PATH': '/usr/bin:/bin', 'PYTHONPATH': str(ROOT), 'HOME': str(cwd), **env}
  return subprocess.Popen(
    [sys.executable, '-m', 't5x_gpu.doctor', *flags],
    cwd=cwd,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def run_doctor(*flags, cwd, **env):
  with start_doctor(*flags, cwd=cwd, **env) as doctor:
    output, _ = doctor.communicate(timeout=DEADLINE_SECONDS)
  return subprocess.CompletedProcess(doctor.args, doctor.returncode, output)


@pytest.mark.slow
def test_report_on_this_machine(tmp_path):
  done = run_doctor(
    '--json',
    f'--model_dir={tmp_path / "new" / "run"}',
    cwd=tmp_path,
    JAX_PLATFORMS='cpu',
    XLA_FLAGS='--xla_gpu_simplify_all_fp_conversions',
  )
  report = json.loads(done.stdout)
  checks = {check['name']: check for check in report['checks']}
  assert list(checks) == [
    'processes',
    'python',
    'packages',
    'driver',
    'numa',
    'host',
    'ulimits',
    '/dev/shm',
    'xla flags',
    'devices',
    'cudnn',
    'nccl',
    'matmul',
    'all-reduce',
    'disk',
  ]
  assert 'GFLOP/s' in checks['matmul']['value'] and 'write' in checks['disk']['value']
  assert checks['xla flags']['status'] == 'warn'
  assert 'xla_gpu_simplify_all_fp_conversions is dropped' in checks['xla flags']['fix']
  assert all(check['fix'] for check in checks.values() if check['status'] != 'ok')
  assert done.returncode == int(bool(report['failed']))
  assert list(tmp_path.glob('new')) == []  # A look leaves nothing behind.


@pytest.mark.slow
def test_missing_gpus_fail_in_words(tmp_path):
  if machine.find_gpus({}).count:
    pytest.skip('this machine has GPUs')
  done = run_doctor('--expect_gpus=8', cwd=tmp_path)
  assert done.returncode == 1
  lines = done.stdout.splitlines()
  assert 'FAIL  devices     jax runs on cpu, 8 expected' in lines
  assert any(line.startswith('FAIL  driver') and '8 GPUs expected' in line for line in lines)
  assert lines[-1].endswith('3 failed: packages, driver, devices')


def test_a_jax_that_hangs_or_dies_is_a_failure_and_the_rest_continues(monkeypatch, tmp_path):
  run = machine.run_with_deadline

  def hanging(command, *, seconds, environ=None):
    if 'devices' in command:
      command = [sys.executable, '-c', 'import time; time.sleep(60)']
      seconds = 0.3
    return run(command, seconds=seconds, environ=environ)

  monkeypatch.setattr(machine, 'run_with_deadline', hanging)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  checks = {
    c.name: c for c in doctor_lib.examine(doctor_lib.DoctorRequest(model_dir=str(tmp_path)))
  }
  assert checks['devices'].status == FAIL
  assert 'no answer within 0.3 s' in checks['devices'].value
  assert 'MB/s' in checks['disk'].value


def test_deadlines_hold_and_keep_what_was_printed():
  begin = time.monotonic()
  done = machine.run_with_deadline(['sh', '-c', 'echo first; sleep 60'], seconds=0.3)
  assert time.monotonic() - begin < 30
  assert (done.code, done.output, done.problem) == (None, 'first\n', 'no answer within 0.3 s')
  assert machine.run_with_deadline(['no-such-program'], seconds=1).problem.startswith(
    'no-such-program: No such'
  )


def test_gin_files_are_refused():
  with raises(ConfigError):
    doctor_lib.main(['--gin_file=gin_configs/examples/demo.gin'])
  with raises(ConfigError):
    doctor_lib.main(['--preset=defualt'])


def test_flags_prints_the_table(capsys):
  assert doctor_lib.main(['--flags']) == 0
  assert 'xla_gpu_enable_latency_hiding_scheduler=True' in capsys.readouterr().out
  assert 'doctor' in __main__.COMMANDS


@pytest.mark.parametrize(
  'versions, gpus, status, text',
  [
    ({'jax': '0.10.2', 'jaxlib': '0.10.2'}, 0, OK, ''),
    ({'jax': '0.10.2', 'jaxlib': '0.10.2'}, 8, FAIL, "'jax[cuda13]==0.10.2'"),
    ({'jax': '0.10.2', 'jaxlib': '0.11.0'}, 0, FAIL, 'jaxlib==0.10.2'),
    ({'jax': '0.11.2', 'jaxlib': '0.11.0'}, 0, WARN, 'jaxlib==0.11.2'),
    (
      {
        'jax': '0.11.2',
        'jaxlib': '0.11.2',
        'jax-cuda12-plugin': '0.10.2',
        'jax-cuda12-pjrt': '0.10.2',
      },
      8,
      FAIL,
      "'jax[cuda12]==0.11.2'",
    ),
    ({'jax': '0.11.2', 'jaxlib': '0.11.2', 'jax-cuda13-plugin': '0.11.2'}, 8, FAIL, 'cuda13'),
    (
      {
        'jax': '0.11.2',
        'jaxlib': '0.11.2',
        'jax-cuda13-plugin': '0.11.2',
        'jax-cuda13-pjrt': '0.11.2',
        'nvidia-ml-py': '13.580.82',
      },
      8,
      OK,
      '',
    ),
    (
      {
        'jax': '0.11.2',
        'jaxlib': '0.11.2',
        'jax-cuda13-plugin': '0.11.2',
        'jax-cuda13-pjrt': '0.11.2',
      },
      8,
      WARN,
      'pip install nvidia-ml-py',
    ),
    (
      {
        'jax': '0.11.2',
        'jaxlib': '0.11.2',
        'jax-cuda12-plugin': '0.11.2',
        'jax-cuda13-plugin': '0.11.2',
      },
      8,
      WARN,
      'uninstall',
    ),
    ({}, 0, FAIL, 'pip install'),
  ],
)
def test_packages_that_do_not_belong_together(versions, gpus, status, text):
  check = checks_lib.check_packages(versions, gpus=gpus)
  assert check.status == status and text in check.fix and bool(check.fix) == (status != OK)


@pytest.mark.parametrize(
  'driver, plugin, on_bus, expected, status, text',
  [
    ('580.95.05', 'jax-cuda13-plugin', 8, None, OK, ''),
    ('550.54.15', 'jax-cuda13-plugin', 8, None, FAIL, 'CUDA 12'),
    ('470.1', 'jax-cuda13-plugin', 8, None, FAIL, 'Update the NVIDIA driver.'),
    (None, 'jax-cuda13-plugin', 8, None, FAIL, '--gpus all'),
    (None, '', 0, 8, FAIL, '--gpus-per-node'),
    (None, '', 0, None, OK, ''),
  ],
)
def test_drivers(driver, plugin, on_bus, expected, status, text):
  check = checks_lib.check_driver(driver, {plugin: '0.11.2'}, on_bus=on_bus, expected=expected)
  assert check.status == status and text in check.fix


@pytest.mark.parametrize(
  'found, on_machine, expected, environ, status, text',
  [
    (H100, 8, None, {}, OK, '8 x NVIDIA H100'),
    (H100, 8, 8, {}, OK, '8 x NVIDIA H100'),
    (H100 | {'count': 1}, 8, None, {}, FAIL, 'though 8 GPUs are here'),
    (H100 | {'count': 1}, 8, None, {'CUDA_VISIBLE_DEVICES': '3'}, OK, 'CUDA_VISIBLE_DEVICES=3'),
    (H100 | {'count': 1}, 8, 8, {'CUDA_VISIBLE_DEVICES': '3'}, FAIL, '8 expected'),
    (CPU, 8, None, {}, FAIL, 'jax runs on cpu, though 8 GPUs are here: cuDNN is missing'),
    (CPU, 8, None, {'JAX_PLATFORMS': 'cpu'}, WARN, 'jax runs on cpu'),
    (CPU, 8, 8, {'JAX_PLATFORMS': 'cpu'}, FAIL, '8 expected'),
    (CPU, 0, None, {}, OK, 'no GPU on this machine'),
    (CPU, 0, 1, {}, FAIL, '1 expected'),
    (None, 0, None, {}, FAIL, 'jax did not start: cuDNN is missing'),
  ],
)
def test_a_quiet_fall_back_to_the_cpu_fails(found, on_machine, expected, environ, status, text):
  check = checks_lib.check_devices(
    found, on_machine=on_machine, expected=expected, environ=environ, problem='cuDNN is missing'
  )
  assert check.status == status and text in check.value and bool(check.fix) == (status != OK)


@pytest.mark.parametrize(
  'rates, status, text',
  [
    ([700e12] * 8, OK, '700 to 700 TFLOP/s bfloat16, 71% of 989'),
    ([700e12] * 7 + [500e12], WARN, '500 to 700'),
    ([400e12] * 8, WARN, '40% of 989'),
    (None, FAIL, 'died'),
  ],
)
def test_matmul_is_held_against_the_datasheet(rates, status, text):
  check = checks_lib.check_matmul(rates, devices=H100, problem='died')
  assert check.status == status and text in check.value
  if rates and rates[-1] == 500e12:
    assert 'GPU 7 is slower' in check.fix


TOGETHER = {'topology': '2 hosts x 8 GPUs', 'kind': 'NVIDIA H100 80GB HBM3'}


@pytest.mark.parametrize(
  'rates, status, text',
  [
    ({'in_host': 360e9}, OK, '360 GB/s in host (2 hosts x 8 GPUs)'),
    ({'in_host': 360e9, 'across_hosts': 45e9}, OK, '360 GB/s in host, 45 GB/s across hosts'),
    ({'in_host': 20e9}, WARN, 'NVLink reaches 450'),
  ],
)
def test_all_reduce_is_held_against_the_links(rates, status, text):
  check = checks_lib.check_all_reduce({'together': TOGETHER, 'all_reduce': rates})
  assert check.status == status and text in check.value


def test_cards_without_nvlink_are_not_held_against_it():
  found = {'together': {**TOGETHER, 'kind': 'NVIDIA H100 PCIe'}, 'all_reduce': {'in_host': 20e9}}
  assert checks_lib.check_all_reduce(found).status == OK


@pytest.mark.parametrize(
  'found, text',
  [
    ({}, 'did not start: no answer within 60 s'),
    ({'together': TOGETHER}, '2 hosts x 8 GPUs were ready, then: no answer within 60 s'),
    ({'problem': {'what': 'Waiting for 1 of 16.', 'fix': 'Start it.'}}, 'Waiting for 1 of 16.'),
  ],
)
def test_an_all_reduce_that_is_not_measured_fails_with_how_far_it_got(found, text):
  check = checks_lib.check_all_reduce(found, problem='no answer within 60 s')
  assert (check.status, check.value) == (FAIL, text) and check.fix


def test_limits_of_the_process(tmp_path):
  plenty = {'nofile': 65536, 'nproc': -1, 'memlock': 65536}
  assert checks_lib.check_ulimits(plenty, infiniband=tmp_path).status == OK
  assert 'ulimit -n' in checks_lib.check_ulimits(plenty | {'nofile': 1024}).fix
  (tmp_path / 'mlx5_0').touch()
  assert 'ulimit -l' in checks_lib.check_ulimits(plenty, infiniband=tmp_path).fix


def test_small_shared_memory_breaks_several_gpus(monkeypatch):
  size = os.statvfs_result((4096, 4096, 16384, 16384, 16384, 1, 1, 1, 0, 255))  # 64 MiB
  monkeypatch.setattr(os, 'statvfs', lambda folder: size)
  assert checks_lib.check_shared_memory(gpus=8).status == FAIL
  check = checks_lib.check_shared_memory(gpus=0)
  assert check.status == WARN and '--ipc=host' in check.fix


def test_an_older_cudnn_than_jax_was_built_with_fails():
  versions = {'nvidia-cudnn-cu13': '9.10.0'}
  check = checks_lib.check_library('cudnn', versions, gpus=8, loaded=91000, built=91200)
  assert check.status == FAIL and 'nvidia-cudnn-cu13' in check.fix
  assert checks_lib.check_library('cudnn', versions, gpus=8, loaded=91201, built=91200).status == OK
  assert checks_lib.check_library('nccl', {}, gpus=8).status == WARN
  assert checks_lib.check_library('nccl', {}, gpus=0).status == OK


def test_numa_nodes_of_gpus_come_from_the_bus(tmp_path):
  for address, vendor, kind, node in (
    ('0000:1b:00.0', '0x10de', '0x030200', '0'),
    ('0000:9b:00.0', '0x10de', '0x030200', '1'),
    ('0000:05:00.0', '0x10de', '0x068000', '0'),  # NVSwitch
    ('0000:00:02.0', '0x1af4', '0x030000', '0'),
  ):
    folder = tmp_path / address
    folder.mkdir()
    for name, text in (('vendor', vendor), ('class', kind), ('numa_node', node)):
      (folder / name).write_text(text + '\n')
  nodes = machine.pci_numa_nodes(tmp_path)
  assert nodes == {'0000:1b:00.0': 0, '0000:9b:00.0': 1}
  assert checks_lib.check_numa(nodes, num_nodes=2).status == OK
  assert checks_lib.check_numa({'0000:1b:00.0': -1}, num_nodes=2).status == WARN
  assert checks_lib.check_numa({'0000:1b:00.0': -1}, num_nodes=1).status == OK


def test_all_reduce_is_measured_per_tier():
  devices = jax.devices()
  rates = measure.measure_all_reduce(devices, num_hosts=2, num_bytes=2**16)
  assert set(rates) == {'in_host', 'across_hosts'} and min(rates.values()) > 0
  assert list(measure.measure_all_reduce(devices[:2], num_bytes=2**16)) == ['in_host']
  assert len(measure.measure_matmul(devices[:2], size=64, dtype='float32', repeats=2)) == 2


def test_a_folder_that_cannot_be_written_to_fails(tmp_path):
  with pytest.raises(OSError) as e:
    measure_disk.measure_disk('/proc/me')
  check = checks_lib.check_disk(None, folder='/proc/me', problem=str(e.value))
  assert check.status == FAIL and '--model_dir' in check.fix
  slow = {'write': 20e6, 'read': 1e9, 'sync_seconds': 0.01, 'free': 1e12}
  assert '10 min' in checks_lib.check_disk(slow, folder='.').fix


def start_two(tmp_path, *flags):
  """Returns two processes of a run, each with two devices and a host of its own."""
  address = launch.free_address()
  return [
    start_doctor(
      *flags,
      f'--coordinator_address={address}',
      '--process_count=2',
      f'--process_index={i}',
      cwd=tmp_path,
      JAX_PLATFORMS='cpu',
      T5X_GPU_DOMAIN=f'rack{i}',
      XLA_FLAGS='--xla_force_host_platform_device_count=2',
    )
    for i in range(2)
  ]


def outputs(doctors):
  try:
    return [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in doctors]
  finally:
    for process in doctors:
      process.kill()
      process.wait()


@pytest.mark.slow
def test_processes_measure_the_links_inside_and_across_hosts_and_the_first_prints(tmp_path):
  doctors = start_two(tmp_path)
  first, second = outputs(doctors)
  found = re.search(
    r'ok    all-reduce  (\S+) GB/s in host, (\S+) GB/s across hosts '
    r'\(2 hosts x 2 CPU devices\)',
    first,
  )
  assert found, first + second
  assert float(found[1]) > 0 and float(found[2]) > 0
  assert 'ok    matmul' in first and ' checks, ' in first
  assert ' ok ' not in second and 'all-reduce' not in second  # only what is not ok
  assert [doctor.returncode for doctor in doctors] == [int('FAIL' in first), int('FAIL' in second)]


@pytest.mark.slow
def test_each_process_prints_its_own_failures_with_its_host_and_number(tmp_path):
  if machine.find_gpus({}).count:
    pytest.skip('this machine has GPUs')
  doctors = start_two(tmp_path, '--expect_gpus=1', '--timeout_seconds=20')
  first, second = outputs(doctors)
  assert 'FAIL  devices     jax runs on cpu, 1 expected' in first
  assert (
    f'{socket.gethostname()}, process 1: FAIL  devices     jax runs on cpu, 1 expected' in second
  ), second
  assert [doctor.returncode for doctor in doctors] == [1, 1]
  assert 'all-reduce' not in first + second  # no process waits for missing GPUs


@pytest.mark.slow  # two processes that measure, like the test above
def test_json_of_several_processes_is_a_line_each(tmp_path):
  reports = [json.loads(text) for text in outputs(start_two(tmp_path, '--json'))]
  assert [r['process'] for r in reports] == [0, 1]
  for report in reports:
    (check,) = (c for c in report['checks'] if c['name'] == 'all-reduce')
    assert 'GB/s across hosts' in check['value']


def measure_links(*flags, seconds, index=0):
  """Returns the check of an all-reduce by one of two processes."""
  done = machine.run_with_deadline(
    [
      sys.executable,
      '-m',
      't5x_gpu.tools.doctor.measure',
      'all_reduce',
      '--process_count=2',
      f'--process_index={index}',
      *flags,
    ],
    seconds=seconds,
    environ={'PYTHONPATH': str(ROOT), 'PATH': os.environ['PATH'], 'JAX_PLATFORMS': 'cpu'},
  )
  return checks_lib.check_all_reduce(checks_lib.json_lines(done.output), problem=done.problem)


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named():
  check = measure_links(
    f'--coordinator_address={launch.free_address()}', '--join_seconds=1', seconds=DEADLINE_SECONDS
  )
  assert check.status == FAIL and 'still waiting for 1 of 2 processes: 1' in check.value


# Joins, and then computes nothing.
IDLE = """
import sys, time
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime import distributed
distributed.join(cluster.detect({}, coordinator_address=sys.argv[1], process_count=2,
                                      process_index=1))
import jax
jax.devices()
time.sleep(1000)
"""


@pytest.mark.slow
def test_a_process_that_hangs_ends_the_measuring_at_its_deadline_and_it_is_said():
  address = launch.free_address()
  with subprocess.Popen(
    [sys.executable, '-c', IDLE, address],
    stderr=subprocess.DEVNULL,
    env={'PYTHONPATH': str(ROOT), 'JAX_PLATFORMS': 'cpu'},
  ) as idle:
    try:
      check = measure_links(f'--coordinator_address={address}', seconds=6)
    finally:
      idle.kill()
  assert check.status == FAIL and 'no answer within 6 s' in check.value


@pytest.mark.parametrize(
  'cluster, expect, here, first',
  [
    (ClusterInfo('single'), 8, 8, True),
    (ClusterInfo('slurm', local_process_index=0, local_process_count=8), 8, 1, True),
    (ClusterInfo('slurm', local_process_index=3, local_process_count=8), 8, 1, False),
    (ClusterInfo('slurm', local_process_index=1, local_process_count=2), 8, 4, False),
    (ClusterInfo('flags', process_index=3, process_count=8), None, None, True),
  ],
)
def test_processes_of_one_host_share_what_is_expected_of_it(cluster, expect, here, first):
  request = doctor_lib.DoctorRequest(model_dir='.', expect_gpus=expect, cluster=cluster)
  assert (request.expected_here, request.is_first_here) == (here, first)


@pytest.mark.gpu
def test_matmul_on_a_gpu_stays_below_its_datasheet():
  rates = measure.measure_matmul(jax.local_devices()[:1], size=8192, dtype='bfloat16')
  found = measure.describe_devices()
  check = checks_lib.check_matmul(rates, devices=found)
  assert check.status == OK, check
