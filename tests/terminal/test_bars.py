"""Bars with an estimate on a terminal, lines elsewhere; times in files."""

import io
import itertools
import re
import threading

import pytest

from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal import progress as progress_lib
from t5x_gpu.terminal.console import Console
from t5x_gpu.terminal.progress import ProgressLine
from tests.terminal.test_progress import Terminal

STAMP = r'\d\d-\d\d \d\d:\d\d:\d\d '


def test_a_count_estimates_the_time_left_from_what_this_process_has_done():
  seconds = itertools.count(0, 10)
  count = progress_lib.Count('infer_eval/cola', 1043, done=43, clock=lambda: next(seconds))
  assert str(count) == 'infer_eval/cola 43/1,043'
  count.advance(100)
  assert str(count) == 'infer_eval/cola 143/1,043 | ETA 0:01:30'


def test_an_unknown_total_has_no_estimate():
  found = []
  count = progress_lib.Count('eval', lambda: found[0] if found else None)
  count.advance(3)
  assert str(count) == 'eval 3'
  found.append(6)
  assert re.fullmatch(r'eval 3/6 \| ETA 0:00:00', str(count))


def test_batches_are_counted_in_the_background_and_counting_ends_with_the_block():
  with progress_lib.BackgroundCounts() as counts:
    known = counts.count(range(7))
    counts._threads[0].join()
    endless = counts.count(itertools.repeat(1))
    assert known() == 7 and endless() is None
  assert not any(thread.name == 'count' for thread in threading.enumerate())


@pytest.mark.parametrize('stream, shown', [(Terminal, 'work .* 2/4 .*0:00:0'), (io.StringIO, '')])
def test_there_are_bars_on_a_terminal_only(stream, shown, monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '80')
  out = stream()
  with progress_lib.bar('work', 4, stream=out) as advance:
    advance(1)
    advance(1)
  plain = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', out.getvalue())
  assert re.search(shown, plain.replace('\r', '\n')) if shown else not out.getvalue()


def test_elsewhere_there_is_a_line_now_and_then(monkeypatch, capsys):
  monkeypatch.setattr(progress_lib, 'SECONDS_BETWEEN_LINES', 0)
  with Console().progress('written', 40_000_000) as advance:
    advance(10_000_000)
  lines = capsys.readouterr().out.splitlines()
  assert re.fullmatch(STAMP + r'written 10/40 MB \| ETA 0:00:0\d', lines[0])
  assert re.match(STAMP + r'written: 40.0 MB in ', lines[1])


def test_what_steps_wait_for_takes_the_place_of_the_live_line(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm')
  monkeypatch.setenv('COLUMNS', '120')
  out = Terminal()
  with ProgressLine(100, stream=out) as progress:
    with progress.part('infer_eval/cola', 50) as advance:
      advance(25)
      progress._live.refresh()
    progress._live.refresh()
  plain = re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', out.getvalue())
  assert re.search(r'step 0/100 .*infer_eval/cola 25/50 \| ETA 0:00:00', plain)
  assert 'cola' not in plain.rsplit('step 0/100', 1)[1]


def test_lines_begin_with_the_time_in_a_file_and_not_on_a_terminal():
  assert re.fullmatch(STAMP, logging_setup.stamp(io.StringIO()))
  assert logging_setup.stamp(Terminal()) == ''
