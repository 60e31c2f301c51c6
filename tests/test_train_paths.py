"""Runs in folders with unusual names: the same losses, or an error before anything is written."""

import pytest

from t5x_gpu import checkpoint_tools, reshard
from tests.helpers_train import Project, run_here

FOLDERS = {
  'dots': '../work/../runs/a',
  'dots after a link': 'link/../runs/a',
  'pattern': 'set[1]/a*b?',
  'spaces': 'a b/%20 #1',
}


@pytest.fixture(name='project')
def _project(tmp_path, monkeypatch) -> Project:
  """A project whose working directory has a link to a folder elsewhere."""
  (tmp_path / 'work').mkdir()
  project = Project(tmp_path / 'work', compiled=tmp_path.parent / 'compiled')
  (tmp_path / 'elsewhere' / 'deep').mkdir(parents=True)
  (project.folder / 'link').symlink_to('../elsewhere/deep')
  # Where the pattern would match, but the path is not.
  (project.folder / 'set1' / 'aXbY' / 'checkpoint_9').mkdir(parents=True)
  monkeypatch.chdir(project.folder)
  return project


def train(project: Project, folder: str, steps: int):
  return project.run(MODEL_DIR=folder, TRAIN_STEPS=steps, SAVE_PERIOD=2, num_devices=1)


def losses(project: Project, folder) -> dict[int, float]:
  return project.metrics(model_dir=project.folder / folder)


@pytest.fixture(scope='module')
def expected(tmp_path_factory) -> dict[int, float]:
  """The losses of a run in a folder with a plain name."""
  project = Project(tmp_path_factory.mktemp('plain'))
  assert train(project, str(project.folder / 'plain'), 4).code == 0
  return losses(project, 'plain')


@pytest.mark.quick_cases('dots after*', 'pattern', 'spaces')
@pytest.mark.parametrize('name', FOLDERS)
def test_a_run_continues_wherever_its_folder_is_and_every_tool_reads_it(project, expected, name):
  folder = FOLDERS[name]
  for steps in (2, 4):
    result = train(project, folder, steps)
    assert result.code == 0, result.err
  assert 'Continuing from' in result.out and 'checkpoint_2' in result.out
  assert losses(project, folder) == expected
  verify = run_here(lambda: checkpoint_tools.main(['verify', folder]))
  assert verify.code == 0 and 'DAMAGED' not in verify.out + verify.err, verify
  to = f'{folder}/../{name[:4]} new'
  done = run_here(lambda: reshard.main([f'--from={folder}', f'--to={to}', '--dtype=float32']))
  assert done.code == 0, done.err
  average = run_here(lambda: checkpoint_tools.main(['average', folder, '--last=2', f'--to={to}2']))
  assert average.code == 0, average.err
  assert run_here(lambda: checkpoint_tools.main(['verify', f'{to}2'])).code == 0


@pytest.mark.parametrize('folder', ['back\\slash', 'run.__lock', 'not-utf8-\udcff'])
def test_a_folder_that_tensorstore_cannot_use_is_refused_at_once(project, folder):
  before = sorted(project.folder.iterdir())
  result = train(project, folder, 4)
  assert result.code == 1 and 'ConfigError' in result.err and 'UTF-8 text' in result.err
  assert sorted(project.folder.iterdir()) == before
