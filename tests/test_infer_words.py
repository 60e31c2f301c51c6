"""Taggers and models of several labels: trained on own files, evaluated, and asked about texts."""

import json

import pytest

from t5x_gpu import eval, infer
from t5x_gpu.metrics.writers import read_json_lines
from tests.helpers_train import Project, run_here

pytestmark = pytest.mark.tf
GIN = """from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
from t5x_gpu.data import batches
from t5x_gpu.models import config
from t5x_gpu.models import encoder
include 'gin_configs/models/encoder_demo.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'
config.TransformerConfig:
  vocab_size = 66
  num_layers = 1
  embed_dim = 16
  num_heads = 2
  head_dim = 8
  mlp_dim = 32
  scan_unroll = 1
VOCABULARY = 'words:64'
MODEL_DIR = 'model'
TASK_FEATURE_LENGTHS = {'inputs': 8}
PACK = False
BATCH_SIZE = 8
EVAL_STEPS = 4
EVAL_PERIOD = 60
LEARNING_RATE = 3e-2
LOG_PERIOD = 20
SAVE_PERIOD = 60
TRAIN_STEPS = 60
WARMUP_STEPS = 5
"""
TAGS = """NUM_CLASSES = 3
encoder.EncoderModel.head_type = 'token_classification'
encoder.EncoderModel.class_names = ('O', 'B-NUM', 'I-NUM')
MIXTURE_OR_TASK_NAME = 'token_classification:jsonl:%s/*.jsonl'
"""
NUMBERS = """encoder.EncoderModel.head_type = 'regression'
MIXTURE_OR_TASK_NAME = 'regression:jsonl:%s/*.jsonl'
"""
SEVERAL = """NUM_CLASSES = 2
encoder.EncoderModel.problem_type = 'multi_label_classification'
MIXTURE_OR_TASK_NAME = 'multi_label:jsonl:%s/*.jsonl'
"""


def run_of(folder, gin, row_of):
  """Returns a run that was trained on 32 rows; row i encodes the number i."""
  data = folder / 'data'
  data.mkdir()
  for name in ('train', 'dev'):
    lines = [json.dumps(row_of(i)) + '\n' for i in range(32)]
    (data / f'{name}.jsonl').write_text(''.join(lines))
  project = Project(folder, gin=GIN + gin % data)
  result = project.run(num_devices=1)
  assert result.code == 0, result.err
  return project


def answers(project, tmp_path, *prompts):
  path, out = tmp_path / 'p.jsonl', tmp_path / 'out.jsonl'
  path.write_text(''.join(json.dumps({'inputs': text}) + '\n' for text in prompts))
  flags = [f'--checkpoint={project.model_dir}', f'--prompts={path}', f'--output={out}']
  result = run_here(lambda: infer.main(flags), num_devices=1)
  assert result.code == 0, result.err
  return [json.loads(line) for line in out.read_text().splitlines()]


@pytest.mark.slow
def test_a_tagger_finds_the_words_that_it_learned(tmp_path):
  def row_of(i):
    numbers = ['one', 'two', 'six'][: 1 + i % 3]
    tags = ['B-NUM', *['I-NUM'] * (len(numbers) - 1)]
    return {'tokens': ['we', 'saw', *numbers, 'cats'], 'tags': ['O', 'O', *tags, 'O']}

  project = run_of(tmp_path, TAGS, row_of)
  assert project.metrics('eval/micro_f1')[60] == 1.0
  result = run_here(lambda: eval.main(list(project.argv())), num_devices=1)
  assert result.code == 0, result.err
  (record,) = read_json_lines(project.model_dir / 'eval' / 'validation.jsonl')
  for name in ('micro_precision', 'micro_recall', 'micro_f1', 'macro_f1', 'accuracy', 'loss'):
    value = project.metrics(f'eval/{name}')[60]
    assert record[f'eval/{name}'] == pytest.approx(value, rel=1e-5), name

  found, long = answers(project, tmp_path, 'we saw one two cats', 'we saw cats ' * 4)
  assert found['words'] == ['we', 'saw', 'one', 'two', 'cats']
  assert found['tags'] == ['O', 'O', 'B-NUM', 'I-NUM', 'O']
  assert found['entities'] == [{'type': 'NUM', 'text': 'one two', 'start': 2, 'stop': 4}]
  assert long['tags'][7:] == [None] * 5 and None not in long['tags'][:7]


@pytest.mark.slow
def test_a_text_has_all_labels_that_it_learned(tmp_path):
  words = [('red', 'color'), ('cat', 'animal')]

  def row_of(i):
    chosen = [pair for bit, pair in enumerate(words) if i >> bit & 1]
    return {'text': ' '.join(['the', *(w for w, _ in chosen)]), 'labels': [k for _, k in chosen]}

  project = run_of(tmp_path, SEVERAL, row_of)
  for name in ('subset_accuracy', 'micro_f1', 'macro_f1'):
    assert project.metrics(f'eval/{name}')[60] == 1.0
  both, none = answers(project, tmp_path, 'the red cat', 'the')
  assert sorted(both['labels']) == ['animal', 'color'] and none['labels'] == []
  assert set(none['probabilities']) == {'animal', 'color'}


@pytest.mark.slow
def test_a_text_has_the_number_that_it_learned(tmp_path):
  words = ('low', 'mid', 'high')
  project = run_of(
    tmp_path, NUMBERS, lambda i: {'text': f'the {words[i % 3]}', 'label': (i % 3) / 2 - 0.5}
  )
  assert project.metrics('eval/pearson')[60] > 0.95
  assert project.metrics('eval/spearman')[60] > 0.9
  assert project.metrics('eval/loss')[60] < 0.05
  low, high = answers(project, tmp_path, 'the low', 'the high')
  assert low['value'] == pytest.approx(-0.5, abs=0.3) and low['value'] < high['value'] - 0.5
