"""Snippets of standard-library source, labelled by the package they come from; no TF.

Real text of a real difficulty that is on every machine: names, idioms and comments give a package
away, and the files of validation were never seen in training.
"""

import functools
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence

from t5x_gpu.data.sources.discovery import standard_library_files
from t5x_gpu.data.sources.labelled_tables import LabelledTexts
from t5x_gpu.errors import DataError

# The 16 packages with the most source that have several files, in Python 3.11 and later, on every
# distribution (Debian packs tkinter, lib2to3 and distutils apart). Sorted: the order is the number.
PACKAGES = ('asyncio', 'concurrent', 'ctypes', 'email', 'html', 'http', 'importlib', 'json',
            'logging', 'multiprocessing', 're', 'unittest', 'urllib', 'wsgiref', 'xml', 'xmlrpc')
# Whole lines up to here; with its end of sequence a snippet fills 256 byte tokens.
MAX_BYTES = 255
# A shorter rest of a file tells nothing.
MIN_BYTES = 32
# Files go to validation, in an order drawn by hash, until it has this share of a package's bytes;
# a file that would take it beyond the second share stays in training.
VALIDATION_SHARE, MAX_VALIDATION_SHARE = 0.15, 0.45


def snippets_of(text: bytes) -> Iterator[bytes]:
  """Yields `text` in pieces of at most `MAX_BYTES`, cut at line ends, longer lines anywhere.

  Pieces that have fewer than `MIN_BYTES` without their white space are left out.
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
  """Returns the files of one package that are for validation, at least one; `sizes` in bytes."""
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
    raise DataError(
        f"python_source_classification reads {len(PACKAGES)} packages of the standard library, and "
        f'under {root} there is too little source of: {", ".join(short)}.',
        fix='Use a Python with its whole library in source form, or a task of your own: '
            "MIXTURE_OR_TASK_NAME = 'classification:csv:FOLDER/*.csv'.",
        parameters=('DatasetConfig.mixture_or_task_name',))
  return found


@functools.cache
def python_snippets() -> LabelledTexts:
  """Returns snippets of `PACKAGES` by split; no file gives to both.

  Raises:
    DataError: an interpreter without these packages in source form.
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
    # A line longer than a snippet may be cut inside a character.
    return [piece.decode(errors='replace') for piece in snippets_of(f.read())]
