"""Peaks are dense, and unknown rather than guessed."""

import re

import pytest

from t5x_gpu.runtime.hardware import GIB, GPUS, find_gpu, memory_bytes, peak_flops

KINDS = {
  'NVIDIA A100-SXM4-40GB': (312e12, 40),
  'NVIDIA A100-PCIE-40GB': (312e12, 40),
  'NVIDIA A100-SXM4-80GB': (312e12, 80),
  'NVIDIA A100 80GB PCIe': (312e12, 80),
  'NVIDIA H100 80GB HBM3': (989.4e12, 80),
  'NVIDIA H100 PCIe': (756e12, 80),
  'NVIDIA H200': (989.4e12, 141),
  'NVIDIA B200': (2250e12, 180),
  'NVIDIA GB200': (2500e12, 186),
  'NVIDIA L4': (121e12, 24),
  'NVIDIA L40S': (362.05e12, 48),
  'NVIDIA A10': (125e12, 24),
  'Tesla T4': (None, 16),
  'Tesla V100-SXM2-16GB': (None, 16),
  'Tesla V100-SXM2-32GB': (None, 32),
  'Tesla V100-PCIE-16GB': (None, 16),
  'Tesla V100-PCIE-32GB': (None, 32),
}

# What data sheets print "with sparsity" for bfloat16, in 1e12.
SPARSE_BFLOAT16 = {
  'NVIDIA A100-SXM4-40GB': 624,
  'NVIDIA H100 80GB HBM3': 1979,
  'NVIDIA H100 PCIe': 1513,
  'NVIDIA H200': 1979,
  'NVIDIA B200': 4500,
  'NVIDIA GB200': 5000,
  'NVIDIA L4': 242,
  'NVIDIA L40S': 733,
  'NVIDIA A10': 250,
}


@pytest.mark.parametrize('kind', KINDS)
def test_device_kinds_have_their_dense_bfloat16_peak_and_memory(kind):
  peak, gib = KINDS[kind]
  assert peak_flops(kind, 'bfloat16') == peak
  assert memory_bytes(kind) == gib * GIB


@pytest.mark.parametrize('kind', SPARSE_BFLOAT16)
def test_sparse_figures_are_not_used(kind):
  ratio = SPARSE_BFLOAT16[kind] * 1e12 / peak_flops(kind, 'bfloat16')
  assert 1.99 < ratio < 2.03


def test_peaks_of_one_gpu_are_in_their_usual_ratios():
  # fp8 = 2 x bf16 = 4 x tf32, to the rounding of data sheets; fp16 = bf16; float32 is far below.
  for gpu in GPUS:
    peaks = gpu.teraflops
    if 'bfloat16' in peaks:
      assert peaks['float16'] == peaks['bfloat16']
      assert peaks['bfloat16'] / peaks['tf32'] == pytest.approx(2, rel=0.03)
    if 'fp8' in peaks:
      assert peaks['fp8'] / peaks['bfloat16'] == pytest.approx(2, rel=0.02)
    if 'tf32' in peaks and 'float32' in peaks:
      assert peaks['float32'] < peaks['tf32']


@pytest.mark.parametrize(
  'kind',
  [
    'cpu',
    '',
    'NVIDIA H100',
    'NVIDIA H20',
    'NVIDIA H800',
    'NVIDIA A10G',
    'NVIDIA L40',
    'NVIDIA A100-SXM4-80GB MIG 1g.10gb',
    'NVIDIA GeForce RTX 4090',
    'NVIDIA B2000',
  ],
)
def test_other_devices_are_unknown(kind):
  assert peak_flops(kind, 'bfloat16') is None
  assert memory_bytes(kind) is None


def test_each_kind_matches_one_row():
  for kind in KINDS:
    assert [gpu for gpu in GPUS if re.fullmatch(gpu.kind, kind)] == [find_gpu(kind)]


def test_dtypes_are_known_by_their_usual_names():
  h100 = 'NVIDIA H100 80GB HBM3'
  assert peak_flops(h100, 'bf16') == peak_flops(h100, 'bfloat16') == 989.4e12
  assert peak_flops(h100, 'float8_e4m3fn') == peak_flops(h100, 'fp8') == 1978.9e12
  assert (peak_flops(h100, 'tf32'), peak_flops(h100, 'float32')) == (494.7e12, 66.9e12)
  assert peak_flops('NVIDIA A100-SXM4-80GB', 'fp8') is None
  with pytest.raises(ValueError, match='int9'):
    peak_flops(h100, 'int9')


def test_every_row_has_a_source():
  for gpu in GPUS:
    assert gpu.source.startswith('https://')
