"""What we promise keeps a quick test: its cases must not all become slow.

docs/checkpoints.md lists what is guaranteed, row by row; other promises are in README.md.
"""

import importlib
import pathlib
import re

import pytest

DOCS = pathlib.Path(__file__).parents[1] / 'docs' / 'checkpoints.md'

# File -> a test of it that `make test` runs.
CHECKPOINTS = {
  'checkpoint/test_any_to_any.py': 'test_layouts_of_every_axis_read_bit_for_bit_what_another_wrote',
  'checkpoint/test_checkpointer.py': (
    'test_a_corrupt_latest_checkpoint_is_set_aside_and_the_one_before_is_used'
  ),
  'checkpoint/test_foreign_files.py': 'test_what_somebody_put_there_stays_and_does_not_count',
  'checkpoint/test_linked_checkpoints.py': (
    'test_a_run_continues_from_a_link_and_retention_removes_the_link_alone'
  ),
  'checkpoint/test_local_checkpoints.py': (
    'test_any_host_may_be_lost_and_the_step_comes_back_bit_exactly'
  ),
  'checkpoint/test_refused_files.py': (
    'test_a_run_that_cannot_open_a_file_stops_with_the_reason_and_moves_nothing'
  ),
  'checkpoint/test_run_lock.py': (
    'test_a_second_run_and_a_dry_run_fail_before_compiling_and_change_nothing'
  ),
  'data/sources/test_source_files.py': 'test_bytes_overwritten_anywhere_are_refused',
  'property/test_damaged_files.py': 'test_a_damaged_file_raises_nothing_but_errors_of_ours',
  'property/test_nothing_is_lost.py': (
    'test_a_run_that_is_killed_damaged_and_moved_is_the_run_that_nothing_happened_to'
  ),
  'test_train_damaged_files.py': 'test_a_restart_moves_damaged_files_aside_and_names_them',
  'test_train_paths.py': ('test_a_run_continues_wherever_its_folder_is_and_every_tool_reads_it'),
  'test_train_resume.py': (
    'test_a_run_that_ended_and_starts_again_is_the_run_that_nothing_happened_to'
  ),
  'test_train_stops.py': (
    'test_a_full_disk_ends_the_run_with_its_name_and_the_last_good_checkpoint'
  ),
}
OTHERS = [
  (
    'checkpoint/test_any_to_any.py',
    'test_two_processes_read_what_one_wrote_and_go_on_with_the_same_loss',
  ),
  ('parity/test_hf_logits.py', 'test_logits_of_padded_rows_equal_hugging_face'),
  ('parity/test_layouts.py', 'test_the_first_gradients_of_a_layout_are_those_of_one_device'),
  ('parity/test_t5x_decoder_only.py', 'test_losses_of_twenty_adafactor_steps_equal_t5x'),
  ('parity/test_t5x_encoder_decoder.py', 'test_losses_of_twenty_adafactor_steps_equal_t5x'),
]


def is_slow(marks) -> bool:
  return any(mark.name == 'slow' for mark in marks)


@pytest.mark.parametrize('file, name', [*CHECKPOINTS.items(), *OTHERS])
def test_a_promise_has_a_test_with_a_case_that_is_not_slow(file, name):
  module = importlib.import_module('tests.' + file.removesuffix('.py').replace('/', '.'))
  of_module = getattr(module, 'pytestmark', [])
  own = getattr(getattr(module, name), 'pytestmark', [])
  assert not is_slow(of_module if isinstance(of_module, list) else [of_module])
  assert not is_slow(own)
  for mark in own:
    if mark.name == 'parametrize':
      cases = mark.args[1]
      assert not all(is_slow(getattr(case, 'marks', ())) for case in cases), 'every case is slow'


def test_every_guarantee_of_checkpoints_has_such_a_test():
  table = (
    DOCS.read_text(encoding='utf-8').partition('## What is guaranteed')[2].partition('\n## ')[0]
  )
  rows = [re.findall(r'`tests/(\S+\.py)`', row) for row in table.splitlines() if '`tests/' in row]
  assert len(rows) > 10
  for files in rows:
    assert set(files) & set(CHECKPOINTS), f'no quick test of {files}'
