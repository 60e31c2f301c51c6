"""Layers against plain numpy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from t5x_gpu.errors import ModelError
from t5x_gpu.layers.backends.plain import dot_product_attention
from t5x_gpu.layers.dense import DenseGeneral, contract
from t5x_gpu.layers.embedding import Embedding
from t5x_gpu.layers.masks import decoder_mask, token_info
from t5x_gpu.layers.mlp import Mlp, MlpConfig
from t5x_gpu.layers.positions import RotaryEmbedding, relative_position_buckets
from t5x_gpu.layers.rounded import rounded_kernel
from t5x_gpu.partitioning.axis_rules import AxisRules, split_names, use_rules
from tests.messages import raises


@pytest.fixture
def rng():
  return np.random.default_rng(0)


def init(module, *args, **kwargs):
  """Returns plain parameters of `module`."""
  return split_names(module.init(jax.random.key(0), *args, **kwargs)['params'])[0]


def test_attention_equals_numpy_softmax(rng):
  q, k, v = (rng.normal(size=(2, 5, 3, 4)).astype(np.float32) for _ in range(3))
  bias = rng.normal(size=(1, 3, 5, 5)).astype(np.float32)
  mask = np.tril(np.ones((5, 5), bool))[None, None]
  logits = np.einsum('bqhd,bkhd->bhqk', q, k) + bias
  logits = np.where(mask, logits, -np.inf)
  weights = np.exp(logits - logits.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  want = np.einsum('bhqk,bkhd->bqhd', weights, v)
  np.testing.assert_allclose(
    dot_product_attention(q, k, v, mask=mask, bias=bias), want, rtol=2e-5, atol=1e-6
  )


def test_attention_of_a_row_that_may_attend_to_nothing_is_finite(rng):
  q = rng.normal(size=(1, 2, 1, 4)).astype(np.float32)
  out = dot_product_attention(q, q, q, mask=np.zeros((1, 1, 2, 2), bool))
  assert np.isfinite(out).all()


def mask_of(tokens, **more):
  info = token_info(tokens, **more)
  return decoder_mask(info, info)[0, 0]


def test_mask_is_causal_and_stays_in_its_segment_and_off_padding():
  tokens = jnp.asarray([[5, 6, 7, 8, 0]])
  segments = jnp.asarray([[1, 1, 2, 2, 0]])
  want = np.array(
    [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]], bool
  )
  np.testing.assert_array_equal(mask_of(tokens, segment_ids=segments), want)


def test_prefix_positions_see_each_other_both_ways():
  mask = mask_of(jnp.ones((1, 4), jnp.int32), prefix=jnp.asarray([[1, 1, 0, 0]]))
  want = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]], bool)
  np.testing.assert_array_equal(mask, want)


def test_causal_position_buckets_are_exact_then_logarithmic_then_constant():
  row = relative_position_buckets(300, 300, bidirectional=False, num_buckets=32, max_distance=128)[
    299
  ]
  by_distance = row[::-1]
  np.testing.assert_array_equal(by_distance[:16], np.arange(16))
  assert (np.diff(by_distance) >= 0).all()
  assert (by_distance[128:] == 31).all() and by_distance[100] < 31


def test_bidirectional_position_buckets_distinguish_the_sides():
  buckets = relative_position_buckets(40, 40, bidirectional=True, num_buckets=32, max_distance=128)
  assert set(buckets[20, :20]).isdisjoint(buckets[20, 21:])
  np.testing.assert_array_equal(buckets[20, 21:] - 16, buckets[20, 19:0:-1][:19])


@pytest.mark.parametrize(
  'changes',
  [
    {'theta': 0.0},
    {'theta': -1.0},
    {'scaling': 'linear', 'factor': 0},
    {'scaling': 'linear', 'factor': math.nan},
    {'scaling': 'llama3', 'low_freq_factor': 4.0},
    {'scaling': 'llama3', 'original_length': 0},
    {'scaling': 'lama3'},
    {'scaling': 'yarn', 'beta_slow': 32},
    {'scaling': 'yarn', 'theta': 1.0},
    {'attention_factor': 1.5},
    {'short_factors': (1.0,), 'long_factors': (1.0,)},
    {'scaling': 'longrope', 'short_factors': (1.0,)},
    {'scaling': 'longrope', 'short_factors': (1.0, 0.0), 'long_factors': (1.0, 2.0)},
  ],
)
def test_rotary_positions_that_cannot_be_are_refused(changes):
  with raises(ModelError) as e:
    RotaryEmbedding(**changes)
  assert e.value.parameters


@pytest.mark.parametrize('model', [1, 2, 4])
def test_embedding_and_its_gradient_are_those_of_a_gather_whole_or_split(rng, model):
  table = jnp.asarray(rng.normal(size=(12, 4)).astype(np.float32))
  ids = jnp.asarray([[3, 11, 0, 3, 7, 5]])
  pull = jnp.asarray(rng.normal(size=(1, 6, 4)).astype(np.float32))
  mesh = jax.make_mesh((model,), ('model',), axis_types=(jax.sharding.AxisType.Auto,))

  def read(table):
    with use_rules(AxisRules(activations={'vocab': ('model',)}), mesh.shape):
      return (Embedding(12, 4).apply({'params': {'embedding': table}}, ids) * pull).sum()

  with jax.set_mesh(mesh):
    got = jax.jit(jax.value_and_grad(read))(table)
  want = jax.value_and_grad(lambda t: (t[ids] * pull).sum())(table)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)


def test_gradient_of_a_bfloat16_table_adds_up_in_float32():
  table = jnp.zeros((2, 1), jnp.bfloat16)
  ids = jnp.zeros((1, 1000), jnp.int32)
  grad = jax.grad(
    lambda t: (
      Embedding(2, 1, jnp.bfloat16)
      .apply({'params': {'embedding': t}}, ids)
      .sum()
      .astype(jnp.float32)
    )
  )(table)
  assert float(grad[0, 0]) == 1000  # bfloat16 would stop at 256


@pytest.mark.parametrize('num_in', [1, 2])
@pytest.mark.parametrize(
  'prepare', [lambda k: k, lambda k: rounded_kernel(k, jnp.bfloat16)], ids=['array', 'rounded']
)
def test_gradient_of_a_float32_kernel_is_not_rounded_to_the_dtype_of_activations(
  rng, num_in, prepare
):
  inputs = (8, 4)[:num_in]
  x = jnp.asarray(rng.normal(size=(2, 16, *inputs)), jnp.bfloat16)
  kernel = jnp.asarray(rng.normal(size=(*inputs, 3, 5)), jnp.float32)
  y, pull = jax.vjp(lambda x, k: contract(x, prepare(k), num_in), x, kernel)
  rounded = kernel.astype(jnp.bfloat16)
  assert y.dtype == jnp.bfloat16 and (y == jnp.tensordot(x, rounded, num_in)).all()
  dy = jnp.asarray(rng.normal(size=y.shape), jnp.bfloat16)
  dx, dkernel = pull(dy)
  assert (dx == jnp.tensordot(dy, jnp.moveaxis(rounded, (-2, -1), (0, 1)), 2)).all()
  exact = np.tensordot(np.float64(x), np.float64(dy), ((0, 1), (0, 1)))
  np.testing.assert_allclose(dkernel, exact, rtol=1e-5, atol=1e-5)  # bfloat16 would be off by 4e-3


def test_gradient_of_a_kernel_transposes_no_activation_on_the_cpu(rng):
  x, kernel = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((4, 64, 96), (96, 160)))
  loss = lambda x, kernel: jnp.sum(jnp.tanh(contract(jnp.tanh(x), kernel)))
  program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(x, kernel).compile().as_text()
  assert 'f32[256,160]' in program
  assert 'f32[160,256]' not in program and 'f32[96,256]' not in program


@pytest.mark.parametrize('split', ['x', 'kernel'])
def test_contract_in_a_region_takes_an_operand_that_all_devices_share(rng, split):
  x = jnp.asarray(rng.normal(size=(2, 8, 4)), jnp.bfloat16)
  kernel = jnp.asarray(rng.normal(size=(2, 4, 3)), jnp.float32)
  x, kernel = (x, kernel[0]) if split == 'x' else (x[0], kernel)

  def loss(x, kernel):
    return jnp.sum(contract(x, kernel).astype(jnp.float32) ** 2)

  def each(x, kernel):
    x, kernel = (x[0], kernel) if split == 'x' else (x, kernel[0])
    return jax.lax.psum(loss(x, kernel), 'data')

  specs = tuple(P('data') if name == split else P() for name in ('x', 'kernel'))
  mesh = Mesh(np.array(jax.devices()[:2]), ('data',))
  in_region = jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P())
  in_axes = tuple(0 if name == split else None for name in ('x', 'kernel'))
  want = jax.grad(lambda *a: jnp.sum(jax.vmap(loss, in_axes)(*a)), (0, 1))(x, kernel)
  for got, expected in zip(jax.jit(jax.grad(in_region, (0, 1)))(x, kernel), want, strict=True):
    np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=2e-2, atol=2e-2)


def test_dense_general_contracts_the_trailing_dimensions(rng):
  x = rng.normal(size=(2, 3, 4, 5)).astype(np.float32)
  module = DenseGeneral((6,), ('heads', 'kv', 'embed'), num_in=2, use_bias=True)
  params = init(module, x)
  want = np.einsum('blhk,hke->ble', x, params['kernel']) + params['bias']
  np.testing.assert_allclose(module.apply({'params': params}, x), want, rtol=1e-4, atol=1e-5)


def test_dense_initializer_has_unit_gain_whatever_the_shape_of_inputs_and_features():
  x = jnp.ones((1, 1, 64, 32))
  kernel = init(DenseGeneral((16, 128), ('heads', 'kv', None, 'mlp'), num_in=2), x)['kernel']
  assert kernel.shape == (64, 32, 16, 128)
  np.testing.assert_allclose(np.std(kernel), 1 / np.sqrt(64 * 32), rtol=0.02)


def test_gated_mlp_multiplies_its_branches(rng):
  x = rng.normal(size=(1, 2, 4)).astype(np.float32)
  module = Mlp(MlpConfig(mlp_dim=8))
  params = init(module, x)
  hidden = jax.nn.gelu(x @ params['wi_0']['kernel']) * (x @ params['wi_1']['kernel'])
  np.testing.assert_allclose(
    module.apply({'params': params}, x), hidden @ params['wo']['kernel'], rtol=1e-5, atol=1e-6
  )
