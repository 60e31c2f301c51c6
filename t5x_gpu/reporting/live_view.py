"""One screen about a run, for a terminal: `python -m t5x_gpu.top`."""

import datetime
import math
import time
from collections.abc import Sequence
from typing import Optional

import rich.console
import rich.progress_bar
import rich.table
import rich.text

from t5x_gpu.metrics.goodput import LOST, summary
from t5x_gpu.metrics.throughput import pauses_that_took_time
from t5x_gpu.reporting.run_record import RunRecord
from t5x_gpu.reporting.sections import ended, latest_profile, mixture_shares, state_of
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.terminal.progress import format_loss, format_seconds

_BLOCKS, _ASCII = '▁▂▃▄▅▆▇█', '_.-=+*%#'
_SPARKS = 40
_SPEED_SECONDS = 900.0  # the shown speed is the mean of the last quarter of an hour
_MOST_PROBLEMS = 3
_PARTS = ('compute', 'exposed_communication', 'input_wait')
_MOST_SHARES = 4
_SAMPLE_CHARACTERS = 500


def view(run: RunRecord, *, now: Optional[float] = None, unicode: bool = True) -> rich.table.Table:
  """Returns the screen.

  Args:
    run: the run's record.
    now: seconds since 1970; None for the current time.
    unicode: whether the terminal can show blocks.
  """
  now = time.time() if now is None else now
  grid = rich.table.Table.grid(padding=(0, 2, 0, 0))
  grid.add_column(style='dim', no_wrap=True)
  grid.add_column()
  devices = run.facts.get('devices')
  where = f'{devices} x {run.facts.get("device_kind", "")}' if devices else ''
  title = (' · ' if unicode else ' | ').join(
    filter(None, (run.name, state_of(run, now=now), where, _host(run)))
  )
  profile, unreadable = latest_profile(run)
  grid.add_row('run', rich.text.Text(title, style='bold'))
  for name, content in (
    ('step', _progress(run, now)),
    ('loss', _loss(run, unicode=unicode)),
    ('speed', _speed(run)),
    ('profile', _profile(profile, now) if profile else ''),
    ('eval', _evaluation(run)),
    ('goodput', summary(run.accounts) if run.accounts else ''),
    ('mixture', _mixture(run)),
    ('saved', _saved(run)),
    ('sample', _sample(run, unicode=unicode)),
    ('restarts', _restarts(run, now)),
    *(('note', problem) for problem in [*run.problems, *unreadable][:_MOST_PROBLEMS]),
  ):
    if content:
      is_text = isinstance(content, str)
      grid.add_row(name, rich.text.Text(content) if is_text else content)
  return grid


def _host(run: RunRecord) -> str:
  return ' '.join(str(run.facts[k]) for k in ('host', 'job') if run.facts.get(k))


def eta_seconds(run: RunRecord, *, now: float) -> Optional[float]:
  """Returns the seconds until the last step, saves and evaluations included; None if unknown."""
  if run.total_steps is None or run.step is None:
    return None
  left = max(0, run.total_steps - run.step)
  if not left:
    return 0.0
  if run.accounts:
    lines = [x for x in run.accounts.processes[-1].process.lines if x.step is not None]
    recent = [x for x in lines if x.at >= lines[-1].at - _SPEED_SECONDS]
    if recent and recent[-1].step > recent[0].step:
      seconds = (recent[-1].at - recent[0].at) / (recent[-1].step - recent[0].step)
      return max(0.0, left * seconds - max(0.0, now - recent[-1].at))
  seconds = run.last('train/step_seconds')
  return left * seconds if seconds and math.isfinite(seconds) else None


def _progress(run: RunRecord, now: float) -> rich.console.RenderableType:
  if run.step is None:
    return 'no step yet'
  if run.total_steps is None:
    return f'{run.step:,}'
  eta = eta_seconds(run, now=now) if state_of(run, now=now) in ('', 'running') else None
  text = f'{run.step:,}/{run.total_steps:,} ({run.step / max(1, run.total_steps):.0%})'
  row = rich.table.Table.grid(padding=(0, 1, 0, 0))
  bar = rich.progress_bar.ProgressBar(total=max(1, run.total_steps), completed=run.step, width=30)
  row.add_row(text, bar, f'ETA {format_seconds(eta)}' if eta else '')
  return row


def sparkline(values: Sequence[float], *, unicode: bool = True) -> str:
  """Returns a one-line curve; values that are not finite are `!`."""
  blocks = _BLOCKS if unicode else _ASCII
  known = [v for v in values if math.isfinite(v)]
  low, high = min(known, default=0.0), max(known, default=0.0)
  span = (high - low) or 1.0
  return ''.join(
    blocks[round((v - low) / span * (len(blocks) - 1))] if math.isfinite(v) else '!' for v in values
  )


def _loss(run: RunRecord, *, unicode: bool) -> str:
  values = [value for _, value in run.series('train/loss')]
  if not values:
    return ''
  shown = values[-_SPARKS:]
  return (
    f'{format_loss(values[-1])}  {sparkline(shown, unicode=unicode)}  last {len(shown)} log lines'
  )


def _speed(run: RunRecord) -> str:
  parts = (
    ('train/tokens_per_second', lambda v: f'{v:,.0f} tokens/s'),
    ('train/step_seconds_median', lambda v: f'{v:.3g} s per step'),
    ('train/input_wait_fraction', lambda v: f'input wait {v:.1%}'),
    ('train/mfu', lambda v: f'MFU {v:.1%}'),
  )
  known = [(run.last(key), text) for key, text in parts]
  return '  '.join(text(value) for value, text in known if value is not None)


def _profile(profile: Json, now: float) -> str:
  seconds, parts = profile['seconds_per_step'], profile['parts']
  shares = ', '.join(
    f'{name.replace("_", " ")} {parts[name] / seconds:.1%}'
    for name in _PARTS
    if seconds and parts.get(name) is not None
  )
  pauses = pauses_that_took_time(parts) if seconds else {}
  if pauses:
    between = ', '.join(f'{name} {pause / seconds:.1%}' for name, pause in pauses.items())
    shares += f'; between steps: {between}'
  steps = f'steps {profile["first_step"]:,}-{profile["last_step"]:,}'
  return f'{steps}{_age(profile.get("written", ""), now)}: {shares}'


def _age(written: str, now: float) -> str:
  try:
    at = datetime.datetime.fromisoformat(written).timestamp()
  except ValueError:
    return ''
  return f', {format_seconds(max(0.0, now - at))} ago'


def _mixture(run: RunRecord) -> str:
  shares = mixture_shares(run, most=_MOST_SHARES)
  if len(shares) < 2:
    return ''
  return ', '.join(f'{name} {share:.0%}' for name, share in shares.items())


def _sample(run: RunRecord, *, unicode: bool) -> str | rich.text.Text:
  if not run.samples:
    return ''
  last = run.samples[-1]
  text = last['text'][:_SAMPLE_CHARACTERS]
  text = ' '.join(''.join(c if c.isprintable() else ' ' for c in text).split())
  if not unicode:
    text = text.encode('ascii', 'replace').decode('ascii')
  return rich.text.Text(
    f'step {last["step"]:,}: {text}', no_wrap=True, overflow='ellipsis' if unicode else 'crop'
  )


def _evaluation(run: RunRecord) -> str:
  points = run.series('eval/loss')
  if not points:
    return ''
  (step, value), (best_step, best) = points[-1], min(points, key=lambda p: p[1])
  return f'loss {format_loss(value)} at step {step:,}, best {format_loss(best)} at {best_step:,}'


def _saved(run: RunRecord) -> str:
  if not run.checkpoints:
    return 'no checkpoint yet'
  last = run.checkpoints[-1]
  behind = f', {run.step - last:,} steps ago' if run.step is not None and run.step > last else ''
  return f'checkpoint_{last}{behind}; {len(run.checkpoints)} kept'


def _restarts(run: RunRecord, now: float) -> str:
  if not run.accounts or len(run.accounts.processes) < 2:
    return ''
  before, last = run.accounts.processes[-2:]
  lost = run.accounts.seconds[LOST]
  known = last.interruptions
  how = known[-1].cause if known else ended(before, is_last=False, now=now)
  return (
    f'{len(run.accounts.processes) - 1}, the last after: {how}; '
    f'{run.accounts.lost_steps:,} steps trained again ({format_seconds(lost)})'
  )
