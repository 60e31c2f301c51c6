"""A Hugging Face tokenizer as a SeqIO vocabulary: `tokenizer.json`, read by package `tokenizers`.

Ids are the tokenizer's ids, and id 0 may have any meaning: a word (GPT-2, Llama 3 and Qwen: '!'),
the end of a text (GPT-NeoX), or padding, which a text may contain by name ('<pad>').
"""

import functools
import hashlib
import importlib
import json
import logging
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies.special_tokens import DeclaredToken, read_special_tokens
from t5x_gpu.errors import DataError, first_line
from t5x_gpu.storage.json_schema import read_json
from t5x_gpu.storage.user_paths import expanded_path

# Usual names of the padding token, for tokenizers without a tokenizer_config.json.
PADDING = ('[PAD]', '<pad>', '<PAD>', '<|pad|>')
# A runic letter, to see how a tokenizer encodes a letter that it does not know.
_RARE = '\u16a0'
_PARAMETERS = ('DatasetConfig.vocabulary',)
log = logging.getLogger(__name__)
_Tokenizer = Any  # tokenizers.Tokenizer, which is imported if it is needed
_error = functools.partial(DataError, parameters=_PARAMETERS)
_SAME_MODEL = 'Use tokenizer.json and tokenizer_config.json of the same model.'


class HuggingFaceVocabulary(seqio.Vocabulary):
  """Text <-> token ids of a `tokenizer.json`, without its template of special tokens.

  Args:
    path: tokenizer.json, or its folder; tokenizer_config.json (or special_tokens_map.json) in the
      folder names the special tokens. They stay whole in a text, like the tokens that
      tokenizer_config.json or added_tokens.json declare.
    extra_ids: number of sentinels after the tokenizer's ids, for a tokenizer without sentinels.
  Raises:
    DataError: the file does not exist or is not a tokenizer, special tokens lack an id, a token
      cannot have the id that a file declares, or `tokenizers` is not installed.
  """

  def __init__(self, path: str | os.PathLike, *, extra_ids: int = 0):
    super().__init__(extra_ids=extra_ids)
    self.path = _tokenizer_file(path)
    self._tokenizer = _load(self.path)
    self._named, declared, special = read_special_tokens(self.path.parent)
    self._added = _add(self.path, self._tokenizer, declared)
    self._named |= _unknown_token(self.path, self._named)
    _check_named(self.path, self._tokenizer, self._named)
    self._added += _add(self.path, self._tokenizer, special)
    _check_unknown(self.path, self._tokenizer)
    size = self._tokenizer.get_vocab_size(with_added_tokens=True)
    # Some tokenizers have gaps between ids, so the size is the highest id plus one.
    self._own_size = max(size, 1 + max(self._tokenizer.get_vocab().values(), default=0))
    padding = (self._named['pad_token'],) if 'pad_token' in self._named else PADDING
    is_free = self._tokenizer.id_to_token(0) in (None, *padding)
    self.zero_is_a_word = not is_free or self.eos_id == 0

  def id_of(self, token: str) -> Optional[int]:
    """Returns the id of `token`, or None."""
    return self._tokenizer.token_to_id(token)

  def _id(self, *names: str) -> Optional[int]:
    for name in names:
      if name in self._named:
        return self.id_of(self._named[name])
    return None

  @property
  def start_id(self) -> Optional[int]:
    """Id that precedes a text for an encoder: BERT's [CLS]."""
    return self._id('cls_token')

  @functools.cached_property
  def template_start(self) -> Optional[int]:
    """Id that the tokenizer's template puts before a text, such as <bos> of Llama; or None."""
    ids = self._tokenizer.encode('', add_special_tokens=True).ids
    return ids[0] if ids and ids[0] == self.bos_id else None

  @property
  def pad_id(self) -> int:
    """Id that SeqIO writes after the end of a text before decoding; `_decode` drops it."""
    return -1 if self.zero_is_a_word else 0

  @property
  def bos_id(self) -> Optional[int]:
    return self._id('bos_token', 'cls_token')

  @property
  def eos_id(self) -> Optional[int]:
    """Id that ends a text; for BERT, [SEP]."""
    return self._id('eos_token', 'sep_token')

  @property
  def unk_id(self) -> Optional[int]:
    return self._id('unk_token')

  @property
  def mask_id(self) -> Optional[int]:
    return self._id('mask_token')

  @functools.cached_property
  def sentinel_ids(self) -> tuple[int, ...]:
    """The tokenizer's <extra_id_0>, <extra_id_1>, ... (T5); () if it does not have sentinels."""
    found: list[int] = []
    while (number := self.id_of(f'<extra_id_{len(found)}>')) is not None:
      found.append(number)
    return tuple(found)

  @property
  def special_tokens(self) -> dict[str, str]:
    """'eos_token' -> its text, for the special tokens named in the tokenizer's files."""
    return dict(self._named)

  @functools.cached_property
  def added_tokens(self) -> dict[int, str]:
    """Id -> text of added tokens, which splitting never produces: <bos>, <|im_end|>, ..."""
    added = self._tokenizer.get_added_tokens_decoder()
    return {number: token.content for number, token in added.items()}

  @functools.cached_property
  def ordinary_ids(self) -> np.ndarray:
    """Ids [n], int32, of text pieces: all ids except padding, special and added tokens."""
    special = set(self._tokenizer.get_added_tokens_decoder())
    special |= {self._tokenizer.token_to_id(token) for token in self._named.values()}
    special |= set() if self.zero_is_a_word else {0}
    return np.asarray(sorted({*self._tokenizer.get_vocab().values()} - special), np.int32)

  @functools.cached_property
  def fingerprint(self) -> str:
    """Digest of the tokenizer and its special tokens, 16 hex digits."""
    digest = hashlib.sha256(self.path.read_bytes())
    digest.update(json.dumps(self._named, sort_keys=True).encode())
    if self._added:
      digest.update(json.dumps(self._added).encode())
    return digest.hexdigest()[:16]

  @property
  def _base_vocab_size(self) -> int:
    return self._own_size

  def _encode(self, s: str) -> list[int]:
    return self._tokenizer.encode(s, add_special_tokens=False).ids

  def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Returns the ids of `text`, and the character range of each id."""
    encoding = self._tokenizer.encode(text, add_special_tokens=False)
    return encoding.ids, encoding.offsets

  def spelled(self, ids: Iterable[int]) -> str:
    """Returns the text of all `ids`, with the special tokens."""
    return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)

  def _decode(self, ids: Iterable[int]) -> str:
    # `seqio.Vocabulary.decode` keeps the EOS; the tokenizer does not know sentinels that we added.
    dropped = {self.eos_id, self.start_id, self.pad_id}
    kept = [i for i in map(int, ids) if i not in dropped]
    return self._tokenizer.decode(kept, skip_special_tokens=False)

  def _encode_tf(self, s: tf.Tensor) -> tf.Tensor | tf.RaggedTensor:
    def encode(texts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
      rows = [self._encode(text.decode('utf-8', errors='replace')) for text in texts.reshape(-1)]
      flat = np.asarray([i for row in rows for i in row], np.int32)
      return flat, np.asarray([len(row) for row in rows], np.int64)

    # Stateless, so it is not part of the state of a tf.data iterator.
    ids, lengths = tf.numpy_function(
      encode, [tf.reshape(s, [-1])], [tf.int32, tf.int64], stateful=False
    )
    ids, lengths = tf.ensure_shape(ids, [None]), tf.ensure_shape(lengths, [None])
    return ids if s.shape.rank == 0 else tf.RaggedTensor.from_row_lengths(ids, lengths)

  def _decode_tf(self, ids: tf.Tensor) -> tf.Tensor:
    if isinstance(ids, tf.RaggedTensor):
      ids = ids.to_tensor(self.pad_id)

    def decode(rows: np.ndarray) -> np.ndarray:
      texts = [self._decode(row).encode() for row in np.atleast_2d(rows)]
      return np.asarray(texts if rows.ndim > 1 else texts[0], dtype=object)

    text = tf.numpy_function(decode, [ids], tf.string, stateful=False)
    return tf.ensure_shape(text, ids.shape[:-1])

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, HuggingFaceVocabulary)
      and self.fingerprint == other.fingerprint
      and self.extra_ids == other.extra_ids
    )

  def __hash__(self) -> int:
    return hash((self.fingerprint, self.extra_ids))

  def __repr__(self) -> str:
    return f'HuggingFaceVocabulary({str(self.path)!r})'


def _tokenizer_file(path: str | os.PathLike) -> pathlib.Path:
  given = expanded_path(path)
  file = given / 'tokenizer.json' if given.is_dir() else given
  if file.is_file():
    return file
  held = sorted(p.name for p in given.iterdir())[:8] if given.is_dir() else []
  raise _error(
    f'The tokenizer {str(file)!r} does not exist (working directory: {os.getcwd()})'
    + (f'; the folder holds {", ".join(held) or "nothing"}.' if given.is_dir() else '.'),
    fix='Give the folder of the model, or its tokenizer.json, after huggingface: in '
    'DatasetConfig.vocabulary. A folder with only a vocab file needs, once: '
    'transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER).',
  )


def _load(path: pathlib.Path) -> _Tokenizer:
  try:
    library = importlib.import_module('tokenizers')
  except ModuleNotFoundError as e:
    raise _error(
      f'Reading {str(path)!r} needs the package tokenizers, which is not installed.',
      fix="Run: pip install 't5x_gpu[hf]', or: pip install tokenizers",
    ) from e
  try:
    tokenizer = library.Tokenizer.from_file(str(path))
  except Exception as e:  # The Rust library raises Exception itself.
    raise DataError(
      f'{str(path)!r} cannot be read as a tokenizer: {e}',
      fix='Point DatasetConfig.vocabulary at a tokenizer.json that the tokenizers package, or '
      'save_pretrained of a fast tokenizer, has written.',
      parameters=('DatasetConfig.vocabulary',),
    ) from e
  # SeqIO cuts and pads rows; the file's settings are for single sentences.
  tokenizer.no_padding()
  tokenizer.no_truncation()
  return tokenizer


def _add(
  path: pathlib.Path, tokenizer: _Tokenizer, declared: Sequence[DeclaredToken]
) -> list[tuple[str, list[bool]]]:
  """Adds tokens that tokenizer.json lacks, or has with flags that another file replaces.

  Returns the text and the flags of the tokens that were added.
  """
  added_token = importlib.import_module('tokenizers').AddedToken
  have = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
  added = []
  for token in declared:
    own = have.get(token.text)
    is_same = own and all(getattr(own, flag) == value for flag, value in token.flags.items())
    if is_same or (own and not token.replaces):
      continue
    tokenizer.add_tokens([added_token(token.text, **token.flags)])
    number = tokenizer.token_to_id(token.text)
    if token.id not in (None, number):
      raise _error(
        f'{str(path.with_name(token.file))!r} gives {token.text!r} the id {token.id}, but with '
        f'{str(path)!r} it has the id {number}.',
        fix=_SAME_MODEL,
      )
    added.append((token.text, [*token.flags.values()]))
  return added


def _unknown_token(path: pathlib.Path, named: Mapping[str, str]) -> dict[str, str]:
  """Returns {'unk_token': its text} of tokenizer.json; {} if it has none, or `named` has it."""
  unknown = (
    None if 'unk_token' in named else read_json(path, dict).get('model', {}).get('unk_token')
  )
  return {'unk_token': unknown} if unknown else {}


def _check_named(path: pathlib.Path, tokenizer: _Tokenizer, named: Mapping[str, str]) -> None:
  """Raises DataError if a special token has no id."""
  missing = {key: token for key, token in named.items() if tokenizer.token_to_id(token) is None}
  if missing:
    raise _error(
      f'{str(path)!r} has no id for '
      + ', '.join(f'{token!r} ({key})' for key, token in sorted(missing.items()))
      + ', special tokens named in the same folder.',
      fix=_SAME_MODEL,
    )


def _check_unknown(path: pathlib.Path, tokenizer: _Tokenizer) -> None:
  """Raises DataError if a letter outside of the vocabulary is an error, and warns if it is lost.

  Such a letter may come late, and its text cannot be changed within a run.
  """
  try:
    ids = tokenizer.encode(_RARE, add_special_tokens=False).ids
  except Exception as e:  # The Rust library raises Exception itself.
    raise _error(
      f'{str(path)!r} has no token for unknown text, so a letter outside of its vocabulary would '
      f'end a run: {first_line(e)}.',
      fix='Train it with an unknown token: unk_token (for a Unigram model, unk_id).',
    ) from e
  if not ids:
    _warn_of_lost_letters(path)


@functools.cache  # a run opens its tokenizer several times
def _warn_of_lost_letters(path: pathlib.Path) -> None:
  log.warning(
    '%s has no token for unknown text: it drops letters outside of its vocabulary, such as %r',
    path,
    _RARE,
  )
