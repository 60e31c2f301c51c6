"""Optional members have one place each, which declares them with their defaults."""

import ast

from tests.test_layering import PACKAGE, modules, none, path_of

# Class that declares optional members -> the module that alone may look for them.
OPTIONAL = {'OptionalMembers': 't5x_gpu.models.model', 'FileBatchIterator': 't5x_gpu.data.batches'}
MODELS = ('model', 'plain')  # what variables and fields that hold a model end in


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


def test_optional_members_are_declared_and_looked_for_in_one_place():
  members = {name: members_of(name) for name in OPTIONAL}
  found = [
    f'{path_of(module).relative_to(PACKAGE.parent)}:{call.lineno} has {ast.unparse(call)}. Use '
    'OptionalMembers(model) or optional_method(batches, name), and declare the member there.'
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
  members = members_of('OptionalMembers')
  assert len(lookups(ast.parse(seen), members)) == 4
  assert lookups(ast.parse(legal), members) == []
