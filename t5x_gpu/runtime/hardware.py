"""Dense peak FLOP/s and memory of GPUs, by the name that the driver gives them.

Vendors also print figures "with sparsity", twice the dense ones; our matmuls can only reach the
dense ones. A device that is not in the table is unknown (None): an MFU against a guessed peak would
be a wrong number that looks right.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Optional

GIB = 2**30
_NVIDIA = 'https://www.nvidia.com/'
_AMPERE = _NVIDIA + (
  'content/dam/en-zz/Solutions/Data-Center/a100/pdf/'
  'nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf'
)
# Table "NVIDIA H100 Tensor Core GPU preliminary performance specs": dense and sparse.
_HOPPER = 'https://resources.nvidia.com/en-us-tensor-core/gtc22-whitepaper-hopper'
# Table of per-GPU figures, dense and sparse, for HGX B200 and GB200.
_BLACKWELL = 'https://resources.nvidia.com/en-us-blackwell-architecture'

# Other spellings of the dtypes in the table.
_DTYPES = {
  'bfloat16': 'bfloat16',
  'bf16': 'bfloat16',
  'float16': 'float16',
  'fp16': 'float16',
  'f16': 'float16',
  'fp8': 'fp8',
  'float8_e4m3fn': 'fp8',
  'float8_e5m2': 'fp8',
  'tf32': 'tf32',
  'tensorfloat32': 'tf32',
  'float32': 'float32',
  'fp32': 'float32',
  'f32': 'float32',
}


@dataclasses.dataclass(frozen=True)
class Gpu:
  """One row: a kind of GPU.

  Attributes:
    kind: regular expression for the whole of `jax.Device.device_kind`.
    teraflops: dtype -> dense peak in 1e12 FLOP/s. float32 is the peak of the CUDA cores; matmuls of
      float32 arrays may use 'tf32' (`jax_default_matmul_precision`).
    memory_bytes: nominal; a program gets slightly less.
    source: of the figures.
  """

  kind: str
  teraflops: Mapping[str, float]
  memory_bytes: int
  source: str


_A100 = {'bfloat16': 312, 'float16': 312, 'tf32': 156, 'float32': 19.5}
_H100_SXM = {'bfloat16': 989.4, 'float16': 989.4, 'fp8': 1978.9, 'tf32': 494.7, 'float32': 66.9}

GPUS = (
  Gpu(r'NVIDIA A100(-SXM4|-PCIE|-PCIe)-40GB', _A100, 40 * GIB, _AMPERE),
  Gpu(r'NVIDIA A100(-SXM4-80GB| 80GB PCIe)', _A100, 80 * GIB, _AMPERE),
  Gpu(r'NVIDIA H100 80GB HBM3', _H100_SXM, 80 * GIB, _HOPPER),
  Gpu(
    r'NVIDIA H100 PCIe',
    {'bfloat16': 756, 'float16': 756, 'fp8': 1513, 'tf32': 378, 'float32': 51.2},
    80 * GIB,
    _HOPPER,
  ),
  # The die and clocks of the H100 SXM, with more memory.
  Gpu(r'NVIDIA H200', _H100_SXM, 141 * GIB, _NVIDIA + 'en-us/data-center/h200/'),
  # No float32 for the next two: NVIDIA's brief and data sheets disagree (75 or 80, 80 or 90).
  Gpu(
    r'NVIDIA B200',
    {'bfloat16': 2250, 'float16': 2250, 'fp8': 4500, 'tf32': 1100},
    180 * GIB,
    _BLACKWELL,
  ),
  Gpu(
    r'NVIDIA GB200',
    {'bfloat16': 2500, 'float16': 2500, 'fp8': 5000, 'tf32': 1250},
    186 * GIB,
    _BLACKWELL,
  ),
  Gpu(
    r'NVIDIA L40S',
    {'bfloat16': 362.05, 'float16': 362.05, 'fp8': 733, 'tf32': 183, 'float32': 91.6},
    48 * GIB,
    _NVIDIA + 'en-us/data-center/l40s/',
  ),
  Gpu(
    r'NVIDIA L4',
    {'bfloat16': 121, 'float16': 121, 'fp8': 242.5, 'tf32': 60, 'float32': 30.3},
    24 * GIB,
    _NVIDIA + 'en-us/data-center/l4/',
  ),
  # Not Amazon's A10G, which is another chip configuration.
  Gpu(
    r'NVIDIA A10',
    {'bfloat16': 125, 'float16': 125, 'tf32': 62.5, 'float32': 31.2},
    24 * GIB,
    _NVIDIA + 'en-us/data-center/products/a10-gpu/',
  ),
  # No bfloat16 tensor cores before Ampere.
  Gpu(
    r'(NVIDIA |)Tesla T4',
    {'float16': 65, 'float32': 8.1},
    16 * GIB,
    _NVIDIA + 'en-us/data-center/tesla-t4/',
  ),
  Gpu(
    r'(NVIDIA |)Tesla V100-SXM2-16GB',
    {'float16': 125, 'float32': 15.7},
    16 * GIB,
    _NVIDIA + 'en-us/data-center/v100/',
  ),
  Gpu(
    r'(NVIDIA |)Tesla V100-SXM[23]-32GB',
    {'float16': 125, 'float32': 15.7},
    32 * GIB,
    _NVIDIA + 'en-us/data-center/v100/',
  ),
  Gpu(
    r'(NVIDIA |)Tesla V100-PCIE-16GB',
    {'float16': 112, 'float32': 14},
    16 * GIB,
    _NVIDIA + 'en-us/data-center/v100/',
  ),
  Gpu(
    r'(NVIDIA |)Tesla V100-PCIE-32GB',
    {'float16': 112, 'float32': 14},
    32 * GIB,
    _NVIDIA + 'en-us/data-center/v100/',
  ),
)


def find_gpu(device_kind: str) -> Optional[Gpu]:
  """Returns the row for `device_kind` (`jax.Device.device_kind`), None if unknown."""
  return next((gpu for gpu in GPUS if re.fullmatch(gpu.kind, device_kind)), None)


def peak_flops(device_kind: str, dtype: str) -> Optional[float]:
  """Returns the dense peak in FLOP/s of one device, None if unknown.

  Args:
    device_kind: `jax.Device.device_kind`, 'NVIDIA H100 80GB HBM3'.
    dtype: 'bfloat16', 'float16', 'fp8', 'tf32' or 'float32', or numpy's name for one.
  Raises:
    ValueError: the dtype is not in the table.
  """
  if dtype not in _DTYPES:
    raise ValueError(f'No peak is tabulated for dtype {dtype!r}, only for {", ".join(_DTYPES)}.')
  gpu = find_gpu(device_kind)
  teraflops = gpu.teraflops.get(_DTYPES[dtype]) if gpu else None
  # Rounded to whole GFLOP/s: 66.9 * 1e12 is not 66.9e12.
  return None if teraflops is None else round(teraflops * 1e3) * 1e9


def memory_bytes(device_kind: str) -> Optional[int]:
  """Returns the nominal memory of one device in bytes, None if unknown."""
  gpu = find_gpu(device_kind)
  return gpu.memory_bytes if gpu else None
