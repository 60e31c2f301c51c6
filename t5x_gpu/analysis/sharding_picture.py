"""A picture of every parameter: how the mesh splits it, and its bytes per device."""

import importlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from t5x_gpu.analysis.array_layout import ArrayLayout, optimizer_bytes
from t5x_gpu.metrics import plots
from t5x_gpu.partitioning.mesh.mesh_sizes import MESH_AXES

# Okabe-Ito colors, which color-blind readers can distinguish; grey for arrays that are not split.
AXIS_COLORS = dict(
  zip(MESH_AXES, ('#CC79A7', '#0072B2', '#E69F00', '#56B4E9', '#F0E442', '#009E73', '#D55E00'))
)
WHOLE = '#CCCCCC'
_PARAMETERS, _OPTIMIZER = '#444444', '#AAAAAA'
_ROW_INCHES = 0.32
_MAX_CUTS = 64  # per dimension; more would blur


def draw(
  parameters: Sequence[ArrayLayout],
  optimizer: Sequence[ArrayLayout],
  png_path: str | os.PathLike,
  *,
  title: str,
) -> pathlib.Path:
  """Draws one row per parameter and returns the path of the picture.

  The left side shows the array as a rectangle cut into its parts, one color per mesh axis; the part
  of device 0 is framed. The right side shows a device's bytes of the array and of its optimizer
  state.

  Args:
    parameters, optimizer: layouts, from `state_layouts`.
    png_path: picture to write; its folder must exist.
    title: text above the picture.
  Raises:
    ConfigError: matplotlib is not installed.
  """
  rows = len(parameters)
  names = max(len(p.name) for p in parameters)
  words = max(len(_words(p)) for p in parameters)
  left, right = 0.075 * names + 0.3, 0.065 * words + 0.3
  boxes, bars = 3.0, 2.4
  width, height = left + boxes + right + bars + 0.4, rows * _ROW_INCHES + 1.25
  figure = plots.new_figure((width, height))

  def axes_at(x: float, wide: float) -> Any:
    axes = figure.add_axes((x / width, 0.5 / height, wide / width, rows * _ROW_INCHES / height))
    axes.set_ylim(rows, 0)
    axes.set_yticks([])
    return axes

  cells = axes_at(left, boxes)
  cells.set_xlim(0, 1)
  cells.axis('off')
  for row, p in enumerate(parameters):
    cells.text(-0.03, row + 0.5, p.name, ha='right', va='center', fontsize=8, family='monospace')
    cells.text(1.03, row + 0.5, _words(p), ha='left', va='center', fontsize=7)
    _draw_array(cells, p, row)
  _draw_bytes(axes_at(left + boxes + right, bars), parameters, optimizer)
  figure.text(0.15 / width, 1 - 0.28 / height, title, fontsize=10, va='center')
  _draw_legend(figure, parameters, 1 - 0.42 / height)
  return plots.save_figure(figure, png_path)


def _words(p: ArrayLayout) -> str:
  return ', '.join(
    f'{name or "-"} {size}' + (f' / {"+".join(axes)} {parts}' if axes else '')
    for name, size, axes, parts in zip(p.names, p.shape, p.split, p.parts)
  )


def _draw_array(axes: Any, p: ArrayLayout, row: int) -> None:
  """Draws the rectangle [0, 1] x [row + 0.12, row + 0.88] cut into its parts.

  The first split dimension runs from left to right and the second from top to bottom. The third
  cuts each column again.
  """
  cut = [i for i, parts in enumerate(p.parts) if parts > 1]
  top, high = row + 0.12, 0.76
  columns, lines, inner = ([min(p.parts[i], _MAX_CUTS) for i in cut] + [1, 1, 1])[:3]
  colors = [[AXIS_COLORS[axis] for axis in p.split[i]] for i in cut] or [[WHOLE]]
  for i in range(columns):
    # A dimension split over two axes alternates their colors.
    axes.barh(
      top + high / 2,
      1 / columns,
      left=i / columns,
      height=high,
      linewidth=0,
      color=colors[0][i % len(colors[0])],
      alpha=0.95 if i % 2 == 0 else 0.55,
    )
  for i in range(1, lines):
    y = top + high * i / lines
    axes.plot(
      [0, 1], [y, y], color=colors[1][0], linewidth=max(0.6, 3 - 0.3 * lines), solid_capstyle='butt'
    )
  for i in range(1, columns * inner):
    if i % inner:
      x = i / (columns * inner)
      axes.plot(
        [x, x],
        [top, top + high],
        color=colors[2][0],
        solid_capstyle='butt',
        linewidth=max(0.6, 3 - 0.1 * columns * inner),
      )
  wide, tall = 1 / (columns * inner), high / lines
  axes.plot(
    [0, wide, wide, 0, 0],
    [top, top, top + tall, top + tall, top],
    color='black',
    linewidth=1,
    clip_on=False,
  )


def _draw_bytes(
  axes: Any, parameters: Sequence[ArrayLayout], optimizer: Sequence[ArrayLayout]
) -> None:
  state = optimizer_bytes(optimizer)
  middle = [row + 0.5 for row in range(len(parameters))]
  own = [p.bytes_per_device / 2**20 for p in parameters]
  rest = [state[p.name] / 2**20 for p in parameters]
  axes.barh(middle, own, height=0.6, color=_PARAMETERS)
  axes.barh(middle, rest, left=own, height=0.6, color=_OPTIMIZER)
  for y, a, b in zip(middle, own, rest):
    axes.text(
      a + b, y, f' {a + b:.2g}' if a + b < 100 else f' {a + b:,.0f}', va='center', fontsize=7
    )
  axes.set_xlim(0, max(a + b for a, b in zip(own, rest)) * 1.18)
  axes.set_xlabel('MiB per device', fontsize=8)
  axes.tick_params(labelsize=7)
  axes.locator_params(axis='x', nbins=5)
  for side in ('top', 'right'):
    axes.spines[side].set_visible(False)


def _draw_legend(figure: Any, parameters: Sequence[ArrayLayout], y: float) -> None:
  used = {axis for p in parameters for axis in p.mesh_axes}
  entries = [(f'split over {a}', AXIS_COLORS[a]) for a in MESH_AXES if a in used]
  if any(p.is_whole for p in parameters):
    entries.append(('whole on every device', WHOLE))
  entries += [
    ('(framed: the part of device 0)', 'white'),
    ('parameter', _PARAMETERS),
    ('optimizer state', _OPTIMIZER),
  ]
  patches = importlib.import_module('matplotlib.patches')
  handles = [patches.Patch(color=color, label=label) for label, color in entries]
  figure.legend(
    handles=handles,
    loc='upper left',
    bbox_to_anchor=(0, y),
    ncols=len(handles),
    fontsize=7.5,
    frameon=False,
    handlelength=1.2,
    columnspacing=1.4,
  )
