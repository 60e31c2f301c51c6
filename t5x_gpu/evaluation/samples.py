"""`MODEL_DIR/samples.jsonl`: texts that the model generated after the last step of a run."""

import json
import logging
import os
import pathlib

from t5x_gpu.config.atomic_write import append_line
from t5x_gpu.config.json_schema import Fields, Whole
from t5x_gpu.config.set_aside import set_aside_unless_file
from t5x_gpu.models.decoding import SampleConfig

SAMPLES = 'samples.jsonl'
SCHEMA = Fields({'step': Whole(), 'prompt': str, 'text': str}, optional={'temperature': float})
_log = logging.getLogger(__name__)


def append_sample(folder: str | os.PathLike, step: int, config: SampleConfig, text: str) -> None:
  """Appends a text to the file; warns if that fails.

  Args:
    folder: folder of the run's files.
    step: number of training steps done.
    config: how the text was generated.
    text: the prompt and its continuation.
  """
  record = {'step': step, 'prompt': config.prompt, 'temperature': config.temperature, 'text': text}
  path = pathlib.Path(folder) / SAMPLES
  try:
    set_aside_unless_file(path)  # opening a pipe would wait for a reader
    append_line(path, json.dumps(record))
  except OSError as e:
    _log.warning('%s cannot be written: %s.', path, e.strerror or e)
