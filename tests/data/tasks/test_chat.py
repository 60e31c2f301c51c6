"""Conversations become rows whose loss falls on the assistant's tokens alone."""

import functools
import json
import logging
import re

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from t5x_gpu.data import data_module
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.data.sources.conversations import conversation_row
from t5x_gpu.data.tasks import tables
from t5x_gpu.data.vocabularies.chat_template import ChatTemplate
from t5x_gpu.data.vocabularies.huggingface import HuggingFaceVocabulary
from t5x_gpu.errors import DataError
from tests.helpers_chat import (
  CHATML,
  GENERATION,
  TALKS,
  chatml_by_hand,
  talk,
  write_talks,
  write_tokenizer,
)
from tests.helpers_prepared import prepare_here
from tests.messages import raises

pytest.importorskip('tokenizers')
pytestmark = pytest.mark.tf
LENGTH = 128
MANY = [talk(f'What is {i}?', f'It is {i}!', 'And?', f'{i + 1}') for i in range(60)]


@pytest.fixture(name='chat')
def _chat(tmp_path):
  """A tokenizer whose id 0 is a word, and 60 conversations."""
  folder = write_tokenizer(tmp_path / 'tokenizer', CHATML, zero_is_a_word=True)
  path = write_talks(tmp_path / 'a.jsonl', MANY)
  return f'jsonl:{path}', f'huggingface:{folder}'


def expected_rows(vocabulary, talks):
  """Returns (inputs, targets, loss) of each conversation, from the whole text of a template."""
  vocabulary = HuggingFaceVocabulary(vocabulary.removeprefix('huggingface:'))
  found = [chatml_by_hand(vocabulary, messages) for messages in talks]
  return [(ids[:-1], ids[1:], loss[1:]) for ids, loss in found]


def rows_of(iterator, number=10**9):
  """Returns (inputs, targets, loss) of each example in the batches."""
  found = []
  for batch in iterator:
    for i in range(len(batch['decoder_target_tokens'])):
      segments = batch['decoder_segment_ids'][i]
      for s in range(1, segments.max() + 1):
        names = ('decoder_input_tokens', 'decoder_target_tokens', 'decoder_loss_weights')
        found.append(tuple(batch[name][i][segments == s].tolist() for name in names))
        if 'decoder_positions' in batch:
          positions = batch['decoder_positions'][i][segments == s]
          assert positions.tolist() == list(range(len(positions)))
    if len(found) >= number:
      break
  return found


def split_talks(talks, name, open_data, vocabulary, **options):
  """Returns what streaming gives for both splits."""
  found = []
  for split in ('train', 'validation'):
    opened = open_data(
      name, vocabulary=vocabulary, lengths={'targets': LENGTH}, split=split, repeat=False, **options
    )
    found += rows_of(opened.iterator)
  return found


@pytest.mark.parametrize('pack', [True, False])
def test_the_loss_is_on_the_answers_and_everything_is_read_once(open_data, chat, pack):
  expected = expected_rows(chat[1], MANY)
  assert any(0 in inputs for inputs, _, _ in expected)  # the word of id 0
  found = split_talks(MANY, chat[0], open_data, chat[1], pack=pack)
  assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_all_tokens_can_have_a_loss(open_data, chat):
  found = split_talks(MANY, chat[0], open_data, chat[1], loss_on_targets_only=False)
  expected = [(a, b, [1] * len(c)) for a, b, c in expected_rows(chat[1], MANY)]
  assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_prepared_rows_are_the_same_and_a_changed_template_is_other_data(open_data, chat, tmp_path):
  name, vocabulary = chat
  options = dict(lengths={'targets': LENGTH}, vocab_size=384, vocabulary=vocabulary)
  prepare_here(name, tmp_path / 'rows', **options)
  before = read_index(tmp_path / 'rows', split='train').plan()
  opened = open_data(f'prepared:{tmp_path}/rows', lengths={'targets': LENGTH}, repeat=False)
  found = rows_of(opened.iterator)
  expected = sorted(expected_rows(vocabulary, MANY))
  assert len(found) > 40 and all(row in expected for row in found)
  (tmp_path / 'tokenizer/chat_template.jinja').write_text(GENERATION)
  with raises(DataError):
    prepare_here(name, tmp_path / 'rows', **options)
  assert before == read_index(tmp_path / 'rows', split='train').plan()


@pytest.mark.slow
def test_prepared_rows_are_refused_for_other_variables_of_the_template(open_data, chat, tmp_path):
  name, vocabulary = chat
  lengths, variables = {'targets': LENGTH}, {'system': 'Be brief.', 'tools_first': True}
  prepare_here(
    name,
    tmp_path / 'rows',
    lengths=lengths,
    vocabulary=vocabulary,
    chat_template_variables=variables,
  )
  rows = f'prepared:{tmp_path}/rows'
  for same in (variables, None):  # None: as they were prepared
    open_data(rows, lengths=lengths, chat_template_variables=same)
  with raises(DataError):
    open_data(rows, lengths=lengths, chat_template_variables={'system': 'Be long.'})


@pytest.mark.slow
def test_a_resumed_run_refuses_a_changed_template(open_data, chat, tmp_path):
  name, vocabulary = chat
  options = dict(vocabulary=vocabulary, lengths={'targets': LENGTH})
  first = open_data(name, **options).iterator
  next(first)
  state, expected = first.get_state(), next(first)
  second = open_data(name, **options).iterator
  second.set_state(state)
  np.testing.assert_equal(next(second), expected)
  (tmp_path / 'tokenizer/chat_template.jinja').write_text(GENERATION)
  with raises(DataError):
    open_data(name, **options).iterator.set_state(state)


@pytest.mark.slow
def test_long_conversations_are_cut_or_left_out_and_counted(open_data, tmp_path, caplog):
  folder = write_tokenizer(tmp_path / 'tokenizer', GENERATION)
  longest = [talk(letter * 90, 'b') for letter in 'acd']
  talks = [*longest, *[talk('Hi', 'b' * (60 + i)) for i in range(12)], talk('Hi', 'yes')]
  write_talks(tmp_path / 'a.jsonl', talks)
  with caplog.at_level(logging.WARNING):
    found = split_talks(
      talks, f'jsonl:{tmp_path}/a.jsonl', open_data, f'huggingface:{folder}', pack=True
    )
  assert len(found) == 16
  caplog.clear()
  with caplog.at_level(logging.WARNING):
    opened = open_data(
      f'jsonl:{tmp_path}/a.jsonl',
      vocabulary=f'huggingface:{folder}',
      lengths={'targets': 48},
      repeat=True,
    )
    found = rows_of(opened.iterator, number=60)
  text = caplog.text
  assert all(len(targets) <= 48 and any(loss) for _, targets, loss in found)
  assert re.search(
    r'a\.jsonl:[123] has \d+ tokens; a row holds 48 \(TASK_FEATURE_LENGTHS\): left out', text
  )
  assert text.count(': cut') == 4  # three by name, and once at 10
  assert '10 conversations so far are longer than the 48 tokens of a row' in text


REFUSING = (
  '{% for m in messages %}{% if refused in m.content %}{{ raise_exception("not that") }}{% endif %}'
  '{% endfor %}' + CHATML
)


@pytest.mark.slow
def test_conversations_that_the_template_refuses_are_skipped_and_counted(
  open_data, tmp_path, caplog
):
  vocabulary = f'huggingface:{write_tokenizer(tmp_path / "tokenizer", REFUSING)}'
  talks = [talk(f'Hi {i}', 'bad' if i in (3, 20) else 'good') for i in range(40)]
  name = f'jsonl:{write_talks(tmp_path / "a.jsonl", talks)}'
  options = dict(chat_template_variables={'refused': 'bad'})
  with caplog.at_level(logging.WARNING):
    found = split_talks(talks, name, open_data, vocabulary, max_corrupt_fraction=0.1, **options)
  good = [messages for i, messages in enumerate(talks) if i not in (3, 20)]
  assert sorted(found) == sorted(expected_rows(vocabulary, good))
  for number in (4, 21):
    assert f'a.jsonl:{number}: the chat template' in caplog.text
  with raises(DataError):
    split_talks(talks, name, open_data, vocabulary, max_corrupt_fraction=0.02, **options)
  with raises(DataError):
    split_talks(talks, name, open_data, vocabulary, **options)


def test_sharegpt_and_parts_of_text_are_the_same_conversations(tmp_path):
  folder = write_tokenizer(tmp_path / 'tokenizer', GENERATION)
  template = ChatTemplate(HuggingFaceVocabulary(folder))
  names = {'user': 'human', 'assistant': 'gpt', 'system': 'system'}
  shared = [{'from': names[m['role']], 'value': m['content']} for m in TALKS[2]]
  parts = [
    {**m, 'content': [{'type': 'text', 'text': c} for c in m['content']], 'name': None}
    for m in TALKS[2]
  ]
  for key, messages in (('conversations', shared), ('messages', parts)):
    path = write_talks(tmp_path / f'{key}.jsonl', [messages], key=key)
    task = tables.PATTERN_TASKS['jsonl'](str(path))
    [row] = [
      x
      for split in ('train', 'validation')
      for x in task.source.get_dataset(split, shuffle=False).as_numpy_iterator()
    ]
    content = json.loads(row['targets'])
    assert content == {'messages': TALKS[2], 'tools': None}
    assert template.tokens(**content, where='a')[0].size > 20
    assert row['where'].decode() == f'{path}:1'


@pytest.mark.parametrize('form', ['parquet', 'arrow'])
def test_tables_hold_conversations_too(tmp_path, form):
  rows = {'messages': [*TALKS, TALKS[0]], 'tools': [None] * 4, 'id': list(range(4))}
  table = pa.table(rows)
  if form == 'parquet':
    pq.write_table(table, tmp_path / 'a.parquet', row_group_size=2)
  else:
    with pa.ipc.new_stream(str(tmp_path / 'a.arrow'), table.schema) as writer:
      writer.write_table(table, max_chunksize=3)
  name, spelled = ('parquet', '/a.parquet') if form == 'parquet' else ('hf_dataset', '')
  task = tables.PATTERN_TASKS[name](f'{tmp_path}{spelled}')
  found = []
  for split in task.splits:
    found += task.source.get_dataset(split, shuffle=False).as_numpy_iterator()
  found = sorted((x['where'].decode(), json.loads(x['targets'])['messages']) for x in found)
  assert [row for _, row in found] == rows['messages']
  assert [where for where, _ in found] == [f'{tmp_path}/a.{form}, row {i}' for i in range(1, 5)]


USER = {'role': 'user', 'content': 'a'}
ANSWER = {'role': 'assistant', 'content': 'b'}


@pytest.mark.parametrize(
  'record',
  [
    {'messages': 'text'},
    {'messages': []},
    {'messages': [USER, 'b']},
    {'messages': [{'role': 'asistant', 'content': 'b'}]},
    {'messages': [USER]},
    {'messages': [USER, {'role': 'assistant'}]},
    {'messages': [{**USER, 'content': [{'type': 'text', 'text': 'a'}, {'type': 'image'}]}]},
    {'messages': [USER, ANSWER], 'tools': 'f()'},
    {'messages': [USER, {**ANSWER, 'content': '\ud800'}]},
  ],
)
def test_bad_conversations_are_named_with_file_and_line(record):
  with raises(DataError) as e:
    raise conversation_row(record, key='messages', where='a.jsonl:1')
  assert e.value.fix


@pytest.mark.parametrize(
  'record', [{'messages': [USER]}, {'messages': [USER, ANSWER], 'text': 'a'}]
)
def test_errors_come_out_of_the_batches(open_data, tmp_path, record):
  folder = write_tokenizer(tmp_path / 'tokenizer', GENERATION)
  lines = [{'messages': TALKS[0]}, {'messages': TALKS[1]}] * 20
  (tmp_path / 'a.jsonl').write_text('\n'.join(map(json.dumps, [record, *lines])))
  with raises(DataError) as e:
    for split in ('train', 'validation'):
      opened = open_data(
        f'jsonl:{tmp_path}/a.jsonl', vocabulary=f'huggingface:{folder}', split=split, repeat=False
      )
      list(opened.iterator)
  assert e.value.fix


def test_wrong_settings_are_refused_before_anything_is_read(open_data, chat, tmp_path):
  name, vocabulary = chat
  with raises(DataError):
    open_data(name)
  with raises(DataError):
    open_data(f'span_corruption:{name}', vocabulary=vocabulary)
  (tmp_path / 'a.csv').write_text('messages\n[]\n')
  with raises(DataError):
    open_data(f'csv:{tmp_path}/a.csv#messages=messages', vocabulary=vocabulary)


@pytest.mark.slow
def test_the_key_of_messages_can_be_chosen(open_data, chat, tmp_path):
  path = write_talks(tmp_path / 'b.jsonl', MANY, key='chat', text='x')
  found = split_talks(MANY, f'jsonl:{path}#messages=chat', open_data, chat[1])
  assert sorted(found) == sorted(expected_rows(chat[1], MANY))


def test_prompts_are_made_by_the_template(chat):
  _, vocabulary = chat
  text = data_module.open_text(
    DatasetConfig('', {}, '', 1, vocabulary=vocabulary),
    'prompt_text',
    feature_converter='lm',
    model_vocab_size=300,
    has_inputs=False,
  )
  own = HuggingFaceVocabulary(vocabulary.removeprefix('huggingface:'))
  ids = own.encode('<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n')
  assert text.encode_chat(talk('Hi!')[:1], where='a') == ids and 0 in ids
  assert text.chat_ends() == [own.id_of('<|im_end|>')]


def _tool(name, *parameters):
  properties = {parameter: {'type': 'string'} for parameter in parameters}
  function = {'name': name, 'parameters': {'type': 'object', 'properties': properties}}
  return {'type': 'function', 'function': function}


def _calls(name, **arguments):
  """Returns a conversation with a call of a tool."""
  call = {'type': 'function', 'function': {'name': name, 'arguments': arguments}}
  return {
    'messages': [
      {'role': 'user', 'content': 'What?'},
      {'role': 'assistant', 'content': None, 'tool_calls': [call]},
      {'role': 'assistant', 'content': 'This.', 'parts': [{'type': 'text', 'text': 'x'}]},
    ],
    'tools': [_tool(name, *arguments)],
  }


def _json_table(records):
  """Returns a table as `datasets` 5 stores messages that differ in their keys."""
  json_type = pa.json_(pa.string())
  messages = [list(map(json.dumps, record['messages'])) for record in records]
  ends = np.cumsum([0, *map(len, messages)]).astype(np.int32)
  stored = pa.ExtensionArray.from_storage(json_type, pa.array(sum(messages, [])))
  tools = pa.array([json.dumps(record['tools']) for record in records])
  return pa.table(
    {
      'messages': pa.ListArray.from_arrays(pa.array(ends), stored),
      'tools': pa.ExtensionArray.from_storage(json_type, tools),
    }
  )


@pytest.mark.parametrize('kind', ['structs', 'json'])
@pytest.mark.parametrize('form', ['parquet', 'hf_dataset'])
def test_tables_have_the_messages_of_json_lines_without_nulls_that_nobody_wrote(
  tmp_path, kind, form
):
  records = [_calls('weather', city='Lima'), _calls('add', a='1', b='2')] * 20
  if kind == 'json':  # with explicit nulls
    records[0]['messages'][1]['tool_calls'][0]['function']['arguments']['unit'] = None
  table = _json_table(records) if kind == 'json' else pa.Table.from_pylist(records)
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(record) + '\n' for record in records))
  if form == 'parquet':
    pq.write_table(table, tmp_path / 'a.parquet')
    name = f'parquet:{tmp_path}/a.parquet'
  else:
    folder = tmp_path / 'hf'
    folder.mkdir()
    with pa.OSFile(str(folder / 'a.arrow'), 'wb') as f, pa.ipc.new_stream(f, table.schema) as out:
      out.write_table(table)
    name = f'hf_dataset:{folder}'

  def contents(spelled):
    kind, _, rest = spelled.partition(':')
    source = tables.PATTERN_TASKS[kind](rest).source
    return [
      json.loads(row['targets'])
      for split in source.splits
      for row in source.get_dataset(split, shuffle=False).as_numpy_iterator()
    ]

  found, expected = contents(name), contents(f'jsonl:{tmp_path}/a.jsonl')
  assert len(found) == 40
  order = functools.partial(json.dumps, sort_keys=True)
  assert sorted(map(order, found)) == sorted(map(order, expected))


def test_maps_and_bytes_of_a_table_are_objects_and_texts(tmp_path):
  arguments = pa.map_(pa.string(), pa.string())
  message = pa.struct({'role': pa.string(), 'content': pa.binary(), 'arguments': arguments})
  rows = [[{'role': 'user', 'content': b'q'}, {'role': 'assistant', 'content': b'a'}], None]
  rows[0][1]['arguments'] = [('city', 'Lima')]
  pq.write_table(pa.table({'messages': pa.array(rows, pa.list_(message))}), tmp_path / 'a.parquet')
  source = tables.PATTERN_TASKS['parquet'](f'{tmp_path}/a.parquet').source
  [row] = [  # the second row is blank
    row
    for split in source.splits
    for row in source.get_dataset(split, shuffle=False).as_numpy_iterator()
  ]
  assert json.loads(row['targets'])['messages'] == [
    {'role': 'user', 'content': 'q'},
    {'role': 'assistant', 'content': 'a', 'arguments': {'city': 'Lima'}},
  ]


@pytest.mark.parametrize('depth', [150, 900, 100_000])
@pytest.mark.parametrize('as_text', [True, False])
def test_tools_that_are_nested_too_deeply_are_one_damaged_conversation(
  open_data, chat, tmp_path, depth, as_text
):
  nested = '[' * depth + ']' * depth
  good = json.dumps({'messages': MANY[0]})
  tools = json.dumps(nested) if as_text else nested
  bad = f'{good[:-1]}, "tools": {tools}}}'
  (tmp_path / 'a.jsonl').write_text('\n'.join([good, bad]))
  options = dict(vocabulary=chat[1], lengths={'targets': LENGTH}, repeat=False)
  with raises(DataError):
    list(open_data(chat[0], **options).iterator)
