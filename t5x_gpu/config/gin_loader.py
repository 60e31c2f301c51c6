"""Loads gin files and command-line bindings into a checked configuration: `LoadedConfig`."""

import copy
import dataclasses
import os
import re
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Optional, TypeVar, Union

import gin

from t5x_gpu.config import checks, gin_names, provenance
from t5x_gpu.config.gin_text import REQUIRED, GinFiles
from t5x_gpu.config.reader import Bindings, Call, Reader
from t5x_gpu.config.t5x import translation as t5x
from t5x_gpu.errors import ConfigError, Problem

ENTRY = 't5x_gpu.train.train'
Part = TypeVar('Part')


@dataclasses.dataclass(frozen=True)
class LoadedConfig:
  """A configuration that passed all checks. gin holds one at a time.

  Attributes:
    entry: the entry points that it was checked for.
    provenance: every value, its origin, and the values it overrides.
    notes: remarks to print, not errors.
    bindings: all bindings, in order.
  """

  entry: tuple[str, ...]
  provenance: provenance.Provenance
  notes: tuple[str, ...]
  bindings: Bindings

  def arguments(self, entry: str = '', *, only: Optional[Collection[str]] = None) -> dict[str, Any]:
    """Returns the keyword arguments of the entry function, defaults included.

    gin calls the constructors that values refer to.

    Args:
      entry: 'module.function'; the first entry point of `load` if ''.
      only: the parameters that the caller needs; None for all. Others are not built, and need not
        be set.
    Raises:
      ConfigError: required values are not set; lists all, with how to set each of them. Errors of
        constructors pass through.
    """
    if provenance.current() is not self.provenance:
      raise ConfigError(
        'Another configuration has been loaded since this one.',
        fix='Call arguments() before the next load().',
      )
    call = _entry_call(entry or self.entry[0])
    if call is None:
      raise ConfigError(f'No gin file configures {entry or self.entry[0]}.')
    if missing := checks.missing(self.bindings, call, only=only):
      raise ConfigError('Required values are not set', problems=missing)
    bound = gin.get_bindings(call.selector, resolve_references=False)
    return {
      name: copy.deepcopy(bound[name]) if name in bound else parameter.default
      for name, parameter in gin_names.parameters(call.selector).items()
      if only is None or name in only
    }


def configured(loaded: LoadedConfig, part: type[Part], *, entry: str = ENTRY) -> Part:
  """Returns `part` (`Run`, or a smaller dataclass) with the values that gin sets for `entry`.

  Parameters of `entry` that `part` does not have are neither built nor required.

  Raises:
    ConfigError: required values are not set. Errors of the constructors that gin calls.
  """
  names = [field.name for field in dataclasses.fields(part)]
  return part(**loaded.arguments(entry, only=names))


def load(
  gin_files: Sequence[Union[str, os.PathLike]],
  *,
  bindings: Sequence[str] = (),
  computed: Mapping[str, str] = types.MappingProxyType({}),
  search_paths: Sequence[str] = (),
  entry: Union[str, Sequence[str]] = ENTRY,
  read_as_data: Mapping[str, Collection[str]] = types.MappingProxyType({}),
  placeholders: Mapping[str, str] = types.MappingProxyType({}),
) -> LoadedConfig:
  """Returns the configuration of `gin_files`, then `bindings`, after every check of `checks`.

  Forgets earlier configurations, including gin's.

  Args:
    gin_files: paths; see GinFiles for the searched folders.
    bindings: 'KEY=VALUE' as after `--gin.`; text may be unquoted.
    computed: computed 'KEY=VALUE' -> its origin, `provenance.OF_DATA`; `bindings` take precedence.
    search_paths: more folders to search for gin files.
    entry: the function that the configuration is for, or several: 'module.function'. Bindings that
      are not reached from them are unused, which is an error.
    read_as_data: gin file that must not run any code -> the macros and arguments of `train` to take
      from it; see `gin_text.keep_data_only`.
    placeholders: macro -> value in gin, for required macros that are not set and irrelevant here.
  Raises:
    ConfigError: all problems at once, each with file:line and suggestions.
  """
  unknown = read_as_data.keys() - set(map(os.fspath, gin_files))
  if unknown:  # a file with a different spelling would run code
    raise ValueError(f'read_as_data names {sorted(unknown)}, which are not among gin_files.')
  gin_names.forget()
  provenance.forget()
  _make_working_directory_importable()
  entries = (entry,) if isinstance(entry, str) else tuple(entry)
  reader = Reader(GinFiles(search_paths), read_as_data=read_as_data)
  gin_files = [os.fspath(name) for name in gin_files]
  trusted = [name for name in gin_files if name not in read_as_data]
  theirs = t5x.of_t5x(trusted, search_paths=search_paths)
  if theirs:
    translated = t5x.translate(
      theirs, bindings=bindings, search_paths=search_paths, script=t5x.script_of(entries)
    )
    if translated.problems:
      raise ConfigError(
        "T5X's gin files ask for things that do not exist here",
        problems=translated.problems,
        docs='from_t5x.md',
      )
    reader.read_text(translated.text, shown='translation', origins=translated.origins)
    reader.notes += translated.notes
    bindings = translated.ours
  for name in gin_files:
    if name not in theirs:
      reader.read_file(name, asked_at='')
  for text, origin in computed.items():
    reader.read_command_line([text], origin=origin)
  reader.read_command_line(bindings)
  unset = {b.key for b in Bindings(reader.bindings).final() if b.is_macro and b.value == REQUIRED}
  reader.read_command_line([f'{k}={v}' for k, v in placeholders.items() if k in unset])
  bound = Bindings(reader.bindings)
  problems = list(reader.problems)
  if not reader.unreadable:
    calls = [_entry_call(name) for name in entries]
    roots = [*calls, *checks.decorated_calls(bound)]
    unbound = [name for name, call in zip(entries, calls) if call is None]
    problems += [
      Problem(
        f'No gin file configures {name}.',
        'Include one of gin_configs/runs/, or import its module and bind its parameters.',
      )
      for name in unbound
    ]
    if not unbound:
      problems += checks.problems(bound, roots, lost=reader.lost)
  if problems:
    error = ConfigError('The configuration cannot be used', problems=problems)
    error.docs = reader.docs
    raise error
  used = bound.used(bound.calls(roots))
  gin_names.bind((b.scope, b.selector, b.arg, b.value) for b in used)
  config = gin_names.config_text(reader.names)
  report, notes = provenance.collect(bound, calls, used=used, config=config)
  return LoadedConfig(entries, report, (*reader.notes, *notes), bound)


def configures(gin_files: Sequence[str], entry: str, *, search_paths: Sequence[str] = ()) -> bool:
  """Returns whether gin files, ours or T5X's, configure `entry`; runs no code.

  Does not read the includes of our files. Passes over files that cannot be read: `load` reports the
  error.
  """
  try:
    if script := t5x.configured_script(gin_files, search_paths=search_paths):
      return script == t5x.script_of([entry])
    paths = map(GinFiles(search_paths).find, gin_files)
    texts = [path.read_text('utf-8', 'replace') for path in paths]
  except (ConfigError, OSError):
    return False
  # A binding or a block: comments and strings name the entry, too.
  binding = rf'^(?:[\w./]*[./])?{entry.rpartition(".")[2]}\s*[.:]'
  return any(re.search(binding, text, re.MULTILINE) for text in texts)


def _make_working_directory_importable() -> None:
  """Makes users' modules importable from console scripts, as with `python -m`."""
  if '' not in sys.path and os.getcwd() not in sys.path:
    sys.path.insert(0, os.getcwd())


def _entry_call(entry: str) -> Optional[Call]:
  """Returns the call of the entry function, or None if no gin file names it."""
  try:
    selector = gin_names.selector_of(entry)
  except Exception as e:  # A user's module may raise anything on import.
    raise ConfigError(f'The entry point {entry} cannot be imported: {type(e).__name__}: {e}') from e
  return selector and Call(selector, (), evaluated=True)
