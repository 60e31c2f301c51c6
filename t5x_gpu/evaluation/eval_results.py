"""Stores metrics of a run's checkpoints: MODEL_DIR/eval/NAME.jsonl and its pictures."""

import contextlib
import json
import logging
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.config.atomic_write import write_atomically
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.config.set_aside import check_not_refused
from t5x_gpu.data.same_data import differences
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.evaluator import LOSS
from t5x_gpu.metrics import classification
from t5x_gpu.metrics.confusion_picture import plot_confusion
from t5x_gpu.metrics.writers import (
  JsonLinesWriter,
  MetricWriter,
  MultiWriter,
  TensorBoardWriter,
  read_json_lines,
)

FOLDER = 'eval'
_log = logging.getLogger(__name__)


class EvalResults(contextlib.AbstractContextManager):
  """Metrics by checkpoint of one MODEL_DIR, stored as MODEL_DIR/eval/NAME.*.

  Only process 0 has one.

  Args:
    model_dir: MODEL_DIR of the run.
    name: name of this evaluation.
    facts: facts that its metrics depend on, in addition to the checkpoint.
  Raises:
    ConfigError: the metrics on disk depend on other facts.
  """

  def __init__(self, model_dir: pathlib.Path, name: str, facts: Mapping[str, Any]):
    self.folder, self.name = model_dir / FOLDER, name
    self.path = self.folder / f'{name}.jsonl'
    self._facts = facts
    self._tensorboard = model_dir / 'tensorboard' / f'{FOLDER}_{name}'
    # Opened for the first metric, so that errors before it leave no files.
    self._writer: Optional[MultiWriter] = None
    _check_facts(self.folder / f'{name}.json', facts, name)

  def __exit__(self, *error: Any) -> None:
    if self._writer is not None:
      self._writer.close()

  def _open(self) -> MultiWriter:
    writers: list[MetricWriter] = [JsonLinesWriter(self.path)]
    facts = json.dumps(self._facts, indent=1) + '\n'
    write_atomically(self.folder / f'{self.name}.json', facts)
    try:
      writers.append(TensorBoardWriter(self._tensorboard))
    except ConfigError as e:  # tensorboardX is not installed
      _log.warning('No TensorBoard files: %s', e)
    return MultiWriter(writers)

  @property
  def records(self) -> dict[int, dict[str, float]]:
    """Step -> metrics, ascending."""
    if not self.path.is_file():
      return {}
    return {
      record.pop('step'): record
      for record in sorted(read_json_lines(self.path), key=lambda record: record['step'])
    }

  def add(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the metrics of a checkpoint. A kill leaves at most one incomplete line."""
    self._writer = self._writer or self._open()
    self._writer.write(step, values)
    self._writer.flush()

  def add_confusion(self, step: int, confusion: np.ndarray, names: Sequence[str]) -> None:
    """Writes the confusion matrix as a table and, if matplotlib is installed, as a picture."""
    stem = self.folder / f'{self.name}_confusion_{step}'
    classification.write_csv(confusion, names, f'{stem}.csv')
    try:
      plot_confusion(confusion, names, f'{stem}.png', title=f'Step {step}, {self.name}')
    except ConfigError as e:
      _log.warning('No picture: %s', e)


def _check_facts(path: pathlib.Path, facts: Mapping[str, Any], name: str) -> None:
  try:
    before = read_json(path, dict)
  except (OSError, ValueError) as e:
    check_not_refused(e, path)
    return
  if different := differences(before, json.loads(json.dumps(facts)), before='then'):
    raise ConfigError(
      f'{path.with_suffix(".jsonl")} has the metrics of another evaluation:\n  '
      + '\n  '.join(different),
      fix=f'Give this evaluation another name, --name={name}_2, or remove {path.parent}/{name}.*',
    )


def table(records: Mapping[int, Mapping[str, float]], *, width: int) -> str:
  """Returns a row for each metric and a column for each step, split into blocks to fit `width`.

  Args:
    records: step -> values.
    width: width of the terminal, in characters.
  """
  names = list(dict.fromkeys(name for values in records.values() for name in values))
  first = max(map(len, ('step', *map(short, names))))
  columns = [
    [str(step), *(f'{values[name]:.4f}' if name in values else '-' for name in names)]
    for step, values in records.items()
  ]
  cell = max((len(text) for column in columns for text in column), default=0) + 2
  at_once = max(1, (width - first) // cell)
  blocks = []
  for start in range(0, len(columns), at_once):
    rows = zip(['step', *map(short, names)], *columns[start : start + at_once])
    blocks.append(
      '\n'.join(
        name.ljust(first) + ''.join(text.rjust(cell) for text in texts) for name, *texts in rows
      )
    )
  return '\n\n'.join(blocks)


def short(name: str) -> str:
  """Returns the name of a metric without its prefix."""
  return name.removeprefix('infer_').removeprefix(LOSS)
