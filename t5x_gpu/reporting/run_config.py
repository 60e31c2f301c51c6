"""The configuration of a run from its files, and the differences between runs."""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.config.json_schema import read_bytes
from t5x_gpu.config.provenance import OF_DATA, OF_RUN
from t5x_gpu.config.report import CONFIG, ORIGINS, changes

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
  try:
    return read_bytes(path).decode('utf-8')
  except FileNotFoundError:
    return None
  except (OSError, ValueError) as e:
    problems.append(f'{path.name} cannot be read: {e}.')
    return None


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
