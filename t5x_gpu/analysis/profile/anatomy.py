"""Where the time of a step goes: input wait, dispatch, compute, exposed communication, idle.

`Anatomy.to_json` is the content of MODEL_DIR/profiles/<step>/anatomy.json (docs/monitor.md).
Communication is exposed while a device sends or receives and computes nothing.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.analysis.profile.intervals import Interval, length, union, without
from t5x_gpu.analysis.profile.program_ops import ProgramOp, ProgramOps
from t5x_gpu.analysis.profile.trace import Operation

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
