"""Snippets of the standard library, labelled by package: real text available on every machine.

Names, idioms and comments reveal the package. Training never sees the files of validation.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence

from t5x_gpu.data.sources.discovery import standard_library_files
from t5x_gpu.data.sources.labelled.tables import LabelledTexts
from t5x_gpu.errors import task_error

# The 16 largest packages with several files, in Python 3.11 and later, on every distribution
# (Debian has separate packages for tkinter, lib2to3 and distutils). Sorted by class number.
PACKAGES = (
  'asyncio',
  'concurrent',
  'ctypes',
  'email',
  'html',
  'http',
  'importlib',
  'json',
  'logging',
  'multiprocessing',
  're',
  'unittest',
  'urllib',
  'wsgiref',
  'xml',
  'xmlrpc',
)
# With its end-of-sequence token, a snippet has at most 256 byte tokens.
MAX_BYTES = 255
# The rest of a file is dropped if it is shorter.
MIN_BYTES = 32
# Files go to validation, in the order of a hash, until validation has the first share of a
# package's bytes. A file that would exceed the second share stays in training.
VALIDATION_SHARE, MAX_VALIDATION_SHARE = 0.15, 0.45


def snippets_of(text: bytes) -> Iterator[bytes]:
  """Yields `text` in pieces of at most `MAX_BYTES`, cut at line ends; cuts longer lines anywhere.

  Pieces with fewer than `MIN_BYTES`, after stripping white space, are skipped.
  """
  piece = b''
  for line in text.splitlines(keepends=True):
    if piece and len(piece) + len(line) > MAX_BYTES:
      yield from _long_enough(piece)
      piece = b''
    piece += line
    while len(piece) > MAX_BYTES:
      yield from _long_enough(piece[:MAX_BYTES])
      piece = piece[MAX_BYTES:]
  yield from _long_enough(piece)


def _long_enough(piece: bytes) -> Iterator[bytes]:
  if len(piece.strip()) >= MIN_BYTES:
    yield piece


def split_files(sizes: dict[str, int]) -> set[str]:
  """Returns the validation files of a package, at least one, given file -> bytes."""
  total, taken = sum(sizes.values()), 0
  chosen: set[str] = set()
  for path in sorted(sizes, key=lambda path: hashlib.sha256(path.encode()).digest()):
    if taken >= VALIDATION_SHARE * total:
      break
    if taken + sizes[path] <= MAX_VALIDATION_SHARE * total:
      chosen.add(path)
      taken += sizes[path]
  return chosen or {min(sizes, key=lambda path: (sizes[path], path))}


def package_files() -> dict[str, list[str]]:
  """Returns package -> its .py files, sorted. Raises DataError if a package has fewer than two."""
  root = sysconfig.get_paths()['stdlib']
  found: dict[str, list[str]] = {package: [] for package in PACKAGES}
  for path in sorted(sum(standard_library_files().values(), [])):
    package = os.path.relpath(path, root).split(os.sep)[0]
    if package in found:
      found[package].append(path)
  if short := [package for package, files in found.items() if len(files) < 2]:
    raise task_error(
      f'python_source_classification reads {len(PACKAGES)} packages of the standard library; '
      f'{root} has fewer than two source files of: {", ".join(short)}.',
      fix='Use a Python with its whole library in source form, or your own data: '
      "MIXTURE_OR_TASK_NAME = 'classification:csv:FOLDER/*.csv'.",
    )
  return found


@functools.cache
def python_snippets() -> LabelledTexts:
  """Returns snippets of `PACKAGES` by split; each file is in one split.

  Raises:
    DataError: the interpreter's packages are not in source form.
  """
  root = sysconfig.get_paths()['stdlib']
  texts: dict[str, list[str]] = {'train': [], 'validation': []}
  labels: dict[str, list[int]] = {'train': [], 'validation': []}
  for number, (_, files) in enumerate(package_files().items()):
    names = {os.path.relpath(path, root).replace(os.sep, '/'): path for path in files}
    held_back = split_files({name: os.path.getsize(path) for name, path in names.items()})
    for name, path in names.items():
      split = 'validation' if name in held_back else 'train'
      pieces = _texts(path)
      texts[split] += pieces
      labels[split] += [number] * len(pieces)
  return LabelledTexts(class_names=PACKAGES, texts=texts, labels=labels)


def _texts(path: str) -> Sequence[str]:
  with open(path, 'rb') as f:
    # A line that is longer than a snippet may be cut inside a character.
    return [piece.decode(errors='replace') for piece in snippets_of(f.read())]
