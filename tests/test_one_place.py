"""Optional members, private parts of libraries and names of classes have one place each."""

import ast
import collections
import itertools
import re
from collections.abc import Iterator

from tests.test_layering import PACKAGE, modules, none, path_of

# Class that declares optional members -> the module that alone may look for them.
OPTIONAL = {'Model': 't5x_gpu.models.model', 'FileBatchIterator': 't5x_gpu.data.batches'}
MODELS = ('model', 'plain')  # what variables and fields that hold a model end in

# Each use in these modules names the public API that would end it, and the request for it.
INTERNALS = {'t5x_gpu.runtime.cluster.jax_internals', 't5x_gpu.layers.backends.tokamax_internals'}
# Module or folder -> what it reads of another library, and why.
MAY_READ = {
  't5x_gpu.config.gin_names': 'gin: no public list of functions and classes; forgets none',
  't5x_gpu.cli': 'argparse: it has no public list of the arguments of a parser',
  't5x_gpu.conversion.conversion': 'transformers: the choice of expert kernels',
}
# Public in spite of the underscore.
DOCUMENTED = {'_exit', '_current_frames', '_current_exceptions', '_replace', '_asdict', '_fields'}
PRIVATE_MODULE = re.compile(r'\w\._[a-z]\w*(\.|$)')


def members_of(name: str) -> set[str]:
  """Returns the public members of a class of `OPTIONAL`."""
  (declared,) = (n for n in modules()[OPTIONAL[name]].body if getattr(n, 'name', '') == name)
  found = {n.name for n in declared.body if isinstance(n, ast.FunctionDef)}
  found |= {n.target.id for n in declared.body if isinstance(n, ast.AnnAssign)}
  return {name for name in found if not name.startswith('_')}


def is_model(node: ast.expr) -> bool:
  return ast.unparse(node).rpartition('.')[2].endswith(MODELS)


def looks_for(call: ast.Call, members: set[str]) -> bool:
  """Returns whether a call of getattr or hasattr looks for a member that may be absent."""
  if not isinstance(call.func, ast.Name) or call.func.id not in ('getattr', 'hasattr'):
    return False
  owner, name = call.args[:2]
  is_literal = isinstance(name, ast.Constant)
  may_be_absent = call.func.id == 'hasattr' or len(call.args) == 3
  return (is_literal and name.value in members) or (
    is_model(owner) and (is_literal or may_be_absent)
  )


def lookups(tree: ast.AST, members: set[str]) -> list[ast.Call]:
  return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and looks_for(n, members)]


def test_bytes_are_formatted_in_one_place():
  found = [
    f'{path_of(module).relative_to(PACKAGE.parent)}:{node.lineno} formats bytes: use console.show.'
    for module, tree in modules().items()
    for node in ast.walk(tree)
    if isinstance(node, ast.JoinedStr) and module != 't5x_gpu.terminal.console'
    for value, text in itertools.pairwise(node.values)
    if isinstance(value, ast.FormattedValue)
    and isinstance(text, ast.Constant)
    and re.match(r' ([KMG]i?B)\b(?!/)', text.value)
    and not ast.unparse(value.value).startswith('mib(')
  ]
  none(found)


def test_optional_members_are_declared_and_looked_for_in_one_place():
  members = {name: members_of(name) for name in OPTIONAL}
  found = [
    f'{path_of(module).relative_to(PACKAGE.parent)}:{call.lineno} has {ast.unparse(call)}. Use '
    'model.NAME or optional_method(batches, name), and declare the member with its default there.'
    for module, tree in modules().items()
    if module not in OPTIONAL.values()
    for call in lookups(tree, set().union(*members.values()))
  ]
  none(found)


def test_the_rule_sees_the_forms_of_a_lookup():
  seen = """
getattr(model, 'x', 0)
getattr(self._model, name, None)
hasattr(request.model, 'x')
getattr(thing, 'gathers_layers', False)
"""
  legal = """
getattr(model, name)
getattr(model.layer, 'name', '')
hasattr(device, 'x')
"""
  members = members_of('Model')
  assert len(lookups(ast.parse(seen), members)) == 4
  assert lookups(ast.parse(legal), members) == []


def own_names(tree: ast.Module) -> set[str]:
  """Returns the names that a module defines for itself and the objects of its classes."""
  names = set()
  for node in ast.walk(tree):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
      names.add(node.name)
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
      names.add(node.id)
    elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ('self', 'cls'):
      names.add(node.attr)
  return names


def private_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Yields (line, text) of private modules and attributes of other libraries."""
  own = own_names(tree)
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      is_private = node.attr.startswith('_') and not node.attr.endswith('__')
      if is_private and node.attr not in own | DOCUMENTED:
        yield node.lineno, ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
      if ' ' not in node.value and PRIVATE_MODULE.search(node.value):  # of import_module
        yield node.lineno, node.value
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
      module = [node.module] if isinstance(node, ast.ImportFrom) else []
      for name in (*module, *(alias.name for alias in node.names)):
        if any(re.match('_[a-z]', part) for part in name.split('.')):
          yield node.lineno, name


def test_private_parts_of_libraries_are_used_in_one_module_each():
  found = [
    f'{path_of(module).relative_to(PACKAGE.parent)}:{line} uses {text}'
    for module, tree in modules().items()
    if module not in INTERNALS and not any(f'{module}.'.startswith(f'{m}.') for m in MAY_READ)
    for line, text in private_uses(tree)
  ]
  none(found)


def test_every_module_that_may_use_private_parts_does():
  for listed in (*INTERNALS, *MAY_READ):
    trees = [tree for module, tree in modules().items() if f'{module}.'.startswith(f'{listed}.')]
    assert any(list(private_uses(tree)) for tree in trees), listed


def test_the_rule_sees_the_forms_of_a_private_use():
  seen = """
import jax._src.lib
from jax._src import lib
from orbax import _internal
importlib.import_module('tokamax._src.ops')
jax.config._values
"""
  legal = """
import jax
os._exit(1)
self._values = other._values
print('a sentence with x._src.y in it')
"""
  assert len(list(private_uses(ast.parse(seen)))) == 5
  assert list(private_uses(ast.parse(legal))) == []


def test_public_names_of_classes_are_unique():
  found = collections.defaultdict(list)
  for module, tree in modules().items():
    for node in tree.body:
      if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
        found[node.name].append(module)
  none([f'{name} is in {", ".join(found[name])}' for name in found if len(found[name]) > 1])


# `start` sets up a process, `open_X` returns an X that is ready, `join` meets the other processes.
OTHER_WORDS = re.compile(r'_?(begin|init|initialize|setup|set_up)(_|$)')


def test_run_and_runtime_have_one_word_for_setting_up():
  none(
    [
      f'{path_of(module)}:{node.lineno}: {node.name}; say start, or open_X if it returns an X'
      for module, tree in modules().items()
      if module.startswith(('t5x_gpu.run.', 't5x_gpu.runtime.'))
      for node in ast.walk(tree)
      if isinstance(node, ast.FunctionDef) and OTHER_WORDS.match(node.name)
    ]
  )
