"""Vocabularies by name (`named_vocabulary`), their special ids, and text <-> ids.

`HashedWordsVocabulary` works without a file or training.
"""

import dataclasses
import hashlib
import os
import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import Optional, Union

import numpy as np

from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.huggingface import PADDING, HuggingFaceVocabulary
from t5x_gpu.data.vocabularies.special_tokens import read_special_tokens
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.storage.user_paths import without_dots

# Ids 0 and 1 are padding and end of text; every word has an id, so there is no unknown id.
EOS_ID, NUM_SPECIAL = 1, 2
# A run of letters, a run of digits, or a single other mark; in the syntax of RE2 (TF).
_PIECE = r'([\pL\pM]+|\pN+|[^\s\pL\pM\pN])'


class HashedWordsVocabulary(seqio.Vocabulary):
  """Words, numbers and punctuation marks -> ids 2 to `num_words` + 1, by a hash that never changes.

  Useful for small models and a first look at new data: a word takes one position instead of about
  five bytes. Different words may share an id, so ids cannot be decoded back to text. Case matters,
  white space does not.

  Args:
    num_words: number of ids for words.
    extra_ids: number of sentinels after the word ids.
  """

  def __init__(self, num_words: int, *, extra_ids: int = 0):
    super().__init__(extra_ids=extra_ids)
    self.num_words = num_words

  @property
  def bos_id(self) -> None:
    return None

  @property
  def eos_id(self) -> int:
    return EOS_ID

  @property
  def unk_id(self) -> None:
    return None

  @property
  def _base_vocab_size(self) -> int:
    return self.num_words + NUM_SPECIAL

  def _encode(self, s: str) -> list[int]:
    return [int(i) for i in self._encode_tf(tf.constant(s)).numpy()]

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    words = tf.strings.split(tf.strings.regex_replace(s, _PIECE, r' \1 '))
    # FarmHash's fingerprint: the same on every machine and in every version of TF.
    return NUM_SPECIAL + tf.cast(tf.strings.to_hash_bucket_fast(words, self.num_words), tf.int32)

  def _decode(self, ids: Iterable[int]) -> str:
    """Returns '<17> <4203>', because the words are unknown; without padding and end."""
    return ' '.join(f'<{i}>' for i in map(int, ids) if i >= NUM_SPECIAL)

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    kept = tf.ragged.boolean_mask(ids, ids >= NUM_SPECIAL)
    return tf.strings.reduce_join('<' + tf.strings.as_string(kept) + '>', axis=-1, separator=' ')

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, HashedWordsVocabulary)
      and self.num_words == other.num_words
      and self.extra_ids == other.extra_ids
    )

  def __hash__(self) -> int:
    return hash(('words', self.num_words, self.extra_ids))

  def __repr__(self) -> str:
    return f'HashedWordsVocabulary({self.num_words})'


_PREFIX, _HUGGINGFACE, _WORDS = 'sentencepiece:', 'huggingface:', 'words:'


class ClassVocabulary(seqio.PassThroughVocabulary):
  """The classes of a label: number <-> name.

  Args:
    names: class names in the order of their numbers.
  """

  def __init__(self, names: Sequence[str]):
    super().__init__(size=len(names))
    self.names = tuple(names)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, ClassVocabulary) and self.names == other.names

  def __hash__(self) -> int:
    return hash(self.names)


@dataclasses.dataclass(frozen=True)
class TextVocabulary:
  """Text <-> the model's token ids, for one feature.

  Attributes:
    size: number of ids; the model's vocabulary must be at least as large.
    eos_id: id that ends a document, or None.
    zero_is_a_word: id 0 is a token of texts, or their end, rather than padding.
    name: for logs: 'byte', 'sentencepiece:FILE', 'huggingface:FILE', 'words:N' or SeqIO's class
      name.
  """

  size: int
  eos_id: Optional[int]
  name: str
  _seqio: seqio.Vocabulary = dataclasses.field(repr=False)
  zero_is_a_word: bool = False

  def without_padding(self, ids: Iterable[int]) -> list[int]:
    """Returns `ids` without padding."""
    return [int(i) for i in ids if i != 0 or self.zero_is_a_word]

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without an end-of-sequence id."""
    return [int(i) for i in self._seqio.encode(text)]

  def decode(self, ids: Union[list[int], np.ndarray]) -> str:
    """Returns the text of `ids` up to the first end-of-sequence id; padding is skipped."""
    ids = [int(i) for i in np.asarray(ids).reshape(-1)]
    if self.eos_id in ids:
      ids = ids[: ids.index(self.eos_id)]
    return self._seqio.decode(self.without_padding(ids))

  def spelled(self, ids: Sequence[int]) -> str:
    """Returns the text of all `ids`, with special tokens if the vocabulary can spell them."""
    if isinstance(self._seqio, HuggingFaceVocabulary):
      return self._seqio.spelled(self.without_padding(ids))
    return self.decode(list(ids))


def named_vocabulary(name: str, *, extra_ids: int = 0) -> seqio.Vocabulary:
  """Returns SeqIO's vocabulary named `name`.

  Args:
    name: 'byte' (259 ids), 'sentencepiece:FILE', 'huggingface:FOLDER' or 'words:N' (words hashed
      into N ids; no file).
    extra_ids: number of sentinels after the last id, counted from the end as in T5. A Hugging Face
      tokenizer uses its own sentinels if it has enough (for one sentinel, [MASK] is enough).
  Raises:
    DataError: the name is unknown, the file is missing or broken, or files next to a SentencePiece
      model declare tokens that it would split.
  """
  if name == 'byte':
    return seqio.ByteVocabulary(extra_ids=extra_ids)
  if name.startswith(_HUGGINGFACE):
    path = name[len(_HUGGINGFACE) :]
    own = HuggingFaceVocabulary(path)
    num_own = max(len(own.sentinel_ids), own.mask_id is not None)
    return own if num_own >= extra_ids else HuggingFaceVocabulary(path, extra_ids=extra_ids)
  if name.startswith(_WORDS):
    number = name[len(_WORDS) :]
    if not number.isdecimal() or not 0 < int(number) < 2**30:
      raise DataError(
        f'The vocabulary {name!r} hashes words into {number!r} ids; that must be a '
        'whole number from 1 to 2**30 - 1.',
        fix="Set DatasetConfig.vocabulary to 'words:8192', for example.",
        parameters=('DatasetConfig.vocabulary',),
      )
    return HashedWordsVocabulary(int(number), extra_ids=extra_ids)
  if not name.startswith(_PREFIX):
    raise DataError(
      f'There is no vocabulary {name!r}.',
      fix="Set DatasetConfig.vocabulary to 'byte', 'sentencepiece:MODEL_FILE', "
      "'huggingface:FOLDER', 'words:8192', or None for the task's own.",
      parameters=('DatasetConfig.vocabulary',),
    )
  path = without_dots(os.path.expanduser(name[len(_PREFIX) :]))
  if '://' not in path and not os.path.isfile(path):
    raise DataError(
      f'The SentencePiece model {path!r} does not exist (working directory: {os.getcwd()}).',
      fix='Correct the path after sentencepiece: in DatasetConfig.vocabulary; it is the .model '
      'file that spm_train writes.',
      parameters=('DatasetConfig.vocabulary',),
    )
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=extra_ids)
  try:
    _ = vocabulary.vocab_size  # Loads the file.
  except Exception as e:  # SentencePiece raises RuntimeError, OSError and protobuf's own errors.
    raise DataError(
      f'{path!r} cannot be read as a SentencePiece model: {e}',
      fix='Point DatasetConfig.vocabulary at the .model file (not .vocab).',
      parameters=('DatasetConfig.vocabulary',),
    ) from e
  if '://' not in path:
    _check_folder(pathlib.Path(path), vocabulary)
  return vocabulary


def _check_folder(path: pathlib.Path, vocabulary: seqio.SentencePieceVocabulary) -> None:
  """Raises DataError if the files of a Hugging Face tokenizer add to its SentencePiece model.

  Args:
    path: the SentencePiece model.
    vocabulary: its vocabulary.
  """
  named, declared, special = read_special_tokens(path.parent)
  pieces = vocabulary.tokenizer
  # Named tokens mark places, such as the end, and the model has its own for these.
  in_no_text = {*named.values(), *PADDING, pieces.id_to_piece(pieces.unk_id())}

  def is_split(token: str) -> bool:
    number = pieces.piece_to_id(token)
    return number == pieces.unk_id() or pieces.is_control(number)

  split = [
    token.text
    for token in (*declared, *special)
    if token.text not in in_no_text
    and not re.fullmatch(r'<extra_id_\d+>', token.text)  # DatasetConfig.extra_ids
    and is_split(token.text)
  ]
  end = named.get('eos_token') or None
  if split:
    problem = 'splits ' + ', '.join(map(repr, split[:8])) + (', ...' if split[8:] else '')
  elif end is not None and pieces.piece_to_id(end) != vocabulary.eos_id:
    own = repr(pieces.id_to_piece(vocabulary.eos_id)) if vocabulary.eos_id >= 0 else 'nothing'
    problem = f'ends texts with {own} instead of {end!r}'
  else:
    return
  folder = str(path.parent)
  first = (
    f'Run transformers.AutoTokenizer.from_pretrained({folder!r}).save_pretrained({folder!r}), then'
  )
  raise DataError(
    f'The SentencePiece model {str(path)!r} {problem}: only files next to it, which SentencePiece '
    'does not read, declare that.',
    fix=('Set' if path.with_name('tokenizer.json').is_file() else f'{first} set')
    + f" DatasetConfig.vocabulary = 'huggingface:{folder}'. To read texts without these "
    'tokens, copy the SentencePiece model alone to another folder.',
    parameters=('DatasetConfig.vocabulary',),
  )


def check_loads(vocabulary: seqio.Vocabulary, *, task: str) -> None:
  """Raises DataError if a task's SentencePiece model cannot be read (T5's model needs network)."""
  if not isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return
  try:
    _ = vocabulary.vocab_size  # Loads the file.
  except Exception as e:  # as above, and TensorFlow's errors for gs://
    raise DataError(
      f'{task!r} has the vocabulary {vocabulary.sentencepiece_model_file}, which '
      f'cannot be read: {first_line(e)[:300]}',
      fix="Set DatasetConfig.vocabulary = 'sentencepiece:FILE' (a copy), or another vocabulary.",
      parameters=('DatasetConfig.vocabulary',),
      docs='tasks.md#t5s-own-tasks',
    ) from e


def vocabulary_name(vocabulary: seqio.Vocabulary) -> str:
  """Returns the name of `vocabulary`, for messages and fingerprints."""
  if isinstance(vocabulary, seqio.ByteVocabulary):
    return 'byte'
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return _PREFIX + vocabulary.sentencepiece_model_file
  if isinstance(vocabulary, HuggingFaceVocabulary):
    return _HUGGINGFACE + str(vocabulary.path)
  if isinstance(vocabulary, HashedWordsVocabulary):
    return f'{_WORDS}{vocabulary.num_words}'
  if isinstance(vocabulary, ClassVocabulary):
    return 'classes'
  return type(vocabulary).__name__


def zero_is_a_word(vocabulary: seqio.Vocabulary) -> bool:
  """Returns whether id 0 is a token of texts, or their end, rather than padding."""
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return vocabulary.tokenizer.pad_id() != 0  # by default, id 0 is <unk> and padding has no id
  return getattr(vocabulary, 'zero_is_a_word', False) or vocabulary.eos_id == 0


def text_may_have_zero(vocabulary: seqio.Vocabulary) -> bool:
  """Returns whether a text may have id 0, also if it contains the padding token's name, '<pad>'."""
  return isinstance(vocabulary, HuggingFaceVocabulary) or zero_is_a_word(vocabulary)


def never_gives_zero(vocabulary: seqio.Vocabulary) -> bool:
  """Returns whether id 0 is certainly padding; False for custom vocabularies."""
  known = (seqio.ByteVocabulary, HashedWordsVocabulary, seqio.SentencePieceVocabulary)
  return isinstance(vocabulary, known) and not zero_is_a_word(vocabulary)


def vocabulary_fingerprint(vocabulary: seqio.Vocabulary) -> str:
  """Returns facts that identify `vocabulary` in a checkpoint: content of its file, not its path."""
  kind = vocabulary_name(vocabulary)
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    digest = hashlib.sha256(vocabulary.sp_model).hexdigest()[:16]
    kind = f'{_PREFIX}{os.path.basename(vocabulary.sentencepiece_model_file)} ({digest})'
  elif isinstance(vocabulary, HuggingFaceVocabulary):
    kind = f'{_HUGGINGFACE}{vocabulary.path.name} ({vocabulary.fingerprint})'
  elif isinstance(vocabulary, ClassVocabulary):
    kind = f'classes {", ".join(vocabulary.names)}'
  return f'{kind}, {vocabulary.vocab_size} ids'


def check_fits(name: str, size: int, *, model_vocab_size: int) -> None:
  """Raises DataError if the vocabulary `name` has more ids, `size`, than the model."""
  if size > model_vocab_size:
    raise DataError(
      f'The vocabulary {name} has {size:,} ids, the model {model_vocab_size:,}: it has no '
      f'embeddings for ids {model_vocab_size:,} to {size - 1:,}.',
      fix='Use the vocabulary that the model was trained with (DatasetConfig.vocabulary, or '
      '--vocabulary), or a checkpoint that was trained with this one.',
      parameters=('DatasetConfig.vocabulary', 'TransformerConfig.vocab_size'),
    )


def text_vocabulary(vocabulary: seqio.Vocabulary) -> TextVocabulary:
  """Returns `vocabulary` for encoding prompts and decoding samples."""
  eos_id = vocabulary.eos_id
  return TextVocabulary(
    size=vocabulary.vocab_size,
    eos_id=None if eos_id is None or eos_id < 0 else eos_id,  # SentencePiece returns -1 for none
    name=vocabulary_name(vocabulary),
    _seqio=vocabulary,
    zero_is_a_word=zero_is_a_word(vocabulary),
  )


def start_id(vocabulary: seqio.Vocabulary) -> Optional[int]:
  """Returns the id that precedes a text for an encoder ([CLS]), or None."""
  return vocabulary.start_id if isinstance(vocabulary, HuggingFaceVocabulary) else None


def end_id(vocabulary: seqio.Vocabulary) -> int:
  """Returns the id that ends a text. Raises DataError if `vocabulary` does not have one."""
  if vocabulary.eos_id is None or vocabulary.eos_id < 0:  # SentencePiece returns -1
    raise DataError(
      f'{vocabulary_name(vocabulary)!r} has no end-of-text id, and this task needs one.',
      fix='Name "eos_token" (or "sep_token") in the tokenizer_config.json next to tokenizer.json; '
      'train a SentencePiece model with eos_id 1.',
      parameters=('DatasetConfig.vocabulary',),
    )
  return vocabulary.eos_id


def sentinel_ids(vocabulary: seqio.Vocabulary) -> tuple[int, ...]:
  """Returns the ids that mark masked spans, in order; descending, as in T5."""
  if isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.sentinel_ids:
    return vocabulary.sentinel_ids
  return tuple(vocabulary.vocab_size - 1 - i for i in range(vocabulary.extra_ids))


def mask_id(vocabulary: seqio.Vocabulary) -> Optional[int]:
  """Returns the id for masked tokens: [MASK], or the first sentinel; None without either."""
  if isinstance(vocabulary, HuggingFaceVocabulary) and vocabulary.mask_id is not None:
    return vocabulary.mask_id
  return next(iter(sentinel_ids(vocabulary)), None)


def ordinary_ids(vocabulary: seqio.Vocabulary) -> np.ndarray:
  """Returns the ids [n], int32, of text pieces: not padding, end, unknown or sentinels."""
  if isinstance(vocabulary, HuggingFaceVocabulary):
    return vocabulary.ordinary_ids
  special = {vocabulary.eos_id, vocabulary.unk_id, *sentinel_ids(vocabulary)}
  special |= set() if zero_is_a_word(vocabulary) else {0}
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    special.add(vocabulary.bos_id)
  return np.asarray([i for i in range(vocabulary.vocab_size) if i not in special], np.int32)
