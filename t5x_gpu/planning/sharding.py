"""The sharding of a run and the traffic of its step, split by XLA for simulated devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.analysis import sharding_tables
from t5x_gpu.analysis.array_layout import ArrayLayout, state_layouts
from t5x_gpu.analysis.collectives import Collective, flops_per_device, inventory, partitioned_hlo
from t5x_gpu.analysis.sharding_lint import Finding, ParameterShapes, lint, purpose
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.runtime.cluster.topology import Device
from t5x_gpu.runtime.main_log import silent
from t5x_gpu.training.program import Program
from t5x_gpu.training.summary import size_line


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
def make_plan(program: Program, hlo: Optional[str] = None) -> ShardingPlan:
  """Returns the plan of a program; compiles its training step unless `hlo` is given.

  Args:
    program: program on simulated devices.
    hlo: `partitioned_hlo` of its training step.
  """
  hlo = hlo or partitioned_hlo(
    program.train_step.lower(program.abstract_state, program.abstract_batch)
  )
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
    sharding_tables.parameter_table(parameters, optimizer),
    'Which part each device holds (the same letter: the same part)\n'
    + sharding_tables.device_picture(parameters, program.layout.sizes, places),
  ]
  apart = sharding_tables.split_apart(parameters, optimizer)
  if apart:
    parts.append(
      'The same for the optimizer state\n'
      + sharding_tables.device_picture(apart, program.layout.sizes, places, what='array')
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
  rows = sharding_tables.traffic(plan.collectives, plan.parameters, plan.program.layout.sizes)
  lines = [
    'What a training step sends',
    sharding_tables.traffic_table(rows),
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


def as_json(plan: ShardingPlan) -> dict[str, Any]:
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


def layout_json(program: Program) -> dict[str, Any]:
  """Returns the sharding, as far as it is known before the step is compiled."""
  sizes = program.layout.sizes
  parameters, optimizer = state_layouts(program.abstract_state, program.names)

  def arrays(layouts: Sequence[ArrayLayout]) -> list[dict[str, Any]]:
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
