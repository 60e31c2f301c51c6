"""Checks in milliseconds whether the array files of a checkpoint are complete. Reads no array.

Orbax keeps the pieces of all arrays in a few files. An index, a manifest and a tree of nodes with
checksums (TensorStore's OCDBT), stores the position of each piece. So the sizes of the files show
whether all pieces are there. The metadata of the arrays is checked before TensorStore sees it.
Source: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

import tensorstore as ts

from t5x_gpu.checkpoint.schemas import ARRAY_METADATA
from t5x_gpu.checkpoint.storage.paths import AnyPath, RemotePath, context, kvstore_spec
from t5x_gpu.config.json_schema import open_regular, parse_json

_MOST_METADATA_BYTES = 1 << 20  # of one array


def check_only_files(folder: str | os.PathLike) -> None:
  """Raises OSError or ValueError if something in `folder` is neither a file nor a folder.

  Orbax and TensorStore would wait for a pipe forever.
  """
  with os.scandir(folder) as entries:
    for entry in entries:
      if entry.is_dir(follow_symlinks=False):
        check_only_files(entry)
      elif not entry.is_file():  # follows links
        raise ValueError(f'{entry.path} is not a file')


def check_array_files(folder: AnyPath) -> None:
  """Raises OSError or ValueError unless each piece of each array lies inside its file.

  Finds missing or truncated files, a damaged index, and metadata that would make TensorStore end
  the process. Does not find bytes that changed inside a file. Takes about 3 ms for every 1000
  pieces (one per array and shard). Objects in storage cannot be truncated, so remote files only
  need to exist, and their metadata is not checked.

  Args:
    folder: folder of the item in the checkpoint, `checkpoint_<step>/state`.
  """
  ends: dict[str, int] = {}
  metadata: dict[str, list[tuple[str, int, int]]] = {}  # file -> key, offset and length in it
  try:
    base = ts.KvStore.open(kvstore_spec(folder), context=context()).result()
    manifest = ts.ocdbt.dump(base).result()
    root = manifest['versions'][-1]['root'].get('location') if manifest else None
    if root is None:
      raise ValueError('manifest.ocdbt lists no arrays')
    for key, entry in _entries(base, root):
      if 'indirect_value' not in entry:  # short values are in the index itself
        _check_metadata(key, entry.get('inline_value', b''))
        continue
      # 'value:ocdbt.process_0/:d/bd17da16:65208:3861': folder, file, offset, length.
      place, offset, length = entry['indirect_value'].rsplit(':', 2)
      file = ''.join(place.split(':')[1:])
      ends[file] = max(ends.get(file, 0), int(offset) + int(length))
      if _name(key) in ARRAY_METADATA:
        metadata.setdefault(file, []).append((key, int(offset), int(length)))
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
      raise ValueError(f'{file} is truncated: it has {size:,} of at least {end:,} bytes')
  for file, places in metadata.items():
    with open_regular(folder / file) as f:
      for key, offset, length in places:
        if length > _MOST_METADATA_BYTES:
          raise ValueError(f'{key} has {length:,} bytes, and {_MOST_METADATA_BYTES:,} is the limit')
        f.seek(offset)
        _check_metadata(key, f.read(length))


def _entries(
  base: ts.KvStore, node: str, prefix: bytes = b''
) -> Iterator[tuple[str, Mapping[str, Any]]]:
  """Yields key and entry of each value below a node of the index."""
  for entry in ts.ocdbt.dump(base, node).result()['entries']:
    if 'location' in entry:
      yield from _entries(base, entry['location'], prefix + entry['subtree_common_prefix'])
    else:
      yield (prefix + entry['key']).decode(errors='replace'), entry


def _name(key: str) -> str:
  return key.rpartition('/')[2]


def _check_metadata(key: str, content: bytes) -> None:
  """Raises ValueError if `content` is the metadata of an array, but not valid."""
  if _name(key) in ARRAY_METADATA:
    try:
      parse_json(content, ARRAY_METADATA[_name(key)])
    except ValueError as e:
      raise ValueError(f'{key} is damaged: {e}') from e
