"""JAX's coordination service: the key-value store in process 0, a barrier, detecting its end."""

import contextlib
import ctypes
import itertools
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Optional, Protocol, TypeVar

from t5x_gpu.runtime.cluster import addresses, jax_internals
from t5x_gpu.storage.json_schema import JsonValue

_log = logging.getLogger(__name__)

_EXCHANGE_SECONDS = 60
_rounds = itertools.count()


_T = TypeVar('_T')


class Store(Protocol):
  """The watchdog's view of the coordination service, which runs in process 0."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

  def wait_for_value(self, key: str, *, seconds: float) -> str:
    """Returns the value of a key once it is set; raises if it is not set in time."""

  def wait_for_all(self, name: str, *, seconds: float) -> None:
    """Returns once every process has made this call with this name; raises if one is missing."""

  def has_ended(self) -> bool:
    """Returns whether process 0 has certainly ended, as opposed to being unreachable."""


def within(seconds: float, ask: Callable[[], _T]) -> Optional[_T]:
  """Returns the result of `ask`; None if it raises or does not return in time."""
  answers: list[_T] = []

  def run() -> None:
    with contextlib.suppress(Exception):
      answers.append(ask())

  thread = threading.Thread(target=run, name='ask', daemon=True)
  thread.start()
  thread.join(seconds)
  return answers[0] if answers else None


def delay_aborts() -> None:
  """Delays an abort by six seconds, so that the watchdog can report the reason.

  JAX aborts from C++ within 10 ms of process 0's end, without naming process 0. JAX's callback for
  this event does not work from Python (std::bad_cast with jaxlib 0.10.2 and 0.11.2), and a thread
  that aborts runs no Python code. But libc's sleep takes one integer, like a signal handler: it
  sleeps for SIGABRT = 6 seconds in that thread and returns, and the abort continues.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class _JaxStore:
  """The store of `jax.distributed`."""

  def __init__(self, client: jax_internals.CoordinationClient, address: str):
    self._client = client
    self._address = addresses.split(address)
    self.key_value_set = client.key_value_set
    self.key_value_dir_get = client.key_value_dir_get

  def wait_for_value(self, key: str, *, seconds: float) -> str:
    return self._client.blocking_key_value_get(key, int(seconds * 1000))

  def wait_for_all(self, name: str, *, seconds: float) -> None:
    self._client.wait_at_barrier(name, timeout_in_ms=int(seconds * 1000))

  def has_ended(self) -> bool:
    try:
      socket.create_connection(self._address, timeout=1).close()
    except ConnectionRefusedError:  # the host answers, but nothing listens there
      return True
    except OSError:
      return False
    return False


def coordination_store() -> Optional[Store]:
  """Returns the key-value store of `jax.distributed`, or None for a single process."""
  state = jax_internals.distributed_state()
  return _JaxStore(state.client, state.coordinator_address) if state.client else None


def exchange(value: JsonValue) -> list[JsonValue]:
  """Returns each process's value, by process index; usable before a backend starts.

  All processes must call it the same number of times.
  """
  state = jax_internals.distributed_state()
  return exchange_by(
    state.client,
    value,
    name=f't5x_gpu_exchange/{next(_rounds)}',
    index=state.process_id,
    count=state.num_processes,
  )


def exchange_by(
  client: jax_internals.CoordinationClient, value: JsonValue, *, name: str, index: int, count: int
) -> list[JsonValue]:
  """Returns each process's value; all of them call this once with a `name`.

  Process 0 reads the values and posts them together, equal ones once: three requests for each
  process. If each read the values of all, 512 processes would need 0.26 million.
  """
  wait = _EXCHANGE_SECONDS * 1000
  client.key_value_set(f'{name}/{index}', json.dumps(value))
  if index == 0:
    texts = [client.blocking_key_value_get(f'{name}/{i}', wait) for i in range(count)]
    number = {text: i for i, text in enumerate(dict.fromkeys(texts))}
    client.key_value_set(f'{name}/all', json.dumps([list(number), [number[t] for t in texts]]))
  values, numbers = json.loads(client.blocking_key_value_get(f'{name}/all', wait))
  # Process 0, which holds the store, may end because of these values.
  client.wait_at_barrier(f'{name}/read', timeout_in_ms=wait)
  return [json.loads(values[i]) for i in numbers]


def let_gloo_listen_on(host: str) -> None:
  """Makes gloo (collectives of CPU devices) listen on this address; call before JAX has devices.

  JAX gives gloo no address, so gloo uses the address of the host's name: possibly a network that
  the run does not need, or Debian's 127.0.1.1, which other hosts cannot reach.

  JAX has no public API for this. JAX also creates gloo for runs on GPUs, which do not need it. So
  if gloo rejects the address, it keeps its own choice, with a warning.
  """
  make = jax_internals.gloo_maker()
  if make is None:
    _log.info('This jaxlib has no make_gloo_tcp_collectives: gloo chooses its address.')
    return

  def make_on_host(*args: object, **kwargs: object) -> object:
    try:
      return make(*args, **{'hostname': host, **kwargs})
    except (TypeError, RuntimeError) as e:  # another signature; no such address
      _log.warning('gloo cannot listen on %s and chooses an address itself: %s', host, e)
      return make(*args, **kwargs)

  jax_internals.set_gloo_maker(make_on_host)
