"""Monitors speed per device, peak memory, GPU sensors and the slowest process.

`model_speed` gives the cost of a step, `RankReports` the working time of every process, and
`Monitor` the numbers of one window of steps.
"""

import contextlib
import dataclasses
import json
import logging
import socket
import statistics
from collections.abc import Mapping, Sequence
from typing import Optional, Self

import jax

from t5x_gpu.metrics.throughput import StepTimes, mfu
from t5x_gpu.models.flops import step_flops, step_tokens
from t5x_gpu.models.model import Model, config_of
from t5x_gpu.runtime import hardware
from t5x_gpu.runtime.cluster.coordination import Store, within
from t5x_gpu.runtime.health.gpu_sensors import GpuSensors
from t5x_gpu.runtime.topology import Device

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ModelSpeed:
  """The cost of a step on each device.

  Attributes:
    tokens: tokens of a step, per device; padding included.
    flops: model FLOPs of a step, per device, without recomputation.
    peak_flops: dense peak of the device in FLOP/s for the model's dtype; None if unknown.
    dtype: dtype of the matmuls.
  Source: Chowdhery et al. 2022 (PaLM), appendix B; models/flops.py.
  """

  tokens: float
  flops: float
  peak_flops: Optional[float]
  dtype: str

  def mfu(self, step_seconds: float) -> Optional[float]:
    """Returns the model FLOPs utilization, 0 to 1; None if the peak is unknown."""
    return mfu(self.flops, step_seconds=step_seconds, peak_flops=self.peak_flops)

  def tflops_per_second(self, step_seconds: float) -> float:
    """Returns model TFLOP/s per device."""
    return self.flops / step_seconds / 1e12

  def metrics(self, step_seconds: Optional[float]) -> dict[str, float]:
    """Returns the known numbers by metric name; {} without a step."""
    if not step_seconds:
      return {}
    values = {
      'tokens_per_second_per_device': self.tokens / step_seconds,
      'tflops_per_second_per_device': self.tflops_per_second(step_seconds),
      'mfu': self.mfu(step_seconds),
    }
    return {name: value for name, value in values.items() if value is not None}


def model_speed(
  model: Model, shapes: Mapping[str, Sequence[int]], devices: Sequence[Device]
) -> ModelSpeed:
  """Returns the costs of a step.

  Args:
    model: the model, for its FLOPs and dtype.
    shapes: feature -> [batch, length] of the global batch.
    devices: all devices of the run.
  """
  tokens, flops = (of(model, shapes) / len(devices) for of in (step_tokens, step_flops))
  config, kind = config_of(model), devices[0].device_kind
  dtype = 'float32' if config is None else config.dtype
  # By default JAX multiplies float32 matrices in TF32 on GPUs that support it.
  tf32 = dtype == 'float32' and jax.config.jax_default_matmul_precision is None
  peak = (hardware.peak_flops(kind, 'tf32') if tf32 else None) or hardware.peak_flops(kind, dtype)
  return ModelSpeed(tokens, flops, peak, dtype)


def peak_memory_bytes(devices: Sequence[jax.Device]) -> Optional[int]:
  """Returns the peak memory in use on any of `devices`; None if they do not report it."""
  peaks = [(device.memory_stats() or {}).get('peak_bytes_in_use') for device in devices]
  return max((peak for peak in peaks if peak is not None), default=None)


# In a synchronous step all processes take equally long: the fast ones wait in a collective. So they
# report the seconds in which their hosts work rather than wait for devices. A profile compares the
# devices (docs/monitor.md).
_KEY = 't5x_gpu_monitor/ranks'
_ASK_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class RankReport:
  """Means of one process over its last window of steps.

  Attributes:
    rank: process index.
    host: name of the host.
    step: last step of the window.
    host_seconds: seconds per step in which the host works: input, dispatch, logging.
    input_seconds: the part of `host_seconds` spent waiting for input.
    peak_memory_bytes: largest memory in use on one of the process's devices; None if unknown.
    sm_mhz_min: lowest clock of the process's GPUs; None if unknown.
  """

  rank: int
  host: str
  step: int
  host_seconds: float
  input_seconds: float
  peak_memory_bytes: Optional[int] = None
  sm_mhz_min: Optional[float] = None

  @property
  def name(self) -> str:
    return f'process {self.rank} on {self.host}'


@dataclasses.dataclass(frozen=True)
class Slowest:
  """The process whose host works longest, and its seconds per step above the median."""

  report: RankReport
  seconds_behind: float


def slowest(reports: Sequence[RankReport]) -> Optional[Slowest]:
  """Returns the slowest of several processes; None for fewer than two."""
  if len(reports) < 2:
    return None
  last = max(reports, key=lambda r: r.host_seconds)
  return Slowest(last, last.host_seconds - statistics.median(r.host_seconds for r in reports))


class RankReports:
  """Publishes this process's report; process 0 reads all. Never raises, never blocks for long.

  Args:
    store: store that all processes share; None for a single process.
    rank: index of this process.
  """

  def __init__(self, store: Optional[Store], *, rank: int):
    self._store, self._rank = store, rank

  def post(self, **values: float | int | None) -> RankReport:
    """Publishes and returns the report with these `values`."""
    report = RankReport(rank=self._rank, host=socket.gethostname(), **values)
    if self._store is not None:
      text = json.dumps(dataclasses.asdict(report))
      key = f'{_KEY}/{self._rank}'
      within(_ASK_SECONDS, lambda: self._store.key_value_set(key, text, allow_overwrite=True))
    return report

  def read(self) -> list[RankReport]:
    """Returns the last report of each process; [] except on process 0 of several."""
    if self._store is None or self._rank != 0:
      return []
    found = within(_ASK_SECONDS, lambda: self._store.key_value_dir_get(_KEY)) or []
    reports = []
    for _, text in found:
      with contextlib.suppress(ValueError, TypeError):  # written by another version of this code
        reports.append(RankReport(**json.loads(text)))
    return sorted(reports, key=lambda r: r.rank)


# Warn if a host works this share of the step longer than other hosts.
_MOST_BEHIND = 0.1


class Monitor(contextlib.ExitStack):
  """Numbers of one window of steps; every process computes them, process 0 logs them.

  Args:
    speed: cost of a step.
    local_devices: devices of this process.
    sensors: sensors of its GPUs.
    ranks: exchanges reports between processes.
  """

  def __init__(
    self,
    speed: ModelSpeed,
    *,
    local_devices: Sequence[jax.Device],
    sensors: GpuSensors,
    ranks: RankReports,
  ):
    super().__init__()
    self._speed, self._local_devices = speed, tuple(local_devices)
    self._sensors, self._ranks = sensors, ranks
    self._warned: set[int] = set()

  def __enter__(self) -> Self:
    super().__enter__()
    self.enter_context(self._sensors)
    return self

  def window(self, step: int, times: StepTimes) -> dict[str, float]:
    """Returns the metrics of the steps up to `step`, which took `times`."""
    peak, gpus = peak_memory_bytes(self._local_devices), self._sensors.metrics()
    values = {f'train/{k}': v for k, v in self._speed.metrics(times.step_seconds).items()}
    values |= {f'gpu/{name}': value for name, value in gpus.items()}
    reports = []
    if times.step_seconds:
      self._ranks.post(
        step=step,
        host_seconds=times.host_seconds,
        input_seconds=(times.input_wait_fraction or 0.0) * times.step_seconds,
        peak_memory_bytes=peak,
        sm_mhz_min=gpus.get('sm_mhz_min'),
      )
      reports = self._ranks.read()
    peaks = [r.peak_memory_bytes for r in reports if r.peak_memory_bytes is not None]
    if peak is not None:
      values['train/peak_memory_bytes'] = max([peak, *peaks])
    clocks = [r.sm_mhz_min for r in reports if r.sm_mhz_min is not None]
    if clocks:
      values['gpu/sm_mhz_min'] = min(clocks)
    last = slowest(reports)
    if last is not None:
      values['train/slowest_rank'] = last.report.rank
      values['train/slowest_rank_seconds'] = last.seconds_behind
      self._warn_about(last, reports, times.step_seconds)
    return values

  def _warn_about(
    self, last: Slowest, reports: Sequence[RankReport], step_seconds: Optional[float]
  ) -> None:
    """Warns once for each process that slows down the others."""
    report = last.report
    late = step_seconds and last.seconds_behind > _MOST_BEHIND * step_seconds
    if late and report.rank not in self._warned:
      self._warned.add(report.rank)
      _log.warning(
        'Slow host: %s spends %.3f s per step there, %.3f s more than the median of %d processes; '
        '%.3f s are spent waiting for input. A step takes %.3f s.',
        report.name,
        report.host_seconds,
        last.seconds_behind,
        len(reports),
        report.input_seconds,
        step_seconds,
      )
