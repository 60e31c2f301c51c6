"""The GPU benchmark: it resumes, keeps what finished, and times the same models as PyTorch."""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import gin
import pytest

from benchmarks.gpu import __main__ as runner
from benchmarks.gpu import attention, report, step, torch_parts
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.timing import time_calls
from t5x_gpu.models.config import TransformerConfig

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / 'scripts' / 'bench_gpu.sh'
# What a machine that only measures may lack.
ABSENT = ('tensorflow', 'seqio', 'orbax', 'gin', 'tokamax', 'qwix', 'torch', 'matplotlib')
BLOCK = f"""
import sys
class Absent:
  def find_spec(self, name, path=None, target=None):
    if name.split('.')[0] in {ABSENT}:
      raise ImportError(f'No module named {{name!r}}')
sys.meta_path.insert(0, Absent())
"""


def environ(folder: pathlib.Path) -> dict[str, str]:
  """Returns variables of a Python without the packages ABSENT."""
  (folder / 'sitecustomize.py').write_text(textwrap.dedent(BLOCK))
  return {**os.environ, 'PYTHONPATH': str(folder), 'PYTHON': sys.executable}


@pytest.mark.process
@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_remaining_parts(tmp_path):
  command = ['bash', SCRIPT, '--small', '--out', tmp_path, '--parts=ceilings,loss,ceilings_torch']
  options = dict(env=environ(tmp_path), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  with subprocess.Popen(command, **options) as first:
    line = first.stdout.readline()
    first.send_signal(signal.SIGINT)
    _, errors = first.communicate(timeout=120)
  assert line.startswith('ceilings: done, 3 rows'), line + errors
  assert first.returncode == 130 and 'Finished parts are kept' in errors
  assert list(json.loads((tmp_path / 'results.json').read_text())) == ['ceilings']

  second = subprocess.run(command, **options, check=False)
  assert second.stdout.splitlines()[0].startswith('ceilings_torch: missing'), second.stdout
  assert second.returncode == 1 and '1 parts are left' in second.stdout
  results = json.loads((tmp_path / 'results.json').read_text())
  assert results['ceilings_torch']['reason'] == 'PyTorch is not installed'
  stored, chunked = results['loss']['rows']
  assert stored['loss'] == pytest.approx(chunked['loss'], rel=1e-4)
  assert results['loss']['machine']['versions']['jax']
  table = (tmp_path / 'table.md').read_text()
  assert '| matmul bfloat16 | 64 | XLA |' in table and '| chunked | 64 | 32 |' in table
  assert 'not results' in table


@pytest.mark.process
def test_a_part_that_reaches_its_limit_is_killed_and_costs_only_itself(tmp_path):
  args = argparse.Namespace(out=tmp_path, small=True)
  results = {}
  runner.run(Part('loss', 100, 'loss:measure'), args, results, limit=0.3)
  result = results['loss']
  assert (result['status'], result['rows']) == ('killed', [])
  assert result['reason'] == 'reached its limit of 0 s' and result['seconds'] < 60
  assert not runner.finished(result, args)


def test_an_unknown_part_is_refused_with_the_closest_one(capsys):
  with pytest.raises(SystemExit):
    runner.main(['--parts=ceiling'])
  assert "no part 'ceiling'" in capsys.readouterr().err


def test_new_parts_run_before_those_that_failed_and_finished_ones_do_not():
  names = [part.name for part in PARTS]
  args = argparse.Namespace(parts=names, again=False, small=False)
  result = {'status': 'done', 'small': False}
  results = {names[0]: result, names[1]: {**result, 'status': 'failed'}, names[2]: dict(result)}
  results[names[2]]['small'] = True
  assert [part.name for part in runner.left(args, results)] == [*names[3:], names[1], names[2]]
  args.again = True
  assert len(runner.left(args, results)) == len(names)


def test_the_first_calls_are_not_timed():
  waits, calls = [], []
  timing = time_calls(lambda: calls.append(0), waits.append, samples=4, sample_seconds=1e-4)
  assert timing.samples == 4 and len(waits) == 3 + 1 + 4
  assert len(calls) == 3 + 1 + 4 * timing.calls
  assert timing.fastest <= timing.seconds <= timing.slowest


def test_a_product_that_converts_its_operands_is_not_an_fp8_ceiling():
  machine = {'card': 'NVIDIA H100', 'driver': '1', 'python': '3', 'versions': {}, 'commit': 'c'}

  def result(*rows):
    return {'status': 'done', 'reason': None, 'small': False, 'machine': machine, 'rows': rows}

  matmul = {'what': 'matmul', 'size': 8, 'seconds': 1.0}
  results = {
    'ceilings': result(
      {**matmul, 'precision': 'bfloat16', 'tflops': 700.0},
      {**matmul, 'precision': 'fp8', 'tflops': 600.0, 'is_fp8_gemm': False},
    ),
    'ceilings_torch': result({**matmul, 'precision': 'bfloat16', 'tflops': 800.0}),
  }
  assert report.ceilings(results) == {'bfloat16': 800.0}
  ours = {'model': 'gpt2_xl', 'precision': 'bfloat16', 'rows': 4, 'seconds': 2.0, 'flops': 1e15}
  theirs = {'model': 'gpt2_xl', 'precision': 'bfloat16', 'rows': 8, 'seconds': 2.0}
  first, second = report._with_shares([ours, theirs], {'bfloat16': 800.0})
  assert first['tflops'] == pytest.approx(500.0) and second['tflops'] == pytest.approx(1000.0)
  assert first['ceiling_share'] == pytest.approx(500 / 800)


@pytest.mark.parametrize('name', SHAPES)
def test_pytorch_times_a_model_with_as_many_parameters(name):
  torch = pytest.importorskip('torch')
  from benchmarks.gpu.torch_model import Model

  shape = SHAPES[name]
  program = step.program_of(step.model_of(shape, 'bfloat16'), shape, shape.rows[-1])
  with torch.device('meta'):
    theirs = sum(p.numel() for p in Model(shape).parameters())
  assert theirs == program.num_params


@pytest.mark.parametrize(
  'name, path, differs',
  [
    ('gpt2_xl', 'gpt2_xl', {'vocab_size', 'remat_policy'}),
    ('bert_large', 'bert_large', {'vocab_size'}),
    ('t5_large', 't5_1_1_large', set()),
    ('decoder_134m', 'decoder_base', {'relative_bias', 'query_pre_attn_scalar', 'rope'}),
  ],
)
def test_models_are_those_of_the_gin_files(name, path, differs):
  with gin.unlock_config():
    gin.clear_config()
    gin.parse_config_file(str(ROOT / f'gin_configs/models/{path}.gin'))
    theirs = gin.query_parameter('%MODEL').scoped_configurable_fn().config
    gin.clear_config()
  ours = step.model_of(SHAPES[name], 'bfloat16').config
  fields = TransformerConfig.__dataclass_fields__
  different = {f for f in fields if getattr(ours, f) != getattr(theirs, f)}
  assert {f for f in different if 'dropout' not in f} == differs


def test_the_choice_of_auto_is_marked_and_pytorch_is_next_to_it():
  pytest.importorskip('torch')
  ours, theirs = attention.measure(32, small=True), torch_parts.measure_attention(small=True)
  rows = [*ours, *theirs]
  assert [r['packed'] for r in rows if r.get('auto')] == [False, True]
  assert not any('error' in row for row in rows)
  machine = {'card': 'cpu', 'driver': '1', 'python': '3', 'versions': {}, 'commit': 'c'}
  result = {'status': 'done', 'reason': None, 'small': True, 'machine': machine}
  losses = list(torch_parts.measure_loss(small=True))
  table = report.table(
    {'attention_2048': {**result, 'rows': rows}, 'loss_torch': {**result, 'rows': losses}}
  )
  assert '| dense (auto) | 32 | whole |' in table and '| PyTorch SDPA | 32 | whole |' in table
  assert '| PyTorch | 64 | 32 |' in table


@pytest.mark.slow
@pytest.mark.process
def test_every_part_works_in_small(tmp_path):
  done = subprocess.run(
    ['bash', SCRIPT, '--small', '--out', tmp_path, '--seconds=3000'],
    env={**os.environ, 'PYTHON': sys.executable},
    text=True,
    capture_output=True,
  )
  results = json.loads((tmp_path / 'results.json').read_text())
  assert list(results) == [part.name for part in PARTS], done.stdout
  bad = {n: r['reason'] for n, r in results.items() if r['status'] not in ('done', 'missing')}
  assert not bad and done.stdout.count(': done,') >= len(PARTS) - 6
