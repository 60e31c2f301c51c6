"""What gin accepts in silence stops the run, with file:line and a suggestion."""

import sys

import pytest

from t5x_gpu.errors import ConfigError
from tests.config.project import RUN, write


def problems_of(load, *files, bindings=()) -> str:
  with pytest.raises(ConfigError) as e:
    load(list(files) or ['my.gin'], bindings=bindings)
  return str(e.value)


@pytest.mark.parametrize(
  'line, expected',
  [
    (
      'trian/train_script.Data.pack = False',
      "no reference enters scope 'trian' of trian/Data.pack. Did you mean 'train'?",
    ),
    ('BATCH_SZIE = 7', "macro BATCH_SZIE is set, and nothing uses it. Did you mean 'BATCH_SIZE'?"),
    (
      'train_script.Adafactor.decay = 0.5',
      'Adafactor.decay is set, but the run never uses Adafactor: no @Adafactor leads to it',
    ),
    (
      'train/train_script.AdamW.decay = 0.5',
      'train/AdamW.decay is set, but no @train/AdamW is used. It is used as @OPTIMIZER/AdamW.',
    ),
    ("train_script.Data.pack = 'yes'", "Data.pack = 'yes': 'yes' is a str; expected bool."),
    (
      'train_script.Partitioner.num_partition = 2',
      "Partitioner has no parameter 'num_partition'. Did you mean 'num_partitions'?",
    ),
    (
      'train_script.Partitoner.num_partitions = 2',
      "Module app.train has no 'Partitoner'. Did you mean 'Partitioner'?",
    ),
    (
      'train_scrip.Partitioner.num_partitions = 2',
      "'train_scrip' is not imported. Did you mean 'train_script'?",
    ),
    (
      'train_script.train.optimizer = @train_script.AdmaW()',
      "Module app.train has no 'AdmaW'. Did you mean 'AdamW'?",
    ),
  ],
)
def test_one_wrong_line_gives_one_problem_with_its_place(project, load, line, expected):
  write(
    project / 'bad.gin',
    f'from __gin__ import dynamic_registration\nfrom app import train as train_script\n{line}\n',
  )
  text = problems_of(load, 'my.gin', 'bad.gin')
  assert text.startswith('bad.gin:3: ')
  assert expected in text
  assert 'problems' not in text, 'consequences of the one problem are reported as well'


@pytest.mark.parametrize(
  'binding, expected',
  [
    (
      'BATCHSIZE=8',
      "--gin.BATCHSIZE: no gin file uses a macro BATCHSIZE. Did you mean 'BATCH_SIZE'?",
    ),
    (
      'TOTAL_STEPS=8',
      '--gin.TOTAL_STEPS: no gin file uses a macro TOTAL_STEPS. It is a parameter: set '
      'train.total_steps.',
    ),
    (
      'tran.total_steps=8',
      "--gin.tran.total_steps: No function or class 'tran' is known to gin. Did you mean 'train'?",
    ),
    # As T5X spells it, where it belongs to another class.
    (
      'trainer.Trainer.total_steps=8',
      'total_steps is a parameter of train: write train.total_steps.',
    ),
    ('partitioning.PjitPartitioner.num_partitions=2', 'write Partitioner.num_partitions.'),
    ('train.total_step=8', "train has no parameter 'total_step'. Did you mean 'total_steps'?"),
    (
      'evl/Data.batch_size=8',
      "no reference enters scope 'evl' of evl/Data.batch_size. Did you mean 'eval'?",
    ),
    (
      'TRAIN_STEPS="8"',
      "--gin.TRAIN_STEPS: train.total_steps = '8' through %TRAIN_STEPS at "
      "gin_configs/runs/run.gin:16: '8' is a str; expected int. Write 8.",
    ),
    ('TRAIN_STEPS=many', "'many' is a str; expected int."),
    ('Data.pack=true', "'true' is a str; expected bool. Write True."),
    ('train.dtype=float16', "'float16' is a str; expected 'float32' or 'bfloat16'."),
    ('train.optimizer=@AdamW', 'is the class or function itself; write @AdamW() to call it.'),
    ('train.data=@Partitioner()', '@Partitioner() gives Partitioner; expected Data.'),
    ('train.layers=abc', 'expected Sequence[int]'),
    (
      'AdamW.betas=[0.9, 0.99]',
      '[0.9, 0.99] is a list; expected tuple[float, float]. Write (0.9, 0.99).',
    ),
    ('AdamW.betas=(0.9,)', 'expected tuple[float, float]'),
    ('Data.lengths={"targets": 8.0}', 'expected Mapping[str, int]'),
    ('LENGTH=8.5', 'expected Mapping[str, int]'),
    ('train.optimizer=@Adafactor()', 'Write train_script.Adafactor.'),
    ('AdamW.schedule=@constant', 'Write train_script.constant.'),
    ('train.optimizer=@lion.Lion()', "No gin file imports 'lion'; imported are train_script."),
    ('Adafactor.decay=0.5', 'Write train_script.Adafactor.'),
    ('MODEL_DIR=3', '3 is an int; expected str. For the text, add quotes: "\'3\'".'),
    ('MODEL_DIR=1e5', '1e5 is a float; expected str. For the text, add quotes: "\'1e5\'".'),
    ('MODEL_DIR=1_000', 'add quotes: "\'1_000\'".'),
    ('TRAIN_STEPS=True', 'True is a bool; expected int.'),
    ('MODEL_DIR=[a', 'starts like a gin value but is not one'),
    ('MODEL_DIR=', '--gin.MODEL_DIR has no value.'),
    ('MODEL-DIR=a', '--gin.MODEL-DIR is not a name that gin can bind.'),
  ],
)
def test_command_line_mistakes(load, binding, expected):
  text = problems_of(load, bindings=[binding])
  assert expected in text
  assert 'problems' not in text


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
  text = problems_of(
    load, 'my.gin', 'bad.gin', bindings=['TRAIN_STEPS=x', 'trian/Data.pack=False', 'Data.pak=True']
  )
  assert 'The configuration cannot be used: 6 problems.' in text
  for expected in (
    'bad.gin:3 binds A a second time; bad.gin:1 does too',
    'bad.gin:2: macro B',
    'bad.gin:3: macro A',
    "'x' is a str",
    "'trian'",
    "'pak'",
  ):
    assert expected in text


def test_a_key_bound_twice_in_one_file(project, load):
  write(project / 'gin_configs/runs/run.gin', RUN + 'train/train_script.Data:\n  batch_size = 1\n')
  text = problems_of(load)
  assert 'run.gin:26 binds train/Data.batch_size a second time' in text
  assert 'run.gin:18 does too' in text


def test_an_include_below_may_not_take_back_a_value(project, load):
  write(project / 'my.gin', "BATCH_SIZE = 8\ninclude 'gin_configs/runs/run.gin'\n")
  assert (
    'my.gin:1 sets BATCH_SIZE = 8, and gin_configs/runs/run.gin:5, included after it, '
    'sets it to 128.\n  Move the include above that line.'
  ) in problems_of(load)


def test_macros_in_a_circle(project, load):
  write(project / 'a.gin', 'TRAIN_STEPS = %OTHER\nOTHER = %TRAIN_STEPS\n')
  text = problems_of(load, 'my.gin', 'a.gin')
  assert text.startswith('Macros refer to each other in a circle: %TRAIN_STEPS (a.gin:1) -> ')


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
  text = problems_of(load, bindings=['train.total_steps=5', 'TRAIN_STEPS=7'])
  assert (
    text == '--gin.TRAIN_STEPS has no effect: the bindings that use TRAIN_STEPS are overridden.'
  )


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
  assert "more.gin:3: no reference enters scope 'other'" in problems_of(load, 'my.gin', 'more.gin')


@pytest.mark.parametrize(
  'text, expected',
  [
    ('A = runs/a\n', 'bad.gin:1 is not gin'),
    ('A = runs/a\n', "Text needs quotes: A = 'runs/a'"),
    ('A = 1\n\nB = [1, 2\n', 'is not closed'),
    ('A = 1\nB 2\n', "bad.gin:2 is not gin: Couldn't parse statement, expected ':' or '='"),
    ('train.train:\n    a = 1\n  b = 2\n', 'bad.gin:3 is not gin'),
    ("A = 'x\n", 'bad.gin:1 is not gin'),
    ('import app.trian\n', "bad.gin:1: There is no module 'trian' in app. Did you mean 'train'?"),
    ('import ap\n', "bad.gin:1: There is no module 'ap'. Did you mean 'app'"),
    ('from app.train import Data\n', 'write `from app import train` and use train.Data.'),
    ('import broken\n', "Importing broken failed: NameError: name 'x' is not defined"),
    ('import broken\n', 'broken.py:2).'),
    ('import needs\n', "Importing needs failed: ModuleNotFoundError: No module named 'nothing"),
    ("include 'nowhere.gin'\n", "bad.gin:1 includes 'nowhere.gin', which does not exist."),
  ],
)
def test_unreadable_files_and_modules_are_the_only_problem(project, load, text, expected):
  write(project / 'bad.gin', text)
  write(project / 'broken.py', '\nx\n')
  write(project / 'needs.py', 'import nothing_here\n')
  found = problems_of(load, 'my.gin', 'bad.gin', bindings=['BATCHSIZE=3'])
  assert expected in found
  assert 'BATCHSIZE' not in found


def test_one_failed_import_hides_its_consequences(project, load):
  write(
    project / 'bad.gin',
    'from __gin__ import dynamic_registration\nfrom app import trian\n'
    'trian.train.total_steps = 5\ntrian.train.model_dir = @trian.f()\n',
  )
  text = problems_of(load, 'bad.gin')
  assert text == "bad.gin:2: There is no module 'trian' in app. Did you mean 'train'?"


def test_imports_without_dynamic_registration_name_the_missing_line(project, load):
  write(project / 'bad.gin', 'from app import train as other\nother.train.total_steps = 5\n')
  text = problems_of(load, 'my.gin', 'bad.gin')
  assert text.startswith("bad.gin:2: No function or class 'other.train' is known to gin.")
  assert text.endswith('before them: from __gin__ import dynamic_registration')


LINE = 'from t5x_gpu.training import schedules'


@pytest.mark.parametrize(
  'text, expected',
  [
    (
      'schedules.linear.peak = 5\n',
      "a.gin:1: No function or class 'schedules.linear' is known to gin. Import it in this file: "
      f'from __gin__ import dynamic_registration, and {LINE}',
    ),
    (
      'from __gin__ import dynamic_registration\nschedules.linear.peak = 5\n',
      f"a.gin:2: 'schedules' is not imported. Write in this file: {LINE}",
    ),
    (
      'from __gin__ import dynamic_registration\nschedules.no_such.peak = 5\n',
      "a.gin:2: 'schedules' is not imported.",
    ),
  ],
)
def test_names_that_only_other_files_import_come_with_their_import(project, load, text, expected):
  write(project / 'a.gin', text)
  assert problems_of(load, 'my.gin', 'a.gin') == expected


def test_names_on_the_command_line_come_with_their_import(load):
  text = problems_of(load, 'my.gin', bindings=['train.optimizer=@schedules.linear()'])
  assert text.endswith(f'Import it in a gin file first: {LINE}')


def test_problems_in_two_files_are_both_found(project, load):
  write(project / 'a.gin', 'A = b c\n')
  text = problems_of(load, 'a.gin', 'nowhere.gin')
  assert 'a.gin:1 is not gin' in text and "'nowhere.gin' does not exist" in text


def test_macros_used_only_by_unused_bindings_are_not_reported_as_well(project, load):
  write(
    project / 'bad.gin',
    'from __gin__ import dynamic_registration\n'
    'from app import train as train_script\n'
    'trian/train_script.Data.pack = %A\nA = True\n'
    'evla/train_script.Data.pack = %B\nB = %C\nC = False\n',
  )
  text = problems_of(load, 'my.gin', 'bad.gin')
  assert '2 problems' in text and "'trian'" in text and "'evla'" in text


def test_a_chain_of_unused_macros_is_one_problem(project, load):
  write(project / 'bad.gin', 'A = %B\nB = %C\nC = 1\n')
  assert problems_of(load, 'my.gin', 'bad.gin') == (
    'bad.gin:1: macro A is set, and nothing uses it.'
  )
