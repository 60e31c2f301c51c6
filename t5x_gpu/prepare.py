"""Tokenize and pack a task once: `python -m t5x_gpu.prepare --gin_file=MY.gin --output=DIR`.

The result is ArrayRecord shards with an index. A run reads them with MIXTURE_OR_TASK_NAME =
'prepared:DIR' and no other change (docs/data.md).
"""

import argparse
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Iterable
from typing import Optional

import rich.console

from t5x_gpu import cli
from t5x_gpu.config.gin_loader import LoadedConfig
from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.data_module import open_preparation
from t5x_gpu.data.prepared.index import INDEX, Index, Shard
from t5x_gpu.data.prepared.output_folder import Parts, SplitFolder, open_split
from t5x_gpu.data.prepared.workers import ShardJob, Workers
from t5x_gpu.errors import NoExamplesError
from t5x_gpu.runtime.process_exit import sigterm_raises
from t5x_gpu.storage.user_paths import expanded_path
from t5x_gpu.terminal import logging_setup, streams
from t5x_gpu.terminal.console import show
from t5x_gpu.terminal.flag_types import positive_int
from t5x_gpu.terminal.progress import bar

EXAMPLES = """examples:
  {prog} --gin_file=my.gin --output=/data/my_rows
  {prog} --gin_file=my.gin --output=/data/my_rows --split=train --workers=32
  python -m t5x_gpu.train --gin_file=my.gin --gin.MIXTURE_OR_TASK_NAME=prepared:/data/my_rows

Take the gin file of the run: it sets the text, the lengths, packing and the model. After an
interruption the same command continues.
"""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _Split:
  """One split to prepare.

  Attributes:
    trains: whether it is the training split.
    required: whether it is an error if the split is empty; otherwise it is skipped.
  """

  config: DatasetConfig
  spec: BatchSpec
  feature_converter: str
  index: Index
  trains: bool
  required: bool


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('prepare')
  group.add_argument(
    '--output', metavar='DIR', help='folder for the rows, with a subfolder per split'
  )
  group.add_argument(
    '--split',
    action='append',
    default=[],
    metavar='NAME',
    help=(
      'which split; may be repeated (default: the training split, and the evaluation split if the '
      'gin file evaluates the same task)'
    ),
  )
  group.add_argument(
    '--workers',
    type=positive_int,
    metavar='N',
    help='processes (default: one per core); the rows do not depend on it',
  )
  group.add_argument(
    '--shards',
    type=positive_int,
    metavar='N',
    help=(
      'files per task (default: one per 64 MiB of text, at least 4); rows are packed within a file'
    ),
  )


def _splits(loaded: LoadedConfig, names: list[str], num_parts: Optional[int]) -> list[_Split]:
  """Returns the splits to prepare, checked against the model."""
  settings = ('model', 'train_dataset_cfg', 'train_eval_dataset_cfg')
  run = loaded.arguments(only=settings)
  model, train, evaluated = (run[name] for name in settings)
  known = {train.split: train}
  if evaluated is not None and (evaluated.mixture_or_task_name == train.mixture_or_task_name):
    known.setdefault(evaluated.split, evaluated)
  found = []
  for name in names or list(known):
    config = known.get(name) or dataclasses.replace(train, split=name)
    spec = model.batch_spec(config.task_feature_lengths, batch_size=1, pack=config.pack)
    converter = model.feature_converter(config.task_feature_lengths)
    trains = name == train.split
    required = trains or bool(names)
    try:
      made = open_preparation(config, spec=spec, feature_converter=converter)
    except NoExamplesError as e:
      if required:
        raise
      _log_skipped(name, e)
    else:
      plan = made.plan(num_parts=num_parts)
      found.append(_Split(config, spec, converter, plan, trains, required))
  return found


def _log_skipped(split: str, reason: NoExamplesError) -> None:
  _log.warning('Skipping %s; a run on these rows does not evaluate. %s', split, reason.what)


def _prepare(folder: SplitFolder, split: _Split, *, workers: Workers) -> Optional[Index]:
  """Writes the missing shards; returns the index, or None if the split was already complete."""
  if not folder.todo and (folder.path / INDEX).exists():
    return None
  jobs = [
    ShardJob(
      split.config,
      split.spec,
      split.feature_converter,
      folder.path,
      name,
      part,
      split.index.members[name].num_shards,
    )
    for name, part in folder.todo
  ]
  written: Parts = {}
  rows = tokens = 0
  begin, done = time.monotonic(), len(folder.finished)

  def rate() -> str:
    if not rows:
      return ''
    seconds = max(time.monotonic() - begin, 1e-9)
    padding = 1 - tokens / (rows * split.index.tokens_per_row)
    return (
      f', {rows:,} rows, {rows / seconds:,.0f} rows/s, {tokens / seconds:,.0f} tokens/s, '
      f'padding {padding:.1%}'
    )

  with (
    bar(f'{split.index.split}: shards', done + len(jobs), done=done, note=rate) as advance,
    contextlib.closing(workers.write(jobs)) as events,
  ):
    for job, event in events:
      if isinstance(event, Shard):
        written[job.task, job.part] = event
        advance(1)
      else:
        rows, tokens = rows + event.rows, tokens + event.tokens
        advance(0)
  return folder.finish(
    written, max_corrupt_fraction=split.config.max_corrupt_fraction, trains=split.trains
  )


def _summary(index: Index) -> Iterable[str]:
  """Yields lines about the content of a split."""
  size = sum(shard.bytes for member in index.members.values() for shard in member.shards)
  yield (
    f'{index.split}: {index.rows:,} rows, {index.tokens:,} tokens, padding '
    f'{index.padding:.1%}, {show(size, MB=",.1f")}'
  )
  for name, member in index.members.items():
    if member.records.damaged:
      yield (
        f'  {name}: skipped {member.records.damaged:,} damaged records of {member.records.read:,}'
      )
  if len(index.members) > 1:
    for name, member in index.members.items():
      yield f'  {name}: {member.rows:,} rows, {member.tokens:,} tokens, rate {member.rate:g}'


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files, then prepares each split."""
  args = cli.parse_args(
    'python -m t5x_gpu.prepare', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  extra = args.extra
  cli.check_given('Add --output=DIR, a folder for the rows.', output=extra.output)
  if not args.dry_run:
    streams.outlive()  # the command writes files, so it continues without standard output
  logging_setup.quiet_environment()
  loaded = args.load_with_classes()
  logging_setup.setup()
  splits = _splits(loaded, extra.split, extra.shards)
  output = expanded_path(extra.output)
  console = rich.console.Console(markup=False, highlight=False, soft_wrap=True)
  with Workers(extra.workers or len(os.sched_getaffinity(0))) as workers:
    for split in splits:
      shards = {name: member.num_shards for name, member in split.index.members.items()}
      if args.dry_run:
        console.print(
          f'Dry run: {output / split.config.split} would get shards of '
          f'{", ".join(f"{name} ({number})" for name, number in shards.items())}.'
        )
        continue
      with sigterm_raises(), open_split(output / split.config.split, split.index) as folder:
        if folder.finished and folder.todo:
          console.print(
            f'{split.config.split}: {len(folder.finished)} shards are finished and unchanged, '
            f'{len(folder.todo)} remain.'
          )
        try:
          index = _prepare(folder, split, workers=workers)
        except NoExamplesError as e:
          if not split.trains:
            folder.remove()  # otherwise a run would take it for unfinished
          if split.required:
            raise
          _log_skipped(split.config.split, e)
          continue
      if index is None:
        console.print(f'{split.config.split}: already complete, every byte unchanged.')
      else:
        console.print('\n'.join(_summary(index)))
  if not args.dry_run:
    console.print(
      f"Train on it: the same gin file with --gin.MIXTURE_OR_TASK_NAME='prepared:{output}'"
    )
  return 0


if __name__ == '__main__':
  # Imported under its own name, because the workers import it too.
  from t5x_gpu.prepare import main as main_

  cli.run_main(main_)
