"""The decoder's own properties; its numbers against T5X are in tests/parity."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.compiled.collectives import flops_per_device, partitioned_hlo
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.backends import choose
from t5x_gpu.layers.fp8 import PRODUCT
from t5x_gpu.models.config import REMAT_POLICIES, TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.partitioning.axis_rules import split_names
from tests.helpers_layouts import QUICK
from tests.helpers_programs import program_of
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=17,
  num_layers=3,
  embed_dim=16,
  num_heads=2,
  head_dim=8,
  mlp_dim=32,
  relative_bias='per_layer',
)
LENGTH = 12


def make(**changes):
  """Returns (model, parameters, batch of one unpadded row)."""
  model = DecoderOnlyModel(dataclasses.replace(CONFIG, **changes))
  spec = model.batch_spec({'targets': LENGTH}, batch_size=1, pack=False)
  params = jax.jit(lambda: split_names(model.init(jax.random.key(0), spec))[0])()
  tokens = np.random.default_rng(0).integers(1, 17, (1, LENGTH)).astype(np.int32)
  return model, params, batch_of(tokens)


def logits_of(model, params, batch):
  return jax.jit(model.logits)(params, batch)


def loss_of(model, params, batch, key=None):
  batch = {**batch, 'rows': np.arange(batch['decoder_target_tokens'].shape[0])}
  sums = jax.jit(lambda p, b, k: model.loss(p, b, dropout_key=k))(params, batch, key)
  return sums['loss'][0]


def batch_of(targets, **more):
  inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
  return {
    'decoder_target_tokens': targets,
    'decoder_input_tokens': inputs,
    'decoder_loss_weights': (targets > 0).astype(np.int32),
    **more,
  }


@pytest.mark.quick_cases('decoder_causal_attention*')
@pytest.mark.parametrize('marked_by', ['decoder_loss_weights', 'decoder_causal_attention'])
def test_id_0_is_a_word_if_weights_or_prefix_mark_it(marked_by):
  model, params, _ = make()
  targets = np.asarray([[5, 0, 7, 3, 0, 2, 0, 9, 4, 0, 0, 0]], np.int32)
  is_token = (np.arange(LENGTH) < 10).astype(np.int32)[None]
  batch = batch_of(targets, **{'decoder_loss_weights': 0 * is_token, marked_by: is_token})
  want = logits_of(model, params, {**batch, 'decoder_segment_ids': is_token})
  got = logits_of(model, params, batch)
  np.testing.assert_allclose(got[:, :10], want[:, :10], rtol=1e-6)
  masked = logits_of(model, params, {**batch, marked_by: 0 * is_token})
  assert np.abs(masked - want)[0, 2:10].max() > 1e-3


@pytest.mark.quick_cases('full')
@pytest.mark.parametrize(
  'changes',
  [
    {'scan_unroll': 2},
    pytest.param({'scan_unroll': 8}, marks=pytest.mark.slow),
    {'remat_policy': 'dots', 'full_remat_layers': 3},
    *(
      pytest.param({'remat_policy': policy}, id=policy)
      for policy in REMAT_POLICIES
      if policy != 'none'
    ),
    pytest.param({'remat_policy': 'offload', 'scan_unroll': 8}, marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_loss_and_gradients_do_not_depend_on_unrolling_or_rematerialisation(changes):
  model, params, batch = make()
  other = DecoderOnlyModel(dataclasses.replace(CONFIG, **changes))

  def value_and_grad(m):
    return jax.jit(jax.value_and_grad(lambda p: m.loss(p, batch)['loss'][0]))(params)

  (loss, grads), (other_loss, other_grads) = value_and_grad(model), value_and_grad(other)
  np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), grads, other_grads
  )


@pytest.mark.parametrize(
  'platform, num_devices, changes, has_loop',
  [
    ('gpu', 1, {}, False),
    ('gpu', 2, {}, False),
    ('gpu', 2, {'remat_policy': 'dots'}, True),
    ('cpu', 1, {}, True),
    ('gpu', 1, {'scan_unroll': 1}, True),
    ('gpu', 1, {'dtype': 'fp8'}, False),
    ('gpu', 1, {'num_layers': 33}, True),
  ],
  ids=str,
)
def test_layers_run_without_a_loop_on_a_gpu_unless_they_compute_something_again(
  platform, num_devices, changes, has_loop, monkeypatch
):
  monkeypatch.setattr(choose, 'hardware', lambda: choose.Hardware(platform, 'NVIDIA H200'))
  config = dataclasses.replace(CONFIG, **{'attention': 'dense', **changes})
  program = program_of(DecoderOnlyModel(config), {'targets': LENGTH}, data=num_devices)
  traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
  loops = re.findall(rf'length={config.num_layers}\n.*?unroll=(\d+)', str(traced.jaxpr), re.DOTALL)
  assert loops and (set(loops) == {'1'}) == has_loop, loops


@pytest.mark.slow
def test_rematerialisation_saves_memory():
  # In a loop: XLA's CPU compiler drops the barriers that keep unrolled layers from being merged.
  def temp_bytes(remat_policy):
    model, params, batch = make(num_layers=4, mlp_dim=512, remat_policy=remat_policy)
    grad = jax.jit(jax.grad(lambda p: model.loss(p, batch)['loss'][0]))
    return grad.lower(params).compile(QUICK).memory_analysis().temp_size_in_bytes

  # Not 'offload': on the CPU, XLA keeps in the device's memory what a GPU moves to the host's.
  sizes = [temp_bytes(policy) for policy in BY_MEMORY[:-1]]
  assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 5, sizes
  assert sizes[-1] < 0.75 * sizes[0]


@pytest.mark.parametrize('fp8_scaling', ['current', 'mxfp8'])
@pytest.mark.parametrize('remat_policy', ['dots', 'minimal'])
def test_products_in_8_bits_are_stored_with_their_scale(remat_policy, fp8_scaling):
  changes = dict(num_layers=2, scan_unroll=1, dtype='fp8', fp8_scaling=fp8_scaling)
  model, params, batch = make(**changes, remat_policy=remat_policy)
  jaxpr = jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch)['loss'][0]))(params)
  products = sum(f'name={PRODUCT}' in line for line in str(jaxpr).splitlines())
  gated = len(CONFIG.mlp_activations) > 1
  # Of queries, keys, values, the output of attention and the MLP, and two of a gated MLP once more
  # behind their barrier; none is computed again.
  assert products == 4 + (5 if gated else 2), jaxpr


@pytest.mark.slow
@pytest.mark.parametrize('attention', ['chunked', pytest.param('tokamax', marks=pytest.mark.slow)])
def test_dots_computes_no_matrix_product_of_attention_again(attention):
  def flops(remat_policy):
    model, params, batch = make(num_layers=2, attention=attention, remat_policy=remat_policy)
    grad = jax.jit(jax.grad(lambda p: model.loss(p, batch)['loss'][0]))
    return flops_per_device(partitioned_hlo(grad.lower(params)))

  assert flops('dots') == flops('none') < flops('minimal')
  of_attention = flops('minimal') - flops('dots')
  assert flops('attention') <= flops('full') - of_attention


@pytest.mark.slow
def test_offload_keeps_inputs_and_matmul_outputs_of_layers_in_host_memory():
  def on_host(remat_policy):
    model, params, batch = make(num_layers=2, relative_bias='shared', remat_policy=remat_policy)
    jaxpr = jax.make_jaxpr(jax.grad(lambda p: model.loss(p, batch)['loss'][0]))(params)
    # With or without the one row, which products merge with the positions.
    return sorted(re.findall(r'f32<host>\[(?:1,)?([\d,]*)\] = device_put', str(jaxpr)))

  query_key_value, mlp = ['12,2,8'] * 3, ['12,32'] * 2
  residual = ['12,16'] * 2  # the layer's input, and attention's output
  assert on_host('offload') == sorted(query_key_value + mlp + residual)
  assert on_host('minimal') == []


@pytest.mark.quick_cases('shared')
@pytest.mark.parametrize('relative_bias', ['none', 'shared', 'per_layer'])
def test_a_logit_does_not_depend_on_later_tokens(relative_bias):
  model, params, batch = make(relative_bias=relative_bias)
  changed = batch_of(np.where(np.arange(LENGTH) >= 7, 3, batch['decoder_target_tokens']))
  logits, other = logits_of(model, params, batch), logits_of(model, params, changed)
  np.testing.assert_allclose(logits[:, :8], other[:, :8], rtol=1e-5, atol=1e-6)
  assert not np.allclose(logits[:, 8:], other[:, 8:], atol=1e-3)


def test_packed_examples_have_the_loss_of_separate_ones():
  model, params, _ = make()
  rng = np.random.default_rng(1)
  a, b = (rng.integers(1, 17, (1, n)).astype(np.int32) for n in (5, 7))
  packed = batch_of(np.concatenate([a, b], 1), decoder_segment_ids=np.array([[1] * 5 + [2] * 7]))
  packed['decoder_input_tokens'][0, 5] = 0  # a new example starts from 0

  def padded(x):
    return batch_of(np.pad(x, ((0, 0), (0, LENGTH - x.shape[1]))))

  want = sum(loss_of(model, params, padded(x)) for x in (a, b))
  np.testing.assert_allclose(loss_of(model, params, packed), want, rtol=1e-5)


@pytest.mark.slow
def test_inputs_see_each_other_only_when_asked():
  model, params, batch = make()
  batch['decoder_causal_attention'] = np.array([[1] * 6 + [0] * 6])
  prefix_model = dataclasses.replace(model, inputs_bidirectional_attention=True)
  causal = logits_of(model, params, batch)
  np.testing.assert_array_equal(causal, logits_of(model, params, make()[2]))
  assert not np.allclose(logits_of(prefix_model, params, batch), causal, atol=1e-3)
  assert model.feature_converter({'inputs': 4, 'targets': 4}) == 'prefix_lm'
  assert model.feature_converter({'targets': 4}) == 'lm'


@pytest.mark.slow
def test_dropout_needs_a_key_and_follows_it():
  model, params, batch = make(dropout_rate=0.5)
  keys = jax.random.split(jax.random.key(1))

  def loss(key=None):
    return float(loss_of(model, params, batch, key))

  assert loss(keys[0]) == loss(keys[0]) != loss(keys[1])
  assert loss() == loss() != loss(keys[0])


@pytest.mark.slow
def test_bfloat16_computes_in_bfloat16_with_float32_parameters_and_logits():
  model, params, batch = make(dtype='bfloat16')
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype('float32')}
  logits = logits_of(model, params, batch)
  assert logits.dtype == jnp.float32
  want = logits_of(make()[0], params, batch)
  np.testing.assert_allclose(logits, want, atol=0.1)
  assert not np.array_equal(logits, want)


@pytest.mark.parametrize('name', ['finish', '_finish'])
def test_a_model_of_a_user_overrides_finish_by_its_name_today_and_in_0_2(name):
  calls = []

  def own(self, params, x, batch, dropout_key):
    calls.append(self)
    return getattr(super(user_class, self), name)(params, x, batch, dropout_key)

  model, params, batch = make()
  user_class = type('UserModel', (DecoderOnlyModel,), {name: own})
  user_model = user_class(model.config)
  for part in (user_model.logits, user_model.token_log_probs, user_model.loss):
    jax.eval_shape(part, params, batch)
  assert calls == [user_model] * 3


def test_an_untrained_model_guesses():
  model, params, _ = make(vocab_size=512)
  tokens = np.random.default_rng(0).integers(1, 512, (8, LENGTH)).astype(np.int32)
  loss = loss_of(model, params, batch_of(tokens)) / tokens.size
  assert abs(loss - np.log(512)) < 1.0


def test_flops_count_the_weights_six_times_and_attention_twelve_times():
  c = CONFIG
  matmul_weights = sum(
    np.prod(p.shape)
    for path, p in jax.tree_util.tree_leaves_with_path(make()[1])
    if 'kernel' in str(path)
  )
  want = 6 * matmul_weights + 12 * c.num_layers * c.num_heads * c.head_dim * LENGTH
  assert transformer_flops_per_token(c, LENGTH) == want


@pytest.mark.parametrize(
  'changes',
  [
    {'num_heads': 0},
    {'dropout_rate': 1.0},
    {'dtype': 'bfloat61'},
    {'relative_bias': 'per-layer'},
    {'mlp_activations': ('gleu',)},
    {'max_length': 64, 'num_positions': 32},
  ],
  ids=str,
)
def test_impossible_models_are_refused_with_the_value_and_a_suggestion(changes):
  with raises(ModelError):
    dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize('parameter', ['num_positions', 'max_length'])
def test_rows_longer_than_the_model_takes_are_refused(parameter):
  model = DecoderOnlyModel(dataclasses.replace(CONFIG, **{parameter: 8}))
  model.batch_spec({'targets': 8}, batch_size=1, pack=False)
  with raises(ModelError):
    model.batch_spec({'targets': 9}, batch_size=1, pack=False)


def test_all_problems_of_a_model_come_in_one_message():
  with raises(ModelError):
    dataclasses.replace(CONFIG, num_heads=0, dtype='x', dropout_rate=2.0)


@pytest.mark.parametrize('options', [{'z_loss': -1e-4}, {'label_smoothing': 1.0}], ids=str)
def test_impossible_losses_are_refused(options):
  with raises(ModelError):
    DecoderOnlyModel(CONFIG, **options)


def test_only_a_model_without_positions_does_not_see_the_order():
  assert CONFIG.sees_order
  assert not dataclasses.replace(CONFIG, relative_bias='none').sees_order
  assert dataclasses.replace(CONFIG, relative_bias='none', num_positions=8).sees_order
