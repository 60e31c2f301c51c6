"""The GPU benchmark: it resumes, keeps what finished, and times the same models as PyTorch."""

import argparse
import contextlib
import dataclasses
import functools
import gzip
import io
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys

import gin
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import published
from benchmarks.gpu import __main__, attention, report, torch_parts, tuning
from benchmarks.gpu import step as step_lib
from benchmarks.gpu.parts import PARTS, Missing, Part, Skipped
from benchmarks.gpu.planned import planned
from benchmarks.gpu.shapes import LOOPS, SHAPES
from benchmarks.gpu.timing import time_calls
from t5x_gpu.layers import grouped_matmul
from t5x_gpu.layers.backends.choose import Hardware, choose
from t5x_gpu.layers.backends.tokamax_internals import library, listed_untuned
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.xla.presets import select
from t5x_gpu.tools.planning import assumptions
from t5x_gpu.tools.planning.gpu_targets import find_target, kernels_for

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / 'scripts' / 'bench_gpu.sh'
# What a machine that only measures may lack.
ABSENT = ('tensorflow', 'seqio', 'orbax', 'gin', 'tokamax', 'qwix', 'torch', 'matplotlib')
BLOCK = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
  return None if name.split('.')[0] in {absent} else find(name, path, target)
PathFinder.find_spec = find_spec
"""
H100 = 'NVIDIA H100 80GB HBM3'
MACHINE = {'card': H100, 'driver': '1', 'python': '3', 'versions': {}, 'commit': 'c'}


def result(*rows, small=False):
  return {'status': 'done', 'reason': None, 'small': small, 'machine': MACHINE, 'rows': rows}


def environ(folder: pathlib.Path, absent: tuple[str, ...] = ABSENT) -> dict[str, str]:
  """Returns variables of a Python without the packages `absent`."""
  (folder / 'sitecustomize.py').write_text(BLOCK.format(absent=absent))
  return {**os.environ, 'PYTHONPATH': str(folder), 'PYTHON': sys.executable}


@pytest.mark.process
@pytest.mark.slow
def test_an_interrupted_run_continues_with_the_remaining_parts(tmp_path):
  parts = 'ceilings,loss,ceilings_torch,decoder_134m_bf16'
  command = ['bash', SCRIPT, '--small', '--out', tmp_path, f'--parts={parts}']
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
  stored, *chunked = results['loss']['rows']
  assert chunked and [row['loss'] for row in chunked] == pytest.approx(
    [stored['loss']] * len(chunked), rel=1e-4
  )
  assert results['loss']['machine']['versions']['jax']
  table = (tmp_path / 'table.md').read_text()
  assert '| matmul bfloat16 | 64 | XLA |' in table and '| chunked | 64 | 32 |' in table
  assert 'not results' in table
  [step] = results['decoder_134m_bf16']['rows']
  assert step['plan'] is None and step['attention'][0]['name'] == 'dense'
  assert '| decoder_134m | bfloat16 | 2 x 16 | - |' in table


@pytest.mark.process
def test_a_python_without_jax_is_named(tmp_path):
  env = environ(tmp_path, absent=('jax',))
  done = subprocess.run(['bash', SCRIPT, '--help'], env=env, text=True, capture_output=True)
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  assert done.stderr.startswith(f'{sys.executable} has no jax.') and 'PYTHON=' in done.stderr


@pytest.mark.process
def test_a_machine_without_a_gpu_is_named_once(tmp_path):
  command = ['bash', SCRIPT, '--out', tmp_path, '--parts=ceilings,loss']
  env = {**os.environ, 'PYTHON': sys.executable, 'CUDA_VISIBLE_DEVICES': ''}
  done = subprocess.run(command, env=env, text=True, capture_output=True)
  assert done.returncode == 1
  first, second, *_ = done.stdout.splitlines()
  assert first.startswith('ceilings: no GPU, 0 rows') and not second
  assert 'finds no GPU' in first and '--small' in first
  assert '2 parts are left' in done.stdout


@pytest.mark.process
def test_a_part_that_reaches_its_limit_is_killed_and_costs_only_itself(tmp_path):
  args = argparse.Namespace(out=tmp_path, small=True)
  results = {}
  __main__.run(Part('loss', 100, 'loss:measure'), args, results, limit=0.3)
  result = results['loss']
  assert (result['status'], result['rows']) == ('killed', [])
  assert result['reason'] == 'reached its limit of 0 s' and result['seconds'] < 60
  assert not __main__.finished(result, args)
  # A shorter attempt, at the end of a call, does not replace what an earlier one has measured.
  results['loss'] = before = {**result, 'rows': [{'what': 'stored'}]}
  __main__.run(Part('loss', 100, 'loss:measure'), args, results, limit=0.3)
  assert results['loss'] == before


@pytest.mark.parametrize('own', [None, '/elsewhere'])
def test_a_killed_part_does_not_compile_again(own, tmp_path, monkeypatch):
  """Its process keeps compiled programs and tuned kernels in the folder of results."""
  monkeypatch.delenv(__main__.COMPILED, raising=False)
  if own:
    monkeypatch.setenv(__main__.COMPILED, own)
  on_gpu, on_cpu = (
    __main__.environment(argparse.Namespace(out=tmp_path, small=small)) for small in (False, True)
  )
  assert on_gpu[__main__.COMPILED] == (own or str(tmp_path / 'compiled'))
  assert on_cpu.get(__main__.COMPILED) == own


def test_an_unknown_part_is_refused_with_the_closest_one(capsys):
  with pytest.raises(SystemExit):
    __main__.main(['--parts=ceiling'])
  assert "no part 'ceiling'" in capsys.readouterr().err


def test_new_parts_run_before_those_that_failed_and_finished_ones_do_not():
  names = [part.name for part in PARTS]
  args = argparse.Namespace(parts=names, again=False, small=False)
  results = {
    names[0]: result(),
    names[1]: {**result(), 'status': 'failed'},
    names[2]: result(small=True),
  }
  assert [part.name for part in __main__.left(args, results)] == [*names[3:], names[1], names[2]]
  args.again = True
  assert len(__main__.left(args, results)) == len(names)


def test_the_first_calls_are_not_timed():
  waits, calls = [], []
  timing = time_calls(lambda: calls.append(0), waits.append, samples=4, sample_seconds=1e-4)
  assert timing.samples == 4 and len(waits) == 3 + 1 + 4
  assert len(calls) == 3 + 1 + 4 * timing.calls
  assert timing.fastest <= timing.seconds <= timing.slowest


def test_a_product_that_converts_its_operands_is_not_an_fp8_ceiling():
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
  if 'attention_softcap' in shape.config:
    pytest.skip("PyTorch's attention has no cap of its logits: no part times it")
  program = step_lib.program_of(
    step_lib.run_of(step_lib.model_of(shape, 'bfloat16'), shape, shape.rows[-1])
  )
  with torch.device('meta'):
    theirs = sum(p.numel() for p in Model(shape).parameters())
  assert theirs == program.num_params


@pytest.mark.parametrize(
  'name, path, differs',
  [
    ('gpt2_xl', 'gpt2_xl', {'vocab_size', 'remat_policy', 'scan_unroll'}),
    ('bert_large', 'bert_large', {'vocab_size'}),
    ('t5_large', 't5_1_1_large', set()),
    ('llama3_2_1b', 'llama3_2_1b', {'rope'}),
    ('qwen3_1_7b', 'qwen3_1_7b', {'rope'}),
    ('llama3_8b', 'llama3_8b', {'rope'}),
    ('gemma2_2b', 'gemma2_2b', set()),
    ('decoder_134m', 'decoder_base', {'relative_bias', 'query_pre_attn_scalar', 'rope'}),
  ],
)
def test_models_are_those_of_the_gin_files(name, path, differs):
  with gin.unlock_config():
    gin.clear_config()
    gin.parse_config_file(str(ROOT / f'gin_configs/models/{path}.gin'))
    theirs = gin.query_parameter('%MODEL').scoped_configurable_fn().config
    gin.clear_config()
  ours = step_lib.model_of(SHAPES[name], 'bfloat16').config
  fields = TransformerConfig.__dataclass_fields__
  different = {f for f in fields if getattr(ours, f) != getattr(theirs, f)}
  assert {f for f in different if 'dropout' not in f} == differs


def test_gpt2_xl_runs_its_layers_as_the_prediction_for_published_runs():
  shape = SHAPES['gpt2_xl']
  expected = {f'REMAT_POLICY = {shape.remat_policy!r}'}
  expected.add(f'TransformerConfig.scan_unroll = {shape.scan_unroll}')
  assert shape.scan_unroll == shape.config['num_layers'] and expected < {*published.GPT2_XL}
  [run] = (run for run in published.RUNS if run.name == 'GPT-2 XL, PyTorch')
  assert run.ours.batch == (shape.rows[0], shape.length)


def test_the_choice_of_auto_is_marked_and_pytorch_is_next_to_it():
  pytest.importorskip('torch')
  ours, theirs = attention.measure(32, small=True), torch_parts.measure_attention(small=True)
  rows = [*ours, *theirs]
  assert [r['packed'] for r in rows if r.get('auto')] == [False, True]
  assert not any('error' in row for row in rows)
  losses = torch_parts.measure_loss(small=True)
  table = report.table(
    {'attention_2048': result(*rows, small=True), 'loss_torch': result(*losses, small=True)}
  )
  assert '| dense (auto) | 32 | whole |' in table and '| PyTorch SDPA | 32 | whole |' in table
  assert '| PyTorch | 64 | 32 |' in table


@pytest.fixture(scope='module')
def results_before(tmp_path_factory):
  """Results of an earlier part, on a very slow H100."""
  path = tmp_path_factory.mktemp('results') / 'results.json'
  matmul = {'what': 'matmul', 'precision': 'bfloat16', 'size': 8, 'tflops': 1e-4}
  path.write_text(json.dumps({'ceilings': result(matmul)}))
  return path


@pytest.fixture(scope='module')
def planned_step(results_before):
  """The row of a step on this CPU, with a plan for an H100."""
  with contextlib.redirect_stdout(io.StringIO()) as printed:
    [row] = step_lib.measure(
      'decoder_134m', 'fp8', small=True, plan_for=H100, results=results_before
    )
  assert 'precision: fp8, emulated' in printed.getvalue()  # on a GPU the same call refuses
  return row


def test_a_step_says_its_attention_and_how_many_matmuls_are_in_fp8(planned_step):
  [choice] = planned_step['attention']
  assert (choice['name'], choice['reason'], choice['no_kernel']) == ('dense', 'cpu, rows of 16', '')
  assert planned_step['fp8_gemms'] == 0 < planned_step['gemms']
  table = report.table({'decoder_134m_bf16': result(planned_step)})
  assert f'| dense (cpu, rows of 16) | 0 of {planned_step["gemms"]} |' in table
  assert 'NO KERNEL' not in table


def test_a_gpu_row_without_a_kernel_is_marked(planned_step):
  need = dataclasses.replace(attention.NEED, dtype='float32', q_length=4096, kv_length=4096)
  slow = choose('auto', need, Hardware('gpu', H100, 9.0, has_packages=True))
  assert slow.name == 'chunked' and slow.no_kernel
  row = {**planned_step, 'attention': [dataclasses.asdict(slow)]}
  alone = {'backend': 'chunked', 'length': 4096, 'packed': False, 'auto': True}
  alone['no_kernel'] = slow.no_kernel
  table = report.table({'decoder_134m_bf16': result(row), 'attention_4096': result(alone)})
  assert f'| **NO KERNEL** chunked ({slow.reason}) |' in table
  assert f'| **NO KERNEL**: {slow.no_kernel} |' in table


def test_the_table_compares_the_plan_with_what_was_measured(planned_step):
  plan = planned_step['plan']
  assert plan['gpu'] == 'h100' and plan['attention'] == ['tokamax mosaic_gpu']
  assert plan['seconds'] > 0 and plan['formula_bytes'] > 0 and plan['compiled_bytes'] > 0
  plan = {**plan, 'seconds': 0.11, 'calibrated_seconds': 0.09, 'compiled_bytes': 21 * 2**30}
  row = {**planned_step, 'plan': {**plan, 'formula_bytes': 19 * 2**30}, 'seconds': 0.1}
  row |= {'peak_bytes': 20 * 2**30, 'peak_bytes_before_steps': 2**30}
  smaller = {**row, 'peak_bytes_before_steps': 20 * 2**30}
  table = report.table({'decoder_134m_bf16': result(row, smaller, planned_step)})
  begin = '| decoder_134m | fp8 | 2 x 16 | h100 with tokamax mosaic_gpu | '
  assert begin + '100 | 110 | 1.10 | 90 | 0.90 | 20 | 19 | 0.95 | 21 | 1.05 |' in table
  assert begin + '100 | 110 | 1.10 | 90 | 0.90 | - | 19 | - | 21 | - |' in table


def test_a_plan_takes_the_ceilings_that_were_measured_before(planned_step, results_before):
  assert planned_step['plan']['calibrated_seconds'] > planned_step['plan']['seconds']
  before = json.loads(results_before.read_text())
  results_before.write_text(json.dumps({**before, 'decoder_134m_fp8': result(planned_step)}))
  assert list(assumptions.read(results_before).values) == ['gemm_efficiency']


@pytest.fixture
def times(monkeypatch):
  """Lets Tokamax take an H100 for granted, and made-up times for its measurements.

  Returns how many times the block sizes of each call were asked for.
  """
  tokamax = library()
  jax.clear_caches()  # another test of this process may have traced the same kernels
  asked = []

  def autotune(call, cache_results):
    assert not cache_results
    asked.append(call)
    sizes = sorted(
      call.autotuning_configs, key=lambda size: (size == call.heuristics_config, str(size))
    )
    times = [tokamax.BenchmarkData(1.0, 1.0, (float(i),), {}) for i in range(1, 1 + len(sizes))]
    if len(sizes) > 1:
      times[0] = MemoryError('too little shared memory')
    return library('tokamax._src.autotuning.autotuner').AutotuningData(zip(sizes, times))

  monkeypatch.setattr(tokamax.BoundArguments, 'autotune', autotune)
  monkeypatch.setattr(library('tokamax._src.ops.op'), '_AUTOTUNING_CACHE', {})
  with kernels_for(find_target('h100')):
    yield asked


@pytest.mark.versions
@pytest.mark.filterwarnings('ignore::DeprecationWarning')  # Tokamax's kernels, with jax
def test_block_sizes_are_tuned_once_and_kept(times, tmp_path, monkeypatch):
  monkeypatch.setattr(tuning, 'ATTENTION', (2048, 4096))
  rows = list(tuning.measure_attention(folder=tmp_path, small=True))
  # The same small rows stand for both lengths: the second one finds them tuned.
  assert len(rows) == len(times) and {row['for'] for row in rows} == {'attention_2048'}
  forward, backward = rows[:2]
  assert (forward['kernel'], backward['kernel']) == (
    'PallasMosaicGpuFlashAttention',
    'PallasMosaicGpuFlashAttentionVjp',
  )
  assert forward['arguments'] == 'q [2, 128, 2, 16], k [2, 128, 2, 16]'
  assert backward['failed'] == 1 and backward['seconds'] < backward['default_seconds']
  for call in times:
    starts = tuning._with_values(call).arguments['mask'].k_start
    assert starts.shape[:2] == (2, 1) and not starts.any()
  table = report.table({'tune_attention': result(*rows)})
  assert f'| {backward["kernel"]} | attention_2048 | q [2, 128, 2, 16]' in table
  assert f'| {backward["tried"]} (1) |' in table and backward['config'] in table

  # Another process.
  monkeypatch.setattr(library('tokamax._src.ops.op'), '_AUTOTUNING_CACHE', {})
  assert tuning.load(tmp_path) == f'{len(rows)} kernels have block sizes that were tuned before'
  assert list(tuning.measure_attention(folder=tmp_path, small=True)) == []
  make = attention.backends()['tokamax mosaic_gpu']
  _, both = attention.calls(make, attention.shape_of(32, small=True), np.ones(32))
  text = jax.jit(both.function).trace(*both.arguments)
  text = text.lower(lowering_platforms=('cuda',)).as_text(debug_info=True)
  chosen = re.findall(r'(\w+)=(\d+)', backward['config'])
  assert all(f'\\22{name}\\22:{value}' in text for name, value in chosen), text


@pytest.mark.versions
@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_the_grouped_matmuls_of_experts_are_tuned_with_equal_groups(times, tmp_path):
  rows, gradient, sizes = (
    jax.ShapeDtypeStruct(shape, dtype)
    for shape, dtype in (((256, 64), 'bfloat16'), ((256, 128), 'bfloat16'), ((4,), 'int32'))
  )
  sums = functools.partial(grouped_matmul._ragged_sums, 'mosaic')
  with listed_untuned() as calls:
    jax.jit(sums).trace(rows, gradient, sizes)
  [call] = calls
  row = tuning.tune(call, tmp_path)
  assert row['arguments'] == 'lhs [256, 64], rhs [256, 128]' and row['failed'] == 1
  assert tuning._with_values(call).arguments['group_sizes'].tolist() == [64] * 4
  jax.clear_caches()
  with listed_untuned() as calls:
    jax.jit(sums).trace(rows, gradient, sizes)
  assert calls == []


def test_a_machine_without_kernels_tunes_none(tmp_path):
  with pytest.raises(Missing, match='run on GPUs'):
    list(tuning.measure_attention(folder=tmp_path, small=True))


@pytest.mark.slow
def test_options_are_compared_with_the_preset(monkeypatch):
  changes = {
    'one pass off': lambda options: options | {'xla_disable_hlo_passes': 'algsimp'},
    'unknown': lambda options: options | {'xla_no_such_option': True},
  }
  monkeypatch.setattr(step_lib, 'OPTIONS', changes)
  preset, changed, failed = step_lib.measure_options('decoder_134m', 'bfloat16', small=True)
  assert [r['options'] for r in (preset, changed)] == ['as the preset', 'one pass off']
  assert preset['rows'] == changed['rows'] and changed['preset_seconds'] == preset['seconds']
  assert 'xla_no_such_option' in failed['error']  # costs its own row only
  table = report.table({'options_decoder_1.3b_2048_bf16': result(preset, changed, failed)})
  assert (
    '| as the preset | decoder_134m | bfloat16 | - | 1 | 2 x 16 |' in table and '| +0.0% |' in table
  )
  assert '| one pass off |' in table and failed['error'] in table


def test_double_buffering_is_switched_and_other_passes_stay_off():
  switch = step_lib.OPTIONS_OF_SEVERAL['double buffering of loops switched']
  on = {'xla_disable_hlo_passes': 'collective-pipeliner-forward'}
  off = switch(on)
  assert off['xla_disable_hlo_passes'].split(',')[1:] == ['loop-double-buffer-transformer']
  assert switch(off) == on


@pytest.mark.slow
def test_options_of_a_pipeline_are_compared_with_the_preset():
  rows = list(step_lib.measure_options('decoder_134m', 'bfloat16', kind='pipeline', small=True))
  assert [row['options'] for row in rows] == ['as the preset', *step_lib.OPTIONS_OF_A_PIPELINE]
  assert {row.get('error') for row in rows} == {None}
  assert all(row['losses'] == pytest.approx(rows[0]['losses'], rel=1e-5) for row in rows)
  table = report.table({'options_pipeline_decoder_1.3b_2048_bf16': result(*rows)})
  end = '| decoder_134m | bfloat16 | 3d 2 x tp 2 x dp 2 | 8 | 16 x 16 |'
  assert f'| as the preset {end}' in table
  assert f'| pipeline options of max_overlap {end}' in table


@pytest.mark.slow
def test_options_of_a_full_gpu_are_compared_with_the_preset():
  changes = step_lib.OPTIONS_OF_A_FULL_GPU
  rows = list(step_lib.measure_options('llama3_8b', 'bfloat16', kind='full', small=True))
  assert [row['options'] for row in rows] == ['as the preset', *changes]
  assert {row.get('error') for row in rows} == {None}
  assert all(row['losses'] == pytest.approx(rows[0]['losses'], rel=1e-5) for row in rows)
  table = report.table({'options_full_llama3_8b_bf16': result(*rows)})
  for label in ('as the preset', *changes):
    assert f'| {label} | llama3_8b | bfloat16 | fsdp | 8 | 16 x 16 |' in table


def test_a_step_that_fills_the_gpu_takes_the_most_rows_that_fit(monkeypatch):
  asked = []

  def largest(shape, model, rows, *_, change=None, **__):
    asked.append((rows, model.config.remat_policy))
    return step_lib.Timed({'rows': 32, 'seconds': 1.0}, lambda: None)

  monkeypatch.setattr(step_lib, '_largest', largest)
  list(step_lib.measure_options('llama3_8b', 'bfloat16', kind='full'))
  first, second = asked
  assert first == ([80, 64, 48, 32, 24, 16, 8], 'dots') and second == ([32], 'dots')


def test_the_slop_factor_of_the_preset_is_switched_off():
  name = 'xla_gpu_memory_limit_slop_factor'
  preset = dict(select('default', gpu='h100').compile_options)
  [change] = step_lib.OPTIONS_OF_A_FULL_GPU.values()
  assert preset[name] == 300 and change(preset) == preset | {name: 95}


@pytest.mark.slow
def test_layers_in_a_loop_are_compared_with_layers_without_one(monkeypatch):
  unrolls, model_of = [], step_lib.model_of

  def noted(shape, precision):
    unrolls.append(shape.scan_unroll)
    return model_of(shape, precision)

  monkeypatch.setattr(step_lib, 'model_of', noted)
  rows = list(step_lib.measure_loops(small=True))
  assert unrolls == [1, 2] * len(LOOPS) and {row.get('error') for row in rows} == {None}
  for loop, without in zip(rows[::2], rows[1::2]):
    assert loop['losses'] == pytest.approx(without['losses'], rel=1e-3)
  table = report.table({'loops': result(*rows)})
  for case in LOOPS:
    words = f'| {case.shape} | {case.remat_policy} | {case.precision} | fsdp | 8 | '
    for layers, milliseconds in zip(('in a loop', 'without a loop'), case.compiled):
      [line] = (line for line in table.splitlines() if line.startswith(f'| {layers} {words}'))
      assert line.endswith(f'| {milliseconds} |')


def test_sends_of_a_pipeline_overlap_with_the_options_of_max_overlap():
  change = step_lib.OPTIONS_OF_A_PIPELINE['pipeline options of max_overlap']
  before = {'xla_disable_hlo_passes': 'rematerialization', 'xla_gpu_autotune_level': 4}
  assert change(before) == {
    'xla_disable_hlo_passes': 'rematerialization,collective-permute-motion',
    'xla_gpu_experimental_pipeline_parallelism_opt_level': 'PIPELINE_PARALLELISM_OPT_LEVEL_ENABLE',
    'xla_gpu_autotune_level': 4,
  }


@pytest.mark.parametrize(
  'changes',
  [
    step_lib.OPTIONS,
    step_lib.OPTIONS_OF_SEVERAL,
    step_lib.OPTIONS_OF_A_PIPELINE,
    step_lib.OPTIONS_OF_A_FULL_GPU,
  ],
)
def test_xla_knows_the_options(changes):
  newer = ('xla_gpu_enable_pdl_launch',)  # jax 0.11
  lowered = jax.jit(jnp.sin).lower(1.0)
  for change in changes.values():
    options = {name: value for name, value in change({}).items() if name not in newer}
    lowered.compile(compiler_options=options or None)


def test_the_slowest_kernels_are_next_to_the_time_of_their_bytes(planned_step, results_before):
  kernels = planned_step['slowest_kernels']
  assert len(kernels) > 3 and all(k['kernel_seconds'] > 0 for k in kernels)
  assert kernels[0]['least_seconds'] is None, 'not a card that a plan knows'
  kept = results_before.parent / 'steps' / 'decoder_134m_fp8'
  assert b'HloModule jit_train_step' in gzip.decompress((kept / 'step.hlo.txt.gz').read_bytes())
  assert (kept / 'step.xplane.pb.gz').stat().st_size > 1000
  on_card = [{**kernels[0], 'kernel_seconds': 3e-3, 'least_seconds': 2e-3, 'plan_seconds': 2.4e-3}]
  row = {**planned_step, 'slowest_kernels': on_card}
  failed = {**planned_step, 'slowest_kernels': {'error': 'DataError: no trace'}}
  table = report.table({'decoder_134m_bf16': result(row, failed)})
  assert f'| decoder_134m fp8 | {kernels[0]["place"]} |' in table and '| 2 | 2.4 | 0.80 |' in table
  assert 'DataError: no trace' in table


def test_kinds_of_kernels_are_next_to_what_the_plan_expects_of_them(planned_step):
  assert set(planned_step['seconds_by_kind']) == {'gemm', 'memory'}
  expected = planned_step['plan']['seconds_by_kind']
  assert set(expected) == {'gemm', 'fp8_gemm', 'attention', 'memory'}
  assert math.fsum(expected.values()) == pytest.approx(planned_step['plan']['seconds'])
  measured = {'gemm': 0.1, 'memory': 0.02, 'waiting': 0.004}
  plan = {'gemm': 0.11, 'memory': 0.01, 'attention': 0.05}
  row = {**planned_step, 'seconds_by_kind': measured, 'plan': {'seconds_by_kind': plan}}
  others = {'gpus': 2, 'layout': 'fsdp', 'preset_seconds': 1.0}
  options = [
    {**row, **others, 'options': label} for label in ('as the preset', 'NCCL user buffers')
  ]
  table = report.table({'options_gpus_decoder_1.3b_2048_bf16': result(*options)})
  begin = '| decoder_134m fp8 fsdp |'
  lines = [line for line in table.splitlines() if line.startswith(begin)][: len(measured) + 1]
  assert lines == [
    f'{begin} matmuls | 100 | 110 | 1.10 |',
    f'{begin} attention | - | 50 | - |',
    f'{begin} reading and writing | 20 | 10 | 0.50 |',
    f'{begin} waiting for collectives | 4 | - | - |',
  ]


def test_a_time_is_written_before_the_step_is_compiled_again_for_its_kernels(
  monkeypatch, results_before
):
  seen = []
  monkeypatch.setattr(step_lib, '_kernels', lambda *_: seen.append('traced') or {'kinds': 1})
  timed = step_lib.Timed({'seconds': 1.0}, lambda: None)
  rows = step_lib._with_kernels({'model': 'm'}, timed, results_before)
  row = next(rows)
  assert row == {'model': 'm', 'seconds': 1.0} and not seen
  assert next(rows, None) is None and row['kinds'] == 1, 'the row that was yielded'


def test_a_peak_is_shown_only_where_the_step_set_it(planned_step):
  peak = {'peak_bytes': 20 * 2**30, 'peak_bytes_before_steps': 2**30}
  others = {'gpus': 1, 'layout': '', 'preset_seconds': 1.0, 'options': 'no Triton GEMMs'}
  first = {**planned_step, **others, **peak}
  later = first | {'peak_bytes_before_steps': 20 * 2**30}  # an earlier step needed as much
  theirs = {'what': 'PyTorch', 'model': 'decoder_134m', 'peak_bytes': 3 * 2**30}
  theirs |= {'precision': 'bfloat16', 'rows': 2, 'length': 16, 'seconds': 1.0}
  for part, ours in (
    ('options_decoder_1.3b_2048_bf16', [first, later]),
    ('decoder_134m_bf16', [first, later, theirs]),
  ):
    table = report.table({part: result(*ours)})
    assert table.count('| 20.00 |') == 1
  assert '| 3.00 |' in table


def test_several_gpus_are_compared_with_one(monkeypatch):
  found = {'tp 2 x dp 4': step_lib.layouts(8, 2)['tp 2 x dp 4'], 'pp': Partitioner(stage=3)}
  monkeypatch.setattr(step_lib, 'layouts', lambda *_: found)
  *rows, failed = step_lib.measure_gpus('decoder_134m', small=True)
  assert [(r['layout'], r['gpus'], r['rows']) for r in rows] == [
    ('-', 1, 2),
    ('tp 2 x dp 4', 8, 16),
  ]
  assert rows[0]['efficiency'] == 1
  for row in rows:
    per_gpu = row['tokens_per_second'] / row['gpus']
    assert row['efficiency'] == pytest.approx(per_gpu / rows[0]['tokens_per_second'])
    assert row['losses'][0] == pytest.approx(math.log(128), abs=1)
  assert failed['error'].startswith('MeshError')  # costs its own row only
  table = report.table({'gpus_decoder_134m': result(*rows, failed)})
  assert '| decoder_134m | - | 1 | 2 x 16 |' in table and '| 100% |' in table
  assert '| decoder_134m | tp 2 x dp 4 | 8 | 16 x 16 |' in table and failed['error'] in table


def test_the_traffic_table_is_measured_on_all_gpus(monkeypatch):
  steps = {'llama3_8b': (1, (('full', 'bfloat16'), ('dots', 'no such precision')))}
  monkeypatch.setattr(step_lib, 'TRAFFIC', steps)
  full, failed = step_lib.measure_traffic(['llama3_8b'], small=True)
  assert (full['layout'], full['gpus'], full['rows']) == ('fsdp', 8, 8)
  assert full['losses'][0] == pytest.approx(math.log(128), abs=1)
  assert 'no such precision' in failed['error']  # costs its own row only
  table = report.table({'traffic_llama3_8b': result(full, failed)})
  assert '| llama3_8b | full | bfloat16 | fsdp | 8 | 8 x 16 |' in table
  assert failed['error'] in table


def test_the_traffic_table_is_the_one_of_the_docs():
  docs = (ROOT / 'docs/performance.md').read_text()
  text = docs[docs.index('<a name="traffic">') : docs.index('<a name="peer">')]
  batches = {
    'Llama-3 8B': 'llama3_8b',
    'Llama-3.2 1B': 'llama3_2_1b',
    'Qwen-3 1.7B': 'qwen3_1_7b',
    'Gemma-2 2B': 'gemma2_2b',
    'GPT-2 XL': 'gpt2_xl',
    'BERT-Large, masked tokens': 'bert_large',
    'T5 1.1 large': 't5_large',
  }
  for words, name in batches.items():
    rows, variants = step_lib.TRAFFIC[name]
    begin = text.index(f'| {words} | {8 * rows} x {SHAPES[name].length}')
    lines = text[begin:].splitlines()[: len(variants)]
    for line, (remat_policy, precision) in zip(lines, variants):
      assert f'`{remat_policy}`' in line and ('FP8' in line) == (precision == 'fp8'), line


def test_tensor_parallelism_splits_as_many_heads_as_it_can():
  first = ['dp', 'fsdp']
  for num_gpus, num_heads, others in (
    (8, 16, ['tp 8', 'zero1', 'tp_sp 8', 'hsdp 4 x dp 2']),
    (8, 2, ['tp 2 x dp 4', 'zero1', 'tp_sp 2 x dp 4', 'hsdp 4 x dp 2']),
    (6, 16, ['tp 2 x dp 3', 'zero1', 'tp_sp 2 x dp 3', 'hsdp 3 x dp 2']),
    (2, 16, ['tp 2', 'zero1', 'tp_sp 2']),
    (3, 16, ['zero1']),
  ):
    assert list(step_lib.layouts(num_gpus, num_heads)) == first + others


def test_a_pipeline_has_model_in_its_two_stages_where_it_fits():
  names = {n: step_lib.pipeline(n, 16)[0] for n in (2, 4, 6, 8)}
  assert names == {2: 'pp 2', 4: '3d 2 x tp 2', 6: 'pp 2 x dp 3', 8: '3d 2 x tp 2 x dp 2'}
  assert step_lib.pipeline(8, 25)[0] == 'pp 2 x dp 4'
  with pytest.raises(Skipped, match='3 GPUs'):
    step_lib.pipeline(3, 16)


def test_layouts_are_those_of_the_gin_files():
  found = [*step_lib.layouts(8, 8).items(), step_lib.pipeline(8, 2), step_lib.pipeline(8, 25)]
  for name, ours in found:
    layout = name.split()[0]
    with gin.unlock_config():
      gin.clear_config()
      gin.parse_config_file(str(ROOT / f'gin_configs/parallel/{layout}.gin'))
      theirs = gin.get_configurable(Partitioner)()
      gin.clear_config()
    if layout == 'hsdp':  # its replicas are whole hosts
      theirs = dataclasses.replace(
        theirs, ici_mesh_shape=None, dcn_mesh_shape=None, data=2, fsdp=-1
      )
    assert dataclasses.replace(ours, num_partitions=ours.num_partitions or 1) == theirs, name


@pytest.mark.process
@pytest.mark.slow
def test_one_gpu_has_nothing_to_compare_and_the_part_is_finished(tmp_path):
  command = ['bash', SCRIPT, '--small', '--out', tmp_path, '--parts=gpus_decoder_134m']
  env = {**os.environ, 'PYTHON': sys.executable, 'XLA_FLAGS': ''}
  done = subprocess.run(command, env=env, text=True, capture_output=True)
  assert done.returncode == 0, done.stderr
  assert 'gpus_decoder_134m: skipped, 0 rows' in done.stdout and 'has one GPU' in done.stdout
  assert 'Skipped:' in (tmp_path / 'table.md').read_text()


def test_a_plan_that_fails_costs_its_own_fields_only(planned_step):
  plan = planned(None, None, None, device_kind=H100)
  assert plan['error'].startswith('AttributeError')
  table = report.table({'decoder_134m_bf16': result({**planned_step, 'plan': plan})})
  assert f'| {plan["error"]} | ' in table
  assert planned(None, None, None, device_kind='cpu') is None


def test_the_docs_say_how_many_calls_the_limits_allow():
  calls = math.ceil(sum(part.limit_seconds for part in PARTS) / __main__.SECONDS)
  text = ' '.join((ROOT / 'docs/performance.md').read_text().split())
  assert calls == 20 and 'twenty calls if every part reaches its limit' in text


# Parts that differ from others in sizes alone, which `--small` makes equal.
REPEATED = re.compile(
  r'decoder_1\.3b_8192|decoder_134m|traffic_1b|attention_(4096|8192|16384|32768)'
)


@pytest.mark.slow
@pytest.mark.process
def test_every_kind_of_part_works_in_small(tmp_path):
  parts = [part for part in PARTS if not REPEATED.search(part.name)]
  names = [part.name for part in parts]
  done = subprocess.run(
    ['bash', SCRIPT, '--small', '--out', tmp_path, '--seconds=3000', f'--parts={",".join(names)}'],
    env={**os.environ, 'PYTHON': sys.executable},
    text=True,
    capture_output=True,
  )
  results = json.loads((tmp_path / 'results.json').read_text())
  assert list(results) == names, done.stdout
  bad = {n: r['reason'] for n, r in results.items() if r['status'] not in ('done', 'missing')}
  # Others tune kernels of GPUs, or need PyTorch.
  others = sum('torch' in part.name or part.tokamax == 'tunes' for part in parts)
  assert not bad and done.stdout.count(': done,') >= len(parts) - others
