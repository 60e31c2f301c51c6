"""Elementwise kernels of a compiled step, by the parts of the model that `work` counts.

A kernel's `op_name`, the path of what it computes in the traced Python program, has the modules of
Flax, the scope of the loss, and no transformation at all in the optimizer. XLA adds kernels around
loops, for weights and for activations stored between layers: their dtype and operation decide.
"""

import collections
import dataclasses
import re
from collections.abc import Collection, Sequence

from t5x_gpu.compiled.traffic import KernelTraffic
from t5x_gpu.models.heads import LOSS_SCOPE
from t5x_gpu.tools.planning.formulas import work as parts
from t5x_gpu.tools.planning.formulas.work import Work, elementwise_bytes
from t5x_gpu.tools.planning.sharding import ElementwiseRow, elementwise_rows

_LARGEST = 2  # kernels named per part


@dataclasses.dataclass(frozen=True)
class PartKernels:
  """The elementwise kernels of one part of the model in a step, on one GPU.

  Attributes:
    part: one of the names of formulas/work.py.
    formula_bytes: bytes that they read and write by formula.
    num_bytes: the same as compiled.
    largest: kernels with the most bytes, at most two.
  """

  part: str
  formula_bytes: float
  num_bytes: int
  largest: tuple[ElementwiseRow, ...]


def kernels_by_part(
  kernels: Sequence[KernelTraffic], work: Sequence[Work], *, dtype: str
) -> list[PartKernels]:
  """Returns the elementwise kernels by part, most bytes first.

  Args:
    kernels: kernels of the compiled step.
    work: the step by formula.
    dtype: TransformerConfig's dtype.
  """
  formula = elementwise_bytes(work)
  found: dict[str, list[KernelTraffic]] = collections.defaultdict(list)
  for kernel in kernels:
    if not kernel.multiplies:
      found[_part_of(kernel, formula, dtype)].append(kernel)
  rows = [
    PartKernels(
      part,
      formula.get(part, 0.0),
      sum(kernel.num_bytes for kernel in found[part]),
      tuple(elementwise_rows(found[part])[:_LARGEST]),
    )
    for part in {**formula, **found}
  ]
  return sorted(rows, key=lambda row: -row.num_bytes)


def _part_of(kernel: KernelTraffic, known: Collection[str], dtype: str) -> str:
  """Returns the part of an elementwise kernel; `known` are the parts of the step by formula."""
  name, result = kernel.op_name, kernel.instruction.arrays[0].dtype
  operation = name.split('/')[-1] or kernel.instruction.opcode
  in_module = re.search(r'\b[A-Z]\w*', name)  # Flax names modules after their classes
  if re.search(rf'\b{LOSS_SCOPE}\b', name):
    return parts.LOGITS
  if name and not (in_module or 'shard_map' in name or 'jvp(' in name):
    return parts.OPTIMIZER
  if parts.CONVERSIONS in known and (result[:2] == 'f8' or operation in ('abs', 'reduce_max')):
    return parts.CONVERSIONS
  if parts.ATTENTION in known and 'attention/' in name:
    return parts.ATTENTION
  if 'embed' in name.lower() or operation == 'scatter-add':
    return parts.EMBEDDING
  is_wide = result == 'f32' and not dtype.endswith('float32')
  if in_module:
    is_gradient = is_wide and operation == 'dot_general'
    return parts.WEIGHTS_AND_GRADIENTS if is_gradient else parts.ELEMENTWISE
  if is_wide or operation in ('convert_element_type', 'reduce_precision', 'transpose'):
    return parts.WEIGHTS_AND_GRADIENTS
  if parts.STORED in known and re.search('slice|broadcast|copy|closed_call', operation):
    return parts.STORED
  return parts.ELEMENTWISE
