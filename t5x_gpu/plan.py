"""Show what a gin file would do on N GPUs, without one: `python -m t5x_gpu.plan --gpus=64`.

First whether it fits, how fast it is, when it ends and what bounds it; then memory, time and
traffic by part. No data is read and nothing is allocated. XLA compiles the real training step for
GPUs that this machine need not have. `--show sharding` and `--show remat` print more about one
question.
"""

import argparse
import contextlib
import dataclasses
import json
from typing import Any, Optional

from t5x_gpu import cli
from t5x_gpu.analysis import sharding_picture
from t5x_gpu.analysis.array_layout import state_layouts
from t5x_gpu.analysis.collectives import partitioned_hlo
from t5x_gpu.analysis.gpu_compile import CompiledStep, compile_step
from t5x_gpu.analysis.gpu_tables import gpu_json, gpu_text
from t5x_gpu.analysis.remat_costs import remat_costs, remat_json, remat_text
from t5x_gpu.config import gin_loader
from t5x_gpu.models.model import config_of
from t5x_gpu.planning import screen
from t5x_gpu.planning.as_json import prediction_json
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.devices import simulated_devices, topology_of
from t5x_gpu.planning.prediction import PlanConfig, Prediction, predict
from t5x_gpu.planning.progress import doing
from t5x_gpu.planning.sharding import as_json, layout_text, make_plan, traffic_text
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.runtime.xla.deviceless import DescribedGpus, can_compile, described_gpus
from t5x_gpu.runtime.xla.gpu_targets import TARGETS, GpuTarget, find_target
from t5x_gpu.terminal import logging_setup
from t5x_gpu.training.program import Program, program_of_run

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --gpus=64 --gpu=h200
  {prog} --gin_file=my.gin --gpus=64 --show=sharding --out=layout.png
  {prog} --gin_file=my.gin --show=remat --gpu=h100
  {prog} --gin_file=my.gin --gpus=16 --gin.Partitioner.fsdp=4 --json=plan.json

--gin.X=VALUE sets any macro or parameter after the gin files, as in python -m t5x_gpu.train;
--gin.Assumptions.X what a plan assumes about GPUs and links (gin_configs/plan/assumptions.gin).
"""
SHOWN = ('prediction', 'sharding', 'remat')
DEFAULT_GPU = 'h100'
ASSUMPTIONS = 'gin_configs/plan/assumptions.gin'


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('plan')
  group.add_argument(
    '--show',
    choices=SHOWN,
    default='prediction',
    help='prediction (default): fit, speed, bottleneck; sharding: where every array lives, what a '
    'step sends; remat: memory and matrix products of each remat_policy',
  )
  group.add_argument('--gpus', type=int, metavar='N', help='GPUs in all (default: 8)')
  group.add_argument(
    '--gpus_per_host', type=int, metavar='N', help='GPUs of a host (default: 8, or all if fewer)'
  )
  group.add_argument('--devices', type=int, metavar='N', help='the same as --gpus')
  group.add_argument(
    '--hosts', type=int, metavar='N', help='hosts of --devices, in place of --gpus_per_host'
  )
  group.add_argument(
    '--gpu',
    metavar='NAME',
    help=f'which GPU: {", ".join(TARGETS)} (default: {DEFAULT_GPU}; the others --show only compile '
    'for a GPU that is named)',
  )
  group.add_argument('--out', metavar='FILE.png', help='also draw every parameter to FILE.png')
  group.add_argument('--json', metavar='FILE', help='also write everything to FILE')


def _show_remat(
  config: PlanConfig,
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
  _write(json_file, remat_json(costs, current=current))


def _show_sharding(
  config: PlanConfig, program: Program, gpus: Optional[DescribedGpus], json_file: Optional[str]
) -> None:
  """Prints what a step sends; for a GPU, also what XLA compiles for it."""
  plan = make_plan(program)
  print('\n' + traffic_text(plan), flush=True)
  step = compile_step(config, gpus) if gpus else None
  if step:
    print('\n' + gpu_text(step))
  _write(json_file, as_json(plan) | ({'compiled': gpu_json(step)} if step else {}))


def _show_prediction(
  config: PlanConfig,
  program: Program,
  gpu: GpuTarget,
  assumed: Assumptions,
  *,
  dry_run: bool,
  json_file: Optional[str],
) -> None:
  """Prints the prediction, and writes it if `json_file` is given."""
  prediction = _predicted(config, program, gpu, assumed, dry_run=dry_run)
  print(screen.first_screen(prediction))
  print('\n' + screen.tables(prediction), flush=True)
  _write(json_file, prediction_json(prediction))


def _predicted(
  config: PlanConfig, program: Program, gpu: GpuTarget, assumed: Assumptions, *, dry_run: bool
) -> Prediction:
  """Returns the prediction, from the best source that there is."""
  step: Optional[CompiledStep] = None
  hlo: Optional[str] = None
  topology = program.layout.topology
  if not dry_run and can_compile():
    with doing(f'compiling the step for {topology.num_devices} x {gpu.device_kind}'):
      gpus = described_gpus(
        gpu.name, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
      )
      with contextlib.redirect_stdout(None):
        step = compile_step(config, gpus)
  elif not dry_run:
    with doing(f'splitting the step over {topology.num_devices} simulated devices'):
      hlo = partitioned_hlo(
        program.train_step.lower(program.abstract_state, program.abstract_batch)
      )
  return predict(program, config, gpu=gpu, assumed=assumed, compiled=step, partitioned=hlo)


def _write(json_file: Optional[str], content: dict[str, Any]) -> None:
  if json_file:
    with open(json_file, 'w') as f:
      json.dump(content, f, indent=1)


def _draw(program: Program, path: str, title: str) -> None:
  parameters, optimizer = state_layouts(program.abstract_state, program.names)
  sharding_picture.draw(parameters, optimizer, path, title=title)
  print(f'Picture: {path}')


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files and prints the plan; --out draws it, --json writes it."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.plan', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  extra = args.extra
  topology = topology_of(
    gpus=extra.gpus, gpus_per_host=extra.gpus_per_host, devices=extra.devices, hosts=extra.hosts
  )
  gpu = find_target(extra.gpu or DEFAULT_GPU)
  cli.check_folders_of(extra.out, extra.json)
  devices = simulated_devices(topology.num_devices)
  gpus = None
  if extra.gpu and extra.show != 'prediction':
    gpus = described_gpus(
      extra.gpu, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
    )
  loaded = dataclasses.replace(args, gin_files=(ASSUMPTIONS, *args.gin_files)).load(
    entry=(gin_loader.ENTRY, Assumptions)
  )
  config = gin_loader.configured(loaded, PlanConfig)
  assumed = gin_loader.configured(loaded, Assumptions, entry=Assumptions)
  logging_setup.setup()
  program = program_of_run(config, topology=topology, devices=devices)
  if extra.show == 'sharding':
    print(layout_text(program), flush=True)
  else:
    print(program.layout.table(), end='\n\n' if extra.show == 'prediction' else '\n', flush=True)
  if extra.out:
    _draw(program, extra.out, f'{", ".join(args.gin_files)} on {topology}')
  if extra.show == 'prediction':
    _show_prediction(config, program, gpu, assumed, dry_run=args.dry_run, json_file=extra.json)
  elif args.dry_run:
    return 0
  elif extra.show == 'remat':
    _show_remat(config, topology, devices, gpus, extra.json)
  else:
    _show_sharding(config, program, gpus, extra.json)
  return 0


if __name__ == '__main__':
  cli.run_main(main)
