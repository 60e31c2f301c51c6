"""Compares the layouts of gin_configs/parallel on simulated CPU devices.

    python benchmarks/layouts.py [--layouts dp,fsdp,tp] [--rounds 5] [--steps 2]

One small decoder, one global batch, eight devices: what each layout compiles, computes, sends and
stores per device, and how long a step takes relative to plain data parallelism. The devices share
the cores and a memory: seconds show work done twice and copies, not links, and a device that waits
leaves its core to the others. Writes benchmarks/results/layouts.json and docs/images/layouts.png.
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import pathlib
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax
import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt

from t5x_gpu.compiled import hlo_text
from t5x_gpu.compiled.collectives import flops_per_device, inventory, partitioned_hlo
from t5x_gpu.config import gin_loader
from t5x_gpu.data.data_module import open_batches
from t5x_gpu.partitioning.array_layout import state_layouts
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.terminal import logging_setup
from t5x_gpu.tools.planning.devices import simulated_devices, topology_of
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.train_step import StepConfig

ROOT = pathlib.Path(__file__).parents[1]
NUM_DEVICES = 8
# The decoder of the demo with as many heads as devices, AdamW, layers in a loop.
MODEL = (
  'TransformerConfig.num_heads=8',
  'TransformerConfig.head_dim=16',
  'TransformerConfig.scan_unroll=1',
  'BATCH_SIZE=32',
  "TASK_FEATURE_LENGTHS={'targets': 128}",
  'MIXTURE_OR_TASK_NAME=none',
  'MODEL_DIR=none',
  'TRAIN_STEPS=100',
)
EXPERTS = ('TransformerConfig.num_experts=4', 'TransformerConfig.mlp_dim=192')


@dataclasses.dataclass(frozen=True)
class Setting:
  """A layout to measure.

  Attributes:
    gin: name of a file of gin_configs/parallel.
    bindings: further ones.
    hosts: that the devices stand for.
    base: the layout whose step is 1.
  """

  gin: str
  bindings: tuple[str, ...] = ()
  hosts: int = 1
  base: str = 'dp'


SETTINGS = {
  'dp': Setting('dp'),
  'zero1': Setting('zero1'),
  'fsdp': Setting('fsdp'),
  'hsdp': Setting('hsdp', hosts=2),
  'tp': Setting('tp'),
  'tp_sp': Setting('tp_sp'),
  'cp': Setting('cp'),
  'cp_gather': Setting('cp', ("Partitioner.context_attention='gather'",)),
  'pp_1f1b': Setting('pp'),
  'pp_gpipe': Setting('pp', ("Partitioner.pipeline_schedule='gpipe'",)),
  'pp_circular': Setting(
    'pp', ("Partitioner.pipeline_schedule='circular'", 'Partitioner.pipeline_repeats=2')
  ),
  '3d': Setting('3d'),
  'dp_experts': Setting('dp', EXPERTS, base='dp_experts'),
  'ep': Setting('ep', EXPERTS, base='dp_experts'),
}
# What the picture shows: heading, key of a row.
PANELS = (
  ('CPU s of a step / data parallel', ('cpu_ratio',)),
  ('FLOPs / ideal', ('flops_ratio',)),
  ('MiB sent per device and step', ('sent_mib',)),
  ('MiB per device: state (dark), temporaries', ('state_mib', 'temp_mib')),
)


class Layout:
  """One layout, compiled and ready to run.

  Args:
    setting: which.
    devices: NUM_DEVICES of them.
  """

  def __init__(self, setting: Setting, devices: Sequence[Any]):
    config = load(setting)
    self.topology = topology_of(devices=NUM_DEVICES, hosts=setting.hosts)
    self.program = build_program(config, topology=self.topology, devices=list(devices))
    program = self.program
    begin = time.monotonic()
    self._step = self._lowered().compile()
    self.compile_seconds = time.monotonic() - begin
    ideal = one_device_flops(config, devices[0]) / NUM_DEVICES
    hlo = partitioned_hlo(self._lowered())
    self.flops_ratio = mean_flops(hlo, program) / ideal
    self.sent_bytes = sum(
      c.bytes_per_call * (share_of_ticks(program, c.trip_counts) if c.in_branch else 1)
      for c in inventory(hlo, program.layout.mesh.shape)
    )
    parameters, optimizer = state_layouts(program.abstract_state, program.names)
    self.state_bytes = sum(a.bytes_per_device for a in (*parameters, *optimizer))
    self.temp_bytes = self._step.memory_analysis().temp_size_in_bytes
    self._state = program.init()
    self._batches = ready_batches(config, program)
    self.losses: list[float] = []
    self.cpu_seconds: list[float] = []

  def _lowered(self) -> Any:
    return self.program.train_step.lower(self.program.abstract_state, self.program.abstract_batch)

  def step(self) -> float:
    """Returns the seconds of one training step."""
    batch = self._batches[len(self.losses) % len(self._batches)]
    begin, cpu_begin = time.monotonic(), time.process_time()
    self._state, sums = self._step(self._state, batch)
    loss, weight = jax.device_get(sums['loss'])
    seconds = time.monotonic() - begin
    self.cpu_seconds.append(time.process_time() - cpu_begin)
    self.losses.append(float(loss / weight))
    return seconds

  @property
  def bubble(self) -> Optional[float]:
    pipeline = self.program.layout.pipeline
    return None if pipeline is None else pipeline.bubble_fraction


def load(setting: Setting) -> StepConfig:
  """Returns the settings of the training step under a setting."""
  files = [
    ROOT / 'gin_configs' / name
    for name in ('models/decoder_demo.gin', f'parallel/{setting.gin}.gin', 'runs/pretrain.gin')
  ]
  loaded = gin_loader.load(files, bindings=(*MODEL, *setting.bindings))
  return gin_loader.configured(loaded, StepConfig)


def one_device_flops(config: StepConfig, device: Any) -> int:
  """Returns the FLOPs of a step's matrix products where nothing is split."""
  program = build_program(
    dataclasses.replace(config, partitioner=Partitioner()),
    topology=topology_of(devices=1),
    devices=[device],
  )
  return flops_per_device(
    program.train_step.lower(program.abstract_state, program.abstract_batch).as_text('hlo')
  )


def share_of_ticks(program: Program, trip_counts: Sequence[int]) -> float:
  """Returns in how many of a pipeline's ticks, the outermost of the loops, a stage has work."""
  pipeline = program.layout.pipeline
  return 1.0 if pipeline is None else pipeline.num_units / trip_counts[0]


def mean_flops(hlo: str, program: Program) -> float:
  """Returns the FLOPs of a step's matrix products that a device computes, mean over the devices.

  `flops_per_device` counts a branch as if it was taken every time. Here counts how often it is: a
  pipeline's stage works in some of its ticks; under 1f1b the last stage leaves the forward pass to
  its backward pass, and it alone computes the head; a ring leaves out what causality masks.
  """
  pipeline, mesh = program.layout.pipeline, program.layout.mesh.shape
  module, total = hlo_text.parse(hlo), 0.0
  for visit in module.walk():
    if visit.instruction.opcode != 'dot':
      continue
    left = visit.computation.instructions[visit.instruction.operands[0]].arrays[0].shape
    summed = math.prod(left[i] for i in visit.instruction.numbers('lhs_contracting_dims'))
    flops = 2 * visit.instruction.arrays[0].size * summed * visit.count
    if visit.in_branch and pipeline is not None:
      flops *= share_of_ticks(program, visit.trip_counts)
      if pipeline.schedule == '1f1b':
        if visit.op_name.count('branch_1_fun') > 1:
          flops /= pipeline.num_stages
        elif 'jvp(' not in visit.op_name:
          flops *= (pipeline.num_stages - 1) / pipeline.num_stages
    elif visit.in_branch:
      flops *= (1 + 1 / (2 * mesh['context'])) / 2  # of the pairs of chunks
    total += flops
  return total


def ready_batches(config: StepConfig, program: Program) -> list[Any]:
  """Returns a few synthetic batches on the devices; the same for every layout."""
  dataset = dataclasses.replace(config.train_dataset_cfg, module='t5x_gpu.data.synthetic')
  batches = open_batches(
    dataset,
    spec=program.spec,
    feature_converter=config.model.feature_converter(dataset.task_feature_lengths),
  )
  return [program.layout.put_batch(next(batches)) for _ in range(4)]


def measure(names: Sequence[str], *, rounds: int, steps: int) -> list[dict[str, Any]]:
  """Returns a row per layout; their steps take turns, so that a slow minute hits all of them."""
  devices = simulated_devices(NUM_DEVICES)
  layouts = {}
  for name in names:
    layouts[name] = Layout(SETTINGS[name], devices)
    layouts[name].step()  # warm up
    print(f'{name}: compiled in {layouts[name].compile_seconds:.1f} s', flush=True)
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for _ in range(rounds):
    for name, layout in layouts.items():
      seconds[name].append(statistics.median(layout.step() for _ in range(steps)))
  check_losses(layouts)
  return [row(name, layouts, seconds) for name in names]


def check_losses(layouts: Mapping[str, Layout]) -> None:
  """Ends the program unless layouts of the same model have the same losses."""
  for name, layout in layouts.items():
    base = layouts[SETTINGS[name].base].losses
    off = max(abs(a - b) / b for a, b in zip(layout.losses, base))
    if not off < 1e-3:
      raise SystemExit(
        f'{name}: its losses {layout.losses} differ from the losses of '
        f'{SETTINGS[name].base}, {base}: nothing here can be compared.'
      )


def row(
  name: str, layouts: Mapping[str, Layout], seconds: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
  layout, base = layouts[name], layouts[SETTINGS[name].base]
  mesh = {axis: size for axis, size in layout.program.layout.mesh.shape.items() if size > 1}
  ratios = [own / other for own, other in zip(seconds[name], seconds[SETTINGS[name].base])]
  cpu = [statistics.median(one.cpu_seconds[1:]) for one in (layout, base)]
  return {
    'layout': name,
    'mesh': ' x '.join(f'{axis} {size}' for axis, size in mesh.items()),
    'hosts': layout.topology.num_hosts,
    'base': SETTINGS[name].base,
    'compile_seconds': round(layout.compile_seconds, 2),
    'step_seconds': round(statistics.median(seconds[name]), 4),
    'step_ratio': round(statistics.median(ratios), 3),
    'cpu_ratio': round(cpu[0] / cpu[1], 3),
    'flops_ratio': round(layout.flops_ratio, 3),
    'sent_mib': round(layout.sent_bytes / 2**20, 3),
    'sent_ratio': round(layout.sent_bytes / base.sent_bytes, 3),
    'state_mib': round(layout.state_bytes / 2**20, 3),
    'state_ratio': round(layout.state_bytes * NUM_DEVICES / base.state_bytes, 3),
    'temp_mib': round(layout.temp_bytes / 2**20, 3),
    'bubble': None if layout.bubble is None else round(layout.bubble, 4),
    'last_loss': layout.losses[-1],
  }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows as a table for docs/performance.md."""
  lines = [
    '| layout | mesh | compile s | step / dp | CPU s / dp | FLOPs / ideal | bubble | sent '
    '/ dp | MiB sent | state / ideal | state MiB | temp MiB |',
    '|---' * 12 + '|',
  ]
  for r in rows:
    bubble = '' if r['bubble'] is None else f'{r["bubble"]:.0%}'
    lines.append(
      f'| {r["layout"]} | {r["mesh"]} | {r["compile_seconds"]:.1f} | '
      f'{r["step_ratio"]:.2f} | {r["cpu_ratio"]:.2f} | {r["flops_ratio"]:.2f} | '
      f'{bubble} | {r["sent_ratio"]:.2f} | {r["sent_mib"]:.1f} | '
      f'{r["state_ratio"]:.2f} | {r["state_mib"]:.1f} | {r["temp_mib"]:.0f} |'
    )
  return '\n'.join(lines)


def draw(rows: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
  """Writes the picture: a panel per column, a bar per layout."""
  figure, panels = plt.subplots(
    1, len(PANELS), figsize=(12, 0.32 * len(rows) + 1), sharey=True, layout='constrained'
  )
  places = range(len(rows))
  for axes, (title, keys) in zip(panels, PANELS):
    left = [0.0] * len(rows)
    for key, color in zip(keys, ('#30608c', '#a9c4dd')):
      values = [r[key] for r in rows]
      axes.barh(places, values, left=left, color=color)
      left = [a + b for a, b in zip(left, values)]
    for place, total in zip(places, left):
      axes.text(
        total,
        place,
        f' {total:.2f}' if max(left) < 10 else f' {total:.0f}',
        va='center',
        fontsize=8,
      )
    if keys[0].endswith('_ratio'):
      axes.axvline(1.0, color='0.6', linewidth=0.8)
    axes.set_title(title, fontsize=9)
    axes.set_xlim(0, 1.18 * max(left))
    axes.tick_params(labelsize=8)
    axes.spines[['top', 'right']].set_visible(False)
  panels[0].set_yticks(places, [r['layout'] for r in rows])
  panels[0].invert_yaxis()
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def chosen(text: Optional[str]) -> list[str]:
  """Returns the names of layouts, in table order, with the layouts that they are compared with."""
  wanted = set(SETTINGS) if text is None else set(text.split(','))
  if not wanted <= set(SETTINGS):
    raise SystemExit(
      f'--layouts: there is no {", ".join(sorted(wanted - set(SETTINGS)))}; there '
      f'are {", ".join(SETTINGS)}.'
    )
  wanted |= {SETTINGS[name].base for name in wanted}
  return [name for name in SETTINGS if name in wanted]


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--layouts', metavar='A,B', help=f'of {", ".join(SETTINGS)} (all)')
  parser.add_argument('--rounds', type=int, default=5, help='turns of each layout (5)')
  parser.add_argument('--steps', type=int, default=2, help='steps timed per turn (2)')
  parser.add_argument('--json', type=pathlib.Path, default=ROOT / 'benchmarks/results/layouts.json')
  parser.add_argument('--picture', type=pathlib.Path, default=ROOT / 'docs/images/layouts.png')
  args = parser.parse_args()
  if min(args.rounds, args.steps) < 1:
    parser.error('--rounds and --steps are at least 1.')
  names = chosen(args.layouts)
  logging_setup.quiet_environment()
  load_before, begin = os.getloadavg()[0], time.monotonic()
  rows = measure(names, rounds=args.rounds, steps=args.steps)
  report = {
    'command': ' '.join(['python', 'benchmarks/layouts.py', *sys.argv[1:]]),
    'date': datetime.date.today().isoformat(),
    'load_at_start': round(load_before, 2),
    'load_at_end': round(os.getloadavg()[0], 2),
    'seconds': round(time.monotonic() - begin),
    'machine': f'{os.cpu_count()} CPU cores, {platform.machine()}',
    'python': platform.python_version(),
    'jax': jax.__version__,
    'model': MODEL,
    'devices': NUM_DEVICES,
    'rounds': args.rounds,
    'steps_per_round': args.steps,
    'layouts': rows,
  }
  args.json.write_text(json.dumps(report, indent=1) + '\n')
  draw(rows, args.picture)
  print(markdown(rows))
  print(
    f'load {load_before:.1f} at the start, {report["load_at_end"]:.1f} at the end; written: '
    f'{args.json} {args.picture}'
  )


if __name__ == '__main__':
  main()
