"""Runs the parts of the GPU benchmark, each in a separate process with a time limit.

Finished parts are kept in OUT/results.json and skipped by the next call, so a call that is cut off,
or that runs out of its time, loses at most the part it was in. Parts that failed are tried again
after the new ones. Written too: OUT/table.md, OUT/log.txt, OUT/tuned with block sizes of Tokamax's
kernels, and OUT/compiled with programs and XLA's tuning, which the next call reads (or
$JAX_COMPILATION_CACHE_DIR).
"""

import argparse
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Optional

from benchmarks.gpu import machine, report
from benchmarks.gpu.one_part import DONE, MISSING, NO_GPU, SKIPPED
from benchmarks.gpu.parts import PARTS, Part, Row
from t5x_gpu.errors import did_you_mean
from t5x_gpu.storage.files import atomic_write

COMPILED = 'JAX_COMPILATION_CACHE_DIR'
SECONDS = 530  # of a call, after which it starts no part
LEAST_SECONDS = 25  # a part that would get less than this is left to the next call

NO_TOKAMAX = (
  'tokamax is not installed: attention runs without a kernel, and the table marks such rows. '
  'pip install tokamax, unless that is what you want to measure.'
)

Results = dict[str, Row]  # by part


def parse(argv: list[str]) -> argparse.Namespace:
  """Returns the flags; exits with a message if one is wrong."""
  parser = argparse.ArgumentParser(
    'scripts/bench_gpu.sh',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
    epilog='parts, in the order in which they run:\n  '
    + '\n  '.join(f'{part.name} ({part.limit_seconds} s)' for part in PARTS)
    + f'\nAll limits together are {sum(part.limit_seconds for part in PARTS)} s.',
  )
  parser.add_argument(
    '--out', type=pathlib.Path, help='folder of results; build/bench_gpu, or bench_gpu_small'
  )
  parser.add_argument('--parts', help='only these, with commas between: ceilings,loss')
  parser.add_argument('--again', action='store_true', help='also run finished parts')
  parser.add_argument(
    '--seconds',
    type=int,
    default=SECONDS,
    help=f'start no part after this time (default {SECONDS})',
  )
  parser.add_argument(
    '--small', '--dry_run', action='store_true', help='tiny sizes on the CPU: does the code work?'
  )
  args = parser.parse_args(argv)
  names = [part.name for part in PARTS]
  args.parts = args.parts.split(',') if args.parts else names
  for name in args.parts:
    if name not in names:
      parser.error(f'--parts: there is no part {name!r}.{did_you_mean(name, names)}')
  folder = pathlib.Path('build') / ('bench_gpu_small' if args.small else 'bench_gpu')
  args.out = args.out or folder
  return args


def main(argv: Optional[list[str]] = None) -> int:
  """Returns 0 if every part is finished, 1 if some are left, 130 after Ctrl-C."""
  args = parse(sys.argv[1:] if argv is None else argv)
  deadline = time.monotonic() + args.seconds
  args.out.mkdir(parents=True, exist_ok=True)
  if not args.small and importlib.util.find_spec('tokamax') is None:
    print(NO_TOKAMAX, file=sys.stderr)
  results = read(args.out / 'results.json')
  try:
    for part in left(args, results):
      seconds = deadline - time.monotonic()
      if seconds < min(LEAST_SECONDS, part.limit_seconds):
        break
      run(part, args, results, limit=min(part.limit_seconds, seconds))
      write(args.out, results)
      print(report.line(part.name, results[part.name]), flush=True)
      if results[part.name]['status'] == 'no GPU':
        break  # the others would fail in the same way
  except KeyboardInterrupt:
    print('Stopped. Finished parts are kept.', file=sys.stderr)
    return 130
  write(args.out, results)
  print(f'\n{report.table(results)}\nWritten to {args.out}/table.md and results.json.')
  unfinished = [n for n in args.parts if not finished(results.get(n), args)]
  if unfinished:
    print(f'{len(unfinished)} parts are left; the same command continues: {", ".join(unfinished)}.')
  return 1 if unfinished else 0


def read(path: pathlib.Path) -> Results:
  """Returns the results of earlier calls."""
  return json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}


def left(args: argparse.Namespace, results: Results) -> list[Part]:
  """Returns the parts to run: untried parts first, then failed parts."""
  chosen = [part for part in PARTS if part.name in args.parts]
  if not args.again:
    chosen = [part for part in chosen if not finished(results.get(part.name), args)]
  return sorted(chosen, key=lambda part: part.name in results)


def finished(result: Optional[Row], args: argparse.Namespace) -> bool:
  """Returns whether a part need not run again; one that lacks something may now find it."""
  return (
    result is not None and result['status'] in ('done', 'skipped') and result['small'] == args.small
  )


def run(part: Part, args: argparse.Namespace, results: Results, *, limit: float) -> None:
  """Runs `part` for at most `limit` seconds and puts its result into `results`.

  The result of an earlier attempt stays if both were killed and the earlier one has more rows.
  """
  begin, clocks = time.monotonic(), machine.clocks()
  with tempfile.TemporaryDirectory() as folder, open(args.out / 'log.txt', 'ab') as log:
    rows = pathlib.Path(folder) / 'rows.json'
    command = [sys.executable, '-m', 'benchmarks.gpu.one_part', part.name, '--rows', str(rows)]
    command += ['--results', str((args.out / 'results.json').resolve())]
    command += ['--tuned', str((args.out / 'tuned').resolve())]
    log.write(f'\n== {part.name}\n'.encode())
    log.flush()
    start = log.tell()
    child = subprocess.Popen(
      [*command, *(['--small'] if args.small else [])],
      cwd=machine.ROOT,
      env=environment(args),
      stdout=log,
      stderr=subprocess.STDOUT,
      start_new_session=True,  # Ctrl-C and the limit end all of its processes, here
    )
    try:
      code: Optional[int] = child.wait(limit)
    except subprocess.TimeoutExpired:
      code = None
    finally:
      _kill(child)
    found = json.loads(rows.read_text(encoding='utf-8')) if rows.exists() else []
  status, reason = _outcome(code, limit, args.out / 'log.txt', start)
  before = results.get(part.name, {})
  if status == before.get('status') == 'killed' and len(found) < len(before['rows']):
    return  # the earlier attempt had more time, and measured more
  results[part.name] = {
    'status': status,
    'reason': reason,
    'small': args.small,
    'seconds': round(time.monotonic() - begin, 1),
    'limit_seconds': part.limit_seconds,
    'machine': machine.describe(),
    'clocks': [clocks, machine.clocks()],
    'command': ' '.join(['scripts/bench_gpu.sh', f'--parts={part.name}', *small_flag(args)]),
    'rows': found,
  }


def environment(args: argparse.Namespace) -> dict[str, str]:
  """Returns the variables of a part."""
  environ = dict(os.environ, JAX_PLATFORMS='cpu' if args.small else 'cuda', PYTHONUNBUFFERED='1')
  if not args.small:  # --small does not cache compiled programs
    # A part that is killed has tuned some of its kernels; the next call takes up there.
    environ.setdefault(COMPILED, str((args.out / 'compiled').resolve()))
  return environ


def small_flag(args: argparse.Namespace) -> list[str]:
  return ['--small'] if args.small else []


def _kill(child: subprocess.Popen) -> None:
  try:
    os.killpg(child.pid, signal.SIGKILL)
  except ProcessLookupError:
    pass
  child.wait()


def _outcome(
  code: Optional[int], limit: float, log: pathlib.Path, start: int
) -> tuple[str, Optional[str]]:
  """Returns (status, reason) of a part that ended with exit code `code`, None if it was killed."""
  if code == DONE:
    return 'done', None
  if code is None:
    return 'killed', f'reached its limit of {limit:.0f} s'
  with open(log, 'rb') as f:
    f.seek(start)
    lines: list[Any] = f.read().decode(errors='replace').strip().splitlines()
  last = lines[-1][:500] if lines else f'exit code {code}'
  statuses = {MISSING: 'missing', SKIPPED: 'skipped', NO_GPU: 'no GPU'}
  return statuses.get(code, 'failed'), last


def write(out: pathlib.Path, results: Results) -> None:
  """Writes results and table."""
  for name, text in (
    ('results.json', json.dumps(results, indent=1)),
    ('table.md', report.table(results) + '\n'),
  ):
    with atomic_write(out / name) as path:
      path.write_text(text, encoding='utf-8')


if __name__ == '__main__':
  sys.exit(main())
