"""`plan_page`: a prediction as one HTML page that opens without a network.

`mesh_drawing` shows the hosts and their GPUs, one view per mesh axis. GPUs of one color are a group
along that axis; their number is the place in the group. Each host is a separate small SVG, so a
phone shows one below the other.
"""

import math
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

import numpy as np

from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.mesh import FSDP_SPLITS, SPLITS, device_array
from t5x_gpu.partitioning.mesh_sizes import MESH_AXES
from t5x_gpu.reporting.charts import NUM_COLORS, stacked_bars
from t5x_gpu.reporting.page import Child, Section, Tile, element, page, table, views
from t5x_gpu.terminal.console import show
from t5x_gpu.tools.planning import screen
from t5x_gpu.tools.planning.formulas import work
from t5x_gpu.tools.planning.formulas.step_memory import (
  ACTIVATIONS,
  BATCH,
  FRAGMENTATION,
  GRADIENTS,
  LAYER,
  LOSS,
  MICROBATCHES,
  OPTIMIZER,
  PARAMETERS,
  STACK,
  WEIGHTS,
  MemoryUse,
)
from t5x_gpu.tools.planning.formulas.step_time import NETWORK, NVLINK, CollectiveTime
from t5x_gpu.tools.planning.prediction import Prediction

MOST_HOSTS = 16
_MOST_VIEWS = 4
# In units of a host's SVG.
_CELL, _GAP, _EDGE, _TITLE = 44, 8, 10, 24


def mesh_drawing(layout: Layout, collectives: Sequence[CollectiveTime]) -> list[ET.Element]:
  """Returns the hosts and their GPUs, seen along each mesh axis larger than 1.

  Args:
    layout: layout of the run.
    collectives: collectives of a GPU in a step.
  """
  axes = [axis for axis in MESH_AXES if layout.sizes.total[axis] > 1]
  if not axes:
    return [_hosts(layout, '')]
  drawn = {axis: element('div', *_view(layout, axis, collectives)) for axis in axes}
  if len(drawn) > _MOST_VIEWS:
    return list(drawn.values())
  return [views('mesh', drawn)]


def _view(layout: Layout, axis: str, collectives: Sequence[CollectiveTime]) -> Iterator[ET.Element]:
  size, sizes = layout.sizes.total[axis], layout.sizes
  number = layout.topology.num_devices // size
  splits = FSDP_SPLITS[layout.zero_stage] if axis == 'fsdp' else SPLITS[axis]
  own = [c for c in collectives if c.axes == (axis,)]
  sent = sum(c.num_bytes for c in own)
  if not sizes.crosses_hosts(axis):
    link = 'inside a host, over NVLink'
  elif sizes.ici[axis] == 1:
    link = f'over the network, one GPU on each of {sizes.dcn[axis]} hosts'
  else:
    link = f'over the network, {sizes.ici[axis]} GPUs on each of {sizes.dcn[axis]} hosts'
  groups = '1 group' if number == 1 else f'{number:,} groups'
  yield element(
    'p',
    element('b', axis),
    f' splits {splits}: {groups} of {size:,} GPUs {link}. '
    f'Each GPU sends {show(sent)} per step along it'
    + (f', {sum(c.seconds for c in own) * 1e3:,.3g} ms if nothing else ran.' if own else '.'),
    class_='note',
  )
  yield _hosts(layout, axis)


def _hosts(layout: Layout, axis: str) -> ET.Element:
  topology = layout.topology
  shown = min(topology.num_hosts, MOST_HOSTS)
  more = topology.num_hosts - shown
  return element(
    'div',
    element(
      'div', *(_host(layout, axis, host, cells) for host, cells in _cells(layout, axis, shown)),
      class_='hosts',
    ),
    element('p', f'{more:,} more hosts continue the pattern.', class_='note') if more else None,
  )  # fmt: skip


def _cells(
  layout: Layout, axis: str, num_hosts: int
) -> Iterator[tuple[int, list[tuple[int, int, str]]]]:
  """Yields (host, its GPUs as (group, place along `axis`, tooltip with all places))."""
  sizes, topology = layout.sizes, layout.topology
  array = device_array(sizes, topology, range(topology.num_devices))
  places = np.zeros((topology.num_devices, len(MESH_AXES)), int)
  for place, device in np.ndenumerate(array):
    places[device] = place
  shape = [1 if a == axis else sizes.total[a] for a in MESH_AXES]
  for host in range(num_hosts):
    cells = []
    for device in range(host * topology.devices_per_host, (host + 1) * topology.devices_per_host):
      place = dict(zip(MESH_AXES, map(int, places[device])))
      others = [0 if a == axis else place[a] for a in MESH_AXES]
      group = int(np.ravel_multi_index(others, shape))
      words = ', '.join(f'{a} {place[a]}' for a in MESH_AXES if sizes.total[a] > 1)
      cells.append((group, place.get(axis, device), f'GPU {device}: {words or "all of the run"}'))
    yield host, cells


def _host(layout: Layout, axis: str, host: int, cells: list[tuple[int, int, str]]) -> ET.Element:
  sizes = layout.sizes
  columns = 4 if len(cells) <= 8 else 8
  rows = math.ceil(len(cells) / columns)
  width = 2 * _EDGE + columns * (_CELL + _GAP) - _GAP
  bottom = _TITLE + rows * (_CELL + _GAP) + _EDGE
  several = layout.topology.num_hosts > 1
  drawn = [
    element('rect', x=1, y=1, width=width - 2, height=bottom + 8, rx=8, class_='case'),
    element('text', f'host {host}', x=_EDGE, y=17),
  ]
  for i, (group, place, words) in enumerate(cells):
    x = _EDGE + (i % columns) * (_CELL + _GAP)
    y = _TITLE + i // columns * (_CELL + _GAP)
    drawn.append(
      element(
        'g',
        element('title', words),
        element('rect', x=x, y=y, width=_CELL, height=_CELL, rx=5, class_=f'f{group % NUM_COLORS}'),
        element('text', str(place), x=x + _CELL / 2, y=y + _CELL / 2 + 5, class_='on'),
      )
    )
  inside = axis and sizes.ici[axis] > 1
  drawn.append(_wire('NVLink', width, bottom, bool(inside)))
  if several:
    crosses = bool(axis) and sizes.crosses_hosts(axis)
    drawn.append(_wire(NETWORK, width, bottom + 24, crosses))
  height = bottom + (36 if several else 12)
  label = f'host {host}: ' + ', '.join(words for _, _, words in cells)
  return element(
    'svg', *drawn, viewBox=f'0 0 {width} {height}', class_='host', role='img', aria_label=label
  )


def _wire(name: str, width: int, y: int, used: bool) -> ET.Element:
  """Returns a line between GPUs, thick if the axis sends over it, and its name."""
  end = width - _EDGE
  return element(
    'g',
    element('title', f'{name}: ' + ('used along this axis' if used else 'not used along it')),
    element('path', d=f'M{_EDGE} {y}H{end - 56}', class_='wire used' if used else 'wire'),
    element('text', name, x=end - 50, y=y + 4, class_='small'),
  )


_WAITING, _BUBBLE = 'waiting for collectives', 'pipeline bubble'
_ARGUMENTS, _TEMPORARIES = 'parameters, optimizer state, batch', 'temporaries'
_OUTPUTS = 'outputs'
# Component or part -> number of its color, in drawing order. Adding ten gives the same color with a
# pattern: XLA's allocation, next to the parts of it that formulas know; and the eleventh part.
_MEMORY_COLORS = {
  PARAMETERS: 0,
  OPTIMIZER: 1,
  BATCH: 9,
  _ARGUMENTS: 10,
  _TEMPORARIES: 13,
  _OUTPUTS: 12,
  GRADIENTS: 2,
  ACTIVATIONS: 3,
  LAYER: 4,
  MICROBATCHES: 14,
  WEIGHTS: 5,
  STACK: 8,
  LOSS: 6,
  FRAGMENTATION: 7,
}
_TIME_COLORS = {
  work.MODEL: 11,
  work.MLP: 0,
  work.EXPERTS: 10,
  work.ATTENTION_PROJECTIONS: 5,
  work.ATTENTION: 6,
  work.LOGITS: 2,
  work.ELEMENTWISE: 3,
  work.EMBEDDING: 7,
  work.WEIGHTS_AND_GRADIENTS: 4,
  work.OPTIMIZER: 8,
  _WAITING: 1,
  _BUBBLE: 9,
}


def plan_page(p: Prediction, layout: Layout, *, title: str, advice: str = '') -> str:
  """Returns a plan as HTML.

  Args:
    p: the prediction.
    layout: layout of the run.
    title: title of the page, such as the names of the gin files.
    advice: changes that would make it fit, if it does not; '' for none.
  """
  sections = [
    _bottleneck(p),
    _memory(p.memory, advice),
    _parameters(p),
    _mesh(layout, p),
    _traffic(p),
    _time(p),
    _assumptions(p),
  ]
  written = time.strftime('%Y-%m-%d %H:%M:%S', time.localtime())
  return page(
    title,
    sections,
    subtitle=_subtitle(p),
    tiles=_tiles(p),
    notes=screen.caveats(p),
    footer=f'python -m t5x_gpu.plan wrote this page at {written}.',
  )


def _subtitle(p: Prediction) -> str:
  mesh = ' x '.join(f'{axis} {size}' for axis, size in p.mesh.items()) or 'one GPU'
  hosts = f'{p.num_hosts} host' + 's' * (p.num_hosts > 1)
  return f'{p.num_params:,} parameters · {p.num_gpus} x {p.gpu.device_kind} ({hosts}) · {mesh}'


def _tiles(p: Prediction) -> list[Tile]:
  memory = p.memory
  verdict = (
    Tile('memory', 'fits', f'{show(memory.left_bytes)} per GPU to spare', 'good')
    if memory.fits
    else Tile('memory', 'does not fit', f'{show(-memory.left_bytes)} per GPU too much', 'bad')
  )
  return [
    verdict,
    Tile('per step', screen.seconds(p.seconds_per_step), f'{p.tokens_per_step:,} tokens'),
    Tile(
      'tokens/s', f'{p.tokens_per_second:,.0f}', f'{p.tokens_per_second / p.num_gpus:,.0f} per GPU'
    ),
    Tile(
      'MFU',
      'unknown' if p.mfu is None else f'{p.mfu:.1%}',
      f'{p.flops_per_gpu / 1e12:,.0f} TFLOP/s per GPU in {p.dtype}',
    ),
    Tile(
      'to the end',
      screen.duration(p.days),
      f'{p.total_steps:,} steps, {screen.count(p.total_tokens)} tokens, '
      f'{screen.gpu_hours(p)} GPU hours',
    ),
    Tile(
      'checkpoint',
      show(p.checkpoint.num_bytes),
      f'{p.checkpoint.seconds:,.0f} s to write, while the run continues',
    ),
  ]


def _bottleneck(p: Prediction) -> Section:
  total = p.seconds_per_step
  rows = [
    (c.what, f'{c.seconds * 1e3:,.2f}', f'{c.seconds / total:.0%}', c.remedy)
    for c in screen.costs(p)
  ]
  content: list[Child] = [element('p', screen.bottleneck_sentence(p))]
  if rows:
    head = ('what a change could remove', 'ms per step', 'share', 'how')
    content.append(table(head, rows, texts=(0, 3)))
  return Section('bottleneck', 'What bounds a step', content)


def _memory(memory: MemoryUse, advice: str) -> Section:
  parts = {name: float(size) for name, size in memory.components.items() if size}
  bars = {'by formula': parts}
  if memory.compiled is not None:
    compiled = memory.compiled
    bars['as compiled'] = {
      _ARGUMENTS: float(compiled.argument_bytes),
      _TEMPORARIES: float(compiled.temporary_bytes),
      _OUTPUTS: float(compiled.output_bytes),
      FRAGMENTATION: float(memory.components[FRAGMENTATION]),
    }
  longest = max(memory.gpu_bytes, *(sum(bar.values()) for bar in bars.values()))
  pool = f"XLA's share of the GPU, {memory.pool_bytes / memory.gpu_bytes:.0%} of it"
  chart = stacked_bars(
    bars,
    title='Memory per GPU',
    colors=_MEMORY_COLORS,
    text=show,
    full=longest,
    limit=(memory.pool_bytes, pool),
    in_table=False,
  )
  head, *rows = screen.memory_rows(memory)
  how = [element('pre', advice)] if advice else []
  content = [chart, *how, table(head, rows, texts=(0, 2))]
  intro = screen.fits_line(memory) + '. A full bar is all of the GPU.'
  return Section('memory', 'Memory', content, intro)


def _parameters(p: Prediction) -> Section:
  head, *rows = screen.parameter_rows(p)
  return Section('parameters', 'Parameters', [table(head, rows)])


def _mesh(layout: Layout, p: Prediction) -> Section:
  intro = (
    'GPUs of one color are a group that exchanges data along the chosen axis; the number is the '
    'place in the group. Thick lines carry its traffic.'
  )
  return Section('mesh', 'Mesh', mesh_drawing(layout, p.time.collectives), intro)


def _traffic(p: Prediction) -> Section:
  if not p.time.collectives:
    return Section('traffic', 'Traffic', [element('p', f'{screen.NO_TRAFFIC}.')])
  used = sorted({'+'.join(c.axes) for c in p.time.collectives})
  colors = {axes: i for i, axes in enumerate(used)}
  by_link: dict[str, dict[str, float]] = {}
  time_of: dict[str, dict[str, float]] = {}
  for c in p.time.collectives:
    axes = '+'.join(c.axes)
    sent = by_link.setdefault(c.link, {})
    sent[axes] = sent.get(axes, 0.0) + c.num_bytes
    shares = time_of.setdefault(c.link, {'hidden': 0.0, 'waited for': 0.0})
    shares['waited for'] += c.exposed_seconds
    shares['hidden'] += c.seconds - c.exposed_seconds
  order = [link for link in (NVLINK, NETWORK) if link in by_link]
  head, *rows = screen.traffic_rows(p)
  content = [
    element(
      'div',
      stacked_bars(
        {link: by_link[link] for link in order},
        title='Sent by a GPU per step, by mesh axis',
        colors=colors,
        text=show,
        in_table=False,
      ),
      stacked_bars(
        {link: time_of[link] for link in order},
        title='Time of the links per step',
        colors={'hidden': 2, 'waited for': 1},
        text=screen.seconds,
        in_table=False,
      ),
      class_='grid2',
    ),
    table(head, rows, texts=(0, 1, 2, 6)),
  ]
  intro = 'Hidden traffic runs behind matrix kernels; the GPU waits for the rest.'
  return Section('traffic', 'Traffic', content, intro)


def _time(p: Prediction) -> Section:
  step = p.time
  parts: dict[str, float] = {}
  for part in step.parts:
    parts[part.part] = parts.get(part.part, 0.0) + part.seconds
  parts[_WAITING] = step.exposed_seconds
  parts[_BUBBLE] = step.bubble_seconds
  chart = stacked_bars(
    {'step': parts},
    title='A step on a GPU',
    colors=_TIME_COLORS,
    text=screen.seconds,
    in_table=False,
  )
  head, *rows = screen.time_rows(step)
  content = [chart, table(head, rows, texts=(0, 1, 6))]
  if p.elementwise_kernels:
    head, *rows = screen.elementwise_rows(p)
    content.append(table(head, rows, texts=(0, 4)))
  return Section('time', 'Time', content)


def _assumptions(p: Prediction) -> Section:
  head, *rows = screen.assumption_rows(p)
  intro = 'Set them with --gin.Assumptions.NAME=VALUE.'
  return Section('assumptions', 'Assumptions', [table(head, rows, texts=(0, 1, 2))], intro)
