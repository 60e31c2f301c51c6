"""Pages as a reader gets them: code parses, lines are short, a command comes first; the site."""

import ast
import pathlib
import re
import subprocess
import sys
import textwrap
import tokenize

import gin
import pytest
import yaml

from scripts import docs_site
from t5x_gpu.config import gin_loader
from t5x_gpu.errors import ConfigError

ROOT = pathlib.Path(__file__).parents[1]
DOCS = sorted((ROOT / 'docs').glob('*.md'))
PAGES = [ROOT / name for name in docs_site.ROOT_PAGES] + DOCS
WIDTH = 100
FIRST_COMMAND_WITHIN = 10  # lines of a page
NO_COMMAND = {'comparison.md', 'decisions.md'}
# What a block that is indented, not fenced, is if it starts a program.
PROGRAMS = ('python', 'make', 'git', 'pip', 'sbatch', 'srun', 'export', 'kubectl', 'qsub', 'minio')

ids = lambda path: path.name  # noqa: E731


def fenced(text: str) -> list[tuple[int, str, str]]:
  """Returns (line, language, code) of each fenced block."""
  found = re.finditer(r'^```(\w*)\n(.*?)^```', text, re.DOTALL | re.MULTILINE)
  return [(text.count('\n', 0, m.start()) + 2, m[1], m[2]) for m in found]


def prose(text: str) -> str:
  """Returns `text` with its fenced blocks emptied; line numbers stay."""
  return re.sub(
    r'^```.*?^```', lambda m: '\n' * m[0].count('\n'), text, flags=re.DOTALL | re.MULTILINE
  )


def shell_lines(text: str) -> list[tuple[int, str]]:
  """Returns (line, command) of the commands in blocks of shell and in indented blocks."""
  found = [
    (n + i, s)
    for n, lang, code in fenced(text)
    if lang == 'sh'
    for i, s in enumerate(code.splitlines())
  ]
  indented = prose(text).replace('\\\n', '  ').splitlines()
  found += [(i, line.strip()) for i, line in enumerate(indented, 1) if line.startswith('    ')]
  return [(i, line) for i, line in found if line.startswith(PROGRAMS) and '<' not in line]


class _Reader(gin.config_parser.ParserDelegate):
  """Takes references and macros without looking them up."""

  def configurable_reference(self, scoped_configurable_name, evaluate):
    return scoped_configurable_name

  def macro(self, macro_name):
    return macro_name


@pytest.mark.parametrize('path', PAGES, ids=ids)
def test_code_blocks_parse(path):
  text = path.read_text(encoding='utf-8')
  for line, language, code in fenced(text):
    where = f'{path.name}:{line}'
    try:
      if language == 'python':
        ast.parse(code, where)
      elif language == 'gin':
        list(gin.config_parser.ConfigParser(code, _Reader()))
      elif language == 'json':
        yaml.safe_load(code)
    except (SyntaxError, tokenize.TokenError, yaml.YAMLError) as e:
      pytest.fail(f'{where}: {e}', pytrace=False)


def settings_of(text: str) -> list[tuple[int, str]]:
  """Returns (line, gin) of the blocks that set a value, for any language mark."""
  indented = re.finditer(r'(?:^    .*\n)+', prose(text), re.MULTILINE)
  found = [(n, code) for n, _, code in fenced(text)]
  found += [(text.count('\n', 0, m.start()) + 1, textwrap.dedent(m[0])) for m in indented]
  result = []
  for line, code in found:
    try:
      statements = list(gin.config_parser.ConfigParser(code, _Reader()))
    except (SyntaxError, tokenize.TokenError, ValueError):
      continue
    keys = [(s.scope, s.selector, s.arg_name) for s in statements if hasattr(s, 'arg_name')]
    if keys and len(set(keys)) == len(keys):  # otherwise a list of alternatives
      result.append((line, code))
  return result


BASES = ('examples/demo.gin', 'examples/encoder_demo.gin', 'examples/dpo_llama.gin')
# What the reader has made with an earlier command, or writes on the same page.
OF_THE_READER = re.compile(r'runs/llama|my_\w+|Partitioner\.site')


@pytest.mark.parametrize('path', DOCS, ids=ids)
def test_settings_can_be_put_into_a_gin_file(path, tmp_path):
  problems = []
  for line, code in settings_of(path.read_text(encoding='utf-8')):
    if OF_THE_READER.search(code):
      continue
    (tmp_path / 'own.gin').write_text(code)
    found = []
    for base in BASES:
      try:
        gin_loader.load([f'gin_configs/{base}', str(tmp_path / 'own.gin')])
      except ConfigError as e:
        found.append(str(e).splitlines()[0])
    if len(found) == len(BASES):
      problems.append(f'{path.name}:{line} {found[0]}')
  if problems:
    pytest.fail('\n'.join(problems), pytrace=False)


@pytest.mark.parametrize('path', PAGES, ids=ids)
def test_commands_parse(path):
  lines = shell_lines(path.read_text(encoding='utf-8'))
  done = subprocess.run(
    ['bash', '-n'], input='\n'.join(line for _, line in lines), text=True, capture_output=True
  )
  assert done.returncode == 0, f'{path.name}: {done.stderr}'


@pytest.mark.parametrize('path', PAGES, ids=ids)
def test_prose_wraps(path):
  long = [
    f'{path.name}:{i} has {len(line)} columns'
    for i, line in enumerate(prose(path.read_text(encoding='utf-8')).splitlines(), 1)
    if len(line) > WIDTH and ' ' in line.strip() and not re.match(r'[|#]|    |!\[', line)
  ]
  assert not long, '\n'.join(long)


@pytest.mark.parametrize('path', [p for p in DOCS if p.name not in NO_COMMAND], ids=ids)
def test_a_page_begins_with_a_command(path):
  head = path.read_text(encoding='utf-8').splitlines()[:FIRST_COMMAND_WITHIN]
  assert any(re.match(r'    \w|\$ python', line) for line in head), path.name


def test_the_site_has_every_page():
  listed = [f'{name}.md' for names in docs_site.SECTIONS.values() for name in names]
  assert sorted([*listed, 'index.md']) == sorted(docs_site.pages())


def test_links_of_the_site_lead_to_pages_and_headings():
  anchors = {'index.md': {}, 'contributing.md': {}, 'train.md': {'old': 'new-name'}}
  at_root = '[a](docs/train.md#old), [b](t5x_gpu/train.py), [c](https://x.org), [d](LICENSE)'
  assert docs_site.site_text(at_root, page='index.md', anchors=anchors) == (
    '[a](train.md#new-name), b, [c](https://x.org), d'
  )
  in_docs = (
    '## <a name="old"></a>New name\n[a](#old), [b](../t5x_gpu/x.py), [c](../CONTRIBUTING.md)'
  )
  assert docs_site.named_headings(in_docs) == {'old': 'new-name'}
  assert docs_site.site_text(in_docs, page='train.md', anchors=anchors) == (
    '## New name\n[a](#new-name), b, [c](contributing.md)'
  )


def test_the_site_builds_without_warnings(tmp_path):
  done = subprocess.run(
    [sys.executable, 'scripts/docs_site.py', str(tmp_path / 'site')],
    cwd=ROOT,
    text=True,
    capture_output=True,
  )
  assert done.returncode == 0, done.stderr
  assert (tmp_path / 'site/index.html').is_file()
