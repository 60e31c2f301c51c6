"""docs/architecture.md: its picture follows from the imports, and its table has every folder."""

import re

from scripts import draw_architecture
from tests.helpers_pages import ROOT
from tests.test_layering import ORDER

PAGE = (ROOT / 'docs/architecture.md').read_text(encoding='utf-8')


def test_the_picture_is_current():
  drawn = draw_architecture.svg(draw_architecture.folder_imports())
  assert draw_architecture.PICTURE.read_text(encoding='utf-8') == drawn, (
    'run python scripts/draw_architecture.py'
  )


def test_the_page_describes_every_folder_from_the_bottom():
  described = re.findall(r'^\| `(\w+)[./]', PAGE, re.MULTILINE)
  assert described == list(ORDER)
  assert {*described, 'commands'} == set(draw_architecture.folder_imports())


def test_arrows_that_follow_from_others_are_left_out():
  graph = {'a': {'b', 'c'}, 'b': {'c'}, 'c': set()}
  assert draw_architecture.without_shortcuts(graph) == {'a': {'b'}, 'b': {'c'}, 'c': set()}
  assert draw_architecture.floors(graph) == {'c': 0, 'b': 1, 'a': 2}
