"""Evaluates checkpoints one after the other (loss, and metrics of tasks), and stores the results.

`steps_to_evaluate` selects the checkpoints while a run may still write and remove some;
`EvalResults` stores the metrics as MODEL_DIR/eval/NAME.jsonl.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import pathlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Optional, Self, Union

import numpy as np

from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.params_files import read_params
from t5x_gpu.checkpoint.store import CheckpointAddress
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import batches_for, open_task_names
from t5x_gpu.data.same_data import differences
from t5x_gpu.data.same_on_hosts import check_same_on_hosts
from t5x_gpu.errors import CheckpointError, ConfigError, NoExamplesError, UserError, first_line
from t5x_gpu.evaluation.evaluator import (
  LOSS,
  Evaluator,
  confusion_of,
  hits_of,
  open_task_evaluator,
  values_of,
)
from t5x_gpu.metrics import reduce, scores
from t5x_gpu.metrics.writers import (
  JsonLinesWriter,
  MetricWriter,
  MultiWriter,
  TensorBoardWriter,
  read_json_lines,
)
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.model import Params, writes_text
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.topology import discover
from t5x_gpu.storage.files import check_not_refused, write_atomically
from t5x_gpu.storage.json_schema import Json, read_json
from t5x_gpu.terminal.progress import BackgroundCounts, Show, Total, silent
from t5x_gpu.training.memory import check_evaluation_memory
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.train_step import StepConfig

_log = logging.getLogger(__name__)


class CheckpointEvaluator:
  """Evaluates parameters of different checkpoints on the same data.

  Args:
    config: config of the run.
    dataset: task or mixture, split and lengths.
    tasks_dataset: dataset with the task metrics; None for `dataset`.
    decoding: how to decode predictions; None for greedy decoding.
    metrics: 'loss', 'tasks', or 'all' for the loss and any task metrics.
    num_batches: number of batches of each task, for the loss; None for the whole split.
    num_examples: number of examples of each task, for its metrics; None for the whole split.
  Attributes:
    program: the model on its mesh.
    confusion: [true class, predicted class] of the last checkpoint, if the model classifies.
    hits: [class, (right, predicted, true)], if rows have several labels or words form entities.
    num_rows: number of rows in the loss of the last checkpoint.
  Raises:
    NoExamplesError: no task of `dataset` has an example; some without are left out, with a warning.
    UserError: model, mesh and data do not fit; raised on all processes if their data differ.
  """

  def __init__(
    self,
    config: StepConfig,
    dataset: DatasetConfig,
    *,
    tasks_dataset: Optional[DatasetConfig] = None,
    decoding: Optional[DecodingConfig] = None,
    metrics: str = 'all',
    num_batches: Optional[int] = None,
    num_examples: Optional[int] = None,
  ):
    topology, devices = discover()
    self._model = model = config.model
    self.program = build_program(
      dataclasses.replace(config, num_microbatches=1),
      topology=topology,
      devices=devices,
      dataset=dataset,
    )
    check_evaluation_memory(self.program)
    self.confusion: Optional[np.ndarray] = None
    self.hits: Optional[np.ndarray] = None
    self.num_rows = 0
    self._losses: dict[str, Evaluator] = {}
    self._uncounted: dict[str, Callable[[], Iterable[object]]] = {}
    self._totals: dict[str, Total] = {}
    self._counts = BackgroundCounts()
    names = () if metrics == 'tasks' else open_task_names(dataset)
    self._is_mixture = len(names) > 1
    empty: list[NoExamplesError] = []
    for name in names:
      one = dataclasses.replace(dataset, mixture_or_task_name=name, shuffle=False)
      try:
        batches = batches_for(model, one, repeat=False)
      except NoExamplesError as e:
        empty.append(e)
      else:
        self._losses[name] = Evaluator(self.program, batches, num_batches)
        if num_batches is None:  # unknown until the whole split is read and packed
          self._uncounted[name] = functools.partial(batches_for, model, one, repeat=False)
    if empty and not self._losses:
      raise empty[0]
    for error in empty:
      _log.warning('Not evaluated: %s', error.what)
    self._tasks = (
      None
      if metrics == 'loss'
      else open_task_evaluator(
        self.program,
        dataclasses.replace(tasks_dataset or dataset, split=dataset.split),
        train_lengths=config.train_dataset_cfg.task_feature_lengths,
        decoding=decoding,
        num_examples=num_examples,
        required=metrics == 'tasks',
      )
    )
    check_same_on_hosts(
      {name: evaluator.batches for name, evaluator in self._losses.items()},
      self._tasks.tasks if self._tasks else (),
    )

  def __enter__(self) -> Self:
    """Counts the batches in the background, to estimate the remaining time."""
    self._totals = {name: self._counts.count(opened()) for name, opened in self._uncounted.items()}
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._counts.__exit__(*exc_info)

  def run(self, params: Params, *, show: Show = silent) -> dict[str, float]:
    """Returns the metrics by name.

    Args:
      params: parameters with layers in model order.
      show: shows the progress of each part.
    """
    values: dict[str, float] = {}
    self.num_rows = 0
    if self._losses:
      run_order, total = self.program.params_in_run_form(params), {}
      for name, evaluator in self._losses.items():
        sums = evaluator.sums(
          run_order, title=f'{LOSS}{name}', show=show, total=self._totals.get(name)
        )
        total = reduce.add(total, sums)
        self.num_rows += evaluator.num_rows
        if self._is_mixture:
          values |= values_of(sums, prefix=f'{LOSS}{name}/')
      self.confusion, self.hits = confusion_of(total), hits_of(total)
      values = values_of(total, prefix=LOSS) | values
      if writes_text(self._model):
        values |= _perplexities(values)
    if self._tasks is not None:
      values |= self._tasks.run(params, show=show)
    return values


def _perplexities(values: Mapping[str, float]) -> dict[str, float]:
  """Returns the perplexity for each cross entropy, which is per target token."""
  name = 'cross_entropy'
  return {
    f'{key.removesuffix(name)}perplexity': math.exp(min(value, _MOST_NATS))
    for key, value in values.items()
    if key.endswith(f'/{name}')
  }


_MOST_NATS = 700.0  # of a finite perplexity
POLL_SECONDS = 2.0  # between two listings of MODEL_DIR
Wanted = Union[str, tuple[int, ...]]  # 'all', 'last' or steps


def steps_to_evaluate(
  model_dir: ModelDir,
  *,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  timeout: float,
) -> Iterator[int]:
  """Yields the steps to evaluate, oldest first and the same on all processes.

  Lists the steps again after each step, because a run may have written and removed checkpoints.

  Args:
    model_dir: MODEL_DIR of the run.
    wanted: 'all', 'last', or steps.
    done: steps to skip.
    last_step: wait for new checkpoints until this step; None to not wait.
    timeout: seconds to wait for the next checkpoint.
  """
  done = set(done)
  deadline = time.monotonic() + timeout
  while True:
    step = distributed.broadcast_json(_next(model_dir, wanted, done, last_step, deadline))
    if step == _END:
      return
    if step != _NOT_YET:
      done.add(step)
      yield step
      deadline = time.monotonic() + timeout
    elif distributed.is_main_process():
      time.sleep(POLL_SECONDS)
    model_dir.refresh()


_END, _NOT_YET = -1, -2


def _next(
  model_dir: ModelDir,
  wanted: Wanted,
  done: Collection[int],
  last_step: Optional[int],
  deadline: float,
) -> int:
  steps = model_dir.steps
  if wanted == 'last':
    steps = steps[-1:]
  elif wanted != 'all':
    steps = [step for step in steps if step in wanted]
  left = [step for step in steps if step not in done]
  if left:
    return left[0]
  if last_step is None or any(step >= last_step for step in model_dir.steps):
    return _END
  return _END if time.monotonic() >= deadline else _NOT_YET


def read_if_there(checkpoint: CheckpointAddress, program: Program) -> Optional[Params]:
  """Returns the parameters; None, on all processes, if the run has removed the checkpoint.

  Raises:
    CheckpointError: the checkpoint exists and cannot be read.
  """
  params, problem = None, None
  try:
    params = read_params(checkpoint, program.abstract_saved.params)
  except Exception as e:  # Orbax and TensorStore raise many kinds of errors when files vanish
    problem = e
  exists = checkpoint.path.exists()
  if problem is not None and exists:
    if isinstance(problem, UserError):
      raise problem
    raise CheckpointError(
      f'{checkpoint.path} cannot be read: {type(problem).__name__}: {first_line(problem)[:200]}',
      fix='Skip it: list the steps to evaluate as --steps=1000,2000.',
      parameters=('MODEL_DIR',),
    ) from problem
  whole = all(distributed.gather_json(problem is None))
  return params if whole else None


FOLDER = 'eval'


class EvalResults(contextlib.AbstractContextManager):
  """Metrics by checkpoint of one MODEL_DIR, stored as MODEL_DIR/eval/NAME.*.

  Only process 0 has one.

  Args:
    model_dir: MODEL_DIR of the run.
    name: name of this evaluation.
    facts: facts that its metrics depend on, in addition to the checkpoint.
  Raises:
    ConfigError: the metrics on disk depend on other facts.
  """

  def __init__(self, model_dir: pathlib.Path, name: str, facts: Json):
    self.folder, self.name = model_dir / FOLDER, name
    self.path = self.folder / f'{name}.jsonl'
    self._facts = facts
    self._tensorboard = model_dir / 'tensorboard' / f'{FOLDER}_{name}'
    # Opened for the first metric, so that errors before it leave no files.
    self._writer: Optional[MultiWriter] = None
    _check_facts(self.folder / f'{name}.json', facts, name)

  def __exit__(self, *error: object) -> None:
    if self._writer is not None:
      self._writer.close()

  def _open(self) -> MultiWriter:
    writers: list[MetricWriter] = [JsonLinesWriter(self.path, waits=False)]
    facts = json.dumps(self._facts, indent=1) + '\n'
    write_atomically(self.folder / f'{self.name}.json', facts)
    try:
      writers.append(TensorBoardWriter(self._tensorboard))
    except ConfigError as e:  # tensorboardX is not installed
      _log.warning('No TensorBoard files: %s', e)
    return MultiWriter(writers)

  @property
  def records(self) -> dict[int, dict[str, float]]:
    """Step -> metrics, ascending."""
    if not self.path.is_file():
      return {}
    return {
      record.pop('step'): record
      for record in sorted(read_json_lines(self.path), key=lambda record: record['step'])
    }

  def add(self, step: int, values: Mapping[str, float]) -> None:
    """Writes the metrics of a checkpoint. A kill leaves at most one incomplete line.

    Raises:
      AccessError: the file cannot be written.
    """
    self._writer = self._writer or self._open()
    self._writer.write(step, values)
    self._writer.flush()

  def add_confusion(self, step: int, confusion: np.ndarray, names: Sequence[str]) -> None:
    """Writes the confusion matrix as a table, which a report shows."""
    stem = self.folder / f'{self.name}_confusion_{step}'
    scores.write_confusion_csv(confusion, names, f'{stem}.csv')


def _check_facts(path: pathlib.Path, facts: Json, name: str) -> None:
  try:
    before = read_json(path, dict)
  except (OSError, ValueError) as e:
    check_not_refused(e, path)
    return
  if different := differences(before, json.loads(json.dumps(facts)), before='then'):
    raise ConfigError(
      f'{path.with_suffix(".jsonl")} has the metrics of another evaluation:\n  '
      + '\n  '.join(different),
      fix=f'Give this evaluation another name, --name={name}_2, or remove {path.parent}/{name}.*',
    )


def table(records: Mapping[int, Mapping[str, float]], *, width: int) -> str:
  """Returns a row for each metric and a column for each step, split into blocks to fit `width`.

  Args:
    records: step -> values.
    width: width of the terminal, in characters.
  """
  names = list(dict.fromkeys(name for values in records.values() for name in values))
  first = max(map(len, ('step', *map(short, names))))
  columns = [
    [str(step), *(f'{values[name]:.4f}' if name in values else '-' for name in names)]
    for step, values in records.items()
  ]
  cell = max((len(text) for column in columns for text in column), default=0) + 2
  at_once = max(1, (width - first) // cell)
  blocks = []
  for start in range(0, len(columns), at_once):
    rows = zip(['step', *map(short, names)], *columns[start : start + at_once])
    blocks.append(
      '\n'.join(
        name.ljust(first) + ''.join(text.rjust(cell) for text in texts) for name, *texts in rows
      )
    )
  return '\n\n'.join(blocks)


def short(name: str) -> str:
  """Returns the name of a metric without its prefix."""
  return name.removeprefix('infer_').removeprefix(LOSS)
