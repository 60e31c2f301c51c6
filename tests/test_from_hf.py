"""`config from_hf`: a Hugging Face folder becomes a run, and the run a folder for transformers."""

import json
import pathlib
import shlex

import pytest

from t5x_gpu import config_tools, convert, infer, train
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import open_survey
from t5x_gpu.errors import ConfigError
from tests.conversion.hf_files import CONFIGS, write_model
from tests.conversion.test_exported_text import PROMPTS, answers, generated, shown
from tests.helpers_chat import CHATML, talk, write_talks, write_tokenizer
from tests.helpers_train import compiled_kept_in, run_here
from tests.messages import raises

transformers = pytest.importorskip('transformers')
torch = pytest.importorskip('torch')
pytestmark = pytest.mark.tf

SIZES = {'vocab_size': 384, 'initializer_range': 0.2}
MODELS = {
  'llama': {**CONFIGS['llama'], **SIZES, 'max_position_embeddings': 512, 'num_hidden_layers': 1},
  'qwen2': {**CONFIGS['qwen2'], **SIZES, 'max_position_embeddings': 512},
  'gemma3': {**CONFIGS['gemma3_text'], **SIZES, 'max_position_embeddings': 512},
  't5': {**CONFIGS['t5'], 'vocab_size': 384, 'num_decoder_layers': 2},
  'bert': {**CONFIGS['bert_mlm'], **SIZES},
}
DATA = {
  'chats': [{'messages': talk(f'What is {i}?', f'It is {i}!')} for i in range(60)],
  'pairs': [{'inputs': f'say {i}', 'targets': str(i)} for i in range(60)],
  'preferences': [
    {'prompt': talk(f'say {i}')[:1], 'chosen': talk('', str(i))[1:], 'rejected': talk('', 'no')[1:]}
    for i in range(60)
  ],
  'labels': [{'text': f'say {i}', 'label': ('even', 'odd')[i % 2]} for i in range(60)],
}


@pytest.fixture(name='folder')
def _folder(tmp_path, monkeypatch):
  """The current folder, with the data."""
  monkeypatch.chdir(tmp_path)
  for name, rows in DATA.items():
    (tmp_path / f'{name}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return tmp_path


def write_folder(path: pathlib.Path, name: str) -> None:
  """Writes a tiny random model as transformers does."""
  config = dict(MODELS[name])
  config = transformers.AutoConfig.for_model(config.pop('model_type'), **config)
  torch.manual_seed(0)
  model = getattr(transformers, config.architectures[0])(config)
  model.generation_config = None if name == 'bert' else transformers.GenerationConfig()
  model.save_pretrained(path)
  write_tokenizer(path, None if name in ('t5', 'bert') else CHATML)


def from_hf(*flags: str):
  return run_here(lambda: config_tools.main(['from_hf', *flags]))


def written(name: str) -> dict[str, str]:
  """Returns setting -> comment of each line of a gin file but the first comments."""
  lines = [line for line in pathlib.Path(name).read_text().splitlines() if line]
  return dict(line.split('  # ') for line in lines if not line.startswith('#'))


def trained_and_exported(tmp_path: pathlib.Path, *, num_devices: int = 1) -> pathlib.Path:
  """Trains my.gin as it is but for the precision; returns the exported folder.

  The run exports its model itself if my.gin says so; else the command does that the file names.
  """
  with compiled_kept_in(tmp_path / 'compiled'):
    flags = ['--gin_file=my.gin', '--gin.PRECISION=float32', "--gin.LOGGERS=('jsonl',)"]
    result = run_here(lambda: train.main(flags), num_devices=num_devices)
    assert result.code == 0, result.err
  lines = pathlib.Path('my.gin').read_text().splitlines()
  if any('ExportConfig' in line for line in lines):
    return pathlib.Path('runs/my_hf')
  [export] = [line for line in lines if line.startswith('# Export: ')]
  argv = shlex.split(export.removeprefix('# Export: '))[3:]
  result = run_here(lambda: convert.main([*argv, '--check=tensors']), num_devices=1)
  assert result.code == 0, result.err
  return pathlib.Path('runs/my_hf')


@pytest.fixture(name='llama')
def _llama(folder):
  write_model(folder / 'llama', MODELS['llama'])
  write_tokenizer(folder / 'llama', CHATML)


def test_a_dry_run_prints_the_file_and_writes_nothing(folder, llama):
  before = sorted(folder.rglob('*'))
  result = from_hf('llama', '--task=jsonl:chats.jsonl', '--lora', '--gpus=8', '--dry_run')
  assert result.code == 0, result.err
  assert sorted(folder.rglob('*')) == before
  file = folder / 'printed.gin'
  file.write_text(result.out[result.out.index('# Fine-tunes') :])
  lines = written('printed.gin')
  assert lines['LEARNING_RATE = 0.0002'].startswith('QLoRA')
  assert 'train_script.train.learning_rate = @schedules.constant()' in lines
  assert 'optimizers.AdamW.b2 = 0.999' in lines
  assert 'the longest' in lines["TASK_FEATURE_LENGTHS = {'targets': 64}"]
  assert "include 'runs/llama/model.gin'" in lines


def test_lengths_cover_99_percent_of_the_examples_and_at_most_the_models_positions(folder, llama):
  talks = [talk(f'{i:03}', 'b ' * (400 if i == 7 else 60)) for i in range(150)]
  write_talks(folder / 'long.jsonl', talks)
  survey = open_survey(
    DatasetConfig('jsonl:long.jsonl', None, 'train', 1, vocabulary='huggingface:llama'),
    num_measured=1000,
  )
  assert survey.num_examples == survey.num_measured < 150
  usual, *_, longest = sorted(set(survey.lengths['targets']))
  result = from_hf('llama', '--task=jsonl:long.jsonl', '--dry_run')
  length = -(-usual // 64) * 64
  assert f"TASK_FEATURE_LENGTHS = {{'targets': {length}}}" in result.out
  assert f'at most {usual} tokens, the longest {longest}' in result.out
  write_talks(folder / 'longer.jsonl', [talk(f'{i:03}', 'b ' * 400) for i in range(20)])
  result = from_hf('llama', '--task=jsonl:longer.jsonl', '--dry_run')
  assert "TASK_FEATURE_LENGTHS = {'targets': 512}" in result.out and '100.0% are cut' in result.out


@pytest.mark.parametrize(
  'objective, model',
  [('', 'llama'), pytest.param('span_corruption:', 't5', marks=pytest.mark.slow)],
)
def test_a_long_text_counts_as_all_its_rows(objective, model, folder):
  write_model(folder / 'base', {**MODELS[model], 'vocab_size': 512})  # with sentinels
  write_tokenizer(folder / 'base', None)
  (folder / 'texts.jsonl').write_text('{"text": "%s"}\n' % ('b' * 20_000) * 40)
  config = DatasetConfig(
    'jsonl:texts.jsonl', None, 'train', 1, pack=False, vocabulary='huggingface:base'
  )
  texts = open_survey(config, num_measured=1000)
  result = from_hf('base', f'--task={objective}jsonl:texts.jsonl', '--dry_run')
  assert result.code == 0, result.err
  epochs, in_a_row = (3, 512 / 0.9) if objective else (1, 512)
  rows = epochs * texts.lengths['targets'].sum() / in_a_row
  assert 'BATCH_SIZE = 128  # rows of a step, 128 pieces of texts' in result.out
  assert f'TRAIN_STEPS = {-(-rows // 128):.0f}  # {epochs} epoch' in result.out


def test_more_examples_than_are_measured_are_counted(folder):
  config = DatasetConfig('jsonl:pairs.jsonl', None, 'train', 1)
  whole, part = (open_survey(config, num_measured=number) for number in (100, 5))
  assert part.num_measured == 5 and part.num_examples == whole.num_examples == whole.num_measured


@pytest.mark.parametrize(
  'flags',
  [
    ['--task=classification:jsonl:labels.jsonl'],
    [],
    ['--task=jsonl:chats.jsonl', '--gpu=h200'],
    ['--task=jsonl:chats.jsonl', '--output=configs/my.gin'],
    ['--task=jsonl:chats.jsonl', '--converted=runs/a', '--model_dir=./runs/a/'],
    ['--task=jsonl:chats.jsonl', '--export=llama'],
  ],
  ids=['data', 'no-data', 'no-gpus', 'no-folder', 'one-folder', 'export'],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(flags, folder, llama):
  with raises(ConfigError):
    config_tools.main(['from_hf', 'llama', '--output=my.gin', *flags])
  assert not (folder / 'runs').exists()


@pytest.mark.slow
def test_a_folder_with_other_weights_is_not_taken_for_the_converted_model(folder, llama):
  flags = ['--task=jsonl:chats.jsonl', '--converted=here']
  assert from_hf('llama', *flags, '--output=one.gin').code == 0
  result = from_hf('llama', *flags, '--output=two.gin', '--lora')
  assert result.code == 0 and 'has the same weights, converted before' in result.out
  write_tokenizer(folder / 'llama', None)
  result = from_hf('llama', *flags, '--task=jsonl:pairs.jsonl', '--output=three.gin')
  assert result.code == 1 and 'tokenizer_config.json in' in result.err
  write_model(folder / 'other', MODELS['llama'], seed=5)
  write_tokenizer(folder / 'other', CHATML)
  result = from_hf('other', *flags, '--output=three.gin')
  assert result.code == 1 and 'is not other converted' in result.err
  assert not (folder / 'three.gin').exists()


EXPORT = '--export=runs/my_hf'


@pytest.mark.parametrize(
  'model, data, flags',
  [
    ('llama', 'chats', []),
    pytest.param(
      'qwen2', 'chats', ['--lora', '--gpus=1', '--export=runs/my_hf'], marks=pytest.mark.slow
    ),
    pytest.param('gemma3', 'preferences', ['--lora'], marks=pytest.mark.slow),
    pytest.param('llama', 'preferences', [], marks=pytest.mark.slow),
    pytest.param('llama', 'pairs', ['--gpus=8'], marks=pytest.mark.slow),
    pytest.param('t5', 'pairs', [], marks=pytest.mark.slow),
  ],
)
def test_a_folder_is_fine_tuned_and_generates_in_transformers_as_here(model, data, flags, folder):
  write_folder(folder / 'base', model)
  result = from_hf('base', f'--task=jsonl:{data}.jsonl', '--output=my.gin', *flags)
  assert result.code == 0, result.err
  assert all(written('my.gin').values())
  exported = trained_and_exported(folder, num_devices=8 if '--gpus=8' in flags else 1)
  chat = data != 'pairs'
  length = 16
  flags = [
    f'--gin.DecodingConfig.max_decode_length={length}',
    '--gin.Partitioner.num_partitions=1',
    *(['--chat'] if chat else []),
  ]
  ours = answers('runs/my', folder, *flags)
  tokenizer = 'PreTrainedTokenizerFast' if model == 'qwen2' else 'AutoTokenizer'
  theirs = generated(exported, chat=chat, tokenizer=tokenizer, max_new_tokens=length)
  assert [shown(r['prediction']) for r in ours] == [shown(text) for text, _ in theirs]
  assert [r['num_tokens'] for r in ours] == [number for _, number in theirs]


@pytest.mark.slow
def test_an_encoder_gets_a_head_for_the_labels_and_classifies_in_transformers_as_here(folder):
  write_folder(folder / 'base', 'bert')
  result = from_hf('base', '--task=classification:jsonl:labels.jsonl', '--output=my.gin')
  assert result.code == 0, result.err
  exported = trained_and_exported(folder)
  pathlib.Path('prompts.txt').write_text('\n'.join(PROMPTS[:3]))
  argv = ['--checkpoint=runs/my', '--prompts=prompts.txt']
  result = run_here(lambda: infer.main(argv), num_devices=1)
  assert result.code == 0, result.err
  ours = [json.loads(line)['probabilities'] for line in result.out.splitlines()]
  tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(exported)
  model = transformers.BertForSequenceClassification.from_pretrained(exported).eval()
  assert set(model.config.id2label.values()) == {'even', 'odd'}
  for prompt, found in zip(PROMPTS, ours):
    ids = [*tokenizer(prompt, add_special_tokens=False)['input_ids'], 2]
    with torch.no_grad():
      theirs = model(torch.tensor([ids])).logits.softmax(-1)[0].tolist()
    by_name = {model.config.id2label[i]: p for i, p in enumerate(theirs)}
    assert by_name == pytest.approx(found, abs=1e-4)
