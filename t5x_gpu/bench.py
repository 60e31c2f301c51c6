"""Time a gin file's training step on synthetic batches: tokens/s, TFLOP/s, MFU and memory.

Needs neither TensorFlow nor data, only the packages of `CORE` in setup.py.
"""

import argparse
import dataclasses
import json
import statistics
import time
from typing import Optional

import jax

from t5x_gpu import cli
from t5x_gpu.compiled.kernels import fp8_lines
from t5x_gpu.config import gin_loader
from t5x_gpu.data.data_module import open_batches
from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics.monitor import model_speed, peak_memory_bytes
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.topology import discover
from t5x_gpu.runtime.xla import flags
from t5x_gpu.runtime.xla.programs import compile_errors
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.console import show
from t5x_gpu.training.memory import check_memory
from t5x_gpu.training.program import Program, build_program, compile_options, size_line
from t5x_gpu.training.train_step import StepConfig


@dataclasses.dataclass(frozen=True)
class Result:
  """One measurement; None for unknown values.

  Attributes:
    device_kind, num_devices, dtype, jax_version: the devices and the program.
    num_params, batch_size, length: sizes of the model and the global batch.
    compile_seconds: time to compile the training step.
    step_seconds: median of the timed steps.
    cpu_seconds_per_step: CPU time of this process, which other load on the machine does not change.
    tokens_per_second: all devices together, padding included.
    model_tflops_per_second_per_device: FLOPs of models/flops.py, per device.
    mfu: these FLOPs per second over the dense peak of the device and dtype.
    peak_bytes: high-water mark of device memory.
    losses: losses of the first and last timed step, to see that the model trains.
  """

  device_kind: str
  num_devices: int
  dtype: str
  jax_version: str
  num_params: int
  batch_size: int
  length: int
  compile_seconds: float
  step_seconds: float
  cpu_seconds_per_step: float
  tokens_per_second: float
  model_tflops_per_second_per_device: float
  mfu: Optional[float]
  peak_bytes: Optional[int]
  losses: tuple[float, float]


def bench(
  program: Program, *, num_steps: int, warmup_steps: int, xla: Optional[flags.Applied] = None
) -> Result:
  """Returns the measurement of the training step of `program`.

  Waits for each step, which costs microseconds and makes every step a separate sample.

  Raises:
    ModelError: as `fp8_lines`.
  """
  config, model = program.config, program.config.model
  devices = program.layout.mesh.devices.reshape(-1)
  dataset = dataclasses.replace(config.train_dataset_cfg, module='t5x_gpu.data.synthetic')
  batches = open_batches(
    dataset,
    spec=program.spec,
    feature_converter=model.feature_converter(dataset.task_feature_lengths),
  )
  begin = time.monotonic()
  traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
  with compile_errors(devices[0].device_kind):
    step = traced.lower().compile(compiler_options=compile_options(program, xla))
  compile_seconds = time.monotonic() - begin
  for line in fp8_lines(step, model, program.layout.mesh):
    log(line)
  state = program.init()
  # A few batches in turn, so that the time does not include making them.
  ready = [program.put_batch(next(batches)) for _ in range(4)]
  seconds, losses = [], []
  for i in range(warmup_steps + num_steps):
    if i == warmup_steps:
      cpu_begin = time.process_time()
    begin = time.monotonic()
    state, sums = step(state, ready[i % len(ready)])
    loss, weight = jax.device_get(sums['loss'])
    if i >= warmup_steps:
      seconds.append(time.monotonic() - begin)
      losses.append(float(loss / weight))
  cpu_seconds_per_step = (time.process_time() - cpu_begin) / num_steps
  batch_size, length = next(iter(program.spec.shapes.values()))
  step_seconds = statistics.median(seconds)
  speed = model_speed(model, program.spec.shapes, devices)
  return Result(
    device_kind=devices[0].device_kind,
    num_devices=len(devices),
    dtype=speed.dtype,
    jax_version=jax.__version__,
    num_params=program.num_params,
    batch_size=batch_size,
    length=length,
    compile_seconds=compile_seconds,
    step_seconds=step_seconds,
    cpu_seconds_per_step=cpu_seconds_per_step,
    tokens_per_second=speed.tokens * len(devices) / step_seconds,
    model_tflops_per_second_per_device=speed.tflops_per_second(step_seconds),
    mfu=speed.mfu(step_seconds),
    peak_bytes=peak_memory_bytes(devices[:1]),
    losses=(losses[0], losses[-1]),
  )


def describe(result: Result) -> str:
  """Returns the measurement as text."""
  r = result
  memory = 'unknown' if r.peak_bytes is None else show(r.peak_bytes, GiB='.2f')
  utilisation = (
    'unknown (peak FLOP/s of this device and dtype is unknown)' if r.mfu is None else f'{r.mfu:.1%}'
  )
  return (
    f'{r.num_devices} x {r.device_kind}, {r.dtype}, jax {r.jax_version}; batch '
    f'{r.batch_size} x {r.length}\n'
    f'  compile      {r.compile_seconds:.1f} s\n'
    f'  step         {r.step_seconds * 1e3:.1f} ms (median)\n'
    f'  tokens/s     {r.tokens_per_second:,.0f}\n'
    f'  TFLOP/s      {r.model_tflops_per_second_per_device:.2f} per device '
    '(model FLOPs, models/flops.py)\n'
    f'  MFU          {utilisation}\n'
    f'  peak memory  {memory}\n'
    f'  loss         {r.losses[0]:.3f} -> {r.losses[1]:.3f}'
  )


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files, measures, prints, and with --json writes the result."""

  def extra(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--steps', type=int, default=20, help='timed steps (default 20)')
    parser.add_argument('--warmup', type=int, default=3, help='untimed steps first (default 3)')
    parser.add_argument('--json', metavar='FILE', help='also write the result to FILE')
    cluster_lib.add_flags(parser)

  logging_setup.quiet_environment()
  args = cli.parse_args('python -m t5x_gpu.bench', __doc__.splitlines()[0], argv, extra=extra)
  if args.extra.steps < 1 or args.extra.warmup < 0:
    raise ConfigError(
      f'--steps={args.extra.steps} --warmup={args.extra.warmup}: nothing to time.',
      fix='Give --steps of at least 1 and --warmup of at least 0.',
    )
  cluster = cluster_lib.detect_here(args.extra)
  loaded = args.load()
  config = gin_loader.configured(loaded, StepConfig)
  xla = distributed.start(cluster, config.distributed_cfg, xla_preset=config.xla_preset)
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  topology, devices = discover()
  program = build_program(config, topology=topology, devices=devices)
  is_main = distributed.is_main_process()
  if is_main:
    print(xla.report(), program.layout.table(), size_line(program), sep='\n', flush=True)
  check_memory(program)
  if args.dry_run:
    return 0
  result = bench(program, num_steps=args.extra.steps, warmup_steps=args.extra.warmup, xla=xla)
  if is_main:
    print(describe(result))
    if args.extra.json:
      with open(args.extra.json, 'w') as f:
        json.dump(dataclasses.asdict(result), f, indent=1)
  return 0


if __name__ == '__main__':
  cli.run_main(main)
