"""Results of prompts as JSON lines in their order: what a kill has left is continued."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.config.json_schema import parse_json, read_json
from t5x_gpu.errors import ConfigError, DataError

NUMBER = 'number'  # of the prompt, in every line
FACTS = '.facts.json'


class ResultLines:
  """Appends one line per prompt to a file; `FILE.facts.json` says what the lines depend on.

  A line is written whole and reaches the disk before the next batch is computed. A last line that a
  kill has cut is removed when the file is opened again.

  Args:
    path: of the file; its folder is made.
    facts: JSON-ready, what the results depend on.
    numbers: of the prompts, in order.
    overwrite: begin anew.
  Attributes:
    num_done: prompts that the file already had.
  Raises:
    ConfigError: the file holds other results, or cannot be written.
    DataError: a line in the middle is no result.
  """

  def __init__(self, path: str, *, facts: Mapping[str, Any], numbers: Sequence[int],
               overwrite: bool = False):
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
      raise ConfigError(f'--output={path} cannot be written: {e.strerror}.',
                        fix='Give a file in a folder that you may write to.') from e

  def _num_done(self, facts: Mapping[str, Any], numbers: Sequence[int]) -> int:
    """Returns how many results the file has, after removing a torn last line."""
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
              f'{line[:60]!r}.', fix='Mend or remove the file, or begin anew with --overwrite.')
        num_done, whole_bytes = num_done + 1, whole_bytes + len(line)
      f.truncate(whole_bytes)
    return num_done

  def _check_facts(self, facts: Mapping[str, Any]) -> None:
    try:
      before = read_json(self._facts_path)
    except (OSError, ValueError):
      before = None
    fix = 'Give another --output, or begin anew with --overwrite.'
    if not isinstance(before, dict):
      raise ConfigError(f'{self.path} exists, and {self._facts_path.name}, which would say what is '
                        'in it, does not.', fix=fix)
    now = json.loads(json.dumps(facts))
    different = [f'{key}: then {before.get(key)!r}, now {now.get(key)!r}'
                 for key in sorted(now.keys() | before.keys()) if before.get(key) != now.get(key)]
    if different:
      raise ConfigError(f'{self.path} has results of something else:\n  '
                        + '\n  '.join(different), fix=fix)

  def write(self, records: list[dict[str, Any]]) -> None:
    """Appends results, which come with their numbers, in order."""
    self._file.write(''.join(to_line(record) for record in records).encode('utf-8'))
    self._file.flush()
    os.fsync(self._file.fileno())

  def close(self) -> None:
    self._file.close()


def to_line(record: Mapping[str, Any]) -> str:
  """Returns a line of JSON, its text readable as it is."""
  return json.dumps(record, ensure_ascii=False) + '\n'


def _number(line: bytes) -> Optional[int]:
  try:
    record = parse_json(line)
  except ValueError:
    return None
  number = record.get(NUMBER) if isinstance(record, dict) else None
  return number if isinstance(number, int) else None
