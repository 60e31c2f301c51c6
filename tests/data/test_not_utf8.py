"""Text that is not UTF-8 is refused by file and line, or repaired on request and counted."""

import gzip

import numpy as np
import pytest

from t5x_gpu.data.sources import readers
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError
from tests.data.tasks.test_builtin import examples
from tests.messages import raises

pytestmark = pytest.mark.tf
LINES = [f'line {i} caf\u00e9'.encode() for i in range(400)]


def with_latin1_at(*numbers):
  return (
    b'\n'.join(
      'caf\u00e9'.encode('latin-1') if number in numbers else line
      for number, line in enumerate(LINES, 1)
    )
    + b'\n'
  )


def read_all(opened):
  return sum(1 for _ in opened.iterator)


@pytest.mark.quick_cases('lines')
@pytest.mark.parametrize(
  'name, write',
  [
    ('text_files:a.txt', lambda path, text: path.write_bytes(text)),
    ('text_lines:a.txt', lambda path, text: path.write_bytes(text)),
    ('text_files:a.txt.gz', lambda path, text: path.write_bytes(gzip.compress(text))),
    ('text_lines:a.txt.gz', lambda path, text: path.write_bytes(gzip.compress(text))),
    ('text_files:a.txt', lambda path, text: path.write_bytes(b'\xef\xbb\xbf' + text)),
    ('mlm:text_files:a.txt', lambda path, text: path.write_bytes(text)),
  ],
  ids=['files', 'lines', 'files_gz', 'lines_gz', 'files_with_mark', 'mlm'],
)
def test_the_first_line_that_is_not_utf8_is_named(open_data, tmp_path, monkeypatch, name, write):
  monkeypatch.chdir(tmp_path)
  write(tmp_path / name.rpartition(':')[2], with_latin1_at(130, 131, 390))
  converter, lengths = (
    ('encoder_mlm', {'inputs': 64, 'targets': 64}) if 'mlm' in name else ('lm', {'targets': 64})
  )
  with raises(DataError):
    read_all(open_data(name, converter=converter, lengths=lengths, repeat=False, shuffle=False))


def test_pairs_that_are_not_utf8_are_refused(open_data, tmp_path):
  (tmp_path / 'a.tsv').write_bytes(b'good\tpair\n' * 30 + b'bad\tcaf\xe9\n')
  with raises(DataError):
    read_all(
      open_data(
        f'text_pairs:{tmp_path}/a.tsv',
        converter='prefix_lm',
        repeat=False,
        lengths={'inputs': 16, 'targets': 16},
      )
    )


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['text_files', 'text_lines'])
def test_replacing_is_asked_for_counted_and_part_of_what_the_data_is(
  open_data, tmp_path, kind, caplog
):
  path = tmp_path / 'a.txt'
  path.write_bytes(with_latin1_at(30, 31, 32, 33, 390))
  task = builtin.PATTERN_TASKS[kind](f'{path}#errors=replace')
  for _ in range(2):
    found = [
      bytes(np.array([i - 3 for i in e['targets'] if i > 2], np.uint8)).decode()
      for split in ('train', 'validation')
      for e in examples(task, split)
    ]
  text = ''.join(found) if kind == 'text_files' else '\n'.join(found)
  assert text.count('caf\ufffd') == 5 and text.count('caf\u00e9') == 395
  assert caplog.text.count(f'{path}: 5 of the lines 1 to 400 had bytes') == 1
  assert f'{path}:30 has bytes that are not UTF-8' in caplog.text
  described = open_data(f'{kind}:{path}#errors=replace').iterator.describe()
  assert described[f'source of {kind}']['errors'] == 'replace'


def test_what_can_be_asked_for(open_data, text_folder):
  assert (
    'errors'
    not in open_data(f'text_files:{text_folder}#errors=strict').iterator.describe()[
      'source of text_files'
    ]
  )
  with raises(DataError):
    open_data(f'text_files:{text_folder}#errors=replce')


@pytest.mark.slow
@pytest.mark.parametrize('before', [b'', b'one line\n' * 150_000])
def test_carriage_returns_that_are_left_out_are_reported(open_data, tmp_path, caplog, before):
  (tmp_path / 'a.txt').write_bytes(before + b'one line\r\n' * 200)
  (tmp_path / 'b.txt').write_bytes(b'another line\n' * 200)
  open_data(f'text_files:{tmp_path}/*.txt')
  assert (
    '1 of 2 files have carriage returns (\\r), which are dropped from the text: ' in caplog.text
  )


def test_exactly_what_python_decodes_is_taken_for_utf8():
  """All bytes that decide about a character, in every combination of up to three."""
  parts = [
    b'a',
    b'\x80',
    b'\x9f',
    b'\xa0',
    b'\xbf',
    b'\xc1',
    b'\xc2',
    b'\xe0',
    b'\xed',
    b'\xef',
    b'\xf0',
    b'\xf4',
    b'\xf5',
    b'\xff',
    '\ud7ff'.encode(),
    '\uffff'.encode(),
    '\U0010ffff'.encode(),
    b'\xf4\x90\x80\x80',
    b'\xed\xa0\x80',
    b'\xc0\x80',
  ]
  cases = [a + b + c for a in parts for b in parts for c in parts]
  got = tf.strings.regex_full_match(tf.constant(cases), readers._UTF8).numpy()

  def decodes(text):
    try:
      text.decode()
    except UnicodeDecodeError:
      return False
    return True

  assert [bool(g) for g in got] == [decodes(case) for case in cases]
