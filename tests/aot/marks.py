"""The marks of tests that compile for GPUs that are absent."""

import os

import pytest

from t5x_gpu.runtime.xla import probe

PLUGIN, JAXLIB = probe.installed().plugin, probe.installed().jaxlib
MARKS = [
  pytest.mark.aot,
  pytest.mark.slow,
  pytest.mark.filterwarnings('ignore::DeprecationWarning'),  # Tokamax's Mosaic kernels, with jax
  pytest.mark.skipif(
    (PLUGIN is None or PLUGIN != JAXLIB) and 'T5X_GPU_TEST_AOT' not in os.environ,
    reason=f'compiling for GPUs needs the CUDA plugin of jax {JAXLIB}: make test-aot installs it',
  ),
]
