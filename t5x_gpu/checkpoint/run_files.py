"""The small files in MODEL_DIR, next to the checkpoints.

- Files of a run: config.gin, metrics.jsonl, samples.jsonl, report.html, TensorBoard event files.
  Their writers append, rename and flush, which only a disk can do. With a MODEL_DIR in object
  storage, they are written to a local folder of process 0, and copied before each commit and at
  the end.
- Files that describe the model and are carried from one MODEL_DIR to the next: its gin file;
  tokenizer and configuration of a converted model.
"""

import contextlib
import json
import logging
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.data.sources.source_files import NAME as SOURCE_FILES
from t5x_gpu.errors import CheckpointError
from t5x_gpu.runtime import process_exit
from t5x_gpu.storage.files import (
  append_line,
  check_not_refused,
  set_aside_unless_file,
  write_atomically,
)
from t5x_gpu.storage.json_schema import Fields, Json, Whole, read_json
from t5x_gpu.storage.paths import AnyPath, RemotePath, is_remote

_log = logging.getLogger(__name__)

CONFIG_GIN, MODEL_GIN = 'config.gin', 'model.gin'  # in a run, and in a converted model
GIN_FILES = (CONFIG_GIN, MODEL_GIN)
HF_FOLDER = 'hf'  # in a converted model: config.json, tokenizer, names
PREDICTIONS = 'predictions'  # of evaluated tasks
VOCABULARY = 'vocabulary.txt'  # in a merged model: the name of a vocabulary without a file
# SentencePiece models: the first in T5, the second in Llama 2 and Gemma.
SENTENCEPIECE = ('spiece.model', 'tokenizer.model')
# Files that a report reads, and files that a resumed run also needs, because it appends to them
# and keeps earlier configurations.
_OF_A_REPORT = (
  r'config(_origins)?(_\d+)?\.(gin|txt)|(metrics|goodput|samples)\.jsonl|eval/.*\.(jsonl|csv)'
  r'|confusion\.csv|profiles/[^/]+/anatomy\.json'
)
_OF_A_PROCESS = re.compile(r'(profiles|spikes)/.*process_\d+\b.*')  # except process 0
_OF_A_RUN = _OF_A_REPORT + r'|loggers\.json|tensorboard/.*|eval/.*'


def on_this_machine(path: AnyPath) -> pathlib.Path:
  """Returns a local path: `path` itself, or a temporary copy if it is in object storage."""
  if not isinstance(path, RemotePath):
    return path
  folder = temporary_folder()
  for name in path.files() or ['']:
    copy = folder / path.name / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(path.joinpath(name).read_bytes() if name else path.read_bytes())
  return folder / path.name


def temporary_folder() -> pathlib.Path:
  """Returns a new folder, which is removed when the process exits."""
  temporary = tempfile.TemporaryDirectory(prefix='t5x_gpu_', ignore_cleanup_errors=True)
  process_exit.before_exit(temporary.cleanup)
  return pathlib.Path(temporary.name)


def copy_for_report(model_dir: RemotePath, folder: pathlib.Path) -> None:
  """Copies the small files that a report reads from object storage to `folder`."""
  _copy(model_dir, folder, _OF_A_REPORT)


def _copy(model_dir: RemotePath, folder: pathlib.Path, pattern: str) -> None:
  """Copies the files whose names match; does not list checkpoints."""
  names = [*model_dir.files(stop='checkpoint_'), *model_dir.files(first='checkpoint`')]
  for name in filter(re.compile(pattern).fullmatch, names):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model_dir.joinpath(name).read_bytes())


class RunFiles(contextlib.AbstractContextManager):
  """Where a run writes its small files; as a context, it copies them to MODEL_DIR at the end.

  Args:
    model_dir: MODEL_DIR of the run.
    is_main: whether this is process 0. Other processes copy only files with their index in the
      name: traces, batches of bad steps.
  Attributes:
    model_dir: destination of the files.
    folder: folder that the files are written to: MODEL_DIR itself if it is on a disk.
  """

  def __init__(self, model_dir: AnyPath, *, is_main: bool):
    self.model_dir = model_dir
    self._remote = model_dir if isinstance(model_dir, RemotePath) else None
    self._is_main = is_main
    self._pushed: dict[str, tuple[int, int]] = {}
    if not isinstance(model_dir, RemotePath):
      self.folder = model_dir
      return
    self.folder = temporary_folder()
    if is_main:
      _copy(model_dir, self.folder, _OF_A_RUN)
      self._pushed = self._listing()

  def _listing(self) -> dict[str, tuple[int, int]]:
    return {
      path.relative_to(self.folder).as_posix(): (stat.st_size, stat.st_mtime_ns)
      for path in sorted(self.folder.rglob('*'))
      if path.is_file() and not path.name.endswith('.tmp') and (stat := path.stat())
    }

  def _is_ours(self, name: str) -> bool:
    return self._is_main or bool(_OF_A_PROCESS.fullmatch(name))

  def push(self) -> None:
    """Copies files that changed since the last call; raises CheckpointError if that fails."""
    if self._remote is None:
      return
    for name, state in self._listing().items():
      if self._pushed.get(name) != state and self._is_ours(name):
        with contextlib.suppress(FileNotFoundError):  # replaced by its next version just now
          self._remote.joinpath(name).write_bytes((self.folder / name).read_bytes())
          self._pushed[name] = state

  def __exit__(self, *error: object) -> None:
    """Copies the remaining files. A failure is only logged: the checkpoints are committed."""
    try:
      self.push()
    except CheckpointError as e:
      kept = shutil.copytree(self.folder, f'{self.folder}_kept')
      _log.error('%s\nThe last lines of metrics are in %s.', e, kept)


def carry(source: AnyPath, target: AnyPath) -> None:
  """Copies the files that describe the model from one MODEL_DIR to another."""
  for name in (*GIN_FILES, VOCABULARY, SOURCE_FILES):
    if (source / name).is_file():
      (target / name).write_bytes((source / name).read_bytes())
  carry_hf_folder(source, target)


def carry_hf_folder(source: AnyPath, target: AnyPath) -> None:
  """Copies the tokenizer and configuration of a converted model, if `source` has them."""
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


def carried_vocabulary(model_dir: AnyPath) -> Optional[str]:
  """Returns the vocabulary in a model's folder, a value for DatasetConfig.vocabulary; or None."""
  if (model_dir / VOCABULARY).is_file():
    return (model_dir / VOCABULARY).read_text('utf-8').strip()
  folder = model_dir / HF_FOLDER
  if (folder / 'tokenizer.json').is_file():
    return f'huggingface:{on_this_machine(folder)}'
  for name in SENTENCEPIECE:
    if (folder / name).is_file():
      return f'sentencepiece:{on_this_machine(folder / name)}'
  return None


def carried_ends(model_dir: AnyPath) -> tuple[int, ...]:
  """Returns the ids that end a text, from generation_config.json or else config.json; may be ().

  Raises:
    CheckpointError: a file cannot be read.
  """
  for name in ('generation_config.json', 'config.json'):
    path = model_dir / HF_FOLDER / name
    if not path.is_file():
      continue
    try:
      ends = read_json(path, dict).get('eos_token_id')
      ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
      if any(isinstance(i, bool) or not isinstance(i, int) for i in ends):
        raise ValueError(f'"eos_token_id" is {ends}, not token ids')
    except (ValueError, OSError) as e:
      check_not_refused(e, path)
      raise CheckpointError(
        f'{path} cannot be read ({e}). It lists the tokens that end a text.',
        fix='Copy it again from the model that was converted.',
      ) from e
    if ends:
      return tuple(ends)
  return ()


# Settings of generation_config.json that change the output -> values that have no effect.
_GENERATION = {
  'do_sample': (False,),
  'num_beams': (1,),
  'repetition_penalty': (1.0,),
  'encoder_repetition_penalty': (1.0,),
  'no_repeat_ngram_size': (0,),
  'encoder_no_repeat_ngram_size': (0,),
  'min_length': (0,),
  'min_new_tokens': (0,),
  **dict.fromkeys(
    (
      'bad_words_ids',
      'begin_suppress_tokens',
      'exponential_decay_length_penalty',
      'forced_bos_token_id',
      'forced_eos_token_id',
      'guidance_scale',
      'penalty_alpha',
      'sequence_bias',
      'suppress_tokens',
    ),
    ([],),
  ),
}
_SAMPLING = {'temperature': (1.0,), 'top_k': (), 'top_p': (1.0,), 'min_p': (), 'typical_p': (1.0,)}
_BEAMS = {'length_penalty': (), 'early_stopping': (), 'diversity_penalty': (0.0,)}


def carried_generation(folder: AnyPath) -> Json:
  """Returns the settings that make transformers decode a model other than greedily.

  Reads generation_config.json, or config.json without it; leaves out end ids.

  Args:
    folder: folder of the Hugging Face model, or HF_FOLDER of the converted one.
  Raises:
    CheckpointError: a file cannot be read.
  """
  for name in ('generation_config.json', 'config.json'):
    path = folder / name
    if not path.is_file():
      continue
    try:
      content = read_json(path, dict)
    except (ValueError, OSError) as e:
      check_not_refused(e, path)
      raise CheckpointError(
        f'{path} cannot be read ({e}).', fix='Copy it again from the model that was converted.'
      ) from e
    neutral = dict(_GENERATION)
    neutral |= _SAMPLING if content.get('do_sample') else {}
    neutral |= _BEAMS if (content.get('num_beams') or 1) > 1 else {}
    return {
      key: content[key]
      for key, values in neutral.items()
      if content.get(key) is not None and content[key] not in values
    }
  return {}


def not_applied(settings: Json) -> str:
  """Returns the line about settings of `carried_generation`; '' without any."""
  if not settings:
    return ''
  named = ', '.join(f'{key} = {value!r}' for key, value in settings.items())
  return (
    f'the files set {named}; infer does not apply them. It takes the most probable token, or what '
    'DecodingConfig says (--gin.DecodingConfig.temperature=0.6)'
  )


# `MODEL_DIR/samples.jsonl`: texts that the model generated after the last step of a run.
SAMPLES = 'samples.jsonl'
SCHEMA = Fields({'step': Whole(), 'prompt': str, 'text': str}, optional={'temperature': float})


def write_predictions(
  folder: str | os.PathLike, step: int, task: str, records: Sequence[Json]
) -> None:
  """Writes predictions/TASK_STEP.jsonl, a line per record; warns if that fails.

  Args:
    folder: folder of the run's files.
    step: number of training steps done.
    task: name of the task.
    records: texts and scores of its examples.
  """
  name = re.sub(r'[^\w.-]+', '_', task)
  path = pathlib.Path(folder) / PREDICTIONS / f'{name}_{step}.jsonl'
  try:
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, ''.join(json.dumps(record) + '\n' for record in records))
  except OSError as e:
    _log.warning('%s cannot be written: %s.', path, e.strerror or e)


def append_sample(
  folder: str | os.PathLike, step: int, *, prompt: str, temperature: float, text: str
) -> None:
  """Appends a text to the file; warns if that fails.

  Args:
    folder: folder of the run's files.
    step: number of training steps done.
    prompt, temperature: as in SampleConfig.
    text: the prompt and its continuation.
  """
  record = {'step': step, 'prompt': prompt, 'temperature': temperature, 'text': text}
  path = pathlib.Path(folder) / SAMPLES
  try:
    set_aside_unless_file(path)  # opening a pipe would wait for a reader
    append_line(path, json.dumps(record))
  except OSError as e:
    _log.warning('%s cannot be written: %s.', path, e.strerror or e)
