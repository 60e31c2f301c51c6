"""Assumptions measured on a GPU: results of scripts/bench_gpu.sh replace the defaults.

A plan looks for results of its GPU in benchmarks/results, which keeps them, and in build/bench_gpu,
where the script writes them; both in the current folder and in the repository.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.errors import ConfigError
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.runtime.xla.gpu_targets import TARGETS, GpuTarget

NONE = 'none'
FOLDERS = ('benchmarks/results', 'build/bench_gpu')
_REPOSITORY = pathlib.Path(__file__).parents[2]
# Row length whose attention efficiency is used for all lengths.
_LENGTH = 4096


@dataclasses.dataclass(frozen=True)
class Calibration:
  """Measured values from a file of results.

  Attributes:
    values: parameter of Assumptions -> measured value.
    gpu: GPU on which they were measured.
    path: the file.
  """

  values: Mapping[str, float]
  gpu: GpuTarget
  path: pathlib.Path

  def applied(self, assumed: Assumptions) -> Assumptions:
    """Returns `assumed` with the measured values, naming the file as their source."""
    measured = dict.fromkeys(self.values, f'measured: {self.gpu.device_kind}, {self.path}')
    return dataclasses.replace(assumed, **self.values, sources={**assumed.sources, **measured})

  def without(self, assumed: Assumptions) -> 'Calibration':
    """Returns the measured values of parameters that gin leaves at their defaults."""
    default = Assumptions()
    kept = {n: v for n, v in self.values.items() if getattr(assumed, n) == getattr(default, n)}
    return dataclasses.replace(self, values=kept)


def calibrated(flag: Optional[str], gpu: GpuTarget, assumed: Assumptions) -> Assumptions:
  """Returns a plan's assumptions about `gpu`, with values measured on this GPU.

  Args:
    flag: --calibrate: a file whose values replace all others, or 'none' for no calibration. None
      looks for existing results of `gpu`, which replace only defaults.
    gpu: GPU of the prediction.
    assumed: assumptions as configured by gin.
  Raises:
    ConfigError: `flag` is not such a file.
  """
  if flag == NONE:
    return assumed
  if flag:
    found = read(pathlib.Path(flag))
    found = found if found.gpu == gpu else None
  else:
    here = dict.fromkeys(
      root / name for root in (pathlib.Path.cwd(), _REPOSITORY) for name in FOLDERS
    )
    found = find(gpu, list(here))
    found = found and found.without(assumed)
  return found.applied(assumed) if found else assumed


def check_is_used(flag: Optional[str], gpus: Sequence[GpuTarget]) -> None:
  """Raises ConfigError if --calibrate is a file of a GPU that is not in `gpus`."""
  if flag in (None, NONE):
    return
  found = read(pathlib.Path(flag))
  if found.gpu not in gpus:
    planned = ' or '.join(dict.fromkeys(gpu.device_kind for gpu in gpus))
    settings = ' '.join(f'--gin.Assumptions.{name}={v:.3g}' for name, v in found.values.items())
    raise ConfigError(
      f'--calibrate={flag} was measured on {found.gpu.device_kind}, which does not apply to '
      f'{planned}.',
      fix=f'Plan with --gpu={found.gpu.name}; or, if you expect the same of your GPU, write '
      f'{settings}.',
      docs='plan.md#how-it-is-computed',
    )


def find(gpu: GpuTarget, folders: Sequence[pathlib.Path]) -> Optional[Calibration]:
  """Returns the calibration of `gpu` with the most values in these folders, or the newest such."""
  found = []
  for path in (path for folder in folders for path in folder.glob('*.json')):
    try:
      calibration = read(path)
    except ConfigError:  # results of another benchmark
      continue
    if calibration.gpu == gpu:
      found.append(calibration)
  return max(found, key=lambda c: (len(c.values), c.path.stat().st_mtime), default=None)


def read(path: pathlib.Path) -> Calibration:
  """Returns the calibration in `path`, the results.json of scripts/bench_gpu.sh.

  Raises:
    ConfigError: the file is missing or of another kind, has only tiny sizes, or an unknown GPU.
  """
  results = _results(path)
  rows, cards = [], set()
  for part, result in results.items():
    if result.get('small') is False:
      cards.add(result['machine']['card'])
      rows += [{**row, 'part': part} for row in result['rows']]
  gpu = next((t for t in TARGETS.values() if any(t.device_kind in str(c) for c in cards)), None)
  if len(cards) != 1 or gpu is None:
    raise ConfigError(
      f'{path} must have results of exactly one supported GPU, but has: '
      f'{", ".join(map(str, cards)) or "only tiny sizes on the CPU"}.',
      fix=f'Run scripts/bench_gpu.sh on one of {", ".join(TARGETS)}.',
      docs='plan.md#how-it-is-computed',
    )
  values = dict(_measured(rows, gpu))
  if not values:
    raise ConfigError(
      f'{path} has neither ceilings nor attention.',
      fix='Run scripts/bench_gpu.sh --parts=ceilings,attention_4096 first.',
      docs='plan.md#how-it-is-computed',
    )
  return Calibration(values, gpu, path)


def _results(path: pathlib.Path) -> Mapping[str, Any]:
  try:
    results = json.loads(path.read_text(encoding='utf-8'))
  except OSError as e:
    raise ConfigError(
      f'--calibrate={path} cannot be read: {e.strerror}.',
      fix='Give the results.json of scripts/bench_gpu.sh, in build/bench_gpu by default.',
      docs='plan.md#how-it-is-computed',
    ) from e
  except ValueError:
    results = None
  wanted = {'small', 'machine', 'rows'}
  if not isinstance(results, dict) or not all(
    isinstance(r, dict) and wanted <= r.keys() for r in results.values()
  ):
    raise ConfigError(
      f'--calibrate={path} is not a file of scripts/bench_gpu.sh.',
      fix='Give its results.json: part -> status, machine and rows.',
      docs='plan.md#how-it-is-computed',
    )
  return results


def _measured(rows: list[Mapping[str, Any]], gpu: GpuTarget) -> Iterator[tuple[str, float]]:
  for name, precision in (('gemm_efficiency', 'bfloat16'), ('fp8_gemm_efficiency', 'fp8')):
    rates = [
      row['tflops']
      for row in rows
      if row.get('what') == 'matmul'
      and row.get('precision') == precision
      and row.get('is_fp8_gemm', True)
    ]
    if rates:
      yield name, min(1.0, max(rates) * 1e12 / gpu.peak_flops(precision))
  copies = [row['gigabytes_per_second'] for row in rows if row.get('what') == 'copy']
  if copies:
    yield 'memory_efficiency', min(1.0, max(copies) * 1e9 / gpu.memory_bandwidth)
  for name, kernel in (('mosaic_efficiency', 'mosaic'), ('triton_efficiency', 'triton')):
    rate = _attention(rows, kernel)
    if rate:
      yield name, min(1.0, rate * 1e12 / gpu.peak_flops('bfloat16'))


def _attention(rows: list[Mapping[str, Any]], kernel: str) -> Optional[float]:
  """Returns TFLOP/s forward and backward of a kernel, on rows closest to 4096."""
  timed = [
    (abs(row['length'] - _LENGTH), row['backward']['tflops'])
    for row in rows
    if kernel in row.get('backend', '') and 'backward' in row and not row.get('packed')
  ]
  return min(timed)[1] if timed else None
