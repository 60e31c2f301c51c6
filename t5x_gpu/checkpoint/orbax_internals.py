"""Everything that relies on private parts of Orbax (0.12.8), and the public API that is missing.

We know of an issue of google/orbax only where it is named.

Orbax closes its event loop when a read or write of a checkpoint fails, without cancelling the
others (asyncio_utils.run_sync). The other operations end when TensorStore finishes them, and each
would print a stack; for a save, which runs in the background, at any time.
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

# Handlers of the items in a checkpoint, for `_CHECKPOINT_METADATA`. The strings are paths of
# private modules. Missing: names that do not change when Orbax moves a module.
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

  Missing: a `check_for_errors` that reports it, google/orbax#605. The issue is closed, but the
  method still reports nothing before `wait_until_finished`, because the commit thread holds the
  error.
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
  """Makes `handler` merge the files of all processes in any folder, and check the result.

  Orbax finds these files by a glob pattern that begins with the path of the folder. If no file
  matches, it logs a warning and commits a checkpoint without an index. Missing: `glob.escape` of
  that path.

  Args:
    handler: handler of the state.
    check: called on process 0 with the folder of the item, before the commit; raises if the arrays
      cannot be read.
  """
  finalize = handler.finalize

  def finalize_and_check(directory: epath.Path) -> None:
    finalize(_LiteralPath(directory))
    try:
      check(pathlib.Path(directory))
    except (OSError, ValueError) as e:
      raise ValueError(f'the arrays that were written cannot be opened: {e}') from e

  handler.finalize = finalize_and_check


# Missing, for all of the following: Orbax should cancel and await work that it abandons.


def read_tree(handler: ocp.PyTreeCheckpointHandler, folder: pathlib.Path, target: Any) -> Any:
  """Returns the arrays in `folder` as a tree like `target`.

  Avoids `restore` of a manager or a Checkpointer, in which all processes would wait for a process
  that could not read its part.
  """
  args = ocp.args.PyTreeRestore(
    target, restore_args=ocp.checkpoint_utils.construct_restore_args(target)
  )
  return handler.restore(epath.Path(folder), args=args)


@contextlib.contextmanager
def silence_abandoned_work() -> Iterator[None]:
  """From now on, silences work that Orbax abandons; within the block, also work never begun."""
  logging.getLogger('absl').addFilter(_drop_stacks)
  logging.getLogger('asyncio').addFilter(_drop_tasks)
  if not isinstance(sys.unraisablehook, _DropCallbacks):
    sys.unraisablehook = _DropCallbacks(sys.unraisablehook)
  with warnings.catch_warnings():
    warnings.filterwarnings('ignore', 'coroutine .* was never awaited', RuntimeWarning)
    yield


def wait_for_abandoned_reads() -> None:
  """Waits until the reads that Orbax abandoned have ended, but at most a few seconds.

  Call it within `silence_abandoned_work`, after the `except` block, which still refers to them.
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
  """Drops asyncio's records of Orbax tasks whose exception was never retrieved."""
  return _ORBAX not in record.getMessage()


class _DropCallbacks:
  """sys.unraisablehook that ignores two kinds of errors.

  These are callbacks of TensorStore into a closed loop, and Orbax's reads that are destroyed before
  they end.
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
  # Not isinstance: it reads __class__, which makes objects of torch warn.
  return type(o) is types.CoroutineType and _ORBAX in o.cr_code.co_filename
