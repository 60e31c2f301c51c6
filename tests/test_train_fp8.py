"""A run in FP8 with FSDP, accumulation, remat, checkpoints and restarts."""

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
def test_fp8_resumes_bit_exactly_and_its_checkpoint_continues_in_another_precision(tmp_path, warm):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  whole, parts = (Project(tmp_path / name, warm=warm) for name in 'ab')
  result = whole.run(**FP8, TRAIN_STEPS=6, num_devices=4)
  assert result.code == 0, result.err
  assert 'precision: fp8, emulated' in result.out
  assert parts.run(**FP8, TRAIN_STEPS=3, num_devices=4).code == 0
  assert parts.run(**FP8, TRAIN_STEPS=6, num_devices=4).code == 0
  assert parts.metrics() == whole.metrics()

  other = {**FP8, 'PRECISION': 'bfloat16', 'Partitioner.fsdp': 2}
  result = parts.run(**other, TRAIN_STEPS=8, num_devices=2)
  assert result.code == 0, result.err
  assert list(parts.metrics()) == list(range(1, 9))
