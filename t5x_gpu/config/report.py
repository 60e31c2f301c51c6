"""Shows the origins of values: on the screen, in the run's files, in `explain` and `diff`."""

import difflib
import errno
import functools
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional, Union

import rich.console
import rich.text

from t5x_gpu.config import gin_text
from t5x_gpu.config.gin_text import REQUIRED, GinFiles
from t5x_gpu.config.provenance import DEFAULT, Provenance, Setting
from t5x_gpu.errors import ConfigError, did_you_mean, listed
from t5x_gpu.storage.files import atomic_write, set_aside_damaged, write_atomically
from t5x_gpu.storage.json_schema import read_bytes

CONFIG, ORIGINS = 'config.gin', 'config_origins.txt'
_VALUE_WIDTH = 60  # longer values are cut in the printed table, never in files
_MOST_CHANGES = 15  # changes on the first screen of a run
_MOST_NAMES = 20  # names of further changes on the first screen


def print_table(provenance: Provenance, *, console: Optional[rich.console.Console] = None) -> None:
  """Prints every value and its origin; plain text unless the console is a terminal.

  Args:
    provenance: provenance of the configuration.
    console: stdout if None.
  """
  console = console or rich.console.Console(highlight=False)
  rows = _columns((*provenance.settings, *provenance.defaults), width=_VALUE_WIDTH)
  for expression, origin, overridden in rows:
    line = rich.text.Text.assemble(
      (expression, 'bold'),
      '   ',
      (origin, 'cyan'),
      *([('   ' + overridden, 'dim')] if overridden.strip() else []),
    )
    console.print(
      line.plain.rstrip() if not console.is_terminal else line,
      soft_wrap=True,
      markup=False,
      highlight=False,
    )


def print_changes(
  provenance: Provenance,
  *,
  files: GinFiles,
  gin_files: Sequence[str] = (),
  model_dir: str,
  console: Optional[rich.console.Console] = None,
) -> None:
  """Prints the values that the user's gin files and flags change: old, new, and origin.

  Flags come first, then the gin files of the command line (last file first), then included files;
  settings of a file are in file order. If there are many changes, prints only names of the last.

  Args:
    provenance: provenance of the configuration.
    files: finds gin files, and distinguishes the package's files from the user's.
    gin_files: gin files of the command line.
    model_dir: folder that the run writes all values to.
    console: stdout if None.
  """
  console = console or rich.console.Console(highlight=False)
  is_users = functools.cache(lambda file: file != DEFAULT and not files.is_shipped(file))
  changes = []
  for setting in provenance.settings:
    # If the user sets a value twice, show the value before the first change.
    old = next(
      (
        value
        for value, origin in setting.overrides
        if value != setting.value or not is_users(_file(origin))
      ),
      setting.value,
    )
    if old != setting.value and is_users(_file(setting.origin)):
      changes.append((setting, _cut('not set' if old == repr(REQUIRED) else old)))
  changes.sort(key=lambda change: _rank(change[0].origin, gin_files))
  rows = [
    (f'{setting.key}: {old} -> {_cut(setting.value)}', setting.origin)
    for setting, old in changes[:_MOST_CHANGES]
  ]
  width = max((len(row[0]) for row in rows), default=0)
  total = len(provenance.settings) + len(provenance.defaults)
  text = [
    f'configuration: {len(changes) or "nothing"} changed; all {total} values, and who set '
    f'them, in {os.path.join(model_dir, ORIGINS)}',
    *(f'  {change.ljust(width)}   {origin}' for change, origin in rows),
  ]
  if rest := [setting for setting, _ in changes[_MOST_CHANGES:]]:
    where = ', '.join(dict.fromkeys(_file(setting.origin) for setting in rest))
    names = listed([setting.key for setting in rest], _MOST_NAMES)
    text.append(f'  and {len(rest)} more, set in {where}: {", ".join(names)}')
  for line in text:
    console.print(line, soft_wrap=True, markup=False, highlight=False)


def _rank(origin: str, gin_files: Sequence[str]) -> tuple[int, str, int]:
  """Returns the sort key of a change: flags, the last gin file, ..., the first, included files."""
  if origin.startswith('--'):
    return 0, '', 0
  file, line = _file(origin), origin.rsplit(':', 1)[-1]
  given = [os.path.abspath(name) for name in reversed(gin_files)]
  path = os.path.abspath(file)
  rank = given.index(path) if path in given else len(given)
  return rank + 1, file, int(line) if line.isdecimal() else 0


def _file(origin: str) -> str:
  """Returns 'a.gin' of 'a.gin:7' and of 'scope/Class.parameter, a.gin:7'."""
  return origin.rsplit(', ', 1)[-1].rsplit(':', 1)[0]


def _cut(text: str, width: int = _VALUE_WIDTH) -> str:
  return text if len(text) <= width else text[: width - 3] + '...'


def _columns(
  settings: Sequence[Setting], *, width: Optional[int] = None
) -> list[tuple[str, str, str]]:
  """Returns (expression, origin, overridden) padded to columns, expressions cut at `width`."""
  rows = [
    (_cut(s.expression, width or len(s.expression)), s.origin, s.overridden) for s in settings
  ]
  widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
  return [(a.ljust(min(widths[0], _VALUE_WIDTH)), b.ljust(widths[1]), c) for a, b, c in rows]


def lines(settings: Sequence[Setting]) -> list[str]:
  """Returns one uncut line per setting: `key = value   origin   overrides ...`."""
  return ['   '.join(row).rstrip() for row in _columns(settings)]


def write(provenance: Provenance, model_dir: Union[str, os.PathLike]) -> list[str]:
  """Writes config.gin and config_origins.txt; returns a line for each change since the last run.

  config.gin repeats the run. An earlier, different config.gin is kept as config_<N>.gin, with its
  origins. Files are replaced atomically: a killed process leaves the old or the new file. A damaged
  file is renamed with a warning.

  Raises:
    ConfigError: the folder cannot be written.
  """
  folder = pathlib.Path(model_dir)
  origins = [
    *lines(provenance.settings),
    '',
    '# Defaults that nothing sets:',
    *lines(provenance.defaults),
    '',
  ]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    changes = _keep_previous(folder, provenance.config)
    write_atomically(folder / CONFIG, provenance.config, sync=True)
    write_atomically(folder / ORIGINS, '\n'.join(origins), sync=True)
  except OSError as e:
    is_full = e.errno in (errno.ENOSPC, errno.EDQUOT)
    raise ConfigError(
      f'{folder} cannot be written: {e.strerror or e}.',
      fix=('Free some space there, or give' if is_full else 'Give')
      + ' a folder that you can write to: --gin.MODEL_DIR=FOLDER',
      parameters=('train.model_dir',),
    ) from e
  return changes


def _keep_previous(folder: pathlib.Path, config: str) -> list[str]:
  """Copies an earlier, different config.gin to config_<N>.gin; returns the changes."""
  old, origins = _text_of(folder / CONFIG), _text_of(folder / ORIGINS)
  if old is None or old == config:
    return []
  numbers = sorted(
    int(match[1])
    for name in os.listdir(folder)
    if (match := re.fullmatch(r'config_(\d+)\.gin', name))
  )
  # If a run was killed after this copy, the copy already exists.
  if not numbers or _text_of(folder / f'config_{numbers[-1]}.gin') != old:
    number = numbers[-1] + 1 if numbers else 1
    for name, text in ((ORIGINS, origins), (CONFIG, old)):
      if text is not None:
        stem, suffix = os.path.splitext(name)
        kept = folder / f'{stem}_{number}{suffix}'
        with atomic_write(kept) as new:
          shutil.copy2(folder / name, new)
  return changes(old, config)


def _text_of(path: pathlib.Path) -> Optional[str]:
  """Returns the text of a file; None if it is missing, or if it was damaged and renamed."""
  if not os.path.lexists(path):
    return None
  try:
    return read_bytes(path).decode('utf-8')
  except (OSError, ValueError) as e:
    set_aside_damaged(path, e)
    return None


def changes(old: str, new: str) -> list[str]:
  """Returns `KEY: old -> new` for the values that differ between two config.gin."""
  try:
    before, after = (dict(_texts(text)) for text in (old, new))
  # Edited by hand, or damaged: show the lines that differ.
  except (ConfigError, ValueError, SyntaxError, RecursionError, MemoryError):
    return list(
      difflib.unified_diff(old.splitlines(), new.splitlines(), 'before', 'now', lineterm='', n=0)
    )
  return [
    f'{key}: {before.get(key, "not set")} -> {after.get(key, "not set")}'
    for key in sorted(before.keys() | after.keys())
    if before.get(key) != after.get(key)
  ]


def _texts(config: str) -> Iterator[tuple[str, str]]:
  for s in gin_text.read(config, shown=CONFIG):
    if hasattr(s, 'arg_name'):
      scope = f'{s.scope}/' if s.scope else ''
      yield scope + s.selector + (f'.{s.arg_name}' if s.arg_name else ''), repr(s.value)


def explain(provenance: Provenance, name: str) -> list[str]:
  """Returns lines that show the origin of `name`, its macros, and the settings that use it.

  Raises:
    ConfigError: this run has no setting named `name`; suggests the closest names.
  """
  found = provenance.find(name)
  everything = (*provenance.settings, *provenance.defaults)
  if not found:
    names = sorted(
      {n for s in everything for n in (s.key, s.unscoped, s.unscoped.rsplit('.', 1)[-1])}
    )
    # BATCHSIZE means a macro, batchsize a parameter.
    hint = did_you_mean(name, [n for n in names if n.isupper() == name.isupper()]) or did_you_mean(
      name, names
    )
    raise ConfigError(
      f'This run has no setting {name!r}.{hint}',
      fix='Name a macro, Class.parameter, scope/Class.parameter or part of one; '
      'python -m t5x_gpu.config show --gin_file=... lists all.',
    )
  result = []
  for setting in found:
    result += _explained(setting, provenance)
    users = [s for s in provenance.settings if setting.key in _macros(s)]
    result += [f'  used by {s.key}   {s.origin}' for s in users]
  return result


def _explained(setting: Setting, provenance: Provenance, depth: int = 0) -> list[str]:
  indent = '  ' * depth
  result = [f'{indent}{setting.key} = {setting.text}   {setting.origin}']
  result += [f'{indent}  overrides {value}   {origin}' for value, origin in setting.overrides]
  for name in _macros(setting):
    for macro in (s for s in provenance.settings if s.key == name):
      result += _explained(macro, provenance, depth + 1)
  return result


def _macros(setting: Setting) -> list[str]:
  if setting.origin == DEFAULT:
    return []
  found = gin_text.instances(gin_text.parse_value(setting.text), gin_text.Macro)
  return [macro.name for macro in found]


def diff(a: Provenance, b: Provenance) -> list[str]:
  """Returns `KEY: value (origin) -> value (origin)` for values that differ between two runs."""

  def by_key(settings: Iterable[Setting]) -> dict[str, Setting]:
    return {s.key: s for s in settings}

  def shown(setting: Optional[Setting]) -> str:
    return f'{setting.value} ({setting.value_origin})' if setting else 'not used'

  left, right = (by_key((*p.defaults, *p.settings)) for p in (a, b))
  return [
    f'{key}: {shown(left.get(key))} -> {shown(right.get(key))}'
    for key in sorted(left.keys() | right.keys())
    if key not in left or key not in right or left[key].value != right[key].value
  ]
