"""The layout of a run's arrays and the traffic of a step, as text for the terminal."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from t5x_gpu.analysis.array_layout import ArrayLayout, optimizer_bytes, part_held
from t5x_gpu.analysis.collectives import Collective
from t5x_gpu.analysis.sharding_lint import PURPOSES, ParameterShapes, purpose
from t5x_gpu.partitioning.mesh.mesh_sizes import MeshSizes
from t5x_gpu.terminal.text_table import table

MAX_DEVICES_DRAWN = 32
_LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'


def mib(num_bytes: float) -> str:
  """Returns `num_bytes` in MiB, with two decimals."""
  return f'{num_bytes / 2**20:,.2f}'


def parameter_table(parameters: Sequence[ArrayLayout], optimizer: Sequence[ArrayLayout]) -> str:
  """Returns one line per parameter with its optimizer state, and the totals per device.

  A parameter's line names the axes of its state if the state is split over more axes (ZeRO-1 and
  2).
  """
  state = optimizer_bytes(optimizer)
  apart = {
    array.parameter: f' (state over {" and ".join(array.mesh_axes)})'
    for array in split_apart(parameters, optimizer)
  }
  rows = [('parameter', 'shape', 'axes', 'split over', 'MiB/device', 'optimizer MiB/device')]
  for p in parameters:
    rows.append(
      (
        p.name,
        ' x '.join(map(str, p.shape)),
        ' '.join(n or '-' for n in p.names),
        p.split_words + apart.get(p.name, ''),
        mib(p.bytes_per_device),
        mib(state[p.name]),
      )
    )
  if state[None]:
    rows.append(('(no parameter)', '', '', '', '', mib(state[None])))
  totals = sum(p.bytes_per_device for p in parameters), sum(state.values())
  on_one_device = sum(p.true_bytes for p in parameters), sum(a.true_bytes for a in optimizer)
  rows.append(('total', '', '', '', *map(mib, totals)))
  rows.append(('on one device', '', '', '', *map(mib, on_one_device)))
  return table(rows, right=(4, 5))


def split_apart(
  parameters: Sequence[ArrayLayout], optimizer: Sequence[ArrayLayout]
) -> list[ArrayLayout]:
  """Returns the optimizer's arrays that are split over more axes than their parameter."""
  axes = {p.name: set(p.mesh_axes) for p in parameters}
  return [a for a in optimizer if a.parameter in axes and set(a.mesh_axes) - axes[a.parameter]]


def device_picture(
  arrays: Sequence[ArrayLayout],
  sizes: MeshSizes,
  devices: Sequence[Mapping[str, int]],
  *,
  what: str = 'parameter',
) -> str:
  """Returns a column per device: its position on the mesh, and its part of each array.

  Devices with the same letter hold the same part. Arrays with the same layout share a line.

  Args:
    arrays: layouts.
    sizes: sizes of the mesh.
    devices: position (mesh axis -> index) of each device, host after host.
    what: word for an array.
  """
  shown = devices[:MAX_DEVICES_DRAWN]
  per_host = math.prod(sizes.ici.values())

  def line(cells: Sequence[object]) -> str:
    width = max(len(str(cell)) for cell in cells)
    return ' | '.join(
      ' '.join(f'{cells[i]!s:>{width}}' for i in range(start, min(start + per_host, len(cells))))
      for start in range(0, len(cells), per_host)
    )

  rows = []
  if sizes.num_devices > per_host:
    rows.append(('host', line([i // per_host for i in range(len(shown))]), ''))
  rows += [
    (axis, line([place[axis] for place in shown]), '')
    for axis, size in sizes.total.items()
    if size > 1
  ]
  alike = collections.defaultdict(list)
  for array in arrays:
    held = [part_held(array, place, sizes.total) for place in shown]
    alike[tuple(held.index(part) for part in held), math.prod(array.parts)].append(array.name)
  for (firsts, parts), names in alike.items():
    letters = {first: _LETTERS[i % len(_LETTERS)] for i, first in enumerate(dict.fromkeys(firsts))}
    rows.append(
      (
        '1 part' if parts == 1 else f'{parts} parts',
        line([letters[first] for first in firsts]),
        f'{len(names)} {what}{"s" * (len(names) > 1)}: {_listed(names)}',
      )
    )
  more = len(devices) - len(shown)
  return table([('device', line([i % 10 for i in range(len(shown))]), ''), *rows]) + (
    f'\n({more} more devices)' if more else ''
  )


def _listed(names: Sequence[str], *, width: int = 60) -> str:
  text = ', '.join(names)
  if len(text) <= width:
    return text
  kept = text[:width].rsplit(', ', 1)[0]
  return f'{kept}, ...'


@dataclasses.dataclass(frozen=True)
class TrafficRow:
  """Collectives of one kind over the same axes for the same purpose.

  Attributes:
    purpose, kind, axes: the same for all these collectives.
    link: 'inside a host' or 'network'.
    count: number of runs in a step.
    num_bytes: bytes that a device sends for them in a step.
    flags: why the count is uncertain, or ''.
    largest: the collective that sends the most bytes.
  """

  purpose: str
  kind: str
  axes: tuple[str, ...]
  link: str
  count: int
  num_bytes: int
  flags: str
  largest: Collective


def traffic(
  collectives: Sequence[Collective], parameters: Sequence[ArrayLayout], sizes: MeshSizes
) -> list[TrafficRow]:
  """Returns the traffic of a step, summed by purpose, kind and axes; most bytes first."""
  shapes = ParameterShapes(parameters, sizes.total)
  groups = collections.defaultdict(list)
  for c in collectives:
    groups[purpose(c, shapes), c.kind, c.axes].append(c)
  rows = []
  for (use, kind, axes), members in groups.items():
    flags = ['some in branches'] * any(c.in_branch for c in members)
    flags += ['loops of unknown length'] * any(c.unknown_count for c in members)
    rows.append(
      TrafficRow(
        use,
        kind,
        axes,
        'network' if any(map(sizes.crosses_hosts, axes)) else 'inside a host',
        sum(c.count for c in members),
        sum(c.bytes_per_call for c in members),
        ', '.join(flags),
        max(members, key=lambda c: c.bytes_per_call),
      )
    )
  return sorted(rows, key=lambda row: (-row.num_bytes, PURPOSES.index(row.purpose)))


def traffic_table(rows: Sequence[TrafficRow]) -> str:
  """Returns one line per row and the sums per link."""
  if not rows:
    return 'no collectives: the devices exchange nothing'
  lines = [('purpose', 'kind', 'mesh axis', 'link', 'per step', 'MiB/device', 'largest')]
  for r in rows:
    shape = ' x '.join(map(str, r.largest.shape))
    flags = f' ({r.flags})' if r.flags else ''
    lines.append(
      (
        r.purpose,
        r.kind,
        '+'.join(r.axes),
        r.link,
        f'{r.count:,}',
        mib(r.num_bytes),
        f'{r.largest.dtype}[{shape}] {place(r.largest)}{flags}',
      )
    )
  links = collections.Counter()
  for r in rows:
    links[r.link] += r.num_bytes
  return (
    table(lines, right=(4, 5))
    + '\nper device and step: '
    + ', '.join(
      f'{mib(num_bytes)} MiB {"over the network" if link == "network" else link}'
      for link, num_bytes in links.most_common()
    )
  )


def place(collective: Collective) -> str:
  """Returns the end of its path, 'mlp/wo/dot_general', after 'backward' if it is in that pass."""
  name = collective.op_name
  words = [
    word
    for word in name.split('/')
    if word not in ('body', 'closed_call', 'while') and '(' not in word
  ]
  return ('backward ' if 'transpose(' in name else '') + '/'.join(words[-3:])
