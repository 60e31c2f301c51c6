"""Which stage of a pipeline does what when, and what follows: bubble, traffic, legal sizes.

Time is counted in ticks; at the end of each, every stage hands one activation to its neighbour. A
unit is one microbatch in one of the stage's blocks of layers. Everything here is arithmetic on
ints, NumPy arrays or traced values alike; `pipeline_parallel` runs what `Timetable` says.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.errors import did_you_mean
from t5x_gpu.partitioning.mesh_problems import any_of, divisors, nearest_multiples

# gpipe: all forward, then all backward. 1f1b: backward of each microbatch as soon as it can be.
# circular: gpipe with several blocks of layers per stage, which microbatches visit in turn.
SCHEDULES = ('gpipe', '1f1b', 'circular')

# What a user sets, for errors.
SET_BY = {'layers': 'TransformerConfig.num_layers', 'batch': 'BATCH_SIZE',
          'stage': 'Partitioner.stage', 'schedule': 'Partitioner.pipeline_schedule',
          'microbatches': 'Partitioner.num_pipeline_microbatches',
          'repeats': 'Partitioner.pipeline_repeats'}


@dataclasses.dataclass(frozen=True)
class Timetable:
  """Who does what when.

  Attributes:
    schedule: one of SCHEDULES.
    num_stages: S, at least 2.
    num_microbatches: M; at least S for 'circular', whose microbatches come round.
    repeats: R, blocks of layers per stage; 1 unless 'circular'. Block r of stage s is block
      r * S + s of the model.
  """
  schedule: str
  num_stages: int
  num_microbatches: int
  repeats: int = 1

  def __post_init__(self) -> None:
    assert self.schedule in SCHEDULES, self
    assert self.num_stages > 1 and self.num_microbatches > 0 and self.repeats > 0, self
    assert self.repeats == 1 or self.schedule == 'circular', self
    assert self.repeats == 1 or self.num_microbatches >= self.num_stages, self

  @property
  def num_units(self) -> int:
    """Units of every stage: unit u is microbatch u % M in the stage's block u // M."""
    return self.repeats * self.num_microbatches

  @property
  def forward_ticks(self) -> int:
    """Ticks until the last stage has done its last unit."""
    return self.num_units + self.num_stages - 1

  @property
  def interleaved_ticks(self) -> int:
    """Ticks of a 1f1b step, in which a stage goes forward with one unit and back with another."""
    return self.num_units + 2 * (self.num_stages - 1)

  @property
  def head_share(self) -> int:
    """Microbatches whose head a stage computes, rounded up; under 1f1b the last does all."""
    return -(-self.num_microbatches // self.num_stages)

  @property
  def kept_inputs(self) -> int:
    """Stage inputs kept for the backward pass of a step: a ring under 1f1b, else all of them."""
    return 2 * self.num_stages - 1 if self.schedule == '1f1b' else self.forward_ticks

  def forward_unit(self, tick: Any, stage: Any) -> Any:
    """Returns the unit that `stage` takes forward; it idles where that is not in [0, num_units)."""
    return tick - stage

  def backward_unit(self, tick: Any, stage: Any) -> Any:
    """Returns the unit that `stage` takes back under 1f1b: the last stage's is its forward one."""
    return tick - (2 * (self.num_stages - 1) - stage)


def bubble_fraction(schedule: str, num_stages: int, num_microbatches: int, repeats: int = 1, *,
                    skip_idle: bool = True) -> float:
  """Returns the part of a step in which a stage waits for others.

  (S-1) / (R*M + S-1): of the R*M + S-1 forward slots a stage has work in R*M, and likewise
  backward. Idle slots of 1f1b cost nothing while all stages idle in them; computed and discarded
  (`skip_idle=False`) they cost 2(S-1) of M + 2(S-1).

  Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2, which give it
  relative to the ideal time, (S-1) / (R*M); Huang et al. 2019 (GPipe), section 2.2.
  """
  table = Timetable(schedule, num_stages, num_microbatches, repeats)
  slots = table.forward_ticks
  if schedule == '1f1b' and not skip_idle:
    slots = table.interleaved_ticks
  return 1.0 - table.num_units / slots


def layer_order(num_layers: int, num_stages: int, repeats: int = 1) -> np.ndarray:
  """Returns p [layers]: layer i of the parameters in memory is layer p[i] of the model.

  Split over `stage` in contiguous parts, the parameters then give stage s its blocks r * S + s for
  r in range(repeats), one after the other.
  """
  blocks = np.arange(num_layers).reshape(repeats, num_stages, -1)
  return blocks.swapaxes(0, 1).reshape(-1)


def traffic_per_step(*, schedule: str, num_stages: int, num_microbatches: int,
                     activation_bytes: int, repeats: int = 1,
                     shared_gradient_bytes: int = 0) -> dict[str, float]:
  """Returns the bytes that a device sends over `stage` in one training step, by collective.

  'collective-permute': one activation per tick and direction, and where the backward sweep follows
  the forward sweep, the last stage's outputs for the head of other stages and their gradients
  back. 'all-reduce', once, by the caller: gradients of what every stage holds, counted as a ring.
  Evaluation sends half of the former.

  Args:
    schedule, num_stages, num_microbatches, repeats: as in `Timetable`.
    activation_bytes: of one microbatch between two layers, on one device.
    shared_gradient_bytes: on one device, of all parameters but the layers.
  """
  table = Timetable(schedule, num_stages, num_microbatches, repeats)
  if schedule == '1f1b':
    activations = table.interleaved_ticks
  else:
    activations = table.forward_ticks + table.head_share * (num_stages - 1)
  traffic = {'collective-permute': 2.0 * activations * activation_bytes}
  if shared_gradient_bytes:
    traffic['all-reduce'] = 2.0 * (num_stages - 1) / num_stages * shared_gradient_bytes
  return traffic


def check(sizes: Mapping[str, int], mesh_shape: Mapping[str, int], *, schedule: str,
          num_pipeline_microbatches: int, repeats: int = 1, batch_parts: int = 1,
          num_microbatches: int = 1,
          parameter_names: Optional[Mapping[str, str]] = None,
          legal_sizes: Optional[Mapping[str, Sequence[int]]] = None) -> list[str]:
  """Returns one sentence with its fix for everything that keeps the pipeline from running.

  Args:
    sizes: array axis -> size, of which 'layers' and 'batch' (global) are looked at.
    mesh_shape: mesh axis -> size. Without a `stage` axis of 2 or more nothing can be wrong.
    schedule: how stages take turns.
    num_pipeline_microbatches: parts into which a device's rows are cut.
    repeats: blocks of layers per stage.
    batch_parts: product of the mesh axes that split rows.
    num_microbatches: gradient accumulation; each part goes through the pipeline by itself.
    parameter_names: changes of SET_BY.
    legal_sizes: mesh axis -> sizes that it could have, for the fix; None for any.
  """
  stages = mesh_shape.get('stage', 1)
  if stages == 1:
    return []
  names = {**SET_BY, **(parameter_names or {})}
  problems = _schedule_problems(schedule, repeats, stages, sizes.get('layers'), names)
  if 'layers' in sizes:
    possible = None if legal_sizes is None else legal_sizes['stage']
    problems += _layer_problems(sizes['layers'], stages, max(repeats, 1), names, possible)
  return problems + _microbatch_problems(
      schedule, num_pipeline_microbatches, stages, sizes.get('batch'),
      batch_parts * num_microbatches, names)


def _schedule_problems(schedule: str, repeats: int, stages: int, layers: Optional[int],
                       names: Mapping[str, str]) -> list[str]:
  if schedule not in SCHEDULES:
    return [f'{names["schedule"]} = {schedule!r} is no pipeline schedule.'
            f'{did_you_mean(str(schedule), SCHEDULES)} Set it to '
            f'{any_of(map(repr, SCHEDULES))}.']
  if repeats < 1:
    return [f'{names["repeats"]} = {repeats} is not 1 or more. Set it to 1, or to 2 or more with '
            f"{names['schedule']} = 'circular'."]
  if schedule == 'circular' and repeats == 1:
    more = '2 or more' if layers is None or layers % stages else _more_repeats(layers, stages)
    fix = f'{names["repeats"]} = {more}, or ' if more else ''
    return [f'The circular schedule with {names["repeats"]} = 1 is gpipe: each microbatch passes '
            f"the {stages} stages once. Set {fix}{names['schedule']} = 'gpipe'."]
  if schedule != 'circular' and repeats > 1:
    return [f'{names["repeats"]} = {repeats}, but under {schedule} each microbatch passes the '
            f"{stages} stages once. Set {names['schedule']} = 'circular', or {names['repeats']} = "
            '1.']
  return []


def _more_repeats(layers: int, stages: int) -> str:
  """Returns the legal numbers of blocks per stage above 1, '' without any."""
  legal = divisors(layers // stages)[1:]
  return any_of(legal) if legal else ''


def _layer_problems(layers: int, stages: int, repeats: int, names: Mapping[str, str],
                    possible: Optional[Sequence[int]]) -> list[str]:
  blocks = stages * repeats
  if layers % blocks == 0:
    return []
  nearest = nearest_multiples(layers, blocks)
  what = f'stage={stages}' + (f' x {repeats} blocks each (= {blocks})' if repeats > 1 else '')
  fix = [f'{names["layers"]} = {any_of(nearest)}']
  fitting = [n // repeats for n in divisors(layers) if n % repeats == 0]
  fitting = [n for n in fitting if possible is None or n in possible]
  if fitting:
    fix.append(f'{names["stage"]} = {any_of(fitting)}')
  if repeats > 1 and layers % stages == 0:
    more = _more_repeats(layers, stages)
    if more:
      fix.append(f'{names["repeats"]} = {more}')
  return [f'layers = {layers} does not divide over {what}. Set {", or ".join(fix)}.']


def _microbatch_problems(schedule: str, microbatches: int, stages: int, batch: Optional[int],
                         parts: int, names: Mapping[str, str]) -> list[str]:
  least = stages if schedule == 'circular' else 1
  # A batch that the mesh or the accumulation does not divide is reported by their own checks.
  rows = batch // parts if batch and batch % parts == 0 else None
  legal = [n for n in divisors(rows) if n >= least] if rows else []
  if microbatches < least:
    why = (f'{names["microbatches"]} = {microbatches} is not 1 or more.' if microbatches < 1 else
           f'{names["microbatches"]} = {microbatches} is fewer than the {stages} stages: under the '
           'circular schedule the first microbatch would come round before the last has started.')
    if rows is not None and not legal:  # too few rows for any number
      return [f'{why} Set {names["batch"]} = {parts * stages} and {names["microbatches"]} = '
              f"{stages}, or {names['schedule']} = 'gpipe' and {names['repeats']} = 1."]
    return [f'{why} Set it to {any_of(legal) if legal else f"{least} or more"}.']
  if rows is None or rows % microbatches == 0:
    return []
  unit = parts * microbatches
  nearest = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
  fix = f'{names["batch"]} = {any_of(nearest)}'
  if legal:
    fix = f'{names["microbatches"]} = {any_of(legal)}, or {fix}'
  each = f'{rows} rows' if parts == 1 else f'the {rows} rows of each of {parts} parts'
  return [f'batch = {batch}: {each} cannot be cut into {names["microbatches"]} = {microbatches}. '
          f'Set {fix}.']
