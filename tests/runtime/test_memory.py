"""How much memory a process may use, from the files of Linux."""

import pathlib
import types

import jax
import pytest

from t5x_gpu.runtime import hardware
from t5x_gpu.runtime.hardware import GIB, Limit


def files(root: pathlib.Path, **texts: str) -> pathlib.Path:
  total = f'MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\n'
  for name, text in {'proc/meminfo': total, **texts}.items():
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
  return root


def test_without_control_groups_it_is_the_hosts_memory(tmp_path):
  assert hardware.host_limit(files(tmp_path)) == Limit(64 * GIB, "the host's memory")


@pytest.mark.parametrize(
  'groups, limits, expected',
  [
    ('0::/job/step', {'job/memory.max': 8 * GIB, 'job/step/memory.max': 'max'}, 8),
    ('0::/job/step', {'job/memory.max': 'max', 'job/step/memory.max': 4 * GIB}, 4),
    ('0::/', {'memory.max': 2 * GIB}, 2),
    ('0::/of/the/host', {'memory.max': 3 * GIB}, 3),
    ('0::/job', {'job/memory.max': 128 * GIB}, 64),
    ('7:blkio:/job\n4:memory:/job', {'memory/job/memory.limit_in_bytes': 5 * GIB}, 5),
    (
      '4:cpu,memory:/x/y',
      {'memory/memory.limit_in_bytes': 2**63 - 4096, 'memory/x/memory.limit_in_bytes': 6 * GIB},
      6,
    ),
  ],
)
def test_the_smallest_limit_of_all_control_groups_counts(tmp_path, groups, limits, expected):
  root = files(
    tmp_path,
    **{'proc/self/cgroup': groups + '\n'},
    **{f'sys/fs/cgroup/{name}': f'{value}\n' for name, value in limits.items()},
  )
  assert hardware.host_limit(root).bytes == expected * GIB


def test_no_file_says_nothing(tmp_path):
  assert hardware.host_limit(tmp_path) is None


def test_this_machine_has_memory_that_its_cpu_devices_share():
  host = hardware.host_limit()
  assert host.bytes > 2**28
  one = hardware.device_limit(jax.devices('cpu')[:1], devices_per_host=1, host=host)
  eight = hardware.device_limit(jax.devices('cpu')[:1], devices_per_host=8, host=host)
  assert one == host and eight.bytes == host.bytes // 8 and 'shared by 8' in eight.source


def gpu(**stats: int) -> types.SimpleNamespace:
  """The attributes of a GPU that jax.Device shows."""
  return types.SimpleNamespace(
    platform='gpu', device_kind='NVIDIA H100 80GB HBM3', memory_stats=lambda: stats or None
  )


def test_an_allocator_that_exceeds_its_limit_is_not_held_to_it(monkeypatch):
  monkeypatch.setenv('XLA_PYTHON_CLIENT_ALLOCATOR', 'cuda_async')
  limit = hardware.device_limit([gpu(bytes_limit=60 * GIB)], devices_per_host=1, host=None)
  assert limit.bytes == 80 * GIB


def test_a_gpu_has_what_its_allocator_may_use_and_the_smallest_counts():
  gpus = [gpu(bytes_limit=60 * GIB), gpu(bytes_limit=59 * GIB)]
  limit = hardware.device_limit(gpus, devices_per_host=2, host=Limit(8 * GIB, 'host'))
  assert limit.bytes == 59 * GIB and 'bytes_limit' in limit.source
  assert hardware.device_limit([gpu()], devices_per_host=1, host=None).bytes == 80 * GIB
