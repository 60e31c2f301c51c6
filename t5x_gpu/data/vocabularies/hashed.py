"""A vocabulary without a file or training: every word is hashed into one of N ids.

Useful for small models and a first look at new data: a word takes one position instead of about
five bytes. The ids cannot be decoded back to text.
"""

from collections.abc import Iterable
from typing import Any

from t5x_gpu.data.tf_runtime import seqio, tf

# Ids 0 and 1 are padding and end of text; every word has an id, so there is no unknown id.
EOS_ID, NUM_SPECIAL = 1, 2
# A run of letters, a run of digits, or a single other mark; in the syntax of RE2 (TF).
_PIECE = r'([\pL\pM]+|\pN+|[^\s\pL\pM\pN])'


class HashedWordsVocabulary(seqio.Vocabulary):
  """Words, numbers and punctuation marks -> ids 2 to `num_words` + 1, by a hash that never changes.

  Different words may share an id. Case matters, white space does not.

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

  def __eq__(self, other: Any) -> bool:
    return (
      isinstance(other, HashedWordsVocabulary)
      and self.num_words == other.num_words
      and self.extra_ids == other.extra_ids
    )

  def __hash__(self) -> int:
    return hash(('words', self.num_words, self.extra_ids))

  def __repr__(self) -> str:
    return f'HashedWordsVocabulary({self.num_words})'
