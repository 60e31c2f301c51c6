"""Everything that relies on private parts of Orbax (0.12.8), and the public API it waits for.

Where no issue of google/orbax is named, we know of none.

Orbax closes its event loop when one of the reads or writes of a checkpoint fails, without
cancelling the others (asyncio_utils.run_sync). Those end when TensorStore is done with them, and
each would print a stack: for a save, at any time, as it runs in the background.
"""

import contextlib
import gc
import logging
import os
import pathlib
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import orbax.checkpoint as ocp
from etils import epath

# What `_CHECKPOINT_METADATA` names as the writers of our items. The strings are paths of private
# modules. Missing: names that do not change when Orbax moves a module.
HANDLERS = {
  'data': ocp.JsonCheckpointHandler.typestr(),
  'manifest': ocp.JsonCheckpointHandler.typestr(),
  'state': ocp.StandardCheckpointHandler.typestr(),
}
GIVEN_UP_SECONDS = 5
_ORBAX = f'{os.sep}orbax{os.sep}'
_LOOP_IS_CLOSED = 'Event loop is closed'


def set_deleter(manager: ocp.CheckpointManager, deleter: Any) -> None:
  """Makes `manager` delete old checkpoints with `deleter`, a `removal.RenamingDeleter`.

  Missing: a `CheckpointManagerOptions.checkpoint_deleter`. Orbax's own deleter either deletes in
  place, so a kill can leave half of a checkpoint, or renames without deleting (`todelete_subdir`).
  """
  manager._checkpoint_deleter = deleter


def save_has_failed(manager: ocp.CheckpointManager) -> bool:
  """Returns whether the save in the background has failed by now.

  Missing: a `check_for_errors` that reports it, google/orbax#605. That was closed, but the method
  stays silent until `wait_until_finished`, as the thread that commits has taken the error.
  """
  return bool(
    manager._finalize_thread.map(
      lambda thread: thread is not None and not thread.is_alive() and thread.exception
    )
  )


class _LiteralPath(type(epath.Path('/'))):
  """A path in which `[`, `*` and `?` are ordinary characters."""

  def glob(self, pattern: str) -> Iterator['_LiteralPath']:
    yield from map(type(self), pathlib.Path(self).glob(pattern))


def check_before_commit(
  handler: ocp.PyTreeCheckpointHandler, check: Callable[[pathlib.Path], None]
) -> None:
  """Makes `handler` merge the files of all processes wherever they are, and check the result.

  Orbax finds these files by a pattern that begins with the folder's own path. Where none match, it
  logs a warning and commits a checkpoint without an index. Missing: `glob.escape` of that path.

  Args:
    handler: of the state.
    check: called on process 0 with the folder of the item, before the step counts; raises if the
      arrays cannot be read.
  """
  finalize = handler.finalize

  def finalize_and_check(directory: epath.Path) -> None:
    finalize(_LiteralPath(directory))
    try:
      check(pathlib.Path(directory))
    except (OSError, ValueError) as e:
      raise ValueError(f'the arrays that were written cannot be opened: {e}') from e

  handler.finalize = finalize_and_check


# Missing, for all of the following: Orbax cancels and awaits the reads or writes that it gives up.


def read_tree(handler: ocp.PyTreeCheckpointHandler, folder: pathlib.Path, target: Any) -> Any:
  """Returns the arrays in `folder` as a tree like `target`.

  Not the `restore` of a manager or a Checkpointer: in it, processes wait for one that could not
  read its part.
  """
  args = ocp.args.PyTreeRestore(
    target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
  )
  return handler.restore(epath.Path(folder), args=args)


@contextlib.contextmanager
def silence_abandoned_work() -> Iterator[None]:
  """From now on, work that Orbax abandons ends silently; within the block also what never began."""
  logging.getLogger('absl').addFilter(_drop_stacks)
  logging.getLogger('asyncio').addFilter(_drop_tasks)
  if not isinstance(sys.unraisablehook, _DropCallbacks):
    sys.unraisablehook = _DropCallbacks(sys.unraisablehook)
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
    yield


def wait_for_abandoned_reads() -> None:
  """Returns once the reads that Orbax abandoned have ended; after a few seconds at the latest.

  Call it within `silence_abandoned_work`, after the `except` block, which still holds them.
  """
  deadline = time.monotonic() + GIVEN_UP_SECONDS
  gc.collect()
  while time.monotonic() < deadline and any(_is_of_orbax(o) for o in gc.get_objects()):
    time.sleep(0.01)
    gc.collect()


def _drop_stacks(record: logging.LogRecord) -> bool:
  """Orbax logs an error's stack once per layer, and then raises it; we report it once."""
  return not (record.exc_info and _ORBAX in record.pathname)


def _drop_tasks(record: logging.LogRecord) -> bool:
  """asyncio names the source file of a task whose exception nobody retrieved."""
  return _ORBAX not in record.getMessage()


class _DropCallbacks:
  """sys.unraisablehook without callbacks of TensorStore into a closed loop, and without reads of
  Orbax that are thrown away before they end.
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
