"""Show what a gin file would do on N GPUs, without one: `python -m t5x_gpu.plan --gpus=64`.

First whether it fits, how fast it is, when it ends and what bounds it; then memory, time and
traffic by part. No data is read and nothing is allocated. XLA compiles the real training step for
GPUs that this machine need not have. `--show sharding` and `--show remat` print more about one
question.
"""

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any, Optional

from t5x_gpu import cli
from t5x_gpu.analysis import sharding_picture
from t5x_gpu.analysis.array_layout import state_layouts
from t5x_gpu.analysis.gpu_compile import compile_step
from t5x_gpu.analysis.gpu_tables import gpu_json, gpu_text
from t5x_gpu.analysis.remat_costs import remat_costs, remat_json, remat_text
from t5x_gpu.config import gin_loader
from t5x_gpu.config.atomic_write import atomic_write
from t5x_gpu.errors import ConfigError, UserError
from t5x_gpu.models.model import config_of
from t5x_gpu.planning import remedies, scaling, screen
from t5x_gpu.planning.as_json import prediction_json
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.calibration import Calibration, calibrated
from t5x_gpu.planning.devices import simulated_devices, topology_of
from t5x_gpu.planning.page.plan_page import plan_page
from t5x_gpu.planning.planner import Planner
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.planning.sharding import as_json, layout_text, make_plan, traffic_text
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.runtime.xla.deviceless import DescribedGpus, described_gpus
from t5x_gpu.runtime.xla.gpu_targets import TARGETS, find_target
from t5x_gpu.terminal import logging_setup
from t5x_gpu.training.program import Program, program_of_run

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --gpus=64 --gpu=h200 --scale=8,64,512 --html=plan.html
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
  group.add_argument(
    '--scale', metavar='N,N,...', help='also predict, by formula, these numbers of GPUs'
  )
  group.add_argument(
    '--what_if',
    metavar='NAME=V,V',
    help='also predict, by formula, other GPUs (gpu=h100,b200) or values of a gin macro or '
    'parameter (BATCH_SIZE=64,128)',
  )
  group.add_argument(
    '--calibrate',
    metavar='FILE',
    help='results.json of scripts/bench_gpu.sh: measured efficiencies in place of the defaults; '
    'none: not those of this GPU that are in benchmarks/results either',
  )
  group.add_argument('--out', metavar='FILE.png', help='also draw every parameter to FILE.png')
  group.add_argument('--json', metavar='FILE', help='also write everything to FILE')
  group.add_argument(
    '--html', metavar='FILE.html', help='also write the prediction as one page with charts'
  )


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
  planner: Planner,
  args: cli.Args,
  measured: Optional[Calibration],
) -> None:
  """Prints the prediction and what the flags ask of it, and writes it if --json is given."""
  extra, topology = args.extra, program.layout.topology
  predicted = planner.by_formula if args.dry_run else planner.exactly
  prediction = predicted(config, topology)
  print(screen.first_screen(prediction))
  content = prediction_json(prediction)
  advice, scaled = '', None
  if not prediction.memory.fits:
    compiled = planner.exactly if planner.compiles and not args.dry_run else None
    found, advice = remedies.advice(
      config, topology, prediction, by_formula=planner.by_formula, compiled=compiled
    )
    print('\n' + advice)
    content['remedies'] = [
      {'settings': r.change.settings, 'prediction': prediction_json(r.prediction)} for r in found
    ]
  if extra.scale:
    scaled = _scaled(config, topology, planner, scaling.numbers(extra.scale, '--scale'))
    print(f'\nOn other numbers of GPUs, rows per GPU as now\n{scaling.scale_table(scaled)}')
    content['scale'] = {n: _outcome_json(p) for n, p in scaled.items()}
  if extra.what_if:
    name, outcomes = _what_if(args, topology, planner)
    print(f'\nWhat if (by formula)\n{scaling.what_if_table(name, outcomes)}')
    content['what_if'] = {value: _outcome_json(p) for value, p in outcomes.items()}
  print('\n' + screen.tables(prediction, measured), flush=True)
  _write(extra.json, content)
  if extra.html:
    with atomic_write(extra.html) as new:
      new.write_text(
        plan_page(
          prediction,
          program.layout,
          title=f'Plan of {", ".join(pathlib.Path(name).name for name in args.gin_files)}',
          advice=advice,
          scaled=scaled,
          measured=measured,
        ),
        'utf-8',
      )
    print(f'\nPage: {extra.html}')


def _outcome_json(outcome: scaling.Outcome) -> dict[str, Any]:
  if isinstance(outcome, UserError):
    return {'error': str(outcome)}
  return prediction_json(outcome)


def _scaled(
  config: PlanConfig, topology: Topology, planner: Planner, numbers: list[int]
) -> dict[int, scaling.Outcome]:
  """Returns the prediction on each number of GPUs, by formula, with as many rows per GPU."""
  found: dict[int, scaling.Outcome] = {}
  dataset = config.train_dataset_cfg
  for number in numbers:
    rows = dataset.batch_size * number // topology.num_devices
    scaled = dataclasses.replace(
      config, train_dataset_cfg=dataclasses.replace(dataset, batch_size=max(rows, 1))
    )
    try:
      each = min(number, topology.devices_per_host)
      found[number] = planner.by_formula(scaled, topology_of(gpus=number, gpus_per_host=each))
    except UserError as e:
      found[number] = e
  return found


def _what_if(
  args: cli.Args, topology: Topology, planner: Planner
) -> tuple[str, dict[str, scaling.Outcome]]:
  """Returns (name, value -> prediction by formula) of --what_if NAME=VALUE,VALUE."""
  name, equals, values = args.extra.what_if.partition('=')
  if not (name and equals and values):
    raise ConfigError(
      f'--what_if={args.extra.what_if} is not NAME=VALUE,VALUE.',
      fix='Write --what_if gpu=h100,b200, or a gin macro or parameter: --what_if BATCH_SIZE=8,16.',
    )
  found: dict[str, scaling.Outcome] = {}
  for value in values.split(','):
    gpu = find_target(value) if name == 'gpu' else planner.gpu
    bindings = args.bindings if name == 'gpu' else (*args.bindings, f'{name}={value}')
    try:
      config, _ = _configured(dataclasses.replace(args, bindings=bindings))
      changed = dataclasses.replace(planner, gpu=gpu)
      found[value] = changed.by_formula(config, topology)
    except UserError as e:
      found[value] = e
  return name, found


def _configured(args: cli.Args) -> tuple[PlanConfig, Assumptions]:
  """Returns the run, and what the plan assumes, as gin configured them."""
  loaded = dataclasses.replace(args, gin_files=(ASSUMPTIONS, *args.gin_files)).load(
    entry=(gin_loader.ENTRY, Assumptions)
  )
  config = gin_loader.configured(loaded, PlanConfig)
  return config, gin_loader.configured(loaded, Assumptions, entry=Assumptions)


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
  if not logging_setup.is_verbose():
    # XLA's warnings about memory: the plan itself says whether a step fits.
    os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '2')
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.plan', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  extra = args.extra
  topology = topology_of(
    gpus=extra.gpus, gpus_per_host=extra.gpus_per_host, devices=extra.devices, hosts=extra.hosts
  )
  gpu = find_target(extra.gpu or DEFAULT_GPU)
  cli.check_folders_of(extra.out, extra.json, extra.html)
  if extra.html and extra.show != 'prediction':
    raise ConfigError(
      f'--html is a page of the prediction, and --show={extra.show} shows something else.',
      fix='Leave out --show or --html.',
    )
  largest = scaling.numbers(extra.scale, '--scale')[-1] if extra.scale else 1
  devices = simulated_devices(max(topology.num_devices, largest))
  gpus = None
  if extra.gpu and extra.show != 'prediction':
    gpus = described_gpus(
      extra.gpu, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
    )
  config, assumed = _configured(args)
  assumed, calibration = calibrated(extra.calibrate, gpu, assumed)
  logging_setup.setup()
  planner = Planner(gpu, assumed, devices)
  program = planner.program(config, topology)
  if extra.show == 'sharding':
    print(layout_text(program), flush=True)
  else:
    print(program.layout.table(), end='\n\n' if extra.show == 'prediction' else '\n', flush=True)
  if extra.out:
    _draw(program, extra.out, f'{", ".join(args.gin_files)} on {topology}')
  if extra.show == 'prediction':
    _show_prediction(config, program, planner, args, calibration)
  elif args.dry_run:
    return 0
  elif extra.show == 'remat':
    _show_remat(config, topology, devices[: topology.num_devices], gpus, extra.json)
  else:
    _show_sharding(config, program, gpus, extra.json)
  return 0


if __name__ == '__main__':
  cli.run_main(main)
