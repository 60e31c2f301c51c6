"""A server imports the modules of a program once, and forks its processes."""

import errno
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from t5x_gpu.runtime.cluster.fork_server import ForkedProcess, ForkServer, is_supported
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY

# JAX warns of forks in a process that has imported it: this one may have, `launch` does not.
pytestmark = pytest.mark.filterwarnings('ignore:os.fork.. was called:RuntimeWarning')

# `slow` is imported by the server, `program` runs in each process.
MODULES = {
  'slow': 'import os\nIMPORTED_BY = os.getpid()\n',
  'program': """
import os, pathlib, signal, subprocess, sys, time
import slow
print(sys.argv[1:], os.environ.get('NAME'), os.environ.get('GONE'), sorted(os.sched_getaffinity(0)))
print(slow.IMPORTED_BY == os.getppid(), os.getsid(0) == os.getpid(), __name__)
print(sorted(os.listdir('/proc/self/fd')), flush=True)
if os.environ['NAME'] == 'wait':
  time.sleep(600)
if os.environ['NAME'] in ('parent', 'ended parent'):
  child = subprocess.Popen(['sleep', '600'])
  pathlib.Path(os.environ['CHILD']).write_text(str(child.pid))
if os.environ['NAME'] == 'parent':
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(child.poll() is not None))  # still needs it
  time.sleep(600)
raise SystemExit(7)
""",
}


@pytest.fixture
def server(tmp_path):
  for name, text in MODULES.items():
    (tmp_path / f'{name}.py').write_text(text)
  path = os.pathsep.join((str(tmp_path), str(REPOSITORY)))
  env = {**os.environ, 'PYTHONPATH': path, 'NAME': 'server', 'GONE': 'still here'}
  started = ForkServer('program', ['--a', 'b c'], imports=('json',), env=env)
  assert started.wait_until_ready(DEADLINE_SECONDS)
  started.env = {name: value for name, value in env.items() if name != 'GONE'}
  yield started
  started.close()


LOSES_ITS_PARENT = """
import os, signal, time
from t5x_gpu.runtime.cluster.fork_server import end_with_parent
parent = os.getpid()
if os.fork() == 0:
  while os.getppid() == parent:
    time.sleep(0.01)
  end_with_parent(signal.SIGTERM, parent=parent)
  print('continues')
"""


def test_a_process_whose_parent_is_killed_before_it_asks_for_a_signal_ends():
  command = [sys.executable, '-c', LOSES_ITS_PARENT]
  done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def wait_for(condition) -> None:
  deadline = time.monotonic() + DEADLINE_SECONDS
  while not condition():
    assert time.monotonic() < deadline
    time.sleep(0.01)


def lines(process: ForkedProcess) -> list[str]:
  with process.stdout as text:
    return text.read().decode().splitlines()


def test_a_process_runs_the_program_with_its_own_environment_cores_and_session(server):
  processes = [server.start({**server.env, 'NAME': name}, [0]) for name in ('first', 'second')]
  for process, name in zip(processes, ('first', 'second'), strict=True):
    assert lines(process) == [
      f"['--a', 'b c'] {name} None [0]",
      'True True __main__',
      "['0', '1', '2', '3']",  # standard input, output, error, and the folder that listdir reads
    ]
    assert process.wait() == 7 == process.returncode


def test_a_killed_process_shows_its_signal_and_takes_its_session_with_it(server):
  process = server.start({**server.env, 'NAME': 'wait'})
  assert process.poll() is None and os.getsid(process.pid) == process.pid
  os.killpg(process.pid, signal.SIGKILL)
  assert process.wait() == -signal.SIGKILL
  process.stdout.close()
  process.send_signal(signal.SIGTERM)  # does nothing: its number may belong to another process


def test_a_server_that_is_lost_ends_its_processes_and_says_so(server):
  process = server.start({**server.env, 'NAME': 'wait'})
  server._popen.kill()
  assert process.wait() == -signal.SIGKILL
  process.stdout.close()
  with pytest.raises(OSError):
    server.start(server.env)
  wait_for(lambda: not pathlib.Path(f'/proc/{process.pid}/exe').exists())


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_stop_signal_for_all_processes_of_a_job_reaches_those_that_train(server, number):
  process = server.start({**server.env, 'NAME': 'wait'})
  os.kill(server._popen.pid, number)
  again = server.start({**server.env, 'NAME': 'again'})  # the server has seen the signal
  assert again.wait() == 7
  again.stdout.close()
  assert process.poll() is None
  process.send_signal(number)
  assert process.wait() == (130 if number == signal.SIGINT else -number)
  process.stdout.close()


def test_no_process_outlives_the_program_that_started_the_server(server, tmp_path):
  program = (
    'import os\nfrom t5x_gpu.runtime.cluster.fork_server import ForkServer\n'
    'server = ForkServer("program", [], imports=(), env=os.environ)\n'
    'assert server.wait_until_ready(60)\n'
    'print(server.start({**os.environ, "NAME": "wait"}).pid, flush=True)\n'
    'os.kill(os.getpid(), 9)\n'
  )
  done = subprocess.run(
    [sys.executable, '-c', program], env=server.env, stdout=subprocess.PIPE, text=True
  )
  pid = int(done.stdout)
  wait_for(lambda: not pathlib.Path(f'/proc/{pid}/exe').exists())


@pytest.mark.parametrize('number', [signal.SIGKILL, signal.SIGTERM])
def test_no_child_outlives_the_program_that_started_the_server(server, tmp_path, number):
  program = (
    'import os, sys, time\n'
    'from t5x_gpu.runtime.cluster.fork_server import ForkServer\n'
    'server = ForkServer("program", [], imports=(), env=os.environ)\n'
    'assert server.wait_until_ready(60)\n'
    'for name in ("parent", "ended parent"):\n'
    '  env = {**os.environ, "NAME": name, "CHILD": name}\n'
    f'  process = server.start(env, None, {int(number)})\n'
    '  while not os.path.exists(name) or not open(name).read(): time.sleep(0.01)\n'
    '  if name != "parent": process.wait()\n'
    'os.kill(os.getpid(), 9)\n'
  )
  subprocess.run([sys.executable, '-c', program], env=server.env, cwd=tmp_path)
  for name in ('ended parent', 'parent'):
    pid = int((tmp_path / name).read_text())
    wait_for(lambda pid=pid: not pathlib.Path(f'/proc/{pid}/exe').exists())


def test_a_server_that_cannot_import_is_not_ready(tmp_path):
  missing = ForkServer('t5x_gpu.errors', [], imports=('no_such_module',), env=os.environ)
  assert not missing.wait_until_ready(DEADLINE_SECONDS)
  missing.close()


# Names what its `--data` imports, as training does once it has read its configuration.
ASKED = """
import os, sys
from t5x_gpu.runtime.cluster import fork_server
if fork_server.answers(lambda: [sys.argv[1]]):
  raise SystemExit(1)
data = sys.modules.get(sys.argv[1])
print(data is not None and data.IMPORTED_BY == os.getppid(), fork_server._ASKED in os.environ)
"""
THREAD = (
  'import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()'
)


@pytest.fixture
def asking(tmp_path):
  """Returns a server whose processes name a module."""
  for name, text in {'asked': ASKED, 'data': MODULES['slow'], 'thread': THREAD}.items():
    (tmp_path / f'{name}.py').write_text(text)
  env = {**os.environ, 'PYTHONPATH': os.pathsep.join((str(tmp_path), str(REPOSITORY)))}
  started = []

  def start(name: str) -> ForkServer:
    started.append(ForkServer('asked', [name], imports=(), env=env, asks=True))
    started[-1].env = env
    return started[-1]

  yield start
  for server in started:
    server.close()


def test_the_server_imports_what_a_process_names(asking):
  server = asking('data')
  assert server.wait_until_ready(DEADLINE_SECONDS)
  process = server.start(server.env)
  assert lines(process) == ['True False'] and process.wait() == 0


def test_a_server_that_an_import_makes_unsafe_ends_and_says_so(asking, capfd):
  assert not asking('thread').wait_until_ready(DEADLINE_SECONDS)
  assert 'launch: thread started threads or CUDA' in capfd.readouterr().err


@pytest.mark.tf
def test_tensorflow_can_be_imported_before_a_fork():
  program = (
    'import os\nfrom t5x_gpu.runtime.cluster import fork_server\n'
    'import jax\nbefore = fork_server._unsafe_to_fork()\n'
    'from t5x_gpu.data import tf_import\nprint(fork_server._unsafe_to_fork() <= before)\n'
    'if (pid := os.fork()) == 0:\n'
    '  from t5x_gpu.data.tf_runtime import tf\n'
    '  rows = tf.data.Dataset.range(9).map(lambda x: x + 1, num_parallel_calls=4).prefetch(2)\n'
    '  print(int(sum(row.numpy() for row in rows)), jax.numpy.ones(3).sum(), flush=True)\n'
    '  os._exit(0)\n'
    'os.waitpid(pid, 0)\n'
  )
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONWARNINGS': 'ignore', 'PYTHONUNBUFFERED': '1'}
  done = subprocess.check_output(
    [sys.executable, '-c', program], cwd=REPOSITORY, env=env, text=True, timeout=DEADLINE_SECONDS
  )
  assert done.split() == ['True', '45', '3.0']


def test_an_older_kernel_and_another_system_start_processes_without_a_server(monkeypatch):
  assert is_supported()

  def forbidden(pid):
    raise OSError(errno.ENOSYS, 'Function not implemented')

  monkeypatch.setattr(os, 'pidfd_open', forbidden)
  assert not is_supported()
  monkeypatch.delattr(os, 'pidfd_open')
  assert not is_supported()


def test_what_training_imports_later_is_in_memory_before_its_first_start():
  program = (
    'import sys\nfrom t5x_gpu import launch\nfrom t5x_gpu.runtime.cluster import fork_server\n'
    'for name in launch.LATER_IMPORTS: __import__(name)\n'
    'fork_server._import_as("t5x_gpu.train")\nbefore = set(sys.modules)\n'
    'import t5x_gpu.train\n'
    'print(sorted(set(sys.modules) - before), any(n.startswith("tensorflow") for n in before))\n'
  )
  done = subprocess.check_output([sys.executable, '-c', program], cwd=REPOSITORY, text=True)
  assert done.splitlines()[-1] == "['t5x_gpu.train'] False"
