"""A prediction's assumptions about hardware that is not there, each figure with its source.

Set them in a gin file for `plan` alone, or on its command line:

    python -m t5x_gpu.plan --gin_file=my.gin --gpu=h100 --gin.Assumptions.network_gigabits=200

`calibrated` replaces shares of the peak by values that scripts/bench_gpu.sh measured on the GPU.
`Assumptions.effective` returns the values for a GPU, each with its source.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Optional

from t5x_gpu.errors import ConfigError
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.tools.planning.gpu_targets import TARGETS, GpuTarget

_NCCL = 'https://github.com/NVIDIA/nccl/blob/v2.19.3-1/src/graph/tuning.cc'
_H200 = 'one H200 (docs/performance.md#one-h200)'
_DGX = 'https://docs.nvidia.com/dgx/dgxh100-user-guide/introduction-to-dgxh100.html'

# Shares of the bytes of an axis that XLA's schedule hides behind matrix kernels, for a plan that
# cannot compile for GPUs. From steps of 134M to 8B on 8 and 64 H100, tests/aot/recorded.json.
HIDDEN = {'stage': 0.0, 'data': 0.85, 'fsdp': 0.8, 'context': 0.8, 'expert': 0.3, 'model': 0.4}


class Effective(NamedTuple):
  """A figure that a prediction uses, and its source."""

  value: float | Mapping[str, float]
  source: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumptions:
  """Efficiencies (shares of a datasheet's peak) and speeds of links.

  Attributes:
    gemm_efficiency: for matrix products large enough to fill the GPU; None for 0.7 before Hopper
      and 0.66 since, because Hopper's clock falls under this load.
    fp8_gemm_efficiency: for FP8 matrix products; conversions to FP8 are bound by the memory.
    mosaic_efficiency, triton_efficiency: for attention kernels, forward and backward.
    memory_efficiency: share of the memory bandwidth, for everything except matrix products.
    kernel_seconds: minimum time from the start of a kernel to the start of the next.
    nvlink_efficiency: share of NVLink's bandwidth in one direction, in a ring of NCCL.
    network_gigabits: Gbit/s of the network adapters of one GPU; None for the GPU's usual adapters.
    network_efficiency: share of the network's bandwidth, in a ring of NCCL.
    collective_seconds: time to start a collective.
    nvlink_hop_seconds, network_hop_seconds: latency of a step of a ring.
    hidden_shares: mesh axis -> share of its bytes that travel behind matrix kernels, if the step
      was not compiled for a GPU; missing axes keep the default.
    busy_share: share of the time of matrix kernels during which a collective may run.
    fragmentation: share of the temporaries that the allocator loses between arrays.
    save_gigabytes: GB/s that one host writes to the storage of checkpoints.
    sources: parameter -> source of its value, if it is neither from gin nor the default; set by a
      calibration.
  """

  gemm_efficiency: Optional[float] = None
  fp8_gemm_efficiency: float = 0.63
  mosaic_efficiency: float = 0.39
  triton_efficiency: float = 0.31
  memory_efficiency: float = 0.8
  kernel_seconds: float = 4e-6
  nvlink_efficiency: float = 0.78
  network_gigabits: Optional[float] = None
  network_efficiency: float = 0.78
  collective_seconds: float = 8.4e-6
  nvlink_hop_seconds: float = 3.4e-6
  network_hop_seconds: float = 9.6e-6
  hidden_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)
  busy_share: float = 0.9
  fragmentation: float = 0.02
  save_gigabytes: float = 2.0
  sources: Mapping[str, str] = dataclasses.field(default_factory=dict)

  def __post_init__(self) -> None:
    unknown = self.sources.keys() - SOURCES.keys()
    if unknown:
      raise ConfigError(
        f'Assumptions.sources has {", ".join(sorted(unknown))}, which Assumptions lacks.',
        fix=f'The names are {", ".join(SOURCES)}.',
        parameters=('Assumptions.sources',),
        docs='plan.md#how-it-is-computed',
      )
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name == 'sources':
        continue
      if field.name == 'hidden_shares':
        wrong = {a: s for a, s in value.items() if a not in HIDDEN or not 0 <= s <= 1}
        if wrong:
          raise ConfigError(
            f'Assumptions.hidden_shares = {dict(value)!r}: {wrong} is not the share (0 to 1) of a '
            'mesh axis.',
            fix=f'The mesh axes are {", ".join(HIDDEN)}.',
            parameters=('Assumptions.hidden_shares',),
          )
      elif value is not None and not 0 < value <= (1 if _is_share(field.name) else float('inf')):
        raise ConfigError(
          f'Assumptions.{field.name} = {value!r} must be above 0'
          + (' and at most 1: it is a share.' if _is_share(field.name) else '.'),
          fix=f'The default is {field.default}.',
          parameters=(f'Assumptions.{field.name}',),
        )

  def gemm_share(self, gpu: GpuTarget) -> float:
    """Returns the efficiency of matrix products on `gpu`."""
    if self.gemm_efficiency is not None:
      return self.gemm_efficiency
    return 0.66 if float(gpu.compute_capability) >= 9 else 0.7

  def gigabits(self, gpu: GpuTarget) -> float:
    """Returns the Gbit/s of the network adapters of one `gpu`."""
    return self.network_gigabits or gpu.network_gigabits

  def hidden_share(self, axes: tuple[str, ...]) -> float:
    """Returns the hidden share of the bytes over `axes`, which is the least hidden axis's share."""
    return min(self._shares()[axis] for axis in axes)

  def _shares(self) -> dict[str, float]:
    return {**HIDDEN, **self.hidden_shares}

  def effective(self, gpu: GpuTarget) -> dict[str, Effective]:
    """Returns parameter -> its value for `gpu`, with the source.

    The source is 'measured: ...', 'set in gin' for a value that differs from the default, or the
    default's source.
    """
    default = Assumptions()
    of_gpu = {
      'gemm_efficiency': self.gemm_share(gpu),
      'network_gigabits': self.gigabits(gpu),
      'hidden_shares': self._shares(),
    }
    found = {}
    for name, source in SOURCES.items():
      given = getattr(self, name)
      if name in self.sources:
        source = self.sources[name]
      elif given != getattr(default, name):
        source = 'set in gin'
      elif name in _OF_HOPPER and float(gpu.compute_capability) >= 10:
        source = f"Hopper's value, not known for {gpu.device_kind}. {source}"
      found[name] = Effective(of_gpu.get(name, given), source)
    return found


def _is_share(name: str) -> bool:
  return name.endswith(('_efficiency', '_share')) or name == 'fragmentation'


# Parameter -> source of its default.
SOURCES = {
  'gemm_efficiency': f'Hopper: 654 of 989 TFLOP/s, 8192 x 8192 x 8192 on {_H200}; before: '
  'Rosetta-Pax 5B on A100 (docs/plan.md#checks)',
  'fp8_gemm_efficiency': f'1253 of 1979 TFLOP/s, the same product with scales on {_H200}',
  'mosaic_efficiency': '383 of 989 TFLOP/s, forward and backward, 2048 causal positions, heads of '
  f'128, on {_H200}',
  'triton_efficiency': '305 of 989 TFLOP/s forward, 4096 causal positions, H100: '
  'https://github.com/apple/axlearn/blob/main/axlearn/common/flash_attention/'
  'gpu_attention_benchmark.py',
  'memory_efficiency': 'a round figure: 0.79 in the bfloat16 step, 0.68 in the FP8 step on '
  f'{_H200}; the copy of scripts/bench_gpu.sh measures it',
  'kernel_seconds': 'a round figure for a kernel in a CUDA graph',
  'nvlink_efficiency': f'235 of 300 GB/s on A100, where NCCL caps its own estimate: {_NCCL}',
  'network_gigabits': f'one adapter per GPU, 400 Gbit/s since Hopper, 200 on A100: {_DGX}',
  'network_efficiency': 'as nvlink_efficiency',
  'collective_seconds': f'base latency of a ring, protocol Simple: {_NCCL}',
  'nvlink_hop_seconds': f'latency of a step, protocol Simple: {_NCCL}',
  'network_hop_seconds': f'latency of a step, protocol Simple: {_NCCL}',
  'hidden_shares': 'shares in the steps of tests/aot/recorded.json',
  'busy_share': 'a round figure: the first and last collective of a loop have nothing to hide in',
  'fragmentation': 'a round figure',
  'save_gigabytes': 'a round figure for parallel storage; benchmarks/checkpoints.py measures yours',
}
assert {*SOURCES, 'sources'} == {field.name for field in dataclasses.fields(Assumptions)}
# Defaults that were measured on Hopper and are also used for later GPUs.
_OF_HOPPER = ('gemm_efficiency', 'fp8_gemm_efficiency', 'mosaic_efficiency', 'triton_efficiency')


# A plan looks for results of its GPU in benchmarks/results, which keeps them, and in
# build/bench_gpu, where the script writes them; both in the current folder and in the repository.
NONE = 'none'
FOLDERS = ('benchmarks/results', 'build/bench_gpu')
_REPOSITORY = pathlib.Path(__file__).parents[3]
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
    ConfigError: `flag` is not such a file, or its values are of another GPU.
  """
  if flag == NONE:
    return assumed
  if flag:
    found = read(pathlib.Path(flag))
    if found.gpu != gpu:
      settings = ' '.join(f'--gin.Assumptions.{name}={v:.3g}' for name, v in found.values.items())
      raise ConfigError(
        f'--calibrate={flag} was measured on {found.gpu.device_kind}, which does not apply to '
        f'{gpu.device_kind}.',
        fix=f'Plan with --gpu={found.gpu.name}; or, if you expect the same of your GPU, write '
        f'{settings}.',
        docs='plan.md#how-it-is-computed',
      )
  else:
    here = dict.fromkeys(
      root / name for root in (pathlib.Path.cwd(), _REPOSITORY) for name in FOLDERS
    )
    found = find(gpu, list(here))
    found = found and found.without(assumed)
  return found.applied(assumed) if found else assumed


def find(gpu: GpuTarget, folders: Sequence[pathlib.Path]) -> Optional[Calibration]:
  """Returns the calibration of `gpu` in these folders, or None.

  Of several, one that the script wrote on this machine (build/bench_gpu) comes before
  benchmarks/results, then the one with the most values, then the newest.
  """
  found = []
  for path in (path for folder in folders for path in folder.glob('*.json')):
    try:
      calibration = read(path)
    except ConfigError:  # results of another benchmark
      continue
    if calibration.gpu == gpu:
      found.append(calibration)
  own = pathlib.Path(FOLDERS[-1]).name
  return max(
    found,
    key=lambda c: (c.path.parent.name == own, len(c.values), c.path.stat().st_mtime),
    default=None,
  )


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


def _results(path: pathlib.Path) -> Json:
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


def _measured(rows: list[Json], gpu: GpuTarget) -> Iterator[tuple[str, float]]:
  for name, dtype in (('gemm_efficiency', 'bfloat16'), ('fp8_gemm_efficiency', 'fp8')):
    rates = [
      row['tflops']
      for row in rows
      if row.get('what') == 'matmul'
      and row.get('precision') == dtype
      and row.get('is_fp8_gemm', dtype != 'fp8')
    ]
    if rates:
      yield name, min(1.0, max(rates) * 1e12 / gpu.peak_flops(dtype))
  copies = [row['gigabytes_per_second'] for row in rows if row.get('what') == 'copy']
  if copies:
    yield 'memory_efficiency', min(1.0, max(copies) * 1e9 / gpu.memory_bandwidth)
  for name, kernel in (('mosaic_efficiency', 'mosaic'), ('triton_efficiency', 'triton')):
    rate = _attention(rows, kernel)
    if rate:
      yield name, min(1.0, rate * 1e12 / gpu.peak_flops('bfloat16'))


def _attention(rows: list[Json], kernel: str) -> Optional[float]:
  """Returns TFLOP/s forward and backward of a kernel, on rows closest to 4096."""
  timed = [
    (abs(row['length'] - _LENGTH), row['backward']['tflops'])
    for row in rows
    if kernel in row.get('backend', '') and 'backward' in row and not row.get('packed')
  ]
  return min(timed)[1] if timed else None
