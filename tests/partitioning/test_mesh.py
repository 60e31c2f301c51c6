"""The mesh keeps communication-heavy axes inside hosts, and depends on the topology alone."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental import mesh_utils

from t5x_gpu.errors import Problem
from t5x_gpu.partitioning.mesh import build_mesh, device_array, mesh_table
from t5x_gpu.partitioning.mesh_sizes import MESH_AXES, resolve_mesh_sizes
from t5x_gpu.partitioning.partitioner import SizeHint, check_model_sizes
from t5x_gpu.runtime.topology import Topology, discover
from tests.messages import record_message


@dataclasses.dataclass(frozen=True)
class FakeGpu:
  id: int
  process_index: int
  slice_index: int
  platform: str = 'gpu'
  device_kind: str = 'NVIDIA H100 80GB HBM3'


def fake_gpus(num_hosts, devices_per_host, *, process_per_gpu):
  return [
    FakeGpu(i, i if process_per_gpu else i // devices_per_host, i // devices_per_host)
    for i in range(num_hosts * devices_per_host)
  ]


def ids(array) -> np.ndarray:
  return np.vectorize(lambda device: device.id, otypes=[int])(array)


@pytest.mark.parametrize('process_per_gpu', [True, False])
@pytest.mark.parametrize('num_partitions', [1, 2, 4, 8])
def test_24_hosts_of_8_keep_model_inside_hosts(num_partitions, process_per_gpu):
  topology, devices = discover(fake_gpus(24, 8, process_per_gpu=process_per_gpu))
  sizes = resolve_mesh_sizes(topology, num_partitions=num_partitions)
  array = device_array(sizes, topology, devices)
  # The golden order: devices in sequence, so that eight neighbors are one host.
  golden = np.arange(192).reshape(1, 192 // num_partitions, 1, 1, 1, num_partitions)
  np.testing.assert_array_equal(ids(array), golden)
  for group in ids(array).reshape(-1, num_partitions):
    assert len(set(group // 8)) == 1
  assert sizes.warnings == ()


def test_golden_mesh_of_24_hosts_with_fsdp_and_model():
  topology, devices = discover(fake_gpus(24, 8, process_per_gpu=True))
  sizes = resolve_mesh_sizes(topology, num_partitions=4, fsdp=4)
  array = ids(device_array(sizes, topology, devices))
  assert array.shape == (1, 12, 4, 1, 1, 4)
  # fsdp = 2 hosts x 2 halves of a host: data group 0 is hosts 0 and 1.
  assert array[0, 0, :, 0, 0].tolist() == [
    [0, 1, 2, 3],
    [4, 5, 6, 7],
    [8, 9, 10, 11],
    [12, 13, 14, 15],
  ]
  assert array[0, 11, :, 0, 0, 0].tolist() == [176, 180, 184, 188]


def test_golden_mesh_with_axes_across_hosts_by_hand():
  topology = Topology(2, 4)
  sizes = resolve_mesh_sizes(
    topology, ici_mesh_shape={'data': 2, 'model': 2}, dcn_mesh_shape={'fsdp': 2}
  )
  array = ids(device_array(sizes, topology, fake_gpus(2, 4, process_per_gpu=False)))
  assert array[0, :, :, 0, 0, :].tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize(
  'topology, kwargs',
  [
    (Topology(4, 8), dict(num_partitions=4, fsdp=4, stage=2)),
    (Topology(6, 4), dict(num_partitions=2, context=3, expert=2)),
    (Topology(3, 8), dict(fsdp=-1, data=1)),
    (Topology(2, 8), dict(num_partitions=16)),
    (
      Topology(4, 6),
      dict(ici_mesh_shape={'data': 3, 'expert': 2}, dcn_mesh_shape={'data': 2, 'fsdp': 2}),
    ),
  ],
)
def test_mesh_has_the_host_blocks_of_jax_hybrid_mesh(topology, kwargs):
  devices = fake_gpus(topology.num_hosts, topology.devices_per_host, process_per_gpu=True)
  sizes = resolve_mesh_sizes(topology, **kwargs)
  expected = mesh_utils.create_hybrid_device_mesh(
    list(sizes.ici.values()), list(sizes.dcn.values()), devices
  )
  np.testing.assert_array_equal(ids(device_array(sizes, topology, devices)), ids(expected))


def test_built_mesh_has_auto_axes_and_runs():
  topology = Topology(2, 4)
  sizes = resolve_mesh_sizes(topology, num_partitions=2, fsdp=2)
  mesh = build_mesh(sizes, topology, jax.devices())
  assert mesh.axis_names == MESH_AXES
  assert dict(mesh.shape) == dict(sizes.total)
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  sharding = jax.NamedSharding(mesh, jax.P(('data', 'fsdp'), 'model'))
  x = jax.device_put(np.arange(32.0).reshape(8, 4), sharding)
  assert float(jax.jit(lambda x: x.sum())(x)) == 496.0
  assert {s.data.shape for s in x.addressable_shards} == {(2, 2)}


def test_devices_of_another_number_are_refused():
  topology = Topology(2, 4)
  with pytest.raises(AssertionError):
    device_array(resolve_mesh_sizes(topology), topology, jax.devices()[:4])
  with pytest.raises(AssertionError):
    device_array(resolve_mesh_sizes(Topology(1, 8)), topology, jax.devices())


def test_table_shows_what_is_split_and_over_which_link():
  topology = Topology(2, 8)
  table = mesh_table(resolve_mesh_sizes(topology, num_partitions=4, fsdp=4), topology)
  assert table.splitlines() == [
    'mesh: 2 hosts x 8 GPUs = 16 GPUs (given)',
    '  axis   size  splits                link',
    '  data      1  batch                 -',
    '  fsdp      4  batch and parameters  crosses the network (2 hosts x 2 inside each)',
    '  model     4  heads, mlp, vocab     inside a host',
    '  note: the 8 GPUs of a host go to the innermost axes first: model 4 inside a host, '
    'fsdp 2 inside a host x 2 across hosts',
  ]


def test_table_shows_the_warning_of_a_model_axis_across_hosts():
  topology = Topology(2, 8)
  table = mesh_table(resolve_mesh_sizes(topology, num_partitions=16), topology)
  assert 'WARNING: num_partitions = 16 spans 2 hosts' in table


RULES = {
  'batch': ('data', 'fsdp'),
  'length': (),
  'embed': ('fsdp',),
  'heads': ('model',),
  'mlp': ('model',),
}


def test_model_sizes_that_divide_have_no_problems():
  sizes = resolve_mesh_sizes(Topology(1, 8), num_partitions=2, fsdp=2)
  assert (
    check_model_sizes(sizes, {'batch': 8, 'length': 7, 'embed': 6, 'heads': 6, 'mlp': 10}, RULES)
    == []
  )


def test_every_model_size_that_does_not_divide_is_a_problem_with_its_rule():
  sizes = resolve_mesh_sizes(Topology(1, 8), num_partitions=4, fsdp=2)
  heads = SizeHint('TransformerConfig.num_heads', is_width=True)
  batch = SizeHint('BATCH_SIZE', each_of=2, multiple_of=3)
  assert check_model_sizes(
    sizes,
    {'batch': 3, 'heads': 6, 'mlp': 1024, 'embed': 5},
    RULES,
    hints={'heads': heads, 'batch': batch},
  ) == [
    Problem(
      'batch = 3 does not divide over fsdp=2 in each of 2 microbatches.',
      'Set BATCH_SIZE to a multiple of 12.',
      ('BATCH_SIZE', 'Partitioner.fsdp'),
    ),
    Problem(
      'heads = 6 does not divide over model=4.',
      'Set Partitioner.num_partitions = 1 or 2.',
      ('TransformerConfig.num_heads', 'Partitioner.num_partitions'),
    ),
    Problem(
      'embed = 5 does not divide over fsdp=2.',
      'Set embed to a multiple of 2.',
      ('embed', 'Partitioner.fsdp'),
    ),
  ]


def test_a_size_over_two_axes_names_their_product():
  sizes = resolve_mesh_sizes(Topology(2, 8), fsdp=4)
  [problem] = check_model_sizes(sizes, {'batch': 20}, RULES)
  record_message(problem.text())


def test_only_partitions_legal_on_the_hosts_are_listed():
  # 6 heads divide by 3 and 6 too, but 8 devices of a host do not.
  sizes = resolve_mesh_sizes(Topology(3, 8), num_partitions=4)
  hints = {'heads': SizeHint('TransformerConfig.num_heads', is_width=True)}
  [problem] = check_model_sizes(sizes, {'heads': 6}, RULES, hints=hints)
  record_message(problem.text())


def test_names_without_rule_and_rules_without_axis_are_problems():
  sizes = resolve_mesh_sizes(Topology(1, 8))
  for problem in (
    *check_model_sizes(sizes, {'head': 6}, RULES),
    *check_model_sizes(sizes, {'x': 6}, {'x': ('modle',)}),
  ):
    record_message(problem.text())
