"""Tokenizers of each library, with special tokens at every place: at id 0, equal, absent, in texts.

The name of a kind is the special token that is first (id 0), or equal to another.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, Optional

import pytest
import sentencepiece

WORDS = ('text', 'says', 'and', 'more', *map(str, range(16)))
LETTERS = 'abcdefghijklmnopqrstuvwxyz0123456789'
_T5 = {'pad': '<pad>', 'eos': '</s>', 'unk': '<unk>'}
_GPT = '<|endoftext|>'
# Tokenizer -> (its library's model, its first ids, its named tokens).
HUGGINGFACE = {
  'pad_in_text': ('words', ['<pad>', '</s>', '<unk>'], _T5),
  'pad_is_end': ('words', ['</s>', '<unk>'], {'pad': '</s>', 'eos': '</s>', 'unk': '<unk>'}),
  'end_first': ('words', ['</s>', '<unk>'], {'eos': '</s>', 'unk': '<unk>'}),
  'all_equal': ('words', ['</s>'], dict.fromkeys(('bos', 'eos', 'unk', 'pad'), '</s>')),
  'unknown_first': ('words', ['<unk>', '<pad>', '</s>'], _T5),
  'pad_is_unknown': ('words', ['<unk>', '</s>'], {**_T5, 'pad': '<unk>'}),
  'begin_first': ('words', ['<s>', '</s>', '<unk>'], {'bos': '<s>', 'eos': '</s>', 'unk': '<unk>'}),
  'word_first': ('words', ['text', '</s>', '<unk>'], {'eos': '</s>', 'unk': '<unk>'}),
  'bpe_end_first': ('bpe', [_GPT, '<pad>'], {'eos': _GPT, 'bos': _GPT, 'pad': '<pad>'}),
  'bpe_mark_first': ('bpe', ['!', _GPT], {'eos': _GPT}),  # as GPT-2's, without any padding
  'bpe_all_equal': ('bpe', [_GPT], dict.fromkeys(('bos', 'eos', 'unk', 'pad'), _GPT)),
  'wordpiece_bert': (
    'wordpiece',
    ['[PAD]', '[UNK]', '[CLS]', '[SEP]'],
    {'pad': '[PAD]', 'unk': '[UNK]', 'cls': '[CLS]', 'sep': '[SEP]'},
  ),
  'wordpiece_unknown_first': ('wordpiece', ['[UNK]', '[SEP]'], {'unk': '[UNK]', 'sep': '[SEP]'}),
  'unigram_t5': ('unigram', ['<pad>', '</s>', '<unk>'], _T5),
  'unigram_begin_first': ('unigram', ['<s>', '<pad>', '</s>', '<unk>'], {**_T5, 'bos': '<s>'}),
  'unigram_unknown_first': ('unigram', ['<unk>', '</s>'], {'eos': '</s>', 'unk': '<unk>'}),
}
# Settings of spm_train; its defaults are unk 0, bos 1, eos 2 and no padding.
SENTENCEPIECE = {
  'sp_default': {},
  'sp_end_first': {'eos_id': 0, 'unk_id': 1, 'bos_id': -1},
  'sp_begin_first': {'bos_id': 0, 'eos_id': 1, 'unk_id': 2},
  'sp_t5': {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1},
  'sp_pad_last': {'pad_id': 3, 'model_type': 'bpe'},
  'sp_bytes': {'byte_fallback': True, 'vocab_size': 288},  # as Llama 2
}
KINDS = (*HUGGINGFACE, *SENTENCEPIECE)


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer in a folder.

  Attributes:
    vocabulary: VOCABULARY, with the folder as the command line names it in place of {}.
    encode: text -> ids, by its own library, without special tokens.
  """

  vocabulary: str
  encode: Callable[[str], Sequence[int]]


def write_sentencepiece(path: pathlib.Path, **changed: Any) -> None:
  """Trains a SentencePiece model; `changed` are settings of spm_train."""
  settings = {'vocab_size': 48, 'hard_vocab_limit': False, 'minloglevel': 2}
  with open(path, 'wb') as file:
    sentencepiece.SentencePieceTrainer.train(
      sentence_iterator=iter([' '.join(WORDS)] * 9), model_writer=file, **(settings | changed)
    )


def write_tokenizer(folder: pathlib.Path, kind: str) -> Tokenizer:
  """Writes the tokenizer of one of KINDS into `folder`; skips the test without its library."""
  if kind in SENTENCEPIECE:
    write_sentencepiece(folder / 'sp.model', **SENTENCEPIECE[kind])
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / 'sp.model'))
    return Tokenizer('sentencepiece:{}/sp.model', own.encode)
  model, first, named = HUGGINGFACE[kind]
  own = _huggingface(model, first, named.get('unk'))
  own.add_special_tokens([token for token in first if token[0] in '<['])
  own.save(str(folder / 'tokenizer.json'))
  names = {f'{name}_token': token for name, token in named.items()}
  (folder / 'tokenizer_config.json').write_text(json.dumps(names))
  return Tokenizer('huggingface:{}', lambda text: own.encode(text, add_special_tokens=False).ids)


def _huggingface(model: str, first: Sequence[str], unknown: Optional[str]) -> Any:
  """Returns a tokenizer whose vocabulary begins with the tokens `first`."""
  library = pytest.importorskip('tokenizers')
  models, splits, decoders = library.models, library.pre_tokenizers, library.decoders

  def ids(*pieces: str) -> dict[str, int]:
    return {piece: i for i, piece in enumerate(dict.fromkeys([*first, *pieces]))}

  if model == 'words':
    made = library.Tokenizer(models.WordLevel(ids(*WORDS), unk_token=unknown))
    made.pre_tokenizer = splits.WhitespaceSplit()
  elif model == 'bpe':  # of bytes, so that nothing is unknown
    made = library.Tokenizer(models.BPE(ids(*sorted(splits.ByteLevel.alphabet())), []))
    made.pre_tokenizer = splits.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
  elif model == 'wordpiece':
    pieces = (*WORDS, *LETTERS, *(f'##{letter}' for letter in LETTERS))
    made = library.Tokenizer(models.WordPiece(ids(*pieces), unk_token=unknown))
    made.pre_tokenizer = splits.Whitespace()
    made.decoder = decoders.WordPiece()
  else:
    pieces = ids(*(f'\u2581{word}' for word in WORDS), '\u2581', *LETTERS)
    scores = [(piece, -float(piece in LETTERS)) for piece in pieces]
    made = library.Tokenizer(models.Unigram(scores, unk_id=pieces[unknown]))
    made.pre_tokenizer = splits.Metaspace()
    made.decoder = decoders.Metaspace()
  return made
