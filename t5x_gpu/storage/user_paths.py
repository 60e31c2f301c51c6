"""Paths as users write them: `~`, relative, with `..`."""

import os
import pathlib
import sys

from t5x_gpu.errors import ConfigError


def check_encoding(*texts: str) -> None:
  """Raises ConfigError if Python names the file of one of `texts` otherwise than libraries do.

  TensorStore, TensorFlow and ArrayRecord take names as UTF-8. Python does so unless its UTF-8 mode
  is off in a locale with another encoding: then both would use different files.
  """
  encoding = sys.getfilesystemencoding()
  other = next((text for text in texts if not text.isascii()), None)
  if encoding != 'utf-8' and other is not None:
    raise ConfigError(
      f'{other!r} is not in ASCII, and Python reads the names of files as {encoding}, because '
      f'PYTHONUTF8 = {os.environ.get("PYTHONUTF8")} or because of the locale.',
      fix='Set the environment variable PYTHONUTF8=1.',
    )


def expanded_path(text: str | os.PathLike) -> pathlib.Path:
  """Returns the path `text` with the home folder in place of `~`; a second call changes nothing.

  Raises:
    ConfigError: the path begins with the home of an unknown user.
  """
  text = os.fspath(text)
  expanded = os.path.expanduser(text)
  if expanded.startswith('~'):
    raise ConfigError(
      f'{text!r} begins with the home folder of a user that this machine does not know.',
      fix=f'Write the path out, or ./{text} for a folder of that name.',
    )
  path = pathlib.Path(expanded)
  return path.absolute() if str(path).startswith('~') else path  # it was ./~NAME


def user_path(text: str | os.PathLike) -> pathlib.Path:
  """Returns the absolute path of `text`, without `..`; call it once for each path of the user.

  TensorStore refuses paths with `..`. A `..` after a link leads to the parent of the link's target,
  as everywhere in the system: up to the last `..`, links are replaced by their targets. All later
  links stay, so that the user recognizes the path.

  Raises:
    ConfigError: the path is empty or too long, names the home of an unknown user, or cannot be read
      in the encoding of this process.
  """
  text = os.fspath(text)
  if not text or '\0' in text:
    raise ConfigError(
      f'The path {text!r} is empty or has a null byte.', fix='Give the path of a file or folder.'
    )
  path = expanded_path(text).absolute()
  check_encoding(str(path))
  _check_lengths(path)
  if '..' not in path.parts:
    return path
  end = len(path.parts) - path.parts[::-1].index('..')
  return pathlib.Path(os.path.realpath(pathlib.Path(*path.parts[:end])), *path.parts[end:])


def without_dots(text: str) -> str:
  """Returns the path `text`, as `user_path` if it has `..`; addresses of storage stay.

  TensorFlow takes `..` after a link for the parent of the link, which the system does not.
  """
  if '://' in text or '..' not in text.split(os.sep):
    return text
  return str(user_path(text))


def _check_lengths(path: pathlib.Path) -> None:
  """Raises ConfigError if a name in `path`, or all of it, is longer than the system allows."""
  above = next((folder for folder in path.parents if os.path.isdir(folder)), path)
  longest = max(path.parts, key=lambda name: len(os.fsencode(name)))
  most = os.pathconf(above, 'PC_NAME_MAX'), os.pathconf(above, 'PC_PATH_MAX') - 1
  lengths = len(os.fsencode(longest)), len(os.fsencode(path))
  if lengths[0] > most[0] or lengths[1] > most[1]:
    raise ConfigError(
      f'The path {_cut(str(path))!r} is too long: {lengths[1]} bytes, and its longest name '
      f'{_cut(longest)!r} has {lengths[0]}. In {_cut(str(above))}, a name may have {most[0]} bytes '
      f'and a path {most[1]}.',
      fix='Shorten it, or name another.',
      docs='checkpoints.md',
    )


def _cut(text: str) -> str:
  return text if len(text) <= 100 else f'{text[:80]}...{text[-17:]}'
