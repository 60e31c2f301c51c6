"""What each interruption of a run has cost, as tables for a page and a terminal.

The ledger has the ends of processes, and with `launch` their causes. An interruption costs the
steps that are trained again, the time until it is noticed, and the time until the next step.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.metrics.goodput import DONE, DOWNTIME, LOST, Accounts, ProcessAccount
from t5x_gpu.runtime.cluster.interruptions import CRASHED
from t5x_gpu.terminal import console
from t5x_gpu.terminal.progress import format_seconds

_MOST = 40  # interruptions in a terminal; a page has all
STOPPED = 'stopped'
UNKNOWN = 'unknown'
_INTERRUPTS = ('SIGINT', 'KeyboardInterrupt')
# A job that was stopped this close to its end was stopped by its time limit.
_LIMIT_SECONDS = 900.0


@dataclasses.dataclass(frozen=True)
class InterruptionCost:
  """What one interruption has cost.

  Attributes:
    at: when it was noticed, or the last sign of the process, in seconds since 1970.
    kind: 'process killed', ...; 'unknown' without `launch`.
    cause: what happened.
    error: the error of a process as one line, '' if there is none.
    step: the last finished step; None before the first one.
    repeated_steps: number of steps that were trained again.
    repeated: seconds of these steps.
    noticing: seconds from the last finished step until `launch` noticed; None if unknown.
    restarting: seconds until the next process had its state and compiled step; without `launch`,
      from the last sign of the process.
  """

  at: float
  kind: str
  cause: str
  error: str
  step: Optional[int]
  repeated_steps: int
  repeated: float
  noticing: Optional[float]
  restarting: float

  @property
  def total(self) -> float:
    return self.repeated + (self.noticing or 0.0) + self.restarting


def costs_of(accounts: Accounts) -> list[InterruptionCost]:
  """Returns what each interruption has cost, in the order of time.

  Before a process, several starts may have failed without a line: then each costs the time until
  the next one, and the last one the time until the first step.
  """
  found: list[InterruptionCost] = []
  for before, now in itertools.pairwise([None, *accounts.processes]):
    if before is not None and before.process.end == DONE:
      before = None
    if before is not None or now.interruptions:
      found += _costs(before, now)
  return found


def _costs(before: Optional[ProcessAccount], now: ProcessAccount) -> list[InterruptionCost]:
  """Returns the costs of the interruptions between two processes; None before the first one."""
  end = now.process.start
  begin = end - now.seconds[DOWNTIME] if before else min(end, now.interruptions[0].at)
  again = math.fsum(now.seconds[name] for name in ('init', 'compile', 'restore')) if before else 0.0
  lost_steps, lost = (before.lost_steps, before.seconds[LOST]) if before else (0, 0.0)
  if not now.interruptions:
    kind, cause = _end_of(before, now)
    error = str(before.process.facts.get('error', ''))
    down = end - begin + again
    step = before.process.last.step
    return [InterruptionCost(begin, kind, cause, error, step, lost_steps, lost, None, down)]
  # Clocks of hosts may differ.
  noticed = [min(max(each.at, begin), end) for each in now.interruptions]
  noticed = list(itertools.accumulate(noticed, max))
  found = [
    InterruptionCost(at, each.kind, each.cause, each.error, each.step, 0, 0.0, None, until - at)
    for each, at, until in zip(now.interruptions, noticed, [*noticed[1:], end + again])
  ]
  if before:
    first, noticing = found[0], noticed[0] - begin
    found[0] = dataclasses.replace(
      first, repeated_steps=lost_steps, repeated=lost, noticing=noticing
    )
  return found


def _end_of(before: ProcessAccount, now: ProcessAccount) -> tuple[str, str]:
  """Returns the kind and cause of an end that no `launch` has seen."""
  end, facts = before.process.end, before.process.facts
  job, later = facts.get('job'), now.process.facts
  # In an interactive job, the user starts a run again.
  attempts = [each.get('job_attempt') for each in (facts, later)]
  is_again = bool(job) and job == later.get('job') and attempts[0] != attempts[1]
  again = f'; the scheduler started job {job} again' if is_again else ''
  if end is None:
    return UNKNOWN, f'killed, cause unknown{again}'
  if end in _INTERRUPTS:
    return STOPPED, 'stopped by Ctrl-C'
  if not end.startswith('SIG'):
    return CRASHED, f'ended by {end}{again}'
  limit = facts.get('job_end')
  if isinstance(limit, int | float) and abs(limit - before.process.last.at) < _LIMIT_SECONDS:
    return STOPPED, f'stopped by {end}, at the time limit of the job{again}'
  return STOPPED, f'stopped by {end}{again}'


@dataclasses.dataclass(frozen=True)
class InterruptionTable:
  """A table.

  Attributes:
    title: text above the table.
    head, rows: names of the columns, and the cells.
    texts: columns of text; the others hold numbers.
  """

  title: str
  head: Sequence[str]
  rows: Sequence[Sequence[str]]
  texts: Sequence[int]

  def text(self) -> str:
    """Returns the table for a terminal, without its title."""
    right = [i for i in range(len(self.head)) if i not in self.texts]
    rows = [[' '.join(cell.split()) for cell in row] for row in (self.head, *self.rows)]
    return console.table(rows, right=right)


def table_of(costs: Sequence[InterruptionCost], accounts: Accounts) -> InterruptionTable:
  """Returns a row for each interruption."""
  rows = [
    [
      time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each.at)),
      '' if each.step is None else f'{each.step:,}',
      f'{each.repeated_steps:,}' if each.repeated_steps else '',
      _seconds(each.repeated) if each.repeated_steps else '',
      '' if each.noticing is None else _seconds(each.noticing),
      _seconds(each.restarting),
      _seconds(each.total),
      _share(each.total, accounts),
      f'{each.cause}: {each.error}' if each.error else each.cause,
    ]
    for each in costs
  ]
  head = ['noticed', 'after step', 'steps repeated', 'repeating s', 'noticing s', 'restart s']
  head += ['cost s', 'share', 'what happened']
  return InterruptionTable('Interruptions', head, rows, (0, 8))


def totals_of(costs: Sequence[InterruptionCost], accounts: Accounts) -> InterruptionTable:
  """Returns a row for each kind of interruption, the most expensive first."""
  kinds = {each.kind: [c for c in costs if c.kind == each.kind] for each in costs}
  rows = [
    [
      kind,
      str(len(found)),
      f'{sum(each.repeated_steps for each in found):,}',
      _seconds(_total(found)),
      _share(_total(found), accounts),
    ]
    for kind, found in sorted(kinds.items(), key=lambda item: -_total(item[1]))
  ]
  head = ['kind', 'number', 'steps repeated', 'cost s', 'share']
  return InterruptionTable('Interruptions by kind', head, rows, (0,))


def printed_tables(accounts: Accounts) -> str:
  """Returns both tables for a terminal; '' for a run that nothing interrupted."""
  costs = costs_of(accounts)
  if not costs:
    return ''
  number = '1 interruption' if len(costs) == 1 else f'{len(costs)} interruptions'
  wall = math.fsum(accounts.seconds.values())
  title = f'{number} cost {format_seconds(_total(costs))} of {format_seconds(wall)}'
  if len(costs) > _MOST:
    title += f'; the last {_MOST} are shown'
  last = table_of(costs[-_MOST:], accounts)
  return f'{title}:\n{last.text()}\n\n{totals_of(costs, accounts).text()}\n'


def _total(costs: Sequence[InterruptionCost]) -> float:
  return math.fsum(each.total for each in costs)


def _seconds(value: float) -> str:
  return f'{value:,.1f}'


def _share(seconds: float, accounts: Accounts) -> str:
  return f'{100 * seconds / max(math.fsum(accounts.seconds.values()), 1e-9):.1f}%'
