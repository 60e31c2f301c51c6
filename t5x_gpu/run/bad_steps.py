"""Bad steps, skipped or not finite: counts them, and writes their batches to MODEL_DIR."""

import collections
import logging
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from t5x_gpu.data.batches import Batch
from t5x_gpu.errors import TrainingError, first_line
from t5x_gpu.metrics import reduce
from t5x_gpu.runtime import distributed
from t5x_gpu.training.guards.spikes import SpikeConfig

_log = logging.getLogger(__name__)

FOLDER = 'spikes'
_KEPT = 3  # batches: one step is in flight, and the next batch may already be read


class BadSteps:
  """Checks each finished step.

  Args:
    config: how many steps may be skipped, and how many batches are written.
    folder: MODEL_DIR.
    first_step: number of steps taken before this process started.
    vocabulary: returns a vocabulary that decodes ids into text, or None if there is no text.
  """

  def __init__(
    self,
    config: SpikeConfig,
    *,
    folder: pathlib.Path,
    first_step: int,
    vocabulary: Callable[[], Any],
  ):
    self._config, self._folder, self._vocabulary = config, folder, vocabulary
    self._batches: collections.deque[tuple[int, Batch]] = collections.deque(maxlen=_KEPT)
    self._last_read = first_step
    self._in_a_row = self._dumps = 0
    self.num_skipped = 0

  def read(self, batch: Batch) -> None:
    """Remembers the batch of the next step."""
    self._last_read += 1
    self._batches.append((self._last_read, batch))

  def step_done(self, step: int, sums: reduce.Sums) -> list[str]:
    """Returns the names of values that are not finite in a step that was not skipped.

    Raises:
      TrainingError: too many steps were skipped in a row.
    """
    bad = [
      name for name, (total, _) in sums.items() if np.size(total) == 1 and not math.isfinite(total)
    ]
    if not sums.get('skipped', (0.0, 1.0))[0]:
      self._in_a_row = 0
      if bad:
        self._dump(step, f'{", ".join(bad)} is not finite')
      return bad
    self.num_skipped += 1
    self._in_a_row += 1
    norm = sums['grad_norm'][0]
    reason = f'{", ".join(bad)} is not finite' if bad else f'the gradient norm is {norm:.4g}'
    _log.warning('Step %d is skipped: %s. %d since the start.', step, reason, self.num_skipped)
    self._dump(step, reason)
    if self._in_a_row >= self._config.most_in_a_row:
      raise TrainingError(
        f'{self._in_a_row} steps up to step {step} were skipped in a row: {reason}. Their batches '
        f'are in {self._folder / FOLDER}.',
        fix='Lower the learning rate or lengthen the warm-up, then start again from the last '
        'checkpoint.',
        parameters=('SpikeConfig.most_in_a_row', 'SpikeConfig.skip_above', 'train.learning_rate'),
        docs='monitor.md#spikes',
      )
    return []

  def _dump(self, step: int, reason: str) -> None:
    """Writes this process's rows of the batch of `step`, as arrays and as text."""
    batch = dict(self._batches).get(step)
    if batch is None or self._dumps >= self._config.most_dumps:
      return
    self._dumps += 1
    folder = self._folder / FOLDER / f'step_{step:08}'
    name = f'process_{distributed.process_index()}'
    try:
      folder.mkdir(parents=True, exist_ok=True)
      arrays = {key: np.asarray(value) for key, value in batch.items()}
      np.savez_compressed(folder / f'{name}.npz', **arrays)
      text = f'step {step}: {reason}\n{_text(arrays, self._vocabulary())}'
      (folder / f'{name}.txt').write_text(text, encoding='utf-8')
    except Exception as e:  # a custom vocabulary may raise anything; it must not end the run
      _log.warning('The batch of step %d cannot be written: %s', step, first_line(e))


def _text(arrays: Mapping[str, np.ndarray], vocabulary: Any) -> str:
  """Returns each row of token features, decoded if there is a vocabulary."""
  lines = []
  for name, array in arrays.items():
    if not (name.endswith('tokens') and array.ndim == 2):
      continue
    for number, row in enumerate(array):
      ids = [int(i) for i in row]
      shown = ' '.join(map(str, ids)) if vocabulary is None else repr(vocabulary.decode(ids))
      lines.append(f'{name}[{number}]: {shown}')
  return '\n'.join(lines) + '\n'
