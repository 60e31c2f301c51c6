"""The benchmark command on a small model."""

import json

import pytest

from t5x_gpu import bench
from t5x_gpu.errors import ConfigError, DataError, OutOfMemoryError
from tests.messages import raises

# A process tries the XLA flags once per version of jaxlib; platform.processor() may call uname.
pytestmark = pytest.mark.process

DEMO = [
  '--gin_file=gin_configs/examples/demo.gin',
  '--gin.TransformerConfig.num_layers=1',
  "--gin.TASK_FEATURE_LENGTHS={'targets': 16}",
  '--gin.BATCH_SIZE=8',
]


@pytest.mark.slow
def test_bench_writes_what_it_measured(tmp_path, capsys):
  out = tmp_path / 'result.json'
  fp8 = '--gin.PRECISION=fp8'
  assert bench.main([*DEMO, fp8, '--steps', '2', '--warmup', '1', '--json', str(out)]) == 0
  result = json.loads(out.read_text())
  assert result['step_seconds'] > 0 and result['num_devices'] == 8
  assert result['tokens_per_second'] == pytest.approx(8 * 16 / result['step_seconds'])
  assert result['mfu'] is None, 'no peak is known for a CPU'
  printed = capsys.readouterr().out
  assert 'precision: fp8, emulated' in printed
  assert 'tokens/s' in printed and 'MFU          unknown' in printed


@pytest.mark.process
def test_a_model_larger_than_the_memory_is_refused_before_it_compiles():
  with raises(OutOfMemoryError):
    bench.main([*DEMO, f'--gin.TransformerConfig.mlp_dim={2**36}'])


def test_a_dry_run_of_bench_checks_and_times_nothing(capsys):
  assert bench.main([*DEMO, '--dry_run']) == 0
  printed = capsys.readouterr().out
  assert 'parameters;' in printed and 'tokens/s' not in printed


def test_bench_refuses_what_cannot_be_timed():
  with raises(ConfigError):
    bench.main([*DEMO, '--steps', '0'])
  with raises(DataError):
    bench.main([*DEMO, '--gin.BATCH_SIZE=0', '--dry_run'])
