"""python -m t5x_gpu.infer: prompts in, JSON lines out, also after interruptions."""

import contextlib
import errno
import gzip
import io
import json
import os
import signal
import sys
import types

import flax.traverse_util
import jax
import numpy as np
import pyarrow as pa
import pytest
from jax.experimental.compilation_cache import compilation_cache
from pyarrow import parquet

from t5x_gpu import convert, infer
from t5x_gpu.checkpoint.params_files import ParamsWriter, read_params
from t5x_gpu.config import gin_loader
from t5x_gpu.data.data_module import Prompt
from t5x_gpu.data.prompts import read_prompts
from t5x_gpu.data.streaming.task_prompts import TaskText
from t5x_gpu.errors import DataError
from t5x_gpu.evaluation.generated_text import InferJob
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.inference.generation import Generator
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import discover
from t5x_gpu.terminal.printable import printable
from tests.conversion.hf_files import CONFIGS, write_model
from tests.helpers_chat import CHATML, write_tokenizer
from tests.helpers_disk import refused_to_python
from tests.helpers_train import TINY_GIN, compiled_kept_in, devices, run_here
from tests.messages import raises, record_stderr

PROMPTS = ['def f(', 'import os', 'x', 'class Ä:', 'for i in', 'while True']
DECODE = ['--gin.DecodingConfig.max_decode_length=6', '--gin.DecodingConfig.batch_size=2']


def write_params(folder, shapes):
  rng = np.random.default_rng(0)
  flat = {
    name: rng.normal(0, 0.5, a.shape).astype(np.float32)
    for name, a in flax.traverse_util.flatten_dict(shapes, sep='/').items()
  }
  shapes = {name: value.shape for name, value in flat.items()}
  with ParamsWriter(
    folder, step=3, shapes=shapes, chunks=shapes, about={}, compress=False
  ) as writer:
    for name, value in flat.items():
      writer.write(name, (), value)


def write_run(folder, gin):
  """Makes `folder` as a run leaves it: a checkpoint of random parameters, and config.gin."""
  folder.mkdir()
  (folder / 'my.gin').write_text(
    gin.replace("'t5x_gpu.data.synthetic'", "'t5x_gpu.data.seqio_batches'").replace(
      "MODEL_DIR = 'model'", f'MODEL_DIR = {str(folder)!r}'
    )
  )
  loaded = gin_loader.load([folder / 'my.gin'])
  (folder / 'config.gin').write_text(loaded.provenance.config)
  model = loaded.arguments()['model']
  shapes = split_names(jax.eval_shape(lambda: model.init(jax.random.key(0), None)))[0]
  write_params(folder, shapes)
  return model, shapes


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('infer') / 'run'
  write_run(folder, TINY_GIN)
  with compiled_kept_in(folder / 'compiled'):
    yield folder


@pytest.fixture
def prompts(tmp_path):
  path = tmp_path / 'prompts.txt'
  path.write_text('\n'.join(PROMPTS) + '\n', 'utf-8')
  return path


def call(model_dir, *flags, num_devices=1):
  argv = [
    f'--checkpoint={model_dir}',
    *map(str, flags),
    *([] if any('DecodingConfig' in str(f) for f in flags) else DECODE),
  ]
  return run_here(lambda: infer.main(argv), num_devices=num_devices)


def answers(model_dir, *flags, **options):
  """Returns the records that a call writes to standard output."""
  result = call(model_dir, *flags, **options)
  assert result.code == 0, result.err
  return [json.loads(line) for line in result.out.splitlines()]


@pytest.fixture(scope='module')
def expected(model_dir, tmp_path_factory):
  path = tmp_path_factory.mktemp('expected') / 'p.txt'
  path.write_text('\n'.join(PROMPTS), 'utf-8')
  return answers(model_dir, f'--prompts={path}')


def test_every_prompt_has_its_answer_in_order(expected):
  assert [record['number'] for record in expected] == list(range(6))
  assert [record['inputs'] for record in expected] == PROMPTS
  assert all(record['num_tokens'] == 6 and record['score'] < 0 for record in expected)
  assert len({record['score'] for record in expected}) == 6


@contextlib.contextmanager
def nothing_kept():
  """Within, jax compiles everything again."""
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', True)
    compilation_cache.reset_cache()


@pytest.mark.slow
def test_answers_on_eight_devices_are_those_of_one(model_dir, prompts, expected):
  # jax 0.10 on CPU may hang when it reads a program of several axes from its cache.
  with nothing_kept():
    on_eight = answers(
      model_dir,
      f'--prompts={prompts}',
      *DECODE,
      '--gin.Partitioner.num_partitions=2',
      '--gin.Partitioner.fsdp=2',
      num_devices=8,
    )
  for got, want in zip(on_eight, expected, strict=True):
    assert got.pop('score') == pytest.approx(want['score'], rel=1e-4)
    assert got == {key: value for key, value in want.items() if key != 'score'}


def test_json_lines_keep_their_fields_and_standard_input_is_read(model_dir, expected, monkeypatch):
  lines = [{'inputs': text, 'id': f'q{i}', 'targets': 'ab'} for i, text in enumerate(PROMPTS[:2])]
  data = '\n'.join(map(json.dumps, lines)).encode()
  monkeypatch.setattr(sys, 'stdin', types.SimpleNamespace(buffer=io.BytesIO(data)))
  got = answers(model_dir, '--prompts=-')
  assert [record.pop('id') for record in got] == ['q0', 'q1']
  assert [record.pop('targets') for record in got] == ['ab', 'ab']
  assert got == expected[:2]


@pytest.mark.tf
def test_prompts_are_read_from_tf_examples(model_dir, expected, tmp_path):
  import tensorflow as tf

  for name, texts in (('a', PROMPTS[:1]), ('b', PROMPTS[1:3])):
    with tf.io.TFRecordWriter(str(tmp_path / f'{name}.tfrecord')) as writer:
      for text in texts:
        value = tf.train.Feature(bytes_list=tf.train.BytesList(value=[text.encode()]))
        features = tf.train.Features(feature={'question': value})
        writer.write(tf.train.Example(features=features).SerializeToString())
  pattern = f'tfrecord:{tmp_path}/*.tfrecord'
  assert answers(model_dir, f'--prompts={pattern}#inputs=question') == expected[:3]
  result = call(model_dir, f'--prompts={pattern}#text=question')
  record_stderr(result.err)
  assert result.code == 1


def test_blank_lines_are_skipped_and_count_in_the_numbers(model_dir, expected, tmp_path):
  path, output = tmp_path / 'p.txt', tmp_path / 'answers.jsonl'
  path.write_text(f'{PROMPTS[0]}\n\n{PROMPTS[1]}\n \n\n{PROMPTS[2]}\n', 'utf-8')
  command = (model_dir, f'--prompts={path}', f'--output={output}')
  assert call(*command).code == 0
  got = [json.loads(line) for line in output.read_text('utf-8').splitlines()]
  assert got == [{**want, 'number': n} for want, n in zip(expected, (0, 2, 5))]
  whole = output.read_bytes()
  os.truncate(output, len(whole) - 3)  # as a kill leaves it
  assert call(*command).code == 0
  assert output.read_bytes() == whole


@pytest.mark.parametrize(
  'form, columns', [('csv', ''), ('csv', '#text=text'), ('tsv.gz', '#inputs=text'), ('parquet', '')]
)
def test_the_rows_of_a_table_are_prompts(model_dir, expected, tmp_path, form, columns):
  rows = [*PROMPTS, '', 'two\nlines']  # the blank one counts in the numbers
  path = tmp_path / f'new.{form}'
  if form == 'parquet':
    parquet.write_table(pa.table({'text': rows, 'label': range(8)}), path)
  elif form == 'csv':
    content = ''.join(f'"{text}",{i}\r\n' for i, text in enumerate(rows))
    path.write_text(f'\ufefftext,label\r\n{content}', 'utf-8')
  else:
    content = ''.join(f'{text}\t{i}\n' for i, text in enumerate(rows[:-1]))
    path.write_bytes(gzip.compress(f'text\tlabel\n{content}'.encode()))
  found = answers(model_dir, f'--prompts={path}{columns}')
  assert [record['inputs'] for record in found[:6]] == PROMPTS
  assert [record['score'] for record in found[:6]] == pytest.approx(
    [record['score'] for record in expected], rel=1e-5
  )
  if form != 'tsv.gz':
    assert (found[6]['inputs'], found[6]['number']) == ('two\nlines', 7)


def test_keys_of_json_lines_can_be_chosen_and_texts_may_be_compressed(tmp_path):
  (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(b'{"body": "a", "label": 1, "score": 2}\n'))
  [prompt] = read_prompts(f'{tmp_path}/a.jsonl.gz#text=body')
  assert (prompt.inputs, dict(prompt.extra), prompt.number) == ('a', {}, 0)
  (tmp_path / 'b.jsonl').write_text('{"text": "a", "id": 1}\n{"text": "b", "inputs": "c"}\n')
  first, second = read_prompts(f'{tmp_path}/b.jsonl')
  assert (first.inputs, dict(first.extra)) == ('a', {'id': 1})
  assert (second.inputs, dict(second.extra)) == ('c', {'text': 'b'})
  (tmp_path / 'a.txt').write_bytes(b'\xef\xbb\xbffirst\r\nsecond')
  assert [p.inputs for p in read_prompts(f'{tmp_path}/a.txt')] == ['first', 'second']
  pairs = pa.table({'text': ['a'], 'text2': ['b'], 'targets': ['c']})
  parquet.write_table(pairs, tmp_path / 'a.parquet')
  with refused_to_python('a.txt', errno.EMFILE), raises(DataError):
    read_prompts(f'{tmp_path}/a.txt')
  [prompt] = read_prompts(f'{tmp_path}/a.parquet')
  assert (prompt.inputs, prompt.targets, dict(prompt.extra)) == ('a', 'c', {'text2': 'b'})
  messages = [[{'role': 'user', 'content': 'Hi', 'name': None}], None]
  parquet.write_table(pa.table({'messages': messages}), tmp_path / 'chat.parquet')
  [prompt] = read_prompts(f'{tmp_path}/chat.parquet', chat=True)
  assert prompt.messages == [{'role': 'user', 'content': 'Hi'}] and prompt.inputs == 'Hi'


def test_likelier_targets_have_higher_scores_and_their_end_counts(model_dir, expected, tmp_path):
  path = tmp_path / 'pairs.jsonl'
  path.write_text(
    '\n'.join(json.dumps({'inputs': 'x', 'targets': text}) for text in ('abc', 'abcd', 'Ä'))
  )
  got = answers(model_dir, f'--prompts={path}', '--score')
  assert [r['num_tokens'] for r in got] == [4, 5, 3]
  assert [r['targets'] for r in got] == ['abc', 'abcd', 'Ä']
  assert all(r['score'] < expected[2]['score'] / 6 * r['num_tokens'] for r in got)


def test_texts_of_a_task_are_scored(model_dir):
  got = answers(model_dir, '--score', '--examples=3', '--split=validation')
  assert len(got) == 3 and all(r['num_tokens'] == 32 and r['score'] < -32 for r in got)


@pytest.mark.slow
def test_inputs_of_a_task_are_continued_by_an_encoder_decoder(tmp_path):
  gin = (
    TINY_GIN.replace('models/decoder_demo.gin', 'models/encoder_decoder_demo.gin')
    .replace("'python_source'", "'turned'")
    .replace("{'targets': 32}", "{'inputs': 8, 'targets': 8}")
  )
  write_run(tmp_path / 'run', gin + "MIXTURE_OR_TASK_MODULE = 'tests.eval_tasks'\nPACK = False\n")
  got = answers(tmp_path / 'run', '--trust_gin')
  assert [r['inputs'] for r in got] == ['abc', 'def', 'ghi', 'jkl', 'mno']
  assert [r['targets'] for r in got] == ['cba', 'fed', 'ihg', 'lkj', 'onm']
  scored = answers(tmp_path / 'run', '--score', '--examples=2', '--trust_gin')
  assert [r['num_tokens'] for r in scored] == [4, 4]  # and the end
  (tmp_path / 'p.jsonl').write_text('{"inputs": "abc", "targets": "cba"}\n')
  [same] = answers(
    tmp_path / 'run', '--score', f'--prompts={tmp_path / "p.jsonl"}', '--vocabulary=byte'
  )
  assert same['score'] == pytest.approx(scored[0]['score'], rel=1e-5)


def test_several_decodes_are_all_written(model_dir, prompts):
  got = answers(
    model_dir,
    f'--prompts={prompts}',
    '--examples=2',
    '--gin.DecodingConfig.num_beams=3',
    '--gin.DecodingConfig.num_decodes=3',
    '--gin.DecodingConfig.max_decode_length=4',
    '--gin.DecodingConfig.batch_size=2',
  )
  for record in got:
    assert len(record['predictions']) == 3 and record['predictions'][0] == record['prediction']
    assert record['scores'] == sorted(record['scores'], reverse=True)


@pytest.mark.quick_cases('mid_line')
@pytest.mark.parametrize('cut', ['mid_line', 'after_line', 'no_newline'])
def test_a_killed_run_continues_where_it_stopped(
  model_dir, prompts, expected, tmp_path, cut, monkeypatch
):
  output = tmp_path / 'answers.jsonl'
  assert call(model_dir, f'--prompts={prompts}', f'--output={output}').code == 0
  whole = output.read_bytes()
  assert [json.loads(line) for line in whole.splitlines()] == expected
  lines = whole.splitlines(keepends=True)
  output.write_bytes(
    b''.join(lines[:3])
    + {'mid_line': lines[3][:20], 'after_line': b'', 'no_newline': lines[3][:-1]}[cut]
  )
  asked = []
  generate = Generator.generate
  monkeypatch.setattr(
    Generator,
    'generate',
    lambda self, prompts, **options: (
      asked.extend(options['numbers']),
      generate(self, prompts, **options),
    )[1],
  )
  again = call(model_dir, f'--prompts={prompts}', f'--output={output}')
  assert again.code == 0 and '6 results' in again.err and '3 of them new' in again.err
  assert output.read_bytes() == whole
  assert asked == [3, 4, 5]


def test_ctrl_c_keeps_what_is_written(model_dir, prompts, tmp_path, monkeypatch):
  output = tmp_path / 'answers.jsonl'
  generate = Generator.generate

  def interrupted(self, prompts, **options):
    if 4 in options['numbers']:
      raise KeyboardInterrupt
    return generate(self, prompts, **options)

  monkeypatch.setattr(Generator, 'generate', interrupted)
  result = call(model_dir, f'--prompts={prompts}', f'--output={output}')
  assert result.code == 130 and 'the same command continues' in result.err
  assert len(output.read_text().splitlines()) == 4
  monkeypatch.setattr(Generator, 'generate', generate)
  assert '2 of them new' in call(model_dir, f'--prompts={prompts}', f'--output={output}').err


@pytest.mark.slow
def test_results_of_something_else_are_not_continued(model_dir, prompts, tmp_path):
  output = tmp_path / 'answers.jsonl'
  assert call(model_dir, f'--prompts={prompts}', f'--output={output}').code == 0
  other = call(
    model_dir,
    f'--prompts={prompts}',
    f'--output={output}',
    *DECODE,
    '--gin.DecodingConfig.length_penalty=0.1',
    '--examples=2',
  )
  assert other.code == 1
  for part in ('length_penalty: then 0.6, now 0.1', 'prompts: then', '--overwrite'):
    assert part in other.err
  assert len(output.read_text().splitlines()) == 6
  changed = call(
    model_dir, f'--prompts={prompts}', f'--output={output}', '--examples=2', '--overwrite'
  )
  assert changed.code == 0 and len(output.read_text().splitlines()) == 2
  output.write_text('{"number": 5}\n')
  assert (
    'answers.jsonl:1 is not the result of prompt 0'
    in call(model_dir, f'--prompts={prompts}', f'--output={output}', '--examples=2').err
  )
  output.with_name('answers.jsonl.facts.json').unlink()
  assert (
    'exists without answers.jsonl.facts.json'
    in call(model_dir, f'--prompts={prompts}', f'--output={output}').err
  )


@pytest.mark.parametrize(
  'text, name',
  [
    ('', 'p.txt'),
    ('\n\n', 'p.jsonl'),
    ('{"inputs": "a"}\n{"inputs": a}', 'p.jsonl'),
    ('{"inputs": a}', 'p.jsonl'),
    ('{"body": "a"}', 'p.jsonl'),
    ('{"inputs": "a", "targets": 3}', 'p.jsonl'),
    ('{"inputs": "a"}\n{"inputs": "a", "number": 7, "scores": 1, "id": 2}', 'p.jsonl'),
    (None, 'none.txt'),
    (None, 'none.csv'),
    ('body,n\na,1\n', 'p.csv'),
    ('body,n\na,1\n', 'p.csv#text=bodi'),
    ('text,text\na,b\n', 'p.csv'),
    ('text,n\na\n', 'p.csv'),
    ('text,targets\n,b\n', 'p.csv'),
    ('text\n\n', 'p.csv'),
    ('', 'p.tsv'),
    ('a', 'p.csv#txt=a'),
    ('a', 'p.csv#targets=a'),
    ('a', 'p.txt#text=a'),
    ('a', 'p.parquet'),
    ('a', 'p.jsonl.gz'),
    ('{"b": "\\ud800"}', 'p.jsonl#text=b'),
    ('{"b": 3}', 'p.jsonl#text=b'),
    ('a', 'p.tfrecord'),
    ('{"a": ' + '[' * 150 + ']' * 150 + '}', 'p.jsonl'),
  ],
)
def test_bad_prompts_are_refused_by_file_and_line(model_dir, tmp_path, text, name):
  if text is not None:
    (tmp_path / name.partition('#')[0]).write_text(text)
  result = call(model_dir, f'--prompts={tmp_path / name}', '--dry_run')
  assert result.code == 1
  record_stderr(result.err)


@pytest.mark.parametrize(
  'flags',
  [
    ['--prompts={p}', '--gin.config.TransformerConfig.num_positions=8'],
    ['--prompts={p}', '--vocabulary=sentencepiece:none.model'],
    ['--prompts={p}', '--vocabulary=words:8192'],
    ['--prompts={p}', '--step=7'],
    ['--prompts={p}', '--score'],
    ['--dry_run'],
    ['--prompts={p}', '--interactive'],
    ['--prompts={p}', '--gin.DecodingConfig.beams=2'],
  ],
)
def test_what_cannot_work_is_refused(model_dir, prompts, flags):
  flags = [flag.format(p=prompts) for flag in flags]
  result = call(model_dir, *flags, '--dry_run')
  assert result.code == 1
  record_stderr(result.err)


def test_a_folder_without_a_gin_file_is_refused(tmp_path):
  result = run_here(lambda: infer.main([f'--checkpoint={tmp_path}']))
  assert result.code == 1 and 'neither config.gin nor model.gin' in result.err
  assert 'Neither --checkpoint nor --gin_file' in run_here(lambda: infer.main([])).err
  result = call(tmp_path / 'nowhere')
  assert result.code == 1 and f'--checkpoint={tmp_path}/nowhere does not exist' in result.err


def test_merged_adapters_write_what_they_write_unmerged(model_dir, prompts, tmp_path):
  lora = (model_dir / 'my.gin').read_text() + (
    'from t5x_gpu.models import lora\n'
    'train_script.train.model = @lora.LoraModel()\n'
    'lora.LoraModel.model = %MODEL\n'
  )
  folder = tmp_path / 'lora'
  model, shapes = write_run(folder, lora)
  got = answers(folder, f'--prompts={prompts}', '--examples=2')
  params = read_params(folder, shapes)
  with devices(1):
    layout = Partitioner().lay_out(*discover(), logical_sizes={**model.logical_sizes(), 'batch': 2})
    generator = Generator(model, params, layout=layout, config=DecodingConfig(max_decode_length=6))
    wanted = generator.generate([[3 + b for b in text.encode()] for text in PROMPTS[:2]])
  assert [record['score'] for record in got] == pytest.approx([w.score for [w] in wanted], rel=1e-4)


def type_lines(monkeypatch, *lines):
  """Types lines, then Ctrl-D."""
  left = iter(lines)

  def typed(_):
    try:
      return next(left)
    except StopIteration:
      raise EOFError from None

  monkeypatch.setattr('builtins.input', typed)


def test_what_is_typed_is_continued(model_dir, expected, monkeypatch):
  type_lines(monkeypatch, 'import os', '', 'x')
  result = call(model_dir, '--interactive')
  assert result.code == 0, result.err
  by_input = {r['inputs']: printable(r['prediction']) for r in expected}
  assert result.out == by_input['import os'] + '\n' + by_input['x'] + '\n'


def test_a_converted_model_whose_tokenizer_adds_nothing_starts_with_the_prompt(tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  files = pytest.importorskip('tests.conversion.hf_files')
  words = {'<eos>': 0, **{f'w{i}': i for i in range(1, files.VOCAB)}}
  files.write_model(tmp_path / 'theirs', files.CONFIGS['llama'])
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='w1'))
  tokenizer.save(str(tmp_path / 'theirs/tokenizer.json'))
  (tmp_path / 'theirs/tokenizer_config.json').write_text('{"eos_token": "<eos>"}')
  convert.main([f'--from={tmp_path / "theirs"}', f'--to={tmp_path / "ours"}', '--check=tensors'])
  (tmp_path / 'p.txt').write_text('w5\n')
  result = call(tmp_path / 'ours', f'--prompts={tmp_path / "p.txt"}', f'--output={tmp_path / "o"}')
  assert result.code == 0, result.err
  assert (
    'DecodingConfig.start_token = None: the model is converted from Hugging Face; its tokenizer '
    'puts no token in front of a text' in result.err
  )


def test_a_converted_model_needs_nothing_but_its_folder(tmp_path):
  tokenizers = pytest.importorskip('tokenizers')
  files = pytest.importorskip('tests.conversion.hf_files')
  # As Llama 3 has it: '!' is 0, there is no padding, and a template puts <bos> first; as Qwen 3 has
  # it, the model knows more ids than the tokenizer.
  tokenizer = tokenizers.Tokenizer(
    tokenizers.models.WordLevel(
      {'!': 0, '<bos>': 1, '<eos>': 2, **{f'w{i}': i for i in range(3, files.VOCAB - 4)}},
      unk_token='!',
    )
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single='<bos> $A', special_tokens=[('<bos>', 1)]
  )
  theirs = tmp_path / 'theirs'
  files.write_model(theirs, files.CONFIGS['llama'])
  tokenizer.save(str(theirs / 'tokenizer.json'))
  (theirs / 'tokenizer_config.json').write_text(
    json.dumps({'bos_token': '<bos>', 'eos_token': '<eos>'})
  )
  (theirs / 'generation_config.json').write_text('{"eos_token_id": [2, 7]}')
  convert.main([f'--from={theirs}', f'--to={tmp_path / "ours"}', '--check=tensors'])
  (tmp_path / 'p.txt').write_text('w5 w9 !\n')
  result = call(tmp_path / 'ours', f'--prompts={tmp_path / "p.txt"}', f'--output={tmp_path / "o"}')
  assert result.code == 0, result.err
  assert 'its tokenizer puts token 1 in front of a text' in result.err
  assert '92 ids; ids that end a text: 2, 7' in result.err
  facts = json.loads((tmp_path / 'o.facts.json').read_text())
  assert facts['DecodingConfig.start_token'] == 1
  assert facts['DecodingConfig.zero_is_padding'] is False
  assert facts['DecodingConfig.stop_tokens'] == [2, 7]


@pytest.mark.parametrize(
  'name, field', [('bert_classification', 'label'), ('bert_embedding', 'vector')]
)
def test_a_converted_encoder_takes_texts_as_long_as_its_table_of_positions(tmp_path, name, field):
  tokenizers = pytest.importorskip('tokenizers')
  files = pytest.importorskip('tests.conversion.hf_files')
  config = files.VARIANTS[name]
  files.write_model(tmp_path / 'theirs', config)
  words = {'[PAD]': 0, '[UNK]': 1, '[CLS]': 2, '[SEP]': 3, 'good': 4, 'bad': 5}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token='[UNK]'))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.save(str(tmp_path / 'theirs' / 'tokenizer.json'))
  (tmp_path / 'theirs' / 'tokenizer_config.json').write_text(
    json.dumps({'cls_token': '[CLS]', 'sep_token': '[SEP]', 'pad_token': '[PAD]'})
  )
  convert.main([f'--from={tmp_path}/theirs', f'--to={tmp_path}/ours', '--check=tensors'])
  long = 'good ' * (config['max_position_embeddings'] + 9)
  (tmp_path / 'p.txt').write_text(f'good bad\n{long}\n')
  found = answers(tmp_path / 'ours', f'--prompts={tmp_path / "p.txt"}')
  assert len(found) == 2 and all(field in record for record in found)


def test_a_converted_model_with_a_sentencepiece_file_alone_is_read_with_it(tmp_path):
  files = pytest.importorskip('tests.conversion.hf_files')
  import sentencepiece

  files.write_model(tmp_path / 'theirs', {**files.CONFIGS['llama'], 'eos_token_id': 2})
  (tmp_path / 'text').write_text('one two three four\n' * 9)
  sentencepiece.SentencePieceTrainer.train(
    input=str(tmp_path / 'text'),
    model_prefix=str(tmp_path / 'theirs' / 'tokenizer'),
    vocab_size=30,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  convert.main([f'--from={tmp_path}/theirs', f'--to={tmp_path}/ours', '--check=tensors'])
  (tmp_path / 'p.txt').write_text('one two\n')
  result = call(tmp_path / 'ours', f'--prompts={tmp_path / "p.txt"}', '--dry_run')
  assert result.code == 0, result.err
  assert f'vocabulary: sentencepiece:{tmp_path}/ours/hf/tokenizer.model' in result.err
  assert 'end a text: 2\n' in result.err and 'its tokenizer puts token 1 in front' in result.err


@pytest.mark.parametrize(
  'setting, what',
  [
    ('TransformerConfig.mlp_dim', 'The parameters take '),
    ('DecodingConfig.batch_size', 'keys and values of '),
  ],
)
def test_what_is_larger_than_the_memory_is_refused_before_it_is_read(
  model_dir, prompts, setting, what
):
  for flags in ((), ('--dry_run',)):
    result = call(model_dir, f'--prompts={prompts}', f'--gin.{setting}={2**36}', *flags)
    assert result.code == 1 and 'Traceback' not in result.err
    assert 'OutOfMemoryError: The parameters take ' in result.err and what in result.err


@pytest.mark.parametrize('temperature', [0.0, 0.7])
def test_a_stream_gives_the_texts_of_generate_token_by_token(model_dir, temperature, monkeypatch):
  jobs = []
  monkeypatch.setattr(infer, 'talk', lambda job, *, chat: jobs.append(job))
  assert call(model_dir, '--interactive', f'--temperature={temperature}').code == 0
  [job] = jobs
  prompt = job.tokens(Prompt('here', 'import os'))
  [[whole]] = job.generator.generate([prompt], numbers=[3])
  parts = list(job.generator.stream(prompt, number=3))
  assert [len(part.tokens) for part in parts] == list(range(1, len(whole.tokens) + 1))
  assert parts[-1].tokens == whole.tokens and parts[-1].is_complete == whole.is_complete
  assert all(part.tokens == whole.tokens[: len(part.tokens)] for part in parts)
  assert parts[-1].score == pytest.approx(whole.score, abs=1e-4)


@pytest.fixture(name='chat_model', scope='module')
def _chat_model(tmp_path_factory):
  """A converted chat model of random weights."""
  pytest.importorskip('tokenizers')
  folder = tmp_path_factory.mktemp('chat')
  write_model(folder / 'theirs', {**CONFIGS['llama'], 'vocab_size': 300})
  write_tokenizer(folder / 'theirs', CHATML)
  convert.main([f'--from={folder / "theirs"}', f'--to={folder / "ours"}', '--check=tensors'])
  return folder / 'ours'


def test_a_talk_keeps_its_messages_until_reset_and_ends_with_quit(chat_model, monkeypatch):
  asked = []
  encode = TaskText.encode_chat

  def encode_chat(self, messages, **options):
    asked.append([message['content'] for message in messages])
    return encode(self, messages, **options)

  monkeypatch.setattr(TaskText, 'encode_chat', encode_chat)
  type_lines(monkeypatch, 'Hi', 'And?', '/reset', 'Hi', '/quit', 'never read')
  result = call(chat_model, '--chat', '--interactive', '--max_tokens=4')
  assert result.code == 0, result.err
  first, second, third = result.out.removesuffix('\n').split('\n')
  assert first == third and [len(messages) for messages in asked] == [1, 3, 1]
  assert asked[1][0] == 'Hi' and asked[1][2] == 'And?' and printable(asked[1][1]) == first
  assert 'The conversation starts over' in result.err


def test_an_interrupt_ends_the_answer_and_not_the_talk(chat_model, monkeypatch):
  before = signal.getsignal(signal.SIGINT)
  stream = Generator.stream

  def interrupted(self, prompt, **options):
    for i, found in enumerate(stream(self, prompt, **options)):
      if i == 2:
        signal.raise_signal(signal.SIGINT)
      yield found

  lengths = []
  monkeypatch.setattr(Generator, 'stream', interrupted)
  decoded = InferJob.decoded
  monkeypatch.setattr(
    InferJob, 'decoded', lambda self, one: lengths.append(len(one.tokens)) or decoded(self, one)
  )
  type_lines(monkeypatch, 'Hi', 'Hi again')
  result = call(chat_model, '--chat', '--interactive', '--max_tokens=30')
  assert result.code == 0, result.err
  assert lengths == [1, 2, 3, 1, 2, 3]
  assert signal.getsignal(signal.SIGINT) is before
