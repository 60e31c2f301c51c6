"""docs/add_a_parallelism.md, applied word for word to a copy of the package."""

import shutil

import pytest

from tests.helpers_pages import ROOT, apply_diff, blocks, run

PAGE = 'add_a_parallelism.md'
(COMMANDS,) = (block.splitlines() for block in blocks(PAGE, 'sh'))


@pytest.fixture(scope='module')
def clone(tmp_path_factory):
  """A copy of the package and its gin files with the page's edits, and the page's gin file."""
  path = tmp_path_factory.mktemp('clone')
  for name in ('t5x_gpu', 'gin_configs'):
    shutil.copytree(ROOT / name, path / name, ignore=shutil.ignore_patterns('__pycache__'))
  (python,), (diff,), (gin,) = (blocks(PAGE, language) for language in ('python', 'diff', 'gin'))
  (path / 't5x_gpu/partitioning/site_parallel.py').write_text(python)
  apply_diff(diff, path)
  (path / 'two_sites.gin').write_text(gin)
  return path


def test_the_mesh_has_the_axis(clone):
  table = run(clone, f'{COMMANDS[2]} --dry_run', devices=4, package=clone)
  assert [line.split()[:2] for line in table.splitlines() if line.startswith('  site')] == [
    ['site', '2']
  ]


@pytest.mark.slow
def test_gradients_cross_it(clone):
  output = run(clone, COMMANDS[0], package=clone)
  assert 'site+data ' in output and 'No findings' in output


@pytest.mark.slow
def test_it_trains_as_on_one_device(clone):
  assert 'parity: ok' in run(clone, COMMANDS[1], package=clone)
  run(clone, COMMANDS[2], devices=4, package=clone)
  assert (clone / 'runs/two_sites/checkpoint_4').is_dir()
