"""Measures training on this machine's CPU and writes benchmarks/results/cpu.json.

    python benchmarks/cpu.py [--repeats 3] [--torch PYTHON]

Figures of one run of this script may be compared with each other; machines and hours differ.
Rounds of the framework (`python -m t5x_gpu.train`, as a user starts it) and of the bare step take
turns, so that a slow minute hits both. With --torch, a Python that has PyTorch times
benchmarks/torch_step.py as well.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

ROOT = pathlib.Path(__file__).parents[1]
OUT = ROOT / 'benchmarks' / 'results' / 'cpu.json'
RUNS = {
  'demo': ['--gin.TRAIN_STEPS=60', '--gin.EVAL_PERIOD=None', '--gin.SAVE_PERIOD=20'],
  'decoder_14m': [],
}
TIMED_ALONE = 'decoder_14m'  # the example whose step the bare steps repeat
BARE_STEPS = ['--steps', '10']
STEP_LINE = re.compile(r'\bstep \d+/')  # in a file it follows the time


def train(example: str, options: list[str]) -> dict[str, float]:
  """Returns what one run of the trainer took, from its output, its metrics and the kernel."""
  with tempfile.TemporaryDirectory() as folder:
    command = [
      sys.executable,
      '-m',
      't5x_gpu.train',
      f'--gin.MODEL_DIR={folder}',
      f'--gin_file=gin_configs/examples/{example}.gin',
      '--gin.LOG_PERIOD=1',
      *options,
    ]
    begin = time.monotonic()
    process = subprocess.Popen(
      command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    seen: dict[str, float] = {}
    lines = 0
    for line in process.stdout:
      lines += 1
      if STEP_LINE.search(line):
        seen.setdefault('first_step_seconds', time.monotonic() - begin)
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.monotonic() - begin
    if status:
      raise SystemExit(f'{" ".join(command)} failed; run it by hand to see why.')
    records = [json.loads(line) for line in (pathlib.Path(folder) / 'metrics.jsonl').open()]

    def values(key: str) -> list[float]:
      return [r[key] for r in records if key in r]

    return {
      'seconds_from_command_to_first_step': seen['first_step_seconds'],
      'step_seconds': statistics.median(values('train/step_seconds')),
      'tokens_per_second': statistics.median(values('train/tokens_per_second')),
      'input_wait_fraction': statistics.median(values('train/input_wait_fraction')),
      'save_stall_seconds': statistics.median(values('train/save_seconds')),
      'cpu_seconds': usage.ru_utime + usage.ru_stime,
      'wall_seconds': wall,
      'peak_rss_mib': usage.ru_maxrss / 1024,
      'output_lines': lines,
      'final_loss': values('train/loss')[-1],
    }


def script(python: str, name: str, *flags: str) -> dict[str, Any]:
  """Returns the JSON line that another script of this folder prints."""
  out = subprocess.run(
    [python, str(ROOT / 'benchmarks' / name), *flags],
    cwd=ROOT,
    check=True,
    text=True,
    stdout=subprocess.PIPE,
  ).stdout
  return json.loads(out.strip().splitlines()[-1])


def bench(example: str, options: list[str]) -> dict[str, Any]:
  """Returns the numbers of `python -m t5x_gpu.bench`: the step alone, as the bare step is timed."""
  with tempfile.TemporaryDirectory() as folder:
    out = os.path.join(folder, 'result.json')
    subprocess.run(
      [
        sys.executable,
        '-m',
        't5x_gpu.bench',
        *BARE_STEPS,
        '--warmup',
        '2',
        f'--gin_file=gin_configs/examples/{example}.gin',
        *options,
        '--json',
        out,
      ],
      cwd=ROOT,
      check=True,
      stdout=subprocess.DEVNULL,
    )
    with open(out) as f:
      result = json.load(f)
  return {
    key: result[key]
    for key in ('step_seconds', 'cpu_seconds_per_step', 'compile_seconds', 'tokens_per_second')
  }


def _processor() -> str:
  """Returns the processor's name, family and model, as Linux tells them; '' elsewhere."""
  info = pathlib.Path('/proc/cpuinfo')
  lines = info.read_text().splitlines() if info.exists() else []
  fields = dict(
    reversed([[x.strip() for x in line.split(':', 1)] for line in lines if ':' in line])
  )
  found = [f'{key} {fields[key]}' for key in ('model name', 'cpu family', 'model') if key in fields]
  return ''.join(f', {each}' for each in found)


def median_of(rounds: list[dict[str, Any]]) -> dict[str, Any]:
  return {
    key: round(statistics.median(r[key] for r in rounds), 4)
    if isinstance(rounds[0][key], (int, float))
    else rounds[0][key]
    for key in rounds[0]
  }


def commit() -> str:
  """Returns the commit of this checkout, with '-dirty' if files differ from it; '' without git."""
  return subprocess.run(
    ['git', 'describe', '--always', '--dirty', '--exclude=*'],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
  ).stdout.strip()


def measure(repeats: int, torch: Optional[str], *, runs: bool) -> dict[str, Any]:
  """Returns medians over `repeats` rounds; of whole runs, too, if `runs`."""
  results: dict[str, list[dict[str, Any]]] = {}
  for i in range(repeats):
    for example, options in RUNS.items() if runs else ():
      results.setdefault(f't5x_gpu {example}', []).append(train(example, options))
    results.setdefault(f't5x_gpu.bench {TIMED_ALONE}', []).append(
      bench(TIMED_ALONE, RUNS[TIMED_ALONE])
    )
    results.setdefault(f'bare jax step, {TIMED_ALONE}', []).append(
      script(sys.executable, 'bare_step.py', *BARE_STEPS)
    )
    if torch:
      results.setdefault(f'PyTorch step, {TIMED_ALONE}', []).append(script(torch, 'torch_step.py'))
    print(f'round {i + 1} of {repeats} done', flush=True)
  return {name: median_of(rounds) for name, rounds in results.items()}


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--torch', metavar='PYTHON', help='a Python that has PyTorch')
  parser.add_argument('--only_steps', action='store_true', help='time no whole runs')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  if args.only_steps and args.out == OUT:
    parser.error(f'--only_steps needs --out: {OUT.name} has whole runs, too')
  measured = commit()
  load = os.getloadavg()[0]
  if load > 0.5:
    print(f'Something else is running (load {load:.1f}); the seconds will be too long.')
  results = measure(args.repeats, args.torch, runs=not args.only_steps)
  versions = subprocess.run(
    [
      sys.executable,
      '-c',
      'import jax, flax, optax; print(jax.__version__, flax.__version__, optax.__version__)',
    ],
    text=True,
    stdout=subprocess.PIPE,
    check=True,
  ).stdout.split()
  report = {
    'command': ' '.join(
      ['python', 'benchmarks/cpu.py', *(os.path.basename(word) for word in sys.argv[1:])]
    ),
    'commit': measured,
    'date': datetime.date.today().isoformat(),
    'load_at_start': load,
    'machine': f'{os.cpu_count()} CPU cores, {platform.machine()}{_processor()}',
    'python': platform.python_version(),
    'jax, flax, optax': versions,
    'repeats': args.repeats,
    'medians': results,
  }
  args.out.write_text(json.dumps(report, indent=1) + '\n')
  print(json.dumps(report, indent=1))


if __name__ == '__main__':
  main()
