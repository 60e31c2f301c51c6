"""Each setting of a run has one declaration, which gin reads and functions take as a whole."""

import ast
import dataclasses
import inspect
import types
import typing

import pytest

from t5x_gpu import train
from t5x_gpu.evaluation.infer_request import RUN_SETTINGS
from t5x_gpu.run.config import Run
from t5x_gpu.tools.planning.prediction import PlanConfig
from tests.test_layering import modules

SETTINGS = {field.name: field.default for field in dataclasses.fields(Run)}


def parameters(function):
  arguments = function.args
  return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def test_train_takes_the_settings_that_run_declares():
  assert inspect.signature(train.train) == inspect.signature(Run)
  with pytest.raises(TypeError, match='num_microbatch'):
    train.train(num_microbatch=2)


def test_no_function_takes_the_settings_of_a_run_one_by_one():
  found = {
    f'{module}.{node.name}': sorted(parameters(node) & SETTINGS.keys())
    for module, tree in modules().items()
    for node in ast.walk(tree)
    if isinstance(node, ast.FunctionDef) and len(parameters(node) & SETTINGS.keys()) > 3
  }
  assert not found


def test_commands_that_need_less_read_settings_of_run():
  assert set(RUN_SETTINGS) < SETTINGS.keys()
  assert typing.get_type_hints(PlanConfig).items() < typing.get_type_hints(Run).items()


NO_EVALUATION = dict(train_eval_dataset_cfg=None, infer_eval_dataset_cfg=None)


def run_with(**settings):
  required = [name for name, default in SETTINGS.items() if default is dataclasses.MISSING]
  return Run(**{**dict.fromkeys(required), **settings})


@pytest.mark.parametrize(
  'settings, said',
  [
    (dict(eval_period=10), 'train.eval_period = 10 has no effect: train.train_eval_dataset_cfg'),
    (dict(eval_each_task=True), 'train.eval_each_task = True has no effect'),
    (dict(infer_eval_period=10), 'has no effect: train.infer_eval_dataset_cfg = None'),
    (dict(num_predictions=None), 'train.num_predictions = None has no effect'),
    (dict(run_eval_before_training=True), 'train_eval_dataset_cfg = None and train.infer_eval_'),
  ],
)
def test_a_setting_of_an_evaluation_that_never_runs_is_noted(settings, said):
  (note,) = run_with(**settings, **NO_EVALUATION).notes()
  assert said in note
  data = types.SimpleNamespace(task_feature_lengths={})
  assert not [*run_with(**settings, **dict.fromkeys(NO_EVALUATION, data)).notes()]


def test_a_run_without_evaluations_has_no_notes():
  assert not [*run_with(**NO_EVALUATION).notes()]
