"""Every script of benchmarks/ and scripts/ runs; here at tiny sizes, and its figures are unused."""

import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from benchmarks import cpu
from benchmarks.ranks import OWN_NETWORK
from t5x_gpu.terminal.progress import ProgressLine
from tests.aot.marks import MARKS
from tests.helpers_train import REPOSITORY, Project
from tests.helpers_xla import xla_flags

# Runs `main` of a script with other constants, and with its results in another file.
DRIVER = """
import importlib, pathlib, sys
name, constants, out = sys.argv[1:4]
sys.argv[1:] = sys.argv[4:]
module = importlib.import_module(name)
for key in ('OUT', 'RESULTS'):
  if hasattr(module, key):
    setattr(module, key, pathlib.Path(out))
for line in constants.splitlines():
  for key in line.partition(' = ')[0].split(', '):
    assert hasattr(module, key), f'{name} has no constant {key}'
exec(constants, vars(module))
module.main()
"""
STEP = 'BATCH, LENGTH, LAYERS, EMBED, MLP = 1, 16, 1, 48, 32'
SMALL = [
  f'--gin.TransformerConfig.{name}={value}'
  for name, value in (('num_layers', 1), ('embed_dim', 16), ('mlp_dim', 32), ('scan_unroll', 1))
]
RUN = [
  *SMALL,
  '--gin.DatasetConfig.module=t5x_gpu.data.synthetic',
  '--gin.train/DatasetConfig.batch_size=2',
  '--gin.TASK_FEATURE_LENGTHS={"targets": 32}',
  '--gin.TRAIN_STEPS=2',
  '--gin.SAVE_PERIOD=1',
  '--gin.EVAL_PERIOD=None',
  '--gin.train.sample_cfg=None',
]
TINY = (
  'MODEL = TransformerConfig(vocab_size=256, num_layers=1, embed_dim=16, num_heads=2, '
  'head_dim=8, mlp_dim=32)'
)
# Script -> (constants, flags). `{tiny}` is a gin file of a very small GPT-2.
TINY_RUNS = {
  'agents': ('', ['--hosts', '4', '--out', '{out}']),
  'attention_cpu': ('REPEATS, TOKENS = 1, 64', ['32']),
  'bare_step': (STEP, ['--steps', '1']),
  'checkpoints': ("BUDGETS = ('512MiB',)", ['--rounds', '1', '--model', '{tiny}']),
  'convert': ('', ['--model', '{tiny}']),
  'cpu': (f"RUNS = {{'decoder_14m': {RUN!r}}}\nBARE_STEPS = ['--steps', '1']", ['--repeats', '1']),
  'data': ('', ['--length', '64', '--seconds', '0.1', '--rounds', '1']),
  'decode': (
    'PROMPT, NEW = 4, 4\n'
    "MODELS = {'gpt2, tiny': transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, "
    'n_head=2, bos_token_id=None, eos_token_id=None)}',
    ['--rounds', '1', '--batches', '2', '--threads', '1', '--models', 'gpt2', '--out', '{out}'],
  ),
  'dropless': ('BATCH, LENGTH, EMBED, MLP = 2, 32, 16, 32', ['--rounds', '1']),
  'layouts': (
    '',
    ['--layouts', 'dp', '--rounds', '1', '--steps', '1', '--json', '{out}']
    + ['--picture', '{folder}/layouts.png'],
  ),
  'local_save': ("CASES = {'one device': (1, 1, {})}", ['--rounds', '1', '--local', '{folder}']),
  'moments': (f'{TINY}\nBATCH, LENGTH, HELD_OUT = 2, 16, 2', ['--steps', '10']),
  'precision_curves': (
    "RUNS = {'float32': Run('float32'), 'bfloat16': Run('bfloat16')}",
    ['--steps', '2'],
  ),
  'published': ("RUNS = (Run('tiny', 1, _case('decoder_demo', 'dp', 8, 128)),)", []),
  'ranks': ('', ['--ranks', '16', '--checkpoints', '16', '--out', '{out}']),
  'start': ('', []),
  'torch_step': (f'{STEP}\nSTEPS = 1', []),
  'tp_memory': ('DEVICES = (1, 2)', ['--batch', '1', '--length', '16', '--out', '{out}']),
}
NO_RESULTS_FILE = ('bare_step', 'torch_step')
# Compile for GPUs, with the extra [plan].
FOR_GPUS = {
  'compiled_memory': (
    "CASES = (Case(model='decoder_demo', layout='dp', batch=(8, 128)),)",
    ['--out', '{out}'],
  ),
  'layer_loop': (
    "SHAPES = {k: v.small() for k, v in SHAPES.items()}\nCASES = (Case('decoder_134m', (1, 2)),)",
    ['--out', '{out}'],
  ),
  'loss_memory': ('SIZES = ((256, 64, 1024),)', ['--out', '{out}']),
}
# Benchmarks and scripts that have their own tests.
OWN_TESTS = {'faults': 'cluster/test_fault_loop.py'}
TESTED = {
  'bench_gpu.sh': 'test_bench_gpu.py',
  'docs_site.py': 'test_pages.py',
  'docs_tables.py': 'runtime/xla/test_docs_tables.py',
  'draw_architecture.py': 'test_architecture.py',
  'prepare_pile.py': 'test_prepare_pile.py',
  'train.pbs': 'test_scripts.py',
  'train.slurm': 'test_scripts.py',
  'train_k8s.yaml': 'test_scripts.py',
  'train_mpi.sh': 'test_scripts.py',
}
DRAWN = {'draw_mesh.py', 'draw_report.py', 'draw_schedules.py'}


def run(name: str, constants: str, flags: list[str], folder: pathlib.Path) -> None:
  tiny, out = folder / 'tiny.gin', folder / 'out.json'
  sizes = 'num_layers = 1', 'embed_dim = 16', 'num_heads = 2', 'head_dim = 8', 'mlp_dim = 32'
  text = (REPOSITORY / 'gin_configs/models/gpt2_small.gin').read_text()
  for size in (*sizes, 'query_pre_attn_scalar = 8.0', 'VOCAB_SIZE = 384'):
    text = re.sub(rf'\b{size.partition(" ")[0]} = [\d.]+', size, text)
  tiny.write_text(text)
  flags = [flag.format(tiny=tiny, out=out, folder=folder) for flag in flags]
  # `make test-aot` adds the compiler for GPUs to PYTHONPATH.
  path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get('PYTHONPATH'))))
  done = subprocess.run(
    [sys.executable, '-c', DRIVER, f'benchmarks.{name}', constants, str(out), *flags],
    cwd=REPOSITORY,
    env={**os.environ, 'XLA_FLAGS': xla_flags(), 'PYTHONPATH': path},
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  )
  assert done.returncode == 0, done.stdout
  results = done.stdout.splitlines()[-1] if name in NO_RESULTS_FILE else out.read_text()
  assert json.loads(results), done.stdout


@pytest.mark.quick_cases('bare_step')
@pytest.mark.parametrize('name', TINY_RUNS)
def test_a_benchmark_runs(tmp_path, name):
  if name in ('torch_step', 'decode'):
    pytest.importorskip('torch')
  if name == 'ranks' and subprocess.run([*OWN_NETWORK, 'true'], capture_output=True).returncode:
    pytest.skip('network namespaces are not allowed here')
  run(name, *TINY_RUNS[name], tmp_path)


def test_the_benchmark_of_training_finds_the_first_step_in_a_log():
  log = io.StringIO()
  ProgressLine(10, stream=log).update(1, {'train/loss': 2.0})
  assert cpu.STEP_LINE.search(log.getvalue())


def test_the_benchmark_of_steps_alone_runs_no_training_and_keeps_the_file_of_whole_runs(
  monkeypatch, capsys
):
  for name in ('bench', 'script'):
    monkeypatch.setattr(cpu, name, lambda *_: {'seconds': 1.0})
  monkeypatch.setattr(cpu, 'train', lambda *_: pytest.fail('a whole run'))
  found = cpu.measure(2, 'python', runs=False)
  assert found and not set(found) & {f't5x_gpu {name}' for name in cpu.RUNS}
  monkeypatch.setattr(sys, 'argv', ['cpu.py', '--only_steps'])
  with pytest.raises(SystemExit):
    cpu.main()
  assert '--only_steps needs --out: cpu.json has whole runs, too' in capsys.readouterr().err


def with_compiler(test):
  """Marks a test that compiles for GPUs that are absent."""
  for mark in MARKS:
    test = mark(test)
  return test


@with_compiler
@pytest.mark.parametrize('name', FOR_GPUS)
def test_a_benchmark_that_compiles_for_gpus_runs(tmp_path, name):
  run(name, *FOR_GPUS[name], tmp_path)


def test_every_script_is_run_by_a_test():
  names = {p.stem for p in (REPOSITORY / 'benchmarks').glob('*.py')}
  assert names == {*TINY_RUNS, *FOR_GPUS, *OWN_TESTS}
  scripts = {p.name for p in (REPOSITORY / 'scripts').iterdir() if p.is_file()}
  assert scripts == {*TESTED, *DRAWN}
  for script, test in {**TESTED, **OWN_TESTS}.items():
    assert script in (REPOSITORY / 'tests' / test).read_text(), f'{test} does not test {script}'


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(DRAWN - {'draw_report.py'}))
def test_a_picture_is_drawn(tmp_path, name):
  picture = tmp_path / 'picture.png'
  subprocess.run([sys.executable, f'scripts/{name}', picture], cwd=REPOSITORY, check=True)
  assert picture.read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
def test_a_picture_of_a_report_is_drawn(tmp_path):
  if not any(map(shutil.which, ('chromium', 'chromium-browser'))):
    pytest.skip('no Chromium: apt-get install chromium')
  assert Project(tmp_path).run(TRAIN_STEPS=2).code == 0
  picture = tmp_path / 'report.png'
  command = [sys.executable, 'scripts/draw_report.py', tmp_path / 'model', picture]
  subprocess.run(command, cwd=REPOSITORY, check=True)
  assert picture.read_bytes().startswith(b'\x89PNG')
