"""The sharding of a run and the traffic of its step, split by XLA for simulated devices.

`make_plan` gives a `ShardingPlan`, shown as text or JSON. `gpu_text` and `gpu_json` show a step
compiled for GPUs instead.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.compiled.collectives import Collective, flops_per_device, inventory, partitioned_hlo
from t5x_gpu.compiled.hlo_text import Array
from t5x_gpu.compiled.kernels import KERNEL_KINDS, KernelCount
from t5x_gpu.compiled.traffic import KernelTraffic, Traffic
from t5x_gpu.partitioning import array_layout
from t5x_gpu.partitioning.array_layout import ArrayLayout, part_held, state_layouts
from t5x_gpu.partitioning.mesh_sizes import MeshSizes
from t5x_gpu.runtime.main_log import silent
from t5x_gpu.runtime.topology import Device
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.terminal.console import mib, show, table
from t5x_gpu.tools.planning.gpu_compile import CompiledStep
from t5x_gpu.tools.planning.sharding_lint import PURPOSES, Finding, ParameterShapes, lint, purpose
from t5x_gpu.training.program import Program, size_line

MAX_DEVICES_DRAWN = 32
_LETTERS = 'abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789'


def device_picture(
  arrays: Sequence[ArrayLayout],
  sizes: MeshSizes,
  devices: Sequence[Mapping[str, int]],
  *,
  what: str = 'parameter',
) -> str:
  """Returns a column per device: its position on the mesh, and its part of each array.

  Devices with the same letter hold the same part. Arrays with the same layout share a line.

  Args:
    arrays: layouts.
    sizes: sizes of the mesh.
    devices: position (mesh axis -> index) of each device, host after host.
    what: word for an array.
  """
  shown = devices[:MAX_DEVICES_DRAWN]
  per_host = math.prod(sizes.ici.values())

  def line(cells: Sequence[object]) -> str:
    width = max(len(str(cell)) for cell in cells)
    return ' | '.join(
      ' '.join(f'{cells[i]!s:>{width}}' for i in range(start, min(start + per_host, len(cells))))
      for start in range(0, len(cells), per_host)
    )

  rows = []
  if sizes.num_devices > per_host:
    rows.append(('host', line([i // per_host for i in range(len(shown))]), ''))
  rows += [
    (axis, line([place[axis] for place in shown]), '')
    for axis, size in sizes.total.items()
    if size > 1
  ]
  alike = collections.defaultdict(list)
  for array in arrays:
    held = [part_held(array, place, sizes.total) for place in shown]
    alike[tuple(held.index(part) for part in held), math.prod(array.parts)].append(array.name)
  for (firsts, parts), names in alike.items():
    letters = {first: _LETTERS[i % len(_LETTERS)] for i, first in enumerate(dict.fromkeys(firsts))}
    rows.append(
      (
        '1 part' if parts == 1 else f'{parts} parts',
        line([letters[first] for first in firsts]),
        f'{len(names)} {what}{"s" * (len(names) > 1)}: {_listed(names)}',
      )
    )
  more = len(devices) - len(shown)
  return table([('device', line([i % 10 for i in range(len(shown))]), ''), *rows]) + (
    f'\n({more} more devices)' if more else ''
  )


def _listed(names: Sequence[str], *, width: int = 60) -> str:
  text = ', '.join(names)
  if len(text) <= width:
    return text
  kept = text[:width].rsplit(', ', 1)[0]
  return f'{kept}, ...'


@dataclasses.dataclass(frozen=True)
class TrafficRow:
  """Collectives of one kind over the same axes for the same purpose.

  Attributes:
    purpose, kind, axes: the same for all these collectives.
    link: 'inside a host' or 'network'.
    count: number of runs in a step.
    num_bytes: bytes that a device sends for them in a step.
    flags: why the count is uncertain, or ''.
    largest: the collective that sends the most bytes.
  """

  purpose: str
  kind: str
  axes: tuple[str, ...]
  link: str
  count: int
  num_bytes: int
  flags: str
  largest: Collective


def traffic(
  collectives: Sequence[Collective], parameters: Sequence[ArrayLayout], sizes: MeshSizes
) -> list[TrafficRow]:
  """Returns the traffic of a step, summed by purpose, kind and axes; most bytes first."""
  shapes = ParameterShapes(parameters, sizes.total)
  groups = collections.defaultdict(list)
  for c in collectives:
    groups[purpose(c, shapes), c.kind, c.axes].append(c)
  rows = []
  for (use, kind, axes), members in groups.items():
    flags = ['some in branches'] * any(c.in_branch for c in members)
    flags += ['loops of unknown length'] * any(c.unknown_count for c in members)
    rows.append(
      TrafficRow(
        use,
        kind,
        axes,
        'network' if any(map(sizes.crosses_hosts, axes)) else 'inside a host',
        sum(c.count for c in members),
        sum(c.bytes_per_call for c in members),
        ', '.join(flags),
        max(members, key=lambda c: c.bytes_per_call),
      )
    )
  return sorted(rows, key=lambda row: (-row.num_bytes, PURPOSES.index(row.purpose)))


def traffic_table(rows: Sequence[TrafficRow]) -> str:
  """Returns one line per row and the sums per link."""
  if not rows:
    return 'no collectives: the devices exchange nothing'
  lines = [('purpose', 'kind', 'mesh axis', 'link', 'per step', 'MiB/device', 'largest')]
  for r in rows:
    shape = ' x '.join(map(str, r.largest.shape))
    flags = f' ({r.flags})' if r.flags else ''
    lines.append(
      (
        r.purpose,
        r.kind,
        '+'.join(r.axes),
        r.link,
        f'{r.count:,}',
        mib(r.num_bytes),
        f'{r.largest.dtype}[{shape}] {place(r.largest.op_name)}{flags}',
      )
    )
  links = collections.Counter()
  for r in rows:
    links[r.link] += r.num_bytes
  return (
    table(lines, right=(4, 5))
    + '\nper device and step: '
    + ', '.join(
      f'{mib(num_bytes)} MiB {"over the network" if link == "network" else link}'
      for link, num_bytes in links.most_common()
    )
  )


def place(op_name: str) -> str:
  """Returns the end of a path, 'mlp/wo/dot_general', after 'backward' if it is in that pass."""
  words = [
    word
    for word in op_name.split('/')
    if word not in ('body', 'closed_call', 'while') and '(' not in word
  ]
  return ('backward ' if 'transpose(' in op_name else '') + '/'.join(words[-3:])


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
  """The sharding of a run and the cost of its step, known before it starts.

  Attributes:
    program: the model on its mesh.
    parameters, optimizer: layout of each array.
    collectives: collectives of a training step.
    flops_per_device: FLOPs of a step's matrix products.
    findings: possible problems.
  """

  program: Program
  parameters: Sequence[ArrayLayout]
  optimizer: Sequence[ArrayLayout]
  collectives: Sequence[Collective]
  flops_per_device: int
  findings: Sequence[Finding]


@silent()  # would print kernel choices for simulated devices
def make_plan(program: Program) -> ShardingPlan:
  """Returns the plan of a program on simulated devices; compiles its training step."""
  hlo = partitioned_hlo(program.train_step.lower(program.abstract_state, program.abstract_batch))
  collectives = inventory(hlo, program.layout.mesh.shape)
  parameters, optimizer = state_layouts(program.abstract_state, program.names)
  return ShardingPlan(
    program,
    parameters,
    optimizer,
    collectives,
    flops_per_device(hlo),
    lint(program, collectives=collectives),
  )


def layout_text(program: Program) -> str:
  """Returns the mesh, the layout of every parameter, and which device holds which part."""
  parameters, optimizer = state_layouts(program.abstract_state, program.names)
  mesh = program.layout.mesh
  number = {device: i for i, device in enumerate(_in_host_order(program))}
  places: list[dict[str, int]] = [{} for _ in number]
  for place, device in np.ndenumerate(mesh.devices):
    places[number[device]] = dict(zip(mesh.axis_names, place))
  parts = [
    program.layout.table(),
    f'{size_line(program)}\n{local_checkpoints_line(program)}',
    array_layout.parameter_table(parameters, optimizer),
    'Which part each device holds (the same letter: the same part)\n'
    + device_picture(parameters, program.layout.sizes, places),
  ]
  apart = array_layout.split_apart(parameters, optimizer)
  if apart:
    parts.append(
      'The same for the optimizer state\n'
      + device_picture(apart, program.layout.sizes, places, what='array')
    )
  return '\n\n'.join(parts)


def local_checkpoints_line(program: Program) -> str:
  """Returns the size of local checkpoints of the run (docs/checkpoints.md#local-checkpoints)."""
  topology = program.layout.topology
  host = {
    device: f'host {i // topology.devices_per_host}'
    for i, device in enumerate(_in_host_order(program))
  }
  names = tuple(dict.fromkeys(host.values()))
  hosts = Hosts(names, names, lambda device: names.index(host[device]))
  return f'local checkpoints would take {plan_copies(program.abstract_saved, hosts).words(hosts)}'


def _in_host_order(program: Program) -> list[Device]:
  """Returns the devices of the mesh by their number: host after host."""
  return sorted(program.layout.mesh.devices.reshape(-1), key=lambda device: device.id)


def traffic_text(plan: ShardingPlan) -> str:
  """Returns the traffic and computation of a step, and the findings of the lint."""
  rows = traffic(plan.collectives, plan.parameters, plan.program.layout.sizes)
  lines = [
    'What a training step sends',
    traffic_table(rows),
    f'matrix products per device and step: {plan.flops_per_device / 1e9:,.3f} GFLOP',
    '',
  ]
  if plan.findings:
    lines += [
      f'{len(plan.findings)} finding{"s" * (len(plan.findings) > 1)}:',
      *map(str, plan.findings),
    ]
  else:
    lines.append(
      'No findings: the layout splits what it can; every gather and reduction has a known purpose.'
    )
  return '\n'.join(lines)


def as_json(plan: ShardingPlan) -> JsonObject:
  """Returns the plan for JSON."""
  shapes = ParameterShapes(plan.parameters, plan.program.layout.sizes.total)
  return {
    **layout_json(plan.program),
    'flops_per_device': plan.flops_per_device,
    'collectives': [
      {**dataclasses.asdict(c), 'purpose': purpose(c, shapes), 'bytes_per_step': c.bytes_per_call}
      for c in plan.collectives
    ],
    'findings': [dataclasses.asdict(finding) for finding in plan.findings],
  }


def layout_json(program: Program) -> JsonObject:
  """Returns the sharding, as far as it is known before the step is compiled."""
  sizes = program.layout.sizes
  parameters, optimizer = state_layouts(program.abstract_state, program.names)

  def arrays(layouts: Sequence[ArrayLayout]) -> list[JsonObject]:
    return [
      {**dataclasses.asdict(a), 'bytes': a.num_bytes, 'bytes_per_device': a.bytes_per_device}
      for a in layouts
    ]

  return {
    'num_devices': sizes.num_devices,
    'num_params': program.num_params,
    'mesh': {
      axis: {'size': size, 'inside_a_host': sizes.ici[axis], 'across_hosts': sizes.dcn[axis]}
      for axis, size in sizes.total.items()
    },
    'parameters': arrays(parameters),
    'optimizer': arrays(optimizer),
    'bytes_per_device': {
      'parameters': sum(a.bytes_per_device for a in parameters),
      'optimizer': sum(a.bytes_per_device for a in optimizer),
    },
  }


@dataclasses.dataclass(frozen=True)
class ElementwiseRow:
  """Elementwise kernels of a step with the same place in the model and the same result.

  Attributes:
    place: the end of their path, as `place`.
    result: type and shape of the first array that they write, 'bf16[4 x 4096 x 8192]'.
    runs: number of runs in a step.
    num_bytes: bytes that all runs read and write.
  """

  place: str
  result: str
  runs: int
  num_bytes: int


def elementwise_rows(kernels: Sequence[KernelTraffic]) -> list[ElementwiseRow]:
  """Returns the kernels of a step that multiply no matrices, most bytes first."""
  groups: dict[tuple[str, Array], list[KernelTraffic]] = collections.defaultdict(list)
  for kernel in kernels:
    if not kernel.multiplies:
      name = place(kernel.op_name) or kernel.instruction.opcode
      groups[name, kernel.instruction.arrays[0]].append(kernel)
  rows = [
    ElementwiseRow(
      name,
      str(array),
      sum(kernel.runs for kernel in members),
      sum(kernel.num_bytes for kernel in members),
    )
    for (name, array), members in groups.items()
  ]
  return sorted(rows, key=lambda row: -row.num_bytes)


# Rows of elementwise kernels that `gpu_text` shows.
_SHOWN = 8


def _elementwise(step: CompiledStep) -> str:
  rows = elementwise_rows(step.kernel_traffic)
  lines = [('elementwise kernels', 'result', 'per step', 'GB', 'ms, at least')]
  for row in rows[:_SHOWN]:
    least = row.num_bytes / step.gpus.target.memory_bandwidth
    gigabytes = f'{row.num_bytes / 1e9:.2f}'
    lines.append((row.place, row.result, f'{row.runs:,}', gigabytes, f'{1e3 * least:.2f}'))
  return table(lines, right=(2, 3, 4))


def gpu_text(step: CompiledStep) -> str:
  """Returns memory, kernels and their traffic, and what is sent with its overlap, for one GPU."""
  target = step.gpus.target
  return '\n'.join(
    [
      f'Compiled for {step.gpus.topology.num_devices} x {target.device_kind} '
      f'({step.gpus.topology}), {step.compile_seconds:.0f} s',
      _memory(step),
      'matrix kernels: '
      + '; '.join(_count(kind, n) for kind, n in step.kernels.items() if n.calls),
      _traffic(step.traffic),
      _sent(step),
      '',
      _elementwise(step),
    ]
  )


def _memory(step: CompiledStep) -> str:
  memory, available = step.memory, step.gpus.target.memory_bytes
  return (
    f'memory per GPU: {show(memory.total_bytes, GiB=".2f")} of {show(available, GiB=".2f")} '
    f'({"fits" if memory.total_bytes <= available else "DOES NOT FIT"}), NCCL not counted: '
    f'arguments {show(memory.argument_bytes, GiB=".2f")}, '
    f'temporaries {show(memory.temporary_bytes, GiB=".2f")}, '
    f'outputs {show(memory.output_bytes, GiB=".2f")}'
  )


def _count(kind: str, number: KernelCount) -> str:
  calls = f'{number.calls} call{"" if number.calls == 1 else "s"}'
  return f'{kind} {number.runs:,} per step ({calls} in the program)'


def _traffic(t: Traffic) -> str:
  return (
    f'read and written per step: {show(t.other_bytes, GB=".1f")} by elementwise kernels '
    f'({show(t.copied_bytes, GB=".1f")} by copies), {show(t.matmul_bytes, GB=".1f")} by matrix '
    f'kernels; {t.kernels:,} kernels'
  )


def _sent(step: CompiledStep) -> str:
  rows = [('kind', 'mesh axis', 'MiB/GPU and step', 'behind a matrix kernel')]
  rows += [(o.kind, '+'.join(o.axes), mib(o.num_bytes), f'{o.share:.0%}') for o in step.overlaps]
  return table(rows, right=(2, 3)) if step.overlaps else 'no collectives: the GPUs exchange nothing'


def gpu_json(step: CompiledStep) -> JsonObject:
  """Returns the contents of `gpu_text` for JSON; kernels as in `kernels.KERNEL_KINDS`."""
  memory = step.memory
  return {
    'gpu': step.gpus.target.name,
    'num_hosts': step.gpus.topology.num_hosts,
    'gpus_per_host': step.gpus.topology.devices_per_host,
    'argument_bytes': memory.argument_bytes,
    'temporary_bytes': memory.temporary_bytes,
    'output_bytes': memory.output_bytes,
    'kernels': {kind: dataclasses.asdict(step.kernels[kind]) for kind in KERNEL_KINDS},
    'traffic': dataclasses.asdict(step.traffic),
    'sent': {
      f'{o.kind} {"+".join(o.axes)}': {'bytes': o.num_bytes, 'hidden_bytes': o.hidden_bytes}
      for o in step.overlaps
    },
  }
