"""The timetable of a pipeline, its bubble, its traffic, and checks of its settings.

Time is counted in ticks. At the end of a tick every stage sends one activation to its neighbor. A
unit is one microbatch in one of the stage's blocks of layers. Everything here is arithmetic that
works on ints, NumPy arrays and traced values; `pipeline.value_and_grad` follows the `Timetable`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Optional

import numpy as np

from t5x_gpu.errors import Problem
from t5x_gpu.partitioning.mesh_sizes import SET_BY, divisors
from t5x_gpu.partitioning.trees import Index

# gpipe: all forward, then all backward. 1f1b: backward of each microbatch as soon as possible.
# circular: gpipe with several blocks of layers per stage, which microbatches visit in turn.
SCHEDULES = ('gpipe', '1f1b', 'circular')


@dataclasses.dataclass(frozen=True)
class Timetable:
  """The schedule of a pipeline: which unit each stage computes in each tick.

  Attributes:
    schedule: one of SCHEDULES.
    num_stages: S, at least 2.
    num_microbatches: M; at least S if a stage has several blocks.
    repeats: R, blocks of layers per stage and stack; 1 unless 'circular'. Block r of stage s is
      block r * S + s of the stack.
    num_stacks: K, stacks of the model: 2 for encoder-decoders, else 1. A stage has R blocks of the
      first stack, then R of the second. 1 for '1f1b' and without `skip_idle`.
    skip_idle: whether a stage without work skips its layers; otherwise it computes and discards.
  """

  schedule: str
  num_stages: int
  num_microbatches: int
  repeats: int = 1
  num_stacks: int = 1
  skip_idle: bool = True

  @property
  def num_blocks(self) -> int:
    """Blocks of layers of every stage, K*R; a microbatch visits a stage this often."""
    return self.num_stacks * self.repeats

  @property
  def num_units(self) -> int:
    """Units of every stage: unit u is microbatch u % M in the stage's block u // M."""
    return self.num_blocks * self.num_microbatches

  @property
  def forward_ticks(self) -> int:
    """Ticks until the last stage has computed its last unit."""
    return self.num_units + self.num_stages - 1

  @property
  def interleaved_ticks(self) -> int:
    """Ticks of a 1f1b step; in each a stage runs one unit forward and another backward."""
    return self.num_units + 2 * (self.num_stages - 1)

  @property
  def ticks(self) -> int:
    """Ticks of a step's forward pass; in 1f1b they contain the backward pass, too."""
    return self.interleaved_ticks if self.schedule == '1f1b' else self.forward_ticks

  @property
  def busy_share(self) -> float:
    """Share of the ticks in which a stage has work."""
    return self.num_units / self.ticks

  @property
  def bubble_fraction(self) -> float:
    """Fraction of the time of the layers in which a stage waits for others.

    (S-1) / (K*R*M + S-1): a stage has work in K*R*M of K*R*M + S-1 forward slots, and likewise in
    the backward pass. With two stacks this assumes blocks of equal duration; otherwise stages also
    wait for the slower block. Slots of 1f1b in which all stages idle cost nothing. If idle work is
    computed and discarded, they cost 2(S-1) of M + 2(S-1).

    Source: Narayanan et al. 2021 (arXiv:2104.04473), sections 2.2.1 and 2.2.2, which give it
    relative to the ideal time, (S-1) / (R*M); Huang et al. 2019 (GPipe), section 2.2.
    """
    return 1.0 - self.num_units / (self.forward_ticks if self.skip_idle else self.ticks)

  @property
  def head_share(self) -> int:
    """Microbatches whose head a stage computes, rounded up; in 1f1b the last stage computes all."""
    return -(-self.num_microbatches // self.num_stages)

  @property
  def kept_inputs(self) -> int:
    """Stage inputs kept for the backward pass: a ring buffer in 1f1b, otherwise all of them."""
    return 2 * self.num_stages - 1 if self.schedule == '1f1b' else self.forward_ticks

  def forward_unit(self, tick: Index, stage: Index) -> Index:
    """Returns the unit that `stage` runs forward; outside of [0, num_units) it idles."""
    return tick - stage

  def backward_unit(self, tick: Index, stage: Index) -> Index:
    """Returns the unit that `stage` runs backward in 1f1b; on the last stage, its forward unit."""
    return tick - (2 * (self.num_stages - 1) - stage)

  @property
  def least_rows(self) -> int:
    """Fewest rows of a device: with several blocks per stage, microbatches go around the stages."""
    return self.num_stages if self.num_blocks > 1 else 1

  def for_rows(self, rows: int) -> 'Timetable':
    """Returns the schedule for another number of rows, with as few microbatches if possible.

    Args:
      rows: rows of one device, at least `least_rows`.
    """
    legal = [n for n in divisors(rows) if n >= self.least_rows]
    count = max((n for n in legal if n <= self.num_microbatches), default=legal[0])
    return dataclasses.replace(self, num_microbatches=count)


def layer_order(num_layers: int, num_stages: int, repeats: int = 1) -> np.ndarray:
  """Returns p [layers]: layer i of the parameters in memory is layer p[i] of the model.

  If `stage` splits the parameters into contiguous parts, stage s gets its blocks r * S + s for r in
  range(repeats), in this order.
  """
  blocks = np.arange(num_layers).reshape(repeats, num_stages, -1)
  return blocks.swapaxes(0, 1).reshape(-1)


def traffic_per_step(
  table: Timetable,
  *,
  activation_bytes: int,
  output_bytes: Optional[int] = None,
  shared_gradient_bytes: int = 0,
  sums_in_last_tick: bool = False,
) -> dict[str, float]:
  """Returns collective -> bytes that a device sends over `stage` per training step.

  'collective-permute': one activation per tick and direction. Except in 1f1b, also the last stage's
  outputs for the heads of other stages, and their gradients. 'all-reduce', once, by the caller:
  gradients of parameters that every stage holds, as a ring. Evaluation sends half of the permutes.

  Args:
    table: the schedule.
    activation_bytes: bytes of a microbatch between two layers on one device, over all stacks.
    output_bytes: bytes of the part that the head reads (the last stack's); None for all bytes.
    shared_gradient_bytes: gradients of all parameters except layers, on one device.
    sums_in_last_tick: whether the last tick is computed separately (`pipeline.LayerSums`). In 1f1b
      it has no forward pass.
  """
  num_stages = table.num_stages
  if table.schedule == '1f1b':
    sent = (table.interleaved_ticks - 0.5 * sums_in_last_tick) * activation_bytes
  else:
    output_bytes = activation_bytes if output_bytes is None else output_bytes
    sent = (
      table.forward_ticks * activation_bytes + table.head_share * (num_stages - 1) * output_bytes
    )
  traffic = {'collective-permute': 2.0 * sent}
  if shared_gradient_bytes:
    traffic['all-reduce'] = 2.0 * (num_stages - 1) / num_stages * shared_gradient_bytes
  return traffic


# Parameters of a pipeline.
STAGE, SCHEDULE = 'Partitioner.stage', 'Partitioner.pipeline_schedule'
REPEATS, MICROBATCHES = 'Partitioner.pipeline_repeats', 'Partitioner.num_pipeline_microbatches'


def check(
  sizes: Mapping[str, int],
  mesh_shape: Mapping[str, int],
  *,
  schedule: str,
  num_pipeline_microbatches: int,
  repeats: int = 1,
  batch_parts: int = 1,
  num_microbatches: int = 1,
  skip_idle: bool = True,
) -> list[Problem]:
  """Returns everything that keeps the pipeline from running.

  Args:
    sizes: array axis -> size; reads 'layers', 'encoder_layers' (if it differs), 'stacks' (1 by
      default) and 'batch' (global).
    mesh_shape: mesh axis -> size. There are no problems unless `stage` is 2 or more.
    schedule: one of SCHEDULES.
    num_pipeline_microbatches: parts into which a device's rows are cut.
    repeats: blocks of layers per stage and stack.
    batch_parts: product of the mesh axes that split rows.
    num_microbatches: parts of gradient accumulation; each goes through the pipeline separately.
    skip_idle: whether stages without work skip their layers; with a ring they cannot.
  """
  stages = mesh_shape.get('stage', 1)
  if stages == 1:
    return []
  num_stacks = sizes.get('stacks', 1)
  counts = {name: sizes[name] for name in ('layers', 'encoder_layers') if name in sizes}
  problems = _schedule_problems(schedule, repeats, stages, num_stacks)
  if num_stacks > 1 and not skip_idle:
    problems.append(
      Problem(
        "Partitioner.context_attention = 'ring' in a pipeline of encoder and decoder: a hop waits "
        f'for all devices, but some of the {stages} stages may be in the decoder while others are '
        'in the encoder.',
        "Set Partitioner.context_attention = 'gather'.",
        ('Partitioner.context_attention', STAGE),
      )
    )
  problems += _layer_problems(counts, stages, max(repeats, 1))
  return problems + _microbatch_problems(
    schedule,
    num_pipeline_microbatches,
    stages,
    sizes.get('batch'),
    batch_parts * num_microbatches,
    num_stacks,
  )


def _schedule_problems(schedule: str, repeats: int, stages: int, num_stacks: int) -> list[Problem]:
  set_circular = f"Set {SCHEDULE} = 'circular'."
  set_gpipe = f"Set {SCHEDULE} = 'gpipe'."
  if repeats < 1:
    what = f'{REPEATS} = {repeats} must be at least 1.'
    return [Problem(what, f'Set {REPEATS} = 1.', (REPEATS,))]
  if schedule == '1f1b' and num_stacks > 1:
    what = (
      f"{SCHEDULE} = '1f1b' starts the backward pass of a microbatch once it has passed "
      f'the {stages} stages; with an encoder and a decoder it passes them {num_stacks} times.'
    )
    return [Problem(what, set_circular if repeats > 1 else set_gpipe, (SCHEDULE, REPEATS))]
  if schedule == 'circular' and repeats == 1:
    times = 'once' if num_stacks == 1 else f'once per stack of layers, {num_stacks} times'
    what = (
      f'The circular schedule with {REPEATS} = 1 is gpipe: each microbatch passes '
      f'the {stages} stages {times}.'
    )
    return [Problem(what, set_gpipe, (SCHEDULE, REPEATS))]
  if schedule != 'circular' and repeats > 1:
    what = (
      f'{REPEATS} = {repeats}, but under {schedule} each microbatch passes the '
      f'{stages} stages once{" per stack of layers" if num_stacks > 1 else ""}.'
    )
    return [Problem(what, set_circular, (REPEATS, SCHEDULE))]
  return []


def _layer_problems(counts: Mapping[str, int], stages: int, repeats: int) -> list[Problem]:
  """Returns the problem with the layer counts of all stacks, if any.

  Args:
    counts: 'layers' or 'encoder_layers' -> layers.
    stages, repeats: settings of the pipeline.
  """
  blocks = stages * repeats
  wrong = {name: count for name, count in counts.items() if count % blocks}
  if not wrong:
    return []
  over = f'stage={stages}' + (f' x {repeats} blocks each (= {blocks})' if repeats > 1 else '')
  others = ''.join(
    f' ({name} = {count} does)' for name, count in counts.items() if name not in wrong
  )
  said = ' and '.join(f'{name} = {count}' for name, count in wrong.items())
  what = f'{said} {"do" if len(wrong) > 1 else "does"} not divide over {over}{others}.'
  common = math.gcd(*counts.values())
  set_by = [SET_BY[name] for name in wrong]
  if repeats == 1:
    fix = f'Set {STAGE} to a number that divides {common}.'
    return [Problem(what, fix, (*set_by, STAGE))]
  fix = f'Set {STAGE} and {REPEATS} so that their product divides {common}.'
  return [Problem(what, fix, (*set_by, STAGE, REPEATS))]


def _microbatch_problems(
  schedule: str, microbatches: int, stages: int, batch: Optional[int], parts: int, num_stacks: int
) -> list[Problem]:
  """Returns the problem with the microbatches of the pipeline, if any.

  Args:
    schedule, stages, num_stacks: settings of the pipeline.
    microbatches: parts into which a device's rows are cut.
    batch: global rows; None if unknown.
    parts: number of equal parts of the batch; the pipeline cuts each of them.
  """
  least = stages if schedule == 'circular' or num_stacks > 1 else 1
  # Other checks report a batch that the mesh or the accumulation does not divide.
  rows = batch // parts if batch and batch % parts == 0 else None
  if microbatches < least:
    where = 'under the circular schedule' if num_stacks == 1 else 'from the encoder to the decoder'
    what = (
      f'{MICROBATCHES} = {microbatches} must be at least 1.'
      if microbatches < 1
      else f'{MICROBATCHES} = {microbatches} is fewer than the {stages} stages: {where} '
      'the first microbatch would return to stage 0 before the last has started.'
    )
  elif rows is None or rows % microbatches == 0:
    return []
  else:
    each = f'{rows} rows' if parts == 1 else f'the {rows} rows of each of {parts} parts'
    what = f'batch = {batch}: {each} cannot be cut into {MICROBATCHES} = {microbatches}.'
  if rows is not None and rows < least:  # too few for any number
    fix = f'Set {SET_BY["batch"]} to a multiple of {parts * max(least, microbatches)}.'
  else:
    rule = [f'divides {rows}'] * bool(rows) + [f'is at least {least}'] * (least > 1 or not rows)
    fix = f'Set {MICROBATCHES} to a number that {" and ".join(rule)}.'
  return [Problem(what, fix, (SET_BY['batch'], MICROBATCHES))]
