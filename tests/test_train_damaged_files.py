"""A restart continues from a good checkpoint, even if the small files next to it are damaged."""

import json
import re

import pytest

from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.metrics.goodput import GOODPUT
from tests.helpers_crashes import MACROS
from tests.helpers_fuzz import replace
from tests.helpers_train import Project

# The `START_FILES` that every run has; the fuzz tests damage the others too.
SMALL = ('config.gin', 'config_origins.txt', 'metrics.jsonl', LOCK, GOODPUT)
SKIPPED = {GOODPUT: ('garbage',)}  # a file whose bad lines are skipped
DEEP = b'[' * 100_000 + b']' * 100_000
GARBAGE = {
  'config.gin': b'\xff\xfe not text',
  'config_origins.txt': b'\x80' * 10,
  LOCK: b'\xff\xfe\x00',
  GOODPUT: b'\xff{"run": ' + DEEP + b'}\n',
  'metrics.jsonl': b'{"step": ' + DEEP + b'}\n\xff\n',
}


@pytest.fixture
def project(tmp_path, warm) -> Project:
  return Project(tmp_path, warm=warm)


def restart(project: Project, steps: int):
  """Trains on to so many steps; returns the run, whose exit code is 0."""
  with project.start(**MACROS, SAVE_PERIOD=2, TRAIN_STEPS=steps) as run:
    assert run.finish() == 0, run.err
  assert 'Traceback' not in run.err and project.steps()[-1] == steps
  return run


def put(project: Project, kind: str) -> None:
  for name in SMALL:
    path = project.model_dir / name
    if kind == 'garbage':
      path.write_bytes(GARBAGE[name])
    else:
      replace(path, kind)


@pytest.mark.parametrize(
  'kinds',
  [
    ('garbage',),
    pytest.param(('full folder', 'looping link'), marks=pytest.mark.slow),
    pytest.param(('nothing', 'folder', 'dangling link', 'pipe', 'zeros'), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_a_restart_moves_damaged_files_aside_and_names_them(project, kinds):
  restart(project, 2)
  for number, kind in enumerate(kinds):
    put(project, kind)
    before = set(project.model_dir.glob('corrupt_*'))
    run = restart(project, 2 * number + 4)
    assert f'Continuing from {project.model_dir}/checkpoint_{2 * number + 2}.' in run.out
    new = {path.name for path in set(project.model_dir.glob('corrupt_*')) - before}
    if kind == 'nothing':
      assert not new
    else:
      moved = {name for name in SMALL if kind not in SKIPPED.get(name, ())}
      assert {re.sub(r'^corrupt_|\.\d+$', '', name) for name in new} == moved
      for name in new:
        assert f'kept as {name}' in run.err
    assert max(project.metrics()) == 2 * number + 4
    assert (project.model_dir / 'config.gin').read_text().count('TRAIN_STEPS')


@pytest.mark.slow
def test_metrics_keep_the_good_lines_of_a_damaged_file(project):
  restart(project, 2)
  path = project.model_dir / 'metrics.jsonl'
  good = path.read_bytes()
  path.write_bytes(b'{"step": ' + DEEP + b'}\n' + good + b'{"step": 1.5}\n')
  restart(project, 4)
  assert path.read_bytes().startswith(good) and sorted(project.metrics()) == [1, 2, 3, 4]
  assert (project.model_dir / 'corrupt_metrics.jsonl').read_bytes().startswith(b'{"step": [[')


@pytest.mark.slow
@pytest.mark.parametrize(
  'damage',
  [
    'types',
    *(pytest.param(kind, marks=pytest.mark.slow) for kind in ('deep', 'folder', 'looping link')),
  ],
)
def test_a_damaged_manifest_falls_back_to_the_older_checkpoint(project, damage):
  restart(project, 4)
  manifest = project.model_dir / 'checkpoint_4' / 'manifest' / 'metadata'
  if damage == 'types':
    content = json.loads(manifest.read_text())
    content.pop('seal')
    manifest.write_text(json.dumps({**content, 'arrays': {'params/x': [[-1, 1.5], 7]}}))
  elif damage == 'deep':
    manifest.write_bytes(DEEP)
  else:
    replace(manifest, damage)
  run = restart(project, 6)
  assert 'checkpoint_4 cannot be read' in run.err
  assert f'Continuing from {project.model_dir}/checkpoint_2.' in run.out
  assert (project.model_dir / 'corrupt_checkpoint_4').is_dir()
