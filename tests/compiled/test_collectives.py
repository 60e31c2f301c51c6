"""The kinds, mesh axes, bytes and counts of known collectives are read correctly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from t5x_gpu.compiled import collectives, hlo_text
from t5x_gpu.compiled.collectives import flops_per_device, inventory, partitioned_hlo
from t5x_gpu.partitioning.pipeline import update_if
from tests.helpers_collectives import count, total_bytes
from tests.helpers_train import compiled_kept_in

SHAPE = {'data': 2, 'fsdp': 2, 'model': 2}


@functools.cache
def mesh() -> Mesh:
  return Mesh(
    np.array(jax.devices()[:8]).reshape(2, 2, 2), tuple(SHAPE), axis_types=(AxisType.Auto,) * 3
  )


def struct(shape, *spec, dtype='float32'):
  return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), P(*spec)))


def hlo_of(function, *args, **jit_options):
  with jax.set_mesh(mesh()):
    return partitioned_hlo(jax.jit(function, **jit_options).lower(*args))


def found_in(function, *args, **jit_options):
  return inventory(hlo_of(function, *args, **jit_options), SHAPE)


def on_devices(function, *, out=P(), into=P(('data', 'fsdp')), axes=('data', 'fsdp')):
  return jax.shard_map(
    function, mesh=mesh(), in_specs=into, out_specs=out, axis_names={*axes}, check_vma=False
  )


ROWS = (16, 8)  # split over data and fsdp: [4, 8] on a device, 128 bytes of float32


def rows(dtype='float32'):
  return struct(ROWS, ('data', 'fsdp'), dtype=dtype)


# ---- One collective each ------------------------------------------------------------------------


@pytest.mark.parametrize('axes, parts', [(('data',), 2), (('fsdp',), 2), (('data', 'fsdp'), 4)])
def test_a_psum_is_one_all_reduce_over_its_axes(axes, parts):
  (c,) = found_in(on_devices(lambda x: jax.lax.psum(x, axes), out=P(('data', 'fsdp'))), rows())
  assert (c.kind, c.axes, c.dtype, c.shape) == ('all-reduce', axes, 'f32', (4, 8))
  assert c.bytes_per_device == 2 * 128 * (parts - 1) // parts
  assert (c.count, c.trip_counts, c.in_branch, c.unknown_count) == (1, (), False, False)


def test_the_line_of_code_that_caused_it_is_named():
  (c,) = found_in(on_devices(lambda x: jax.lax.psum(jnp.tanh(x), 'data')), rows())
  assert c.op_name == 'jit(<lambda>)/shard_map/psum'
  assert 'test_collectives.py:' in c.source


def test_all_gather_reduce_scatter_and_all_to_all_send_all_but_their_own_part():
  def f(x):
    return (
      jax.lax.all_gather(x, 'fsdp', tiled=True),
      jax.lax.psum_scatter(x, 'data', scatter_dimension=1, tiled=True),
      jax.lax.all_to_all(x, 'data', split_axis=1, concat_axis=0, tiled=True),
    )

  found = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert {c.kind: (c.axes, c.shape, c.bytes_per_device) for c in found} == {
    'all-gather': (('fsdp',), (8, 8), 128),
    'reduce-scatter': (('data',), (4, 8), 64),
    'all-to-all': (('data',), (4, 8), 64),
  }


def test_bfloat16_is_counted_as_such_and_not_as_what_the_cpu_makes_of_it():
  (c,) = found_in(
    on_devices(lambda x: jax.lax.psum(x, 'data'), out=P(('data', 'fsdp'))), rows('bfloat16')
  )
  assert (c.dtype, c.bytes_per_device) == ('bf16', 64)


def test_fsdp_by_the_compiler_is_gather_and_reduce_scatter_and_data_all_reduces_the_part():
  # [8, 16] of the weights: [4, 8] on a device, [8, 8] once gathered over fsdp.
  def f(w, x):
    return jnp.sum(jnp.tanh(x @ w))

  found = found_in(
    jax.grad(f),
    struct((8, 16), 'fsdp', 'model'),
    struct(ROWS, ('data', 'fsdp')),
    out_shardings=NamedSharding(mesh(), P('fsdp', 'model')),
  )
  assert sorted((c.kind, c.axes, c.shape, c.bytes_per_device) for c in found) == [
    ('all-gather', ('fsdp',), (8, 8), 128),
    ('all-reduce', ('data',), (8, 4), 128),
    ('reduce-scatter', ('fsdp',), (8, 8), 128),
  ]


def test_an_all_reduce_that_is_used_whole_as_well_stays_one():
  def f(x, *, keep):
    whole = jax.lax.psum(x, 'data')
    part = jax.lax.dynamic_slice_in_dim(whole, 4 * jax.lax.axis_index('data'), 4, axis=1)
    return part, (whole if keep else part)

  for keep, kind in ((True, 'all-reduce'), (False, 'reduce-scatter')):
    mapped = on_devices(functools.partial(f, keep=keep), out=P(('data', 'fsdp')))
    assert [c.kind for c in found_in(mapped, rows())] == [kind]


def test_a_slice_that_all_devices_take_alike_makes_no_reduce_scatter():
  def f(x, i):
    return jax.lax.dynamic_slice_in_dim(jax.lax.psum(x, 'data'), i, 4, axis=1)

  mapped = on_devices(f, into=(P(('data', 'fsdp')), P()), out=P(('data', 'fsdp')))
  assert [c.kind for c in found_in(mapped, rows(), struct((), dtype='int32'))] == ['all-reduce']


def test_tensor_parallel_pair_of_products_has_one_all_reduce():
  def f(x, a, b):
    return jax.nn.relu(x @ a) @ b

  found = found_in(
    f,
    struct(ROWS),
    struct((8, 32), None, 'model'),
    struct((32, 8), 'model'),
    out_shardings=NamedSharding(mesh(), P()),
  )
  assert [(c.kind, c.axes) for c in found] == [('all-reduce', ('model',))]


def test_no_collective_where_nothing_moves():
  assert found_in(lambda x: x * 2, rows()) == []
  alone = Mesh(
    np.array(jax.devices()[:1]).reshape(1, 1, 1), tuple(SHAPE), axis_types=(AxisType.Auto,) * 3
  )
  f = jax.shard_map(
    lambda x: jax.lax.psum(x, 'data'),
    mesh=alone,
    in_specs=P('data'),
    out_specs=P(),
    axis_names={'data'},
  )
  with jax.set_mesh(alone):
    assert inventory(partitioned_hlo(jax.jit(f).lower(jnp.ones(4))), alone.shape) == []


# ---- How often ----------------------------------------------------------------------------------


def shift(x):
  return jax.lax.ppermute(x, 'data', [(0, 1), (1, 0)])


def test_in_a_scan_it_counts_as_often_as_the_scan_is_long():
  def f(x):
    return jax.lax.scan(lambda c, _: (shift(c) + 1, None), x, length=5)[0]

  (c,) = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert (c.kind, c.axes, c.count, c.trip_counts) == ('collective-permute', ('data',), 5, (5,))
  assert c.bytes_per_device == 128 and c.bytes_per_call == 640


def test_scans_in_scans_multiply_forward_and_backward():
  def inner(c, _):
    return jnp.tanh(shift(c)), None

  def outer(c, _):
    return jax.lax.scan(inner, c, length=3)[0], None

  def f(x):
    def loss(x):
      return jnp.sum(jax.lax.scan(outer, x, length=4)[0])

    return jax.grad(loss)(x)

  found = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert [(c.kind, c.count, c.trip_counts) for c in found] == [
    ('collective-permute', 12, (4, 3))
  ] * 2


def test_both_branches_of_a_conditional_are_listed_and_flagged():
  def f(x):
    x = jax.lax.psum(x, 'fsdp')
    return jax.lax.cond(jnp.sum(x) > 0, shift, lambda x: jax.lax.psum(x, 'data'), x)

  always, *branches = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert (always.axes, always.in_branch) == (('fsdp',), False)
  assert sorted((c.kind, c.in_branch) for c in branches) == [
    ('all-reduce', True),
    ('collective-permute', True),
  ]


def test_a_loop_of_unknown_length_counts_once_and_says_so():
  def f(x, n):
    return jax.lax.fori_loop(0, n, lambda i, x: shift(x), x)

  mapped = on_devices(f, into=(P(('data', 'fsdp')), P()), out=P(('data', 'fsdp')))
  (c,) = found_in(mapped, rows(), struct((), dtype='int32'))
  assert (c.count, c.unknown_count) == (1, True)


def test_a_loop_of_one_iteration_or_none_counts_as_a_branch():
  def f(x):
    return update_if(jnp.sum(x) > 0, shift, x)

  (c,) = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert (c.count, c.trip_counts, c.in_branch, c.unknown_count) == (1, (), True, False)


def test_a_loop_counts_by_where_it_begins_and_how_it_grows():
  def f(x):
    return jax.lax.while_loop(lambda s: s[0] <= 11, lambda s: (s[0] + 3, shift(s[1])), (2, x))[1]

  (c,) = found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())
  assert (c.count, c.unknown_count) == (4, False)  # 2, 5, 8, 11


# ---- Sums over the list -------------------------------------------------------------------------


def test_totals_choose_by_kind_and_axis():
  def f(x):
    x = jax.lax.scan(lambda c, _: (shift(c), None), x, length=3)[0]
    return jax.lax.psum(x, ('data', 'fsdp')), jax.lax.psum(jnp.sum(x), 'fsdp')

  found = found_in(on_devices(f), rows())
  assert total_bytes(found) == 3 * 128 + 2 * 128 * 3 // 4 + 4
  assert total_bytes(found, kind='collective-permute') == 384
  assert total_bytes(found, axis='fsdp') == 192 + 4
  assert total_bytes(found, kind='all-reduce', axis='data') == 192
  assert total_bytes(found, axis='model') == 0
  assert count(found) == 5 and count(found, kind='all-reduce') == 2
  assert count(found, axis='fsdp', min_bytes=100) == 1
  with pytest.raises(AssertionError):
    count(found, kind='allreduce')


# ---- FLOPs --------------------------------------------------------------------------------------


def test_flops_of_a_loop_are_those_of_all_its_turns():
  def f(x, w):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, w)[0]

  x, w = struct((16, 8), ('data', 'fsdp')), struct((7, 8, 8))
  product = 2 * (16 // 4) * 8 * 8
  assert flops_per_device(hlo_of(f, x, w)) == 7 * product
  backward = jax.grad(lambda w, x: jnp.sum(f(x, w)))
  assert flops_per_device(hlo_of(backward, w, x)) == 3 * 7 * product


def test_flops_per_device_of_one_device_are_all_of_them():
  lowered = jax.jit(lambda a, b: jnp.einsum('bij,bjk->bik', a, b)).lower(
    jnp.ones((3, 4, 5)), jnp.ones((3, 5, 6))
  )
  assert flops_per_device(partitioned_hlo(lowered)) == 2 * 3 * 4 * 5 * 6


def test_of_branches_the_dearest_counts():
  def f(x, w):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w)

  lowered = jax.jit(f).lower(jnp.ones((4, 8)), jnp.ones((8, 8)))
  assert flops_per_device(partitioned_hlo(lowered)) == 2 * 2 * 4 * 8 * 8


# ---- Reading ------------------------------------------------------------------------------------


def test_a_program_in_the_compilation_cache_is_read_all_the_same(tmp_path):
  def f(x):
    return jax.lax.psum(x, 'data') * 3

  with compiled_kept_in(tmp_path):
    for _ in range(2):
      assert len(found_in(on_devices(f, out=P(('data', 'fsdp'))), rows())) == 1
    assert jax.config.jax_enable_compilation_cache


@pytest.mark.parametrize(
  'text, groups',
  [
    ('{{0,1},{2,3},{4,5},{6,7}}', [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ('[4,2]<=[8]', [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ('[4,2]<=[4,2]T(1,0)', [[0, 2], [4, 6], [1, 3], [5, 7]]),
    ('[2,4]<=[2,2,2]T(1,0,2)', [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=4,'b'=2] {'a'}", [[0, 2, 4, 6], [1, 3, 5, 7]]),
    ("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [[0, 1, 4, 5], [2, 3, 6, 7]]),
    ("mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ("mesh['a'=2,'b'=4] {'b':(1)2}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ("mesh['a'=2,'b'=4], device_ids=(7,6,5,4,3,2,1,0) {'a'}", [[7, 3], [6, 2], [5, 1], [4, 0]]),
    ('{}', [[0, 1, 2, 3, 4, 5, 6, 7]]),
  ],
)
def test_all_spellings_of_replica_groups_are_understood(text, groups):
  attributes = f', channel_id=1, replica_groups={text}, to_apply=%add, metadata={{op_name="f"}}'
  assert collectives.replica_groups(attributes, 8).tolist() == groups


@pytest.mark.parametrize(
  'groups, axes',
  [
    ([[0, 1]], ('model',)),
    ([[0, 2], [1, 3]], ('fsdp',)),
    ([[0, 4]], ('data',)),
    ([[0, 6]], ('data', 'fsdp')),
    ([list(range(8))], ('data', 'fsdp', 'model')),
    ([[3]], ()),
    ([[0, 4], [4, 0]], ('data',)),
  ],
)
def test_groups_name_the_axes_along_which_their_devices_differ(groups, axes):
  assert collectives.varying_axes(np.array(groups), SHAPE) == axes


# As jaxlib prints a program compiled for GPUs: asynchronous, with trip counts, tuples in two ways.
COMPILED = """HloModule jit_step, num_partitions=8

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %ag = (bf16[4,8]{1,0}, bf16[8,8]{1,0}) all-gather-start(bf16[4,8]{1,0} %x), replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}
  %done = bf16[8,8]{1,0} all-gather-done(%ag)
  %rs = ((bf16[8,8]{1,0}), bf16[4,8]{1,0}) reduce-scatter-start(%done), replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}, to_apply=%add
  %rs.done = bf16[4,8]{1,0} reduce-scatter-done(%rs)
  ROOT %t = (s32[], bf16[4,8]{1,0}) tuple(%p#0, %rs.done)
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], /*index=1*/bf16[4,8]{1,0}) tuple(%zero, %a)
  %loop = (s32[], bf16[4,8]{1,0}) while(%start), condition=%none, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %ar = (f32[10]{0}, f32[6]{0}) all-reduce-start(%zero, %zero), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %cp = (f32[10]{0}, f32[10]{0}, u32[], u32[]) collective-permute-start(%zero), source_target_pairs={{0,4},{4,0}}
  ROOT %out = bf16[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


# A loop that XLA has changed last, whose counter it computes in fusions: no known_trip_count.
COUNTED_IN_FUSIONS = """HloModule jit_step, num_partitions=8

%fused_compare (p: s32[]) -> pred[] {
  %p = s32[] parameter(0)
  %limit = s32[] constant(7)
  ROOT %compare = pred[] compare(%p, %limit), direction=LT
}

%condition (state: (s32[], f32[8])) -> pred[] {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  ROOT %fusion = pred[] fusion(%i), kind=kLoop, calls=%fused_compare
}

%fused_add (step: s32[], p: s32[]) -> s32[] {
  %p = s32[] parameter(1)
  %step = s32[] parameter(0)
  ROOT %add = s32[] add(%p, %step)
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %copy = s32[] copy(%i)
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %two = s32[] constant(2)
  %next = s32[] fusion(%two, %copy), kind=kLoop, calls=%fused_add
  %ar = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%next, %ar)
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %one = s32[] constant(1)
  %start = (s32[], f32[8]{0}) tuple(%one, %a)
  %loop = (s32[], f32[8]{0}) while(%start), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%loop), index=1
}
"""


def test_a_loop_counts_as_often_as_it_runs_if_fusions_compute_its_counter():
  (c,) = inventory(COUNTED_IN_FUSIONS, dict(data=4, fsdp=2))
  assert (c.kind, c.trip_counts, c.unknown_count) == ('all-reduce', (3,), False)


def test_the_text_of_a_compiled_gpu_program_is_read_too():
  assert [
    (c.kind, c.axes, c.dtype, c.shape, c.bytes_per_device, c.count)
    for c in inventory(COMPILED, SHAPE)
  ] == [
    ('all-gather', ('fsdp',), 'bf16', (8, 8), 64, 12),
    ('reduce-scatter', ('fsdp',), 'bf16', (8, 8), 64, 12),
    ('all-reduce', ('model',), 'f32', (10,), 40, 1),
    ('all-reduce', ('model',), 'f32', (6,), 24, 1),
    ('collective-permute', ('data',), 'f32', (10,), 40, 1),
  ]


def test_text_that_is_not_a_program_is_refused():
  with pytest.raises(ValueError, match='no ENTRY'):
    hlo_text.parse('HloModule nothing\n')
