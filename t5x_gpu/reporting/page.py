"""The frame of a page: its head and style, links to its sections, tiles of numbers, tables, views.

HTML is built as elements of `xml.etree`, which escapes all text: text of a run cannot become
markup. The style is for light and dark, wide and narrow, and paper.
"""

import dataclasses
import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from typing import Optional, Union

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


# Okabe and Ito's colors, which color-blind readers can distinguish; lighter on a dark page.
_LIGHT = (
  '#0072b2',
  '#d55e00',
  '#009e73',
  '#b85c93',
  '#c98a00',
  '#3a9bd9',
  '#7257b5',
  '#8a8f98',
  '#3f4754',
  '#b3a07f',
)
_DARK = (
  '#5cb3f5',
  '#ff935c',
  '#3fd0a4',
  '#ec9fcb',
  '#f5bd4a',
  '#9ad6ff',
  '#b9a3f0',
  '#8d949e',
  '#5d6878',
  '#d6c39c',
)


def _variables(colors: tuple[str, ...]) -> str:
  return ''.join(f'--c{i}:{color};' for i, color in enumerate(colors))


def _classes() -> str:
  return ''.join(
    f'.c{i}{{stroke:var(--c{i})}}.b{i}{{background:var(--c{i})}}.f{i}{{fill:var(--c{i})}}'
    for i in range(len(_LIGHT))
  )


_VIEWS = ''.join(
  f'.views>input:nth-of-type({i}):checked~.view:nth-of-type({i}){{display:block}}'
  for i in range(1, 5)
)

STYLE = (
  ':root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b2430;--dim:#5b6675;'
  '--edge:#dde2e9;--grid:#e6eaf0;--accent:#0b62a8;--good:#0a7d55;--bad:#c23b22;--shade:#0b62a814;'
  + _variables(_LIGHT)
  + '}@media(prefers-color-scheme:dark){:root{--page:#12161c;--card:#1a2029;--text:#e6eaf0;'
  '--dim:#98a3b2;--edge:#2c3542;--grid:#29313d;--accent:#6cb8ff;--good:#3fd0a4;--bad:#ff8a70;'
  '--shade:#6cb8ff1f;' + _variables(_DARK) + '}}'
  """
*{box-sizing:border-box}
html{scroll-behavior:smooth;scroll-padding-top:3.4rem;-webkit-text-size-adjust:100%}
@media(prefers-reduced-motion:reduce){html{scroll-behavior:auto}}
body{margin:0;background:var(--page);color:var(--text);
  font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue","DejaVu Sans",sans-serif}
header,main,footer{max-width:68rem;margin:0 auto;padding:0 1.25rem}
header{padding-top:1.75rem}
h1{font-size:1.6rem;line-height:1.2;margin:0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:0 0 .35rem}
h3{font-size:1rem;margin:1.25rem 0 .35rem}
p{margin:.35rem 0}
.subtitle,.intro,.note,footer{color:var(--dim)}
.subtitle{overflow-wrap:anywhere}
.note{font-size:.875rem}
footer{font-size:.8125rem;padding-bottom:2.5rem}
a{color:var(--accent)}
:focus-visible{outline:2px solid var(--accent);outline-offset:2px;border-radius:3px}
.skip{position:absolute;left:-999rem}
.skip:focus{left:1rem;top:.5rem;background:var(--card);padding:.25rem .75rem;z-index:3}
nav{position:sticky;top:0;z-index:2;background:var(--page);border-bottom:1px solid var(--edge);
  margin-top:1rem}
nav ul{max-width:68rem;margin:0 auto;padding:0 1.25rem;display:flex;gap:1.1rem;list-style:none;
  overflow-x:auto;scrollbar-width:none}
nav a{display:block;padding:.6rem 0;white-space:nowrap;text-decoration:none;font-size:.9rem;
  color:var(--dim)}
nav a:hover,nav a:focus{color:var(--accent)}
section{background:var(--card);border:1px solid var(--edge);border-radius:12px;
  padding:1.1rem 1.25rem 1.25rem;margin:1.1rem 0;min-width:0}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9rem,1fr));gap:.75rem;
  margin-top:1.25rem}
.tile{background:var(--card);border:1px solid var(--edge);border-radius:12px;padding:.7rem .9rem;
  min-width:0}
.tile-name{font-size:.8125rem;color:var(--dim)}
.tile-value{font-size:1.45rem;font-weight:650;line-height:1.25;overflow-wrap:anywhere;
  font-variant-numeric:tabular-nums}
.tile-note{font-size:.8125rem;color:var(--dim);overflow-wrap:anywhere}
.good{color:var(--good)}.bad{color:var(--bad)}
.notes{list-style:none;margin:1.1rem 0 0;padding:.6rem 1rem;border-radius:12px;
  border:1px solid var(--c4);background:var(--card)}
.notes li{margin:.2rem 0;overflow-wrap:anywhere}
.grid2{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr));
  gap:0 1.5rem}
.scroll{overflow-x:auto;margin-top:.5rem}
table{border-collapse:collapse;font-size:.875rem;min-width:100%}
caption{text-align:left;color:var(--dim);padding-bottom:.25rem}
th,td{text-align:left;padding:.32rem .9rem .32rem 0;border-bottom:1px solid var(--edge);
  vertical-align:top}
th{font-weight:600;color:var(--dim);white-space:nowrap}
tbody tr:last-child td{border-bottom:0}
td{max-width:26rem;overflow-wrap:break-word}
.number{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font-family:ui-monospace,"SF Mono",Menlo,Consolas,"DejaVu Sans Mono",monospace;
  font-size:.8125rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--page);border:1px solid var(--edge);
  border-radius:8px;padding:.7rem .9rem;margin:.5rem 0;max-height:24rem;overflow-y:auto}
details{margin-top:.6rem;font-size:.9rem}
summary{cursor:pointer;color:var(--dim);width:max-content;max-width:100%}
summary:hover{color:var(--accent)}
figure{margin:.9rem 0 0;min-width:0}
figcaption{font-weight:600;font-size:.95rem}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;list-style:none;margin:.25rem 0;padding:0;
  font-size:.8125rem;color:var(--dim)}
.legend li{display:flex;align-items:center;gap:.4rem;min-width:0;overflow-wrap:anywhere}
.key.pale{opacity:.45}
.key.dashed{background-image:repeating-linear-gradient(90deg,#0000 0 3px,var(--card) 3px 5px)}
.key{width:.75rem;height:.75rem;border-radius:3px;flex:none}
.plot{position:relative;height:15rem;margin:.6rem .9rem 1.5rem var(--gutter,3rem);
  border-bottom:1px solid var(--edge)}
.plot svg{display:block;width:100%;height:100%;overflow:visible}
.plot path{fill:none;vector-effect:non-scaling-stroke}
.grid{stroke:var(--grid);stroke-width:1}
.mark{stroke:var(--dim);stroke-width:1;stroke-dasharray:2 4}
.plot .limit{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:6 4}
.line{stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.pale{stroke-width:1;opacity:.4}
.dashed{stroke-dasharray:6 5}
.plot .p1{stroke-dasharray:12 4}
.plot .p2{stroke-dasharray:2 5}
.plot .p3{stroke-dasharray:12 4 2 4}
.spots{stroke-width:7;stroke-linecap:round}
.hover{fill:transparent}
.hover:hover{fill:var(--shade)}
.y-tick,.x-tick,.x-label,.y-label{font-size:.75rem;color:var(--dim);
  font-variant-numeric:tabular-nums}
.y-tick{position:absolute;right:100%;transform:translateY(-50%);padding-right:.5rem;
  white-space:nowrap}
.x-tick{position:absolute;top:100%;transform:translateX(-50%);padding-top:.25rem;
  white-space:nowrap}
.x-label{text-align:right;margin:-.2rem .9rem 0 0}
.bars{display:grid;grid-template-columns:minmax(4rem,max-content) 1fr max-content;
  gap:.45rem .75rem;align-items:center;margin-top:.5rem;font-size:.875rem}
.bar-row{display:contents}
.bar-name{overflow-wrap:anywhere;max-width:14rem}
.bar{position:relative;display:flex;height:1.35rem;border-radius:5px;overflow:hidden;
  background:var(--grid)}
.bar span{height:100%;min-width:1px}
.bar span+span:not(.limit){border-left:1px solid var(--card)}
.bar .limit{position:absolute;border-left:2px solid var(--bad)}
i.p1,span.p1{background-image:repeating-linear-gradient(45deg,#0000 0 4px,var(--card) 4px 6px)}
i.p2,span.p2{background-image:repeating-linear-gradient(135deg,#0000 0 4px,var(--card) 4px 6px)}
i.p3,span.p3{background-image:repeating-linear-gradient(90deg,#0000 0 4px,var(--card) 4px 6px)}
.bar-total{font-variant-numeric:tabular-nums;white-space:nowrap}
.shade{margin:-.32rem -.9rem -.32rem 0;padding:.32rem .6rem;
  background:rgb(0 114 178/var(--share))}
.shade.dark{color:#fff}
.class-name{max-width:6rem;margin-left:auto;white-space:normal;overflow-wrap:anywhere}
.hosts{display:grid;grid-template-columns:repeat(auto-fill,minmax(13rem,1fr));gap:.75rem;
  margin-top:.6rem}
.host{display:block;width:100%;height:auto;max-width:22rem}
.host text{font-size:15px;fill:var(--text)}
.host .on{fill:#fff;text-anchor:middle;font-weight:600}
.host .small{font-size:12px;fill:var(--dim)}
.host .case{fill:var(--page);stroke:var(--edge)}
.wire{fill:none;stroke:var(--grid);stroke-width:3}
.wire.used{stroke:var(--accent);stroke-width:5}
.views{margin-top:.6rem}
.views>input{position:absolute;opacity:0}
.views>label{display:inline-block;font-size:.8125rem;padding:.15rem .7rem;border-radius:99px;
  border:1px solid var(--edge);color:var(--dim);cursor:pointer;margin-right:.35rem}
.views>input:checked+label{background:var(--accent);border-color:var(--accent);color:var(--card)}
.views>input:focus-visible+label{outline:2px solid var(--accent);outline-offset:2px}
.view{display:none}
@media(max-width:34rem){
  header,main,footer,nav ul{padding-left:.8rem;padding-right:.8rem}
  section{padding:.9rem .9rem 1rem}
  h1{font-size:1.3rem}
  .tiles{grid-template-columns:repeat(2,minmax(0,1fr));gap:.5rem}
  .tile-value{font-size:1.2rem}
  .plot{height:12rem}
  td:not(.number){min-width:6.5rem}
  td:last-child:not(.number){min-width:10rem}
  .hosts{grid-template-columns:repeat(auto-fill,minmax(9rem,1fr));gap:.5rem}
  .bars{grid-template-columns:1fr}
  .bar-row{display:grid;grid-template-columns:1fr max-content;gap:.1rem .5rem}
  .bar-name{max-width:none}
  .bar{grid-row:2;grid-column:1/-1}
  .x-tick:nth-of-type(even){visibility:hidden}
}
@media print{nav{position:static}section,.tile{break-inside:avoid}}
""" + _classes() + _VIEWS
)


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
