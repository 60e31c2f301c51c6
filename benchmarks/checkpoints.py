"""Saves, restores and reshards a checkpoint against dd on the same disk; checkpoints.json.

    python benchmarks/checkpoints.py [--rounds 3] [--folder FOLDER] [--model GIN]

The 134M decoder with AdamW, 1.6 GB of random float32, on one device. Saves and dd take turns; both
end with everything on disk (sync), and before each reading the files are dropped from the page
cache. `stall` is how long the step loop waits. The resharder runs in a separate process, whose
peak memory is compared with a process that reshards a tiny checkpoint.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.config import gin_loader
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.state import TrainState
from t5x_gpu.training.train_step import StepConfig

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / 'benchmarks' / 'results' / 'checkpoints.json'
RUN = 'gin_configs/examples/decoder_14m.gin'
MODEL = 'gin_configs/models/decoder_base.gin'
BUDGETS = ('512MiB', '1GiB')  # eight chunks of up to 64 MiB must fit


def seconds(what: Callable[[], Any]) -> float:
  begin = time.perf_counter()
  what()
  return time.perf_counter() - begin


def drop_from_cache(folder: pathlib.Path) -> None:
  """Makes the next reading one from the disk."""
  os.sync()
  for path in (p for p in folder.rglob('*') if p.is_file()):
    with open(path, 'rb') as file:
      os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def dd(*flags: str) -> None:
  subprocess.run(['dd', 'bs=16M', 'status=none', *flags], check=True)


def random_state(model: str) -> TrainState:
  """Returns a state of the model that the gin file sets; without zeros, which compress."""
  loaded = gin_loader.load([str(ROOT / RUN), model], bindings=[], search_paths=())
  config = dataclasses.replace(gin_loader.configured(loaded, StepConfig), optimizer=AdamW())
  program = build_program(config, topology=Topology(1, 1), devices=jax.devices()[:1])
  key = jax.random.key(0)
  return jax.block_until_ready(
    jax.tree.map(
      lambda x: (
        jax.device_put(jax.random.normal(key, x.shape, x.dtype), x.sharding)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else x
      ),
      program.init(),
    )
  )


def disk(folder: pathlib.Path, state: TrainState, *, rounds: int) -> dict[str, float]:
  """Returns medians of seconds; leaves the last checkpoint."""
  size = sum(x.nbytes for x in jax.tree.leaves(state))
  facts = {
    'data_state': b'',
    'manifest': make_manifest(state, mesh_shape={}, data={}, next_batch_hash=''),
  }
  target = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
  )
  times: dict[str, list[float]] = {}
  (folder / 'dd').mkdir()
  raw = folder / 'dd' / 'raw'

  def take(name: str, what: Callable[[], Any]) -> None:
    if step:  # the first round compiles
      times.setdefault(name, []).append(seconds(what))
    else:
      what()

  with Checkpointer(str(folder / 'run'), keep=Keep(last=1)) as checkpointer:
    for step in range(rounds + 1):
      begin = time.perf_counter()
      take('save_stall', lambda: checkpointer.save(step, state, **facts))
      checkpointer.wait()
      os.sync()
      if step:
        times.setdefault('save', []).append(time.perf_counter() - begin)
      take('dd_write', lambda: (dd('if=/dev/zero', f'of={raw}', f'count={size >> 24}'), os.sync()))
      drop_from_cache(folder)
      take('restore', lambda: jax.block_until_ready(checkpointer.restore_latest(target).state))
      take('dd_read', lambda: dd(f'if={raw}', 'of=/dev/null'))
      raw.unlink()
  return {'bytes': size, **{name: statistics.median(values) for name, values in times.items()}}


# VmHWM is of the program alone; rusage also counts what the process was before it became Python.
RESHARD = """
import sys
from t5x_gpu import reshard
code = reshard.main(sys.argv[1:])
peak = next(line for line in open('/proc/self/status') if line.startswith('VmHWM'))
print('peak kB', peak.split()[1])
sys.exit(code)
"""


def reshard(source: pathlib.Path, to: pathlib.Path, *, memory: str) -> dict[str, float]:
  """Returns the seconds and the peak memory of a process that reshards `source`."""
  drop_from_cache(source)
  begin = time.perf_counter()
  done = subprocess.run(
    [sys.executable, '-c', RESHARD, f'--from={source}', f'--to={to}', f'--memory={memory}'],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  peak = int(done.stdout.split()[-1]) * 1024
  return {'seconds': time.perf_counter() - begin, 'peak_bytes': peak}


def small_checkpoint(folder: pathlib.Path) -> pathlib.Path:
  state = TrainState(step=jnp.int32(1), params={'w': jnp.zeros(8)}, opt_state=(jnp.zeros(8),))
  with Checkpointer(str(folder)) as checkpointer:
    checkpointer.save(
      1,
      state,
      data_state=b'',
      manifest=make_manifest(state, mesh_shape={}, data={}, next_batch_hash=''),
    )
  return folder


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--folder', default=None, help='on the disk to measure; four times the state')
  parser.add_argument('--model', default=str(ROOT / MODEL))
  args = parser.parse_args()
  load = os.getloadavg()[0]
  with tempfile.TemporaryDirectory(dir=args.folder) as name:
    folder = pathlib.Path(name)
    r = disk(folder, random_state(args.model), rounds=args.rounds)
    base = reshard(small_checkpoint(folder / 'small'), folder / 'to_small', memory=BUDGETS[0])
    resharded = {
      memory: reshard(folder / 'run', folder / f'to_{memory}', memory=memory) for memory in BUDGETS
    }
  mega = r['bytes'] / 1e6
  print(
    f'{mega:.0f} MB at load {load:.1f}: stall {r["save_stall"]:.2f} s; save '
    f'{mega / r["save"]:.0f} MB/s, {r["dd_write"] / r["save"]:.2f} of dd; restore '
    f'{mega / r["restore"]:.0f} MB/s, {r["dd_read"] / r["restore"]:.2f} of dd'
  )
  for memory, run in resharded.items():
    run['over_base_bytes'] = run['peak_bytes'] - base['peak_bytes']
    print(
      f'reshard --memory={memory}: {mega / (run["seconds"] - base["seconds"]):.0f} MB/s, peak '
      f'{run["over_base_bytes"] / 2**20:.0f} MiB over the peak with a tiny checkpoint'
    )
  OUT.write_text(
    json.dumps(
      {
        'load_before': load,
        'rounds': args.rounds,
        'disk': r,
        'reshard_of_nothing': base,
        'reshard': resharded,
      },
      indent=1,
    )
    + '\n'
  )


if __name__ == '__main__':
  main()
