"""Random batches on which a wrong mean shows: ragged rows, unequal weights, a row of padding alone.

With the full rows and weights 1 of `synthetic` a mean of the devices' means is the true mean, and a
sum that should have been divided by the target tokens of all devices looks right.
"""

import numpy as np

from t5x_gpu.data.batches import Batch, BatchSpec
from t5x_gpu.data.features import LABEL_WEIGHTS
from t5x_gpu.data.synthetic import SyntheticBatches

MAX_WEIGHT = 3


def uneven_batches(spec: BatchSpec, *, seed: int, num_batches: int) -> list[Batch]:
  """Returns `num_batches` batches of `spec`, a function of the arguments alone.

  Each row ends at a random length of its own, padding (0 in every feature) follows; the last of
  several rows is nothing but padding. Weights, where they are not 0, are 1 to `MAX_WEIGHT`; labels
  have the weight 0 where the row is empty.

  Raises:
    DataError: `spec` has a feature that no random batch can have.
  """
  batches = SyntheticBatches(spec, seed=seed, num_batches=num_batches)
  return [_uneven(batch, np.random.default_rng([seed, step]))
          for step, batch in enumerate(batches)]


def _uneven(batch: Batch, random: np.random.Generator) -> Batch:
  ends: dict[str, np.ndarray] = {}  # of the rows of each stack, 'encoder' or 'decoder'
  result = {}
  for name, x in sorted(batch.items(), key=lambda item: -item[1].ndim):  # labels after tokens
    if x.ndim == 1:
      if name == LABEL_WEIGHTS:
        x = x * random.integers(1, MAX_WEIGHT + 1, x.shape)
      result[name] = np.where(ends['encoder'] > 0, x, 0).astype(batch[name].dtype)
      continue
    rows, length = x.shape[:2]
    stack = name.split('_')[0]
    if stack not in ends:
      ends[stack] = random.integers(min(2, length), length + 1, rows)
      if rows > 1:
        ends[stack][-1] = 0
    if name.endswith('loss_weights'):
      x = x * random.integers(1, MAX_WEIGHT + 1, x.shape).astype(x.dtype)
    result[name] = np.where(np.arange(length) < ends[stack][:, None], x, 0).astype(x.dtype)
  return {name: result[name] for name in batch}
