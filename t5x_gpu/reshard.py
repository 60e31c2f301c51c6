"""Rewrite a checkpoint: other dtypes, chunks or groups of layers, with or without the optimizer.

`python -m t5x_gpu.reshard --from=CHECKPOINT --to=FOLDER`. It works without the model and
without a GPU, in bounded host memory. The same command continues after an interruption
(docs/reshard.md).
"""

import argparse
from collections.abc import Sequence
from typing import Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.arrays import CHUNK_BYTES
from t5x_gpu.conversion.tensor_copy import FLOATS
from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal import logging_setup, streams
from t5x_gpu.terminal.console import Console
from t5x_gpu.terminal.flag_types import MIB, byte_size
from t5x_gpu.tools.reshard import ReshardRequest, reshard

PROG = 'python -m t5x_gpu.reshard'
EXAMPLES = """examples:
  {prog} --from=runs/a --to=runs/a_bf16 --dtype=bfloat16 --drop_optimizer
  {prog} --from=runs/a/checkpoint_1000 --to=runs/b --layout=8x2 --memory=1GiB --verify
  {prog} --from=runs/a --to=runs/per_layer --unscan
  {prog} --from=s3://bucket/runs/a --to=runs/a                  from object storage, or to it

The same command continues an interrupted one. Any checkpoint restores onto any mesh: a layout only
makes restoring faster.
"""


def _layout(text: str) -> tuple[int, ...]:
  parts = text.split('x')
  if not all(part.isdecimal() and int(part) for part in parts):
    raise argparse.ArgumentTypeError(f'{text!r} is not a layout such as 8 or 8x2')
  return tuple(map(int, parts))


def _flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('reshard')
  group.add_argument(
    '--from', dest='source', metavar='FOLDER', help='a MODEL_DIR, or one of its checkpoints'
  )
  group.add_argument('--to', dest='target', metavar='FOLDER', help='new MODEL_DIR')
  group.add_argument('--step', type=int, metavar='N', help='which checkpoint (default: the latest)')
  group.add_argument(
    '--dtype', choices=tuple(FLOATS), help='new dtype of parameters (default: keep)'
  )
  group.add_argument(
    '--optimizer_dtype',
    choices=tuple(FLOATS),
    help='new dtype of the optimizer state (default: keep)',
  )
  group.add_argument(
    '--drop_optimizer',
    action='store_true',
    help='write only parameters: for eval, infer and warm starts; cannot be resumed',
  )
  group.add_argument(
    '--layout',
    type=_layout,
    default=(),
    metavar='NxN',
    help=(
      'cut the largest dimension of each array into N chunks, the next into N: 8x2 matches what '
      'a mesh of fsdp=8 and model=2 reads (default: keep the chunks)'
    ),
  )
  group.add_argument(
    '--chunk_size',
    dest='chunk_bytes',
    type=byte_size,
    default=CHUNK_BYTES,
    metavar='SIZE',
    help=f'maximum size of a chunk (default: {CHUNK_BYTES // MIB}MiB)',
  )
  form = group.add_mutually_exclusive_group()
  form.add_argument(
    '--unscan', dest='unscan', action='store_const', const=True, help='one array per layer'
  )
  form.add_argument(
    '--scan',
    dest='unscan',
    action='store_const',
    const=False,
    help='one array for all layers (default: keep)',
  )
  group.add_argument('--verify', action='store_true', help='read everything back at the end')
  group.add_argument(
    '--memory',
    type=byte_size,
    default='2GiB',
    metavar='SIZE',
    help='limit of host memory for arrays (default: 2GiB)',
  )


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and writes."""
  logging_setup.quiet_environment()
  jax.config.update('jax_platforms', 'cpu')  # never takes a GPU from a run
  args = cli.parse_args(
    PROG,
    __doc__.splitlines()[0],
    argv,
    extra=_flags,
    without_config='Leave --gin_file and --gin.X out.',
    examples=EXAMPLES,
  )
  extra = args.extra
  usage = f'{PROG} --from=CHECKPOINT --to=NEW_FOLDER'
  cli.check_given(usage, **{'from': extra.source, 'to': extra.target})
  if not args.dry_run:
    streams.outlive()  # the command writes files, so it continues without standard output
  if extra.drop_optimizer and extra.optimizer_dtype:
    raise ConfigError(
      '--optimizer_dtype has no effect with --drop_optimizer.', fix='Leave one of the two out.'
    )
  logging_setup.setup()
  console = Console()
  paths = {'source': as_path(extra.source), 'target': as_path(extra.target)}
  request = ReshardRequest(**{**vars(extra), **paths})
  try:
    with sigterm_raises():
      console.say(f'done: {reshard(request, console)}')
  except (KeyboardInterrupt, SystemExit):
    console.say(f'{extra.target} is unfinished. To continue, run the same command again.')
    raise
  return 0


if __name__ == '__main__':
  cli.run_main(main)
