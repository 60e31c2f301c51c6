"""The end of a `with` block around the checkpoints of a run."""

import abc
import logging
import types
from typing import Optional, Self

from t5x_gpu.errors import CheckpointError

_log = logging.getLogger(__name__)


class CommitAtExit(abc.ABC):
  """Commits the save under way when the block ends, also when the run fails; not when it is
  interrupted. Other runs can use MODEL_DIR after it in any case."""

  @abc.abstractmethod
  def wait(self) -> None:
    """Returns when everything is committed; raises CheckpointError if it could not be."""

  @abc.abstractmethod
  def close(self) -> None:
    """Ends what runs in the background, once all is committed, and lets others use MODEL_DIR."""

  @abc.abstractmethod
  def _release(self) -> None:
    """Lets other runs use MODEL_DIR, whatever is under way."""

  def __enter__(self) -> Self:
    return self

  def __exit__(
    self,
    kind: Optional[type[BaseException]],
    error: Optional[BaseException],
    trace: Optional[types.TracebackType],
  ) -> None:
    try:
      if error is None:
        self.wait()
        self.close()
      elif isinstance(error, Exception) and not isinstance(error, CheckpointError):
        try:
          self.wait()
        except CheckpointError as e:
          _log.error('%s', e)
    finally:
      self._release()
