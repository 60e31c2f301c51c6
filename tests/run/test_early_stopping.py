"""A run ends before its last step when a metric does not improve."""

import json

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.run.early_stopping import EarlyStop, EarlyStopping
from tests.helpers_train import TINY_GIN, Project
from tests.messages import raises


@pytest.mark.parametrize(
  'values, options, is_reached',
  [
    ([1.0, 1.0], {}, False),  # one value more is needed
    ([1.0, 1.0, 1.0], {}, True),
    ([1.0, 0.9, 0.8], {}, False),
    ([1.0, 0.9, 0.71], {'atol': 0.2}, True),
    ([1.0, 0.8, 0.6], {'atol': 0.15}, False),
    ([1.0, 0.8, 0.6], {'atol': 0.1, 'rtol': 0.09}, False),
    ([1.0, 0.8, 0.6], {'rtol': 0.3}, True),
    ([1.0, 0.8, 0.7, 0.6], {'atol': 0.15}, True),
    ([0.5, 0.4, 0.45], {}, False),  # the first of the comparisons improves
    ([1.0, 1.2, 1.3], {'best_is': 'max', 'atol': 0.25}, True),
    ([1.0, 1.2, 1.5], {'best_is': 'max', 'atol': 0.15}, False),
  ],
)
def test_values_decide_as_in_t5x(values, options, is_reached):
  assert EarlyStopping(**options).is_reached(values) == is_reached


def test_settings_that_cannot_stop_a_run_are_refused_together():
  with raises(ConfigError):
    EarlyStopping(metric='train/loss', best_is='least', patience=1, atol=-1.0)


GIN = (
  TINY_GIN.replace('import config\n', 'import config\nfrom t5x_gpu.run import early_stopping\n')
  + """
train_script.train.early_stopping = @early_stopping.EarlyStopping()
early_stopping.EarlyStopping.atol = 100.0
"""
)


def test_run_that_does_not_improve_is_saved_ends_and_stays_ended_after_a_restart(tmp_path):
  project = Project(tmp_path, gin=GIN)
  settings = {'EVAL_PERIOD': 2, 'SAVE_PERIOD': 5, 'TRAIN_STEPS': 20}
  first = project.run(num_devices=1, **settings)
  assert first.code == 0, first.err
  assert project.steps() == [5, 6] and sorted(project.metrics('eval/loss')) == [2, 4, 6]
  assert 'Stopping early at step 6: eval/loss' in first.out and 'Done at step 6' in first.out

  again = project.run(num_devices=1, **settings)
  assert again.code == 0, again.err
  assert 'Stopping early at step 6' in again.out and max(project.metrics()) == 6

  patient = project.run('--gin.EarlyStopping.patience=4', num_devices=1, **settings)
  assert patient.code == 0 and 'Stopping early at step 8' in patient.out, patient.err
  assert project.steps() == [5, 6, 8]


def test_evaluations_before_the_first_step_of_a_restart_do_not_count(tmp_path):
  records = [{'step': step, 'eval/loss': step / 10} for step in (3, 10, 14, 17, 20, 30)]
  (tmp_path / 'metrics.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in records))
  stop = EarlyStop(EarlyStopping(), 10, None, folder=tmp_path, first_step=20)
  assert stop.values == {3: 0.3, 10: 1.0, 20: 2.0}


def test_metric_without_an_evaluation_period_is_refused(tmp_path):
  with raises(ConfigError):
    Project(tmp_path, gin=GIN).check(EVAL_PERIOD=None, num_devices=1)
