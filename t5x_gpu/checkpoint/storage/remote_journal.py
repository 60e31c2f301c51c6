"""`Journal` for a folder in object storage: written where it will be, committed at the end.

`reshard.json` in the folder says how far it is good. Until the commit no reader takes it for a
checkpoint.
"""

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Optional, Self, Union

from t5x_gpu.checkpoint.storage.atomic_folder import SCHEMA, Journal
from t5x_gpu.checkpoint.storage.object_store_steps import commit
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.errors import CheckpointError

_JOURNAL = 'reshard.json'


def open_journal(target: AnyPath, *, work: Any, num_bytes: int) -> Union[Journal, 'RemoteJournal']:
  """Returns the unfinished folder of `target`, and how far it is; arguments as of `Journal`."""
  if isinstance(target, RemotePath):
    return RemoteJournal(target, work=work)
  return Journal(target, work=work, num_bytes=num_bytes)


class RemoteJournal(contextlib.AbstractContextManager):
  """An unfinished folder in object storage, with the methods of `Journal`.

  Args:
    target: must be empty, or unfinished; what another work has left is removed.
    work: JSON-ready, all that the result depends on.
  Attributes:
    folder: to write into.
    entry: what `note` was told last, by an earlier process perhaps; None at the beginning.
  Raises:
    CheckpointError: something else is there, or it cannot be written.
  """

  def __init__(self, target: RemotePath, *, work: Any):
    self.folder = target
    self.entry: Optional[dict[str, Any]] = None
    self._work = hashlib.sha256(json.dumps(work, sort_keys=True).encode()).hexdigest()
    self._path = target / _JOURNAL
    names = target.files()
    if names and _JOURNAL not in names:
      raise CheckpointError(f'{target} is not empty: it has {len(names)} objects. Nothing is '
                            'overwritten.',
                            fix='Name another folder with --to, or remove this one.')
    if names:
      kept: Mapping[str, Any] = {}
      with contextlib.suppress(ValueError):
        kept = read_json(self._path, SCHEMA)
      if kept.get('work') == self._work:
        self.entry = kept['entry']
      else:
        target.remove_tree(last=[_JOURNAL])
    if self.entry is None:
      self._note()

  def note(self, entry: dict[str, Any]) -> None:
    """Records that the folder is good as far as `entry` says."""
    self.entry = entry
    self._note()

  def _note(self) -> None:
    self._path.write_text(json.dumps({'work': self._work, 'entry': self.entry}))

  def finish(self) -> None:
    """Makes what was written a checkpoint."""
    for name in sorted({name.split('/')[0] for name in self.folder.files(first='checkpoint_')
                        if name.startswith('checkpoint_')}):
      commit(self.folder / name)
    self._path.unlink()

  def discard(self) -> None:
    """Removes what is unfinished."""
    self.folder.remove_tree(last=[_JOURNAL])

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    """Leaves what is unfinished for the next call."""
