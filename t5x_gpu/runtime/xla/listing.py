"""The table of presets as text; scripts/docs_tables.py makes the page docs/xla_flags.md of it."""

import dataclasses
import itertools
from collections.abc import Iterator

from t5x_gpu.runtime.xla.presets import PRESETS
from t5x_gpu.runtime.xla.table import ONE_LAYER, TABLE, XlaSetting

KINDS = {
  'compile_option': 'Compile options: passed to `.compile()` of each program',
  'jax_config': 'jax.config',
  'xla_flag': 'XLA_FLAGS: read while programs run',
  'env': 'Environment variables',
}


def table() -> str:
  """Returns the table for a terminal: a line per setting, with its reason below."""
  lines = [f'{name:14}{text}' for name, text in PRESETS.items()]
  for kind, title in KINDS.items():
    lines += ['', title]
    for names, row in alike(kind):
      lines += [f'  {name}={shown(row)}' for name in names]
      lines += [
        f'      {", ".join(row.presets)}; {where(row)}',
        f'      {row.reason}',
        f'      {row.source}',
      ]
  return '\n'.join(lines) + '\n'


def alike(kind: str) -> Iterator[tuple[list[str], XlaSetting]]:
  """Yields the names of rows that are equal except for the name, and one of these rows."""
  rows = (row for row in TABLE if row.kind == kind)
  for _, group in itertools.groupby(rows, lambda row: dataclasses.replace(row, name='')):
    group = list(group)
    yield [row.name for row in group], group[0]


def shown(row: XlaSetting) -> str:
  return row.value if row.value == ONE_LAYER else f'{row.value}' or "''"


def where(row: XlaSetting) -> str:
  parts = [', '.join(row.generations).upper() or 'every GPU']
  if row.hosts != 'any':
    parts.append(f'{row.hosts} host{"s" if row.hosts == "several" else ""}')
  elif row.several_gpus:
    parts.append('several GPUs')
  if row.axes:
    parts.append(f'mesh axis {" or ".join(row.axes)}')
  if row.without_axes:
    parts.append(f'without {" and ".join(row.without_axes)}')
  if row.layers_ahead is not None:
    parts.append('with overlap_layers' if row.layers_ahead else 'without overlap_layers')
  return ', '.join(parts)
