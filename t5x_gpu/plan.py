"""Show what a gin file would do on N GPUs, without one: `python -m t5x_gpu.plan --show sharding`.

Prints the mesh, the sharding of every parameter, what a step sends over which link, and possible
problems. Nothing is allocated and no data is read: XLA compiles the real training step for N
simulated CPU devices, up to the point where it is split over them. With --gpu, XLA also compiles it
for that GPU, which this machine need not have. `--show remat` compares what layers may store.
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import MutableMapping, Sequence
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu import cli
from t5x_gpu.analysis import sharding_picture, sharding_tables
from t5x_gpu.analysis.array_layout import ArrayLayout, state_layouts
from t5x_gpu.analysis.collectives import Collective, flops_per_device, inventory, partitioned_hlo
from t5x_gpu.analysis.gpu_compile import compile_step
from t5x_gpu.analysis.gpu_tables import gpu_json, gpu_text
from t5x_gpu.analysis.remat_costs import remat_costs, remat_json, remat_text
from t5x_gpu.analysis.sharding_lint import Finding, ParameterShapes, lint, purpose
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.config import gin_loader
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import config_of
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.runtime.xla.deviceless import DescribedGpus, described_gpus
from t5x_gpu.runtime.xla.gpu_targets import TARGETS, find_target
from t5x_gpu.terminal import logging_setup
from t5x_gpu.training.program import Program, program_of_run
from t5x_gpu.training.step_config import StepConfig
from t5x_gpu.training.summary import size_line

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --devices=64 --hosts=8 --out=layout.png
  {prog} --gin_file=my.gin --devices=64 --hosts=8 --gpu=h100
  {prog} --gin_file=my.gin --show remat --gpu=h100
  {prog} --gin_file=my.gin --gin.Partitioner.fsdp=4 --gin.NUM_PARTITIONS=2 --json=plan.json

--gin.X=VALUE sets any macro or parameter after the gin files, as in python -m t5x_gpu.train.
"""
SHOWN = ('sharding', 'remat')
_COUNT_FLAG = '--xla_force_host_platform_device_count'


@dataclasses.dataclass(frozen=True)
class ShardingPlan:
  """The sharding of a run and the cost of its step, known before it starts.

  Attributes:
    program: the model on its mesh.
    parameters, optimizer: layout of each array.
    collectives: of a training step.
    flops_per_device: of a step's matrix products.
    findings: possible problems.
  """

  program: Program
  parameters: Sequence[ArrayLayout]
  optimizer: Sequence[ArrayLayout]
  collectives: Sequence[Collective]
  flops_per_device: int
  findings: Sequence[Finding]


def simulated_devices(number: int, *, environ: MutableMapping[str, str]) -> list[Device]:
  """Returns simulated CPU devices; call it before JAX starts a backend.

  Args:
    number: how many.
    environ: os.environ; its XLA_FLAGS are changed until the backend has started.
  Raises:
    ConfigError: JAX has started with fewer.
  """
  flags = re.sub(rf'{_COUNT_FLAG}=\S*', '', environ.get('XLA_FLAGS', ''))
  before = environ.get('XLA_FLAGS')
  environ['XLA_FLAGS'] = f'{flags} {_COUNT_FLAG}={number}'.strip()
  jax.config.update('jax_platforms', 'cpu')
  try:
    devices = jax.devices()
  finally:
    if before is None:
      del environ['XLA_FLAGS']
    else:
      environ['XLA_FLAGS'] = before
  if len(devices) < number:
    raise ConfigError(
      f'--devices={number}: JAX has already started with {len(devices)}.',
      fix=f'Start the process with XLA_FLAGS={_COUNT_FLAG}={number}.',
    )
  return devices[:number]


def topology_of(num_devices: int, num_hosts: int) -> Topology:
  """Returns the topology of the flags; raises ConfigError if hosts differ in their devices."""
  if num_devices < 1 or num_hosts < 1 or num_devices % num_hosts:
    legal = [n for n in range(1, max(num_devices, 1) + 1) if num_devices % n == 0]
    raise ConfigError(
      f'--devices={num_devices} cannot be divided among --hosts={num_hosts}.',
      fix=f'--devices is the number of all GPUs; --hosts may be {", ".join(map(str, legal))}.'
      if num_devices > 0
      else 'Give --devices of at least 1.',
    )
  return Topology(
    num_hosts, num_devices // num_hosts, reason=f'--devices={num_devices} --hosts={num_hosts}'
  )


def make_plan(program: Program) -> ShardingPlan:
  """Returns the plan of a program; compiles its training step."""
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
  """Returns the size of local checkpoints of the run (docs/checkpoints.md#local-steps)."""
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
  """Returns what a step sends and computes, and the findings of the lint."""
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
  sizes = plan.program.layout.sizes
  shapes = ParameterShapes(plan.parameters, sizes.total)

  def arrays(layouts: Sequence[ArrayLayout]) -> list[dict[str, Any]]:
    return [
      {**dataclasses.asdict(a), 'bytes': a.num_bytes, 'bytes_per_device': a.bytes_per_device}
      for a in layouts
    ]

  return {
    'num_devices': sizes.num_devices,
    'num_params': plan.program.num_params,
    'mesh': {
      axis: {'size': size, 'inside_a_host': sizes.ici[axis], 'across_hosts': sizes.dcn[axis]}
      for axis, size in sizes.total.items()
    },
    'parameters': arrays(plan.parameters),
    'optimizer': arrays(plan.optimizer),
    'bytes_per_device': {
      'parameters': sum(a.bytes_per_device for a in plan.parameters),
      'optimizer': sum(a.bytes_per_device for a in plan.optimizer),
    },
    'flops_per_device': plan.flops_per_device,
    'collectives': [
      {**dataclasses.asdict(c), 'purpose': purpose(c, shapes), 'bytes_per_step': c.bytes_per_call}
      for c in plan.collectives
    ],
    'findings': [dataclasses.asdict(finding) for finding in plan.findings],
  }


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('plan')
  group.add_argument(
    '--show',
    choices=SHOWN,
    default='sharding',
    help='sharding (default), or remat: memory and matrix products of each remat_policy',
  )
  group.add_argument(
    '--devices', type=int, default=8, metavar='N', help='total number of GPUs (default: 8)'
  )
  group.add_argument(
    '--hosts', type=int, default=1, metavar='N', help='number of hosts (default: 1)'
  )
  group.add_argument(
    '--gpu',
    metavar='NAME',
    help=f'also compile the step for this GPU and print memory, kernels and overlap: '
    f'{", ".join(TARGETS)} (needs the extra [plan])',
  )
  group.add_argument('--out', metavar='FILE.png', help='also draw every parameter to FILE.png')
  group.add_argument('--json', metavar='FILE', help='also write everything to FILE')


def _show_remat(
  config: StepConfig,
  topology: Topology,
  devices: list[Device],
  gpus: Optional[DescribedGpus],
  json_file: Optional[str],
) -> None:
  """Prints what each remat policy costs, and writes it if `json_file` is given."""
  costs = remat_costs(
    config,
    lambda changed: program_of_run(changed, topology=topology, devices=devices),
    gpus=gpus or None,
  )
  current = config_of(config.model).remat_policy
  print('\n' + remat_text(costs, current=current, gpu=gpus and gpus.target.device_kind))
  if json_file:
    with open(json_file, 'w') as f:
      json.dump(remat_json(costs, current=current), f, indent=1)


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files and prints the plan; --out draws it, --json writes it."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.plan', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  topology = topology_of(args.extra.devices, args.extra.hosts)
  if args.extra.gpu:
    find_target(args.extra.gpu)
  cli.check_folders_of(args.extra.out, args.extra.json)
  devices = simulated_devices(topology.num_devices, environ=os.environ)
  gpus = args.extra.gpu and described_gpus(
    args.extra.gpu, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
  )
  loaded = args.load()
  config = gin_loader.configured(loaded, StepConfig)
  logging_setup.setup()
  program = program_of_run(config, topology=topology, devices=devices)
  print(program.layout.table() if args.extra.show == 'remat' else layout_text(program), flush=True)
  if args.extra.out:
    parameters, optimizer = state_layouts(program.abstract_state, program.names)
    sharding_picture.draw(
      parameters, optimizer, args.extra.out, title=(f'{", ".join(args.gin_files)} on {topology}')
    )
    print(f'Picture: {args.extra.out}')
  if args.dry_run:
    return 0
  if args.extra.show == 'remat':
    _show_remat(config, topology, devices, gpus, args.extra.json)
    return 0
  plan = make_plan(program)
  print('\n' + traffic_text(plan), flush=True)
  step = compile_step(config, gpus) if gpus else None
  if step:
    print('\n' + gpu_text(step))
  if args.extra.json:
    with open(args.extra.json, 'w') as f:
      json.dump(as_json(plan) | ({'compiled': gpu_json(step)} if step else {}), f, indent=1)
  return 0


if __name__ == '__main__':
  cli.run_main(main)
