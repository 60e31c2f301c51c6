"""Files are found, bound in order and give the entry function's arguments; gin's state is ours."""

import subprocess
import sys

import gin
import pytest

from t5x_gpu.config import gin_loader, gin_text
from t5x_gpu.errors import ConfigError, MeshError, UserError
from tests.config.project import write
from tests.messages import raises


def test_arguments_are_what_gin_would_pass(project, load):
  arguments = load(['my.gin'], bindings=['MODEL_DIR=runs/a']).arguments()
  assert arguments['model_dir'] == 'runs/a'
  assert arguments['total_steps'] == 50
  assert arguments['data'].batch_size == 8 and arguments['eval_data'].batch_size == 4
  assert arguments['data'].lengths == {'targets': 16}
  assert arguments['optimizer'].schedule(5) == pytest.approx(25**-0.5)
  assert type(arguments['data']).__module__ == 'app.train'


def test_later_files_and_the_command_line_override(project, load):
  write(project / 'more.gin', 'BATCH_SIZE = 9\nTRAIN_STEPS = 7\n')
  arguments = load(['my.gin', 'more.gin'], bindings=['MODEL_DIR=a', 'TRAIN_STEPS=3']).arguments()
  assert (arguments['data'].batch_size, arguments['total_steps']) == (9, 3)


@pytest.mark.parametrize(
  'binding, name, value',
  [
    ('train.total_steps=3', 'total_steps', 3),
    ('train_script.train.total_steps=3', 'total_steps', 3),
    ('app.train_script.train.total_steps=3', 'total_steps', 3),
    ('train.dtype=bfloat16', 'dtype', 'bfloat16'),
    ('train.layers=[1, %TRAIN_STEPS]', 'layers', [1, 50]),
    ('MODEL_DIR=\\"x\\"', 'model_dir', 'x'),
    ("MODEL_DIR='x y'", 'model_dir', 'x y'),
    ('MODEL_DIR=2024/a', 'model_dir', '2024/a'),
    ('MODEL_DIR=a=b', 'model_dir', 'a=b'),
    ('train.optimizer=None', 'optimizer', None),
  ],
)
def test_command_line_spellings(load, binding, name, value):
  bindings = ['MODEL_DIR=d', binding]
  assert load(['my.gin'], bindings=bindings).arguments()[name] == value


def test_command_line_reaches_scopes_and_unregistered_names(load):
  arguments = load(
    ['my.gin'],
    bindings=[
      'MODEL_DIR=d',
      'train/Data.batch_size=2',
      'AdamW.schedule=@train_script.constant',
      'constant.rate=0.5',
    ],
  ).arguments()
  assert arguments['data'].batch_size == 2 and arguments['eval_data'].batch_size == 4
  assert arguments['optimizer'].schedule(1) == 0.5


def test_loads_do_not_see_each_other(project, load):
  load(['my.gin'], bindings=['train.dtype=bfloat16'])
  write(project / 'app/train.py', 'def train(*, x: int = 0): pass\n')
  write(
    project / 'other.gin',
    'from __gin__ import dynamic_registration\nfrom app import train\ntrain.train.x = 5\n',
  )
  for name in ('app.train', 'app'):
    del sys.modules[name]
  assert load(['other.gin']).arguments() == {'x': 5}


def test_a_decorated_module_may_be_imported_again(project, load):
  write(project / 'decorated.py', 'import gin\n@gin.configurable\ndef train(x=1): return x\n')
  write(project / 'd.gin', 'import decorated\ntrain.x = 5\n')
  for _ in range(2):
    config = gin_loader.load(['d.gin'], entry='decorated.train')
    assert config.arguments() == {'x': 5}
    del sys.modules['decorated']


def test_an_older_configuration_refuses_to_answer_for_gin(load):
  old = load(['my.gin'], bindings=['MODEL_DIR=a'])
  load(['my.gin'], bindings=['MODEL_DIR=b'])
  with raises(ConfigError):
    old.arguments()


def test_required_values_are_listed_together(project, load):
  write(
    project / 'bare.gin',
    'from __gin__ import dynamic_registration\n'
    'from app import train\ntrain.train:\n  data = @train.Data()\n  total_steps = %STEPS\n',
  )
  with raises(ConfigError):
    load(['bare.gin']).arguments()


def test_a_required_macro_names_its_flag(load):
  with raises(ConfigError):
    load(['my.gin']).arguments()


def test_what_a_caller_does_not_need_is_neither_required_nor_resolved(load):
  config = load(['my.gin'], bindings=['Partitioner.num_partitions=3'])
  assert config.arguments(only=('dtype', 'total_steps')) == {'dtype': 'float32', 'total_steps': 50}


def test_errors_of_constructors_keep_their_class_and_text(load):
  config = load(['my.gin'], bindings=['MODEL_DIR=a', 'Partitioner.num_partitions=3'])
  with raises(MeshError) as e:
    config.arguments()
  assert UserError.__str__(e.value).startswith('8 GPUs cannot')
  assert e.value.parameters == ('Partitioner.num_partitions',)


def test_several_entries_share_a_file(project):
  write(
    project / 'both.gin',
    "include 'gin_configs/runs/run.gin'\n"
    'from __gin__ import dynamic_registration\nfrom app import train as script\n'
    "MODEL_DIR = 'a'\nscript.infer.model_dir = %MODEL_DIR\n",
  )
  config = gin_loader.load(['both.gin'], entry=('app.train.train', 'app.train.infer'))
  assert config.arguments('app.train.infer') == {'model_dir': 'a'}
  with raises(ConfigError):
    gin_loader.load(['both.gin'], entry='app.train.train')


def test_an_entry_that_no_file_configures(project):
  with raises(ConfigError):
    gin_loader.load(['my.gin'], entry='app.train.infer')


@pytest.mark.parametrize(
  'text, is_configured',
  [
    ('app.train.infer.model_dir = "a"\n', True),
    ('a/train.infer:\n  model_dir = "a"\n', True),
    ('# then app.train.infer: predictions\n', False),
    ('train.train.note = "infer.model_dir"\n', False),
  ],
)
def test_only_a_binding_configures_an_entry(text, is_configured, tmp_path):
  (tmp_path / 'a.gin').write_text(text)
  assert gin_loader.configures([str(tmp_path / 'a.gin')], 'app.train.infer') is is_configured


def test_search_paths_and_other_working_directories(project, load, monkeypatch, tmp_path):
  write(project / 'lab/mine.gin', "include 'runs/run.gin'\nMODEL_DIR = 'm'\n")
  monkeypatch.chdir(project / 'app')
  config = load(['mine.gin'], search_paths=[str(project / 'lab'), str(project / 'gin_configs')])
  assert config.provenance.find('MODEL_DIR')[0].origin == 'mine.gin:2'
  assert config.provenance.find('TRAIN_STEPS')[0].origin == 'runs/run.gin:8'


def test_an_importable_folder_without_init_is_not_a_package(project, load):
  """gin 0.5.0's own resource reader raises a TypeError here (resource_reader.py:89)."""
  (project / 'elsewhere').mkdir()
  write(project / 'runs2/a.gin', "include 'gin_configs/runs/run.gin'\nMODEL_DIR = 'm'\n")
  assert load(['runs2/a.gin']).arguments()['model_dir'] == 'm'
  with raises(ConfigError):
    load(['runs2/b.gin'])


def test_a_missing_file_names_folders_and_the_closest_shipped(project, load, monkeypatch):
  package = project / 'site/t5x_gpu'
  write(package / 'gin_configs/examples/demo.gin', '')
  monkeypatch.setattr(gin_text, 'PACKAGE', package)
  with raises(ConfigError):
    load(['gin_configs/examples/dmeo.gin'])


def test_shipped_files_are_found_from_any_directory_in_a_wheel(project, load, monkeypatch):
  package = project / 'site/t5x_gpu'
  write(package / 'gin_configs/runs/shipped.gin', (project / 'my.gin').read_text())
  monkeypatch.setattr(gin_text, 'PACKAGE', package)
  config = load(['gin_configs/runs/shipped.gin'])
  assert config.provenance.find('BATCH_SIZE')[0].origin == 'gin_configs/runs/shipped.gin:3'


def test_circular_includes_stop(project, load):
  write(project / 'a.gin', "include 'b.gin'\n")
  write(project / 'b.gin', "include 'a.gin'\n")
  with raises(ConfigError):
    load(['a.gin'])


def test_a_file_in_the_folder_of_the_including_one_is_found_last(project, load):
  text = (project / 'my.gin').read_text()
  write(project / 'experiments/base.gin', text)
  write(project / 'experiments/mine.gin', "include 'base.gin'\n")
  assert load(['experiments/mine.gin']).provenance.find('BATCH_SIZE')
  write(project / 'base.gin', text.replace('BATCH_SIZE = ', 'BATCH_SIZE = 1'))
  assert (
    load(['experiments/mine.gin']).provenance.find('BATCH_SIZE')[0].origin.startswith('base.gin')
  )


def test_deep_includes_give_a_note(project, load):
  write(project / 'deep.gin', "include 'my.gin'\n")
  assert load(['my.gin']).notes == ()
  (note,) = load(['deep.gin']).notes
  assert note.startswith('my.gin:1 includes gin_configs/runs/run.gin')


def test_gin_stays_open_for_modules_imported_later(load):
  load(['my.gin'])
  assert not gin.config_is_locked()


def test_config_layer_imports_neither_jax_nor_tensorflow():
  code = (
    'import sys, t5x_gpu.config.gin_loader, t5x_gpu.config.report\n'
    "assert 'numpy' not in sys.modules\n"
    'import t5x_gpu.cli\n'  # it looks into MODEL_DIR by TensorStore, which imports numpy
    "print(sorted({'jax', 'tensorflow', 'seqio', 'flax'} & set(sys.modules)))"
  )
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
  assert done.stdout.strip() == '[]', done.stderr


def test_singletons_are_one_object(project, load):
  write(
    project / 'one.gin',
    'from __gin__ import dynamic_registration\n'
    'from app import train as train_script\n'
    'train_script.train.data = @shared/gin.singleton()\n'
    'train_script.train.eval_data = @shared/gin.singleton()\n'
    'shared/gin.singleton.constructor = @train/train_script.Data\nMODEL_DIR = "a"\n',
  )
  arguments = load(['my.gin', 'one.gin']).arguments()
  assert arguments['data'] is arguments['eval_data'] and arguments['data'].batch_size == 8


def test_files_may_hold_any_utf8_text(project, load):
  (project / 'u.gin').write_text('# größer\nMODEL_DIR = "läufe"\n', encoding='utf-8')
  assert load(['my.gin', 'u.gin']).arguments()['model_dir'] == 'läufe'


def test_names_of_an_earlier_load_are_forgotten(load):
  load(['my.gin'], bindings=['train.optimizer=@train_script.Adafactor()', 'Adafactor.decay=0.1'])
  with raises(ConfigError):
    load(['my.gin'], bindings=['train.optimizer=@Adafactor()'])


def test_a_value_with_a_line_break_is_one_string(load):
  assert load(['my.gin'], bindings=['MODEL_DIR=1\nB = 2']).arguments()['model_dir'] == '1\nB = 2'


def test_an_import_of_t5s_package_says_how_to_install_it(tmp_path):
  (tmp_path / 'my.gin').write_text(
    'from __gin__ import dynamic_registration\nfrom t5.data import mixtures\n'
  )
  with raises(ConfigError):
    gin_loader.load([tmp_path / 'my.gin'])
