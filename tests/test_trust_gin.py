"""The gin file of a checkpoint folder is data: no command runs its code, unless asked to."""

import re
import shutil
import sys

import pytest

from t5x_gpu import convert, eval, infer, parity, reshard, train
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.config import gin_loader, report
from t5x_gpu.config.gin_text import GinFiles
from t5x_gpu.data import data_module
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import check_trusted
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation import infer_request
from tests.helpers_prepared import prepare_here
from tests.helpers_train import TINY_GIN, compiled_kept_in, run_here
from tests.messages import raises
from tests.test_infer import DECODE, write_run

MODEL = """from __gin__ import dynamic_registration
from t5x_gpu.models import config
from t5x_gpu.models import decoder_only

MODEL = @decoder_only.DecoderOnlyModel()
decoder_only.DecoderOnlyModel.config = @config.TransformerConfig()
config.TransformerConfig:
  vocab_size = 264
  num_layers = 1
  embed_dim = 16
  num_heads = 8
  head_dim = 4
  mlp_dim = 32
  scan_unroll = 1
"""
EVIL = "open('ran', 'w').close()\ndef get(**kwargs):\n  return 0.0\n"
CALL = "subprocess.getoutput.cmd = 'touch ran'\n"
# What is added to the imports, what replaces `mlp_dim = 32`, what is added at the end.
ATTACKS = {
  'a called reference': ('import subprocess', 'mlp_dim = @subprocess.getoutput()', CALL),
  'a scoped one': ('import subprocess', 'mlp_dim = @a/b/subprocess.getoutput()', CALL),
  'in a list': ('import subprocess', 'windows = (None, [@subprocess.getoutput()])', CALL),
  'as a key': ('import subprocess', 'rope = {@subprocess.getoutput(): 1}', CALL),
  'through macros': (
    'import subprocess',
    'mlp_dim = %A',
    'A = %B\nB = @subprocess.getoutput()\n' + CALL,
  ),
  'a module that does it on import': ('import evil', 'mlp_dim = @evil.get()', ''),
  'a reference that is not called': ('import evil', 'mlp_dim = @evil.get', ''),
  'through a t5x_gpu module': (
    'from t5x_gpu import launch',
    'mlp_dim = @launch.subprocess.getoutput()',
    "launch.subprocess.getoutput.cmd = 'touch ran'\n",
  ),
  'a t5x_gpu function': (
    'from t5x_gpu import cli',
    'mlp_dim = @cli.run_main()',
    'cli.run_main.main = @evil.get',
  ),
  'one name for two modules': ('import evil as config', 'mlp_dim = 32', ''),
  'a macro with the name of a function': (
    'import evil',
    'mlp_dim = %evil.get',
    'evil.get.x = 1\nMLP = %evil.get\n',
  ),
  'another file': ("include 'evil.gin'", 'mlp_dim = 32', ''),
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  """The working directory of a user, with a module and a gin file in the way."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / 'evil.py').write_text(EVIL)
  (tmp_path / 'p.txt').write_text('import os\n')
  (tmp_path / 'evil.gin').write_text('import evil\n')
  yield tmp_path
  sys.modules.pop('evil', None)


# Files that fail on their own: their values have the wrong types, or their names clash.
FAIL_ANYWAY = ('in a list', 'as a key', 'a t5x_gpu function')


def attacked(text: str, name: str) -> str:
  imports, value, end = ATTACKS[name]
  first, rest = text.split('\n', 1)
  assert first == 'from __gin__ import dynamic_registration'
  return f'{first}\n{imports}\n' + re.sub(r'mlp_dim = 32\b', value, rest) + end


@pytest.mark.parametrize('name', ATTACKS)
def test_nothing_that_a_model_file_names_runs(folder, name):
  (folder / 'model.gin').write_text(attacked(MODEL, name))
  with raises(ConfigError) as error:
    convert.object_of_gin(['model.gin'], as_data=True)
  assert re.search(r'model\.gin:\d+ (names @|includes |imports )', str(error.value)) or (
    'nothing sets evil.get' in str(error.value)
  )
  assert not (folder / 'ran').exists()


def test_the_attacks_would_work(folder):
  for name in ATTACKS:
    (folder / 'ran').unlink(missing_ok=True)
    sys.modules.pop('evil', None)
    (folder / 'model.gin').write_text(attacked(MODEL, name))
    try:
      convert.object_of_gin(['model.gin'])
    except Exception:
      pass  # the result is not a model
    assert (folder / 'ran').exists() or name in FAIL_ANYWAY, name


@pytest.mark.parametrize('first', ['', 'import __gin__.dynamic_registration\n'])
def test_names_that_are_not_of_imports_lead_nowhere(folder, first):
  (folder / '__gin__').mkdir()
  (folder / '__gin__/dynamic_registration.py').write_text(EVIL)
  (folder / 'model.gin').write_text(first + MODEL.split('\n', 1)[1])
  with raises(ConfigError):
    convert.object_of_gin(['model.gin'], as_data=True)
  assert not (folder / 'ran').exists()


def test_what_a_command_does_not_need_is_left_out_unread(folder):
  (folder / 'model.gin').write_text(
    MODEL.replace('from t5x', 'import evil\nimport nowhere\nfrom t5x', 1)
    + 'OPTIMIZER = @evil.get()\nevil.get.x = @nowhere.f()\nA = %B\n'
  )
  assert convert.object_of_gin(['model.gin'], as_data=True).config.mlp_dim == 32
  assert not (folder / 'ran').exists()


@pytest.mark.parametrize(
  'line, says',
  [
    ("mlp_dim = '32'", 'mlp_dim'),
    ('mlp_dimension = 32', 'did you mean'),
    ('mlp_dim = -4', 'mlp_dim'),
  ],
)
def test_values_are_checked_as_those_of_any_gin_file(folder, line, says):
  (folder / 'model.gin').write_text(MODEL.replace('mlp_dim = 32', line))
  with pytest.raises(Exception, match=f'(?i){says}') as error:
    convert.object_of_gin(['model.gin'], as_data=True)
  assert 'model.gin' in str(error.value) or line.startswith('mlp_dim = -')


def test_brackets_without_end_are_an_error_of_ours(folder):
  (folder / 'model.gin').write_text(MODEL + 'A = ' + '[' * 5000 + ']' * 5000 + '\n')
  with raises(ConfigError):
    convert.object_of_gin(['model.gin'], as_data=True)


@pytest.mark.parametrize('name', GinFiles().shipped('examples'))
def test_the_shipped_examples_run_without_trust(folder, name):
  loaded = gin_loader.load([name], bindings=['MODEL_DIR=run'])
  wanted = infer_request.RUN_SETTINGS
  (folder / 'config.gin').write_text(loaded.provenance.config)
  expected = loaded.arguments(only=wanted)
  as_data = gin_loader.load(['config.gin'], read_as_data={'config.gin': wanted})
  assert as_data.arguments(only=wanted) == expected


@pytest.mark.parametrize(
  'given',
  [
    dict(mixture_or_task_module='evil'),
    dict(module='evil'),
    dict(mixture_or_task_name='tfds:huggingface:x'),
    dict(mixture_or_task_name='mlm:tfds:3d:9'),
    dict(mixture_or_task_name='tfds:ns:x#text=tfds:y'),
  ],
)
def test_a_task_that_would_import_is_refused(folder, given):
  config = DatasetConfig(
    **{
      'mixture_or_task_name': 'python_source',
      'split': 'train',
      'task_feature_lengths': {'targets': 8},
      'batch_size': 1,
    }
    | given
  )
  for function in ('prompt_text', 'class_text'):
    with raises(ConfigError):
      data_module.open_text(config, function, may_import=(), model_vocab_size=264)
    assert not (folder / 'ran').exists()


def test_prepared_rows_of_a_task_that_would_import_are_too(folder):
  prepare_here(f'text_lines:{folder}/p.txt', folder / 'rows', num_parts=1)
  config = DatasetConfig(f'prepared:{folder}/rows', {'targets': 32}, 'train', 1)
  options = dict(feature_converter='lm', model_vocab_size=264, has_inputs=False)
  with raises(ConfigError):
    data_module.open_text(config, 'prompt_text', may_import=(), **options)
  text = data_module.open_text(config, 'prompt_text', may_import=('tests.mixed_tasks',), **options)
  assert text.name == 'byte'


@pytest.mark.parametrize(
  'name',
  [
    'tfds:glue/cola:2.0.0#text=sentence',
    'tfds:imdb_reviews',
    'tfds:a/b:*.*.*',
    'jsonl:/data/tfds/*.jsonl',
    '',
  ],
)
def test_tasks_that_import_nothing_are_not(name):
  check_trusted(
    DatasetConfig(name, {}, 'train', 1, mixture_or_task_module='t5x_gpu.data.tasks.builtin'), ()
  )


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('trust') / 'run'
  write_run(folder, TINY_GIN)
  with compiled_kept_in(folder / 'compiled'):
    yield folder


@pytest.fixture
def hostile(run, folder):
  """Returns a function that makes a MODEL_DIR whose config.gin has an attack."""

  def make(name=None, **replaced):
    path = folder / 'stranger'
    path.mkdir()
    shutil.copytree(run / 'checkpoint_3', path / 'checkpoint_3')
    text = (run / 'config.gin').read_text()
    for old, new in replaced.items():
      text = re.sub(rf'^{old} = .*', f'{old} = {new}', text, flags=re.MULTILINE)
    (path / 'config.gin').write_text(attacked(text, name) if name else text)
    return path

  return make


@pytest.mark.parametrize('flags', [['--dry_run'], ['--interactive'], []])
def test_infer_runs_nothing_and_names_the_fix(hostile, folder, flags):
  path = hostile('a called reference')
  result = run_here(lambda: infer.main([f'--checkpoint={path}', *flags]), num_devices=1)
  assert result.code == 1 and 'stranger/config.gin:' in result.err
  assert '@subprocess.getoutput()' in result.err and '--trust_gin' in result.err
  assert not (folder / 'ran').exists()


def test_infer_runs_the_file_when_asked_and_says_so(hostile, folder):
  path = hostile(MIXTURE_OR_TASK_MODULE="'evil'")
  argv = [f'--checkpoint={path}', '--dry_run', '--prompts=p.txt']
  refused = run_here(lambda: infer.main(argv), num_devices=1)
  assert refused.code == 1 and "mixture_or_task_module = 'evil'" in refused.err
  assert not (folder / 'ran').exists()
  trusted = run_here(lambda: infer.main([*argv, '--trust_gin']), num_devices=1)
  assert trusted.code == 0 and (folder / 'ran').exists(), trusted.err
  assert f'--trust_gin: running {path}/config.gin' in trusted.err
  both = run_here(lambda: infer.main([*argv, '--trust_gin', '--gin_file=my.gin']))
  assert both.code == 1 and 'Leave one of them out' in both.err


@pytest.mark.parametrize(
  'value, names',
  [
    ('my_tasks', ['my_tasks']),
    ("'my.tasks'", ['my.tasks']),
    ('["one", "two.tasks"]', ['one', 'two.tasks']),
    ("('one',)", ['one', '']),
    # A folder in a path is not a module.
    ("'sentencepiece:evil/sp.model'", ['sentencepiece:evil/sp.model']),
  ],
)
def test_only_whole_names_on_the_command_line_may_be_imported(value, names):
  assert infer_request._items(value) == names


def test_infer_works_without_a_task_given_a_vocabulary_and_prompts(hostile, folder):
  path = hostile(MIXTURE_OR_TASK_MODULE="'evil'")
  result = run_here(
    lambda: infer.main([f'--checkpoint={path}', '--vocabulary=byte', '--prompts=p.txt', *DECODE]),
    num_devices=1,
  )
  assert result.code == 0 and '"inputs": "import os"' in result.out, result.err
  assert not (folder / 'ran').exists()


def test_a_module_on_the_command_line_is_imported(hostile, folder):
  path = hostile(MIXTURE_OR_TASK_MODULE="'nowhere'")
  result = run_here(
    lambda: infer.main(
      [f'--checkpoint={path}', '--dry_run', '--prompts=p.txt', '--gin.MIXTURE_OR_TASK_MODULE=evil']
    ),
    num_devices=1,
  )
  assert result.code == 0 and (folder / 'ran').exists(), result.err


def test_own_parts_that_infer_does_not_need_are_in_nobodys_way(hostile, folder):
  path = hostile(OPTIMIZER='@evil.get()')
  text = (path / 'config.gin').read_text()
  (path / 'config.gin').write_text(text.replace('from t5x_gpu', 'import evil\nfrom t5x_gpu', 1))
  result = run_here(
    lambda: infer.main([f'--checkpoint={path}', '--dry_run', '--prompts=p.txt']), num_devices=1
  )
  assert result.code == 0 and not (folder / 'ran').exists(), result.err


def test_convert_runs_nothing_unless_asked(hostile, folder):
  path = hostile('a module that does it on import')
  argv = [f'--from={path}', f'--to={folder}/out', '--check=tensors']
  refused = run_here(lambda: convert.main(argv))
  assert refused.code == 1 and 'config.gin:' in refused.err and '--trust_gin' in refused.err
  assert not (folder / 'ran').exists() and not (folder / 'out').exists()
  trusted = run_here(lambda: convert.main([*argv, '--trust_gin']))
  assert f'--trust_gin: running {path}/config.gin' in trusted.out and (folder / 'ran').exists()
  useless = run_here(lambda: convert.main([*argv, '--trust_gin', f'--gin_file={path}/config.gin']))
  assert useless.code == 1 and 'Leave one of them out' in useless.err


def test_other_commands_do_not_read_the_file(hostile, run, folder):
  path = hostile('a module that does it on import')
  given = [
    f'--gin_file={run}/config.gin',
    '--dry_run',
    f'--gin.MODEL_DIR={path}',
    '--gin.DATA_MODULE=t5x_gpu.data.synthetic',
  ]
  evaluated = run_here(lambda: eval.main([*given, '--batches=1']), num_devices=1)
  compared = run_here(lambda: parity.main(given), num_devices=1)
  resharded = run_here(lambda: reshard.main([f'--from={path}', f'--to={folder}/new']))
  shutil.rmtree(path / 'checkpoint_3')  # it has parameters alone
  trained = run_here(lambda: train.main(given), num_devices=1)
  for result in (evaluated, compared, resharded, trained):
    assert result.code == 0, result.err
  assert ParamsReader(folder / 'new').step == 3
  assert (folder / 'new/config.gin').read_bytes() == (path / 'config.gin').read_bytes()
  # A run that begins there compares the file with its own, and keeps it.
  changes = report.write(gin_loader.load([run / 'config.gin']).provenance, path)
  assert any('@evil.get()' in change for change in changes)
  assert not (folder / 'ran').exists()
