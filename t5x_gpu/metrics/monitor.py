"""Monitors speed per device, peak memory, GPU sensors and the slowest process."""

import contextlib
import logging
from collections.abc import Sequence
from typing import Any, Optional, Self

from t5x_gpu.metrics.speed import ModelSpeed, peak_memory_bytes
from t5x_gpu.metrics.throughput import StepTimes
from t5x_gpu.runtime.health.gpu_sensors import GpuSensors
from t5x_gpu.runtime.health.rank_reports import RankReport, RankReports, Slowest, slowest

_log = logging.getLogger(__name__)

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
    local_devices: Sequence[Any],
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
