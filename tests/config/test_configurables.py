"""Every parameter that gin can set is shown to users or tested; others would be dead options."""

import importlib
import inspect
import pathlib
import re

from t5x_gpu.config import gin_text

ROOT = pathlib.Path(__file__).parents[2]
_IMPORT = re.compile(r'^from (t5x_gpu[\w.]*) import (\w+)$', re.MULTILINE)


def gin_texts() -> list[str]:
  return [(ROOT / name).read_text() for name in gin_text.GinFiles().shipped()]


def configurables() -> dict[str, object]:
  """Returns 'module.Name' -> object for the public parts of modules that shipped gin files import.

  Functions and classes that a module imports from elsewhere do not count.
  """
  modules = {found.groups() for text in gin_texts() for found in _IMPORT.finditer(text)}
  found = {}
  for package, stem in sorted(modules):
    module = importlib.import_module(f'{package}.{stem}')
    for name, value in vars(module).items():
      is_own = getattr(value, '__module__', None) == module.__name__
      if is_own and not name.startswith('_') and callable(value):
        found[f'{stem}.{name}'] = value
  return found


def named(configurable: str, texts: list[str]) -> bool:
  """Returns whether any text names a configurable as gin files and pages do."""
  stem, name = configurable.split('.')
  return any(re.search(rf'\b{stem}\.{name}\b|\b{name}\.\w', text) for text in texts)


def test_every_parameter_that_gin_can_set_is_in_a_gin_file_a_page_or_a_test():
  shown = gin_texts() + [path.read_text() for path in (ROOT / 'docs').glob('*.md')]
  tests = [path.read_text() for path in (ROOT / 'tests').rglob('*.py')]
  # name=value in Python and gin; `Class.name` on a page; 'name' in the table of a test.
  uses = re.finditer(r"\b(\w+) ?=[^=]|[`'](?:[\w.]*\.)?(\w+)[`' ]", '\n'.join([*shown, *tests]))
  words = {use.group(1) or use.group(2) for use in uses}
  checked, missing = 0, []
  for configurable, value in configurables().items():
    if not named(configurable, shown):
      continue  # a function or class of the same module that no gin file is meant to configure
    try:
      parameters = inspect.signature(value).parameters
    except ValueError:
      continue
    checked += len(parameters)
    missing += [f'{configurable}.{name}' for name in parameters if name not in words]
  assert checked > 100
  assert not missing, f'Show these on a page, test them, or remove them: {", ".join(missing)}'
