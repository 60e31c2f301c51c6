"""No text of a file gives the terminal an order, wherever it is printed."""

import io
import json
import logging
import sys

import pytest

from t5x_gpu import cli
from t5x_gpu.errors import DataError
from t5x_gpu.evaluation.generated_text import to_line
from t5x_gpu.runtime import main_log
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.console import Console
from t5x_gpu.terminal.printable import printable
from t5x_gpu.terminal.progress import ProgressLine
from tests.helpers_train import quiet_logging, run_here

# Clears the screen, sets the title, rings, goes back; U+009B begins what ESC [ does.
HOSTILE = 'a\x1b[2Jb\x1b]0;title\x07c\rd\x9b31me\x7ff\x08\x00'


def is_harmless(text):
  return all(c in '\n\t' or c.isprintable() for c in text)


def test_control_characters_are_spelled_out_and_all_else_is_kept():
  assert printable(HOSTILE) == r'a\x1b[2Jb\x1b]0;title\x07c\rd\x9b31me\x7ff\x08\x00'
  assert printable('name\udce9') == r'name\udce9'  # bytes of a file name that are not UTF-8
  kept = 'Line one\n\tline two: \u00e9 \u4e2d \U0001f600 \u05d0\u200f'
  assert printable(kept) == kept


@pytest.mark.parametrize('way', ['log', 'console', 'logging', 'progress', 'error', 'bug'])
def test_every_way_to_the_terminal_spells_them_out(way, capsys):
  def fail(error):
    raise error

  if way == 'log':
    main_log.log(f'Sample:\n{HOSTILE}')
  elif way == 'console':
    Console().say(HOSTILE)
  elif way == 'progress':
    stream = io.StringIO()
    with ProgressLine(total_steps=1, stream=stream) as line:
      line.note(HOSTILE)
    sys.stdout.write(stream.getvalue())
  elif way == 'logging':
    with quiet_logging():
      logging_setup.setup()
      logging.getLogger('t5x_gpu.data').warning('%s', HOSTILE)
  else:
    error = DataError(HOSTILE, fix=HOSTILE) if way == 'error' else RuntimeError(HOSTILE)
    result = run_here(lambda: fail(error))
    sys.stderr.write(result.err)
    assert result.code == 1
  text = ''.join(capsys.readouterr())
  assert r'a\x1b[2Jb' in text and is_harmless(text)


def test_results_are_the_same_json_without_control_characters():
  record = {'prediction': HOSTILE, 'inputs': '\ud800'}
  line = to_line(record)
  assert json.loads(line) == record and is_harmless(line)


def test_an_error_keeps_its_lines():
  assert cli.describe_error(DataError('one\ntwo', fix='three')).splitlines()[1] == 'two'
