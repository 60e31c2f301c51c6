"""Compiled programs: the cache of earlier starts, kept by JAX in a folder of the user, and errors.

On GPUs and on one CPU device the cache is on. On several CPU devices it is on only if the user has
set JAX_COMPILATION_CACHE_DIR, because jax 0.10.2 deadlocks there when it reads programs with
several mesh axes. JAX_ENABLE_COMPILATION_CACHE=false turns it off. Errors of the folder are
warnings: JAX then compiles. `compile_errors` turns a step that cannot be compiled into an error for
users.

Machines with different CPUs may share the folder: JAX's keys contain the instruction sets.

All processes must find the same programs. On GPUs they compile together: each tunes a part of the
kernels, and waits up to 24 hours for the others (XLA's xla/backends/autotuner/autotuner.cc). One
that finds the program tunes nothing. So the cache is off unless all processes see one folder.
"""

import collections
import contextlib
import logging
import os
import pathlib
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from typing import Optional

import jax
from jax import monitoring

from t5x_gpu.errors import ModelError, UserError, first_line
from t5x_gpu.runtime import distributed, shared_folder
from t5x_gpu.runtime.cluster import jax_internals
from t5x_gpu.runtime.cluster.agreement import who_text

_log = logging.getLogger(__name__)

_PREFIX = '/jax/compilation_cache/'
_REQUESTS, _HITS = 'compile_requests_use_cache', 'cache_hits'
_SAVED_SECONDS = 'compile_time_saved_sec'
_LOOK_SECONDS = 5.0  # if a file server is slower, this start compiles
_counts: collections.Counter = collections.Counter()
_is_listening = False


def default_folder(environ: Mapping[str, str]) -> pathlib.Path:
  """Returns the folder for compiled programs: $XDG_CACHE_HOME/t5x_gpu/xla, or below ~/.cache."""
  base = environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return pathlib.Path(base, 't5x_gpu', 'xla')


def start_cache(platform: str, *, num_devices: Optional[int], environ: Mapping[str, str]) -> None:
  """Turns the cache on if it is safe, and starts counting its hits; call it before any compile.

  All processes must call it.

  Args:
    platform: platform of the devices, 'gpu' or 'cpu'.
    num_devices: number of devices of all processes; None if unknown.
    environ: os.environ.
  """
  global _is_listening
  is_safe = platform == 'gpu' or num_devices == 1
  if cache_folder() is None and is_safe and jax.config.jax_enable_compilation_cache:
    wanted = default_folder(environ)
    problem = _problem_with(wanted)
    if problem:
      _log.warning(
        '%s cannot hold compiled programs (%s): every start compiles. Set '
        'JAX_COMPILATION_CACHE_DIR to another folder.',
        wanted,
        problem,
      )
    else:
      jax.config.update('jax_compilation_cache_dir', str(wanted))
  jax_internals.keep_folder_out_of_keys()
  jax_internals.delete_unreadable_programs()
  if distributed.members():
    _turn_off_unless_shared()
    if platform == 'cpu':
      jax_internals.let_every_process_keep_programs()
  if not _is_listening:
    _is_listening = True
    monitoring.register_event_listener(_count)
    monitoring.register_event_duration_secs_listener(_count_seconds)
  _counts.clear()


def cache_folder() -> Optional[str]:
  """Returns the folder in use; None if the cache is off."""
  return (jax.config.jax_enable_compilation_cache or None) and jax.config.jax_compilation_cache_dir


def cache_line() -> str:
  """Returns how many programs were read instead of compiled, for the log; '' without a cache.

  All processes must call it. The text is process 0's, and names a process that compiled more.
  """
  counts = distributed.gather_json([_counts[_HITS], _counts[_REQUESTS]])
  hits, requests = counts[0]
  if cache_folder() is None or not requests:
    return ''
  saved = f', which saved {_counts[_SAVED_SECONDS]:.0f} s' if hits else ''
  line = f'compiled programs: {hits} of {requests} read from {cache_folder()}{saved}'
  compiled = [needed - read for read, needed in counts]
  slowest = compiled.index(max(compiled))
  if compiled[slowest] > compiled[0]:
    line += f'; process {slowest} read {counts[slowest][0]} of {counts[slowest][1]}'
  return line


def _turn_off_unless_shared() -> None:
  """Turns the cache off, on all processes, unless all see one folder."""
  text = cache_folder()
  jax.config.update('jax_compilation_cache_dir', None)  # until all processes agree
  is_url = text is not None and '://' in text
  folder = None if text is None or is_url else pathlib.Path(text)
  if folder is not None:
    with contextlib.suppress(OSError):
      folder.mkdir(mode=0o700, parents=True, exist_ok=True)
  with shared_folder.marked(folder) as name:
    has = is_url or folder is not None and shared_folder.sees(folder, name, seconds=_LOOK_SECONDS)
    found = distributed.gather_json([text, has])
  without = [process for process, (_, has) in enumerate(found) if not has]
  if not without:
    jax.config.update('jax_compilation_cache_dir', text)
    return
  text = found[0][0]
  if text is not None and distributed.is_main_process():
    who = who_text(without, distributed.hostnames())
    _log.warning(
      'Every start compiles: %s. Set JAX_COMPILATION_CACHE_DIR to a folder that all hosts share.',
      f'process 0 cannot write to {text}'
      if 0 in without
      else f'{who} cannot see what process 0 writes to {text}',
    )


def _problem_with(path: pathlib.Path) -> str:
  """Creates the folder, readable for its user only; returns why it is not writable, or ''."""
  try:
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path) as f:
      f.write(b'x')
  except OSError as e:
    return e.strerror or str(e)
  return ''


def _count(event: str, **_: object) -> None:
  _counts[event.removeprefix(_PREFIX)] += 1


def _count_seconds(event: str, seconds: float, **_: object) -> None:
  if event == _PREFIX + _SAVED_SECONDS:
    _counts[_SAVED_SECONDS] += max(seconds, 0.0)


@contextlib.contextmanager
def compile_errors(device_kind: str) -> Iterator[None]:
  """Context that turns errors of lowering or compiling a step into ModelError.

  Args:
    device_kind: kind of the devices to compile for.
  Raises:
    ModelError: a kernel cannot be lowered, or XLA cannot compile the step.
  """
  try:
    yield
  except UserError:
    raise
  except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as e:
    if 'RESOURCE_EXHAUSTED' in str(e):
      raise
    reason = textwrap.shorten(first_line(e), 160, placeholder=' ...')
    raise ModelError(
      f'The training step cannot be compiled for {device_kind}: {reason}',
      fix='If it names tiles, let the tokens of a GPU be a multiple of 128: change the lengths or '
      "the batch. If it names a kernel, set TransformerConfig.attention = 'chunked'.",
      parameters=('TASK_FEATURE_LENGTHS', 'BATCH_SIZE', 'TransformerConfig.attention'),
      docs='plan.md#a-gpu-that-you-do-not-have',
    ) from e
