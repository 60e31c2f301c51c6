"""What users do, each as commands in a world, with the numbers that come out."""

import dataclasses
import json
import os
import pathlib
import shlex
import time
from collections.abc import Callable
from typing import Any, Optional

from t5x_gpu.runtime.preemption import EXIT_PREEMPTED
from tests.helpers_tokenizers import Tokenizer
from tests.helpers_train import REPOSITORY
from tests.helpers_xla import xla_flags

DEADLINE_SECONDS = 300

GIN = """
from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
from t5x_gpu.data import batches
from t5x_gpu.models import config

include 'gin_configs/models/llama3_2_1b.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'

config.TransformerConfig:
  vocab_size = 288
  num_layers = 1
  embed_dim = 16
  num_heads = 4
  num_kv_heads = 2
  head_dim = 4
  query_pre_attn_scalar = 4.0
  mlp_dim = 32
  scan_unroll = 1

BATCH_SIZE = 4
DATA_MODULE = 't5x_gpu.data.seqio_batches'
DTYPE = 'float32'
LEARNING_RATE = 1e-2
LOG_PERIOD = 1
SAVE_PERIOD = 2
TASK_FEATURE_LENGTHS = {'targets': 32}
TRAIN_STEPS = 4
WARMUP_STEPS = 2
batches.DatasetConfig.module = %DATA_MODULE
"""


class Failed(AssertionError):
  """A command did not end as its flow needs; what it printed is the message."""


@dataclasses.dataclass
class Place:
  """Where the commands of one world run.

  Attributes:
    warm: the process that forks the commands (tests/helpers_warm.py).
    base: folder of the gin file and the logs.
    cwd: working folder of the commands.
    runs: folder of everything that the commands write, as the command line names it.
    data: MIXTURE_OR_TASK_NAME.
    gin_file: as the command line names it.
    tokenizer: in the folder `tokenizer` inside `runs`; None for bytes.
    macros: further values of the gin file.
    environment: variables of the commands; None removes one.
    before: Python that each command runs first: limits, signals, closed files.
    stdout: where the commands print, or None for the log.
    between: called between the two trainings of a flow.
    is_requeued: a training that stops before its last step and saves is started again, as by Slurm.
  """

  warm: Any
  base: pathlib.Path
  cwd: pathlib.Path
  runs: str
  data: str
  gin_file: str
  tokenizer: Optional[Tokenizer] = None
  macros: dict[str, Any] = dataclasses.field(default_factory=dict)
  environment: dict[str, Optional[str]] = dataclasses.field(default_factory=dict)
  before: str = ''
  stdout: Optional[pathlib.Path] = None
  between: Optional[Callable[[], None]] = None
  is_requeued: bool = False

  def folder(self, name: str) -> str:
    """Returns the folder `name` inside `runs`, as the command line names it."""
    return self.file(name) + ('/' if self.runs.endswith('/') else '')

  def file(self, name: str) -> str:
    return f'{self.runs.rstrip("/")}/{name}'

  def real(self, name: str) -> pathlib.Path:
    path = self.file(name)
    home = self.environment.get('HOME') or ''
    return self.cwd / (path.replace('~', home, 1) if path.startswith('~/') else path)

  def gin(self, **macros: Any) -> list[str]:
    values = {'MIXTURE_OR_TASK_NAME': self.data, **self.macros, **macros}
    if self.tokenizer:
      values['VOCABULARY'] = self.tokenizer.vocabulary.format(self.file('tokenizer'))
    return [f'--gin_file={self.gin_file}', *(f'--gin.{k}={v}' for k, v in values.items())]

  def start(self, command: str, *argv: str, **environment: str) -> 'Started':
    """Returns a started `python -m t5x_gpu.COMMAND ARGV`."""
    log = self.base / f'{len(list(self.base.glob("*.log"))):02}_{command}.log'
    log.touch()
    log.chmod(0o666)
    variables = {
      **os.environ,
      'XLA_FLAGS': xla_flags(1),
      'PYTHONPATH': os.pathsep.join([str(REPOSITORY), str(self.base)]),
      'JAX_COMPILATION_CACHE_DIR': str(self.warm.compiled),
      'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
      **environment,
      **self.environment,
    }
    script = (
      f'{self.before}\nimport sys\nsys.path.insert(0, {str(self.base)!r})\n'
      f'sys.argv = {["t5x_gpu", command, *argv]!r}\n'
      'from t5x_gpu.__main__ import main\nmain()\n'
    )
    process = self.warm.start(
      argv,
      cwd=self.cwd,
      environment={k: v for k, v in variables.items() if v is not None},
      out=self.stdout or log,
      err=log,
      script=script,
    )
    return Started(process, log, shlex.join([command, *argv]))

  def run(self, command: str, *argv: str, **environment: str) -> None:
    """Runs a command, which must end with code 0."""
    code = None
    while code is None or code == EXIT_PREEMPTED and self.is_requeued:
      started = self.start(command, *argv, **environment)
      code = started.finish()
    if code != 0:
      raise Failed(f'{started.line}: exit code {code}\n{started.text}')


@dataclasses.dataclass
class Started:
  process: Any
  log: pathlib.Path
  line: str

  @property
  def text(self) -> str:
    return self.log.read_text(errors='replace')

  def finish(self) -> int:
    return self.process.wait(DEADLINE_SECONDS)

  def wait_for(self, path: pathlib.Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
      code = self.process.poll()
      if code is not None or time.monotonic() > deadline:
        self.process.kill()
        raise Failed(f'{self.line}: no {path.name}, exit code {code}\n{self.text}')
      time.sleep(0.01)


def train_and_resume(place: Place) -> Any:
  """Leaves a run in the folder `a`, for the flows of RUN_FIRST."""
  argv = place.gin(MODEL_DIR=place.folder('a'))
  place.run('train', *argv, '--gin.TRAIN_STEPS=2')
  if place.between:
    place.between()
  place.run('train', *argv)
  return _losses(place.real('a'))


def kill_and_resume(place: Place) -> Any:
  argv = place.gin(MODEL_DIR=place.folder('killed'), DATA_MODULE='held_data')
  module = {'HELD_MODULE': 't5x_gpu.data.seqio_batches'}
  held = place.cwd / 'held'
  running = place.start('train', *argv, HOLD_AFTER='3', **module)
  running.wait_for(held)
  running.process.kill()
  running.finish()
  held.unlink()
  if place.between:
    place.between()
  place.run('train', *argv, **module)
  return _losses(place.real('killed'))


def train(place: Place) -> Any:
  place.run('train', *place.gin(MODEL_DIR=place.folder('trained')))
  return _losses(place.real('trained'))


def evaluate(place: Place) -> Any:
  place.run('eval', *place.gin(MODEL_DIR=place.folder('a')), '--batches=1')
  return _records(place.real('a') / 'eval' / 'validation.jsonl')[1:]


def infer(place: Place) -> Any:
  return _infer(place, 'out.jsonl')


def _infer(place: Place, output: str, *flags: str) -> Any:
  place.real('prompts.txt').write_text('text 1\ntext 2\n', encoding='utf-8')
  place.run(
    'infer',
    *place.gin(MODEL_DIR=place.folder('a')),
    *flags,
    f'--prompts={place.file("prompts.txt")}',
    f'--output={place.file(output)}',
    '--gin.DecodingConfig.max_decode_length=4',
  )
  return _records(place.real(output))


def convert_there_and_back(place: Place) -> Any:
  exported, back = place.folder('exported'), place.folder('back')
  place.run('convert', f'--from={place.folder("a")}', f'--to={exported}', '--check=own')
  place.run('convert', f'--from={exported}', f'--to={back}', '--check=own')
  return _infer(place, 'again.jsonl', f'--checkpoint={back}')


def reshard(place: Place) -> Any:
  place.run('reshard', f'--from={place.folder("a")}', f'--to={place.folder("b")}')
  place.run('train', *place.gin(MODEL_DIR=place.folder('b'), TRAIN_STEPS=6))
  return _records(place.real('b') / 'metrics.jsonl')[-1]['train/loss']


def prepare_and_train(place: Place) -> Any:
  rows = place.folder('rows')
  place.run(
    'prepare', *place.gin(MODEL_DIR='unused'), f'--output={rows}', '--workers=1', '--shards=1'
  )
  argv = place.gin(MODEL_DIR=place.folder('p'), MIXTURE_OR_TASK_NAME=f'prepared:{rows}')
  place.run('train', *argv)
  return _losses(place.real('p')), _counted(place.real('rows'))


def _counted(rows: pathlib.Path) -> tuple[int, int]:
  """Returns how many texts and tokens prepared rows have, in all splits."""
  indices = [json.loads(path.read_text()) for path in rows.glob('*/index.json')]
  members = [member for index in indices for member in index['members'].values()]
  shards = [shard for member in members for shard in member['shards']]
  return (
    sum(sum(shard['lengths'].values()) for shard in shards),
    sum(shard['tokens'] for shard in shards),
  )


def launch_two(place: Place) -> Any:
  argv = place.gin(MODEL_DIR=place.folder('two'))
  place.run('launch', '--nproc=2', '--no_gpu', '--', *argv)
  return _losses(place.real('two'))


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def _losses(folder: pathlib.Path) -> dict[int, float]:
  """Returns step -> loss; each step came exactly once."""
  records = [r for r in _records(folder / 'metrics.jsonl') if 'train/loss' in r]
  steps = [r['step'] for r in records]
  if steps != list(range(1, len(steps) + 1)):
    raise Failed(f'{folder}/metrics.jsonl has the steps {steps}')
  return {r['step']: r['train/loss'] for r in records}


# They begin with the run that `train_and_resume` leaves.
RUN_FIRST = ('evaluate', 'infer', 'convert_there_and_back', 'reshard')

FLOWS = {
  flow.__name__: flow
  for flow in (
    train,
    train_and_resume,
    kill_and_resume,
    evaluate,
    infer,
    convert_there_and_back,
    reshard,
    prepare_and_train,
    launch_two,
  )
}
