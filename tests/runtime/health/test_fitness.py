"""Unfit GPUs, read by a child process through the real pynvml from a fake driver."""

import os
import sys
import tempfile
from unittest import mock

import pytest

from t5x_gpu.runtime.cluster import generations
from t5x_gpu.runtime.health import fitness
from tests.helpers_disk import fill, small_disk
from tests.runtime.health import fake_driver

# GPUS is the number of GPUs. Damaged rows on GPU 1 and a recovery action of GPU 0 are optional.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
static int number(const char *name) { const char *v = getenv(name); return v ? atoi(v) : 0; }
int nvmlInitWithFlags(unsigned flags) {
  if (number("HANGS")) for (;;) {}
  return number("BROKEN") ? 9 : 0;
}
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = number("GPUS"); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
  if ((int)index == number("LOST") - 1) return 15;
  *handle = (void *)(size_t)(index + 1);
  return 0;
}
int nvmlDeviceGetUUID(void *handle, char *uuid, unsigned length) {
  strcpy(uuid, "GPU-x");
  uuid[4] = '0' + (size_t)handle - 1;
  return 0;
}
int nvmlDeviceGetRemappedRows(void *handle, unsigned *cor, unsigned *unc, unsigned *pending,
                              unsigned *failure) {
  *cor = *unc = *pending = 0;
  *failure = (size_t)handle == 2 && number("DAMAGED");
  return 0;
}
struct value { unsigned field, scope; long long time, latency; int type, result;
               union { unsigned ui; double d; } value; };
int nvmlDeviceGetFieldValues(void *handle, int count, struct value *values) {
  values[0].result = number("OLD") ? 3 : 0;
  values[0].value.ui = (size_t)handle == 1 ? number("ACTION") : 0;
  return 0;
}
"""


@pytest.fixture
def driver(tmp_path, monkeypatch):
  library = tmp_path / 'libnvidia-ml.so.1'
  fake_driver.build(DRIVER, library)
  monkeypatch.setenv('LD_LIBRARY_PATH', f'{tmp_path}:{os.environ.get("LD_LIBRARY_PATH", "")}')
  return monkeypatch


@pytest.mark.parametrize(
  'variables, problem',
  [
    ({}, ''),
    ({'GPUS': '7'}, 'it had 8 GPUs at its first start and has 7 now'),
    ({'LOST': '3'}, 'it had 8 GPUs at its first start and has 7 now'),
    ({'DAMAGED': '1'}, 'GPU 1 (GPU-1) has damaged memory that it cannot replace'),
    ({'ACTION': '1'}, 'GPU 0 (GPU-0) needs a reset of the GPU'),
    ({'ACTION': '2'}, 'GPU 0 (GPU-0) needs a reboot of the host'),
    ({'ACTION': '4'}, ''),  # after its work
    ({'ACTION': '1', 'OLD': '1'}, ''),  # an older driver does not know
  ],
)
def test_gpus_that_cannot_serve_another_start(driver, variables, problem):
  for name, value in {'GPUS': '8', **variables}.items():
    driver.setenv(name, value)
  assert fitness.gpu_problem(8) == problem


def test_a_driver_that_fails_is_a_problem(driver):
  driver.setenv('BROKEN', '1')
  assert fitness.gpu_problem(8) == (
    'its GPUs cannot be read: NVMLError_DriverNotLoaded: Driver Not Loaded'
  )


def test_gpus_are_not_checked_without_an_answer_of_the_driver(driver, tmp_path):
  driver.setenv('GPUS', '8')
  driver.setenv('HANGS', '1')
  assert 40 < fitness._SECONDS < generations.OFFER_SECONDS - 10  # drivers are slow; leaders wait
  with mock.patch.object(fitness, '_SECONDS', 2), pytest.raises(TimeoutError) as hangs:
    fitness.gpu_problem(8)
  assert str(hangs.value) == 'no answer within 2 s'
  (python := tmp_path / 'python').write_text('#!/bin/sh\necho no package >&2\nexit 1\n')
  python.chmod(0o755)
  driver.setattr(sys, 'executable', str(python))
  with pytest.raises(RuntimeError, match='no package'):
    fitness.gpu_problem(8)


def test_gpus_are_checked_while_the_disk_is_full(driver, tmp_path):
  driver.setenv('GPUS', '8')
  with small_disk(tmp_path / 'disk', size='64k') as disk:
    driver.setattr(tempfile, 'tempdir', str(disk))
    fill(disk)
    assert fitness.gpu_problem(8) == ''
    driver.setenv('GPUS', '7')
    assert fitness.gpu_problem(8) == 'it had 8 GPUs at its first start and has 7 now'


def test_a_host_without_gpus_is_not_asked(driver):
  driver.setenv('BROKEN', '1')
  assert fitness.gpu_problem(0) == ''
