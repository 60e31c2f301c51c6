"""The printed table, the files in MODEL_DIR, and the command `python -m t5x_gpu.config`."""

import io
import os
import re
import subprocess
import sys

import pytest
import rich.console

from t5x_gpu.config import gin_loader, report
from t5x_gpu.config.gin_text import PACKAGE, GinFiles
from t5x_gpu.errors import ConfigError
from tests.config.project import ENTRY, write
from tests.helpers_disk import fill, small_disk
from tests.messages import raises

TRICKY = [
  'MODEL_DIR=it\'s "a" long ' + 'path ' * 30,
  'AdamW.betas=(1e-9, 0.5)',
  'train.eval_data=None',
  "Data.lengths={'targets': %LENGTH, 'inputs': 3}",
  'train.layers=[-1, 2]',
]


def changed(config, model_dir='out', gin_files=()) -> list[str]:
  console = rich.console.Console(file=io.StringIO(), width=80)
  report.print_changes(
    config.provenance, files=GinFiles(), gin_files=gin_files, model_dir=model_dir, console=console
  )
  return console.file.getvalue().splitlines()


def printed(config, **kwargs) -> str:
  console = rich.console.Console(file=io.StringIO(), width=80, **kwargs)
  report.print_table(config.provenance, console=console)
  return console.file.getvalue()


def test_table_is_plain_lines_where_there_is_no_terminal(load):
  text = printed(load(['my.gin'], bindings=['train.dtype=bfloat16']))
  assert '\x1b' not in text
  row = next(line for line in text.splitlines() if line.startswith('train.total_steps'))
  assert row.split('   ')[0] == 'train.total_steps = 50 (%TRAIN_STEPS)'
  assert row.endswith('gin_configs/runs/run.gin:16   overrides 100 (default)')
  assert len(text.splitlines()) == len(
    load(['my.gin']).provenance.settings + load(['my.gin']).provenance.defaults
  )


def test_a_run_prints_only_what_the_user_changed_with_old_and_new_value_and_place(load):
  first, *changes = changed(load(['my.gin'], bindings=['train.dtype=bfloat16', 'LENGTH=16']))
  assert re.fullmatch(
    r'configuration: \d changed; all \d+ values, and who set them, in '
    r'out/config_origins.txt',
    first,
  )
  assert re.sub(' +', ' ', changes[0]) == (
    " train.dtype: 'float32' -> 'bfloat16' --gin.train.dtype"
  )
  assert re.search(r'^  BATCH_SIZE: 128 -> 8 +my.gin:3$', '\n'.join(changes), re.M)
  assert re.search(
    r'train.total_steps: 100 -> 50 +gin_configs/runs/run.gin:16$', '\n'.join(changes), re.M
  )
  assert not any('LENGTH' in change or 'train.model_dir' in change for change in changes)


def test_a_users_own_settings_come_first_in_their_order_and_names_of_the_rest_follow(project):
  """Sizes are late in the alphabet, and early in what a user writes."""
  sizes = ('vocab_size = 512', 'num_layers = 3', 'mlp_dim = 96', 'head_dim = 12', 'num_heads = 6')
  (project / 'sizes.gin').write_text(
    'from t5x_gpu.models import config\nconfig.TransformerConfig:\n'
    + ''.join(f'  {size}\n' for size in sizes)
  )
  (project / 'base.gin').write_text(
    "include 'gin_configs/examples/demo.gin'\n"
    'BATCH_SIZE = 24\nDROPOUT_RATE = 0.2\nEVAL_PERIOD = 7\nEVAL_STEPS = 3\nLEARNING_RATE = 0.5\n'
    'LOG_PERIOD = 3\nSAVE_PERIOD = 7\nRANDOM_SEED = 5\nWARMUP_STEPS = 3\nNUM_MICROBATCHES = 2\n'
    "LOGGERS = ('jsonl',)\n"
  )
  files = ['base.gin', 'sizes.gin']
  config = gin_loader.load(files, bindings=['TRAIN_STEPS=2'])
  first, *lines = changed(config, gin_files=files)
  assert first.startswith('configuration: 17 changed; all ')
  assert lines[0].startswith('  TRAIN_STEPS: 400 -> 2 ')
  names = [line.split(':')[0].strip() for line in lines[1:6]]
  assert names == [f'TransformerConfig.{size.split()[0]}' for size in sizes]
  assert lines[6].split() == ['BATCH_SIZE:', '8', '->', '24', 'base.gin:2']
  assert len(lines) == 16
  assert lines[15] == '  and 2 more, set in base.gin: NUM_MICROBATCHES, LOGGERS'


def test_files_of_the_package_change_nothing_and_a_copy_of_one_is_the_users(project):
  demo = 'gin_configs/examples/demo.gin'
  flags = ['TRAIN_STEPS=2', 'BATCH_SIZE=8']
  shipped = gin_loader.load([demo], bindings=flags)
  assert changed(shipped)[0].startswith('configuration: 1 changed; all ')
  assert changed(shipped)[1:] == ['  TRAIN_STEPS: 400 -> 2   --gin.TRAIN_STEPS']
  assert changed(gin_loader.load([demo]))[0].startswith('configuration: nothing changed; all ')
  (project / 'mine.gin').write_text((PACKAGE.parent / demo).read_text())
  mine = changed(gin_loader.load(['mine.gin']))
  line = next(
    i
    for i, text in enumerate((project / 'mine.gin').read_text().splitlines(), 1)
    if text.startswith('LOG_PERIOD')
  )
  assert re.search(rf'LOG_PERIOD: 100 -> 20 +mine.gin:{line}$', '\n'.join(mine), re.M)
  assert re.search(r"MODEL_DIR: not set -> 'runs/demo' +mine.gin:", '\n'.join(mine))


def test_table_has_colors_on_a_terminal_and_cuts_long_values(load):
  text = printed(load(['my.gin'], bindings=['MODEL_DIR=' + 'x' * 300]), force_terminal=True)
  assert '\x1b[' in text and 'x' * 100 not in text and 'xxx...' in text


def test_written_config_gives_the_same_run(project, load):
  first = load(['my.gin'], bindings=TRICKY)
  arguments = first.arguments()
  report.write(first.provenance, project / 'out')
  again = load([project / 'out/config.gin'])
  got = again.arguments()
  # Functions and objects are rebuilt by gin; their values must agree.
  for name in ('model_dir', 'data', 'eval_data', 'total_steps', 'layers'):
    assert got[name] == arguments[name]
  assert got['optimizer'].betas == (1e-9, 0.5)
  assert got['optimizer'].schedule(5) == arguments['optimizer'].schedule(5)
  assert again.provenance.config == first.provenance.config


def test_written_config_leaves_out_what_an_override_made_idle(project, load):
  config = load(['my.gin'], bindings=['MODEL_DIR=a', 'train.optimizer=@train_script.Adafactor()'])
  assert config.notes
  report.write(config.provenance, project / 'out')
  assert load([project / 'out/config.gin']).notes == ()


def test_origins_file_lists_settings_and_defaults(project, load):
  report.write(load(['my.gin']).provenance, project / 'out')
  text = (project / 'out/config_origins.txt').read_text()
  assert 'my.gin:3' in text and 'overrides 128 (gin_configs/runs/run.gin:5)' in text
  assert 'AdamW.betas = (0.9, 0.999)' in text.split('# Defaults')[1]


def test_a_different_earlier_config_is_kept_and_the_changes_reported(project, load):
  out = project / 'out'
  assert report.write(load(['my.gin']).provenance, out) == []
  first = (out / 'config.gin').read_text()
  assert report.write(load(['my.gin']).provenance, out) == []
  assert sorted(os.listdir(out)) == ['config.gin', 'config_origins.txt']
  changed = load(['my.gin'], bindings=['BATCH_SIZE=9', 'train.dtype=bfloat16'])
  changes = report.write(changed.provenance, out)
  assert changes == ['BATCH_SIZE: 8 -> 9', "train_script.train.dtype: not set -> 'bfloat16'"]
  assert (out / 'config_1.gin').read_text() == first
  assert 'my.gin:3' in (out / 'config_origins_1.txt').read_text()
  report.write(load(['my.gin']).provenance, out)
  assert sorted(os.listdir(out)) == [
    'config.gin',
    'config_1.gin',
    'config_2.gin',
    'config_origins.txt',
    'config_origins_1.txt',
    'config_origins_2.txt',
  ]


def test_killed_while_writing_leaves_whole_files_and_loses_none(project, load, monkeypatch):
  out = project / 'out'
  report.write(load(['my.gin']).provenance, out)
  first = (out / 'config.gin').read_text()
  changed = load(['my.gin'], bindings=['BATCH_SIZE=9']).provenance
  real, calls = os.replace, []
  for survive in range(3):  # Dies at each rename in turn.

    def replace(a, b, calls=calls, survive=survive):
      calls.append(b)
      if len(calls) > survive:
        raise KeyboardInterrupt
      real(a, b)

    calls.clear()
    monkeypatch.setattr(os, 'replace', replace)
    with pytest.raises(KeyboardInterrupt):
      report.write(changed, out)
    assert (out / 'config.gin').read_text() == first
  monkeypatch.setattr(os, 'replace', real)
  report.write(changed, out)
  assert (out / 'config_1.gin').read_text() == first
  assert not (out / 'config_2.gin').exists()


def test_a_config_edited_by_hand_is_kept_too(project, load):
  write(project / 'out/config.gin', 'this is not gin\n')
  changes = report.write(load(['my.gin']).provenance, project / 'out')
  assert '-this is not gin' in changes
  assert (project / 'out/config_1.gin').read_text() == 'this is not gin\n'


def test_an_unwritable_folder_is_a_clear_error(project, load):
  write(project / 'file', '')
  with raises(ConfigError):
    report.write(load(['my.gin']).provenance, project / 'file/out')


@pytest.mark.process
def test_a_full_disk_is_a_clear_error(project, load):
  with small_disk(project / 'disk', size='64k') as disk:
    fill(disk)
    with raises(ConfigError):
      report.write(load(['my.gin']).provenance, disk / 'out')


def test_explain_follows_macros_and_names_users(load):
  provenance = load(['my.gin'], bindings=['BATCH_SIZE=9']).provenance
  assert report.explain(provenance, 'train/Data.batch_size') == [
    'train/Data.batch_size = %BATCH_SIZE   gin_configs/runs/run.gin:18',
    '  BATCH_SIZE = 9   --gin.BATCH_SIZE',
    '    overrides 8   my.gin:3',
    '    overrides 128   gin_configs/runs/run.gin:5',
  ]
  assert report.explain(provenance, 'BATCH_SIZE')[-1] == (
    '  used by train/Data.batch_size   gin_configs/runs/run.gin:18'
  )
  assert report.explain(provenance, 'betas') == ['AdamW.betas = (0.9, 0.999)   default']
  with raises(ConfigError):
    report.explain(provenance, 'warmpu')


def config_command(project, *args, stdout=subprocess.PIPE) -> subprocess.CompletedProcess:
  root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
  return subprocess.run(
    [sys.executable, '-m', 't5x_gpu.config', *args, f'--entry={ENTRY}'],
    cwd=project,
    env={**os.environ, 'PYTHONPATH': root},
    stdout=stdout,
    stderr=subprocess.PIPE,
    text=True,
    timeout=60,
  )


def test_command_explains_one_key(project):
  done = config_command(project, 'explain', '--gin_file', 'my.gin', 'BATCH_SIZE')
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines()[:2] == [
    'BATCH_SIZE = 8   my.gin:3',
    '  overrides 128   gin_configs/runs/run.gin:5',
  ]


def test_command_shows_all(project):
  done = config_command(project, 'show', '--gin_file=my.gin', '--gin.TRAIN_STEPS', '5')
  assert done.returncode == 0, done.stderr
  row = next(line for line in done.stdout.splitlines() if line.startswith('TRAIN_STEPS'))
  assert row.split() == [
    'TRAIN_STEPS',
    '=',
    '5',
    '--gin.TRAIN_STEPS',
    'overrides',
    '50',
    '(gin_configs/runs/run.gin:8)',
  ]


def test_command_shows_what_differs(project):
  done = config_command(project, 'diff', 'my.gin', 'gin_configs/runs/run.gin')
  assert done.stdout.splitlines() == [
    'BATCH_SIZE: 8 (my.gin:3) -> 128 (gin_configs/runs/run.gin:5)',
    'train/Data.batch_size: 8 (my.gin:3) -> 128 (gin_configs/runs/run.gin:5)',
  ]
  assert config_command(project, 'diff', 'my.gin', 'my.gin').stdout == 'No value differs.\n'


def test_a_closed_pipe_is_not_an_error(project):
  read, written = os.pipe()
  os.close(read)
  done = config_command(project, 'show', '--gin_file=my.gin', stdout=written)
  os.close(written)
  assert 'Traceback' not in done.stderr and 'BrokenPipe' not in done.stderr


@pytest.mark.parametrize(
  'args, expected',
  [
    (['explain', 'BATCHSIZE', '--gin_file=my.gin'], "Did you mean 'BATCH_SIZE'"),
    (['explain', '--gin_file=my.gin'], 'explain takes 1 name(s), got 0'),
    (['show'], 'No --gin_file is given.'),
    (['diff', 'my.gin'], 'diff takes 2 name(s), got 1'),
    (['shwo'], "invalid choice: 'shwo'"),
  ],
)
def test_command_mistakes_exit_1_without_a_traceback(project, args, expected):
  done = config_command(project, *args)
  assert done.returncode == 1
  assert done.stderr.startswith('ConfigError: ') and expected in done.stderr
  assert 'Traceback' not in done.stderr
