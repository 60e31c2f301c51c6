"""Plain lines for files, a live line for terminals, and a terminal that is always given back."""

import io
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

from t5x_gpu.terminal import progress

METRICS = {
  'train/loss': 5.9123,
  'train/accuracy': 0.1214,
  'train/tokens_per_second': 12345.4,
  'train/input_wait_fraction': 0.0031,
  'train/learning_rate': 0.01,
}


class Terminal(io.StringIO):
  def isatty(self):
    return True


def _plain(text):
  """`text` without escape sequences."""
  return re.sub(r'\x1b\[[0-9;?]*[a-zA-Z]', '', text)


def _unstamped(text: str) -> str:
  """`text` without the time at the beginning of each line, which must be there."""
  lines = text.splitlines(keepends=True)
  assert all(re.match(r'\d\d-\d\d \d\d:\d\d:\d\d ', line) for line in lines), text
  return ''.join(line[len('11-20 14:05:21 ') :] for line in lines)


def test_plain_line_is_exactly_this():
  out = io.StringIO()
  with progress.ProgressLine(100, stream=out) as p:
    p.advance(9)
    p.update(10, METRICS, eta_seconds=83)
  assert _unstamped(out.getvalue()) == (
    'step 10/100 | loss 5.912 | acc 0.121 | 12,345 tok/s | wait 0.3% | ETA 0:01:23\n'
  )


def test_unknown_numbers_are_left_out_of_the_line():
  out = io.StringIO()
  progress.ProgressLine(100, stream=out).update(1, {'train/loss': float('nan')})
  assert _unstamped(out.getvalue()) == 'step 1/100 | loss nan\n'


def test_a_pipe_gets_plain_lines_even_when_color_is_forced(monkeypatch):
  monkeypatch.setenv('FORCE_COLOR', '1')
  monkeypatch.setenv('TERM', 'xterm-256color')
  out = io.StringIO()
  with progress.ProgressLine(100, stream=out) as p:
    p.update(10, METRICS)
    p.note('[bold]saved[/bold] checkpoint_10 :smile:')
  assert '\x1b' not in out.getvalue()
  assert '[bold]saved[/bold] checkpoint_10 :smile:\n' in out.getvalue()


def test_long_plain_lines_are_not_wrapped():
  out = io.StringIO()
  progress.ProgressLine(100, stream=out).note('x' * 500)
  assert _unstamped(out.getvalue()) == 'x' * 500 + '\n'


def test_other_processes_print_nothing():
  out = Terminal()
  with progress.ProgressLine(100, stream=out, enabled=False) as p:
    p.update(10, METRICS)
    p.note('saved')
  assert out.getvalue() == ''


def test_ascii_streams_take_any_text():
  raw = io.BytesIO()
  out = io.TextIOWrapper(raw, encoding='ascii')
  progress.ProgressLine(100, stream=out).note('sample: ünïcode')
  assert _unstamped(raw.getvalue().decode()) == 'sample: ?n?code\n'


def test_terminal_keeps_about_ten_lines_of_a_long_run(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('COLUMNS', '120')
  out = Terminal()
  with progress.ProgressLine(1000, stream=out) as p:
    for step in range(1, 1001):
      p.update(step, {'train/loss': step})
  kept = re.findall(r'^step (\d+)/1000 \| loss', _plain(out.getvalue()).replace('\r', '\n'), re.M)
  assert kept[0] == '1' and kept[-1] == '1000' and 10 <= len(kept) <= 12


def test_live_line_fits_narrow_terminals_and_keeps_the_loss(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  for columns in (40, 60, 80, 100, 200):
    monkeypatch.setenv('COLUMNS', str(columns))
    out = Terminal()
    p = progress.ProgressLine(100000, stream=out)
    p.update(50000, METRICS, eta_seconds=83)
    with p._console.capture() as capture:
      p._console.print(p._render())
    line = _plain(capture.get())
    assert line.count('\n') == 1 and len(line.strip()) < columns, line
    assert 'loss 5.912' in line and ('━' in line or columns < 50)
  assert 'acc 0.121' in line and 'wait 0.3%' in line  # wide enough for all


@pytest.mark.parametrize('error', [KeyboardInterrupt, RuntimeError, SystemExit])
def test_terminal_is_restored_and_last_numbers_stay_when_the_run_fails(monkeypatch, error):
  monkeypatch.setenv('TERM', 'xterm-256color')
  out = Terminal()
  with pytest.raises(error):
    with progress.ProgressLine(100, stream=out) as p:
      p.update(1, {'train/loss': 9.0})
      p.update(2, {'train/loss': 8.0})  # within the first tenth: only the live line shows it
      raise error
  assert '\x1b[?25l' in out.getvalue()  # the cursor was hidden
  assert out.getvalue().rindex('\x1b[?25h') > out.getvalue().rindex('\x1b[?25l')
  assert _plain(out.getvalue()).endswith('step 2/100 | loss 8.000\n')


def test_no_color_is_honoured_on_a_terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('NO_COLOR', '1')
  out = Terminal()
  with progress.ProgressLine(100, stream=out) as p:
    p.update(10, METRICS)
  assert not re.search(r'\x1b\[[0-9;]*(3[0-9]|38;5;\d+)m', out.getvalue())


def test_dumb_terminals_get_plain_lines(monkeypatch):
  monkeypatch.setenv('TERM', 'dumb')
  out = Terminal()
  with progress.ProgressLine(100, stream=out) as p:
    p.update(10, {'train/loss': 1.0})
  assert out.getvalue() == 'step 10/100 | loss 1.000\n'


def test_prints_and_warnings_of_others_stay_whole_lines_on_a_real_terminal(tmp_path):
  code = textwrap.dedent("""
      import sys
      from t5x_gpu.terminal import progress
      with progress.ProgressLine(100) as p:
        p.update(10, {'train/loss': 5.0}, eta_seconds=10)
        print('from stdout')
        print('from stderr', file=sys.stderr)
        p.note('from note')
  """)
  main, worker = pty.openpty()
  env = {**os.environ, 'TERM': 'xterm-256color', 'COLUMNS': '100'}
  process = subprocess.Popen(
    [sys.executable, '-c', code], stdin=worker, stdout=worker, stderr=worker, env=env
  )
  os.close(worker)
  out = b''
  try:
    while chunk := os.read(main, 65536):
      out += chunk
  except OSError:  # how Linux says that the other end has closed
    pass
  os.close(main)
  assert process.wait() == 0
  lines = _plain(out.decode()).replace('\r', '\n').split('\n')
  assert {'from stdout', 'from stderr', 'from note'} <= {line.strip() for line in lines}
  assert out.decode().rindex('\x1b[?25h') > out.decode().rindex('\x1b[?25l')


def test_format_seconds():
  assert progress.format_seconds(83.4) == '0:01:23'
  assert progress.format_seconds(86400 * 2 + 3600 * 3 + 65) == '2d 03:01:05'


def test_small_losses_keep_their_digits():
  assert progress.format_loss(0.00123) == '1.23e-03' and progress.format_loss(0.0) == '0.000'
