"""Writes the launch scripts of Slurm, PBS, Open MPI and Kubernetes, which a wheel carries too."""

import pathlib

from t5x_gpu.errors import ConfigError

_PACKAGE = pathlib.Path(__file__).resolve().parents[2]


def shipped() -> list[pathlib.Path]:
  """Returns the scripts of the installed package, or of the repository that contains it."""
  inside = _PACKAGE / 'scripts'
  return sorted((inside if inside.is_dir() else _PACKAGE.parent / 'scripts').glob('train*'))


def write(folder: pathlib.Path) -> list[pathlib.Path]:
  """Writes the scripts to `folder`, which is created, and returns their paths.

  Raises:
    ConfigError: a file of that name has other contents. Nothing is written then.
  """
  texts = {folder / path.name: path.read_bytes() for path in shipped()}
  changed = [p for p, text in texts.items() if p.exists() and p.read_bytes() != text]
  if changed:
    raise ConfigError(
      f'{", ".join(map(str, changed))} would be overwritten.',
      fix='Name another folder, or move the changed files.',
      docs='slurm.md',
    )
  folder.mkdir(parents=True, exist_ok=True)
  for path, text in texts.items():
    path.write_bytes(text)
    path.chmod(0o755 if path.suffix == '.sh' else 0o644)
  return list(texts)
