"""The same run on other numbers or kinds of GPUs, as tables."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Union

from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.planning.devices import topology_of
from t5x_gpu.planning.planner import Planner
from t5x_gpu.planning.prediction import PlanConfig, Prediction
from t5x_gpu.planning.screen import duration, seconds
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.memory import show
from t5x_gpu.terminal.text_table import table

# A prediction, or why there is none.
Outcome = Union[Prediction, UserError]
_BAR = 30


def numbers(text: str, flag: str) -> list[int]:
  """Returns the numbers of '1,8,64'.

  Raises:
    ConfigError: they are not numbers of 1 or more.
  """
  parts = [part.strip() for part in text.split(',')]
  if not all(part.isdigit() and int(part) > 0 for part in parts):
    raise ConfigError(
      f'{flag}={text} is not a list of numbers of GPUs.', fix=f'Write it as {flag}=1,8,64.'
    )
  return sorted({int(part) for part in parts})


def scaled(
  config: PlanConfig, topology: Topology, planner: Planner, numbers: list[int]
) -> dict[int, Outcome]:
  """Returns the prediction on each number of GPUs, by formula, with as many rows per GPU."""
  found: dict[int, Outcome] = {}
  dataset = config.train_dataset_cfg
  for number in numbers:
    rows = dataset.batch_size * number // topology.num_devices
    grown = dataclasses.replace(
      config, train_dataset_cfg=dataclasses.replace(dataset, batch_size=max(rows, 1))
    )
    try:
      each = min(number, topology.devices_per_host)
      found[number] = planner.by_formula(grown, topology_of(gpus=number, gpus_per_host=each))
    except UserError as e:
      found[number] = e
  return found


def scale_table(outcomes: Mapping[int, Outcome]) -> str:
  """Returns one line per number of GPUs; efficiency is tokens/s per GPU, relative to the first."""
  rows = [('GPUs', 's/step', 'tokens/s', 'MFU', 'GiB per GPU', 'fits', 'efficiency', '')]
  base = None
  problems = []
  for number, p in outcomes.items():
    if isinstance(p, UserError):
      rows.append((f'{number:,}', '-', '-', '-', '-', '-', '-', ''))
      problems.append(f'{number} GPUs: {p.what}')
      continue
    each = p.tokens_per_second / p.num_gpus
    base = base or each
    rows.append((f'{number:,}', *_cells(p), f'{each / base:.0%}', '#' * round(_BAR * each / base)))
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
    hours = f'{p.days * 24 * p.num_gpus:,.0f}'
    columns.append((value, *_cells(p), duration(p.days), hours))
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
