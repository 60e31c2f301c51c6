"""Show what a gin file would do on N GPUs, without having any: `python -m t5x_gpu.plan --gpus=64`.

First whether it fits, how fast it is, when it ends and what limits it; then memory, time and
traffic by part. Reads no data and allocates nothing. XLA compiles the real training step for the
GPUs, which this machine does not need. `--show sharding` and `--show remat` print more about one
question.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Optional

from t5x_gpu import cli
from t5x_gpu.config import gin_loader
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import config_of
from t5x_gpu.runtime.topology import Device, Topology
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.flag_types import positive_float
from t5x_gpu.tools.planning import faults, remedies, screen, sharding
from t5x_gpu.tools.planning.assumptions import Assumptions, calibrated
from t5x_gpu.tools.planning.devices import simulated_devices, topology_of
from t5x_gpu.tools.planning.gpu_compile import compile_step
from t5x_gpu.tools.planning.gpu_targets import TARGETS, DescribedGpus, described_gpus, find_target
from t5x_gpu.tools.planning.page import plan_page
from t5x_gpu.tools.planning.prediction import PlanConfig, Planner
from t5x_gpu.tools.planning.remat_costs import remat_costs, remat_json, remat_text
from t5x_gpu.tools.planning.screen import prediction_json
from t5x_gpu.tools.planning.search import search, workers
from t5x_gpu.tools.planning.sharding import gpu_json, gpu_text
from t5x_gpu.training.program import Program, build_program, host_counts

PREDICTION, SHARDING, REMAT, FAULTS = 'prediction', 'sharding', 'remat', 'faults'
SHOWN = (PREDICTION, SHARDING, REMAT, FAULTS)
# Flags that change or extend a prediction, and have no effect on the output of --show.
_OF_PREDICTIONS = ('calibrate', 'html')
FAULT_FLAGS = ('faults_per_gpu_day', 'start_seconds', 'measured_run', 'repair_hours')
_LOOP = 'Plan once per value, in a loop of the shell: '
# Flags that are gone -> their replacement.
_REMOVED = {
  'scale': f'{_LOOP}--gpus=N --gin.BATCH_SIZE=ROWS --json=FILE.',
  'what_if': f'{_LOOP}--gpu=NAME or --gin.NAME=VALUE --json=FILE.',
  'out': '--show=sharding prints how each parameter is split, and what each device holds.',
}


def check_flags(extra: argparse.Namespace, *, dry_run: bool) -> None:
  """Raises ConfigError for flags that are gone or do not work together."""
  for name, fix in _REMOVED.items():
    if getattr(extra, name):
      raise ConfigError(f'plan has no --{name} any more.', fix=fix, docs='plan.md#flags')
  _check_show(extra, dry_run)
  _check_faults(extra)
  _check_search(extra)


def _given(extra: argparse.Namespace, names: tuple[str, ...]) -> list[str]:
  return [f'--{name}' for name in names if getattr(extra, name)]


def _check_show(extra: argparse.Namespace, dry_run: bool) -> None:
  others = _given(extra, _OF_PREDICTIONS)
  if extra.show != PREDICTION and others:
    raise ConfigError(
      f'--show={extra.show} makes no prediction, so it does not work with {" and ".join(others)}.',
      fix=f'Leave out --show, or {" and ".join(others)}.',
      docs='plan.md#flags',
    )
  if extra.show == REMAT and dry_run and extra.json:
    raise ConfigError(
      '--json has nothing to write with --show=remat --dry_run: the costs of remat policies are '
      'known when they are compiled.',
      fix='Leave out --dry_run or --json.',
      docs='plan.md#remat',
    )


def _check_faults(extra: argparse.Namespace) -> None:
  if extra.start_seconds is not None and extra.measured_run is not None:
    raise ConfigError(
      '--start_seconds and --measured_run both say how long a start takes.',
      fix='Give one of them.',
      docs='plan.md#faults',
    )
  others = [f'--{name}' for name in FAULT_FLAGS if getattr(extra, name) is not None]
  if others and extra.show != FAULTS:
    raise ConfigError(
      f'{" and ".join(others)} without --show=faults has no effect.',
      fix='Add --show=faults.',
      docs='plan.md#faults',
    )


def _check_search(extra: argparse.Namespace) -> None:
  others = _given(extra, ('html',))
  others += [f'--show={extra.show}'] if extra.show != PREDICTION else []
  if extra.search is not None and others:
    raise ConfigError(
      f'--search cannot be combined with {" and ".join(others)}: it looks for another layout.',
      fix='Search with --search=best.gin; then plan with --gin_file=best.gin and these flags.',
      docs='plan.md#search',
    )
  if extra.search_processes is not None and (extra.search is None or extra.search_processes < 1):
    raise ConfigError(
      f'--search_processes={extra.search_processes} must be at least 1 and needs --search: it is '
      'the number of variants predicted at the same time.',
      fix='Write --search=best.gin --search_processes=2, for example.',
      docs='plan.md#search',
    )


EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --gpus=64 --gpu=h200 --html=plan.html
  {prog} --gin_file=my.gin --gpus=64 --gpu=h200 --search=best.gin
  {prog} --gin_file=my.gin --gpus=64 --show=sharding --json=layout.json
  {prog} --gin_file=my.gin --show=remat --gpu=h100
  {prog} --gin_file=my.gin --gpus=1024 --show=faults
  {prog} --gin_file=my.gin --gpus=16 --gin.Partitioner.fsdp=4 --json=plan.json

--gin.X=VALUE sets any macro or parameter after the gin files, as in python -m t5x_gpu.train;
--gin.Assumptions.X what a plan assumes about GPUs and links (gin_configs/plan/assumptions.gin).
"""
DEFAULT_GPU = 'h100'
ASSUMPTIONS = 'gin_configs/plan/assumptions.gin'
ASSUMPTIONS_ENTRY = 't5x_gpu.tools.planning.assumptions.Assumptions'
UNREAD = {'MIXTURE_OR_TASK_NAME': 'unread'}  # required by runs, but a plan reads no data


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('plan')
  group.add_argument(
    '--show',
    choices=SHOWN,
    default=PREDICTION,
    help='prediction (default): fit, speed, bottleneck; sharding: where every array lives, what a '
    'step sends; remat: memory and matrix products of each remat_policy; faults: the share of time '
    'that faults cost, by checkpoint interval and spare hosts',
  )
  group.add_argument('--gpus', type=int, metavar='N', help='total number of GPUs (default: 8)')
  group.add_argument(
    '--gpus_per_host', type=int, metavar='N', help='GPUs per host (default: 8, or all if fewer)'
  )
  group.add_argument('--devices', type=int, metavar='N', help='the same as --gpus')
  group.add_argument(
    '--hosts', type=int, metavar='N', help='number of hosts, instead of --gpus_per_host'
  )
  group.add_argument(
    '--gpu',
    metavar='NAME',
    help=f'which GPU: {", ".join(TARGETS)} (default: {DEFAULT_GPU}; --show sharding and remat '
    'compile for a GPU only if you name one)',
  )
  group.add_argument(
    '--search',
    nargs='?',
    const='',
    metavar='FILE.gin',
    help='instead, find the fastest layout, microbatches and remat_policy for these GPUs, and '
    'write them to FILE.gin with the reasons; minutes',
  )
  group.add_argument(
    '--search_processes',
    type=int,
    metavar='N',
    help='how many variants --search predicts at a time (default: as cores and memory allow)',
  )
  group.add_argument(
    '--faults_per_gpu_day',
    type=positive_float,
    metavar='X',
    help=f'with --show=faults: faults of one GPU and its part of a host in a day (default: '
    f'{faults.FAULTS_PER_GPU_DAY:g}, of Llama 3 405B)',
  )
  group.add_argument(
    '--start_seconds',
    type=positive_float,
    metavar='S',
    help='with --show=faults: from the start of processes to the first step (default: '
    f'{faults.START_SECONDS:g})',
  )
  group.add_argument(
    '--measured_run',
    metavar='MODEL_DIR',
    help='with --show=faults, instead of --start_seconds: the time that further starts and saves '
    'of this run took',
  )
  group.add_argument(
    '--repair_hours',
    type=positive_float,
    metavar='H',
    help=f'with --show=faults: until a lost host is back (default: {faults.REPAIR_HOURS:g})',
  )
  group.add_argument('--scale', help=argparse.SUPPRESS)
  group.add_argument('--what_if', help=argparse.SUPPRESS)
  group.add_argument('--out', help=argparse.SUPPRESS)
  group.add_argument(
    '--calibrate',
    metavar='FILE',
    help='results.json of scripts/bench_gpu.sh: use its measured efficiencies instead of the '
    'defaults; none: use the defaults, even if benchmarks/results has measurements of this GPU',
  )
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
    lambda changed: build_program(changed, topology=topology, devices=devices),
    gpus=gpus or None,
  )
  current = config_of(config.model).remat_policy
  print('\n' + remat_text(costs, current=current, gpu=gpus and gpus.target.device_kind))
  _write(json_file, remat_json(costs, current=current))


def _show_sharding(
  config: PlanConfig, program: Program, gpus: Optional[DescribedGpus], json_file: Optional[str]
) -> None:
  """Prints the traffic of a step and, for a GPU, the step as XLA compiles it."""
  plan = sharding.make_plan(program)
  print('\n' + sharding.traffic_text(plan), flush=True)
  step = compile_step(config, gpus) if gpus else None
  if step:
    print('\n' + gpu_text(step))
  compiled = {}
  if step:
    rows = sharding.elementwise_rows(step.kernel_traffic)
    compiled = {
      'compiled': gpu_json(step),
      'elementwise_kernels': [dataclasses.asdict(row) for row in rows],
    }
  _write(json_file, sharding.as_json(plan) | compiled)


def _show_prediction(
  config: PlanConfig, program: Program, planner: Planner, args: cli.Args
) -> None:
  """Prints the prediction and the results of other flags, and writes JSON if --json is given."""
  extra, topology = args.extra, program.layout.topology
  predicted = planner.by_formula if args.dry_run else planner.exactly
  prediction = predicted(config, topology)
  print(screen.first_screen(prediction))
  content = prediction_json(prediction)
  compiled = planner.exactly if planner.compiles and not args.dry_run else None
  fits = prediction.memory.fits
  found, advice = (remedies.faster_accumulation if fits else remedies.advice)(
    config, topology, prediction, by_formula=planner.by_formula, compiled=compiled
  )
  if advice:
    print('\n' + advice)
    content['faster' if fits else 'remedies'] = [
      {'settings': r.change.settings, 'prediction': prediction_json(r.prediction)} for r in found
    ]
  print('\n' + screen.tables(prediction), flush=True)
  _write(extra.json, content)
  if extra.html:
    page = plan_page(
      prediction,
      program.layout,
      title=f'Plan of {", ".join(pathlib.Path(name).name for name in args.gin_files)}',
      advice=advice,
    )
    _write(extra.html, page)
    print(f'\nPage: {extra.html}')


def _show_faults(config: PlanConfig, program: Program, planner: Planner, args: cli.Args) -> None:
  """Prints what faults cost, and writes it if --json is given."""
  predicted = planner.by_formula if args.dry_run else planner.exactly
  prediction = predicted(config, program.layout.topology)
  given = {name: v for name in FAULT_FLAGS if (v := getattr(args.extra, name)) is not None}
  if model_dir := given.pop('measured_run', None):
    given['measured'] = faults.measured_run(as_path(model_dir))
  costs = faults.costs_of_faults(prediction, host_counts(program), **given)
  print(faults.text(costs), flush=True)
  _write(args.extra.json, faults.as_json(costs))


def _show_search(config: PlanConfig, topology: Topology, planner: Planner, args: cli.Args) -> int:
  """Prints the fastest variants and writes the best one; after Ctrl-C, the best so far.


  Returns the exit code: 1 if none fits, so that there is no file.
  """
  task = workers.SearchTask(
    functools.partial(_configured, args), planner.gpu.name, topology, planner.assumed
  )
  number = args.extra.search_processes or workers.default_number()
  found = search.SearchState()
  try:
    search.search(found, config, task, num_processes=number, compiles=not args.dry_run)
  finally:
    if found.scores:
      _print_found(found, config, topology, planner, args)
  if not found.scores:
    planner.program(config, topology)  # raises why this layout fails; all others fail as well
  return int(not found.scores or found.best(found.scores[0].variant.dtype) is None)


def _print_found(
  found: search.SearchState,
  config: PlanConfig,
  topology: Topology,
  planner: Planner,
  args: cli.Args,
) -> None:
  gpus = f'{topology.num_devices} x {planner.gpu.device_kind}'
  print(search.search_text(found, gpus), flush=True)
  _write(args.extra.json, search.search_json(found))
  best = found.best(found.scores[0].variant.dtype)
  if best is None:
    smallest = min(found.scores, key=lambda s: s.needed_bytes).variant.applied(config)
    print(remedies.nothing_fits(smallest, topology, by_formula=planner.by_formula))
    return
  text = search.gin_text(found, best, given=config, gpus=gpus, files=args.gin_files)
  _write(args.extra.search, text)
  print(f'\n{args.extra.search or "As a gin file (--search=FILE writes it)"}:\n\n{text}', end='')


def _configured(args: cli.Args) -> tuple[PlanConfig, Assumptions]:
  """Returns the run and the plan's assumptions as configured by gin."""
  loaded = dataclasses.replace(args, gin_files=(ASSUMPTIONS, *args.gin_files)).load(
    entry=(gin_loader.ENTRY, ASSUMPTIONS_ENTRY), placeholders=UNREAD
  )
  config = gin_loader.configured(loaded, PlanConfig)
  return config, gin_loader.configured(loaded, Assumptions, entry=ASSUMPTIONS_ENTRY)


def _write(path: Optional[str], content: dict[str, Any] | str) -> None:
  """Writes text, or data as JSON, if there is a `path`."""
  if path:
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    write_atomically(path, text)


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files and prints the plan; --json writes it."""
  level = 'TF_CPP_MIN_LOG_LEVEL'
  if os.environ.get(level, '1') == '1' and not logging_setup.is_verbose():
    os.environ[level] = '2'  # no memory warnings: the plan prints whether a step fits
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.plan', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  extra = args.extra
  topology = topology_of(
    gpus=extra.gpus, gpus_per_host=extra.gpus_per_host, devices=extra.devices, hosts=extra.hosts
  )
  gpu = find_target(extra.gpu or DEFAULT_GPU)
  cli.check_folders_of(extra.json, extra.html, extra.search)
  check_flags(extra, dry_run=args.dry_run)
  devices = simulated_devices(topology.num_devices)
  gpus = None
  if extra.gpu and extra.show != PREDICTION:
    gpus = described_gpus(
      extra.gpu, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
    )

  config, assumed = _configured(args)
  assumed = calibrated(extra.calibrate, gpu, assumed)
  logging_setup.setup()
  planner = Planner(gpu, assumed, devices)
  if extra.search is not None:
    return _show_search(config, topology, planner, args)
  program = planner.program(config, topology)
  if extra.show == SHARDING:
    print(sharding.layout_text(program), flush=True)
  else:
    print(program.layout.table(), end='\n\n' if extra.show == PREDICTION else '\n', flush=True)
  if extra.show == PREDICTION:
    _show_prediction(config, program, planner, args)
  elif extra.show == FAULTS:
    _show_faults(config, program, planner, args)
  elif args.dry_run:
    _write(extra.json, sharding.layout_json(program))
  elif extra.show == REMAT:
    _show_remat(config, topology, devices[: topology.num_devices], gpus, extra.json)
  else:
    _show_sharding(config, program, gpus, extra.json)
  return 0


if __name__ == '__main__':
  cli.run_main(main)
