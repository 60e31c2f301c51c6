"""The same run on other numbers or kinds of GPUs, as tables."""

from collections.abc import Mapping, Sequence

from t5x_gpu.errors import UserError
from t5x_gpu.planning.prediction import Prediction
from t5x_gpu.planning.screen import duration, gpu_hours, seconds
from t5x_gpu.planning.what_if import Outcome
from t5x_gpu.runtime.memory import show
from t5x_gpu.terminal.text_table import table

_BAR = 30


def scale_table(outcomes: Mapping[int, Outcome]) -> str:
  """Returns one line per number of GPUs; efficiency is tokens/s per GPU, relative to the first."""
  rows = [('GPUs', 's/step', 'tokens/s', 'MFU', 'GiB per GPU', 'fits', 'efficiency', '')]
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
  """Returns one column per value of `name`."""
  titles = (name, 's/step', 'tokens/s', 'MFU', 'GiB per GPU', 'fits', 'to the end', 'GPU hours')
  columns, problems = [titles], []
  for value, p in outcomes.items():
    if isinstance(p, UserError):
      columns.append((value, *['-'] * (len(titles) - 1)))
      problems.append(f'{name} = {value}: {p.what}')
      continue
    columns.append((value, *_cells(p), duration(p.days), gpu_hours(p)))
  return '\n'.join([table(list(zip(*columns)), right=range(1, len(columns))), *problems])


def _cells(p: Prediction) -> Sequence[str]:
  memory = p.memory
  return (
    seconds(p.seconds_per_step),
    f'{p.tokens_per_second:,.0f}',
    'unknown' if p.mfu is None else f'{p.mfu:.1%}',
    f'{memory.needed_bytes / 2**30:,.1f}',
    'yes' if memory.fits else f'no: {show(-memory.left_bytes)} too much',
  )
