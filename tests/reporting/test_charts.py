"""Pages are well formed, self-contained and escape their contents; charts show every value."""

import math
import re

import pytest

from t5x_gpu.reporting import charts
from t5x_gpu.reporting.page import Section, Tile, element, page, table, views
from tests.reporting.pages import Page

HOSTILE = '</title></style><script>alert(1)</script>\x00" onload="x()" \ud800 &amp; <b>'


def curve(points, *, x_log=False, y_log=False, **options):
  return charts.line_chart(
    [charts.Series('a', points, **options)],
    title='Loss',
    x=charts.Axis('step', is_log=x_log),
    y=charts.Axis('loss', is_log=y_log),
  )


def parsed(*content) -> Page:
  found = Page(page('title', [Section('one', 'One', content)]))
  found.check()
  return found


def test_text_of_a_run_cannot_become_markup():
  shown = page(
    HOSTILE,
    [
      Section('one', HOSTILE, [table([HOSTILE, 'b'], [[HOSTILE, 1]]), HOSTILE]),
      Section('two', 'Two', [curve([(1, 2.0)]), element('pre', HOSTILE)]),
    ],
    subtitle=HOSTILE,
    tiles=[Tile(HOSTILE, HOSTILE, HOSTILE)],
    notes=[HOSTILE],
    footer=HOSTILE,
  )
  shown.encode('utf-8')
  found = Page(shown)
  found.check()
  assert found.text.count('<script>alert(1)</script>') > 8
  assert found.headings[1] == 'Two'


def test_links_and_scripts_from_elsewhere_are_refused():
  for wrong in (lambda: element('a', 'x', href='https://a'), lambda: element('script', 'x')):
    with pytest.raises(ValueError, match='A report has no'):
      wrong()


def test_values_of_a_curve_are_under_the_pointer_and_in_the_table():
  found = parsed(curve([(1, 6.5), (2, 3.25), (3, math.nan), (4, 2.0)]))
  assert 'step 2\na: 3.25' in found.text and 'step 4\na: 2' in found.text
  assert [a['d'].count('M') for t, a in found.tags if a.get('class', '').startswith('line')] == [2]


@pytest.mark.parametrize('x_log', [False, True])
@pytest.mark.parametrize('y_log', [False, True])
@pytest.mark.parametrize(
  'points',
  [
    [],
    [(0, 0.0)],
    [(5, 1.0)],
    [(0, -1.0), (1, 0.0), (2, 1e-9)],
    [(1, math.nan), (2, math.inf)],
    [(1, 1e30), (2, 1e-30)],
    [(s, 2.0) for s in range(1, 50)],
  ],
)
def test_charts_of_odd_points_are_drawn(points, x_log, y_log):
  found = parsed(curve(points, x_log=x_log, y_log=y_log, kind='dots'))
  assert 'nan' not in ' '.join(a.get('d', '') + a.get('style', '') for _, a in found.tags)


def test_a_bad_step_among_many_stays_visible():
  points = [(float(s), 2.0) for s in range(100_000)]
  points[54_321] = (54_321.0, 9.0)
  kept = charts.fewer(points, most=1000)
  assert len(kept) <= 1102 and (54_321.0, 9.0) in kept
  assert (kept[0], kept[-1]) == (points[0], points[-1]) and kept == sorted(kept)


@pytest.mark.parametrize(
  'scale, whole, expected',
  [
    (charts.Scale(0, 10), False, [0, 2, 4, 6, 8, 10]),
    (charts.Scale(1.1, 1.42), False, [1.1, 1.2, 1.3, 1.4]),
    (charts.Scale(1, 3), True, [1, 2, 3]),
    (charts.Scale(1, 1000, True), False, [1, 10, 100, 1000]),
    (charts.Scale(8, 512, True), False, [10, 20, 50, 100, 200, 500]),
    (charts.Scale(2.1, 2.4, True), False, [2.1, 2.2, 2.3, 2.4]),
  ],
)
def test_ticks_are_round_numbers(scale, whole, expected):
  assert charts.ticks(scale, whole=whole) == pytest.approx(expected)


def test_bars_are_as_long_as_their_amounts():
  bars = charts.stacked_bars(
    {'a': {'compute': 30.0, 'wait': 10.0}, 'b': {'compute': 20.0}},
    title='Time',
    colors={'compute': 0, 'wait': 1},
    text='{:.0f} s'.format,
  )
  found = parsed(bars)
  widths = [a['style'] for t, a in found.tags if t == 'span' and 'style' in a]
  assert widths == ['width:75.000%', 'width:25.000%', 'width:50.000%']
  assert 'a: compute 30 s, wait 10 s' in [a.get('aria-label') for _, a in found.tags]


def test_a_part_without_a_color_is_drawn_too():
  bars = charts.stacked_bars(
    {'a': {'compute': 1.0, 'new': 2.0, 'newer': 1.0}},
    title='Time',
    colors={'compute': 1},
    text='{:.0f} s'.format,
  )
  found = parsed(bars)
  drawn = {a['title']: a['class'] for t, a in found.tags if t == 'span' and 'title' in a}
  assert list(drawn) == ['compute: 1 s', 'new: 2 s', 'newer: 1 s']
  assert len(set(drawn.values())) == 3 and drawn['compute: 1 s'] == 'b1'
  assert 'a: compute 1 s, new 2 s, newer 1 s' in [a.get('aria-label') for _, a in found.tags]


def test_more_curves_and_parts_than_colors_differ_in_their_pattern():
  number = 4 * charts.NUM_COLORS
  names = [f'run {i}' for i in range(number)]
  chart = charts.line_chart(
    [charts.Series(name, [(0, i), (1, i)], color=i) for i, name in enumerate(names)],
    title='Loss',
    x=charts.Axis('step'),
    y=charts.Axis('loss'),
  )
  bars = charts.stacked_bars(
    {'a': dict.fromkeys(names, 1.0)},
    title='Shares',
    colors={name: i for i, name in enumerate(names)},
    text='{:.0f}'.format,
  )
  found = parsed(chart, bars)
  lines = [a['class'] for t, a in found.tags if t == 'path' and a['class'].startswith('line')]
  keys = [a['class'] for t, a in found.tags if t == 'i']
  parts = [a['class'] for t, a in found.tags if t == 'span' and 'title' in a]
  assert len(set(lines)) == len(set(parts)) == number
  assert [k.removeprefix('key ') for k in keys[number:]] == parts  # the legend of the bars
  rules = set(re.findall(r'\.(\w+)\{', found.source))
  assert {name for drawn in (*lines, *parts) for name in drawn.split()} <= rules


def test_views_are_chosen_without_a_script():
  found = parsed(views('scale', {'linear': 'x', 'log': 'y'}))
  buttons = [a for t, a in found.tags if t == 'input']
  assert [('checked' in b) for b in buttons] == [True, False]
  assert [a['for'] for t, a in found.tags if t == 'label'] == [b['id'] for b in buttons]
