"""What any layout wrote, any other reads: every bit, as today's mesh wants it; the run continues.

A row of the table is a layout on 1, 2, 4, 6 or 8 devices (tests/helpers_topologies.py). What the
next step makes of a state depends on its bits and on who computes it, not on who wrote it; each
layout steps as one device does in tests/parity/test_layouts.py.
"""

import functools
import itertools
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from t5x_gpu.checkpoint.checkpointer import RestoredState
from tests import helpers_topologies
from tests.helpers_topologies import SPLITS, STEPS_BEFORE
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY
from tests.helpers_xla import xla_flags
from tests.parity.tolerances import MESH_LOSS

NAMES = list(SPLITS)
QUICK_PAIRS = [
  ('alone', 'fsdp_8'),
  ('fsdp_8', 'fsdp_6'),
  ('fsdp_6', 'circular_2'),
  ('circular_2', 'model_8'),
  ('model_8', 'context_8'),
  ('context_8', 'alone'),
]
ALL_PAIRS = list(itertools.product(NAMES, NAMES))
QUICK_LOSSES = [
  ('circular_2', 'fsdp_8'),
  ('fsdp_8', 'fsdp_6'),
  ('context_8', 'model_8'),
  ('model_8', 'circular_2'),
]


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """Returns get(layout) -> MODEL_DIR, written once."""

  @functools.cache
  def get(name):
    folder = tmp_path_factory.mktemp('written') / name
    helpers_topologies.write(folder, name)
    manifest = json.loads((folder / f'checkpoint_{STEPS_BEFORE}/manifest/metadata').read_text())
    assert manifest['mesh'] == mesh_of(name)
    return folder

  return get


def mesh_of(name: str) -> dict[str, int]:
  return dict(helpers_topologies.program(name).layout.mesh.shape)


def check_restored(restored: RestoredState, reader: str) -> None:
  """Fails unless every array has the bits that were written, split as the reader's mesh wants."""
  want = jax.tree_util.tree_leaves_with_path(helpers_topologies.state())
  targets = jax.tree.leaves(helpers_topologies.program(reader).abstract_saved)
  got = jax.tree.leaves(restored.state)
  assert len(got) == len(want) == len(targets) > 20
  for x, (path, value), target in zip(got, want, targets):
    name = jax.tree_util.keystr(path)
    assert x.sharding == target.sharding and x.dtype == value.dtype, name
    assert np.asarray(x).tobytes() == value.tobytes(), name
  helpers_topologies.data_of(restored)  # compares the hash of the next batch
  assert json.loads(restored.data_state)['batches_taken'] == STEPS_BEFORE


def check_pairs(written, pairs) -> None:
  for writer, reader in pairs:
    try:
      check_restored(helpers_topologies.read(written(writer), reader), reader)
    except Exception as e:
      raise AssertionError(f'written under {writer}, read under {reader}: {e}') from e


def test_layouts_of_every_axis_read_bit_for_bit_what_another_wrote(written):
  check_pairs(written, QUICK_PAIRS)


@pytest.mark.slow
def test_every_pair_of_layouts_restores_bit_for_bit(written):
  assert len(ALL_PAIRS) == 18**2
  meshes = {json.dumps(mesh_of(name)) for name in NAMES}
  assert len(meshes) == 17  # circular_2 has the same mesh as stage_2
  check_pairs(written, ALL_PAIRS)


def after_restore(written, writer: str, reader: str):
  """Returns the state of a run that continues under `reader`, and its batches."""
  restored = helpers_topologies.read(written(writer), reader)
  return helpers_topologies.program(reader).in_run_form(restored.state), helpers_topologies.data_of(
    restored
  )


@pytest.mark.parametrize('writer, reader', QUICK_LOSSES)
def test_the_next_loss_is_that_of_one_device(written, writer, reader):
  """Within MESH_LOSS: other meshes add the same sums in another order."""
  losses = []
  for pair in (('alone', 'alone'), (writer, reader)):
    state, batches = after_restore(written, *pair)
    sums = helpers_topologies.forward(pair[1])(
      state.params, helpers_topologies.put(pair[1], next(batches))
    )
    losses.append(helpers_topologies.loss_of(sums))
  assert losses[1] == pytest.approx(losses[0], rel=MESH_LOSS) and losses[0] > 4


# ---- Numbers of processes ----------------------------------------------------------------------


def processes(count: int, **folders) -> dict:
  """Returns what `count` processes with eight devices in all wrote or found in these folders."""
  environment = {
    **os.environ,
    'PYTHONPATH': str(REPOSITORY),
    'JAX_PLATFORMS': 'cpu',
    'XLA_FLAGS': xla_flags(8 // count),
  }
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      'tests.checkpoint.restoring_ranks',
      f'--count={count}',
      *(f'--{what}={folder}' for what, all_of in folders.items() for folder in all_of),
    ],
    cwd=REPOSITORY,
    env=environment,
    capture_output=True,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return json.loads(done.stdout.splitlines()[-1])


def check_found(found, folder, *, written_by: int, loss: float) -> None:
  manifest = json.loads((folder / f'checkpoint_{STEPS_BEFORE}/manifest/metadata').read_text())
  assert manifest['num_processes'] == written_by
  assert found['checksums'] == manifest['checksums']['arrays'] and len(found['checksums']) > 20
  assert found['loss'] == pytest.approx(loss, rel=MESH_LOSS)


def loss_alone() -> float:
  batches = helpers_topologies.data()
  for _ in range(STEPS_BEFORE):
    next(batches)
  params = helpers_topologies.placed('alone').params
  return helpers_topologies.loss_of(helpers_topologies.forward('alone')(params, next(batches)))


def test_two_processes_read_what_one_wrote_and_go_on_with_the_same_loss(tmp_path):
  helpers_topologies.write(tmp_path / 'of_1', 'fsdp_8')
  found = processes(2, read=[tmp_path / 'of_1'])
  check_found(found[str(tmp_path / 'of_1')], tmp_path / 'of_1', written_by=1, loss=loss_alone())


@pytest.mark.slow
def test_any_number_of_processes_reads_what_any_wrote(tmp_path):
  folders = {count: tmp_path / f'of_{count}' for count in (1, 2, 4)}
  for count, folder in folders.items():
    processes(count, write=[folder])
  sums = [
    json.loads((f / f'checkpoint_{STEPS_BEFORE}/manifest/metadata').read_text())['checksums']
    for f in folders.values()
  ]
  assert sums[0] == sums[1] == sums[2]
  for count in folders:
    found = processes(count, read=folders.values())
    for written_by, folder in folders.items():
      check_found(found[str(folder)], folder, written_by=written_by, loss=loss_alone())
