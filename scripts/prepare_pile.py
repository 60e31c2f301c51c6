"""Turns shards of The Pile (.jsonl.zst) into TFRecord or ArrayRecord files of tf.train.Examples.

    python scripts/prepare_pile.py --output=DIR pile/train/*.jsonl.zst
    python scripts/prepare_pile.py --output=DIR --sets='Wikipedia (en),ArXiv' pile/train

Each record has `text` and `pile_set_name`. Files are done side by side; the same command again goes
on where it was cut off, a file at a time. Train on them with
MIXTURE_OR_TASK_NAME = 'arrayrecord:DIR/*.arrayrecord'. To train on the .jsonl.zst as they are:
'jsonl:pile/train/*.jsonl.zst', which python -m t5x_gpu.prepare takes too.
"""

import argparse
import collections
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import signal
import sys
from collections.abc import Iterator
from typing import Any, Optional

import rich.console
import rich.progress
from array_record.python.array_record_module import ArrayRecordWriter

from t5x_gpu.data.sources.corrupt_records import Damage
from t5x_gpu.data.sources.discovery import matching_files
from t5x_gpu.data.sources.json_lines import json_value
from t5x_gpu.data.sources.rows import limited_lines, open_stream
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError, UserError
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.storage.files import atomic_write

SETTINGS = 'prepare_pile.json'
DONE = '.done.json'
PARTIAL = '.partial'
_LINES_PER_COUNT = 1000


def documents(
  path: str, *, sets: Optional[frozenset[str]], max_corrupt_fraction: float
) -> Iterator[tuple[str, str]]:
  """Yields (text, set) of the lines of a shard; with `sets`, of these sets alone.

  Raises:
    DataError: more damaged lines than allowed, or a file that breaks off.
  """
  damage = Damage(num_files=1)
  damage.max_fraction = max_corrupt_fraction
  first = number = 0
  damaged: list[DataError] = []
  try:
    with open_stream(path) as f:
      for number, line in enumerate(limited_lines(f, path), 1):
        try:
          record = json_value(line)
          text, name = record['text'], record.get('meta', {}).get('pile_set_name', '')
          if not isinstance(text, str) or not isinstance(name, str):
            raise TypeError('its text or pile_set_name is not a string')
        except (ValueError, TypeError, KeyError, AttributeError) as e:
          damaged.append(
            DataError(
              f'{path}:{number} is not a document of The Pile: {type(e).__name__}: {e}.',
              fix='Remove that line.',
            )
          )
        else:
          if text.strip() and (sets is None or name in sets):
            yield text, name
        if number - first == _LINES_PER_COUNT or damaged and not max_corrupt_fraction:
          damage.count(path, first=first, num_records=number - first, damaged=damaged)
          first, damaged = number, []
  except (OSError, EOFError) as e:
    raise DataError(
      f'{path} breaks off after line {number}: {e}.', fix='Download that file again.'
    ) from e
  if number > first:
    damage.count(path, first=first, num_records=number - first, damaged=damaged)
  damage.end_of_file(path, num_records=number)


class _Files:
  """Writes records into NAME-00000.FORM, NAME-00001.FORM, ...; each appears once it is whole."""

  def __init__(self, folder: pathlib.Path, name: str, *, form: str, max_bytes: int):
    self._folder, self._name, self._form = folder, name, form
    self._max_bytes = max_bytes
    self._writer: Any = None
    self._bytes = 0
    self.files: list[str] = []

  def write(self, record: bytes) -> None:
    """Writes one record."""
    if self._writer is None:
      self.files.append(f'{self._name}-{len(self.files):05d}.{self._form}')
      partial = str(self._folder / (self.files[-1] + PARTIAL))
      self._writer = (
        ArrayRecordWriter(partial, 'group_size:1,zstd:3')
        if self._form == 'arrayrecord'
        else tf.io.TFRecordWriter(partial)
      )
      self._bytes = 0
    self._writer.write(record)
    self._bytes += len(record)
    if self._bytes >= self._max_bytes:
      self.close()

  def close(self) -> None:
    """Ends the file that is being written."""
    if self._writer is not None:
      self._writer.close()
      self._writer = None
      path = self._folder / self.files[-1]
      os.replace(path.with_name(path.name + PARTIAL), path)


def _name_of(path: str) -> str:
  return os.path.basename(path).partition('.jsonl')[0]


def convert(path: str, folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, int]:
  """Writes the documents of one shard, atomically; returns their number per set."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the parent ends the workers
  sets = frozenset(settings['sets']) if settings['sets'] is not None else None
  files = _Files(
    folder, _name_of(path), form=settings['format'], max_bytes=settings['file_megabytes'] * 10**6
  )
  counts: collections.Counter[str] = collections.Counter()
  for text, name in documents(
    path, sets=sets, max_corrupt_fraction=settings['max_corrupt_fraction']
  ):
    feature = {
      key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode('utf-8', 'replace')]))
      for key, value in (('text', text), ('pile_set_name', name))
    }
    files.write(
      tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString(
        deterministic=True
      )
    )
    counts[name] += 1
  files.close()
  done = folder / (_name_of(path) + DONE)
  with atomic_write(done, suffix=PARTIAL) as new:
    new.write_text(json.dumps({'files': files.files, 'documents': counts}), 'utf-8')
  return dict(counts)


def _check_settings(folder: pathlib.Path, settings: dict[str, Any]) -> None:
  path = folder / SETTINGS
  if not path.exists():
    with atomic_write(path, suffix=PARTIAL) as new:
      new.write_text(json.dumps(settings, indent=2), 'utf-8')
    return
  before = json.loads(path.read_text('utf-8'))
  if different := [name for name in settings if settings[name] != before.get(name)]:
    raise DataError(
      f'{folder} was begun with '
      + ', '.join(f'{name} = {before.get(name)!r} (now {settings[name]!r})' for name in different)
      + '.',
      fix='Run the command with the settings of the first call, or give another --output.',
    )


def _inputs(patterns: list[str]) -> list[str]:
  paths = sorted(
    {
      path
      for pattern in patterns
      for path in matching_files(pattern)
      if '.jsonl' in os.path.basename(path)
    }
  )
  names = collections.Counter(map(_name_of, paths))
  if twice := [name for name, count in names.items() if count > 1]:
    raise DataError(
      f'{names[twice[0]]} files are called {twice[0]}.jsonl*; their outputs would '
      'overwrite each other.',
      fix='Convert them into two folders.',
    )
  if not paths:
    raise DataError(
      f'No .jsonl, .jsonl.gz or .jsonl.zst file in {", ".join(patterns)}.',
      fix='Give the shards of The Pile, or their folder.',
    )
  return paths


def run(args: argparse.Namespace) -> None:
  """Converts what is not yet done. Raises DataError as `documents` does."""
  folder = pathlib.Path(args.output).expanduser()
  paths = _inputs(args.inputs)
  folder.mkdir(parents=True, exist_ok=True)
  settings = {
    'format': args.format,
    'file_megabytes': args.file_megabytes,
    'sets': sorted(s.strip() for s in args.sets.split(',')) if args.sets else None,
    'max_corrupt_fraction': args.max_corrupt_fraction,
  }
  _check_settings(folder, settings)
  todo = [path for path in paths if not (folder / (_name_of(path) + DONE)).exists()]
  console = rich.console.Console(highlight=False, soft_wrap=True)
  console.print(f'{len(paths)} files, {len(paths) - len(todo)} done before', markup=False)
  if len(todo) < args.workers and todo:
    console.print(
      f'{len(todo)} files keep {len(todo)} of {args.workers} workers busy: a file is '
      'read by one worker.',
      markup=False,
    )
  counts: collections.Counter[str] = collections.Counter()
  # TensorFlow does not survive a fork.
  context = multiprocessing.get_context('spawn')
  pool = concurrent.futures.ProcessPoolExecutor(args.workers, mp_context=context)
  try:
    with rich.progress.Progress(
      *rich.progress.Progress.get_default_columns(),
      rich.progress.MofNCompleteColumn(),
      console=console,
      disable=not console.is_terminal,
    ) as bar:
      task = bar.add_task('files', total=len(paths), completed=len(paths) - len(todo))
      futures = {pool.submit(convert, path, folder, settings): path for path in todo}
      for future in concurrent.futures.as_completed(futures):
        found = future.result()
        counts.update(found)
        bar.advance(task)
        console.print(f'{futures[future]}: {sum(found.values()):,} documents', markup=False)
  except BaseException:
    for process in list(pool._processes.values()):  # the pool itself would wait for them
      process.kill()
    raise
  finally:
    pool.shutdown(cancel_futures=True)
    for partial in folder.glob('*' + PARTIAL):
      partial.unlink()
  for name, count in counts.most_common():
    console.print(f'  {count:>12,}  {name or "(no set)"}', markup=False)


def main() -> int:
  """Returns the exit code."""
  parser = argparse.ArgumentParser(
    description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('inputs', nargs='+', metavar='FILES', help='shards, patterns or folders')
  parser.add_argument('--output', required=True, metavar='DIR')
  parser.add_argument('--format', choices=('arrayrecord', 'tfrecord'), default='arrayrecord')
  parser.add_argument(
    '--sets', metavar='NAMES', help=('pile_set_names to keep, separated by commas (default: all)')
  )
  parser.add_argument('--file_megabytes', type=int, default=256, help='text per file written')
  parser.add_argument('--workers', type=int, default=os.cpu_count() or 1)
  parser.add_argument(
    '--max_corrupt_fraction',
    type=float,
    default=0.0,
    help=('share of the lines of a file that may be damaged: left out (default: none)'),
  )
  try:
    with sigterm_raises():
      run(parser.parse_args())
  except UserError as e:
    print(f'{type(e).__name__}: {e}', file=sys.stderr)
    return 1
  except KeyboardInterrupt:
    print('Interrupted; files that are done are kept.', file=sys.stderr)
    return 130
  return 0


if __name__ == '__main__':
  sys.exit(main())
