"""What a converted model says of its text, in the files that came along: vocabulary and ends."""

from typing import Optional

from t5x_gpu.checkpoint.run_files import on_this_machine
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.config.json_schema import read_json
from t5x_gpu.errors import CheckpointError

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
      raise CheckpointError(f'{path} cannot be read ({e}), which says what ends a text.',
                            fix='Copy it once more from the model that was converted.') from e
    if ends:
      return tuple(ends)
  return ()
