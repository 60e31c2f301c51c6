"""Where process 0 listens, whom it accepts, and that a slow client blocks no other."""

import contextlib
import errno
import json
import socket
import threading
import time

import pytest

from t5x_gpu.errors import ClusterError, ConfigError
from t5x_gpu.runtime.cluster import addresses, rendezvous
from t5x_gpu.runtime.cluster.cluster import detect
from tests.messages import raises
from tests.runtime.cluster.test_meeting import free_port, info, member, run_all

SECONDS = 60


@pytest.mark.parametrize('host', ['127.0.0.1', '::1', 'localhost'])
def test_the_interface_of_the_coordinators_address_is_the_only_one(host):
  listening = addresses.listen(
    [addresses.join(host, free_port())], bind_address=None, is_one_host=False
  )
  with contextlib.closing(listening):
    assert set(listening.hosts) <= {'127.0.0.1', '::1'} and '' not in listening.hosts
    with pytest.raises(ConnectionRefusedError):
      socket.create_connection(('127.0.0.2', listening.port), timeout=SECONDS).close()


def test_a_request_that_came_before_the_limit_of_open_files_is_answered(monkeypatch):
  listening = addresses.listen([f'127.0.0.1:{free_port()}'], bind_address=None, is_one_host=False)
  with contextlib.ExitStack() as stack:
    reception = stack.enter_context(contextlib.closing(rendezvous.Reception(listening, '')))
    here = ('127.0.0.1', listening.port)
    first = stack.enter_context(socket.create_connection(here, timeout=SECONDS))
    assert reception.poll(SECONDS) == []
    rendezvous.send_question(first, 'a question', '')

    def accept(listener):
      raise OSError(errno.EMFILE, 'Too many open files')

    monkeypatch.setattr(socket.socket, 'accept', accept)
    stack.enter_context(socket.create_connection(here, timeout=SECONDS))
    time.sleep(0.1)  # both are ready now
    (question,) = reception.poll(SECONDS)
    stack.enter_context(question.connection)
    with pytest.raises(OSError, match='Too many open files'):
      reception.poll(SECONDS)


def test_all_interfaces_only_where_others_use_another_address_and_the_log_says_so(caplog):
  for host, reason in (
    ('no-such-host.invalid', 'does not resolve on this host'),
    ('192.0.2.77', '192.0.2.77 is not an address of this host'),
  ):
    with contextlib.closing(
      addresses.listen([f'{host}:{free_port()}'], bind_address=None, is_one_host=False)
    ) as listening:
      socket.create_connection(('127.0.0.2', listening.port), timeout=SECONDS).close()
    assert reason in caplog.text


def test_a_name_that_means_loopback_here_means_another_address_elsewhere(monkeypatch, caplog):
  real = socket.getaddrinfo

  def debian(host, *arguments, **options):  # 127.0.1.1 <own name> in /etc/hosts
    return real('127.0.1.1' if host == 'gpu-001' else host, *arguments, **options)

  monkeypatch.setattr(socket, 'getaddrinfo', debian)
  for is_one_host, is_seen_elsewhere in ((True, False), (False, True)):
    with contextlib.closing(
      addresses.listen([f'gpu-001:{free_port()}'], bind_address=None, is_one_host=is_one_host)
    ) as listening:
      elsewhere = socket.socket()
      elsewhere.settimeout(SECONDS)
      assert (elsewhere.connect_ex(('127.0.0.2', listening.port)) == 0) == is_seen_elsewhere
      elsewhere.close()
  assert "'gpu-001' means 127.0.1.1 on this host" in caplog.text


@pytest.mark.parametrize(
  'found, hosts',
  [
    # The host's own name by systemd: every address, those without an interface included.
    (('127.0.0.3', 'fe80::1'), ('127.0.0.3',)),
    (('fe80::1',), ('::',)),
  ],
)
def test_link_local_addresses_of_a_name_do_not_keep_process_0_from_listening(
  monkeypatch, found, hosts
):
  monkeypatch.setattr(
    socket,
    'getaddrinfo',
    lambda *arguments, **options: [
      (socket.AF_INET6 if ':' in each else socket.AF_INET, socket.SOCK_STREAM, 6, '', (each, 0))
      for each in found
    ],
  )
  with contextlib.closing(
    addresses.listen([f'gpu-001:{free_port()}'], bind_address=None, is_one_host=True)
  ) as listening:
    assert listening.hosts == hosts or (hosts, listening.hosts) == (('::',), ('0.0.0.0',))


def test_a_host_without_ipv6_listens_on_the_other_addresses(monkeypatch):
  real = socket.create_server

  def create_server(address, *, family, **options):  # ipv6.disable=1, but ::1 is in /etc/hosts
    if family == socket.AF_INET6:
      raise OSError(errno.EAFNOSUPPORT, 'Address family not supported by protocol')
    return real(address, family=family, **options)

  monkeypatch.setattr(socket, 'create_server', create_server)
  port = free_port()
  with contextlib.closing(
    addresses.listen([f'[::1]:{port}', f'127.0.0.1:{port}'], bind_address=None, is_one_host=True)
  ) as listening:
    assert listening.hosts == ('127.0.0.1',)


def test_all_addresses_that_a_launcher_offers_are_listened_on():
  port = free_port()
  with contextlib.closing(
    addresses.listen(
      [f'127.0.0.2:{port}', f'127.0.0.3:{port}'], bind_address=None, is_one_host=False
    )
  ) as both:
    assert both.hosts == ('127.0.0.2', '127.0.0.3')


def test_the_bind_address_wins_and_must_be_of_this_host():
  port = free_port()
  with contextlib.closing(
    addresses.listen(['node1:62000'], bind_address=f'127.0.0.3:{port}', is_one_host=False)
  ) as listening:
    assert (listening.hosts, listening.port) == (('127.0.0.3',), port)
  with raises(ClusterError):
    addresses.listen(['node1:62000'], bind_address=f'192.0.2.77:{port}', is_one_host=False)


@pytest.mark.parametrize('address', ['::1:62000', 'fd00::1', '[node1]:62000', '[::1]'])
def test_an_ipv6_address_without_brackets_is_refused(address):
  with raises(ConfigError):
    detect({}, coordinator_address=address, process_count=2, process_index=0)


def test_an_ipv6_master_address_gets_its_brackets():
  env = {'RANK': '0', 'WORLD_SIZE': '2', 'MASTER_ADDR': 'fd00::1', 'MASTER_PORT': '29500'}
  assert detect(env).coordinator_address == '[fd00::1]:29500'


def test_processes_meet_over_ipv6():
  port = free_port()
  outcomes = run_all(
    [info(i, port=port, host='::1') for i in range(3)],
    [member(i) for i in range(3)],
    seconds=SECONDS,
  )
  assert [o.error for o in outcomes] == [''] * 3
  assert {o.value.address for o in outcomes} == {f'[::1]:{port}'}
  assert outcomes[0].value.bind_address == f'[::1]:{port}'
  assert {o.value.own_host for o in outcomes} == {'::1'}


def test_jaxs_service_listens_where_the_others_came_not_on_all_interfaces():
  # Process 0 cannot tell which of its addresses the others use, and listens on all of them.
  port = free_port()
  outcomes = run_all(
    [
      info(0, count=2, port=port, host='no-such-host.invalid'),
      info(1, count=2, port=port, host='127.0.0.2'),
    ],
    [member(0), member(1)],
    seconds=SECONDS,
  )
  assert [o.error for o in outcomes] == ['', '']
  assert outcomes[0].value.bind_address == outcomes[1].value.address == f'127.0.0.2:{port}'


def test_the_secret_lets_the_processes_of_the_job_in():
  port = free_port()
  outcomes = run_all(
    [info(i, port=port) for i in range(3)],
    [member(i) for i in range(3)],
    seconds=SECONDS,
    secrets=('s3cret',) * 3,
  )
  assert [o.error for o in outcomes] == [''] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
  'secrets, words',
  [
    (('a', 'a', 'b'), 'has another T5X_GPU_JOB_SECRET, but process 0 has a different one'),
    pytest.param(
      ('a', 'a', ''),
      'has no T5X_GPU_JOB_SECRET, but process 0 has a different one',
      marks=pytest.mark.slow,
    ),
    pytest.param(
      ('', '', 'b'),
      'has another T5X_GPU_JOB_SECRET, but process 0 has none',
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_process_with_another_secret_is_refused_with_the_reason(secrets, words, caplog):
  port = free_port()
  outcomes = run_all(
    [info(i, port=port) for i in range(3)],
    [member(i) for i in range(3)],
    seconds=3,
    secrets=secrets,
  )
  assert words in outcomes[2].error and 'process 2 on node1 (127.0.0.1)' in outcomes[2].error
  assert 'still waiting for 1 of 3 processes: 2' in outcomes[0].error
  assert words in caplog.text


def serve(line: bytes, port: int, received: bytearray) -> None:
  """Stands in for process 0: sends one line, keeps what comes, and hangs up."""
  with socket.create_server(('127.0.0.1', port)) as server:
    connection, _ = server.accept()
    with connection:
      connection.sendall(b'{"challenge": "0"}\n')
      while not received.endswith(b'\n'):
        received += connection.recv(65536)
      connection.sendall(line)


def test_a_process_0_that_does_not_know_the_secret_is_not_believed():
  port, received = free_port(), bytearray()
  answer = b'{"text": "{\\"run\\": \\"test/1\\", \\"members\\": []}", "proof": ""}\n'
  server = threading.Thread(target=serve, args=(answer, port, received))
  server.start()
  (outcome,) = run_all([info(1, port=port)], [member(1)], seconds=0.5, secrets=('s3cret',))
  server.join(SECONDS)
  assert 'could not reach process 0' in outcome.error
  assert b'test/1' in received and b's3cret' not in received  # a signature travels, not the secret


def test_a_question_that_was_overheard_cannot_be_asked_again():
  port, overheard, proven = free_port(), b'', []
  with contextlib.closing(
    rendezvous.Reception(
      addresses.listen([f'127.0.0.1:{port}'], bind_address=None, is_one_host=True), 's3cret'
    )
  ) as reception:
    for _ in range(2):
      with socket.create_connection(('127.0.0.1', port), timeout=SECONDS) as connection:
        assert reception.poll(SECONDS) == []  # accepts, and sends the challenge
        challenge = json.loads(connection.recv(1000))['challenge']
        overheard = (
          overheard
          or json.dumps(
            {
              'text': '"hello"',
              'challenge': 'x',
              'proof': rendezvous.proof('s3cret', 'question', challenge, 'x', '"hello"'),
            }
          ).encode()
          + b'\n'
        )
        connection.sendall(overheard)
        (question,) = reception.poll(SECONDS)
        proven.append((question.message, question.is_signed, question.is_proven))
        question.connection.close()
  assert proven == [('hello', True, True), ('hello', True, False)]


def test_a_process_of_an_older_version_is_logged_with_its_host(caplog):
  port = free_port()
  with contextlib.closing(
    rendezvous.Reception(
      addresses.listen([f'127.0.0.1:{port}'], bind_address=None, is_one_host=True), ''
    )
  ) as reception:
    with socket.create_connection(('127.0.0.1', port), timeout=SECONDS) as connection:
      connection.sendall(b'{"run": "test/1", "count": 2, "member": {}}\n')
      deadline = time.monotonic() + SECONDS
      while 'Ignored a message from 127.0.0.1' not in caplog.text:
        assert time.monotonic() < deadline
        assert reception.poll(0.1) == []
  assert 'another version of t5x_gpu' in caplog.text


class Dribbler(threading.Thread):
  """Connects, and sends a byte of a line that never ends, again and again."""

  def __init__(self, port: int):
    super().__init__(daemon=True)
    self._port = port
    self.is_in = threading.Event()
    self.is_dropped = threading.Event()
    self.done = threading.Event()

  def run(self) -> None:
    while True:
      try:
        connection = socket.create_connection(('127.0.0.1', self._port), timeout=SECONDS)
        break
      except ConnectionRefusedError:  # process 0 does not listen yet
        time.sleep(0.01)
    with connection, contextlib.suppress(OSError):
      while not self.done.wait(0.05):
        connection.sendall(b'x')
        self.is_in.set()
      return
    self.is_dropped.set()


def test_a_client_that_sends_byte_by_byte_holds_nobody():
  port = free_port()
  dribblers = [Dribbler(port) for _ in range(3)]
  results = []
  host = threading.Thread(
    target=lambda: results.extend(run_all([info(0, port=port)], [member(0)], seconds=SECONDS))
  )
  host.start()
  for dribbler in dribblers:
    dribbler.start()
    assert dribbler.is_in.wait(SECONDS)
  started = time.monotonic()
  guests = run_all([info(i, port=port) for i in (1, 2)], [member(1), member(2)], seconds=SECONDS)
  host.join(SECONDS)
  for dribbler in dribblers:
    dribbler.done.set()
  assert [o.error for o in (*results, *guests)] == [''] * 3
  assert time.monotonic() - started < SECONDS / 2


def test_a_client_that_sends_byte_by_byte_is_dropped(monkeypatch):
  monkeypatch.setattr(rendezvous, 'LINE_SECONDS', 0.3)
  port = free_port()
  with contextlib.closing(
    rendezvous.Reception(
      addresses.listen([f'127.0.0.1:{port}'], bind_address=None, is_one_host=True), ''
    )
  ) as reception:
    dribbler = Dribbler(port)
    dribbler.start()
    deadline = time.monotonic() + SECONDS
    while not dribbler.is_dropped.is_set():
      assert time.monotonic() < deadline
      assert reception.poll(0.1) == []


def test_a_server_that_sends_byte_by_byte_does_not_hold_a_process(monkeypatch):
  monkeypatch.setattr(rendezvous, 'LINE_SECONDS', 0.3)
  with socket.create_server(('127.0.0.1', 0)) as server:

    def dribble() -> None:
      with contextlib.suppress(OSError):
        while True:
          connection, _ = server.accept()
          with connection, contextlib.suppress(OSError):
            while True:
              connection.sendall(b'x')
              time.sleep(0.05)

    threading.Thread(target=dribble, daemon=True).start()
    (outcome,) = run_all([info(1, port=server.getsockname()[1])], [member(1)], seconds=0.5)
  assert 'listens there' in outcome.error
