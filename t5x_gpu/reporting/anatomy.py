"""The section on profiles that a run took of itself: MODEL_DIR/profiles/<step>/anatomy.json."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.config.json_schema import Fields, ListOf, MapOf, Nullable, Whole, read_json
from t5x_gpu.metrics.throughput import pauses_that_took_time
from t5x_gpu.reporting.charts import stacked_bars
from t5x_gpu.reporting.markup import Child, element
from t5x_gpu.reporting.page import Section, table
from t5x_gpu.reporting.run_record import RunRecord

_MOST_PROFILES = 8
_MOST_ROWS = 12
_PARTS = {'compute': 2, 'exposed_communication': 1, 'idle': 7}  # they sum to the step
_SCHEMA = Fields(
  {
    'first_step': Whole(),
    'last_step': Whole(),
    'reason': str,
    'seconds_per_step': float,
    'parts': MapOf(Nullable(float)),
    'operations': ListOf(Fields({'name': str, 'kind': str, 'seconds': float, 'share': float})),
    'collectives': ListOf(
      Fields({'kind': str, 'axes': ListOf(str), 'seconds': float, 'bytes': float})
    ),
  },
  optional={
    'mfu': Nullable(float),
    'process_index': Whole(),
    'host': str,
    'written': str,
    'ranks': ListOf(Fields({'rank': Whole(), 'host': str, **dict.fromkeys(_PARTS, float)})),
  },
)


def anatomy_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the parts of a step's time, by profile, with the longest operations."""
  content: list[Child] = []
  for run in runs:
    prefix = f'{run.name}, ' if len(runs) > 1 else ''
    found, unreadable = _profiles(run.folder)
    if found:
      content.append(
        stacked_bars(
          {f'{prefix}{_steps(p)}': _parts(p) for p in found},
          title='One step, by what the devices do',
          colors={name.replace('_', ' '): color for name, color in _PARTS.items()},
          text=lambda seconds: f'{1e3 * seconds:,.4g} ms',
        )
      )
      # Process 0 knows the device time of all processes.
      content += _tables(max(found, key=lambda p: (not _process(p), p['first_step'])), prefix)
    content += [element('p', f'{prefix}{problem}', class_='note') for problem in unreadable]
  if not content:
    return None
  intro = 'From profiles that the run took of itself; docs/monitor.md explains the numbers.'
  return Section('anatomy', 'Anatomy of a step', content, intro)


def latest_profile(run: RunRecord) -> tuple[Optional[Mapping[str, Any]], list[str]]:
  """Returns the readable profile of process 0 with the last steps, and the unreadable ones."""
  unreadable: list[str] = []
  paths = [p for p in run.folder.glob('profiles/*/anatomy.json') if p.parent.name.isdecimal()]
  for path in sorted(paths, key=lambda p: int(p.parent.name), reverse=True):
    if profile := _read(path, run.folder, unreadable):
      return profile, unreadable
  return None, unreadable


def _profiles(folder: pathlib.Path) -> tuple[list[Mapping[str, Any]], list[str]]:
  """Returns the latest profiles, by step and process, and the unreadable ones."""
  unreadable: list[str] = []
  paths = folder.glob('profiles/*/anatomy.json')
  found = [p for path in paths if (p := _read(path, folder, unreadable))]
  found.sort(key=lambda p: (p['first_step'], _process(p)))
  of_main = [p for p in found if not _process(p)]
  of_others = [p for p in found if _process(p)]
  shown = [*of_main[-_MOST_PROFILES:], *of_others[-_MOST_PROFILES:]]
  return [p for p in found if p in shown], sorted(unreadable)


def _read(
  path: pathlib.Path, folder: pathlib.Path, unreadable: list[str]
) -> Optional[Mapping[str, Any]]:
  try:
    return read_json(path, _SCHEMA)
  except (OSError, ValueError) as e:
    unreadable.append(f'{path.relative_to(folder)} cannot be read: {e}.')
    return None


def _process(profile: Mapping[str, Any]) -> int:
  return profile.get('process_index', 0)


def _steps(profile: Mapping[str, Any]) -> str:
  rank = _process(profile)
  process = f', process {rank} on {profile.get("host", "another host")}' if rank else ''
  return f'steps {profile["first_step"]:,}-{profile["last_step"]:,} ({profile["reason"]}){process}'


def _parts(profile: Mapping[str, Any]) -> dict[str, float]:
  return {name.replace('_', ' '): profile['parts'].get(name) or 0.0 for name in _PARTS}


def _tables(profile: Mapping[str, Any], prefix: str) -> list[Child]:
  operations = [
    [o['name'], o['kind'], f'{1e3 * o["seconds"]:.3f}', f'{o["share"]:.1%}', o.get('op_name', '')]
    for o in profile['operations'][:_MOST_ROWS]
  ]
  collectives = [
    [
      c['kind'],
      ' + '.join(c['axes']),
      f'{1e3 * c["seconds"]:.3f}',
      f'{c["bytes"] / 1e6:,.2f}',
      '' if c.get('gb_per_second') is None else f'{c["gb_per_second"]:.3g}',
    ]
    for c in profile['collectives'][:_MOST_ROWS]
  ]
  where = f'{prefix}{_steps(profile)}'
  tables: list[Child] = []
  pauses = pauses_that_took_time(profile['parts'])
  if pauses:
    rows = [[name, f'{1e3 * seconds:.3f}'] for name, seconds in pauses.items()]
    caption = f'Between steps, on average since the start, {where}'
    tables.append(table(['pause', 'ms per step'], rows, caption=caption))
  if operations:
    head = ['operation', 'kind', 'ms per step', 'share', 'place in the model']
    tables.append(table(head, operations, caption=f'Longest operations, {where}', texts=(0, 1, 4)))
  if collectives:
    head = ['collective', 'mesh axes', 'ms per step', 'MB per device', 'GB/s']
    tables.append(table(head, collectives, caption=f'Collectives, {where}', texts=(0, 1)))
  ranks = sorted(profile.get('ranks', ()), key=lambda r: -r['compute'])
  if len(ranks) > 1:
    head = ['process', 'host', *(f'{name.replace("_", " ")}, ms' for name in _PARTS)]
    rows = [[r['rank'], r['host'], *(f'{1e3 * r[n]:.3f}' for n in _PARTS)] for r in ranks]
    caption = f'Processes by device time, {where}'
    tables.append(table(head, rows[:_MOST_ROWS], caption=caption, texts=(1,)))
  return tables
