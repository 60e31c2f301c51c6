"""Check that a gin file's model trains on its mesh as on one device: `python -m t5x_gpu.parity`.

Runs a few steps of the model twice, in float32 (FP8 matmuls stay FP8): on a mesh of N devices,
simulated unless --real is given, and on one device without parallelism. Needs neither data nor a
GPU. Exits with code 1 if a layer's output, a gradient, an update, the loss or a norm differs
(docs/parity.md).
"""

import argparse
import dataclasses
import json
import os
import re
from collections.abc import Sequence
from typing import Any, Optional

import jax
import rich.console
import rich.table

from t5x_gpu import cli
from t5x_gpu.config import gin_loader
from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import ConfigError, MeshError, OutOfMemoryError
from t5x_gpu.layers.config import IN_FLOAT32
from t5x_gpu.models.model import uses_fp8
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Device, Topology, discover
from t5x_gpu.runtime.xla import flags as flags_lib
from t5x_gpu.terminal import console as console_lib
from t5x_gpu.terminal import logging_setup
from t5x_gpu.tools.parity.paired_run import RecordedRun, Recording, TwoRuns
from t5x_gpu.tools.parity.verdict import (
  Report,
  as_dict,
  compare_runs,
  layer_rows,
  parameter_rows,
  step_rows,
)
from t5x_gpu.training.memory import check_memory
from t5x_gpu.training.program import Program, build_program, compile_options
from t5x_gpu.training.schedules import Schedule
from t5x_gpu.training.train_step import StepConfig

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --devices=16 --hosts=2 --gin.NUM_PARTITIONS=4
  {prog} --gin_file=my.gin --gin.BATCH_SIZE=8 --gin.TransformerConfig.num_layers=4

To check a large model, use a smaller one with the same architecture: fewer layers, smaller sizes,
one row per part of the batch. The last line is the verdict; exit code 0 means that the runs are
equal.
"""
TOLERANCE = 1e-5
FP8_TOLERANCE = 0.0625  # the largest rounding error of E4M3, see docs/precision.md
# Four roundings of 2^-8, of terms that are twice as large as their sum.
BFLOAT16_GRADIENT_TOLERANCE = 2.0**-5
FAKE = 'xla_force_host_platform_device_count'


def in_float32(model: Any) -> tuple[Any, bool]:
  """Returns the model with float32 arithmetic, and whether it has a dtype field.

  Matmuls in FP8 stay in FP8.

  Looks for fields called `dtype` in the model's dataclass and in dataclasses inside it.
  """
  if not dataclasses.is_dataclass(model) or isinstance(model, type):
    return model, False
  changes, found = {}, False
  for field in (f for f in dataclasses.fields(model) if f.init):
    value = getattr(model, field.name)
    if field.name == 'dtype' and value is not None:
      exact = IN_FLOAT32.get(value, 'float32') if isinstance(value, str) else jax.numpy.float32
      changes['dtype'], found = exact, True
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
      inner, inner_found = in_float32(value)
      if inner_found:
        changes[field.name], found = inner, True
  return (dataclasses.replace(model, **changes) if changes else model), found


def build(
  config: StepConfig, *, topology: Topology, devices: Sequence[Device]
) -> tuple[Program, Program]:
  """Returns the program on the mesh, and the program on one device to compare with.

  The program on one device takes the whole batch at once, without accumulation.

  Args:
    config: configuration of the run.
    topology, devices: hosts and devices of the mesh.
  Raises:
    MeshError, ConfigError, ShapeError: as a run of the gin file would.
  """
  recorded = dataclasses.replace(
    config, model=in_float32(config.model)[0], optimizer=Recording(config.optimizer)
  )
  on_mesh = build_program(recorded, topology=topology, devices=list(devices))
  alone = dataclasses.replace(
    recorded,
    partitioner=Partitioner(),
    num_microbatches=1,
    learning_rate=_scaled(config.learning_rate, on_mesh.learning_rate_factor),
    learning_rate_scaling=None,
  )
  single = dataclasses.replace(topology, num_hosts=1, devices_per_host=1)
  on_one = build_program(alone, topology=single, devices=[devices[0]])
  return on_mesh, on_one


def check_memory_of_both(programs: tuple[Program, Program]) -> None:
  """Raises OutOfMemoryError unless both programs of `build` fit."""
  for program in programs:
    try:
      check_memory(program)
    except OutOfMemoryError as e:
      raise OutOfMemoryError(
        e.what,
        fix='Compare a smaller model of the same architecture, such as '
        '--gin.TransformerConfig.num_layers=2, and fewer rows: one device takes the whole batch.',
        parameters=('TransformerConfig.num_layers',),
        docs='parallelism.md#memory',
      ) from None


def default_tolerance(config: StepConfig) -> float:
  """Returns the largest relative difference that rounding can explain in a run."""
  if uses_fp8(config.model):
    return FP8_TOLERANCE
  in_bfloat16 = config.partitioner.gradient_dtype == 'bfloat16'
  return BFLOAT16_GRADIENT_TOLERANCE if in_bfloat16 else TOLERANCE


def _scaled(schedule: Schedule, factor: float) -> Schedule:
  return lambda step: factor * schedule(step)


def parity(
  programs: tuple[Program, Program],
  *,
  num_steps: int = 3,
  tolerance: float = TOLERANCE,
  xla: Optional[flags_lib.Applied] = None,
) -> Report:
  """Returns the differences of the two programs of `build` over some steps.

  Args:
    programs: from `build`.
    num_steps: updates to compare.
    tolerance: largest relative difference allowed.
    xla: settings to compile with.
  """
  # By default GPUs multiply float32 matrices in TF32, which has a mantissa of 10 bits.
  with jax.default_matmul_precision('highest'):
    mesh, one = (RecordedRun(p, compiler_options=compile_options(p, xla)) for p in programs)
    batches = uneven_batches(
      programs[0].spec, seed=programs[0].config.random_seed, num_batches=num_steps
    )
    return compare_runs(TwoRuns(mesh, one), batches, tolerance=tolerance)


def _devices(args: argparse.Namespace) -> tuple[Topology, list[Device]]:
  """Returns the devices of the mesh: simulated CPU devices, or with --real this machine's GPUs."""
  number, hosts = args.devices, args.hosts
  if number < 1 or hosts < 1 or number % hosts:
    raise ConfigError(
      f'--devices={number} --hosts={hosts}: every host has the same number of '
      'devices, at least one.',
      fix=f'Give --hosts a number that divides {number}.'
      if number >= 1
      else 'Give --devices of at least 1.',
    )
  if args.real:
    _, found = discover()
    if found[0].platform == 'cpu' or len(found) < number:
      gpus = 0 if found[0].platform == 'cpu' else len(found)
      raise MeshError(
        f'--real --devices={number}: jax sees {gpus} GPUs here.',
        fix=f'Give --devices={gpus} or fewer.'
        if gpus
        else 'Remove --real to use simulated CPU devices.',
      )
    return Topology(hosts, number // hosts, reason='--hosts'), found[:number]
  flags = os.environ.get('XLA_FLAGS', '')
  before = re.search(rf'--{FAKE}=(\d+)', flags)
  if not before or int(before[1]) < number:
    flags = re.sub(rf'--{FAKE}=\d+', '', flags)
    os.environ['XLA_FLAGS'] = f'{flags} --{FAKE}={number}'.strip()
  jax.config.update('jax_platforms', 'cpu')  # the variable was read when jax was imported
  found = jax.devices('cpu')
  if len(found) < number:
    raise MeshError(
      f'--devices={number}: jax has already started with {len(found)} CPU devices.',
      fix=f'Give --devices={len(found)} or fewer, or start a new Python process.',
    )
  return Topology(
    hosts, number // hosts, device_word='CPU device', reason='simulated on this CPU'
  ), found[:number]


def print_table(rows: list[list[str]], *, console: rich.console.Console) -> None:
  """Prints rows; the first row is the header, in bold if the terminal is wide enough."""
  widths = [max(map(len, column)) for column in zip(*rows)]
  if console.is_terminal and sum(widths) + 3 * len(widths) <= console.width:
    table = rich.table.Table(*rows[0], box=None, header_style='bold')
    for row in rows[1:]:
      table.add_row(*row)
    console.print(table)
    return
  print(console_lib.table(rows))


def _add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--devices',
    type=int,
    default=8,
    metavar='N',
    help='devices of the mesh on all hosts (default 8)',
  )
  parser.add_argument(
    '--hosts', type=int, default=1, metavar='N', help='number of hosts to simulate (default 1)'
  )
  parser.add_argument(
    '--steps', type=int, default=3, metavar='N', help='updates to compare (default 3)'
  )
  parser.add_argument(
    '--tolerance',
    type=float,
    metavar='X',
    help=f'largest relative difference (default {TOLERANCE}; {BFLOAT16_GRADIENT_TOLERANCE} with '
    f"Partitioner.gradient_dtype = 'bfloat16'; {FP8_TOLERANCE} in FP8)",
  )
  parser.add_argument(
    '--real', action='store_true', help="use this machine's GPUs instead of simulated CPU devices"
  )
  parser.add_argument('--json', metavar='FILE', help='also write every number to FILE')


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Returns 0 if the model trains equally on its mesh and on one device, else 1."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.parity',
    'Checks that a model trains on its mesh as on one device: compares a few steps of both.',
    argv,
    extra=_add_flags,
    examples=EXAMPLES,
  )
  if args.extra.steps < 1 or not (args.extra.tolerance is None or args.extra.tolerance > 0):
    raise ConfigError(
      f'--steps={args.extra.steps} --tolerance={args.extra.tolerance}: nothing to compare.',
      fix='Give --steps of at least 1 and a positive --tolerance, such as 1e-5.',
    )
  cli.check_folders_of(args.extra.json)
  topology, devices = _devices(args.extra)
  logging_setup.setup()
  loaded = args.load()
  config = gin_loader.configured(loaded, StepConfig)
  fp8 = uses_fp8(config.model)
  tolerance = args.extra.tolerance or default_tolerance(config)
  xla = flags_lib.prepare_environment(config.xla_preset) if args.extra.real else None
  programs = build(config, topology=topology, devices=devices)
  batch_size, length = max(programs[0].spec.shapes.values(), key=len)[:2]  # labels are [batch]
  float32 = (
    ('FP8 and float32' if fp8 else 'float32')
    if in_float32(config.model)[1]
    else "the model's own precision (it has no field dtype to set to float32)"
  )
  print(
    programs[0].layout.table(),
    f'{programs[0].num_params:,} parameters',
    f'steps: {args.extra.steps} of {batch_size} x {length} tokens in {float32}, against '
    f'{topology.count(1)}; relative tolerance {tolerance:g}',
    sep='\n',
    flush=True,
  )
  check_memory_of_both(programs)
  if args.dry_run:
    return 0
  report = parity(programs, num_steps=args.extra.steps, tolerance=tolerance, xla=xla)
  console = rich.console.Console(highlight=False)
  for rows in (step_rows(report), layer_rows(report), parameter_rows(report)):
    if len(rows) > 1:
      print()
      print_table(rows, console=console)
  print()
  if report.rounding:
    print(
      'Above the tolerance, but explained by rounding (one ulp of the parameters changes as much '
      f'on one device): {", ".join(report.rounding)}.'
    )
  if report.failure and report.failure.how:
    print(report.failure.how)
  print(report.sentence())
  if args.extra.json:
    with open(args.extra.json, 'w', encoding='utf-8') as f:
      json.dump(as_dict(report), f, indent=1)
  return int(report.failure is not None)


if __name__ == '__main__':
  cli.run_main(main)
