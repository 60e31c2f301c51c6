"""docs/add_a_parallelism.md, applied word for word to a copy of the package."""

import re
import shlex
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


MESH_TABLE = """
from t5x_gpu.partitioning.mesh import mesh_table
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
partitioner, topology = Partitioner(site=2, fsdp=4), Topology(num_hosts=2, devices_per_host=4)
print(partitioner.rules().activations['batch'])
print(mesh_table(partitioner.mesh_sizes(topology), topology))
"""


def test_the_axis_crosses_the_network_and_splits_rows(clone):
  output = run(clone, f'python -c {shlex.quote(MESH_TABLE)}', package=clone)
  assert output.startswith("('data', 'site', 'fsdp', 'expert')")
  assert re.search(r'^  site +2  batch +crosses the network$', output, re.MULTILINE)


@pytest.mark.slow
def test_gradients_cross_it(clone):
  output = run(clone, COMMANDS[0], package=clone)
  assert 'site+data ' in output and 'No findings' in output


@pytest.mark.slow
def test_it_trains_as_on_one_device(clone):
  assert 'parity: ok' in run(clone, COMMANDS[1], package=clone)
  run(clone, COMMANDS[2], devices=4, package=clone)
  assert (clone / 'runs/two_sites/checkpoint_4').is_dir()
