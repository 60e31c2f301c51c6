"""Decides what follows when the processes of a run have ended: the end, or another start.

Pure: no clock, process or socket. `launch` calls it with what happened; a simulation may replay it.
"""

import dataclasses
import signal
from typing import Annotated, Optional, Union

from t5x_gpu.storage.json_schema import Whole

# Exit codes of processes that were asked to stop: done, saved for the scheduler, Ctrl-C.
EXIT_PREEMPTED, EXIT_INTERRUPTED = 85, 130
STOPPED_CODES = (0, EXIT_PREEMPTED, EXIT_INTERRUPTED)
EXIT_USAGE = 2  # argparse
EXIT_CONFIG = 78  # a mistake in the configuration, mesh, model or shapes
_FINAL_CODES = (*STOPPED_CODES, EXIT_USAGE, EXIT_CONFIG)
# Processes that lose another one exit with these codes as well, so they do not show who failed.
EXIT_ERROR = 1  # another rank failed with an error
EXIT_STUCK = 86  # this or another rank made no progress
EXIT_RANK_DEAD = 87  # another rank sent no heartbeat
SHARED_CODES = (EXIT_ERROR, EXIT_STUCK, EXIT_RANK_DEAD)
# Signals from outside: two processes that get them have nothing in common.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)
# The exit code of a process, or minus the signal that ended it.
ReturnCode = Annotated[int, Whole(-64, 255)]
# A step counts as done when its numbers have arrived; the next one is already running.
STEPS_IN_FLIGHT = 1


@dataclasses.dataclass(frozen=True)
class Ended:
  """How the processes of one start ended.

  Attributes:
    code: exit code of the process that failed first, minus the signal if one ended it; 0 if none.
    failed: processes that had failed when the first failure was seen.
    step: the last step that a process had finished; None before the first one.
    asked: whether a signal asked the run to stop: Ctrl-C, SIGTERM, ...
    paused: whether the processes have saved and ended to continue on more hosts.
    is_lost: whether no process failed, but a host or the network.
  """

  code: ReturnCode
  failed: frozenset[int] = frozenset()
  step: Optional[int] = None
  asked: bool = False
  paused: bool = False
  is_lost: bool = False

  @property
  def culprits(self) -> frozenset[int]:
    """Processes that failed by themselves; empty if the exit code does not show which."""
    return frozenset() if self.code in SHARED_CODES else self.failed

  def repeats(self, last: 'Ended') -> bool:
    """Returns whether this is the failure of `last` again: same step; same process or code."""
    if self.is_lost or last.is_lost:
      return False
    if self.step is None or last.step is None:
      is_same_step = self.step == last.step
    else:
      is_same_step = abs(self.step - last.step) <= STEPS_IN_FLIGHT
    is_same_code = self.code == last.code and self.code not in _FROM_OUTSIDE
    may_be_same = not self.culprits or not last.culprits or bool(self.culprits & last.culprits)
    return is_same_step and (may_be_same or is_same_code)


@dataclasses.dataclass(frozen=True)
class Stop:
  """The run ends.

  Attributes:
    reason: why it does not start again; '' if it is done or was asked to stop.
  """

  reason: str = ''


@dataclasses.dataclass(frozen=True)
class Restart:
  """All processes start again; `number` restarts have followed a failure."""

  number: int


@dataclasses.dataclass(frozen=True)
class Restarts:
  """The restarts of a run so far.

  Attributes:
    allowed: how many restarts the user allows.
    done: number of restarts.
    last: the failure before the last restart.
  """

  allowed: int
  done: int = 0
  last: Optional[Ended] = None

  def suspects(self, ended: Ended) -> frozenset[int]:
    """Returns the processes that caused both `ended` and the failure that it repeats.

    Empty if it does not repeat, or if the causes of one of the two are not known.
    """
    if self.last is None or not ended.repeats(self.last):
      return frozenset()
    if not ended.culprits or not self.last.culprits:
      return frozenset()
    return ended.culprits | self.last.culprits

  def after(
    self, ended: Ended, *, leaves_out_hosts: bool = False
  ) -> tuple['Restarts', Union[Stop, Restart]]:
    """Returns what follows an end, and the state then.

    Every failure uses up one restart, so a run of any faults ends; a pause does not. If a failure
    repeats at the same step, another start would end the same way, unless a host is the reason.

    Args:
      ended: how the processes ended.
      leaves_out_hosts: whether another start would be without the hosts that may be the reason. If
        the failure then repeats, on any host, the run ends.
    """
    if ended.paused and not ended.asked:
      return self, Restart(self.done)
    if ended.asked or ended.code in STOPPED_CODES:
      return self, Stop()
    if leaves_out_hosts:
      ended = dataclasses.replace(ended, failed=frozenset())
    elif ended.code in _FINAL_CODES:
      return self, Stop('another start would end with the same error')
    elif self.last is not None and ended.repeats(self.last):
      place = 'before the first step' if ended.step is None else f'after step {ended.step}'
      return self, Stop(f'it failed twice in a row {place}')
    if self.done == self.allowed:
      return self, Stop(f'--restarts={self.allowed} are used up')
    return Restarts(self.allowed, self.done + 1, ended), Restart(self.done + 1)
