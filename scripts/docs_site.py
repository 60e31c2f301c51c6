"""What mkdocs.yml needs beyond docs/: README, CONTRIBUTING and CHANGELOG as pages.

Links to files that are not pages (source code, gin files) become plain text: the site has no copy
of them. A list needs a blank line before it in Python-Markdown, which GitHub does not ask for.
"""

import pathlib
import re
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
PAGES = {
  'README.md': 'index.md',
  'CONTRIBUTING.md': 'contributing.md',
  'CHANGELOG.md': 'changelog.md',
}
_LINK = re.compile(r'(?<!!)\[([^\]]*)\]\(([^)\s]+)\)')
_LIST_WITHOUT_BLANK = re.compile(r'(?m)^((?![-*|#>\s]|\d+\.).+)\n(?=(?:[-*]|1\.) )')


def site_text(text: str, *, at_root: bool) -> str:
  """Returns a page as the site shows it.

  Args:
    text: Markdown as in the repository.
    at_root: the page comes from the root, so its links to pages begin with docs/.
  """

  def link(match: re.Match[str]) -> str:
    words, target = match.groups()
    if re.match(r'[a-z]+:|#', target):
      return match[0]
    name, mark, anchor = target.partition('#')
    name = name.removeprefix('docs/' if at_root else '../')
    name = PAGES.get(name, name)
    is_page = name in PAGES.values() or (ROOT / 'docs' / name).is_file()
    return f'[{words}]({name}{mark}{anchor})' if is_page else words

  text = _LINK.sub(link, text)
  if at_root:
    text = text.replace('](docs/images/', '](images/')
  return _LIST_WITHOUT_BLANK.sub(r'\1\n\n', text)


def on_files(files: Any, config: Any) -> Any:
  """Adds the pages of the repository's root."""
  from mkdocs.structure.files import File  # mkdocs loads this module; tests work without it

  for name, page in PAGES.items():
    text = (ROOT / name).read_text(encoding='utf-8')
    files.append(File.generated(config, page, content=site_text(text, at_root=True)))
  return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
  """Returns the text of a page of docs/ as the site shows it."""
  if page.file.src_uri in PAGES.values():
    return markdown
  return site_text(markdown, at_root=False)
