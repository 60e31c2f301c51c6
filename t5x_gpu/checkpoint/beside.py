"""What lies beside checkpoints in their folder and says of which model they are."""

import pathlib
import shutil

CONFIG_GIN, MODEL_GIN = 'config.gin', 'model.gin'  # of a run, and of a converted model
GIN_FILES = (CONFIG_GIN, MODEL_GIN)
HF_FOLDER = 'hf'  # of a converted model: config.json, tokenizer, names


def carry(source: pathlib.Path, target: pathlib.Path) -> None:
  """Copies it from one folder to another."""
  for name in GIN_FILES:
    if (source / name).is_file():
      shutil.copyfile(source / name, target / name)
  if (source / HF_FOLDER).is_dir():
    shutil.copytree(source / HF_FOLDER, target / HF_FOLDER, dirs_exist_ok=True)
