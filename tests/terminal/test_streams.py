"""Output without a reader does not end a command that has another product."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import threading
from unittest import mock

import pytest

from t5x_gpu.terminal import streams
from tests.helpers_train import REPOSITORY

# Prints a line, and a letter that ASCII lacks; says on stderr that it has come to its end.
COMMAND = """
import sys
from t5x_gpu import cli
from t5x_gpu.terminal import streams
def main():
  if len(sys.argv) > 1:
    streams.outlive()
    streams.keep_in(sys.argv[1])
  print('first')
  print('caf\\u00e9', flush=True)
  print('the end', file=sys.stderr, flush=True)
cli.run_main(main)
"""


def run(*arguments, stdout='', **environment):
  """Returns the finished command; the shell redirects its output."""
  script = f'"$@" {stdout}'
  return subprocess.run(
    ['bash', '-c', script, 'bash', sys.executable, '-c', COMMAND, *arguments],
    cwd=REPOSITORY,
    env={**os.environ, **environment},
    capture_output=True,
    text=True,
  )


@pytest.mark.parametrize('stdout', ['> /dev/full', '> >(:)', '>&-'])
def test_a_command_continues_without_standard_output(tmp_path, stdout):
  done = run(str(tmp_path), stdout=stdout)
  assert done.returncode == 0 and done.stderr.endswith('the end\n')
  assert 'Traceback' not in done.stderr


def test_the_text_that_a_full_disk_does_not_take_is_kept(tmp_path):
  done = run(str(tmp_path), stdout='> /dev/full')
  warning, *kept = (tmp_path / streams.TERMINAL_LOG).read_text().splitlines()
  assert kept == ['first', 'café']
  assert warning.endswith(
    'WARNING Standard output cannot be written: No space left on device. Continuing without it.'
  )
  assert done.stderr.splitlines() == [warning, 'the end']


def test_without_both_streams_the_text_and_the_exit_code_remain(tmp_path):
  done = run(str(tmp_path), stdout='> /dev/full 2>&1')
  assert done.returncode == 0
  text = (tmp_path / streams.TERMINAL_LOG).read_text()
  assert 'café\n' in text and 'Standard error cannot be written' in text and 'the end\n' in text


def test_a_command_whose_product_is_its_output_fails_with_the_reason():
  done = run(stdout='> /dev/full')
  assert done.returncode == 1
  assert (
    done.stderr.splitlines()[-1] == 'Standard output cannot be written: No space left on device.'
  )
  assert 'Traceback' not in done.stderr


def test_standard_error_on_a_full_disk_changes_nothing():
  done = run(stdout='2> /dev/full')
  assert done.returncode == 0 and done.stdout == 'first\ncafé\n'


def test_an_encoding_without_a_letter_escapes_it():
  done = run(PYTHONIOENCODING='ascii')
  assert done.returncode == 0 and done.stdout == 'first\ncaf\\xe9\n'


def test_a_reader_that_stalls_loses_text_and_gets_what_follows_once_it_reads_again(
  tmp_path, monkeypatch
):
  monkeypatch.setattr(streams, '_kept', streams._Kept())
  streams.keep_in(tmp_path)
  reading, writing = os.pipe()
  try:
    monkeypatch.setitem(streams._NAMES, writing, 'The pipe')
    stream = streams.Stream(writing)
    monkeypatch.setattr(streams, '_streams', {1: stream})
    monkeypatch.setattr(streams.signal, 'signal', lambda *_: None)
    streams.outlive(stall_seconds=0.01)
    while not stream.failure:
      stream.write(b'x' * 4096)
    kept = tmp_path / streams.TERMINAL_LOG
    assert 'its reader has read nothing' in kept.read_text()
    os.read(reading, 1 << 20)
    assert stream.write(b'again') == 5 and not stream.failure
    assert os.read(reading, 5) == b'again' and 'again' not in kept.read_text()
  finally:
    os.close(reading)
    os.close(writing)


def test_a_signal_handler_and_a_thread_write_while_the_main_thread_waits_for_a_reader(monkeypatch):
  reading, writing = os.pipe()
  os.set_blocking(writing, False)
  with contextlib.suppress(BlockingIOError):
    while os.write(writing, b'x' * 4096):
      pass
  os.set_blocking(writing, True)
  stream = streams.Stream(writing, stall_seconds=60)
  stream.outlives = True
  monkeypatch.setitem(streams._streams, 2, stream)
  handled, problems = threading.Event(), []

  def handle(*_):
    handled.set()
    streams.write_stderr('from the handler\n')

  def write_and_read():
    while sys._current_frames()[main].f_code.co_name != '_wait':
      pass
    signal.pthread_kill(main, signal.SIGUSR1)
    handled.wait()
    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
      thread.start()
    while any(thread.is_alive() for thread in threads) or not done.is_set():
      if select.select([reading], [], [], 0.01)[0]:
        text.extend(os.read(reading, 1 << 16))

  def write():
    try:
      stream.write(b'from a thread\n')
    except BaseException as e:
      problems.append(e)

  main, text, done = threading.get_ident(), bytearray(), threading.Event()
  before = signal.signal(signal.SIGUSR1, handle)
  other = threading.Thread(target=write_and_read)
  other.start()
  try:
    stream.write(b'from the main thread\n')
  finally:
    done.set()
    other.join()
    signal.signal(signal.SIGUSR1, before)
    text.extend(os.read(reading, 1 << 16) if select.select([reading], [], [], 0)[0] else b'')
    os.close(reading)
    os.close(writing)
  assert not problems and stream.failure is None
  assert text.count(b'from a thread\n') == 2
  assert b'from the handler\n' in text and b'from the main thread\n' in text


@pytest.mark.parametrize(
  'failure, lost',
  [
    (None, False),
    (TimeoutError('its reader has read nothing'), False),
    (OSError(errno.ENOSPC, ''), False),
    (OSError(errno.EPIPE, ''), True),
    (OSError(errno.EIO, ''), True),
  ],
)
def test_standard_output_is_lost_only_if_nobody_can_read_it(monkeypatch, failure, lost):
  monkeypatch.setitem(streams._streams, 1, mock.Mock(failure=failure))
  assert streams.stdout_is_lost() == lost
