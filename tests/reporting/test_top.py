"""`top`: one frame of a run, from its files alone; Ctrl-C leaves with 0."""

import json
import math
import os
import pty
import re
import shutil
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
from tests.messages import raises
from tests.reporting.runs import MANIFEST, START, write_profile, write_run


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


def test_a_frame_has_the_latest_profile_the_mixture_and_the_last_sample(tmp_path):
  folder = write_run(tmp_path / 'a')
  for first_step in (9, 20):
    write_profile(folder, first_step=first_step, now=START + first_step)
  (folder / 'samples.jsonl').write_text(
    '{"step": 20, "prompt": "a", "text": "abc"}\n'
    '{"step": 40, "prompt": "def", "text": "def f():\\n  \\u001b[31m pass"}\n'
  )
  shown = frame(folder, now=START + 20 + 90, width=150)
  for line in (
    'profile steps 20-22, 0:01:30 ago: compute 60.0%, exposed communication 30.0%, '
    'input wait 5.0%; between steps: evaluation 4.0%',
    'mixture books 75%, code 25%',
    'sample step 40: def f(): [31m pass',
  ):
    assert line in shown, (line, shown)
  assert '\x1b' not in shown
  (folder / 'profiles' / '20' / 'anatomy.json').write_text('{')
  shown = frame(folder, now=START + 20 + 90)
  assert 'profile steps 9-11' in shown and 'note profiles/20/anatomy.json cannot be read' in shown


def test_all_rows_fit_into_a_terminal_of_80_by_24(tmp_path):
  folder = write_run(tmp_path / 'a', starts=((0, 24), (20, 30)))
  write_profile(folder, first_step=20, now=START)
  (folder / 'samples.jsonl').write_text(json.dumps({'step': 40, 'prompt': '', 'text': 'é ' * 900}))
  rates = {f'a_task_with_a_long_name_{i}': i + 1.0 for i in range(40)}
  manifest = folder / 'checkpoint_40' / 'manifest' / 'metadata'
  manifest.write_text(json.dumps({**MANIFEST, 'data': {'rates': rates}}))
  for name in ('goodput.jsonl', 'metrics.jsonl', 'config_origins.txt', 'eval/test.jsonl'):
    with open(folder / name, 'a', encoding='utf-8') as file:
      file.write('{"damaged\n' * 3)
  for unicode in (True, False):
    lines = frame(folder, now=START + 5000, width=80, unicode=unicode).splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80
    rows = [line.split()[0] for line in lines if not line.startswith(' ')]
    assert {'profile', 'mixture', 'sample', 'restarts', 'note'} < set(rows), lines
    (sample,) = (line for line in lines if line.startswith('sample'))
    assert sample.isascii() != unicode


def test_a_narrow_terminal_without_unicode_shows_plain_characters(tmp_path):
  shown = frame(write_run(tmp_path / 'a'), now=START, width=40, unicode=False)
  assert max(map(len, shown.splitlines())) <= 40
  assert not set(shown) & set('▁▂▃▄▅▆▇█·')


def test_a_run_without_a_ledger_without_metrics_and_without_a_step(tmp_path):
  folder = write_run(tmp_path / 'a', with_ledger=False)
  shown = frame(folder, now=START)
  assert 'step 40/40 (100%)' in shown and 'note' not in shown
  (folder / 'metrics.jsonl').unlink()
  shown = frame(folder, now=START)
  assert 'step 40/40 (100%)' in shown and 'note There is no metrics.jsonl' in shown
  shutil.rmtree(folder / 'checkpoint_40')
  shown = frame(folder, now=START)
  assert 'step no step yet' in shown and 'note' not in shown  # it has just begun


def test_a_run_that_a_person_stopped(tmp_path):
  for i, end in enumerate(('SIGINT', 'KeyboardInterrupt')):
    folder = write_run(tmp_path / str(i))
    ledger = folder / 'goodput.jsonl'
    ledger.write_text(ledger.read_text().replace('"end": "done"', f'"end": "{end}"'))
    assert 'ended by Ctrl-C' in frame(folder, now=START)


def test_sparklines():
  assert sparkline([1, 2, math.nan, 8]) == '▁▂!█'
  assert sparkline([]) == '' and sparkline([3.0, 3.0]) == '▁▁'


def test_without_a_terminal_it_prints_one_frame(tmp_path, capsys):
  assert top.main([str(write_run(tmp_path / 'a'))]) == 0
  out = capsys.readouterr().out
  assert 'checkpoint_40; 1 kept' in out and '\x1b' not in out


def test_it_shows_one_run():
  with raises(ConfigError):
    top.main([])
  with raises(ConfigError):
    top.main(['a', 'b'])
  with raises(ConfigError):
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
