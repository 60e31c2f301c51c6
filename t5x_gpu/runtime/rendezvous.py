"""All processes of a run meet at process 0 before JAX starts, over a plain TCP connection each.

JAX's own start has one answer to a wrong host name, a closed port and a process that never came:
after five minutes every process aborts with the same text, which names none of them. Here process 0
learns who came and says who did not; the others learn why they cannot reach it. What the processes
tell of themselves (host, GPUs) is known before anything is allocated, and processes of another run
that knock at the same port are sent away.

One line of JSON each way: the hello of a process, then the answer of process 0 once all are there.
"""

import collections
import contextlib
import dataclasses
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.errors import ClusterError
from t5x_gpu.runtime.cluster import ClusterInfo

_log = logging.getLogger(__name__)

TRY_SECONDS = 5  # for one connection
RETRY_SECONDS = 0.1
# A name that does not resolve now seldom does so later; in Kubernetes it does, once the pod is up.
DNS_SECONDS = 20
REPORT_SECONDS = 30
_MAX_LINE = 1 << 22  # a table of ten thousand processes


@dataclasses.dataclass(frozen=True)
class Member:
  """What a process tells of itself.

  Attributes:
    process_index: in the run.
    hostname: as the operating system says.
    host_key: equal for processes that share a host, and only for those.
    domain: of fast links: T5X_GPU_DOMAIN where that is set, else the host_key.
    gpus: UUIDs of the GPUs it will use, () if unknown.
    versions: of jax and jaxlib, which must be the same for them to join.
    code: digest of all code and versions (runtime/same_code.py).
  """
  process_index: int
  hostname: str
  host_key: str
  domain: str
  gpus: tuple[str, ...] = ()
  versions: str = ''
  code: str = ''


@dataclasses.dataclass(frozen=True)
class Meeting:
  """How it ended: everybody is there.

  Attributes:
    address: 'host:port' at which this process reaches process 0.
    members: by process index.
  """
  address: str
  members: tuple[Member, ...]


@contextlib.contextmanager
def meet(cluster: ClusterInfo, me: Member, *, timeout_seconds: float) -> Iterator[Meeting]:
  """Yields once all processes have come; the block must start JAX's service on process 0.

  The other processes are let go only when that service listens: they would otherwise be refused,
  and try again a second later. Or when the block fails: what is wrong with the members, they find
  themselves.

  Raises:
    ClusterError: some did not come (named), process 0 cannot be reached (with the reason), its port
      is in use, or two processes claim the same index.
  """
  if cluster.process_index == 0:
    host = _Host(cluster, me, time.monotonic() + timeout_seconds, timeout_seconds)
    with host:
      meeting = host.gather()
      host.release_once_listening(meeting)
      yield meeting
  else:
    yield _Guest(cluster, me, timeout_seconds).meet()


class _Host:
  """Process 0's side."""

  def __init__(self, cluster: ClusterInfo, me: Member, deadline: float, timeout_seconds: float):
    self._cluster = cluster
    self._deadline = deadline
    self._timeout_seconds = timeout_seconds
    self._members = {0: me}
    self._connections: dict[int, socket.socket] = {}
    self._listener, self._address = _listen(cluster)
    self._failed = threading.Event()
    self._release: Optional[threading.Thread] = None

  def __enter__(self) -> '_Host':
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._listener.close()
    if self._release is not None and exc_info[0] is not None:
      self._failed.set()
      self._release.join(TRY_SECONDS)

  def gather(self) -> Meeting:
    """Returns once everybody has come; tells those who came if somebody did not."""
    count = self._cluster.process_count
    report_at = time.monotonic() + REPORT_SECONDS
    self._listener.settimeout(0.2)
    while not self._all_here():
      try:
        connection, peer = self._listener.accept()
      except TimeoutError:
        self._drop_the_gone()
      else:
        self._welcome(connection, peer[0])
      if time.monotonic() > self._deadline:
        self._refuse_all(self._missing_text(self._timeout_seconds))
        raise ClusterError(
            self._missing_text(self._timeout_seconds),
            fix='Look at the first lines of the missing processes: they could not start, or could '
                f'not reach {self._address} (a wrong name, a firewall). Start all '
                f'{count} processes, with the same --coordinator_address.',
            docs='slurm.md#they-do-not-find-each-other')
      if time.monotonic() > report_at:
        _log.warning(self._missing_text(None))
        report_at += REPORT_SECONDS
    return Meeting(self._address, tuple(self._members[i] for i in range(count)))

  def _all_here(self) -> bool:
    if len(self._members) == self._cluster.process_count:
      self._drop_the_gone()
    return len(self._members) == self._cluster.process_count

  def _welcome(self, connection: socket.socket, peer: str) -> None:
    connection.settimeout(TRY_SECONDS)
    try:
      hello = json.loads(_read_line(connection))
      member = _member(hello['member'])
      run, count = hello['run'], hello['count']
    except (OSError, ValueError, KeyError, TypeError):
      connection.close()  # a port scanner, or a process that died
      return
    refusal = ''
    if run != self._cluster.run_id:
      refusal = f'another run listens here ({self._cluster.run_id!r}, not {run!r})'
    elif count != self._cluster.process_count:
      refusal = f'process 0 belongs to a run of {self._cluster.process_count}, not of {count}'
    elif member.process_index in self._members:
      other = self._members[member.process_index]
      refusal = (f'process {member.process_index} came twice, from {other.hostname} and from '
                 f'{member.hostname} ({peer})')
    if refusal:
      _send(connection, {'run': self._cluster.run_id, 'refused': refusal})
      connection.close()
      if run == self._cluster.run_id:
        _log.warning('Not joined: %s.', refusal)
      return
    self._members[member.process_index] = member
    self._connections[member.process_index] = connection

  def _drop_the_gone(self) -> None:
    """Forgets processes that came and died: they may be started again, and are else missing."""
    for index, connection in list(self._connections.items()):
      connection.setblocking(False)
      try:
        gone = not connection.recv(1, socket.MSG_PEEK)
      except BlockingIOError:
        gone = False
      except OSError:
        gone = True
      connection.settimeout(TRY_SECONDS)
      if gone:
        _log.warning('Process %d on %s came and ended.', index, self._members[index].hostname)
        connection.close()
        del self._connections[index], self._members[index]

  def _missing_text(self, waited: Optional[float]) -> str:
    count = self._cluster.process_count
    missing = [i for i in range(count) if i not in self._members]
    hosts = collections.Counter(member.hostname for member in self._members.values())
    present = ', '.join(f'{n} on {host}' for host, n in list(hosts.items())[:8])
    after = 'Waiting' if waited is None else f'After {waited:g} s: still waiting'
    return (f'{after} for {len(missing)} of {count} processes: {numbers(missing)}. '
            f'Here: {present}{", ..." if len(hosts) > 8 else ""}.')

  def _refuse_all(self, text: str) -> None:
    for connection in self._connections.values():
      _send(connection, {'run': self._cluster.run_id, 'refused': text})
      connection.close()

  def release_once_listening(self, meeting: Meeting) -> None:
    """Closes the port for JAX's service to take it, and answers everybody once that listens."""
    port = self._listener.getsockname()[1]
    self._listener.close()
    answer = {'run': self._cluster.run_id,
              'members': [dataclasses.asdict(member) for member in meeting.members]}

    def release() -> None:
      while time.monotonic() < self._deadline + TRY_SECONDS and not self._failed.is_set():
        try:
          socket.create_connection(('127.0.0.1', port), timeout=1).close()
          break
        except OSError:
          time.sleep(0.01)
      for connection in self._connections.values():
        _send(connection, answer)
        connection.close()
    self._release = threading.Thread(target=release, daemon=True, name='rendezvous')
    self._release.start()


def _listen(cluster: ClusterInfo) -> tuple[socket.socket, str]:
  """Returns a listening socket and its address: the first of the run's ports that is free."""
  busy = []
  for address in dict.fromkeys((cluster.coordinator_address, *cluster.other_addresses)):
    port = int(address.rpartition(':')[2])
    if port in busy:
      continue
    try:
      # Without SO_REUSEPORT, unlike JAX's service: two runs on one port must not go unnoticed.
      return socket.create_server(('', port), backlog=1024), address
    except OSError:
      busy.append(port)
  raise ClusterError(
      f'Process 0 cannot listen on port {" or ".join(map(str, busy))}: in use on this host '
      f'({socket.gethostname()}), perhaps by an earlier run that still ends.',
      fix='Set --coordinator_address=HOST:PORT (or JAX_COORDINATOR_ADDRESS) to another port, or '
          'end that program.')


class _Guest:
  """The side of all other processes."""

  def __init__(self, cluster: ClusterInfo, me: Member, timeout_seconds: float):
    self._cluster = cluster
    self._me = me
    self._timeout_seconds = timeout_seconds
    self._failures: dict[str, str] = {}  # address -> the last reason

  def meet(self) -> Meeting:
    started = time.monotonic()
    deadline = started + self._timeout_seconds
    addresses = (self._cluster.coordinator_address, *self._cluster.other_addresses)
    dns_seconds = (self._timeout_seconds if self._cluster.kind == 'kubernetes' else
                   min(DNS_SECONDS, self._timeout_seconds))
    while True:
      for address in addresses:
        meeting = self._try(address, deadline)
        if meeting is not None:
          return meeting
      waited = time.monotonic() - started
      no_name = all('resolve' in self._failures[address] for address in addresses)
      if waited > self._timeout_seconds or (no_name and waited > dns_seconds):
        raise self._unreachable(waited)
      time.sleep(RETRY_SECONDS)

  def _try(self, address: str, deadline: float) -> Optional[Meeting]:
    host, _, port = address.rpartition(':')
    try:
      connection = socket.create_connection((host.strip('[]'), int(port)), timeout=TRY_SECONDS)
    except OSError as e:
      self._failures[address] = _why(e, host)
      return None
    with connection:
      try:
        _send(connection, {'run': self._cluster.run_id, 'count': self._cluster.process_count,
                           'member': dataclasses.asdict(self._me)})
        # Until the slowest process has come; a little longer than process 0 itself waits.
        connection.settimeout(max(deadline - time.monotonic(), 0) + 2 * TRY_SECONDS)
        answer = json.loads(_read_line(connection))
        run = answer['run']
      except (OSError, ValueError, KeyError, TypeError):
        self._failures[address] = ('something else listens there, or process 0 ended while this '
                                   'process waited')
        return None
    if 'members' in answer:
      return Meeting(address, tuple(map(_member, answer['members'])))
    if run == self._cluster.run_id:
      raise ClusterError(
          f'Process {self._me.process_index} of {self._cluster.process_count} was not joined: '
          f'{answer.get("refused")}.', fix='Start each process once, all with the same count, '
          'address and versions.', docs='slurm.md#they-do-not-find-each-other')
    self._failures[address] = str(answer.get('refused'))
    return None

  def _unreachable(self, waited: float) -> ClusterError:
    reasons = '; '.join(f'{address}: {reason}' for address, reason in self._failures.items())
    text = ' '.join(self._failures.values())
    if 'resolve' in text:
      fix = ('Set --coordinator_address to a name that all hosts know (getent hosts NAME), or to '
             'an IP address of the first host.')
    elif 'timed out' in text:
      fix = ('A firewall or a wrong network: open the port between the hosts, or set '
             '--coordinator_address to an address of process 0 on a network that they share.')
    else:
      fix = ('Look at the first lines of process 0: it did not start, or listens elsewhere. All '
             'processes need the same --coordinator_address, on the host of process 0.')
    return ClusterError(
        f'Process {self._me.process_index} of {self._cluster.process_count} (on '
        f'{self._me.hostname}) could not reach process 0 for {waited:.0f} s. {reasons}.', fix=fix,
        docs='slurm.md#they-do-not-find-each-other')


def _why(e: OSError, host: str) -> str:
  if isinstance(e, socket.gaierror):
    return f'the name {host!r} does not resolve (DNS: {e.strerror})'
  if isinstance(e, ConnectionRefusedError):
    return 'connection refused (the host answers, nothing listens on the port)'
  if isinstance(e, TimeoutError):
    return f'timed out (no answer within {TRY_SECONDS} s)'
  return f'{e.strerror or e}'


def _member(values: Mapping[str, Any]) -> Member:
  """Returns the member; fields that this version of t5x_gpu does not have are ignored."""
  names = [field.name for field in dataclasses.fields(Member) if field.name in values]
  return Member(**{**{name: values[name] for name in names}, 'gpus': tuple(values['gpus'])})


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
  with contextlib.suppress(OSError):  # the other end is gone: noticed by who waits for it
    connection.sendall(json.dumps(message).encode() + b'\n')


def _read_line(connection: socket.socket) -> bytes:
  """Returns the bytes before the newline; raises ValueError if the other end stops before it."""
  data = bytearray()
  while not data.endswith(b'\n'):
    part = connection.recv(65536)
    if not part or len(data) > _MAX_LINE:
      raise ValueError('no line')
    data += part
  return bytes(data)


def numbers(values: Sequence[int]) -> str:
  """Returns '1, 4-7, 9' for [1, 4, 5, 6, 7, 9]."""
  spans: list[list[int]] = []
  for value in values:
    if spans and value == spans[-1][-1] + 1:
      spans[-1] = [spans[-1][0], value]
    else:
      spans.append([value, value])
  return ', '.join(str(a) if a == b else f'{a}-{b}' for a, b in spans)
