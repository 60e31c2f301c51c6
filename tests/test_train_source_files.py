"""A run that continues trains on the text it began with, or not at all."""

import functools
import importlib
import json
import os
import shutil
import sys

import pytest

from t5x_gpu.data.sources.source_files import NAME
from tests.helpers_fuzz import START_FILES
from tests.helpers_train import WATCHED_BATCHES, Project, listing, without_ledger

pytestmark = pytest.mark.tf
MACROS = {
  'DATA_MODULE': 't5x_gpu.data.seqio_batches',
  'EVAL_STEPS': 1,
  'WARMUP_STEPS': 1,
  'MIXTURE_OR_TASK_NAME': 'text_lines:corpus/*.txt',
}


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
  """Two steps on 2 MB of text, saved."""
  project = Project(tmp_path_factory.mktemp('trained'))
  (project.folder / 'corpus').mkdir()
  lines = [f'line {i} of a corpus that two steps hardly enter' for i in range(40_000)]
  (project.folder / 'corpus/a.txt').write_text('\n'.join(lines))
  result = run(project, TRAIN_STEPS=2)
  assert result.code == 0, result.err
  [file] = json.loads((project.model_dir / NAME).read_bytes())['tasks']['text_lines'].values()
  assert file[4], 'the run ended before it had hashed 2 MB'
  return project


@pytest.fixture(name='project')
def _project(trained, tmp_path):
  """A copy for one test; modification times are kept."""
  folder = tmp_path / 'copy'
  shutil.copytree(trained.folder, folder)
  return Project(folder)


def overwrite(project):
  path = project.folder / 'corpus/a.txt'
  shutil.copyfile(path, project.folder / 'a.txt')
  with open(path, 'rb+') as f:
    f.seek(200_000)
    f.write(b'changed')


def run(project, *flags, **macros):
  before = os.getcwd()
  os.chdir(project.folder)
  try:
    return project.run(*flags, num_devices=1, **{**MACROS, **macros})
  finally:
    os.chdir(before)


@pytest.mark.slow
@pytest.mark.parametrize('flags', [(), pytest.param(['--dry_run'], marks=pytest.mark.slow)])
def test_bytes_that_changed_far_behind_the_next_batch_are_refused_before_a_step(project, flags):
  overwrite(project)
  before = listing(project.model_dir)
  result = run(project, *flags, TRAIN_STEPS=4)
  assert result.code == 1
  assert 'The training text has changed' in result.err
  assert 'corpus/a.txt: same size, different bytes' in result.err
  assert without_ledger(listing(project.model_dir)) == without_ledger(before)


@pytest.mark.slow
def test_a_file_with_other_times_and_the_same_bytes_is_trained_on(project):
  os.utime(project.folder / 'corpus/a.txt', ns=(0, 10**18))
  result = run(project, TRAIN_STEPS=3)
  assert result.code == 0, result.err
  assert 'Continuing from' in result.out and 'comparing all their bytes' in result.err


@pytest.mark.slow
def test_a_checkpoint_from_before_there_was_a_record_continues_and_gets_one(project):
  (project.model_dir / NAME).unlink()
  result = run(project, TRAIN_STEPS=3)
  assert result.code == 0, result.err
  assert 'source_files.json does not exist. Without it a restart compares only' in result.err
  assert (project.model_dir / NAME).exists()


@pytest.mark.slow
def test_a_run_continued_from_another_compares_with_its_record(project):
  with open(project.gin_file, 'a') as f:
    f.write(
      'from t5x_gpu.checkpoint import initialize\n'
      'train_script.train.initialize_from = @initialize.RestoreConfig()\n'
      f"initialize.RestoreConfig.path = '{project.model_dir}'\n"
      "initialize.RestoreConfig.mode = 'resume'\n"
    )
  other = {'MODEL_DIR': project.folder / 'other', 'TRAIN_STEPS': 3}
  overwrite(project)
  result = run(project, **other)
  assert result.code == 1 and 'corpus/a.txt: same size, different bytes' in result.err
  shutil.copyfile(project.folder / 'a.txt', project.folder / 'corpus/a.txt')
  result = run(project, **other)
  assert result.code == 0, result.err
  assert (project.folder / 'other' / NAME).exists()


CHANGING_DATA = (
  """
from t5x_gpu.data import seqio_batches as _inner

change = None  # called before the seventh batch


def before(number):
  if number == 7 and change is not None:
    change()
"""
  + WATCHED_BATCHES
)


def _new_bytes(path):
  path.write_bytes(b'quite another text\n' * 9000)


def _not_text(path):
  path.write_bytes(b'\xff\xfe' * 30_000)  # an error of the reader


def _other_file(path):
  new = path.with_name('new')
  new.write_text(path.read_text().replace('shuffled', 'replaced'))
  shutil.copystat(path, new)  # the same size and times
  os.replace(new, path)


@pytest.mark.quick_cases('new_bytes')
@pytest.mark.parametrize(
  'change, says',
  [
    pytest.param(_new_bytes, 'at the start, 171,000 now', id='new_bytes'),
    pytest.param(_not_text, 'at the start, 60,000 now', marks=pytest.mark.slow),
    pytest.param(_other_file, 'replaced by another file', marks=pytest.mark.slow),
    pytest.param(os.unlink, 'it no longer exists', marks=pytest.mark.slow),
  ],
)
def test_text_that_changes_during_a_run_stops_it_after_a_save_of_the_last_good_step(
  tmp_path, monkeypatch, change, says
):
  (tmp_path / 'changing_data.py').write_text(CHANGING_DATA)
  monkeypatch.syspath_prepend(tmp_path)
  data = importlib.import_module('changing_data')
  whole, project = (
    Project(_folder(tmp_path, name), compiled=tmp_path.parent / 'compiled')
    for name in ('whole', 'changed')
  )
  for one in (whole, project):
    (one.folder / 'corpus').mkdir()
    lines = [f'line {i} of a corpus that is shuffled' for i in range(1500)]
    (one.folder / 'corpus/a.txt').write_text('\n'.join(lines))
  macros = {'DATA_MODULE': 'changing_data', 'TRAIN_STEPS': 8, 'SAVE_PERIOD': 4}
  assert run(whole, **macros).code == 0
  path = project.folder / 'corpus/a.txt'
  shutil.copy2(path, project.folder / 'kept.txt')
  data.change = functools.partial(change, path)
  result = run(project, **macros)
  assert result.code == 1
  assert 'The training text has changed during the run' in result.err and says in result.err
  assert 'checkpoint_6 was trained on the original text alone' in result.err
  assert project.steps() == [4, 6]
  shutil.copy2(project.folder / 'kept.txt', path)
  data.change = None
  result = run(project, **macros)
  assert result.code == 0, result.err
  assert project.metrics() == whole.metrics()
  assert project.metrics('eval/loss') == whole.metrics('eval/loss')


def _folder(parent, name):
  folder = parent / name
  folder.mkdir()
  return folder


@pytest.mark.slow
def test_evaluation_text_that_changed_between_two_starts_is_said_and_trained_on(tmp_path):
  project = Project(tmp_path)
  (tmp_path / 'named').mkdir()
  for split in ('train', 'validation'):
    _write_rows(tmp_path / 'named' / f'{split}.jsonl', split)
  macros = {'MIXTURE_OR_TASK_NAME': 'jsonl:named/*.jsonl'}
  result = run(project, TRAIN_STEPS=2, **macros)
  assert result.code == 0, result.err
  assert 'evaluation text' not in result.err
  _write_rows(tmp_path / 'named/validation.jsonl', 'another')
  for steps, count in ((4, 1), (5, 0)):
    result = run(project, TRAIN_STEPS=steps, **macros)
    assert result.code == 0, result.err
    assert 'Continuing from' in result.out
    assert result.err.count('The evaluation text has changed since the last start') == count


def _write_rows(path, word):
  path.write_text(''.join(json.dumps({'text': f'{word} {i}'}) + '\n' for i in range(40)))


_opened: list[str] | None = None


def _hook(event, args):
  if event == 'open' and _opened is not None and isinstance(args[0], (str, os.PathLike)):
    mode, flags = args[1], args[2] or 0
    if mode is None or not set('wx') & set(mode) and not flags & os.O_TRUNC:
      _opened.append(os.fspath(args[0]))


@pytest.fixture
def opened(monkeypatch):
  """Files that this process opens, unless it makes them new. An audit hook stays for ever."""
  monkeypatch.setitem(globals(), '_opened', [])
  sys.addaudithook(_hook)
  return _opened


@pytest.mark.slow
def test_the_fuzz_tests_damage_every_file_that_a_start_opens(project, opened):
  """A file that a later version reads at the start belongs into `START_FILES`."""
  with open(project.gin_file, 'a') as f:
    f.write(
      'from t5x_gpu.models import decoding\n'
      'train_script.train.sample_cfg = @decoding.SampleConfig()\n'
      "decoding.SampleConfig.prompt = 'line'\n"
      'decoding.SampleConfig.num_tokens = 2\n'
    )
  local = {
    'CheckpointConfig.local_checkpoint_dir': project.folder / 'local',
    'CheckpointConfig.local_period': 1,
  }
  result = run(project, TRAIN_STEPS=3, **local)
  assert result.code == 0 and 'Continuing from' in result.out, result.err
  folder = os.path.realpath(project.model_dir)
  names = {os.path.relpath(os.path.realpath(path), folder) for path in opened}
  names = {name for name in names if not name.startswith(('..', 'checkpoint_', 'tensorboard'))}
  temporary = {name for name in names if '.tmp' in name or name.startswith('.write_test')}
  # The report opens these at the end; a client of W&B or MLflow opens loggers.json.
  at_end = {'.', 'report.html', 'config_1.gin'}
  assert names - temporary - at_end == START_FILES - {'loggers.json'}
