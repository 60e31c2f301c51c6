"""The entries of a run's watchdogs in the store of process 0: heartbeats and verdicts."""

import dataclasses
import json
from typing import Optional

from t5x_gpu.runtime.cluster.coordination import Store
from t5x_gpu.runtime.heartbeats import Beat

EXIT_ERROR = 1  # another rank failed with an error
EXIT_STUCK = 86  # this or another rank made no progress
EXIT_RANK_DEAD = 87  # another rank sent no heartbeat
STUCK, DEAD, FAILED = 'stuck', 'dead', 'failed'
_BEATS = 't5x_gpu_watchdog/beats'
_MAIN = 't5x_gpu_watchdog/main'  # read by every process: process 0's heartbeat, and verdicts
_END = 't5x_gpu_watchdog/end'


@dataclasses.dataclass(frozen=True)
class EndReason:
  """Why all processes end.

  Attributes:
    kind: STUCK, DEAD or FAILED.
    text: for the report.
    code: exit code.
  """

  kind: str
  text: str
  code: int


class Noticeboard:
  """The watchdogs' keys in the store. Any call may raise, or block while process 0 is unreachable.

  Args:
    store: key-value store that all processes share.
    rank: index of this process.
  """

  def __init__(self, store: Store, *, rank: int):
    self._store = store
    self._rank = rank

  def post_beat(self, beat: Beat) -> None:
    """Replaces this process's heartbeat."""
    self._store.key_value_set(f'{_BEATS}/{self._rank}', beat.to_json(), allow_overwrite=True)
    if self._rank == 0:
      self._store.key_value_set(f'{_MAIN}/beat', beat.to_json(), allow_overwrite=True)

  def post_verdict(self, verdict: EndReason) -> None:
    """Posts this process's verdict for all to read."""
    text = json.dumps(dataclasses.asdict(verdict))
    self._store.key_value_set(f'{_MAIN}/verdict_{self._rank}', text, allow_overwrite=True)

  def beats(self) -> dict[int, Beat]:
    """Returns the last heartbeat of each rank."""
    beats = [Beat.from_json(text) for _, text in self._store.key_value_dir_get(_BEATS)]
    return {beat.rank: beat for beat in beats}

  def news(self) -> tuple[Optional[Beat], Optional[EndReason]]:
    """Returns process 0's heartbeat and the verdict with the lowest key; None if missing."""
    beat, verdict = None, None
    for key, text in sorted(self._store.key_value_dir_get(_MAIN)):
      if key.endswith('/beat'):
        beat = Beat.from_json(text)
      elif verdict is None:
        verdict = EndReason(**json.loads(text))
    return beat, verdict

  def wait_for_end(self, *, seconds: float) -> None:
    """Returns once every process has reached the end of its block; raises if one does not."""
    self._store.wait_for_all(_END, seconds=seconds)

  def has_ended(self) -> bool:
    """Returns whether process 0, and the store with it, is known to be gone."""
    return self._store.has_ended()
