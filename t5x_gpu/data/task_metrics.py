"""Tasks with metrics, and the model outputs that the metrics need. No TensorFlow."""

import dataclasses
from collections.abc import Sequence
from typing import Optional, Protocol


@dataclasses.dataclass(frozen=True)
class ModelOutputs:
  """Model outputs for the examples of a task, in order; lists that were not requested are empty.

  Attributes:
    predictions: token ids, the best continuation of each example's inputs.
    prediction_scores: log-probabilities of the predictions.
    scores: log-probabilities of the targets.
  """

  predictions: Sequence[Sequence[int]] = ()
  prediction_scores: Sequence[float] = ()
  scores: Sequence[float] = ()


class EvaluatedTask(Protocol):
  """A task with metrics, and its examples.

  Attributes:
    name: name of the task.
    inputs, targets: token ids of each example; inputs are empty if the task has no inputs.
    eos_id: id that ends a text, or None.
    zero_is_a_word: id 0 is a word, not padding.
    needs_predictions, needs_scores: whether the metrics need predictions or scores.
  """

  name: str
  inputs: Sequence[Sequence[int]]
  targets: Sequence[Sequence[int]]
  eos_id: Optional[int]
  zero_is_a_word: bool
  needs_predictions: bool
  needs_scores: bool

  def metrics(self, outputs: ModelOutputs) -> dict[str, float]:
    """Returns metric -> value."""
