"""Errors are values: what they print, what they carry, and that nothing parses their text."""

import ast
import collections
import functools
import pathlib
import pickle
import re
from collections.abc import Iterator

import pytest

import t5x_gpu
from t5x_gpu.errors import ConfigError, Problem, UserError, bad_setting, first_line
from t5x_gpu.models.decoding import SampleConfig

PACKAGE = pathlib.Path(t5x_gpu.__file__).parent

# Function that looks into the text of an error -> whose text: these libraries have neither a code
# nor a type for the case.
FOREIGN = {
  '_damage': 'XLA',
  '_is_news': 'tokamax',
  '_position': 'seqio and TensorFlow',
  '_refused_by_child': 'XLA',
  '_save_error': 'Orbax',
  '_wait': 'TensorStore',
  'compile_errors': 'XLA',
  'is_outage': 'TensorStore',
  'read': 'tokenize of Python',
  'reason_of': 'TensorStore',
  'storage_error': 'TensorStore',
  'system_error': 'Orbax and TensorStore',
}
MESSAGE = re.compile(r'(problem|reason|message|warning|sentence|why(_\w+)?|error|err|e)s?')
TAKE_APART = {
  *('startswith', 'endswith', 'removeprefix', 'removesuffix', 'partition', 'rpartition'),
  *('split', 'rsplit', 'replace', 'find', 'index'),
}


def is_message(node: ast.AST, names: set[str]) -> bool:
  """Returns whether an expression is the text of an error, by its spelling or as one of `names`."""
  match node:
    case ast.Call(func=ast.Name(id='str' | 'repr' | 'first_line'), args=[ast.Name(id=name), *_]):
      return bool(MESSAGE.fullmatch(name))
    case ast.Attribute(attr='what' | 'fix' | 'args' | 'msg'):
      return True
    case ast.Subscript(value=value) | ast.Call(func=ast.Attribute(value=value)):
      return is_message(value, names)
    case ast.Name(id=name):
      return name in names or bool(MESSAGE.fullmatch(name))
  return False


def looks_into(node: ast.AST, names: set[str]) -> bool:
  """Returns whether an expression looks into the text of an error; cutting it into lines is not."""
  match node:
    case ast.Compare(left=ast.Name(), ops=[ast.In() | ast.NotIn()], comparators=[ast.Name()]):
      return False  # an item of a list
    case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[right]):
      return is_message(right, names)
    case ast.Call(func=ast.Attribute(value=ast.Name(id='re')), args=[_, *texts]):
      return any(is_message(text, names) for text in texts)
    case ast.Call(args=[ast.Constant(value='\n')]):
      return False
    case ast.Call(func=ast.Attribute(value=text, attr=name), args=[_, *_]):
      return name in TAKE_APART and is_message(text, names)
  return False


def readers(source: str) -> Iterator[tuple[str, str]]:
  """Yields (function, line and expression) of every look into the text of an error."""
  nodes, owner, names = list(ast.walk(ast.parse(source))), {}, collections.defaultdict(set)
  for node in nodes:
    for child in ast.iter_child_nodes(node):
      owner[child] = node.name if isinstance(node, ast.FunctionDef) else owner.get(node, '')
    match node:
      case ast.Assign(targets=[ast.Name(id=name)], value=value) if is_message(value, set()):
        names[owner[node]].add(name)
  for node in nodes:
    if looks_into(node, names[owner.get(node, '')]):
      yield owner[node], f'{node.lineno}: {ast.unparse(node)}'


@functools.cache
def readers_of_package() -> list[tuple[str, str]]:
  return [
    (function, f'{path.name}:{place}')
    for path in sorted(PACKAGE.rglob('*.py'))
    for function, place in readers(path.read_text('utf-8'))
  ]


def test_no_code_looks_into_the_text_of_our_own_errors():
  assert [place for function, place in readers_of_package() if function not in FOREIGN] == []


def test_every_foreign_text_is_looked_into():
  assert FOREIGN.keys() == {function for function, _ in readers_of_package()}


@pytest.mark.parametrize(
  'expression',
  [
    "'fits' in str(e)",
    "'fits' in e.what",
    "reason.startswith('No ')",
    "why_not.removeprefix('no kernel, ')",
    "problems[0].fix.split(' ')",
    "re.match('heads = ', problem)",
    "re.findall('[A-Z]', str(error))",
    "str(e).split(': ')[-1].startswith('No ')",
  ],
)
def test_the_rule_sees(expression):
  assert {function for function, _ in readers(f'def f(x):\n  return {expression}')} == {'f'}
  assert list(readers('def f(x):\n  text = str(e)\n  return "a" in text'))


@pytest.mark.parametrize(
  'expression', ["str(e).split('\\n')", 'problem in problems', "f'{e.what} {e.fix}'", 'e.problems']
)
def test_the_rule_allows(expression):
  assert list(readers(f'def f(x):\n  return {expression}')) == []


TWO = (
  Problem('heads = 6 does not divide over model=4.', 'Set num_heads.', ('A.num_heads', 'P.model')),
  Problem('mlp = 6 does not divide over model=4.', 'Set mlp_dim.\nOr model.', ('P.model',)),
)


def test_an_error_of_one_problem_is_that_problem():
  e = ConfigError('Title', problems=TWO[:1], fix='Read the page.', docs='mesh.md')
  assert e.problems == (Problem(e.what, e.fix, e.parameters),)
  assert str(e).splitlines() == [
    'heads = 6 does not divide over model=4.',
    '  Set num_heads.',
    '  Read the page.',
    '  See docs/mesh.md',
  ]


def test_an_error_without_a_list_carries_one_problem():
  e = ConfigError('x = 1.', fix='Set x = 2.', parameters=('A.x',))
  assert e.problems == (Problem('x = 1.', 'Set x = 2.', ('A.x',)),)
  assert UserError('x').problems == (Problem('x'),) and str(UserError('x')) == 'x'


def test_several_problems_are_numbered_each_with_its_fix():
  e = ConfigError('The mesh is impossible', problems=TWO, fix='All of them.', parameters=('B.y',))
  assert e.problems == TWO and e.parameters == ('A.num_heads', 'P.model', 'B.y')
  assert str(e).splitlines() == [
    'The mesh is impossible: 2 problems.',
    '  1. heads = 6 does not divide over model=4.',
    '     Set num_heads.',
    '  2. mlp = 6 does not divide over model=4.',
    '     Set mlp_dim.',
    '     Or model.',
    '  All of them.',
  ]


def test_an_error_keeps_its_problems_between_processes():
  e = ConfigError('Title', problems=TWO, docs='mesh.md')
  copy = pickle.loads(pickle.dumps(e))
  assert (copy.problems, str(copy)) == (TWO, str(e))


def test_parameters_are_those_that_a_check_names_and_never_words_of_the_text():
  assert ConfigError('MODEL_DIR and train.total_steps', fix='Set A.x = 1.').parameters == ()


def test_a_bad_setting_names_its_value_and_its_parameter():
  found = bad_setting(SampleConfig('a', num_tokens=3), 'num_tokens', 'must be less.')
  assert found == Problem('num_tokens = 3 must be less.', '', ('SampleConfig.num_tokens',))


@pytest.mark.parametrize(
  'message, line',
  [
    ('', 'ValueError'),
    ('\n a reason\nand more', 'a reason'),
    (
      '{{function_node __wrapped__IteratorGetNext_output_types_1_device_/job:localhost/task:0}} '
      'a.txt; No such file or directory [Op:IteratorGetNext] name: ',
      'a.txt; No such file or directory',
    ),
    ('a [Op: x] b {{function_node c}}', 'a [Op: x] b {{function_node c}}'),
  ],
)
def test_the_first_line_of_an_error_is_a_reason_without_names_of_operations(message, line):
  assert first_line(ValueError(message)) == line
