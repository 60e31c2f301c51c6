"""Measures how fast batches can be read: tokens per second, and per second of one core."""

import dataclasses
import time

from t5x_gpu.data import features
from t5x_gpu.data.batches import Batch, BatchIterator
from t5x_gpu.data.prepared.index import counted_features


@dataclasses.dataclass(frozen=True)
class Speed:
  """Tokens per second of wall time and of CPU time, without padding; number of timed batches."""

  tokens_per_second: float
  tokens_per_core_second: float
  batches: int


def measure(batches: BatchIterator, *, seconds: float) -> Speed:
  """Returns the speed of reading whole batches; the first batch is not timed."""

  def read(batch: Batch) -> int:
    return sum(int(features.is_token(batch, name).sum()) for name in counted_features(batch))

  read(next(batches))
  start, cpu, number, tokens = time.perf_counter(), time.process_time(), 0, 0
  while number == 0 or time.perf_counter() - start < seconds:
    tokens += read(next(batches))
    number += 1
  return Speed(
    tokens / (time.perf_counter() - start), tokens / max(time.process_time() - cpu, 1e-9), number
  )
