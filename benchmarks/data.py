"""Tokens per second of one core: prepared rows, our streaming path, and SeqIO alone; data.json.

    python benchmarks/data.py [--length 1024] [--seconds 10] [--rounds 3]

The same text (the standard library's source, bytes), packed rows of the same length in batches of
16. Each path runs in a separate process, in turns. The figure is tokens without padding per second
of CPU time, which other load disturbs less than the clock, and the median of the rounds.
"""

import argparse
import importlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from t5x_gpu.data import batches, data_module, features

OUT = pathlib.Path(__file__).parent / 'results' / 'data.json'
PATHS = ('prepared', 'streaming', 'seqio')
BATCH = 16
GIN = """from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
include 'gin_configs/models/decoder_demo.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'
MODEL_DIR = 'unused'
TRAIN_STEPS = 1
BATCH_SIZE = 16
MIXTURE_OR_TASK_NAME = 'python_source'
"""


def of_ours(name: str, length: int) -> Iterator[dict[str, np.ndarray]]:
  """Returns our batches of a task, or of prepared rows."""
  config = batches.DatasetConfig(name, {'targets': length}, 'train', BATCH)
  spec = features.batch_spec(
    'lm',
    task_feature_lengths=config.task_feature_lengths,
    pack=True,
    batch_size=BATCH,
    vocab_size=384,
  )
  return data_module.open_batches(config, spec=spec, feature_converter='lm')


def of_seqio(length: int) -> Iterator[dict[str, np.ndarray]]:
  """Returns the batches of SeqIO's own `get_dataset`, tf.data's options as they are by default."""
  # Imported here: the process of prepared rows has neither TensorFlow nor SeqIO.
  seqio = importlib.import_module('t5x_gpu.data.tasks.builtin').seqio
  dataset = seqio.get_dataset(
    mixture_or_task_name='python_source',
    task_feature_lengths={'targets': length},
    dataset_split='train',
    shuffle=True,
    num_epochs=None,
    seed=0,
    feature_converter=seqio.LMFeatureConverter(pack=True),
  )
  return dataset.batch(BATCH, drop_remainder=True).prefetch(2).as_numpy_iterator()


def measure(path: str, folder: str, length: int, seconds: float) -> dict[str, Any]:
  """Returns the speed of one path, in this process."""
  opened = time.perf_counter()
  data = (
    of_seqio(length)
    if path == 'seqio'
    else of_ours(f'prepared:{folder}' if path == 'prepared' else 'python_source', length)
  )
  next(data)['decoder_target_tokens'][:]
  opened = time.perf_counter() - opened
  start, cpu, tokens, number = time.perf_counter(), time.process_time(), 0, 0
  while time.perf_counter() - start < seconds:
    batch = next(data)
    tokens += sum(
      int(np.count_nonzero(x[:])) for name, x in batch.items() if name == 'decoder_target_tokens'
    )
    number += 1
  wall, cpu = time.perf_counter() - start, time.process_time() - cpu
  return {
    'tokens_per_core_second': tokens / cpu,
    'tokens_per_second': tokens / wall,
    'batches': number,
    'first_batch_seconds': opened,
  }


def prepare(folder: pathlib.Path, length: int) -> dict[str, float]:
  """Prepares the text and returns the time it took."""
  gin = folder / 'data.gin'
  gin.write_text(GIN + f"TASK_FEATURE_LENGTHS = {{'targets': {length}}}\n")
  start, before = time.perf_counter(), os.times()
  subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_gpu.prepare',
      f'--gin_file={gin}',
      '--split=train',
      f'--output={folder}/rows',
    ],
    check=True,
  )
  after = os.times()
  index = json.loads((folder / 'rows' / 'train' / 'index.json').read_text())
  shards = [s for m in index['members'].values() for s in m['shards']]
  cpu = after.children_user + after.children_system - before.children_user - before.children_system
  return {
    'seconds': time.perf_counter() - start,
    'cpu_seconds': cpu,
    'rows': sum(s['rows'] for s in shards),
    'tokens': sum(s['tokens'] for s in shards),
    'bytes': sum(s['bytes'] for s in shards),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--length', type=int, default=1024)
  parser.add_argument('--seconds', type=float, default=10)
  parser.add_argument('--rounds', type=int, default=3)
  parser.add_argument('--one', nargs=2, help=argparse.SUPPRESS)  # a path and the folder
  args = parser.parse_args()
  if args.one:
    print(json.dumps(measure(*args.one, args.length, args.seconds)))
    return
  with tempfile.TemporaryDirectory() as folder:
    prepared = prepare(pathlib.Path(folder), args.length)
    found: dict[str, list[dict[str, Any]]] = {path: [] for path in PATHS}
    for _ in range(args.rounds):
      for path in PATHS:
        done = subprocess.run(
          [
            sys.executable,
            __file__,
            '--one',
            path,
            f'{folder}/rows',
            f'--length={args.length}',
            f'--seconds={args.seconds}',
          ],
          check=True,
          stdout=subprocess.PIPE,
          text=True,
        )
        found[path].append(json.loads(done.stdout.splitlines()[-1]))
        print(path, found[path][-1], flush=True)
  medians = {
    path: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
    for path, rounds in found.items()
  }
  ratios = {
    f'{a} / {b}': medians[a]['tokens_per_core_second'] / medians[b]['tokens_per_core_second']
    for a, b in (('prepared', 'streaming'), ('prepared', 'seqio'), ('streaming', 'seqio'))
  }
  OUT.write_text(
    json.dumps(
      {
        'length': args.length,
        'batch': BATCH,
        'rounds': args.rounds,
        'cores': os.cpu_count(),
        'load': os.getloadavg()[0],
        'python': platform.python_version(),
        'prepare': prepared,
        'median': medians,
        'ratios': ratios,
        'all': found,
      },
      indent=1,
    )
    + '\n'
  )
  print(json.dumps(ratios))


if __name__ == '__main__':
  main()
