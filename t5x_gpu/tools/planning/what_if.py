"""The same run on other numbers or kinds of GPUs, or with other values, by formula, as tables.

The shares that the compiled step hides behind its matrix kernels replace the assumed shares. The
run itself keeps its own prediction.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Union

from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.terminal.console import show, table
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.devices import topology_of
from t5x_gpu.tools.planning.gpu_targets import GpuTarget, find_target
from t5x_gpu.tools.planning.prediction import COMPILED, PlanConfig, Planner, Prediction
from t5x_gpu.tools.planning.screen import duration, fits_cell, gpu_caveat, gpu_hours, seconds

# A prediction, or an error.
Outcome = Union[Prediction, UserError]
# (more gin bindings, GPU) -> the run with these bindings, and the plan's assumptions about that GPU
Configured = Callable[[Sequence[str], GpuTarget], tuple[PlanConfig, Assumptions]]
# value -> (GPU, run, the plan's assumptions)
Variants = Mapping[str, tuple[GpuTarget, PlanConfig, Assumptions]]
_QUOTED_OR_ONE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|.""", re.DOTALL)


def numbers(text: str, flag: str) -> list[int]:
  """Returns the numbers of '1,8,64'.

  Raises:
    ConfigError: an entry is not a number of 1 or more.
  """
  parts = [part.strip() for part in text.split(',')]
  if not all(part.isdigit() and int(part) > 0 for part in parts):
    raise ConfigError(
      f'{flag}={text} is not a list of numbers of GPUs.',
      fix=f'Write it as {flag}=1,8,64.',
      docs='plan.md#other-numbers-and-kinds-of-gpus',
    )
  return sorted({int(part) for part in parts})


def name_and_values(text: str) -> tuple[str, list[str]]:
  """Returns the parts of 'NAME=VALUE,VALUE'; a value may be a dict, list, tuple or string.

  Raises:
    ConfigError: the text has another form, or names an unknown GPU.
  """
  name, _, values = text.partition('=')
  found = _split(values)
  if not (name and all(found)):
    raise ConfigError(
      f'--what_if={text} is not NAME=VALUE,VALUE.',
      fix='Write --what_if=gpu=h100,b200; a gin macro or parameter may be in the place of gpu, and '
      '[1,2] is one value.',
      docs='plan.md#other-numbers-and-kinds-of-gpus',
    )
  if name == 'gpu':
    for value in found:
      find_target(value)
  return name, found


def _split(text: str) -> list[str]:
  """Returns the parts of `text` between the commas that are outside brackets and quotes."""
  parts, depth = [''], 0
  for token in _QUOTED_OR_ONE.findall(text):
    depth += (token in '([{') - (token in ')]}')
    if token == ',' and not depth:
      parts.append('')
    else:
      parts[-1] += token
  return [part.strip() for part in parts]


def variants(name: str, values: Sequence[str], configured: Configured, gpu: GpuTarget) -> Variants:
  """Returns the run on `gpu` with each of the values of `name`.

  Raises:
    ConfigError, ModelError: the parameter does not exist, or does not take a value.
  """
  if name == 'gpu':
    gpus = {value: find_target(value) for value in values}
    return {value: (other, *configured((), other)) for value, other in gpus.items()}
  return {value: (gpu, *configured((f'{name}={value}',), gpu)) for value in values}


def changed(
  runs: Variants, topology: Topology, planner: Planner, given: tuple[PlanConfig, Prediction]
) -> dict[str, Outcome]:
  """Returns the predictions of `variants`; `given` is the current run's."""
  config, prediction = given
  found: dict[str, Outcome] = {}
  for value, (gpu, run, assumed) in runs.items():
    # Schedules are functions, which compare unequal even with equal values. They do not change a
    # plan.
    same = dataclasses.replace(run, learning_rate=config.learning_rate) == config
    if same and (gpu, assumed) == (planner.gpu, planner.assumed):
      found[value] = prediction
      continue
    other = dataclasses.replace(planner, gpu=gpu, assumed=with_overlap_of(prediction, assumed))
    try:
      found[value] = other.by_formula(run, topology)
    except UserError as e:
      found[value] = e
  return found


def scaled(
  config: PlanConfig,
  topology: Topology,
  planner: Planner,
  given: Prediction,
  numbers: Sequence[int],
) -> dict[int, Outcome]:
  """Returns the prediction on each number of GPUs, with as many rows per GPU as `given` has."""
  planner = dataclasses.replace(planner, assumed=with_overlap_of(given, planner.assumed))
  dataset = config.train_dataset_cfg
  found: dict[int, Outcome] = {}
  for number in numbers:
    if number == topology.num_devices:
      found[number] = given
      continue
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


def with_overlap_of(given: Prediction, assumed: Assumptions) -> Assumptions:
  """Returns `assumed` with the shares that the schedule of `given` hides, by mesh axis."""
  sent: collections.Counter[str] = collections.Counter()
  hidden: collections.Counter[str] = collections.Counter()
  for c in given.time.collectives:
    for axis in c.axes if c.from_schedule else ():
      sent[axis] += c.num_bytes
      hidden[axis] += c.num_bytes * c.hidden_share
  shares = {axis: hidden[axis] / sent[axis] for axis in sent if sent[axis]}
  if not shares:
    return assumed
  return dataclasses.replace(
    assumed,
    hidden_shares={**assumed.hidden_shares, **shares},
    sources={**assumed.sources, 'hidden_shares': "XLA's schedule of the compiled step"},
  )


def how(given: Prediction) -> str:
  """Returns in words how the figures of other runs were computed."""
  if given.source == COMPILED:
    return 'by formula, with the overlap of the compiled step; the current run as compiled'
  return 'by formula'


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
