"""A run in FP8 with FSDP, accumulation and remat, and its checkpoint."""

import pytest

from tests.helpers_train import Project

FP8 = {
  'PRECISION': 'fp8',
  'Partitioner.fsdp': 4,
  'NUM_MICROBATCHES': 2,
  'DROPOUT_RATE': 0.1,
  'TransformerConfig.num_layers': 2,
  'TransformerConfig.remat_policy': 'full',
  'SAVE_PERIOD': 3,
}


@pytest.mark.slow
def test_a_checkpoint_of_an_fp8_run_continues_in_another_precision(tmp_path):
  project = Project(tmp_path)
  result = project.run(**FP8, TRAIN_STEPS=3, num_devices=4)
  assert result.code == 0, result.err
  assert 'precision: fp8, emulated' in result.out
  other = {**FP8, 'PRECISION': 'bfloat16', 'Partitioner.fsdp': 2}
  result = project.run(**other, TRAIN_STEPS=5, num_devices=2)
  assert result.code == 0, result.err
  assert list(project.metrics()) == list(range(1, 6))
