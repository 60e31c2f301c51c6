"""A writer that sends metrics to a service from a separate thread, and never stops the run."""

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, Optional, Protocol, Self

from t5x_gpu.errors import first_line
from t5x_gpu.metrics.loggers.secrets import redacted

_log = logging.getLogger(__name__)

CAPACITY = 10_000  # maximum number of records queued for a service that is down; about 10 MB
CLOSE_SECONDS = 30.0
_LONGEST_WAIT = 60.0


class Client(Protocol):
  """A connection to a service. Any method may raise or block."""

  def log(self, step: int, values: Mapping[str, float]) -> None:
    """Sends numbers."""

  def close(self, *, failed: bool) -> None:
    """Ends the run at the service."""


class BackgroundWriter:
  """A MetricWriter in front of a `Client`. Use it as a context manager.

  A failed client is retried after 1, 2, 4, ... 60 s, with one warning. Records wait in memory;
  beyond `capacity` the oldest record is dropped. metrics.jsonl has all records.

  Args:
    name: name of the service, for messages.
    connect: returns the client; called in the thread.
    capacity: maximum number of waiting records.
    close_seconds: how long the end of the run waits for queued records.
    first_wait: seconds until the first retry.
  """

  def __init__(
    self,
    name: str,
    connect: Callable[[], Client],
    *,
    capacity: int = CAPACITY,
    close_seconds: float = CLOSE_SECONDS,
    first_wait: float = 1.0,
  ):
    self._name, self._connect = name, connect
    self._close_seconds, self._first_wait = close_seconds, first_wait
    self._records: collections.deque[tuple[int, dict[str, float]]] = collections.deque(
      maxlen=capacity
    )
    self._changed = threading.Condition()
    self._closing = self._failed = self._closed = False
    self._stop_waiting = threading.Event()
    self.num_sent = self.num_lost = 0
    self._thread = threading.Thread(target=self._work, name=f'logger_{name}', daemon=True)

  def __enter__(self) -> Self:
    self._thread.start()
    return self

  def __exit__(self, kind: Optional[type[BaseException]], *rest: Any) -> None:
    self._failed = kind is not None
    self.close()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Queues one record; never blocks."""
    with self._changed:
      self.num_lost += len(self._records) == self._records.maxlen
      self._records.append((step, {name: float(value) for name, value in values.items()}))
      self._changed.notify()

  def truncate_after(self, step: int) -> None:
    """Does nothing: a service keeps its records; repeated steps are written again."""

  def flush(self) -> None:
    """Does nothing: the thread sends records as soon as it can."""

  def close(self) -> None:
    """Sends queued records, for at most `close_seconds`."""
    if self._closed:
      return
    self._closed = True
    with self._changed:
      self._closing = True
      self._changed.notify()
    self._stop_waiting.set()
    if self._thread.ident is not None:
      self._thread.join(self._close_seconds)
    lost = self.num_lost + len(self._records)
    if lost:
      _log.warning(
        '%s did not get %d of %d records; metrics.jsonl has them all.',
        self._name,
        lost,
        lost + self.num_sent,
      )

  def _work(self) -> None:
    client: Optional[Client] = None
    wait = self._first_wait
    while True:
      with self._changed:
        while not self._records and not self._closing:
          self._changed.wait()
        record = self._records.popleft() if self._records else None
      last_try = self._closing
      try:
        client = client or self._connect()
        if record is None:
          client.close(failed=self._failed)
          return
        client.log(*record)
        self.num_sent += 1
        wait = self._first_wait
      except Exception as e:
        self._warn(e)
        with self._changed:
          if record is not None and len(self._records) < self._records.maxlen:
            self._records.appendleft(record)
          elif record is not None:
            self.num_lost += 1
        if last_try:
          return
        self._stop_waiting.wait(wait)
        wait = min(2 * wait, _LONGEST_WAIT)

  def _warn(self, e: Exception) -> None:
    """Warns about the first failure; other loggers continue meanwhile."""
    if not self._warned:
      self._warned = True
      _log.warning(
        '%s does not accept metrics: %s. The run continues, and keeps trying.',
        self._name,
        redacted(first_line(e)).rstrip('.'),
      )

  _warned = False
