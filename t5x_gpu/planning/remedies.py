"""A run that does not fit: the cheapest changes with which it does, each compiled to be sure.

Candidates are predicted by formula, which takes milliseconds; those that fit are compiled in the
order of their time until three are found. If none fits, `least_gpus` returns how many GPUs would.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Optional

from t5x_gpu.errors import UserError
from t5x_gpu.planning.changes import Change, single_changes, with_another
from t5x_gpu.planning.formulas.memory import GRADIENTS, OPTIMIZER, PARAMETERS, STACK
from t5x_gpu.planning.prediction import PlanConfig, Prediction
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.memory import show

NUMBER = 3
# Formulas are within 10% of what XLA allocates.
_ALMOST = 1.1

# (the run, where) -> its prediction
Predict = Callable[[PlanConfig, Topology], Prediction]


@dataclasses.dataclass(frozen=True)
class Remedy:
  """A change with which the run fits.

  Attributes:
    change: the settings.
    prediction: of the changed run.
    is_compiled: whether XLA compiled it; else it fits by formula.
  """

  change: Change
  prediction: Prediction
  is_compiled: bool


def remedies(
  config: PlanConfig,
  topology: Topology,
  *,
  by_formula: Predict,
  compiled: Optional[Predict],
  number: int = NUMBER,
) -> list[Remedy]:
  """Returns the fastest changes with which the run fits, of one kind or of two.

  Args:
    config, topology: the run that does not fit.
    by_formula: predicts without compiling.
    compiled: predicts from the compiled step; None where nothing can be compiled.
    number: of changes, at most.
  """
  singles = _predicted(single_changes(config, topology), topology, by_formula)
  candidates = [c for c in singles if _may_fit(c[1])]
  if len(candidates) < number:
    smallest = sorted(singles, key=lambda c: c[1].memory.needed_bytes)[:3]
    for change, _ in smallest:
      more = _predicted(with_another(change, topology), topology, by_formula)
      candidates += [c for c in more if _may_fit(c[1])]
  candidates.sort(key=lambda c: (c[1].seconds_per_step, len(c[0].settings)))
  found: list[Remedy] = []
  seen: set[frozenset[str]] = set()
  for change, prediction in candidates:
    key = frozenset(change.settings)
    if key in seen:
      continue
    seen.add(key)
    exact = prediction if compiled is None else compiled(change.config, topology)
    if exact.memory.fits:
      found.append(Remedy(change, exact, compiled is not None))
    if len(found) == number:
      break
  return found


def _may_fit(prediction: Prediction) -> bool:
  memory = prediction.memory
  return memory.needed_bytes <= _ALMOST * memory.pool_bytes


def _predicted(
  changes: Iterable[Change], topology: Topology, by_formula: Predict
) -> list[tuple[Change, Prediction]]:
  """Returns the changes that are legal, with their predictions."""
  found = []
  for change in changes:
    try:
      found.append((change, by_formula(change.config, topology)))
    except UserError:  # a layout that does not divide, a schedule that needs more rows
      continue
  return found


def least_gpus(
  config: PlanConfig, topology: Topology, *, by_formula: Predict
) -> tuple[Optional[int], Prediction]:
  """Returns (the least number of GPUs on which the run fits, the smallest step on `topology`).

  More GPUs split parameters, optimizer state and gradients further (fsdp over all of them); what is
  left is one pass over a layer. The number is None if that alone does not fit.
  """
  singles = _predicted(single_changes(config, topology), topology, by_formula)
  options = list(singles)
  for change, _ in sorted(singles, key=lambda c: c[1].memory.needed_bytes)[:3]:
    options += _predicted(with_another(change, topology), topology, by_formula)
  smallest = min(
    [p for _, p in options] or [by_formula(config, topology)], key=lambda p: p.memory.needed_bytes
  )
  memory = smallest.memory
  split = sum(memory.components.get(n, 0) for n in (PARAMETERS, OPTIMIZER, GRADIENTS, STACK))
  room = memory.pool_bytes - (memory.needed_bytes - split)
  if room <= 0:
    return None, smallest
  each = topology.devices_per_host
  number = max(math.ceil(topology.num_devices * split / room), topology.num_devices)
  return math.ceil(number / each) * each, smallest


def text(found: Sequence[Remedy], before: Prediction) -> str:
  """Returns the remedies with their cost in time."""
  lines = []
  for i, remedy in enumerate(found, 1):
    p = remedy.prediction
    cost = p.seconds_per_step / before.seconds_per_step - 1
    how = 'as compiled' if remedy.is_compiled else 'by formula'
    lines.append(
      f'{i}. {", ".join(remedy.change.settings)}: {show(p.memory.needed_bytes)} ({how}), '
      f'{p.seconds_per_step:.3g} s per step ({cost:+.0%})'
    )
  return '\n'.join(lines)


def advice(
  config: PlanConfig,
  topology: Topology,
  before: Prediction,
  *,
  by_formula: Predict,
  compiled: Optional[Predict],
) -> tuple[list[Remedy], str]:
  """Returns the remedies of a run that does not fit, and all of it as text."""
  found = remedies(config, topology, by_formula=by_formula, compiled=compiled)
  if found:
    return found, f'With these changes it fits:\n{text(found, before)}'
  return [], nothing_fits(config, topology, by_formula=by_formula)


def nothing_fits(config: PlanConfig, topology: Topology, *, by_formula: Predict) -> str:
  """Returns how much the smallest step needs, and how many GPUs would do."""
  number, smallest = least_gpus(config, topology, by_formula=by_formula)
  least = show(smallest.memory.needed_bytes)
  on = topology.count(topology.num_devices)
  if number is None:
    return (
      f'No remat policy, number of microbatches or layout fits on {on}: at least {least} per GPU, '
      'and more GPUs of this kind do not help. Split rows over Partitioner.context, shorten them, '
      'or take a GPU with more memory.'
    )
  return (
    f'No remat policy, number of microbatches or layout fits on {on}: at least {least} per GPU. '
    f'The least number of GPUs is {number}, with Partitioner.fsdp = {number} (by formula).'
  )
