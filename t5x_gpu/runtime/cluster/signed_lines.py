"""One question and one answer per connection, both signed with the secret of the job.

    process 0: {"challenge": ...}
    the other: {"text": ..., "challenge": ..., "proof": ...}
    process 0: {"text": ..., "proof": ...}

Each line is JSON; `text` is the message itself. Without a secret the proofs are empty.
"""

import contextlib
import dataclasses
import json
import logging
import selectors
import socket
import time
from typing import Any

from t5x_gpu.runtime.cluster import addresses, job_secret

_log = logging.getLogger(__name__)

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
  message: Any
  is_signed: bool
  is_proven: bool
  peer_host: str
  own_host: str
  _challenge: str
  _secret: str

  def answer(self, message: Any) -> None:
    """Sends the answer and closes the connection."""
    text = json.dumps(message)
    self.connection.settimeout(LINE_SECONDS)
    _send(
      self.connection,
      {'text': text, 'proof': job_secret.proof(self._secret, 'answer', self._challenge, text)},
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
    """Returns the completed requests; waits up to `seconds` for something to happen."""
    questions = []
    for key, _ in self._selector.select(seconds):
      if key.fileobj in self._listening.sockets:
        with contextlib.suppress(OSError):  # it has hung up, or too many files are open
          self._accept(*key.fileobj.accept())
      else:
        questions += self._read(key.fileobj)
    for connection, caller in list(self._callers.items()):
      if time.monotonic() > caller.deadline:
        self._forget(connection)
        connection.close()
    return questions

  def _accept(self, connection: socket.socket, peer: tuple[Any, ...]) -> None:
    connection.setblocking(False)
    caller = _Caller(peer[0], job_secret.new(), time.monotonic() + LINE_SECONDS)
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
      is_proven=job_secret.proves(
        proof, self._secret, 'question', caller.challenge, challenge, text
      ),
      peer_host=addresses.peer_host(connection),
      own_host=addresses.local_host(connection),
      _challenge=challenge,
      _secret=self._secret,
    )


def send_question(connection: socket.socket, message: Any, secret: str) -> str:
  """Sends a question, and returns the challenge for `read_answer`.

  Raises:
    OSError, ValueError, ... (`UNREADABLE`): the other end is not a `Reception`.
  """
  theirs = json.loads(_read_line(connection, time.monotonic() + LINE_SECONDS))['challenge']
  text, challenge = json.dumps(message), job_secret.new()
  _send(
    connection,
    {
      'text': text,
      'challenge': challenge,
      'proof': job_secret.proof(secret, 'question', theirs, challenge, text),
    },
  )
  return challenge


def read_answer(
  connection: socket.socket, challenge: str, secret: str, *, deadline: float
) -> tuple[Any, bool]:
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
  return json.loads(text), job_secret.proves(line['proof'], secret, 'answer', challenge, text)


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
