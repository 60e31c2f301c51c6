"""The size of a program: parameters and bytes per device."""

import math
from typing import Any

import jax

from t5x_gpu.training.program import Program


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
