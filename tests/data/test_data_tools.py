"""python -m t5x_gpu.data: rows decoded and colored, lengths and shares, speed, checksums."""

import importlib
import json
import re
import shutil

import numpy as np
import pytest

from t5x_gpu.data.prepared.index import read_index
from t5x_gpu.data.prepared.shard_writer import RowStats, pieces, target_of
from t5x_gpu.data.vocabularies.vocabularies import named_vocabulary
from t5x_gpu.errors import ConfigError, DataError
from tests.helpers_train import TINY_GIN, run_here
from tests.messages import raises
from tests.reporting.pages import Page

pytestmark = pytest.mark.tf
command = importlib.import_module('t5x_gpu.data_tools')

# Two examples and three of padding; the first two tokens of the second one are not taught.
ROW = {
  'decoder_target_tokens': np.asarray([5, 6, 7, 8, 9, 0, 0, 0]),
  'decoder_segment_ids': np.asarray([1, 1, 2, 2, 2, 0, 0, 0]),
  'decoder_loss_weights': np.asarray([1, 1, 0, 0, 1, 0, 0, 0]),
}


def run(*argv):
  result = run_here(lambda: command.main(list(map(str, argv))))
  assert result.code == 0, result.err
  return result.out


def test_a_row_falls_into_its_examples_and_what_is_taught_of_them():
  found = [(p.example, p.has_loss, p.text, p.is_first) for p in pieces(ROW, decode=str)]
  assert found == [(1, True, '[5, 6]', True), (2, False, '[7, 8]', True), (2, True, '[9]', False)]


@pytest.mark.parametrize(
  'row, says',
  [
    ({'label': 1}, 'label: good'),
    ({'label': 7}, 'label: 7'),  # the data have no name for it
    ({'encoder_labels': [2, 1, 0], 'label_weights': 1}, 'labels: good, bad'),
    ({'encoder_labels': [0, 0, 0], 'label_weights': 1}, 'labels: none'),
    ({'encoder_labels': [0, 2, 0, 1]}, 'tags: good bad'),
    ({'scores': -25_000}, 'score: -2.5'),
    (ROW, ''),
  ],
)
def test_the_target_of_a_row_is_shown_in_words(row, says):
  row = {name: np.asarray(x) for name, x in row.items()}
  assert target_of(row, ('bad', 'good')) == says


def test_facts_of_rows_leave_out_rows_that_only_fill_a_batch():
  facts = RowStats()
  facts.add(ROW)
  facts.add({name: np.zeros_like(x) for name, x in ROW.items()})
  assert (facts.rows, facts.tokens, facts.positions, facts.padding) == (1, 5, 8, 3 / 8)
  assert facts.lengths == {1: 1, 2: 1}  # of 2 and of 3 tokens


def test_lengths_have_bins_without_gaps():
  assert command.bins({0: 1, 3: 2}) == [('1', 1), ('2', 0), ('3-4', 0), ('5-8', 2)]
  assert command.lengths_table({0: 1, 1: 3})[1] == '  2   75.0%  ' + '#' * 40
  assert command.bins({}) == []


def test_preview_shows_rows_as_text(mixed_rows):
  out = run('preview', f'prepared:{mixed_rows}')
  assert (
    len(
      re.findall(r'^row \d: \d+ examples, \d+ of 32 positions, padding [\d.]+%$', out, re.MULTILINE)
    )
    == 4
  )
  assert re.search(r'^  \[1\] a\d+ a*$', out, re.MULTILINE), out
  assert re.search(r'^4 rows: padding [\d.]+%$', out, re.MULTILINE)


def test_preview_shows_each_text_of_an_evaluation_once(tmp_path):
  (tmp_path / 'a.jsonl').write_text(''.join(f'{{"text": "text {i}"}}\n' for i in range(60)))
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)
  out = run(
    'preview',
    f'--gin_file={tmp_path}/tiny.gin',
    f'--gin.MIXTURE_OR_TASK_NAME=jsonl:{tmp_path}/a.jsonl',
    '--gin.DATA_MODULE=t5x_gpu.data.seqio_batches',
    '--split=validation',
    '--rows=60',
  )
  texts = re.findall(r'^  \[\d+\] (text \d+)', out, re.MULTILINE)
  assert 1 < len(texts) == len(set(texts)) < 10 and ' 0 examples' not in out


def test_preview_spells_out_what_a_terminal_would_obey(tmp_path):
  lines = [json.dumps({'text': f'{i}\x1b[2Jafter\x07'}) + '\n' for i in range(40)]
  (tmp_path / 'a.jsonl').write_text(''.join(lines))
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)
  out = run(
    'preview',
    f'--gin_file={tmp_path}/tiny.gin',
    f'--gin.MIXTURE_OR_TASK_NAME=jsonl:{tmp_path}/a.jsonl',
    '--gin.DATA_MODULE=t5x_gpu.data.seqio_batches',
    '--rows=1',
  )
  assert r'\x1b[2Jafter\x07' in out and '\x1b[2J' not in out


def test_stats_of_prepared_rows_are_those_of_all(mixed_rows, tmp_path):
  picture = tmp_path / 'lengths.html'
  out = run('stats', mixed_rows, f'--picture={picture}')
  index = read_index(mixed_rows, split='train')
  assert f'{index.rows:,} rows in prepared:{mixed_rows}' in out
  shares = re.findall(r'^ +([\d.]+)% +([\d.]+)% +([\d.]+)% +(\d+)  (mixed_.)$', out, re.MULTILINE)
  assert [(s[0], int(s[3]), s[4]) for s in shares] == [
    (rate, index.members[name].rows, name)
    for rate, name in (('60.0', 'mixed_a'), ('30.0', 'mixed_b'), ('10.0', 'mixed_c'))
  ]
  drawn = Page(picture.read_text())
  drawn.check()
  assert sum(a.get('class', '').startswith('line') for _, a in drawn.tags) == 3


def test_words_of_the_training_data_become_a_tokenizer_that_later_data_do_not_change(tmp_path):
  rows = ['x\t1\t\tThe dog barks.', "x\t0\t\tBarks the dog, isn't it?", 'x\t1\t\tThe dog runs.']
  (tmp_path / 'train.tsv').write_text('\n'.join(rows))
  (tmp_path / 'dev.tsv').write_text('x\t1\t\tA cat sleeps.')
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)
  folder = tmp_path / 'words'
  flags = (
    f'--gin_file={tmp_path}/tiny.gin',
    '--gin.DATA_MODULE=t5x_gpu.data.seqio_batches',
    f'--gin.MIXTURE_OR_TASK_NAME=cola_tsv:{tmp_path}/*.tsv',
    f"--gin.VOCABULARY='huggingface:{folder}'",
  )
  assert '13 words' in run('words', *flags)
  vocabulary = named_vocabulary(f'huggingface:{folder}')
  assert vocabulary.encode('dog . The dog') == [3, 4, 5, 3]  # by frequency, then by name
  assert vocabulary.encode('The cat') == [5, vocabulary.unk_id]  # a word of dev.tsv
  assert vocabulary.eos_id == 1 and not vocabulary.zero_is_a_word
  before = (folder / 'tokenizer.json').read_text()
  run('words', *flags)
  (tmp_path / 'train.tsv').write_text('\n'.join(rows[:2]))
  with raises(DataError):
    command.main(['words', *flags])
  assert (folder / 'tokenizer.json').read_text() == before
  few = tmp_path / 'few'
  assert '2 words' in run('words', *flags, '--max_words=2', f'--output={few}')
  assert named_vocabulary(f'huggingface:{few}').vocab_size == 5


def test_words_need_data_and_a_folder(tmp_path):
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)
  with raises(ConfigError):
    command.main(['words', f'--gin_file={tmp_path}/tiny.gin'])


def test_a_picture_must_be_a_page():
  with raises(ConfigError):
    command.main(['stats', 'prepared:x', '--picture=lengths.png'])


@pytest.mark.slow
def test_stats_and_bench_of_text_and_what_the_model_takes(tmp_path):
  (tmp_path / 'tiny.gin').write_text(TINY_GIN)
  (tmp_path / 'model').mkdir()
  (tmp_path / 'model' / 'metrics.jsonl').write_text(
    ''.join(json.dumps({'step': i, 'train/tokens_per_second': float(i)}) + '\n' for i in (1, 2, 30))
  )
  (tmp_path / 'a.txt').write_text(''.join(f'line {i}\n' for i in range(500)))
  flags = (
    f'--gin_file={tmp_path}/tiny.gin',
    f'--gin.MODEL_DIR={tmp_path}/model',
    '--gin.DATA_MODULE=t5x_gpu.data.seqio_batches',
    f'--gin.MIXTURE_OR_TASK_NAME=text_lines:{tmp_path}/a.txt',
  )
  assert re.search(
    r'^20 rows of text_lines:.*split train: \d+ tokens, padding [\d.]+%$',
    run('stats', *flags, '--rows=20'),
    re.MULTILINE,
  )
  out = run(
    'stats',
    *flags,
    '--rows=200',
    '--gin.MIXTURE_OR_TASK_NAME=mixed_one_split',
    '--gin.MIXTURE_OR_TASK_MODULE=tests.mixed_tasks',
  )
  assert out.startswith('200 rows of mixed_one_split')  # the small task has 40 short examples
  shares = re.findall(r'^ +([\d.]+)% +([\d.]+)% +([\d.]+)  (mixed_.)$', out, re.MULTILINE)
  assert [(rate, name) for rate, _, _, name in shares] == [('50.0', 'mixed_a'), ('50.0', 'mixed_t')]
  parts = [float(rate) * float(length) for rate, _, length, _ in shares]
  assert [float(share) for _, share, _, _ in shares] == pytest.approx(
    [100 * part / sum(parts) for part in parts], abs=0.3
  )
  out = run('bench', *flags, '--seconds=0.1')
  assert re.search(r'batch 8: [\d,]+ tokens/s, [\d,]+ per core', out)
  assert f'The model takes 2 tokens/s ({tmp_path}/model/metrics.jsonl)' in out and 'enough' in out
  assert 'too slow' in run('bench', *flags, '--seconds=0.1', '--eats=1e15')


def test_check_reads_every_byte(mixed_rows, tmp_path):
  assert 'every byte unchanged' in run('check', f'prepared:{mixed_rows}')
  copied = shutil.copytree(mixed_rows, tmp_path / 'copied')
  shard = copied / 'train' / 'mixed_b' / '00001-of-00002.arrayrecord'
  content = bytearray(shard.read_bytes())
  content[len(content) // 3] ^= 1
  shard.write_bytes(content)
  with raises(DataError):
    command.main(['check', f'prepared:{copied}'])


@pytest.mark.parametrize(
  'argv', [['stats'], ['preview', 'a', '--gin_file=b.gin'], ['preview', 'a', '--rows=0']]
)
def test_command_lines_that_cannot_be_are_refused(argv):
  with raises(ConfigError):
    command.main(argv)
