"""`top`: one frame of a run, from its files alone; Ctrl-C leaves with 0."""

import math
import os
import pty
import re
import signal
import subprocess
import sys

import pytest
import rich.console

from t5x_gpu import top
from t5x_gpu.errors import ConfigError
from t5x_gpu.reporting.live_view import eta_seconds, sparkline, view
from t5x_gpu.reporting.run_record import read_run
from tests.helpers_train import REPOSITORY
from tests.reporting.runs import START, write_run


def frame(folder, *, now: float, width: int = 120, unicode: bool = True) -> str:
  console = rich.console.Console(width=width, force_terminal=False)
  with console.capture() as capture:
    console.print(view(read_run(folder, name='a'), now=now, unicode=unicode))
  return re.sub(' +', ' ', capture.get())


def test_a_frame_of_a_run_that_trains(tmp_path):
  folder = write_run(tmp_path / 'a', starts=((0, 24), (20, 30)))
  ledger = folder / 'goodput.jsonl'
  ledger.write_text(ledger.read_text().replace(', "end": "done"', ''))
  now = START + 335 + 300 + 90 + 100
  shown = frame(folder, now=now + 30)
  for line in (
    'run a · running · 8 x NVIDIA H100 · node7 81',
    'step 30/40 (75%)',
    'ETA 0:01:10',  # 10 steps of 10 s, 30 s ago
    'loss 2.200 █',
    'speed 5,030 tokens/s',
    'eval loss 2.642 at step 20, best 2.642 at 20',
    'goodput 36% of 0:13:45 (2 starts): downtime 36%, compile 15%, init 7%, lost 5%, save 1%',
    'saved checkpoint_40; 1 kept',
    'restarts 1, the last after: killed; 4 steps trained again (0:00:40)',
  ):
    assert line in shown, (line, shown)
  assert 'silent for 0:10:00' in frame(folder, now=now + 600)
  assert eta_seconds(read_run(folder), now=now) == pytest.approx(100)


def test_a_narrow_terminal_without_unicode_shows_plain_characters(tmp_path):
  shown = frame(write_run(tmp_path / 'a'), now=START, width=40, unicode=False)
  assert max(map(len, shown.splitlines())) <= 40
  assert not set(shown) & set('▁▂▃▄▅▆▇█·')


def test_a_run_without_a_ledger_and_one_without_a_step(tmp_path):
  folder = write_run(tmp_path / 'a', with_ledger=False)
  assert 'step 40/40 (100%)' in frame(folder, now=START)
  (folder / 'metrics.jsonl').unlink()
  assert 'step no step yet' in frame(folder, now=START)


def test_sparklines():
  assert sparkline([1, 2, math.nan, 8]) == '▁▂!█'
  assert sparkline([]) == '' and sparkline([3.0, 3.0]) == '▁▁'


def test_without_a_terminal_it_prints_one_frame(tmp_path, capsys):
  assert top.main([str(write_run(tmp_path / 'a'))]) == 0
  out = capsys.readouterr().out
  assert 'checkpoint_40; 1 kept' in out and '\x1b' not in out


@pytest.mark.parametrize('folders', [[], ['a', 'b']])
def test_it_shows_one_run(folders):
  with pytest.raises(ConfigError, match='top shows one'):
    top.main(folders)
  with pytest.raises(ConfigError, match='does not name a folder in a bucket'):
    top.main(['s3://b'])


@pytest.mark.slow
def test_ctrl_c_leaves_a_live_terminal_with_0(tmp_path):
  folder = write_run(tmp_path / 'a')
  terminal, other = pty.openpty()
  command = [sys.executable, '-m', 't5x_gpu.top', str(folder)]
  environment = {**os.environ, 'PYTHONPATH': str(REPOSITORY), 'TERM': 'xterm', 'LANG': 'C.UTF-8'}
  process = subprocess.Popen(command, stdin=other, stdout=other, stderr=other, env=environment)
  os.close(other)
  seen = b''
  while b'checkpoint_40' not in seen:
    seen += os.read(terminal, 4096)
  process.send_signal(signal.SIGINT)
  assert process.wait(60) == 0
  os.close(terminal)
