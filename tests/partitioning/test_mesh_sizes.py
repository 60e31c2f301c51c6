"""Mesh sizes: which are legal, how they are split over hosts, and what the errors say."""

import pytest

from t5x_gpu.errors import MeshError
from t5x_gpu.partitioning.mesh_sizes import (
  MESH_AXES,
  divisors,
  legal_partitions,
  resolve_mesh_sizes,
)
from t5x_gpu.runtime.topology import Topology
from tests.messages import raises


def error(topology, **sizes) -> MeshError:
  with raises(MeshError) as e:
    resolve_mesh_sizes(topology, **sizes)
  return e.value


def big(sizes) -> dict[str, int]:
  return {axis: size for axis, size in sizes.items() if size > 1}


def test_all_devices_are_data_parallel_by_default():
  sizes = resolve_mesh_sizes(Topology(2, 8))
  assert tuple(sizes.total) == tuple(sizes.ici) == tuple(sizes.dcn) == MESH_AXES
  assert big(sizes.total) == {'data': 16}
  assert (big(sizes.ici), big(sizes.dcn)) == ({'data': 8}, {'data': 2})
  assert sizes.num_devices == 16 and sizes.crosses_hosts('data')


def test_innermost_axes_take_the_devices_of_a_host_first():
  sizes = resolve_mesh_sizes(Topology(4, 8), num_partitions=4, fsdp=4, stage=2)
  assert big(sizes.ici) == {'fsdp': 2, 'model': 4}
  assert big(sizes.dcn) == {'stage': 2, 'fsdp': 2}
  assert 'fsdp 2 inside a host x 2 across hosts' in sizes.notes[-1]
  assert sizes.warnings == ()


def test_three_partitions_of_eight_gpus_name_every_legal_value():
  e = error(Topology(1, 8), num_partitions=3)
  assert e.parameters == ('Partitioner.num_partitions',)


def test_legal_partitions_across_hosts_are_listed_apart():
  topology = Topology(6, 8)
  assert legal_partitions(topology) == ((1, 2, 4, 8), (16, 24, 48))
  e = error(topology, num_partitions=12)
  assert e.parameters == ('Partitioner.num_partitions',)


@pytest.mark.parametrize('topology', [Topology(1, 8), Topology(3, 6), Topology(24, 8)])
def test_exactly_the_legal_partitions_resolve(topology):
  legal = sum(legal_partitions(topology), ())
  for num_partitions in range(1, topology.num_devices + 2):
    if num_partitions in legal:
      assert (
        resolve_mesh_sizes(topology, num_partitions=num_partitions).total['model'] == num_partitions
      )
    else:
      error(topology, num_partitions=num_partitions)


def test_partitions_that_span_hosts_are_allowed_with_a_warning():
  sizes = resolve_mesh_sizes(Topology(4, 8), num_partitions=16)
  assert (sizes.ici['model'], sizes.dcn['model']) == (8, 2)
  assert len(sizes.warnings) == 1
  assert 'spans 2 hosts' in sizes.warnings[0] and 'network' in sizes.warnings[0]


def test_sizes_of_another_product_are_an_error_with_the_rule_and_one_fix():
  [problem] = error(Topology(2, 8), data=2, fsdp=4, num_partitions=4).problems
  assert problem.parameters == (
    'Partitioner.data',
    'Partitioner.fsdp',
    'Partitioner.num_partitions',
  )
  resolve_mesh_sizes(Topology(2, 8), data=-1, fsdp=4, num_partitions=4)


def test_sizes_that_leave_no_whole_rest_are_an_error_with_both_numbers():
  [problem] = error(Topology(2, 8), fsdp=3, num_partitions=4).problems
  assert problem.parameters == ('Partitioner.fsdp', 'Partitioner.num_partitions')


def test_another_axis_can_take_what_is_left():
  assert big(resolve_mesh_sizes(Topology(2, 8), data=2, fsdp=-1).total) == {'data': 2, 'fsdp': 8}


def test_two_open_sizes_are_an_error_that_names_the_one_to_set():
  error(Topology(2, 8), fsdp=-1)


def test_all_problems_come_in_one_message():
  assert len(error(Topology(2, 8), num_partitions=3, data=3, fsdp=0).problems) == 2
  assert len(error(Topology(2, 8), num_partitions=3, data=3, fsdp=8).problems) == 2


@pytest.mark.parametrize('value', [0, -2, 2.0, '2', True, None])
def test_an_invalid_size_is_refused(value):
  error(Topology(1, 8), fsdp=value)
  if value is not None:
    error(Topology(1, 8), num_partitions=value)


@pytest.mark.parametrize(
  'submesh, model',
  [
    ((1, 1, 1, 1), 1),
    ((1, 2, 1, 1), 2),
    ((1, 1, 1, 2), 2),
    ((1, 2), 2),
    ([1, 4, 1, 1], 4),
    ((2, 8), 16),
  ],
)
def test_a_t5x_submesh_sets_the_size_of_model(submesh, model):
  sizes = resolve_mesh_sizes(Topology(2, 8), model_parallel_submesh=submesh)
  assert sizes.total['model'] == model
  assert any('model_parallel_submesh' in note for note in sizes.notes)


@pytest.mark.parametrize('submesh', [8, (1,), (1, 2, 1), (1, 0, 1, 1), (1, -1, 1, 1), ('a', 'b')])
def test_a_submesh_of_another_form_is_refused(submesh):
  e = error(Topology(1, 8), model_parallel_submesh=submesh)
  assert e.parameters == ('Partitioner.model_parallel_submesh',)


def test_an_illegal_submesh_names_itself():
  e = error(Topology(1, 8), model_parallel_submesh=(1, 3, 1, 1))
  assert e.parameters == ('Partitioner.model_parallel_submesh',)


def test_advice_for_a_submesh_does_not_name_num_partitions():
  e = error(Topology(2, 8), model_parallel_submesh=(1, 4, 1, 1), data=8)
  assert e.parameters == ('Partitioner.data', 'Partitioner.model_parallel_submesh')


def test_submesh_and_num_partitions_exclude_each_other():
  error(Topology(1, 8), model_parallel_submesh=(1, 2, 1, 1), num_partitions=2)


def test_sizes_can_be_given_inside_and_across_hosts():
  sizes = resolve_mesh_sizes(
    Topology(4, 8), ici_mesh_shape={'fsdp': -1, 'model': 2}, dcn_mesh_shape={'stage': 2, 'data': -1}
  )
  assert big(sizes.ici) == {'fsdp': 4, 'model': 2}
  assert big(sizes.dcn) == {'stage': 2, 'data': 2}
  assert list(sizes.total.values()) == [2, 2, 4, 1, 1, 2]


def test_ici_sizes_alone_put_the_hosts_on_data_and_say_so():
  sizes = resolve_mesh_sizes(Topology(3, 8), ici_mesh_shape={'fsdp': 8}, num_partitions=1)
  assert big(sizes.total) == {'data': 3, 'fsdp': 8}
  assert sizes.notes == ('dcn_mesh_shape is not set: data takes the hosts (3)',)


def test_dcn_sizes_can_put_an_inner_axis_across_hosts():
  # Flat sizes would lay fsdp=2 inside the host.
  sizes = resolve_mesh_sizes(Topology(2, 8), ici_mesh_shape={'data': 8}, dcn_mesh_shape={'fsdp': 2})
  assert sizes.crosses_hosts('fsdp') and not sizes.crosses_hosts('data')


@pytest.mark.parametrize(
  'sizes',
  [
    dict(ici_mesh_shape={'fsdp': 4}),
    dict(dcn_mesh_shape={'data': 3}),
    dict(ici_mesh_shape={'fsdp': 3, 'data': -1}),
    dict(ici_mesh_shape={'fsdp': -1, 'data': -1}),
    dict(ici_mesh_shape={'fdsp': 8}),
    dict(ici_mesh_shape=(1, 8)),
    dict(dcn_mesh_shape={'data': 'x'}),
    dict(ici_mesh_shape={'fsdp': 8}, fsdp=8),
    dict(ici_mesh_shape={'fsdp': 8}, num_partitions=2),
  ],
)
def test_errors_for_bad_ici_and_dcn_sizes_name_sizes_that_fit(sizes):
  e = error(Topology(2, 8), **sizes)
  assert any('mesh_shape' in parameter for parameter in e.parameters)


def test_model_across_hosts_by_dcn_must_cover_whole_hosts_or_divide_one():
  sizes = resolve_mesh_sizes(
    Topology(2, 8), ici_mesh_shape={'model': 4, 'data': 2}, dcn_mesh_shape={'model': 2}
  )
  assert sizes.warnings
  error(Topology(3, 8), ici_mesh_shape={'model': 4, 'data': 2}, dcn_mesh_shape={'model': 3})


def test_messages_use_the_word_of_the_topology():
  error(Topology(1, 8, device_word='CPU device'), num_partitions=3)


def test_divisors_are_all_and_ascending():
  for number in (1, 2, 12, 36, 97):
    assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
