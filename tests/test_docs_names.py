"""Names in errors, docs and comments exist: parameters, macros, flags, files, pages."""

import ast
import functools
import json
import pathlib
import re

import pytest

from t5x_gpu.config import gin_text

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = sorted((ROOT / 't5x_gpu').rglob('*.py'))
ROOT_PAGES = [ROOT / name for name in ('README.md', 'CHANGELOG.md', 'CONTRIBUTING.md')]
PAGES = [*ROOT_PAGES, *sorted((ROOT / 'docs').glob('*.md'))]
GIN_FILES = sorted((ROOT / 'gin_configs').rglob('*.gin'))
SCRIPTS = [ROOT / 'Makefile', *sorted(p for p in (ROOT / 'scripts').glob('*') if p.is_file())]

# What commands write, and a file that a page has the reader write.
WRITTEN = ('benchmarks/results', 't5x_gpu/partitioning/site_parallel.py')
# Flags of other programs that our pages show.
FOREIGN_FLAGS = {
  '--logdir',
  '--data_dir',
  '--ipc',
  '--shm-size',
  '--nodes',
  '--partition',
  '--account',
  '--ntasks-per-node',
  '--gpus-per-node',
  '--signal',
  '--requeue',
  '--open-mode',
  '--cpus-per-task',
  '--gpus-per-task',
  '--kill-on-bad-exit',
  '--no-kill',
  '--ntasks',
  '--exact',
  '--exclusive',
  '--pty',
  '--standalone',
  '--env',
  '--from-literal',
  '--array',
  '--no-deps',
  '--run_mode',
  '--multiprocess_gpu',
  '--logtostderr',
  '--alsologtostderr',
  '--stderrthreshold',
  '--jax_backend_target',
  '--process-slot-var',
  '--model_args',
  '--tasks',
  '--batch_size',
  '--apply_chat_template',
}
# The parameters of T5X that have a translation, and macros of T5X's gin files.
T5X_RULES = ROOT / 't5x_gpu' / 'config' / 't5x' / 'rules.py'
T5X_MACROS = {'INITIAL_CHECKPOINT_PATH', 'CHECKPOINT_PATH', 'EVAL_OUTPUT_DIR', 'INFER_OUTPUT_DIR'}
FOREIGN_PREFIXES = ('--xla_', '--gin.')
# Names that stand for something, in usage texts and examples.
PLACEHOLDERS = {'NAME', 'KEY', 'X', 'A', 'B', 'FILE', 'VALUE', 'MACRO', 'COMMAND'}


@functools.cache
def trees() -> dict[pathlib.Path, ast.Module]:
  return {path: ast.parse(path.read_text(encoding='utf-8')) for path in SOURCES}


@functools.cache
def parameters() -> dict[str, set[str]]:
  """Returns class or function -> the names that gin can bind, and its other attributes."""
  found: dict[str, set[str]] = {}
  bases: dict[str, list[str]] = {}
  for tree in trees().values():
    for node in tree.body:
      if isinstance(node, ast.FunctionDef):
        found.setdefault(node.name, set()).update(_arguments(node))
      elif isinstance(node, ast.ClassDef):
        names = found.setdefault(node.name, set())
        bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
        for item in node.body:
          if isinstance(item, ast.AnnAssign):
            names.add(item.target.id)
          elif isinstance(item, ast.Assign):
            names.update(target.id for target in item.targets if isinstance(target, ast.Name))
          elif isinstance(item, ast.FunctionDef):
            names.update(_arguments(item) if item.name == '__init__' else [item.name])

  def inherited(name: str) -> set[str]:
    return found.get(name, set()).union(*map(inherited, bases.get(name, ())))

  found |= {name: inherited(name) for name in bases}
  found['train'] |= found['Run'] | found['EvalConfig'] | found['StepConfig']  # it makes a Run
  return found


def _arguments(function: ast.FunctionDef) -> set[str]:
  a = function.args
  return {x.arg for x in (*a.posonlyargs, *a.args, *a.kwonlyargs)} - {'self', 'cls'}


@functools.cache
def macros() -> set[str]:
  return {
    name
    for path in GIN_FILES
    for name in re.findall(r'^([A-Z][A-Z0-9_]*) = ', path.read_text(), re.MULTILINE)
  }


def knob_problem(name: str) -> str:
  """Returns why gin cannot bind `name` ('train/DatasetConfig.seed', 'BATCH_SIZE'), or ''."""
  name = name.rsplit('/', 1)[-1]
  if '.' not in name:
    return '' if name in macros() | PLACEHOLDERS | T5X_MACROS else f'no gin file has a macro {name}'
  owner, parameter = name.rsplit('.', 2)[-2:]
  if owner not in parameters():
    return f'{name}: nothing is called {owner}'
  return (
    ''
    if parameter in parameters()[owner] | PLACEHOLDERS
    else (f'{name}: {owner} has no {parameter}')
  )


def shown(path: pathlib.Path, line: int, what: str) -> str:
  return f'{path.relative_to(ROOT)}:{line} {what}'


def none(problems: list[str]) -> None:
  if problems:
    pytest.fail('\n'.join(problems), pytrace=False)


def lines_of(paths: list[pathlib.Path]) -> list[tuple[pathlib.Path, int, str]]:
  return [
    (path, i, line)
    for path in paths
    if path.exists()
    for i, line in enumerate(path.read_text(encoding='utf-8').splitlines(), 1)
  ]


def errors_keywords(keyword: str) -> list[tuple[pathlib.Path, ast.expr]]:
  return [
    (path, k.value)
    for path, tree in trees().items()
    for node in ast.walk(tree)
    if isinstance(node, ast.Call)
    for k in node.keywords
    if k.arg == keyword
  ]


def test_parameters_of_errors_exist():
  found = errors_keywords('parameters')
  assert len(found) > 20
  none(
    [
      shown(path, text.lineno, problem)
      for path, value in found
      for text in ast.walk(value)
      if isinstance(text, ast.Constant)
      and isinstance(text.value, str)
      and re.fullmatch(r'[\w/]+\.\w+|[A-Z][A-Z0-9_]+', text.value)
      and (problem := knob_problem(text.value))
    ]
  )


def test_parameters_in_texts_exist():
  # Every Class.parameter in a string of the package, the remedies of errors among them.
  problems = []
  for path, tree in trees().items():
    if path == T5X_RULES:
      continue
    for node in ast.walk(tree):
      if isinstance(node, ast.Constant) and isinstance(node.value, str):
        for owner, name in re.findall(r'\b([A-Z]\w*[a-z]\w*|train)\.([a-z_]\w*)\b', node.value):
          if owner in parameters() and (problem := knob_problem(f'{owner}.{name}')):
            problems.append(shown(path, node.lineno, problem))
  none([p for p in problems if not p.endswith('train has no train')])


def test_macros_in_remedies_exist():
  # `Set TRAIN_STEPS higher`, `Set BATCH_SIZE = 8`.
  none(
    [
      shown(path, text.lineno, f'there is no macro {name}')
      for path, value in errors_keywords('fix')
      for text in ast.walk(value)
      if isinstance(text, ast.Constant) and isinstance(text.value, str)
      for name in re.findall(r'\b[Ss]et ([A-Z][A-Z0-9_]{2,})\b', text.value)
      if name not in macros()
    ]
  )


def test_gin_overrides_in_pages_and_headers_exist():
  none(
    [
      shown(path, i, problem)
      for path, i, line in lines_of(PAGES + GIN_FILES + SCRIPTS)
      for name in re.findall(r'--gin\.([\w/.]+)', line)
      if (problem := knob_problem(name))
    ]
  )


def test_pages_that_errors_point_to_exist():
  found = errors_keywords('docs')
  assert found
  problems = []
  for path, value in found:
    page, _, anchor = ast.literal_eval(value).partition('#')
    file = ROOT / 'docs' / page
    if not file.exists() or anchor and anchor not in anchors(file.read_text(encoding='utf-8')):
      problems.append(shown(path, value.lineno, f'points to docs/{page}#{anchor}'))
  none(problems)


def anchors(markdown: str) -> set[str]:
  """Returns the anchors of a page: headings as GitHub names them, and `<a name=...>`."""
  heads = re.findall(r'^#+ (.+)$', markdown, re.MULTILINE)
  return {
    *re.findall(r'<a (?:name|id)="([^"]+)">', markdown),
    *(re.sub(r'<.*?>|[^\w -]', '', head.lower()).replace(' ', '-') for head in heads),
  }


def test_links_between_pages_lead_somewhere():
  problems = []
  for path, i, line in lines_of(PAGES):
    for target in re.findall(r'\]\(([^)\s]+)\)', line):
      if not re.match(r'[a-z]+:', target):
        name, _, anchor = target.partition('#')
        page = (path.parent / name) if name else path
        if not page.exists() or anchor and anchor not in anchors(page.read_text()):
          problems.append(shown(path, i, f'links to {target}'))
  none(problems)


def test_files_that_texts_mention_exist():
  folders = '|'.join(('t5x_gpu', 'gin_configs', 'docs', 'tests', 'scripts', 'benchmarks'))
  pattern = rf'(?<![\w/.-])((?:{folders})/[\w./*{{}},<>-]*)'
  problems = []
  for path, i, line in lines_of(PAGES + GIN_FILES + SCRIPTS + SOURCES):
    for name in re.findall(pattern, line):
      name = name.rstrip('.,-')
      if not (re.search(r'[{}<*]', name) or name.startswith(WRITTEN) or (ROOT / name).exists()):
        problems.append(shown(path, i, f'mentions {name}'))
  none(problems)


# Python files of other projects, and files that a page has the reader write.
FOREIGN_FILES = re.compile(r't5x/|my_\w+\.py|faulty_data\.py|gpu_attention_benchmark\.py')
PY = r'((?:\w+/)*\w+\.py)\b'
IDENTIFIER = r'([A-Za-z_]\w*(?:\.\w+)*)'
# `a/b.py: name`, `a/b.py::name`, `a/b.py`: `name`; `name` in a/b.py, `name` ([b.py](a/b.py)).
FILE_THEN_NAME = re.compile(rf'`{PY}(?:::?[ ]?|`:\s+`){IDENTIFIER}(?:\([^`]*\))?`')
NAME_THEN_FILE = re.compile(
  rf'`{IDENTIFIER}(?:\([^`]*\))?`,?\s+(?:#\s*)?(?:\(|(?:in|of|from)\s+)(?:#\s*)?\[?`?{PY}'
)
# - [b.py](a/b.py): `name`, and `other(x)` ...
ITEM_OF_A_FILE = re.compile(rf'^(?:\d+\.|-) \[[^]]*\]\([./]*{PY}\)(.*?)(?=^\S|^$)', re.M | re.S)


@functools.cache
def python_files() -> dict[str, str]:
  folders = ('t5x_gpu', 'tests', 'scripts', 'benchmarks')
  paths = [p for folder in folders for p in (ROOT / folder).rglob('*.py')]
  return {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding='utf-8')
    for path in (*paths, ROOT / 'setup.py')
  }


def texts_called(name: str) -> list[str]:
  """Returns the texts of our Python files called `name`, 'fsdp.py' or 'partitioning/fsdp.py'."""
  return [text for path, text in python_files().items() if f'/{path}'.endswith(f'/{name}')]


def names_of_files(text: str) -> list[tuple[int, str, str]]:
  """Returns (offset, file, name) where `text` says that a Python file has a name."""
  found = [(m.start(), m[1], m[2]) for m in FILE_THEN_NAME.finditer(text)]
  found += [(m.start(), m[2], m[1]) for m in NAME_THEN_FILE.finditer(text)]
  for item in ITEM_OF_A_FILE.finditer(text):
    names = re.findall(rf'`{IDENTIFIER}(?:\([^`]*\))?`', item[2])
    found += [(item.start(), item[1], name) for name in names if '.py' not in name]
  return [(i, file, name.rsplit('.', 1)[-1]) for i, file, name in found]


@pytest.mark.parametrize(
  'text',
  [
    '(`a/b.py: name`).',
    '`a/b.py::X.name`',
    '`a/b.py`: `name(x, y)`',
    '`name`\n  (`a/b.py`)',
    '`X.name(x)` in\n[a/b.py](../t5x_gpu/a/b.py)',
    '# `name` of\n# a/b.py',
    '1. [b.py](../a/b.py): a run; `name(run)`\n   does.\n2. [c.py](../c.py): `other`',
  ],
)
def test_names_of_files_are_seen(text):
  assert [found[1:] for found in names_of_files(text)][0] == ('a/b.py', 'name')


def test_files_have_the_names_that_texts_say():
  problems, checked = [], 0
  for path in (*PAGES, *GIN_FILES, *SCRIPTS, *SOURCES):
    if path.name == 'CHANGELOG.md':  # of its time
      continue
    text = path.read_text(encoding='utf-8')
    for i, file, name in names_of_files(text):
      if not FOREIGN_FILES.search(file):
        checked += 1
        if not any(re.search(rf'\b{name}\b', t) for t in texts_called(file)):
          problems.append(shown(path, text.count('\n', 0, i) + 1, f'{file} has no {name}'))
  assert checked > 20
  none(problems)


def test_python_files_that_texts_mention_exist():
  pattern = rf'(?<![\w./<{{*-]){PY}'
  problems = []
  for path, i, line in lines_of([*PAGES, *GIN_FILES]):
    for name in re.findall(pattern, line) if path.name != 'CHANGELOG.md' else ():
      if not (name.startswith(WRITTEN) or FOREIGN_FILES.search(name) or texts_called(name)):
        problems.append(shown(path, i, f'mentions {name}'))
  none(problems)


def test_folders_that_pages_mention_exist():
  folders = {path.name for path in (ROOT / 't5x_gpu').iterdir() if path.is_dir()}
  none(
    [
      shown(path, i, f'mentions {name}')
      for path, i, line in lines_of(PAGES)
      for name in re.findall(r'`(\w+(?:/\w+)*)/?`', line)
      if '/' in name and name.split('/')[0] in folders and path.name != 'CHANGELOG.md'
      if not ((ROOT / 't5x_gpu' / name).is_dir() or (ROOT / f't5x_gpu/{name}.py').exists())
    ]
  )


def test_names_of_modules_that_texts_mention_exist():
  # `parameters.keep_policy`, `t5x_gpu.data.seqio_batches`, `t5x_gpu.data.batches.BatchIterator`.
  problems = []
  for path in (*PAGES, *GIN_FILES, *SCRIPTS, *SOURCES):
    text = path.read_text(encoding='utf-8')
    for m in re.finditer(r'\bt5x_gpu((?:\.\w+)+)', text if path.name != 'CHANGELOG.md' else ''):
      parts = m[1].strip('.').split('.')
      folder = ROOT / 't5x_gpu'
      while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
      if not parts or parts[0] in PLACEHOLDERS or m[0] in gin_text.MOVED:
        continue
      file = folder / f'{parts[0]}.py'
      if not file.exists() or (
        parts[1:] and not re.search(rf'\b{parts[1]}\b', file.read_text(encoding='utf-8'))
      ):
        problems.append(shown(path, text.count('\n', 0, m.start()) + 1, f'mentions {m[0]}'))
  none(problems)


def test_modules_that_texts_run_exist():
  none(
    [
      shown(path, i, f'runs {name}')
      for path, i, line in lines_of(PAGES + GIN_FILES + SCRIPTS + SOURCES)
      for name in re.findall(r'python -m (t5x_gpu[\w.]*[a-z])\b', line)
      if not (ROOT / name.replace('.', '/')).is_dir()
      and not (ROOT / f'{name.replace(".", "/")}.py').exists()
    ]
  )


def test_flags_that_pages_mention_exist():
  benchmarks = [ast.parse(path.read_text()) for path in (ROOT / 'benchmarks').rglob('*.py')]
  ours = {
    argument.value
    for tree in (*trees().values(), *benchmarks)
    for node in ast.walk(tree)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('.add_argument')
    for argument in node.args
    if isinstance(argument, ast.Constant)
  }
  assert {'--gin_file', '--dry_run', '--gin_search_paths', '--tfds_data_dir'} <= ours
  none(
    [
      shown(path, i, f'mentions {flag}')
      for path, i, line in lines_of(PAGES + GIN_FILES)
      for flag in re.findall(r'(?<![\w-])--[a-zA-Z][\w.-]*', line)
      if flag.rstrip('.') not in ours | FOREIGN_FLAGS and not flag.startswith(FOREIGN_PREFIXES)
    ]
  )


def test_make_targets_that_pages_mention_exist():
  targets = set(re.findall(r'^([a-z0-9-]+):', (ROOT / 'Makefile').read_text(), re.MULTILINE))
  assert {'setup', 'demo', 'test', 'test-all', 'test-py312'} <= targets
  none(
    [
      shown(path, i, f'runs make {name}')
      for path, i, line in lines_of(PAGES + GIN_FILES)
      for name in re.findall(r'(?:`|^# ?|^ *\$? ?)make ([a-z0-9-]+)(?:`|$)', line)
      if name not in targets
    ]
  )


def test_readme_and_performance_page_have_the_recorded_speed_on_a_cpu():
  medians = json.loads((ROOT / 'benchmarks/results/cpu.json').read_text())['medians']
  readme, page = ((ROOT / name).read_text() for name in ('README.md', 'docs/performance.md'))
  for name in ('t5x_gpu', 'bare jax step,', 'PyTorch step,'):
    seconds = medians[f'{name} decoder_14m']['step_seconds']
    for text in (readme, page):
      assert re.search(rf'\| \**{seconds:.2f}\** \| \**{8 * 256 / seconds:.0f}\** \|', text), name


def test_readme_shows_the_plan_of_the_plan_page():
  shown = (ROOT / 'README.md').read_text().split('$ python -m t5x_gpu.plan')[1].split('\n\n')[0]
  page = (ROOT / 'docs/plan.md').read_text()
  lines = [line.strip().removesuffix('...').strip() for line in shown.splitlines()[1:]]
  assert len(lines) == 5
  none([line for line in lines if line not in page])
