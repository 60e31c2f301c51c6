"""Connections between the agents of a run, with a beat each second: who is silent is lost.

Lines are JSON, signed with the secret of the job as in `rendezvous`. A proof covers the challenges
of both ends and the number of the line, so that no line can be repeated or moved.

    both ends: {"challenge": ...}
    then:      {"text": ..., "proof": ...}     "text" is the message, '' is a beat
    a refusal: {"refused": ..., "run": ...}    to an end without the secret, which cannot check more
"""

import contextlib
import dataclasses
import json
import logging
import queue
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Optional, Union

from t5x_gpu.runtime import machine
from t5x_gpu.runtime.cluster import addresses, generations, rendezvous
from t5x_gpu.runtime.cluster.rendezvous import MAX_LINE, SECRET_VARIABLE, UNREADABLE
from t5x_gpu.storage.files import reason_of
from t5x_gpu.storage.json_schema import JsonValue

_log = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4.5  # a loss is noticed within five seconds
CONNECT_SECONDS = 3.0
RETRY_SECONDS = 0.2
FULL_SECONDS = 1.0
_LEAVE_SECONDS = 2.0  # for the last messages


@dataclasses.dataclass(frozen=True)
class Opened:
  """A connection that this end opened for `tag`."""

  tag: int
  link: int


@dataclasses.dataclass(frozen=True)
class Failed:
  """No connection could be opened for `tag`, with the reason for the user."""

  tag: int
  reason: str


@dataclasses.dataclass(frozen=True)
class Came:
  """A message on a link; the first one of a link that the other end opened makes it known."""

  link: int
  message: JsonValue


@dataclasses.dataclass(frozen=True)
class Closed:
  """The other end is gone, or has been silent for `silent_seconds`."""

  link: int
  silent_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class TurnedAway:
  """The other end belongs to this run and refuses this one: it has another secret."""

  link: int
  reason: str


@dataclasses.dataclass(frozen=True)
class NoRoom:
  """An end that calls cannot be answered now: the limit of open files is reached."""

  reason: str


Event = Union[Opened, Failed, Came, Closed, TurnedAway, NoRoom]


@dataclasses.dataclass
class _Link:
  """One end of a connection.

  Attributes:
    is_caller: whether this end opened it.
    is_known: whether an event has named the link.
  """

  number: int
  connection: socket.socket
  is_caller: bool
  is_known: bool
  challenge: str = dataclasses.field(default_factory=rendezvous.new_secret)
  theirs: str = ''
  num_sent: int = 0
  num_read: int = 0
  read: bytearray = dataclasses.field(default_factory=bytearray)
  unsent: bytearray = dataclasses.field(default_factory=bytearray)
  waiting: list[str] = dataclasses.field(default_factory=list)
  heard_at: float = dataclasses.field(default_factory=time.monotonic)
  beat_at: float = 0.0
  is_closing: bool = False

  def parts(self, *, by_caller: bool, number: int, text: str) -> tuple[str, ...]:
    """Returns the signed parts of a line."""
    caller, called = self.challenge, self.theirs
    if not self.is_caller:
      caller, called = called, caller
    return ('agents', 'caller' if by_caller else 'called', caller, called, str(number), text)


class Links:
  """All connections of one agent.

  Args:
    secret: the job's secret; '' accepts everybody.
    run_id: see `ClusterInfo`.
  """

  def __init__(self, secret: str, *, run_id: str):
    self._secret, self._run_id = secret, run_id
    self._selector = selectors.DefaultSelector()
    self._links: dict[int, _Link] = {}
    self._last = 0
    self._encoded: Optional[tuple[generations.Message, str]] = None  # the last message sent
    self._listening: list[socket.socket] = []
    self._resting: dict[socket.socket, float] = {}  # listener: when it accepts again
    self._dialed: queue.SimpleQueue[tuple[int, Union[socket.socket, str]]] = queue.SimpleQueue()

  def listen(self, sockets: Sequence[socket.socket]) -> None:
    """Accepts connections from now on."""
    for listener in sockets:
      listener.setblocking(False)
      self._selector.register(listener, selectors.EVENT_READ)
      self._listening.append(listener)

  def connect(self, tag: int, to: Sequence[str]) -> None:
    """Opens a connection to the first of the addresses that answers; `poll` returns the result."""
    # Resolving a name may take seconds, so a separate thread connects.
    threading.Thread(target=self._dial, args=(tag, to), daemon=True, name='connect').start()

  def _dial(self, tag: int, to: Sequence[str]) -> None:
    reasons = []
    for address in to:
      try:
        found = socket.create_connection(addresses.split(address), timeout=CONNECT_SECONDS)
      except OSError as e:
        reasons.append(f'{address}: {rendezvous.failure(e, addresses.split(address)[0]).what}')
        continue
      if _has_answered(found):
        self._dialed.put((tag, found))
        return
      reasons.append(f'{address}: it accepts connections and does not answer')
      found.close()
    time.sleep(RETRY_SECONDS)
    self._dialed.put((tag, '; '.join(reasons)))

  def is_open(self, link: int) -> bool:
    """Returns whether neither end has closed a link."""
    return link in self._links and not self._links[link].is_closing

  def own_host(self, link: int) -> str:
    """Returns the numeric address of this end."""
    return addresses.local_host(self._links[link].connection)

  def peer_host(self, link: int) -> str:
    """Returns the numeric address of the other end."""
    return addresses.peer_host(self._links[link].connection)

  def send(self, link: int, message: generations.Message) -> int:
    """Sends a message, unless the link is closed; returns the length of its text."""
    if self._encoded is None or message != self._encoded[0]:  # one for all hosts is encoded once
      self._encoded = message, json.dumps(generations.message_to_json(message))
    text = self._encoded[1]
    if link in self._links:
      self._send_text(self._links[link], text)
    return len(text)

  def close(self, link: int) -> None:
    """Closes a link after its last messages."""
    if link in self._links:
      self._links[link].is_closing = True
      self._flush(self._links[link])

  def leave(self) -> None:
    """Closes everything; waits a little for the last messages."""
    for link in list(self._links):
      self.close(link)
    deadline = time.monotonic() + _LEAVE_SECONDS
    while self._links and time.monotonic() < deadline:
      self.poll(0.05)
    for link in list(self._links.values()):
      self._forget(link)
    for listener in self._listening:
      listener.close()
    self._selector.close()

  def poll(self, seconds: float) -> list[Event]:
    """Returns what happened; waits up to `seconds` for something to happen."""
    events: list[Event] = []
    for key, ready in self._selector.select(seconds):
      if key.data is None:
        events += self._accept(key.fileobj)
        continue
      link = key.data
      if ready & selectors.EVENT_READ and link.number in self._links:
        events += self._read(link)
      if ready & selectors.EVENT_WRITE and link.number in self._links:
        self._flush(link)
    with contextlib.suppress(queue.Empty):
      while True:
        tag, found = self._dialed.get_nowait()
        if isinstance(found, str):
          events.append(Failed(tag, found))
        else:
          events.append(Opened(tag, self._add(found, is_caller=True).number))
    now = time.monotonic()
    for listener in [each for each, until in self._resting.items() if now > until]:
      del self._resting[listener]
      self._selector.register(listener, selectors.EVENT_READ)
    for link in list(self._links.values()):
      if now > link.heard_at + SILENT_SECONDS:
        events += self._lost(link, now - link.heard_at)
      # An end that was called stays silent until it knows the caller, which it may have to refuse.
      elif now > link.beat_at + BEAT_SECONDS and (link.is_caller or link.num_read):
        link.beat_at = now
        if not link.is_closing:
          self._send_text(link, '')
    return events

  def _accept(self, listener: socket.socket) -> list[Event]:
    try:
      connection, _ = listener.accept()
    except OSError as error:
      if error.errno not in rendezvous.TOO_MANY_FILES:  # it has hung up
        return []
      self._selector.unregister(listener)  # or it would be ready at once, again and again
      self._resting[listener] = time.monotonic() + FULL_SECONDS
      limit = machine.open_files_limit()
      return [NoRoom(f'{reason_of(error)}; the limit of this process is {limit} (ulimit -Hn)')]
    self._add(connection, is_caller=False)
    return []

  def _add(self, connection: socket.socket, *, is_caller: bool) -> _Link:
    connection.setblocking(False)
    self._last += 1
    link = _Link(self._last, connection, is_caller, is_known=is_caller)
    self._links[link.number] = link
    self._selector.register(connection, selectors.EVENT_READ, link)
    self._write(link, {'challenge': link.challenge})
    return link

  def _send_text(self, link: _Link, text: str) -> None:
    if not link.theirs:  # there is nothing to sign yet
      link.waiting.append(text)
      return
    parts = link.parts(by_caller=link.is_caller, number=link.num_sent, text=text)
    link.num_sent += 1
    self._write(link, {'text': text, 'proof': rendezvous.proof(self._secret, *parts)})

  def _write(self, link: _Link, line: JsonValue) -> None:
    link.unsent += json.dumps(line).encode() + b'\n'
    self._flush(link)

  def _flush(self, link: _Link) -> None:
    try:
      while link.unsent:
        del link.unsent[: link.connection.send(link.unsent)]
    except BlockingIOError:
      pass
    except OSError:  # the other end is gone: reading will tell
      link.unsent.clear()
    if link.is_closing and not link.unsent and not link.waiting:
      self._forget(link)
      return
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
    self._selector.modify(link.connection, wanted, link)

  def _forget(self, link: _Link) -> None:
    del self._links[link.number]
    self._selector.unregister(link.connection)
    link.connection.close()

  def _lost(self, link: _Link, silent_seconds: float = 0.0) -> list[Event]:
    self._forget(link)
    is_news = link.is_known and not link.is_closing
    return [Closed(link.number, silent_seconds)] if is_news else []

  def _read(self, link: _Link) -> list[Event]:
    try:
      part = link.connection.recv(1 << 16)
    except BlockingIOError:
      return []
    except OSError:
      part = b''
    link.read += part
    link.heard_at = time.monotonic()
    events: list[Event] = []
    *lines, rest = link.read.split(b'\n')
    link.read = bytearray(rest)
    for line in lines:
      if link.number not in self._links:
        break
      try:
        events += self._take(link, bytes(line))
      except UNREADABLE:
        _log.warning('Closed a connection: from another program, or another t5x_gpu.')
        return events + self._lost(link)
    if link.number in self._links and (not part or len(link.read) > MAX_LINE):
      events += self._lost(link)
    return events

  def _take(self, link: _Link, data: bytes) -> list[Event]:
    """Returns the events of one line."""
    line = json.loads(data)
    if not link.theirs:
      link.theirs = str(line['challenge'])
      while link.waiting:  # a link that is closing ends with the last one
        self._send_text(link, link.waiting.pop(0))
      return []
    if 'refused' in line:
      is_ours = line['run'] == self._run_id and link.is_caller and not link.num_read
      self._forget(link)
      return [TurnedAway(link.number, str(line['refused'])) if is_ours else Closed(link.number)]
    text = line['text']
    parts = link.parts(by_caller=not link.is_caller, number=link.num_read, text=text)
    if not rendezvous.proves(line['proof'], self._secret, *parts):
      return self._refuse(link, is_signed=bool(line['proof']))
    link.num_read += 1
    if not text:
      return []
    link.is_known = True
    return [Came(link.number, json.loads(text))]

  def _refuse(self, link: _Link, *, is_signed: bool) -> list[Event]:
    """Turns away an end without this job's secret."""
    who = addresses.peer_host(link.connection)
    text = (
      f'{who} has {"another" if is_signed else "no"} {SECRET_VARIABLE}, but the agent at '
      f'{addresses.local_host(link.connection)} has {"a different one" if self._secret else "none"}'
    )
    _log.warning('Rejected an agent: %s.', text)
    events: list[Event] = [Closed(link.number)] if link.is_known else []
    link.is_closing = True
    self._write(link, {'refused': text, 'run': self._run_id})
    return events


def _has_answered(connection: socket.socket) -> bool:
  """Returns whether the other end has sent something: its kernel connects for a stopped process."""
  try:
    return bool(connection.recv(1, socket.MSG_PEEK))
  except OSError:
    return False
