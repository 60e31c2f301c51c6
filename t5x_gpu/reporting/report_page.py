"""`report_page`: the report of one run, or of several side by side."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Optional

from t5x_gpu.errors import listed
from t5x_gpu.reporting.page import Section, Tile, page, table
from t5x_gpu.reporting.run_record import RunRecord
from t5x_gpu.reporting.sections import (
  anatomy_section,
  classes_section,
  configuration_section,
  data_section,
  evaluations_section,
  goodput_section,
  loss_section,
  progress_section,
  samples_section,
  speed_section,
  state_of,
)
from t5x_gpu.terminal.progress import format_loss, format_seconds

# Each returns its section, or None if the runs have no data for it. To add a section, add a
# function here; it reads its data from `RunRecord.folder`.
SECTIONS: tuple[Callable[[Sequence[RunRecord]], Optional[Section]], ...] = (
  loss_section,
  goodput_section,
  progress_section,
  speed_section,
  anatomy_section,
  evaluations_section,
  classes_section,
  data_section,
  configuration_section,
  samples_section,
)


REPORT = 'report.html'  # in MODEL_DIR


def report_page(runs: Sequence[RunRecord]) -> str:
  """Returns the report as HTML."""
  several = len(runs) > 1
  sections = [section for make in SECTIONS if (section := make(runs))]
  if several:
    sections.insert(0, _comparison(runs))
  written = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime())
  return page(
    ' and '.join(listed([run.name for run in runs], 3)),
    sections,
    subtitle='' if several else _subtitle(runs[0]),
    tiles=[] if several else _tiles(runs[0]),
    notes=[
      (f'{run.name}: ' if several else '') + problem for run in runs for problem in run.problems
    ],
    footer=f'python -m t5x_gpu.report wrote this page at {written}.',
  )


def _subtitle(run: RunRecord) -> str:
  total = f' of {run.total_steps:,}' if run.total_steps else ''
  steps = f'{run.step:,}{total} steps' if run.step is not None else ''
  kind, count = run.facts.get('device_kind', ''), run.facts.get('devices')
  devices = f'{count} x {kind}' if count else ''
  name = run.settings.get('MIXTURE_OR_TASK_NAME')
  parts = (state_of(run, now=time.time()), steps, devices, name.value.strip('\'"') if name else '')
  return ' · '.join(filter(None, parts))


def _number(value: Optional[float]) -> str:
  return '' if value is None else format_loss(value)


def _tiles(run: RunRecord) -> list[Tile]:
  """Returns the numbers at the top of the page, if known."""
  tiles = []
  loss, evaluated = run.last('train/loss'), run.last('eval/loss')
  if loss is not None:
    step = max(step for step, _ in run.series('train/loss'))
    tone = '' if math.isfinite(loss) else 'bad'
    tiles.append(Tile('training loss', _number(loss), f'at step {step:,.0f}', tone))
  if evaluated is not None:
    step, best = min(((s, v) for s, v in run.series('eval/loss')), key=lambda p: p[1])
    note = f'best {_number(best)} at step {step:,.0f}'
    tiles.append(Tile('evaluation loss', _number(evaluated), note))
  speed = run.last('train/tokens_per_second')
  if speed is not None:
    tiles.append(Tile('tokens/s', f'{speed:,.0f}', 'all devices together'))
  if run.accounts:
    share = run.accounts.goodput
    tiles += [
      Tile(
        'goodput',
        f'{100 * share:.0f}%',
        f'of {format_seconds(run.accounts.wall_seconds)}',
        'good' if share >= 0.9 else 'bad' if share < 0.5 else '',
      ),
      Tile(
        'restarts',
        str(len(run.accounts.processes) - 1),
        f'{run.accounts.lost_steps:,} steps trained again',
      ),
    ]
  if run.checkpoints:
    count = len(run.checkpoints)
    tiles.append(Tile('last checkpoint', f'{run.checkpoints[-1]:,}', f'{count} kept'))
  return tiles


def _comparison(runs: Sequence[RunRecord]) -> Section:
  rows = []
  for run in runs:
    speed = run.last('train/tokens_per_second')
    rows.append(
      [
        run.name,
        state_of(run, now=time.time()),
        f'{run.step:,}' if run.step is not None else '',
        _number(run.last('train/loss')),
        _number(run.last('eval/loss')),
        '' if speed is None else f'{speed:,.0f}',
        f'{100 * run.accounts.goodput:.0f}%' if run.accounts else '',
        format_seconds(run.accounts.wall_seconds) if run.accounts else '',
        str(run.facts.get('devices', '')),
      ]
    )
  head = ['run', 'state', 'step', 'loss', 'eval loss', 'tokens/s', 'goodput', 'wall time']
  return Section('comparison', 'Comparison', [table([*head, 'devices'], rows, texts=(0, 1))])
