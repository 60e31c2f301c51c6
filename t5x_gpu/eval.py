"""Evaluate checkpoints on held-back data: `python -m t5x_gpu.eval --gin_file=MY.gin`.

The gin file is the run's own. Over the whole split: the loss and, for classes, their scores; for
tasks with metric_fns, SeqIO's metrics of predictions and likelihoods. One checkpoint, all of a
MODEL_DIR, or those that a run still writes; what has been evaluated is not evaluated again.
"""

import argparse
import dataclasses
import functools
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Optional, Self, Union

import jax
import numpy as np

from t5x_gpu import cli
from t5x_gpu.checkpoint.arrays.params_files import read_params
from t5x_gpu.checkpoint.model_dir import check_writable, checkpoint_path, committed_steps, why
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.storage.paths import AnyPath
from t5x_gpu.checkpoint.storage.shared_folder import shared_model_dir
from t5x_gpu.config import gin_loader
from t5x_gpu.data.batches import DatasetConfig, open_class_names, open_task_names
from t5x_gpu.data.same_on_hosts import check_same_on_hosts
from t5x_gpu.errors import CheckpointError, ConfigError, UserError
from t5x_gpu.evaluation.eval_results import Results, short, table
from t5x_gpu.evaluation.evaluator import (
  LOSS,
  Evaluator,
  batches_for,
  confusion_of,
  open_task_evaluator,
  values_of,
)
from t5x_gpu.metrics import classification, reduce
from t5x_gpu.partitioning.layout import LaidOut
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster import topology as topology_lib
from t5x_gpu.terminal import logging_setup
from t5x_gpu.terminal.bars import BackgroundCounts, Show, Total, bar, silent
from t5x_gpu.training.program import Program, program_of_run

EXAMPLES = """examples:
  {prog} --gin_file=gin_configs/examples/demo.gin
  {prog} --gin_file=my.gin --steps=last --split=test
  {prog} --gin_file=my.gin --gin.MODEL_DIR=runs/a --watch

The gin file says what to evaluate on: train.train_eval_dataset_cfg, of which --split takes another
split. It may be changed from here: --gin.train_eval/DatasetConfig.batch_size=64 (docs/eval.md).
"""
METRICS = ('all', 'loss', 'tasks')
POLL_SECONDS = 2.0  # between two looks at MODEL_DIR
Wanted = Union[str, tuple[int, ...]]  # 'all', 'last' or steps


class CheckpointEvaluator:
  """Evaluates one checkpoint after the other.

  Args:
    arguments: of train.train.
    dataset: task or mixture, split and lengths.
    metrics: 'loss', 'tasks', or 'all': the loss, and the metrics of tasks if there are any.
    num_batches: of each task, for the loss; None for the whole split.
    num_examples: of each task, for its metrics; None for the whole split.
  Attributes:
    program: the model on its mesh.
    confusion: [true class, predicted class] of the last one, if the model classifies.
  Raises:
    UserError: of the model, the mesh or the data, on all processes if they have different data.
  """

  def __init__(
    self,
    arguments: Mapping[str, Any],
    dataset: DatasetConfig,
    *,
    metrics: str = 'all',
    num_batches: Optional[int] = None,
    num_examples: Optional[int] = None,
  ):
    topology, devices = topology_lib.discover()
    model = arguments['model']
    self.program = program_of_run(
      {**arguments, 'train_dataset_cfg': dataset},
      topology=topology,
      devices=devices,
      num_microbatches=1,
    )
    self.confusion: Optional[np.ndarray] = None
    self._losses: dict[str, Evaluator] = {}
    self._uncounted: dict[str, Callable[[], Iterable[Any]]] = {}
    self._totals: dict[str, Total] = {}
    self._counts = BackgroundCounts()
    if metrics != 'tasks':
      for name in open_task_names(dataset):
        one = dataclasses.replace(dataset, mixture_or_task_name=name, shuffle=False)
        self._losses[name] = Evaluator(
          self.program, batches_for(model, one, repeat=False), num_batches
        )
        if num_batches is None:  # nobody knows before all is read, and packed
          self._uncounted[name] = functools.partial(batches_for, model, one, repeat=False)
    own = arguments.get('infer_eval_dataset_cfg')
    self._tasks = (
      None
      if metrics == 'loss'
      else open_task_evaluator(
        model,
        self.program,
        dataclasses.replace(own, split=dataset.split) if own else dataset,
        decoding=arguments.get('decoding_cfg'),
        num_examples=num_examples,
        required=metrics == 'tasks',
      )
    )
    check_same_on_hosts(
      {name: evaluator.batches for name, evaluator in self._losses.items()},
      self._tasks.tasks if self._tasks else (),
    )

  def __enter__(self) -> Self:
    """Within, batches are counted in the background, so that bars have an estimate."""
    self._totals = {name: self._counts.count(opened()) for name, opened in self._uncounted.items()}
    return self

  def __exit__(self, *exc_info: Any) -> None:
    self._counts.__exit__(*exc_info)

  def run(self, params: Any, *, show: Show = silent) -> dict[str, float]:
    """Returns the values by name.

    Args:
      params: with layers in the order of the model.
      show: shows how far each part is.
    """
    values: dict[str, float] = {}
    if self._losses:
      run_order, total = _in_run_order(self.program, params), {}
      for name, evaluator in self._losses.items():
        sums = evaluator.sums(
          run_order, title=f'{LOSS}{name}', show=show, total=self._totals.get(name)
        )
        total = reduce.add(total, sums)
        if len(self._losses) > 1:
          values |= values_of(sums, prefix=f'{LOSS}{name}/')
      self.confusion = confusion_of(total)
      values = values_of(total, prefix=LOSS) | values
    if self._tasks is not None:
      values |= self._tasks.run(params, show=show)
    return values


def _in_run_order(program: Program, params: Any) -> Any:
  layout, names = program.layout, program.names.params
  if not layout.reorders_layers:
    return params
  shardings = jax.tree.map(lambda a: a.sharding, program.abstract_state.params)
  return LaidOut(
    layout.mesh, jax.jit(lambda p: layout.in_run_order(p, names), out_shardings=shardings)
  )(params)


def steps_to_evaluate(
  folder: AnyPath,
  *,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  timeout: float,
) -> Iterator[int]:
  """Yields steps of checkpoints to evaluate, oldest first; the same on all processes.

  Args:
    folder: MODEL_DIR.
    wanted: 'all', 'last', or steps.
    done: not these.
    last_step: of the run, whose checkpoints are waited for; None not to wait.
    timeout: seconds to wait for the next one.
  """
  done = set(done)
  deadline = time.monotonic() + timeout
  while True:
    step = distributed.broadcast_json(_next(folder, wanted, done, last_step, deadline))
    if step == _END:
      return
    if step == _NOT_YET:
      if distributed.is_main_process():
        time.sleep(POLL_SECONDS)
      continue
    done.add(step)
    yield step
    deadline = time.monotonic() + timeout


_END, _NOT_YET = -1, -2


def _next(
  folder: AnyPath, wanted: Wanted, done: Collection[int], last_step: Optional[int], deadline: float
) -> int:
  steps = committed_steps(folder)
  if wanted == 'last':
    steps = steps[-1:]
  elif wanted != 'all':
    steps = [step for step in steps if step in wanted]
  left = [step for step in steps if step not in done]
  if left:
    return left[0]
  if last_step is None or any(step >= last_step for step in committed_steps(folder)):
    return _END
  return _END if time.monotonic() >= deadline else _NOT_YET


def _read(model_dir: AnyPath, step: int, program: Program) -> Any:
  """Returns the parameters, or None if the run has removed that checkpoint meanwhile."""
  params, problem = None, None
  try:
    params = read_params(model_dir, program.abstract_state.params, step=step)
  except Exception as e:  # of Orbax and TensorStore, when files vanish under them
    problem = e
  exists = checkpoint_path(model_dir, step).exists()
  if problem is not None and exists:
    if isinstance(problem, UserError):
      raise problem
    raise CheckpointError(
      f'{checkpoint_path(model_dir, step)} cannot be read: {why(problem)}',
      fix='Leave it out: --steps=... names those to evaluate.',
      parameters=('MODEL_DIR',),
    ) from problem
  whole = all(distributed.gather_json(problem is None))
  return params if whole else None


def evaluate(
  arguments: Mapping[str, Any], options: argparse.Namespace, *, dry_run: bool = False
) -> int:
  """Evaluates what `options` (see `_add_flags`) ask for; returns the exit code.

  Args:
    arguments: of train.train.
    options: the flags.
    dry_run: build, open and check everything, say what would be done, write nothing.
  """
  model_dir = shared_model_dir(arguments['model_dir'], dry_run=dry_run)
  dataset = _dataset(arguments, options.split)
  wanted = _wanted(options.steps)
  _check_checkpoints(model_dir, wanted, watch=options.watch)
  evaluator = CheckpointEvaluator(
    arguments,
    dataset,
    metrics=options.metrics,
    num_batches=options.batches,
    num_examples=options.examples,
  )
  name = options.name or re.sub(r'\W+', '_', dataset.split)
  if dry_run:
    _say(f'Dry run: would evaluate {options.steps} of steps {committed_steps(model_dir)}.')
    return 0
  if not distributed.is_main_process():
    _evaluate_all(model_dir, wanted, options, arguments, evaluator, None, dataset, None)
    return 0
  check_writable(model_dir)
  with (
    RunFiles(model_dir, is_main=True) as files,
    Results(files.folder, name, _facts(arguments, dataset, options)) as results,
    evaluator,
  ):
    _evaluate_all(model_dir, wanted, options, arguments, evaluator, results, dataset, files)
    known = results.records
  where = results.path.parent.relative_to(files.folder)
  width = shutil.get_terminal_size((100, 24)).columns
  print(f'\n{table(known, width=width)}\n\nIn {model_dir / where}: {results.path.name}')
  if options.watch and max(known, default=0) < arguments['total_steps']:
    print(
      f'No further checkpoint within {options.timeout:g} s; the run is not at step '
      f'{arguments["total_steps"]}. The same command goes on from here.'
    )
  return 0


def _evaluate_all(
  model_dir: AnyPath,
  wanted: Wanted,
  options: argparse.Namespace,
  arguments: Mapping[str, Any],
  evaluator: CheckpointEvaluator,
  results: Optional[Results],
  dataset: DatasetConfig,
  files: Optional[RunFiles],
) -> None:
  """Evaluates what is not in `results` yet, and adds it; only process 0 has results and files."""
  done = distributed.broadcast_json(results and sorted(results.records))
  if done:
    _say(f'Evaluated before: {", ".join(map(str, done))} ({results and results.path}).')
  for step in steps_to_evaluate(
    model_dir,
    wanted=wanted,
    done=done,
    timeout=options.timeout,
    last_step=arguments['total_steps'] if options.watch else None,
  ):
    params = _read(model_dir, step, evaluator.program)
    if params is None:
      _say(f'step {step}: the run has removed this checkpoint; set CheckpointConfig.keep higher.')
      continue
    values = evaluator.run(params, show=functools.partial(bar, enabled=results is not None))
    if results is None:
      continue
    results.add(step, values)
    _say(f'step {step} | ' + ' | '.join(f'{short(k)} {v:.4f}' for k, v in values.items()))
    if evaluator.confusion is not None:
      names = open_class_names(dataset) or tuple(map(str, range(len(evaluator.confusion))))
      _say(classification.table(evaluator.confusion, names))
      results.add_confusion(step, evaluator.confusion, names)
    files.push()


def _dataset(arguments: Mapping[str, Any], split: Optional[str]) -> DatasetConfig:
  dataset = arguments.get('train_eval_dataset_cfg')
  if dataset is None:
    raise ConfigError(
      'The configuration does not say what to evaluate on: '
      'train.train_eval_dataset_cfg is not set.',
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
      f'--steps={text} is neither all, last, nor steps.',
      fix='Write --steps=all, --steps=last or --steps=1000,2000.',
    )
  return tuple(map(int, text.split(',')))


def _check_checkpoints(model_dir: AnyPath, wanted: Wanted, *, watch: bool) -> None:
  """Raises CheckpointError unless what is asked for is there, or may come."""
  steps = committed_steps(model_dir)
  missing = [] if isinstance(wanted, str) else [step for step in wanted if step not in steps]
  if watch or steps and not missing:
    return
  what = f'no checkpoint of step {", ".join(map(str, missing))}' if steps else 'no checkpoint'
  raise CheckpointError(
    f'MODEL_DIR = {str(model_dir)!r} has {what}.',
    fix=f'Its steps are {", ".join(map(str, steps))}.'
    if steps
    else 'Give the folder of the run, --gin.MODEL_DIR=..., or wait for its checkpoints: --watch.',
    parameters=('MODEL_DIR',),
  )


def _facts(
  arguments: Mapping[str, Any], dataset: DatasetConfig, options: argparse.Namespace
) -> dict[str, Any]:
  """Returns what the numbers depend on, besides the checkpoint and the code."""
  decoding = arguments.get('decoding_cfg')
  own = arguments.get('infer_eval_dataset_cfg')
  return {
    'mixture_or_task_name': dataset.mixture_or_task_name,
    'split': dataset.split,
    'task_feature_lengths': dict(dataset.task_feature_lengths),
    'pack': dataset.pack,
    'vocabulary': dataset.vocabulary,
    'metrics': options.metrics,
    'loss_on_targets_only': dataset.loss_on_targets_only,
    'batches': options.batches,
    # A number of batches is another number of examples where they are larger.
    'batch_size': dataset.batch_size if options.batches else None,
    'examples': options.examples,
    'infer_eval': own and own.mixture_or_task_name,
    'decoding': decoding
    and {key: value for key, value in dataclasses.asdict(decoding).items() if key != 'batch_size'},
  }


def _say(text: str) -> None:
  if distributed.is_main_process() and text:
    print(f'{logging_setup.stamp(sys.stdout)}{text}', flush=True)


def _positive(text: str) -> int:
  if not text.isdecimal() or int(text) < 1:
    raise argparse.ArgumentTypeError(f'{text!r} is no whole number of at least 1')
  return int(text)


def _add_flags(parser: argparse.ArgumentParser) -> None:
  group = parser.add_argument_group('what to evaluate')
  group.add_argument(
    '--steps',
    default='all',
    metavar='STEPS',
    help='checkpoints of MODEL_DIR: all (default), last, or 1000,2000',
  )
  group.add_argument(
    '--watch', action='store_true', help='wait for new checkpoints until that of step TRAIN_STEPS'
  )
  group.add_argument(
    '--timeout',
    type=float,
    default=3600.0,
    metavar='SECONDS',
    help='with --watch: how long to wait for the next one (default 3600)',
  )
  group.add_argument('--split', metavar='SPLIT', help="another split than the gin file's")
  group.add_argument(
    '--metrics',
    choices=METRICS,
    default='all',
    help=('the loss, the metrics of tasks (an error without any), or all there are (default)'),
  )
  group.add_argument(
    '--batches',
    type=_positive,
    metavar='N',
    help='of each task, for the loss (default: the whole split)',
  )
  group.add_argument(
    '--examples',
    type=_positive,
    metavar='N',
    help='of each task, for its metrics (default: the whole split)',
  )
  group.add_argument(
    '--name', metavar='NAME', help='of the results: MODEL_DIR/eval/NAME.jsonl (default: the split)'
  )
  cluster_lib.add_flags(parser)


def main(argv: Optional[Sequence[str]] = None) -> int:
  """Parses flags and gin files, then evaluates."""
  logging_setup.quiet_environment()
  args = cli.parse_args(
    'python -m t5x_gpu.eval',
    __doc__.splitlines()[0],
    sys.argv[1:] if argv is None else argv,
    extra=_add_flags,
    examples=EXAMPLES,
  )
  cluster = cluster_lib.detect_here(args.extra)
  if args.tfds_data_dir:
    os.environ['TFDS_DATA_DIR'] = args.tfds_data_dir
  loaded = gin_loader.load(
    args.gin_files, bindings=args.bindings, search_paths=args.gin_search_paths
  )
  arguments = loaded.arguments(without=('checkpoint_cfg', 'sample_cfg', 'initialize_from'))
  distributed.start(cluster, arguments)
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  return evaluate(arguments, args.extra, dry_run=args.dry_run)


if __name__ == '__main__':
  # Under its own name: gin files import t5x_gpu.train, and there must be one of each module.
  from t5x_gpu.eval import main as main_

  cli.run_main(main_)
