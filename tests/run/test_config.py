"""Each setting of a run has one declaration, which gin reads and functions take as a whole."""

import ast
import dataclasses
import inspect
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
