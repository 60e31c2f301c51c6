"""Processes meet before JAX starts; a process that cannot join gets the reason."""

import contextlib
import dataclasses
import errno
import os
import random
import socket
import threading
import time

import pytest

from t5x_gpu.errors import ClusterError
from t5x_gpu.runtime.cluster import addresses, rendezvous
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.cluster.members import ClusterMember, from_rows, to_rows
from t5x_gpu.runtime.cluster.members import check as check_members
from t5x_gpu.runtime.cluster.rendezvous import meet
from tests.messages import raises


def free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


def info(
  index: int,
  *,
  count: int = 3,
  port: int,
  run_id: str = 'test/1',
  host: str = '127.0.0.1',
  others: tuple[str, ...] = (),
) -> ClusterInfo:
  return ClusterInfo(
    kind='flags',
    process_index=index,
    process_count=count,
    run_id=run_id,
    coordinator_address=addresses.join(host, port),
    other_addresses=others,
  )


def member(index: int, **more) -> ClusterMember:
  return ClusterMember(
    process_index=index,
    hostname=f'node{index // 2}',
    host_key=f'node{index // 2}',
    domain=f'node{index // 2}',
    **more,
  )


@dataclasses.dataclass
class Outcome:
  value: object = None
  error: str = ''
  seconds: float = 0.0


def run_all(
  infos: list[ClusterInfo],
  members: list[ClusterMember],
  *,
  seconds: float = 5,
  delays: tuple[float, ...] = (),
  secrets: tuple[str, ...] = (),
) -> list[Outcome]:
  """Returns what each of these processes (threads here) got."""
  outcomes = [Outcome() for _ in infos]

  def run(i: int) -> None:
    time.sleep(delays[i] if i < len(delays) else 0)
    started = time.monotonic()
    try:
      with contextlib.ExitStack() as stack:
        outcomes[i].value = stack.enter_context(
          meet(infos[i], members[i], timeout_seconds=seconds, secret=secrets[i] if secrets else '')
        )
        if infos[i].process_index == 0:  # in the place of JAX's service
          host, port = addresses.split(outcomes[i].value.bind_address)
          stack.enter_context(
            socket.create_server(
              (host, port),
              family=socket.AF_INET6 if ':' in host else socket.AF_INET,
              dualstack_ipv6=host == '::',
            )
          )
          time.sleep(0.2)
    except ClusterError as e:
      outcomes[i].error = str(e)
    outcomes[i].seconds = time.monotonic() - started

  threads = [threading.Thread(target=run, args=(i,)) for i in range(len(infos))]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(60)
    assert not thread.is_alive()
  return outcomes


def test_everybody_gets_the_same_table_whoever_comes_first():
  port = free_port()
  members = [member(i, gpus=(f'GPU-{i}',)) for i in range(3)]
  for delays in ((0, 0, 0), (0.3, 0, 0), (0, 0, 0.3)):
    outcomes = run_all([info(i, port=port) for i in range(3)], members, delays=delays)
    assert [o.error for o in outcomes] == ['', '', '']
    assert outcomes[0].value.members == tuple(members)
    for index, outcome in enumerate(outcomes[1:], 1):  # GPUs are for process 0, and one's own
      known = [m if m.process_index == index else dataclasses.replace(m, gpus=()) for m in members]
      assert outcome.value.members == tuple(known)


def test_missing_processes_are_named_to_all_who_came():
  port = free_port()
  ids = (0, 1, 3)
  outcomes = run_all(
    [info(i, count=6, port=port) for i in ids], [member(i) for i in ids], seconds=2
  )
  for outcome in outcomes:
    assert 'still waiting for 3 of 6 processes: 2, 4-5' in outcome.error
    assert '2 on node0, 1 on node1' in outcome.error
    assert outcome.seconds < 20


def test_a_name_that_does_not_resolve_is_reported_as_dns():
  (outcome,) = run_all([info(1, port=1, host='no-such-host.invalid')], [member(1)], seconds=0.3)
  assert "'no-such-host.invalid' does not resolve (DNS" in outcome.error
  assert 'Process 1 of 3 (on node0) could not reach process 0' in outcome.error
  assert 'getent hosts' in outcome.error


def test_a_port_where_nobody_listens_is_reported_as_refused():
  (outcome,) = run_all([info(2, port=free_port())], [member(2)], seconds=0.3)
  assert 'connection refused' in outcome.error and 'Process 2 of 3' in outcome.error


def test_a_host_that_does_not_answer_is_reported_as_timed_out(monkeypatch):
  monkeypatch.setattr(rendezvous, 'TRY_SECONDS', 0.2)
  with socket.create_server(('127.0.0.1', 0), backlog=0) as full, contextlib.ExitStack() as stack:
    port = full.getsockname()[1]
    for _ in range(4):  # no process accepts: the queue of the kernel is full after one or two
      waiting = stack.enter_context(socket.socket())
      waiting.setblocking(False)
      with contextlib.suppress(BlockingIOError):
        waiting.connect(('127.0.0.1', port))
    time.sleep(0.1)
    (outcome,) = run_all([info(1, port=port)], [member(1)], seconds=0.3)
  assert 'timed out' in outcome.error and 'firewall' in outcome.error


def test_a_fixed_port_in_use_is_an_error_at_once():
  with socket.create_server(('', 0)) as taken:
    port = taken.getsockname()[1]
    (outcome,) = run_all([info(0, port=port)], [member(0)])
  assert f'cannot listen on port {port}: in use' in outcome.error
  assert outcome.seconds < 10  # not the 30 s and more of a retry


def test_a_derived_port_in_use_is_passed_over_by_all():
  with socket.create_server(('', 0)) as taken:
    port, second = taken.getsockname()[1], free_port()

    def hang_up() -> None:  # on everybody, as another program would
      with contextlib.suppress(OSError):  # closed, at the end of the test
        while True:
          taken.accept()[0].close()

    threading.Thread(target=hang_up, daemon=True).start()
    infos = [info(i, count=2, port=port, others=(f'127.0.0.1:{second}',)) for i in range(2)]
    outcomes = run_all(infos, [member(0), member(1)])
  assert [o.error for o in outcomes] == ['', '']
  assert outcomes[1].value.address == f'127.0.0.1:{second}'


@pytest.mark.slow
def test_a_process_of_another_run_is_refused_with_the_reason():
  port = free_port()
  infos = [
    info(0, count=2, port=port),
    info(1, count=2, port=port),
    info(1, count=2, port=port, run_id='test/older attempt'),
  ]
  outcomes = run_all(infos, [member(0), member(1), member(1)], seconds=4, delays=(0, 0.5, 0))
  assert [o.error for o in outcomes[:2]] == ['', '']
  assert 'another run listens here' in outcomes[2].error or 'refused' in outcomes[2].error


def test_two_processes_with_one_index_are_reported():
  port = free_port()
  infos = [info(i, port=port) for i in (0, 1, 1, 2)]
  outcomes = run_all(infos, [member(0), member(1), member(1), member(2)], delays=(0, 0, 0.2, 0.4))
  assert [o.error for o in (outcomes[0], outcomes[1], outcomes[3])] == ['', '', '']
  assert 'process 1 joined twice' in outcomes[2].error


def test_other_versions_of_jax_end_all_processes_with_the_same_error():
  port = free_port()
  members = [member(i, versions=f'jax {i // 2}') for i in range(3)]
  outcomes = run_all([info(i, port=port) for i in range(3)], members, seconds=60)
  assert 'Process 2 on node1 runs jax 1, process 0 on node0 jax 0.' in outcomes[0].error
  assert [o.error for o in outcomes] == [outcomes[0].error] * 3
  assert max(o.seconds for o in outcomes) < 50  # less than the timeout


def test_the_table_of_4096_processes_has_a_row_per_host_and_a_few_kilobytes():
  members = tuple(
    ClusterMember(
      i,
      hostname=f'gpu-{i // 8:04}',
      host_key=(key := f'gpu-{i // 8:04}//{random.Random(i // 8).randbytes(16).hex()}'),
      domain=key,
      versions='jax 0.10.2, jaxlib 0.10.2',
      code='0123456789abcdef',
    )
    for i in range(4096)
  )
  rows = to_rows(members)
  assert from_rows(rows) == members
  assert len(rows) < 80 * 512
  cyclic = tuple(dataclasses.replace(members[i % 512 * 8], process_index=i) for i in range(4096))
  assert from_rows(to_rows(cyclic)) == cyclic


def test_a_limit_of_open_files_is_named_to_all_who_came(monkeypatch):
  port, count = free_port(), 12
  real, left = socket.socket.accept, 5

  def accept(self):
    nonlocal left
    if not left:
      raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    accepted = real(self)  # raises before a process has come
    left -= 1
    return accepted

  monkeypatch.setattr(socket.socket, 'accept', accept)
  infos = [info(i, count=count, port=port) for i in range(count)]
  outcomes = run_all(infos, [member(i) for i in range(count)], seconds=4)
  assert 'cannot take one more: Too many open files (EMFILE)' in outcomes[0].error
  assert 'ulimit -n' in outcomes[0].error
  assert outcomes[0].seconds < 4  # it does not wait for the deadline
  assert outcomes[0].error in [o.error for o in outcomes[1:]]


@pytest.mark.slow
def test_a_process_that_came_and_died_is_missing_again(caplog):
  port = free_port()

  def come_and_go() -> None:
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
      try:
        with socket.create_connection(('127.0.0.1', port)) as connection:
          rendezvous.send_question(
            connection, {'run': 'test/1', 'count': 3, 'member': dataclasses.asdict(member(1))}, ''
          )
        return
      except ConnectionRefusedError:  # process 0 does not listen yet
        time.sleep(0.01)

  thread = threading.Thread(target=come_and_go)
  thread.start()
  (outcome,) = run_all([info(0, count=3, port=port)], [member(0)], seconds=3)
  thread.join()
  assert 'waiting for 2 of 3 processes: 1-2' in outcome.error
  assert 'Process 1 on node0 ended' in caplog.text


def test_one_gpu_in_two_processes_is_an_error_that_names_both():
  with raises(ClusterError):
    check_members(
      [member(0, gpus=('GPU-a',)), member(1, gpus=('GPU-b',)), member(2, gpus=('GPU-a',))]
    )


def test_separate_gpus_are_not_an_error():
  check_members([member(i, gpus=(f'GPU-{i}',)) for i in range(4)])
  check_members([member(i) for i in range(4)])


def test_a_domain_for_some_processes_only_is_an_error():
  members = [member(0), dataclasses.replace(member(1), domain='rack1')]
  with raises(ClusterError):
    check_members(members)


def test_a_process_without_a_digest_of_its_code_is_older_than_the_others():
  members = [member(0, code='1234'), member(1)]
  with raises(ClusterError):
    check_members(members)
  check_members([member(0), member(1)])


def test_fields_that_only_a_newer_version_sends_are_ignored():
  values = {**dataclasses.asdict(member(1, gpus=('GPU-1',))), 'of_the_future': [1]}
  assert ClusterMember.from_json(values) == member(1, gpus=('GPU-1',))
