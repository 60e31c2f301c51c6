"""Measures what a local step costs the step loop against a save to MODEL_DIR, on this CPU.

    python benchmarks/local_save.py [--rounds 7] [--local /dev/shm]

Writes benchmarks/results/local_save.json. The 14M decoder with AdamW, 165 MB: on one device, and
split by fsdp over eight simulated CPU devices of two hosts. The first host is timed: it keeps its
half and receives the other. Both kinds of save take turns in every round.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax

from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.local.replication import Hosts, plan_copies
from t5x_gpu.checkpoint.local.tier import LocalTier
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.config import gin_loader
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.devices import simulated_devices
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.train_step import StepConfig

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / 'benchmarks' / 'results' / 'local_save.json'
EXAMPLE = 'gin_configs/examples/decoder_14m.gin'
CASES = {'one device': (1, 1, {}), 'fsdp 8, two hosts': (8, 2, {'Partitioner.fsdp': 8})}


def seconds(what: Callable[[], Any]) -> float:
  begin = time.perf_counter()
  what()
  return time.perf_counter() - begin


def measure(
  num_devices: int, num_hosts: int, settings: dict[str, Any], *, rounds: int, local: str
) -> dict[str, float]:
  """Returns medians of seconds; `written` is until it is on disk, the stall included."""
  bindings = [f'{key}={value}' for key, value in settings.items()]
  loaded = gin_loader.load([str(ROOT / EXAMPLE)], bindings=bindings, search_paths=())
  program = build_program(
    dataclasses.replace(gin_loader.configured(loaded, StepConfig), optimizer=AdamW()),
    topology=Topology(num_hosts, num_devices // num_hosts),
    devices=jax.devices()[:num_devices],
  )
  state = jax.block_until_ready(program.init())
  names = tuple(f'host {i}' for i in range(num_hosts))
  hosts = Hosts(names, names, lambda device: device.id * num_hosts // num_devices)
  copies = plan_copies(state, hosts)
  facts = {
    'data_state': b'',
    'manifest': make_manifest(state, mesh_shape={}, data={}, next_batch_hash=''),
  }
  times: dict[str, list[float]] = {}
  with tempfile.TemporaryDirectory() as model_dir, tempfile.TemporaryDirectory(dir=local) as near:
    checkpointer = Checkpointer(model_dir, keep=Keep(last=2))
    tier = LocalTier(
      pathlib.Path(near),
      model_dir=pathlib.Path(model_dir),
      copies=copies,
      hosts=hosts,
      period=1,
      process=0,
      attempt='',
    )
    with tier:
      for step in range(rounds + 1):
        for name, saver in (('durable', checkpointer), ('local', tier)):
          stall = seconds(lambda: saver.save(step, state, **facts))
          rest = seconds(saver.wait)
          if step:  # the first one compiles
            times.setdefault(f'{name}_stall', []).append(stall)
            times.setdefault(f'{name}_written', []).append(stall + rest)
    checkpointer.close()
  return {
    'bytes': sum(x.nbytes for x in jax.tree.leaves(state)),
    'local_bytes': copies.bytes_of[0],
    **{name: statistics.median(values) for name, values in times.items()},
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=7)
  parser.add_argument('--local', default='/dev/shm', help='memory or a disk of this host')
  args = parser.parse_args()
  simulated_devices(8)
  load = os.getloadavg()[0]
  results = {
    name: measure(*case, rounds=args.rounds, local=args.local) for name, case in CASES.items()
  }
  for name, r in results.items():
    print(
      f'{name}: {r["bytes"] / 1e6:.0f} MB; stall {r["durable_stall"]:.3f} s durable, '
      f'{r["local_stall"]:.3f} s local, ratio {r["local_stall"] / r["durable_stall"]:.2f}; '
      f'on disk after {r["durable_written"]:.2f} s and {r["local_written"]:.2f} s'
    )
  OUT.write_text(
    json.dumps({'load_before': load, 'rounds': args.rounds, 'results': results}, indent=1) + '\n'
  )


if __name__ == '__main__':
  main()
