"""Runs a command with a deadline, even if the command cannot be killed."""

import dataclasses
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Optional


@dataclasses.dataclass(frozen=True)
class CommandResult:
  """The result of a command.

  Attributes:
    code: exit code; None if the command was not found or its deadline passed.
    output: standard output so far.
    errors: standard error so far.
    problem: why there is no exit code, or ''.
  """

  code: Optional[int]
  output: str
  errors: str
  problem: str = ''


def run(
  command: Sequence[str], *, seconds: float, environ: Optional[Mapping[str, str]] = None
) -> CommandResult:
  """Returns the result of `command`, shortly after `seconds` at the latest.

  SIGKILL does not end a process that waits in the kernel, for a broken GPU or an unreachable file
  server. `subprocess.run` would wait for it; this function leaves it behind.

  Args:
    command: program and arguments.
    seconds: deadline.
    environ: the environment, this process's by default.
  """
  with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
    try:
      child = subprocess.Popen(
        command,
        stdout=output,
        stderr=errors,
        stdin=subprocess.DEVNULL,
        env=environ,
        start_new_session=True,
      )
    except OSError as error:
      return CommandResult(None, '', '', f'{command[0]}: {error.strerror}')
    problem = ''
    try:
      child.wait(seconds)
    except subprocess.TimeoutExpired:
      problem = f'no answer within {seconds:g} s'
    finally:  # also after Ctrl-C, which the child's separate session does not receive
      if child.returncode is None:
        os.killpg(child.pid, signal.SIGKILL)
        for _ in range(10):
          if child.poll() is not None:
            break
          time.sleep(0.05)
    texts = []
    for file in (output, errors):
      file.seek(0)
      texts.append(file.read().decode(errors='replace'))
    return CommandResult(None if problem else child.returncode, *texts, problem)
