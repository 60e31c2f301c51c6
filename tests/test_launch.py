"""python -m t5x_gpu.launch: processes start, are bound to cores, print and end together."""

import array
import ctypes
import dataclasses
import fcntl
import io
import os
import pathlib
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
from typing import Optional

import pynvml
import pytest

from t5x_gpu import launch
from t5x_gpu.errors import ConfigError, number_ranges
from t5x_gpu.reporting.interruptions import costs_of
from t5x_gpu.reporting.run_record import read_run
from t5x_gpu.runtime import numa
from t5x_gpu.runtime.cluster import fork_server, interruptions, rendezvous
from t5x_gpu.runtime.machine import PhysicalGpu, own_gpus, physical_gpus
from t5x_gpu.terminal import streams
from tests.helpers_disk import small_disk
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags
from tests.messages import raises

# JAX warns of forks in a process that has imported it: this one has, `launch` does not.
pytestmark = pytest.mark.filterwarnings('ignore:os.fork.. was called:RuntimeWarning')

GPUS = [PhysicalGpu(f'GPU-{i}', f'0000:{i + 1:02x}:00.0') for i in range(8)]


def plan(num_processes: int, **options) -> list[launch.ProcessPlan]:
  return launch.plan(
    num_processes,
    **{
      'use_gpus': True,
      'numa_mode': 'off',
      'env': {},
      'gpus': GPUS,
      'address': '127.0.0.1:61500',
      **options,
    },
  )


def test_each_process_gets_its_own_gpu_index_and_address():
  plans = plan(8)
  assert [p.env['JAX_LOCAL_DEVICE_IDS'] for p in plans] == list('01234567')
  assert [p.env['JAX_PROCESS_INDEX'] for p in plans] == list('01234567')
  assert {p.env['JAX_PROCESS_COUNT'] for p in plans} == {'8'}
  assert {p.env['JAX_COORDINATOR_ADDRESS'] for p in plans} == {'127.0.0.1:61500'}
  assert {p.env['CUDA_DEVICE_ORDER'] for p in plans} == {'PCI_BUS_ID'}


def test_all_processes_of_a_launch_share_a_new_secret_and_listen_on_loopback():
  (secret,) = {p.env['T5X_GPU_JOB_SECRET'] for p in plan(8)}
  assert len(secret) == 64 and {p.env['T5X_GPU_JOB_SECRET'] for p in plan(8)} != {secret}
  assert plan(1, env={'T5X_GPU_JOB_SECRET': 'mine'})[0].env['T5X_GPU_JOB_SECRET'] == 'mine'
  assert {p.env['NCCL_SOCKET_IFNAME'] for p in plan(8)} == {'=lo'}
  assert plan(1, env={'NCCL_SOCKET_IFNAME': 'ib0'})[0].env['NCCL_SOCKET_IFNAME'] == 'ib0'


def test_processes_of_several_hosts_share_the_secret_of_the_environment_or_have_none():
  plans = [plan(2, first=2 * host, count=4)[0].env for host in range(2)]
  assert [rendezvous.secret_from_environment(env) for env in plans] == ['', '']
  env = plan(2, env={'T5X_GPU_JOB_SECRET': 'mine'}, first=2, count=4)[0].env
  assert rendezvous.secret_from_environment(env) == 'mine'


def test_fewer_processes_share_the_gpus_out_in_blocks():
  assert [p.env['JAX_LOCAL_DEVICE_IDS'] for p in plan(2)] == ['0,1,2,3', '4,5,6,7']


def test_visible_devices_are_respected():
  plans = plan(2, env={'CUDA_VISIBLE_DEVICES': '6,7'})
  assert [p.env['JAX_LOCAL_DEVICE_IDS'] for p in plans] == ['0', '1']
  assert own_gpus(GPUS, plans[1].env, [1]) == ('GPU-7',)


@pytest.mark.parametrize('nproc, gpus', [(3, GPUS), (16, GPUS), (2, []), (2, GPUS[:1])])
def test_gpus_that_cannot_be_shared_out_are_an_error(nproc, gpus):
  with raises(ConfigError):
    plan(nproc, gpus=gpus)


@pytest.fixture
def two_sockets(tmp_path):
  """A sysfs of two NUMA nodes with four GPUs each, and 0-7 and 8-15 as cores."""
  for i, gpu in enumerate(GPUS):
    device = tmp_path / 'sys/bus/pci/devices' / gpu.pci_address
    device.mkdir(parents=True)
    (device / 'numa_node').write_text(f'{i // 4}\n')
  for node, cpus in enumerate(('0-7', '8-13,14,15')):
    folder = tmp_path / f'sys/devices/system/node/node{node}'
    folder.mkdir(parents=True)
    (folder / 'cpulist').write_text(cpus + '\n')
  return tmp_path


ALL_CORES = frozenset(range(16))


def bind(addresses: list[str], root: pathlib.Path, allowed=ALL_CORES) -> numa.CoreBinding:
  return numa.bind_to_gpus(addresses, allowed=allowed, root=root)


def test_a_process_runs_on_the_cores_near_its_gpu(two_sockets):
  assert bind([GPUS[0].pci_address], two_sockets).cpus == frozenset(range(8))
  binding = bind([GPUS[7].pci_address], two_sockets)
  assert binding.cpus == frozenset(range(8, 16))
  assert binding.reason == 'NUMA node 1, cores 8-15'


def test_a_process_with_gpus_on_both_sockets_may_use_both(two_sockets):
  assert bind([g.pci_address for g in GPUS], two_sockets).cpus == ALL_CORES


def test_cores_that_the_container_forbids_are_left_out(two_sockets):
  assert bind([GPUS[0].pci_address], two_sockets, frozenset({6, 7, 8})).cpus == {6, 7}
  binding = bind([GPUS[0].pci_address], two_sockets, frozenset({9}))
  assert binding.cpus is None and 'none of the cores' in binding.reason


def test_a_machine_without_numa_is_left_alone(two_sockets):
  (two_sockets / 'sys/bus/pci/devices' / GPUS[0].pci_address / 'numa_node').write_text('-1\n')
  binding = bind([GPUS[0].pci_address], two_sockets)
  assert binding.cpus is None and 'no NUMA node' in binding.reason


def test_a_file_gives_the_cores_of_each_process(tmp_path):
  file = tmp_path / 'cores.txt'
  file.write_text('# two processes\n0: 0-3,8\n1: 4-7\n')
  bindings = numa.read_bindings(str(file), num_processes=2)
  assert [b.cpus for b in bindings] == [frozenset({0, 1, 2, 3, 8}), frozenset({4, 5, 6, 7})]
  with raises(ConfigError):
    numa.read_bindings(str(file), num_processes=3)
  file.write_text('first: 0-3\n')
  with raises(ConfigError):
    numa.read_bindings(str(file), num_processes=1)
  with raises(ConfigError):
    numa.read_bindings(str(tmp_path / 'none'), num_processes=1)


def test_binding_reaches_the_started_process_and_not_the_launcher():
  before = os.sched_getaffinity(0)
  core = min(before)
  with numa.running_on(frozenset({core})):
    seen = subprocess.check_output(
      [sys.executable, '-c', 'import os; print(os.sched_getaffinity(0))'], text=True
    )
  assert seen.strip() == f'{{{core}}}'
  assert os.sched_getaffinity(0) == before
  with raises(ConfigError), numa.running_on({4000}):
    pass


def test_cpu_lists_survive_a_round_trip():
  assert number_ranges(sorted(numa.parse_cpus('0-2,8,10-11\n'))) == '0-2,8,10-11'


# A driver with three GPUs, of which NVML describes two. nvmlPciInfo_t begins with the legacy bus id
# (16 bytes) and five unsigned ints; the bus id follows.
FAKE_NVML = r"""
#include <stdio.h>
#include <string.h>
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  *handle = (void *)(size_t)(index + 1);
  return index == 1 ? 15 : 0;  /* NVML_ERROR_GPU_IS_LOST */
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  return snprintf(uuid, length, "GPU-%d", (int)(size_t)handle - 1) < 0;
}
int nvmlDeviceGetPciInfo_v3(void *handle, char *info) {
  return sprintf(info + 36, "00000000:%dB:00.0", (int)(size_t)handle) < 0;
}
"""


def use_nvml(monkeypatch, library: str) -> None:
  monkeypatch.setattr(pynvml, 'nvmlLib', None)
  monkeypatch.setattr(pynvml, 'CDLL', lambda name: ctypes.CDLL(library))
  pynvml._nvmlGetFunctionPointer_cache.clear()


def test_without_a_driver_there_are_no_gpus(monkeypatch):
  use_nvml(monkeypatch, 'no-such-library.so')
  assert physical_gpus() == []


def test_without_the_package_of_nvml_the_gpus_are_unknown(monkeypatch, caplog):
  monkeypatch.setitem(sys.modules, 'pynvml', None)  # what Python does for a missing module
  assert physical_gpus() == []
  assert 'pip install nvidia-ml-py' in caplog.text


@pytest.mark.skipif(not shutil.which('cc'), reason='no C compiler')
def test_nvml_gives_uuids_and_addresses_of_sysfs_and_skips_a_lost_gpu(
  monkeypatch, tmp_path, caplog
):
  library = tmp_path / 'nvml.so'
  subprocess.run(
    ['cc', '-shared', '-fPIC', '-x', 'c', '-', '-o', library],
    input=FAKE_NVML,
    text=True,
    check=True,
  )
  use_nvml(monkeypatch, str(library))
  assert physical_gpus() == [
    PhysicalGpu('GPU-0', '0000:1b:00.0'),
    PhysicalGpu('GPU-2', '0000:3b:00.0'),
  ]
  assert 'GPU 1' in caplog.text


@pytest.mark.parametrize(
  'visible, ids, want',
  [
    (None, (1,), ('GPU-1',)),
    ('3,5', None, ('GPU-3', 'GPU-5')),
    ('3,5', (1,), ('GPU-5',)),
    ('GPU-6,MIG-x', None, ('GPU-6', 'MIG-x')),
    ('', None, ()),
    ('0', (3,), ()),
  ],
)
def test_the_gpus_of_a_process_are_known_by_uuid(visible, ids, want):
  env = {} if visible is None else {'CUDA_VISIBLE_DEVICES': visible}
  assert own_gpus(GPUS, env, ids) == want
  assert own_gpus(GPUS, {**env, 'JAX_PLATFORMS': 'cpu'}, ids) == ()


def group(program: str, number: int = 3, **options) -> launch.Group:
  plans = plan(number, use_gpus=False, env=dict(os.environ))
  return launch.Group(
    [
      sys.executable,
      '-c',
      "import os, signal, sys, time\nindex = int(os.environ['JAX_PROCESS_INDEX'])\n" + program,
    ],
    plans,
    **options,
  )


def test_lines_come_with_the_number_of_their_process(capfdbinary):
  assert group("print('hello from', index)").wait() == 0
  lines = sorted(capfdbinary.readouterr().out.splitlines())
  assert lines == [f'[{i}] hello from {i}'.encode() for i in range(3)]


def test_a_process_starts_without_loading_a_library_after_the_fork(monkeypatch):
  monkeypatch.setattr(fork_server.ctypes, 'CDLL', None)  # would raise in the new process
  assert group('', 1).wait() == 0


def test_a_reader_that_stalls_gets_all_lines_once_it_reads_again(monkeypatch):
  reading, writing = os.pipe()
  stream = streams.Stream(writing, stall_seconds=0.0)
  stream.outlives = True
  monkeypatch.setitem(streams._NAMES, writing, 'The pipe')
  monkeypatch.setitem(streams._streams, 1, stream)
  read = []
  with open(reading, 'rb') as output, monkeypatch.context() as patch:
    patch.setattr(sys, 'stdout', io.TextIOWrapper(io.BufferedWriter(stream)))
    started = group('for i in range(4000): print("line", i, "of more than a pipe holds")', 1)
    held = array.array('i', [0])
    while held[0] < 60_000:  # of 65,536: the pipe is full
      fcntl.ioctl(reading, termios.FIONREAD, held)
    reader = threading.Thread(target=lambda: read.extend(output))
    reader.start()
    code = started.wait()
    os.close(writing)
    reader.join()
  assert code == 0
  assert read == [b'[0] line %d of more than a pipe holds\n' % i for i in range(4000)]


def test_the_first_failure_ends_all_and_shows_its_last_lines(capfd):
  started = time.monotonic()
  code = group(
    "print('about to fail', index)\n"
    'if index == 1: time.sleep(0.3); print("the reason"); sys.exit(7)\n'
    'time.sleep(60)'
  ).wait()
  assert code == 7 and time.monotonic() - started < 40
  error = capfd.readouterr().err
  assert 'process 1 of 3 failed first (exit code 7)' in error and '  the reason' in error
  assert 'about to fail 0' not in error


def test_a_doctor_that_finds_something_does_not_end_the_others(capfd):
  started = group(
    'if index == 1: sys.exit(1)\ntime.sleep(0.5); print("looked on", index)', end_together=False
  )
  assert started.wait() == 1
  captured = capfd.readouterr()
  assert 'looked on 0' in captured.out and 'looked on 2' in captured.out and not captured.err


@pytest.mark.slow
def test_launch_starts_the_doctor_once_per_process_and_gives_its_exit_code(tmp_path):
  env = {**os.environ, 'XLA_FLAGS': xla_flags()}
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_gpu.launch',
      '--nproc',
      '2',
      '--no_gpu',
      '--module',
      't5x_gpu.doctor',
      '--',
      '--expect_gpus=6',
    ],
    cwd=tmp_path,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    env={**env, 'PYTHONPATH': str(REPOSITORY)},
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 1
  # Six on this machine are three for each of two processes.
  assert '[0] FAIL  devices     jax runs on cpu, 3 expected' in done.stdout
  assert re.search(r'\[1\] \S+, process 1: FAIL  devices     jax runs on cpu, 3', done.stdout)
  assert (
    re.search(r'\[0\] 1\d checks', done.stdout) and 'process 1: FAIL  driver' not in done.stdout
  )


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch):
  monkeypatch.setattr(launch, 'KILL_SECONDS', 0.5)
  started = time.monotonic()
  assert (
    group(
      'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
      'if index == 0: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n'
      'time.sleep(60)',
      2,
    ).wait()
    == 128 + signal.SIGKILL
  )
  assert time.monotonic() - started < 40


@pytest.mark.parametrize('other', [0, 1, 85, 87])
def test_of_processes_that_end_within_one_poll_the_one_that_failed_by_itself_is_named(other, capfd):
  started = group(f'if index == 1: os.kill(os.getpid(), signal.SIGKILL)\nsys.exit({other})')
  for process in started._processes:
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # all have ended
  assert started.wait() == 128 + signal.SIGKILL and started.failed == {1}
  assert 'process 1 of 3 failed first (SIGKILL)' in capfd.readouterr().err


def test_an_agent_does_not_wait_until_the_kernel_has_ended_a_process(monkeypatch):
  are_gone = threading.Event()

  class SlowToEnd(subprocess.Popen):
    def poll(self):
      return super().poll() if are_gone.is_set() else None

    def wait(self, timeout=None):
      are_gone.wait(2)
      return super().wait(timeout)

  with monkeypatch.context() as patch:
    patch.setattr(subprocess, 'Popen', SlowToEnd)
    started = group('time.sleep(600)', 2, at_once=True)
  started.end(0)
  before = time.monotonic()
  assert started.poll() and started.poll() and time.monotonic() - before < 1
  are_gone.set()
  while started.poll():
    time.sleep(0.01)
  assert started.was_ended and started.failed_at is None and started.finish() == 0


def test_processes_that_saved_and_stop_are_not_hurried():
  assert group('time.sleep(0.5 * index); print("saved"); sys.exit(85)').wait() == 85


def test_ctrl_c_reaches_every_process_once(capfd):
  started = group(
    'def stop(*_):\n  print("got it", index); sys.exit(130)\n'
    'signal.signal(signal.SIGINT, stop); print("ready"); time.sleep(60)',
    2,
  )
  output = ''
  while output.count('ready') < 2:
    output += capfd.readouterr().out
    time.sleep(0.01)
  started.forward(signal.SIGINT)
  assert started.wait() == 130
  assert sorted(capfd.readouterr().out.splitlines()) == ['[0] got it 0', '[1] got it 1']


# The beginning of fake workers: `start` counts the starts, from 0.
WORKER = """
import os, signal, sys, time
from t5x_gpu.runtime.progress import ProgressFile
index, start = int(os.environ['JAX_PROCESS_INDEX']), int(os.environ['START'])
"""


def agent(
  program: str, number: int = 3, *, restarts: int = 5, problem: Optional[str] = ''
) -> tuple[launch.Agent, list]:
  """Returns an agent of fake workers, and a list of the environments of each of their starts.

  `problem` is the answer about the GPUs of this host; None for no answer.
  """
  starts = []

  def find_problem() -> str:
    if problem is None:
      raise TimeoutError('no answer')
    return problem

  def start(variables):
    plans = plan(number, use_gpus=False, env={**os.environ, 'PYTHONPATH': str(REPOSITORY)})
    plans = [
      dataclasses.replace(p, env={**p.env, **v, 'START': str(len(starts))})
      for p, v in zip(plans, variables, strict=True)
    ]
    starts.append([p.env for p in plans])
    return launch.Group([sys.executable, '-c', WORKER + program], plans, at_once=True)

  run = launch.Agent(start, num_processes=number, restarts=restarts, find_problem=find_problem)
  return run, starts


def test_a_killed_process_ends_the_others_at_once_and_all_start_again(capfd):
  run, starts = agent(
    'progress = ProgressFile(os.environ, first_step=10 * start)\n'
    'progress.step_done(10 * start + 5)\n'
    'if start == 0 and index == 1: os.kill(os.getpid(), signal.SIGKILL)\n'
    'if start == 0: signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)\n'
    'if start == 1: time.sleep(0.5)'
  )
  began = time.time()
  assert run.wait() == 0 and len(starts) == 2
  first, second = (interruptions.history_of(interruptions.facts(envs[0])) for envs in starts)
  assert first.interruptions == () and second.run == first.run
  (killed,) = second.interruptions
  assert (killed.number, killed.kind, killed.step) == (1, interruptions.KILLED, 5)
  assert killed.cause == f'process 1 on {socket.gethostname()} failed (SIGKILL)'
  assert killed.error == ''
  assert began - 1 < killed.stepped_at <= killed.at + 0.1 < time.time() + 0.1
  captured = capfd.readouterr()
  assert 'process 1 of 3 failed first (SIGKILL)' in captured.err
  assert 'launch: restart 1 of at most 5' in captured.err
  assert 'training again: step 15 is done' in captured.err


def test_a_host_that_has_lost_a_gpu_starts_no_processes_again(capfd):
  run, starts = agent('os.kill(os.getpid(), signal.SIGKILL)', 1, problem='it has 7 GPUs now')
  assert run.wait() == 128 + signal.SIGKILL and len(starts) == 1
  assert f'{socket.gethostname()} cannot take part: it has 7 GPUs now.' in capfd.readouterr().err


def test_failures_on_a_full_disk_differ_by_their_steps(tmp_path, monkeypatch, capfd):
  with small_disk(tmp_path / 'disk', size='256k') as disk:
    monkeypatch.setattr(tempfile, 'tempdir', str(disk))
    run, starts = agent(
      f'os.system("cat /dev/zero > {disk}/filler 2>&-")\n'
      'ProgressFile(os.environ, first_step=10 * start).step_done(10 * start + 5)\n'
      'if start < 2: os.kill(os.getpid(), signal.SIGKILL)',
      1,
    )
    assert run.wait() == 0 and len(starts) == 3, capfd.readouterr().err
  failed = interruptions.history_of(interruptions.facts(starts[2][0])).interruptions
  assert [each.step for each in failed] == [5, 15]


def test_a_host_whose_gpus_cannot_be_asked_continues_with_a_warning(capfd):
  run, starts = agent('if start == 0: os.kill(os.getpid(), signal.SIGKILL)', 1, problem=None)
  assert run.wait() == 0 and len(starts) == 2
  assert 'launch: the GPUs were not checked: TimeoutError: no answer.' in capfd.readouterr().err


def test_a_failure_that_repeats_ends_the_run_with_its_exit_code(capfd, monkeypatch):
  monkeypatch.setattr(launch, 'KILL_SECONDS', 0.5)  # the others report nothing
  run, starts = agent(
    'ProgressFile(os.environ, first_step=0).step_done(7)\n'
    'if index == 1: print("the reason"); sys.exit(7)\n'
    'time.sleep(600)'
  )
  assert run.wait() == 7 and len(starts) == 2
  (failed,) = interruptions.history_of(interruptions.facts(starts[1][0])).interruptions
  assert (failed.kind, failed.error) == (interruptions.CRASHED, 'the reason')
  error = capfd.readouterr().err
  assert 'not starting again: it failed twice in a row after step 7' in error
  assert error.count('  the reason') == 2


def test_processes_that_lost_another_one_have_time_to_name_it(capfd):
  run, _ = agent(
    'if start == 1: sys.exit(0)\n'
    'if index == 1: sys.exit(1)\n'
    'time.sleep(0.5); print("lost process 1"); sys.exit(87)'
  )
  assert run.wait() == 0
  assert capfd.readouterr().out.count('lost process 1') == 2


@pytest.mark.parametrize('wanted, code', [(None, 1), ('78', 78), ('5', 5)])
def test_a_mistake_in_the_configuration_ends_the_run_with_the_code_asked_for(
  wanted, code, monkeypatch, capfd
):
  if wanted is None:
    monkeypatch.delenv('T5X_GPU_CONFIG_ERROR_CODE', raising=False)
  else:
    monkeypatch.setenv('T5X_GPU_CONFIG_ERROR_CODE', wanted)
  run, starts = agent('sys.exit(int(os.environ["T5X_GPU_CONFIG_ERROR_CODE"]))', 2)
  assert run.wait() == code and len(starts) == 1
  assert 'another start would end with the same error' in capfd.readouterr().err


@pytest.mark.parametrize(
  'state, number, code',
  [
    ('', signal.SIGTERM, 85),
    ('', signal.SIGUSR1, 85),
    ('', signal.SIGINT, 130),
    ('ProgressFile(os.environ, first_step=0)\n', signal.SIGTERM, 128 + signal.SIGTERM),
  ],
)
def test_a_stop_signal_ends_the_run_even_if_it_kills_a_process(state, number, code, capfd):
  run, starts = agent(state + 'print("ready"); time.sleep(600)', 2)

  def stop() -> None:
    output = ''
    while output.count('ready') < 2:
      output += capfd.readouterr().out
      time.sleep(0.01)
    run.forward(number)

  stopper = threading.Thread(target=stop)
  stopper.start()
  assert run.wait() == code and len(starts) == 1
  stopper.join()


def test_a_signal_handler_leaves_the_processes_to_the_main_loop(monkeypatch):
  run, _ = agent('time.sleep(600)', 1)
  sent = []
  monkeypatch.setattr(launch.Group, '_send', lambda group, number: sent.append(number))
  run._group = group = launch.Group([sys.executable, '-c', ''], plan(1, use_gpus=False))
  run.forward(signal.SIGTERM)  # may come in the middle of a poll of the same process
  assert not sent
  group.wait()


def test_a_stop_signal_between_two_starts_prevents_the_second(monkeypatch):
  run, starts = agent('sys.exit(1)', 1)
  monkeypatch.setattr(launch, '_log', lambda text: run.forward(signal.SIGTERM))
  assert run.wait() == 85 and len(starts) == 1


def test_children_of_a_crashed_process_are_killed_before_the_next_start(tmp_path):
  os.mkfifo(pipe := tmp_path / 'pipe')
  with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as output:
    run, _ = agent(
      'import subprocess\n'
      f'if start == 0: subprocess.Popen("sleep 30; echo survived", shell=True, '
      f'stdout=open({str(pipe)!r}, "w"), stderr=subprocess.DEVNULL)\n'
      'if start == 0: sys.exit(7)',
      1,
    )
    assert run.wait() == 0
    os.set_blocking(output.fileno(), True)
    assert output.read() == ''  # once all writers are gone


def test_launch_may_open_as_many_files_as_the_system_allows(monkeypatch):
  monkeypatch.delenv('JAX_PLATFORMS')
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
  try:
    with pytest.raises(ConfigError):  # a host without GPUs
      launch.main(['--nproc=64', '--', '--gin_file=x.gin'])
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_launch_imports_the_modules_of_the_run_ends_it_with_85(number, tmp_path):
  with subprocess.Popen(
    [sys.executable, '-m', 't5x_gpu.launch', '--restarts=3', '--', '--gin_file=x.gin'],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
    stdout=subprocess.PIPE,
    text=True,
  ) as run:
    assert read_until(run, 'process 0') == 'launch: process 0: CPU; not bound: no GPU\n'
    run.send_signal(number)
    assert run.wait(DEADLINE_SECONDS) == 85


# A launch whose child has left a child behind.
ORPHAN = """
import os, pathlib, signal, subprocess, time
from t5x_gpu import launch
launch.not_as_process_1()
signal.signal(signal.SIGTERM, lambda *_: os._exit(85))
subprocess.run(['sh', '-c', 'sleep 0.1 & sleep 0.1 &'])
while (left := [p for p in pathlib.Path('/proc').glob('[0-9]*') if int(p.name) > os.getpid()]):
  time.sleep(0.01)
print('none left', os.getpid(), os.getppid(), flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which('unshare'), reason='needs root, unshare')
def test_process_1_of_a_container_leaves_no_zombies_and_passes_signals_on(tmp_path):
  isolated = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
  with subprocess.Popen(
    [*isolated, sys.executable, '-c', ORPHAN],
    cwd=tmp_path,
    env={**os.environ, 'PYTHONPATH': str(REPOSITORY)},
    stdout=subprocess.PIPE,
    text=True,
  ) as container:
    assert re.search(r'none left \d+ 1$', read_until(container, 'none left'))
    process_1 = subprocess.check_output(['pgrep', '-P', str(container.pid)], text=True)
    os.kill(int(process_1), signal.SIGTERM)
    assert container.wait(DEADLINE_SECONDS) == 85


def test_a_script_may_turn_restarts_and_spares_off_by_0(tmp_path):
  flags = ['--spares=0', f'--write_scripts={tmp_path}']
  assert launch.main(['--restarts=0', *flags]) == 0
  with raises(ConfigError):
    launch.main(['--restarts=-1', *flags])


def test_restarts_are_for_training_alone():
  with raises(ConfigError):
    launch.main(['--restarts=3', '--module=t5x_gpu.bench', '--', '--gin_file=x.gin'])


def project_launch(project: Project, *flags: str, **macros) -> subprocess.Popen:
  env = {**os.environ, 'XLA_FLAGS': xla_flags()}
  env.update(PYTHONPATH=str(REPOSITORY))
  return subprocess.Popen(
    [
      sys.executable,
      '-m',
      't5x_gpu.launch',
      '--nproc',
      '2',
      '--no_gpu',
      *flags,
      '--',
      *project.argv(**macros),
    ],
    cwd=project.folder,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )


def read_until(process: subprocess.Popen, words: str) -> str:
  text = ''
  for line in process.stdout:
    text += line
    if words in line:
      return text
  raise AssertionError(f'{words!r} never came:\n{text}')


@pytest.mark.slow
def test_a_killed_run_of_two_processes_ends_with_the_losses_of_one(tmp_path):
  alone = Project(_folder(tmp_path, 'alone'))
  assert alone.run(num_devices=1, TRAIN_STEPS=40).code == 0
  project = Project(_folder(tmp_path, 'two'))

  # kill -9 of process 1, as the kernel does when memory runs out.
  with project_launch(project, TRAIN_STEPS=40) as run:
    assert 'processes: 2 on 1 host, no GPUs' in read_until(run, 'step 10/')
    while not project.steps():
      time.sleep(0.01)
    pids = subprocess.check_output(['pgrep', '-P', str(run.pid)], text=True).split()
    os.kill(int(pids[1]), signal.SIGKILL)
    output = run.communicate(timeout=DEADLINE_SECONDS)[0]
  assert run.returncode == 128 + signal.SIGKILL, output
  assert 'process 1 of 2 failed first (SIGKILL)' in output
  assert project.steps()[-1] < 40

  with project_launch(project, TRAIN_STEPS=40) as run:
    output = run.communicate(timeout=DEADLINE_SECONDS)[0]
  assert run.returncode == 0, output
  losses = project.metrics()
  assert list(losses) == list(range(1, 41))
  assert losses == pytest.approx(alone.metrics(), rel=1e-5)


@pytest.mark.slow
def test_a_run_whose_process_is_killed_continues_with_the_losses_of_an_unbroken_one(tmp_path):
  alone = Project(_folder(tmp_path, 'alone'))
  assert alone.run(num_devices=1, TRAIN_STEPS=30).code == 0
  project = Project(_folder(tmp_path, 'two'))
  settings = {
    'TRAIN_STEPS': 30,
    'SAVE_PERIOD': 30,
    'CheckpointConfig.local_checkpoint_dir': tmp_path / 'local',
    'CheckpointConfig.local_period': 5,
  }

  code_file = tmp_path / 'code'
  with project_launch(project, '--restarts=5', f'--code_file={code_file}', **settings) as run:
    read_until(run, 'step 10/')
    children = subprocess.check_output(['pgrep', '-P', str(run.pid)], text=True).split()
    os.kill(int(children[0]), signal.SIGKILL)
    read_until(run, 'process 0 of 2 failed first (SIGKILL)')
    read_until(run, 'launch: restart 1 of at most 5')
    read_until(run, 'Promoted local checkpoint')
    assert 'The last interruption (process 0 on' in read_until(run, 'launch: training again')
    output = run.stdout.read()
  assert run.wait(DEADLINE_SECONDS) == 0, output
  assert code_file.read_text() == '0\n'
  losses = project.metrics()
  assert list(losses) == list(range(1, 31))
  assert losses == pytest.approx(alone.metrics(), rel=1e-5)
  assert project.steps()[-1] == 30 and not (project.model_dir / 'run.lock').exists()

  (cost,) = costs_of(read_run(project.model_dir).accounts)
  assert cost.kind == interruptions.KILLED and cost.step >= 10
  assert cost.repeated_steps == cost.step - 10 and cost.noticing is not None
  printed = subprocess.check_output(
    [sys.executable, '-m', 't5x_gpu.report', project.model_dir], cwd=REPOSITORY, text=True
  )
  assert '1 interruption cost 0:' in printed and 'failed (SIGKILL)' in printed
  assert 'failed (SIGKILL)' in (project.model_dir / 'report.html').read_text()


@pytest.mark.slow
def test_processes_with_different_flags_end_with_an_error(tmp_path):
  """Else they would train, each by its own configuration, until a collective hangs."""
  address = launch.free_address()

  def start(index: int, **macros):
    return Project(_folder(tmp_path, str(index))).start(
      '--process_count=2',
      f'--process_index={index}',
      f'--coordinator_address={address}',
      MODEL_DIR=tmp_path / 'model',
      **macros,
    )

  with start(0, SAVE_PERIOD=3) as one, start(1, SAVE_PERIOD=4) as two:
    assert (one.finish(), two.finish()) == (1, 1), one.err + two.err
  for run in (one, two):
    assert 'ConfigError: The configuration is not the same on all 2 processes' in run.err
    assert 'Config.period": "3"' in run.err and 'Config.period": "4"' in run.err
  assert not (tmp_path / 'model').exists()


def _folder(parent: pathlib.Path, name: str) -> pathlib.Path:
  folder = parent / name
  folder.mkdir()
  return folder


def test_a_time_that_arrives_late_is_not_a_clock_that_differs():
  late = dict(own=1007.0, other=1000.0)
  assert launch.seconds_ahead(**late, latency=0.1) == 7.0
  assert launch.seconds_ahead(**late, latency=6.0) == 0.0
  assert launch.seconds_ahead(own=993.0, other=1000.0, latency=60.0) == -7.0
