"""The frame of a page: its head, links to its sections, tiles of numbers, tables, views."""

import dataclasses
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Optional

from t5x_gpu.reporting.markup import Child, document, element
from t5x_gpu.reporting.style import STYLE


@dataclasses.dataclass(frozen=True)
class Section:
  """A part of a page.

  Attributes:
    name: anchor, letters and dashes.
    title: heading.
    content: content below the heading.
    intro: a sentence below the heading; '' for none.
  """

  name: str
  title: str
  content: Sequence[Child]
  intro: str = ''


@dataclasses.dataclass(frozen=True)
class Tile:
  """A number at the top of a page.

  Attributes:
    name: name of the number.
    value: the number as text.
    note: a few words below it.
    tone: 'good', 'bad' or ''.
  """

  name: str
  value: str
  note: str = ''
  tone: str = ''


def page(
  title: str,
  sections: Sequence[Section],
  *,
  subtitle: str = '',
  tiles: Sequence[Tile] = (),
  notes: Sequence[str] = (),
  footer: str = '',
) -> str:
  """Returns a self-contained HTML page.

  Args:
    title: heading of the page.
    sections: sections in order.
    subtitle: a line below the heading.
    tiles: the most important numbers.
    notes: warnings above the first section.
    footer: a line at the end.
  """
  links = [element('li', element('a', s.title, href=f'#{s.name}')) for s in sections]
  body = element(
    'body',
    element('a', 'Skip to the content', href='#content', class_='skip'),
    element(
      'header',
      element('h1', title),
      element('p', subtitle, class_='subtitle') if subtitle else None,
    ),
    element('nav', element('ul', *links), aria_label='Sections') if len(links) > 1 else None,
    element(
      'main',
      element('div', *map(_tile, tiles), class_='tiles') if tiles else None,
      element('ul', *(element('li', note) for note in notes), class_='notes', role='status')
      if notes
      else None,
      *map(_section, sections),
      id='content',
    ),
    element('footer', footer) if footer else None,
  )
  return document(title, body, style=STYLE)


def _tile(tile: Tile) -> ET.Element:
  return element(
    'div',
    element('div', tile.name, class_='tile-name'),
    element('div', tile.value, class_=f'tile-value {tile.tone}'.strip()),
    element('div', tile.note, class_='tile-note') if tile.note else None,
    class_='tile',
  )


def _section(section: Section) -> ET.Element:
  heading = f'{section.name}-heading'
  return element(
    'section',
    element('h2', section.title, id=heading),
    element('p', section.intro, class_='intro') if section.intro else None,
    *section.content,
    id=section.name,
    aria_labelledby=heading,
  )


def table(
  head: Sequence[Child],
  rows: Sequence[Sequence[Child]],
  *,
  caption: str = '',
  texts: Sequence[int] = (0,),
) -> ET.Element:
  """Returns a table that scrolls sideways on a narrow screen.

  Args:
    head: names of the columns.
    rows: cells.
    caption: text above the table; '' for none.
    texts: columns of text, which are aligned to the left; the other columns hold numbers.
  """

  def cell(tag: str, column: int, content: Child, **attributes: object) -> ET.Element:
    return element(tag, content, class_=None if column in texts else 'number', **attributes)

  return element(
    'div',
    element(
      'table',
      element('caption', caption) if caption else None,
      element('thead', element('tr', *(cell('th', i, c, scope='col') for i, c in enumerate(head)))),
      element(
        'tbody', *(element('tr', *(cell('td', i, c) for i, c in enumerate(row))) for row in rows)
      ),
    ),
    class_='scroll',
    tabindex='0',
    role='region',
    aria_label=caption or ', '.join(str(c) for c in head if isinstance(c, str) and c),
  )


def views(name: str, contents: Mapping[str, Child]) -> ET.Element:
  """Returns several views of the same data; radio buttons choose one (mouse, keyboard, touch).

  Args:
    name: name of the choice, unique on the page.
    contents: name of the view -> its content, at most four; the first is shown initially.
  """
  if not 0 < len(contents) <= 4:  # the style defines four
    raise ValueError(f'{len(contents)} views')
  parts: list[Child] = []
  for i, view in enumerate(contents):
    button = element('input', type='radio', name=name, id=f'{name}-{i}', checked=i == 0)
    parts += [button, element('label', view, for_=f'{name}-{i}')]
  parts += [element('div', content, class_='view') for content in contents.values()]
  return element('div', *parts, class_='views')


def folded(title: str, *content: Child, is_open: bool = False) -> Optional[ET.Element]:
  """Returns content that a click or a key expands."""
  return element('details', element('summary', title), *content, open=is_open)
