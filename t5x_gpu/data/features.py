"""Which model features each feature converter makes from task features, as plain data without TF.

The trainer builds abstract batches from this without importing SeqIO.
`tests/data/streaming/test_feature_converters.py` compares it with SeqIO's features.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Optional

import numpy as np

from t5x_gpu.data.batches import STACK_TOKENS, BatchSpec, assumed_mask
from t5x_gpu.errors import ConfigError, DataError, Problem, did_you_mean

# SeqIO makes all features int32, loss weights included; so does T5X.
DTYPE = 'int32'
# Model features of classification, both [batch]: the class, and 0 for a padding row.
LABEL, LABEL_WEIGHTS = 'label', 'label_weights'
# Several labels per row: class numbers plus one, [batch, length]; 0 means no label. The labels of a
# text fill the first positions; the tag of a word is at its first token.
LABELS = 'encoder_labels'
# [batch], in ten-thousandths: the number to predict, or the similarity of two texts; 0 if absent.
SCORES = 'scores'
SCORE_UNIT = 10_000
# Task feature [length] of text pairs: 0 for the first text, 1 for the second.
TOKEN_TYPES = 'token_types'
# Task features: 1 where the loss counts, 0 elsewhere; and the decoder inputs of conversations.
LOSS_MASK, DECODER_INPUTS = 'loss_mask', 'decoder_inputs'
# Task feature of pairs: positions 1, 2, ... in the chosen text, then in the rejected text.
# (The name avoids '_positions', a suffix that SeqIO's packing removes.)
PAIR_PLACES = 'pair_places'


@dataclasses.dataclass(frozen=True)
class ConverterFeatures:
  """The task features that a feature converter reads, and the model features that it makes.

  Attributes:
    task_features: features that the task must have and `task_feature_lengths` must name.
    tokens: model feature with token ids -> the task features whose ids and lengths it joins.
    aligned: model feature -> the token feature with the same length.
    packed: like `aligned`, for features that exist only in packed rows; None if a row is always one
      example.
    label: task feature with the class number of an example, or its class numbers, or None.
      `task_feature_lengths` leaves it out.
    classes: model feature for the label: `label` [batch], or `encoder_labels`.
    weighted_rows: whether rows have `label_weights` [batch].
    scored: whether rows have `scores` [batch].
    other_features: further features that the task must have; `task_feature_lengths` leaves them
      out.
    equal_lengths: whether the task features share positions, so that their lengths must be equal.
  """

  task_features: tuple[str, ...]
  tokens: Mapping[str, tuple[str, ...]]
  aligned: Mapping[str, str]
  packed: Optional[Mapping[str, str]]
  label: Optional[str] = None
  classes: str = LABEL
  weighted_rows: bool = False
  scored: bool = False
  other_features: tuple[str, ...] = ()
  equal_lengths: bool = False


_DECODER_ALIGNED = {'decoder_loss_weights': 'decoder_target_tokens'}
_DECODER_PACKED = {
  'decoder_segment_ids': 'decoder_target_tokens',
  'decoder_positions': 'decoder_target_tokens',
}

_ENCODER_TOKENS = {'encoder_input_tokens': ('inputs',)}
_TYPES = {'encoder_token_types': 'encoder_input_tokens'}
_LABELS = {LABELS: 'encoder_input_tokens'}
_ENCODER_PACKED = {
  'encoder_segment_ids': 'encoder_input_tokens',
  'encoder_positions': 'encoder_input_tokens',
}

LAYOUTS: dict[str, ConverterFeatures] = {
  'lm': ConverterFeatures(
    task_features=('targets',),
    tokens={'decoder_target_tokens': ('targets',), 'decoder_input_tokens': ('targets',)},
    aligned=_DECODER_ALIGNED,
    packed=_DECODER_PACKED,
  ),
  'preference': ConverterFeatures(
    task_features=('targets',),
    tokens={'decoder_target_tokens': ('targets',), 'decoder_input_tokens': ('targets',)},
    aligned={**_DECODER_ALIGNED, **_DECODER_PACKED},
    packed={},
  ),
  'prefix_lm': ConverterFeatures(
    task_features=('inputs', 'targets'),
    tokens={
      'decoder_target_tokens': ('inputs', 'targets'),
      'decoder_input_tokens': ('inputs', 'targets'),
    },
    aligned={**_DECODER_ALIGNED, 'decoder_causal_attention': 'decoder_target_tokens'},
    packed=_DECODER_PACKED,
  ),
  'encoder_decoder': ConverterFeatures(
    task_features=('inputs', 'targets'),
    tokens={
      'encoder_input_tokens': ('inputs',),
      'decoder_target_tokens': ('targets',),
      'decoder_input_tokens': ('targets',),
    },
    aligned=_DECODER_ALIGNED,
    packed={
      'encoder_segment_ids': 'encoder_input_tokens',
      'encoder_positions': 'encoder_input_tokens',
      **_DECODER_PACKED,
    },
  ),
  'encoder_mlm': ConverterFeatures(
    task_features=('inputs', 'targets'),
    tokens={'encoder_input_tokens': ('inputs',), 'encoder_target_tokens': ('targets',)},
    aligned={'encoder_loss_weights': 'encoder_target_tokens'},
    packed=_ENCODER_PACKED,
    equal_lengths=True,
  ),
}

_CLASSIFIED = ConverterFeatures(
  task_features=('inputs',),
  tokens=_ENCODER_TOKENS,
  aligned={},
  packed=None,
  label='label',
  weighted_rows=True,
)
_MULTI_LABEL = dataclasses.replace(_CLASSIFIED, aligned=_LABELS, label='labels', classes=LABELS)
_REGRESSED = dataclasses.replace(_CLASSIFIED, label=None, scored=True, other_features=('score',))
LAYOUTS |= {
  'encoder_classification': _CLASSIFIED,
  'encoder_classification_with_types': dataclasses.replace(_CLASSIFIED, aligned=_TYPES),
  'encoder_multi_label': _MULTI_LABEL,
  'encoder_multi_label_with_types': dataclasses.replace(
    _MULTI_LABEL, aligned={**_LABELS, **_TYPES}
  ),
  'encoder_regression': _REGRESSED,
  'encoder_regression_with_types': dataclasses.replace(_REGRESSED, aligned=_TYPES),
  'encoder_tags': ConverterFeatures(
    task_features=('inputs',),
    tokens=_ENCODER_TOKENS,
    aligned=_LABELS,
    packed=_ENCODER_PACKED,
    label='tags',
    classes=LABELS,
  ),
  # A row holds all texts of one example: segment 1 is the first text, and so on.
  'encoder_text_sets': ConverterFeatures(
    task_features=('inputs',),
    tokens=_ENCODER_TOKENS,
    aligned=_ENCODER_PACKED,
    packed=None,
    weighted_rows=True,
    scored=True,
    other_features=('segments', 'places', 'score'),
  ),
}


def layout(feature_converter: str) -> ConverterFeatures:
  """Returns the layout named `feature_converter`. Raises ConfigError for unknown names."""
  if feature_converter not in LAYOUTS:
    raise ConfigError(
      f'There is no feature converter {feature_converter!r}.'
      + did_you_mean(feature_converter, LAYOUTS),
      fix='Use one of ' + ', '.join(repr(name) for name in LAYOUTS) + '.',
    )
  return LAYOUTS[feature_converter]


def check_batch_size(batch_size: object) -> None:
  """Raises DataError unless `batch_size` is a whole number of at least 1."""
  if not _is_length(batch_size):
    raise DataError(
      f'The global batch has batch_size = {batch_size!r} examples; it must be a whole number '
      'of at least 1.',
      fix='Set BATCH_SIZE (DatasetConfig.batch_size) to a multiple of the devices that split '
      'the batch, such as 8.',
      parameters=('DatasetConfig.batch_size',),
    )


def check_lengths(feature_converter: str, *, task_feature_lengths: Mapping[str, int]) -> None:
  """Raises DataError unless `task_feature_lengths` has exactly the converter's features, >= 1."""
  wanted = layout(feature_converter).task_features
  problems = []
  for name in wanted:
    if name not in task_feature_lengths:
      problems.append(
        f'{name!r} has no length.' + did_you_mean(name, task_feature_lengths.keys() - set(wanted))
      )
  for name, length in task_feature_lengths.items():
    if name not in wanted:
      problems.append(f'{name!r} is not one of its features.' + did_you_mean(name, wanted))
    elif not _is_length(length):
      problems.append(f'{name!r} has length {length!r}; a sequence needs at least 1 token.')
  lengths = {
    name: task_feature_lengths[name]
    for name in wanted
    if _is_length(task_feature_lengths.get(name))
  }
  if layout(feature_converter).equal_lengths and len(set(lengths.values())) > 1:
    problems.append(
      'They are the same positions, masked and unmasked, so their lengths must be equal.'
    )
    lengths = dict.fromkeys(wanted, max(lengths.values()))
  if not problems:
    return
  example = {name: lengths.get(name, 256) for name in wanted}
  hint = ''
  if feature_converter == 'lm' and 'inputs' in task_feature_lengths:
    hint = (
      "\nFor inputs and targets in one sequence use feature converter 'prefix_lm'; "
      "for an encoder over the inputs, 'encoder_decoder'."
    )
  raise DataError(
    'task_feature_lengths',
    problems=[Problem(problem) for problem in problems],
    fix=f'Feature converter {feature_converter!r} takes '
    + ' and '.join(repr(name) for name in wanted)
    + f', task_feature_lengths = {dict(task_feature_lengths)}.\n'
    f'Set TASK_FEATURE_LENGTHS = {example}.' + hint,
    parameters=('DatasetConfig.task_feature_lengths',),
  )


def check_pack(feature_converter: str, *, pack: bool) -> None:
  """Raises DataError for packing with a converter whose rows have one label each."""
  if pack and layout(feature_converter).packed is None:
    raise DataError(
      f'Feature converter {feature_converter!r} has one label per row, or one set of texts, so it '
      'cannot pack several examples into one row (pack = True).',
      fix='Set PACK = False.',
      parameters=('DatasetConfig.pack',),
    )


def is_token(row: Mapping[str, np.ndarray], name: str) -> np.ndarray:
  """Returns booleans [..., length]: whether feature `name` of a row, or batch, is not padding."""
  stack = name.split('_')[0]
  if f'{stack}_segment_ids' in row:
    return np.asarray(row[f'{stack}_segment_ids']) > 0
  return assumed_mask(row, stack)


def _is_length(value: object) -> bool:
  """Returns whether `value` is a whole number of at least 1."""
  return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def batch_spec(
  feature_converter: str,
  *,
  task_feature_lengths: Mapping[str, int],
  batch_size: int,
  pack: bool,
  vocab_size: int,
  num_classes: Optional[int] = None,
  class_names: Sequence[str] = (),
) -> BatchSpec:
  """Returns shapes, dtypes and vocabulary bounds of the global batch; imports no TF.

  Args:
    feature_converter: a key of `LAYOUTS`.
    task_feature_lengths: task feature -> tokens; in 'prefix_lm', rows have inputs + targets tokens.
    batch_size: rows of the global batch.
    pack: put several examples into a row, with segment ids and positions. Otherwise each row is one
      example at positions 0, 1, 2, ..., and segment ids are 1 on its tokens.
    vocab_size: exclusive upper bound of the model's token ids.
    num_classes: number of classes of the model, if rows have labels.
    class_names: class names of the model, in the order of its class numbers; empty to use the
      data's.
  Raises:
    ConfigError, DataError: unknown converter; missing, extra or zero lengths; batch_size < 1;
      packing with one label per row; a label without `num_classes`.
  """
  check_batch_size(batch_size)
  check_lengths(feature_converter, task_feature_lengths=task_feature_lengths)
  check_pack(feature_converter, pack=pack)
  kind = layout(feature_converter)
  lengths = {
    name: sum(task_feature_lengths[part] for part in parts) for name, parts in kind.tokens.items()
  }
  for name, like in {**kind.aligned, **(kind.packed if pack else {})}.items():
    lengths[name] = lengths[like]
  for stack, tokens in STACK_TOKENS.items():
    if tokens in lengths:
      lengths.setdefault(f'{stack}_segment_ids', lengths[tokens])
  shapes: dict[str, tuple[int, ...]] = {
    name: (batch_size, length) for name, length in lengths.items()
  }
  vocab_sizes = dict.fromkeys(kind.tokens, vocab_size)
  if kind.label:
    if num_classes is None or num_classes < 2:
      raise DataError(
        f'The model has num_classes = {num_classes}; a classifier needs at least 2.',
        fix="Set the model's num_classes to the task's number of classes.",
        parameters=('EncoderModel.num_classes',),
      )
    vocab_sizes[kind.classes] = num_classes + (kind.classes == LABELS)
  for name, has in (
    (LABEL, kind.label and kind.classes == LABEL),
    (LABEL_WEIGHTS, kind.weighted_rows),
    (SCORES, kind.scored),
  ):
    if has:
      shapes[name] = (batch_size,)
  return BatchSpec(shapes, dict.fromkeys(shapes, DTYPE), vocab_sizes, tuple(class_names))
