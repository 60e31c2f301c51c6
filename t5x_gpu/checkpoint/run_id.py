"""MODEL_DIR/run.id: which run this is, so that files kept elsewhere can be told to be of it."""

import dataclasses
import json
import os
import pathlib
import secrets
from typing import Optional

from t5x_gpu.errors import CheckpointError

RUN_ID = 'run.id'


@dataclasses.dataclass(frozen=True)
class RunId:
  """The name of a run.

  Attributes:
    name: sixteen random hexadecimal digits.
    folder: MODEL_DIR when it was made, or was last seen.
  """
  name: str
  folder: str


def read_run_id(folder: pathlib.Path) -> Optional[str]:
  """Returns the name of the run in `folder`; None if it has none, or if it is another's.

  A MODEL_DIR that was moved keeps its name. In a copy of one the name is the original's, as long as
  that is there: the copy is another run.
  """
  kept = _read(folder)
  if kept is None:
    return None
  here, there = str(folder.resolve()), pathlib.Path(kept.folder)
  other = None if str(there) == here else _read(there)
  return None if other is not None and other.name == kept.name else kept.name


def ensure_run_id(folder: pathlib.Path) -> str:
  """Returns the name of the run in `folder`, which gets one if it has none. For one process."""
  name = read_run_id(folder) or secrets.token_hex(8)
  now = RunId(name, str(folder.resolve()))
  if _read(folder) != now:
    new = folder / f'.{RUN_ID}.{os.getpid()}'
    try:
      new.write_text(json.dumps(dataclasses.asdict(now), indent=1) + '\n', 'utf-8')
      os.replace(new, folder / RUN_ID)
    except OSError as e:
      raise CheckpointError(f'{folder / RUN_ID} cannot be written: {e.strerror or e}.',
                            fix='Set MODEL_DIR to a folder of yours with free space.',
                            parameters=('MODEL_DIR',)) from e
  return name


def _read(folder: pathlib.Path) -> Optional[RunId]:
  try:
    return RunId(**json.loads((folder / RUN_ID).read_text('utf-8')))
  except (OSError, ValueError, TypeError):
    return None
