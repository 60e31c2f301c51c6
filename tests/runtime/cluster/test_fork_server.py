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
import os, signal, sys, time
import slow
print(sys.argv[1:], os.environ.get('NAME'), os.environ.get('GONE'), sorted(os.sched_getaffinity(0)))
print(slow.IMPORTED_BY == os.getppid(), os.getsid(0) == os.getpid(), __name__)
print(sorted(os.listdir('/proc/self/fd')), flush=True)
if os.environ['NAME'] == 'wait':
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


def test_a_server_that_cannot_import_is_not_ready(tmp_path):
  missing = ForkServer('t5x_gpu.errors', [], imports=('no_such_module',), env=os.environ)
  assert not missing.wait_until_ready(DEADLINE_SECONDS)
  missing.close()


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
