"""docs/add_an_optimizer.md, done word for word by a user with an empty folder; the schedules of
docs/train.md."""

import inspect
import math
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.config import gin_loader
from t5x_gpu.partitioning.axis_rules import AxisNames
from t5x_gpu.training import schedules
from tests.helpers_pages import ROOT, blocks, run
from tests.helpers_train import TINY_GIN, Project

PAGE = 'add_an_optimizer.md'
SMALL = ('--gin.TransformerConfig.num_layers=1', '--gin.TransformerConfig.scan_unroll=1')
(CODE,), (GIN,), (COMMANDS,) = (blocks(PAGE, language) for language in ('python', 'gin', 'sh'))


@pytest.fixture
def page(tmp_path, monkeypatch):
  """The module of the page."""
  (tmp_path / 'my_training.py').write_text(CODE)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'my_training', raising=False)
  return __import__('my_training')


def test_lion_takes_the_sign_of_the_average_and_decays(page):
  optimizer = page.Lion(b1=0.9, b2=0.99, weight_decay=0.5)
  params, names = {'w': jnp.array([1.0, -2.0])}, {'w': AxisNames(('embed',))}
  state = optimizer.init(params, names)
  options = dict(names=names, learning_rate=jnp.float32(0.1), step=jnp.int32(0))
  new, state = optimizer.update({'w': jnp.array([3.0, -1.0])}, state, params, **options)
  np.testing.assert_allclose(new['w'], [1.0 - 0.1 * 1.5, -2.0 + 0.1 * 2.0], rtol=1e-6)
  # The second gradient is smaller than the average of the first, 0.01 x 3.
  newer, _ = optimizer.update({'w': jnp.array([-0.1, 0.0])}, state, new, **options)
  assert newer['w'][0] < new['w'][0] * (1 - 0.1 * 0.5)
  state_names = optimizer.state_names(params, names)
  assert jax.tree.structure(state_names) == jax.tree.structure(state)
  assert AxisNames(('embed',)) in jax.tree.leaves(state_names)


def test_the_schedule_rises_stays_and_falls(page):
  schedule = page.warmup_stable_decay(2.0, total_steps=10, warmup_steps=4, decay_steps=2)
  rates = [float(schedule(step)) for step in (0, 3, 7, 8, 9, 10)]
  assert rates == [0.5, 2.0, 2.0, 2.0, 1.0, 0.0]


def test_the_three_train_alike_on_any_mesh(page, tmp_path):
  own = re.search(r'^MODEL = .*?(?=^MODEL_DIR)', GIN, re.MULTILINE | re.DOTALL)[0]
  imports = TINY_GIN.replace('from t5x_gpu.models', 'import my_training\nfrom t5x_gpu.models', 1)
  losses = []
  for number, flags in ((8, ('--gin.Partitioner.fsdp=2', '--gin.NUM_PARTITIONS=2')), (1, ())):
    project = Project(tmp_path, gin=imports + own)
    model_dir = tmp_path / f'on_{number}'
    result = project.run(*flags, num_devices=number, MODEL_DIR=model_dir, TRAIN_STEPS=3)
    assert result.code == 0, result.err
    losses.append(list(project.metrics(model_dir=model_dir).values()))
    assert list(project.metrics('train/poly', model_dir=model_dir)) == [1, 2, 3]
  np.testing.assert_allclose(*losses, rtol=1e-5)


def test_the_table_of_schedules_has_each_with_its_arguments_and_formula():
  page = (ROOT / 'docs/train.md').read_text(encoding='utf-8')
  rows = re.findall(r'^\| `(\w+)\(([\w, ]+)\)` \| ([^|:]+)', page, re.MULTILINE)
  functions = {
    name: function
    for name, function in vars(schedules).items()
    if inspect.isfunction(function) and function.__annotations__['return'] is schedules.Schedule
  }
  del functions['factors']  # a product of T5X's formulas
  assert {name for name, _, _ in rows} == set(functions)
  values = dict(learning_rate=0.3, peak=0.3, base=2.0, final=0.1, total_steps=50, warmup_steps=8)
  for name, arguments, formula in rows:
    function = functions[name]
    assert set(arguments.split(', ')) == set(inspect.signature(function).parameters)
    schedule = function(**{argument: values[argument] for argument in arguments.split(', ')})
    for step in (0, 3, 8, 20, 49, 60):
      known = dict(
        values,
        step=step,
        w=min(1, (step + 1) / values['warmup_steps']),
        p=min(max((step - 8) / (50 - 8), 0), 1),
      )
      text = formula.replace(' x ', ' * ').replace('pi p', 'pi * p')
      expected = eval(text, {'cos': math.cos, 'pi': math.pi, 'sqrt': math.sqrt}, known)
      assert float(schedule(step)) == pytest.approx(expected, rel=1e-5), (name, step)


def test_a_gin_file_chooses_a_schedule_as_the_page_says(tmp_path):
  (block,) = (b for b in blocks('train.md', 'gin') if 'schedules' in b)
  (tmp_path / 'my.gin').write_text(block)
  found = gin_loader.load([str(tmp_path / 'my.gin')]).provenance
  assert found.find('train.learning_rate')[0].value == '@schedules.linear()'
  assert found.find('linear.peak')[0].value == '1.0'


@pytest.fixture
def folder(tmp_path):
  """A folder with the two files of the page."""
  (tmp_path / 'my_training.py').write_text(CODE)
  (tmp_path / 'my_training.gin').write_text(GIN)
  return tmp_path


@pytest.mark.slow
@pytest.mark.process
def test_the_commands_train_and_resume_on_another_mesh(folder):
  train, resume, _ = COMMANDS.splitlines()
  assert 'poly' in run(folder, train, *SMALL)
  assert 'checkpoint_6' in run(folder, resume, *SMALL)
  assert (folder / 'runs/my_training/checkpoint_8').is_dir()


@pytest.mark.slow
@pytest.mark.process
def test_the_mesh_trains_as_one_device(folder):
  assert 'parity: ok' in run(folder, COMMANDS.splitlines()[2], *SMALL)
