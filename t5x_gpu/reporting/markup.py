"""HTML as elements of `xml.etree`, which escapes all text: text of a run cannot become markup."""

import re
import xml.etree.ElementTree as ET
from typing import Union

Child = Union[ET.Element, str, int, float, None]

# Not allowed in HTML, except tab and newline; lone surrogates cannot be written as UTF-8.
_FORBIDDEN = re.compile('[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]')
_NOT_ESCAPED = ('script', 'style')  # the serializer does not escape their text


def clean(text: object) -> str:
  """Returns text with a replacement character for each character that HTML forbids."""
  return _FORBIDDEN.sub('\N{REPLACEMENT CHARACTER}', str(text))


def element(tag: str, *children: Child, **attributes: object) -> ET.Element:
  """Returns an element.

      element('p', 'loss ', element('b', 2.31), class_='note')

  Args:
    tag: an HTML or SVG tag.
    *children: elements and text, in order; None is left out.
    **attributes: `class_` is class, `aria_label` is aria-label; None is left out, True has no
      value. A link may only lead to a place on the same page.
  """
  if tag in _NOT_ESCAPED or not str(attributes.get('href', '#')).startswith('#'):
    raise ValueError(f'A report has no <{tag}> like this: {attributes}')
  new = ET.Element(tag)
  for name, value in attributes.items():
    if value is not None and value is not False:
      name = name.rstrip('_').replace('_', '-')
      new.set(name, '' if value is True else clean(value))
  return add(new, *children)


def add(parent: ET.Element, *children: Child) -> ET.Element:
  """Appends children to `parent` and returns it."""
  for child in children:
    if isinstance(child, ET.Element):
      parent.append(child)
    elif child is not None:
      if len(parent):
        parent[-1].tail = (parent[-1].tail or '') + clean(child)
      else:
        parent.text = (parent.text or '') + clean(child)
  return parent


def document(title: str, body: ET.Element, *, style: str) -> str:
  """Returns a page in one file. Its security policy forbids scripts and every request.

  Args:
    title: title of the window.
    body: a `body` element.
    style: CSS. It is not escaped, so it must not come from a run.
  """
  css = ET.Element('style')
  css.text = style
  policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
  head = element(
    'head',
    element('meta', charset='utf-8'),
    element('meta', content=policy, **{'http-equiv': 'Content-Security-Policy'}),
    element('meta', name='viewport', content='width=device-width, initial-scale=1'),
    element('meta', name='color-scheme', content='light dark'),
    element('title', title),
    css,
  )
  html = element('html', head, body, lang='en')
  return '<!DOCTYPE html>\n' + ET.tostring(html, encoding='unicode', method='html') + '\n'
