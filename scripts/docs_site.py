"""Builds the documentation site with Sphinx: `make docs` writes build/site. Warnings are errors.

    python scripts/docs_site.py [OUTPUT]

The pages stay as GitHub shows them. For the site, README, CONTRIBUTING and CHANGELOG become pages,
links to other files (source code, gin files) become plain text, and links to `<a name>` anchors
become links to the heading they stand in.
"""

import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
STAGED = ROOT / 'build' / 'docs_source'
SITE = ROOT / 'build' / 'site'
ROOT_PAGES = {
  'README.md': 'index.md',
  'CONTRIBUTING.md': 'contributing.md',
  'CHANGELOG.md': 'changelog.md',
}
SECTIONS = {
  'Run': (
    'train',
    'tasks',
    'data',
    'models',
    'from_t5x',
    'from_huggingface',
    'finetune',
    'sweep',
    'infer',
    'eval',
    'report',
    'convert',
  ),
  'Scale': ('parallelism', 'mesh', 'plan', 'parity', 'slurm'),
  'Fast': ('attention', 'precision', 'xla_flags', 'performance', 'tuning'),
  'Keep running': ('monitor', 'checkpoints', 'reshard', 'never_down', 'watchdog', 'security'),
  'Extend': (
    'architecture',
    'add_a_model',
    'add_a_parallelism',
    'add_a_data_source',
    'add_an_optimizer',
    'decisions',
    'comparison',
    'contributing',
    'changelog',
  ),
}
CONFIG = """
project = html_title = 't5x_gpu'
extensions = ['myst_parser']
myst_heading_anchors = 4
html_theme = 'furo'
html_static_path = []
"""
_LINK = re.compile(r'(?<!!)\[([^\]]*)\]\(([^)\s]+)\)')
_NAMED_HEADING = re.compile(r'^(#+) <a name="([^"]+)"></a>(.*)$', re.MULTILINE)
_NAME = re.compile(r'^<a name="[^"]+"></a>\n', re.MULTILINE)


def pages() -> dict[str, pathlib.Path]:
  """Returns name of each page of the site -> its file."""
  named = {page: ROOT / name for name, page in ROOT_PAGES.items()}
  return named | {path.name: path for path in sorted((ROOT / 'docs').glob('*.md'))}


def slug(heading: str) -> str:
  """Returns the anchor of a heading, as GitHub and MyST make it."""
  return re.sub(r'[^\w -]', '', heading.strip().lower()).replace(' ', '-')


def named_headings(text: str) -> dict[str, str]:
  """Returns `<a name>` of a heading -> the anchor of that heading."""
  return {name: slug(heading) for _, name, heading in _NAMED_HEADING.findall(text)}


def site_text(text: str, *, page: str, anchors: dict[str, dict[str, str]]) -> str:
  """Returns a page as the site shows it.

  Args:
    text: Markdown as in the repository.
    page: its name on the site.
    anchors: name of each page -> its `named_headings`.
  """
  at_root = page in ROOT_PAGES.values()

  def link(match: re.Match[str]) -> str:
    words, target = match.groups()
    if re.match(r'[a-z]+:', target):
      return match[0]
    name, mark, anchor = target.partition('#')
    name = name.removeprefix('docs/' if at_root else '../')
    name = ROOT_PAGES.get(name, name)
    if name and name not in anchors:
      return words
    anchor = anchors[name or page].get(anchor, anchor)
    return f'[{words}]({name}{mark}{anchor})'

  text = _LINK.sub(link, text).replace('](docs/images/', '](images/')
  text = _NAME.sub('', _NAMED_HEADING.sub(r'\1 \3', text))
  return text.replace('```gin\n', '```text\n')


def contents() -> str:
  """Returns the table of contents of the site, a hidden part of its first page."""
  return ''.join(
    f'\n```{{toctree}}\n:hidden:\n:caption: {title}\n\n' + '\n'.join(names) + '\n```\n'
    for title, names in SECTIONS.items()
  )


def stage(folder: pathlib.Path) -> None:
  """Writes the sources of the site, for Sphinx, into `folder`."""
  shutil.rmtree(folder, ignore_errors=True)
  shutil.copytree(ROOT / 'docs' / 'images', folder / 'images')
  texts = {name: path.read_text(encoding='utf-8') for name, path in pages().items()}
  anchors = {name: named_headings(text) for name, text in texts.items()}
  for name, text in texts.items():
    text = site_text(text, page=name, anchors=anchors)
    (folder / name).write_text(text + (contents() if name == 'index.md' else ''), encoding='utf-8')
  (folder / 'conf.py').write_text(CONFIG, encoding='utf-8')


def main() -> int:
  """Builds the site into the folder that the command line names, else into `SITE`."""
  output = sys.argv[1] if len(sys.argv) > 1 else str(SITE)
  stage(STAGED)
  options = ('-W', '--keep-going', '--nitpicky', '--quiet')
  done = subprocess.run([sys.executable, '-m', 'sphinx', *options, str(STAGED), output])
  if done.returncode == 0:
    print(f'{output}/index.html')
  return done.returncode


if __name__ == '__main__':
  sys.exit(main())
