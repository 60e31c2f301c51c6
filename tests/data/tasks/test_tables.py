"""Tasks from files with columns: every form gives the same rows, in one order, from any place."""

import gzip
import pathlib

import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from t5x_gpu.data import batches
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError
from tests.helpers_tables import FORMS, write_form

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
    with pytest.raises(DataError, match="no column 'bodi'.*Did you mean 'body'"):
      task_of(f'{name}#text=bodi')


# jsonl is dealt by a hash, whatever the names are.
@pytest.mark.parametrize('form', [form for form in FORMS if form != 'jsonl'])
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
  with pytest.raises(DataError, match='source of'):
    open_data(f'{name}#text=text', shuffle=False).iterator.set_state(state)


def test_a_wrong_choice_and_a_wrong_form_are_named(tmp_path):
  path = pathlib.Path(tmp_path / 'a.parquet')
  path.write_text('no such thing')
  with pytest.raises(DataError, match='cannot be read as parquet'):
    task_of(f'parquet:{path}')
  with pytest.raises(DataError, match="Did you mean 'inputs'"):
    task_of(f'parquet:{path}#input=a,targets=b')
