"""Tasks from files with columns: every form gives the same rows, in one order, from any place."""

import errno
import gzip
import json
import pathlib

import pyarrow as pa
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from pyarrow import parquet

from t5x_gpu.data import batches
from t5x_gpu.data.sources import labelled
from t5x_gpu.data.sources import rows as rows_lib
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError
from tests.helpers_disk import refused_to_python
from tests.helpers_tables import FORMS, write_form
from tests.messages import raises

pytestmark = pytest.mark.tf


def task_of(name, **kwargs):
  return task_lookup.lookup(batches.DatasetConfig(name, {'targets': 8}, 'train', 1, **kwargs))


def rows_of(task, *, split='train', shard=None):
  """Returns the texts of a task's source, in the order of reading."""
  data = task.source.get_dataset(split, shuffle=False, shard_info=shard)
  return [
    {name: text.decode() for name, text in row.items() if name != 'document_end'}
    for row in data.as_numpy_iterator()
  ]


def all_rows(task):
  return [row for split in sorted(task.splits) for row in rows_of(task, split=split)]


def numbered(num_rows, *, name='text', begin=0):
  return [{name: f'row {i}, "\u00e9" {"x" * (i % 7)}'} for i in range(begin, begin + num_rows)]


def texts(rows, name='text'):
  return sorted(row[name] for row in rows)


@pytest.mark.quick_cases('csv', 'tfrecord')
@pytest.mark.parametrize('form', FORMS)
def test_every_form_gives_every_row_once_and_deals_them_by_a_hash(tmp_path, form):
  written = numbered(600)
  write_form(form, tmp_path / 'd', written[:513], name='a')
  task = task_of(write_form(form, tmp_path / 'd', written[513:], name='b'))
  assert set(task.output_features) == {'targets'}
  assert texts(all_rows(task), 'targets') == texts(written)
  assert 0 < len(rows_of(task, split='validation')) < 100


@pytest.mark.quick_cases('jsonl', 'parquet')
@pytest.mark.parametrize('form', FORMS)
def test_inputs_and_targets_are_supervised_and_columns_can_be_chosen(tmp_path, form):
  rows = [{'inputs': f'q{i}', 'targets': f'a{i}', 'body': f'b{i}'} for i in range(30)]
  name = write_form(form, tmp_path / 'd', rows)
  assert texts(all_rows(task_of(name)), 'inputs') == texts(rows, 'inputs')
  assert texts(all_rows(task_of(f'{name}#text=body')), 'targets') == texts(rows, 'body')
  chosen = task_of(f'{name}#inputs=body,targets=inputs')
  assert {(row['inputs'][1:], row['targets'][0]) for row in all_rows(chosen)} == {
    (str(i), 'q') for i in range(30)
  }
  if form != 'jsonl':  # whose objects may differ from line to line
    with raises(DataError):
      task_of(f'{name}#text=bodi')


@pytest.mark.parametrize('form', FORMS)
def test_words_in_names_say_the_split(tmp_path, form):
  write_form(form, tmp_path / 'd', numbered(20), name='train-00')
  task = task_of(write_form(form, tmp_path / 'd', numbered(7, begin=20), name='validation-00'))
  assert [len(rows_of(task, split=split)) for split in ('train', 'validation')] == [20, 7]


def test_folders_of_a_hugging_face_dataset_say_the_split(tmp_path):
  for split, count in (('train', 12), ('test', 5)):
    write_form('hf_dataset', tmp_path / split, numbered(count), name='data-00000-of-00001')
    write_form('hf_dataset', tmp_path / split, numbered(99), name='cache-1234')  # not the data
  task = task_of(f'hf_dataset:{tmp_path}')
  assert {split: len(rows_of(task, split=split)) for split in task.splits} == {
    'train': 12,
    'test': 5,
  }


def test_folders_say_the_split_behind_a_link_and_dots(tmp_path):
  for name in ('deep', 'data'):
    (tmp_path / 'disk' / name).mkdir(parents=True)
  (tmp_path / 'link').symlink_to('disk/deep')
  for split, count in (('train', 3), ('test', 2)):
    write_form('hf_dataset', tmp_path / 'disk' / 'data' / split, numbered(count))
  task = task_of(f'hf_dataset:{tmp_path}/link/../data')
  assert [len(rows_of(task, split=split)) for split in ('train', 'test')] == [3, 2]


@pytest.mark.quick_cases('.gz')
@pytest.mark.parametrize('ending', ['.gz', '.zst'])
def test_json_lines_and_texts_are_read_compressed(tmp_path, ending):
  written = numbered(300)
  assert texts(
    all_rows(task_of(write_form('jsonl', tmp_path / 'd', written, ending=ending))), 'targets'
  ) == texts(written)
  lines = task_of(f'text_lines:{tmp_path}/d/*')
  whole = task_of(f'text_files:{tmp_path}/d/*')
  assert len(all_rows(lines)) == 300
  assert len(''.join(row['targets'] for row in all_rows(whole)).splitlines()) == 300


def test_text_files_are_the_same_compressed(tmp_path, text_folder):
  (tmp_path / 'z').mkdir()
  for name in ('2.txt', '4.txt'):  # whole spans: the plain reader gives them no end
    (text_folder / name).unlink()
  for path in text_folder.iterdir():
    (tmp_path / 'z' / f'{path.name}.gz').write_bytes(gzip.compress(path.read_bytes()))
  plain, packed = (
    list(
      task_of(f'text_files:{folder}/*')
      .get_dataset({'targets': 50}, split='train', shuffle=False)
      .as_numpy_iterator()
    )
    for folder in (text_folder, tmp_path / 'z')
  )
  assert len(plain) > 100
  assert [list(e['targets']) for e in packed] == [list(e['targets']) for e in plain]


# One form of each kind in make test: read from the front, entered by row, entered by record.
@pytest.mark.quick_cases('csv')
@pytest.mark.parametrize(
  'form',
  [
    form
    if form in ('csv', 'parquet', 'arrayrecord')
    else pytest.param(form, marks=pytest.mark.slow)
    for form in FORMS
  ],
)
def test_a_stream_saved_inside_a_block_continues_in_another_reader(open_data, tmp_path, form):
  for name in 'abc':
    write_form(form, tmp_path / 'd', numbered(700, begin=ord(name) * 1000), name=name)
  name = write_form(form, tmp_path / 'd', numbered(1), name='d')
  first, second = (open_data(name, pack=False, batch_size=8).iterator for _ in range(2))
  for _ in range(60):  # past the first blocks of all files, with the shuffle buffer of 1000
    next(first)
  second.set_state(first.get_state())
  for _ in range(50):
    want, got = next(first), next(second)
    assert all((want[key] == got[key]).all() for key in want)


@pytest.mark.parametrize('form', ['csv', 'parquet'])
def test_shards_of_a_source_share_its_files_and_lose_none(tmp_path, form):
  for i in range(5):
    write_form(form, tmp_path / 'd', numbered(40, begin=100 * i), name=str(i))
  task = task_of(f'{form}:{tmp_path}/d/*')
  parts = [rows_of(task, shard=seqio.ShardInfo(index=i, num_shards=2)) for i in range(2)]
  assert parts[0] and parts[1]
  assert texts(parts[0] + parts[1], 'targets') == texts(rows_of(task), 'targets')


def test_array_records_of_plain_text(tmp_path):
  writer = ArrayRecordWriter(str(tmp_path / 'a.arrayrecord'), 'group_size:1')
  for row in numbered(300):
    writer.write(row['text'].encode())
  writer.close()
  task = task_of(f'arrayrecord:{tmp_path}/a.arrayrecord')
  assert texts(all_rows(task), 'targets') == texts(numbered(300))


def test_spans_are_hidden_in_any_table(tmp_path):
  name = write_form('parquet', tmp_path / 'd', numbered(50))
  assert set(task_of(f'span_corruption:{name}').output_features) == {'inputs', 'targets'}


@pytest.mark.slow
def test_a_choice_of_columns_is_part_of_what_the_data_is(open_data, tmp_path):
  rows = [{'text': f'a{i}', 'body': f'b{i}'} for i in range(50)]
  name = write_form('csv', tmp_path / 'd', rows)
  state = open_data(f'{name}#text=body', shuffle=False).iterator.get_state()
  with raises(DataError):
    open_data(f'{name}#text=text', shuffle=False).iterator.set_state(state)


def test_a_wrong_choice_and_a_wrong_form_are_named(tmp_path):
  path = pathlib.Path(tmp_path / 'a.parquet')
  path.write_text('no such thing')
  with raises(DataError):
    task_of(f'parquet:{path}')
  with raises(DataError):
    task_of(f'parquet:{path}#input=a,targets=b')


def refused(name):
  """Returns the error of reading everything."""
  with raises(DataError) as e:
    _read(name)
  assert e.value.fix
  return str(e.value)


def _read(name):
  task = task_of(name)
  try:
    return all_rows(task)
  except Exception:
    if task.source.problem is None:
      raise
  raise task.source.problem


def test_json_lines_for_test_are_not_trained_on(tmp_path, caplog):
  for split in ('train', 'validation', 'test'):
    write_form('jsonl', tmp_path / 'd', [{'text': split}] * 3, name=split)
  task = task_of(f'jsonl:{tmp_path}/d/*.jsonl')
  for split in ('train', 'validation', 'test'):
    assert rows_of(task, split=split) == [{'targets': split}] * 3
  assert not caplog.text
  # With a file without a split in its name, a hash decides, and the log says so.
  write_form('jsonl', tmp_path / 'd', numbered(60), name='more')
  assert len(all_rows(task_of(f'jsonl:{tmp_path}/d/*.jsonl'))) == 69
  assert 'training also reads 2 of the 4 files' in caplog.text


def test_a_run_whose_texts_a_hash_assigned_is_refused_with_the_reason(
  tmp_path, open_data, monkeypatch
):
  for split in ('train', 'test'):
    name = write_form('jsonl', tmp_path / 'd', numbered(60), name=split)
  with monkeypatch.context() as earlier:
    earlier.setattr(labelled, 'clear_splits', lambda files: None)
    state = open_data(name).iterator.get_state()
  with raises(DataError):
    open_data(name).iterator.set_state(state)
  write_form('jsonl', tmp_path / 'd', numbered(61), name='train')
  with raises(DataError):
    open_data(name).iterator.set_state(state)


def test_texts_for_test_that_are_trained_on_are_named(tmp_path, caplog):
  for name in ('wiki.train.tokens', 'wiki.test.tokens'):
    (tmp_path / name).write_text('a line\n')
  task_of(f'text_lines:{tmp_path}/*')
  assert 'training also reads 1 of the 2 files' in caplog.text and 'wiki.test' in caplog.text


def test_a_table_that_cannot_be_opened_is_not_called_another_form(tmp_path):
  name = write_form('csv', tmp_path / 'd', numbered(3))
  with refused_to_python('part.csv', errno.EMFILE):
    refused(name)


@pytest.mark.parametrize('pair', [('', 'a'), ('a', ''), ('a', ' \n')])
def test_half_of_a_pair_is_damage_in_json_lines_too(tmp_path, pair):
  pairs = [('q', 'a'), pair, ('', '')]  # the last one is a blank row
  rows = [dict(zip(('inputs', 'targets'), texts)) for texts in pairs]
  name = write_form('jsonl', tmp_path / 'd', rows)
  refused(name)
  write_form('jsonl', tmp_path / 'd', [rows[0], rows[2]])
  assert len(_read(name)) == 1


def _repeated(form, folder):
  """Writes a file with two columns called text."""
  names, values = ['text', 'text', 'n'], ['a', 'b', '1']
  mark = {'csv': ',', 'tsv': '\t'}.get(form)
  table = pa.Table.from_arrays([pa.array([value]) for value in values], names=names)
  if mark:
    (folder / f'a.{form}').write_text(f'{mark.join(names)}\n{mark.join(values)}\n')
  elif form == 'parquet':
    parquet.write_table(table, folder / 'a.parquet')
  elif form == 'jsonl':
    (folder / 'a.jsonl').write_text('{"n": "1", "text": "a", "text": "b"}\n')
  else:
    with pa.OSFile(str(folder / 'a.arrow'), 'wb') as f, pa.ipc.new_stream(f, table.schema) as out:
      out.write_table(table)
  return f'hf_dataset:{folder}' if form == 'hf_dataset' else f'{form}:{folder}/*'


@pytest.mark.parametrize('form', ['csv', 'tsv', 'parquet', 'hf_dataset', 'jsonl'])
def test_two_columns_of_one_name_are_refused_unless_another_is_chosen(tmp_path, form):
  name = _repeated(form, tmp_path)
  refused(name)
  if form == 'jsonl':  # the same value twice is clear
    (tmp_path / 'a.jsonl').write_text('{"text": "1", "text": "1"}\n')
    assert _read(name) == [{'targets': '1'}]
  else:
    assert _read(f'{name}#text=n') == [{'targets': '1'}]


@pytest.mark.quick_cases('a,b-csv', 'question, long-parquet')
@pytest.mark.parametrize('form', ['csv', 'parquet'])
@pytest.mark.parametrize('column', ['question, long', 'a,b', 'te#xt', 'a=b'])
def test_names_of_columns_may_have_commas_and_marks(tmp_path, form, column):
  rows = [{column: 'q', 'reply': 'a'}] * 2
  if form == 'csv':
    (tmp_path / 'a.csv').write_text(f'"{column}",reply\nq,a\nq,a\n')
    name = f'csv:{tmp_path}/a.csv'
  else:
    name = write_form(form, tmp_path / 'd', rows)
  assert _read(f'{name}#text={column}') == [{'targets': 'q'}] * 2
  assert _read(f'{name}#inputs={column},targets=reply') == [{'inputs': 'q', 'targets': 'a'}] * 2
  assert _read(f'{name}#targets=reply,inputs={column}') == [{'inputs': 'q', 'targets': 'a'}] * 2


def _arrays():
  texts = pa.array(['a', None, 'b'])
  as_json = pa.array(['"a"', None, '"b"'])
  return {
    'string_view': pa.array(['a', None, 'b'], pa.string_view()),
    'large_string': texts.cast(pa.large_string()),
    'dictionary': texts.dictionary_encode(),
    'binary_view': pa.array([b'a', None, b'b'], pa.binary_view()),
    'fixed': pa.array([b'a', None, b'b'], pa.binary(1)),
    'json': pa.ExtensionArray.from_storage(pa.json_(pa.string()), as_json),
    'null': pa.nulls(3),
  }


@pytest.mark.parametrize('form', ['parquet', 'hf_dataset'])
@pytest.mark.parametrize('kind', _arrays())
def test_columns_of_every_kind_of_text_are_text_and_nulls_are_blank(tmp_path, form, kind):
  table = pa.table({'text': _arrays()[kind]})
  if form == 'parquet':
    parquet.write_table(table, tmp_path / 'a.parquet')
  else:
    with pa.OSFile(str(tmp_path / 'a.arrow'), 'wb') as f, pa.ipc.new_stream(f, table.schema) as out:
      out.write_table(table)
  found = _read(f'{form}:{tmp_path}' + ('/*' if form == 'parquet' else ''))
  assert texts(found, 'targets') == ([] if kind == 'null' else ['a', 'b'])


def _save_to_disk(folder, rows, num_shards):
  """Writes files as `datasets.Dataset.save_to_disk` does; earlier ones stay."""
  names = [f'data-{i:05}-of-{num_shards:05}' for i in range(num_shards)]
  for i, name in enumerate(names):
    write_form('hf_dataset', folder, rows[i::num_shards], name=name)
  state = {'_data_files': [{'filename': f'{name}.arrow'} for name in names], '_split': None}
  (folder / 'state.json').write_text(json.dumps(state))
  (folder / 'dataset_info.json').write_text('{}')


def test_shards_of_an_earlier_save_to_disk_are_not_read(tmp_path, caplog):
  _save_to_disk(tmp_path, numbered(60, begin=100), 2)
  _save_to_disk(tmp_path, numbered(30), 1)
  assert texts(_read(f'hf_dataset:{tmp_path}'), 'targets') == texts(numbered(30))
  assert 'skipped 2 files of an earlier save_to_disk' in caplog.text
  (tmp_path / 'data-00000-of-00001.arrow').unlink()
  refused(f'hf_dataset:{tmp_path}')
  (tmp_path / 'state.json').write_text('{"_data_files": [1]}')
  refused(f'hf_dataset:{tmp_path}')


def test_splits_of_an_earlier_save_to_disk_are_not_read(tmp_path):
  for split in ('train', 'test', 'validation'):
    (tmp_path / split).mkdir()
    _save_to_disk(tmp_path / split, [{'text': split}] * 4, 1)
  (tmp_path / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
  task = task_of(f'hf_dataset:{tmp_path}')
  assert {split: rows_of(task, split=split) for split in task.splits} == {
    split: [{'targets': split}] * 4 for split in ('train', 'test')
  }
  _save_to_disk(tmp_path, numbered(4), 1)
  refused(f'hf_dataset:{tmp_path}')


def test_endings_in_capitals_are_the_same_endings(tmp_path):
  line = b'{"text": "a"}\n'
  (tmp_path / 'A.JSONL.GZ').write_bytes(gzip.compress(line) + gzip.compress(line))
  assert len(_read(f'jsonl:{tmp_path}/*')) == 2
  assert len(_read(f'text_lines:{tmp_path}/*')) == 2
  write_form('hf_dataset', tmp_path / 'd', numbered(3))
  (tmp_path / 'd' / 'part.arrow').rename(tmp_path / 'd' / 'PART.ARROW')
  assert len(_read(f'hf_dataset:{tmp_path}/d')) == 3


LONG = {
  'jsonl': ('a.jsonl.gz', b'{"text": "%s"}\n'),
  'csv': ('a.csv.gz', b'text\n%s\n'),
  'tsv': ('a.tsv.gz', b'text\n%s\n'),
  'text_lines': ('a.txt.gz', b'short\n%s'),
  'text_files': ('a.txt.gz', b'short\n%s'),
  'text_files of one line': ('a.txt', b'short\n%s'),
  'text_pairs': ('a.jsonl', b'{"inputs": "a", "targets": "%s"}\n'),
  'classification:jsonl': ('train.jsonl', b'{"text": "%s", "label": 1}\n'),
}


@pytest.mark.quick_cases('jsonl', 'csv', 'text_files of one line')
@pytest.mark.parametrize('kind', LONG)
def test_a_line_without_an_end_is_refused_by_file_and_line(tmp_path, monkeypatch, kind):
  limit = 4 << 20
  monkeypatch.setattr(rows_lib, 'MAX_TEXT_BYTES', limit)
  file, form = LONG[kind]
  for length, fits in ((limit // 2, True), (3 * limit, False)):
    content = form % (b'x' * length)
    (tmp_path / file).write_bytes(gzip.compress(content, 1) if file.endswith('.gz') else content)
    name = f'{kind.partition(" ")[0]}:{tmp_path}/{file}'
    if fits and not kind.startswith(('csv', 'classification')):
      assert sum(len(row.get('targets', '')) for row in _read(name)) >= length
    if not fits:
      refused(name)


def test_a_text_that_is_too_long_for_a_tokenizer_is_damage_in_tables(tmp_path, monkeypatch):
  monkeypatch.setattr(rows_lib, 'MAX_TEXT_BYTES', 1 << 20)
  name = write_form('parquet', tmp_path / 'd', [{'text': 'a'}, {'text': 'x' * (2 << 20)}])
  refused(name)
