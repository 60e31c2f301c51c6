"""Speed per device, memory and the slowest process."""

import json
import logging

import pytest

from t5x_gpu.metrics.monitor import (
  ModelSpeed,
  Monitor,
  RankReport,
  RankReports,
  model_speed,
  peak_memory_bytes,
  slowest,
)
from t5x_gpu.metrics.throughput import StepTimes
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.runtime.health.gpu_sensors import GpuSensors
from tests.helpers_train import Project


class H100:
  device_kind = 'NVIDIA H100 80GB HBM3'
  platform = 'gpu'

  def __init__(self, peak):
    self._peak = peak

  def memory_stats(self):
    return {'bytes_in_use': 1, 'peak_bytes_in_use': self._peak}


def test_speed_is_that_of_palm_appendix_b():
  config = TransformerConfig(
    vocab_size=1000, num_layers=2, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=256,
    mlp_activations=('gelu',), dtype='bfloat16',
  )  # fmt: skip
  speed = model_speed(DecoderOnlyModel(config), {'ids': (8, 128)}, [H100(1)] * 4)
  weights = 2 * (4 * 64 * 64 + 2 * 64 * 256) + 64 * 1000  # attention, MLP; logits
  per_token = 6 * weights + 12 * 2 * 4 * 16 * 128
  assert speed == ModelSpeed(8 * 128 / 4, per_token * 256, 989.4e12, 'bfloat16')
  assert speed.metrics(0.5) == {
    'tokens_per_second_per_device': 512.0,
    'tflops_per_second_per_device': pytest.approx(per_token * 512 / 1e12),
    'mfu': pytest.approx(per_token * 512 / 989.4e12),
  }
  assert speed.metrics(None) == {}


def test_the_high_water_is_the_largest_of_the_devices_and_unknown_on_cpus():
  class Cpu:
    def memory_stats(self):
      return None

  assert peak_memory_bytes([H100(3), H100(7)]) == 7
  assert peak_memory_bytes([Cpu()]) is None


class Store:
  """The coordination service's key-value store, in one process."""

  def __init__(self):
    self.values = {}

  def key_value_set(self, key, value, allow_overwrite=False):
    assert allow_overwrite or key not in self.values
    self.values[key] = value

  def key_value_dir_get(self, key):
    return [(k, v) for k, v in self.values.items() if k.startswith(key)]


def times(step_seconds, host_seconds, waits=0.0):
  return StepTimes(
    step_seconds, step_seconds, 1.0, waits, None, {}, host_seconds=host_seconds
  )  # fmt: skip


def test_the_slowest_process_is_named_with_how_far_it_is_behind(caplog):
  store = Store()
  devices = [H100(5)]
  monitors = [
    Monitor(
      ModelSpeed(1, 1, None, 'bfloat16'),
      local_devices=devices,
      sensors=GpuSensors(()),
      ranks=RankReports(store, rank=rank),
    )
    for rank in range(4)
  ]
  for rank in (3, 2, 1):
    monitors[rank].window(10, times(1.0, 0.4 if rank == 2 else 0.1, waits=0.35))
  with caplog.at_level(logging.WARNING):
    values = [monitors[0].window(10, times(1.0, 0.1)) for _ in range(2)]
  assert values[0] == values[1]
  assert values[0]['train/slowest_rank'] == 2
  assert values[0]['train/slowest_rank_seconds'] == pytest.approx(0.3)
  assert values[0]['train/peak_memory_bytes'] == 5
  (warning,) = [record.getMessage() for record in caplog.records]
  assert warning.startswith('Slow host: process 2 on ')
  assert (
    'spends 0.400 s per step there, 0.300 s more than the median of 4 processes; 0.350 s' in warning
  )


def test_a_store_that_fails_or_has_strange_values_costs_only_the_numbers():
  class Broken:
    def key_value_set(self, *args, **kwargs):
      raise RuntimeError('UNAVAILABLE')

    key_value_dir_get = key_value_set

  reports = RankReports(Broken(), rank=0)
  reports.post(step=1, host_seconds=0.1, input_seconds=0.0)
  assert reports.read() == []
  store = Store()
  store.values = {'t5x_gpu_monitor/ranks/1': json.dumps({'other': 1})}
  assert RankReports(store, rank=0).read() == []
  assert slowest([RankReport(0, 'a', 1, 0.1, 0.0)]) is None


@pytest.mark.slow
def test_a_run_logs_its_speed_per_device_and_the_parts_of_its_steps(tmp_path):
  project = Project(tmp_path)
  result = project.run(TRAIN_STEPS=3)
  assert result.code == 0, result.err
  speed = project.metrics('train/tokens_per_second')
  for key in ('train/tokens_per_second_per_device', 'train/tflops_per_second_per_device'):
    assert project.metrics(key).keys() == speed.keys()
  per_device = project.metrics('train/tokens_per_second_per_device')
  assert per_device == pytest.approx({step: value / 8 for step, value in speed.items()})
  steps, hosts = project.metrics('train/step_seconds'), project.metrics('train/host_seconds')
  assert all(0 < hosts[step] <= steps[step] for step in steps)
  assert project.metrics('train/mfu') == {}  # the peak of a CPU is unknown
