"""A drawing of a mesh: each host with its GPUs, colored by groups that exchange data.

One view per mesh axis. GPUs of one color are a group along that axis; their number is the place in
the group. Each host is a separate small SVG, so a phone shows one below the other.
"""

import math
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence

import numpy as np

from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.mesh.mesh import FSDP_SPLITS, SPLITS, device_array
from t5x_gpu.partitioning.mesh.mesh_sizes import MESH_AXES
from t5x_gpu.planning.formulas.links import NETWORK
from t5x_gpu.planning.formulas.step_time import CollectiveTime
from t5x_gpu.reporting.charts import NUM_COLORS
from t5x_gpu.reporting.markup import element
from t5x_gpu.reporting.page import views
from t5x_gpu.runtime.memory import show

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
