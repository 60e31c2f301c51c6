"""Whether the array files of a checkpoint are whole, told in milliseconds: no array is read.

Orbax keeps the pieces of all arrays in a few files, and where each piece lies in an index: a
manifest and a tree of nodes, each with a checksum (TensorStore's OCDBT). So the sizes of the files
tell whether all pieces are there.
Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

import os
from collections.abc import Iterator

import tensorstore as ts

from t5x_gpu.checkpoint.paths import AnyPath, RemotePath, context, kvstore_spec


def check_only_files(folder: str | os.PathLike) -> None:
  """Raises OSError or ValueError if something in `folder` is neither a file nor a folder.

  Orbax and TensorStore would wait for a pipe for ever.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        check_only_files(entry)
      elif not entry.is_file():  # of a link, what it leads to; nothing is looked up for a file
        raise ValueError(f'{entry.path} is no file')


def check_array_files(folder: AnyPath) -> None:
  """Raises OSError or ValueError unless each piece of each array lies inside its file.

  That finds files that are missing or cut off, and a damaged index; not bytes that have changed
  inside a file. It takes some milliseconds, 3 more for every 1000 pieces (one per array and shard).
  In object storage nothing can be cut off, and the files need only be there.

  Args:
    folder: of the item in the checkpoint, `checkpoint_<step>/state`.
  """
  ends: dict[str, int] = {}
  try:
    base = ts.KvStore.open(kvstore_spec(folder), context=context()).result()
    manifest = ts.ocdbt.dump(base).result()
    root = manifest['versions'][-1]['root'].get('location') if manifest else None
    if root is None:
      raise ValueError('manifest.ocdbt names no arrays')
    for piece in _pieces(base, root):
      # 'value:ocdbt.process_0/:d/bd17da16:65208:3861': folder, file, offset, length.
      place, offset, length = piece.rsplit(':', 2)
      file = ''.join(place.split(':')[1:])
      ends[file] = max(ends.get(file, 0), int(offset) + int(length))
  except (LookupError, TypeError, AttributeError, RuntimeError) as e:  # of a damaged index
    raise ValueError(f'the index of the arrays is damaged: {type(e).__name__}: {e}') from e
  if isinstance(folder, RemotePath):
    missing = sorted(ends.keys() - set(folder.files()))
    if missing:
      raise ValueError(f'{missing[0]} is missing')
    return
  for file, end in ends.items():
    size = (folder / file).stat().st_size
    if size < end:
      raise ValueError(f'{file} is cut off: it has {size:,} of at least {end:,} bytes')


def _pieces(base: ts.KvStore, node: str) -> Iterator[str]:
  """Yields where each value below a node lies, but those that are kept in the index itself."""
  for entry in ts.ocdbt.dump(base, node).result()['entries']:
    if 'location' in entry:
      yield from _pieces(base, entry['location'])
    elif 'indirect_value' in entry:
      yield entry['indirect_value']
