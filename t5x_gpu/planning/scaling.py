"""The same run on other numbers or kinds of GPUs, or with other values, as tables."""

from collections.abc import Mapping, Sequence

from t5x_gpu.errors import UserError
from t5x_gpu.planning.prediction import Prediction
from t5x_gpu.planning.screen import duration, fits_cell, gpu_caveat, gpu_hours, seconds
from t5x_gpu.planning.what_if import Outcome
from t5x_gpu.runtime.memory import show
from t5x_gpu.terminal.text_table import table

_BAR = 30


def scale_table(outcomes: Mapping[int, Outcome]) -> str:
  """Returns one line per number of GPUs; efficiency is tokens/s per GPU, relative to the first."""
  rows = [('GPUs', 's/step', 'tokens/s', 'MFU', 'memory per GPU', 'fits', 'efficiency', '')]
  speeds = [
    p.tokens_per_second / p.num_gpus for p in outcomes.values() if isinstance(p, Prediction)
  ]
  problems = []
  for number, p in outcomes.items():
    if isinstance(p, UserError):
      rows.append((f'{number:,}', '-', '-', '-', '-', '-', '-', ''))
      problems.append(f'{number:,} GPU{"s" * (number > 1)}: {p.what}')
      continue
    each = p.tokens_per_second / p.num_gpus
    bar = '#' * round(_BAR * each / max(speeds))
    rows.append((f'{number:,}', *_cells(p), f'{each / speeds[0]:.0%}', bar))
  return '\n'.join([table(rows, right=(0, 1, 2, 3, 4, 6)), *problems])


def what_if_table(name: str, outcomes: Mapping[str, Outcome]) -> str:
  """Returns one column per value of `name`, and notes below them."""
  rows, notes = what_if_rows(name, outcomes)
  return '\n'.join([table(rows, right=range(1, len(rows[0]))), *notes])


def what_if_rows(
  name: str, outcomes: Mapping[str, Outcome]
) -> tuple[list[tuple[str, ...]], list[str]]:
  """Returns (a header with the values of `name`, then a row per figure; notes about the values)."""
  titles = (name, 's/step', 'tokens/s', 'MFU', 'memory per GPU', 'fits', 'to the end', 'GPU hours')
  columns, notes = [titles], []
  for value, p in outcomes.items():
    if isinstance(p, UserError):
      columns.append((value, *['-'] * (len(titles) - 1)))
      notes.append(f'{name} = {value}: {p.what}')
      continue
    columns.append((value, *_cells(p), duration(p.days), gpu_hours(p)))
    notes += filter(None, [name == 'gpu' and gpu_caveat(p)])
  return list(zip(*columns)), notes


def _cells(p: Prediction) -> Sequence[str]:
  memory = p.memory
  return (
    seconds(p.seconds_per_step),
    f'{p.tokens_per_second:,.0f}',
    'unknown' if p.mfu is None else f'{p.mfu:.1%}',
    show(memory.needed_bytes),
    fits_cell(memory),
  )
