"""Attention over rows that are split over `context` equals dense attention of whole rows."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_gpu.layers.backends.choose import attention_by
from t5x_gpu.layers.backends.context import kernel_context_attention
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import AxisRules, use_rules
from t5x_gpu.partitioning.context_parallel import (
  in_position_order,
  length_order,
  local_positions,
  num_before,
  rules,
)
from tests.helpers_layouts import QUICK
from tests.layers.backends.test_attention_backends import (
  PACKED,
  PADDED,
  PREFIX,
  Case,
  arrays,
  assert_same,
  dense,
  results,
)

NAMES = ('output', 'dquery', 'dkey', 'dvalue', 'dtable')
HEADS_RULES = AxisRules(activations={'heads': ('model',), 'kv_heads': ('model',)})
ENCODED = np.array([[1] * 9 + [2] * 5 + [3] * 10, [4] * 2 + [9] * 18 + [0] * 4])
CASES = {
  'packed window, grouped heads': Case(PACKED, window=6, kv_heads=2),
  'prefix, softcap': Case(PACKED, prefix=PREFIX, softcap=2.0),
  'relative bias': Case(PACKED, has_bias=True),
  'encoder with bias': Case(PADDED, causal=False, has_bias=True, kv_heads=2),
  'packed cross': Case(PACKED, ENCODED, causal=False, kv_heads=2),
  'padded': Case(PADDED),
  'no window in this layer': Case(PACKED, window=0),
  'cross without keys of a segment': Case(PACKED, np.where(ENCODED == 2, 0, ENCODED), causal=False),
}
kernel = functools.partial(kernel_context_attention, kernel='reference', multiple=16)
chunked = functools.partial(attention_by, 'chunked')


def split_results(case, make, method, mesh_shape):
  """Returns `results` of attention over a mesh, with positions in their usual order."""
  (query, key, value, table), dout = arrays(case)
  table = jnp.zeros((query.shape[2], 8)) if table is None else table
  ways, manual = mesh_shape['context'], tuple(a for a in mesh_shape if a != 'model')
  devices = np.array(jax.devices()[: math.prod(mesh_shape.values())])
  mesh = Mesh(
    devices.reshape(list(mesh_shape.values())),
    list(mesh_shape),
    axis_types=(AxisType.Auto,) * len(mesh_shape),
  )

  def info_of(segments, prefix=None):
    return TokenInfo(local_positions(segments.shape[1] * ways), segments, prefix)

  def region(query, key, value, table, dout, segments, prefix, kv_segments):
    with use_rules(rules(method) + HEADS_RULES, mesh_shape, manual_axes=manual):
      table = jax.lax.pcast(table, manual, to='varying')
      info = info_of(segments, None if case.prefix is None else prefix)
      kv_info = None if case.kv_segments is None else info_of(kv_segments)
      attention = make(case.kind, info, kv_info)

      def out(query, key, value, table):
        bias = attention.bias(table) if case.has_bias else None
        window = None if case.window is None else jnp.int32(case.window)
        return attention(query, key, value, bias, window)

      got, pull = jax.vjp(out, query, key, value, table)
      *grads, dtable = pull(dout)
    return got * (segments > 0)[..., None, None], *grads, jax.lax.psum(dtable, manual)

  tokens = P('data' if 'data' in manual else None, 'context')
  mapped = jax.shard_map(
    region,
    mesh=mesh,
    in_specs=(tokens, tokens, tokens, P(), tokens, tokens, tokens, tokens),
    out_specs=(tokens,) * 4 + (P(),),
    axis_names=set(manual),
  )

  def placed(x, *spec, reorder=True):
    x = np.asarray(x)
    x = x[:, length_order(x.shape[1], ways)] if reorder else x
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))

  heads = 'model' if 'model' in mesh_shape else None
  whole = [placed(x, *tokens, heads) for x in (query, key, value)]
  infos = [
    placed(case.segments if x is None else x, *tokens)
    for x in (case.segments, case.prefix, case.kv_segments)
  ]
  args = (*whole, placed(table, heads, reorder=False), placed(dout, *tokens, heads), *infos)
  with jax.set_mesh(mesh):
    got = jax.jit(mapped).lower(*args).compile(QUICK)(*args)
  got = [x if x.ndim == 2 else in_position_order(x, ways, dim=1) for x in map(jnp.asarray, got)]
  return dict(zip(NAMES, got if case.has_bias else got[:4]))


QUICK_CASES = ('packed window, grouped heads', 'prefix, softcap', 'relative bias', 'packed cross')


@pytest.mark.quick_cases('ring-packed cross*', 'ring-relative*')
@pytest.mark.parametrize(
  ('method', 'name'),
  [
    pytest.param(
      method,
      name,
      marks=() if name in QUICK_CASES[: 4 if method == 'ring' else 1] else pytest.mark.slow,
    )
    for method in ('ring', 'gather')
    for name in CASES
  ],
)
def test_kernels_over_a_split_length_equal_dense_attention(method, name):
  got = split_results(CASES[name], kernel, method, {'context': 4, 'model': 2})
  assert_same(got, results(CASES[name], dense(CASES[name])))


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('method', ['ring', 'gather'])
def test_chunks_over_a_split_length_equal_dense_attention(method, name):
  got = split_results(CASES[name], chunked, method, {'context': 4, 'model': 2})
  assert_same(got, results(CASES[name], dense(CASES[name])))


@pytest.mark.slow
@pytest.mark.parametrize('method, model', [('ring', 2), ('gather', 1)])
def test_rows_may_be_split_too(method, model):
  case = CASES['relative bias']
  mesh_shape = {'data': 2, 'context': 2, 'model': model}
  assert_same(split_results(case, kernel, method, mesh_shape), results(case, dense(case)))


def test_positions_of_a_device_are_counted_and_gathered_positions_come_back_in_order():
  order = length_order(24, 4)
  assert (in_position_order(jnp.asarray(order), 4, dim=0) == np.arange(24)).all()
  for local in order.reshape(4, 6):
    positions = jnp.arange(-2, 30)
    want = (local < np.arange(-2, 30)[:, None]).sum(-1)
    np.testing.assert_array_equal(num_before(positions, jnp.asarray(local)), want)
