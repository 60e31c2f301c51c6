"""What users do, each as commands in a world, with the numbers that come out."""

import dataclasses
import json
import os
import pathlib
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Optional

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
ROW_TOKENS = 32  # of TASK_FEATURE_LENGTHS; a longer text becomes several rows


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
    inputs: folder of the gin file, the texts and the prompts, as the command line names it.
    contents: the texts.
    form, texts, columns: MIXTURE_OR_TASK_NAME is FORM:TEXTS COLUMNS, TEXTS a name in `inputs`.
    trained: folder of the run for the flows of RUN_FIRST; the folder `a` unless it is set.
    tokenizer: in the folder `tokenizer` inside `runs`; None for bytes.
    macros: further values of the gin file.
    environment: variables of the commands; None removes one.
    before: Python that each command runs first: limits, signals, closed files.
    is_forked: whether a command is a fork of `warm`; otherwise it is a new Python, without
      `before`.
    stdout: where the commands print, or None for the log.
    between: called between the two trainings of a flow.
    during: called while a training waits for its next batch.
  """

  warm: Any
  base: pathlib.Path
  cwd: pathlib.Path
  runs: str
  inputs: str
  contents: Sequence[str]
  form: str = 'jsonl'
  texts: str = 'texts.jsonl'
  columns: str = ''
  trained: Optional[str] = None
  tokenizer: Optional[Tokenizer] = None
  macros: dict[str, Any] = dataclasses.field(default_factory=dict)
  environment: dict[str, Optional[str]] = dataclasses.field(default_factory=dict)
  before: str = ''
  is_forked: bool = True
  stdout: Optional[pathlib.Path] = None
  between: Optional[Callable[[], None]] = None
  during: Optional[Callable[[], None]] = None

  @property
  def data(self) -> str:
    return f'{self.form}:{self.input(self.texts)}{self.columns}'

  @property
  def run_folder(self) -> str:
    return self.trained or self.folder('a')

  def folder(self, name: str) -> str:
    """Returns the folder `name` inside `runs`, as the command line names it."""
    return self.file(name) + ('/' if self.runs.endswith('/') else '')

  def file(self, name: str) -> str:
    return f'{self.runs.rstrip("/")}/{name}'

  def input(self, name: str) -> str:
    return f'{self.inputs.rstrip("/")}/{name}'

  def real(self, path: str) -> pathlib.Path:
    """Returns a path of the command line as the test's process names it."""
    home = self.environment.get('HOME') or ''
    return self.cwd / (path.replace('~', home, 1) if path.startswith('~/') else path)

  def gin(self, **macros: Any) -> list[str]:
    values = {'MIXTURE_OR_TASK_NAME': self.data, **self.macros, **macros}
    if self.tokenizer:
      values['VOCABULARY'] = self.tokenizer.vocabulary.format(self.file('tokenizer'))
    gin_file = self.input('world.gin')
    return [f'--gin_file={gin_file}', *(f'--gin.{k}={v}' for k, v in values.items())]

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
    environment = {k: v for k, v in variables.items() if v is not None}
    out = self.stdout or log
    if self.is_forked:
      process = self.warm.start(
        argv, cwd=self.cwd, environment=environment, out=out, err=log, script=script
      )
    else:
      with open(out, 'ab') as stdout, open(log, 'ab') as stderr:
        process = subprocess.Popen(
          [sys.executable, '-m', 't5x_gpu', command, *argv],
          cwd=self.cwd,
          env=environment,
          stdout=stdout,
          stderr=stderr,
        )
    return Started(process, log, shlex.join([command, *argv]))

  def run(self, command: str, *argv: str, **environment: str) -> None:
    """Runs a command, which must end with code 0."""
    self.start(command, *argv, **environment).succeed()


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

  def succeed(self) -> None:
    if (code := self.finish()) != 0:
      raise Failed(f'{self.line}: exit code {code}\n{self.text}')

  def wait_for(self, path: pathlib.Path) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists():
      code = self.process.poll()
      if code is not None or time.monotonic() > deadline:
        self.process.kill()
        raise Failed(f'{self.line}: no {path.name}, exit code {code}\n{self.text}')
      time.sleep(0.01)


def _train(place: Place, folder: str, *, after: int = 1, **macros: Any) -> None:
  """Trains to the end; the texts change after `after` batches if the world has `during`."""
  argv = place.gin(MODEL_DIR=folder, **macros)
  if place.during is None:
    place.run('train', *argv)
    return
  running = held(place, argv, after=after)
  place.during()
  (place.base / 'go').touch()
  running.succeed()
  (place.base / 'go').unlink()


def held(place: Place, argv: Sequence[str], *, after: int) -> Started:
  """Returns a training that has read `after` batches and waits until the file `go` appears."""
  argv = [*argv, '--gin.DATA_MODULE=held_data']
  module = 't5x_gpu.data.seqio_batches'
  running = place.start(
    'train', *argv, HOLD_AFTER=str(after), HOLD_IN=str(place.base), HELD_MODULE=module
  )
  running.wait_for(place.base / 'held')
  (place.base / 'held').unlink()
  return running


def train(place: Place) -> Any:
  """Leaves a run in the folder `a`, for the flows of RUN_FIRST."""
  _train(place, place.folder('a'))
  return _losses(place, place.folder('a'))


def kill_and_resume(place: Place) -> Any:
  """Leaves a run in the folder `a`, too."""
  running = held(place, place.gin(MODEL_DIR=place.folder('a')), after=3)
  running.wait_for(place.real(place.file('a/checkpoint_2')))
  running.process.kill()
  running.finish()
  if place.between:
    place.between()
  _train(place, place.folder('a'), after=0)  # from a local checkpoint, one batch is left
  return _losses(place, place.folder('a'))


def evaluation_while_training(place: Place) -> Any:
  """Returns the last evaluation of the run in the folder `a`."""
  return _evaluation(_records(place.real(place.file('a/metrics.jsonl'))))


def evaluate(place: Place) -> Any:
  place.run('eval', *place.gin(MODEL_DIR=place.run_folder))
  return _evaluation(_records(place.real(place.run_folder) / 'eval' / 'validation.jsonl'))


def _evaluation(records: Sequence[dict[str, Any]]) -> dict[str, float]:
  [*_, last] = [r for r in records if 'eval/loss' in r]
  return {key: last[key] for key in ('eval/accuracy', 'eval/loss')}


def infer(place: Place) -> Any:
  return _infer(place, place.run_folder, 'out.jsonl')


def _infer(place: Place, checkpoint: str, output: str) -> Any:
  place.real(place.input('prompts.txt')).write_text('text 1\nsays größe\n', encoding='utf-8')
  place.run(
    'infer',
    *place.gin(MODEL_DIR=place.run_folder),
    f'--checkpoint={checkpoint}',
    f'--prompts={place.input("prompts.txt")}',
    f'--output={place.file(output)}',
    '--gin.DecodingConfig.max_decode_length=4',
  )
  return _records(place.real(place.file(output)))


def convert_there_and_back(place: Place) -> Any:
  exported, back = place.folder('exported'), place.folder('back')
  place.run('convert', f'--from={place.run_folder}', f'--to={exported}', '--check=own')
  place.run('convert', f'--from={exported}', f'--to={back}', '--check=own')
  return _infer(place, back, 'again.jsonl')


def reshard(place: Place) -> Any:
  place.run('reshard', f'--from={place.run_folder}', f'--to={place.folder("b")}', '--step=2')
  _train(place, place.folder('b'))
  return _losses(place, place.run_folder) | _losses(place, place.folder('b'), first=3)


def prepare(place: Place) -> Any:
  """Returns how many prepared rows and tokens there are, in all splits."""
  argv = place.gin(MODEL_DIR='unused')
  rows = place.folder('rows')
  place.run('prepare', *argv, f'--output={rows}', '--workers=1', '--shards=1')
  indices = [json.loads(path.read_text()) for path in place.real(rows).glob('*/index.json')]
  members = [member for index in indices for member in index['members'].values()]
  shards = [shard for member in members for shard in member['shards']]
  return (
    sum(sum(shard['lengths'].values()) for shard in shards),
    sum(shard['tokens'] for shard in shards),
  )


def train_on_prepared(place: Place) -> Any:
  argv = place.gin(
    MODEL_DIR=place.folder('p'), MIXTURE_OR_TASK_NAME=f'prepared:{place.folder("rows")}'
  )
  place.run('train', *argv)
  return _losses(place, place.folder('p'))


def launch_two(place: Place) -> Any:
  argv = place.gin(MODEL_DIR=place.folder('two'))
  place.run('launch', '--nproc=2', '--no_gpu', '--', *argv)
  return _losses(place, place.folder('two'))


def _records(path: pathlib.Path) -> list[dict[str, Any]]:
  return [json.loads(line) for line in path.read_text(encoding='utf-8').splitlines()]


def _losses(place: Place, folder: str, *, first: int = 1) -> dict[int, float]:
  """Returns step -> loss of a run; each step from `first` came exactly once."""
  path = place.real(folder) / 'metrics.jsonl'
  records = [r for r in _records(path) if 'train/loss' in r]
  steps = [r['step'] for r in records]
  if steps != list(range(first, first + len(steps))):
    raise Failed(f'{path} has the steps {steps}')
  return {r['step']: r['train/loss'] for r in records}


FLOWS = {
  flow.__name__: flow
  for flow in (
    train,
    kill_and_resume,
    evaluation_while_training,
    evaluate,
    infer,
    convert_there_and_back,
    reshard,
    prepare,
    train_on_prepared,
    launch_two,
  )
}
# Flow -> the flow whose files it needs.
RUN = 'kill_and_resume'
FIRST = {
  **dict.fromkeys(('evaluate', 'infer', 'convert_there_and_back', 'reshard'), RUN),
  'evaluation_while_training': 'train',
  'train_on_prepared': 'prepare',
}
# Flow -> the flow of the plain world that has its numbers; for `prepare`, the tokenizer's library.
SAME_AS = {
  'train': 'train',
  'kill_and_resume': 'train',
  'reshard': 'train',
  'launch_two': 'train',
  'evaluate': 'evaluation_while_training',
  'infer': 'infer',
  'convert_there_and_back': 'infer',
  'train_on_prepared': 'train_on_prepared',
}
