"""Reads the tags, texts and links of a page without a browser."""

import html.parser
import re
from typing import Optional

VOID = {'meta', 'input', 'br', 'hr', 'img', 'link'}
LOADS = ('src', 'srcset', 'data', 'poster', 'action', 'xlink:href', 'background', 'cite')


class Page(html.parser.HTMLParser):
  """A parsed page. Fails if a tag is not closed or closes another one.

  Attributes:
    ids: ids of all elements.
    links: values of all `href`.
    text: all text.
    tags: (tag, attributes) of all elements.
  """

  def __init__(self, text: str):
    super().__init__(convert_charrefs=True)
    self.ids: list[str] = []
    self.links: list[str] = []
    self.tags: list[tuple[str, dict[str, Optional[str]]]] = []
    self.text = ''
    self.headings: list[str] = []
    self._open: list[str] = []
    self.source = text
    self.feed(text)
    self.close()
    assert self._open == [], f'not closed: {self._open}'

  def handle_starttag(self, tag, attrs):
    attributes = dict(attrs)
    assert len(attributes) == len(attrs), f'{tag} has an attribute twice: {attrs}'
    self.tags.append((tag, attributes))
    if tag not in VOID:
      self._open.append(tag)
    if 'id' in attributes:
      self.ids.append(attributes['id'])
    if 'href' in attributes:
      self.links.append(attributes['href'])
    if tag == 'h2':
      self.headings.append('')

  def handle_endtag(self, tag):
    assert self._open and self._open[-1] == tag, f'</{tag}> closes {self._open[-1:]}'
    self._open.pop()

  def handle_data(self, data):
    if 'style' not in self._open:
      self.text += data
      if self._open[-1:] == ['h2']:
        self.headings[-1] += data

  def check(self) -> None:
    """Fails unless the page is self-contained, has no script and its links lead somewhere."""
    assert len(set(self.ids)) == len(self.ids), 'an id comes twice'
    assert {link.removeprefix('#') for link in self.links} <= set(self.ids)
    for tag, attributes in self.tags:
      assert tag not in ('script', 'iframe', 'object', 'embed', 'link', 'base'), tag
      assert not any(name in LOADS or name.startswith('on') for name in attributes), attributes
      assert not any('url(' in (value or '') for value in attributes.values()), attributes
    style = self.source.split('<style>')[1].split('</style>')[0]
    assert not re.search(r'url\(|@import|https?:', style)
    assert ('meta', 'viewport') in [(tag, a.get('name')) for tag, a in self.tags]
    policy = [a['content'] for _, a in self.tags if a.get('http-equiv')]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]
