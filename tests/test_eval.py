"""Evaluating checkpoints: `python -m t5x_gpu.eval`, and metrics of tasks during training."""

import csv
import json
import math
import shutil

import numpy as np
import pytest

from t5x_gpu import eval
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.evaluation import checkpoint_evaluator
from t5x_gpu.metrics.writers import read_json_lines
from tests import eval_tasks
from tests.helpers_train import TINY_GIN, Project, compiled_kept_in, run_here
from tests.messages import record_stderr


def tiny_gin(text: str) -> str:
  """Returns the very small project's gin file with `text`, whose macros replace its own."""
  own = {line.split(' = ')[0] for line in text.splitlines() if ' = ' in line}
  kept = [line for line in TINY_GIN.splitlines() if line.split(' = ')[0] not in own]
  return '\n'.join([*kept, text])


GIN = tiny_gin("""DATA_MODULE = 't5x_gpu.data.seqio_batches'
MIXTURE_OR_TASK_MODULE = 'tests.eval_tasks'
MIXTURE_OR_TASK_NAME = 'turned'
TASK_FEATURE_LENGTHS = {'inputs': 8, 'targets': 8}
PACK = False
TRAIN_STEPS = 6
SAVE_PERIOD = 2
EVAL_PERIOD = 2
EVAL_STEPS = 100
Z_LOSS = 0.0
train_script.train.infer_eval_dataset_cfg = @train_eval/batches.DatasetConfig()
train_script.train.infer_eval_period = 4
train_script.train.run_eval_before_training = True
train_script.train.num_predictions = 3
train_script.train.decoding_cfg = @decoding.DecodingConfig()
decoding.DecodingConfig.max_decode_length = 6
""").replace(
  'from t5x_gpu.models import config\n',
  'from t5x_gpu.models import config\nfrom t5x_gpu.models import decoding\n'
  'from t5x_gpu.run import early_stopping\n',
)


@pytest.fixture(scope='module')
def project(tmp_path_factory):
  """A run of six steps with three checkpoints, evaluated during training."""
  made = Project(tmp_path_factory.mktemp('eval'), gin=GIN)
  made.trained = made.run(num_devices=1)
  assert made.trained.code == 0, made.trained.err
  return made


def evaluate(project, *flags, num_devices=1, **macros):
  with compiled_kept_in(project._compiled):
    return run_here(lambda: eval.main(project.argv(*flags, **macros)), num_devices=num_devices)


def records(project, name='validation'):
  path = project.model_dir / 'eval' / f'{name}.jsonl'
  return {r['step']: r for r in read_json_lines(path)}


@pytest.fixture(scope='module')
def evaluated(project):
  project.evaluation = evaluate(project)
  assert project.evaluation.code == 0, project.evaluation.err
  return project


def test_a_run_can_evaluate_before_its_first_step(project):
  first, *rest = read_json_lines(project.model_dir / 'metrics.jsonl')
  assert first['step'] == 0 and rest[0]['step'] == 1
  assert {'eval/loss', 'infer_eval/turned/mean_score'} < first.keys()
  assert 'train/loss' not in first
  # Random parameters guess: the loss is nearly log(vocab_size).
  assert first['eval/cross_entropy'] == pytest.approx(math.log(264), rel=0.1)
  assert 'eval  step 0 | ' in project.trained.out and 'step 0/6' not in project.trained.out


@pytest.mark.slow
def test_loss_of_each_task_of_a_mixture_is_the_loss_of_that_task_alone(project, tmp_path):
  macros = {
    'train.eval_each_task': True,
    'MIXTURE_OR_TASK_NAME': 'all_turned',
    'TRAIN_STEPS': 1,
    'train.infer_eval_dataset_cfg': None,
  }
  result = project.run(num_devices=1, MODEL_DIR=tmp_path / 'model', **macros)
  assert result.code == 0, result.err
  alone, mixture = (
    read_json_lines(folder / 'metrics.jsonl')[0]
    for folder in (project.model_dir, tmp_path / 'model')
  )  # both of the initial parameters
  assert mixture['eval/turned/loss'] == pytest.approx(alone['eval/loss'], rel=1e-5)
  assert mixture['eval/turned/accuracy'] == pytest.approx(alone['eval/accuracy'], rel=1e-5)
  assert mixture['eval/turned_more/loss'] != mixture['eval/turned/loss'] != mixture['eval/loss']
  assert 'turned 5 rows, turned_more 10 rows' in result.out


def test_every_evaluation_of_tasks_writes_the_texts_of_the_first_examples(project):
  folder = project.model_dir / 'predictions'
  assert sorted(p.name for p in folder.iterdir()) == [f'turned_{n}.jsonl' for n in (0, 4, 6)]
  found = [json.loads(line) for line in (folder / 'turned_6.jsonl').read_text().splitlines()]
  assert [r['inputs'] for r in found] == ['abc', 'def', 'ghi']
  assert [r['targets'] for r in found] == ['cba', 'fed', 'ihg']
  _, predictions = eval_tasks.seen['exact_match']
  assert [f'prediction: {r["prediction"]}' for r in found] == predictions[:3]
  assert all(r['score'] < 0 and r['target_score'] < 0 for r in found)


@pytest.mark.slow
def test_a_restart_evaluates_before_its_first_step_with_the_numbers_of_that_step(project, tmp_path):
  model_dir = tmp_path / 'model'
  shutil.copytree(project.model_dir, model_dir)
  result = project.run(num_devices=1, MODEL_DIR=model_dir, TRAIN_STEPS=7)
  assert result.code == 0, result.err
  records = [r for r in read_json_lines(model_dir / 'metrics.jsonl') if r['step'] == 6]
  then, again = ({k: v for k, v in r.items() if 'eval/' in k} for r in records)
  assert then == again and 'eval/loss' in again


def test_a_run_that_stops_early_runs_every_evaluation_at_its_end(project, tmp_path):
  result = project.run(
    '--gin.train.early_stopping=@early_stopping.EarlyStopping()',
    '--gin.EarlyStopping.patience=2',
    '--gin.EarlyStopping.atol=100.0',
    num_devices=1,
    MODEL_DIR=tmp_path / 'model',
  )
  assert result.code == 0 and 'Stopping early at step 2' in result.out, result.err
  *_, last = read_json_lines(tmp_path / 'model' / 'metrics.jsonl')
  assert last['step'] == 2 and {'eval/loss', 'infer_eval/turned/mean_score'} < last.keys()
  assert (tmp_path / 'model' / 'predictions' / 'turned_2.jsonl').is_file()


@pytest.mark.slow
def test_all_checkpoints_have_the_loss_that_training_found_for_them(evaluated):
  trained = evaluated.metrics('eval/loss')
  assert sorted(trained) == [0, 2, 4, 6]
  found = records(evaluated)
  assert sorted(found) == [2, 4, 6]
  for step, record in found.items():
    assert record['eval/loss'] == pytest.approx(trained[step], rel=1e-5)


@pytest.mark.slow
def test_metrics_of_tasks_during_training_come_in_their_period_and_are_those_of_eval(evaluated):
  name = 'infer_eval/turned/mean_score'
  trained = evaluated.metrics(name)
  assert sorted(trained) == [0, 4, 6]
  found = records(evaluated)
  for step in (4, 6):
    assert found[step][name] == pytest.approx(trained[step], rel=1e-5)
  assert found[6]['infer_eval/turned/examples'] == 5.0


def test_scores_are_the_loss_of_whole_examples(evaluated):
  # Two ways through the model: rows as in training, and targets scored one by one.
  record = records(evaluated)[6]
  tokens = 4  # three letters and the end
  assert record['infer_eval/turned/mean_score'] == pytest.approx(
    -tokens * record['eval/cross_entropy'], rel=1e-4
  )


def test_metrics_get_postprocessed_text_of_the_whole_split_in_order(evaluated):
  targets, predictions = eval_tasks.seen['exact_match']
  assert targets == [f'target: {word}' for word in ('cba', 'fed', 'ihg', 'lkj', 'onm')]
  assert len(predictions) == 5
  assert all(p.startswith('prediction: ') for p in predictions)
  assert len(eval_tasks.seen['mean_score'][1]) == 5


def test_a_metric_that_is_not_a_number_is_left_out_with_one_warning(evaluated):
  assert 'infer_eval/turned/first' not in records(evaluated)[6]
  assert evaluated.evaluation.err.count('the metric first is a Text, not a number') == 1


def test_a_table_and_tensorboard_files_are_left(evaluated):
  table = evaluated.evaluation.out.split('\n\n')[-2].splitlines()
  assert table[0].split() == ['step', '2', '4', '6']
  names = {name for values in records(evaluated).values() for name in values} - {'step'}
  assert {line.split()[0] for line in table[1:]} == {
    name.removeprefix('infer_').removeprefix('eval/') for name in names
  }
  assert list((evaluated.model_dir / 'tensorboard' / 'eval_validation').iterdir())


def test_what_has_been_evaluated_is_not_evaluated_again(evaluated):
  path = evaluated.model_dir / 'eval' / 'validation.jsonl'
  before = path.read_bytes()
  again = evaluate(evaluated)
  assert again.code == 0 and 'Evaluated before: 2, 4, 6' in again.out
  assert path.read_bytes() == before
  lines = before.splitlines(keepends=True)
  path.write_bytes(b''.join(lines[:2]) + lines[2][:20])  # a kill in the middle of a line
  assert evaluate(evaluated).code == 0
  assert path.read_bytes() == before


@pytest.mark.slow
def test_eight_devices_find_what_one_finds(evaluated):
  assert evaluate(evaluated, '--name=eight', '--steps=last', num_devices=8).code == 0
  [record], one = records(evaluated, 'eight').values(), records(evaluated)[6]
  for name, value in record.items():
    assert value == pytest.approx(one[name], rel=1e-4), name


@pytest.mark.slow
def test_a_mixture_has_results_of_each_task_over_its_whole_split(evaluated):
  result = evaluate(evaluated, '--name=mixture', '--steps=4', MIXTURE_OR_TASK_NAME='all_turned')
  assert result.code == 0, result.err
  [record] = records(evaluated, 'mixture').values()
  # 5 examples of 4 target tokens and 10 of 3; a mixture that ends with its shortest had fewer.
  total = (20 * record['eval/turned/loss'] + 30 * record['eval/turned_more/loss']) / 50
  assert record['eval/loss'] == pytest.approx(total, rel=1e-5)
  assert record['infer_eval/turned_more/mean_score'] == pytest.approx(
    -3 * record['eval/turned_more/cross_entropy'], rel=1e-4
  )
  assert record['eval/turned/loss'] == pytest.approx(records(evaluated)[4]['eval/loss'], rel=1e-5)


@pytest.mark.slow
def test_a_task_of_a_mixture_without_examples_is_left_out_unless_it_is_the_only_one(evaluated):
  result = evaluate(evaluated, '--name=fewer', '--steps=4', MIXTURE_OR_TASK_NAME='turned_and_none')
  assert result.code == 0, result.err
  assert "Not evaluated: 'turned_none' has no example" in result.err
  assert "No metrics of turned_none: no example in split 'validation'" in result.err
  [record] = records(evaluated, 'fewer').values()
  assert record['eval/loss'] == record['eval/turned/loss']
  assert record['eval/loss'] == pytest.approx(records(evaluated)[4]['eval/loss'], rel=1e-5)
  for metrics in ('loss', 'tasks'):
    result = evaluate(
      evaluated, '--name=none', f'--metrics={metrics}', MIXTURE_OR_TASK_NAME='turned_none'
    )
    assert result.code == 1 and "NoExamplesError: 'turned_none' has no example" in result.err


def test_the_perplexity_is_the_exponential_of_the_cross_entropy(evaluated):
  for record in records(evaluated).values():
    assert record['eval/perplexity'] == pytest.approx(math.exp(record['eval/cross_entropy']))


def test_multiple_choice_compares_the_log_probabilities_of_the_choices(evaluated, tmp_path):
  rows = [{'inputs': 'ab', 'choices': ['a', 'bc', 'abc'], 'answer': i % 3} for i in range(3)]
  path = tmp_path / 'questions.jsonl'
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  task = f'multiple_choice:{path}'
  flags = ['--name=choice', '--steps=6', '--metrics=tasks']
  result = evaluate(evaluated, *flags, MIXTURE_OR_TASK_NAME=task)
  assert result.code == 0, result.err
  record = records(evaluated, 'choice')[6]
  names = ('accuracy', 'accuracy_per_token', 'accuracy_per_byte')
  # Each choice is the answer of one of three equal questions.
  assert [record[f'infer_eval/multiple_choice/{name}'] for name in names] == [
    pytest.approx(1 / 3)
  ] * 3
  assert record['infer_eval/multiple_choice/questions'] == 3


@pytest.mark.slow
def test_a_number_of_batches_and_of_examples_can_be_given(evaluated):
  result = evaluate(evaluated, '--name=few', '--steps=6', '--examples=2', '--batches=1')
  assert result.code == 0, result.err
  assert records(evaluated, 'few')[6]['infer_eval/turned/examples'] == 2.0


@pytest.mark.slow
def test_the_loss_alone_works_without_metrics(evaluated):
  result = evaluate(evaluated, '--name=loss', '--steps=6', '--metrics=loss')
  assert result.code == 0, result.err
  assert set(records(evaluated, 'loss')[6]) == {
    'step',
    'eval/loss',
    'eval/cross_entropy',
    'eval/perplexity',
    'eval/accuracy',
    'eval/z_loss',
  }


def test_a_dry_run_writes_nothing(project, tmp_path):
  shutil.copytree(project.model_dir / 'checkpoint_6', tmp_path / 'm' / 'checkpoint_6')
  result = evaluate(project, '--dry_run', MODEL_DIR=tmp_path / 'm')
  assert result.code == 0 and 'would evaluate all of steps [6]' in result.out
  assert [p.name for p in (tmp_path / 'm').iterdir()] == ['checkpoint_6']


@pytest.mark.parametrize(
  'flags, macros',
  [
    (['--steps=5'], {}),
    (['--steps=newest'], {}),
    (['--split=tset'], {}),
    (['--name=validation', '--examples=3'], {}),
    (['--name=x', '--metrics=tasks'], {'MIXTURE_OR_TASK_NAME': 'turned_without_metrics'}),
    (['--name=x'], {'MIXTURE_OR_TASK_NAME': 'turned_broken'}),
    (['--name=x', '--batches=0'], {}),
    (['--name=x'], {'TransformerConfig.mlp_dim': 64}),
  ],
)
def test_bad_input_is_an_error_with_a_remedy(evaluated, flags, macros):
  before = records(evaluated)
  result = evaluate(evaluated, *flags, **macros)
  assert result.code == 1
  record_stderr(result.err)
  assert records(evaluated) == before
  assert not list((evaluated.model_dir / 'eval').glob('x.*'))


def test_a_folder_without_checkpoints_is_an_error(project, tmp_path):
  result = evaluate(project, MODEL_DIR=tmp_path / 'empty')
  assert result.code == 1 and 'has no checkpoint' in result.err and '--watch' in result.err
  assert not (tmp_path / 'empty').exists()


@pytest.mark.slow
def test_a_task_without_metrics_has_its_loss(evaluated):
  result = evaluate(
    evaluated, '--name=bare', '--steps=6', MIXTURE_OR_TASK_NAME='turned_without_metrics'
  )
  assert result.code == 0, result.err
  assert math.isfinite(records(evaluated, 'bare')[6]['eval/loss'])


@pytest.mark.slow
def test_infer_eval_of_a_task_without_metrics_fails_before_the_first_step(project, tmp_path):
  result = project.run(
    num_devices=1, MODEL_DIR=tmp_path / 'm', MIXTURE_OR_TASK_NAME='turned_without_metrics'
  )
  assert result.code == 1 and 'has no metrics' in result.err
  assert not (tmp_path / 'm').exists()


# ---- Watching ----------------------------------------------------------------------------------


def steps_of(folder, monkeypatch, *, timeout=60.0, last_step=6, wanted='all', done=()):
  monkeypatch.setattr(checkpoint_evaluator, 'POLL_SECONDS', 0.001)
  return checkpoint_evaluator.steps_to_evaluate(
    ModelDir(folder), wanted=wanted, done=done, last_step=last_step, timeout=timeout
  )


def test_watching_takes_new_checkpoints_until_the_last_step(tmp_path, monkeypatch):
  (tmp_path / 'checkpoint_2').mkdir()
  found = []
  for step in steps_of(tmp_path, monkeypatch):
    found.append(step)
    if step < 6:
      (tmp_path / f'checkpoint_{step + 2}').mkdir()
  assert found == [2, 4, 6]


def test_watching_waits_for_the_first_checkpoint(tmp_path, monkeypatch):
  naps = []

  def nap(seconds):
    naps.append(seconds)
    if len(naps) == 3:
      (tmp_path / 'checkpoint_6').mkdir()

  monkeypatch.setattr(checkpoint_evaluator.time, 'sleep', nap)
  assert list(steps_of(tmp_path, monkeypatch)) == [6]
  assert len(naps) == 3


def test_watching_ends_when_nothing_comes_in_time(tmp_path, monkeypatch):
  (tmp_path / 'checkpoint_2').mkdir()
  assert list(steps_of(tmp_path, monkeypatch, timeout=0.05)) == [2]


def test_watching_the_last_one_leaves_out_those_between(tmp_path, monkeypatch):
  for step in (2, 4):
    (tmp_path / f'checkpoint_{step}').mkdir()
  found = []
  for step in steps_of(tmp_path, monkeypatch, wanted='last'):
    found.append(step)
    (tmp_path / 'checkpoint_6').mkdir(exist_ok=True)
  assert found == [4, 6]


@pytest.mark.slow
def test_watching_a_run_that_is_done_ends(evaluated):
  result = evaluate(evaluated, '--watch', '--timeout=600')
  assert result.code == 0, result.err
  assert 'No further checkpoint' not in result.out


@pytest.mark.slow
def test_a_checkpoint_that_the_run_removes_meanwhile_is_left_out(evaluated, monkeypatch):
  read = checkpoint_evaluator.read_params

  def removed_first(checkpoint, *args):
    if checkpoint.step == 2:
      shutil.rmtree(checkpoint.path)
    return read(checkpoint, *args)

  monkeypatch.setattr(checkpoint_evaluator, 'read_params', removed_first)
  kept = evaluated.folder / 'kept'
  shutil.copytree(evaluated.model_dir / 'checkpoint_2', kept)
  try:
    result = evaluate(evaluated, '--name=removed', '--metrics=loss')
  finally:
    shutil.move(kept, evaluated.model_dir / 'checkpoint_2')
  assert result.code == 0, result.err
  assert 'step 2: the run deleted this checkpoint before it was evaluated' in result.out
  assert sorted(records(evaluated, 'removed')) == [4, 6]


@pytest.mark.slow
def test_a_metric_that_fails_during_training_stops_the_run_after_a_save(tmp_path):
  eval_tasks.seen['calls'] = 0
  project = Project(tmp_path, gin=GIN)
  macros = {'MIXTURE_OR_TASK_NAME': 'turned_fails', 'SAVE_PERIOD': 100}
  result = project.run(num_devices=1, **macros)
  assert result.code == 1
  assert 'IndexError: no such word' in result.err and 'Traceback' not in result.err
  assert project.steps() == [4]
  result = project.run(num_devices=1, **macros)
  assert result.code == 0, result.err
  assert project.steps() == [4, 6]


# ---- Classes -----------------------------------------------------------------------------------

CLASSES_GIN = tiny_gin("""DATA_MODULE = 't5x_gpu.data.seqio_batches'
TASK_FEATURE_LENGTHS = {'inputs': 16}
PACK = False
NUM_CLASSES = 5
TRAIN_STEPS = 2
""").replace('decoder_demo', 'encoder_demo')


@pytest.mark.slow
def test_classes_have_scores_and_a_confusion_matrix_over_every_row_once(tmp_path):
  # Names that no table or picture can show as they are, and two classes that the data do not have.
  names = 'a', '"b,\n"', 'c' * 5000
  for split, count in (('train', 24), ('dev', 13)):
    rows = [f'text {i},{names[i % 3]}' for i in range(count)]
    (tmp_path / f'{split}.csv').write_text('\n'.join(['text,label', *rows]) + '\n')
  project = Project(tmp_path, gin=CLASSES_GIN)
  task = {'MIXTURE_OR_TASK_NAME': f'imdb_csv:{tmp_path}/*.csv'}
  result = project.run(num_devices=1, **task)
  assert result.code == 0, result.err
  assert 'eval  step 2 | 13 rows | accuracy' in result.out
  with open(project.model_dir / 'confusion.csv', newline='') as f:
    table = list(csv.reader(f))
  assert [row[0] for row in table[1:]] == table[0][1:]
  assert table[0][1:] == ['a', 'b,', 'c' * 5000, 'unused 3', 'unused 4']
  result = evaluate(project, **task)
  assert result.code == 0, result.err
  [record] = records(project).values()
  assert {'eval/accuracy', 'eval/macro_f1', 'eval/matthews_corrcoef'} <= set(record)
  assert 'step 2 | 13 rows | accuracy' in result.out
  with open(project.model_dir / 'eval' / 'validation_confusion_2.csv', newline='') as f:
    counts = np.array([[float(x) for x in row[1:]] for row in list(csv.reader(f))[1:]])
  np.testing.assert_array_equal(counts.sum(1), [5, 4, 4, 0, 0])  # 13 rows in batches of 8
  assert record['eval/accuracy'] == pytest.approx(np.trace(counts) / 13)
  facts = json.loads((project.model_dir / 'eval' / 'validation.json').read_text())
  assert facts['split'] == 'validation'


def test_a_model_larger_than_the_memory_is_refused_before_it_is_read(project):
  for flags in ((), ('--dry_run',)):
    result = evaluate(project, *flags, **{'TransformerConfig.mlp_dim': 2**36})
    assert result.code == 1 and 'Traceback' not in result.err
    assert 'OutOfMemoryError: The parameters take ' in result.err
    assert 'Partitioner.fsdp above ' in result.err
