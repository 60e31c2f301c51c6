"""MODEL_DIR/run.id: which run this is, so that files kept elsewhere can be told to be of it."""

import contextlib
import dataclasses
import json
import os
import pathlib
import secrets
from typing import Optional

from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.config.json_schema import Fields, Text, read_json
from t5x_gpu.config.set_aside import set_aside
from t5x_gpu.errors import CheckpointError

RUN_ID = 'run.id'
# The name is that of a folder on local disks: it must not be '../..'.
_SCHEMA = Fields({'name': Text('[0-9a-f]{16}'), 'folder': str}, others=False)


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
  kept = None
  with contextlib.suppress(OSError, ValueError):
    kept = _read(folder)
  if kept is None:
    return None
  here, there = str(folder.resolve()), pathlib.Path(kept.folder)
  with contextlib.suppress(OSError, ValueError):
    if str(there) != here and _read(there).name == kept.name:
      return None
  return kept.name


def ensure_run_id(folder: pathlib.Path) -> str:
  """Returns the name of the run in `folder`, which gets one if it has none. For one process.

  A damaged file is renamed, with a warning.
  """
  name = read_run_id(folder) or secrets.token_hex(8)
  now, kept = RunId(name, str(folder.resolve())), None
  try:
    kept = _read(folder)
  except FileNotFoundError:
    pass
  except (OSError, ValueError) as e:
    set_aside(folder / RUN_ID, str(e))
  if kept != now:
    try:
      with atomic_write(folder / RUN_ID, suffix=f'.{os.getpid()}.tmp') as new:
        new.write_text(json.dumps(dataclasses.asdict(now), indent=1) + '\n', 'utf-8')
    except OSError as e:
      raise CheckpointError(
        f'{folder / RUN_ID} cannot be written: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder of yours with free space.',
        parameters=('MODEL_DIR',),
      ) from e
  return name


def _read(folder: pathlib.Path) -> RunId:
  """Raises OSError or ValueError if there is none, or a damaged one."""
  return RunId(**read_json(folder / RUN_ID, _SCHEMA))
