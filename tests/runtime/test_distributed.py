"""Two real processes over loopback agree on values; one process needs nothing."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import types

import jax
import pytest

from t5x_gpu.errors import MeshError
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster
from t5x_gpu.runtime.cluster.members import ClusterMember
from tests.helpers_xla import xla_flags
from tests.messages import raises

DEADLINE_SECONDS = 120
ROOT = pathlib.Path(__file__).parents[2]


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def run_two(
  folder: pathlib.Path, *, prefixes=((), ()), envs=({}, {}), name: str = 'two_processes.py'
) -> list[dict]:
  """Returns the output of each of two processes; `prefixes` precede their commands."""
  address = f'127.0.0.1:{free_port()}'
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), 'XLA_FLAGS': xla_flags(2)}
  script = str(pathlib.Path(__file__).parent / name)
  processes = [
    subprocess.Popen(
      [*prefix, sys.executable, script, address, str(i), str(folder)],
      env={**env, **envs[i]},
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
    )
    for i, prefix in enumerate(prefixes)
  ]
  try:
    outputs = [process.communicate(timeout=DEADLINE_SECONDS)[0] for process in processes]
  finally:
    for process in processes:
      process.kill()
      process.wait()
  for process, output in zip(processes, outputs):
    assert process.returncode == 0, output
  return [
    json.loads(line.removeprefix('RESULT '))
    for output in outputs
    for line in output.splitlines()
    if line.startswith('RESULT ')
  ]


@pytest.fixture(scope='module')
def results(tmp_path_factory) -> list[dict]:
  return run_two(tmp_path_factory.mktemp('one_host'))


def test_flags_join_two_processes(results):
  assert [r['joined'] for r in results] == [True, True]
  assert [r['index'] for r in results] == [0, 1]
  assert [r['count'] for r in results] == [2, 2]
  assert [r['main'] for r in results] == [True, False]


def test_gather_json_waits_for_the_slower_process(results):
  assert [r['waited'] for r in results] == [[True] * 6] * 2


def test_broadcast_gives_everyone_the_value_of_process_0(results):
  assert [r['broadcast'] for r in results] == [{'from': 0, 'text': 'é' * 100}] * 2


def test_gather_gives_everyone_all_values_in_order(results):
  assert [r['gathered'] for r in results] == [[{'i': 0, 'pad': ''}, {'i': 1, 'pad': 'x' * 50}]] * 2


def test_values_of_any_length_compile_a_few_programs(results):
  for r in results:
    assert r['lengths_are_equal']
    assert r['num_compiled'] <= 7  # for 1, 4, 16 and 64 KiB, gathered and broadcast


def test_a_difference_is_an_error_on_every_process_that_shows_both(results):
  for r in results:
    assert 'The config is not the same on all 2 processes' in r['difference']
    assert '"lr": 0.1' in r['difference'] and '"lr": 0.2' in r['difference']


def test_two_processes_of_one_machine_are_one_host(results):
  for r in results:
    assert r['topology'] == [1, 4]
    assert 'host name and boot id' in r['reason']
    assert r['sum'] == 28.0


@pytest.mark.slow
def test_machines_are_identified_by_boot_id_and_keep_model_inside(tmp_path):
  # A second "machine": the same one, with another boot id in its own mount namespace.
  (tmp_path / 'boot_id').write_text('11111111-2222-3333-4444-555555555555\n')
  mount = f'mount --bind {tmp_path}/boot_id /proc/sys/kernel/random/boot_id && exec "$@"'
  other = next(
    (
      prefix
      for prefix in (
        ['unshare', '-m', 'sh', '-c', mount, 'sh'],
        ['unshare', '-rm', 'sh', '-c', mount, 'sh'],
      )
      if subprocess.run([*prefix, 'true'], capture_output=True).returncode == 0
    ),
    None,
  )
  if other is None:
    pytest.skip('mount namespaces are not allowed here')
  for r in run_two(tmp_path, prefixes=((), other)):
    assert r['topology'] == [2, 2]
    assert r['model_groups'] == [[0], [1]]
    assert r['sum'] == 28.0


def test_a_single_process_starts_nothing():
  assert distributed.join(cluster.detect({})) is False
  assert (distributed.process_index(), distributed.process_count()) == (0, 1)
  assert distributed.is_main_process() and distributed.members() == ()


def table_of(monkeypatch, gpus_of_each):
  """Returns the table of processes on two hosts, with these GPUs."""
  half = len(gpus_of_each) // 2
  monkeypatch.setattr(
    distributed,
    '_members',
    [
      ClusterMember(
        process_index=i,
        hostname=f'gpu-00{1 + i // half}',
        host_key=str(i // half),
        domain='rack',
        gpus=gpus,
      )
      for i, gpus in enumerate(gpus_of_each)
    ],
  )
  return distributed.members_table().splitlines()


def uuid(number):
  return f'GPU-{number:08x}-c9f5-4f3a-9a53-1de0e7ab0c1f'


def test_the_table_shows_which_process_has_which_gpu_on_which_host(monkeypatch):
  assert table_of(monkeypatch, [(uuid(0xA0 + i),) for i in range(4)]) == [
    'processes: 4 on 2 hosts',
    '  gpu-001   0: 000000a0   1: 000000a1',
    '  gpu-002   2: 000000a2   3: 000000a3',
  ]
  assert table_of(monkeypatch, [(uuid(1), 'MIG-1de0e7ab-9a53'), ()])[1:] == [
    '  gpu-001   0: 00000001,MIG-1de0e7ab-9a53',
    '  gpu-002   1: no GPU',
  ]


def test_the_table_of_many_processes_has_a_line_per_host(monkeypatch):
  lines = table_of(monkeypatch, [(uuid(i),) for i in range(16)])
  assert len(lines) == 3 and max(map(len, lines)) < 140


def test_the_table_of_cpu_processes_says_that_they_have_no_gpus(monkeypatch):
  assert table_of(monkeypatch, [()] * 6) == [
    'processes: 6 on 2 hosts, no GPUs',
    '  gpu-001   0-2',
    '  gpu-002   3-5',
  ]


def test_one_process_agrees_with_itself():
  value = object()
  assert distributed.broadcast_json(value) is value
  assert distributed.gather_json(value) == [value]
  distributed.assert_equal_across_hosts(value, 'anything')


def test_processes_with_other_numbers_of_devices_are_named(monkeypatch):
  counts = {0: 8, 1: 8, 2: 7, 3: 8}
  devices = [types.SimpleNamespace(process_index=i) for i, n in counts.items() for _ in range(n)]
  monkeypatch.setattr(jax, 'devices', lambda: devices)
  with raises(MeshError):
    distributed._check_equal_processes.__wrapped__()
