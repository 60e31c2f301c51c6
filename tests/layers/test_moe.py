"""The mixture-of-experts MLP against plain MLPs: routing, room, gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.compiled.collectives import flops_per_device
from t5x_gpu.errors import ModelError
from t5x_gpu.layers.backends.choose import Hardware
from t5x_gpu.layers.dropout import DropoutRng
from t5x_gpu.layers.grouped_matmul import Groups, grouped_matmul, kernel_for
from t5x_gpu.layers.mlp import Mlp
from t5x_gpu.layers.moe import MoeConfig, MoeMlp, capacity, route, router_charges
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.flops import transformer_flops_per_token
from t5x_gpu.partitioning.axis_rules import AxisNames, split_names
from t5x_gpu.runtime.main_log import log_once
from t5x_gpu.training.adafactor import Adafactor
from tests.messages import raises

BATCH, LENGTH, EMBED, MLP = 3, 12, 8, 16
CONFIG = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=8, num_heads=2, head_dim=4, mlp_dim=16
)


@pytest.fixture
def x():
  return np.random.default_rng(0).normal(size=(BATCH, LENGTH, EMBED)).astype(np.float32)


def moe(num_experts, k=2, factor=2.0, **settings):
  """Returns experts, of which each token uses `k`."""
  return MoeMlp(
    MoeConfig(
      num_experts=num_experts,
      num_experts_per_token=k,
      expert_capacity_factor=factor,
      mlp_dim=MLP,
      **settings,
    )
  )


def init(module):
  """Returns plain parameters of `module`."""
  return jax.jit(
    lambda: split_names(module.init(jax.random.key(0), jnp.zeros((1, 1, EMBED)))['params'])[0]
  )()


def output(module, params, x, **options):
  """Returns what a module makes of `x`; of experts, without their charges."""
  out = module.apply({'params': params}, x, **options)
  return out[0] if isinstance(out, tuple) else out


def apply(module, params, x, **options):
  return jax.jit(lambda params, x: output(module, params, x, **options))(params, x)


def kept_choices(ids, room):
  """Returns which of the choices [batch, length, k] find room, token after token."""
  kept = np.zeros(ids.shape, bool)
  for row in range(ids.shape[0]):
    taken = {}
    for place in range(ids.shape[1]):
      for choice, expert in enumerate(ids[row, place]):
        kept[row, place, choice] = taken.get(expert, 0) < room
        taken[expert] = taken.get(expert, 0) + 1
  return kept


def reference(params, x, ids, kept):
  """Returns what every expert makes of every token, weighted by the gates; gated GELU.

  Args:
    params: parameters of a MoeMlp.
    x: [batch, length, embed].
    ids, kept: [batch, length, k] the chosen experts and whether they had room.
  """
  probabilities = jax.nn.softmax(x @ params['router']['kernel'])
  gates = jnp.take_along_axis(probabilities, ids, -1)
  if ids.shape[-1] > 1:
    gates = gates / gates.sum(-1, keepdims=True)
  one_hot = jax.nn.one_hot(ids, probabilities.shape[-1])
  weights = jnp.sum(one_hot * (gates * kept)[..., None], axis=2)
  wi_0, wi_1, wo = (params[name]['kernel'] for name in ('wi_0', 'wi_1', 'wo'))
  hidden = jax.nn.gelu(jnp.einsum('bld,edm->belm', x, wi_0)) * jnp.einsum('bld,edm->belm', x, wi_1)
  return jnp.einsum('belm,emd,ble->bld', hidden, wo, weights)


@pytest.mark.quick_cases('4-2-0.5', '5-3-0.7')
@pytest.mark.parametrize('experts, k, factor', [(4, 2, 4.0), (4, 2, 0.5), (6, 1, 1.0), (5, 3, 0.7)])
def test_outputs_and_gradients_equal_those_of_every_expert_on_every_token(x, experts, k, factor):
  module = moe(experts, k, factor)
  params = init(module)
  room = capacity(LENGTH, num_experts=experts, experts_per_token=k, factor=factor)
  weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
  ids = np.argsort(-(x @ np.asarray(params['router']['kernel'])), axis=-1)[..., :k]
  kept = kept_choices(ids, room)
  assert kept.all() == (factor == 4.0)

  @jax.jit
  def both(params, x, ids, kept):
    return tuple(
      jax.value_and_grad(lambda p, x: jnp.sum(weights * f(p, x)), (0, 1))(params, x)
      for f in (lambda p, x: output(module, p, x), lambda p, x: reference(p, x, ids, kept))
    )

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *both(params, x, ids, kept)
  )


@pytest.mark.quick_cases('0.5-activations1')
@pytest.mark.parametrize('activations', [('relu',), ('gelu', 'linear')])
@pytest.mark.parametrize('rate', [0.0, 0.5])
def test_one_expert_with_room_for_all_is_the_dense_mlp(x, activations, rate):
  module = moe(1, 1, 1.0, mlp_activations=activations, dropout_rate=rate)
  dense = Mlp(module.config)
  params = init(dense)
  of_expert = {**jax.tree.map(lambda p: p[None], params), 'router': init(module)['router']}
  rng = DropoutRng(jax.random.key(1), jnp.arange(BATCH))
  np.testing.assert_allclose(
    apply(module, of_expert, x, dropout_rng=rng),
    apply(dense, params, x, dropout_rng=rng),
    rtol=1e-5,
    atol=1e-6,
  )


def all_to_one_expert(module):
  """Returns parameters under which every token with a positive first feature chooses expert 0."""
  params = init(module)
  kernel = np.zeros((EMBED, module.config.num_experts), np.float32)
  kernel[0, 0] = 100.0
  return {**params, 'router': {'kernel': jnp.asarray(kernel)}}


def test_overflow_drops_the_later_tokens_of_a_row_only(x):
  module = moe(4, 1, 1.0)  # room for 12 / 4 = 3 tokens
  x[:, :, 0] = 1.0
  x[1, :6, 0] = -1.0  # the first tokens of row 1 go elsewhere
  out = np.asarray(apply(module, all_to_one_expert(module), x))
  passed = (out != 0).any(-1)
  np.testing.assert_array_equal(passed[0], np.arange(LENGTH) < 3)
  np.testing.assert_array_equal(passed[1][6:], np.arange(6) < 3)
  np.testing.assert_array_equal(passed[2], np.arange(LENGTH) < 3)


def test_a_row_is_independent_of_other_rows_and_a_token_of_later_ones(x):
  module = moe(4, 2, 0.5)
  params = init(module)
  out = np.asarray(apply(module, params, x))
  changed = x.copy()
  changed[0] = np.random.default_rng(1).normal(size=changed[0].shape)
  np.testing.assert_array_equal(apply(module, params, changed)[1], out[1])
  changed = x.copy()
  changed[:, 7:] = np.random.default_rng(2).normal(size=changed[:, 7:].shape)
  np.testing.assert_array_equal(apply(module, params, changed)[:, :7], out[:, :7])


def test_gates_add_up_to_one_and_a_single_gate_is_its_probability():
  logits = np.random.default_rng(0).normal(size=(2, 5, 4)).astype(np.float32)
  several = route(logits, experts_per_token=2, capacity=5).gates
  np.testing.assert_allclose(several.sum(-1), 1.0, rtol=1e-6)
  single = route(logits, experts_per_token=1, capacity=5).gates
  np.testing.assert_allclose(single[..., 0], jax.nn.softmax(logits).max(-1), rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('factor', [None, 4.0])
def test_gates_are_divided_by_their_sum_or_not_as_asked(x, factor):
  params = init(moe(4))
  logits = x @ np.asarray(params['router']['kernel'])
  chosen = np.sort(jax.nn.softmax(logits), axis=-1)[..., -2:].sum(-1, keepdims=True)
  both = [apply(moe(4, 2, factor, normalize_gates=on), params, x) for on in (True, False)]
  np.testing.assert_allclose(both[0] * chosen, both[1], rtol=1e-4, atol=1e-6)
  one = route(logits, experts_per_token=1, capacity=LENGTH, normalize=True).gates
  np.testing.assert_array_equal(one, 1.0)


def test_gradients_do_not_use_scatter_add(x):
  module = moe(4)
  gradient = jax.grad(lambda p, x: output(module, p, x).sum(), (0, 1))
  assert 'scatter' not in str(jax.make_jaxpr(gradient)(init(module), x))


def test_the_router_chooses_in_float32_whatever_the_dtype(x):
  """Choices of bfloat16 logits would differ: two experts' logits are closer than its rounding."""
  module = moe(2, 1, dtype='bfloat16')
  params = init(module)
  kernel = np.ones((EMBED, 2), np.float32)
  kernel[:, 1] += 1e-4
  params['router'] = {'kernel': jnp.asarray(kernel)}
  params['wo'] = {'kernel': params['wo']['kernel'].at[0].set(0.0)}
  out = apply(module, params, np.abs(x).astype(jnp.bfloat16))
  assert out.dtype == jnp.bfloat16
  assert (np.asarray(out, np.float32) != 0).any(-1).all()  # no token went to expert 0


def test_experts_are_drawn_as_so_many_mlps():
  kernel = init(moe(64))['wo']['kernel']
  np.testing.assert_allclose(np.std(kernel), MLP**-0.5, rtol=0.05)
  assert len({float(k[0, 0]) for k in kernel}) == 64
  params = init(moe(64, init_stddev=0.02))
  for kernel in jax.tree.leaves(params):  # of the experts and of the router
    np.testing.assert_allclose(np.std(kernel), 0.02, rtol=0.1)


@pytest.mark.parametrize(
  'changes, parameter',
  [
    ({'num_experts': -1}, 'num_experts'),
    ({'num_experts': 2, 'num_experts_per_token': 3}, 'num_experts_per_token'),
    ({'num_experts': 2, 'num_experts_per_token': 0}, 'num_experts_per_token'),
    ({'num_experts': 2, 'expert_capacity_factor': 0.0}, 'expert_capacity_factor'),
  ],
  ids=str,
)
def test_experts_that_cannot_be_are_refused_by_name(changes, parameter):
  with raises(ModelError) as caught:
    dataclasses.replace(CONFIG, **changes)
  assert caught.value.parameters == (f'TransformerConfig.{parameter}',)


def test_flops_count_the_experts_that_a_token_uses():
  dense, many, more = (
    transformer_flops_per_token(dataclasses.replace(CONFIG, **changes), 16)
    for changes in ({}, {'num_experts': 8}, {'num_experts': 16})
  )
  mlp, router = 3 * 8 * 16, 8 * 8
  assert many - dense == 6 * CONFIG.num_layers * (mlp + router)
  assert more - many == 6 * CONFIG.num_layers * router


def test_adafactor_treats_each_expert_as_a_separate_parameter():
  optimizer = Adafactor(min_dim_size_to_factor=4)
  rng = np.random.default_rng(0)
  param, grad = (rng.normal(size=(3, 8, 16)).astype(np.float32) for _ in range(2))

  def update(param, grad, names):
    names = {'p': AxisNames(names)}
    state = optimizer.init({'p': param}, names)
    return optimizer.update(
      {'p': grad}, state, {'p': param}, names=names, learning_rate=0.1, step=jnp.asarray(0)
    )[0]['p']

  together = update(param, grad, ('experts', 'embed', 'mlp'))
  for i in range(3):
    np.testing.assert_allclose(together[i], update(param[i], grad[i], ('embed', 'mlp')), rtol=1e-5)


def test_without_a_capacity_factor_no_token_is_dropped(x):
  module = moe(4, 1, None)
  params = all_to_one_expert(module)
  assert (np.abs(np.asarray(apply(module, params, x))).sum(-1) > 0).all()


def test_router_charges_are_those_of_the_papers_and_leave_padding_out(x):
  logits = np.asarray(x[..., :4])
  valid = np.ones((BATCH, LENGTH), np.int32)
  valid[1, 5:] = 0
  charges = np.asarray(router_charges(logits, experts_per_token=2, valid=valid))
  probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
  for row in range(BATCH):
    count = valid[row].sum()
    chosen = np.argsort(-logits[row, :count], axis=-1)[:, :2]
    shares = np.bincount(chosen.ravel(), minlength=4) / chosen.size
    want = 4 * (shares * probabilities[row, :count].mean(0)).sum()
    np.testing.assert_allclose(charges[row, :count, 0].mean(), want, rtol=1e-5)
  np.testing.assert_allclose(charges[..., 1], np.log(np.exp(logits).sum(-1)) ** 2, rtol=1e-5)


def test_a_router_that_spreads_tokens_evenly_is_charged_1():
  logits = 10.0 * np.eye(4, dtype=np.float32)[np.arange(8) % 4][None]
  charges = router_charges(logits, experts_per_token=1, valid=np.ones((1, 8)))
  np.testing.assert_allclose(charges[..., 0], 1.0, rtol=1e-5)


@pytest.mark.quick_cases('4-2-0.5')
@pytest.mark.parametrize('experts, k, rate', [(4, 2, 0.0), (4, 2, 0.5), (6, 1, 0.0)])
def test_dropless_experts_equal_experts_with_room_for_all_tokens(x, experts, k, rate):
  # 6 experts of one token each take some of the groups empty, and blocks partly filled.
  weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
  rng = DropoutRng(jax.random.key(1), jnp.arange(BATCH))
  dropless, roomy = (moe(experts, k, factor, dropout_rate=rate) for factor in (None, 99.0))

  def value_and_grads(module):
    def f(p, x):
      return jnp.sum(weights * output(module, p, x, dropout_rng=rng))

    return jax.jit(jax.value_and_grad(f, (0, 1)))(init(module), x)

  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
    value_and_grads(dropless),
    value_and_grads(roomy),
  )


def test_dropless_experts_may_all_be_the_same_or_unused():
  module = moe(4, 1, None)
  x = np.abs(np.random.default_rng(0).normal(size=(2, 200, EMBED))).astype(np.float32)
  params = all_to_one_expert(module)
  gradient = jax.jit(jax.grad(lambda p: output(module, p, x).sum()))(params)
  used = np.abs(np.asarray(gradient['wo']['kernel'])).sum((1, 2))
  assert used[0] > 0 and (used[1:] == 0).all()


def test_dropless_experts_multiply_each_choice_once(x):
  """The loop over blocks: its number times the size of a block, not experts times tokens."""
  rows = jnp.ones((64, 16))
  sizes = jnp.asarray([16, 0, 40, 0], jnp.int32)
  kernels = jnp.arange(4.0)[:, None, None] * jnp.ones((4, 16, 8))
  got = jax.jit(lambda: grouped_matmul(rows, kernels, Groups(sizes, 8)))()
  want = np.repeat([0.0, 32.0, 0.0], [16, 40, 8])
  np.testing.assert_array_equal(got, want[:, None] * np.ones(8))
  text = jax.jit(lambda r, k: grouped_matmul(r, k, Groups(sizes, 8))).lower(rows, kernels)
  assert flops_per_device(text.as_text('hlo')) == 2 * 64 * 16 * 8


@pytest.mark.parametrize(
  ('capability', 'dtype', 'features', 'kernel', 'reason'),
  [
    (9.0, 'bfloat16', 128, 'mosaic', 'bfloat16'),
    (9.0, 'bfloat16', 96, None, 'multiples of 64 features, not 96'),
    (8.0, 'bfloat16', 96, 'triton', 'bfloat16'),
    (8.0, 'float32', 128, None, 'kernels take bfloat16'),
    (10.0, 'bfloat16', 128, None, 'no kernel serves this GPU'),
    (None, 'bfloat16', 128, None, 'no kernel serves this GPU'),
  ],
)
def test_grouped_matmuls_choose_a_kernel_and_say_why(capability, dtype, features, kernel, reason):
  found, text = kernel_for(Hardware('gpu', 'a GPU', capability), dtype, (features, 256))
  assert found == kernel and text.startswith('a GPU') and reason in text


def test_on_a_cpu_a_line_says_that_experts_are_a_loop(x, capsys):
  log_once.cache_clear()
  module = moe(4, 1, None)
  jax.eval_shape(functools.partial(output, module), init(module), x)
  assert 'experts: grouped matmuls by a loop over blocks (cpu)' in capsys.readouterr().out
