"""Vocabularies by name, and text <-> ids for people who look at what a model writes."""

import dataclasses
import hashlib
import os
from typing import Optional, Union

import numpy as np

from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError

_PREFIX = 'sentencepiece:'


@dataclasses.dataclass(frozen=True)
class TextVocabulary:
  """Text <-> token ids of one feature.

  Attributes:
    size: number of ids; the model's vocabulary must be at least as large.
    eos_id: id that ends a document, or None.
    name: for logs: 'byte', 'sentencepiece:FILE' or SeqIO's class name.
  """
  size: int
  eos_id: Optional[int]
  name: str
  _seqio: seqio.Vocabulary = dataclasses.field(repr=False)

  def encode(self, text: str) -> list[int]:
    """Returns the ids of `text`, without an end-of-sequence id."""
    return [int(i) for i in self._seqio.encode(text)]

  def decode(self, ids: Union[list[int], np.ndarray]) -> str:
    """Returns the text of `ids`, up to the first end-of-sequence id; padding gives nothing."""
    ids = [int(i) for i in np.asarray(ids).reshape(-1)]
    if self.eos_id in ids:
      ids = ids[:ids.index(self.eos_id)]
    return self._seqio.decode([i for i in ids if i != 0])


def named_vocabulary(name: str) -> seqio.Vocabulary:
  """Returns SeqIO's vocabulary for 'byte' (259 ids) or 'sentencepiece:MODEL_FILE'.

  Raises:
    DataError: another name, or a model file that is missing or broken.
  """
  if name == 'byte':
    return seqio.ByteVocabulary(extra_ids=0)
  if not name.startswith(_PREFIX):
    raise DataError(f'There is no vocabulary {name!r}.',
                    fix="Set DatasetConfig.vocabulary to 'byte', 'sentencepiece:MODEL_FILE', or "
                        "None for the task's own.", parameters=('DatasetConfig.vocabulary',))
  path = os.path.expanduser(name[len(_PREFIX):])
  if '://' not in path and not os.path.isfile(path):
    raise DataError(
        f'The SentencePiece model {path!r} does not exist (looked from {os.getcwd()}).',
        fix='Correct the path after sentencepiece: in DatasetConfig.vocabulary; it is the .model '
            'file that spm_train writes.', parameters=('DatasetConfig.vocabulary',))
  vocabulary = seqio.SentencePieceVocabulary(path, extra_ids=0)
  try:
    _ = vocabulary.vocab_size  # Loads the file.
  except Exception as e:  # SentencePiece raises RuntimeError, OSError and protobuf's own errors.
    raise DataError(f'{path!r} cannot be read as a SentencePiece model: {e}',
                    fix='Point DatasetConfig.vocabulary at the .model file (not .vocab).',
                    parameters=('DatasetConfig.vocabulary',)) from e
  return vocabulary


def vocabulary_name(vocabulary: seqio.Vocabulary) -> str:
  """Returns how people call `vocabulary`, for messages and fingerprints."""
  if isinstance(vocabulary, seqio.ByteVocabulary):
    return 'byte'
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    return _PREFIX + vocabulary.sentencepiece_model_file
  return type(vocabulary).__name__


def vocabulary_fingerprint(vocabulary: seqio.Vocabulary) -> str:
  """Returns what identifies `vocabulary` in a checkpoint: the content of its file, not its path."""
  kind = vocabulary_name(vocabulary)
  if isinstance(vocabulary, seqio.SentencePieceVocabulary):
    digest = hashlib.sha256(vocabulary.sp_model).hexdigest()[:16]
    kind = f'{_PREFIX}{os.path.basename(vocabulary.sentencepiece_model_file)} ({digest})'
  return f'{kind}, {vocabulary.vocab_size} ids'


def text_vocabulary(vocabulary: seqio.Vocabulary) -> TextVocabulary:
  """Returns `vocabulary` for encoding prompts and decoding samples."""
  return TextVocabulary(size=vocabulary.vocab_size, eos_id=vocabulary.eos_id,
                        name=vocabulary_name(vocabulary), _seqio=vocabulary)
