"""The small files of a run: config.gin, metrics.jsonl, event files of TensorBoard, pictures.

What writes them appends, renames and flushes, as one can on a disk alone. So with a MODEL_DIR in
object storage they are written to a folder of process 0 and copied from there: before each commit
of a checkpoint, and at the end.

What lies beside checkpoints in their folder and says of which model they are.

What a converted model says of its text, in the files that came along: vocabulary and ends.
"""

import contextlib
import logging
import pathlib
import re
import shutil
import tempfile
from typing import Any, Optional, Self

from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath, is_remote
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.data.sources.source_files import NAME as SOURCE_FILES
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import process_exit

_log = logging.getLogger(__name__)


# What a run that goes on needs of an earlier one: it appends, and keeps other configurations.
_OF_A_RUN = re.compile(r'config(_origins)?(_\d+)?\.(gin|txt)|metrics\.jsonl|tensorboard/.*|eval/.*')


def on_this_machine(path: AnyPath) -> pathlib.Path:
  """Returns a file or a folder; out of object storage it is fetched, and goes with the process."""
  if not isinstance(path, RemotePath):
    return path
  folder = _temporary_folder()
  for name in path.files() or ['']:
    copy = folder / path.name / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.joinpath(name).read_bytes() if name else path.read_bytes())
  return folder / path.name


def _temporary_folder() -> pathlib.Path:
  temporary = tempfile.TemporaryDirectory(prefix='t5x_gpu_', ignore_cleanup_errors=True)
  process_exit.before_exit(temporary.cleanup)
  return pathlib.Path(temporary.name)


class RunFiles(contextlib.AbstractContextManager):
  """Where a run writes its small files; as a context, it sees to it that they arrive.

  Args:
    model_dir: of the run.
    is_main: False on all processes but one, which have none.
  Attributes:
    model_dir: where they end up.
    folder: of this machine; MODEL_DIR itself where that is on a disk.
  """

  def __init__(self, model_dir: AnyPath, *, is_main: bool):
    self.model_dir = model_dir
    self._remote = model_dir if isinstance(model_dir, RemotePath) and is_main else None
    self._pushed: dict[str, tuple[int, int]] = {}
    if not isinstance(model_dir, RemotePath):
      self.folder = model_dir
      return
    self.folder = _temporary_folder()
    if self._remote is not None:
      self._pull()

  def _pull(self) -> None:
    """Fetches what earlier runs have left; checkpoints are not even listed."""
    names = [*self._remote.files(stop='checkpoint_'), *self._remote.files(first='checkpoint`')]
    for name in filter(_OF_A_RUN.fullmatch, names):
      path = self.folder / name
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(self._remote.joinpath(name).read_bytes())
    self._pushed = self._listing()

  def _listing(self) -> dict[str, tuple[int, int]]:
    return {
      path.relative_to(self.folder).as_posix(): (stat.st_size, stat.st_mtime_ns)
      for path in sorted(self.folder.rglob('*'))
      if path.is_file() and not path.name.endswith('.tmp') and (stat := path.stat())
    }

  def push(self) -> None:
    """Copies what has changed since the last time; raises CheckpointError if it cannot be."""
    if self._remote is None:
      return
    for name, state in self._listing().items():
      if self._pushed.get(name) != state:
        with contextlib.suppress(FileNotFoundError):  # replaced by its next version just now
          self._remote.joinpath(name).write_bytes((self.folder / name).read_bytes())
          self._pushed[name] = state

  def __enter__(self) -> Self:
    return self

  def __exit__(self, *error: Any) -> None:
    """Copies what is left. Should that fail, the run is no worse for it: it has its checkpoints."""
    try:
      self.push()
    except CheckpointError as e:
      kept = shutil.copytree(self.folder, f'{self.folder}_kept')
      _log.error('%s\nThe last lines of metrics are in %s.', e, kept)


CONFIG_GIN, MODEL_GIN = 'config.gin', 'model.gin'  # of a run, and of a converted model
GIN_FILES = (CONFIG_GIN, MODEL_GIN)
HF_FOLDER = 'hf'  # of a converted model: config.json, tokenizer, names


def carry(source: AnyPath, target: AnyPath) -> None:
  """Copies it from one folder to another."""
  for name in (*GIN_FILES, SOURCE_FILES):
    if (source / name).is_file():
      (target / name).write_bytes((source / name).read_bytes())
  names = (
    (source / HF_FOLDER).files()
    if is_remote(source)
    else [
      p.relative_to(source / HF_FOLDER).as_posix()
      for p in (source / HF_FOLDER).rglob('*')
      if p.is_file()
    ]
  )
  for name in names:
    copy = target / HF_FOLDER / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes((source / HF_FOLDER / name).read_bytes())


FOLDER = 'hf'
# SentencePiece models: T5's, and that of Llama 2 and Gemma.
SENTENCEPIECE = ('spiece.model', 'tokenizer.model')


def carried_vocabulary(model_dir: AnyPath) -> Optional[str]:
  """Returns the tokenizer of a converted model as DatasetConfig.vocabulary names it, or None."""
  folder = model_dir / FOLDER
  if (folder / 'tokenizer.json').is_file():
    return f'huggingface:{on_this_machine(folder)}'
  for name in SENTENCEPIECE:
    if (folder / name).is_file():
      return f'sentencepiece:{on_this_machine(folder / name)}'
  return None


def carried_ends(model_dir: AnyPath) -> tuple[int, ...]:
  """Returns the ids that end a text by generation_config.json, or else config.json; maybe none.

  Raises:
    CheckpointError: a file that cannot be read.
  """
  for name in ('generation_config.json', 'config.json'):
    path = model_dir / FOLDER / name
    if not path.is_file():
      continue
    try:
      ends = read_json(path, dict).get('eos_token_id')
      ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
      if any(isinstance(i, bool) or not isinstance(i, int) for i in ends):
        raise ValueError(f'"eos_token_id" is {ends}, no token ids')
    except (ValueError, OSError) as e:
      raise CheckpointError(
        f'{path} cannot be read ({e}), which says what ends a text.',
        fix='Copy it once more from the model that was converted.',
      ) from e
    if ends:
      return tuple(ends)
  return ()
