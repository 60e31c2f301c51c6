"""Hosts are found from the attributes of devices, for any number of processes."""

import dataclasses
from typing import Optional

import jax
import pytest

from t5x_gpu.errors import MeshError
from t5x_gpu.runtime.topology import Topology, discover, group_by_host
from tests.messages import raises


@dataclasses.dataclass(frozen=True)
class FakeGpu:
  id: int
  process_index: int
  slice_index: Optional[int] = None
  platform: str = 'gpu'


def test_one_process_is_one_host():
  topology, devices = discover()
  assert topology == Topology(1, 8)
  assert devices == jax.devices()
  assert str(topology) == '1 host x 8 CPU devices'


def test_one_process_per_gpu_gives_the_same_order_as_one_per_host():
  per_gpu = [FakeGpu(id=i, process_index=i, slice_index=i // 8) for i in range(24)]
  per_host = [FakeGpu(id=i, process_index=i // 8, slice_index=i // 8) for i in range(24)]
  topologies, orders = zip(discover(per_gpu), discover(per_host))
  assert topologies == (Topology(3, 8), Topology(3, 8))
  assert [d.id for d in orders[0]] == [d.id for d in orders[1]] == list(range(24))


def test_processes_dealt_in_turns_are_grouped_by_host():
  # Slurm's cyclic distribution: rank 0 on host 0, rank 1 on host 1, rank 2 on host 0, ...
  devices = [FakeGpu(id=i, process_index=i, slice_index=i % 2) for i in range(8)]
  topology, ordered = discover(devices)
  assert topology == Topology(2, 4)
  assert [d.id for d in ordered] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_order_does_not_depend_on_the_order_given():
  devices = [FakeGpu(id=i, process_index=i // 2, slice_index=7 - i // 4) for i in range(16)]
  assert discover(devices[::-1]) == discover(devices)
  # The host of process 0 comes first though its slice_index is the highest.
  assert discover(devices)[1][0].id == 0


def test_devices_of_a_host_go_by_process_whatever_their_ids():
  devices = [FakeGpu(id=7 - i, process_index=i, slice_index=i // 4) for i in range(8)]
  assert [d.process_index for d in discover(devices)[1]] == list(range(8))


def test_a_process_is_a_host_where_devices_say_nothing():
  topology, _ = discover([FakeGpu(id=i, process_index=i // 4) for i in range(8)])
  assert topology == Topology(2, 4)
  assert 'each process counts as a host' in topology.reason


def test_uneven_hosts_are_an_error_that_names_the_odd_one():
  devices = [FakeGpu(id=i, process_index=i, slice_index=min(i // 8, 2)) for i in range(23)]
  with raises(MeshError):
    discover(devices)


def test_any_key_can_stand_for_the_host():
  domains = {0: 'rack-a', 1: 'rack-b', 2: 'rack-a', 3: 'rack-b'}
  topology, ordered = group_by_host(
    [FakeGpu(id=i, process_index=i) for i in range(4)], lambda d: domains[d.process_index]
  )
  assert topology == Topology(2, 2)
  assert [d.id for d in ordered] == [0, 2, 1, 3]


@pytest.mark.parametrize('hosts, devices', [(0, 8), (2, 0), (-1, 8)])
def test_a_topology_without_devices_is_an_error(hosts, devices):
  with raises(MeshError):
    Topology(hosts, devices)


def test_the_word_for_a_device_is_not_part_of_the_value():
  assert Topology(2, 4, device_word='CPU device', reason='x') == Topology(2, 4)
  assert Topology(2, 4).count(1) == '1 GPU' and Topology(2, 4).count(3) == '3 GPUs'


def test_no_environment_variable_fakes_hosts(monkeypatch):
  monkeypatch.setenv('T5X_GPU_FAKE_HOSTS', '2')
  assert discover()[0] == Topology(1, 8)
