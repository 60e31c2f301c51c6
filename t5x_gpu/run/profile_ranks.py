"""The device time of every process during one profile, collected by process 0.

A process announces its trace when it begins and publishes the device time when it ends, so
process 0 knows which processes to wait for. A signal reaches processes at steps that differ by one
or two; traces that overlap count as one profile.
"""

import dataclasses
import json
import socket
import time
from collections.abc import Mapping
from typing import Any, Optional

from t5x_gpu.analysis.profile.anatomy import DeviceTime
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.coordination import Store, within

_KEY = 't5x_gpu_monitor/profiles'
_ASK_SECONDS = 3.0
_WAIT_SECONDS = 30.0


class ProfileRanks:
  """Exchanges device times.

  Args:
    store: store that all processes share; None for a single process.
  """

  def __init__(self, store: Optional[Store]):
    self._store = store
    self._rank = distributed.process_index()
    self._own = {'rank': self._rank, 'host': socket.gethostname()}

  def begins(self, *, first_step: int, last_step: int) -> None:
    """Announces that this process takes a trace of these steps."""
    self._publish(first_step, last_step, None)

  def collect(
    self, *, first_step: int, last_step: int, time_of_devices: DeviceTime, of_all: bool
  ) -> list[dict[str, Any]]:
    """Returns rank, host and device time: of every process on process 0, of this process elsewhere.

    Args:
      first_step, last_step: steps of this process's trace.
      time_of_devices: device time of this process.
      of_all: whether every process takes this trace; otherwise only processes that announced one
        do.
    """
    times = dataclasses.asdict(time_of_devices)
    self._publish(first_step, last_step, times)
    own = {**self._own, **times}
    if self._store is None or self._rank:
      return [own]
    deadline = time.monotonic() + _WAIT_SECONDS
    while True:
      found = self._overlapping(first_step, last_step)
      known = {r: trace['device_time'] for r, trace in found.items() if trace['device_time']}
      known[self._rank] = own
      wanted = distributed.process_count() if of_all else len({*found, self._rank})
      if len(known) >= wanted or time.monotonic() > deadline:
        return [known[rank] for rank in sorted(known)]
      time.sleep(0.2)

  def _publish(self, first: int, last: int, times: Optional[Mapping[str, float]]) -> None:
    if self._store is None:
      return
    content = {'first_step': first, 'last_step': last, 'device_time': times and self._own | times}
    within(
      _ASK_SECONDS,
      lambda: self._store.key_value_set(
        f'{_KEY}/{self._rank}/{first}', json.dumps(content), allow_overwrite=True
      ),
    )

  def _overlapping(self, first: int, last: int) -> dict[int, Any]:
    """Returns rank -> published contents of its latest trace that overlaps these steps."""
    pairs = within(_ASK_SECONDS, lambda: self._store.key_value_dir_get(_KEY)) or []
    found = {}
    for key, text in pairs:
      trace = json.loads(text)
      rank = int(key.split('/')[-2])
      if trace['first_step'] <= last and trace['last_step'] >= first:
        if rank not in found or trace['first_step'] > found[rank]['first_step']:
          found[rank] = trace
    return found
