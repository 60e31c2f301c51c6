"""A program as text: its parameters and their sharding."""

import math
from typing import Any

import jax

from t5x_gpu.training.program import Program


def parameter_table(program: Program) -> str:
  """Returns one line per parameter: name, shape, axis names, how it is split, MiB per device."""
  names = jax.tree.leaves(program.names.params)
  flat, _ = jax.tree_util.tree_flatten_with_path(program.abstract_state.params)
  rows = [('parameter', 'shape', 'axes', 'split over', 'MiB/device')]
  shapes = [array.shape for array in jax.tree.leaves(program.abstract_saved.params)]
  for (path, array), axis_names, shape in zip(flat, names, shapes, strict=True):
    local = array.sharding.shard_shape(array.shape)
    rows.append(
      (
        jax.tree_util.keystr(path, simple=True, separator='/'),
        ' x '.join(map(str, shape)),
        ' '.join(str(n or '-') for n in axis_names.names),
        ' '.join(_entry(e) for e in array.sharding.spec) or '-',
        f'{math.prod(local) * array.dtype.itemsize / 2**20:.2f}',
      )
    )
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join(
    '  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows
  )


def _entry(entry: Any) -> str:
  if entry is None:
    return '-'
  return '+'.join(entry) if isinstance(entry, tuple) else entry


def bytes_per_device(tree: Any) -> int:
  """Returns the bytes that the arrays of an abstract, sharded tree take on one device."""
  return sum(
    math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)
  )


def size_line(program: Program) -> str:
  """Returns `134,307,072 parameters; 1.50 GiB of parameters and optimizer state per device`.

  If only some parameters are trained, it includes their number.
  """
  mib = bytes_per_device(program.abstract_state) / 2**20
  size = f'{mib / 1024:.2f} GiB' if mib >= 1024 else f'{mib:.1f} MiB'
  trained = (
    ''
    if program.num_trained == program.num_params
    else f', {program.num_trained:,} of them trained'
  )
  return (
    f'{program.num_params:,} parameters{trained}; {size} of parameters and optimizer state '
    'per device'
  )
