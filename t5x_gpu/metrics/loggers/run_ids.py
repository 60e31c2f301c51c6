"""Stores the run's ids at W&B and MLflow in MODEL_DIR, so that a resumed run continues them."""

import json
import os
import pathlib

from t5x_gpu.config.atomic_write import write_atomically
from t5x_gpu.config.json_schema import MapOf, Text, read_json
from t5x_gpu.config.set_aside import set_aside_damaged

FILE = 'loggers.json'
_IDS = MapOf(Text(r'[A-Za-z0-9_-]{1,128}'))


class RunIds:
  """Logger name -> id of the run at the service.

  Args:
    folder: MODEL_DIR. A damaged file in it is renamed, with a warning.
  """

  def __init__(self, folder: str | os.PathLike):
    self._path = pathlib.Path(folder) / FILE
    self._ids: dict[str, str] = {}
    if os.path.lexists(self._path):
      try:
        self._ids = read_json(self._path, _IDS)
      except (ValueError, OSError) as e:
        set_aside_damaged(self._path, e, '; W&B and MLflow will show a new run')

  def get(self, logger: str) -> str | None:
    """Returns the id of this run at `logger`; None for a new run."""
    return self._ids.get(logger)

  def keep(self, logger: str, run_id: str) -> None:
    """Writes the id of this run at `logger`."""
    self._ids[logger] = run_id
    write_atomically(self._path, json.dumps(self._ids, indent=1) + '\n')
