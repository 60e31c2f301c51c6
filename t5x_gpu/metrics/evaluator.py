"""The loss on held-back batches, during training; of classification, also its scores."""

import logging
from typing import Any, Optional

import numpy as np

from t5x_gpu.data.batches import BatchIterator
from t5x_gpu.metrics import classification, reduce
from t5x_gpu.training.program import Program

_log = logging.getLogger(__name__)


class Evaluator:
  """The mean loss over the same batches each time.

  Args:
    program: has the eval step.
    batches: opened without repeat.
    num_batches: at most this many; fewer if the data ends.
  """

  def __init__(self, program: Program, batches: BatchIterator, num_batches: int):
    self._program = program
    self._batches = batches
    self._num_batches = num_batches
    self._start = batches.get_state()
    # [true class, predicted class] of the last evaluation, if the model classifies.
    self.confusion: Optional[np.ndarray] = None

  def run(self, params: Any) -> dict[str, float]:
    """Returns eval/loss, eval/accuracy, ... of `params`, for classes eval/macro_f1, ... as well."""
    self._batches.set_state(self._start)
    sums = reduce.Accumulator()
    for _, batch in zip(range(self._num_batches), self._batches):
      sums.add(self._program.eval_step(params, self._program.layout.put_batch(batch)))
    means = sums.means(prefix='eval/')
    if means.empty:
      _log.warning('The evaluation has no target tokens: %s without a value.',
                   ', '.join(means.empty))
    values = means.values
    if reduce.COUNTS in sums.sums():
      self.confusion, _ = sums.sums()[reduce.COUNTS]
      values |= classification.scores(self.confusion, prefix='eval/')
    return values
