"""Statistics of packed rows (examples, padding, lengths), and rows and targets as text."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data import features
from t5x_gpu.data.features import is_token
from t5x_gpu.data.prepared.index import counted_features


@dataclasses.dataclass(frozen=True)
class TokenSpan:
  """Consecutive tokens of one example in a row, all with or all without a loss.

  Attributes:
    feature: model feature of the tokens.
    example: number of the example in the row, from 1.
    has_loss: whether the loss counts there; True without loss weights.
    text: the decoded tokens.
    is_first: whether this piece begins the example.
  """

  feature: str
  example: int
  has_loss: bool
  text: str
  is_first: bool


def row_of(batch: Mapping[str, np.ndarray], row: int) -> dict[str, np.ndarray]:
  """Returns one row of a batch: feature -> [length] or a number."""
  return {name: np.asarray(x[row]) for name, x in batch.items()}


def pieces(
  row: Mapping[str, np.ndarray], *, decode: Callable[[Sequence[int]], str]
) -> Iterator[TokenSpan]:
  """Yields the pieces of a row.

  Args:
    row: result of `row_of`.
    decode: ids -> text.
  """
  for feature in counted_features(row):
    tokens, stack = row[feature], feature.split('_')[0]
    segments = row.get(f'{stack}_segment_ids')
    segments = is_token(row, feature).astype(np.int32) if segments is None else segments
    weights = row.get(f'{stack}_loss_weights')
    has_loss = np.ones(len(tokens), bool) if weights is None else weights > 0
    # The first token of a conversation is only an input; other texts begin with input 0.
    inputs = row.get('decoder_input_tokens') if feature == 'decoder_target_tokens' else None
    changes = np.flatnonzero((np.diff(segments) != 0) | np.diff(has_loss)) + 1
    last = 0
    for start, end in zip([0, *changes], [*changes, len(tokens)]):
      example = int(segments[start])
      if example:
        is_first = example != last
        before = inputs[start : start + 1] if is_first and inputs is not None else []
        ids = [int(i) for i in (*before, *tokens[start:end])]
        text = decode(ids[1:] if len(before) and not before[0] else ids)
        yield TokenSpan(feature, example, bool(has_loss[start]), text, is_first=is_first)
        last = example


def num_with_loss(row: Mapping[str, np.ndarray]) -> Optional[int]:
  """Returns the number of tokens with a loss in a row of a decoder-only model; else None."""
  weights = None if 'encoder_input_tokens' in row else row.get('decoder_loss_weights')
  return None if weights is None else int((weights > 0).sum())


def example_lengths(row: Mapping[str, np.ndarray]) -> list[int]:
  """Returns the number of tokens of each example: inputs and targets together, without padding.

  Segment ids separate packed examples; without segment ids, a row is one example.
  """
  total = np.zeros(1, np.int64)
  for name in counted_features(row):
    segments = row.get(f'{name.split("_")[0]}_segment_ids')
    counts = (
      np.bincount(segments) if segments is not None else np.asarray([0, is_token(row, name).sum()])
    )
    longer, shorter = sorted((total, counts), key=len, reverse=True)
    total = longer + np.pad(shorter, (0, len(longer) - len(shorter)))
  return [int(length) for length in total[1:] if length]


@dataclasses.dataclass
class RowStats:
  """Sums over rows.

  Attributes:
    rows, tokens, positions: counts; positions are tokens and padding.
    lengths: exponent e -> number of examples with 2**(e-1) < length <= 2**e.
  """

  rows: int = 0
  tokens: int = 0
  positions: int = 0
  lengths: collections.Counter = dataclasses.field(default_factory=collections.Counter)

  @property
  def padding(self) -> float:
    return 1 - self.tokens / max(1, self.positions)

  def add(self, row: Mapping[str, np.ndarray]) -> None:
    """Counts a row, unless it is all padding, which only fills up a batch."""
    tokens = sum(int(is_token(row, name).sum()) for name in counted_features(row))
    if tokens:
      self.rows, self.tokens = self.rows + 1, self.tokens + tokens
      self.positions += sum(len(row[name]) for name in counted_features(row))
      self.lengths.update((length - 1).bit_length() for length in example_lengths(row))


def target_of(row: Mapping[str, np.ndarray], names: Sequence[str]) -> str:
  """Returns the class, classes, tags or number of a row as text; '' if it has none."""

  def named(number: int) -> str:
    return names[number] if 0 <= number < len(names) else str(number)

  if features.LABEL in row:
    return f'label: {named(int(row[features.LABEL]))}'
  if features.LABELS in row:
    found = [named(int(i) - 1) for i in row[features.LABELS] if i > 0]
    one_per_word = features.LABEL_WEIGHTS not in row
    return f'tags: {" ".join(found)}' if one_per_word else f'labels: {", ".join(found) or "none"}'
  if features.SCORES in row and (row[features.SCORES] or 'encoder_positions' not in row):
    return f'score: {row[features.SCORES] / features.SCORE_UNIT:.10g}'
  return ''
