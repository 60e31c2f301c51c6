"""Measured efficiencies, from a file of scripts/bench_gpu.sh."""

import json

import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.tools.planning.assumptions import FOLDERS, Assumptions, calibrated, read
from t5x_gpu.tools.planning.gpu_targets import find_target
from tests.messages import raises

MACHINE = {'card': 'NVIDIA H100 80GB HBM3'}


def results(*rows, small=False, machine=MACHINE):
  return {'ceilings': {'status': 'done', 'small': small, 'machine': machine, 'rows': list(rows)}}


def written(tmp_path, content):
  path = tmp_path / 'results.json'
  path.write_text(json.dumps(content))
  return path


def test_measured_shares_replace_the_defaults(tmp_path):
  path = written(
    tmp_path,
    results(
      {'what': 'matmul', 'precision': 'bfloat16', 'size': 4096, 'tflops': 494.7},
      {'what': 'matmul', 'precision': 'bfloat16', 'size': 8192, 'tflops': 692.58},
      {'what': 'matmul', 'precision': 'fp8', 'tflops': 1900.0, 'is_fp8_gemm': False},
      {'what': 'matmul', 'precision': 'fp8', 'tflops': 1385.23, 'is_fp8_gemm': True},
      {'what': 'copy', 'gigabytes_per_second': 2849.472},
      {
        'backend': 'tokamax mosaic_gpu',
        'length': 4096,
        'packed': False,
        'backward': {'tflops': 395.76},
      },
      {
        'backend': 'tokamax mosaic_gpu',
        'length': 2048,
        'packed': False,
        'backward': {'tflops': 1.0},
      },
      {'backend': 'tokamax triton', 'length': 4096, 'packed': False, 'error': 'none'},
    ),
  )
  calibration = read(path)
  assert calibration.values == {
    'gemm_efficiency': pytest.approx(0.7),
    'fp8_gemm_efficiency': pytest.approx(0.7, rel=1e-4),
    'memory_efficiency': pytest.approx(0.85),
    'mosaic_efficiency': pytest.approx(0.4),
  }
  assumed = calibration.applied(Assumptions())
  assert assumed.sources.keys() == calibration.values.keys()
  assert assumed.gemm_efficiency == pytest.approx(0.7)
  assert assumed.triton_efficiency == Assumptions().triton_efficiency


@pytest.mark.parametrize(
  'content',
  [results(small=True), results(machine={'card': 'GeForce'}), results(), {'tasks': []}, [1]],
)
def test_other_files_are_refused(tmp_path, content):
  with raises(ConfigError):
    read(written(tmp_path, content))


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with raises(ConfigError):
    read(tmp_path / 'nothing.json')


MATMUL = {'what': 'matmul', 'precision': 'bfloat16', 'tflops': 692.58}
COPY = {'what': 'copy', 'gigabytes_per_second': 2849.472}


@pytest.fixture
def found_here(tmp_path, monkeypatch):
  """Results of an H100 and of another benchmark, where a plan looks for them."""
  monkeypatch.chdir(tmp_path)
  folder = tmp_path / FOLDERS[0]
  folder.mkdir(parents=True)
  (folder / 'cpu.json').write_text('{"steps": [1]}')
  (folder / 'broken.json').write_text('{')
  (folder / 'less.json').write_text(json.dumps(results(COPY)))
  path = folder / 'h100.json'
  path.write_text(json.dumps(results(MATMUL, COPY)))
  return path


def test_results_of_the_gpu_are_found_and_named(found_here):
  assumed = calibrated(None, find_target('h100'), Assumptions())
  measured = f'measured: NVIDIA H100 80GB HBM3, {found_here}'
  assert assumed.sources == {'gemm_efficiency': measured, 'memory_efficiency': measured}
  assert assumed.gemm_efficiency == pytest.approx(0.7)
  assert assumed.memory_efficiency == pytest.approx(0.85)
  default = Assumptions()
  assert calibrated('none', find_target('h100'), default) == default
  assert calibrated(None, find_target('b200'), default) == default


def test_own_results_come_before_those_of_the_repository(found_here, tmp_path):
  own = tmp_path / FOLDERS[1]
  own.mkdir(parents=True)
  (own / 'results.json').write_text(json.dumps(results(COPY)))
  assert list(calibrated(None, find_target('h100'), Assumptions()).sources) == ['memory_efficiency']


def test_results_that_are_found_leave_what_gin_sets(found_here):
  mine = Assumptions(gemm_efficiency=0.5)
  assumed = calibrated(None, find_target('h100'), mine)
  assert assumed.gemm_efficiency == 0.5 and assumed.memory_efficiency == pytest.approx(0.85)
  assert list(assumed.sources) == ['memory_efficiency']
  assert calibrated(str(found_here), find_target('h100'), mine).gemm_efficiency > 0.69


def test_only_the_gpu_that_was_measured_takes_the_values(found_here):
  h100, b200 = map(find_target, ('h100', 'b200'))
  mine, file = Assumptions(gemm_efficiency=0.5), str(found_here)
  assert calibrated(file, h100, mine).gemm_efficiency == pytest.approx(0.7)
  with raises(ConfigError):
    calibrated(file, b200, mine)
