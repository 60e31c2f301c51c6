"""The cheapest changes with which a run fits, each compiled to be sure.

`single_changes` yields the changes that save memory, as settings that a user would write. Formulas
predict all candidates in milliseconds. Candidates that fit are compiled, the fastest first, until
three are found. If none fits, `least_gpus` looks for the number of GPUs on which a candidate fits,
by formula.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Optional

from t5x_gpu.errors import MeshError, UserError
from t5x_gpu.models.model import config_of
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.partitioning.mesh_sizes import SIZE_PARAMETERS
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.terminal.console import seconds, show
from t5x_gpu.tools.planning.devices import GPUS_PER_HOST
from t5x_gpu.tools.planning.formulas.step_memory import (
  ACTIVATIONS,
  GRADIENTS,
  OPTIMIZER,
  PARAMETERS,
  STACK,
)
from t5x_gpu.tools.planning.prediction import MICROBATCHES, PlanConfig, Prediction, Setting
from t5x_gpu.tools.planning.remat_costs import with_config
from t5x_gpu.training.optimizers import AdamW

# Parameters of Partitioner that set the sizes of axes; some set the same size.
SIZES = (*SIZE_PARAMETERS.values(), 'model_parallel_submesh', 'ici_mesh_shape', 'dcn_mesh_shape')
_MICROBATCHES = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Change:
  """A run that differs from another one.

  Attributes:
    settings: what to write in gin, 'NAME = VALUE' each.
    config: the changed run.
  """

  settings: tuple[str, ...]
  config: PlanConfig

  @property
  def kinds(self) -> set[str]:
    """Classes of the settings: 'Partitioner', 'TransformerConfig', ..."""
    return {setting.split('.')[0] for setting in self.settings}

  @property
  def keeps_precision(self) -> bool:
    """Whether the change keeps every dtype, including the optimizer's moments."""
    return 'AdamW' not in self.kinds


def single_changes(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields changes that may make a step smaller, each of one kind."""
  yield from _overlap(config)
  yield from _remat(config)
  yield from _microbatches(config)
  yield from _layouts(config, topology)
  yield from _moments(config)


def with_another(first: Change, topology: Topology) -> Iterator[Change]:
  """Yields `first` with a second change of another kind."""
  for change in single_changes(first.config, topology):
    if not first.kinds & change.kinds:
      yield _joined(first, change)


def on_all_of(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields the run with the settings that save most memory, in layouts of all devices.

  The batch grows to the next size that the layout divides. The number of microbatches stays if it
  divides the rows of a device; else each microbatch has one row.

  Args:
    config: the run.
    topology: may have more or fewer devices than the run's.
  """
  [saving] = list(_remat(config))[-1:] or [Change((), config)]
  moments = [_joined(saving, change) for change in _moments(saving.config)]
  for first in (saving, *moments):
    for wanted in _partitioners(config.partitioner, topology):
      sizes = wanted.mesh_sizes(topology).total
      parts = math.prod(sizes[axis] for axis in wanted.rules().activations['batch'])
      rows = math.ceil(config.train_dataset_cfg.batch_size / parts)
      dataset = dataclasses.replace(config.train_dataset_cfg, batch_size=rows * parts)
      as_now = config.num_microbatches if rows % config.num_microbatches == 0 else 1
      for number in dict.fromkeys((as_now, rows)):
        settings = (*first.settings, *_differing(wanted, config.partitioner))
        if number != config.num_microbatches:
          settings += (f'train.num_microbatches = {number}',)
        if dataset != config.train_dataset_cfg:
          settings += (f'BATCH_SIZE = {dataset.batch_size}',)
        changed = dataclasses.replace(
          first.config, partitioner=wanted, num_microbatches=number, train_dataset_cfg=dataset
        )
        yield Change(settings, changed)


def _joined(first: Change, second: Change) -> Change:
  """Returns two changes as one; `second` was made from the run of `first`."""
  return Change((*first.settings, *second.settings), second.config)


def layout_settings(wanted: Partitioner, given: Partitioner) -> dict[str, Setting]:
  """Returns the parameters that are not default in `wanted` or in `given`.

  A run keeps the settings of its own gin files, so parameters that return to their default are
  included.
  """
  return {
    field.name: getattr(wanted, field.name)
    for field in dataclasses.fields(Partitioner)
    if not getattr(wanted, field.name) == getattr(given, field.name) == field.default
  }


def _overlap(config: PlanConfig) -> Iterator[Change]:
  """Yields overlap_layers, without which layers outside a loop store every residual."""
  if not config.partitioner.overlap_layers:
    wanted = dataclasses.replace(config.partitioner, overlap_layers=True)
    changed = dataclasses.replace(config, partitioner=wanted)
    yield Change(('Partitioner.overlap_layers = True',), changed)


def _remat(config: PlanConfig, *, all_policies: bool = False) -> Iterator[Change]:
  """Yields other remat policies: policies that store less, or all."""
  model_config = config_of(config.model)
  if model_config is None:
    return
  current = BY_MEMORY.index(model_config.remat_policy)
  for policy in BY_MEMORY[0 if all_policies else current + 1 :]:
    # The time of an offload's transfers to the host is not modelled.
    if policy in ('offload', model_config.remat_policy):
      continue
    changed = dataclasses.replace(config, model=with_config(config.model, remat_policy=policy))
    yield Change((f'TransformerConfig.remat_policy = {policy!r}',), changed)


def _microbatches(config: PlanConfig) -> Iterator[Change]:
  for times in _MICROBATCHES:
    number = config.num_microbatches * times
    if config.train_dataset_cfg.batch_size % number == 0:
      changed = dataclasses.replace(config, num_microbatches=number)
      yield Change((f'train.num_microbatches = {number}',), changed)


def _layouts(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields other layouts of all devices."""
  for wanted in _partitioners(config.partitioner, topology):
    settings = _differing(wanted, config.partitioner)
    if settings and topology.num_devices > 1:
      yield Change(settings, dataclasses.replace(config, partitioner=wanted))


def _partitioners(given: Partitioner, topology: Topology) -> Iterator[Partitioner]:
  """Yields layouts of all devices: fsdp, hsdp, fsdp with model, and fsdp in place of data.

  Other parameters of `given` stay.
  """
  hosts, each, total = topology.num_hosts, topology.devices_per_host, topology.num_devices
  options: list[dict[str, Setting]] = [dict(data=1, fsdp=total)]
  if hosts > 1 and each > 1:
    options.append(dict(ici_mesh_shape={'fsdp': each}, dcn_mesh_shape={'data': hosts}))
  for model in (2, 4, 8):
    if model <= each and each % model == 0 and total > model:
      sizes = dict(data=1, fsdp=total // model, num_partitions=model)
      options.append(dict(sizes, sequence_parallel=True))
  if kept := _fsdp_for_data(given, topology):
    options.append(kept)
  whole = dict(_WHOLE, num_partitions=1 if given.num_partitions else None)
  for sizes in options:
    wanted = dataclasses.replace(given, **(whole | sizes))
    if _same_mesh(wanted, given, topology):  # written in another way
      wanted = dataclasses.replace(wanted, **{name: getattr(given, name) for name in SIZES})
    yield wanted


def _fsdp_for_data(given: Partitioner, topology: Topology) -> Optional[dict[str, Setting]]:
  """Returns the sizes of `given` with `data` moved into fsdp; None if no other axis splits it."""
  by_host = given.ici_mesh_shape is not None or given.dcn_mesh_shape is not None
  try:
    moved = given if by_host else dataclasses.replace(given, data=1, fsdp=-1)
    sizes = dict(moved.mesh_sizes(topology).total)
  except MeshError:  # sizes for another number of devices
    return None
  fsdp = sizes.pop('data') * sizes.pop('fsdp')
  if set(sizes.values()) == {1}:
    return None
  kept = {SIZE_PARAMETERS[axis]: size for axis, size in sizes.items() if size > 1}
  return dict(kept, data=1, fsdp=fsdp, sequence_parallel=given.sequence_parallel)


def _same_mesh(one: Partitioner, other: Partitioner, topology: Topology) -> bool:
  try:
    return one.mesh_sizes(topology) == other.mesh_sizes(topology)
  except MeshError:  # sizes for another number of devices
    return False


def _differing(wanted: Partitioner, given: Partitioner) -> tuple[str, ...]:
  """Returns the settings that turn `given` into `wanted`."""
  return tuple(
    f'Partitioner.{name} = {value!r}'
    for name, value in layout_settings(wanted, given).items()
    if value != getattr(given, name)
  )


# Defaults of the parameters that `_partitioners` sets: a layout that splits nothing.
_WHOLE = {
  field.name: field.default
  for field in dataclasses.fields(Partitioner)
  if field.name in (*SIZES, 'zero_stage', 'sequence_parallel')
}


def _moments(config: PlanConfig) -> Iterator[Change]:
  if isinstance(config.optimizer, AdamW) and config.optimizer.mu_dtype == 'float32':
    smaller = dataclasses.replace(config.optimizer, mu_dtype='bfloat16', nu_dtype='bfloat16')
    settings = ("AdamW.mu_dtype = 'bfloat16'", "AdamW.nu_dtype = 'bfloat16'")
    yield Change(settings, dataclasses.replace(config, optimizer=smaller))


NUMBER = 3
# Numbers of hosts that `least_gpus` tries at most; three or four do.
_TRIES = 32
# Predictions are less exact: between steps that differ by less, precision and memory decide.
EQUAL = 1.005
# Formulas are within 10% of XLA's allocation.
ALMOST = 1.1

# (the run, where) -> its prediction
Predict = Callable[[PlanConfig, Topology], Prediction]
_Candidate = tuple[Change, Prediction]


@dataclasses.dataclass(frozen=True)
class Remedy:
  """A change with which the run fits.

  Attributes:
    change: the settings.
    prediction: prediction of the changed run.
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
  before = by_formula(config, topology)
  singles = [
    c
    for c in _predicted(single_changes(config, topology), topology, by_formula)
    if _saves(c, before)
  ]
  candidates = [c for c in singles if _may_fit(c[1])]
  if len(candidates) < number:
    smallest = sorted(singles, key=lambda c: c[1].memory.needed_bytes)[:3]
    for change, first in smallest:
      more = _predicted(with_another(change, topology), topology, by_formula)
      candidates += [c for c in more if _may_fit(c[1]) and _saves(c, first)]
  return list(itertools.islice(_fitting(candidates, topology, compiled), number))


def _fitting(
  candidates: Iterable[_Candidate], topology: Topology, compiled: Optional[Predict]
) -> Iterator[Remedy]:
  """Yields the candidates that fit, the fastest by formula first."""
  seen: set[frozenset[str]] = set()
  for change, prediction in _ranked(candidates):
    key = frozenset(change.settings)
    if key in seen:
      continue
    seen.add(key)
    try:
      exact = prediction if compiled is None else compiled(change.config, topology)
    except UserError:  # does not compile for this GPU, e.g. no matmul can use FP8
      continue
    if exact.memory.fits:
      yield Remedy(change, exact, compiled is not None)


def faster_accumulation(
  config: PlanConfig,
  topology: Topology,
  before: Prediction,
  *,
  by_formula: Predict,
  compiled: Optional[Predict],
) -> tuple[list[Remedy], str]:
  """Returns a faster order of the microbatches, and the cost of the present order as text.

  By layer, the backward pass computes each layer again, with every remat policy. By microbatch,
  it does not have to, but parameters are gathered for each microbatch.

  Args:
    config, topology: the run.
    before: its prediction, as compiled if `compiled` is given.
    by_formula, compiled: as in `remedies`.
  Returns:
    ([], '') if the run does not accumulate by layer; [] and text if by layer is the fastest.
  """
  if before.recomputes_for != MICROBATCHES:
    return [], ''
  by_microbatch = Change(
    ("Partitioner.accumulate_by = 'microbatch'",),
    dataclasses.replace(
      config, partitioner=dataclasses.replace(config.partitioner, accumulate_by='microbatch')
    ),
  )
  others = (_joined(by_microbatch, c) for c in _remat(by_microbatch.config, all_policies=True))
  least = by_formula(config, topology).seconds_per_step
  candidates = [
    c
    for c in _predicted((by_microbatch, *others), topology, by_formula)
    if _may_fit(c[1]) and EQUAL * c[1].seconds_per_step < least
  ]
  found = [
    remedy
    for remedy in itertools.islice(_fitting(candidates, topology, compiled), 1)
    if EQUAL * remedy.prediction.seconds_per_step < before.seconds_per_step
  ]
  reason = "Partitioner.accumulate_by = 'layer' computes each layer again in the backward pass."
  if found:
    return found, f'{reason} Faster:\n{text(found, before)}'
  return [], f'{reason} No other order that fits is faster.'


def _ranked(candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
  """Yields the candidates, the fastest first.

  Order of equally fast candidates: keeps the precision, changes the fewest kinds of settings, needs
  the least memory.
  """
  left = sorted(candidates, key=lambda c: c[1].seconds_per_step)
  while left:
    limit = EQUAL * left[0][1].seconds_per_step
    number = sum(c[1].seconds_per_step <= limit for c in left)
    yield from sorted(left[:number], key=_cost_besides_time)
    left = left[number:]


def _cost_besides_time(candidate: _Candidate) -> tuple[object, ...]:
  change, prediction = candidate
  of_change = not change.keeps_precision, len(change.kinds)
  return *of_change, prediction.memory.needed_bytes, len(change.settings)


def _saves(candidate: _Candidate, before: Prediction) -> bool:
  return candidate[1].memory.needed_bytes < before.memory.needed_bytes


def _may_fit(prediction: Prediction) -> bool:
  memory = prediction.memory
  return memory.needed_bytes <= ALMOST * memory.pool_bytes


def _predicted(
  changes: Iterable[Change], topology: Topology, by_formula: Predict
) -> Iterator[_Candidate]:
  """Yields the legal changes with their predictions."""
  for change in changes:
    try:
      prediction = by_formula(change.config, topology)
    except UserError:  # a layout that does not divide, a schedule that needs more rows
      continue
    yield change, prediction


def least_gpus(
  config: PlanConfig, topology: Topology, *, by_formula: Predict
) -> tuple[Optional[Remedy], Prediction]:
  """Returns (the remedy on `topology`, else on the fewest GPUs; the prediction of its step).

  Tries part of a host, a host, then more whole hosts, until a step of `on_all_of` is legal and
  fits; so the fewest GPUs do not depend on `topology`. There is no remedy if one row is too large,
  because more GPUs do not split its activations.
  """
  on = functools.cache(lambda where: _smallest(config, where, by_formula))
  asked, remedy = on(topology)
  if remedy:
    return remedy, remedy.prediction
  hosts, first = 1, asked and asked[1]
  each = topology.devices_per_host
  if topology.num_hosts == 1:
    each = max(each, GPUS_PER_HOST)
  for _ in range(_TRIES):
    smallest, remedy = on(Topology(hosts, each))
    if remedy:
      part = _on_part_of_a_host(config, each, by_formula) if hosts == 1 else None
      return part or remedy, first or remedy.prediction
    hosts += 1
    if smallest:
      first = first or smallest[1]
      least = _least_hosts(*smallest)
      if least is None:
        break
      hosts = max(hosts, least)
  return None, first or by_formula(config, topology)


def _on_part_of_a_host(config: PlanConfig, each: int, by_formula: Predict) -> Optional[Remedy]:
  """Returns the remedy on the fewest of a host's `each` GPUs; None if it needs all of them."""
  number = 1
  while number < each:
    smallest, remedy = _smallest(config, Topology(1, number), by_formula)
    if remedy:
      return remedy
    least = 0
    if smallest:  # no layout splits more than the state
      memory = smallest[1].memory
      state = sum(memory.components.get(name, 0) for name in (PARAMETERS, OPTIMIZER))
      least = math.ceil(number * state / memory.pool_bytes)
    number = max(number + 1, least)
  return None


def _smallest(
  config: PlanConfig, topology: Topology, by_formula: Predict
) -> tuple[Optional[_Candidate], Optional[Remedy]]:
  """Returns (None, a remedy) if a step fits, else (the smallest legal step, None)."""
  # The smallest changes of the batch come first.
  options = sorted(on_all_of(config, topology), key=lambda c: c.config.train_dataset_cfg.batch_size)
  predicted = []
  for change, prediction in _predicted(options, topology, by_formula):
    if prediction.memory.fits:
      return None, Remedy(change, prediction, is_compiled=False)
    predicted.append((change, prediction))
  return min(predicted, key=lambda c: c[1].memory.needed_bytes, default=None), None


def _least_hosts(change: Change, prediction: Prediction) -> Optional[int]:
  """Returns how many hosts hold the memory that they split; None if the rest is too large."""
  memory, rows = prediction.memory, change.config.train_dataset_cfg.batch_size
  split = [PARAMETERS, OPTIMIZER, GRADIENTS, STACK]
  if rows * prediction.mesh.get('model', 1) > prediction.num_gpus:  # several rows on each
    split += [ACTIVATIONS, MICROBATCHES]
  split_bytes = sum(memory.components.get(name, 0) for name in split)
  room = memory.pool_bytes - (memory.needed_bytes - split_bytes)
  return math.ceil(prediction.num_hosts * split_bytes / room) if room > 0 else None


def text(found: Sequence[Remedy], before: Prediction) -> str:
  """Returns the remedies with their cost in time."""
  lines = []
  for i, remedy in enumerate(found, 1):
    p = remedy.prediction
    # Rounded, plus 0.0, so that -0.0 becomes 0.0.
    cost = round(p.seconds_per_step / before.seconds_per_step - 1, 2) + 0.0
    how = 'as compiled' if remedy.is_compiled else 'by formula'
    lines.append(
      f'{i}. {", ".join(remedy.change.settings)}: {show(p.memory.needed_bytes)} ({how}), '
      f'{seconds(p.seconds_per_step)} per step ({cost:+.0%})'
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
  """Returns the remedies of a run that does not fit, and the advice as text."""
  found = remedies(config, topology, by_formula=by_formula, compiled=compiled)
  if found:
    return found, f'With these changes it fits:\n{text(found, before)}'
  return [], nothing_fits(config, topology, by_formula=by_formula)


def nothing_fits(config: PlanConfig, topology: Topology, *, by_formula: Predict) -> str:
  """Returns the memory of the smallest step, and the number of GPUs on which it fits, as text."""
  remedy, smallest = least_gpus(config, topology, by_formula=by_formula)
  least = show(smallest.memory.needed_bytes)
  on = topology.count(topology.num_devices)
  none = f'No remat policy, number of microbatches or layout fits on {on}: at least {least} per GPU'
  if remedy is None:
    return (
      f'{none}, and more GPUs of this kind do not help. Split rows over Partitioner.context, '
      'shorten them, or take a GPU with more memory.'
    )
  number, settings = remedy.prediction.num_gpus, ', '.join(remedy.change.settings)
  if number == topology.num_devices:
    return f'By formula it fits with {settings}, all of them together.'
  hosts = remedy.prediction.num_hosts
  words = f'{number} ({hosts} hosts x {number // hosts})' if hosts > 1 else str(number)
  advised = f'The least number of GPUs is {words}' + (f', with {settings}' if settings else '')
  rows = config.train_dataset_cfg.batch_size
  if remedy.change.config.train_dataset_cfg.batch_size != rows:
    return f'{none}. {advised} (by formula); a batch of {rows} does not divide over them.'
  return f'{none}. {advised} (by formula).'
