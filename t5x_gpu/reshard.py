"""Write a checkpoint anew: other dtypes, chunks or groups of layers, with or without the optimizer.

`python -m t5x_gpu.reshard --from=CHECKPOINT --to=FOLDER`. It reads no model and needs no GPU; the
host memory that it takes has a bound, and a call that was cut off goes on (docs/reshard.md).
"""

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.convert.tensor_copy import FLOATS
from t5x_gpu.checkpoint.storage.chunks import CHUNK_BYTES
from t5x_gpu.checkpoint.storage.paths import as_path
from t5x_gpu.checkpoint.tools.reshard import Request, reshard
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.console import Console

PROG = 'python -m t5x_gpu.reshard'
EXAMPLES = """examples:
  {prog} --from=runs/a --to=runs/a_bf16 --dtype=bfloat16 --drop_optimizer
  {prog} --from=runs/a/checkpoint_1000 --to=runs/b --layout=8x2 --memory=1GiB --verify
  {prog} --from=runs/a --to=runs/per_layer --unscan
  {prog} --from=s3://bucket/runs/a --to=runs/a                  from object storage, or to it

The same command goes on with what an earlier one, cut off, has left. Any checkpoint restores onto
any mesh: a layout is for speed alone.
"""
_UNITS = {'': 1, 'KB': 10**3, 'MB': 10**6, 'GB': 10**9, 'KIB': 2**10, 'MIB': 2**20, 'GIB': 2**30}


def _size(text: str) -> int:
  match = re.fullmatch(r'(\d+(?:\.\d+)?)\s*([KMG]I?B)?', text.strip(), re.IGNORECASE)
  if not match or float(match[1]) <= 0:
    raise argparse.ArgumentTypeError(f'{text!r} is no size such as 2GiB or 500MB')
  return int(float(match[1]) * _UNITS[(match[2] or '').upper()])


def _layout(text: str) -> tuple[int, ...]:
  parts = text.split('x')
  if not all(part.isdecimal() and int(part) for part in parts):
    raise argparse.ArgumentTypeError(f'{text!r} is no layout such as 8 or 8x2')
  return tuple(map(int, parts))


def _flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('reshard')
  group.add_argument(
    '--from', dest='source', metavar='FOLDER', help='a MODEL_DIR, or one of its checkpoints'
  )
  group.add_argument('--to', metavar='FOLDER', help='new MODEL_DIR')
  group.add_argument('--step', type=int, metavar='N', help='which checkpoint (default: the latest)')
  group.add_argument('--dtype', choices=tuple(FLOATS), help='of parameters (default: as they are)')
  group.add_argument(
    '--optimizer_dtype', choices=tuple(FLOATS), help='of the optimizer state (default: as it is)'
  )
  group.add_argument(
    '--drop_optimizer',
    action='store_true',
    help='parameters alone: for eval, infer and warm starts, not to be resumed',
  )
  group.add_argument(
    '--layout',
    type=_layout,
    default=(),
    metavar='NxN',
    help=(
      'cut the largest dimension of each array into N chunks, the next into N: what a mesh of '
      'fsdp=8 and model=2 reads is 8x2 (default: chunks as they are)'
    ),
  )
  group.add_argument(
    '--chunk_size',
    type=_size,
    default=CHUNK_BYTES,
    metavar='SIZE',
    help=f'of a chunk at most (default: {CHUNK_BYTES >> 20}MiB)',
  )
  form = group.add_mutually_exclusive_group()
  form.add_argument(
    '--unscan', dest='unscan', action='store_const', const=True, help='an array for each layer'
  )
  form.add_argument(
    '--scan',
    dest='unscan',
    action='store_const',
    const=False,
    help='one array for all layers (default: as it is)',
  )
  group.add_argument('--verify', action='store_true', help='read everything again at the end')
  group.add_argument(
    '--memory',
    type=_size,
    default='2GiB',
    metavar='SIZE',
    help='bound of the host memory for arrays (default: 2GiB)',
  )


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and writes."""
  logging_setup.quiet_environment()
  jax.config.update('jax_platforms', 'cpu')  # no GPU is needed, nor taken from a run
  args = cli.parse_args(
    PROG,
    __doc__.splitlines()[0],
    sys.argv[1:] if argv is None else argv,
    extra=_flags,
    gin_file_required=False,
    takes_config=False,
    examples=EXAMPLES,
  )
  extra = args.extra
  if args.has_config:
    raise ConfigError(f'{PROG} takes no configuration.', fix='Leave --gin_file and --gin.X out.')
  missing = [flag for flag, value in (('--from', extra.source), ('--to', extra.to)) if not value]
  if missing:
    raise ConfigError(
      f'{" and ".join(missing)} must be given.', fix=f'{PROG} --from=CHECKPOINT --to=NEW_FOLDER'
    )
  if extra.drop_optimizer and extra.optimizer_dtype:
    raise ConfigError(
      '--optimizer_dtype means nothing with --drop_optimizer.', fix='Leave one of the two out.'
    )
  logging_setup.setup()
  console = Console()
  request = Request(
    source=as_path(extra.source),
    target=as_path(extra.to),
    step=extra.step,
    dtype=extra.dtype,
    optimizer_dtype=extra.optimizer_dtype,
    drop_optimizer=extra.drop_optimizer,
    layout=extra.layout,
    chunk_bytes=extra.chunk_size,
    unscan=extra.unscan,
    verify=extra.verify,
    memory=extra.memory,
  )
  try:
    with sigterm_raises():
      console.say(f'done: {reshard(request, progress=console.progress, say=console.say)}')
  except (KeyboardInterrupt, SystemExit):
    console.say(f'{extra.to} is unfinished: the same command goes on.')
    raise
  return 0


if __name__ == '__main__':
  cli.run_main(main)
