"""The plan of a small model: its tables, picture, numbers and errors."""

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest

from t5x_gpu import plan
from t5x_gpu.errors import ConfigError, MeshError, ModelError
from t5x_gpu.reporting.run_record import read_run
from t5x_gpu.runtime.main_log import log_once
from t5x_gpu.runtime.xla import probe
from t5x_gpu.tools.planning.devices import topology_of
from t5x_gpu.tools.planning.remedies import EQUAL
from tests.helpers_train import TINY_GIN, run_here
from tests.messages import raises
from tests.reporting.runs import write_run

ROOT = pathlib.Path(__file__).parents[1]


@pytest.fixture
def gin_file(tmp_path):
  path = tmp_path / 'tiny.gin'
  path.write_text(TINY_GIN)
  return path


def flags(gin_file, *more, fsdp=2, model=2, **macros):
  return [
    f'--gin_file={gin_file}',
    f'--gin.Partitioner.fsdp={fsdp}',
    f'--gin.NUM_PARTITIONS={model}',
    *(f'--gin.{k}={v}' for k, v in macros.items()),
    *more,
  ]


def planned(gin_file, tmp_path, *more, **sizes):
  out = tmp_path / 'plan.json'
  show = [] if any(flag.startswith('--show') for flag in more) else ['--show=sharding']
  assert plan.main(flags(gin_file, f'--json={out}', *show, *more, **sizes)) == 0
  return json.loads(out.read_text())


def test_a_plan_works_without_a_data_name(capsys):
  parts = ('models/decoder_demo', 'parallel/fsdp', 'runs/finetune')
  files = [f'--gin_file=gin_configs/{part}.gin' for part in parts]
  shapes = ['--gin.TRAIN_STEPS=10', '--gin.BATCH_SIZE=8']
  lengths = "--gin.TASK_FEATURE_LENGTHS={'targets': 64}"
  assert plan.main([*files, *shapes, lengths, '--dry_run']) == 0
  assert 's per step' in capsys.readouterr().out
  with raises(ConfigError):
    plan.main([*files, *shapes, '--dry_run'])


def test_the_plan_prints_layout_traffic_and_findings(gin_file, tmp_path, capsys):
  got = planned(gin_file, tmp_path, '--hosts=2')
  printed = capsys.readouterr().out
  assert 'mesh: 2 hosts x 4 GPUs = 8 GPUs' in printed
  assert 'layers/mlp/wi_0/kernel' in printed and 'layers embed mlp' in printed
  assert '- fsdp model' in printed
  assert 'local checkpoints would take' in printed and 'any one may be lost' in printed
  assert 'a b c d | a b c d' in printed, 'who holds which part'
  assert 'gradient reduction' in printed and 'network' in printed and 'inside a host' in printed
  assert got['num_devices'] == 8
  assert got['mesh']['data'] == {'size': 2, 'inside_a_host': 1, 'across_hosts': 2}
  assert sum(math.prod(p['shape']) for p in got['parameters']) == got['num_params']


@pytest.mark.slow
def test_bytes_per_device_are_those_of_the_parts(gin_file, tmp_path):
  got = planned(gin_file, tmp_path)
  for p in got['parameters']:
    assert p['bytes_per_device'] * math.prod(p['parts']) == p['bytes']
  assert got['bytes_per_device']['parameters'] == sum(
    p['bytes_per_device'] for p in got['parameters']
  )
  names = {p['name'] for p in got['parameters']}
  # All state of AdamW but its count belongs to a parameter: two moments, split alike.
  owned = [a for a in got['optimizer'] if a['parameter'] is not None]
  assert {a['parameter'] for a in owned} == names
  assert sum(a['bytes_per_device'] for a in owned) == 2 * got['bytes_per_device']['parameters']


def test_plain_data_parallelism_reduces_each_gradient_once_and_gathers_nothing(gin_file, tmp_path):
  got = planned(gin_file, tmp_path, fsdp=1, model=1)
  assert {c['kind'] for c in got['collectives']} == {'all-reduce'}
  assert got['findings'] == []
  gradients = sum(
    c['bytes_per_step'] for c in got['collectives'] if c['purpose'] == 'gradient reduction'
  )
  assert gradients == pytest.approx(2 * 7 / 8 * 4 * got['num_params'], rel=0.03)


@pytest.mark.slow
def test_flops_split_over_the_devices(gin_file, tmp_path):
  whole = planned(gin_file, tmp_path, '--devices=1', fsdp=1, model=1)
  assert whole['collectives'] == []
  parts = planned(gin_file, tmp_path, fsdp=1, model=1)
  # All but the relative position bias, the same for all rows: 8 heads, 32 buckets, 32 x 32 pairs.
  bias = 2 * 2 * 8 * 32 * 32 * 32
  assert (parts['flops_per_device'] - bias) * 8 == pytest.approx(
    whole['flops_per_device'] - bias, rel=0.01
  )


@pytest.mark.slow
def test_remat_policies_are_compared_in_bytes_and_matrix_products(gin_file, tmp_path, capsys):
  more = {'TransformerConfig.num_layers': 2, 'TransformerConfig.remat_policy': "'minimal'"}
  got = planned(gin_file, tmp_path, '--show=remat', '--devices=2', model=1, **more)
  printed = capsys.readouterr().out
  assert 'remat_policy' in printed and 'Temporaries as compiled for the CPU' in printed
  [marked] = [line for line in printed.splitlines() if line.endswith('this run')]
  assert marked.startswith('minimal') and got['current'] == 'minimal'
  costs = {cost['policy']: cost for cost in got['policies']}
  none, dots, minimal, offload, full = (
    costs[policy]['flops'] for policy in ('none', 'dots', 'minimal', 'offload', 'full')
  )
  # Recomputed: attention's two matmuls of 3 (one forward, two backward), of 4 local rows.
  attention = 2 * 4 * 8 * 32 * 32 * 4
  assert dots == none and minimal == offload == none + 2 * 2 * attention
  assert full > minimal
  assert costs['full']['temporary_bytes'] < costs['none']['temporary_bytes']


def test_the_costs_of_faults_are_shown_with_a_setting_for_each_kind_of_checkpoint(
  gin_file, tmp_path, capsys
):
  rates = ('--faults_per_gpu_day=0.05', '--repair_hours=2')
  more = {'Partitioner.fsdp': 1}
  got = planned(gin_file, tmp_path, '--show=faults', '--dry_run', *rates, model=1, **more)
  printed = capsys.readouterr().out
  assert '0.4 a day on 8 GPUs' in printed and 'for 2 hours' in printed
  assert 'SAVE_PERIOD = ' in printed and 'CheckpointConfig.local_period = ' in printed
  in_model_dir, local = got['tiers']
  assert 0 < in_model_dir['best']['goodput'] <= local['best']['goodput'] < 1
  with raises(ConfigError):
    plan.main(flags(gin_file, '--dry_run', *rates))


def test_starts_and_saves_take_as_long_as_in_a_measured_run(gin_file, tmp_path, capsys):
  run = write_run(tmp_path / 'run')
  shown = ['--show=faults', '--dry_run', f'--measured_run={run}']
  got = planned(gin_file, tmp_path, *shown, model=1, **{'Partitioner.fsdp': 1})
  (again,) = [each.seconds for each in read_run(run).accounts.processes[1:]]
  assert got['machines']['start_seconds'] == again['init'] + again['compile'] + again['restore'] > 0
  assert [(each['stall_seconds'], each['stall_source']) for each in got['tiers']] == [
    (5, f'the median of 2 saves in {run}')
  ] * 2
  printed = capsys.readouterr().out
  assert f's, the median of a further start in {run}. The mesh' in printed
  assert f'stops the steps for 5 s (the median of 2 saves in {run}), and' in printed
  once = write_run(tmp_path / 'once', starts=((0, 40),))
  for wrong in (f'--measured_run={tmp_path}', f'--measured_run={once}', '--start_seconds=5'):
    with raises(ConfigError):
      plan.main(flags(gin_file, *shown, wrong))


def test_a_dry_run_compiles_nothing(gin_file, capsys):
  assert plan.main(flags(gin_file, '--show=sharding', '--dry_run')) == 0
  printed = capsys.readouterr().out
  assert 'optimizer MiB/device' in printed and 'What a training step sends' not in printed


def test_what_a_dry_run_knows_of_the_sharding_is_written(gin_file, tmp_path):
  got = planned(gin_file, tmp_path, '--dry_run')
  assert got['mesh']['data']['size'] == 2 and 'collectives' not in got
  assert sum(math.prod(p['shape']) for p in got['parameters']) == got['num_params']


@pytest.mark.parametrize(
  'show',
  [
    ['--show=prediction', '--dry_run'],
    ['--show=sharding'],
    pytest.param(['--show=remat', '--devices=2'], marks=pytest.mark.slow),
    pytest.param(['--show=prediction', '--devices=2'], marks=pytest.mark.slow),
  ],
)
def test_no_line_is_about_the_simulated_devices(gin_file, capsys, show):
  log_once.cache_clear()
  of = 'TransformerConfig.'
  experts = {f'{of}num_experts': 4, f'{of}expert_capacity_factor': None}
  assert plan.main(flags(gin_file, *show, model=1, **experts)) == 0
  printed = capsys.readouterr().out
  assert printed.startswith('mesh: '), printed.splitlines()[0]
  assert '(cpu' not in printed


def test_zero_1_is_seen_to_split_the_optimizer_state_alone(gin_file, capsys):
  dry = ['--show=sharding', '--dry_run']
  assert plan.main(flags(gin_file, *dry, model=1, **{'Partitioner.zero_stage': 1})) == 0
  printed = capsys.readouterr().out
  assert 'batch and optimizer state' in printed and 'whole (state over fsdp)' in printed
  parameters, state = printed.split('The same for the optimizer state')
  assert 'a a a a a a a a' in parameters and 'a b a b a b a b' in state
  assert plan.main(flags(gin_file, *dry, model=1)) == 0
  assert 'state over' not in capsys.readouterr().out


def test_a_layout_that_does_not_fit_is_refused_with_the_legal_ones(gin_file):
  with raises(MeshError):
    plan.main(flags(gin_file, fsdp=3))
  result = run_here(lambda: plan.main(flags(gin_file, fsdp=3)))
  assert result.code == 1 and 'MeshError' in result.err and 'Traceback' not in result.err


@pytest.mark.parametrize(
  'flag',
  [
    '--hosts=3',
    '--devices=0',
    '--gpus=0',
    '--gpus=12',
    '--gpus=8 --devices=8',
    '--gpus_per_host=8 --hosts=1',
    '--gpus=100000',
    '--scale=8,64',
    '--what_if=gpu=h100,b200',
    '--calibrate=nowhere.json',
    '--gin.Assumptions.gemm_efficiency=2',
    '--gin.Assumptions.hidden_shares={"fdsp": 0.5}',
    '--show=memory',
    '--gpu=h10',
    '--json=nowhere/x.json',
    '--out=x.png',
  ],
)
def test_errors_for_wrong_flags_list_the_allowed_values(gin_file, flag):
  with raises(ConfigError) as e:
    plan.main(flags(gin_file, *(flag.split() if flag.count('--') > 1 else [flag])))
  assert e.value.docs or not re.match('--(gpus|devices|hosts|scale|what_if|calibrate)', flag)


@pytest.mark.parametrize(
  'given, hosts, each',
  [
    (dict(devices=64), 8, 8),
    (dict(devices=64, gpus_per_host=4), 16, 4),
    (dict(devices=4), 1, 4),
    (dict(gpus=64, hosts=4), 4, 16),
    (dict(devices=64, hosts=16), 16, 4),
    (dict(hosts=2), 2, 4),
    ({}, 1, 8),
  ],
  ids=str,
)
def test_devices_is_the_same_as_gpus(given, hosts, each):
  got = topology_of(**given)
  assert (got.num_hosts, got.devices_per_host) == (hosts, each)


@pytest.mark.skipif(probe.installed().plugin is not None, reason='the CUDA plugin is installed')
def test_a_gpu_needs_the_plugin_of_the_installed_jax(gin_file):
  with raises(ConfigError):
    plan.main(flags(gin_file, '--show=sharding', '--gpu=h100'))


def test_more_devices_than_jax_has_started_with_are_refused(gin_file):
  assert len(jax.devices()) == 8
  before = os.environ.get('XLA_FLAGS')
  with raises(ConfigError):
    plan.main(flags(gin_file, '--devices=16'))
  assert os.environ.get('XLA_FLAGS') == before


def test_help_shows_examples(capsys):
  with pytest.raises(SystemExit) as e:
    plan.main(['--help'])
  assert e.value.code == 0
  assert '--gpus=64 --gpu=h200' in capsys.readouterr().out


# Starts the requested number of devices in its process, without TensorFlow or matplotlib.
BARE = """
import sys
for name in ('tensorflow', 'tensorflow_datasets', 'seqio', 'matplotlib', 'tensorboardX'):
  sys.modules[name] = None
from t5x_gpu import __main__
sys.argv[1:] = ['plan', '--gin_file=tiny.gin', '--gin.NUM_PARTITIONS=4', '--gpus=16',
                '--gin.BATCH_SIZE=16', '--gin.MIXTURE_OR_TASK_NAME=nowhere', '--json=plan.json']
__main__.main()
"""


def test_the_command_predicts_for_any_number_of_gpus_on_a_bare_machine(gin_file, tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', BARE],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=120,
    env={'PYTHONPATH': str(ROOT), 'PATH': '/usr/bin:/bin', 'HOME': str(tmp_path)},
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert 'mesh: 2 hosts x 8 GPUs = 16 GPUs' in done.stdout
  first = done.stdout.split('Memory per GPU')[0]
  assert '16 x NVIDIA H100' in first and 'FITS: needs ' in first
  assert 'tokens/s' in first and 'MFU' in first and '20 steps of 512 tokens: 10,240 tokens' in first
  got = json.loads((tmp_path / 'plan.json').read_text())
  if got['source'] == 'partitioned':
    assert "pip install 't5x_gpu[plan]'" in first, 'the caveat'
    assert 'splitting the step over 16 simulated devices' in done.stderr, 'progress'
  assert got['num_hosts'] == 2 and got['mesh'] == {'data': 4, 'model': 4} and got['fits']
  step = got['seconds_per_step']
  assert got['days'] == pytest.approx(20 * step / 86400)
  assert got['tokens_per_second'] == pytest.approx(16 * 32 / step)
  time, collectives = got['time'], got['time']['collectives']
  assert step == pytest.approx(
    sum(part['seconds'] for part in time['parts'])
    + sum(c['exposed_seconds'] for c in collectives)
    + time['bubble_seconds']
  )
  assert {c['link'] for c in collectives if 'data' in c['axes']} == {'network'}


def test_a_dry_run_predicts_by_formulas_alone(gin_file, capsys):
  assert plan.main(flags(gin_file, '--dry_run', '--gpu=b200', '--gpus=4')) == 0
  printed = capsys.readouterr()
  assert '4 x NVIDIA B200' in printed.out and 'Nothing was compiled' in printed.out
  assert 'splitting' not in printed.err


def test_fp8_needs_a_gpu_that_has_it(gin_file, tmp_path):
  dry = ['--dry_run', '--show=prediction']
  with raises(ModelError):
    plan.main(flags(gin_file, *dry, '--gpu=a100-80', PRECISION='"fp8"'))
  assert planned(gin_file, tmp_path, *dry, PRECISION='"fp8"')['mfu'] > 0


def test_assumptions_are_set_on_the_command_line(gin_file, tmp_path, capsys):
  dry = ['--dry_run', '--show=prediction']
  usual = planned(gin_file, tmp_path, *dry)
  assert re.search('gemm_efficiency +0.66 +Hopper:', capsys.readouterr().out)
  slow = planned(gin_file, tmp_path, *dry, '--gin.Assumptions.memory_efficiency=0.4')
  assert re.search('memory_efficiency +0.4 +set in gin', capsys.readouterr().out)
  for got, share in ((usual, 0.8), (slow, 0.4)):
    assert got['assumptions']['memory_efficiency']['value'] == share
    assert got['assumptions']['gemm_efficiency']['value'] == 0.66
    assert got['assumptions']['network_gigabits']['value'] == 400
  assert slow['assumptions']['memory_efficiency']['source'] == 'set in gin'
  bytes_of = {p['part']: p['num_bytes'] for p in usual['time']['parts'] if p['kind'] == 'memory'}
  assert bytes_of['optimizer'] > 0
  assert slow['seconds_per_step'] >= usual['seconds_per_step']


# Wide and long enough that the activations of a layer do not fit a GPU, and the parameters do.
WIDE = {
  'TransformerConfig.embed_dim': 8192,
  'TransformerConfig.mlp_dim': 32768,
  'TransformerConfig.num_layers': 8,
  'TransformerConfig.num_heads': 64,
  'TransformerConfig.head_dim': 128,
  'TransformerConfig.relative_bias': "'none'",
  'TransformerConfig.dtype': "'bfloat16'",
  'TASK_FEATURE_LENGTHS': "{'targets':4096}",
}


def test_a_run_that_does_not_fit_gets_changes_with_which_it_does(gin_file, tmp_path, capsys):
  dry = ['--dry_run', '--show=prediction']
  got = planned(gin_file, tmp_path, *dry, fsdp=8, model=1, **WIDE, BATCH_SIZE=64)
  printed = capsys.readouterr().out
  assert not got['fits'] and 'DOES NOT FIT' in printed and 'With these changes it fits' in printed
  assert len(got['remedies']) == 3
  seconds = [r['prediction']['seconds_per_step'] for r in got['remedies']]
  assert all(a <= EQUAL * b for a, b in itertools.pairwise(seconds))
  # The same flags, written as the remedy says: it fits, at that speed.
  settings = dict(s.split(' = ') for s in got['remedies'][0]['settings'])
  settings = {
    n.replace('train.num_microbatches', 'NUM_MICROBATCHES'): v for n, v in settings.items()
  }
  again = planned(
    gin_file, tmp_path, *dry, **{**dict(fsdp=8, model=1), **WIDE, 'BATCH_SIZE': 64, **settings}
  )
  assert again['fits'] and again['seconds_per_step'] == pytest.approx(seconds[0])


def test_a_model_that_fits_nowhere_gets_the_least_number_of_gpus(gin_file, capsys):
  large = dict(WIDE, **{'TransformerConfig.num_layers': 100})
  argv = flags(gin_file, '--dry_run', '--gpus=2', fsdp=2, model=1, **large, BATCH_SIZE=2)
  assert plan.main(argv) == 0
  printed = capsys.readouterr().out
  least = int(printed.split('The least number of GPUs is ')[1].split()[0])
  assert 'a batch of 2 does not divide over them' in printed.split('The least')[1]
  # 107B parameters, in 16 bytes each with their gradients, of 71 GiB per GPU.
  assert 22 < least < 40


@pytest.mark.slow
@pytest.mark.process
def test_a_search_that_writes_no_file_ends_with_1(gin_file, tmp_path, capsys):
  large = dict(WIDE, **{'TransformerConfig.num_layers': 100})
  best = tmp_path / 'best.gin'
  argv = ['--dry_run', '--gpus=1', '--search_processes=1', f'--search={best}']
  assert plan.main(flags(gin_file, *argv, fsdp=1, model=1, **large, BATCH_SIZE=1)) == 1
  assert 'fits on 1 GPU' in capsys.readouterr().out and not best.exists()


def test_a_calibration_is_of_one_gpu(gin_file, tmp_path):
  file = tmp_path / 'results.json'
  rows = [{'what': 'copy', 'gigabytes_per_second': 2849.472}]
  machine = {'card': 'NVIDIA H100 80GB HBM3'}
  part = {'status': 'done', 'small': False, 'machine': machine, 'rows': rows}
  file.write_text(json.dumps({'ceilings': part}))
  dry = ['--dry_run', '--show=prediction', f'--calibrate={file}']
  found = planned(gin_file, tmp_path, *dry)['assumptions']['memory_efficiency']
  assert found['value'] == pytest.approx(0.85) and found['source'].startswith('measured: ')
  with raises(ConfigError):
    planned(gin_file, tmp_path, *dry, '--gpu=b200')
