"""Why a run was started again: `launch` knows it, and process 0 of the next start records it.

`launch` puts the interruptions of its run so far into `VARIABLE`. The ledger keeps them with the
start (`metrics/goodput.py`), and reports add what each has cost.
"""

import dataclasses
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Optional

from t5x_gpu.runtime.cluster.restarts import EXIT_STUCK
from t5x_gpu.storage.json_schema import Json, JsonObject, Number, from_json, parse_json, to_json

VARIABLE = 'T5X_GPU_INTERRUPTIONS'
# Seconds by which the clock of this host is ahead of the clock of the run, if they differ.
CLOCK_VARIABLE = 'T5X_GPU_CLOCK_AHEAD'
FACT = 'launch'  # the ledger's name for the value of `VARIABLE`
MOST = 16  # a start that fails early records nothing, so the next one has earlier ones as well

KILLED = 'process killed'
CRASHED = 'process crashed'
STUCK = 'process stuck'
LOST_HOST = 'host lost'
CUT_NETWORK = 'network cut'
JOINED = 'host joined'

_WATCHDOG = re.compile(r'WATCHDOG: (?!process \d+ exits)')
_ERROR = re.compile(r'(\w+\.)*\w*(Error|Exception)\b')
_LABEL = re.compile(r'\[\d+/\d+\] ')
_LONGEST = 200

Time = Annotated[float, Number(0, 1e10)]  # seconds since 1970


@dataclasses.dataclass(frozen=True)
class Interruption:
  """The end of one start that another start followed.

  Attributes:
    number: number of the start in this run of `launch`, from 1.
    kind: 'process killed', ...
    cause: 'process 3 on host 1 (gpu-002) failed (SIGKILL)'.
    step: the last step that was finished; None before the first one.
    at: when `launch` noticed it.
    stepped_at: when `step` was finished, or its state restored; None if unknown.
    error: the error of the process as one line, '' if there is none.
  """

  number: int
  kind: str
  cause: str
  step: Optional[int]
  at: Time
  stepped_at: Optional[Time] = None
  error: str = ''

  def __str__(self) -> str:
    if self.kind == JOINED:
      return self.cause
    when = 'before the first step' if self.step is None else f'after step {self.step}'
    return f'{self.cause} {when}'


@dataclasses.dataclass(frozen=True)
class History:
  """The last interruptions, at most `MOST`, of one run of `launch`.

  Attributes:
    run: differs between any two runs of `launch`.
    interruptions: oldest first.
  """

  run: str
  interruptions: tuple[Interruption, ...]


def variables(run: str, interruptions: Sequence[Interruption]) -> dict[str, str]:
  """Returns the environment variables of the processes that start after `interruptions`."""
  return {VARIABLE: json.dumps(to_json(History(run, tuple(interruptions[-MOST:]))))}


def facts(environ: Mapping[str, str]) -> JsonObject:
  """Returns the facts for the ledger; {} without `launch`, or if it does not start again."""
  try:
    return {FACT: parse_json(environ[VARIABLE], dict)}
  except (KeyError, ValueError):
    return {}


def is_restart(environ: Mapping[str, str]) -> bool:
  """Returns whether `launch` has started this process to continue a run."""
  history = history_of(facts(environ))
  return history is not None and bool(history.interruptions)


def run_clock(environ: Mapping[str, str]) -> Callable[[], float]:
  """Returns a clock that all hosts of the run share, in seconds since 1970."""
  try:
    ahead = float(environ.get(CLOCK_VARIABLE, 0))
  except ValueError:
    ahead = 0.0
  return lambda: time.time() - ahead


def history_of(facts: Json) -> Optional[History]:
  """Returns the history in a start's facts; None if there is none, or it is unreadable."""
  try:
    return from_json(History, facts.get(FACT))
  except ValueError:
    return None


def kind_of(code: int) -> str:
  """Returns the kind of a failure with this exit code, or minus the signal."""
  return KILLED if code < 0 else STUCK if code == EXIT_STUCK else CRASHED


def error_line(lines: Sequence[str]) -> str:
  """Returns the line of an output's last lines that names the error; '' without any text."""
  lines = [line.strip() for line in lines if line.strip()]
  found = [line for line in lines if _WATCHDOG.match(line)][:1]
  found += [line for line in reversed(lines) if _ERROR.match(_LABEL.sub('', line, count=1))][:1]
  return next(iter([*found, *reversed(lines)]), '')[:_LONGEST]
