"""Presets start jax on this jaxlib; the user's flags win; bad flags are dropped, never fatal."""

import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime import machine as machine_lib
from t5x_gpu.runtime.xla import flags as flags_lib
from t5x_gpu.runtime.xla import presets, probe
from t5x_gpu.runtime.xla.flags import LEGACY, prepare_environment, read_flags
from t5x_gpu.runtime.xla.presets import GENERATIONS, TABLE
from tests.messages import raises

PRESETS = [name for name in presets.PRESETS if name != 'none']
T5X_SCRIPT_FLAGS = (
  '--xla_gpu_simplify_all_fp_conversions --xla_gpu_all_reduce_combine_threshold_bytes=136314880'
)
OPTION = 'xla_gpu_all_reduce_combine_threshold_bytes'
GATHER = 'xla_gpu_all_gather_combine_threshold_bytes'


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
  # One folder for all tests, not the user's own.
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path_factory.getbasetemp() / 'cache'))


def every_machine():
  """Yields one `select(...)` keyword set per kind of machine."""
  for gpu, hosts, axes in itertools.product(
    (*GENERATIONS, 'NVIDIA L4'), (1, 2), ((), ('stage', 'fsdp', 'context', 'model'))
  ):
    yield dict(gpu=gpu, num_hosts=hosts, mesh_axes=axes)


# Sets what a preset sets on an H200 before jax is imported, and compiles with its options.
START = """
import json, sys
from t5x_gpu.runtime.xla import flags as xla_flags
applied = xla_flags.prepare_environment(sys.argv[1], gpu='NVIDIA H200', num_hosts=2)
applied = xla_flags.refine(applied, mesh_axes=('stage', 'fsdp', 'model'))
assert 'jax' not in sys.modules and 'jaxlib' not in sys.modules
import jax
add = jax.jit(lambda x: x + 1).lower(1.).compile(compiler_options=applied.compile_options)
print(json.dumps([float(add(1.)), jax.config.jax_optimization_level, {
    'dropped': applied.dropped, 'xla_flags': applied.xla_flags,
    'compile_options': applied.compile_options}]))
"""


def start(code, *arguments, flags=None, **env):
  env = {
    'PATH': os.environ['PATH'],
    'JAX_PLATFORMS': 'cpu',
    'PYTHONPATH': os.getcwd(),
    'XDG_CACHE_HOME': os.environ['XDG_CACHE_HOME'],
    **env,
  }
  if flags is not None:
    env['XLA_FLAGS'] = flags
  return subprocess.run(
    [sys.executable, '-c', code, *arguments], env=env, capture_output=True, text=True, timeout=120
  )


@pytest.mark.quick_cases('default')
@pytest.mark.parametrize('preset', PRESETS)
def test_jax_starts_and_compiles_with_the_preset(preset):
  done = start(START, preset, flags=T5X_SCRIPT_FLAGS)
  assert done.returncode == 0, done.stderr
  result, level, applied = json.loads(done.stdout)
  assert result == 2
  assert level == ('O1' if preset in ('default', 'max_overlap') else 'UNKNOWN')
  assert list(applied['dropped']) == ['xla_gpu_simplify_all_fp_conversions']
  assert f'--{OPTION}=136314880' in applied['xla_flags']
  assert OPTION not in applied['compile_options']


def test_this_jaxlib_aborts_at_t5xs_flags_without_us():
  # If this fails, XLA has become lenient, and much of this module can go.
  done = start('import jax; jax.devices()', flags=T5X_SCRIPT_FLAGS)
  assert done.returncode != 0 and 'Unknown flag' in done.stderr


@pytest.mark.parametrize('preset', PRESETS)
def test_this_jaxlib_knows_all_that_the_table_sets(preset):
  options, flags = {}, set()
  for machine in every_machine():
    selected = presets.select(preset, layer_bytes=2**28, **machine)
    # Values differ by machine (command buffers): keep each name's first.
    options = flags_lib.compile_options(selected) | options
    flags |= {f'--{name}={str(value).lower()}' for name, value in selected.xla_flags.items()}
  assert probe.refused_options(options) == {}
  assert probe.refused_flags(sorted(flags)) == {}
  jax.jit(lambda x: x + 1).lower(jnp.float32(0)).compile(compiler_options=options)


def test_options_are_spelled_for_the_version_of_jax():
  selected = presets.select('max_overlap', gpu='h200')
  old = flags_lib.compile_options(selected, '0.10.2')
  new = flags_lib.compile_options(selected, '0.11.2')
  assert old['xla_gpu_enable_pipelined_all_gather'] is True
  assert new['xla_gpu_pipeline_all_gather'] == 'COLLECTIVE_PIPELINING_MODE_ON'
  assert len(old) == len(new) and old.keys() != new.keys()


def test_an_unknown_flag_is_dropped_with_a_suggestion():
  env = {'XLA_FLAGS': '--xla_gpu_enable_triton_gem=false --xla_gpu_autotune_level=2'}
  applied = prepare_environment(gpu=None, environ=env)
  assert env['XLA_FLAGS'] == '--xla_gpu_autotune_level=2'
  assert applied.dropped == {'xla_gpu_enable_triton_gem': f'not in {applied.jaxlib}'}
  assert "Did you mean 'xla_gpu_enable_triton_gemm'" in applied.report()
  assert f'1 flag dropped: not in {applied.jaxlib}' in applied.line


def test_values_that_xla_cannot_read_are_dropped_alone():
  env = {
    'XLA_FLAGS': '--xla_gpu_autotune_level=high --xla_gpu_bogus --xla_gpu_autotune_level=2 '
    '--xla_gpu_enable_command_buffer=FOO'
  }
  applied = prepare_environment(gpu=None, environ=env)
  assert env['XLA_FLAGS'] == '--xla_gpu_autotune_level=2'
  assert "'FOO'" in applied.report() and 'value high' in applied.report()
  assert applied.dropped['xla_gpu_bogus'] == f'not in {applied.jaxlib}'


def test_the_users_flags_win_over_flags_options_and_variables():
  env = {
    'XLA_FLAGS': '--xla_gpu_enable_latency_hiding_scheduler=false '
    '--xla_gpu_first_collective_call_terminate_timeout_seconds=60',
    'XLA_PYTHON_CLIENT_MEM_FRACTION': '.7',
    'NCCL_DEBUG': 'INFO',
    'JAX_OPTIMIZATION_LEVEL': 'O0',
  }
  before = dict(env)
  applied = prepare_environment(gpu='h200', environ=env)
  assert {name: env[name] for name in before} == before
  assert 'XLA_CLIENT_MEM_FRACTION' not in env  # jax raises at both.
  assert 'xla_gpu_enable_latency_hiding_scheduler' not in applied.compile_options
  assert applied.kept == (
    'JAX_OPTIMIZATION_LEVEL',
    'NCCL_DEBUG',
    'XLA_CLIENT_MEM_FRACTION',
    'xla_gpu_enable_latency_hiding_scheduler',
    'xla_gpu_first_collective_call_terminate_timeout_seconds',
  )
  assert not set(applied.kept) & {row.name for row in applied.settings}


def test_a_renamed_flag_of_the_user_wins_over_the_option_of_its_other_name():
  env = {'XLA_FLAGS': '--xla_gpu_pipeline_all_gather=off'}
  applied = prepare_environment('max_overlap', gpu='h200', environ=env)
  assert not [
    name for name in applied.compile_options if 'pipeline' in name and 'all_gather' in name
  ]
  assert len(applied.xla_flags) == 2  # Kept or translated, never lost.


@pytest.mark.quick_cases('*enable*', '*pipeline_all_reduce=1')
@pytest.mark.parametrize('flag', [f'--{name}={value}' for name in LEGACY for value in (1, 0)])
def test_what_replaces_a_legacy_flag_is_known(flag):
  legacy = LEGACY[probe.flag_name(flag)]
  news = list(legacy.now(flag.split('=')[1])) if legacy.now else []
  if re.search('pipeline_', flag) and not probe.refused_flags([flag]):
    pytest.skip('this jaxlib knows the flag itself')
  assert probe.refused_flags(news) == {}


def test_a_literal_variable_in_single_quotes_is_explained():
  env = {'XLA_FLAGS': '${XLA_FLAGS} --xla_gpu_autotune_level=2'}
  applied = prepare_environment(gpu=None, environ=env)
  assert env['XLA_FLAGS'] == '--xla_gpu_autotune_level=2'
  assert 'literal ${XLA_FLAGS}' in applied.report() and 'double quotes' in applied.report()


def test_words_that_are_not_flags_do_not_hide_the_rest(tmp_path):
  # XLA itself stops reading at such a word, silently.
  flags, _ = read_flags('--a=1 stray --b="x y" \'--c\' --d')
  assert flags == ['--a=1', '--b="x y"', '--d']
  assert read_flags('')[0] == []
  file = tmp_path / 'xla.txt'
  file.write_text('--a=1\n --b\n')
  assert read_flags(str(file)) == (['--a=1', '--b'], [])
  flags, warnings = read_flags('/not-there/flags')
  assert flags == [] and 'file name' in warnings[0]


def test_without_gpu_nothing_is_set_and_no_process_is_started(monkeypatch):
  monkeypatch.setattr(subprocess, 'Popen', lambda *a, **k: pytest.fail('started a process'))
  env = {'JAX_PLATFORMS': 'cpu'}
  applied = prepare_environment(environ=env)
  assert env == {'JAX_PLATFORMS': 'cpu'}
  assert applied.compile_options == {}
  assert applied.line == 'xla preset: nothing to set, no GPU (JAX_PLATFORMS=cpu)'


def test_a_warm_start_asks_no_child(monkeypatch):
  def once():
    env = {'XLA_FLAGS': T5X_SCRIPT_FLAGS}
    return prepare_environment('default', gpu='h100', num_hosts=2, environ=env), env

  first = once()
  monkeypatch.setattr(probe, '_child', lambda *a, **k: pytest.fail('asked a child'))
  assert once() == first


def no_child(command, **kwargs):
  return probe.machine.CommandResult(None, '', '', 'no process can be started')


def test_without_cache_and_child_names_are_read_from_the_library(monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', '/dev/null')
  monkeypatch.setattr(probe.machine, 'run_with_deadline', no_child)
  assert probe.refused_flags(['--xla_gpu_autotune_level=1', '--xla_gpu_bogus=1']) == {
    '--xla_gpu_bogus=1': f'not in {probe.installed()}'
  }
  assert probe.refused_options({'xla_gpu_bogus': 1}) == {}


def test_a_garbled_cache_is_rebuilt(monkeypatch):
  probe.refused_flags(['--xla_gpu_bogus=2'])
  for path in probe.cache_folder().glob('*.json'):
    path.write_text('{"question": ')
  assert list(probe.refused_flags(['--xla_gpu_bogus=2'])) == ['--xla_gpu_bogus=2']


def test_a_plugin_of_another_version_is_looked_into(tmp_path):
  library = tmp_path / 'plugin.so'
  library.write_bytes(b'\0xla_gpu_autotune_level\0')
  system = probe.installed()
  system = probe.Installed(system.jaxlib, system.library, '0.0.1', library)
  flags = ['--xla_gpu_autotune_level=1', '--xla_gpu_enable_triton_gemm=true']
  assert probe.refused_flags(flags, system=system) == {flags[1]: 'not in the CUDA plugin 0.0.1'}


@pytest.mark.skipif(probe.installed().plugin is None, reason='needs a CUDA plugin wheel')
def test_the_cuda_plugin_knows_all_that_the_table_sets():
  system = probe.installed()
  selected = [
    presets.select(preset, **machine) for preset in PRESETS for machine in every_machine()
  ]
  names = {
    name for s in selected for name in (*s.xla_flags, *flags_lib.compile_options(s, system.plugin))
  }
  library = system.plugin_library.read_bytes()
  assert [name for name in names if b'\0' + name.encode() + b'\0' not in library] == []


# Tried one by one, a process each, with each jaxlib.
KNOWN = {
  'xla_gpu_enable_latency_hiding_scheduler=true': {'0.10': True, '0.11': True, '0.12': True},
  'xla_gpu_enable_pipelined_all_gather=true': {'0.10': True, '0.11': True, '0.12': True},
  'xla_gpu_pipeline_all_gather=on': {'0.10': False, '0.11': True, '0.12': True},
  'xla_gpu_fused_attention_use_cudnn_rng=true': {'0.10': True, '0.11': False, '0.12': False},
  'xla_gpu_graph_level=0': {'0.10': False, '0.11': False, '0.12': False},
  'xla_gpu_enable_nccl_per_stream_comms=false': {'0.10': False, '0.11': False, '0.12': False},
  'xla_gpu_executable_terminate_timeout_seconds=30': {'0.10': False, '0.11': False, '0.12': False},
  'xla_gpu_enable_command_buffer=': {'0.10': True, '0.11': True, '0.12': True},
}


@pytest.mark.parametrize('how', ['child', 'bytes'])
def test_detection_agrees_with_flags_tried_one_by_one(how, monkeypatch):
  version = '.'.join(jax.__version__.split('.')[:2])
  if how == 'bytes':
    monkeypatch.setenv('XDG_CACHE_HOME', '/dev/null')
    monkeypatch.setattr(probe.machine, 'run_with_deadline', no_child)
  refused = probe.refused_flags([f'--{flag}' for flag in KNOWN])
  assert {flag: f'--{flag}' not in refused for flag in KNOWN} == {
    flag: known[version] for flag, known in KNOWN.items()
  }


def test_memory_fractions_that_jax_refuses_are_mended_or_named():
  env = {'XLA_CLIENT_MEM_FRACTION': '90', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '.8'}
  report = prepare_environment(gpu=None, environ=env).report()
  assert env == {'XLA_CLIENT_MEM_FRACTION': '90'}
  assert 'refuses to start with both' in report and 'Write .9' in report


def test_too_late_is_said():
  jax.devices()
  before = dict(os.environ)
  try:
    assert 'too late' in prepare_environment('none').report()
  finally:
    assert dict(os.environ) == before


def test_a_gather_inside_a_host_is_that_of_a_layer_where_it_is_one_layer_ahead():
  one_host = dict(gpu='h100', num_hosts=1)
  ahead = dict(one_host, layers_ahead=True)
  assert GATHER not in presets.select(**one_host).compile_options
  for layer, threshold in ((10, 30), (200, 200), (5000, 1024)):
    selected = presets.select(**ahead, layer_bytes=layer * 2**20)
    assert selected.compile_options[GATHER] == threshold * 2**20


def test_mesh_and_model_refine_the_options_later():
  applied = prepare_environment('max_overlap', gpu='h200', num_hosts=4, environ={})
  refined = flags_lib.refine(applied, mesh_axes=('stage',), layer_bytes=300 * 2**20)
  assert refined.compile_options[OPTION] == 300 * 2**20
  assert applied.compile_options[OPTION] == presets.LEAST_COMBINED_BYTES
  assert 'xla_gpu_experimental_pipeline_parallelism_opt_level' in (
    refined.compile_options.keys() - applied.compile_options.keys()
  )
  assert refined.env == applied.env


def test_an_unknown_preset_is_named():
  with raises(ConfigError):
    prepare_environment('max_overlapp', gpu=None, environ={})


@pytest.mark.parametrize(
  'kind, name',
  [
    ('NVIDIA A100-SXM4-80GB', 'a100'),
    ('NVIDIA H100 80GB HBM3', 'h100'),
    ('NVIDIA H20', 'h100'),
    ('NVIDIA H200', 'h200'),
    ('NVIDIA B200', 'b200'),
    ('NVIDIA GB200', 'b200'),
    ('NVIDIA A10', ''),
    ('NVIDIA L4', ''),
    ('Quadro GV100', ''),
    (None, None),
  ],
)
def test_generation_of_a_device_kind(kind, name):
  assert presets.generation(kind) == name


def test_one_gpu_gets_nothing_about_communication():
  selected = presets.select('max_overlap', gpu='h200', num_gpus=1, mesh_axes=('fsdp', 'model'))
  assert selected.compile_options == {
    'xla_gpu_memory_limit_slop_factor': 300,
    'xla_gpu_dot_merger_threshold_mb': 0,
    'xla_gpu_enable_dynamic_slice_fusion': False,
  }
  assert not selected.xla_flags and selected.env == {'XLA_CLIENT_MEM_FRACTION': '0.9'}


def test_blackwell_leaves_connections_alone_and_restricts_graphs():
  selected = presets.select('default', gpu='b200', num_gpus=8)
  assert 'CUDA_DEVICE_MAX_CONNECTIONS' not in selected.env
  assert selected.compile_options['xla_gpu_enable_command_buffer'] == 'FUSION,CUSTOM_CALL'
  assert presets.select('default', gpu='h100').env['CUDA_DEVICE_MAX_CONNECTIONS'] == '1'


def test_no_machine_gets_two_values_of_one_setting():
  for preset, machine in itertools.product(PRESETS, every_machine()):
    names = [row.name for row in presets.select(preset, **machine).settings]
    assert len(names) == len(set(names)), (preset, machine)


def test_every_setting_has_a_reason_and_a_source():
  for row in TABLE:
    assert row.reason.endswith('.') and row.source.startswith('https://'), row.name
    assert set(row.presets) <= set(PRESETS) and row.hosts in ('any', 'one', 'several')


def test_gpus_are_found_without_jax(tmp_path):
  for bus in ('0000:1b:00.0', '0000:43:00.0'):
    folder = tmp_path / 'gpus' / bus
    folder.mkdir(parents=True)
    (folder / 'information').write_text('Model: \t\t NVIDIA H100 80GB HBM3\nIRQ:   \t\t 18\n')
  found = machine_lib.find_gpus({}, proc=tmp_path)
  assert (found.kind, found.count) == ('NVIDIA H100 80GB HBM3', 2)
  for hidden in (
    {'CUDA_VISIBLE_DEVICES': ''},
    {'CUDA_VISIBLE_DEVICES': '-1'},
    {'JAX_PLATFORMS': 'cpu'},
  ):
    assert machine_lib.find_gpus(hidden, proc=tmp_path).kind is None
  tool = tmp_path / 'nvidia-smi'
  tool.write_text('#!/bin/sh\necho NVIDIA H200\n')
  tool.chmod(0o755)
  found = machine_lib.find_gpus({}, proc=pathlib.Path('/nowhere'), nvidia_smi=str(tool))
  assert (found.kind, found.count, found.reason) == ('NVIDIA H200', 1, 'nvidia-smi')
  tool.write_text('#!/bin/sh\necho "NVIDIA-SMI has failed because it could not talk"; exit 9\n')
  found = machine_lib.find_gpus({}, proc=pathlib.Path('/nowhere'), nvidia_smi=str(tool))
  assert found.kind is None and 'could not talk' in found.reason
  (tmp_path / 'version').write_text(
    'NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n'
  )
  assert machine_lib.driver_version(tmp_path) == '580.95.05'
