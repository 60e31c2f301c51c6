"""A run that was killed or stopped, and started again, is the run that nothing happened to.

`CASES` is the table: what runs, where its checkpoints are, and the moments at which it ends, one
after the other. A line adds a case. Losses, evaluations and all arrays of the last checkpoint are
equal bit for bit. Odd paths, environments and data are worlds (tests/worlds/table.py), random
sequences of kills and damage are in tests/property/test_nothing_is_lost.py, and several processes
in tests/cluster/.
"""

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from t5x_gpu.checkpoint.model_dir import committed_steps
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.metrics.logging_config import LoggingConfig
from t5x_gpu.run.config import Run
from t5x_gpu.runtime.cluster.restarts import EXIT_PREEMPTED
from t5x_gpu.storage.paths import as_path
from tests import helpers_disk
from tests.helpers_crashes import assert_reported, damaged, files_of_saves, is_saving, until
from tests.helpers_prepared import prepare_here
from tests.helpers_train import Process, Project

STEPS, SAVE_PERIOD = 9, 3
HELD = {'DATA_MODULE': 'held_data', 'DROPOUT_RATE': 0.1}
MACROS = {**HELD, 'TRAIN_STEPS': STEPS, 'SAVE_PERIOD': SAVE_PERIOD}
SEQIO = 't5x_gpu.data.seqio_batches'

# The checkpoint is complete in a temporary folder, and gets its name only once `go` appears.
HELD_COMMIT = """
import os, pathlib, re, time
rename = os.rename
def held(source, target, **kwargs):
  if re.search('checkpoint_[0-9]+$', os.fspath(target)):
    pathlib.Path('held').touch()
    while not pathlib.Path('go').exists():
      time.sleep(0.005)
  return rename(source, target, **kwargs)
os.rename = held
from t5x_gpu import cli, train
cli.run_main(train.main)
"""

# Held in the middle of deleting an old checkpoint: what makes it one is gone, its arrays are not.
HELD_DELETION = """
import pathlib, shutil, time
rmtree = shutil.rmtree
def held(path, *args, **kwargs):
  if 'checkpoint_' in pathlib.Path(path).name:
    rmtree(pathlib.Path(path) / 'manifest')
    pathlib.Path('held').touch()
    while not pathlib.Path('go').exists():
      time.sleep(0.005)
  return rmtree(path, *args, **kwargs)
shutil.rmtree = held
from t5x_gpu import cli, train
cli.run_main(train.main)
"""

# Held in the evaluation of this number, before its first batch counts as done.
HELD_EVALUATION = """
import contextlib, pathlib, time
from t5x_gpu.evaluation.evaluator import Evaluator
sums, left = Evaluator.sums, [{number}]
def held(self, params, *, show, **kwargs):
  @contextlib.contextmanager
  def holding(title, total):
    with show(title, total) as advance:
      left[0] -= 1
      def advance_later(number):
        if not left[0]:
          pathlib.Path('held').touch()
          while not pathlib.Path('go').exists():
            time.sleep(0.005)
        advance(number)
      yield advance_later
  return sums(self, params, show=holding, **kwargs)
Evaluator.sums = held
from t5x_gpu import cli, train
cli.run_main(train.main)
"""


@dataclasses.dataclass(frozen=True)
class Kind:
  """What runs.

  Attributes:
    macros: further values of the gin file.
    module: data module of the batches.
    num_devices: how many fake devices.
    prepare: makes the data in a folder and returns further macros.
    reads_again: whether a resumed run reads the batches again to get to its place in the data.
  """

  macros: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  module: str = 't5x_gpu.data.synthetic'
  num_devices: int = 1
  prepare: Callable[[pathlib.Path], Mapping[str, Any]] = lambda folder: {}
  reads_again: bool = False


def _prepared_rows(folder: pathlib.Path) -> Mapping[str, Any]:
  prepare_here('mixed', folder / 'rows', num_parts=1)
  return {'MIXTURE_OR_TASK_NAME': f'prepared:{folder}/rows'}


KINDS = {
  'random tokens': Kind(),
  'often evaluated': Kind({'EVAL_PERIOD': SAVE_PERIOD}),
  'packed, shuffled source text': Kind({'TASK_FEATURE_LENGTHS': "{'targets': 48}"}, module=SEQIO),
  'a task of Python code': Kind(
    {
      'MIXTURE_OR_TASK_MODULE': 'tests.python_code_tasks',
      'MIXTURE_OR_TASK_NAME': 'generated_and_plain',
    },
    module=SEQIO,
    reads_again=True,
  ),
  'prepared rows of a mixture': Kind(
    {'MIXTURE_OR_TASK_MODULE': 'tests.mixed_tasks', 'train_eval/DatasetConfig.split': 'train'},
    module='t5x_gpu.data.prepared.batches',
    prepare=_prepared_rows,
  ),
  'FP8 with FSDP, accumulation and remat': Kind(
    {
      'PRECISION': 'fp8',
      'Partitioner.fsdp': 4,
      'NUM_MICROBATCHES': 2,
      'TransformerConfig.num_layers': 2,
      'TransformerConfig.remat_policy': 'full',
    },
    num_devices=4,
  ),
}


class Trial:
  """A run in a folder that ends several times."""

  def __init__(self, project: Project, kind: Kind, macros: Mapping[str, Any]):
    self.project, self._kind = project, kind
    self._macros = {**MACROS, **kind.macros, **macros}
    self.model_dir = as_path(str(macros.get('MODEL_DIR', project.model_dir)))

  def start(self, **options: Any) -> Process:
    return self.project.start(
      held_module=self._kind.module, num_devices=self._kind.num_devices, **self._macros | options
    )

  def steps(self) -> list[int]:
    return list(committed_steps(self.model_dir))

  def result(self) -> dict[str, Any]:
    """Returns losses and evaluations of each step, and the checksums of the last state."""
    lines = (self.model_dir / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    found = {
      key: [(r['step'], r[key]) for r in records if key in r] for key in ('train/loss', 'eval/loss')
    }
    assert [step for step, _ in found['train/loss']] == list(range(1, STEPS + 1))
    manifest = StateReader(str(self.model_dir), step=STEPS).manifest
    return {**found, 'checksums': manifest['checksums']}


# The moments.


def compiling(trial: Trial) -> None:
  with trial.start() as run:
    run.wait_for(lambda: 'parameters;' in run.out)
    run.kill()


def writing_a_save(trial: Trial) -> None:
  for files in (1, 5, 9):
    before = trial.steps()
    with trial.start() as run:
      assert until(run, is_saving(trial.project, files=files)), run.err
      run.kill()
    assert set(before) <= set(trial.steps())
    if files_of_saves(trial.project.model_dir):
      return
  pytest.fail('No kill came while files were written: the test proves nothing.')


def before_a_commit(trial: Trial) -> None:
  before = trial.steps()
  with trial.start(script=HELD_COMMIT) as run:
    run.wait_for(run.held)
    run.kill()
  assert trial.steps() == before
  assert list(trial.project.model_dir.glob('checkpoint_*.*')), 'no save was under way'


def deleting(trial: Trial) -> None:
  with trial.start(script=HELD_DELETION) as run:
    run.wait_for(run.held)
    assert SAVE_PERIOD not in trial.steps() and trial.steps()[0] == 2 * SAVE_PERIOD
    run.kill()
  assert [p.name for p in trial.project.model_dir.glob('.removed_*')] == ['.removed_checkpoint_3']


def after_a_save(trial: Trial) -> None:
  with trial.start(hold_before=SAVE_PERIOD + 2) as run:
    run.wait_for(lambda: run.held.exists() and SAVE_PERIOD in trial.steps())
    run.kill()


def on_a_full_disk(trial: Trial) -> None:
  with trial.start(hold_before=SAVE_PERIOD + 2) as run:
    run.wait_for(lambda: run.held.exists() and trial.steps() == [SAVE_PERIOD])
    filler = helpers_disk.fill(trial.project.model_dir.parent)
    run.let_go()
    assert run.finish() == 1, run.out
  assert_reported(run.err, 'No space left on device', 'checkpoint')
  with trial.start() as run:  # nothing has changed
    assert run.finish() == 1, run.out
  assert_reported(run.err, 'No space left on device', 'MODEL_DIR')
  assert trial.steps() == [SAVE_PERIOD]
  filler.unlink()


def on_a_read_only_disk(trial: Trial) -> None:
  folder = trial.project.model_dir
  with trial.start(hold_before=SAVE_PERIOD + 2) as run:
    run.wait_for(lambda: run.held.exists() and trial.steps() == [SAVE_PERIOD])
    # Mounted over itself, read-only: files that are open stay open, as after a remount.
    for options in (['--bind', str(folder)], ['-o', 'remount,bind,ro']):
      subprocess.run(['mount', *options, str(folder)], check=True)
    run.let_go()
    assert run.finish() == 1, run.out
  assert_reported(run.err, 'Read-only file system', 'MODEL_DIR')
  with trial.start() as run:
    assert run.finish() == 1
  assert_reported(run.err, 'cannot be written to: Read-only file system', 'MODEL_DIR is set at')
  assert trial.steps() == [SAVE_PERIOD]
  helpers_disk.unmount(folder)


def _stopped(trial: Trial, number: signal.Signals, *, step: int, code: int) -> None:
  with trial.start(hold_before=step - 1 - max(trial.steps(), default=0)) as run:
    run.wait_for(run.held)
    run.popen.send_signal(number)
    run.wait_for(lambda: f'{number.name}: finishing this step' in run.err)
    run.let_go()
    assert run.finish() == code, run.err
  assert trial.steps()[-1] == step and f'Stopped by {number.name} at step {step}' in run.out
  assert 'Traceback' not in run.err


def ctrl_c(trial: Trial) -> None:
  _stopped(trial, signal.SIGINT, step=2, code=130)


def sigterm(trial: Trial) -> None:
  _stopped(trial, signal.SIGTERM, step=5, code=EXIT_PREEMPTED)


def _in_an_evaluation(trial: Trial, *, number: int, step: int) -> None:
  with trial.start(script=HELD_EVALUATION.format(number=number)) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGTERM)
    run.wait_for(lambda: 'SIGTERM: finishing this step' in run.err)
    run.let_go()
    assert run.finish() == EXIT_PREEMPTED, run.err
  assert f'The evaluation after step {step} was interrupted' in run.out
  assert f'Stopped by SIGTERM at step {step}' in run.out and 'Traceback' not in run.err
  assert trial.steps()[-1] == step


def in_an_evaluation(trial: Trial) -> None:
  _in_an_evaluation(trial, number=2, step=2 * SAVE_PERIOD)


def in_its_repetition(trial: Trial) -> None:
  _in_an_evaluation(trial, number=1, step=2 * SAVE_PERIOD)


def after_its_repetition(trial: Trial) -> None:
  with trial.start(hold_before=0) as run:
    run.wait_for(run.held)
    run.kill()
  assert f'eval  step {2 * SAVE_PERIOD}' in run.out


def in_the_last_evaluation(trial: Trial) -> None:
  _in_an_evaluation(trial, number=1, step=STEPS)


# Where its checkpoints are -> macros.
WHERE: dict[str, Mapping[str, Any]] = {
  'disk': {},
  'disk, the newest': {'CheckpointConfig.keep': 1},
  'small disk': {'CheckpointConfig.keep': 2},
  'local checkpoints': {
    'CheckpointConfig.local_checkpoint_dir': "'local'",
    'CheckpointConfig.local_period': 1,
  },
  'object storage': {'MODEL_DIR': 's3://runs/resumed'},
}

# What, where, when. Cases that are not slow run in `make test`.
slow, tf = pytest.mark.slow, pytest.mark.tf
CASES = [
  ('random tokens', 'disk', (ctrl_c, sigterm)),
  (
    'often evaluated',
    'disk',
    (in_an_evaluation, in_its_repetition, after_its_repetition, in_the_last_evaluation),
  ),
  ('random tokens', 'disk', (writing_a_save,)),
  ('random tokens', 'disk, the newest', (deleting,)),
  pytest.param('random tokens', 'disk', (compiling, before_a_commit, after_a_save), marks=slow),
  pytest.param('random tokens', 'small disk', (on_a_full_disk,), marks=slow),
  pytest.param('random tokens', 'small disk', (on_a_read_only_disk,), marks=slow),
  pytest.param('random tokens', 'local checkpoints', (after_a_save,), marks=slow),
  pytest.param('random tokens', 'object storage', (after_a_save,), marks=slow),
  pytest.param('packed, shuffled source text', 'disk', (after_a_save,), marks=(slow, tf)),
  pytest.param('a task of Python code', 'disk', (after_a_save,), marks=(slow, tf)),
  pytest.param('prepared rows of a mixture', 'disk', (after_a_save,), marks=(slow, tf)),
  pytest.param('FP8 with FSDP, accumulation and remat', 'disk', (after_a_save,), marks=slow),
]


@pytest.fixture(scope='module')
def untouched(tmp_path_factory, warm) -> Callable[[str], tuple[dict[str, Any], dict[str, Any]]]:
  """Returns what -> (further macros, result of a run that nothing happens to)."""
  known = {}

  def find(what: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if what not in known:
      folder = tmp_path_factory.mktemp('untouched')
      macros = KINDS[what].prepare(folder)
      trial = Trial(Project(folder, warm=warm), KINDS[what], macros)
      with trial.start() as run:
        assert run.finish() == 0, run.err
      known[what] = macros, trial.result()
    return known[what]

  return find


@pytest.fixture
def small_disk(tmp_path) -> Iterator[pathlib.Path]:
  with helpers_disk.small_disk(tmp_path / 'disk', size='8m') as disk:
    yield disk


def name(value: str | tuple[Callable[[Trial], None], ...]) -> str:
  return value if isinstance(value, str) else ' and '.join(moment.__name__ for moment in value)


@pytest.mark.parametrize('what, where, when', CASES, ids=name)
def test_a_run_that_ended_and_starts_again_is_the_run_that_nothing_happened_to(
  request, tmp_path, warm, untouched, what, where, when
):
  macros, want = untouched(what)
  project = Project(tmp_path, warm=warm)
  if where == 'object storage':
    request.getfixturevalue('server')
  if where == 'small disk':
    project.model_dir = request.getfixturevalue('small_disk') / 'model'
  trial = Trial(project, KINDS[what], {**macros, **WHERE[where]})
  for moment in when:
    moment(trial)
  saved = max(trial.steps(), default=0)
  with trial.start() as run:
    assert run.finish() == 0, run.err
  assert 'Traceback' not in run.err
  assert deleting not in when or 'Deleted the rest of checkpoint_3' in run.err
  [begin] = re.findall(rf'Continuing from {trial.model_dir}/checkpoint_(\d+)\.', run.out) or [0]
  assert int(begin) > saved if where == 'local checkpoints' else int(begin) == saved
  assert ('batches again in' in run.err) == KINDS[what].reads_again
  assert trial.result() == want
  if in_the_last_evaluation in when:
    with trial.start() as run:
      assert run.finish() == 0 and f'already at step {STEPS}' in run.out, run.err
  if where != 'object storage':
    assert not any(damaged(trial.model_dir, step) for step in trial.steps())
    left = [*trial.model_dir.glob('.removed_*'), *trial.model_dir.glob('checkpoint_*.*')]
    assert not left and not files_of_saves(trial.model_dir)


def test_a_stop_during_the_evaluation_before_the_first_step_is_a_stop_before_it(tmp_path, warm):
  trial = Trial(Project(tmp_path, warm=warm), Kind({'EVAL_PERIOD': 3}), {})
  options = {'train.run_eval_before_training': True}
  with trial.start(script=HELD_EVALUATION.format(number=1), **options) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGTERM)
    run.wait_for(lambda: 'SIGTERM: finishing this step' in run.err)
    run.let_go()
    assert run.finish() == EXIT_PREEMPTED, run.err
  assert 'Stopped by SIGTERM at step 0; there is nothing to save' in run.out
  assert not trial.steps() and 'Traceback' not in run.err
  with trial.start(**options) as run:
    assert run.finish() == 0, run.err
  assert list(trial.project.metrics('eval/loss')) == [0, 3, 6, 9]


def test_an_evaluation_is_repeated_only_where_it_is_due_and_recorded():
  data = DatasetConfig('t', {'targets': 8}, 'validation', 2)
  run = types.SimpleNamespace(
    train_eval_dataset_cfg=data,
    infer_eval_dataset_cfg=None,
    eval_periods=(3, None),
    total_steps=10,
    logging_cfg=LoggingConfig(),
  )
  assert [s for s in range(1, 11) if Run.repeats_evaluation(run, s)] == [3, 6, 9, 10]
  run.logging_cfg = LoggingConfig(loggers=('terminal',))
  assert not Run.repeats_evaluation(run, 3)
  run.logging_cfg, run.train_eval_dataset_cfg = LoggingConfig(), None
  assert not Run.repeats_evaluation(run, 10)


@pytest.mark.slow
def test_a_second_ctrl_c_leaves_at_once(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(**HELD, hold_before=2) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGINT)
    run.wait_for(lambda: 'Press Ctrl-C again to exit immediately' in run.err)
    run.popen.send_signal(signal.SIGINT)
    assert run.finish() == 130
  assert not project.steps() and 'Traceback' not in run.err


@pytest.mark.slow
def test_ctrl_c_during_the_last_save_does_not_lose_it(tmp_path, warm):
  project = Project(tmp_path, warm=warm)
  with project.start(**MACROS | {'TRAIN_STEPS': SAVE_PERIOD}, script=HELD_COMMIT) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGINT)
    run.wait_for(lambda: 'Press Ctrl-C again to exit immediately' in run.err)
    run.let_go()
    assert run.finish() == 0, run.err  # it had finished before the signal
  assert project.steps() == [SAVE_PERIOD] and f'Done at step {SAVE_PERIOD}' in run.out


def test_ctrl_c_during_the_compile_leaves_without_a_stack(tmp_path):
  project = Project(tmp_path)
  with project.start(**HELD) as run:
    run.wait_for(lambda: 'parameters;' in run.out)
    run.popen.send_signal(signal.SIGINT)
    assert run.finish() == 130
  assert run.err.strip().endswith('Interrupted.') and 'Traceback' not in run.err
  assert not project.steps()
