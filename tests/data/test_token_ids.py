"""No id has a meaning by its number: each token of a text has a loss, for any id."""

import collections
import json

import numpy as np
import pytest

from t5x_gpu.data.vocabularies.vocabularies import end_id, named_vocabulary
from tests.helpers_prepared import prepare_here
from tests.helpers_tokenizers import KINDS, WORDS, write_tokenizer

pytestmark = pytest.mark.tf
ODD = ('<pad>', '</s>', 'new', WORDS[0])
TEXTS = [
  ' '.join(WORDS[(i * k) % 20] if k % 4 else ODD[(i + k) % 4] for k in range(1, 4 + i % 9))
  for i in range(40)
]


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


FORMS, MODELS = ('packed', 'alone', 'prepared'), ('lm', 'pairs')
# Each tokenizer in each form and for both models; each form for each model, with half of them.
CASES = [
  (MODELS[(i + j) % 2], form, kind) for i, kind in enumerate(KINDS) for j, form in enumerate(FORMS)
]


# Each tokenizer in one form.
QUICK = [CASES[len(FORMS) * i + i % len(FORMS)] for i in range(len(KINDS))]


@pytest.mark.quick_cases(*map('-'.join, QUICK))
@pytest.mark.parametrize('model, form, kind', CASES)
def test_each_token_and_each_end_has_a_loss(open_data, tmp_path, model, form, kind):
  tokenizer = write_tokenizer(tmp_path, kind)
  name, ids = tokenizer.vocabulary.format(tmp_path), tokenizer.encode
  end = end_id(named_vocabulary(name))
  keys = ('text',) if model == 'lm' else ('inputs', 'targets')
  texts = dict(zip(keys, (TEXTS, TEXTS[::-1])))
  rows = [json.dumps(dict(zip(keys, row))) + '\n' for row in zip(*texts.values())]
  (tmp_path / 'train.jsonl').write_text(''.join(rows[:-1]))
  (tmp_path / 'validation.jsonl').write_text(rows[-1])
  size = named_vocabulary(name).vocab_size
  options = dict(
    lengths={'targets': 64} if model == 'lm' else {'inputs': 64, 'targets': 64},
    converter='lm' if model == 'lm' else 'encoder_decoder',
    pack=form != 'alone',
    vocab_size=size,
    vocabulary=name,
  )
  data = f'jsonl:{tmp_path}/*.jsonl'
  if form == 'prepared':
    prepare_here(data, tmp_path / 'rows', num_parts=1, **options)
    data = f'prepared:{tmp_path}/rows'
  batches = list(open_data(data, repeat=False, **options).iterator)
  stacks = dict(zip(('decoder',) if model == 'lm' else ('encoder', 'decoder'), keys))
  for stack, key in stacks.items():
    want = collections.Counter((*ids(text), end) for text in texts[key][:-1])
    assert examples_of(batches, stack, weighted=stack == 'decoder') == want


def test_a_custom_vocabulary_keeps_zeros_inside_and_takes_those_at_the_end_for_padding(open_data):
  rows = open_data(
    'numbers',
    lengths={'targets': 8},
    pack=True,
    mixture_or_task_module='tests.number_tasks',
    repeat=False,
  ).iterator
  assert examples_of(rows, 'decoder') == {(5, 0, 7): 2, (0, 3): 1}


@pytest.mark.quick_cases('True-sp_default', 'False-word_first')
@pytest.mark.parametrize('pack, kind', [(i % 2 == 0, kind) for i, kind in enumerate(KINDS)])
def test_a_prefix_keeps_each_token_and_its_continuation_has_each_loss(
  open_data, tmp_path, kind, pack
):
  tokenizer = write_tokenizer(tmp_path, kind)
  name, ids = tokenizer.vocabulary.format(tmp_path), tokenizer.encode
  vocabulary = named_vocabulary(name)
  end = end_id(vocabulary)
  pairs = list(zip(TEXTS, TEXTS[::-1]))
  rows = [json.dumps({'inputs': inputs, 'targets': targets}) + '\n' for inputs, targets in pairs]
  (tmp_path / 'train.jsonl').write_text(''.join(rows[:-1]))
  (tmp_path / 'validation.jsonl').write_text(rows[-1])
  opened = open_data(
    f'jsonl:{tmp_path}/*.jsonl',
    converter='prefix_lm',
    lengths={'inputs': 64, 'targets': 64},
    pack=pack,
    repeat=False,
    vocab_size=vocabulary.vocab_size,
    vocabulary=name,
  )
  batches = list(opened.iterator)
  prefixes = [((*ids(inputs), end), (*ids(targets), end)) for inputs, targets in pairs[:-1]]
  want = collections.Counter(prefix + rest for prefix, rest in prefixes)
  assert examples_of(batches, 'decoder', weighted=False) == want
  num_losses = sum(int((batch['decoder_loss_weights'] > 0).sum()) for batch in batches)
  assert num_losses == sum(len(rest) for _, rest in prefixes)


@pytest.mark.quick_cases('sp_default', 'word_first')
@pytest.mark.parametrize('kind', KINDS)
def test_a_classifier_reads_each_token(open_data, tmp_path, kind):
  tokenizer = write_tokenizer(tmp_path, kind)
  name, ids = tokenizer.vocabulary.format(tmp_path), tokenizer.encode
  vocabulary = named_vocabulary(name)
  for split in ('train', 'validation'):
    rows = [json.dumps({'text': text, 'label': i % 2}) + '\n' for i, text in enumerate(TEXTS)]
    (tmp_path / f'{split}.jsonl').write_text(''.join(rows))
  opened = open_data(
    f'classification:jsonl:{tmp_path}/*.jsonl',
    converter='encoder_classification',
    lengths={'inputs': 64},
    pack=False,
    repeat=False,
    num_classes=2,
    vocab_size=vocabulary.vocab_size,
    vocabulary=name,
  )
  got = examples_of(opened.iterator, 'encoder', weighted=False)
  begin = (2,) if kind == 'wordpiece_bert' else ()  # [CLS]
  assert got == collections.Counter((*begin, *ids(text), end_id(vocabulary)) for text in TEXTS)
