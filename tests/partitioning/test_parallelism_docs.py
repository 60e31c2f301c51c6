"""docs/parallelism.md shows the output of the code, and its example layer works."""

import contextlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.pipeline_schedules import Timetable

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'parallelism.md').read_text()


def timetable_text(table: Timetable) -> list[str]:
  """Returns a line per stage: digits go forward, letters back, a column per tick."""

  def cell(unit: int, signs: str) -> str:
    return signs[unit] if 0 <= unit < table.num_units else ''

  def forward(tick: int, stage: int) -> str:
    return cell(table.forward_unit(tick, stage), '0123456789')

  lines, last = [], table.forward_ticks - 1
  for stage in range(table.num_stages):
    if table.schedule == '1f1b':
      cells = [
        forward(tick, stage) + cell(table.backward_unit(tick, stage), 'abcdefghij')
        for tick in range(table.interleaved_ticks)
      ]
    else:
      there = [table.forward_unit(tick, stage) for tick in range(last + 1)]
      cells = [cell(u, '0123456789') for u in there] + [cell(u, 'abcdefghij') for u in there[::-1]]
    lines.append(f'stage {stage}  ' + ' '.join((c or '.').ljust(2) for c in cells).rstrip())
  return lines


@pytest.mark.parametrize(
  'table',
  [Timetable('gpipe', 4, 6), Timetable('1f1b', 4, 6), Timetable('circular', 4, 4, 2)],
  ids=lambda t: t.schedule,
)
def test_the_pictures_of_schedules_are_their_timetables(table):
  shown = re.search(
    rf'^{table.schedule}, M = {table.num_microbatches}.*\n((?:stage .*\n)+)', PAGE, re.MULTILINE
  )
  assert shown.group(1).splitlines() == timetable_text(table)


def test_the_table_of_bubbles_is_what_its_code_prints():
  ((code, expected),) = re.findall(r'```python\n(.*?)```\n\n```text\n(.*?)```\n', PAGE, re.DOTALL)
  printed = io.StringIO()
  with contextlib.redirect_stdout(printed):
    exec(code, {})
  assert printed.getvalue() == expected


def test_the_layer_that_the_page_shows_works():
  (code,) = re.findall(r'```python\n(import flax.*?)```', PAGE, re.DOTALL)
  scope = {}
  exec(code, scope)
  layer, x = scope['Adapter'](rank=8), jnp.ones((2, 4, 16))
  params, names = split_names(layer.init(jax.random.key(0), x)['params'])
  assert names['down'].names == ('embed', 'mlp')
  assert layer.apply({'params': params}, x).shape == x.shape
