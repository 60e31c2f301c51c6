"""Where the time of a step goes: input wait, dispatch, compute, exposed communication, idle.

`read_trace` gives the operations of a profiler trace, `ProgramOps` the place of each instruction in
the model, and `anatomy` puts both together. `Anatomy.to_json` is the content of
MODEL_DIR/profiles/<step>/anatomy.json (docs/monitor.md). Communication is exposed while a device
sends or receives and computes nothing.
"""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.collectives import COLLECTIVE_KINDS, collectives_of
from t5x_gpu.errors import DataError

Interval = tuple[float, float]  # begin, end


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """Returns disjoint intervals in order that cover the same time."""
  merged: list[Interval] = []
  for start, end in sorted(intervals):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    elif end > start:
      merged.append((start, end))
  return merged


def length(intervals: Iterable[Interval]) -> float:
  """Returns the length of disjoint intervals."""
  return sum(end - start for start, end in intervals)


def without(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
  """Returns the parts of disjoint, ordered `intervals` that are not in `others`."""
  rest: list[Interval] = []
  taken = list(others)
  first = 0
  for start, end in intervals:
    while first < len(taken) and taken[first][1] <= start:
      first += 1
    at, i = start, first
    while i < len(taken) and taken[i][0] < end:
      if taken[i][0] > at:
        rest.append((at, taken[i][0]))
      at = max(at, taken[i][1])
      i += 1
    if at < end:
      rest.append((at, end))
  return rest


_CONTROL = ('while', 'call', 'conditional')  # only the operations inside are counted
_COLLECTIVE_NAME = re.compile('|'.join(COLLECTIVE_KINDS))
_NCCL = re.compile(r'nccl\w*?_(AllGather|AllReduce|ReduceScatter|SendRecv|AllToAll)')
_NCCL_KINDS = {
  'AllGather': 'all-gather',
  'AllReduce': 'all-reduce',
  'ReduceScatter': 'reduce-scatter',
  'SendRecv': 'collective-permute',
  'AllToAll': 'all-to-all',
}


@dataclasses.dataclass(frozen=True)
class ProgramOp:
  """One instruction.

  Attributes:
    kind: opcode; for a collective one of COLLECTIVE_KINDS.
    op_name: path in the traced Python program.
    is_collective: whether it sends data between devices.
    axes: mesh axes over which it sends.
    bytes_sent: bytes sent by each device per run, in a ring.
  """

  kind: str
  op_name: str = ''
  is_collective: bool = False
  axes: tuple[str, ...] = ()
  bytes_sent: int = 0


class ProgramOps:
  """The instructions of a step by name.

  Args:
    hlo: `compiled.as_text()`.
    mesh_shape: mesh axis -> size.
  """

  def __init__(self, hlo: str, mesh_shape: Mapping[str, int]):
    self._ops: dict[str, ProgramOp] = {}
    self._by_kernel: dict[str, ProgramOp] = {}
    module = hlo_text.parse(hlo)
    for visit in module.walk():
      instruction = visit.instruction
      if instruction.name in self._ops:
        continue
      sent = collectives_of(module, visit, mesh_shape)
      kind = instruction.opcode.removesuffix('-start')
      op = self._ops[instruction.name] = ProgramOp(
        kind=sent[0].kind if sent else kind,
        op_name=visit.op_name,
        is_collective=kind in COLLECTIVE_KINDS,
        axes=sent[0].axes if sent else (),
        bytes_sent=sum(collective.bytes_per_device for collective in sent),
      )
      if kind == 'fusion':
        self._by_kernel.setdefault(instruction.kernel, op)

  def find(self, name: str) -> ProgramOp | None:
    """Returns the instruction of an operation in a trace; None for control flow."""
    op = self._ops.get(name) or self._by_kernel.get(name)
    if op is None:  # a kernel without a known instruction
      nccl = _NCCL.search(name)
      named = _COLLECTIVE_NAME.match(name)
      kind = _NCCL_KINDS[nccl.group(1)] if nccl else named.group() if named else ''
      return ProgramOp(kind=kind or 'kernel', is_collective=bool(kind))
    return None if op.kind in _CONTROL else op


# A trace contains XLA's own events, which name the HLO instruction: kernels and copies on the
# streams of a GPU, thunks of the CPU client. `jax.profiler.ProfileData` parses the file.
_GPU_PLANE = re.compile(r'/device:GPU:(\d+)')
_STREAM = 'Stream'  # other lines of a GPU are derived from these
_GRAPH = 'command_buffer'  # a CUDA graph, which XLA names in place of each kernel's instruction
_END = 'end: '  # of a CPU operation that another thread finished


@dataclasses.dataclass(frozen=True)
class Operation:
  """One run of an HLO instruction.

  Attributes:
    device: local number of the device.
    name: name of the instruction, or of the kernel if the trace does not name an instruction.
    start_ns, end_ns: nanoseconds since the trace began.
  """

  device: int
  name: str
  start_ns: float
  end_ns: float


def trace_file(folder: pathlib.Path) -> pathlib.Path:
  """Returns the newest trace under `folder`; raises DataError if there is none."""
  found = sorted(folder.rglob('*.xplane.pb'), key=lambda path: path.stat().st_mtime)
  if not found:
    raise DataError(f'{folder} has no trace (*.xplane.pb).')
  return found[-1]


def read_trace(folder: pathlib.Path, *, module: Optional[str] = None) -> list[Operation]:
  """Returns the operations of a trace, ordered by start.

  Args:
    folder: folder that was passed to `jax.profiler.start_trace`.
    module: keeps only the operations of this HLO module ('jit_train_step').
  Raises:
    DataError: there is no trace, or it cannot be read.
  """
  path = trace_file(folder)
  try:
    planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    operations = [operation for plane in planes for operation in _operations(plane, module)]
  except (ValueError, RuntimeError) as e:
    raise DataError(f'The trace {path} cannot be read: {e}') from e
  return sorted(operations, key=lambda operation: operation.start_ns)


def _operations(plane: Any, module: Optional[str]) -> Iterator[Operation]:
  gpu = _GPU_PLANE.search(plane.name)
  if gpu:
    for line in plane.lines:
      if line.name.startswith(_STREAM):
        yield from _of_stream(line, int(gpu.group(1)), module)
  elif plane.name.startswith('/host:CPU'):
    yield from _of_cpu(list(plane.lines), module)


def _of_stream(line: Any, device: int, module: Optional[str]) -> Iterator[Operation]:
  for event in line.events:
    stats = dict(event.stats)
    if module is None or stats.get('hlo_module', module) == module:
      name = str(stats.get('hlo_op') or _GRAPH)
      name = event.name if name.startswith(_GRAPH) else name
      yield Operation(device, name, event.start_ns, event.start_ns + event.duration_ns)


def _of_cpu(lines: Sequence[Any], module: Optional[str]) -> Iterator[Operation]:
  """Yields the thunks; a thunk that another thread finishes ends there."""
  started, ends = [], {}
  for line in lines:
    for event in line.events:
      if event.name.startswith(_END):
        ends[dict(event.stats).get('_c')] = event.start_ns
      elif event.duration_ns:
        stats = dict(event.stats)
        if 'hlo_op' in stats and module in (None, stats.get('hlo_module')):
          started.append((event.start_ns, event.duration_ns, stats))
  for start, duration, stats in started:
    end = max(start + duration, ends.get(stats.get('_p'), 0))
    yield Operation(int(stats.get('device_ordinal', 0)), str(stats['hlo_op']), start, end)


VERSION = 1
TOP_OPERATIONS = 20
_NS = 1e-9


@dataclasses.dataclass(frozen=True)
class DeviceTime:
  """Seconds per step, means over the devices of a process.

  Attributes:
    compute: some operation that is not a collective runs.
    exposed_communication: a collective runs and nothing else.
    hidden_communication: a collective runs while other operations do.
    idle: nothing runs.
  """

  compute: float
  exposed_communication: float
  hidden_communication: float
  idle: float


@dataclasses.dataclass(frozen=True)
class TopOperation:
  """All runs of one instruction.

  Attributes:
    name, kind, op_name: see ProgramOp.
    seconds: seconds per step and device.
    share: share of the step.
    runs: runs per step and device.
  """

  name: str
  kind: str
  op_name: str
  seconds: float
  share: float
  runs: float


@dataclasses.dataclass(frozen=True)
class MeasuredCollectives:
  """All collectives of one kind over the same mesh axes.

  Attributes:
    kind, axes: kind and mesh axes of the collectives.
    seconds: seconds per step and device.
    bytes: bytes that each device sends per step, in a ring; 0 if unknown.
    gb_per_second: bytes per second / 1e9, the bus bandwidth of NCCL's tests.
    runs: runs per step and device.
  """

  kind: str
  axes: tuple[str, ...]
  seconds: float
  bytes: float
  gb_per_second: Optional[float]
  runs: float


@dataclasses.dataclass(frozen=True)
class Anatomy:
  """The anatomy of the steps `first_step` to `last_step`.

  Attributes:
    seconds_per_step: mean, without saves and evaluations.
    device_time: times of this process's devices.
    operations: the longest operations, longest first.
    collectives: all collectives, longest first.
  """

  seconds_per_step: float
  device_time: DeviceTime
  operations: tuple[TopOperation, ...]
  collectives: tuple[MeasuredCollectives, ...]

  def to_json(
    self, *, parts: Mapping[str, float], facts: Mapping[str, Any], ranks: Sequence[Any]
  ) -> dict[str, Any]:
    """Returns the content of anatomy.json.

    Args:
      parts: additional parts in seconds per step: 'input_wait', 'dispatch', 'save', 'eval'.
      facts: additional top-level fields: steps, reason, devices, speed.
      ranks: the device time of each process.
    """
    return {
      'version': VERSION,
      **facts,
      'seconds_per_step': self.seconds_per_step,
      'parts': {**parts, **dataclasses.asdict(self.device_time)},
      'operations': [dataclasses.asdict(operation) for operation in self.operations],
      'collectives': [dataclasses.asdict(collective) for collective in self.collectives],
      'ranks': list(ranks),
    }


def anatomy(
  operations: Sequence[Operation], ops: ProgramOps, *, num_steps: int, seconds_per_step: float
) -> Anatomy:
  """Returns the anatomy of `num_steps` steps.

  Args:
    operations: operations of a trace.
    ops: the instructions of the step.
    num_steps: steps in the trace.
    seconds_per_step: mean duration as measured by the run.
  """
  found = [(o, op) for o in operations if (op := ops.find(o.name)) is not None]
  num_devices = max(1, len({o.device for o, _ in found}))
  per_step = 1 / (num_steps * num_devices)
  seconds: collections.Counter[str] = collections.Counter()
  runs: collections.Counter[str] = collections.Counter()
  kinds: dict[str, ProgramOp] = {}
  for operation, op in found:
    seconds[operation.name] += (operation.end_ns - operation.start_ns) * _NS * per_step
    runs[operation.name] += 1
    kinds[operation.name] = op
  top = tuple(
    TopOperation(
      name,
      kinds[name].kind,
      kinds[name].op_name,
      time,
      time / seconds_per_step if seconds_per_step else 0.0,
      runs[name] * per_step,
    )
    for name, time in seconds.most_common(TOP_OPERATIONS)
  )
  collectives = _collectives(
    {n: seconds[n] for n in seconds}, {n: runs[n] * per_step for n in runs}, kinds
  )
  return Anatomy(
    seconds_per_step, _device_time(found, num_steps, seconds_per_step), top, collectives
  )


def _collectives(
  seconds: Mapping[str, float], runs: Mapping[str, float], kinds: Mapping[str, ProgramOp]
) -> tuple[MeasuredCollectives, ...]:
  groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
  for name, op in kinds.items():
    if op.is_collective:
      groups.setdefault((op.kind, op.axes), []).append(name)
  found = []
  for (kind, axes), names in groups.items():
    time = sum(seconds[name] for name in names)
    sent = sum(kinds[name].bytes_sent * runs[name] for name in names)
    found.append(
      MeasuredCollectives(
        kind=kind,
        axes=axes,
        seconds=time,
        bytes=sent,
        gb_per_second=sent / time / 1e9 if sent and time else None,
        runs=sum(runs[name] for name in names),
      )
    )
  return tuple(sorted(found, key=lambda c: -c.seconds))


def _device_time(
  found: Sequence[tuple[Operation, ProgramOp]], num_steps: int, seconds_per_step: float
) -> DeviceTime:
  by_device: dict[int, tuple[list[Interval], list[Interval]]] = {}
  for operation, op in found:
    compute, sends = by_device.setdefault(operation.device, ([], []))
    (sends if op.is_collective else compute).append((operation.start_ns, operation.end_ns))
  count = max(1, len(by_device)) * num_steps
  computes = exposed = hidden = 0.0
  for compute, sends in by_device.values():
    busy, sending = union(compute), union(sends)
    alone = length(without(sending, busy))
    computes += length(busy)
    exposed += alone
    hidden += length(sending) - alone
  computes, exposed, hidden = (x * _NS / count for x in (computes, exposed, hidden))
  return DeviceTime(computes, exposed, hidden, max(0.0, seconds_per_step - computes - exposed))
