"""Tasks with SeqIO's metrics, against SeqIO's own Evaluator."""

import dataclasses
import functools

import pytest

from t5x_gpu.data import data_module
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import ModelOutputs, open_task_names
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import ConfigError, DataError
from tests import eval_tasks
from tests.messages import raises

open_evaluated_tasks = functools.partial(
  data_module.open_evaluated_tasks, feature_converter='prefix_lm'
)
CONFIG = DatasetConfig('turned', {'inputs': 8, 'targets': 8}, 'validation', 4, pack=False)


@pytest.fixture(scope='module')
def turned():
  [task] = open_evaluated_tasks(CONFIG)
  return task


def test_values_and_what_metrics_get_are_those_of_seqio(turned):
  vocabulary = seqio.ByteVocabulary()
  # Two are right, one is cut off, one empty, one runs on after its end.
  texts = ['cba', 'fed', 'ih', '', 'onm']
  predictions = [[*vocabulary.encode(text), 1] for text in texts]
  predictions[4] += vocabulary.encode('xyz')
  scores = [-1.0, -2.5, -3.0, -0.5, -4.0]
  ours = turned.metrics(ModelOutputs(predictions, [0.0] * 5, scores))
  seen_by_ours = dict(eval_tasks.seen)
  evaluator = seqio.Evaluator(
    'turned',
    seqio.PrefixLMFeatureConverter(pack=False),
    eval_split='validation',
    sequence_length=None,
    use_memory_cache=False,
  )
  padded = [row + [0] * (8 - len(row)) for row in predictions]
  future, _ = evaluator.evaluate(
    compute_metrics=True,
    predict_fn=lambda dataset: list(enumerate(padded)),
    score_fn=lambda dataset: list(enumerate(scores)),
  )
  theirs = future.result()['turned']
  assert ours['mean_score'] == pytest.approx(theirs['mean_score'])
  assert ours['examples'] == theirs['examples'].value
  assert ours['exact_match'] == theirs['exact_match']
  assert seen_by_ours['exact_match'] == eval_tasks.seen['exact_match']
  assert seen_by_ours['exact_match'][1][0] == 'prediction: cba'


def test_examples_are_the_whole_split_in_order_or_the_first_few(turned):
  vocabulary = seqio.ByteVocabulary()
  assert [vocabulary.decode(ids) for ids in turned.inputs] == ['abc', 'def', 'ghi', 'jkl', 'mno']
  assert all(ids[-1] == turned.eos_id == 1 for ids in turned.targets)
  [few] = open_evaluated_tasks(CONFIG, num_examples=2)
  assert few.inputs == turned.inputs[:2]
  assert turned.needs_predictions and turned.needs_scores


def test_a_mixture_gives_its_tasks_with_metrics_and_the_split():
  mixture = dataclasses.replace(CONFIG, mixture_or_task_name='all_turned')
  assert open_task_names(mixture) == ('turned', 'turned_more')
  tasks = open_evaluated_tasks(mixture)
  assert [(t.name, len(t.inputs), t.needs_predictions) for t in tasks] == [
    ('turned', 5, True),
    ('turned_more', 10, False),
  ]


def test_another_vocabulary_changes_ids_and_no_name():
  [task] = open_evaluated_tasks(dataclasses.replace(CONFIG, vocabulary='words:64'))
  assert task.name == 'turned' and all(len(ids) == 2 for ids in task.inputs)


@pytest.mark.parametrize(
  'changes',
  [
    {'mixture_or_task_name': 'turned_without_metrics'},
    {'mixture_or_task_name': 'python_source'},
    {'split': 'test'},
  ],
)
def test_what_cannot_be_evaluated_is_an_error(changes):
  with raises(DataError):
    open_evaluated_tasks(dataclasses.replace(CONFIG, **changes))


def test_missing_metrics_are_fine_where_they_are_not_required():
  bare = dataclasses.replace(CONFIG, mixture_or_task_name='turned_without_metrics')
  assert not open_evaluated_tasks(bare, required=False)
  synthetic = dataclasses.replace(CONFIG, module='t5x_gpu.data.synthetic')
  assert not open_evaluated_tasks(synthetic, required=False)
  assert open_task_names(synthetic) == ('turned',)
  with raises(ConfigError):
    open_evaluated_tasks(synthetic)


def test_pairs_from_files_have_exact_match(tmp_path):
  (tmp_path / 'dev.tsv').write_text('ab\tba\ncd\tdc\n')
  [task] = open_evaluated_tasks(
    dataclasses.replace(CONFIG, mixture_or_task_name=f'text_pairs:{tmp_path}/*.tsv')
  )
  right = seqio.ByteVocabulary().encode('ba')
  assert task.metrics(ModelOutputs([right, right], [0, 0])) == {'exact_match': 0.5}
