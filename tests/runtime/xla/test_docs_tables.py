"""docs/xla_flags.md agrees with the table."""

import pathlib

import pytest

from scripts import docs_tables
from t5x_gpu.runtime.xla import flags, presets
from t5x_gpu.runtime.xla.presets import TABLE

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'xla_flags.md'


def test_the_page_is_up_to_date():
  assert PAGE.read_text(encoding='utf-8') == docs_tables.xla_flags_page(), (
    'python scripts/docs_tables.py xla_flags > docs/xla_flags.md'
  )


def test_every_setting_is_on_the_page_and_in_the_table():
  for row in TABLE:
    for text in (docs_tables.xla_flags_page(), presets.preset_table()):
      assert row.name in text and row.reason in text and row.source in text


@pytest.mark.process
def test_the_example_line_is_what_a_run_prints():
  env = {'XLA_FLAGS': '--xla_gpu_simplify_all_fp_conversions'}
  line = flags.prepare_environment(gpu='h200', num_gpus=8, environ=env).line
  example = 'h200 single-host (default), 4 compile options, 1 flag, 4 variables, 1 flag dropped'
  assert example in line and example in docs_tables.xla_flags_page()
