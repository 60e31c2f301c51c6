"""Every kind of parallelism over real processes on loopback is the same run as one process."""

import os
import re
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.tools.checkpoints import verify
from tests.helpers_train import DEADLINE_SECONDS, REPOSITORY, Project
from tests.helpers_xla import xla_flags
from tests.parity.tolerances import MESH_LOSS

# In `make test`, checkpoint/test_any_to_any.py continues a run on two processes with its losses.
pytestmark = [pytest.mark.cluster, pytest.mark.slow]

# A low learning rate: where a gradient is nearly 0, Adam makes whole steps of its rounding.
MACROS = {
  'TRAIN_STEPS': 3,
  'WARMUP_STEPS': 1,
  'TransformerConfig.num_layers': 4,
  'LEARNING_RATE': 1e-3,
  'DROPOUT_RATE': 0.1,
  'train.train_eval_dataset_cfg': None,
}


@pytest.fixture(scope='module')
def alone(tmp_path_factory) -> Project:
  project = Project(tmp_path_factory.mktemp('alone'))
  result = project.run(num_devices=1, **MACROS)
  assert result.code == 0, result.err
  return project


def parameters(project: Project) -> dict[str, np.ndarray]:
  """Returns path -> value of the parameters in the last checkpoint, read by Orbax alone."""
  folder, reader = project.model_dir / 'checkpoint_3' / 'state', ocp.PyTreeCheckpointer()
  state = reader.restore(
    folder,
    restore_args=jax.tree.map(
      lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(folder).item_metadata.tree
    ),
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): value
    for path, value in jax.tree_util.tree_leaves_with_path(state['params'])
  }


@pytest.mark.parametrize(
  'parallel, processes, devices_of_each, macros',
  [
    ('fsdp', 4, 1, {}),
    ('tp', 2, 2, {'NUM_PARTITIONS': 4}),  # over processes of one host: legal
    ('cp', 2, 2, {'Partitioner.context': 4}),
    ('pp', 2, 2, {'Partitioner.stage': 4}),
    ('3d', 2, 4, {}),
  ],
)
def test_processes_give_the_losses_and_parameters_of_one(
  tmp_path, alone, parallel, processes, devices_of_each, macros
):
  project = Project(tmp_path)
  env = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'XLA_FLAGS': xla_flags(devices_of_each)}
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_gpu.launch',
      '--nproc',
      str(processes),
      '--no_gpu',
      '--',
      f'--gin_file={project.gin_file}',
      f'--gin_file=gin_configs/parallel/{parallel}.gin',
      *project.argv(**MACROS, **macros)[1:],
    ],
    cwd=tmp_path,
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    timeout=DEADLINE_SECONDS,
  )
  assert done.returncode == 0, done.stdout
  assert re.search(
    rf'\[0\] .*mesh: 1 host x {processes * devices_of_each} CPU devices', done.stdout
  )
  assert list(project.metrics()) == [1, 2, 3]
  assert project.metrics() == pytest.approx(alone.metrics(), rel=MESH_LOSS)
  ours, theirs = parameters(project), parameters(alone)
  assert ours.keys() == theirs.keys()
  for path, value in theirs.items():
    np.testing.assert_allclose(ours[path], value, rtol=0, atol=1e-5, err_msg=path)
  # Checksums added up by processes equal the checksums that one reader computes from the files.
  verdict = verify(StateReader(project.model_dir), advance=lambda num_bytes: None)
  assert not verdict.damaged and not verdict.num_unknown and verdict.num_arrays > 20
