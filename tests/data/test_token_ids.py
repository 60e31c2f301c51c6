"""No id has a meaning by its number: each token of a text has a loss, for any id."""

import collections
import json

import numpy as np
import pytest
import sentencepiece

from t5x_gpu.data.vocabularies.vocabularies import end_id, named_vocabulary
from tests.helpers_prepared import prepare_here

tokenizers = pytest.importorskip('tokenizers')
pytestmark = pytest.mark.tf
WORDS = [f'w{i}' for i in range(20)]
# Tokenizer -> (its first ids, its named tokens).
KINDS = {
  'pad_in_text': (['<pad>', '</s>', '<unk>'], {'pad': '<pad>', 'eos': '</s>', 'unk': '<unk>'}),
  'pad_is_end': (['</s>', '<unk>'], {'pad': '</s>', 'eos': '</s>', 'unk': '<unk>'}),
  'end_first': (['</s>', '<unk>'], {'eos': '</s>', 'unk': '<unk>'}),
  'all_equal': (['</s>'], dict.fromkeys(('bos', 'eos', 'unk', 'pad'), '</s>')),
  'unknown_first': (['<unk>', '<pad>', '</s>'], {'pad': '<pad>', 'eos': '</s>', 'unk': '<unk>'}),
  'pad_is_unknown': (['<unk>', '</s>'], {'pad': '<unk>', 'eos': '</s>', 'unk': '<unk>'}),
  'begin_first': (['<s>', '</s>', '<unk>'], {'bos': '<s>', 'eos': '</s>', 'unk': '<unk>'}),
  'word_first': (['w0', '</s>', '<unk>'], {'eos': '</s>', 'unk': '<unk>'}),
}
# Settings of spm_train; its defaults are unk 0, bos 1, eos 2 and no padding.
SENTENCEPIECE = {
  'sp_default': {},
  'sp_end_first': {'eos_id': 0, 'unk_id': 1, 'bos_id': -1},
  'sp_begin_first': {'bos_id': 0, 'eos_id': 1, 'unk_id': 2},
  'sp_t5': {'pad_id': 0, 'eos_id': 1, 'unk_id': 2, 'bos_id': -1},
}
TEXTS = [
  ' '.join(
    WORDS[(i * k) % 20] if k % 4 else ('<pad>', '</s>', 'new', 'w0')[(i + k) % 4]
    for k in range(1, 4 + i % 9)
  )
  for i in range(40)
]


def write_tokenizer(folder, kind):
  """Writes a tokenizer; returns its name for VOCABULARY, and text -> ids by its library."""
  if kind in SENTENCEPIECE:
    (folder / 'words.txt').write_text('\n'.join(' '.join(WORDS) for _ in range(9)))
    sentencepiece.SentencePieceTrainer.train(
      input=str(folder / 'words.txt'),
      model_prefix=str(folder / 'sp'),
      vocab_size=32,
      hard_vocab_limit=False,
      minloglevel=2,
      **SENTENCEPIECE[kind],
    )
    own = sentencepiece.SentencePieceProcessor(model_file=str(folder / 'sp.model'))
    return f'sentencepiece:{folder}/sp.model', own.encode
  first, named = KINDS[kind]
  vocab = {word: i for i, word in enumerate(dict.fromkeys([*first, *WORDS]))}
  tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=named['unk']))
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  tokenizer.add_special_tokens([token for token in first if token.startswith('<')])
  tokenizer.save(str(folder / 'tokenizer.json'))
  names = {f'{name}_token': token for name, token in named.items()}
  (folder / 'tokenizer_config.json').write_text(json.dumps(names))
  return f'huggingface:{folder}', lambda text: tokenizer.encode(text).ids


def examples_of(batches, stack, *, weighted=True):
  """Returns how often the batches have each example of a stack, as a tuple of ids."""
  feature = 'encoder_input_tokens' if stack == 'encoder' else 'decoder_target_tokens'
  found = collections.Counter()
  for batch in batches:
    segments, weights = batch[f'{stack}_segment_ids'], batch.get(f'{stack}_loss_weights')
    if weighted:
      np.testing.assert_array_equal(weights > 0, segments > 0)
    for row, segment in zip(batch[feature], segments):
      assert not row[segment == 0].any()
      found.update(tuple(row[segment == s].tolist()) for s in range(1, segment.max() + 1))
  return found


@pytest.mark.quick_cases(
  'lm-packed-sp_default', 'lm-alone-pad_is_end', 'pairs-packed-pad_in_text', 'pairs-alone-unknown_*'
)
@pytest.mark.parametrize('kind', [*KINDS, *SENTENCEPIECE])
@pytest.mark.parametrize('form', ['packed', 'alone', 'prepared'])
@pytest.mark.parametrize('model', ['lm', 'pairs'])
def test_each_token_and_each_end_has_a_loss(open_data, tmp_path, model, form, kind):
  name, ids = write_tokenizer(tmp_path, kind)
  end = end_id(named_vocabulary(name))
  keys = ('text',) if model == 'lm' else ('inputs', 'targets')
  texts = dict(zip(keys, (TEXTS, TEXTS[::-1])))
  for split in ('train', 'validation'):
    rows = [dict(zip(keys, row)) for row in zip(*texts.values())]
    (tmp_path / f'{split}.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
  size = named_vocabulary(name).vocab_size
  options = dict(
    lengths={'targets': 64} if model == 'lm' else {'inputs': 64, 'targets': 64},
    converter='lm' if model == 'lm' else 'encoder_decoder',
    pack=form != 'alone',
    vocab_size=size,
    vocabulary=name,
  )
  data = f'jsonl:{tmp_path}/train.jsonl'
  if form == 'prepared':
    for split in ('train', 'validation'):
      prepare_here(data, tmp_path / 'rows', num_parts=1, split=split, **options)
    data, options['vocabulary'] = f'prepared:{tmp_path}/rows', None
  got = collections.defaultdict(collections.Counter)
  for split in ('train', 'validation'):  # a hash assigns the lines of the file to splits
    batches = list(open_data(data, split=split, repeat=False, **options).iterator)
    got['decoder'] += examples_of(batches, 'decoder')
    if model == 'pairs':
      got['encoder'] += examples_of(batches, 'encoder', weighted=False)
  stacks = dict(zip(('decoder',) if model == 'lm' else ('encoder', 'decoder'), keys))
  for stack, key in stacks.items():
    want = collections.Counter((*ids(text), end) for text in texts[key])
    assert got[stack] == want


def test_a_custom_vocabulary_keeps_zeros_inside_and_takes_those_at_the_end_for_padding(open_data):
  rows = open_data(
    'numbers',
    lengths={'targets': 8},
    pack=True,
    mixture_or_task_module='tests.number_tasks',
    repeat=False,
  ).iterator
  assert examples_of(rows, 'decoder') == {(5, 0, 7): 2, (0, 3): 1}
