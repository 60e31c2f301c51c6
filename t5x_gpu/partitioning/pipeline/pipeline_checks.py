"""Checks of a pipeline's settings; each problem comes with the nearest sizes that work."""

import math
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.errors import did_you_mean
from t5x_gpu.partitioning.mesh.mesh_problems import any_of, divisors, nearest_multiples
from t5x_gpu.partitioning.pipeline.pipeline_schedules import SCHEDULES

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
  legal_sizes: Optional[Mapping[str, Sequence[int]]] = None,
  with_data: Optional[Mapping[str, Sequence[int]]] = None,
) -> list[str]:
  """Returns one sentence with its fix for every problem that keeps the pipeline from running.

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
    legal_sizes: mesh axis -> sizes to suggest; None for any.
    with_data: mesh axis -> sizes to suggest together with data = -1; given if nothing else is
      wrong, and a layout is then suggested, not another model.
  """
  stages = mesh_shape.get('stage', 1)
  if stages == 1:
    return []
  num_stacks = sizes.get('stacks', 1)
  counts = {name: sizes[name] for name in ('layers', 'encoder_layers') if name in sizes}
  problems = _schedule_problems(schedule, repeats, stages, counts, num_stacks)
  if num_stacks > 1 and not skip_idle:
    problems.append(
      f"{SET_BY['context_attention']} = 'ring' in a pipeline of encoder and decoder: a hop waits "
      f'for all devices, but some of the {stages} stages may be in the decoder while others are '
      f"in the encoder. Set {SET_BY['context_attention']} = 'gather'."
    )
  if counts:
    problems += _layer_problems(counts, stages, max(repeats, 1), legal_sizes, with_data)
  return problems + _microbatch_problems(
    schedule,
    num_pipeline_microbatches,
    stages,
    sizes.get('batch'),
    batch_parts * num_microbatches,
    num_stacks,
  )


def _schedule_problems(
  schedule: str, repeats: int, stages: int, counts: Mapping[str, int], num_stacks: int
) -> list[str]:
  if schedule not in SCHEDULES:
    return [
      f'{SET_BY["schedule"]} = {schedule!r} is not a pipeline schedule.'
      f'{did_you_mean(str(schedule), SCHEDULES)} Set it to '
      f'{any_of(map(repr, SCHEDULES))}.'
    ]
  if repeats < 1:
    return [
      f'{SET_BY["repeats"]} = {repeats} must be at least 1. Set it to 1, or to 2 or more with '
      f"{SET_BY['schedule']} = 'circular'."
    ]
  more = (
    '2 or more'
    if not counts or any(n % stages for n in counts.values())
    else (_more_repeats(math.gcd(*counts.values()), stages))
  )
  if schedule == '1f1b' and num_stacks > 1:
    return [_refuse_1f1b(repeats, more, stages, num_stacks)]
  if schedule == 'circular' and repeats == 1:
    fix = f'{SET_BY["repeats"]} = {more}, or ' if more else ''
    times = 'once' if num_stacks == 1 else f'once per stack of layers, {num_stacks} times'
    return [
      f'The circular schedule with {SET_BY["repeats"]} = 1 is gpipe: each microbatch passes '
      f"the {stages} stages {times}. Set {fix}{SET_BY['schedule']} = 'gpipe'."
    ]
  if schedule != 'circular' and repeats > 1:
    return [
      f'{SET_BY["repeats"]} = {repeats}, but under {schedule} each microbatch passes the '
      f'{stages} stages once{" per stack of layers" if num_stacks > 1 else ""}. Set '
      f"{SET_BY['schedule']} = 'circular', or {SET_BY['repeats']} = 1."
    ]
  return []


def _refuse_1f1b(repeats: int, more: str, stages: int, num_stacks: int) -> str:
  """Returns the sentence for a model with several stacks; `more` has the legal repeats above 1."""
  if repeats > 1:
    fix = f"{SET_BY['schedule']} = 'circular'"
  else:
    circular = f", or {SET_BY['schedule']} = 'circular' and {SET_BY['repeats']} = {more}"
    fix = f"{SET_BY['schedule']} = 'gpipe'{circular if more else ''}"
  return (
    f"{SET_BY['schedule']} = '1f1b' starts the backward pass of a microbatch once it has passed "
    f'the {stages} stages; with an encoder and a decoder it passes them {num_stacks} times. '
    f'Set {fix}.'
  )


def _more_repeats(layers: int, stages: int) -> str:
  """Returns the legal numbers of blocks per stage above 1; '' if there are none."""
  legal = divisors(layers // stages)[1:]
  return any_of(legal) if legal else ''


def _layer_problems(
  counts: Mapping[str, int],
  stages: int,
  repeats: int,
  legal_sizes: Optional[Mapping[str, Sequence[int]]],
  with_data: Optional[Mapping[str, Sequence[int]]],
) -> list[str]:
  """Returns the problem with the layer counts of all stacks, if any.

  Args:
    counts: 'layers' or 'encoder_layers' -> layers.
    stages, repeats: of the pipeline.
    legal_sizes, with_data: as in `check`.
  """
  blocks, common = stages * repeats, math.gcd(*counts.values())
  wrong = {name: count for name, count in counts.items() if count % blocks}
  if not wrong:
    return []
  what = f'stage={stages}' + (f' x {repeats} blocks each (= {blocks})' if repeats > 1 else '')
  others = ''.join(
    f' ({name} = {count} does)' for name, count in counts.items() if name not in wrong
  )
  fitting, fix = [n // repeats for n in divisors(common) if n % repeats == 0], []
  for legal, also in ((legal_sizes, ''), (with_data, ' and Partitioner.data = -1')):
    possible = [n for n in fitting if legal is None or n in legal['stage']]
    if possible and not fix:
      fix.append(f'{SET_BY["stage"]} = {any_of(possible)}{also}')
  if repeats > 1 and common % stages == 0:
    more = _more_repeats(common, stages)
    if more:
      fix.append(f'{SET_BY["repeats"]} = {more}')
  if with_data is None or not fix:
    multiples = {name: any_of(nearest_multiples(n, blocks)) for name, n in wrong.items()}
    fix.insert(0, ' and '.join(f'{SET_BY[name]} = {text}' for name, text in multiples.items()))
  said = ' and '.join(f'{name} = {count}' for name, count in wrong.items())
  return [
    f'{said} {"do" if len(wrong) > 1 else "does"} not divide over {what}{others}. '
    f'Set {", or ".join(fix)}.'
  ]


def _microbatch_problems(
  schedule: str, microbatches: int, stages: int, batch: Optional[int], parts: int, num_stacks: int
) -> list[str]:
  least = stages if schedule == 'circular' or num_stacks > 1 else 1
  # Other checks report a batch that the mesh or the accumulation does not divide.
  rows = batch // parts if batch and batch % parts == 0 else None
  legal = [n for n in divisors(rows) if n >= least] if rows else []
  if microbatches < least:
    where = 'under the circular schedule' if num_stacks == 1 else 'from the encoder to the decoder'
    reason = (
      f'{SET_BY["microbatches"]} = {microbatches} must be at least 1.'
      if microbatches < 1
      else f'{SET_BY["microbatches"]} = {microbatches} is fewer than the {stages} stages: {where} '
      'the first microbatch would return to stage 0 before the last has started.'
    )
    if rows is not None and not legal:  # too few rows for any number
      others = (
        ''
        if num_stacks > 1
        else (f", or {SET_BY['schedule']} = 'gpipe' and {SET_BY['repeats']} = 1")
      )
      return [
        f'{reason} Set {SET_BY["batch"]} = {parts * stages} and {SET_BY["microbatches"]} = '
        f'{stages}{others}.'
      ]
    return [f'{reason} Set it to {any_of(legal) if legal else f"{least} or more"}.']
  if rows is None or rows % microbatches == 0:
    return []
  unit = parts * microbatches
  nearest = [n for n in (batch // unit * unit, (batch // unit + 1) * unit) if n]
  fix = f'{SET_BY["batch"]} = {any_of(nearest)}'
  if legal:
    fix = f'{SET_BY["microbatches"]} = {any_of(legal)}, or {fix}'
  each = f'{rows} rows' if parts == 1 else f'the {rows} rows of each of {parts} parts'
  return [
    f'batch = {batch}: {each} cannot be cut into {SET_BY["microbatches"]} = {microbatches}. '
    f'Set {fix}.'
  ]
