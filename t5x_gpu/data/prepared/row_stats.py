"""What packed rows hold, for people who look at their data: examples, padding, lengths."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from t5x_gpu.data.features import is_token
from t5x_gpu.data.prepared.index import counted_features
from t5x_gpu.data.prepared.shard_writer import example_lengths


@dataclasses.dataclass(frozen=True)
class Piece:
  """Tokens of one example in a row that are alike.

  Attributes:
    feature: model feature that they are of.
    example: number in the row, from 1.
    taught: whether the loss is taken there; True where nothing is said about it.
    text: what they mean.
    is_first: whether an example begins here.
  """

  feature: str
  example: int
  taught: bool
  text: str
  is_first: bool


def row_of(batch: Mapping[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
  """Returns feature -> [length] or a number, of one row of a batch."""
  return {name: np.asarray(x[row]) for name, x in batch.items()}


def pieces(
  row: Mapping[str, np.ndarray], *, decode: Callable[[Sequence[int]], str]
) -> Iterator[Piece]:
  """Yields a row in pieces: a new one wherever the example or the weight changes.

  Args:
    row: of `row_of`.
    decode: ids -> text.
  """
  for feature in counted_features(row):
    tokens, stack = row[feature], feature.split('_')[0]
    segments = row.get(f'{stack}_segment_ids')
    segments = is_token(row, feature).astype(np.int32) if segments is None else segments
    weights = row.get(f'{stack}_loss_weights')
    taught = np.ones(len(tokens), bool) if weights is None else weights > 0
    changes = np.flatnonzero((np.diff(segments) != 0) | (np.diff(taught.astype(np.int8)) != 0)) + 1
    last = 0
    for start, end in zip([0, *changes], [*changes, len(tokens)]):
      example = int(segments[start])
      if example:
        yield Piece(
          feature,
          example,
          bool(taught[start]),
          decode([int(i) for i in tokens[start:end]]),
          is_first=example != last,
        )
        last = example


@dataclasses.dataclass
class RowFacts:
  """Sums over rows.

  Attributes:
    rows, tokens, positions: numbers; positions are tokens and padding.
    lengths: exponent e -> examples with 2**(e-1) < length <= 2**e.
  """

  rows: int = 0
  tokens: int = 0
  positions: int = 0
  lengths: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def padding(self) -> float:
    return 1 - self.tokens / max(1, self.positions)

  def add(self, row: Mapping[str, np.ndarray]) -> None:
    """Counts a row; one without a token only fills a batch, and is left out."""
    tokens = sum(int(is_token(row, name).sum()) for name in counted_features(row))
    if tokens:
      self.rows, self.tokens = self.rows + 1, self.tokens + tokens
      self.positions += sum(len(row[name]) for name in counted_features(row))
      self.lengths.update((length - 1).bit_length() for length in example_lengths(row))
