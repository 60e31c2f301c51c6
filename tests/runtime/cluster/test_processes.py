"""Real processes on loopback: hosts are recognized, all processes stop at the same step, and no
process waits for a failed one."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]
DEADLINE_SECONDS = 240  # JAX alone would take forked_processes.JAX_SECONDS


def run(
  scenario: str, processes: list[dict], **variables: str
) -> tuple[list[dict], list[int], str]:
  """Returns each process's results, its exit code and all output; fails if one does not end."""
  env = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': str(ROOT),
    'TF_CPP_MIN_LOG_LEVEL': '1',
    **variables,
  }
  env.pop('XLA_FLAGS', None)
  with subprocess.Popen(
    [
      sys.executable,
      '-W',
      'ignore::RuntimeWarning',
      str(pathlib.Path(__file__).parent / 'forked_processes.py'),
      scenario,
      json.dumps(processes),
    ],
    env=env,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
    start_new_session=True,
  ) as forked:
    try:
      output = forked.communicate(timeout=DEADLINE_SECONDS)[0]
    except subprocess.TimeoutExpired:
      os.killpg(forked.pid, signal.SIGKILL)
      pytest.fail(f'not all have ended within {DEADLINE_SECONDS} s:\n{forked.communicate()[0]}')
  results = [json.loads(text) for text in re.findall(r'RESULT (\{[^{}]*\})', output)]
  exits = [line for line in output.splitlines() if line.startswith('EXITS ')]
  assert exits, output
  return (
    sorted(results, key=lambda r: r['index']),
    json.loads(exits[0].removeprefix('EXITS ')),
    output,
  )


@pytest.fixture(scope='module')
def one_per_device():
  # Dealt out in turns, as Slurm's cyclic distribution does.
  return run('layout', [{'domain': 'ab'[i % 2]} for i in range(4)])


@pytest.mark.slow
def test_one_process_per_device_finds_two_hosts(one_per_device):
  results, exits, output = one_per_device
  assert exits == [0] * 4, output
  assert {(r['hosts'], r['per_host']) for r in results} == {(2, 2)}
  assert {r['reason'] for r in results} == {'hosts identified by T5X_GPU_DOMAIN'}
  assert {r['sum'] for r in results} == {6.0}


@pytest.mark.slow
def test_one_process_per_host_gives_the_same_host_blocks(one_per_device):
  results, exits, output = run('layout', [{'devices': 2, 'domain': d} for d in 'ab'])
  assert exits == [0, 0], output
  assert {(r['hosts'], r['per_host']) for r in results} == {(2, 2)}
  blocks = {tuple(r['blocks']) for r in results + one_per_device[0]}
  assert blocks == {(0, 0, 1, 1)}  # `model` of 2 stays inside a host


@pytest.mark.slow
def test_hybrid_mesh_of_jax_has_the_same_host_blocks():
  results, exits, output = run('hybrid', [{'devices': 4, 'domain': d} for d in 'ab'])
  assert exits == [0, 0], output
  for r in results:
    assert r['ours'] == r['theirs'] == [[0, 0]] * 2 + [[1, 1]] * 2


@pytest.mark.slow
def test_processes_without_a_domain_are_one_host():
  results, exits, output = run('layout', [{}, {}])
  assert exits == [0, 0], output
  assert {(r['hosts'], r['per_host']) for r in results} == {(1, 2)}
  assert results[0]['reason'] == 'hosts identified by host name and boot id'


@pytest.mark.slow
def test_a_proxy_for_downloads_is_ignored():
  # Without help JAX waits for its timeout and aborts.
  proxy = 'http://127.0.0.1:9'
  _, exits, output = run('layout', [{}, {}], http_proxy=proxy, https_proxy=proxy, grpc_proxy=proxy)
  assert exits == [0, 0], output


@pytest.mark.slow
def test_uneven_hosts_are_an_error_on_every_process():
  _, exits, output = run('layout', [{'domain': 'a'}, {'domain': 'a'}, {'domain': 'b'}])
  assert exits == [1] * 3
  assert output.count('MeshError: The 2 hosts do not have the same number of devices') == 3
  assert 'Traceback' not in output


@pytest.mark.quick_cases('SIGTERM-85')
@pytest.mark.parametrize(
  'name, code',
  [('SIGTERM', 85), ('SIGINT', 130), pytest.param('SIGUSR1', 85, marks=pytest.mark.slow)],
)
def test_a_signal_to_one_process_stops_all_at_the_same_step(name, code):
  results, exits, output = run('stop', [{}, {'at': 5, 'signal': name}, {}])
  assert exits == [code] * 3, output
  steps = {r['step'] for r in results}
  assert len(steps) == 1 and 5 <= steps.pop() < 400
  assert {r['signal'] for r in results} == {name}


@pytest.mark.slow
def test_an_exception_in_one_process_ends_all_without_waiting_for_jax():
  _, exits, output = run('stop', [{}, {'raise_at': 5}, {}])
  assert exits[1] == 1
  assert 0 not in exits
  assert '[1/3] Traceback' in output and 'ValueError: boom' in output


def test_a_killed_process_ends_all_without_waiting_for_jax():
  _, exits, output = run('stop', [{}, {}, {'kill_at': 5}])
  assert exits[2] == -9
  assert 0 not in exits


@pytest.mark.quick_cases('127*')
@pytest.mark.parametrize('host, address', [('127.0.0.1', '127.0.0.1'), ('[::1]', '::1')])
def test_everything_listens_on_the_coordinators_interface_only(host, address):
  # JAX's service in process 0, and gloo in both.
  results, exits, output = run('listening', [{'host': host}] * 2, T5X_GPU_JOB_SECRET='s3cret')
  assert exits == [0, 0], output
  assert [r['sum'] for r in results] == [2.0, 2.0]
  assert [r['listens'] for r in results] == [[address]] * 2
