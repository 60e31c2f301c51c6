"""Rows of weight 0 that fill a batch change no loss, gradient, update or evaluation."""

import dataclasses
from typing import Optional

import jax
import numpy as np
import pytest

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import MeshError
from t5x_gpu.evaluation.evaluator import check_eval_batch
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_parity import OPTIMIZER, assert_same_evaluation, assert_same_steps, recorded
from tests.helpers_programs import build_with
from tests.messages import raises
from tests.models import test_dpo
from tests.models.test_embeddings import MODEL as EMBEDDINGS
from tests.parity import test_layouts
from tests.parity.test_layouts import DENSE, Case

FILL = dict(uneven_batch='fill')
# 16 rows on three, six or twelve parts of a batch.
CASES = {
  'dp': Case(dict(data=3), num_devices=3),
  'dp_2_microbatches': Case(dict(data=3), num_devices=3, num_microbatches=2),
  'zero3_by_layer': Case(dict(fsdp=3), num_devices=3, num_microbatches=2),
  'zero1_overlap': Case(dict(fsdp=6, zero_stage=1, overlap_layers=True), num_devices=6),
  'context_model': Case(dict(data=3, context=2), num_devices=6, model='modern'),
  'pipeline': Case(dict(data=3, stage=2, num_pipeline_microbatches=4), num_devices=6),
  'pipeline_of_all_rows': Case(dict(data=1, stage=2, num_pipeline_microbatches=3), num_devices=2),
  'charged_moe': Case(dict(data=3, expert=2), num_devices=6, model='charged_moe'),
  'moe': Case(dict(data=3, expert=2), num_devices=6, model='moe'),
  't5': Case(dict(data=3, num_partitions=2), num_devices=6, model='t5'),
  'mlm': Case(dict(data=3), num_devices=3, model='mlm'),
  'classifier': Case(dict(fsdp=3), num_devices=3, model='classifier'),
}


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_a_filled_batch_trains_as_its_rows_on_one_device(name):
  # Random numbers are two thirds of the program.
  config = {} if name == 'dp' else dict(dropout_rate=0.0)
  case = CASES[name]
  case = dataclasses.replace(case, partitioner={**case.partitioner, **FILL}, config=config)
  filled = recorded(test_layouts.build(case, case.num_devices, AdamW()))
  assert filled.program.step_spec.batch_size > filled.program.spec.batch_size == 16
  one = test_layouts.one_device(case.model, case.batch_size, AdamW(), **config)
  assert_same_steps(filled, one, num_steps=2)
  if name in ('dp', 'classifier'):
    assert_same_evaluation(filled.program, one.program)


@pytest.mark.slow
def test_preferences_train_as_on_one_device():
  model = test_dpo.DpoModel(test_dpo.PLAIN, 0.3)
  expected, expected_means = test_dpo.single('copy')
  params, means = test_dpo.trained(model, num_devices=3, data=3, uneven_batch='fill')
  for ours, theirs in zip(means, expected_means, strict=True):
    assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
  for name, value in expected.items():
    np.testing.assert_allclose(params[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def program(
  batch_size: int,
  *,
  model: Model = DecoderOnlyModel(dataclasses.replace(DENSE, dropout_rate=0.0)),
  length_of: str = 'targets',
  num_devices: int = 3,
  num_microbatches: int = 1,
  loss_normalizing_factor: Optional[str] = None,
  **partitioner: str,
) -> Program:
  return build_with(
    model=model,
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    loss_normalizing_factor=loss_normalizing_factor,
    task_feature_lengths={length_of: 8},
    batch_size=batch_size,
    pack=length_of == 'targets',
    num_microbatches=num_microbatches,
  )


def test_an_uneven_batch_is_refused_unless_rows_may_fill_it():
  with raises(MeshError):
    program(8)
  filled = program(8, uneven_batch='fill')
  assert filled.spec.batch_size == 8 and filled.step_spec.batch_size == 9
  assert filled.layout.notes == (
    "batch: 8 rows + 1 of weight 0 to fill a multiple of 3 (uneven_batch = 'fill'): 11.1% of the "
    'work of a step is idle',
  )
  in_parts = program(8, num_microbatches=2, uneven_batch='fill')
  assert in_parts.step_spec.batch_size == 12


def test_a_batch_that_divides_stays_as_it_is():
  even = program(9, uneven_batch='fill')
  assert even.step_spec == even.spec and even.layout.notes == ()


def test_the_rows_that_fill_are_zeros_after_the_rows_of_the_data():
  filled = program(4, uneven_batch='fill')
  [batch] = uneven_batches(filled.spec, seed=0, num_batches=1)
  for name, x in filled.put_batch(batch).items():
    assert [shard.data.shape[0] for shard in x.addressable_shards] == [2, 2, 2]
    np.testing.assert_array_equal(x, np.concatenate([batch[name], np.zeros((2, 8), x.dtype)]))
  for name, x in program(4, num_devices=1).layout.put(batch, rows=5).items():
    np.testing.assert_array_equal(x, np.concatenate([batch[name], np.zeros((1, 8), x.dtype)]))


def test_evaluation_batches_are_filled_too():
  check_eval_batch(7, program(9, uneven_batch='fill'))
  assert program(9, uneven_batch='fill').layout.filled_rows(7) == 9


def test_a_divisor_of_all_positions_counts_the_positions_of_the_data():
  totals = dict(batch_size=8, loss_normalizing_factor='NUM_TOTAL_TARGET_TOKENS')
  filled = program(uneven_batch='fill', **totals)
  alone = program(num_devices=1, **totals)
  assert_same_steps(recorded(filled), recorded(alone))


@pytest.mark.slow
def test_rows_that_fill_are_not_negatives_of_embeddings():
  embeddings = dict(model=EMBEDDINGS, length_of='inputs')
  filled = program(8, uneven_batch='fill', **embeddings)
  assert_same_steps(recorded(filled), recorded(program(8, num_devices=1, **embeddings)))
