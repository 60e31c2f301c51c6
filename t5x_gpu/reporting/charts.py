"""Charts as HTML and inline SVG: curves, and bars of several parts.

The SVG contains only lines and stretches to any width. Text is HTML, so it has the same size on a
phone as on a screen. Values appear when the pointer is over the chart, and in a table below it. A
`Scale` places numbers on an axis; `fewer` thins out a long curve.
"""

import bisect
import dataclasses
import itertools
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Optional

from t5x_gpu.reporting.page import Child, add, element, table

Points = list[tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Scale:
  """Maps `low` to 0 and `high` to 1, linearly or by logarithms."""

  low: float
  high: float
  is_log: bool = False

  def __call__(self, value: float) -> float:
    if self.is_log:
      return math.log(value / self.low) / math.log(self.high / self.low)
    return (value - self.low) / (self.high - self.low)

  def shows(self, value: float) -> bool:
    """Returns whether a value has a position on the axis."""
    return math.isfinite(value) and (value > 0 or not self.is_log)


def scale_of(
  values: Iterable[float], *, is_log: bool = False, low: Optional[float] = None, margin: float = 0.0
) -> Scale:
  """Returns an axis that shows all finite `values` (the positive ones, if logarithmic).

  Args:
    values: may be empty.
    is_log: whether the axis is logarithmic.
    low: the axis begins here if no value is below it.
    margin: share of the axis that stays free at both ends.
  """
  known = [v for v in values if math.isfinite(v) and (v > 0 or not is_log)]
  bottom, top = min(known, default=1.0), max(known, default=10.0 if is_log else 2.0)
  if low is not None and (low > 0 or not is_log):
    bottom = min(bottom, low)
  if is_log:
    if bottom == top:
      bottom, top = bottom / 2, top * 2
    space = (top / bottom) ** margin
    return Scale(bottom / space, top * space, True)
  if bottom == top:
    half = abs(bottom) / 2 or 0.5
    return Scale(bottom - half, top + half)
  space = margin * (top - bottom)
  return Scale(bottom if bottom == low else bottom - space, top + space)


def ticks(scale: Scale, *, whole: bool = False) -> list[float]:
  """Returns round numbers on an axis: 1, 2 or 5 times powers of ten.

  Args:
    scale: the axis.
    whole: only whole numbers.
  """
  most = 6
  if scale.is_log:
    decades = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
      found = [f * 10.0**d for d in decades for f in factors]
      found = [v for v in found if scale.low <= v <= scale.high]
      if len(found) <= most:
        break
    found = found[:: math.ceil(len(found) / most) or 1]
    if len(found) > 1:
      return found
  span = scale.high - scale.low
  power = 10.0 ** math.floor(math.log10(span / (most - 1)))
  step = next(f * power for f in (1, 2, 5, 10, 20) if span / (f * power) <= most - 1)
  if whole:
    step = max(1, round(step))
  first = math.ceil(scale.low / step - 1e-9)
  found = [i * step for i in range(first, first + most + 2)]
  return [v for v in found if scale.low - 1e-9 * span <= v <= scale.high + 1e-9 * span]


def fewer(points: Points, *, most: int) -> Points:
  """Returns at most about `most` points of a curve, with the lowest and highest of each stretch.

  A single bad step therefore stays visible among 100,000.
  """
  if len(points) <= most:
    return points
  length = len(points) / max(1, most // 2)
  kept: Points = []
  start = 0.0
  while start < len(points):
    stretch = points[int(start) : max(int(start) + 1, int(start + length))]
    ends = {
      index
      for choose in (min, max)
      for index in [choose(range(len(stretch)), key=lambda i: stretch[i][1])]
    }
    kept += [stretch[i] for i in sorted(ends)]
    start += length
  return [points[0], *kept, points[-1]]


def short_number(value: float) -> str:
  """Returns '12k' for 12,000, '1.5M', '0.05', '2e-05'."""
  size = abs(value)
  for factor, unit in ((1e12, 'T'), (1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
    if size >= factor * 0.99995:
      return f'{value / factor:.4g}{unit}'
  return f'{value:.4g}'


Format = Callable[[float], str]


NUM_COLORS = 10  # colors in the style
_NUM_PATTERNS = 4  # solid, and the style's p1 to p3: dashes of curves, stripes of bars
_SIZE = 1000  # width and height in the SVG's own coordinates
_MOST_POINTS = 1200
_MOST_HOVERS = 150  # places along x that show values
_MOST_ROWS = 40  # rows of the table below


@dataclasses.dataclass(frozen=True)
class Series:
  """One curve.

  Attributes:
    name: name in the legend; '' for none.
    points: (x, y), by x. NaN and infinity leave a gap.
    color: number of its color, from 0; the same number looks the same everywhere on a page. From
      NUM_COLORS on, colors repeat with other dashes.
    kind: 'line', 'pale' (thin, behind others), 'dashed', or 'dots' (a line with a dot per point).
  """

  name: str
  points: Points
  color: int = 0
  kind: str = 'line'


@dataclasses.dataclass(frozen=True)
class Axis:
  """How an axis is drawn.

  Attributes:
    label: name of the axis with its unit.
    is_log: whether it is logarithmic.
    low: the axis begins here if no value is below it.
    text: formats a number at a tick.
    exact: formats a number in the table and under the pointer; None for `text`.
    whole: whether ticks are whole numbers.
  """

  label: str
  is_log: bool = False
  low: Optional[float] = None
  text: Format = short_number
  exact: Optional[Format] = None
  whole: bool = False

  def exact_text(self, value: float) -> str:
    return (self.exact or self.text)(value)


def line_chart(
  series: Sequence[Series],
  *,
  title: str,
  x: Axis,
  y: Axis,
  marks: Sequence[tuple[float, str]] = (),
  limits: Sequence[tuple[float, str]] = (),
) -> ET.Element:
  """Returns a chart of curves with a legend and a table of its values.

  Args:
    series: the curves; the first is drawn last, on top.
    title: title above the chart.
    x, y: the axes.
    marks: (x, text) of vertical lines, such as restarts.
    limits: (y, text) of horizontal lines, such as the memory of a GPU.
  """
  across = scale_of(
    [p[0] for s in series for p in s.points] + [at for at, _ in marks], is_log=x.is_log, low=x.low
  )
  up = scale_of(
    [p[1] for s in series for p in s.points] + [at for at, _ in limits],
    is_log=y.is_log,
    low=y.low,
    margin=0.04,
  )
  svg = element(
    'svg',
    viewBox=f'0 0 {_SIZE} {_SIZE}',
    preserveAspectRatio='none',
    role='img',
    aria_label=f'{title}: {y.label} against {x.label}. The values are in the table below.',
  )
  add(svg, *(_grid(_y(up, v)) for v in _shown_ticks(up, y)))
  add(svg, *(_vertical(_x(across, at), text) for at, text in marks if across.shows(at)))
  add(svg, *(_horizontal(_y(up, at), text) for at, text in limits if up.shows(at)))
  behind, front = ([s for s in series if (s.kind == 'pale') == pale] for pale in (True, False))
  for one in (*behind, *reversed(front)):
    add(svg, *_curve(one, across, up))
  shown = [s for s in series if s.name]
  add(svg, *_hovers(shown, across, x, y))
  plot = element('div', svg, *_tick_labels(across, up, x, y), class_='plot')
  return element(
    'figure',
    element('figcaption', title),
    legend([(s.name, s.color) for s in shown], [s.kind for s in shown]) if len(shown) > 1 else None,
    element('div', y.label, class_='y-label'),
    plot,
    element('div', x.label, class_='x-label'),
    _values_table(shown, x, y),
    class_='chart',
    style=f'--gutter:{max([len(y.text(v)) for v in _shown_ticks(up, y)] or [1]) + 1}ch',
  )


def _x(scale: Scale, value: float) -> float:
  return round(_SIZE * scale(value), 1)


def _y(scale: Scale, value: float) -> float:
  return round(_SIZE * (1 - scale(value)), 1)


def _shown_ticks(scale: Scale, axis: Axis) -> list[float]:
  return ticks(scale, whole=axis.whole)


def _grid(y: float) -> ET.Element:
  return element('path', d=f'M0 {y}H{_SIZE}', class_='grid')


def _vertical(x: float, text: str) -> ET.Element:
  return element('path', element('title', text), d=f'M{x} 0V{_SIZE}', class_='mark')


def _horizontal(y: float, text: str) -> ET.Element:
  return element('path', element('title', text), d=f'M0 {y}H{_SIZE}', class_='limit')


def _curve(one: Series, across: Scale, up: Scale) -> list[ET.Element]:
  """Returns the line, in pieces around gaps, and its dots."""
  visible = [p for p in one.points if across.shows(p[0])]
  pieces = []
  for is_shown, piece in itertools.groupby(visible, key=lambda p: up.shows(p[1])):
    if is_shown:
      places = [(_x(across, a), _y(up, b)) for a, b in fewer(list(piece), most=_MOST_POINTS)]
      pieces.append('M' + 'L'.join(f'{a} {b}' for a, b in places))
      if len(places) == 1:
        pieces.append('h0')  # a round line end: one dot
  if not pieces:
    return []
  names = ' '.join(dict.fromkeys(['line', one.kind, *_look('c', one.color)]))
  drawn = [element('path', d=''.join(pieces), class_=names)]
  if one.kind == 'dots':
    spots = ''.join(f'M{_x(across, a)} {_y(up, b)}h0' for a, b in visible if up.shows(b))
    drawn.append(element('path', d=spots, class_=f'spots c{one.color % NUM_COLORS}'))
  return drawn


def _look(prefix: str, number: int) -> list[str]:
  """Returns the classes of a color and, if colors repeat, of a pattern.

  Args:
    prefix: 'c' for strokes, 'b' for backgrounds.
    number: number of the color.
  """
  repeat, color = divmod(number, NUM_COLORS)
  pattern = repeat % _NUM_PATTERNS
  return [f'{prefix}{color}', *([f'p{pattern}'] if pattern else [])]


def _tick_labels(across: Scale, up: Scale, x: Axis, y: Axis) -> list[ET.Element]:
  def place(value: float) -> str:
    return f'{100 * value:.2f}%'

  return [
    *(
      element('span', y.text(v), class_='y-tick', style=f'top:{place(1 - up(v))}')
      for v in _shown_ticks(up, y)
    ),
    *(
      element('span', x.text(v), class_='x-tick', style=f'left:{place(across(v))}')
      for v in _shown_ticks(across, x)
    ),
  ]


def _at(one: Series, x: float) -> Optional[tuple[float, float]]:
  """Returns the last point of a curve up to `x`."""
  i = bisect.bisect_right(one.points, x, key=lambda p: p[0])
  return one.points[i - 1] if i else None


def _places(series: Sequence[Series], most: int) -> list[float]:
  """Returns at most `most` x at which curves have points, evenly chosen, with first and last."""
  found = sorted({x for s in series for x, _ in s.points if math.isfinite(x)})
  if len(found) <= most:
    return found
  return [found[round(i * (len(found) - 1) / (most - 1))] for i in range(most)]


def _hovers(series: Sequence[Series], across: Scale, x: Axis, y: Axis) -> list[ET.Element]:
  """Returns a band around each x, whose title has the values there."""
  places = [p for p in _places(series, _MOST_HOVERS) if across.shows(p)]
  middles = [_x(across, p) for p in places]
  edges = [0.0, *((a + b) / 2 for a, b in itertools.pairwise(middles)), float(_SIZE)]
  bands = []
  for i, place in enumerate(places):
    lines = [f'{x.label} {x.exact_text(place)}']
    for one in series:
      point = _at(one, place)
      if point is not None and point[0] >= (places[i - 1] if i else -math.inf):
        lines.append(f'{one.name}: {y.exact_text(point[1])}')
    bands.append(
      element(
        'rect',
        element('title', '\n'.join(lines)),
        x=f'{edges[i]:.1f}',
        y=0,
        width=f'{max(edges[i + 1] - edges[i], 1):.1f}',
        height=_SIZE,
        class_='hover',
      )
    )
  return bands


def _values_table(series: Sequence[Series], x: Axis, y: Axis) -> Optional[ET.Element]:
  """Returns a collapsed table with the values at some x."""
  places = _places(series, _MOST_ROWS)
  if not places:
    return None
  rows = []
  for i, place in enumerate(places):
    points = [_at(s, place) for s in series]
    after = places[i - 1] if i else -math.inf
    rows.append(
      [
        x.exact_text(place),
        *(y.exact_text(p[1]) if p and (p[0] > after or p[0] == place) else '' for p in points),
      ]
    )
  return element(
    'details', element('summary', 'Values'), table([x.label, *(s.name for s in series)], rows)
  )


def legend(entries: Sequence[tuple[str, int]], kinds: Sequence[str] = ()) -> ET.Element:
  """Returns names with their colors; `kinds` as in `Series`, '' for the default."""
  return element(
    'ul',
    *(
      element(
        'li', element('i', class_=' '.join(filter(None, ['key', kind, *_look('b', color)]))), name
      )
      for (name, color), kind in itertools.zip_longest(entries, kinds, fillvalue='')
    ),
    class_='legend',
  )


def stacked_bars(
  rows: Mapping[str, Mapping[str, float]],
  *,
  title: str,
  colors: Mapping[str, int],
  text: Format,
  full: Optional[float] = None,
  limit: Optional[tuple[float, str]] = None,
  in_table: bool = True,
) -> ET.Element:
  """Returns a bar per row, divided into parts, with a legend and a table of its values.

  Args:
    rows: name of the row -> part -> amount; parts of 0 are not drawn.
    title: title above the bars.
    colors: part -> number of its color, in drawing order. Other parts follow, with the next
      numbers.
    text: formats an amount.
    full: the amount of a bar of full width; None for the longest bar's.
    limit: (amount, name) that a line marks, such as the memory of a GPU.
    in_table: whether a table with all amounts follows.
  """
  totals = {name: sum(parts.values()) for name, parts in rows.items()}
  full = full or max([*totals.values(), limit[0] if limit else 0.0], default=0.0) or 1.0
  others = [p for p in dict.fromkeys(itertools.chain(*rows.values())) if p not in colors]
  next_color = max(colors.values(), default=-1) + 1
  colors = {**colors, **{part: next_color + i for i, part in enumerate(others)}}
  used = [part for part in colors if any(parts.get(part) for parts in rows.values())]
  bars: list[Child] = []
  for name, parts in rows.items():
    segments = [
      _segment(part, parts[part], full, colors[part], text) for part in used if parts.get(part)
    ]
    if limit:
      at = f'left:{100 * limit[0] / full:.3f}%'
      segments.append(element('span', class_='limit', style=at, title=limit[1]))
    spoken = ', '.join(f'{part} {text(parts[part])}' for part in used if parts.get(part))
    bars.append(
      element(
        'div',
        element('div', name, class_='bar-name'),
        element('div', *segments, class_='bar', role='img', aria_label=f'{name}: {spoken}'),
        element('div', text(totals[name]), class_='bar-total'),
        class_='bar-row',
      )
    )
  values = [
    [name, *(text(parts.get(part, 0.0)) for part in used), text(totals[name])]
    for name, parts in rows.items()
  ]
  return element(
    'figure',
    element('figcaption', title),
    legend([(part, colors[part]) for part in used]),
    element('div', *bars, class_='bars'),
    element('p', f'The line marks {limit[1]}: {text(limit[0])}.', class_='note') if limit else None,
    element('details', element('summary', 'Values'), table(['', *used, 'sum'], values))
    if in_table
    else None,
    class_='chart',
  )


def _segment(part: str, amount: float, full: float, color: int, text: Format) -> ET.Element:
  return element(
    'span',
    class_=' '.join(_look('b', color)),
    style=f'width:{100 * amount / full:.3f}%',
    title=f'{part}: {text(amount)}',
  )
