"""What lies beside checkpoints in their folder and says of which model they are."""

from t5x_gpu.checkpoint.storage.paths import AnyPath, is_remote
from t5x_gpu.data.sources.source_files import NAME as SOURCE_FILES

CONFIG_GIN, MODEL_GIN = 'config.gin', 'model.gin'  # of a run, and of a converted model
GIN_FILES = (CONFIG_GIN, MODEL_GIN)
HF_FOLDER = 'hf'  # of a converted model: config.json, tokenizer, names


def carry(source: AnyPath, target: AnyPath) -> None:
  """Copies it from one folder to another."""
  for name in (*GIN_FILES, SOURCE_FILES):
    if (source / name).is_file():
      (target / name).write_bytes((source / name).read_bytes())
  names = (source / HF_FOLDER).files() if is_remote(source) else [
      p.relative_to(source / HF_FOLDER).as_posix() for p in (source / HF_FOLDER).rglob('*')
      if p.is_file()]
  for name in names:
    copy = target / HF_FOLDER / name
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes((source / HF_FOLDER / name).read_bytes())
