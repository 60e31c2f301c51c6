"""The tables of docs/performance.md show the recorded figures of compiled steps (recorded.json)."""

import collections
import json
import pathlib
import re

import pytest

HERE = pathlib.Path(__file__).parent
RECORDED = json.loads((HERE / 'recorded.json').read_text())
PAGE = (HERE.parents[1] / 'docs' / 'performance.md').read_text()
OLD, NEW = sorted(RECORDED)

# Rows in the order of the page: (a part of the row, recorded step).
OVERLAP = (
  ('`dp`', 'decoder_base dp h100 1x8'),
  ('`fsdp`', 'decoder_base fsdp h100 1x8'),
  ('`zero1`', 'decoder_base zero1 h100 1x8'),
  ('`pp`', 'decoder_base pp h100 1x8'),
  ('`pp`, with', 'decoder_base pp h100 1x8 overlap_layers'),
  ('`3d`', 'decoder_base 3d h100 1x8'),
  ('GPT-2 XL', 'gpt2_xl dp h100 1x8'),
  ('`dp`', 'llama3_2_1b dp h100 1x8'),
  ('`fsdp`', 'llama3_2_1b fsdp h100 1x8'),
  ('FP8', 'llama3_2_1b fsdp h100 1x8 fp8'),
  ('A100', 'llama3_2_1b fsdp a100-80 1x8'),
  ('8 x 8', 'llama3_2_1b fsdp h100 8x8'),
  ('`hsdp`', 'llama3_2_1b hsdp h100 8x8'),
  ('`hsdp`, FP8', 'llama3_2_1b hsdp h100 8x8 fp8'),
  ('`cp`', 'llama3_2_1b cp h100 1x8'),
  ('`tp`', 'llama3_2_1b tp h100 1x8'),
  ('`tp_sp`', 'llama3_2_1b tp_sp h100 1x8'),
  ('a row of 4096', 'llama3_8b fsdp h100 1x8'),
  ('FP8, four rows', 'llama3_8b fsdp h100 1x8 fp8'),
  ('`hsdp`, a row', 'llama3_8b hsdp h100 8x8'),
  ('T5 1.1 base', 't5_1_1_base fsdp h100 1x8'),
)
TRAFFIC = (
  ('`full` | 190', 'llama3_8b fsdp h100 1x8'),
  ('`full`, FP8', 'llama3_8b fsdp h100 1x8 fp8, a row per GPU'),
  ('`minimal`', 'llama3_8b fsdp h100 1x8 minimal'),
  ('`dots`', 'llama3_8b fsdp h100 1x8 dots'),
  ('Llama-3.2 1B', 'llama3_2_1b fsdp h100 1x8'),
  ('by layer', 'llama3_2_1b fsdp h100 1x8 by layer'),
  ('Qwen-3', 'qwen3_1_7b fsdp h100 1x8'),
  ('Gemma-2', 'gemma2_2b fsdp h100 1x8'),
  ('BERT-Large', None),
  ('`dots`', 'bert_large fsdp h100 1x8 dots'),
  ('T5 1.1 large', None),
  ('`dots`', 't5_1_1_large fsdp h100 1x8 dots'),
  ('GPT-2 XL', 'gpt2_xl fsdp h100 1x8 dots'),
  ('134M', 'decoder_base fsdp h100 1x8'),
  ('`dots`', 'decoder_base fsdp h100 1x8 dots'),
)
PEER = (*TRAFFIC[:5], TRAFFIC[6])


def table(section: str) -> tuple[list[str], list[list[str]]]:
  """Returns (columns, rows of cells) of the first table of a section."""
  lines = PAGE[PAGE.index(f'<a name="{section}">') :].splitlines()
  begin = next(i for i, line in enumerate(lines) if line.startswith('|'))
  end = next(i for i in range(begin, len(lines)) if not lines[i].startswith('|'))
  rows = [[cell.strip() for cell in line.strip('|').split('|')] for line in lines[begin:end]]
  return rows[0], rows[2:]


def shares(step: dict, kind: str) -> set[int]:
  """Returns percentages of bytes that overlap a matmul: of a kind of collective, and by axes."""
  sums = collections.defaultdict(collections.Counter)
  for row, counts in step['sent'].items():
    found, axes = row.split()
    if found == kind:
      for key in ('', axes):
        sums[key].update(counts)
  return {round(100 * c['hidden_bytes'] / c['bytes']) for c in sums.values()}


def check(step: dict, column: str, cell: str) -> int:
  """Checks every figure of a cell; returns their number."""
  traffic = step['traffic']
  figures = re.findall(
    r'[\d.]+(?=%)' if 'all-' in column or 'scatter' in column else r'[\d.]+', cell
  )
  exact = {
    'temporaries': step['temporary_bytes'] / 2**30,
    'temporaries GiB': step['temporary_bytes'] / 2**30,
    'matmuls': traffic['matmul_bytes'] / 1e9,
    'elementwise': traffic['other_bytes'] / 1e9,
    'elementwise GB': traffic['other_bytes'] / 1e9,
    'of this, copies': traffic['copied_bytes'] / 1e9,
  }
  for figure in figures:
    if column in exact:
      decimals = len(figure.partition('.')[2])
      assert f'{exact[column]:.{decimals}f}' == figure, (column, cell)
    elif 'permutes' not in cell:
      assert int(figure) in shares(step, column), (column, cell)
  return len(figures)


@pytest.mark.parametrize('section, expected', [('overlap', OVERLAP), ('traffic', TRAFFIC)])
def test_a_table_shows_the_recorded_figures(section, expected):
  columns, rows = table(section)
  assert len(rows) == len(expected)
  for row, (words, name) in zip(rows, expected):
    assert words in ' | '.join(row), 'the order of the page'
    if name is not None:
      checked = [
        check(RECORDED[OLD][name], column, cell)
        for column, cell in zip(columns, row)
        if column not in ('model', 'layout', 'GPUs', 'batch', 'remat')
      ]
      assert sum(checked) >= 2


def test_the_table_of_both_frameworks_shows_the_recorded_figures():
  columns, rows = table('peer')
  recorded = {'ours, jax 0.10': RECORDED[OLD], 'ours, jax 0.12': RECORDED[NEW]}
  steps = ['ours, jax 0.10', 'ours, jax 0.11', 'ours, jax 0.12', 'MaxText']
  assert [row[2] for row in rows] == len(PEER) * steps
  for (_, name), *of_steps in zip(PEER, *(rows[i::4] for i in range(4))):
    for _, _, step, *cells in of_steps:
      for column, cell in zip(columns[3:], cells):
        assert step not in recorded or check(recorded[step][name], column, cell) == 1
