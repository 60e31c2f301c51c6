"""A very small project in a temporary folder, and runs of it: in this process, or in their own.

    project = Project(tmp_path)
    result = project.run('--gin.TRAIN_STEPS=4')          # here, over eight fake devices
    with project.start(DROPOUT_RATE=0.1) as run:         # python -m t5x_gpu.train
      run.wait_for(run.held)
      run.kill()

Everything waits for a condition with a deadline, never for a time.
"""

import contextlib
import dataclasses
import io
import logging
import os
import pathlib
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Optional, Self
from unittest import mock

import jax
from jax.experimental.compilation_cache import compilation_cache

from t5x_gpu import cli, train
from t5x_gpu.config import gin_loader
from t5x_gpu.metrics.writers import read_json_lines
from t5x_gpu.run.check import PlannedRun, check, plan_run
from t5x_gpu.run.config import Run
from t5x_gpu.run.data import open_data
from t5x_gpu.runtime import process_exit, topology
from t5x_gpu.runtime.watchdog import Watchdog, WatchdogConfig
from tests.helpers_xla import xla_flags

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
DEADLINE_SECONDS = 180

# Sizes that eight devices divide in every way: batch, heads, embed, mlp, vocab.
TINY_GIN = """# A model that compiles in two seconds and takes milliseconds per step.
from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
from t5x_gpu.data import batches
from t5x_gpu.models import config

include 'gin_configs/models/decoder_demo.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'

config.TransformerConfig:
  vocab_size = 264
  num_layers = 1
  embed_dim = 16
  num_heads = 8
  head_dim = 4
  mlp_dim = 32
  scan_unroll = 1

DATA_MODULE = 't5x_gpu.data.synthetic'
BATCH_SIZE = 8
EVAL_STEPS = 2
LEARNING_RATE = 1e-2
LOG_PERIOD = 1
MIXTURE_OR_TASK_NAME = 'python_source'
MODEL_DIR = 'model'
SAVE_PERIOD = 10
TASK_FEATURE_LENGTHS = {'targets': 32}
TRAIN_STEPS = 20
WARMUP_STEPS = 2
batches.DatasetConfig.module = %DATA_MODULE
"""

# The end of a user's own data module, which has batches of another one, `_inner`.
WATCHED_BATCHES = """
vocabulary = getattr(_inner, 'vocabulary', None)  # synthetic batches have no text


class WatchedBatches:

  def __init__(self, batches):
    self._batches = batches
    self._taken = 0

  def __getattr__(self, name):
    return getattr(self._batches, name)

  def __iter__(self):
    return self

  def __next__(self):
    self._taken += 1
    before(self._taken)
    return next(self._batches)


def open_batches(config, *, spec, feature_converter, repeat=True):
  batches = _inner.open_batches(config, spec=spec, feature_converter=feature_converter,
                                repeat=repeat)
  return WatchedBatches(batches) if repeat else batches
"""

HELD_DATA = (
  '''"""Batches of $HELD_MODULE; after $HOLD_AFTER of them training waits until the file `go`
appears, and says so by the file `held`; both are in $HOLD_IN, or in the working folder."""

import importlib
import os
import pathlib
import time

_inner = importlib.import_module(os.environ.get('HELD_MODULE', 't5x_gpu.data.synthetic'))


def before(number):
  if number == int(os.environ.get('HOLD_AFTER', -1)) + 1:
    folder = pathlib.Path(os.environ.get('HOLD_IN', ''))
    (folder / 'held').touch()
    while not (folder / 'go').exists():
      time.sleep(0.005)

'''
  + WATCHED_BATCHES
)


@dataclasses.dataclass(frozen=True)
class Result:
  """How a run in this process ended."""

  code: int
  out: str
  err: str


class Process:
  """A run in a separate process. As a context manager it ends with the block."""

  def __init__(self, folder: pathlib.Path, start: Callable[[pathlib.Path, pathlib.Path], Any]):
    self._folder = folder
    self._out, self._err = folder / 'stdout.txt', folder / 'stderr.txt'
    self.held = folder / 'held'
    self.held.unlink(missing_ok=True)
    (folder / 'go').unlink(missing_ok=True)
    for path in (self._out, self._err):
      path.write_bytes(b'')
    self.popen = start(self._out, self._err)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *exc_info: Any) -> None:
    if self.popen.poll() is None:
      self.popen.kill()
    self.popen.wait()

  @property
  def out(self) -> str:
    return self._out.read_text()

  @property
  def err(self) -> str:
    return self._err.read_text()

  def wait_for(
    self, condition: Callable[[], Any] | pathlib.Path, *, seconds: float = DEADLINE_SECONDS
  ) -> None:
    """Returns once `condition` is true (or the file exists) while the process still runs."""
    if isinstance(condition, pathlib.Path):
      condition = condition.exists
    deadline = time.monotonic() + seconds
    while not condition():
      assert self.popen.poll() is None, f'ended before it came so far:\n{self.out}\n{self.err}'
      assert time.monotonic() < deadline, f'not within {seconds} s:\n{self.out}\n{self.err}'
      time.sleep(0.002)

  def let_go(self) -> None:
    """Lets held batches continue."""
    (self._folder / 'go').touch()

  def kill(self) -> None:
    """kill -9."""
    self.popen.send_signal(signal.SIGKILL)
    assert self.popen.wait(DEADLINE_SECONDS) == -signal.SIGKILL

  def finish(self) -> int:
    """Returns the exit code, after the run has ended by itself."""
    return self.popen.wait(DEADLINE_SECONDS)


class Project:
  """A folder with `tiny.gin` and a user's module `held_data`, and the runs of it.

  All runs of a test session keep what XLA compiles next to their folders: a run that some test has
  made before starts in half a second.

  Args:
    folder: where all is.
    gin: text of tiny.gin.
    warm: a WarmStart (tests/helpers_warm.py) that forks the runs of `start`.
    compiled: where its runs keep what XLA compiles; None for next to `folder`.
  """

  def __init__(
    self,
    folder: pathlib.Path,
    *,
    gin: str = TINY_GIN,
    warm: Any = None,
    compiled: Optional[pathlib.Path] = None,
  ):
    self.folder, self._warm = folder, warm
    self.gin_file = folder / 'tiny.gin'
    self.gin_file.write_text(gin)
    (folder / 'held_data.py').write_text(HELD_DATA)
    self.model_dir = folder / 'model'
    self._compiled = compiled or folder.parent / 'compiled'

  def argv(self, *flags: str, **macros: Any) -> list[str]:
    """Returns the command line after `python -m t5x_gpu.train`."""
    macros = {'MODEL_DIR': self.model_dir, **macros}
    return [f'--gin_file={self.gin_file}', *(f'--gin.{k}={v}' for k, v in macros.items()), *flags]

  def run(self, *flags: str, num_devices: int = 8, **macros: Any) -> Result:
    """Returns how a run in this process ended, over the first `num_devices` fake devices."""
    with compiled_kept_in(self._compiled):
      return run_here(lambda: train.main(self.argv(*flags, **macros)), num_devices=num_devices)

  def check(self, *, num_devices: int = 8, **macros: Any) -> PlannedRun:
    """Returns the run once it and its data are checked: all that a dry run does."""
    args = cli.parse_args('train', '', self.argv(**macros))
    with devices(num_devices), contextlib.redirect_stdout(io.StringIO()):
      loaded = gin_loader.load(args.gin_files, bindings=args.bindings)
      checked = check(gin_loader.configured(loaded, Run))
      with checked.model_dir:
        watchdog = Watchdog(WatchdogConfig(), process_index=0, process_count=1)
        plan = plan_run(checked, watchdog=watchdog)
        open_data(plan)
    return plan

  def start(
    self,
    *flags: str,
    script: Optional[str] = None,
    hold_before: int = -1,
    held_module: str = 't5x_gpu.data.synthetic',
    num_devices: int = 1,
    **macros: Any,
  ) -> Process:
    """Returns a started process; `script` takes the place of `-m t5x_gpu.train`.

    It is forked from `warm` if the project has one.
    """
    environment = {**os.environ, 'XLA_FLAGS': xla_flags(num_devices)}
    environment.update(
      JAX_PLATFORMS='cpu',
      PYTHONPATH=str(REPOSITORY),
      PYTHONUNBUFFERED='1',
      HOLD_AFTER=str(hold_before),
      HELD_MODULE=held_module,
    )
    environment.update(
      JAX_COMPILATION_CACHE_DIR=str(self._compiled), JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS='0'
    )
    argv = self.argv(*flags, **macros)

    def popen(out: pathlib.Path, err: pathlib.Path) -> Any:
      if self._warm is not None:
        return self._warm.start(
          argv, cwd=self.folder, environment=environment, out=out, err=err, script=script or ''
        )
      begin = ['-m', 't5x_gpu.train'] if script is None else ['-c', script]
      with open(out, 'wb') as stdout, open(err, 'wb') as stderr:
        return subprocess.Popen(
          [sys.executable, *begin, *argv],
          cwd=self.folder,
          env=environment,
          stdout=stdout,
          stderr=stderr,
          stdin=subprocess.DEVNULL,
        )

    return Process(self.folder, popen)

  def metrics(
    self, key: str = 'train/loss', *, model_dir: Optional[pathlib.Path] = None
  ) -> dict[int, float]:
    """Returns step -> value. Fails if a line is torn or a step comes twice."""
    path = (model_dir or self.model_dir) / 'metrics.jsonl'
    lines = len(path.read_bytes().splitlines())  # counted first: a live run may write on
    records = read_json_lines(path)
    assert len(records) >= lines, 'a torn line'
    pairs = [(r['step'], r[key]) for r in records if key in r]
    assert len(dict(pairs)) == len(pairs), f'{key}: a step came twice: {pairs}'
    return dict(pairs)

  def steps(self) -> list[int]:
    """Returns the committed checkpoints by the names of their folders."""
    return sorted(
      int(p.name.split('_')[1])
      for p in self.model_dir.glob('checkpoint_*')
      if p.name.split('_')[1].isdigit()
    )


def run_here(main: Callable[[], Optional[int]], *, num_devices: int = 8) -> Result:
  """Returns exit code and output of `main` as `cli.run_main` runs it, in this process."""
  out, err = io.StringIO(), io.StringIO()
  code: Any = None
  # A run whose save has failed leaves at once, and would end the tests.
  stays = mock.patch.object(process_exit, 'leave', lambda code, *, failed: sys.exit(code))
  with (
    stays,
    devices(num_devices),
    quiet_logging(),
    warnings.catch_warnings(),
    contextlib.redirect_stdout(out),
    contextlib.redirect_stderr(err),
  ):
    try:
      cli.run_main(main)
    except SystemExit as e:
      code = e.code
  return Result(code, out.getvalue(), err.getvalue())


@contextlib.contextmanager
def devices(number: int) -> Iterator[None]:
  """Within, runs find only the first `number` devices."""
  with topology.only_on(jax.devices()[:number]):
    yield


@contextlib.contextmanager
def compiled_kept_in(folder: pathlib.Path) -> Iterator[None]:
  """Within, jax keeps everything it compiles in `folder`."""
  values = {
    'jax_compilation_cache_dir': str(folder),
    'jax_persistent_cache_min_compile_time_secs': 0.0,
  }
  before = {name: getattr(jax.config, name) for name in values}
  for name, value in values.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # jax looks at the folder only once
  try:
    yield
  finally:
    for name, value in before.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def quiet_logging() -> Iterator[None]:
  """Puts back afterwards what `logging_setup.setup` changes for a whole process."""
  root = logging.getLogger()
  handlers, level = list(root.handlers), root.level
  try:
    yield
  finally:
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)


def without_ledger(files: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
  """Returns a `listing` without the goodput ledger, where every start of a run leaves a line."""
  return {name: value for name, value in files.items() if not name.endswith('goodput.jsonl')}


def listing(folder: pathlib.Path) -> dict[str, tuple[int, int]]:
  """Returns each file under `folder`, except bytecode, with size and modification time."""
  return {
    str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns)
    for p in sorted(folder.rglob('*'))
    if p.is_file() and p.suffix != '.pyc'
  }
