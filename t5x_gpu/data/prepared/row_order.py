"""The order of rows: a pure function of (tasks, rates, seed, row number).

Tasks are interleaved as evenly as their rates allow. Each task starts over, in another order, when
it is exhausted, independently of the others.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Optional

import grain

from t5x_gpu.errors import DataError, did_you_mean

ENDLESS = 2**62
_UNITS = 2**40  # rates are multiples of 1 / _UNITS
_RATES = 'DatasetConfig.mixture_rates'


class EvenMixture(grain.transforms.DatasetSelectionMap):
  """Maps row k of a mixture to (task, row number in the task).

  Task i gets n * rate[i] of the first n rows, give or take one per task. The first task takes its
  share of all rows, the second task its share of the rest, and so on.

  Args:
    rates: rates of the tasks, positive; they need not sum to 1.
  """

  def __init__(self, rates: Sequence[float]):
    total = sum(rates)
    self._units = [max(1, round(rate / total * _UNITS)) for rate in rates]

  def __len__(self) -> int:
    return ENDLESS

  def __getitem__(self, index: int) -> tuple[int, int]:
    # `before` rows reached this task; `passed` of them continue to the next tasks.
    left, before = sum(self._units), index
    for task, units in enumerate(self._units):
      left -= units
      passed = before * left // (left + units)
      if (before + 1) * left // (left + units) == passed:
        return task, before - passed
      before = passed
    raise AssertionError('the last task takes every row that reaches it')


def mixed_rows(
  tasks: Mapping[str, grain.MapDataset],
  *,
  rates: Mapping[str, float],
  seed: Optional[int],
  repeat: bool,
) -> grain.MapDataset:
  """Returns the rows in training order (endless) or evaluation order (each row once).

  Args:
    tasks: name -> its rows, in the order of the files.
    rates: name -> share; training leaves out tasks with rate 0.
    seed: seed of the order; None for the order of the files. Training shuffles each epoch of each
      task separately. Evaluation shuffles the rows of all tasks together and ignores the rates.
    repeat: True for training.
  """
  if not repeat:
    rows = grain.MapDataset.concatenate(list(tasks.values()))
    return rows if seed is None else rows.shuffle(_seed(seed, 'all tasks'))
  names = [name for name in tasks if rates[name] > 0]
  endless = [
    (tasks[name] if seed is None else tasks[name].shuffle(_seed(seed, name))).repeat()
    for name in names
  ]
  return grain.MapDataset.select_from_datasets(endless, EvenMixture([rates[n] for n in names]))


def _seed(seed: int, name: str) -> int:
  # Grain shuffles epoch e with seed + e, so consecutive seeds would share epochs.
  return int.from_bytes(hashlib.sha256(f'{seed} {name}'.encode()).digest()[:4], 'big')


def checked_rates(
  given: Optional[Mapping[str, float]], *, own: Mapping[str, float], rows: Mapping[str, int]
) -> dict[str, float]:
  """Returns task -> rate, summing to 1.

  Args:
    given: DatasetConfig.mixture_rates; missing tasks get rate 0. None for `own`.
    own: rates of the mixture.
    rows: task -> number of rows.
  Raises:
    DataError: unknown tasks, negative rates, only rates of 0, or a task without rows.
  """
  rates = dict(own if given is None else given)
  unknown = [name for name in rates if name not in own]
  if unknown:
    raise DataError(
      f'mixture_rates names {unknown[0]!r}, which is not in the prepared data.'
      + did_you_mean(unknown[0], own),
      fix=f'It has: {", ".join(own)}.',
      parameters=(_RATES,),
    )
  wrong = {
    name: rate
    for name, rate in rates.items()
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1e18
  }
  total = 0 if wrong else sum(rates.values())
  if not total:
    what = wrong or rates
    raise DataError(
      f'mixture_rates = {what}: rates are numbers of at least 0, and at least one is above 0.',
      fix=f'Set {_RATES} = {dict(own)}, the rates of the mixture, or others.',
      parameters=('DatasetConfig.mixture_rates',),
    )
  empty = [name for name, rate in rates.items() if rate > 0 and not rows[name]]
  if empty:
    rest = {name: rate for name, rate in rates.items() if rows[name]}
    raise DataError(
      f'{empty[0]!r} has no rows but a rate of {rates[empty[0]] / total:.3g}.',
      fix=f'Leave it out: {_RATES} = {rest}.' if rest else 'Prepare a split that has examples.',
      parameters=('DatasetConfig.mixture_rates',),
    )
  return {name: rates.get(name, 0) / total for name in own}
