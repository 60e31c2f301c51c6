"""What Orbax leaves behind when one of the reads or writes of a checkpoint fails.

It closes its event loop without cancelling the others (asyncio_utils.run_sync). They end when
TensorStore has done what they wait for, and each would print a stack of its own: of a save, at any
time, as that goes on in the background.
"""

import contextlib
import gc
import logging
import os
import sys
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

GIVEN_UP_SECONDS = 5
_ORBAX = f'{os.sep}orbax{os.sep}'
_LOOP_IS_CLOSED = 'Event loop is closed'


@contextlib.contextmanager
def silent_left_over() -> Iterator[None]:
  """From now on, what Orbax leaves behind ends in silence; within, also what has not even begun."""
  logging.getLogger('absl').addFilter(_drop_stacks)
  logging.getLogger('asyncio').addFilter(_drop_tasks)
  if not isinstance(sys.unraisablehook, _DropCallbacks):
    sys.unraisablehook = _DropCallbacks(sys.unraisablehook)
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
    yield


def _drop_stacks(record: logging.LogRecord) -> bool:
  """Orbax logs an error's stack once per layer, and then raises it: ours then says it once."""
  return not (record.exc_info and _ORBAX in record.pathname)


def _drop_tasks(record: logging.LogRecord) -> bool:
  """Of a task whose exception nobody has taken asyncio tells where it is defined."""
  return _ORBAX not in record.getMessage()


class _DropCallbacks:
  """sys.unraisablehook without what TensorStore's threads tell a loop that is closed, and without
  reads of Orbax that are thrown away before they end.
  """

  def __init__(self, hook: Any):
    self._hook = hook

  def __call__(self, unraisable: Any) -> None:
    is_callback = (
      isinstance(unraisable.exc_value, RuntimeError)
      and str(unraisable.exc_value) == _LOOP_IS_CLOSED
    )
    if not is_callback and not _is_of_orbax(unraisable.object):
      self._hook(unraisable)


def _is_of_orbax(o: Any) -> bool:
  # Not isinstance: it asks for __class__, and objects of torch answer with a warning.
  return type(o) is types.CoroutineType and _ORBAX in o.cr_code.co_filename


def let_go_of_reads() -> None:
  """Returns once the reads that Orbax left are gone; after a few seconds at the latest.

  To be called within `silent_left_over`.
  """
  deadline = time.monotonic() + GIVEN_UP_SECONDS
  gc.collect()
  while time.monotonic() < deadline and any(_is_of_orbax(o) for o in gc.get_objects()):
    time.sleep(0.01)
    gc.collect()
