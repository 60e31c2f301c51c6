"""Any topology with any sizes: a mesh that keeps its promises, or exactly one MeshError."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from t5x_gpu.errors import MeshError
from t5x_gpu.partitioning.mesh import device_array, mesh_table
from t5x_gpu.partitioning.mesh_sizes import (
  MESH_AXES,
  divisors,
  legal_partitions,
  resolve_mesh_sizes,
)
from t5x_gpu.partitioning.partitioner import check_model_sizes
from t5x_gpu.runtime.topology import Topology

quick = settings(max_examples=150, deadline=None, derandomize=True)

topologies = st.builds(Topology, st.integers(1, 24), st.sampled_from([1, 2, 3, 4, 6, 8, 16]))
OUTER = MESH_AXES[:-1]


@st.composite
def factored(draw, number: int, axes=OUTER):
  """Draws sizes for `axes` that multiply to `number`."""
  sizes = {}
  for axis in draw(st.permutations(axes[1:])):
    sizes[axis] = draw(st.sampled_from(divisors(number)))
    number //= sizes[axis]
  return {axes[0]: number, **sizes}


@st.composite
def legal_flat(draw):
  """Draws a topology and flat sizes that fit it, sometimes with one left open."""
  topology = draw(topologies)
  partitions = draw(st.sampled_from(sum(legal_partitions(topology), ())))
  sizes = draw(factored(topology.num_devices // partitions))
  open_axis = draw(st.sampled_from(OUTER + (None,)))
  if open_axis:
    sizes[open_axis] = -1
  return topology, {'num_partitions': partitions, **sizes}


def check_promises(topology, sizes) -> np.ndarray:
  """Checks what every MeshSizes promises; returns device numbers in the mesh."""
  assert tuple(sizes.total) == tuple(sizes.ici) == tuple(sizes.dcn) == MESH_AXES
  assert all(sizes.total[axis] == sizes.ici[axis] * sizes.dcn[axis] for axis in MESH_AXES)
  assert math.prod(sizes.ici.values()) == topology.devices_per_host
  assert math.prod(sizes.dcn.values()) == topology.num_hosts
  array = device_array(sizes, topology, range(topology.num_devices)).astype(int)
  assert array.shape == tuple(sizes.total.values())
  assert sorted(array.ravel()) == list(range(topology.num_devices))
  hosts = array // topology.devices_per_host
  for place, axis in enumerate(MESH_AXES):
    # Along one axis, hosts change exactly as often as the part across hosts says.
    lines = np.moveaxis(hosts, place, -1).reshape(-1, sizes.total[axis])
    assert all(len(set(line)) == sizes.dcn[axis] for line in lines.tolist())
  return array


@quick
@given(legal_flat())
def test_legal_sizes_give_a_mesh_of_all_devices(case):
  topology, kwargs = case
  sizes = resolve_mesh_sizes(topology, **kwargs)
  for axis, size in kwargs.items():
    if size != -1:
      assert sizes.total['model' if axis == 'num_partitions' else axis] == size
  check_promises(topology, sizes)
  assert 'link' in mesh_table(sizes, topology)


@quick
@given(legal_flat())
def test_model_stays_inside_a_host_whenever_it_divides_one(case):
  topology, kwargs = case
  sizes = resolve_mesh_sizes(topology, **kwargs)
  inside = topology.devices_per_host % kwargs['num_partitions'] == 0
  assert sizes.crosses_hosts('model') == (not inside)
  assert bool(sizes.warnings) == (not inside)
  groups = check_promises(topology, sizes).reshape(-1, kwargs['num_partitions'])
  if inside:
    assert all(len(set(group)) == 1 for group in (groups // topology.devices_per_host).tolist())


@st.composite
def legal_hybrid(draw):
  topology = draw(topologies)
  ici = draw(factored(topology.devices_per_host, axes=MESH_AXES[::-1]))
  dcn = draw(factored(topology.num_hosts))
  return topology, ici, dcn


@quick
@given(legal_hybrid())
def test_sizes_inside_and_across_hosts_are_taken_as_given(case):
  topology, ici, dcn = case
  sizes = resolve_mesh_sizes(topology, ici_mesh_shape=ici, dcn_mesh_shape=dcn)
  assert dict(sizes.ici) == {axis: ici[axis] for axis in MESH_AXES}
  assert dict(sizes.dcn) == {axis: dcn.get(axis, 1) for axis in MESH_AXES}
  check_promises(topology, sizes)


@quick
@given(
  topologies,
  st.integers(1, 40),
  st.fixed_dictionaries({axis: st.integers(1, 9) for axis in OUTER}),
  st.sampled_from(OUTER + (None,)),
)
def test_any_sizes_resolve_or_raise_one_mesh_error_that_is_right(
  topology, partitions, sizes, open_axis
):
  if open_axis:
    sizes = {**sizes, open_axis: -1}
  fixed = partitions * math.prod(size for size in sizes.values() if size != -1)
  legal = partitions in sum(legal_partitions(topology), ()) and (
    topology.num_devices % fixed == 0 if open_axis else fixed == topology.num_devices
  )
  try:
    resolved = resolve_mesh_sizes(topology, num_partitions=partitions, **sizes)
  except MeshError as e:
    assert not legal
    assert all(p.fix and p.parameters for p in e.problems)
    assert str(topology.devices_per_host) in str(e) or str(topology.num_devices) in str(e)
  else:
    assert legal
    check_promises(topology, resolved)


values = st.one_of(st.integers(-3, 30), st.none(), st.booleans(), st.just('8'), st.just(2.0))


@quick
@given(
  topologies,
  values,
  values,
  values,
  st.one_of(st.none(), st.tuples(values, values), st.tuples(values, values, values, values)),
  st.one_of(st.none(), st.dictionaries(st.sampled_from(MESH_AXES + ('modle',)), values)),
  st.one_of(st.none(), st.dictionaries(st.sampled_from(MESH_AXES + ('modle',)), values)),
)
def test_nonsense_never_raises_anything_but_mesh_error(
  topology, partitions, data, fsdp, submesh, ici, dcn
):
  try:
    sizes = resolve_mesh_sizes(
      topology,
      num_partitions=partitions,
      data=data,
      fsdp=fsdp,
      model_parallel_submesh=submesh,
      ici_mesh_shape=ici,
      dcn_mesh_shape=dcn,
    )
  except MeshError as e:
    assert e.parameters and all(p.startswith('Partitioner.') for p in e.parameters)
  else:
    check_promises(topology, sizes)


@quick
@given(legal_flat(), st.integers(1, 200))
def test_the_multiple_that_an_error_names_divides(case, size):
  topology, kwargs = case
  sizes = resolve_mesh_sizes(topology, **kwargs)
  rules = {'batch': ('data', 'fsdp')}
  problems = check_model_sizes(sizes, {'batch': size}, rules)
  ways = sizes.total['data'] * sizes.total['fsdp']
  assert [p.fix for p in problems] == [f'Set batch to a multiple of {ways}.'] * (size % ways != 0)
