"""Clocks, power, heat, slowdowns and errors of this process's GPUs, by NVML.

A run reads them while it trains. They are read in a thread, because a GPU that fell off its bus can
block NVML.
https://docs.nvidia.com/deploy/nvml-api/
"""

import contextlib
import dataclasses
import logging
import os
import socket
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any, Optional, Self

from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.health.checks import SLOWDOWNS
from t5x_gpu.runtime.machine import own_gpus, physical_gpus

_log = logging.getLogger(__name__)

PERIOD_SECONDS = 10.0
_NVLINK_ERRORS = ('REPLAY', 'RECOVERY', 'CRC_FLIT')  # of the data link layer
_JOIN_SECONDS = 2.0


@dataclasses.dataclass(frozen=True)
class GpuReading:
  """Readings of one GPU at one time; None or () for values that it does not report.

  Attributes:
    uuid: UUID of the GPU.
    sm_mhz: clock of the multiprocessors.
    watts, celsius: power draw, temperature.
    slowdowns: why the clock is held down, except for the power cap.
    ecc_errors: uncorrected memory errors since the driver was loaded.
    nvlink_errors: replays, recoveries and wrong checksums of all links since the driver was loaded.
  """

  uuid: str
  sm_mhz: Optional[int] = None
  watts: Optional[float] = None
  celsius: Optional[int] = None
  slowdowns: tuple[str, ...] = ()
  ecc_errors: Optional[int] = None
  nvlink_errors: Optional[int] = None


def own_uuids() -> tuple[str, ...]:
  """Returns the UUIDs of this process's GPUs."""
  members = distributed.members()
  if members:
    return members[distributed.process_index()].gpus
  return own_gpus(physical_gpus(), os.environ, None)


def read(pynvml: types.ModuleType, uuid: str) -> GpuReading:
  """Returns the readings of one GPU. NVML must be initialized."""

  def ask(function: str, *args: object) -> Any:
    try:
      return getattr(pynvml, function)(*args)
    except (pynvml.NVMLError, AttributeError):  # an older driver, a GPU without ECC or NVLink
      return None

  handle = ask('nvmlDeviceGetHandleByUUID', uuid)
  if handle is None:
    return GpuReading(uuid)
  reasons = ask('nvmlDeviceGetCurrentClocksEventReasons', handle)
  if reasons is None:  # drivers before 535
    reasons = ask('nvmlDeviceGetCurrentClocksThrottleReasons', handle) or 0
  milliwatts = ask('nvmlDeviceGetPowerUsage', handle)
  return GpuReading(
    uuid,
    sm_mhz=ask('nvmlDeviceGetClockInfo', handle, pynvml.NVML_CLOCK_SM),
    watts=None if milliwatts is None else milliwatts / 1000,
    celsius=ask('nvmlDeviceGetTemperature', handle, pynvml.NVML_TEMPERATURE_GPU),
    slowdowns=tuple(dict.fromkeys(name for bit, name in SLOWDOWNS.items() if reasons & bit)),
    ecc_errors=ask(
      'nvmlDeviceGetTotalEccErrors',
      handle,
      pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
      pynvml.NVML_VOLATILE_ECC,
    ),
    nvlink_errors=_nvlink_errors(pynvml, handle, ask),
  )


def _nvlink_errors(
  pynvml: types.ModuleType, handle: object, ask: Callable[..., Any]
) -> Optional[int]:
  counts = []
  for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
    state = ask('nvmlDeviceGetNvLinkState', handle, link)
    if state is None:  # no link has this or a higher number
      break
    if state:
      counts += [
        ask(
          'nvmlDeviceGetNvLinkErrorCounter',
          handle,
          link,
          getattr(pynvml, f'NVML_NVLINK_ERROR_DL_{name}'),
        )
        for name in _NVLINK_ERRORS
      ]
  known = [count for count in counts if count is not None]
  return sum(known) if known else None


class GpuSensors:
  """Reads GPUs every `period_seconds` in a thread, and warns about problems.

  Args:
    uuids: UUIDs of the GPUs; () reads nothing.
    period_seconds: time between readings.
  """

  def __init__(self, uuids: Sequence[str], *, period_seconds: float = PERIOD_SECONDS):
    self._uuids, self._period = tuple(uuids), period_seconds
    self._first: dict[str, GpuReading] = {}
    self._last: dict[str, GpuReading] = {}
    self._warned: set[tuple[str, str]] = set()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._work, name='gpu_sensors', daemon=True)

  def __enter__(self) -> Self:
    if self._uuids:
      self._thread.start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._stop.set()
    if self._uuids:
      self._thread.join(_JOIN_SECONDS)

  def metrics(self) -> dict[str, float]:
    """Returns the numbers over this process's GPUs at the last reading; {} without GPUs.

    Lowest clock, mean power, highest temperature, slowed GPUs, errors since the run started.
    """
    readings = tuple(self._last.values())
    values: dict[str, float] = {}
    if clocks := [r.sm_mhz for r in readings if r.sm_mhz is not None]:
      values['sm_mhz_min'] = min(clocks)
    if watts := [r.watts for r in readings if r.watts is not None]:
      values['watts_mean'] = sum(watts) / len(watts)
    if celsius := [r.celsius for r in readings if r.celsius is not None]:
      values['celsius_max'] = max(celsius)
    if readings:
      values['slowed'] = sum(bool(r.slowdowns) for r in readings)
    for name in ('ecc_errors', 'nvlink_errors'):
      new = [n for r in readings if (n := self._new_errors(r, name)) is not None]
      if new:
        values[name] = sum(new)
    return values

  def _new_errors(self, reading: GpuReading, name: str) -> Optional[int]:
    now, before = getattr(reading, name), getattr(self._first[reading.uuid], name)
    return None if now is None or before is None else max(0, now - before)

  def _work(self) -> None:
    import pynvml

    try:
      pynvml.nvmlInit()
    except pynvml.NVMLError as e:
      _log.warning('GPU clocks, power and errors are not recorded: %s.', e)
      return
    with contextlib.suppress(pynvml.NVMLError):
      while True:
        for uuid in self._uuids:
          reading = read(pynvml, uuid)
          self._first.setdefault(uuid, reading)
          self._last = {**self._last, uuid: reading}
          self._warn_about(reading)
        if self._stop.wait(self._period):
          break
      pynvml.nvmlShutdown()

  def _warn_about(self, reading: GpuReading) -> None:
    """Warns once for each GPU and problem."""
    problems = [f'slowed down by {reason}' for reason in reading.slowdowns]
    for name, text in (
      ('ecc_errors', 'uncorrected memory errors'),
      ('nvlink_errors', 'NVLink errors'),
    ):
      if self._new_errors(reading, name):
        problems.append(f'new {text}')
    for problem in problems:
      if (reading.uuid, problem) not in self._warned:
        self._warned.add((reading.uuid, problem))
        _log.warning('%s on %s: %s.', reading.uuid, socket.gethostname(), problem)
