"""What gin accepts in silence stops the run, with file:line and a suggestion."""

import sys

import pytest

from t5x_gpu.errors import ConfigError, Problem
from tests.config.project import RUN, write
from tests.messages import raises


def problems_of(load, *files, bindings=()) -> tuple[Problem, ...]:
  with raises(ConfigError) as e:
    load(list(files) or ['my.gin'], bindings=bindings)
  return e.value.problems


@pytest.mark.parametrize(
  'line',
  [
    'trian/train_script.Data.pack = False',
    'BATCH_SZIE = 7',
    'train_script.Adafactor.decay = 0.5',
    'train/train_script.AdamW.decay = 0.5',
    "train_script.Data.pack = 'yes'",
    'train_script.Partitioner.num_partition = 2',
    'train_script.Partitoner.num_partitions = 2',
    'train_scrip.Partitioner.num_partitions = 2',
    'train_script.train.optimizer = @train_script.AdmaW()',
  ],
)
def test_one_wrong_line_gives_one_problem_with_its_place(project, load, line):
  write(
    project / 'bad.gin',
    f'from __gin__ import dynamic_registration\nfrom app import train as train_script\n{line}\n',
  )
  assert len(problems_of(load, 'my.gin', 'bad.gin')) == 1


@pytest.mark.parametrize(
  'binding',
  [
    'BATCHSIZE=8',
    'TOTAL_STEPS=8',
    'tran.total_steps=8',
    # As T5X spells it, where it belongs to another class.
    'trainer.Trainer.total_steps=8',
    'partitioning.PjitPartitioner.num_partitions=2',
    'train.total_step=8',
    'evl/Data.batch_size=8',
    'TRAIN_STEPS="8"',
    'TRAIN_STEPS=many',
    'Data.pack=true',
    'train.dtype=float16',
    'train.optimizer=@AdamW',
    'train.data=@Partitioner()',
    'train.layers=abc',
    'AdamW.betas=[0.9, 0.99]',
    'AdamW.betas=(0.9,)',
    'Data.lengths={"targets": 8.0}',
    'LENGTH=8.5',
    'train.optimizer=@Adafactor()',
    'AdamW.schedule=@constant',
    'train.optimizer=@lion.Lion()',
    'Adafactor.decay=0.5',
    'MODEL_DIR=3',
    'MODEL_DIR=1e5',
    'MODEL_DIR=1_000',
    'TRAIN_STEPS=True',
    'MODEL_DIR=[a',
    'MODEL_DIR=',
    'MODEL-DIR=a',
  ],
)
def test_command_line_mistakes(load, binding):
  assert len(problems_of(load, bindings=[binding])) == 1


@pytest.mark.parametrize(
  'binding',
  [
    'AdamW.decay=1',
    'train.layers=(1, 2)',
    'train.eval_data=None',
    'train.optimizer=@train_script.Adafactor()',
    'train.model_dir=a',
    "Data.lengths={'targets': %TRAIN_STEPS}",
    'train.dtype=bfloat16',
    'AdamW.schedule=@train_script.Adafactor',
  ],
)
def test_legal_values_pass(load, binding):
  load(['my.gin'], bindings=[binding])


def test_all_problems_come_in_one_error(project, load):
  write(project / 'bad.gin', 'A = 1\nB = 2\nA = 3\n')
  problems_of(
    load, 'my.gin', 'bad.gin', bindings=['TRAIN_STEPS=x', 'trian/Data.pack=False', 'Data.pak=True']
  )


def test_a_key_bound_twice_in_one_file(project, load):
  write(project / 'gin_configs/runs/run.gin', RUN + 'train/train_script.Data:\n  batch_size = 1\n')
  problems_of(load)


def test_an_include_below_may_not_take_back_a_value(project, load):
  write(project / 'my.gin', "BATCH_SIZE = 8\ninclude 'gin_configs/runs/run.gin'\n")
  problems_of(load)


def test_macros_in_a_circle(project, load):
  write(project / 'a.gin', 'TRAIN_STEPS = %OTHER\nOTHER = %TRAIN_STEPS\n')
  problems_of(load, 'my.gin', 'a.gin')


def test_overriding_a_binding_that_uses_macros_gives_a_note_not_an_error(load):
  config = load(
    ['my.gin'],
    bindings=['train.total_steps=5', 'MODEL_DIR=a', 'train.optimizer=@train_script.Adafactor()'],
  )
  assert config.arguments()['total_steps'] == 5
  (note,) = config.notes
  for key in ('TRAIN_STEPS (gin_configs/runs/run.gin:8)', 'OPTIMIZER', 'AdamW.schedule', 'rsqrt'):
    assert key in note


def test_a_command_line_override_that_changes_nothing_is_an_error(load):
  problems_of(load, bindings=['train.total_steps=5', 'TRAIN_STEPS=7'])


def test_bindings_of_decorated_configurables_count_as_used(project, load):
  write(
    project / 'mine.py',
    'import gin\n@gin.configurable\ndef helper(x: int = 1): return x\n'
    "def f():\n  with gin.config_scope('inner'):\n    return helper()\n",
  )
  write(project / 'more.gin', 'import mine\nhelper.x = %HELP\nHELP = 2\ninner/helper.x = 3\n')
  config = load(['my.gin', 'more.gin'], bindings=['MODEL_DIR=a'])
  assert config.notes == () and sys.modules['mine'].f() == 3
  write(project / 'again.gin', config.provenance.config)
  again = load(['again.gin'])
  assert sys.modules['mine'].f() == 3 and again.provenance.config == config.provenance.config
  write(project / 'more.gin', 'import mine\nhelper.x = 1\nother/helper.x = 3\n')
  problems_of(load, 'my.gin', 'more.gin')


@pytest.mark.parametrize(
  'text',
  [
    'A = runs/a\n',
    'A = runs/a\n',
    'A = 1\n\nB = [1, 2\n',
    'A = 1\nB 2\n',
    'train.train:\n    a = 1\n  b = 2\n',
    "A = 'x\n",
    'import app.trian\n',
    'import my_recipe\n',
    'from app.train import Data\n',
    'import broken\n',
    'import broken\n',
    'import needs\n',
    'import typo\n',
    'from t5x import adafactor\n',
    'from t5x_gpu import adafactor\n',
    "include 'nowhere.gin'\n",
  ],
)
def test_unreadable_files_and_modules_are_the_only_problem(project, load, text):
  write(project / 'bad.gin', text)
  write(project / 'my_recipes.py', '')  # no module of a machine has a similar name
  write(project / 'broken.py', '\nx\n')
  write(project / 'needs.py', 'import nothing_here\n')
  write(project / 'typo.py', '\nclass Layer\n')
  assert len(problems_of(load, 'my.gin', 'bad.gin', bindings=['BATCHSIZE=3'])) == 1


def test_include_from_the_root_of_a_repository_names_that_folder(project, load):
  (project / 'repository/t5x/runs').mkdir(parents=True)
  write(project / 'repository/t5x/runs/a.gin', "include 't5x/runs/b.gin'\n")
  write(project / 'repository/t5x/runs/b.gin', 'A = 1\n')
  assert len(problems_of(load, 'repository/t5x/runs/a.gin')) == 1


def test_one_failed_import_hides_its_consequences(project, load):
  write(
    project / 'bad.gin',
    'from __gin__ import dynamic_registration\nfrom app import trian\n'
    'trian.train.total_steps = 5\ntrian.train.model_dir = @trian.f()\n',
  )
  problems_of(load, 'bad.gin')


def test_imports_without_dynamic_registration_name_the_missing_line(project, load):
  write(project / 'bad.gin', 'from app import train as other\nother.train.total_steps = 5\n')
  problems_of(load, 'my.gin', 'bad.gin')


LINE = 'from t5x_gpu.training import schedules'


@pytest.mark.parametrize(
  'text',
  [
    'schedules.linear.peak = 5\n',
    'from __gin__ import dynamic_registration\nschedules.linear.peak = 5\n',
    'from __gin__ import dynamic_registration\nschedules.no_such.peak = 5\n',
    "from __gin__ import dynamic_registration\nDatasetConfig.module = 'my_batches'\n",
  ],
)
def test_names_that_only_other_files_import_come_with_their_import(project, load, text):
  write(project / 'a.gin', text)
  problems_of(load, 'my.gin', 'a.gin')


def test_names_on_the_command_line_come_with_their_import(load):
  problems_of(load, 'my.gin', bindings=['train.optimizer=@schedules.linear()'])


def test_problems_in_two_files_are_both_found(project, load):
  write(project / 'a.gin', 'A = b c\n')
  problems_of(load, 'a.gin', 'nowhere.gin')


def test_macros_used_only_by_unused_bindings_are_not_reported_as_well(project, load):
  write(
    project / 'bad.gin',
    'from __gin__ import dynamic_registration\n'
    'from app import train as train_script\n'
    'trian/train_script.Data.pack = %A\nA = True\n'
    'evla/train_script.Data.pack = %B\nB = %C\nC = False\n',
  )
  problems_of(load, 'my.gin', 'bad.gin')


def test_a_chain_of_unused_macros_is_one_problem(project, load):
  write(project / 'bad.gin', 'A = %B\nB = %C\nC = 1\n')
  problems_of(load, 'my.gin', 'bad.gin')
