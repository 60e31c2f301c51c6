"""The bytes that the kernels of a compiled program read and write in a GPU's memory.

    kernels = kernel_traffic(compiled.as_text())
    traffic(kernels).other_bytes

A kernel reads each operand and writes each result once. Two kinds touch less: a slice reads only
its result, and an update in place writes only the update. Kernels that multiply matrices are
limited by their FLOPs; the others by these bytes.
"""

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Optional

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.hlo_text import SAME_VALUE, Computation, Instruction, Module
from t5x_gpu.compiled.kernels import Kernels

# Instructions that launch no kernel, or whose kernels are counted where they are called.
_NO_KERNEL = {
  *('parameter', 'constant', 'iota', 'tuple', 'get-tuple-element', 'bitcast', 'after-all'),
  *('while', 'conditional', 'call', 'async-start', 'async-update', 'async-done', 'copy-done'),
  *('partition-id', 'replica-id', 'opt-barrier', 'add-dependency'),
}
_COLLECTIVES = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-',
  'ragged-all-to-all',
  'recv',
  'reduce-scatter',
  'send',
)
_NO_VALUES = '"AllocateBuffer"'  # target of the custom call that reserves an array's memory
_SLICES = ('dynamic-slice', 'slice', 'gather')
_UPDATE = 'dynamic-update-slice'
# Instructions that compute no values: a kernel of these only moves data.
_MOVES = {
  *('parameter', 'constant', 'iota', 'tuple', 'get-tuple-element', 'bitcast', 'reshape'),
  *('copy', 'copy-start', 'transpose', 'convert', 'broadcast', 'slice', 'dynamic-slice', _UPDATE),
  *('concatenate', 'gather', 'pad', 'reverse'),
}
_SCALAR = 8  # bytes of an index, which instructions compute for a slice


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What one call of a program reads and writes on one GPU, without collectives.

  Attributes:
    kernels: kernels that run.
    matmul_flops: FLOPs of the matmuls, without attention.
    matmul_bytes: bytes of the kernels of `kernels.KERNEL_KINDS`: matmuls and attention.
    other_bytes: bytes of all other kernels.
    moved_bytes: the part of `other_bytes` of kernels that compute nothing: copies, transposes,
      slices, conversions and fills.
    copied_bytes: the part of `moved_bytes` that copies an array as it is.
  """

  kernels: int
  matmul_flops: float
  matmul_bytes: int
  other_bytes: int
  moved_bytes: int
  copied_bytes: int


@dataclasses.dataclass(frozen=True)
class KernelTraffic:
  """A kernel of a program, and what all its runs in one call read and write.

  Attributes:
    instruction: the kernel.
    op_name: its path in the traced Python program; of an instruction in it if it has none itself.
    kind: one of `kernels.KERNEL_KINDS`; None for any other kernel.
    runs: how often it runs.
    num_bytes: bytes of all runs.
    flops: FLOPs of all runs, as `Kernels.flops`.
    in_branch: as in `Visit`: it may run less often.
    only_moves: whether it computes nothing.
  """

  instruction: Instruction
  op_name: str
  kind: Optional[str]
  runs: int
  num_bytes: int
  flops: float = 0.0
  in_branch: bool = False
  only_moves: bool = False

  @property
  def multiplies(self) -> bool:
    """Whether it multiplies matrices."""
    return self.kind is not None


def kernel_traffic(hlo: str) -> list[KernelTraffic]:
  """Returns the traffic of each kernel, in the order of the program.

  Args:
    hlo: `compiled.as_text()` of a program for a GPU.
  """
  module = hlo_text.parse(hlo)
  kernels = Kernels(module)
  found = []
  for visit in kernels.outside_fusions():
    computation, instruction = visit.computation, visit.instruction
    if not _is_kernel(instruction):
      continue
    kind = kernels.kind(computation, instruction)
    found.append(
      KernelTraffic(
        instruction,
        visit.op_name or _fused_name(module, instruction),
        kind,
        visit.count,
        visit.count * bytes_moved(module, computation, instruction),
        visit.count * kernels.flops(computation, instruction) if kind else 0.0,
        visit.in_branch,
        _only_moves(module, instruction),
      )
    )
  return found


def _is_kernel(instruction: Instruction) -> bool:
  return (
    instruction.opcode not in _NO_KERNEL
    and not instruction.opcode.startswith(_COLLECTIVES)
    and instruction.attribute('custom_call_target') != _NO_VALUES
  )


def _only_moves(module: Module, instruction: Instruction) -> bool:
  inside = [instruction]
  if instruction.opcode == 'fusion':
    inside = [*module.computations[module.called(instruction)[0]].instructions.values()]
  return all(i.opcode in _MOVES or _result_bytes(i) <= _SCALAR for i in inside)


def _fused_name(module: Module, fusion: Instruction) -> str:
  """Returns the last name that an instruction of a fusion without a name has, or ''."""
  fused = (
    i.op_name
    for name in reversed(module.called(fusion))
    for i in reversed(module.computations[name].instructions.values())
  )
  return next(filter(None, fused), '')


def traffic(kernels: Sequence[KernelTraffic]) -> Traffic:
  """Returns the sums of `kernel_traffic`."""
  others = [k for k in kernels if not k.multiplies]
  copies = [k for k in others if k.instruction.opcode in ('copy', 'copy-start')]
  return Traffic(
    kernels=sum(k.runs for k in kernels),
    matmul_flops=sum(k.flops for k in kernels),
    matmul_bytes=sum(k.num_bytes for k in kernels if k.multiplies),
    other_bytes=sum(k.num_bytes for k in others),
    moved_bytes=sum(k.num_bytes for k in others if k.only_moves),
    copied_bytes=sum(k.num_bytes for k in copies),
  )


def bytes_moved(module: Module, computation: Computation, instruction: Instruction) -> int:
  """Returns the bytes that an instruction outside of fusions reads and writes."""
  if instruction.opcode == 'fusion':
    fused = module.computations[module.called(instruction)[0]]
    return _read_by(fused) + _written_by(fused)
  if instruction.opcode in _SLICES:
    return 2 * _result_bytes(instruction)
  if instruction.opcode == _UPDATE:
    return 2 * _result_bytes(computation.instructions[instruction.operands[1]])
  operands = [computation.instructions.get(name) for name in instruction.operands]
  read = sum(_result_bytes(operand) for operand in operands if operand is not None)
  return 2 * read if instruction.opcode == 'copy-start' else read + _result_bytes(instruction)


def _result_bytes(instruction: Instruction) -> int:
  return sum(array.num_bytes for array in instruction.arrays)


def _read_by(fused: Computation) -> int:
  """Returns the bytes that a fusion reads of its parameters."""
  total = 0
  for parameter in fused.instructions.values():
    if parameter.opcode != 'parameter':
      continue
    uses = list(_uses(fused, parameter.name))
    whole = _result_bytes(parameter)
    slices = [user for user, _ in uses if user.opcode in _SLICES]
    updates = [user for user, name in uses if _is_updated(user, name)]
    if uses and len(slices) + len(updates) == len(uses):
      total += min(whole, sum(map(_result_bytes, slices)))
    else:
      total += whole
  return total


def _uses(fused: Computation, name: str) -> Iterator[tuple[Instruction, str]]:
  """Yields (instruction that uses the value of `name`, name of its operand)."""
  waiting = collections.deque([name])
  while waiting:
    operand = waiting.popleft()
    for user in fused.users.get(operand, ()):
      if user.opcode in (*SAME_VALUE, 'transpose') and user.name in fused.users:
        waiting.append(user.name)
      else:
        yield user, operand


def _is_updated(user: Instruction, operand: str) -> bool:
  return user.opcode == _UPDATE and user.operands[0] == operand


def _written_by(fused: Computation) -> int:
  root = fused.instructions[fused.root]
  outputs: Sequence[str] = root.operands if root.opcode == 'tuple' else (root.name,)
  total = 0
  for name in outputs:
    origin = fused.origin(name)
    if origin is not None and origin.opcode == _UPDATE:
      origin = fused.instructions[origin.operands[1]]
      total += _result_bytes(origin)
    else:
      total += _result_bytes(fused.instructions[name])
  return total
