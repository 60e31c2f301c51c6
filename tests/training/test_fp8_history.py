"""Delayed scaling: the history is the same on every layout, and hidden from the optimizer."""

import dataclasses

import jax
import numpy as np
import pytest

from benchmarks.precision_curves import Run, averages, curve
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.initialize import Origin
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.fp8 import Operand
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.precision import AMAX
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.state import Fp8History
from tests.helpers_layouts import QUICK
from tests.helpers_programs import build_with
from tests.messages import raises

CURRENT = TransformerConfig(
  vocab_size=32,
  num_layers=2,
  embed_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=24,
  mlp_activations=('relu',),
  dtype='fp8_float32',
  remat_policy='full',
)
DELAYED = dataclasses.replace(CURRENT, fp8_scaling='delayed', fp8_history=3)
STEPS = 2


def program(config=DELAYED, *, num_devices=1, num_microbatches=1, **partitioner):
  return build_with(
    model=DecoderOnlyModel(config),
    optimizer=AdamW(weight_decay=0.1),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'targets': 8},
    batch_size=8,
    pack=True,
    num_microbatches=num_microbatches,
    max_grad_norm=0.1,
  )


def train(p, *, num_steps=STEPS):
  """Returns (state, losses) after some steps."""
  batches = [p.layout.put_batch(b) for b in uneven_batches(p.spec, seed=1, num_batches=num_steps)]
  step = p.train_step.lower(p.abstract_state, batches[0]).compile(compiler_options=QUICK)
  state, losses = p.init(), []
  for batch in batches:
    state, sums = step(state, batch)
    losses.append(float(sums['loss'][0] / sums['loss'][1]))
  return state, losses


@pytest.fixture(scope='module')
def one_device():
  return train(program())


@pytest.mark.slow
def test_a_history_has_the_largest_values_of_the_last_steps(one_device):
  state, _ = one_device
  first, second = program().init(), train(program(), num_steps=1)[0]
  for block, name in (('mlp', 'wo'), ('self_attention', 'out')):
    history = state.fp8_history['layers'][block][name][AMAX]
    assert history.shape == (2, len(Operand), 3)
    assert np.all(history[..., :STEPS] > 0) and not np.any(history[..., STEPS:])
    for step, before in ((1, first), (0, second)):  # the newest comes first
      kernel = before.params['layers'][block][name]['kernel']
      np.testing.assert_array_equal(
        history[:, Operand.KERNEL, step], np.max(np.abs(kernel), axis=tuple(range(1, kernel.ndim)))
      )


LAYOUTS = {
  'accumulation': dict(num_microbatches=2),
  'data': dict(num_devices=2, num_microbatches=2),
  'fsdp': dict(num_devices=2, fsdp=2, num_microbatches=2),  # layer by layer
  'overlap': dict(num_devices=2, num_microbatches=2, overlap_layers=True),
  'fsdp_overlap': dict(num_devices=2, fsdp=2, overlap_layers=True),
  'zero1': dict(num_devices=2, fsdp=2, zero_stage=1, num_microbatches=2),
  'context': dict(num_devices=2, context=2),
  'fsdp_model': dict(num_devices=4, fsdp=2, num_partitions=2, num_microbatches=2),
}
FAST = ('fsdp', 'fsdp_overlap')


@pytest.mark.parametrize(
  'name', [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_every_layout_keeps_the_history_of_one_device(one_device, name):
  want, want_losses = one_device
  state, losses = train(program(**LAYOUTS[name]))
  np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
  got, expected = state.fp8_history, want.fp8_history
  assert all(a.sharding.is_fully_replicated for a in jax.tree.leaves(got))
  rtol = 1e-5
  if name == 'fsdp_model':  # query, key and value are one matmul if heads are split
    got, expected, rtol = of_one_matmul(got), of_one_matmul(expected), 0.05
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol), got, expected)


def of_one_matmul(history):
  """Returns a history with the largest values of query, key and value together."""
  blocks = dict(jax.device_get(history)['layers'])
  attention = dict(blocks['self_attention'])
  joined = [attention.pop(name)[AMAX] for name in ('query', 'key', 'value')]
  return {**blocks, 'self_attention': {**attention, 'joined': np.max(joined, axis=0)}}


def test_scales_follow_the_largest_value_of_the_history_times_the_margin():
  history = {'amax': np.float32([[[1, 5, 2], [0, 0, 3], [0, 0, 0]]])}
  amax = Fp8History(3, margin=2).amaxes(history)['amax']
  np.testing.assert_array_equal(amax[0, :2], [20, 12])
  assert amax[0, Operand.GRADIENT] > 0  # nothing is known: a guess
  after = Fp8History(3).after(history, {'amax': np.float32([[7, 8, 9]])})['amax']
  np.testing.assert_array_equal(after, [[[7, 1, 5], [8, 0, 0], [9, 0, 0]]])


def test_only_the_history_is_added_to_the_state():
  current, delayed = (program(c).abstract_state for c in (CURRENT, DELAYED))
  assert delayed.replace(fp8_history={}) == current
  assert current.fp8_history == {}


def test_a_checkpoint_without_a_history_gets_a_new_one(tmp_path, one_device, caplog):
  p, (state, _) = program(), one_device

  def saved(name, state):

    with Checkpointer(tmp_path / name) as checkpointer:
      described = make_manifest(state, mesh_shape={}, data={}, next_batch_hash='')
      checkpointer.save(STEPS, state, data_state=b'', manifest=described)
    return tmp_path / name

  def restored(folder, program):
    with Checkpointer(folder) as checkpointer:
      return Origin().first_state(checkpointer, program, None)[0]

  with_it, without = saved('with', state), saved('without', state.replace(fp8_history={}))
  same = restored(with_it, p)
  jax.tree.map(np.testing.assert_array_equal, same, state)
  caplog.clear()
  with caplog.at_level('INFO'):
    new = restored(without, p)
  assert 'no FP8 history of this length' in caplog.text
  jax.tree.map(np.testing.assert_array_equal, new.params, state.params)
  assert not any(np.any(a) for a in jax.tree.leaves(new.fp8_history))
  assert restored(with_it, program(CURRENT)).fp8_history == {}
  longer = program(dataclasses.replace(DELAYED, fp8_history=5))
  assert jax.tree.leaves(restored(with_it, longer).fp8_history)[0].shape[-1] == 5


def test_pipelines_refuse_delayed_scaling():
  with raises(ModelError):
    program(num_devices=2, stage=2, num_pipeline_microbatches=2)


@pytest.mark.slow
def test_loss_curve_is_that_of_current_scaling():
  current, delayed = (
    averages(curve(Run('fp8'), 60, fp8_scaling=s)) for s in ('current', 'delayed')
  )
  assert current[-1] < 0.85 * current[0]
  np.testing.assert_allclose(delayed, current, rtol=0.02)
