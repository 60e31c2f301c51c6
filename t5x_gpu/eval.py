"""Evaluate checkpoints on held-back data: `python -m t5x_gpu.eval --gin_file=MY.gin`.

Takes the gin file of the run. Computes, over the whole split: the loss, scores of classes, and, for
tasks with metric_fns, SeqIO's metrics of predictions and likelihoods. Evaluates one checkpoint, all
checkpoints of a MODEL_DIR, or new checkpoints of a running run. Skips checkpoints with results.
"""

import argparse
import dataclasses
import functools
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.model_dir import ModelDir, check_writable, shared_model_dir
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.store import CheckpointAddress
from t5x_gpu.config import gin_loader
from t5x_gpu.conversion.to_ours import converted_once
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.entities import entity_kinds
from t5x_gpu.errors import CheckpointError, ConfigError
from t5x_gpu.evaluation.checkpoint_evaluator import (
  CheckpointEvaluator,
  EvalResults,
  Wanted,
  read_if_there,
  short,
  steps_to_evaluate,
  table,
)
from t5x_gpu.evaluation.evaluator import class_names_of
from t5x_gpu.metrics import scores
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.run.config import EvalConfig
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.distributed import DistributedConfig
from t5x_gpu.runtime.main_log import log
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal import logging_setup, streams
from t5x_gpu.terminal.flag_types import positive_int
from t5x_gpu.terminal.printable import printable
from t5x_gpu.terminal.progress import Show, bar, silent
from t5x_gpu.training import schedules
from t5x_gpu.training.adafactor import Adafactor

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --steps=last --split=test
  {prog} --gin_file=my.gin --gin.MODEL_DIR=runs/a --watch

train.train_eval_dataset_cfg in the gin file is the data to evaluate on; --split selects another
split. Flags may change it: --gin.train_eval/DatasetConfig.batch_size=64 (docs/eval.md).
"""
METRICS = ('all', 'loss', 'tasks')


_SETUP = 't5x_gpu.eval.EvalSetup'
# Shapes of the program where examples are not cut: metrics of tasks do not depend on them.
_ANY_LENGTHS = {'inputs': 128, 'targets': 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalSetup:
  """An evaluation of tasks without the gin file of a run. Flags of the command take precedence.

  Attributes:
    model: the model of the checkpoint.
    dataset_cfg: task or mixture with metrics, and its split; examples are not cut if
      task_feature_lengths is None.
    checkpoint: MODEL_DIR, one of its checkpoints, a converted model, or a checkpoint of T5X, which
      is converted into `output_dir` first.
    output_dir: folder of the results.
    steps: as --steps, for a MODEL_DIR.
    decoding_cfg: how to decode predictions; None for greedy decoding.
    partitioner, distributed_cfg, xla_preset: as for a run.
  """

  model: Model
  dataset_cfg: DatasetConfig
  checkpoint: str
  output_dir: str
  steps: str = 'last'
  decoding_cfg: Optional[DecodingConfig] = None
  partitioner: Partitioner = dataclasses.field(default_factory=Partitioner)
  distributed_cfg: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)
  xla_preset: str = 'default'


def evaluate_setup(setup: EvalSetup, options: argparse.Namespace, *, dry_run: bool = False) -> int:
  """Evaluates the checkpoint of `setup` as `evaluate` does; returns the exit code."""
  if options.watch:
    raise ConfigError(
      '--watch waits for the checkpoints of a run; this gin file configures no run.',
      fix='Give the gin file of the run, MODEL_DIR/config.gin.',
    )
  options = argparse.Namespace(**vars(options))
  options.metrics = options.metrics or 'tasks'
  dataset = setup.dataset_cfg
  if dataset.task_feature_lengths is None:
    if options.metrics != 'tasks':
      raise ConfigError(
        f'--metrics={options.metrics} computes the loss, whose rows have fixed lengths; '
        'DatasetConfig.task_feature_lengths is None.',
        fix="Set lengths, as in {'inputs': 512, 'targets': 128}, or leave --metrics out.",
        parameters=('DatasetConfig.task_feature_lengths',),
      )
    dataset = dataclasses.replace(dataset, task_feature_lengths=_ANY_LENGTHS)
  results = shared_model_dir(setup.output_dir, dry_run=dry_run)
  folder = as_path(setup.checkpoint, parameter='EvalSetup.checkpoint')
  wants_all = (options.steps or setup.steps) == 'all'
  found = converted_once(folder, results.path, setup.model, dry_run=dry_run, wants_all=wants_all)
  if found is None:
    log(f'Dry run: {folder} is a T5X checkpoint, which would be converted first.')
    return 0
  step = re.fullmatch(r'checkpoint_(\d+)', found.name)
  is_step = step is not None and (found / 'manifest').is_dir()
  options.steps = options.steps or (str(int(step[1])) if is_step else setup.steps)
  config = EvalConfig(
    model=setup.model,
    model_dir=str(found.parent if is_step else found),
    train_dataset_cfg=dataset,
    train_eval_dataset_cfg=dataset,
    infer_eval_dataset_cfg=setup.dataset_cfg,
    decoding_cfg=setup.decoding_cfg,
    partitioner=setup.partitioner,
    # An evaluation has no updates.
    optimizer=Adafactor(),
    learning_rate=schedules.constant(0.0),
    total_steps=0,
    distributed_cfg=setup.distributed_cfg,
    xla_preset=setup.xla_preset,
  )
  return evaluate(config, options, results=results, dry_run=dry_run)


def evaluate(
  config: EvalConfig,
  options: argparse.Namespace,
  *,
  results: Optional[ModelDir] = None,
  dry_run: bool = False,
) -> int:
  """Evaluates the checkpoints that `options` select; returns the exit code.

  Args:
    config: configuration of the run.
    options: the flags of `_add_flags`.
    results: folder of the results; None for MODEL_DIR.
    dry_run: build, open and check everything, print the plan, write nothing.
  """
  metrics = options.metrics or 'all'
  if results is None:
    model_dir = shared_model_dir(config.model_dir, dry_run=dry_run)
  else:  # nothing is written next to the checkpoint, so its folder may be read-only
    model_dir = ModelDir(as_path(config.model_dir))
  dataset = _dataset(config, options.split)
  wanted = _wanted(options.steps or 'all')
  with distributed.errors_together():
    _check_checkpoints(model_dir, wanted, watch=options.watch)
  evaluator = CheckpointEvaluator(
    config,
    dataset,
    tasks_dataset=config.infer_eval_dataset_cfg,
    decoding=config.decoding_cfg,
    metrics=metrics,
    num_batches=options.batches,
    num_examples=options.examples,
  )
  name = options.name or re.sub(r'\W+', '_', dataset.split)
  if dry_run:
    log(f'Dry run: would evaluate {options.steps or "all"} of steps {model_dir.steps}.')
    return 0
  last_step = config.total_steps if options.watch else None
  queue = functools.partial(
    steps_to_evaluate, model_dir, wanted=wanted, last_step=last_step, timeout=options.timeout
  )
  if not distributed.is_main_process():
    for step in queue(done=distributed.broadcast_json(None)):
      _evaluate_one(CheckpointAddress(model_dir, step), evaluator)
    return 0
  folder = (results or model_dir).path
  facts = _facts(config, dataset, options, metrics=metrics)
  if results is not None:
    facts['checkpoint'] = str(model_dir.path)
  check_writable(folder)
  with (
    RunFiles(folder, is_main=True) as files,
    EvalResults(files.folder, name, facts) as records,
    evaluator,
  ):
    done = distributed.broadcast_json(sorted(records.records))
    if done:
      log(f'Evaluated before: {", ".join(map(str, done))} ({records.path}).')
    for step in queue(done=done):
      values = _evaluate_one(CheckpointAddress(model_dir, step), evaluator, show=bar)
      if values is not None:
        _report(step, values, evaluator, records, dataset, config.model)
        files.push()
    known = records.records
  where = records.path.parent.relative_to(files.folder)
  width = shutil.get_terminal_size((100, 24)).columns
  print(f'\n{printable(table(known, width=width))}\n\nIn {folder / where}: {records.path.name}')
  if options.watch and max(known, default=0) < config.total_steps:
    print(
      f'No further checkpoint within {options.timeout:g} s; the run is not at step '
      f'{config.total_steps}. The same command continues.'
    )
  return 0


def _evaluate_one(
  checkpoint: CheckpointAddress, evaluator: CheckpointEvaluator, *, show: Show = silent
) -> Optional[Mapping[str, float]]:
  """Returns a checkpoint's metrics; None if the run has removed it. All processes must call it."""
  params = read_if_there(checkpoint, evaluator.program)
  if params is None:
    log(
      f'step {checkpoint.step}: the run deleted this checkpoint before it was evaluated; set '
      'CheckpointConfig.keep higher.'
    )
    return None
  return evaluator.run(params, show=show)


def _report(
  step: int,
  values: Mapping[str, float],
  evaluator: CheckpointEvaluator,
  results: EvalResults,
  dataset: DatasetConfig,
  model: Model,
) -> None:
  """Adds the metrics of a checkpoint to the results and prints them."""
  results.add(step, values)
  rows = f'{evaluator.num_rows:,} rows | ' if evaluator.num_rows else ''
  log(f'step {step} | {rows}' + ' | '.join(f'{short(k)} {v:.4f}' for k, v in values.items()))
  hits, confusion = evaluator.hits, evaluator.confusion
  if hits is None and confusion is None:
    return
  names = class_names_of(model, dataset)
  if hits is not None:
    kinds = entity_kinds(names) if model.tags else names
    log(scores.hits_table(hits, scores.all_names(kinds, len(hits))))
  if confusion is not None:
    names = scores.all_names(names, len(confusion))
    log(scores.confusion_table(confusion, names))
    results.add_confusion(step, confusion, names)


def _dataset(config: EvalConfig, split: Optional[str]) -> DatasetConfig:
  dataset = config.train_eval_dataset_cfg
  if dataset is None:
    raise ConfigError(
      'There is no data to evaluate on: train.train_eval_dataset_cfg is not set.',
      fix='Bind train.train_eval_dataset_cfg = @train_eval/batches.DatasetConfig() '
      'as gin_configs/runs/pretrain.gin does.',
      parameters=('train.train_eval_dataset_cfg',),
    )
  return dataset if split is None else dataclasses.replace(dataset, split=split)


def _wanted(text: str) -> Wanted:
  if text in ('all', 'last'):
    return text
  if not re.fullmatch(r'\d+(,\d+)*', text):
    raise ConfigError(
      f'--steps={text} is not all, last or a list of steps.',
      fix='Write --steps=all, --steps=last or --steps=1000,2000.',
    )
  return tuple(map(int, text.split(',')))


def _check_checkpoints(model_dir: ModelDir, wanted: Wanted, *, watch: bool) -> None:
  """Raises CheckpointError unless the wanted checkpoints exist, or may appear while watching."""
  steps = model_dir.steps
  missing = [] if isinstance(wanted, str) else [step for step in wanted if step not in steps]
  if watch or steps and not missing:
    return
  what = f'no checkpoint of step {", ".join(map(str, missing))}' if steps else 'no checkpoint'
  raise CheckpointError(
    f'MODEL_DIR = {str(model_dir.path)!r} has {what}.',
    fix=f'Its steps are {", ".join(map(str, steps))}.'
    if steps
    else 'Give the folder of the run, --gin.MODEL_DIR=..., or wait for its checkpoints: --watch.',
    parameters=('MODEL_DIR',),
  )


def _facts(
  config: EvalConfig, dataset: DatasetConfig, options: argparse.Namespace, *, metrics: str
) -> dict[str, Any]:
  """Returns the settings that affect the metrics, besides the checkpoint and the code."""
  decoding, tasks = config.decoding_cfg, config.infer_eval_dataset_cfg
  return {
    'mixture_or_task_name': dataset.mixture_or_task_name,
    'split': dataset.split,
    'task_feature_lengths': dict(dataset.task_feature_lengths),
    'pack': dataset.pack,
    'vocabulary': dataset.vocabulary,
    'metrics': metrics,
    'loss_on_targets_only': dataset.loss_on_targets_only,
    'batches': options.batches,
    # With --batches, the batch size determines the number of examples.
    'batch_size': dataset.batch_size if options.batches else None,
    'examples': options.examples,
    'infer_eval': tasks and tasks.mixture_or_task_name,
    'decoding': decoding and decoding.facts,
  }


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('what to evaluate')
  group.add_argument(
    '--steps', metavar='STEPS', help='checkpoints of MODEL_DIR: all (default), last, or 1000,2000'
  )
  group.add_argument(
    '--watch', action='store_true', help='wait for new checkpoints up to step TRAIN_STEPS'
  )
  group.add_argument(
    '--timeout',
    type=float,
    default=3600.0,
    metavar='SECONDS',
    help='with --watch: how long to wait for the next checkpoint (default 3600)',
  )
  group.add_argument('--split', metavar='SPLIT', help="split to evaluate (default: the gin file's)")
  group.add_argument(
    '--metrics',
    choices=METRICS,
    help=('the loss, task metrics (an error if there are none), or all (default)'),
  )
  group.add_argument(
    '--batches',
    type=positive_int,
    metavar='N',
    help='batches per task for the loss (default: the whole split)',
  )
  group.add_argument(
    '--examples',
    type=positive_int,
    metavar='N',
    help='examples per task for its metrics (default: the whole split)',
  )
  group.add_argument(
    '--name', metavar='NAME', help='name of MODEL_DIR/eval/NAME.jsonl (default: the split)'
  )
  cluster_lib.add_flags(parser)


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and gin files, then evaluates."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.eval', __doc__.splitlines()[0], argv, extra=_add_flags, examples=EXAMPLES
  )
  if not args.dry_run:
    streams.outlive()  # the command writes files, so it continues without standard output
  cluster = cluster_lib.detect_here(args.extra)
  setup, notes = None, ()
  if gin_loader.configures(args.gin_files, _SETUP, search_paths=args.gin_search_paths):
    loaded = args.load(entry=_SETUP)
    setup = config = gin_loader.configured(loaded, EvalSetup, entry=_SETUP)
    notes = loaded.notes
  else:
    config = gin_loader.configured(args.load_with_classes(), EvalConfig)
  distributed.start(cluster, config.distributed_cfg, xla_preset=config.xla_preset)
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  if setup is not None:
    log('\n'.join(f'note: {note}' for note in notes))
    return evaluate_setup(setup, args.extra, dry_run=args.dry_run)
  return evaluate(config, args.extra, dry_run=args.dry_run)


if __name__ == '__main__':
  # Imported under its own name: gin files import t5x_gpu.eval, and a module must not exist twice.
  from t5x_gpu.eval import main as main_

  cli.run_main(main_)
