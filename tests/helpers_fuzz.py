"""Damages files at random, and runs their readers: only UserErrors may be raised.

    fuzz(Target(folder, files, use), count=100, seed=0)

A mutation flips bits, cuts, pads or empties a file; puts hostile values into its JSON, nests it, or
takes keys away; or puts a folder, a link or a pipe in its place. A failure names its number.
"""

import collections
import dataclasses
import json
import os
import pathlib
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from t5x_gpu.errors import UserError

# JSON texts, many of which Python's json cannot represent.
HOSTILE = (
  '-1',
  '0',
  '1',
  '1.5',
  '-0.0',
  '1e308',
  '1e999',
  'NaN',
  '-Infinity',
  '2147483648',
  '9223372036854775807',
  '18446744073709551616',
  '1' + '0' * 30,
  '9' * 5000,
  '1e-400',
  'true',
  'null',
  '""',
  '"../../x"',
  '"/etc/passwd"',
  '".."',
  r'"\ud800"',
  r'"\u0000"',
  '"\u202e"',
  '"' + 'A' * 5000 + '"',
  '"float32"',
  '"object"',
  '"O8"',
  '[]',
  '{}',
  '[[]]',
  '[{}]',
  '[1, 2, 3]',
  '[0]',
  '[' + '1, ' * 999 + '1]',
  '[4611686018427387904, 4611686018427387904]',
  '{"a": {"b": 1}}',
  '[' * 60 + ']' * 60,
  '[' * 100_000 + ']' * 100_000,
  '{"a":' * 3000 + '1' + '}' * 3000,
)
# Files in MODEL_DIR, besides checkpoints, that a start of a run opens.
START_FILES = frozenset(
  {
    'config.gin',
    'config_origins.txt',
    'goodput.jsonl',
    'loggers.json',
    'metrics.jsonl',
    'run.id',
    'run.lock',
    'samples.jsonl',
    'source_files.json',
  }
)
_MARK = '"the value to replace"'

Seal = Callable[[bytes], bytes]


@dataclasses.dataclass(frozen=True)
class Target:
  """Files of one kind, and their reader.

  Attributes:
    folder: where they are; what `use` adds to it is removed again.
    files: which of them to damage -> how to unpack their JSON (see `Packed`).
    use: reads them.
    errors: that it may raise.
  """

  folder: pathlib.Path
  files: Mapping[str, 'Packed']
  use: Callable[[], Any]
  errors: tuple[type[Exception], ...] = (UserError,)


@dataclasses.dataclass(frozen=True)
class Packed:
  """Where the JSON is in the bytes of a file; by default it is all of them.

  Attributes:
    unpack: bytes -> text, b'' for a file without JSON.
    pack: (bytes as they were, new text) -> bytes whose checksums and lengths are right again.
  """

  unpack: Callable[[bytes], bytes] = lambda content: content
  pack: Callable[[bytes, bytes], bytes] = lambda content, text: text


BINARY = Packed(unpack=lambda content: b'')


def fuzz(target: Target, *, count: int, seed: int) -> collections.Counter:
  """Returns how often `use` raised which error ('' for none)."""
  outcomes: collections.Counter = collections.Counter()
  original = contents(target.folder)
  target.use()  # undamaged, it reads all
  restore(target.folder, original)
  for number in range(count):
    rng = random.Random(f'{seed} {number}')
    name = rng.choice(list(target.files))
    what = _damage(target.folder / name, original[name], target.files[name], rng)
    try:
      target.use()
      outcomes[''] += 1
    except target.errors as e:
      str(e).encode()  # it can be printed
      outcomes[type(e).__name__] += 1
    except BaseException as e:
      raise AssertionError(
        f'mutation {number} of seed {seed}, {name}, {what}: {type(e).__name__}: {str(e)[:500]}'
      ) from e
    restore(target.folder, original)
  return outcomes


def contents(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns each file below `folder` with its bytes."""
  return {
    path.relative_to(folder).as_posix(): path.read_bytes()
    for path in folder.rglob('*')
    if path.is_file()
  }


def restore(folder: pathlib.Path, contents: Mapping[str, bytes]) -> None:
  """Restores `folder`; writes only the files that differ."""
  parents = {str(parent) for name in contents for parent in pathlib.PurePath(name).parents}
  for base, folders, files in os.walk(folder, topdown=False):
    for name in (*files, *folders):
      path = pathlib.Path(base, name)
      relative = path.relative_to(folder).as_posix()
      is_folder = path.is_dir() and not path.is_symlink()
      if relative not in contents and relative not in parents:
        shutil.rmtree(path) if is_folder else path.unlink()
      elif is_folder and relative in contents:
        shutil.rmtree(path)
      elif path.is_symlink():
        path.unlink()
  for name, content in contents.items():
    path = folder / name
    if not path.is_file() or path.is_symlink() or path.read_bytes() != content:
      path.unlink(missing_ok=True)
      path.parent.mkdir(parents=True, exist_ok=True)
      path.write_bytes(content)


def _damage(path: pathlib.Path, content: bytes, packed: Packed, rng: random.Random) -> str:
  """Damages a file; returns how."""
  text = packed.unpack(content)
  kinds: list[Callable[..., str]] = [_bytes, _bytes, _replace]
  if text:
    kinds += [_json] * 9
  return rng.choice(kinds)(path, content, packed, rng)


def _bytes(path: pathlib.Path, content: bytes, packed: Packed, rng: random.Random) -> str:
  del packed
  new = bytearray(content)
  kind = rng.choice(('flip', 'flip', 'cut', 'empty', 'pad', 'zeros', 'garbage'))
  if kind == 'flip':
    for _ in range(rng.choice((1, 1, 4, 64)) if new else 0):
      new[rng.randrange(len(new))] ^= 1 << rng.randrange(8)
  elif kind == 'cut':
    del new[rng.randrange(len(new) + 1) :]
  elif kind == 'empty':
    new.clear()
  elif kind == 'pad':
    new += rng.randbytes(rng.choice((1, 8, 4096)))
  else:
    start = rng.randrange(len(new) + 1)
    end = min(start + rng.choice((1, 8, 512)), len(new))
    new[start:end] = bytes(end - start) if kind == 'zeros' else rng.randbytes(end - start)
  path.write_bytes(new)
  return kind


def _replace(path: pathlib.Path, content: bytes, packed: Packed, rng: random.Random) -> str:
  del content, packed
  return replace(path, rng.choice(REPLACEMENTS))


REPLACEMENTS = (
  'nothing',
  'folder',
  'full folder',
  'dangling link',
  'looping link',
  'pipe',
  'zeros',
)


def replace(path: pathlib.Path, kind: str) -> str:
  """Replaces a file by one of `REPLACEMENTS`."""
  path.unlink(missing_ok=True)
  if kind in ('folder', 'full folder'):
    path.mkdir()
    if kind == 'full folder':
      (path / 'notes.txt').write_text('mine')
  elif kind == 'dangling link':
    path.symlink_to('nowhere/at/all')
  elif kind == 'looping link':
    path.symlink_to(path.name)
  elif kind == 'pipe':
    os.mkfifo(path)
  elif kind == 'zeros':
    path.symlink_to('/dev/zero')
  return kind


def _json(path: pathlib.Path, content: bytes, packed: Packed, rng: random.Random) -> str:
  """Changes one place of the JSON."""
  value = json.loads(packed.unpack(content))
  places = list(_places(value))
  holder, key = rng.choice(places)
  kind, text = rng.choice((*['put'] * 4, 'drop', 'add', 'rename', 'swap', 'shift')), ''
  if holder is None:
    text = rng.choice(HOSTILE)
    path.write_bytes(packed.pack(content, text.encode()))
    return f'all of it {text[:60]}'
  if kind == 'shift' and isinstance(holder[key], int):
    holder[key] += rng.choice((-1, 1, -8, 8, 1000, -(10**6)))
  elif kind == 'drop':
    del holder[key]
  elif kind == 'swap':
    other, other_key = rng.choice([p for p in places if p[0] is not None])
    if not _holds(holder[key], other) and not _holds(other[other_key], holder):
      holder[key], other[other_key] = other[other_key], holder[key]
  elif kind == 'rename' and isinstance(holder, dict):
    holder[rng.choice(('x', '..', '\0', key + key, '/'))] = holder.pop(key)
  else:
    text = rng.choice(HOSTILE)
    if kind == 'add' and isinstance(holder, dict):
      holder['unknown'] = json.loads(_MARK)
    else:
      holder[key] = json.loads(_MARK)
  new = json.dumps(value).replace(_MARK, text)
  path.write_bytes(packed.pack(content, new.encode()))
  return f'{kind} {key!r} {text[:60]}'


def _holds(value: Any, holder: Any) -> bool:
  """Returns whether `holder` is `value` or inside it, so that a swap would make a cycle."""
  return value is holder or any(
    _holds(child, holder)
    for child in (
      value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
  )


def _places(value: Any) -> list[tuple[Any, Any]]:
  """Returns (holder, key) of every value in a tree; (None, None) for the tree itself."""
  found: list[tuple[Any, Any]] = [(None, None)]
  todo: list[Any] = [value]
  while todo:
    holder = todo.pop()
    keys: Sequence[Any] = (
      list(holder)
      if isinstance(holder, dict)
      else (range(len(holder)) if isinstance(holder, list) else ())
    )
    for key in keys:
      found.append((holder, key))
      todo.append(holder[key])
  return found
