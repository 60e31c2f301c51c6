"""The matrix kernels of a program compiled for a GPU: FP8 and other GEMMs, attention kernels.

    count_kernels(compiled.as_text())['fp8_gemm'].runs

`check_fp8_gemms` raises an error if no matmul of a model in FP8 is in FP8.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, Optional

import jax

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.hlo_text import Computation, Instruction, Module, Visit
from t5x_gpu.errors import ModelError
from t5x_gpu.models.model import Model, config_of, uses_fp8

KERNEL_KINDS = {
  'fp8_gemm': 'matrix product of eight-bit floats, by cuBLAS, cuDNN or Triton',
  'gemm': 'matrix product of another type, by cuBLAS or Triton',
  'mosaic': 'Pallas kernel for Hopper or Blackwell (Mosaic)',
  'triton': 'Pallas kernel in Triton',
  'cudnn': 'attention or fused graph of cuDNN',
}
# Targets of custom calls; the first entry that is part of the target's name counts.
_TARGETS = (
  ('$f8', 'fp8_gemm'),
  ('$mx', 'fp8_gemm'),
  ('__cublas$', 'gemm'),
  ('__cutlass', 'gemm'),
  ('__cudnn$blockScaledDot', 'fp8_gemm'),
  ('mosaic_gpu', 'mosaic'),
  ('triton', 'triton'),
  ('__cudnn$', 'cudnn'),
)
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')  # of a call of cuBLAS


@dataclasses.dataclass(frozen=True)
class KernelCount:
  """How often a program calls a kind of kernel.

  Attributes:
    calls: places in the program.
    runs: times per call of the program: places times the iterations of the loops around them.
  """

  calls: int = 0
  runs: int = 0


def count_kernels(hlo: str) -> Mapping[str, KernelCount]:
  """Returns a count for each of `KERNEL_KINDS`.

  Args:
    hlo: `compiled.as_text()` of a program for a GPU.
  """
  return Kernels(hlo_text.parse(hlo)).counts()


def workspace_bytes(hlo: str) -> int:
  """Returns the largest workspace of a library call in a program; 0 if there is none.

  A call of cuBLAS or cuDNN returns its workspace as an additional array of bytes.

  Args:
    hlo: `compiled.as_text()` of a program for a GPU.
  """
  instructions = (
    instruction
    for computation in hlo_text.parse(hlo).computations.values()
    for instruction in computation.instructions.values()
  )
  sizes = (
    array.num_bytes
    for instruction in instructions
    if instruction.opcode == 'custom-call'
    for array in instruction.arrays[1:]
    if array.dtype in ('s8', 'u8')
  )
  return max(sizes, default=0)


class Kernels:
  """The matrix kernels of a module."""

  def __init__(self, module: Module):
    self._module = module
    self._found: dict[str, Optional[str]] = {}  # computation -> its first kind of kernel

  def counts(self) -> Mapping[str, KernelCount]:
    """Returns a count for each of `KERNEL_KINDS`."""
    calls, runs = collections.Counter(), collections.Counter()
    for visit in self.outside_fusions():
      kind = self.kind(visit.computation, visit.instruction)
      if kind:
        calls[kind] += 1
        runs[kind] += visit.count
    return {kind: KernelCount(calls[kind], runs[kind]) for kind in KERNEL_KINDS}

  def kind(self, computation: Computation, instruction: Instruction) -> Optional[str]:
    """Returns an instruction's kind, one of `KERNEL_KINDS`; None for any other instruction."""
    if instruction.opcode == 'custom-call':
      target = instruction.attribute('custom_call_target') or ''
      return next((kind for part, kind in _TARGETS if part in target), None)
    if instruction.opcode == 'dot':
      left = computation.instructions[instruction.operands[0]]
      return 'fp8_gemm' if left.arrays[0].dtype.startswith('f8') else 'gemm'
    if instruction.opcode == 'fusion':
      if '__cudnn$' in instruction.rest:
        return 'cudnn'
      return self._in_called(instruction)
    return None

  def flops(self, computation: Computation, instruction: Instruction) -> float:
    """Returns the FLOPs of the matrix products of one run of an instruction.

    Only of matmuls: the text does not show what attention kernels compute.
    """
    if instruction.opcode == 'dot':
      dimensions = instruction.numbers('lhs_contracting_dims')
    elif library := _CONTRACTED.search(instruction.rest):
      dimensions = tuple(int(number) for number in re.findall(r'\d+', library.group(1)))
    else:
      return math.fsum(
        self.flops(self._module.computations[name], inner)
        for name in self._module.called(instruction)
        for inner in self._module.computations[name].instructions.values()
      )
    left = computation.instructions[instruction.operands[0]].arrays[0].shape
    return 2.0 * instruction.arrays[0].size * math.prod(left[i] for i in dimensions)

  def multiplies(self, instruction: Instruction) -> bool:
    """Returns whether a loop, call, conditional or asynchronous call has a matrix kernel in it."""
    return self._in_called(instruction) is not None

  def _in_called(self, instruction: Instruction) -> Optional[str]:
    """Returns the first kind of kernel that an instruction runs, at any depth."""
    if instruction.opcode == 'while':
      return self._inside(self._module.body(instruction))
    return next(filter(None, map(self._inside, self._module.called(instruction))), None)

  def _inside(self, name: str) -> Optional[str]:
    if name not in self._found:
      computation = self._module.computations[name]
      found = (
        self.kind(computation, i) or self._in_called(i) for i in computation.instructions.values()
      )
      self._found[name] = next(filter(None, found), None)
    return self._found[name]

  def outside_fusions(self) -> Iterator[Visit]:
    """Yields the visits of instructions that are kernels rather than parts of a kernel."""
    fused: set[str] = set()
    for visit in self._module.walk():
      inside = visit.computation.name in fused
      if visit.instruction.opcode == 'fusion' or inside:
        fused.update(self._module.called(visit.instruction))
      if not inside:
        yield visit


def fp8_lines(step: Any, model: Model, mesh: jax.sharding.Mesh) -> list[str]:
  """Returns a log line on how the step of a model in FP8 multiplies; [] for other models.

  All code that compiles a step in order to run it must call this function.

  Args:
    step: the compiled step.
    model: the step's model.
    mesh: the mesh that the step was compiled for.
  Raises:
    ModelError: on GPUs, if no matmul is in FP8.
  """
  if not uses_fp8(model):
    return []
  config = config_of(model)
  line = 'precision: fp8, emulated: this CPU rounds operands to 8 bits, which saves no time'
  if mesh.devices.flat[0].platform != 'cpu':
    line = check_fp8_gemms(step.as_text(), config.fp8_scaling)
  experts = f'; experts are in {config.compute_dtype.__name__}' if config.num_experts else ''
  scales = {
    'delayed': f'; scales from the last {config.fp8_history} steps',
    'mxfp8': '; a scale for every 32 values',
  }
  return [line + experts + scales.get(config.fp8_scaling, '')]


def check_fp8_gemms(hlo: str, scaling: str = 'current') -> str:
  """Returns a log line with the number of FP8 matmuls in a program for a GPU.

  Args:
    hlo: `compiled.as_text()` of a program.
    scaling: TransformerConfig.fp8_scaling.
  Raises:
    ModelError: there are none: the run would be as slow as without FP8, and less precise.
  """
  kernels = count_kernels(hlo)
  fp8, others = kernels['fp8_gemm'].runs, kernels['gemm'].runs
  if not fp8 and scaling == 'mxfp8':
    raise ModelError(
      "TransformerConfig.fp8_scaling = 'mxfp8', but the XLA of jax "
      f"{jax.__version__} multiplies none of the compiled step's {others} matmuls in MXFP8.",
      fix="Set TransformerConfig.fp8_scaling = 'current', or install jax 0.10.2.",
      parameters=('TransformerConfig.fp8_scaling',),
      docs='precision.md#mxfp8',
    )
  if not fp8:
    raise ModelError(
      f"PRECISION = 'fp8', but none of the {others} matmuls of the compiled step is in FP8.",
      fix="Set PRECISION = 'bfloat16'. The layers of a custom model need kernels with the names of "
      'KERNELS in t5x_gpu/models/precision.py.',
      parameters=('TransformerConfig.dtype',),
      docs='precision.md#fp8',
    )
  return f'precision: fp8, in {fp8} of {fp8 + others} matmuls of a step'
