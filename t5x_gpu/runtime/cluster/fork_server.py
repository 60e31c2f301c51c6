"""A process that imports the modules of a run once, and forks its processes.

`launch` starts it on each host, before the first process of the run. A forked process is as
`python -m MODULE ARGV` with the modules already in memory: a start skips the imports. A
host opens the files of Python's modules once, however many processes it has and however often they
start again. The server itself never touches a device.

What the data of a run need is known from its configuration, which must not be read in the server.
So the server asks first: a process that runs as usual until it has read it (`answers`).

A request is a message {'set', 'unset', 'cpus', 'if_lost'} with the descriptor of a standard output.
The server sends {'ready'}, then {'pid'} or {'error'} for each request, and {'pid', 'status'} for
each end. If its parent is killed, it ends the processes, and their children after them.
"""

import ast
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, Optional

from t5x_gpu.runtime.cluster import members
from t5x_gpu.runtime.process_exit import STOP_SIGNALS

_SOCKET = 'T5X_GPU_FORK_SERVER_SOCKET'
_ASKED = 'T5X_GPU_FORK_SERVER_ASKS'  # descriptor of the answer
_LARGEST = 2**20  # bytes of a message
_UNKNOWN = -signal.SIGKILL  # exit code of a process whose server is gone
_PR_SET_PDEATHSIG = 1  # prctl(2)
_Handlers = Mapping[int, Any]
_prctl = getattr(ctypes.CDLL(None), 'prctl', None)


def end_with_parent(number: int = signal.SIGTERM, *, parent: int) -> None:
  """Sends this new process a signal if its parent is killed; Linux only.

  Otherwise it would continue to train without a terminal, unnoticed. This may run between fork and
  exec, where a lock that another thread held at the fork stays locked: no import, no print.

  Args:
    number: the signal.
    parent: pid of the parent, from before the fork. If it is gone by now, this process ends.
  """
  if _prctl is not None:
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
      os._exit(128 + number)


def is_supported() -> bool:
  """Returns whether this system can watch a process by a descriptor: Linux 5.3 or newer."""
  try:
    os.close(os.pidfd_open(os.getpid()))
  except (AttributeError, OSError):  # another system, an older kernel, or a container forbids it
    return False
  return True


def answers(modules: Callable[[], Iterable[str]]) -> bool:
  """Returns whether the fork server runs this process to ask, and if so tells it these modules.

  The modules must start no threads and touch no GPU. The process has to end then.
  """
  descriptor = os.environ.get(_ASKED)
  if descriptor is not None:
    os.write(int(descriptor), ','.join(modules()).encode())
  return descriptor is not None


class ForkedProcess:
  """A process of a fork server, used like `subprocess.Popen`.

  Attributes:
    pid: process number; it leads a session.
    returncode: exit code, minus the signal if one ended it; None before `poll` has seen the end.
    stdout: standard output and standard error.
  """

  def __init__(self, server: 'ForkServer', pid: int, stdout: BinaryIO):
    self._server, self.pid, self.stdout = server, pid, stdout
    self.returncode: Optional[int] = None
    self._descriptor = os.pidfd_open(pid)

  def poll(self) -> Optional[int]:
    if self.returncode is None:
      self.returncode = self._server.ended(self.pid)
      if self.returncode is None and not self._server.is_alive():
        self.send_signal(signal.SIGKILL)  # it has no parent that would tell its end
        self.returncode = _UNKNOWN
      if self.returncode is not None:
        os.close(self._descriptor)
    return self.returncode

  def send_signal(self, number: int) -> None:
    if self.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(self._descriptor, number)

  def wait(self) -> int:
    while (code := self.poll()) is None:
      time.sleep(0.01)
    return code


class ForkServer:
  """The server's parent.

  Args:
    module, argv: what each process runs: `python -m MODULE ARGV`. The server imports what this
      module imports at its top, and not the module itself, which runs as `__main__`.
    imports: further modules that the server imports.
    env: environment of the imports, which may read it. A process can have other values for
      variables that are read later.
    asks: whether the module calls `answers`.
  """

  def __init__(
    self,
    module: str,
    argv: Sequence[str],
    *,
    imports: Sequence[str],
    env: Mapping[str, str],
    asks: bool = False,
  ):
    self._env = dict(env)
    self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    self._ended: dict[int, int] = {}
    self._is_ready = False
    parent = os.getpid()
    with theirs:
      # Its arguments are the processes' own, so that tools find them by these.
      self._popen = subprocess.Popen(
        [sys.executable, '-m', __name__, ','.join(imports), module, *argv],
        env={**env, _SOCKET: str(theirs.fileno()), **({_ASKED: ''} if asks else {})},
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: end_with_parent(signal.SIGKILL, parent=parent),
      )

  def is_alive(self) -> bool:
    return self._popen.poll() is None

  def wait_until_ready(self, seconds: float) -> bool:
    """Returns whether the server has imported everything; False if it ended, or needs longer."""
    deadline = time.monotonic() + seconds
    while not self._is_ready and self.is_alive() and time.monotonic() < deadline:
      self._take(self._receive(timeout=0.1))
    return self._is_ready

  def start(
    self,
    env: Mapping[str, str],
    cpus: Optional[Iterable[int]] = None,
    if_lost: int = signal.SIGTERM,
  ) -> ForkedProcess:
    """Returns a new process.

    Args:
      env: its environment.
      cpus: the cores that it is bound to; None for all.
      if_lost: signal that it gets if the server or the server's parent is killed.
    Raises:
      OSError: the server is gone or not ready, or the system allows no further process.
    """
    if not self._is_ready or not self.is_alive():
      raise OSError('the fork server does not run')
    request = {
      'set': {name: value for name, value in env.items() if self._env.get(name) != value},
      'unset': [name for name in self._env if name not in env],
      'cpus': None if cpus is None else sorted(cpus),
      'if_lost': if_lost,
    }
    reading, writing = os.pipe()
    stdout = os.fdopen(reading, 'rb')
    try:
      socket.send_fds(self._socket, [json.dumps(request).encode()], [writing])
      while True:
        answer = self._receive(timeout=1.0)
        if answer is None and not self.is_alive():
          raise OSError('the fork server has ended')
        if answer is not None and 'error' in answer:
          raise OSError(answer['error'])
        if answer is not None and 'status' not in answer:
          return ForkedProcess(self, answer['pid'], stdout)
        self._take(answer)
    except BaseException:
      stdout.close()
      raise
    finally:
      os.close(writing)

  def ended(self, pid: int) -> Optional[int]:
    """Returns the exit code of a process that has ended; None before."""
    while (answer := self._receive(timeout=0)) is not None:
      self._take(answer)
    return self._ended.get(pid)

  def close(self) -> None:
    """Ends the server, and with SIGTERM the processes that it has started."""
    self._popen.kill()
    self._popen.wait()
    self._socket.close()

  def _receive(self, timeout: float) -> Optional[dict[str, Any]]:
    if not select.select([self._socket], [], [], timeout)[0]:
      return None
    try:
      text = self._socket.recv(_LARGEST)
    except ConnectionError:
      return None
    return json.loads(text) if text else None

  def _take(self, answer: Optional[dict[str, Any]]) -> None:
    if answer is not None and 'ready' in answer:
      self._is_ready = True
    elif answer is not None:
      self._ended[answer['pid']] = answer['status']


def _outlive_signals() -> _Handlers:
  """Makes this process ignore stop signals; returns the handlers before.

  Slurm may send them to all processes of a job, and `launch` passes them on to the processes of
  this one, which have to save: its end would kill them.
  """
  heeded = [n for n in STOP_SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
  return {number: signal.signal(number, lambda *_: None) for number in heeded}


def _heed_signals(handlers: _Handlers) -> None:
  for number, handler in handlers.items():
    signal.signal(number, handler)


def _serve(link: socket.socket, handlers: _Handlers) -> None:
  """Forks processes until the parent is gone. Returns in each of them."""
  server = os.getpid()
  _prctl(_PR_SET_PDEATHSIG, 0)  # from now on, the end of the link tells the end of the parent
  running: dict[int, int] = {}  # descriptor: process
  # Processes that have ended stay in the system's table, so that their numbers name their groups
  # and nothing else, until the parent has killed the groups.
  ended: list[int] = []
  if_lost: dict[int, int] = {}  # process: signal
  while True:
    for ready in select.select([link, *running], [], [])[0]:
      if ready is not link:
        pid = running.pop(ready)
        os.close(ready)
        ended.append(pid)
        _send(link, {'pid': pid, 'status': _status(pid)})
        continue
      text, descriptors, *_ = socket.recv_fds(link, _LARGEST, 1)
      if not text:
        _end(ended, {pid: if_lost[pid] for pid in running.values()})
        sys.exit()
      (output,) = descriptors
      request = json.loads(text)
      if not running:
        for pid in ended:
          os.waitpid(pid, 0)
        ended.clear()
      waiting, has_session = os.pipe()
      try:
        with warnings.catch_warnings(action='ignore'):  # JAX has no threads before its backend
          pid = os.fork()
      except OSError as error:
        _send(link, {'error': str(error)})
      else:
        if pid == 0:
          _heed_signals(handlers)
          link.close()
          for descriptor in (waiting, *running):
            os.close(descriptor)
          _become(request, output, server)
          os.close(has_session)
          return
        os.close(has_session)
        os.read(waiting, 1)  # until it can be killed with its session
        running[os.pidfd_open(pid)], if_lost[pid] = pid, request['if_lost']
        _send(link, {'pid': pid})
      os.close(waiting)
      os.close(output)


def _status(pid: int) -> int:
  """Returns the exit code of a child that has ended or will, minus the signal; it stays a child."""
  found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
  return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _end(ended: Iterable[int], running: Mapping[int, int]) -> None:
  """Ends processes with their signals; then kills what is left of their groups, and of ended ones.

  A process that has to save may still need its children.
  """
  for pid, number in running.items():
    (os.killpg if number == signal.SIGKILL else os.kill)(pid, number)
  for pid in (*ended, *running):
    _status(pid)
    os.killpg(pid, signal.SIGKILL)


def _send(link: socket.socket, message: Mapping[str, Any]) -> None:
  with contextlib.suppress(ConnectionError):  # the parent is gone: the link ends
    link.send(json.dumps(message).encode())


def _become(request: Mapping[str, Any], output: int, server: int) -> None:
  """Gives a process that `server` has forked its own session, cores, output and environment."""
  end_with_parent(request['if_lost'], parent=server)
  os.setsid()
  if request['cpus'] is not None:
    os.sched_setaffinity(0, request['cpus'])
  os.dup2(output, 1)
  os.dup2(output, 2)
  os.close(output)
  for name in request['unset']:
    os.environ.pop(name, None)
  os.environ.update(request['set'])


def _import_as(module: str) -> None:
  """Carries out the import statements of a module."""
  path = importlib.util.find_spec(module).origin
  with open(path, encoding='utf-8') as file:
    tree = ast.parse(file.read())
  tree.body = [line for line in tree.body if isinstance(line, ast.Import | ast.ImportFrom)]
  exec(compile(tree, path, 'exec'), {})


def _run(module: str, argv: Sequence[str]) -> None:
  sys.argv = [module, *argv]
  runpy.run_module(module, run_name='__main__', alter_sys=True)


def _answer_of(module: str, argv: Sequence[str], handlers: _Handlers) -> str:
  """Returns what a process of the module answers; '' if it fails, as the run then will, too."""
  reading, writing = os.pipe()
  server = os.getpid()
  with warnings.catch_warnings(action='ignore'):
    pid = os.fork()
  if pid == 0:
    try:
      _heed_signals(handlers)
      end_with_parent(parent=server)
      os.environ[_ASKED] = str(writing)
      silent = os.open(os.devnull, os.O_WRONLY)
      os.dup2(silent, 1)
      os.dup2(silent, 2)
      _run(module, argv)
    finally:
      os._exit(0)
  os.close(writing)
  with open(reading, encoding='utf-8') as answer:
    text = answer.read()
  os.waitpid(pid, 0)
  return text


def _unsafe_to_fork() -> tuple[int, bool]:
  """Returns the number of threads, which a fork loses, and whether CUDA is loaded."""
  with open('/proc/self/maps', encoding='utf-8', errors='replace') as maps:
    return len(os.listdir('/proc/self/task')), 'libcuda.so' in maps.read()


def main(imports: str, module: str, *argv: str) -> None:
  """Serves; in a forked process, runs `module`."""
  link = socket.socket(fileno=int(os.environ.pop(_SOCKET)))
  asks = os.environ.pop(_ASKED, None) is not None
  handlers = _outlive_signals()
  for name in filter(None, imports.split(',')):
    importlib.import_module(name)
  _import_as(module)
  if asks and (further := _answer_of(module, argv, handlers)):
    before = _unsafe_to_fork()
    for name in further.split(','):
      importlib.import_module(name)
    if _unsafe_to_fork() > before:
      sys.exit(f'launch: {further} started threads or CUDA: each process imports by itself.')
  members.code_facts()  # keeps what it reads about these modules
  gc.collect()
  gc.freeze()  # a collection in a process would copy the pages of all these modules
  _send(link, {'ready': True})
  _serve(link, handlers)
  _run(module, argv)


if __name__ == '__main__':
  main(*sys.argv[1:])
