"""`python -m t5x_gpu.config explain KEY | show | diff A.gin B.gin`: where values come from."""

import argparse
import dataclasses
import sys
from typing import Optional

from t5x_gpu import cli
from t5x_gpu.config import gin_loader, report
from t5x_gpu.config.provenance import Provenance
from t5x_gpu.errors import ConfigError

PROG = 'python -m t5x_gpu.config'
DESCRIPTION = 'Shows where the values of a run come from and what they override; runs nothing.'
EXAMPLES = """examples:
  {prog} explain BATCH_SIZE --gin_file=my.gin       one value; part of a name is enough
  {prog} show --gin_file=my.gin --gin.BATCH_SIZE=8  all values
  {prog} diff a.gin b.gin                           what differs between two
"""


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('command', choices=('explain', 'show', 'diff'))
  parser.add_argument('names', nargs='*', metavar='KEY|FILE')
  parser.add_argument(
    '--entry',
    default=gin_loader.ENTRY,
    metavar='MODULE.FUNCTION',
    help='function that the configuration is for (default: %(default)s)',
  )


def main(argv: Optional[list[str]] = None) -> Optional[int]:
  """Answers one command on standard output."""
  args = cli.parse_args(
    PROG, DESCRIPTION, argv, extra=_flags, gin_file_required=False, examples=EXAMPLES
  )
  command, names = args.extra.command, args.extra.names
  wanted = {'show': 0, 'diff': 2}.get(command, max(1, len(names)))
  if len(names) != wanted:
    raise ConfigError(
      f'{command} takes {wanted} name(s), got {len(names)}: {" ".join(names)}',
      fix=f'{PROG} --help shows the usage.',
    )
  if command != 'diff' and not args.gin_files:
    raise ConfigError('No --gin_file is given.', fix=f'{PROG} {command} ... --gin_file=FILE')

  def provenance_of(files: tuple[str, ...]) -> Provenance:
    config = dataclasses.replace(args, gin_files=files).load(entry=args.extra.entry)
    for note in config.notes:
      print(f'note: {note}', file=sys.stderr)
    return config.provenance

  if command == 'diff':
    a, b = (provenance_of((*args.gin_files, name)) for name in names)
    print('\n'.join(report.diff(a, b)) or 'No value differs.')
    return None
  provenance = provenance_of(args.gin_files)
  if command == 'show':
    report.print_table(provenance)
  else:
    for name in names:
      print('\n'.join(report.explain(provenance, name)))
  return None
