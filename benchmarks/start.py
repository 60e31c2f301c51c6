"""Seconds from the command to the first step, of a first and a second start.

    python benchmarks/start.py

The 14M decoder with synthetic data, and the demo with its own, on one CPU device and with the
default cache of compiled programs, empty at first; writes benchmarks/results/start.json. It is
wall-clock time, so run it on an idle machine. The processes also report their CPU time.
"""

import json
import os
import pathlib
import re
import resource
import subprocess
import sys
import tempfile
import time

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
OUT = REPOSITORY / 'benchmarks' / 'results' / 'start.json'
# The last step is followed by the evaluation, and printed after it.
TWO_STEPS = """
TRAIN_STEPS = 2
LOG_PERIOD = 1
EVAL_PERIOD = None
"""
RUNS = {
  'decoder_14m': """
from __gin__ import dynamic_registration
from t5x_gpu.data import batches
include 'gin_configs/examples/decoder_14m.gin'
batches.DatasetConfig.module = 't5x_gpu.data.synthetic'
""",
  'demo': "include 'gin_configs/examples/demo.gin'",
}


def start(folder: pathlib.Path, name: str, gin: str) -> dict:
  """Returns the seconds until the first of two steps, and the run's log line about the cache."""
  (folder / 'run.gin').write_text(gin + TWO_STEPS)
  environment = {
    **os.environ,
    'JAX_PLATFORMS': 'cpu',
    'XDG_CACHE_HOME': str(folder / 'cache'),
    'PYTHONPATH': str(REPOSITORY),
    'PYTHONUNBUFFERED': '1',
    'XLA_FLAGS': '',
  }
  environment.pop('JAX_COMPILATION_CACHE_DIR', None)
  command = [sys.executable, '-m', 't5x_gpu.train', f'--gin_file={folder / "run.gin"}']
  before, started, found = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), {}
  with subprocess.Popen(
    [*command, f'--gin.MODEL_DIR={folder / name}'],
    env=environment,
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    stderr=subprocess.STDOUT,
    text=True,
  ) as process:
    text = []
    for line in process.stdout:
      text.append(line)
      if re.search(r'\bstep 1/2\b', line) and 'seconds' not in found:
        found['seconds'] = round(time.monotonic() - started, 2)
      if 'compiled programs: ' in line:
        found['cache'] = re.search(r'\d+ of \d+', line)[0]
  assert process.returncode == 0, ''.join(text)
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
  return {**found, 'cpu_seconds_of_the_run': round(cpu, 2)}


def main() -> None:
  result = {}
  for name, gin in RUNS.items():
    with tempfile.TemporaryDirectory() as folder:
      runs = {each: start(pathlib.Path(folder), each, gin) for each in ('first', 'second')}
    ratio = round(runs['second']['seconds'] / runs['first']['seconds'], 2)
    result[name] = {**runs, 'second_of_first': ratio}
  print(json.dumps(result, indent=1))
  OUT.write_text(json.dumps(result, indent=1) + '\n')


if __name__ == '__main__':
  main()
