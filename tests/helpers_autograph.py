"""TensorFlow's AutoGraph converts each function once for all runs that a warm start forks.

The conversion of SeqIO's functions takes half the CPU time of opening text data. A run notes what
it converts; the process that forks the runs then converts the same. Only syntax trees change:
TensorFlow does not start, so that the process can still fork.
"""

import contextlib
import json
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, Optional

_API = 'tensorflow.python.autograph.impl.api'
_CONVERTER = 'tensorflow.python.autograph.core.converter'


def note_conversions(path: str | os.PathLike) -> None:
  """From now on, this process appends each function that it converts to the file `path`."""
  if _API not in sys.modules:
    return
  transpiler = sys.modules[_API]._TRANSPILER
  transform = transpiler.transform_function

  def noted(fn: Any, context: Any) -> Any:
    if not transpiler._cache.has(fn, transpiler.get_caching_key(context)):
      code, options = fn.__code__, context.options
      features = sorted(feature.name for feature in options.optional_features)
      flags = options.recursive, options.user_requested, options.internal_convert_user_code
      line = [code.co_filename, code.co_name, code.co_firstlineno, flags, features]
      with open(path, 'a', encoding='utf-8') as f:
        f.write(json.dumps(line) + '\n')
    return transform(fn, context)

  transpiler.transform_function = noted


class Repeater:
  """Converts here what other processes have noted.

  Args:
    path: file of `note_conversions`.
  """

  def __init__(self, path: pathlib.Path):
    self._path, self._done = path, set()

  def repeat(self) -> None:
    if _API not in sys.modules or not self._path.exists():
      return
    for line in self._path.read_text(encoding='utf-8').splitlines():
      if line not in self._done:
        self._done.add(line)
        with contextlib.suppress(Exception):  # then each run converts it
          _convert(*json.loads(line))


def _convert(file: str, name: str, line: int, flags: list[bool], features: list[str]) -> None:
  found = _function(file, name, line)
  if found is None:
    return
  converter = sys.modules[_CONVERTER]
  options = converter.ConversionOptions(*flags, [converter.Feature[f] for f in features])
  sys.modules[_API]._TRANSPILER.transform(found, converter.ProgramContext(options=options))


def _function(file: str, name: str, line: int) -> Optional[types.FunctionType]:
  """Returns a function with the code at this place, and empty cells for its free variables."""
  for module in list(sys.modules.values()):
    if getattr(module, '__file__', None) != file:
      continue
    for code in _codes(vars(module).values()):
      if (code.co_name, code.co_firstlineno) == (name, line):
        cells = tuple(types.CellType() for _ in code.co_freevars)
        return types.FunctionType(code, vars(module), closure=cells)
  return None


def _codes(values: Any) -> Iterator[types.CodeType]:
  for value in values:
    value = getattr(value, '__func__', value)
    value = getattr(value, '__wrapped__', value)
    if isinstance(value, type):
      yield from _codes(vars(value).values())
    code = value if isinstance(value, types.CodeType) else getattr(value, '__code__', None)
    if isinstance(code, types.CodeType):
      yield code
      yield from _codes(code.co_consts)
