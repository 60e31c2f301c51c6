"""What Orbax leaves behind when one of the reads or writes of a checkpoint fails.

It closes its event loop without cancelling the others (asyncio_utils.run_sync). They end when
TensorStore has done what they wait for, and each would print a stack of its own.
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

GIVEN_UP_SECONDS = 5


def drop_orbax_stacks(record: logging.LogRecord) -> bool:
  """Orbax logs an error's stack once per layer, and then raises it: ours then says it once."""
  return not (record.exc_info and f'{os.sep}orbax{os.sep}' in record.pathname)


@contextlib.contextmanager
def no_stacks_of_given_up() -> Iterator[None]:
  """Within, the reads or writes that Orbax leaves when one of them fails go in silence.

  They go whenever the collector finds them.
  """
  logger = logging.getLogger('asyncio')
  hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
  disabled, logger.disabled = logger.disabled, True
  try:
    with warnings.catch_warnings():
      warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
      yield
  finally:
    sys.unraisablehook, logger.disabled = hook, disabled


def let_go_of_given_up() -> None:
  """Returns once the reads or writes that Orbax left are gone; after a few seconds at the latest.

  To be called within `no_stacks_of_given_up`.
  """
  deadline = time.monotonic() + GIVEN_UP_SECONDS
  gc.collect()
  # Not isinstance: it asks for __class__, and objects of torch answer with a warning.
  while time.monotonic() < deadline and any(
      type(o) is types.CoroutineType and f'{os.sep}orbax{os.sep}' in o.cr_code.co_filename
      for o in gc.get_objects()):
    time.sleep(0.01)
    gc.collect()
