"""A file with a JSON line per prompt, which continues after a kill.

It continues after the last complete line.
"""

import json
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.config.json_schema import parse_json, read_json
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.data.same_data import differences
from t5x_gpu.errors import ConfigError, DataError

NUMBER = 'number'  # number of the prompt, in every line
FACTS = '.facts.json'
# Control characters that JSON does not escape, and surrogates, which UTF-8 cannot encode.
_UNESCAPED = re.compile(r'[\x7f-\x9f\ud800-\udfff]')


class ResultLines:
  """Appends one line per prompt to a file; `FILE.facts.json` has facts that the lines depend on.

  Lines reach the disk before the next batch is computed. If a kill leaves an incomplete last line,
  opening the file removes it.

  Args:
    path: path of the file; its folder is created.
    facts: JSON-ready facts that the results depend on.
    numbers: numbers of the prompts, in order.
    overwrite: replace the file.
  Attributes:
    num_done: number of results that the file already had.
  Raises:
    ConfigError: the file holds other results, or cannot be written.
    DataError: a line in the middle is not a result.
  """

  def __init__(
    self, path: str, *, facts: Mapping[str, Any], numbers: Sequence[int], overwrite: bool = False
  ):
    self.path = pathlib.Path(path).expanduser()
    self._facts_path = self.path.with_name(self.path.name + FACTS)
    try:
      self.path.parent.mkdir(parents=True, exist_ok=True)
      if overwrite:
        self.path.unlink(missing_ok=True)
        self._facts_path.unlink(missing_ok=True)
      self.num_done = self._num_done(facts, numbers)
      self._facts_path.write_text(json.dumps(facts, indent=1) + '\n', 'utf-8')
      self._file = open(self.path, 'ab')
    except OSError as e:
      raise ConfigError(
        f'--output={path} cannot be written: {e.strerror}.',
        fix='Give a file in a folder that you may write to.',
      ) from e

  def _num_done(self, facts: Mapping[str, Any], numbers: Sequence[int]) -> int:
    """Returns the number of results in the file, after removing an incomplete last line."""
    if not self.path.exists() or not self.path.stat().st_size:
      return 0
    self._check_facts(facts)
    num_done, whole_bytes = 0, 0
    with open(self.path, 'rb+') as f:
      for line in f:
        if not line.endswith(b'\n'):
          break
        expected = numbers[num_done] if num_done < len(numbers) else 'none'
        if _number(line) != expected:
          raise DataError(
            f'{self.path}:{num_done + 1} is not the result of prompt {expected}: the line begins '
            f'{line[:60]!r}.',
            fix='Repair or remove the file, or start over with --overwrite.',
          )
        num_done, whole_bytes = num_done + 1, whole_bytes + len(line)
      f.truncate(whole_bytes)
    return num_done

  def _check_facts(self, facts: Mapping[str, Any]) -> None:
    try:
      before = read_json(self._facts_path)
    except (OSError, ValueError) as e:
      check_not_refused(e, self._facts_path)
      before = None
    fix = 'Give another --output, or start over with --overwrite.'
    if not isinstance(before, dict):
      raise ConfigError(
        f'{self.path} exists without {self._facts_path.name}, which lists the facts that its '
        'results depend on.',
        fix=fix,
      )
    if different := differences(before, json.loads(json.dumps(facts)), before='then'):
      raise ConfigError(
        f'{self.path} has results of another job:\n  ' + '\n  '.join(different), fix=fix
      )

  def write(self, records: list[dict[str, Any]]) -> None:
    """Appends results in the order of their numbers."""
    self._file.write(''.join(to_line(record) for record in records).encode('utf-8'))
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


class VectorFile:
  """Collects the vectors of results, and writes them to a .npy file [results, embed] at the end.

  Args:
    path: path of the file; its folder is created.
    overwrite: replace the file.
  Attributes:
    num_done: always 0, because an interrupted run starts over.
  Raises:
    ConfigError: the file exists.
  """

  num_done = 0

  def __init__(self, path: str, *, overwrite: bool):
    self.path = pathlib.Path(path).expanduser()
    if self.path.exists() and not overwrite:
      raise ConfigError(
        f'--output={path} exists.', fix='Give another --output, or add --overwrite.'
      )
    self.path.parent.mkdir(parents=True, exist_ok=True)
    self._rows: list[Sequence[float]] = []

  def write(self, records: list[dict[str, Any]]) -> None:
    """Takes the vectors of results in the order of their numbers."""
    self._rows += [record['vector'] for record in records]

  def close(self) -> None:
    """Writes the file, which appears only when it is complete."""
    partial = self.path.with_name(self.path.name + '.partial')
    with open(partial, 'wb') as f:
      np.save(f, np.asarray(self._rows, np.float32))
    partial.replace(self.path)


def to_line(record: Mapping[str, Any]) -> str:
  """Returns a line of JSON; does not escape text to ASCII, but escapes control characters."""
  line = json.dumps(record, ensure_ascii=False)
  return _UNESCAPED.sub(lambda match: f'\\u{ord(match[0]):04x}', line) + '\n'


def _number(line: bytes) -> Optional[int]:
  try:
    record = parse_json(line)
  except ValueError:
    return None
  number = record.get(NUMBER) if isinstance(record, dict) else None
  return number if isinstance(number, int) else None
