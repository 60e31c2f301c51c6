"""JAX's coordination service: a store in process 0, a barrier, its end."""

import contextlib
import ctypes
import itertools
import json
import logging
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any, Optional, Protocol

from t5x_gpu.runtime.cluster import addresses, jax_internals

_log = logging.getLogger(__name__)

_EXCHANGE_SECONDS = 60
_rounds = itertools.count()


class Store(Protocol):
  """What the watchdog needs of the coordination service, which lives in process 0."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

  def wait_for_value(self, key: str, *, seconds: float) -> str:
    """Returns the value of a key once somebody has set it; raises if nobody does in time."""

  def wait_for_all(self, name: str, *, seconds: float) -> None:
    """Returns once every process has called it with this name; raises if one does not come."""

  def has_ended(self) -> bool:
    """Returns whether process 0 is known to be gone, not only out of reach."""


def within(seconds: float, ask: Callable[[], Any]) -> Any:
  """Returns what `ask` returns; None if it raises, or does not return in time."""
  answers: list[Any] = []

  def run() -> None:
    with contextlib.suppress(Exception):
      answers.append(ask())

  thread = threading.Thread(target=run, name='ask', daemon=True)
  thread.start()
  thread.join(seconds)
  return answers[0] if answers else None


def delay_aborts() -> None:
  """Lets an abort take six seconds, in which the watchdog can say why.

  JAX aborts within 10 ms of process 0's end, from C++, without a name. Its own callback for that
  cannot be used from Python (std::bad_cast with jaxlib 0.10.2 and 0.11.2), and no Python code runs
  in a thread that aborts. But libc's sleep takes one integer, as a signal's handler does: it sleeps
  for SIGABRT = 6 seconds in that thread, returns, and the abort goes on.
  """
  libc = ctypes.CDLL(None)
  libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
  libc.signal(signal.SIGABRT, ctypes.cast(libc.sleep, ctypes.c_void_p))


class _JaxStore:
  """The store of `jax.distributed`."""

  def __init__(self, client: Any, address: str):
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
    except ConnectionRefusedError:  # its host answers: nothing listens there
      return True
    except OSError:
      return False
    return False


def coordination_store() -> Optional[Store]:
  """Returns the key-value store of `jax.distributed`, or None for a single process."""
  state = jax_internals.distributed_state()
  return _JaxStore(state.client, state.coordinator_address) if state.client else None


def exchange(value: Any) -> list[Any]:
  """Returns what every process passed, by process index. Uses no device, so XLA's flags stay open.

  All processes must call it the same number of times.

  Args:
    value: anything that JSON can hold.
  """
  state, key = jax_internals.distributed_state(), f't5x_gpu_exchange/{next(_rounds)}'
  state.client.key_value_set(f'{key}/{state.process_id}', json.dumps(value))
  values = [
    json.loads(state.client.blocking_key_value_get(f'{key}/{i}', _EXCHANGE_SECONDS * 1000))
    for i in range(state.num_processes)
  ]
  # Process 0 may end because of these values, and the store with it.
  state.client.wait_at_barrier(f'{key}/read', timeout_in_ms=_EXCHANGE_SECONDS * 1000)
  return values


def let_gloo_listen_on(host: str) -> None:
  """Makes gloo, the collectives of CPU devices, listen on this address; before JAX has devices.

  JAX does not hand gloo an address. It then takes the one of the host's own name: a network that
  the run does not need, or Debian's 127.0.1.1, which other hosts cannot reach.

  There is no public way to it. JAX makes gloo for runs on GPUs as well, which do not need it, so
  gloo keeps its own choice, and the log says so, where it does not take the address.
  """
  make = jax_internals.gloo_maker()
  if make is None:
    _log.info('This jaxlib has no make_gloo_tcp_collectives: gloo listens where it chooses.')
    return

  def make_on_host(*args: Any, **kwargs: Any) -> Any:
    try:
      return make(*args, **{'hostname': host, **kwargs})
    except (TypeError, RuntimeError) as e:  # another signature; no such address
      _log.warning('gloo cannot listen on %s, and chooses an address itself: %s', host, e)
      return make(*args, **kwargs)

  jax_internals.set_gloo_maker(make_on_host)
