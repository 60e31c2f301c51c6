"""Damaged input is defined: an error at the first record, or counted, reported and bounded."""

import codecs
import collections
import contextlib
import gc
import gzip
import logging
import sqlite3

import pyarrow as pa
import pytest
from tensorflow.python.data.ops import iterator_ops

from t5x_gpu.data import seqio_batches
from t5x_gpu.data.sources import corrupt_records, line_formats, readers
from t5x_gpu.data.sources.column_formats import ARROW
from t5x_gpu.data.sources.rows import FileForm, checked_row
from t5x_gpu.data.tasks import builtin
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.errors import DataError
from tests.helpers_tables import write_form
from tests.messages import raises, record_message

pytestmark = pytest.mark.tf


def write_lines(path, num_good, *, bad=()):
  """Writes JSON lines; the lines with the numbers `bad` (from 1) are broken."""
  lines = [f'{{"text": "good {i}"}}' for i in range(1, num_good + len(bad) + 1)]
  for number in bad:
    lines[number - 1] = '{"text": "cut'
  path.write_text('\n'.join(lines) + '\n')


def documents(opened):
  """Returns the texts of all batches."""
  vocabulary = seqio_batches.vocabulary(opened.config, feature_converter='lm')
  found = []
  for batch in opened.iterator:
    for row in batch['decoder_target_tokens']:
      if row.any():
        found.append(vocabulary.decode([i for i in row if i > 1]))
  return found


def read_all(open_data, name, **kwargs):
  return [
    text
    for split in ('train', 'validation')
    for text in documents(open_data(name, pack=False, repeat=False, split=split, **kwargs))
  ]


def test_damage_up_to_the_bound_is_left_out_counted_and_reported(open_data, tmp_path, caplog):
  write_lines(tmp_path / 'a.jsonl', 396, bad=(7, 300, 301, 390))
  with caplog.at_level(logging.WARNING):
    found = read_all(open_data, f'jsonl:{tmp_path}/a.jsonl', max_corrupt_fraction=0.01)
  want = {f'good {i}' for i in range(1, 401)} - {f'good {i}' for i in (7, 300, 301, 390)}
  assert collections.Counter(found) == collections.Counter(want)
  assert 'a.jsonl:7 is not JSON' in caplog.text
  assert 'a.jsonl: skipped 4 damaged records of 400' in caplog.text


@pytest.mark.quick_cases('jsonl:{}/a.jsonl-{"bod*', 'hf_dataset:{}-{"id"*')
@pytest.mark.parametrize('first', ['{"body": "cut', '["a"]', '{"id": 1}'])
@pytest.mark.parametrize('name', ['jsonl:{}/a.jsonl', 'hf_dataset:{}'])
def test_with_chosen_columns_the_first_record_may_be_damaged(
  open_data, tmp_path, caplog, name, first
):
  lines = [first, *(f'{{"body": "good {i}"}}' for i in range(400))]
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines) + '\n')
  with caplog.at_level(logging.WARNING):
    found = read_all(open_data, f'{name.format(tmp_path)}#text=body', max_corrupt_fraction=0.01)
  assert collections.Counter(found) == collections.Counter(f'good {i}' for i in range(400))
  assert 'a.jsonl: skipped 1 damaged records of 401' in caplog.text


def test_another_file_of_a_hugging_face_dataset_shows_the_columns(open_data, tmp_path):
  write_lines(tmp_path / 'a.jsonl', 100, bad=(1,))
  name = f'hf_dataset:{tmp_path}'
  with raises(DataError):
    read_all(open_data, name, max_corrupt_fraction=0.01)
  write_lines(tmp_path / 'b.jsonl', 100)
  assert len(read_all(open_data, name, max_corrupt_fraction=0.01)) == 200


def test_one_more_than_the_bound_stops_and_computes_the_fix(open_data, tmp_path):
  write_lines(tmp_path / 'a.jsonl', 395, bad=(7, 8, 300, 301, 390))
  with raises(DataError):
    read_all(open_data, f'jsonl:{tmp_path}/a.jsonl', max_corrupt_fraction=0.01)


def test_the_first_damaged_record_stops_by_default(open_data, tmp_path):
  write_lines(tmp_path / 'a.jsonl', 300, bad=(290,))
  with raises(DataError):
    read_all(open_data, f'jsonl:{tmp_path}/a.jsonl')


def test_damage_early_in_the_data_is_judged_against_a_thousand_records():
  counted = corrupt_records.Damage(num_files=1)
  counted.max_fraction = 0.01
  problems = [DataError(f'record {i}') for i in range(11)]
  counted.count('a', first=0, num_records=100, damaged=problems[:10])
  counted.count('a', first=0, num_records=100, damaged=problems[:10])  # another epoch
  assert counted.records == corrupt_records.RecordCounts(100, 10)
  with raises(DataError):
    counted.count('a', first=100, num_records=100, damaged=problems[10:])


@pytest.mark.parametrize(
  'form, text',
  [
    ('csv', b'id,text\n1,a\n2\n'),
    ('csv', b'id,text\n1,a\n2,"b\n'),
    ('csv', 'text\na\n'.encode('utf-16')),
    ('csv', b'id,text\n1,a\n2,\xff\n'),
    ('tsv', b'inputs\ttargets\na\tb\nc\t\n'),
  ],
)
def test_damaged_tables_are_named_by_line(open_data, tmp_path, form, text):
  (tmp_path / f'a.{form}').write_bytes(text)
  kind = {} if form == 'csv' else {'converter': 'prefix_lm', 'lengths': {'inputs': 8, 'targets': 8}}
  with raises(DataError):
    for split in ('train', 'validation'):
      list(open_data(f'{form}:{tmp_path}/a.{form}', split=split, repeat=False, **kind).iterator)


@pytest.mark.slow
def test_a_tfrecord_of_something_else_is_counted(open_data, tmp_path):
  name = write_form('tfrecord', tmp_path / 'd', [{'text': f'row {i}'} for i in range(60)])
  with tf.io.TFRecordWriter(str(tmp_path / 'd' / 'z.tfrecord')) as writer:
    writer.write(b'\xff\xff\xff')
  with raises(DataError):
    read_all(open_data, name)
  assert len(read_all(open_data, name, max_corrupt_fraction=0.05)) == 60


def rows_of(form, path, text):
  path.write_bytes(text)
  return list(form.rows(str(path), ['text'], 0))


def test_a_line_of_json_that_python_cannot_take_is_one_damaged_record(tmp_path):
  text = b'{"text": "\\ud800"}\n' + b'[' * 100_000 + b'\n{"text": null}\n{"text": "good"}\n'
  *damaged, good = rows_of(line_formats.JSON_LINES, tmp_path / 'a.jsonl', text)
  assert good == (b'good',)
  for row, says in zip(
    damaged,
    (
      'a.jsonl:1 holds half of a surrogate pair',
      'a.jsonl:2 is not JSON: it is nested too deeply',
      "a.jsonl:3 has no text under key 'text': it is null",
    ),
    strict=True,
  ):
    assert isinstance(row, DataError) and says in row.what


def test_every_line_that_an_open_quote_swallows_is_damaged(tmp_path):
  lines = ['text', *(f'row {i}' for i in range(300))]
  lines[150] = '"row 149'
  text = '\n'.join(lines).encode()
  rows = rows_of(line_formats.CSV, tmp_path / 'a.csv', text)
  assert [isinstance(row, DataError) for row in rows] == [False] * 149 + [True] * 151
  after = list(line_formats.CSV.rows(str(tmp_path / 'a.csv'), ['text'], 256))
  assert len(after) == 300 - 256  # a resumed run counts the same


def test_a_tfrecord_that_has_changed_is_counted_and_read_past(tmp_path):
  write_form('tfrecord', tmp_path, [{'text': f'row {i:03d}'} for i in range(200)])
  path = tmp_path / 'part.tfrecord'
  path.write_bytes(path.read_bytes().replace(b'row 100', b'row 700'))
  rows = list(readers.TFRECORD.rows(str(path), ['text'], 0))
  assert 'record 101 has changed' in rows[100].what
  assert [row for row in rows if row is not rows[100]] == [
    (f'row {i:03d}'.encode(),) for i in range(200) if i != 100
  ]
  assert list(readers.TFRECORD.rows(str(path), ['text'], 150)) == rows[150:]


@pytest.mark.parametrize(
  'form', [line_formats.LINES, line_formats.SPANS, line_formats.CSV, line_formats.JSON_LINES]
)
def test_a_byte_order_mark_is_not_text(tmp_path, form):
  text = b'text\nb\n' if form is line_formats.CSV else b'{"text": "a"}\n'
  with_mark = rows_of(form, tmp_path / 'a', codecs.BOM_UTF8 + text)
  assert with_mark == rows_of(form, tmp_path / 'b', text) != []


def test_text_with_a_byte_order_mark_is_read_without_it(tmp_path):
  (tmp_path / 'a.txt').write_bytes(codecs.BOM_UTF8 + b'one\n')
  task = builtin.PATTERN_TASKS['text_lines'](f'{tmp_path}/*.txt')
  found = [
    x['targets']
    for split in ('train', 'validation')
    for x in task.source.get_dataset(split).as_numpy_iterator()
  ]
  assert found == [b'one']
  (tmp_path / 'b.txt').write_bytes('two'.encode('utf-16'))
  with raises(DataError):
    builtin.PATTERN_TASKS['text_lines'](f'{tmp_path}/*.txt')


def test_an_arrow_file_without_rows_has_its_columns(tmp_path):
  schema = pa.schema([('text', pa.string())])
  for new in (pa.ipc.new_stream, pa.ipc.new_file):
    with pa.OSFile(str(tmp_path / 'a.arrow'), 'wb') as f, new(f, schema):
      pass
    assert ARROW.columns(str(tmp_path / 'a.arrow')) == ['text']
    assert not list(ARROW.rows(str(tmp_path / 'a.arrow'), ['text'], 0))


@pytest.mark.slow
def test_damage_leaves_no_iterator_and_calls_no_good_file_empty(open_data, tmp_path, caplog):
  for i in range(8):
    write_lines(tmp_path / f'{i}.jsonl', 90, bad=range(2, 12))

  def iterators():
    return [x for x in gc.get_objects() if type(x) is iterator_ops.OwnedIterator]

  before = iterators()
  # Files are read in parallel: which file the last damaged record is in differs between runs.
  of_two_files = pytest.raises(DataError, match='20 of the 200 records read are damaged')
  with caplog.at_level(logging.WARNING), of_two_files as error:
    open_data(
      f'jsonl:{tmp_path}/*.jsonl',
      max_corrupt_fraction=0.01,
      pack=False,
      batch_size=800,
      repeat=False,
    )
  assert 'has 0 records' not in caplog.text
  gc.collect()
  assert error and len(iterators()) <= len(before)


def _cut(path):
  path.write_bytes(path.read_bytes()[:-9])


@pytest.mark.quick_cases('jsonl-.gz')
@pytest.mark.parametrize('form, ending', [('tfrecord', ''), ('jsonl', '.gz'), ('jsonl', '.zst')])
def test_a_file_that_breaks_off_is_an_error_under_any_bound(open_data, tmp_path, form, ending):
  name = write_form(
    form, tmp_path / 'd', [{'text': f'row {i * i}'} for i in range(600)], ending=ending
  )
  for path in (tmp_path / 'd').iterdir():
    _cut(path)
  with raises(DataError):
    read_all(open_data, name, max_corrupt_fraction=1.0)


def test_empty_files_and_empty_shards_are_skipped_with_a_count(open_data, tmp_path, caplog):
  name = write_form('csv', tmp_path / 'd', [{'text': f'row {i}'} for i in range(40)])
  (tmp_path / 'd' / 'none.csv').touch()
  (tmp_path / 'd' / 'header.csv').write_text('id,text\n')
  with caplog.at_level(logging.WARNING):
    assert len(read_all(open_data, name)) == 40
  assert '1 of the 3 files' in caplog.text and 'are empty and are skipped' in caplog.text
  assert 'header.csv has 0 records and is skipped' in caplog.text


def test_an_empty_compressed_file_is_skipped(open_data, tmp_path):
  (tmp_path / 'a.jsonl').write_text(''.join(f'{{"text": "row {i}"}}\n' for i in range(40)))
  (tmp_path / 'b.jsonl.gz').write_bytes(gzip.compress(b''))
  assert len(read_all(open_data, f'jsonl:{tmp_path}/*')) == 40


def test_a_bound_that_nothing_would_keep_is_refused(open_data):
  with raises(DataError):
    open_data('python_source', max_corrupt_fraction=0.1)
  with raises(DataError):
    open_data('python_source', max_corrupt_fraction=5)


def test_a_member_that_runs_dry_repeats_and_the_rates_hold(open_data):
  def member(name, num_rows):
    def rows(split, shuffle_files, seed=None):
      del split, shuffle_files, seed
      return tf.data.Dataset.range(num_rows).map(
        lambda i: {'targets': tf.strings.join([name, tf.strings.as_string(i)])}
      )

    feature = seqio.Feature(seqio_batches.named_vocabulary('byte'))
    seqio.TaskRegistry.add(
      f'dry_{name}',
      source=seqio.FunctionDataSource(rows, splits=['train']),
      preprocessors=[seqio.preprocessors.tokenize],
      output_features={'targets': feature},
    )
    return f'dry_{name}'

  seqio.MixtureRegistry.add('dry_mixture', [(member('s', 3), 1.0), (member('l', 5000), 3.0)])
  opened = open_data('dry_mixture', pack=False, batch_size=8, lengths={'targets': 8}, shuffle=False)
  vocabulary = seqio_batches.vocabulary(opened.config, feature_converter='lm')
  rows = [
    vocabulary.decode([i for i in row if i > 1])
    for _ in range(100)
    for row in next(opened.iterator)['decoder_target_tokens']
  ]
  small = collections.Counter(row for row in rows if row.startswith('s'))
  assert 0.2 < small.total() / len(rows) < 0.3  # far more than its 3 rows
  assert set(small) == {'s0', 's1', 's2'}
  assert max(small.values()) - min(small.values()) <= 1  # each epoch of it whole


def test_a_row_may_hold_text_whose_unpaired_surrogates_are_damage():
  def row(text):
    return checked_row([text], columns=['text'], where='notes.db, row 1')

  assert row('é') == row('é'.encode()) == ('é'.encode(),)
  assert row(' ') is None
  assert isinstance(row('\ud800'), DataError)


@pytest.mark.parametrize('row', [b'a text', (b'a text', b'a title')], ids=['bytes', 'two'])
def test_rows_other_than_tuples_of_the_columns_are_refused(row):
  form = FileForm('notes', lambda path: ['body'], lambda path, columns, skip: iter([row]))
  reader = readers.BlockReader(form, columns={'targets': 'body'}, num_files=1)
  with pytest.raises(tf.errors.OpError):
    list(reader(tf.constant('notes.db'), tf.constant(0)))
  record_message(f'DataError: {reader.problem}')


def test_an_error_of_any_kind_in_rows_of_a_custom_form_names_the_file():
  def rows(path, columns, skip):
    with contextlib.closing(sqlite3.connect(':memory:', check_same_thread=False)) as database:
      yield from database.execute(f'select {columns[0]}')

  form = FileForm('notes', lambda path: ['body'], rows)
  reader = readers.BlockReader(form, columns={'targets': 'text'}, num_files=1)
  with pytest.raises(tf.errors.OpError):
    list(reader(tf.constant('notes.db'), tf.constant(0)))
  record_message(f'DataError: {reader.problem}')
