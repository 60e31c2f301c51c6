"""Writes a report of one or several runs: one HTML file that opens offline."""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Optional

from t5x_gpu import cli
from t5x_gpu.errors import ConfigError
from t5x_gpu.reporting import interruptions
from t5x_gpu.reporting.report_page import REPORT, report_page
from t5x_gpu.reporting.run_record import read_runs
from t5x_gpu.storage.files import write_atomically
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal.console import Console

PROG = 'python -m t5x_gpu.report'
EXAMPLES = """examples:
  {prog} runs/a                              writes runs/a/report.html
  {prog} runs/a runs/b --out=ab.html         two runs and their differences
  {prog} s3://bucket/runs/a --out=a.html

It only reads files, so it works while a run trains, and on another machine.
"""


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('folders', nargs='*', metavar='MODEL_DIR')
  parser.add_argument(
    '--out', metavar='FILE', help='the page to write (default: report.html in the first MODEL_DIR)'
  )


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and writes the report."""
  args = cli.parse_args(
    PROG,
    __doc__.splitlines()[0],
    argv,
    extra=_flags,
    without_config='Name folders of runs; their configuration is read from there.',
    examples=EXAMPLES,
  ).extra
  if not args.folders:
    raise ConfigError('No MODEL_DIR is given.', fix=f'Name the folder of a run: {PROG} runs/demo')
  out = _output(args)
  console = Console()
  runs = read_runs(args.folders)
  text = report_page(runs)
  try:
    write_atomically(out, text)
  except OSError as e:
    raise ConfigError(
      f'{out} cannot be written: {e.strerror or e}.', fix='Name another file with --out=FILE.'
    ) from e
  for run in runs:
    for problem in run.problems:
      console.say(f'note: {run.name}: {problem}')
    if run.accounts and (tables := interruptions.printed_tables(run.accounts)):
      console.say((f'{run.name}: ' if len(runs) > 1 else '') + tables)
  console.say(f'{out}: {len(text.encode()) / 1e3:,.0f} kB; open it in a browser.')
  return 0


def _output(args: argparse.Namespace) -> pathlib.Path:
  if args.out:
    cli.check_folders_of(args.out)
    return pathlib.Path(args.out)
  folder = as_path(args.folders[0])
  if not isinstance(folder, pathlib.Path):
    raise ConfigError(
      f'{args.folders[0]!r} is in object storage.', fix='Name a file here: --out=report.html'
    )
  return folder / REPORT


if __name__ == '__main__':
  cli.run_main(main)
