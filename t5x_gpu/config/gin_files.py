"""Finds gin files, from any working directory and from an installed wheel.

gin 0.5.0's search treats a folder that Python could import as a package and then fails with a
TypeError (resource_reader.py:89), so we read all files ourselves and pass only their text to gin.
"""

import os
import pathlib
from collections.abc import Iterable
from typing import Optional

from t5x_gpu.config.user_paths import user_path
from t5x_gpu.errors import ConfigError, did_you_mean

PACKAGE = pathlib.Path(__file__).resolve().parents[1]


class GinFiles:
  """Finds gin files in the working directory, `search_paths`, the package and its repository."""

  def __init__(self, search_paths: Iterable[str] = ()):
    cwd = pathlib.Path.cwd()
    folders = [cwd, *((cwd / os.path.expanduser(p)) for p in search_paths), PACKAGE, PACKAGE.parent]
    self.folders = list(dict.fromkeys(map(user_path, folders)))

  def find(
    self, name: str, *, asked_at: str = '', included_by: Optional[pathlib.Path] = None
  ) -> pathlib.Path:
    """Returns the absolute path of the gin file `name`.

    Args:
      name: a path, absolute or relative to one of the folders; the first folder that has it wins.
      asked_at: 'FILE:LINE' of an include statement, for the message.
      included_by: the including file; its folder is searched last.
    Raises:
      ConfigError: the file does not exist; lists the searched folders and similar shipped files.
    """
    expanded = os.path.expanduser(name)
    folders = self.folders if included_by is None else [*self.folders, included_by.parent]
    tried = [user_path(folder / expanded) for folder in folders]
    for path in dict.fromkeys(tried):
      if path.is_file():
        return path
    where = (
      ''
      if os.path.isabs(expanded)
      else ' Searched folders: ' + ', '.join(map(str, dict.fromkeys(folders))) + '.'
    )
    asked = f'{asked_at} includes {name!r}, which' if asked_at else f'Gin file {name!r}'
    shipped = self.shipped()
    by_tail = [s for s in shipped if s.rsplit('/', 1)[1] == os.path.basename(name)]
    hint = f' Did you mean {by_tail[0]!r}?' if by_tail else did_you_mean(name, shipped)
    folder = any(path.is_dir() for path in tried)
    raise ConfigError(
      f'{asked} {"is a folder" if folder else "does not exist"}.{where}{hint}',
      fix='Give the path from one of these folders, or add its folder: --gin_search_paths=FOLDER',
    )

  def shown(self, path: pathlib.Path) -> str:
    """Returns `path` relative to its folder, as messages and tables print it."""
    # The shortest path: a virtual environment may be inside the working directory.
    relative = [str(path.relative_to(f)) for f in self.folders if path.is_relative_to(f)]
    return min(relative, key=len, default=str(path))

  def is_shipped(self, shown: str) -> bool:
    """Returns whether a file, named as by `shown`, comes with the package."""
    found = next((path for f in self.folders if (path := f / shown).is_file()), None)
    roots = [folder / 'gin_configs' for folder in (PACKAGE, PACKAGE.parent)]
    return found is not None and any(found.is_relative_to(root) for root in roots)

  def shipped(self, subfolder: str = '') -> list[str]:
    """Returns the gin files of the package, in the form that users type."""
    for folder in (PACKAGE, PACKAGE.parent):
      root = folder / 'gin_configs'
      if root.is_dir():
        return sorted(str(p.relative_to(folder)) for p in (root / subfolder).rglob('*.gin'))
    return []
