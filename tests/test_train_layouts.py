"""Runs under every kind of layout: the same losses, evaluations, text and checkpoints as alone."""

import functools
import re
import shutil

import numpy as np
import pytest

from t5x_gpu import train
from tests.helpers_train import Project, run_here
from tests.parity.tolerances import MESH_LOSS

# Random tokens that stand for text: one per letter.
LETTERS = '''"""Batches of t5x_gpu.data.synthetic with a vocabulary."""
from t5x_gpu.data.synthetic import open_batches


class Letters:
  def encode(self, text):
    return [ord(c) for c in text]

  def decode(self, ids):
    return ''.join(chr(i) for i in ids)


def vocabulary(config, feature_converter):
  return Letters()
'''
SAMPLE = """
from t5x_gpu.models import decoding
train_script.train.sample_cfg = @decoding.SampleConfig()
decoding.SampleConfig:
  prompt = 'def '
  num_tokens = 6
"""
MACROS = {
  'DATA_MODULE': 'letters',
  'EVAL_PERIOD': 2,
  'SAVE_PERIOD': 2,
  'TRAIN_STEPS': 4,
  'TransformerConfig.num_layers': 4,
  # Batches that differ from training: fewer microbatches of a pipeline.
  'BATCH_SIZE': 16,
  'train_eval/DatasetConfig.batch_size': 8,
}
LAYOUTS = {
  'alone': (1, 'dp', {}),
  'context_x_model': (8, 'cp', {'NUM_PARTITIONS': 2, 'Partitioner.sequence_parallel': True}),
  '3d': (8, '3d', {}),
  'circular_x_fsdp': (
    8,
    'pp',
    {
      'Partitioner.pipeline_schedule': 'circular',
      'Partitioner.pipeline_repeats': 2,
      'Partitioner.fsdp': 2,
    },
  ),
}


def start(folder, layout: str):
  """Returns the project in `folder` and how its run under `layout` ended."""
  project = Project(folder)
  if SAMPLE not in project.gin_file.read_text():
    project.gin_file.write_text(project.gin_file.read_text() + SAMPLE)
  (folder / 'letters.py').write_text(LETTERS)
  num_devices, parallel, of_layout = LAYOUTS[layout]
  argv = project.argv(f'--gin_file=gin_configs/parallel/{parallel}.gin', **MACROS, **of_layout)
  # Without the folder of compiled programs that `Project.run` has: on CPUs, XLA forgets in what
  # order the collectives of a program come that it reads back, and with several axes they wait for
  # each other (jax 0.10.2).
  return project, run_here(lambda: train.main(argv), num_devices=num_devices)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """Returns run(layout) -> its project after four steps, saved at 2 and 4, and its output."""
  with pytest.MonkeyPatch.context() as patch:

    @functools.cache
    def run(layout):
      folder = tmp_path_factory.mktemp(layout)
      patch.syspath_prepend(str(folder))
      project, result = start(folder, layout)
      assert result.code == 0, result.err
      return project, result.out

    yield run


@pytest.mark.slow
@pytest.mark.parametrize(
  'layout',
  [
    '3d',
    *(
      pytest.param(name, marks=pytest.mark.slow) for name in ('context_x_model', 'circular_x_fsdp')
    ),
  ],
)
def test_losses_evaluations_and_text_are_those_of_one_device(runs, layout):
  (got, out), (want, want_out) = runs(layout), runs('alone')
  for key in ('train/loss', 'eval/loss', 'eval/accuracy'):
    assert got.metrics(key).keys() == want.metrics(key).keys() and want.metrics(key)
    np.testing.assert_allclose(
      list(got.metrics(key).values()), list(want.metrics(key).values()), rtol=MESH_LOSS, err_msg=key
    )
  assert sample(out) == sample(want_out) and len(sample(out)) == len('def ') + 6


def sample(out: str) -> str:
  return re.search(r'Sample \(.*\):\n(def .{6})\n', out, re.MULTILINE | re.DOTALL).group(1)


@pytest.mark.slow
@pytest.mark.parametrize(
  'written_under, read_under',
  [pytest.param('circular_x_fsdp', 'alone', marks=pytest.mark.slow), ('3d', 'circular_x_fsdp')],
)
def test_a_checkpoint_continues_under_another_layout_with_the_same_losses(
  runs, tmp_path, written_under, read_under
):
  """Under the circular schedule layers lie in another order than in a checkpoint."""
  shutil.copytree(runs(written_under)[0].model_dir, tmp_path / 'model')
  shutil.rmtree(tmp_path / 'model/checkpoint_4')
  project, result = start(tmp_path, read_under)
  assert result.code == 0 and 'checkpoint_2.' in result.out, result.err
  for key in ('train/loss', 'eval/loss'):
    want, got = runs(written_under)[0].metrics(key), project.metrics(key)
    assert got.keys() == want.keys()
    np.testing.assert_allclose(list(got.values()), list(want.values()), rtol=MESH_LOSS, err_msg=key)


def test_a_dry_run_shows_parameters_the_bubble_and_the_scaled_learning_rate(tmp_path):
  project = Project(tmp_path)
  result = project.run(
    '--gin_file=gin_configs/parallel/3d.gin',
    '--dry_run',
    **{'TransformerConfig.num_layers': 2, 'train.learning_rate_scaling': 'linear'},
  )
  assert result.code == 0, result.err
  assert re.search(r'learning rate: x 2 \(linear in 2 replicas\)$', result.out, re.MULTILINE)
  # Eight rows in two replicas are four microbatches over two stages: (S-1) / (M + S-1) = 1 / 5.
  assert '  pipeline: 1f1b, 4 microbatches, bubble 20.0% of the time of the layers\n' in result.out
  assert re.search(
    r'^layers/mlp/wi_0/kernel +2 x 16 x 32 +layers embed mlp +stage - model ',
    result.out,
    re.MULTILINE,
  )
  assert re.search(r'^  stage +2 +layers \(pipeline\) +inside a host$', result.out, re.MULTILINE)


def test_tensor_parallelism_on_one_device_names_its_needs_and_the_setting(tmp_path):
  result = Project(tmp_path).run('--gin_file=gin_configs/parallel/tp.gin', num_devices=1)
  assert result.code == 1
  assert result.err == (
    'MeshError: num_partitions = 8 splits every layer over 8 devices, but there is 1 CPU '
    'device.\n'
    '  Set Partitioner.num_partitions = 1, or start on a host with 8 CPU devices.\n'
    '  See docs/mesh.md#sizes\n'
    '  Partitioner.num_partitions is set at gin_configs/parallel/tp.gin:5, through '
    '%NUM_PARTITIONS at gin_configs/parallel/tp.gin:8.\n'
  )


def test_every_misfit_is_reported_at_once_with_where_it_was_set(tmp_path):
  project = Project(tmp_path)
  result = project.run(
    '--gin_file=gin_configs/parallel/3d.gin',
    **{'TransformerConfig.num_heads': 5, 'TransformerConfig.num_layers': 3, 'BATCH_SIZE': 7},
  )
  assert result.code == 1 and not project.model_dir.exists()
  assert 'MeshError: The model does not fit the mesh: 3 problems.\n' in result.err
  origins = [line.split(' is set at ') for line in result.err.splitlines() if ' is set at ' in line]
  assert origins == [
    ['  TransformerConfig.num_heads', '--gin.TransformerConfig.num_heads.'],
    [
      '  Partitioner.num_partitions',
      'gin_configs/parallel/3d.gin:6, through %NUM_PARTITIONS at gin_configs/parallel/3d.gin:9.',
    ],
    ['  BATCH_SIZE', '--gin.BATCH_SIZE.'],
    ['  Partitioner.data', 'gin_configs/parallel/3d.gin:11.'],
    ['  TransformerConfig.num_layers', '--gin.TransformerConfig.num_layers.'],
    ['  Partitioner.stage', 'gin_configs/parallel/3d.gin:10.'],
  ]


@pytest.mark.slow
def test_evaluation_batches_too_small_for_the_circular_schedule_are_refused(tmp_path):
  project = Project(tmp_path)
  result = project.run(
    '--gin_file=gin_configs/parallel/pp.gin',
    num_devices=4,
    **{
      **LAYOUTS['circular_x_fsdp'][2],
      'TransformerConfig.num_layers': 4,
      'train_eval/DatasetConfig.batch_size': 2,
    },
  )
  assert result.code == 1, result.out[-500:]
  assert result.err == (
    'ConfigError: Evaluation batches of 2 are too small: the circular schedule of 2 stages needs '
    'at least 2 rows in each of the 2 parts of a batch.\n'
    '  Set train_eval/DatasetConfig.batch_size to a multiple of 4.\n'
    '  train_eval/DatasetConfig.batch_size is set at '
    '--gin.train_eval/DatasetConfig.batch_size.\n'
  )
