"""Sections of a report in tables and text: configuration, data, samples."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.reporting.charts import stacked_bars
from t5x_gpu.reporting.markup import Child, element
from t5x_gpu.reporting.page import Section, folded, table
from t5x_gpu.reporting.run_config import ReportedSetting, differences
from t5x_gpu.reporting.run_record import RunRecord

_MOST_SAMPLES = 20
_MOST_SHARES = 30
# Facts about the data that are shown elsewhere or carry no information.
_NOT_LISTED = ('rates', 'libraries', 'guarantee', 'repeat')


def configuration_section(runs: Sequence[RunRecord]) -> Section:
  """Returns three tables: settings that differ, settings that users changed, all settings."""
  content: list[Child] = []
  if len(runs) > 1:
    content.append(_differences(runs))
  for run in runs:
    name = f' of {run.name}' if len(runs) > 1 else ''
    for number, changes in enumerate(run.earlier, 1):
      content.append(
        folded(
          f'Configuration {number + 1}{name}: {len(changes)} changed while it trained',
          element('pre', '\n'.join(changes)),
          is_open=len(runs) == 1,
        )
      )
    own = {key: s for key, s in run.settings.items() if s.overrides}
    if own:
      content.append(folded(f'Overridden values{name}', _settings(own), is_open=len(runs) == 1))
    if run.settings:
      content.append(folded(f'All {len(run.settings)} values{name}', _settings(run.settings)))
    else:
      content.append(element('p', f'No configuration is known{name}.'))
  return Section('configuration', 'Configuration', content)


def _differences(runs: Sequence[RunRecord]) -> ET.Element:
  rows = [
    [key, *(_with_origin(setting) for setting in settings)]
    for key, settings in differences([run.settings for run in runs])
  ]
  if not rows:
    return element('p', 'The configurations do not differ.')
  return table(
    ['parameter', *(run.name for run in runs)],
    rows,
    caption='Values that differ, and where they are set',
    texts=range(len(runs) + 1),
  )


def _with_origin(setting: Optional[ReportedSetting]) -> Child:
  if setting is None:
    return 'not used'
  origin = element('div', setting.origin, class_='note') if setting.origin else None
  return element('div', element('code', setting.value), origin)


def _settings(settings: Mapping[str, ReportedSetting]) -> ET.Element:
  rows = [
    [key, element('code', s.value), ' '.join(filter(None, (s.origin, s.through))), s.overrides]
    for key, s in settings.items()
  ]
  return table(['parameter', 'value', 'set at', 'instead of'], rows, texts=range(4))


def data_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the shares of a mixture and the facts about the data, from the latest checkpoint."""
  content: list[Child] = []
  shares = {run.name: found for run in runs if len(found := mixture_shares(run)) > 1}
  if shares:
    names = list(dict.fromkeys(name for found in shares.values() for name in found))
    content.append(
      stacked_bars(
        shares,
        title='Shares of the mixture',
        colors={name: i for i, name in enumerate(names)},
        text='{:.1%}'.format,
        full=1.0,
      )
    )
  for run in runs:
    facts = {k: v for k, v in _data(run).items() if k not in _NOT_LISTED}
    if facts:
      title = f'Data of {run.name}' if len(runs) > 1 else 'Facts about the data'
      rows = [[name, _text(value)] for name, value in sorted(facts.items())]
      content.append(
        folded(title, table(['fact', 'value'], rows, texts=(0, 1)), is_open=not shares)
      )
  if not content:
    return None
  return Section('data', 'Data', content, 'As recorded in the latest checkpoint.')


def _data(run: RunRecord) -> Mapping[str, Any]:
  return run.manifest.get('data', {})


def mixture_shares(run: RunRecord, *, most: int = _MOST_SHARES) -> dict[str, float]:
  """Returns task -> share of the mixture, largest first; tasks after `most` as 'others'."""
  rates = _data(run).get('rates')
  if not isinstance(rates, dict) or not all(_is_rate(v) for v in rates.values()):
    return {}
  total = sum(rates.values()) or 1.0
  ordered = sorted(((v / total, name) for name, v in rates.items()), reverse=True)
  found = {name: share for share, name in ordered[:most]}
  if rest := sum(share for share, _ in ordered[most:]):
    found['others'] = rest
  return found


def _is_rate(value: Any) -> bool:
  return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _text(value: Any) -> str:
  return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def samples_section(runs: Sequence[RunRecord]) -> Optional[Section]:
  """Returns the texts that the runs wrote, latest first."""
  content: list[Child] = []
  for run in runs:
    for sample in reversed(run.samples[-_MOST_SAMPLES:]):
      where = f'{run.name}, step' if len(runs) > 1 else 'Step'
      title = f'{where} {sample["step"]:,}, prompt {sample["prompt"]!r}'
      if 'temperature' in sample:
        title += f', temperature {sample["temperature"]:g}'
      content += [element('h3', title), element('pre', sample['text'])]
  return Section('samples', 'Samples', content) if content else None
