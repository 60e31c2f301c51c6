"""Clocks, power, slowdowns and errors of GPUs, read through the real pynvml from a fake driver."""

import ctypes
import time

import pynvml
import pytest

from t5x_gpu.runtime.health.gpu_sensors import GpuReading, GpuSensors, read
from tests.runtime.health import fake_driver

# GPU-0 is healthy, with two NVLinks; GPU-1 is slowed down by heat and has no ECC or NVLink. Every
# reading adds one NVLink error to GPU-0. Codes: 2 invalid argument, 3 not supported, 6 not found.
DRIVER = r"""
#include <string.h>
static unsigned long long errors = 0;
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  if (strncmp(uuid, "GPU-", 4) || uuid[4] > '1') return 6;
  *handle = (void *)(size_t)(uuid[4] - '0' + 1);
  return 0;
}
#define HOT ((size_t)handle == 2)
int nvmlDeviceGetClockInfo(void *handle, int type, unsigned *mhz) {
  *mhz = type == 1 ? (HOT ? 345 : 1980) : 0;
  return 0;
}
int nvmlDeviceGetPowerUsage(void *handle, unsigned *mw) { *mw = HOT ? 200500 : 699500; return 0; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *c) {
  *c = HOT ? 92 : 61;
  return 0;
}
int nvmlDeviceGetCurrentClocksEventReasons(void *handle, unsigned long long *reasons) {
  *reasons = HOT ? 0x64 : 0x4;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(void *handle, int kind, int counter, unsigned long long *count) {
  if (HOT) return 3;
  *count = kind == 1 && counter == 0 ? 5 : 0;
  return 0;
}
int nvmlDeviceGetNvLinkState(void *handle, unsigned link, int *active) {
  if (HOT) return 3;
  if (link > 2) return 2;
  *active = link < 2;
  return 0;
}
int nvmlDeviceGetNvLinkErrorCounter(void *handle, unsigned link, int counter,
                                    unsigned long long *count) {
  *count = link == 0 && counter == 0 ? errors++ : 0;
  return 0;
}
"""


@pytest.fixture
def driver(monkeypatch, tmp_path):
  """The real pynvml on top of a library that answers as NVIDIA's does."""
  library = tmp_path / 'nvml.so'
  fake_driver.build(DRIVER, library)
  monkeypatch.setattr(pynvml, 'nvmlLib', None)
  monkeypatch.setattr(pynvml, 'CDLL', lambda name: ctypes.CDLL(str(library)))
  pynvml._nvmlGetFunctionPointer_cache.clear()
  pynvml.nvmlInit()
  yield
  pynvml._nvmlGetFunctionPointer_cache.clear()


@pytest.mark.process
def test_a_reading_has_what_the_gpu_reports(driver):
  assert read(pynvml, 'GPU-0') == GpuReading(
    'GPU-0', sm_mhz=1980, watts=699.5, celsius=61, ecc_errors=5, nvlink_errors=0
  )
  # A GPU at its power cap (4) is healthy.
  assert read(pynvml, 'GPU-1') == GpuReading(
    'GPU-1', sm_mhz=345, watts=200.5, celsius=92, slowdowns=('heat',)
  )
  assert read(pynvml, 'GPU-7') == GpuReading('GPU-7')


@pytest.mark.process
def test_metrics_are_over_all_gpus_and_problems_warn_once(driver, caplog):
  with GpuSensors(('GPU-0', 'GPU-1'), period_seconds=0.01) as sensors:
    deadline = time.monotonic() + 60
    while sensors.metrics().get('nvlink_errors', 0) < 3:
      assert time.monotonic() < deadline
      time.sleep(0.01)
    values = sensors.metrics()
  assert values.pop('nvlink_errors') >= 3
  assert values == {
    'sm_mhz_min': 345,
    'watts_mean': 450.0,
    'celsius_max': 92,
    'slowed': 1,
    'ecc_errors': 0,  # the five are older than the run
  }
  warnings = [record.getMessage() for record in caplog.records]
  assert len(warnings) == 2
  assert warnings[0].startswith('GPU-1 on ') and warnings[0].endswith(': slowed down by heat.')
  assert warnings[1].startswith('GPU-0 on ') and warnings[1].endswith(': new NVLink errors.')


def test_without_gpus_nothing_is_read():
  with GpuSensors(()) as sensors:
    assert sensors.metrics() == {}
