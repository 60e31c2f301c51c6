"""Which flags and compile options the installed jaxlib accepts: tested in a child process, cached.

XLA ends the process if XLA_FLAGS has an unknown name or an unreadable value. Only XLA knows both,
so a child process that imports just jaxlib (0.3 s) tries them; it reports all unknown flags at
once. The answer is cached per jaxlib and question under ~/.cache/t5x_gpu (XDG_CACHE_HOME):
from the second start on it costs a millisecond.
"""

import dataclasses
import functools
import hashlib
import importlib.util
import json
import mmap
import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.runtime import machine
from t5x_gpu.runtime.machine import versions
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.json_schema import Fields, MapOf, read_json

CHILD_SECONDS = 60
_ACCEPTED = 'T5X_GPU_XLA_FLAGS_ACCEPTED'
_TRY_FLAGS = f'from jaxlib import xla_client as c; c.make_cpu_client(); print("{_ACCEPTED}")'
# The CPU compiler checks the name and type of every option, even of GPU options, then ignores them.
_TRY_OPTIONS = """
import json, sys
from jaxlib import xla_client as c
client = c.make_cpu_client()
devices = c.DeviceList(tuple(client.local_devices()[:1]))
scalar = 'tensor<f32>'
module = ('module @m { func.func public @main(%x: ' + scalar + ') -> ' + scalar +
          ' { return %x : ' + scalar + ' } }')
refused = {}
for name, value in json.loads(sys.argv[1]).items():
  options = c.CompileOptions()
  options.env_option_overrides = [(name, value)]
  try:
    client.compile_and_load(module, devices, options)
  except Exception as error:
    reason = str(error).split(': ', 1)[-1].splitlines()[0]
    refused[name] = '' if reason.startswith('No such compile option') else reason
print(json.dumps(refused))
"""


@dataclasses.dataclass(frozen=True)
class Installed:
  """The libraries that read the flags.

  Attributes:
    jaxlib: its version, None if it is not installed.
    library: the file that holds XLA.
    plugin: version of the CUDA plugin, None if there is none.
    plugin_library: the file that holds the XLA for GPUs.
  """

  jaxlib: Optional[str]
  library: Optional[pathlib.Path]
  plugin: Optional[str] = None
  plugin_library: Optional[pathlib.Path] = None

  def __str__(self) -> str:
    plugin = '' if self.plugin in (None, self.jaxlib) else f' with CUDA plugin {self.plugin}'
    return f'jaxlib {self.jaxlib}{plugin}'


@functools.cache
def installed() -> Installed:
  """Returns the installed jaxlib and CUDA plugin, without importing either."""
  spec = importlib.util.find_spec('jaxlib')
  if spec is None or not spec.submodule_search_locations:
    return Installed(None, None)
  folder = pathlib.Path(spec.submodule_search_locations[0])
  library = max([*folder.glob('*.so')], key=lambda path: path.stat().st_size, default=None)
  jaxlib = versions(['jaxlib']).get('jaxlib')
  plugins = importlib.util.find_spec('jax_plugins')
  for place in (plugins.submodule_search_locations or ()) if plugins else ():
    for path in sorted(pathlib.Path(place).glob('xla_cuda*/xla_cuda_plugin.so')):
      package = f'jax_{path.parent.name.removeprefix("xla_")}_pjrt'
      return Installed(jaxlib, library, versions([package]).get(package), path)
  return Installed(jaxlib, library)


def refused_flags(flags: Sequence[str], *, system: Optional[Installed] = None) -> dict[str, str]:
  """Returns flag -> reason for the flags with which XLA would not start.

  Args:
    flags: '--name=value' each.
    system: the installed libraries, found by default.
  """
  system = installed() if system is None else system
  if not flags or system.jaxlib is None:
    return {}
  refused = _cached(system, 'flags', list(flags), lambda: _refused_by_child(list(flags)))
  if refused is None:  # no child could be started: look for the names in the library's strings
    refused = {
      flag: f'not in {system}' for flag in flags if not _has_string(system.library, flag_name(flag))
    }
  if system.plugin not in (None, system.jaxlib):
    refused |= {
      flag: f'not in the CUDA plugin {system.plugin}'
      for flag in flags
      if not _has_string(system.plugin_library, flag_name(flag))
    }
  return {flag: reason or f'not in {system}' for flag, reason in refused.items()}


def refused_options(
  options: Mapping[str, object], *, system: Optional[Installed] = None
) -> dict[str, str]:
  """Returns name -> reason for the compile options that `.compile()` would reject.

  Args:
    options: as passed to `lowered.compile(compiler_options=...)`.
    system: the installed libraries, found by default.
  """
  system = installed() if system is None else system
  if not options or system.jaxlib is None:
    return {}
  refused = _cached(system, 'options', dict(options), lambda: _options_in_child(dict(options)))
  # Without a child nothing is known; a wrong option would only raise a Python error later.
  return {name: reason or f'not in {system}' for name, reason in (refused or {}).items()}


def flag_name(flag: str) -> str:
  """Returns 'xla_gpu_x' of '--xla_gpu_x=1'."""
  return flag.split('=', 1)[0].lstrip('-')


def _refused_by_child(flags: list[str]) -> Optional[dict[str, str]]:
  """Returns flag -> reason ('' for an unknown name), None if no child could be run."""
  accepted, errors = _flags_in_child(flags)
  if accepted is None:
    return None
  refused = {}
  unknown = re.search(r'Unknown flags? in XLA_FLAGS: (.*)', errors)
  if unknown:  # lists all of them
    names = {flag_name(word) for word in unknown.group(1).split() if word.startswith('-')}
    refused = {flag: '' for flag in flags if flag_name(flag) in names}
    flags = [flag for flag in flags if flag not in refused]
    accepted, errors = _flags_in_child(flags)
  if not accepted:  # XLA stops at the first unreadable value: try each flag alone
    for flag in flags:
      accepted, errors = _flags_in_child([flag])
      if not accepted:
        first = next((line for line in errors.splitlines() if line.startswith('E')), '')
        refused[flag] = (
          ''
          if 'Unknown flag' in errors
          else (first.split('] ', 1)[-1] or f'XLA ended a trial process at {flag}')
        )
  return refused


def _flags_in_child(flags: list[str]) -> tuple[Optional[bool], str]:
  done = _child(_TRY_FLAGS, flags=' '.join(flags))
  return None if done.problem else _ACCEPTED in done.output, done.errors


def _options_in_child(options: dict[str, object]) -> Optional[dict[str, str]]:
  """Returns name -> reason ('' for an unknown name), None if no child could be run."""
  done = _child(_TRY_OPTIONS, json.dumps(options))
  return json.loads(done.output) if done.code == 0 else None


def _child(code: str, *arguments: str, flags: str = '') -> machine.CommandResult:
  # The user's log level must not hide XLA's errors; -P: no module of the working folder.
  environ = {**os.environ, 'XLA_FLAGS': flags, 'TF_CPP_MIN_LOG_LEVEL': '0'}
  return machine.run_with_deadline(
    [sys.executable, '-P', '-c', code, *arguments], seconds=CHILD_SECONDS, environ=environ
  )


def _cached(system: Installed, kind: str, question: object, ask) -> Optional[dict[str, str]]:
  stamp = system.library.stat().st_mtime_ns if system.library else 0
  key = json.dumps([2, kind, str(system), str(system.library), stamp, question])
  path = cache_folder() / f'{hashlib.sha256(key.encode()).hexdigest()[:32]}.json'
  try:
    kept = read_json(path, Fields({'question': str, 'refused': MapOf(str)}))
    if kept['question'] == key:
      return kept['refused']
  except (OSError, ValueError):
    pass  # missing or not readable: ask again
  refused = ask()
  if refused is not None:
    try:  # atomic: the other processes of this host write the same file
      path.parent.mkdir(parents=True, exist_ok=True)
      text = json.dumps({'question': key, 'refused': refused})
      write_atomically(path, text, suffix=f'.{os.getpid()}.tmp')
    except OSError:
      pass  # A home that cannot be written to costs the child's half second at each start.
  return refused


def cache_folder() -> pathlib.Path:
  """Returns the folder of cached answers."""
  base = os.environ.get('XDG_CACHE_HOME') or os.path.join(os.path.expanduser('~'), '.cache')
  return pathlib.Path(base) / 't5x_gpu' / 'xla_flags'


def _has_string(library: Optional[pathlib.Path], name: str) -> bool:
  """Returns whether `name` is a C string of `library`; True for a library that cannot be read."""
  try:
    with open(library, 'rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
      return text.find(b'\0' + name.encode() + b'\0') >= 0
  except (OSError, TypeError, ValueError):
    return True
