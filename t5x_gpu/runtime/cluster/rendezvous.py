"""All processes of a run meet at process 0 before JAX starts, over a plain TCP connection each.

JAX's own start treats a wrong host name, a closed port and a missing process alike: after five
minutes every process aborts with the same message and no names. In `meet`, process 0 reports which
processes are missing, and the others report why they cannot reach it. Hosts and GPUs of all
processes are known before anything is allocated, and processes of other runs are refused.

Each connection has one question (a process's facts) and one answer, a table with a row per host,
given once all have come. Lines are JSON, signed with a secret that only the processes of the job
have; without one, proofs are ''.

    process 0: {"challenge": ...}
    the other: {"text": ..., "challenge": ..., "proof": ...}      "text" is the message itself
    process 0: {"text": ..., "proof": ...}
"""

import collections
import contextlib
import dataclasses
import errno
import functools
import hashlib
import hmac
import json
import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Optional

from t5x_gpu.errors import ClusterError, Problem, listed, number_ranges
from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster import addresses
from t5x_gpu.runtime.cluster import members as members_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.cluster.members import ClusterMember, Meeting
from t5x_gpu.storage.files import reason_of, remedy
from t5x_gpu.storage.json_schema import JsonObject, JsonValue

_log = logging.getLogger(__name__)

# The secret comes from the environment, which Linux shows only to the same user and to root. It is
# never sent: each side signs the other's random challenge together with its message (HMAC-SHA256).
SECRET_VARIABLE = 'T5X_GPU_JOB_SECRET'
# On HPE Cray, Slurm's mpi/cray_shasta, PALS and Flux set the same random number for all tasks.
_OF_SCHEDULERS = ('PMI_SHARED_SECRET',)


def secret_from_environment(env: Mapping[str, str]) -> str:
  """Returns the secret of this job, '' if it has none."""
  return next((env[name] for name in (SECRET_VARIABLE, *_OF_SCHEDULERS) if env.get(name)), '')


def new_secret() -> str:
  """Returns a secret or challenge of 256 random bits, as text."""
  return secrets.token_hex(32)


def proof(secret: str, *parts: str) -> str:
  """Returns a signature of `parts` that only a holder of `secret` can make; '' without a secret."""
  if not secret:
    return ''
  return hmac.new(secret.encode(), json.dumps(parts).encode(), hashlib.sha256).hexdigest()


def proves(given: str, secret: str, *parts: str) -> bool:
  """Returns whether `given` is the signature of `parts`, in constant time."""
  return hmac.compare_digest(given.encode(), proof(secret, *parts).encode())


TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
LINE_SECONDS = 5  # for one whole line
MAX_LINE = 1 << 22  # fits a table of ten thousand processes
# What reading a connection and parsing untrusted JSON can raise.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclasses.dataclass
class Question:
  """A request of one process to process 0.

  Attributes:
    message: any JSON value.
    is_signed, is_proven: whether it has a signature, and whether the signature is valid.
    peer_host, own_host: numeric addresses of both ends.
  """

  connection: socket.socket
  message: JsonValue
  is_signed: bool
  is_proven: bool
  peer_host: str
  own_host: str
  _challenge: str
  _secret: str

  def answer(self, text: str) -> None:
    """Sends the answer, as JSON, and closes the connection."""
    self.connection.settimeout(LINE_SECONDS)
    _send(
      self.connection, {'text': text, 'proof': proof(self._secret, 'answer', self._challenge, text)}
    )
    self.connection.close()

  def is_gone(self) -> bool:
    """Returns whether the process that asked has hung up."""
    self.connection.setblocking(False)
    try:
      return not self.connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
      return False
    except OSError:
      return True


@dataclasses.dataclass
class _Caller:
  """A connection whose request is not complete yet."""

  host: str
  challenge: str
  deadline: float
  data: bytearray = dataclasses.field(default_factory=bytearray)


class Reception:
  """Reads the requests of many connections at once; a slow one does not delay the others.

  Args:
    listening: sockets; `close` closes them.
    secret: the job's secret.
  """

  def __init__(self, listening: addresses.Listening, secret: str):
    self._listening = listening
    self._secret = secret
    self._callers: dict[socket.socket, _Caller] = {}
    self._selector = selectors.DefaultSelector()
    for listener in listening.sockets:
      listener.setblocking(False)
      self._selector.register(listener, selectors.EVENT_READ)

  def close(self) -> None:
    self._selector.close()
    self._listening.close()
    while self._callers:
      self._callers.popitem()[0].close()

  def poll(self, seconds: float) -> list[Question]:
    """Returns the completed requests; waits up to `seconds` for something to happen.

    Raises:
      OSError: this process may open no further file, and no request is complete.
    """
    questions = []
    ready = [key.fileobj for key, _ in self._selector.select(seconds)]
    listeners = [each for each in ready if each in self._listening.sockets]
    for connection in ready:
      if connection not in listeners:
        questions += self._read(connection)
    for listener in listeners:
      try:
        self._accept(*listener.accept())
      except OSError as e:
        if e.errno in TOO_MANY_FILES and not questions:  # else the next poll accepts again
          raise
        # or it has hung up
    for connection, caller in list(self._callers.items()):
      if time.monotonic() > caller.deadline:
        self._forget(connection)
        connection.close()
    return questions

  def _accept(self, connection: socket.socket, peer: tuple[object, ...]) -> None:
    connection.setblocking(False)
    caller = _Caller(peer[0], new_secret(), time.monotonic() + LINE_SECONDS)
    self._callers[connection] = caller
    self._selector.register(connection, selectors.EVENT_READ)
    _send(connection, {'challenge': caller.challenge})

  def _forget(self, connection: socket.socket) -> _Caller:
    self._selector.unregister(connection)
    return self._callers.pop(connection)

  def _read(self, connection: socket.socket) -> list[Question]:
    try:
      part = connection.recv(65536)
    except BlockingIOError:
      return []
    except OSError:
      part = b''
    data = self._callers[connection].data
    data += part
    if part and not data.endswith(b'\n') and len(data) < MAX_LINE:
      return []
    caller = self._forget(connection)
    try:
      return [self._question(connection, caller)]
    except UNREADABLE:  # or a process that died
      if caller.data:
        _log.warning(
          'Ignored a message from %s: from another program, or another version of t5x_gpu.',
          caller.host,
        )
      connection.close()
      return []

  def _question(self, connection: socket.socket, caller: _Caller) -> Question:
    line = json.loads(caller.data)
    text, challenge, proof = line['text'], line['challenge'], line['proof']
    return Question(
      connection,
      json.loads(text),
      is_signed=bool(proof),
      is_proven=proves(proof, self._secret, 'question', caller.challenge, challenge, text),
      peer_host=addresses.peer_host(connection),
      own_host=addresses.local_host(connection),
      _challenge=challenge,
      _secret=self._secret,
    )


def send_question(connection: socket.socket, message: JsonValue, secret: str) -> str:
  """Sends a question, and returns the challenge for `read_answer`.

  Raises:
    OSError, ValueError, ... (`UNREADABLE`): the other end is not a `Reception`.
  """
  theirs = json.loads(_read_line(connection, time.monotonic() + LINE_SECONDS))['challenge']
  text, challenge = json.dumps(message), new_secret()
  _send(
    connection,
    {
      'text': text,
      'challenge': challenge,
      'proof': proof(secret, 'question', theirs, challenge, text),
    },
  )
  return challenge


def read_answer(
  connection: socket.socket, challenge: str, secret: str, *, deadline: float
) -> tuple[JsonValue, bool]:
  """Returns the answer, and whether it is signed with `secret`.

  Args:
    connection: connection on which a question was sent.
    challenge: from `send_question`.
    secret: the job's secret.
    deadline: a time of time.monotonic.
  Raises:
    OSError, ValueError, ... (`UNREADABLE`): there is no answer before the deadline.
  """
  line = json.loads(_read_line(connection, deadline))
  text = line['text']
  return json.loads(text), proves(line['proof'], secret, 'answer', challenge, text)


def _send(connection: socket.socket, message: dict[str, str]) -> None:
  with contextlib.suppress(OSError):  # the other end is gone; processes waiting for it will notice
    connection.sendall(json.dumps(message).encode() + b'\n')


def _read_line(connection: socket.socket, deadline: float) -> bytes:
  """Returns the bytes up to a newline; raises ValueError or OSError if none comes in time."""
  data = bytearray()
  while not data.endswith(b'\n'):
    connection.settimeout(max(deadline - time.monotonic(), 0.001))
    part = connection.recv(65536)
    if not part or len(data) > MAX_LINE or time.monotonic() > deadline:
      raise ValueError('no line')
    data += part
  return bytes(data)


TRY_SECONDS = 5  # for one connection
RETRY_SECONDS = 0.1
POLL_SECONDS = 0.2
# A name that does not resolve at first seldom resolves later, except while Kubernetes starts pods.
DNS_SECONDS = 20
REPORT_SECONDS = 30
_error = functools.partial(ClusterError, docs='slurm.md#they-do-not-find-each-other')


@contextlib.contextmanager
def meet(
  cluster: ClusterInfo, me: ClusterMember, *, timeout_seconds: float, secret: str = ''
) -> Iterator[Meeting]:
  """Yields once all processes have come; the block must start JAX's service on process 0.

  The other processes are released only once that service listens; their first connection would
  otherwise be refused, and they would retry a second later. If the block fails they are released
  too, and each finds the problem with the members by itself.

  Args:
    cluster: which process this is.
    me: the facts that this process sends.
    timeout_seconds: deadline for all processes to come.
    secret: the job's secret (`secret_from_environment`); '' admits every process.
  Raises:
    ClusterError: some processes did not come (the message names them), process 0 cannot be reached
      (with the reason), its port is in use, two processes have the same index, or the members
      cannot be one run (`members.check`).
  """
  if cluster.process_index == 0:
    host = _Host(cluster, me, secret, timeout_seconds)
    with host:
      meeting = host.gather()
      host.release_once_listening(meeting)
      yield meeting
  else:
    yield _Guest(cluster, me, secret, timeout_seconds).meet()


class _Host(contextlib.AbstractContextManager):
  """Process 0, which waits until all processes have asked for the meeting."""

  def __init__(self, cluster: ClusterInfo, me: ClusterMember, secret: str, timeout_seconds: float):
    self._cluster = cluster
    self._secret = secret
    self._deadline = time.monotonic() + timeout_seconds
    self._timeout_seconds = timeout_seconds
    self._members = {0: me}
    self._questions: dict[int, Question] = {}
    self._listening = addresses.listen(
      (cluster.coordinator_address, *cluster.other_addresses),
      bind_address=cluster.bind_address,
      is_one_host=cluster.local_process_count == cluster.process_count,
    )
    self._reception = Reception(self._listening, secret)
    if not secret and not all(map(addresses.is_loopback, self._listening.hosts)):
      _log.warning(
        '%s is not set: anybody who can reach %s can join this run. See docs/security.md.',
        SECRET_VARIABLE,
        self._listening.address,
      )
    self._failed = threading.Event()
    self._release: Optional[threading.Thread] = None

  def __exit__(self, *exc_info: object) -> None:
    self._reception.close()
    if self._release is not None and exc_info[0] is not None:
      self._failed.set()
      self._release.join(TRY_SECONDS)

  def gather(self) -> Meeting:
    """Returns once all processes have come; otherwise informs the present ones, and raises."""
    count = self._cluster.process_count
    report_at = time.monotonic() + REPORT_SECONDS
    while not self._all_here():
      try:
        questions = self._reception.poll(POLL_SECONDS)
      except OSError as e:
        raise self._refuse_all(
          _error(
            f'Process 0 on {socket.gethostname()} has {len(self._members)} of {count} processes '
            f'and cannot take one more: {reason_of(e)}. Its limit is '
            f'{machine.open_files_limit()}, and it needs a connection to each process.',
            fix=remedy(e),
          )
        ) from e
      for question in questions:
        self._welcome(question)
      if not questions:
        self._drop_ended()
      if time.monotonic() > self._deadline:
        raise self._refuse_all(
          _error(
            self._missing_text(self._timeout_seconds),
            fix='Look at the first lines of the missing processes: they could not start, or could '
            f'not reach {self._listening.address} (wrong name, firewall). Start all {count} '
            'processes with the same --coordinator_address.',
          )
        )
      if time.monotonic() > report_at:
        _log.warning(self._missing_text(None))
        report_at += REPORT_SECONDS
    members = tuple(self._members[i] for i in range(count))
    try:
      members_lib.check(members)
    except ClusterError as e:
      raise self._refuse_all(e) from None
    host, port = self._service_host(), self._listening.port
    return Meeting(
      addresses.join(host or '127.0.0.1', port),
      members,
      own_host=host,
      bind_address=self._cluster.bind_address or addresses.join(host or '::', port),
    )

  def _service_host(self) -> Optional[str]:
    """Returns the address of this host that the others used; None if they used several.

    Prefers a non-loopback address: processes that used loopback can reach it as well.
    """
    used = sorted({question.own_host for question in self._questions.values()})
    remote = [host for host in used if not addresses.is_loopback(host)]
    return (remote or used)[0] if len(remote) < 2 else None

  def _all_here(self) -> bool:
    if len(self._members) == self._cluster.process_count:
      self._drop_ended()
    return len(self._members) == self._cluster.process_count

  def _welcome(self, question: Question) -> None:
    try:
      hello = question.message
      member = ClusterMember.from_json(hello['member'])
      run, count = hello['run'], hello['count']
      if member.process_index not in range(count):
        raise ValueError('process index out of range')
    except UNREADABLE:
      question.connection.close()  # not a process of this code
      return
    refusal = ''
    if run != self._cluster.run_id:
      refusal = f'another run listens here ({self._cluster.run_id!r}, not {run!r})'
    elif not question.is_proven:
      refusal = (
        f'process {member.process_index} on {member.hostname} ({question.peer_host}) has '
        f'{"another" if question.is_signed else "no"} {SECRET_VARIABLE}, but process 0 '
        f'has {"a different one" if self._secret else "none"}'
      )
    elif count != self._cluster.process_count:
      refusal = f'process 0 is in a run of {self._cluster.process_count} processes, not of {count}'
    elif member.process_index in self._members:
      other = self._members[member.process_index]
      refusal = (
        f'process {member.process_index} joined twice, from {other.hostname} and from '
        f'{member.hostname} ({question.peer_host})'
      )
    if refusal:
      question.answer(json.dumps({'run': self._cluster.run_id, 'refused': refusal}))
      if run == self._cluster.run_id:
        _log.warning('Rejected a connection: %s.', refusal)
      return
    self._members[member.process_index] = member
    self._questions[member.process_index] = question

  def _drop_ended(self) -> None:
    """Forgets processes that came and ended; after a restart they come again."""
    for index, question in list(self._questions.items()):
      if question.is_gone():
        _log.warning(
          'Process %d on %s ended while waiting for the others.',
          index,
          self._members[index].hostname,
        )
        question.connection.close()
        del self._questions[index], self._members[index]

  def _missing_text(self, waited: Optional[float]) -> str:
    count = self._cluster.process_count
    missing = [i for i in range(count) if i not in self._members]
    hosts = collections.Counter(member.hostname for member in self._members.values())
    present = ', '.join(listed([f'{n} on {host}' for host, n in hosts.items()], 8))
    after = 'Waiting' if waited is None else f'After {waited:g} s: still waiting'
    return (
      f'{after} for {len(missing)} of {count} processes: {number_ranges(missing, separator=", ")}. '
      f'Here: {present}.'
    )

  def _refuse_all(self, error: ClusterError) -> ClusterError:
    """Sends an error to all processes that have come, which raise it too; returns it."""
    facts = {'what': error.what, 'fix': error.fix, 'docs': error.docs}
    for question in self._questions.values():
      question.answer(json.dumps({'run': self._cluster.run_id, 'error': facts}))
    return error

  def release_once_listening(self, meeting: Meeting) -> None:
    """Frees the port for JAX's service, and answers all processes once the service listens."""
    self._reception.close()
    host, port = addresses.split(meeting.address)
    answer = json.dumps(
      {
        'run': self._cluster.run_id,
        'service': meeting.own_host and meeting.address,
        'members': members_lib.to_rows(meeting.members),
      }
    )

    def release() -> None:
      while time.monotonic() < self._deadline + TRY_SECONDS and not self._failed.is_set():
        try:
          socket.create_connection((host, port), timeout=1).close()
          break
        except OSError:
          time.sleep(0.01)
      for question in self._questions.values():
        question.answer(answer)

    self._release = threading.Thread(target=release, daemon=True, name='rendezvous')
    self._release.start()


class _Guest:
  """A process other than process 0, which asks process 0 for the meeting."""

  def __init__(self, cluster: ClusterInfo, me: ClusterMember, secret: str, timeout_seconds: float):
    self._cluster = cluster
    self._me = me
    self._secret = secret
    self._timeout_seconds = timeout_seconds
    self._failures: dict[str, Problem] = {}  # address -> latest reason

  def meet(self) -> Meeting:
    started = time.monotonic()
    deadline = started + self._timeout_seconds
    tried = (self._cluster.coordinator_address, *self._cluster.other_addresses)
    dns_seconds = (
      self._timeout_seconds
      if self._cluster.kind == 'kubernetes'
      else min(DNS_SECONDS, self._timeout_seconds)
    )
    while True:
      for address in tried:
        meeting = self._try(address, deadline)
        if meeting is not None:
          return meeting
      waited = time.monotonic() - started
      no_name = all(self._failures[address].fix == _CORRECT_NAME for address in tried)
      if waited > self._timeout_seconds or (no_name and waited > dns_seconds):
        raise self._unreachable(waited)
      time.sleep(RETRY_SECONDS)

  def _try(self, address: str, deadline: float) -> Optional[Meeting]:
    host, port = addresses.split(address)
    try:
      connection = socket.create_connection((host, port), timeout=TRY_SECONDS)
    except OSError as e:
      self._failures[address] = failure(e, host)
      return None
    with connection:
      try:
        challenge = send_question(connection, self._hello(), self._secret)
        # Wait for the slowest process, a little longer than process 0 itself waits.
        answer, is_proven = read_answer(
          connection, challenge, self._secret, deadline=deadline + 2 * TRY_SECONDS
        )
        run = answer['run']
        own_host, service = addresses.local_host(connection), answer.get('service')
        reached = addresses.join(addresses.peer_host(connection), connection.getpeername()[1])
      except UNREADABLE:
        self._failures[address] = Problem(
          'another program (or version of t5x_gpu) listens there, '
          'or process 0 ended while this process waited',
          _FIND_PROCESS_0,
        )
        return None
    if 'members' in answer and is_proven:
      if service and addresses.is_loopback(own_host):  # on the host of process 0
        own_host, reached = addresses.split(service)[0], service
      return Meeting(
        reached,
        self._with_own_gpus(members_lib.from_rows(answer['members'])),
        own_host=own_host if service else None,
      )
    if run == self._cluster.run_id and 'error' in answer:
      raise ClusterError(**{name: str(text) for name, text in answer['error'].items()})
    if run == self._cluster.run_id and 'refused' in answer:
      raise _error(
        f'Process {self._me.process_index} of {self._cluster.process_count} could not join: '
        f'{answer["refused"]}.',
        fix='Start each process once, all with the same count, address, versions and secret.',
      )
    other = f'the program that listens there has another {SECRET_VARIABLE}, or none'
    self._failures[address] = Problem(str(answer.get('refused', other)), _FIND_PROCESS_0)
    return None

  def _with_own_gpus(self, members: tuple[ClusterMember, ...]) -> tuple[ClusterMember, ...]:
    at = self._me.process_index
    return (*members[:at], self._me, *members[at + 1 :])

  def _hello(self) -> JsonObject:
    return {
      'run': self._cluster.run_id,
      'count': self._cluster.process_count,
      'member': dataclasses.asdict(self._me),
    }

  def _unreachable(self, waited: float) -> ClusterError:
    reasons = '; '.join(f'{address}: {failure.what}' for address, failure in self._failures.items())
    fixes = {failure.fix for failure in self._failures.values()}
    fix = next(fix for fix in (_CORRECT_NAME, _OPEN_PORT, _FIND_PROCESS_0) if fix in fixes)
    return _error(
      f'Process {self._me.process_index} of {self._cluster.process_count} (on '
      f'{self._me.hostname}) could not reach process 0 for {waited:.0f} s. {reasons}.',
      fix=fix,
    )


# What to do about a failed connection, the most specific first.
_CORRECT_NAME = (
  'Set --coordinator_address to a name that all hosts know (getent hosts NAME), or to an IP '
  'address of the first host.'
)
_OPEN_PORT = (
  'A firewall, or the wrong network: open the port between the hosts, or set --coordinator_address '
  'to an address of process 0 on a network that all hosts share.'
)
_FIND_PROCESS_0 = (
  'Look at the first lines of process 0: it did not start, or listens elsewhere. All processes '
  'need the same --coordinator_address, on the host of process 0. If that host has several '
  f'networks, set {addresses.BIND_VARIABLE}=0.0.0.0:PORT there.'
)


def failure(e: OSError, host: str) -> Problem:
  if isinstance(e, socket.gaierror):
    return Problem(f'the name {host!r} does not resolve (DNS: {e.strerror})', _CORRECT_NAME)
  if isinstance(e, ConnectionRefusedError):
    refused = 'connection refused (the host answers, but nothing listens on the port)'
    return Problem(refused, _FIND_PROCESS_0)
  if isinstance(e, TimeoutError):
    return Problem(f'timed out (no answer within {TRY_SECONDS} s)', _OPEN_PORT)
  return Problem(f'{e.strerror or e}', _FIND_PROCESS_0)
