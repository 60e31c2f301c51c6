"""Shows the lengths of packed examples as a histogram: as text and as a picture."""

import os
import pathlib
from collections.abc import Mapping

from t5x_gpu.metrics.plots import new_figure, save_figure

_BAR = 40


def bins(lengths: Mapping[int, int]) -> list[tuple[str, int]]:
  """Returns (range of lengths, number of examples), without gaps.

  Args:
    lengths: exponent e -> examples with 2**(e-1) < length <= 2**e.
  """
  if not lengths:
    return []

  def label(e: int) -> str:
    low, high = (2 ** (e - 1) + 1 if e else 1), 2**e
    return f'{low:,}' if low == high else f'{low:,}-{high:,}'

  return [(label(e), lengths.get(e, 0)) for e in range(min(lengths), max(lengths) + 1)]


def lengths_table(lengths: Mapping[int, int]) -> list[str]:
  """Returns the histogram as lines of text."""
  found = bins(lengths)
  total, most = sum(lengths.values()), max(lengths.values(), default=1)
  width = max((len(name) for name, _ in found), default=0)
  return [
    f'  {name:>{width}}  {number / total:6.1%}  {"#" * round(_BAR * number / most)}'.rstrip()
    for name, number in found
  ]


def plot_lengths(
  lengths: Mapping[str, Mapping[int, int]], png_path: str | os.PathLike, *, title: str
) -> pathlib.Path:
  """Draws the share of examples by length, one curve per task; returns the path of the picture.

  Args:
    lengths: task -> histogram as in `bins`.
    png_path: picture to write; its folder must exist.
    title: text above the picture.
  Raises:
    ConfigError: matplotlib is not installed.
  """
  figure = new_figure((7, 3.6), layout='constrained')
  axes = figure.subplots()
  found = [e for histogram in lengths.values() for e in histogram] or [0]
  exponents = range(min(found), max(found) + 1)
  for name, histogram in lengths.items():
    total = sum(histogram.values()) or 1
    axes.plot(
      exponents,
      [100 * histogram.get(e, 0) / total for e in exponents],
      marker='o',
      markersize=3,
      linewidth=1.2,
      label=name,
    )
  axes.set_xticks(exponents, [f'{2**e:,}' for e in exponents], fontsize=8)
  axes.set_xlabel('tokens per example, at most', fontsize=9)
  axes.set_ylabel('% of examples', fontsize=9)
  axes.set_ylim(bottom=0)
  axes.grid(alpha=0.25, linewidth=0.5)
  axes.set_title(title, fontsize=9, loc='left', parse_math=False)
  if len(lengths) > 1:
    legend = axes.legend(fontsize=8, frameon=False)
    for text in legend.get_texts():
      text.set_parse_math(False)
  return save_figure(figure, png_path)
