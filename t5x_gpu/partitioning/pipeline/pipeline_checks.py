"""Checks of a pipeline's settings."""

import math
from collections.abc import Mapping
from typing import Optional

from t5x_gpu.errors import Problem

# The parameters that a user sets, for errors.
SET_BY = {
  'layers': 'TransformerConfig.num_layers',
  'batch': 'BATCH_SIZE',
  'encoder_layers': 'EncoderDecoderModel.num_encoder_layers',
  'stage': 'Partitioner.stage',
  'schedule': 'Partitioner.pipeline_schedule',
  'microbatches': 'Partitioner.num_pipeline_microbatches',
  'repeats': 'Partitioner.pipeline_repeats',
  'context_attention': 'Partitioner.context_attention',
}


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
      _problem(
        f"{SET_BY['context_attention']} = 'ring' in a pipeline of encoder and decoder: a hop waits "
        f'for all devices, but some of the {stages} stages may be in the decoder while others are '
        'in the encoder.',
        f"Set {SET_BY['context_attention']} = 'gather'.",
        'context_attention',
        'stage',
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


def _problem(what: str, fix: str, *names: str) -> Problem:
  return Problem(what, fix, tuple(SET_BY[name] for name in names))


def _schedule_problems(schedule: str, repeats: int, stages: int, num_stacks: int) -> list[Problem]:
  set_circular = f"Set {SET_BY['schedule']} = 'circular'."
  set_gpipe = f"Set {SET_BY['schedule']} = 'gpipe'."
  if repeats < 1:
    what = f'{SET_BY["repeats"]} = {repeats} must be at least 1.'
    return [_problem(what, f'Set {SET_BY["repeats"]} = 1.', 'repeats')]
  if schedule == '1f1b' and num_stacks > 1:
    what = (
      f"{SET_BY['schedule']} = '1f1b' starts the backward pass of a microbatch once it has passed "
      f'the {stages} stages; with an encoder and a decoder it passes them {num_stacks} times.'
    )
    return [_problem(what, set_circular if repeats > 1 else set_gpipe, 'schedule', 'repeats')]
  if schedule == 'circular' and repeats == 1:
    times = 'once' if num_stacks == 1 else f'once per stack of layers, {num_stacks} times'
    what = (
      f'The circular schedule with {SET_BY["repeats"]} = 1 is gpipe: each microbatch passes '
      f'the {stages} stages {times}.'
    )
    return [_problem(what, set_gpipe, 'schedule', 'repeats')]
  if schedule != 'circular' and repeats > 1:
    what = (
      f'{SET_BY["repeats"]} = {repeats}, but under {schedule} each microbatch passes the '
      f'{stages} stages once{" per stack of layers" if num_stacks > 1 else ""}.'
    )
    return [_problem(what, set_circular, 'repeats', 'schedule')]
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
  if repeats == 1:
    fix = f'Set {SET_BY["stage"]} to a number that divides {common}.'
    return [_problem(what, fix, *wrong, 'stage')]
  fix = f'Set {SET_BY["stage"]} and {SET_BY["repeats"]} so that their product divides {common}.'
  return [_problem(what, fix, *wrong, 'stage', 'repeats')]


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
  name = SET_BY['microbatches']
  if microbatches < least:
    where = 'under the circular schedule' if num_stacks == 1 else 'from the encoder to the decoder'
    what = (
      f'{name} = {microbatches} must be at least 1.'
      if microbatches < 1
      else f'{name} = {microbatches} is fewer than the {stages} stages: {where} '
      'the first microbatch would return to stage 0 before the last has started.'
    )
  elif rows is None or rows % microbatches == 0:
    return []
  else:
    each = f'{rows} rows' if parts == 1 else f'the {rows} rows of each of {parts} parts'
    what = f'batch = {batch}: {each} cannot be cut into {name} = {microbatches}.'
  if rows is not None and rows < least:  # too few for any number
    fix = f'Set {SET_BY["batch"]} to a multiple of {parts * max(least, microbatches)}.'
  else:
    rule = [f'divides {rows}'] * bool(rows) + [f'is at least {least}'] * (least > 1 or not rows)
    fix = f'Set {name} to a number that {" and ".join(rule)}.'
  return [_problem(what, fix, 'batch', 'microbatches')]
