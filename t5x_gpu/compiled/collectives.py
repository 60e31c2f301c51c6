"""The collectives of a compiled function: kind, mesh axes, bytes and how often each runs.

    hlo = partitioned_hlo(program.train_step.lower(program.abstract_state, program.abstract_batch))
    found = inventory(hlo, program.layout.mesh.shape)
    sum(c.bytes_per_call for c in found if 'fsdp' in c.axes), flops_per_device(hlo)

The program is read right after XLA's SPMD partitioner, which treats CPUs and GPUs alike. Later CPU
passes turn bfloat16 into float32 and never create a reduce-scatter.
"""

import contextlib
import dataclasses
import math
import pathlib
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Optional

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.hlo_text import Array, Computation, Instruction, Module, Visit


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
  """Returns the groups [groups, devices per group] of a collective; pairs for a permutation.

  Args:
    attributes: the text after the operands. XLA prints groups in four ways: {{0,1},{2,3}};
      [2,2]<=[2,2]T(1,0); mesh['a'=2,'b'=2] {'b'}; and this last form with
      device_ids=([2,2]T(1,0)).
    num_devices: number of devices in the program; `replica_groups={}` means all of them.
  """
  mesh = re.search(
    r'replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\) )?\s*\{([^}]*)\}', attributes
  )
  if mesh:
    return _mesh_groups(*mesh.groups())
  iota = re.search(r'replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)', attributes)
  if iota:
    return _iota(iota.group(2)).reshape(_numbers(iota.group(1)))
  listed = re.search(r'(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}', attributes)
  if listed and listed.group(1):
    return np.array([_numbers(group) for group in re.findall(r'\{([\d,]+)\}', listed.group(1))])
  return np.arange(num_devices)[None]


def _numbers(text: str) -> list[int]:
  return [int(n) for n in re.findall(r'\d+', text)]


def _iota(text: str) -> np.ndarray:
  """Returns the flat array for '[4,2]T(1,0)': 0 to 7 in this shape, transposed."""
  shape, _, order = text.partition('T')
  numbers = np.arange(math.prod(_numbers(shape))).reshape(_numbers(shape))
  return (numbers.transpose(_numbers(order)) if order else numbers).reshape(-1)


def _mesh_groups(axes: str, device_ids: Optional[str], used: str) -> np.ndarray:
  """Returns the groups that vary over the mesh axes `used`, "'a','b':(2)2" (a part of b)."""
  sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
  number = math.prod(sizes.values())
  if not device_ids:
    devices = np.arange(number)
  elif '[' in device_ids:
    devices = _iota(device_ids)
  else:
    devices = np.array(_numbers(device_ids))
  shape, varying = [], []
  parts = {
    name: (int(before or 1), int(size or sizes[name]))
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", used)
  }
  for name, size in sizes.items():
    before, own = parts.get(name, (size, 1))
    shape += [before, own, size // before // own]
    varying += [False, name in parts, False]
  order = sorted(range(len(shape)), key=lambda i: varying[i])
  group = math.prod(size for size, varies in zip(shape, varying) if varies)
  return devices.reshape(shape).transpose(order).reshape(-1, group)


def varying_axes(groups: np.ndarray, mesh_shape: Mapping[str, int]) -> tuple[str, ...]:
  """Returns the mesh axes along which the devices of a group differ.

  Devices are numbered as in the flattened mesh, whose last axis varies fastest.
  """
  places = np.unravel_index(groups, tuple(mesh_shape.values()))
  return tuple(name for name, place in zip(mesh_shape, places) if (place != place[:, :1]).any())


COLLECTIVE_KINDS = (
  'all-gather',
  'all-reduce',
  'reduce-scatter',
  'all-to-all',
  'collective-permute',
)
# Instructions allowed between an all-reduce and the slice that makes it a reduce-scatter.
_SAME_ELEMENTS = ('copy', 'bitcast', 'convert', 'reshape', 'transpose')

# Compiler options for a program that never runs. They change its machine code alone: the HLO, and
# so kernels, memory and schedule, stay as they are.
NEVER_RUNS = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
# And for a compilation that is only needed for its dump.
_LEAST_EFFORT = {
  **NEVER_RUNS,
  # This CPU pass aborts the process ("Invalid binary instruction opcode copy") for a bfloat16 psum
  # in a shard_map with an automatic axis (jaxlib 0.10.2, 0.11.2).
  'xla_disable_hlo_passes': 'all-reduce-promotion',
}


@dataclasses.dataclass(frozen=True)
class Collective:
  """One collective operation of the program.

  Attributes:
    kind: one of COLLECTIVE_KINDS.
    axes: mesh axes whose devices exchange data, in the order of the mesh.
    dtype, shape: the larger array on one device: the result of an all-gather, else the operand.
    bytes_per_device: bytes that each device sends per run, in a ring: (n - 1) / n of the array,
      twice that for an all-reduce, the whole array for a collective-permute.
    count: number of runs in one call, the product of `trip_counts`.
    trip_counts: iterations of the loops around it, outermost first.
    in_branch: as in `Visit`, so it runs at most `count` times.
    unknown_count: a loop around it has an unknown length, which counts as 1.
    op_name: path in the traced program, 'jit(train_step)/.../mlp/wo/dot_general'.
    source: 'path/file.py:line' of that operation; '' if unknown.
  """

  kind: str
  axes: tuple[str, ...]
  dtype: str
  shape: tuple[int, ...]
  bytes_per_device: int
  count: int = 1
  trip_counts: tuple[int, ...] = ()
  in_branch: bool = False
  unknown_count: bool = False
  op_name: str = ''
  source: str = ''

  @property
  def bytes_per_call(self) -> int:
    """Bytes that each device sends in one call of the function."""
    return self.bytes_per_device * self.count


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
  """Context without the compilation cache: cached programs would not be dumped."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()  # jax reads the setting only once
  try:
    yield
  finally:
    jax.config.update('jax_enable_compilation_cache', before)
    compilation_cache.reset_cache()


def partitioned_hlo(lowered: jax.stages.Lowered) -> str:
  """Returns the program of one device as HLO text, right after XLA's SPMD partitioner.

  Args:
    lowered: from `jax.jit(f).lower(...)` or `OnMesh.lower(...)`. It is compiled with minimal
      optimization; for one device it is only printed, because nothing is partitioned.
  """
  return partitioned(lowered)[0]


def partitioned(lowered: jax.stages.Lowered) -> tuple[str, jax.stages.Compiled]:
  """Returns (`partitioned_hlo`, the compiled program, whose memory is the CPU program's)."""
  with tempfile.TemporaryDirectory(prefix='t5x_gpu_hlo_') as folder:
    with _no_compilation_cache():
      compiled = lowered.compile(
        compiler_options={
          'xla_dump_to': folder,
          'xla_dump_hlo_pass_re': 'spmd-part.*',
          **_LEAST_EFFORT,
        }
      )
    dumps = sorted(pathlib.Path(folder).glob('*.after_spmd-partitioning.*.txt'))
    return dumps[-1].read_text() if dumps else lowered.as_text('hlo'), compiled


def inventory(hlo: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
  """Returns every collective of a program, in program order.

  Collectives with only one device per group are left out. If each device uses only its part of an
  all-reduce, it is listed as a reduce-scatter, because XLA turns it into one on GPUs.

  Args:
    hlo: from `partitioned_hlo`, or the text of a compiled GPU program.
    mesh_shape: mesh axis -> size, in the order of the mesh (`mesh.shape`).
  """
  module = hlo_text.parse(hlo)
  return [
    collective
    for visit in module.walk()
    for collective in collectives_of(module, visit, mesh_shape)
  ]


def collectives_of(module: Module, visit: Visit, mesh_shape: Mapping[str, int]) -> list[Collective]:
  """Returns the collectives of one instruction of `module.walk()`, one per array that it sends."""
  instruction = visit.instruction
  kind = instruction.opcode.removesuffix('-start')
  if kind not in COLLECTIVE_KINDS:
    return []
  num_devices = math.prod(mesh_shape.values())
  groups = replica_groups(instruction.rest, num_devices)
  axes = varying_axes(groups, mesh_shape)
  if not axes:
    return []
  parts = groups.shape[1]
  results = _results(visit.computation, instruction)
  if kind == 'all-to-all' and len(results) > 1:  # one operand for each device
    results = [Array(results[0].dtype, (len(results), *results[0].shape))]
  found = []
  for array in results:
    this = kind
    if kind == 'reduce-scatter':
      array = _gathered(array, instruction, parts)
    elif (
      kind == 'all-reduce'
      and len(results) == 1
      and _only_own_part_used(module, visit.computation, instruction, parts)
    ):
      this = 'reduce-scatter'
    found.append(
      Collective(
        kind=this,
        axes=axes,
        dtype=array.dtype,
        shape=array.shape,
        bytes_per_device=_wire_bytes(this, array.num_bytes, parts),
        count=visit.count,
        trip_counts=visit.trip_counts,
        in_branch=visit.in_branch,
        unknown_count=visit.unknown_count,
        op_name=visit.op_name,
        source=module.source(instruction),
      )
    )
  return found


def _results(computation: Computation, instruction: Instruction) -> list[Array]:
  """Returns the arrays that the collective returns on one device."""
  if not instruction.opcode.endswith('-start'):
    return list(instruction.arrays)
  # Asynchronous: (operands, results, contexts); all-reduce omits the operands.
  operands = [computation.instructions[name] for name in instruction.operands]
  number = sum(len(operand.arrays) for operand in operands)
  if len(instruction.arrays) < 2 * number:
    return list(instruction.arrays[:number])
  return list(instruction.arrays[number : 2 * number])


def _gathered(array: Array, instruction: Instruction, parts: int) -> Array:
  """Returns the operand of a reduce-scatter, given its result."""
  dimension = (instruction.numbers('dimensions') or (0,))[0]
  shape = tuple(size * (parts if i == dimension else 1) for i, size in enumerate(array.shape))
  return Array(array.dtype, shape)


def _wire_bytes(kind: str, num_bytes: int, parts: int) -> int:
  if kind == 'collective-permute':
    return num_bytes
  return (2 if kind == 'all-reduce' else 1) * num_bytes * (parts - 1) // parts


def _only_own_part_used(
  module: Module, computation: Computation, all_reduce: Instruction, parts: int
) -> bool:
  """Returns whether every user slices out 1 / `parts` at an offset computed from the device id."""
  todo = [all_reduce]
  slices = []
  while todo:
    instruction = todo.pop()
    if instruction.name == computation.root:
      return False
    for user in computation.users.get(instruction.name, ()):
      if user.opcode in _SAME_ELEMENTS:
        todo.append(user)
      elif user.opcode == 'dynamic-slice' and user.operands[0] == instruction.name:
        slices.append(user)
      else:
        return False
  size = all_reduce.arrays[0].size
  return bool(slices) and all(
    s.arrays[0].size * parts == size and _depends_on_device(module, computation, s.operands[1:])
    for s in slices
  )


def _depends_on_device(module: Module, computation: Computation, names: Sequence[str]) -> bool:
  seen, todo = set(), list(names)
  while todo:
    name = todo.pop()
    instruction = computation.instructions.get(name)
    if name in seen or instruction is None:
      continue
    seen.add(name)
    if instruction.opcode == 'partition-id' or any(
      inner.opcode == 'partition-id'
      for called in module.called(instruction)
      for inner in module.computations[called].instructions.values()
    ):
      return True
    todo += instruction.operands
  return False


def flops_per_device(hlo: str) -> int:
  """Returns the FLOPs of all matrix products in one call, two per multiply-add.

  Loops count as often as they run; of a conditional, the most expensive branch counts.

  Args:
    hlo: from `partitioned_hlo`.
  """
  module = hlo_text.parse(hlo)
  known: dict[str, int] = {}

  def flops(name: str) -> int:
    if name not in known:
      computation = module.computations[name]
      known[name] = sum(of_instruction(computation, i) for i in computation.instructions.values())
    return known[name]

  def of_instruction(computation: Computation, instruction: Instruction) -> int:
    if instruction.opcode == 'dot':
      left = computation.instructions[instruction.operands[0]].arrays[0].shape
      summed = math.prod(left[i] for i in instruction.numbers('lhs_contracting_dims'))
      return 2 * instruction.arrays[0].size * summed
    if instruction.opcode == 'while':
      return (module.trip_count(computation, instruction) or 1) * flops(module.body(instruction))
    if instruction.opcode == 'conditional':
      return max(map(flops, module.called(instruction)), default=0)
    if instruction.opcode in ('call', 'fusion', 'async-start'):
      return sum(map(flops, module.called(instruction)))
    return 0

  return flops(module.entry)
