"""The kernels of a traced step, next to the time that a plan expects of each and of each kind.

A plan expects of a kernel what it expects of the step: a matrix product takes its FLOPs at the
assumed efficiency, any other kernel its bytes at the assumed speed of memory. Attention is known as
a whole only, because its kernels do not show how many pairs they compute.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Optional

from benchmarks.gpu.parts import Row
from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.kernels import Kernels
from t5x_gpu.compiled.trace import Operation, ProgramOps, anatomy
from t5x_gpu.compiled.traffic import KernelTraffic, kernel_traffic
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.formulas.step_time import StepTime, part_time
from t5x_gpu.tools.planning.formulas.work import Work
from t5x_gpu.tools.planning.gpu_targets import GpuTarget
from t5x_gpu.tools.planning.sharding import place

# Kinds of kernels as in a plan's `Work`, and what is not a kernel that computes.
MATMULS = ('gemm', 'fp8_gemm')
ATTENTION, MEMORY, WAITING, UNKNOWN = 'attention', 'memory', 'waiting', 'unknown'
SLOWEST = 12  # rows of kernels in a result


def traced(
  hlo: str, operations: Sequence[Operation], gpu: Optional[GpuTarget], mesh_shape: Mapping[str, int]
) -> Row:
  """Returns the slowest kernels, and the seconds of all kernels by kind, on the first device.

  Args:
    hlo: the compiled step as text.
    operations: operations of a trace of one step.
    gpu: the card; None if a plan does not know it.
    mesh_shape: mesh axis -> size.
  """
  instructions = ProgramOps(hlo, mesh_shape)
  ours = [o for o in operations if o.device == operations[0].device]
  return {
    'slowest_kernels': slowest_kernels(hlo, ours, instructions, gpu),
    'seconds_by_kind': seconds_by_kind(hlo, ours, instructions),
  }


def slowest_kernels(
  hlo: str, operations: Sequence[Operation], instructions: ProgramOps, gpu: Optional[GpuTarget]
) -> list[Row]:
  """Returns the kernels that take longest, without collectives, which also wait for other GPUs.

  'least_seconds' is the time that the memory of the card needs for the bytes of the kernel; None
  for kernels that multiply matrices. 'plan_seconds' is the time that a plan expects; None for
  attention. Both are None on cards that a plan does not know.
  """
  seconds: collections.Counter[str] = collections.Counter()
  runs: collections.Counter[str] = collections.Counter()
  for operation in operations:
    instruction = instructions.find(operation.name)
    if instruction is not None and not instruction.is_collective:
      seconds[operation.name] += _seconds(operation)
      runs[operation.name] += 1
  # A trace names the instruction. The kernel, which equal fusions share and which may have the name
  # of one of them, stands for the instruction only where that is missing.
  by_instruction, by_kernel = collections.defaultdict(list), collections.defaultdict(list)
  for kernel in kernel_traffic(hlo):
    by_instruction[kernel.instruction.name].append(kernel)
    by_kernel[kernel.instruction.kernel].append(kernel)
  visits = {**by_kernel, **by_instruction}
  products = _products(hlo)
  return [
    {'kernel_seconds': took, 'runs': runs[name], 'place': name, 'result': ''}
    | (_kernel(visits[name], products.get(name), gpu) if name in visits else {})
    for name, took in seconds.most_common(SLOWEST)
  ]


def _kernel(
  visits: Sequence[KernelTraffic], product: Optional[tuple[str, float]], gpu: Optional[GpuTarget]
) -> Row:
  first, num_bytes = visits[0], sum(visit.num_bytes for visit in visits)
  runs = sum(visit.runs for visit in visits)
  kind, flops = product or ('memory', 0.0)
  expected = None
  if gpu is not None and kind != ATTENTION:
    work = Work(part='', kind=kind, flops=runs * flops, num_bytes=num_bytes, runs=runs)
    expected = part_time(work, gpu=gpu, dtype='bfloat16', assumed=Assumptions()).seconds
  return {
    'place': place(first.op_name) or first.instruction.opcode,
    'result': str(first.instruction.arrays[0]),
    'runs': runs,
    'num_bytes': num_bytes,
    'least_seconds': num_bytes / gpu.memory_bandwidth if gpu and not first.multiplies else None,
    'plan_seconds': expected,
  }


def seconds_by_kind(
  hlo: str, operations: Sequence[Operation], instructions: ProgramOps
) -> dict[str, float]:
  """Returns kind of kernel -> seconds of all its runs, and WAITING: only collectives run.

  UNKNOWN: the trace does not name the instruction of a kernel.
  """
  products = _products(hlo)
  found: collections.Counter[str] = collections.Counter()
  for operation in operations:
    instruction = instructions.find(operation.name)
    if instruction is None or instruction.is_collective:
      continue
    kind, _ = products.get(operation.name, (MEMORY, 0.0))
    found[UNKNOWN if instruction.kind == 'kernel' else kind] += _seconds(operation)
  whole = anatomy(operations, instructions, num_steps=1, seconds_per_step=0.0)
  found[WAITING] += whole.device_time.exposed_communication
  return {kind: seconds for kind, seconds in found.items() if seconds}


def planned_by_kind(time: StepTime) -> dict[str, float]:
  """Returns kind of kernel -> seconds that a plan expects of them in a step."""
  found: collections.Counter[str] = collections.Counter()
  for part in time.parts:
    found[part.kind] += part.seconds
  found[WAITING] += time.exposed_seconds
  return {kind: seconds for kind, seconds in found.items() if seconds}


def _seconds(operation: Operation) -> float:
  return (operation.end_ns - operation.start_ns) / 1e9


def _products(hlo: str) -> dict[str, tuple[str, float]]:
  """Returns name of a matrix kernel's instruction -> (kind as in a plan, FLOPs of one run)."""
  module = hlo_text.parse(hlo)
  kernels = Kernels(module)
  found = {}
  for visit in kernels.outside_fusions():
    kind = kernels.kind(visit.computation, visit.instruction)
    if kind is not None:
      flops = kernels.flops(visit.computation, visit.instruction)
      found[visit.instruction.name] = (kind if kind in MATMULS else ATTENTION, flops)
  return found
