"""ModelDir lists the steps once and reads each manifest once, and still sees what has changed."""

import collections
import functools
import os
import pathlib
import re
import sys
import types

import numpy as np
import pytest

from t5x_gpu import checkpoint_tools, eval
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.model_dir import ModelDir, check_room, newest_complete
from t5x_gpu.checkpoint.params_files import ParamsReader, read_params
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.checkpoint.store import CheckpointAddress, StateReader
from t5x_gpu.errors import CheckpointError
from t5x_gpu.evaluation.checkpoint_evaluator import read_if_there, steps_to_evaluate
from t5x_gpu.reporting.run_record import read_run
from t5x_gpu.storage import files
from tests.checkpoint.test_checkpointer import abstract, new_state, opened, save
from tests.checkpoint.test_checksums import flip_a_bit
from tests.checkpoint.test_run_lock import lock_of
from tests.helpers_train import Project, run_here
from tests.messages import raises

# Audit hooks stay for the rest of the process: this one counts only while `_folder` is set.
_folder: pathlib.Path | None = None
_calls: collections.Counter = collections.Counter()


def _count(event: str, args: tuple) -> None:
  if _folder is None or event not in ('open', 'os.scandir', 'os.listdir'):
    return
  path = args[0] if args else None
  is_os_open = event == 'open' and args[1] is None  # open() with an opener raises both events
  if not isinstance(path, (str, os.PathLike)) or is_os_open:
    return
  frame, callers = sys._getframe(1), []
  while frame is not None:
    callers.append(frame.f_code)
    frame = frame.f_back
  if any('/orbax/checkpoint/' in code.co_filename for code in callers):
    return
  path = pathlib.Path(path)
  if path == _folder and any(code.co_name == 'committed_steps' for code in callers):
    _calls['steps listed'] += 1
  elif re.fullmatch(r'checkpoint_\d+/manifest/metadata', os.path.relpath(path, _folder)):
    _calls[f'{path.parts[-3]} read'] += 1


@functools.cache  # every further hook would count again
def _start_to_count() -> None:
  sys.addaudithook(_count)


@pytest.fixture
def calls(monkeypatch):
  """Returns start(folder) -> Counter of listings and manifest reads from then on."""
  _start_to_count()

  def start(folder: pathlib.Path) -> collections.Counter:
    monkeypatch.setattr(sys.modules[__name__], '_folder', folder)
    _calls.clear()
    return _calls

  return start


def test_a_disk_without_room_for_a_checkpoint_is_refused_unless_leftovers_free_enough(
  tmp_path, monkeypatch
):
  usage = types.SimpleNamespace(free=900, total=5000)
  monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: usage)
  with raises(CheckpointError):
    check_room(tmp_path / 'new', 1000)
  check_room(tmp_path / 'new', 900)
  cut_short = tmp_path / 'checkpoint_4.orbax-checkpoint-tmp' / 'state'
  cut_short.mkdir(parents=True)
  (cut_short / 'd').write_bytes(bytes(100))
  check_room(tmp_path, 1000)
  with pytest.raises(CheckpointError):
    check_room(tmp_path, 1001)
  usage.total = usage.free = 0  # unknown
  check_room(tmp_path, 1001)


def test_a_run_looks_for_room_before_it_compiles(tmp_path, monkeypatch):
  usage = types.SimpleNamespace(free=4096, total=1 << 30)
  monkeypatch.setattr(files.shutil, 'disk_usage', lambda path: usage)
  with pytest.raises(CheckpointError, match='No space left on device'):
    Project(tmp_path).check(num_devices=1)


@pytest.mark.slow
def test_a_resume_reads_each_manifest_once_and_lists_the_steps_at_its_start_and_its_end(
  tmp_path, calls
):
  project = Project(tmp_path)
  options = dict(SAVE_PERIOD=2, EVAL_PERIOD=2)
  best = '--gin.checkpointer.CheckpointConfig.keep_best=1'
  assert project.run(best, TRAIN_STEPS=6, **options).code == 0
  seen = calls(project.model_dir)
  result = project.run(best, TRAIN_STEPS=8, **options)
  assert result.code == 0, result.err
  for step in (2, 4, 6):
    assert seen[f'checkpoint_{step} read'] == 1, seen
  assert seen['steps listed'] == 2, seen  # the report at the end reads the run's folder


def folder_with(path: pathlib.Path, *steps: int) -> pathlib.Path:
  with opened(path) as checkpointer:
    for step in steps:
      save(checkpointer, step, new_state(step))
  return path


def counts(*, listed: int, read: tuple[int, ...]) -> dict[str, int]:
  """Returns what the fixture `calls` counts if each manifest in `read` is read once."""
  return {'steps listed': listed} | {f'checkpoint_{step} read': 1 for step in read}


def test_the_check_and_the_restore_of_a_run_share_one_listing(tmp_path, calls):
  folder = folder_with(tmp_path / 'model', 1, 2, 3)
  target = abstract(new_state())
  seen = calls(folder)
  with ModelDir(folder) as model_dir:
    model_dir.lock()
    assert newest_complete(model_dir, target=target).step == 3
    with Checkpointer(model_dir, keep=Keep(last=3, best=1)) as checkpointer:
      assert int(checkpointer.restore_latest(target).state.step) == 3
  assert seen == counts(listed=1, read=(1, 2, 3))


@pytest.mark.parametrize(
  'command, read',
  [
    ('inspect FOLDER', (3,)),
    ('inspect FOLDER --step=1', (1,)),
    ('verify FOLDER', (1, 2, 3)),
    ('average FOLDER --last=2 --to=FOLDER_mean', (2, 3)),
    ('prune FOLDER --keep_last=1', (1, 2, 3)),
    ('prune FOLDER --keep_last=1 --yes', (1, 2, 3)),
  ],
)
def test_a_command_lists_the_steps_once_and_reads_each_manifest_once(
  tmp_path, calls, command, read
):
  folder = folder_with(tmp_path / 'model', 1, 2, 3)
  seen = calls(folder)
  result = run_here(lambda: checkpoint_tools.main(command.replace('FOLDER', str(folder)).split()))
  assert result.code == 0, result.err
  assert seen == counts(listed=1, read=read)


def test_the_folder_of_a_checkpoint_is_read_without_listing_steps(tmp_path, calls):
  folder = folder_with(tmp_path / 'model', 1, 2)
  seen = calls(folder)
  reader = ParamsReader(folder / 'checkpoint_1')
  read_params(reader.checkpoint, abstract(new_state()).params)
  assert seen == {'checkpoint_1 read': 1}


def test_an_evaluation_lists_the_steps_once_before_and_once_after_each_checkpoint(tmp_path, calls):
  folder = folder_with(tmp_path / 'model', 1, 2, 3)
  model_dir, program = ModelDir(folder), types.SimpleNamespace(abstract_saved=abstract(new_state()))
  seen = calls(folder)
  eval._check_checkpoints(model_dir, 'all', watch=False)
  steps = steps_to_evaluate(model_dir, wanted='all', done=(1,), last_step=None, timeout=60.0)
  for step in steps:
    assert seen['steps listed'] == step - 1
    assert read_if_there(CheckpointAddress(model_dir, step), program) is not None
  assert seen == counts(listed=3, read=(2, 3))


def test_a_report_lists_the_steps_once_and_reads_the_latest_manifest(tmp_path, calls):
  folder = folder_with(tmp_path / 'model', 1, 2, 3)
  seen = calls(folder)
  assert read_run(folder).checkpoints == [1, 2, 3]
  assert seen == counts(listed=1, read=(3,))


def test_what_another_run_saved_before_the_lock_is_seen_under_it(tmp_path):
  folder = folder_with(tmp_path / 'model', 1)
  with ModelDir(folder) as model_dir:
    assert newest_complete(model_dir, target=abstract(new_state())).step == 1
    folder_with(folder, 2)
    assert model_dir.steps == [1]
    model_dir.lock()
    assert model_dir.steps == [1, 2]
    assert newest_complete(model_dir, target=abstract(new_state())).step == 2


def test_an_unreadable_checkpoint_is_read_again(tmp_path):
  folder = folder_with(tmp_path / 'model', 1, 2)
  manifest = folder / 'checkpoint_2/manifest/metadata'
  whole = manifest.read_bytes()
  manifest.write_bytes(whole[:20])
  with ModelDir(folder) as model_dir:
    assert newest_complete(model_dir, target=abstract(new_state())).step == 1
    manifest.write_bytes(whole)  # the file server is back
    assert newest_complete(model_dir, target=abstract(new_state())).step == 2


def test_a_run_that_ends_before_it_saves_leaves_no_lock_and_no_folder(tmp_path):
  with ModelDir(tmp_path / 'new/model') as model_dir:
    model_dir.lock()
    assert (tmp_path / 'new/model' / LOCK).exists()
  assert list(tmp_path.iterdir()) == []


def test_a_second_lock_finds_out_that_another_run_has_taken_over(tmp_path):
  with ModelDir(tmp_path / 'model') as model_dir:
    model_dir.lock()
    model_dir.lock()
    lock_of(tmp_path / 'model', host='gpu-08', kernel='another')
    with raises(CheckpointError):
      model_dir.lock()
  assert (tmp_path / 'model' / LOCK).exists()


def test_a_second_lock_finds_out_that_another_run_has_come_and_gone(tmp_path):
  folder = folder_with(tmp_path / 'model', 1)
  with ModelDir(folder) as model_dir:
    model_dir.lock()
    assert model_dir.steps == [1]
    (folder / LOCK).unlink()
    model_dir.lock()  # nothing has changed: the lock is written again
    assert (folder / LOCK).exists()
    (folder / LOCK).unlink()
    folder_with(folder, 2)
    with raises(CheckpointError):
      model_dir.lock()


def test_a_checkpointer_releases_only_the_lock_that_it_took(tmp_path):
  with ModelDir(tmp_path / 'model') as model_dir:
    model_dir.lock()
    with Checkpointer(model_dir) as checkpointer:
      save(checkpointer, 1, new_state(1))
    assert (tmp_path / 'model' / LOCK).exists() and model_dir.is_locked
  assert not (tmp_path / 'model' / LOCK).exists()
  with Checkpointer(tmp_path / 'model'):
    assert (tmp_path / 'model' / LOCK).exists()
  assert not (tmp_path / 'model' / LOCK).exists()


LOSES_ITS_FOLDER = """
import json, pathlib
from t5x_gpu.data import synthetic

class Batches(synthetic.SyntheticBatches):
  def set_state(self, state):  # called once more if the latest checkpoint cannot be restored
    super().set_state(state)
    if list(pathlib.Path({folder!r}).glob('corrupt_checkpoint_*')):
      lock = pathlib.Path({folder!r}, 'run.lock')
      lock.write_text(json.dumps({{**json.loads(lock.read_text()), 'host': 'gpu-08', 'pid': 1}}))

def open_batches(config, *, spec, feature_converter, repeat=True):
  return Batches(spec, seed=config.seed, num_batches=None if repeat else 8)
"""


@pytest.mark.slow
def test_a_run_that_lost_its_model_dir_after_the_restore_truncates_no_metrics(
  tmp_path, monkeypatch
):
  monkeypatch.syspath_prepend(str(tmp_path))
  project = Project(tmp_path)
  (tmp_path / 'loses_its_folder.py').write_text(
    LOSES_ITS_FOLDER.format(folder=str(project.model_dir))
  )
  options = dict(DATA_MODULE='loses_its_folder', SAVE_PERIOD=2)
  first = project.run(TRAIN_STEPS=4, **options)
  assert first.code == 0, first.err
  reader = StateReader(project.model_dir, step=4)
  name = max(reader.shapes, key=lambda n: (n.startswith('params'), np.prod(reader.shapes[n])))
  row = reader.read_at(name, (slice(3, 4), slice(None)))
  flip_a_bit(project.model_dir / 'checkpoint_4', value=row.tobytes())  # found by the restore
  files = [project.model_dir / name for name in ('metrics.jsonl', 'config.gin')]
  before = [path.read_bytes() for path in files]
  result = project.run(TRAIN_STEPS=6, **options)
  assert result.code == 1 and 'now belongs to process 1 on gpu-08' in result.err, result.err
  assert [path.read_bytes() for path in files] == before
  assert project.steps() == [2]


def test_a_model_dir_that_cannot_be_written_is_not_locked(tmp_path):
  (tmp_path / 'file').write_text('not a folder')
  with raises(CheckpointError):
    ModelDir(tmp_path / 'file/model').lock()
