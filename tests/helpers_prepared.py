"""Prepares data as `python -m t5x_gpu.prepare` does, within this process."""

import functools
import itertools
import pathlib

from t5x_gpu.data import features
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import open_preparation
from t5x_gpu.data.prepared.output_folder import open_split
from t5x_gpu.data.prepared.shard_writer import write_shard


def prepare_here(
  name: str,
  folder: pathlib.Path,
  *,
  num_parts: int = 2,
  converter: str = 'lm',
  stop_after: int = 10**9,
  split: str = 'train',
  lengths=None,
  vocab_size: int = 384,
  num_classes=None,
  trains: bool = True,
  **config,
):
  """Returns the index of `folder`/`split`; None if it stops after some shards, as a kill would."""
  config = DatasetConfig(
    name, lengths or {'targets': 32}, split, 1, mixture_or_task_module='tests.mixed_tasks', **config
  )
  spec = features.batch_spec(
    converter,
    task_feature_lengths=config.task_feature_lengths,
    batch_size=1,
    pack=config.pack,
    vocab_size=vocab_size,
    num_classes=num_classes,
  )
  made = open_preparation(config, spec=spec, feature_converter=converter)
  with open_split(folder / split, made.plan(num_parts=num_parts)) as opened:
    if not opened.todo and (opened.path / 'index.json').exists():
      return 'nothing to do'
    written = {}
    for task, part in itertools.islice(opened.todo, stop_after):
      number = opened.plan.members[task].num_shards
      written[task, part] = write_shard(
        made.rows(task, part=part, num_parts=number),
        split=opened.path,
        task=task,
        part=part,
        num_parts=number,
        names=tuple(made.lengths),
        report=lambda rows, tokens: None,
        records=functools.partial(made.records, task, part=part, num_parts=number),
      )
    if len(written) < len(opened.todo):
      return None
    return opened.finish(written, max_corrupt_fraction=config.max_corrupt_fraction, trains=trains)
