"""The record of a run in its files: metrics, ledger, configuration, checkpoints, evaluations.

Only reads files, without a lock or a GPU, so it works on a run that another machine is training
right now. Damaged parts are skipped, counted and named. `differences` compares the configurations
of several runs.
"""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, TypeVar

from t5x_gpu.checkpoint import run_files
from t5x_gpu.checkpoint.model_dir import UNREADABLE, ModelDir, as_model_dir, error_line
from t5x_gpu.checkpoint.run_files import copy_for_report, temporary_folder
from t5x_gpu.checkpoint.run_lock import LOCK
from t5x_gpu.config.provenance import OF_DATA, OF_RUN
from t5x_gpu.config.report import CONFIG, ORIGINS, changes
from t5x_gpu.errors import AccessError, ConfigError, did_you_mean, listed, number_ranges
from t5x_gpu.metrics import goodput
from t5x_gpu.metrics.goodput import GOODPUT
from t5x_gpu.metrics.writers import METRICS, parse_line
from t5x_gpu.storage.json_schema import Json, JsonObject, parse_json, read_bytes
from t5x_gpu.storage.paths import AnyPath, as_path

# `key = value (%MACRO)   origin   overrides ...`, as `config.report` writes it.
_LINE = re.compile(
  r'(?P<key>[^\s=]+) = (?P<value>.*?)(?: \((?P<through>[^()\s]*%\w+[^()]*)\))?\s{3,}'
  rf'(?P<origin>\S.*?:\d+|--gin\.\S+|default|{OF_DATA}|{OF_RUN})'
  r'(?:\s{3,}overrides (?P<overrides>.*))?\s*'
)
IN_EVERY_RUN = ('MODEL_DIR', 'train.model_dir')  # always differs, which is of no interest


@dataclasses.dataclass(frozen=True)
class ReportedSetting:
  """A value of a run.

  Attributes:
    value: value as gin text.
    through: the macro that sets it, '%BATCH_SIZE', or ''.
    origin: 'my.gin:7', '--gin.BATCH_SIZE', 'default', 'the training data', or '' if unknown.
    overrides: the overridden value, or ''.
  """

  value: str
  through: str = ''
  origin: str = ''
  overrides: str = ''

  @property
  def is_macro_of(self) -> str:
    return self.through.removeprefix('%')


def read_settings(folder: pathlib.Path, problems: list[str]) -> dict[str, ReportedSetting]:
  """Returns key -> value and origin, from config_origins.txt; empty if there is none."""
  text = _text(folder / ORIGINS, problems)
  if text is None:
    if (folder / CONFIG).exists():
      problems.append(f'There is no {ORIGINS}: the configuration is not shown.')
    return {}
  found = {}
  for line in text.splitlines():
    if match := _LINE.fullmatch(line):
      values = {k: v or '' for k, v in match.groupdict().items()}
      key = values.pop('key')
      found[key] = ReportedSetting(**values)
  return found


def _text(path: pathlib.Path, problems: list[str]) -> Optional[str]:
  return _read(path, lambda file: read_bytes(file).decode('utf-8'), problems)


def earlier_changes(folder: pathlib.Path, problems: list[str]) -> list[list[str]]:
  """Returns, for each earlier configuration of the run, its changes as `KEY: old -> new`."""
  numbers = sorted(
    int(match[1])
    for path in folder.glob('config_*.gin')
    if (match := re.fullmatch(r'config_(\d+)\.gin', path.name))
  )
  texts = [_text(folder / f'config_{n}.gin', problems) for n in numbers]
  known = [text for text in (*texts, _text(folder / CONFIG, problems)) if text is not None]
  return [changes(old, new) for old, new in zip(known, known[1:])]


def differences(
  runs: Sequence[Mapping[str, ReportedSetting]],
) -> list[tuple[str, list[Optional[ReportedSetting]]]]:
  """Returns the keys whose values differ, with the setting of each run or None.

  A parameter that differs only because of its macro is left out.
  """
  known = [run for run in runs if run]
  different = {
    key
    for run in known
    for key in run
    if key not in IN_EVERY_RUN and len({r[key].value if key in r else None for r in known}) > 1
  }

  def follows(key: str) -> bool:
    settings = [run[key] for run in known if key in run]
    return all(s.through and s.is_macro_of in different for s in settings)

  keys = sorted((k for k in different if not follows(k)), key=lambda k: (not k.isupper(), k))
  return [(key, [run.get(key) for run in runs]) for key in keys]


Records = list[JsonObject]
_T = TypeVar('_T')
_EVAL_FOLDER = 'eval'
_MOST_NAMED = 10  # damaged lines that a message names
_NO_METRICS = (
  f'There is no {METRICS}, so losses and speed are not shown. If it was lost, copy it into the '
  "folder again; a run writes it if LOGGERS has 'jsonl'."
)


@dataclasses.dataclass(frozen=True)
class RunRecord:
  """The contents of MODEL_DIR.

  Attributes:
    name: the shortest end of the path that distinguishes it from the report's other runs.
    folder: folder of its small files.
    metrics: contents of metrics.jsonl, by step.
    accounts: how the wall time was spent; None for a run without a ledger.
    settings: key -> value and origin.
    earlier: a list of changes for each earlier configuration.
    checkpoints: committed steps, ascending.
    manifest: manifest of the latest readable checkpoint; empty if there is none.
    evaluations: name -> records of `python -m t5x_gpu.eval`.
    samples: texts that the run wrote.
    problems: sentences about missing or unreadable files.
  """

  name: str
  folder: pathlib.Path
  metrics: Records
  accounts: Optional[goodput.Accounts]
  settings: Mapping[str, ReportedSetting]
  earlier: Sequence[list[str]]
  checkpoints: Sequence[int]
  manifest: Json
  evaluations: Mapping[str, Records]
  samples: Records
  problems: Sequence[str]

  @functools.cached_property
  def facts(self) -> Json:
    """The ledger's facts about the last start: 'devices', 'total_steps', ..."""
    return self.accounts.processes[-1].process.facts if self.accounts else {}

  @property
  def total_steps(self) -> Optional[int]:
    """The last step of the run; None if no file records it."""
    found = self.facts.get('total_steps')
    if found is None and (setting := self.settings.get('train.total_steps')):
      found = int(setting.value) if setting.value.isdecimal() else None
    return found if isinstance(found, int) else None

  @property
  def step(self) -> Optional[int]:
    """The last finished step that is recorded; without metrics and ledger, the last saved step."""
    steps = [self.metrics[-1]['step']] if self.metrics else []
    if self.accounts and (step := self.accounts.processes[-1].process.last.step) is not None:
      steps.append(step)
    return max(steps or self.checkpoints, default=None)

  def series(self, key: str) -> list[tuple[float, float]]:
    """Returns (step, value) of a metric, ascending; the last record of each step counts."""
    return sorted({r['step']: float(r[key]) for r in self.metrics if key in r}.items())

  def last(self, key: str) -> Optional[float]:
    """Returns the last value of a metric."""
    return next((r[key] for r in reversed(self.metrics) if key in r), None)


def read_run(
  model_dir: ModelDir | str | os.PathLike, *, name: str = '', copies: Optional[pathlib.Path] = None
) -> RunRecord:
  """Returns the record of a run.

  Args:
    model_dir: a folder, or an address in object storage, from which the small files are copied.
    name: name for the record; '' for the path as given.
    copies: folder for files copied from object storage; None for a temporary folder.
  Raises:
    ConfigError: there is no such folder, or it is not the folder of a run.
  """
  opened = as_model_dir(model_dir)
  path, shown = opened.path, str(opened.path if opened is model_dir else model_dir)
  if isinstance(path, pathlib.Path):
    check_folder(path, shown=shown)
    folder = path
  else:
    folder = copies or temporary_folder()
    copy_for_report(path, folder)
  problems: list[str] = []
  ledger = _read(folder / GOODPUT, goodput.read_ledger, problems)
  if ledger and ledger.damaged:
    problems.append(_damaged_text(GOODPUT, ledger.damaged))
  metrics = _records(folder / METRICS, parse_line, problems)
  checkpoints, manifest = _checkpoints(opened, problems)
  # A run creates this file before its first step.
  if checkpoints and not (folder / METRICS).exists():
    problems.append(_NO_METRICS)
  has_begun = any((folder / name).exists() for name in (CONFIG, LOCK, GOODPUT, METRICS))
  if not has_begun and not checkpoints:
    raise _not_a_run(folder, shown)
  return RunRecord(
    name=name or shown,
    folder=folder,
    metrics=sorted(metrics, key=lambda record: record['step']),
    accounts=goodput.accounts_of(ledger) if ledger and ledger.runs else None,
    settings=read_settings(folder, problems),
    earlier=earlier_changes(folder, problems),
    checkpoints=checkpoints,
    manifest=manifest,
    evaluations={
      file.stem: sorted(_records(file, parse_line, problems), key=lambda record: record['step'])
      for file in sorted((folder / _EVAL_FOLDER).glob('*.jsonl'))
    },
    samples=_records(
      folder / run_files.SAMPLES, functools.partial(parse_json, schema=run_files.SCHEMA), problems
    ),
    problems=problems,
  )


def read_runs(model_dirs: Sequence[str]) -> list[RunRecord]:
  """Returns the records of several runs, with short names that differ.

  Args:
    model_dirs: folders, or addresses in object storage.
  Raises:
    ConfigError: a folder is named twice; also the errors of `read_run`.
  """
  _check_named_once(model_dirs)
  parts = [str(as_path(name)).rstrip('/').split('/') for name in model_dirs]
  lengths = range(1, max(map(len, parts)) + 1)
  length = next(n for n in lengths if len({'/'.join(p[-n:]) for p in parts}) == len(parts))
  return [
    read_run(name, name='/'.join(part[-length:]) if len(parts) > 1 else '')
    for name, part in zip(model_dirs, parts)
  ]


def _check_named_once(model_dirs: Sequence[str]) -> None:
  """Raises ConfigError if a folder is named twice: charts identify runs by name."""
  seen: dict[AnyPath, str] = {}
  for name in model_dirs:
    path = as_path(name)
    path = path.resolve() if isinstance(path, pathlib.Path) else path
    if path in seen:
      twice = f'{name!r} is given twice.'
      same = f'{seen[path]!r} and {name!r} are the same folder.'
      raise ConfigError(
        twice if name == seen[path] else same, fix='Name each MODEL_DIR once.', docs='report.md'
      )
    seen[path] = name


def check_folder(path: pathlib.Path, *, shown: str) -> None:
  """Raises ConfigError, with the closest names, unless `path` is a folder."""
  if path.is_dir():
    return
  if path.exists():
    raise ConfigError(
      f'{shown!r} is a file; a MODEL_DIR is a folder.',
      fix=f'Name its folder: {path.parent}',
      docs='report.md',
    )
  existing = path.parent
  while not existing.is_dir():
    existing = existing.parent
  wanted = path.relative_to(existing).parts[0]
  near = sorted(p.name for p in existing.iterdir() if p.is_dir() and not p.name.startswith('.'))
  what = f'There is no folder {shown!r}.{did_you_mean(wanted, near)}'
  there = f'Folders in {existing}: {", ".join(listed(near, 8))}.' if near else ''
  raise ConfigError(what, fix=there or 'Name the MODEL_DIR of a run.', docs='report.md')


def _not_a_run(folder: pathlib.Path, shown: str) -> ConfigError:
  inside = sorted(p.parent.name for p in folder.glob(f'*/{METRICS}'))
  if inside:
    fix = f'Its subfolders are runs: {", ".join(f"{shown}/{name}" for name in listed(inside, 8))}'
  else:
    fix = f'Name a MODEL_DIR: a run writes {METRICS} there after its first step.'
  return ConfigError(
    f'{shown!r} is not the folder of a run: it has no {CONFIG}, no {METRICS} and no checkpoint.',
    fix=fix,
    docs='report.md',
  )


def _read(
  path: pathlib.Path, read: Callable[[pathlib.Path], _T], problems: list[str]
) -> Optional[_T]:
  """Returns the result of `read` on a file; None if the file is missing or unreadable."""
  try:
    return read(path)
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as e:
    problems.append(f'{path.name} cannot be read: {e}.')
    return None


def _records(
  path: pathlib.Path, parse: Callable[[bytes], Optional[JsonObject]], problems: list[str]
) -> Records:
  """Returns the records of a file of JSON lines."""
  found, damaged = [], []
  for number, line in enumerate((_read(path, read_bytes, problems) or b'').splitlines(), 1):
    try:
      record = parse(line)
    except ValueError:
      record = None
    if record is not None:
      found.append(record)
    elif line.strip():
      damaged.append(number)
  if damaged:
    problems.append(_damaged_text(path.name, damaged))
  return found


def _damaged_text(name: str, lines: Sequence[int]) -> str:
  named = listed(number_ranges(lines).split(','), _MOST_NAMED)
  if len(lines) == 1:
    return f'Line {lines[0]} of {name} is damaged and was skipped.'
  return f'{len(lines)} lines of {name} are damaged and were skipped: {", ".join(named)}.'


def _checkpoints(model_dir: ModelDir, problems: list[str]) -> tuple[Sequence[int], Json]:
  """Returns the committed steps, and the manifest of the latest readable checkpoint."""
  steps = model_dir.steps
  for step in reversed(steps):
    try:
      return steps, model_dir.manifest(step)
    except (AccessError, *UNREADABLE) as e:
      problems.append(f'checkpoint_{step} has no readable manifest ({error_line(e)}).')
  return steps, {}
