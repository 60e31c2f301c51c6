"""Shows a run in the terminal while it trains. Ctrl-C quits; the run continues."""

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any, Optional

import rich.console
import rich.live

from t5x_gpu import cli
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.run_files import SAMPLES, temporary_folder
from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics.goodput import GOODPUT
from t5x_gpu.metrics.writers import METRICS
from t5x_gpu.reporting.live_view import view
from t5x_gpu.reporting.run_record import RunRecord, read_run

PROG = 'python -m t5x_gpu.top'
EXAMPLES = """examples:
  {prog} runs/a            live, until Ctrl-C
  {prog} runs/a --once     one frame; without a terminal it does the same
  {prog} s3://bucket/a     a run in object storage, as of its last checkpoint

It only reads files of MODEL_DIR.
"""
_SECONDS = 2.0
_SECONDS_REMOTE = 30.0  # a run copies files to object storage only when it saves
_SHARE_OF_TIME = 0.1  # spent reading files: a slow file server is read less often


def _flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument('folders', nargs='*', metavar='MODEL_DIR')
  parser.add_argument('--once', action='store_true', help='print one frame and exit')


class _Source:
  """Reads a run again when its files have changed."""

  def __init__(self, folder: str):
    self._name, self._dir = folder, ModelDir(folder)
    self._copies = temporary_folder() if self._dir.is_remote else None
    self._seen: Any = None
    self._run: Optional[RunRecord] = None
    self.period = 0.0  # seconds until the next reading

  def run(self) -> RunRecord:
    begin = time.monotonic()
    self._dir.refresh()
    state = time.monotonic() if self._copies else self._state()
    if self._run is None or state != self._seen:
      self._run = read_run(self._dir, name=self._name, copies=self._copies)
      self._seen = state
    least = _SECONDS_REMOTE if self._copies else _SECONDS
    self.period = max(least, (time.monotonic() - begin) / _SHARE_OF_TIME)
    return self._run

  def _state(self) -> Any:
    files = [self._dir.path / name for name in (METRICS, GOODPUT, SAMPLES)]
    known = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files if f.is_file()]
    return known, self._dir.steps


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and shows the run."""
  args = cli.parse_args(
    PROG,
    __doc__.splitlines()[0],
    argv,
    extra=_flags,
    without_config='Name the folder of a run.',
    examples=EXAMPLES,
  ).extra
  if len(args.folders) != 1:
    raise ConfigError(
      f'{len(args.folders)} folders are given; top shows one run.'
      if args.folders
      else 'No MODEL_DIR is given.',
      fix=f'Name the folder of a run: {PROG} runs/demo',
    )
  console = rich.console.Console(file=sys.stdout, highlight=False, markup=False, emoji=False)
  unicode = (console.encoding or '').lower().startswith('utf')
  source = _Source(args.folders[0])
  if args.once or not console.is_terminal:
    console.print(view(source.run(), unicode=unicode), soft_wrap=not console.is_terminal)
    return 0
  try:
    _follow(source, console, unicode=unicode)
  except KeyboardInterrupt:  # the way to quit
    pass
  return 0


def _follow(source: _Source, console: rich.console.Console, *, unicode: bool) -> None:
  def frame() -> Any:
    return view(source.run(), unicode=unicode)

  with rich.live.Live(frame(), console=console, auto_refresh=False) as live:
    while True:
      time.sleep(source.period)
      live.update(frame(), refresh=True)


if __name__ == '__main__':
  cli.run_main(main)
