"""Paths as users write them: `~`, relative, with `..`."""

import os
import pathlib

from t5x_gpu.errors import ConfigError


def user_path(text: str | os.PathLike) -> pathlib.Path:
  """Returns the absolute path that `text` means, without `..`; call it once, where a path enters.

  TensorStore refuses paths with `..`. One that follows a link leads to the parent of the link's
  target, as everywhere in the system: up to the last `..`, links are replaced by their targets. All
  other links stay, so that the path remains the one that the user knows.

  Raises:
    ConfigError: the path is empty, or names the home of an unknown user.
  """
  text = os.fspath(text)
  if not text or '\0' in text:
    raise ConfigError(
      f'The path {text!r} is empty or has a null byte.', fix='Give the path of a file or folder.'
    )
  expanded = os.path.expanduser(text)
  if expanded.startswith('~'):
    raise ConfigError(
      f'{text!r} begins with the home folder of a user that this machine does not know.',
      fix=f'Write the path out, or ./{text} for a folder of that name.',
    )
  path = pathlib.Path(expanded).absolute()
  if '..' not in path.parts:
    return path
  end = len(path.parts) - path.parts[::-1].index('..')
  return pathlib.Path(os.path.realpath(pathlib.Path(*path.parts[:end])), *path.parts[end:])
