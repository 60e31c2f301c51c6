"""One run on any mesh: checkpoints move between meshes, accumulation and devices change no loss."""

import functools
import json
import shutil
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers_train import Project
from tests.parity.tolerances import MESH_LOSS

MESHES = {
  'one_device': (1, {}),
  'data8': (8, {}),
  'fsdp8': (8, {'Partitioner.data': 1, 'Partitioner.fsdp': 8}),
  'model8': (8, {'NUM_PARTITIONS': 8}),
  'three_of_data8': (3, {'Partitioner.uneven_batch': 'fill'}),  # eight rows on three devices
}
MACROS = {'DROPOUT_RATE': 0.1, 'SAVE_PERIOD': 4, 'TRAIN_STEPS': 8}


@pytest.fixture(scope='module')
def runs(tmp_path_factory) -> Callable[[str], Project]:
  """Returns run(mesh) -> the project after eight steps, saved at steps 4 and 8."""

  @functools.cache
  def run(name):
    project, (num_devices, macros) = Project(tmp_path_factory.mktemp(name)), MESHES[name]
    result = project.run(num_devices=num_devices, **MACROS, **macros)
    assert result.code == 0, result.err
    return project

  return run


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh', ['fsdp8', *(pytest.param(name, marks=pytest.mark.slow) for name in ('data8', 'model8'))]
)
def test_losses_on_eight_devices_are_those_of_one(runs, mesh):
  want, got = runs('one_device').metrics(), runs(mesh).metrics()
  np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=MESH_LOSS)
  assert len(set(want.values())) == 8


@pytest.mark.slow
@pytest.mark.parametrize(
  'written_on, read_on',
  [
    ('one_device', 'fsdp8'),
    ('fsdp8', 'one_device'),
    *(
      pytest.param(*pair, marks=pytest.mark.slow)
      for pair in (
        ('one_device', 'data8'),
        ('data8', 'fsdp8'),
        ('fsdp8', 'model8'),
        ('model8', 'one_device'),
        ('data8', 'three_of_data8'),
      )
    ),
  ],
)
def test_a_checkpoint_continues_on_another_mesh_with_the_same_losses(
  runs, tmp_path, written_on, read_on
):
  project = Project(tmp_path)
  shutil.copytree(runs(written_on).model_dir, project.model_dir)
  shutil.rmtree(project.model_dir / 'checkpoint_8')
  num_devices, macros = MESHES[read_on]
  result = project.run(num_devices=num_devices, **MACROS, **macros)
  assert result.code == 0 and 'Continuing from' in result.out, result.err
  want, got = runs(written_on).metrics(), project.metrics()
  assert [got[step] for step in range(1, 5)] == [want[step] for step in range(1, 5)]
  np.testing.assert_allclose(
    [got[step] for step in range(5, 9)], [want[step] for step in range(5, 9)], rtol=MESH_LOSS
  )


@pytest.mark.slow
def test_four_microbatches_give_the_losses_of_one(tmp_path):
  project = Project(tmp_path)
  losses = {}
  for number in (1, 4):
    folder = tmp_path / f'model{number}'
    result = project.run(num_devices=1, MODEL_DIR=folder, NUM_MICROBATCHES=number, TRAIN_STEPS=8)
    assert result.code == 0, result.err
    losses[number] = list(project.metrics(model_dir=folder).values())
  np.testing.assert_allclose(losses[4], losses[1], rtol=MESH_LOSS)
  assert losses[4] != losses[1], 'the sums were taken in the same order: was it accumulated?'


@pytest.mark.slow
def test_a_checkpoint_names_the_mesh_that_wrote_it(runs):
  manifest = json.loads((runs('fsdp8').model_dir / 'checkpoint_8/manifest/metadata').read_text())
  assert manifest['mesh']['fsdp'] == 8 and manifest['mesh']['data'] == 1
