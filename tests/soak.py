"""Tries for a given time to make a run lose something: `make soak`, or python -m tests.soak.

Draws sequences of runs on changing layouts, kills, damaged files and full disks
(tests/property/test_nothing_is_lost.py) from one seed after the other. A failure is printed with
what happened, its seed and the command that repeats it; the rest continues.
"""

import argparse
import collections
import pathlib
import random
import sys
import tempfile
import time
import traceback
from typing import Optional

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.helpers_xla import set_default_flags
from tests.property.test_nothing_is_lost import ALL_LAYOUTS, Lab, machine

EXAMPLES_PER_SEED = 3
RULES_PER_EXAMPLE = 10


class Log:
  """Counts reports, prints them if asked to, and keeps the last example for a failure."""

  def __init__(self, *, verbose: bool):
    self._verbose = verbose
    self.counts: collections.Counter[str] = collections.Counter()
    self.lines: list[str] = []

  def __call__(self, text: str) -> None:
    kind = 'runs' if 'exit code' in text else 'files damaged'
    self.counts[kind] += 1
    if 'exit code' in text:
      self.counts[f'ended with {text.rpartition(" ")[2]}'] += 1
    self.lines.append(text)
    if self._verbose:
      print(f'  {text}', flush=True)


def try_seed(seed: int, lab: Lab, log: Log) -> bool:
  """Returns whether nothing was lost in the examples of a seed; prints what was."""
  log.lines.clear()
  try:
    run_state_machine_as_test(
      hypothesis.seed(seed)(machine(lab, report=log)),
      settings=settings(
        max_examples=EXAMPLES_PER_SEED,
        stateful_step_count=RULES_PER_EXAMPLE,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
      ),
    )
  except Exception:
    print(f'\nSeed {seed} FAILED. What happened in its examples, the last one at the end:')
    print(*(f'  {line}' for line in log.lines), sep='\n')
    traceback.print_exc(file=sys.stdout)
    print(f'Again: python -m tests.soak --seed={seed} --verbose\n', flush=True)
    return False
  return True


def main(argv: Optional[list[str]] = None) -> int:
  """Returns 1 if anything was lost."""
  parser = argparse.ArgumentParser(
    prog='python -m tests.soak',
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
  )
  parser.add_argument('--minutes', type=float, default=60, help='how long; 60 by default')
  parser.add_argument('--seed', type=int, help='this one alone, to see a failure again')
  parser.add_argument(
    '--layouts',
    default=','.join(ALL_LAYOUTS),
    help=f'of runs; all by default: {", ".join(ALL_LAYOUTS)}',
  )
  parser.add_argument('--verbose', action='store_true', help='print every run')
  flags = parser.parse_args(argv)
  set_default_flags()
  log, failed, tried = Log(verbose=flags.verbose), [], 0
  end = time.monotonic() + 60 * flags.minutes
  seeds = (
    iter([flags.seed]) if flags.seed is not None else iter(lambda: random.randrange(2**32), None)
  )
  with tempfile.TemporaryDirectory(prefix='t5x_gpu_soak_') as folder:
    lab = Lab(pathlib.Path(folder), layouts=flags.layouts.split(','))
    try:
      for seed in seeds:
        tried += 1
        if not try_seed(seed, lab, log):
          failed.append(seed)
        left = end - time.monotonic()
        print(
          f'{tried} seeds, {len(failed)} failed; {summary(log)}; '
          f'{max(left, 0) / 60:.1f} minutes left',
          flush=True,
        )
        if left <= 0:
          break
    except KeyboardInterrupt:
      print('Interrupted.', file=sys.stderr)
      return 130
    finally:
      lab.close()
  print(f'Failed seeds: {failed}' if failed else 'Nothing was lost.')
  return 1 if failed else 0


def summary(log: Log) -> str:
  return ', '.join(f'{count} {what}' for what, count in sorted(log.counts.items()))


if __name__ == '__main__':
  sys.exit(main())
