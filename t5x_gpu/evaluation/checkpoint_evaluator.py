"""Evaluates checkpoints one after the other: loss, and metrics of tasks."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Optional, Self

import numpy as np

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import open_task_names
from t5x_gpu.data.same_on_hosts import check_same_on_hosts
from t5x_gpu.evaluation.evaluator import (
  LOSS,
  Evaluator,
  batches_for,
  confusion_of,
  hits_of,
  open_task_evaluator,
  values_of,
)
from t5x_gpu.evaluation.params_memory import check_evaluation_memory
from t5x_gpu.metrics import reduce
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.runtime.cluster import topology as topology_lib
from t5x_gpu.terminal.bars import BackgroundCounts, Show, Total, silent
from t5x_gpu.training.program import program_of_run
from t5x_gpu.training.step_config import StepConfig


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
    topology, devices = topology_lib.discover()
    model = config.model
    self.program = program_of_run(
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
    self._uncounted: dict[str, Callable[[], Iterable[Any]]] = {}
    self._totals: dict[str, Total] = {}
    self._counts = BackgroundCounts()
    if metrics != 'tasks':
      for name in open_task_names(dataset):
        one = dataclasses.replace(dataset, mixture_or_task_name=name, shuffle=False)
        self._losses[name] = Evaluator(
          self.program, batches_for(model, one, repeat=False), num_batches
        )
        if num_batches is None:  # unknown until the whole split is read and packed
          self._uncounted[name] = functools.partial(batches_for, model, one, repeat=False)
    self._tasks = (
      None
      if metrics == 'loss'
      else open_task_evaluator(
        model,
        self.program,
        dataclasses.replace(tasks_dataset or dataset, split=dataset.split),
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

  def __exit__(self, *exc_info: Any) -> None:
    self._counts.__exit__(*exc_info)

  def run(self, params: Any, *, show: Show = silent) -> dict[str, float]:
    """Returns the metrics by name.

    Args:
      params: parameters with layers in model order.
      show: shows the progress of each part.
    """
    values: dict[str, float] = {}
    self.num_rows = 0
    if self._losses:
      run_order, total = self.program.params_in_run_order(params), {}
      for name, evaluator in self._losses.items():
        sums = evaluator.sums(
          run_order, title=f'{LOSS}{name}', show=show, total=self._totals.get(name)
        )
        total = reduce.add(total, sums)
        self.num_rows += evaluator.num_rows
        if len(self._losses) > 1:
          values |= values_of(sums, prefix=f'{LOSS}{name}/')
      self.confusion, self.hits = confusion_of(total), hits_of(total)
      values = values_of(total, prefix=LOSS) | values
    if self._tasks is not None:
      values |= self._tasks.run(params, show=show)
    return values
