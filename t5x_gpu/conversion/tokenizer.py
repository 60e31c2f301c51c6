"""The tokenizer of a run, for a converted model: vocabulary, prompts, and ids that end a text.

For Hugging Face, a vocabulary becomes a tokenizer.json with the ids that `infer` puts before and
after a prompt. generation_config.json lists the ids that end an answer.
"""

import base64
import dataclasses
import importlib
import importlib.util
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.run_files import HF_FOLDER, SENTENCEPIECE, VOCABULARY, carried_vocabulary
from t5x_gpu.conversion.hf.folder import CONFIG, carry_files
from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.storage.json_schema import Json, JsonObject, JsonValue, read_json
from t5x_gpu.storage.user_paths import expanded_path

SentencePieceModel = Any  # a class that protobuf generates
Transformers = Any  # a class of transformers, which may not be installed
_FILES = ('huggingface', 'sentencepiece')
TOKENIZER, TOKENIZER_CONFIG = 'tokenizer.json', 'tokenizer_config.json'
# transformers' class that takes everything from tokenizer.json, as t5x_gpu's vocabulary does. The
# classes of the families replace the template or the splitting in that file.
_CLASS = 'PreTrainedTokenizerFast'
# model_type -> the class that AutoTokenizer of transformers 5 loads, regardless of the class in
# tokenizer_config.json (its list MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS).
FORCED_CLASSES = {'qwen2': 'Qwen2Tokenizer'}
# Where normalizers and patterns that split texts differ: digits, capitals, spaces, accents.
_SAMPLES = (
  'What is 2',
  "THEY'LL pay $1,234.50 in 2026!",
  '  two  spaces\n\n\tand a tab ',
  'nai\u0308ve caf\u00e9, \u6771\u4eac?',
  'if (x[0] != y) {return;}',
)
# Types of pieces in a SentencePiece model.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6


@dataclasses.dataclass(frozen=True)
class RunText:
  """How `infer` turns prompts into ids and ends answers.

  Attributes:
    vocabulary: DatasetConfig.vocabulary, or the class name of a task's vocabulary.
    size: number of its ids, sentinels included.
    ends: ids after a prompt.
    encode: prompt -> ids, `ends` included; the chat template is not applied.
    decoding: the settings of `infer`, with the ids that end an answer.
    is_chat: whether the chat template writes the prompts, from the first id on.
    note: a console line on settings that are unknown; '' if all are known.
  """

  vocabulary: str
  size: int
  ends: tuple[int, ...]
  encode: Callable[[str], Sequence[int]]
  decoding: DecodingConfig
  is_chat: bool = False
  note: str = ''


def carry_vocabulary(name: Optional[str], target: pathlib.Path) -> str:
  """Adds a vocabulary to a converted model, unless it already has a tokenizer.

  Args:
    name: DatasetConfig.vocabulary; None if unknown.
    target: folder of the model.
  Returns:
    What was done, for the console.
  """
  if name and name.partition(':')[0] not in _FILES:
    (target / VOCABULARY).write_text(name + '\n', 'utf-8')
  elif carried_vocabulary(target) is None:
    problem = _copy(name, target / HF_FOLDER, sentencepiece=SENTENCEPIECE[0])
    if problem:
      return f'left out: {problem}. python -m t5x_gpu.infer will need --vocabulary=NAME'
  return name or 'as converted'


def export_vocabulary(name: Optional[str], folder: pathlib.Path, *, is_t5: bool) -> str:
  """Adds a vocabulary to the folder of a Hugging Face model.

  Args:
    name: DatasetConfig.vocabulary; None if unknown.
    folder: folder of the model.
    is_t5: whether the model is of a T5 family, which names its SentencePiece file differently.
  Returns:
    What was done, for the console.
  """
  if name and name.partition(':')[0] not in _FILES:
    return f'left out: {name!r} has no tokenizer file'
  problem = _copy(name, folder, sentencepiece=SENTENCEPIECE[not is_t5])
  return f'left out: {problem}' if problem else str(name)


def _copy(name: Optional[str], folder: pathlib.Path, *, sentencepiece: str) -> str:
  """Copies the files of a tokenizer; returns the reason if that is impossible, or ''."""
  if not name:
    return 'the gin file does not name it'
  kind, _, path = name.partition(':')
  source = expanded_path(path)
  if not source.exists():
    return f'{source} does not exist'
  folder.mkdir(exist_ok=True)
  if kind == 'sentencepiece':
    shutil.copyfile(source, folder / sentencepiece)
  else:
    is_folder = source.is_dir()
    carry_files(source if is_folder else source.parent, folder, without=(CONFIG,))
    if not is_folder:
      shutil.copyfile(source, folder / TOKENIZER)
  return ''


def tokenizer_problem(name: Optional[str]) -> str:
  """Returns what keeps a vocabulary from becoming a tokenizer.json, in one line, or ''.

  Args:
    name: DatasetConfig.vocabulary; None for the vocabulary of a task.
  """
  kind, _, path = (name or 'byte').partition(':')
  if kind in ('byte', 'huggingface'):
    return ''
  if kind != 'sentencepiece':
    return f'{name!r} has no tokenizer file'
  try:
    trainer = _sentencepiece_model(expanded_path(path)).trainer_spec
  except Exception:  # opening the data reports a missing or damaged file
    return ''
  if trainer.model_type in (trainer.UNIGRAM, trainer.BPE):
    return ''
  type_name = trainer.ModelType.Name(trainer.model_type).lower()
  return (
    f'{path} is a SentencePiece model of type {type_name}; tokenizer.json can hold the types '
    'unigram and bpe'
  )


def export_tokenizer(text: RunText, folder: pathlib.Path, *, is_t5: bool) -> str:
  """Writes the tokenizer of a run for Hugging Face, with the ids that `infer` uses.

  Args:
    text: how the run reads and ends texts.
    folder: folder of the model.
    is_t5: as for `export_vocabulary`.
  Returns:
    What was done, for the console.
  """
  kind, _, path = text.vocabulary.partition(':')
  if kind == 'byte':
    tokenizer, names = _byte_tokenizer(text.size), {'eos_token': '</s>', 'pad_token': '<pad>'}
  else:
    said = export_vocabulary(text.vocabulary, folder, is_t5=is_t5)
    if said != text.vocabulary:
      return said
    if problem := tokenizer_problem(text.vocabulary):
      return f'left out: {problem}. The file itself is copied: use it with sentencepiece'
    if kind == 'sentencepiece':
      tokenizer, names = _sentencepiece_tokenizer(expanded_path(path), text.size)
    else:
      tokenizer, names = read_json(folder / TOKENIZER, dict), {}
  tokens = _tokens(tokenizer)
  if kind == 'sentencepiece' and text.decoding.zero_is_padding:
    names['pad_token'] = tokens[0]
  path = folder / TOKENIZER_CONFIG
  own = read_json(path, dict) if kind == 'huggingface' and path.is_file() else {}
  # Keep the spaces before punctuation that the model writes.
  changed = {**own, **names, 'tokenizer_class': _CLASS, 'clean_up_tokenization_spaces': False}
  if not text.is_chat:
    start = () if is_t5 or text.decoding.start_token is None else (text.decoding.start_token,)
    if missing := [i for i in (*start, *text.ends) if i not in tokens]:
      return f'left out: the tokenizer has no token with id {missing[0]}, which prompts have'
    _set_template(tokenizer, start, text.ends, tokens)
    for key in ('add_bos_token', 'add_eos_token'):
      changed.pop(key, None)
    added = {token['id'] for token in tokenizer.get('added_tokens') or [] if token['special']}
    if start and start[0] in added:
      changed['bos_token'] = tokens[start[0]]
  if not is_t5:
    changed['padding_side'] = 'left'
  if not changed.get('pad_token') and changed.get('eos_token'):
    changed['pad_token'] = changed['eos_token']  # only pads batches, where it is masked
  _write(folder / TOKENIZER, tokenizer)
  _write(path, changed)
  return text.vocabulary


def tokenizer_warning(
  text: RunText, folder: pathlib.Path, *, target: pathlib.Path, is_t5: bool
) -> str:
  """Returns how AutoTokenizer reads texts differently from the run; '' if it does not.

  Args:
    text: how the run reads and ends texts.
    folder: folder of the model, with config.json and the tokenizer.
    target: its later path, for the message.
    is_t5: as for `export_vocabulary`.
  """
  if not (folder / TOKENIZER).is_file():
    return ''
  load = f'load it with transformers.{_CLASS}.from_pretrained({str(target)!r})'
  if not importlib.util.find_spec('transformers'):
    model_type = read_json(folder / CONFIG, dict).get('model_type')
    if model_type not in FORCED_CLASSES:
      return ''
    return (
      'WARNING: not checked, because transformers is not installed: for model_type '
      f'{model_type!r}, its AutoTokenizer loads {FORCED_CLASSES[model_type]}, which replaces the '
      f'normalizer and the splitting of tokenizer.json. If this tokenizer has others, {load}'
    )
  transformers = importlib.import_module('transformers')
  transformers.logging.set_verbosity_error()
  difference, name = _difference(text, transformers.AutoTokenizer, folder, is_t5=is_t5)
  if not difference:
    return ''
  if _difference(text, getattr(transformers, _CLASS), folder, is_t5=is_t5)[0]:
    return f'WARNING: tokenizer.json reads {difference}'
  return (
    f'WARNING: AutoTokenizer of transformers {transformers.__version__} loads {name}, which reads '
    f'{difference}. Instead, {load}'
  )


def _difference(
  text: RunText, kind: Transformers, folder: pathlib.Path, *, is_t5: bool
) -> tuple[str, str]:
  """Returns the first text that a class of transformers reads differently, and its name."""
  tokenizer = kind.from_pretrained(folder, local_files_only=True)
  starts = text.decoding.start_token is not None and not (text.is_chat or is_t5)
  start = [text.decoding.start_token] if starts else []
  for sample in _SAMPLES:
    theirs = tokenizer(sample, add_special_tokens=not text.is_chat)['input_ids']
    ours = [*start, *text.encode(sample)]
    if theirs != ours:
      return f'{sample!r} as {theirs}, but the run as {ours}', type(tokenizer).__name__
  return '', type(tokenizer).__name__


def _write(path: pathlib.Path, content: Json) -> None:
  """Writes JSON, unless the file already has this content."""
  if not path.is_file() or read_json(path, dict) != content:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + '\n', 'utf-8')


def _tokens(tokenizer: Json) -> dict[int, str]:
  """Returns id -> token of a tokenizer.json."""
  vocab = tokenizer['model'].get('vocab', {})
  if isinstance(vocab, Mapping):
    found = {number: token for token, number in vocab.items()}
  else:
    found = {number: token for number, (token, _) in enumerate(vocab)}
  return found | {token['id']: token['content'] for token in tokenizer.get('added_tokens') or []}


def _set_template(
  tokenizer: JsonObject, start: Sequence[int], ends: Sequence[int], tokens: Mapping[int, str]
) -> None:
  """Makes the tokenizer write `start` before a text and `ends` after it."""

  def part(name: str, type_id: int) -> list[JsonObject]:
    def special(ids: Sequence[int]) -> list[JsonObject]:
      return [{'SpecialToken': {'id': tokens[i], 'type_id': type_id}} for i in ids]

    return [*special(start), {'Sequence': {'id': name, 'type_id': type_id}}, *special(ends)]

  first = part('A', 0)
  if (tokenizer.get('post_processor') or {}).get('single') == first:
    return  # T5's template
  special = {
    tokens[i]: {'id': tokens[i], 'ids': [i], 'tokens': [tokens[i]]} for i in (*start, *ends)
  }
  tokenizer['post_processor'] = {
    'type': 'TemplateProcessing',
    'single': first,
    'pair': [*first, *part('B', 1)],
    'special_tokens': special,
  }


def _added(number: int, content: str, *, special: bool = True) -> JsonObject:
  flags = dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False)
  return {'id': number, 'content': content, **flags, 'special': special}


def _tokenizer(model: Json, added: Sequence[Json], **parts: JsonValue) -> JsonObject:
  """Returns the content of a tokenizer.json."""
  empty = dict.fromkeys(('truncation', 'padding', 'normalizer', 'pre_tokenizer', 'post_processor'))
  return {'version': '1.0', **empty, **parts, 'added_tokens': list(added), 'model': model}


def _sentinels(first: int, size: int) -> list[tuple[int, str]]:
  """Returns (id, token) of the sentinels from id `first` to `size`, numbered downward as in T5."""
  return [(i, f'<extra_id_{size - 1 - i}>') for i in range(first, size)]


def _byte_tokenizer(size: int) -> JsonObject:
  """Returns SeqIO's ByteVocabulary, with `size` ids, as a tokenizer.json."""
  # ByteLevel writes bytes as characters; unprintable bytes become characters above 255.
  printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [byte for byte in range(256) if byte not in printed]
  characters = {byte: chr(byte) for byte in printed}
  characters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
  special = [(0, '<pad>'), (1, '</s>'), (2, '<unk>'), *_sentinels(259, size)]
  vocab = {token: number for number, token in special}
  vocab |= {character: 3 + byte for byte, character in characters.items()}
  options = {'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}
  level = {'type': 'ByteLevel', **options}
  model = {'type': 'BPE', 'vocab': vocab, 'merges': []}
  added = [_added(number, token) for number, token in special]
  return _tokenizer(model, added, pre_tokenizer=level, decoder=level)


def _sentencepiece_model(path: pathlib.Path) -> SentencePieceModel:
  proto = importlib.import_module('sentencepiece.sentencepiece_model_pb2').ModelProto()
  proto.ParseFromString(path.read_bytes())
  return proto


def _sentencepiece_tokenizer(path: pathlib.Path, size: int) -> tuple[JsonObject, dict[str, str]]:
  """Returns a SentencePiece model with sentinels up to id `size` as a tokenizer.json.

  Also returns 'eos_token' and so on -> token. The type of the model is unigram or BPE.
  """
  proto = _sentencepiece_model(path)
  trainer, rules = proto.trainer_spec, proto.normalizer_spec
  pieces = [(piece.piece, piece.score) for piece in proto.pieces]
  types = [piece.type for piece in proto.pieces]
  by_bytes = _BYTE in types
  sentinels = _sentinels(len(pieces), size)
  added = [
    _added(i, pieces[i][0], special=kind != _USER_DEFINED)
    for i, kind in enumerate(types)
    if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
  ]
  unknown = types.index(_UNKNOWN)
  vocab = [*pieces, *((token, 0.0) for _, token in sentinels)]
  if trainer.model_type == trainer.UNIGRAM:
    model = {'type': 'Unigram', 'unk_id': unknown, 'vocab': vocab, 'byte_fallback': by_bytes}
  else:
    ids = {token: number for number, (token, _) in enumerate(vocab)}
    model = {'type': 'BPE', 'unk_token': pieces[unknown][0], 'fuse_unk': True}
    model |= {'byte_fallback': by_bytes, 'vocab': ids, 'merges': _merges(pieces)}
  steps: list[JsonObject] = []
  if rules.precompiled_charsmap:
    table = base64.b64encode(rules.precompiled_charsmap).decode()
    steps.append({'type': 'Precompiled', 'precompiled_charsmap': table})
  if rules.remove_extra_whitespaces:
    steps.append({'type': 'Strip', 'strip_left': True, 'strip_right': True})
    steps.append({'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': ' '})
  if rules.add_dummy_prefix:
    steps.append({'type': 'Prepend', 'prepend': '\u2581'})
  steps.append({'type': 'Replace', 'pattern': {'String': ' '}, 'content': '\u2581'})
  back: list[JsonObject] = [
    {'type': 'Replace', 'pattern': {'String': '\u2581'}, 'content': ' '},
    {'type': 'ByteFallback'},
    {'type': 'Fuse'},
  ]
  if rules.add_dummy_prefix:
    back.append({'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0})
  tokenizer = _tokenizer(
    model,
    [*added, *(_added(number, token) for number, token in sentinels)],
    normalizer={'type': 'Sequence', 'normalizers': steps},
    decoder={'type': 'Sequence', 'decoders': back},
  )
  names = {'unk_token': pieces[unknown][0]}
  if trainer.eos_id >= 0:
    names['eos_token'] = pieces[trainer.eos_id][0]
  return tokenizer, names


def _merges(pieces: Sequence[tuple[str, float]]) -> list[list[str]]:
  """Returns the merges of a SentencePiece BPE model: pairs of pieces, best merge first."""
  ids = {token: number for number, (token, _) in enumerate(pieces)}
  found = []
  for token, score in pieces:
    pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
    pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
    found += [(-score, ids[a], ids[b], a, b) for a, b in pairs]
  return [[a, b] for *_, a, b in sorted(found)]


def token_ids(text: RunText, model: ModelFields, like: Json) -> JsonObject:
  """Returns the token ids for config.json: start and end of a text, and padding.

  Args:
    text: how the run reads and ends texts.
    model: model of the run.
    like: config.json of the model that the run started from, or empty.
  """
  decoding, is_t5 = text.decoding, model.kind == 'encoder_decoder'
  ends = list(decoding.stop_tokens)
  # A run without padding gets no pad id: transformers would not train that row of the token table.
  padding = 0 if decoding.zero_is_padding else like.get('pad_token_id')
  ids: JsonObject = {
    'eos_token_id': ends[0] if len(ends) == 1 else ends or None,
    'pad_token_id': padding,
  }
  if is_t5:
    ids['decoder_start_token_id'] = decoding.start_token
  elif decoding.start_token is not None:
    ids['bos_token_id'] = decoding.start_token
  else:
    ids['bos_token_id'] = like.get('bos_token_id')
  return ids


def generation_config(text: RunText, model: ModelFields, ids: Json) -> tuple[JsonObject, list[str]]:
  """Returns generation_config.json, and console lines about settings that it cannot hold.

  Args:
    text, model: texts and model of the run.
    ids: result of `token_ids`.
  """
  decoding, notes = text.decoding, []
  content = {name: number for name, number in ids.items() if number is not None}
  if 'pad_token_id' not in content and decoding.stop_tokens:
    content['pad_token_id'] = decoding.stop_tokens[0]  # fills rows after the end of their text
  if decoding.zero_is_padding:
    content['suppress_tokens'] = [0]
  limit = model.config.num_positions
  if limit and decoding.max_decode_length >= limit and model.kind == 'decoder_only':
    content['max_length'] = limit
  else:
    content['max_new_tokens'] = decoding.max_decode_length
  encoder_layers = model.options.get('num_encoder_layers')
  if encoder_layers is not None and encoder_layers < model.config.num_layers:
    content['use_cache'] = False  # transformers 5 sizes the cache by the number of encoder layers
  content['do_sample'] = decoding.temperature > 0
  if decoding.temperature > 0:
    content |= {name: getattr(decoding, name) for name in ('temperature', 'top_k', 'top_p')}
  if decoding.num_beams > 1 and decoding.beam_rule == 'huggingface':
    content |= {
      'num_beams': decoding.num_beams,
      'length_penalty': decoding.length_penalty,
      'early_stopping': False,
    }
  elif decoding.has_beams:
    notes.append(
      f'a beam search with num_beams = {decoding.num_beams} and beam_rule = '
      f'{decoding.beam_rule!r} has no counterpart in transformers: generation_config.json decodes '
      'greedily'
    )
  return content, notes
