"""All uses of private parts of JAX (0.10.2 to 0.12), each with the public API that is missing.

We know of no issue of jax-ml/jax unless one is named.
JAX is imported only when a function needs it: XLA's flags must be set before.
"""

import contextlib
import copy
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any, Optional, Protocol

_TUNED_KERNELS = 'xla_gpu_per_fusion_autotune_cache_dir'


class CoordinationClient(Protocol):
  """The key-value store and barriers of `jax.distributed`."""

  def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...
  def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...
  def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...
  def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


class CoordinationState(Protocol):
  """The processes of the run; without a client, this process is alone."""

  client: Optional[CoordinationClient]
  coordinator_address: str
  process_id: int
  num_processes: int


def backends_started() -> bool:
  """Returns whether JAX has initialized its devices, after which XLA's flags have no effect.

  Missing: a public query that does not initialize the devices, jax-ml/jax#23320.
  """
  bridge = sys.modules.get('jax._src.xla_bridge')
  return bridge is not None and bridge.backends_are_initialized()


def distributed_state() -> CoordinationState:
  """Returns the state of `jax.distributed`.

  Missing: a public client of its key-value store and barriers; `multihost_utils` exchanges arrays
  only, by a collective of all devices.
  """
  return _private('distributed').global_state


def gloo_maker() -> Optional[Callable[..., object]]:
  """Returns the function that makes the collectives of CPU devices; None if jaxlib has none.

  Missing: an argument of `jax.distributed.initialize` for the address on which gloo listens, next
  to `coordinator_bind_address`.
  """
  return getattr(getattr(_private('lib'), '_jax', None), 'make_gloo_tcp_collectives', None)


def set_gloo_maker(make: Callable[..., object]) -> None:
  """Replaces `gloo_maker`; before JAX has devices. Missing: as for `gloo_maker`."""
  _private('lib')._jax.make_gloo_tcp_collectives = make


def keep_folder_out_of_keys() -> None:
  """Keeps the folder of compiled programs out of their keys, so that a copy of it can be used.

  JAX lets XLA keep the kernels that it has tuned below the same folder, and before jax 0.12 the
  path of these was part of every key. Missing: the change of jax 0.12, for jax 0.10 and 0.11.
  """
  key = _private('cache_key')
  if f'--{_TUNED_KERNELS}' in key.xla_flags_to_exclude_from_cache_key:
    return
  hash_options = key._hash_serialized_compile_options

  def hash_without_path(hashed: object, options: Any, **how: bool) -> object:
    options = copy.deepcopy(options)
    setattr(options.executable_build_options.debug_options, _TUNED_KERNELS, '')
    return hash_options(hashed, options, **how)

  key._hash_serialized_compile_options = hash_without_path
  key.xla_flags_to_exclude_from_cache_key.append(f'--{_TUNED_KERNELS}')


def delete_unreadable_programs() -> None:
  """Deletes the file of a program that cannot be read, for example because a full disk cut it off.

  JAX warns and compiles then, but writes over no file: every later start would compile, too.
  Missing: a cache that replaces what it cannot read.
  """
  cache = _private('compilation_cache')
  if cache.get_executable_and_time.__module__ == __name__:
    return
  read = cache.get_executable_and_time

  def read_or_delete(cache_key: str, *args: Any, **more: Any) -> object:
    try:
      return read(cache_key, *args, **more)
    except OSError:
      raise  # of the file server, not of the file
    except Exception:
      with contextlib.suppress(Exception):  # the clients of gs:// and s3:// raise other exceptions
        (cache._cache._path / f'{cache_key}-cache').unlink()
      raise

  cache.get_executable_and_time = read_or_delete


def let_every_process_keep_programs() -> None:
  """Makes each process write what it compiles, not process 0 alone; for CPU devices.

  Their keys contain the process's own devices, so no process can use a program of process 0. On
  GPUs, keys are the same for all. Missing: an option.
  """
  compiler = _private('compiler')
  write = compiler._cache_write
  first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
  seen = {**vars(compiler), 'distributed': first}
  compiler._cache_write = types.FunctionType(write.__code__, seen, write.__name__)


def _private(name: str) -> types.ModuleType:
  return importlib.import_module(f'jax._src.{name}')
