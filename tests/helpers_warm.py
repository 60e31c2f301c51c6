"""Runs that start in a second: one process imports everything, and forks each of them.

    with WarmStart(compiled=folder) as warm:
      project = Project(tmp_path, warm=warm)
      with project.start(TRAIN_STEPS=4) as run: ...

`python -m tests.helpers_warm` reads a JSON object per line. {"argv", "cwd", "environment", "out",
"err", "script"} forks `python -m t5x_gpu.train ARGV` and answers with its pid; {"poll": PID} is
answered by its exit code, or null while it runs. No device is touched before the fork.
"""

import gc
import importlib
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional, Self

from t5x_gpu import cli, launch, train
from t5x_gpu.metrics.writers import TensorBoardWriter
from tests.helpers_autograph import Repeater, note_conversions
from tests.helpers_train import REPOSITORY

# Lowering imports it, in a third of a CPU second. Not every jaxlib has it.
LOWERING = 'jaxlib.mlir.dialects.mhlo'


class Forked:
  """A run, with an interface like `subprocess.Popen`."""

  def __init__(self, warm: 'WarmStart', pid: int):
    self._warm, self.pid, self._code = warm, pid, None

  def poll(self) -> Optional[int]:
    if self._code is None:
      self._code = self._warm.ask({'poll': self.pid})
    return self._code

  def wait(self, timeout: float = 180) -> int:
    deadline = time.monotonic() + timeout
    while self.poll() is None:
      if time.monotonic() > deadline:
        raise subprocess.TimeoutExpired(f'pid {self.pid}', timeout)
      time.sleep(0.005)
    return self._code

  def send_signal(self, number: int) -> None:
    if self.poll() is None:  # until it is polled a pid is not used again
      os.kill(self.pid, number)

  def kill(self) -> None:
    self.send_signal(signal.SIGKILL)


class WarmStart:
  """The process that forks runs. As a context manager, all of them end with the block.

  Args:
    compiled: where all of them keep what XLA compiles.
    imports: further modules that the process imports.
  """

  def __init__(self, compiled: pathlib.Path, *, imports: Sequence[str] = ()):
    environment = {
      **os.environ,
      'PYTHONPATH': str(REPOSITORY),
      'JAX_PLATFORMS': 'cpu',
      'JAX_COMPILATION_CACHE_DIR': str(compiled),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    }
    self.compiled = compiled
    self._popen = subprocess.Popen(
      [sys.executable, '-m', 'tests.helpers_warm', *imports],
      env=environment,
      text=True,
      cwd=REPOSITORY,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      start_new_session=True,
    )

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    os.killpg(self._popen.pid, signal.SIGKILL)  # the runs as well
    self._popen.communicate()

  def ask(self, request: Mapping[str, Any]) -> Any:
    self._popen.stdin.write(json.dumps(request) + '\n')
    self._popen.stdin.flush()
    return json.loads(self._popen.stdout.readline())

  def start(
    self,
    argv: Sequence[str],
    *,
    cwd: pathlib.Path,
    environment: Mapping[str, str],
    out: pathlib.Path,
    err: pathlib.Path,
    script: str = '',
  ) -> Forked:
    """Returns a started run.

    Args:
      argv: after `python -m t5x_gpu.train`.
      cwd, environment: of the run.
      out, err: files to which it writes.
      script: in the place of `-m t5x_gpu.train`.
    """
    return Forked(
      self,
      self.ask(
        {
          'argv': list(argv),
          'cwd': str(cwd),
          'out': str(out),
          'err': str(err),
          'script': script,
          'environment': dict(environment),
        }
      ),
    )


def _run(request: Mapping[str, Any]) -> None:
  """Becomes a run."""
  os.chdir(request['cwd'])
  for descriptor, path, mode in (
    (0, os.devnull, os.O_RDONLY),
    (1, request['out'], os.O_WRONLY | os.O_APPEND),
    (2, request['err'], os.O_WRONLY | os.O_APPEND),
  ):
    os.dup2(os.open(path, mode), descriptor)
  note_conversions(_conversions())
  os.environ.clear()
  os.environ.update(request['environment'])
  sys.path.insert(0, request['cwd'])
  sys.argv = ['t5x_gpu.train', *request['argv']]
  if request['script']:
    exec(request['script'], {'__name__': '__main__'})
  else:
    cli.run_main(train.main)


def _conversions() -> pathlib.Path:
  return pathlib.Path(os.environ['JAX_COMPILATION_CACHE_DIR']).with_suffix('.autograph')


def main() -> None:
  lowering = (LOWERING,) if importlib.util.find_spec(LOWERING) else ()
  for name in (*launch.LATER_IMPORTS, *lowering, *sys.argv[1:]):
    importlib.import_module(name)
  TensorBoardWriter('unused')  # imports what writes event files
  gc.collect()
  gc.freeze()  # a collection in a run would copy the pages of all these modules
  conversions = Repeater(_conversions())
  for line in sys.stdin:
    request = json.loads(line)
    if 'poll' in request:
      pid, status = os.waitpid(request['poll'], os.WNOHANG)
      answer = os.waitstatus_to_exitcode(status) if pid else None
    else:
      conversions.repeat()
      answer = os.fork()
      if answer == 0:
        _run(request)
        return
    print(json.dumps(answer), flush=True)


if __name__ == '__main__':
  main()
