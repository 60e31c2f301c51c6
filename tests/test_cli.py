"""Flags mean what T5X users type; errors come with a remedy, their origins and exit code 1."""

import ast
import errno
import pathlib
import subprocess
import sys

import pytest

from t5x_gpu import __main__, cli, launch
from t5x_gpu.config import gin_loader, provenance, report
from t5x_gpu.errors import AccessError, ConfigError, MeshError
from t5x_gpu.reporting import run_record
from tests.helpers_disk import refused_to_python
from tests.messages import raises

PROG = 'python -m t5x_gpu.train'


def parse(*argv, **kwargs):
  return cli.parse_args(PROG, 'Trains a model.', argv, **kwargs)


def test_gin_files_repeat_and_split_at_commas():
  args = parse('--gin_file=a.gin', '--gin_file', 'b.gin,c.gin', '--gin_search_paths=x, y')
  assert args.gin_files == ('a.gin', 'b.gin', 'c.gin')
  assert args.gin_search_paths == ('x', 'y')
  assert (args.dry_run, args.tfds_data_dir, args.bindings) == (False, None, ())


def test_a_file_that_exists_is_one_file_also_with_commas_or_in_the_home_folder(
  tmp_path, monkeypatch
):
  monkeypatch.setenv('HOME', str(tmp_path))
  (tmp_path / 'a,b .gin').touch()
  argv = [f'--gin_file={folder}/a,b .gin' for folder in ('~', tmp_path)]
  assert parse(*argv).gin_files == ('~/a,b .gin', f'{tmp_path}/a,b .gin')


def test_tensorflow_gets_the_folder_of_its_data_sets_without_dots(tmp_path, monkeypatch):
  (tmp_path / 'disk' / 'deep').mkdir(parents=True)
  (tmp_path / 'link').symlink_to('disk/deep')
  monkeypatch.chdir(tmp_path)
  assert parse('--gin_file=a', '--tfds_data_dir=link/../a').tfds_data_dir == f'{tmp_path}/disk/a'


def test_gin_bindings_in_both_forms_keep_their_order():
  args = parse(
    '--gin.A=1',
    '--gin_file=a.gin',
    '--gin.train/DatasetConfig.batch_size',
    '8',
    '--dry_run',
    '--gin.LR=-5',
    '--gin.B',
    '-5',
    '--gin.C=a=b',
    '--gin.D=[1, 2]',
  )
  assert args.bindings == (
    'A=1',
    'train/DatasetConfig.batch_size=8',
    'LR=-5',
    'B=-5',
    'C=a=b',
    'D=[1, 2]',
  )
  assert args.dry_run


def test_entry_points_add_flags():
  args = parse(
    '--gin_file=a',
    '--num_steps',
    '5',
    extra=lambda p: p.add_argument('--num_steps', type=int, default=3),
  )
  assert vars(args.extra) == {'num_steps': 5}


@pytest.mark.parametrize(
  'argv',
  [
    ['--gin_flie=a.gin'],
    ['--gin-file=a.gin'],
    ['--dryrun'],
    ['--model_dir=a'],
    ['--batch-size', '8'],
    ['--gn.batch_size=8'],
    ['--gin_bindings=A=1'],
    ['--dry_run=maybe'],
    ['--run_mode=precompile'],
    ['--run_mode', 'eval'],
    ['my.gin'],
    ['now'],
    ['--gin.A'],
    ['--gin.A', '--dry_run'],
    ['--gin_file'],
    ['--num_steps=x'],
  ],
)
def test_mistakes_name_the_flag_and_the_fix(argv):
  with raises(ConfigError):
    parse(
      '--gin_file=a.gin', *argv, extra=lambda p: p.add_argument('--num_steps', type=int, default=3)
    )


@pytest.mark.parametrize(
  'argv, note',
  [
    (['--multiprocess_gpu'], 'the launcher of several processes is detected'),
    (['--nomultiprocess_gpu'], 'is detected'),
    (['--logtostderr', '--alsologtostderr=true'], 'log lines'),
    (['--stderrthreshold', 'info'], 'log lines'),
    (['--jax_backend_target=grpc://x'], 'JAX_PLATFORMS'),
    (['--run_mode=train'], ''),
    (['--run_mode', 'train'], ''),
    (['--nodry_run'], ''),
    (['--dry_run=False'], ''),
  ],
)
def test_flags_of_t5x_that_change_nothing_are_accepted_and_named(argv, note, capsys):
  args = parse('--gin_file=a.gin', *argv)
  assert args.gin_files == ('a.gin',) and not args.dry_run
  said = capsys.readouterr().err
  assert note in said and bool(said) == bool(note)


def test_dry_run_is_a_boolean_flag_as_in_t5x():
  assert parse('--gin_file=a.gin', '--dry_run=True').dry_run


def test_no_gin_file_names_the_examples():
  with raises(ConfigError):
    parse('--dry_run')
  assert parse('--dry_run', gin_file_required=False).gin_files == ()


def test_help_shows_examples_and_every_flag(capsys):
  with pytest.raises(SystemExit) as e:
    parse('--help')
  text = capsys.readouterr().out
  assert e.value.code == 0
  for part in (
    'Trains a model.',
    '--gin_file',
    '--gin.X',
    '--gin_search_paths',
    '--tfds_data_dir',
    '--dry_run',
    f'{PROG} --gin_file=my.gin --gin.MODEL_DIR=runs/a',
    'explain BATCH_SIZE',
  ):
    assert part in text
  assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize('command', __main__.COMMANDS)
def test_every_command_of_the_console_script_has_help(command, monkeypatch, capsys):
  monkeypatch.setattr('sys.argv', ['t5x_gpu', command, '--help'])
  with pytest.raises(SystemExit) as e:
    __main__.main()
  text = capsys.readouterr().out
  assert e.value.code == 0 and f'python -m t5x_gpu.{command}' in text
  assert ('--gin_file FILE' in text) == (
    command not in ('launch', 'doctor', 'checkpoint', 'reshard', 'report', 'top')
  )


def test_the_console_script_hands_its_arguments_to_the_command(monkeypatch, capsys):
  monkeypatch.setattr(
    'sys.argv',
    ['t5x_gpu', 'config', 'explain', 'EVAL_STEPS', '--gin_file=gin_configs/examples/demo.gin'],
  )
  with pytest.raises(SystemExit) as e:
    __main__.main()
  assert e.value.code == 0
  assert 'EVAL_STEPS = 10   gin_configs/examples/demo.gin:' in capsys.readouterr().out


@pytest.mark.parametrize(
  'flag', ['--gin_file=a.gin', '--gin.A=1', '--dry_run', '--tfds_data_dir=a']
)
def test_flags_of_the_run_before_the_dashes_of_launch_start_nothing(flag):
  with raises(ConfigError):
    launch.main(['--nproc=1', '--no_gpu', flag, '--', '--help'])


def exit_code(main) -> int:
  with pytest.raises(SystemExit) as e:
    cli.run_main(main)
  return e.value.code


def test_success_exits_0_or_with_the_code_of_main():
  assert exit_code(lambda: None) == 0
  assert exit_code(lambda: 7) == 7


def test_user_errors_print_class_fix_and_docs_without_a_traceback(capsys):
  def main():
    raise MeshError('16 GPUs cannot form 32.', fix='Set data = 1.', docs='mesh.md#sizes')

  assert exit_code(main) == 1
  assert capsys.readouterr().err == (
    'MeshError: 16 GPUs cannot form 32.\n  Set data = 1.\n  See docs/mesh.md#sizes\n'
  )


def test_user_errors_of_gin_constructors_say_where_the_parameter_was_set(
  tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / 'cli_app.py').write_text(
    'from t5x_gpu.errors import MeshError\n'
    'class Mesh:\n  def __init__(self, n: int, m: int = 2):\n'
    "    raise MeshError(f'{n} is odd.', parameters=('Mesh.n', 'Mesh.m', 'Mesh.other'))\n"
    'def train(*, mesh: Mesh): pass\n'
  )
  (tmp_path / 'a.gin').write_text(
    'from __gin__ import dynamic_registration\n'
    'import cli_app\nN = 3\n'
    'cli_app.train.mesh = @cli_app.Mesh()\ncli_app.Mesh.n = %N\n'
  )
  assert exit_code(lambda: gin_loader.load(['a.gin'], entry='cli_app.train').arguments()) == 1
  assert capsys.readouterr().err == (
    'MeshError: 3 is odd.\n  Mesh.n is set at a.gin:3, through %N at a.gin:5.\n'
    '  Mesh.m is 2, its default; nothing sets it.\n'
  )


def test_ctrl_c_exits_130_and_other_errors_show_their_traceback(capsys):
  def interrupted():
    raise KeyboardInterrupt

  assert exit_code(interrupted) == 130
  assert 'Traceback' not in capsys.readouterr().err

  def broken():
    raise RuntimeError('bug')

  provenance.forget()
  assert exit_code(broken) == 1
  error = capsys.readouterr().err
  assert 'Traceback' in error and 'RuntimeError: bug' in error


def test_a_file_that_the_system_refuses_is_named_without_a_traceback(capsys):
  def main():
    raise OSError(errno.EACCES, 'Permission denied', 'runs/a')

  with pytest.raises(SystemExit) as e:
    cli.run_main(main)
  error = capsys.readouterr().err
  assert e.value.code == 1 and 'Traceback' not in error
  assert error.startswith('AccessError: runs/a cannot be used: Permission denied (EACCES).\n')
  assert 'namei -l' in error and 'docs/checkpoints.md#no-access' in error


def test_a_system_exit_of_main_keeps_its_code():
  def main():
    raise SystemExit(3)

  assert exit_code(main) == 3


@pytest.mark.tf
def test_the_data_decides_the_number_of_classes_if_only_a_model_file_does(tmp_path, monkeypatch):
  for name in ('train', 'dev'):
    (tmp_path / f'{name}.csv').write_text('text,label\na,x\nb,y\nc,z\n')
  files = ['--gin_file=gin_configs/examples/encoder_demo.gin', f'--gin.MODEL_DIR={tmp_path}']
  task = f'--gin.MIXTURE_OR_TASK_NAME=classification:csv:{tmp_path}/*.csv'

  def number(*flags):
    loaded = cli.parse_args('train', '', [*files, task, *flags]).load_with_classes()
    return loaded.arguments(only=['model'])['model'].num_classes, loaded.notes

  found, notes = number()
  assert found == 3 and 'NUM_CLASSES = 3: the data has that many classes' in notes[-1]
  assert number('--gin.NUM_CLASSES=5')[0] == 5
  assert number('--gin.DatasetConfig.module=t5x_gpu.data.synthetic')[0] == 16
  number()
  assert provenance.origin_sentences('NUM_CLASSES') == ['NUM_CLASSES is set by the training data.']
  report.write(provenance.current(), tmp_path)
  assert run_record.read_settings(tmp_path, [])['NUM_CLASSES'].origin == 'the training data'
  (tmp_path / 'config.gin').write_text('# of a run\nNUM_CLASSES = 4\n')
  assert number()[0] == 4
  assert 'by the start of this run' in provenance.origin_sentences('NUM_CLASSES')[0]
  monkeypatch.setenv('HOME', str(tmp_path.parent))
  assert number(f'--gin.MODEL_DIR=~/{tmp_path.name}')[0] == 4
  with refused_to_python('config.gin', errno.EMFILE), raises(AccessError):
    number()


def test_a_machine_that_cannot_write_temporary_files_gets_an_error_with_a_fix():
  program = (
    'import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n'
    'from t5x_gpu import cli\n'
    "cli.run_main(lambda: cli.parse_args('train', '', ['--gin_file=a.gin']).load())"
  )
  done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert done.stderr.startswith('AccessError: No usable temporary directory found in')
  assert 'TMPDIR' in done.stderr


@pytest.mark.parametrize('command', ['train', 'eval', 'infer', 'prepare'])
def test_a_command_that_gin_or_workers_import_runs_under_its_own_name(command):
  # Otherwise its module exists twice: as `__main__`, and as what they import.
  path = pathlib.Path(cli.__file__).with_name(f'{command}.py')
  (block,) = [
    node
    for node in ast.parse(path.read_text(encoding='utf-8')).body
    if isinstance(node, ast.If) and '__main__' in ast.unparse(node.test)
  ]
  first, run = map(ast.unparse, block.body)
  assert first == f'from t5x_gpu.{command} import main as main_'
  assert run == 'cli.run_main(main_)'
