"""A sequence split over devices: attention and all its gradients equal dense attention."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_gpu.compiled.collectives import inventory
from t5x_gpu.layers.backends.plain import dot_product_attention
from t5x_gpu.layers.masks import decoder_mask, token_info
from t5x_gpu.layers.positions import relative_position_buckets
from t5x_gpu.partitioning.axis_rules import AxisRules, use_rules
from t5x_gpu.partitioning.context_parallel import (
  check,
  gathered_attention,
  length_order,
  local_positions,
  rules,
  traffic_per_step,
)
from t5x_gpu.partitioning.ring_attention import MASKED, ring_attention
from tests.helpers_collectives import chosen, total_bytes
from tests.messages import record_message

BATCH, LENGTH, HEADS, KV, BUCKETS = 4, 32, 4, 8, 8
INFOS = ('token', 'segment', 'prefix')
NAMES = ('out', 'dquery', 'dkey', 'dvalue', 'dtable')
MODEL_RULES = AxisRules(activations={'heads': ('model',)})


def bucket_matrix(length: int) -> np.ndarray:
  return relative_position_buckets(
    length, length, bidirectional=False, num_buckets=BUCKETS, max_distance=16
  )


def buckets_by_distance(length: int) -> np.ndarray:
  """Returns the bucket of query position - key position = d at index d + length - 1."""
  matrix = bucket_matrix(length)
  return np.concatenate([matrix[0, :0:-1], matrix[:, 0]])


def allowed(q, kv):
  """Returns `decoder_mask` of one block, [batch, 1, q, k], from what is known per position."""
  causal = q['position'][:, None] >= kv['position'][None, :]
  both_ways = (q['prefix'][:, :, None] > 0) & (kv['prefix'][:, None, :] > 0)
  real = (q['token'][:, :, None] > 0) & (kv['token'][:, None, :] > 0)
  segment = q['segment'][:, :, None] == kv['segment'][:, None, :]
  return ((causal | both_ways) & real & segment)[:, None]


def may_attend(q, kv):
  return allowed(q, kv).any()


def logits_fn_for(length: int, *, poisoned: bool = False):
  """Returns logits of causal attention with T5's bias; `poisoned`: NaN where nothing attends."""
  by_distance = buckets_by_distance(length)

  def logits_fn(table, query, key, q_info, kv_info):
    logits = jnp.einsum('bqhd,bkhd->bhqk', query, key, preferred_element_type=jnp.float32)
    distance = q_info['position'][:, None] - kv_info['position'][None, :]
    one_hot = jax.nn.one_hot(jnp.asarray(by_distance)[distance + length - 1], BUCKETS)
    logits = logits + jnp.einsum('hb,qkb->hqk', table, one_hot)[None]
    logits = jnp.where(allowed(q_info, kv_info), logits, MASKED)
    return jnp.where(may_attend(q_info, kv_info), logits, jnp.nan) if poisoned else logits

  return logits_fn


def example(length: int = LENGTH, seed: int = 0):
  """Returns arrays (query, key, value, table, weights of the loss) and what is known per position.

  Row 0 is one whole example, row 1 packed and padded, row 2 a prefix LM, row 3 padding alone.
  """
  rng = np.random.default_rng(seed)
  arrays = [rng.normal(size=(BATCH, length, HEADS, KV)).astype(np.float32) for _ in range(4)]
  arrays.insert(3, rng.normal(size=(HEADS, BUCKETS)).astype(np.float32))
  places = np.arange(length)
  info = {name: np.ones((BATCH, length), np.int32) for name in ('token', 'segment')}
  info['prefix'] = np.zeros((BATCH, length), np.int32)
  info['segment'][1] = 1 + (places > length // 5) + (places > length // 2)
  info['token'][1, -length // 8 :] = info['segment'][1, -length // 8 :] = 0
  info['prefix'][2, : length * 5 // 8] = 1
  info['token'][3] = info['segment'][3] = 0
  return arrays, info


def dense(query, key, value, *, table, info):
  tokens = token_info(info['token'], segment_ids=info['segment'], prefix=info['prefix'])
  mask = decoder_mask(tokens, tokens)
  return dot_product_attention(
    query, key, value, mask=mask, bias=table[:, bucket_matrix(query.shape[1])][None]
  )


def ring(query, key, value, **kwargs):
  return ring_attention(query, key, value, may_attend=may_attend, **kwargs)


@functools.partial(jax.jit, static_argnames='attend')
def results_of(arrays, info, attend=dense):
  """Returns output and gradients of query, key, value and bias table, by the layers' attention."""
  *differentiated, weights = arrays

  def loss(query, key, value, table):
    out = attend(query, key, value, table=table, info=info)
    return (out.astype(jnp.float32) * weights).sum(), out

  (_, out), grads = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(*differentiated)
  return out, *grads


def compiled(
  mesh_shape, attend, *, length=LENGTH, batch=BATCH, dtype=np.float32, logits_fn=logits_fn_for
):
  """Returns a function like `results_of`, compiled; its arrays are laid out by `length_order`."""
  return _compiled(tuple(mesh_shape.items()), attend, length, batch, np.dtype(dtype), logits_fn)


@functools.cache
def _compiled(mesh_sizes, attend, length, batch, dtype, logits_fn):
  mesh_shape = dict(mesh_sizes)
  devices = np.array(jax.devices()[: math.prod(mesh_shape.values())])
  mesh = Mesh(
    devices.reshape(list(mesh_shape.values())),
    list(mesh_shape),
    axis_types=(AxisType.Auto,) * len(mesh_shape),
  )
  manual = tuple(axis for axis in mesh_shape if axis != 'model')
  tokens = P('data' if 'data' in manual else None, 'context')

  def region(query, key, value, table, weights, info):
    table = jax.lax.pcast(table, manual, to='varying')
    info = {**info, 'position': local_positions(length)}

    def loss(query, key, value, table):
      out = attend(
        query,
        key,
        value,
        logits_fn=logits_fn(length),
        logits_params=table,
        q_info=info,
        kv_info=info,
      )
      return (out.astype(jnp.float32) * weights).sum(), out

    with use_rules(MODEL_RULES, mesh_shape):
      (_, out), (dq, dk, dv, dtable) = jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True)(
        query, key, value, table
      )
    return out, dq, dk, dv, jax.lax.psum(dtable, manual)

  mapped = jax.shard_map(
    region,
    mesh=mesh,
    in_specs=(tokens,) * 3 + (P(), tokens, tokens),
    out_specs=(tokens,) * 4 + (P(),),
    axis_names=set(manual),
  )
  heads = 'model' if 'model' in mesh_shape else None

  def array(shape, dtype, *spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))

  x = array((batch, length, HEADS, KV), dtype, *tokens, heads)
  with jax.set_mesh(mesh):
    return (
      jax.jit(mapped)
      .lower(
        x,
        x,
        x,
        array((HEADS, BUCKETS), jnp.float32, heads),
        x.update(dtype=np.float32),
        {name: array((batch, length), jnp.int32, *tokens) for name in INFOS},
      )
      .compile()
    )


def split_results(mesh_shape, arrays, info, attend=ring, **kwargs):
  """Returns what `results_of` does, from a mesh of these sizes, positions in their usual order."""
  length = arrays[0].shape[1]
  function = compiled(mesh_shape, attend, length=length, dtype=arrays[0].dtype, **kwargs)
  order = length_order(length, mesh_shape['context'])
  query, key, value, table, weights = arrays
  arguments = (
    *(x[:, order] for x in (query, key, value)),
    table,
    weights[:, order],
    {name: x[:, order] for name, x in info.items()},
  )
  results = function(*jax.device_put(arguments, function.input_shardings[0]))
  back = np.argsort(order)
  return [np.asarray(x) if x.ndim == 2 else np.asarray(x)[:, back] for x in results]


def assert_close(results, expected, tolerance=1e-5):
  for name, a, b in zip(NAMES, results, expected, strict=True):
    assert np.abs(a - b).max() <= tolerance * np.abs(b).max(), name


@pytest.mark.quick_cases("{'context':*")
@pytest.mark.parametrize(
  'mesh_shape',
  [
    {'context': 4},
    {'data': 2, 'context': 2, 'model': 2},
    *(
      pytest.param(shape, marks=pytest.mark.slow)
      for shape in (
        {'context': 1},
        {'context': 2},
        {'context': 8},
        {'data': 2, 'context': 2},
        {'context': 2, 'model': 2},
      )
    ),
  ],
  ids=str,
)
def test_ring_attention_and_all_gradients_equal_dense(mesh_shape):
  # Every row counts in this loss, also rows whose queries have no keys.
  assert_close(split_results(mesh_shape, *example()), results_of(*example()))


@pytest.mark.parametrize(
  'mesh_shape', [{'context': 4}, {'data': 2, 'context': 2, 'model': 2}], ids=str
)
def test_gathered_attention_and_all_gradients_equal_dense(mesh_shape):
  assert_close(split_results(mesh_shape, *example(), gathered_attention), results_of(*example()))


@pytest.mark.quick_cases('all blocks')
@pytest.mark.parametrize(
  'kwargs', [{}, {'block_length': 3, 'may_attend': may_attend}], ids=['all blocks', 'blocks of 3']
)
def test_ring_equals_dense_without_skipping_and_with_smaller_blocks(kwargs):
  attend = functools.partial(ring_attention, **kwargs)
  assert_close(split_results({'context': 2}, *example(48), attend), results_of(*example(48)))


@pytest.mark.slow
def test_blocks_in_which_nothing_may_attend_are_never_computed():
  arrays, info = example()
  info = {**info, 'prefix': np.zeros_like(info['prefix'])}
  poison = functools.partial(logits_fn_for, poisoned=True)
  assert_close(
    split_results({'context': 2}, arrays, info, logits_fn=poison), results_of(arrays, info)
  )
  # The poison works: without skipping it is found.
  assert np.isnan(
    split_results({'context': 2}, arrays, info, ring_attention, logits_fn=poison)[0]
  ).any()


@pytest.mark.slow
def test_ring_in_bfloat16_is_as_near_to_float32_as_dense_in_bfloat16():
  arrays, info = example()
  low = [x.astype(jnp.bfloat16) for x in arrays[:3]] + arrays[3:]
  for name, *results in zip(
    NAMES, split_results({'context': 4}, low, info), results_of(low, info), results_of(arrays, info)
  ):
    ring, dense, exact = (np.asarray(x, np.float32) for x in results)
    assert np.abs(ring - exact).max() <= (
      1.5 * np.abs(dense - exact).max() + 2e-3 * np.abs(exact).max()
    ), name


def two_layers(layer, query, key, value, table):
  """Returns a scan over two layers, each of which attends with what comes out of the one before."""

  def body(x, table):
    return layer(query + x, key - x, value * x, table), None

  return jax.lax.scan(body, query, jnp.stack([table, 0.5 * table]))[0]


def ring_layers(query, key, value, *, logits_params, **kwargs):
  layer = jax.checkpoint(lambda q, k, v, table: ring(q, k, v, logits_params=table, **kwargs))
  return two_layers(layer, query, key, value, logits_params)


def dense_layers(query, key, value, *, table, info):
  layer = functools.partial(dense, info=info)
  return two_layers(lambda q, k, v, table: layer(q, k, v, table=table), query, key, value, table)


@pytest.mark.slow
def test_layers_of_ring_attention_with_remat_equal_dense_layers():
  assert_close(
    split_results({'context': 4}, *example(), ring_layers),
    results_of(*example(), attend=dense_layers),
  )


quick = settings(max_examples=60, deadline=None, derandomize=True)


@quick
@given(st.integers(1, 16), st.integers(1, 12))
def test_length_order_gives_every_device_the_same_causal_work(ways, chunk):
  length = 2 * ways * chunk
  order = length_order(length, ways)
  assert sorted(order) == list(range(length))
  pairs = causal_pairs(order, ways)
  assert pairs.sum() == length * (length + 1) // 2
  assert set(pairs) == {pairs[0]}
  # And in every step of the ring: no device waits for another.
  at = order.reshape(ways, -1)
  for step in range(ways):
    work = [(at[device][:, None] >= at[device - step][None, :]).sum() for device in range(ways)]
    assert len(set(work)) == 1


def causal_pairs(order, ways):
  """Returns [ways]: the (query, key not after it) pairs of each device."""
  return (order.reshape(ways, -1).astype(np.int64) + 1).sum(-1)


def test_contiguous_order_is_unbalanced():
  pairs = causal_pairs(np.arange(64), 4)
  assert pairs[-1] > 5 * pairs[0]


@pytest.mark.parametrize('ways', [1, 2, 4, 8])
def test_local_positions_are_the_order_of_the_host(ways):
  mesh = Mesh(np.array(jax.devices()[:ways]), ('context',), axis_types=(AxisType.Auto,))
  positions = jax.jit(
    jax.shard_map(lambda: local_positions(LENGTH), mesh=mesh, in_specs=(), out_specs=P('context'))
  )()
  assert positions.dtype == jnp.int32
  np.testing.assert_array_equal(positions, length_order(LENGTH, ways))


def sent_bytes(mesh_shape, attend) -> dict[str, int]:
  """Returns kind of collective over `context` -> bytes that a device sends in one call."""
  found = chosen(inventory(compiled(mesh_shape, attend).as_text(), mesh_shape), axis='context')
  assert not any(c.in_branch or c.unknown_count for c in found)
  return {kind: total_bytes(found, kind=kind) for kind in sorted({c.kind for c in found})}


def traffic(context, num_layers=1, **kwargs):
  info_bytes = 4 * (LENGTH // context) * (len(INFOS) * BATCH + 1)
  return traffic_per_step(
    batch=BATCH,
    length=LENGTH,
    num_heads=HEADS,
    head_dim=KV,
    num_layers=num_layers,
    context=context,
    dtype_bytes=4,
    info_bytes=info_bytes,
    **kwargs,
  )


@pytest.mark.slow
@pytest.mark.parametrize('context', [4, 8])
def test_traffic_is_what_the_compiled_ring_sends(context):
  sent = sent_bytes({'context': context}, ring)
  # The all-reduce is the bias table's gradient, summed by these tests.
  assert sent == {
    'collective-permute': traffic(context),
    'all-reduce': int(2 * (context - 1) / context * 4 * HEADS * BUCKETS),
  }


@pytest.mark.slow
def test_traffic_of_layers_with_remat_counts_the_second_forward():
  sent = sent_bytes({'context': 4}, ring_layers)
  # XLA moves a hop of segment ids, the same for all layers, out of the loop over layers.
  expected = traffic(4, num_layers=2, num_forwards=2)
  assert 0.98 * expected < sent['collective-permute'] <= expected


def test_traffic_is_what_the_compiled_gathering_sends():
  sent = sent_bytes({'context': 4}, gathered_attention)
  assert sent['all-gather'] + sent['reduce-scatter'] == traffic(4, method='gather')


@pytest.mark.slow
def test_heads_split_over_model_are_never_gathered():
  mesh_shape = {'context': 2, 'model': 2}
  found = inventory(compiled(mesh_shape, ring).as_text(), mesh_shape)
  assert total_bytes(found, axis='context') > 0
  assert chosen(found, axis='model') == []


def test_traffic_of_one_device_is_none_and_recomputation_is_counted():
  sizes = dict(batch=2, length=64, num_heads=4, head_dim=8, num_layers=3, dtype_bytes=2)
  assert traffic_per_step(context=1, **sizes) == 0
  there = 3 * 7 * 2 * (2 * 8 * 4 * 8) * 2
  # Sums of gradients take eight hops: the first and the last in 2 bytes, six in 4.
  home = 3 * 2 * (2 * 8 * 4 * 8) * (2 + 6 * 4 + 2)
  assert traffic_per_step(context=8, **sizes) == 2 * there + home
  assert traffic_per_step(context=8, num_forwards=2, **sizes) == 3 * there + home
  # Gradients travel in float32, twice as large as these keys and values.
  assert traffic_per_step(context=8, method='gather', **sizes) == 3 * there


@pytest.mark.slow
def test_backward_of_a_ring_of_eight_needs_far_less_memory_than_dense():
  length = 1024
  ring_bytes, dense_bytes = (
    compiled({'context': ways}, attend, length=length, batch=1).memory_analysis().temp_size_in_bytes
    for ways, attend in ((8, ring), (1, gathered_attention))
  )
  assert dense_bytes > HEADS * 4 * length**2  # one array of logits
  assert ring_bytes < dense_bytes / 30


def test_rules_split_the_length():
  split = {'length': ('context',), 'residual_length': ('context',)}
  assert rules('gather') == AxisRules(activations=split, context_method='gather')


def test_a_length_that_does_not_divide_is_a_problem_with_its_rule():
  mesh_shape = {'data': 2, 'context': 4, 'model': 1}
  assert check({'length': 64, 'batch': 3}, mesh_shape) == []
  assert check({'length': 7}, {'data': 8, 'context': 1}) == []
  [problem] = check({'length': 100}, mesh_shape, multiple_of=12)
  record_message(problem.text())
  assert problem.parameters == ('TASK_FEATURE_LENGTHS', 'Partitioner.context')


def test_a_chunk_without_divisors_is_refused_by_the_ring():
  mesh_shape = {'data': 4, 'context': 2}  # 4124 = 2 x 2 x 1031
  [problem] = check({'length': 4124}, mesh_shape)
  record_message(problem.text())
  assert not any(check({'length': 512 * n}, mesh_shape) for n in range(1, 100))
  assert check({'length': 4124}, mesh_shape, method='gather') == []
  assert check({'length': 4 * 1021}, mesh_shape) == []  # a prime, but one block
