"""Sections of a report on wall time: goodput, progress, the starts of a run."""

import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.metrics.goodput_accounts import (
  CATEGORIES,
  DONE,
  DOWNTIME,
  LOST,
  MEANING,
  ProcessAccount,
  summary,
)
from t5x_gpu.reporting.charts import Axis, Series, line_chart, stacked_bars
from t5x_gpu.reporting.markup import Child, element
from t5x_gpu.reporting.page import Section, folded, table
from t5x_gpu.reporting.run_record import RunRecord
from t5x_gpu.reporting.scales import Points, short_number
from t5x_gpu.terminal.bars import format_seconds

# Category -> number of its color.
COLORS = dict(zip(CATEGORIES, (2, 7, 6, 5, 4, 0, 1, 9, 3, 8)))
SILENT_SECONDS = 120.0  # a living process writes to its ledger every 30 s
_ENDS = {'KeyboardInterrupt': 'Ctrl-C', 'SIGINT': 'Ctrl-C'}  # as a person ends a run
_NO_LEDGER = (
  'has no goodput.jsonl: the file was lost, the run has not started, or an earlier version of '
  't5x_gpu trained it'
)


def goodput_section(runs: Sequence[RunRecord]) -> Section:
  """Returns a section on how the wall time was spent."""
  known = {run.name: run for run in runs if run.accounts}
  content: list[Child] = []
  if known:
    content += [
      stacked_bars(
        {name: run.accounts.seconds for name, run in known.items()},
        title='Wall time by category',
        colors=COLORS,
        text=format_seconds,
        full=max(sum(run.accounts.seconds.values()) for run in known.values()),
      ),
      *(
        element('p', f'{name}: ' if len(known) > 1 else None, f'goodput {summary(run.accounts)}.')
        for name, run in known.items()
      ),
      _meaning(),
    ]
  content += [element('p', f'{run.name} {_NO_LEDGER}.') for run in runs if not run.accounts]
  intro = 'Goodput is the share of wall time spent on training steps that count.'
  return Section('goodput', 'Goodput', content, intro)


def _meaning() -> Optional[ET.Element]:
  return folded(
    'What the categories mean',
    table(['category', 'its seconds'], list(MEANING.items()), texts=(0, 1)),
  )


def progress_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns steps against wall time, and a table of all starts."""
  known = [run for run in runs if run.accounts]
  if not known:
    return None
  longest = max(max((x for x, _ in _steps_by_time(run, 1)), default=0) for run in known)
  unit, seconds = ('hours', 3600) if longest >= 2 * 3600 else ('minutes', 60)
  curves = [Series(r.name, _steps_by_time(r, seconds), i) for i, r in enumerate(runs) if r.accounts]
  chart = line_chart(
    curves,
    title='Steps against wall time',
    x=Axis(unit, low=0.0, text=short_number, exact=lambda v: f'{v:,.2f}'),
    y=Axis('step', exact=lambda v: f'{v:,.0f}', whole=True, low=0.0),
  )
  tables = [_starts(run, named=len(known) > 1) for run in known]
  count = sum(len(run.accounts.processes) - 1 for run in known)
  lost = sum(run.accounts.lost_steps for run in known)
  intro = f'{_counted(count, "restart")}; {_counted(lost, "step")} trained again.'
  return Section('restarts', 'Progress and restarts', [chart, *tables], intro)


def _counted(number: int, what: str) -> str:
  return f'{number:,} {what}' + ('' if number == 1 else 's')


def _steps_by_time(run: RunRecord, unit: int) -> Points:
  """Returns (units of `unit` seconds since the first start, step); a gap between processes."""
  begin = run.accounts.processes[0].process.start
  points: Points = []
  for account in run.accounts.processes:
    lines = [line for line in account.process.lines if line.step is not None]
    points += [((line.at - begin) / unit, float(line.step)) for line in lines]
    if points:
      points.append((points[-1][0], float('nan')))
  return points


def ended(account: ProcessAccount, *, is_last: bool, now: float) -> str:
  """Returns how a process ended: 'done', 'SIGTERM', 'killed', 'running' and so on."""
  if account.process.end:
    return _ENDS.get(account.process.end, account.process.end)
  age = now - account.process.last.at
  if not is_last:
    return 'killed'
  return 'running' if age < SILENT_SECONDS else f'silent for {format_seconds(age)}'


def _starts(run: RunRecord, *, named: bool) -> ET.Element:
  rows = []
  processes = run.accounts.processes
  for i, account in enumerate(processes):
    process, facts = account.process, account.process.facts
    kind = facts.get('device_kind', '')
    rows.append(
      [
        time.strftime('%Y-%m-%d %H:%M', time.localtime(process.start)),
        format_seconds(process.last.total),
        f'{process.first_step:,}' if process.first_step is not None else '',
        f'{process.last.step:,}' if process.last.step is not None else '',
        ended(account, is_last=i == len(processes) - 1, now=time.time()),
        f'{account.lost_steps:,}' if account.lost_steps else '',
        format_seconds(account.seconds[LOST]) if account.seconds[LOST] else '',
        format_seconds(account.seconds[DOWNTIME]) if i else '',
        f'{facts["devices"]} x {kind}' if 'devices' in facts else '',
        ', '.join(str(facts[k]) for k in ('host', 'job') if facts.get(k)),
      ]
    )
  head = ['start', 'time', 'from step', 'to step', 'end', 'steps lost', 'time lost', 'down before']
  return table(
    [*head, 'devices', 'host, job'],
    rows,
    caption=f'Starts of {run.name}' if named else 'Starts',
    texts=(4, 8, 9),
  )


def state_of(run: RunRecord, *, now: float) -> str:
  """Returns 'done', 'running', 'stopped by SIGTERM', ...; '' if no file records it."""
  if not run.accounts:
    return ''
  last = run.accounts.processes[-1]
  end = ended(last, is_last=True, now=now)
  return f'ended by {end}' if last.process.end not in (None, '', DONE) else end
