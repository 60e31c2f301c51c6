"""The vocabulary of a run in the folder of a model that is made from it."""

import pathlib
import shutil
from typing import Optional

from t5x_gpu.checkpoint.convert.hf.folder import CONFIG, carry_files
from t5x_gpu.checkpoint.run_files import HF_FOLDER, SENTENCEPIECE, VOCABULARY, carried_vocabulary

_FILES = ('huggingface', 'sentencepiece')


def carry_vocabulary(name: Optional[str], target: pathlib.Path) -> str:
  """Puts a vocabulary into the folder of a model of ours; a tokenizer that it has stays.

  Args:
    name: as DatasetConfig.vocabulary names it; None if the run does not say.
    target: the folder.
  Returns:
    What was done, for the console.
  """
  if name and name.partition(':')[0] not in _FILES:
    (target / VOCABULARY).write_text(name + '\n', 'utf-8')
  elif carried_vocabulary(target) is None:
    problem = _copy(name, target / HF_FOLDER, sentencepiece=SENTENCEPIECE[0])
    if problem:
      return f'left out: {problem}. python -m t5x_gpu.infer will need --vocabulary=NAME'
  return name or 'as converted'


def export_vocabulary(name: Optional[str], folder: pathlib.Path, *, is_t5: bool) -> str:
  """Puts a vocabulary into the folder of a Hugging Face model.

  Args:
    name: as DatasetConfig.vocabulary names it; None if the run does not say.
    folder: of the model, without a tokenizer.
    is_t5: whether it is of a T5 family, whose SentencePiece file has a name of its own.
  Returns:
    What was done, for the console.
  """
  if name and name.partition(':')[0] not in _FILES:
    return f'left out: {name!r} has no tokenizer file'
  problem = _copy(name, folder, sentencepiece=SENTENCEPIECE[not is_t5])
  return f'left out: {problem}' if problem else str(name)


def _copy(name: Optional[str], folder: pathlib.Path, *, sentencepiece: str) -> str:
  """Copies the files of a tokenizer; returns why not, or ''."""
  if not name:
    return 'the gin file does not name it'
  kind, _, path = name.partition(':')
  source = pathlib.Path(path).expanduser()
  if not source.exists():
    return f'{source} does not exist'
  folder.mkdir(exist_ok=True)
  if kind == 'sentencepiece':
    shutil.copyfile(source, folder / sentencepiece)
  else:
    carry_files(source if source.is_dir() else source.parent, folder, without=(CONFIG,))
  return ''
