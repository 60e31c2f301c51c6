"""`python -m t5x_gpu.checkpoint inspect | diff | verify | average | prune`."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.model_dir import ModelDir, is_link
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.checkpoint.retention import BEST_IS, Keep
from t5x_gpu.checkpoint.run_lock import check_lock
from t5x_gpu.checkpoint.store import CheckpointAddress, StateReader, find_checkpoint
from t5x_gpu.errors import AccessError, CheckpointError, ConfigError, UserError
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.storage.paths import local_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.console import Console, show
from t5x_gpu.terminal.flag_types import positive_int
from t5x_gpu.terminal.printable import printable
from t5x_gpu.tools.checkpoints import (
  PrunePlan,
  average,
  describe,
  description_text,
  plan_prune,
  prune,
  tree_differences,
  value_differences,
  verify,
)

PROG = 'python -m t5x_gpu.checkpoint'
DESCRIPTION = 'Inspects, compares, verifies, averages and removes checkpoints; needs no GPU.'
EXAMPLES = """examples:
  {prog} inspect runs/a                       contents of the latest checkpoint; --json
  {prog} diff runs/a/checkpoint_100 runs/b    exit code 0: equal, 1: different, 2: error
  {prog} verify runs/a                        all checkpoints; 0: intact, 1: damaged, 2: error
  {prog} average runs/a --last=5 --to=runs/a_mean
  {prog} prune runs/a --keep_last=3 --keep_every=1000        shows what it would remove
  {prog} prune runs/a --keep_last=3 --keep_every=1000 --yes

A FOLDER is a MODEL_DIR, or one of its checkpoints. inspect, diff, verify and average also read from
s3:// and gs://.
"""
ERROR = 2
# Flags, and the commands that take them.
FLAGS = {
  'json': ('inspect',),
  'step': ('inspect', 'verify'),
  'last': ('average',),
  'to': ('average',),
  'keep_last': ('prune',),
  'keep_every': ('prune',),
  'keep_steps': ('prune',),
  'keep_best': ('prune',),
  'metric': ('prune',),
  'best_is': ('prune',),
  'yes': ('prune',),
}


def _steps(text: str) -> tuple[int, ...]:
  if not all(part.isdecimal() for part in text.split(',')):
    raise argparse.ArgumentTypeError(f'{text!r} is not a list of steps such as 100,200')
  return tuple(map(int, text.split(',')))


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('command', choices=COMMANDS)
  parser.add_argument('folders', nargs='*', metavar='FOLDER')
  group = parser.add_argument_group('checkpoint')
  group.add_argument(
    '--step',
    type=int,
    metavar='N',
    help='inspect, verify: which checkpoint (default: the latest; verify: all)',
  )
  group.add_argument('--json', action='store_true', help='inspect: print JSON')
  group.add_argument('--to', metavar='FOLDER', help='average: new folder')
  group.add_argument(
    '--last',
    type=positive_int,
    metavar='N',
    help='average: the last N checkpoints of each MODEL_DIR (default: the latest)',
  )
  group.add_argument('--keep_last', type=positive_int, metavar='N', help='prune: keep the last N')
  group.add_argument(
    '--keep_every', type=positive_int, metavar='K', help='prune: keep steps that are multiples of K'
  )
  group.add_argument(
    '--keep_steps', type=_steps, default=(), metavar='N,N', help='prune: keep these steps'
  )
  group.add_argument(
    '--keep_best', type=positive_int, metavar='N', help='prune: keep the N with the best evaluation'
  )
  group.add_argument(
    '--metric', help='prune: metric that --keep_best compares (default: eval/loss)'
  )
  group.add_argument(
    '--best_is',
    choices=BEST_IS,
    help='prune: whether the smallest or the largest value is best (default: min)',
  )
  group.add_argument('--yes', action='store_true', help='prune: remove them (default: only show)')


def _inspect(args: argparse.Namespace, console: Console) -> int:
  described = describe(args.folders[0], step=args.step)
  print(json.dumps(described, indent=1) if args.json else printable(description_text(described)))
  return 0


def _diff(args: argparse.Namespace, console: Console) -> int:
  a, b = map(StateReader, args.folders)
  lines = tree_differences(a, b)
  for line in lines:
    console.say(line)
  both = sum(a.bytes_of(name) for name in a.shapes if b.shapes.get(name) == a.shapes[name])
  count = 0
  with console.progress('compared', both) as advance:
    for difference in value_differences(a, b, advance=advance):
      console.say(str(difference))
      count += 1
  if lines or count:
    console.say(
      f'{a.path} and {b.path} differ: {len(lines)} arrays in name, shape or dtype, '
      f'{count} in values'
    )
    return 1
  console.say(f'{a.path} and {b.path} hold the same {len(a.shapes)} arrays')
  return 0


def _verify(args: argparse.Namespace, console: Console) -> int:
  opened = ModelDir(args.folders[0])
  found = find_checkpoint(opened, step=args.step)
  is_one = args.step is not None or found.model_dir is not opened
  damaged = 0
  for step in [found.step] if is_one else opened.steps:
    checkpoint = CheckpointAddress(found.model_dir, step)
    try:
      reader = StateReader(checkpoint)
      with console.progress(f'checkpoint_{step} read', reader.num_bytes) as advance:
        verdict = verify(reader, advance=advance)
    except AccessError:
      if is_one or not checkpoint.is_deleted:
        raise
      console.say(f'checkpoint_{step}: its run has deleted it meanwhile')
      continue
    except CheckpointError as e:
      console.say(f'checkpoint_{step}: DAMAGED: {e.what}')
      damaged += 1
      continue
    for name, problem in verdict.damaged.items():
      console.say(f'checkpoint_{step}: DAMAGED: {name} {problem}')
    damaged += bool(verdict.damaged)
    if not verdict.damaged:
      known = verdict.num_arrays - verdict.num_unknown
      unknown = f'; {verdict.num_unknown} can be read but have no checksum'
      console.say(
        f'checkpoint_{step}: {known} arrays match their checksums'
        + (unknown if verdict.num_unknown else '')
      )
  return int(damaged > 0)


def _average(args: argparse.Namespace, console: Console) -> int:
  cli.check_given(f'{PROG} average FOLDER ... --to=NEW_FOLDER', to=args.to)
  readers = []
  for name in args.folders:
    opened = ModelDir(name)
    found = find_checkpoint(opened)
    is_one = found.model_dir is not opened or not args.last
    steps = [found.step] if is_one else opened.steps[-args.last :]
    readers += [ParamsReader(CheckpointAddress(found.model_dir, step)) for step in steps]
  if len(readers) < 2:
    raise ConfigError(
      'There is only one checkpoint to average.',
      fix='Name several folders, or set --last=N with N of at least 2.',
    )
  for reader in readers:
    console.say(f'from: {reader.path}')
  with sigterm_raises():
    step = average(readers, local_path(args.to, what='average --to'), console)
  console.say(f'done: {args.to}: checkpoint_{step}, parameters only')
  return 0


def _prune(args: argparse.Namespace, console: Console) -> int:
  if not (args.keep_last or args.keep_every or args.keep_steps or args.keep_best):
    raise ConfigError(
      'Which checkpoints to keep is not set.',
      fix='Set --keep_last=N, --keep_every=K, --keep_steps=N,N or --keep_best=N.',
    )
  keep = Keep(
    args.keep_last,
    args.keep_every,
    args.keep_steps,
    args.keep_best,
    args.metric or Keep.metric,
    args.best_is or Keep.best_is,
    named_by='--metric',
  )
  model_dir = ModelDir(local_path(args.folders[0], what='prune'))
  plan = plan_prune(model_dir, keep)
  check_lock(model_dir.path)
  _show(plan, console)
  if not args.yes:
    console.say('Nothing was removed. To remove these checkpoints, add --yes.')
    return 0
  prune(plan, removed=lambda step: console.say(f'removed checkpoint_{step}'))
  return 0


def _show(plan: PrunePlan, console: Console) -> None:
  for step in sorted((*plan.kept, *plan.removed)):
    if step in plan.kept:
      console.say(f'keep    checkpoint_{step}: {plan.kept[step]}')
    else:
      path = plan.model_dir.checkpoint(step)
      console.say(
        f'remove  checkpoint_{step}: '
        + (
          f'the link only; its files stay in {os.readlink(path)}'
          if is_link(path)
          else show(plan.removed[step], MB=',.1f')
        )
      )
  total = sum(plan.removed.values())
  console.say(f'keep {len(plan.kept)}, remove {len(plan.removed)}: {show(total, MB=",.1f")}')


COMMANDS: dict[str, Callable[[argparse.Namespace, Console], int]] = {
  'inspect': _inspect,
  'diff': _diff,
  'verify': _verify,
  'average': _average,
  'prune': _prune,
}


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Runs one command; returns its exit code."""
  logging_setup.quiet_environment()
  jax.config.update('jax_platforms', 'cpu')  # never takes a GPU from a run
  args = cli.parse_args(
    PROG,
    DESCRIPTION,
    argv,
    extra=_flags,
    without_config='Leave --gin_file and --gin.X out.',
    examples=EXAMPLES,
  )
  extra = args.extra
  useless = [
    f'--{name}'
    for name, commands in FLAGS.items()
    if getattr(extra, name) not in (None, False, ()) and extra.command not in commands
  ]
  if useless:
    raise ConfigError(
      f'{", ".join(useless)} cannot be used with {extra.command}.',
      fix=f'{PROG} --help explains each flag.',
    )
  wanted = {'diff': 2, 'average': max(len(extra.folders), 1)}.get(extra.command, 1)
  if len(extra.folders) != wanted:
    raise ConfigError(
      f'{extra.command} takes {wanted} folder(s), got {len(extra.folders)}.',
      fix=f'{PROG} --help shows how it is used.',
    )
  logging_setup.setup()
  try:
    return COMMANDS[extra.command](extra, Console())
  except UserError as e:
    if extra.command not in ('diff', 'verify'):
      raise
    print(cli.describe_error(e), file=sys.stderr)  # exit code 1 means "different", as in `diff`
    return ERROR
