"""MODEL_DIR/run.id names the run, so that its files in other folders can be recognized."""

import contextlib
import json
import os
import pathlib
import secrets
from typing import Optional

from t5x_gpu.config.atomic_write import write_atomically
from t5x_gpu.config.json_schema import Fields, Text, read_json
from t5x_gpu.config.set_aside import check_not_refused, set_aside_damaged
from t5x_gpu.errors import CheckpointError

RUN_ID = 'run.id'
# `name` becomes the name of a folder on local disks: it must not be '../..'. `folder` is MODEL_DIR
# at the time of writing.
_SCHEMA = Fields({'name': Text('[0-9a-f]{16}'), 'folder': str}, others=False)


def read_run_id(folder: pathlib.Path) -> Optional[str]:
  """Returns the name of the run in `folder`; None if it has none, or the name of another run.

  A MODEL_DIR that was moved keeps its name. A copy is another run: while the original exists, the
  name belongs to the original.

  Raises:
    AccessError: the file cannot be opened.
  """
  try:
    kept = _read(folder)
  except ValueError:
    return None
  except OSError as e:
    check_not_refused(e, folder / RUN_ID)  # without the name, the run loses its local checkpoints
    return None
  here, there = str(folder.resolve()), pathlib.Path(kept['folder'])
  with contextlib.suppress(OSError, ValueError):
    if str(there) != here and _read(there)['name'] == kept['name']:
      return None
  return kept['name']


def ensure_run_id(folder: pathlib.Path) -> str:
  """Returns the name of the run in `folder`; creates it if needed. Called on one process.

  A damaged file is renamed, with a warning.
  """
  name = read_run_id(folder) or secrets.token_hex(8)
  now, kept = {'name': name, 'folder': str(folder.resolve())}, None
  try:
    kept = _read(folder)
  except FileNotFoundError:
    pass
  except (OSError, ValueError) as e:
    set_aside_damaged(folder / RUN_ID, e)
  if kept != now:
    try:
      text = json.dumps(now, indent=1) + '\n'
      write_atomically(folder / RUN_ID, text, suffix=f'.{os.getpid()}.tmp')
    except OSError as e:
      raise CheckpointError(
        f'{folder / RUN_ID} cannot be written: {e.strerror or e}.',
        fix='Set MODEL_DIR to a folder you can write to, with free space.',
        parameters=('MODEL_DIR',),
      ) from e
  return name


def _read(folder: pathlib.Path) -> dict[str, str]:
  """Raises OSError or ValueError if the file is missing or damaged."""
  return read_json(folder / RUN_ID, _SCHEMA)
