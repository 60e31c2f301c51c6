"""Span corruption and masked tokens lose nothing, hide as much as they should, and repeat."""

import json

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from t5x_gpu.data import batches
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.tasks import objectives
from t5x_gpu.data.tf_runtime import seqio, tf
from t5x_gpu.data.vocabularies import vocabularies
from t5x_gpu.errors import DataError
from tests.messages import raises

pytestmark = pytest.mark.tf
BYTES = vocabularies.named_vocabulary('byte', extra_ids=100)
T5 = {'inputs': 512, 'targets': 114}


def restored(inputs, targets, *, sentinels):
  """Returns the tokens that corrupted inputs and targets were made from."""
  assert inputs[-1] == targets[-1] == 1
  spans, tokens = {}, []
  for token in targets[:-1]:
    if token in sentinels:
      spans[token] = []
      last = token
    else:
      spans[last].append(token)
  for token in inputs[:-1]:
    tokens += spans.pop(token) if token in sentinels else [token]
  assert not spans
  return tokens


def corrupted(texts, lengths, *, seed=0, objective=objectives.span_corruption, vocabulary=BYTES):
  dataset = tf.data.Dataset.from_generator(
    lambda: iter({'targets': text} for text in texts),
    output_signature={'targets': tf.TensorSpec([None], tf.int32)},
  )
  given = {
    name: seqio.Feature(vocabulary=vocabulary, add_eos=True) for name in ('inputs', 'targets')
  }
  with seqio.map_seed_manager(seed):
    return list(objective(dataset, lengths, given).as_numpy_iterator())


@pytest.mark.slow
@hypothesis.settings(max_examples=10, deadline=None)  # each traces a graph
@hypothesis.given(
  sizes=st.lists(st.integers(2, 300), min_size=1, max_size=4),
  inputs=st.integers(3, 80),
  targets=st.integers(3, 40),
  seed=st.integers(0, 9),
)
def test_inputs_and_targets_together_are_the_text(sizes, inputs, targets, seed):
  random = np.random.default_rng(seed)
  texts = [random.integers(3, 259, size).tolist() for size in sizes]
  got = corrupted(texts, {'inputs': inputs, 'targets': targets}, seed=seed)
  pieces = [
    restored(
      x['inputs'].tolist(), x['targets'].tolist(), sentinels=vocabularies.sentinel_ids(BYTES)
    )
    for x in got
  ]
  want = sum(texts, [])
  longest = objectives.tokens_for(inputs=inputs, targets=targets)
  # A piece of one token can hide nothing and is left out; only pieces of at most 2 leave such.
  assert sum(pieces, []) == want or longest == 2
  for x in got:
    assert len(x['inputs']) <= inputs and len(x['targets']) <= targets


def test_t5s_lengths_take_568_tokens_as_in_t5():
  assert objectives.tokens_for(**T5) == 568
  assert objectives.noise_counts(568) == (85, 28)
  (x,) = corrupted([list(range(3, 200)) * 2 + list(range(3, 177))], T5)
  assert (len(x['inputs']), len(x['targets'])) == (512, 114)


def test_counts_are_rounded_in_float32_as_in_t5():
  lengths = np.arange(2, 3000)
  hidden = tf.cast(tf.round(tf.cast(lengths, tf.float32) * 0.15), tf.int32)
  hidden = np.clip(hidden, 1, lengths - 1)
  spans = tf.cast(tf.round(tf.cast(hidden, tf.float32) / 3.0), tf.int32)
  spans = np.minimum(np.maximum(spans, 1), np.minimum(hidden, lengths - hidden))
  assert [objectives.noise_counts(int(n)) for n in lengths] == list(zip(hidden, spans))


def test_sentinels_descend_from_the_end_of_the_vocabulary():
  (x,) = corrupted([[7] * 300], T5)
  for name in ('inputs', 'targets'):
    sentinels = [int(t) for t in x[name] if t >= 259]
    assert sentinels == list(range(358, 358 - len(sentinels), -1)) and len(sentinels) == 15
  assert x['targets'][0] == 358  # targets begin with <extra_id_0>
  assert x['inputs'][0] == 7  # and inputs with text


@pytest.mark.slow
def test_spans_fall_everywhere_and_have_the_mean_length():
  masks = []
  for seed in range(400):
    masks.append(
      objectives.noise_mask(
        tf.constant(100), hidden=tf.constant(15), spans=tf.constant(5), seed=tf.constant([seed, 1])
      ).numpy()
    )
  masks = np.array(masks)
  assert (masks.sum(1) == 15).all()
  assert (np.diff(masks.astype(int), axis=1) == 1).sum(1).tolist() == [5] * 400
  # The first token is kept and the last one hidden, as in T5; between them all are as likely.
  assert masks[:, 5:95].mean(0).min() > 0.06 and masks[:, 5:95].mean(0).max() < 0.26


def test_too_few_sentinels_and_too_short_lengths_are_refused():
  with raises(DataError):
    corrupted([[5] * 9], {'inputs': 3072, 'targets': 2048})
  with raises(DataError):
    corrupted([[5] * 9], T5, vocabulary=vocabularies.named_vocabulary('byte'))
  with raises(DataError):
    corrupted([[5] * 9], {'inputs': 2, 'targets': 2})


def masked(texts, length=64, *, seed=0, vocabulary=None):
  return corrupted(
    texts,
    {'inputs': length, 'targets': length},
    seed=seed,
    objective=objectives.masked_lm,
    vocabulary=vocabulary or vocabularies.named_vocabulary('byte', extra_ids=1),
  )


def test_targets_of_the_masked_model_are_the_whole_text_in_framed_pieces():
  text = [3 + i % 256 for i in range(500)]
  got = masked([text])
  assert sum((x['targets'][:-1].tolist() for x in got), []) == text
  for x in got:
    assert x['targets'][-1] == x['inputs'][-1] == 1 and x['loss_mask'][-1] == 0
    assert len(x['inputs']) == len(x['targets']) == len(x['loss_mask']) <= 64
    untold = x['loss_mask'] == 0
    assert (x['inputs'] == x['targets'])[untold].all()


def test_fifteen_percent_are_targets_of_which_80_10_10_are_masked_replaced_and_left():
  text = np.random.default_rng(0).integers(3, 259, 30_000).tolist()
  got = masked([text], 128)
  fractions = [x['loss_mask'].sum() / (len(x['inputs']) - 1) for x in got]
  assert min(fractions) > 0.14 and max(fractions) < 0.16
  inputs, targets, mask = (
    np.concatenate([x[name] for x in got]) for name in ('inputs', 'targets', 'loss_mask')
  )
  inputs, targets = inputs[mask == 1], targets[mask == 1]
  hidden, left = (inputs == 259).mean(), (inputs == targets).mean()
  assert abs(hidden - 0.8) < 0.02 and abs(left - 0.1) < 0.02
  others = inputs[(inputs != 259) & (inputs != targets)]
  assert others.min() >= 3 and others.max() <= 258 and len(set(others)) > 100


@pytest.mark.slow
@pytest.mark.parametrize('objective', [corrupted, masked])
def test_what_is_hidden_depends_on_seed_and_number_alone(objective):
  texts = [[3 + i % 200 for i in range(60)]] * 3
  kwargs = {'lengths': T5} if objective is corrupted else {}
  one, again, other = (objective(texts, seed=seed, **kwargs) for seed in (1, 1, 2))
  key = lambda x: x['inputs'].tolist()
  assert list(map(key, one)) == list(map(key, again))
  assert key(one[0]) != key(other[0]) and key(one[0]) != key(one[1])


def test_vocabulary_without_a_mask_is_refused():
  with raises(DataError):
    masked([[5] * 9], vocabulary=vocabularies.named_vocabulary('byte'))


# --- the tasks ---


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, converter, lengths, vocab_size',
  [
    ('python_source_span_corruption', 'encoder_decoder', {'inputs': 64, 'targets': 24}, 359),
    pytest.param(
      'python_source_mlm', 'encoder_mlm', {'inputs': 64, 'targets': 64}, 260, marks=pytest.mark.slow
    ),
  ],
)
@pytest.mark.parametrize('pack', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_tasks_give_full_rows_and_resume_hiding_the_same(
  open_data, name, converter, lengths, vocab_size, pack
):
  kwargs = dict(converter=converter, lengths=lengths, vocab_size=vocab_size, pack=pack, seed=5)
  iterator = open_data(name, **kwargs).iterator
  next(iterator)
  iterator.peek()
  state = iterator.get_state()
  got = [next(iterator) for _ in range(3)]
  want = list(map(batches.batch_hash, got))
  other = open_data(name, **kwargs).iterator
  other.set_state(state)
  assert [batches.batch_hash(next(other)) for _ in range(3)] == want
  full = np.mean([(batch['encoder_input_tokens'] > 0).mean() for batch in got])
  assert full > 0.9
  for batch in got:
    weights = next(x for key, x in batch.items() if key.endswith('loss_weights'))
    assert weights.any(axis=1).all()
    if pack:
      assert batch['encoder_segment_ids'].max() >= 1


def test_packed_span_corruption_restores_each_segment(open_data, tmp_path):
  lines = [f'line number {i} of this text' for i in range(400)]
  (tmp_path / 'a.txt').write_text('\n'.join(lines))
  iterator = open_data(
    f'span_corruption:text_lines:{tmp_path}/a.txt',
    converter='encoder_decoder',
    lengths={'inputs': 96, 'targets': 40},
    vocab_size=359,
    repeat=False,
  ).iterator
  seen = []
  for batch in iterator:
    for row in range(4):
      enc, dec = batch['encoder_segment_ids'][row], batch['decoder_segment_ids'][row]
      assert enc.max() == dec.max()
      for segment in range(1, enc.max() + 1):
        seen.append(
          bytes(
            t - 3
            for t in restored(
              batch['encoder_input_tokens'][row][enc == segment].tolist(),
              batch['decoder_target_tokens'][row][dec == segment].tolist(),
              sentinels=vocabularies.sentinel_ids(BYTES),
            )
          ).decode()
        )
  assert len(seen) > 300 and set(seen) <= set(lines)


@pytest.mark.slow
def test_second_epoch_hides_other_tokens(open_data, tmp_path):
  (tmp_path / 'a.txt').write_text('\n'.join(['the quick brown fox jumps'] * 4))
  for split in ('train', 'validation'):  # one text, one split
    try:
      iterator = open_data(
        f'mlm:text_lines:{tmp_path}/a.txt',
        converter='encoder_mlm',
        split=split,
        lengths={'inputs': 32, 'targets': 32},
        pack=False,
      ).iterator
    except DataError:
      continue
    rows = {tuple(row) for _ in range(3) for row in next(iterator)['encoder_input_tokens']}
    assert len(rows) > 4


@pytest.mark.parametrize(
  'name',
  [
    'mlm:python_sauce',
    'mlm:wmt_ende',
    'span_corruption:text_files',
    'span_corruption:text_files:/no/such/*.txt',
  ],
)
def test_objectives_of_no_text_are_refused(name):
  with raises(DataError):
    task_lookup.lookup(batches.DatasetConfig(name, {}, 'train', 1))


def test_objective_of_pairs_is_refused(tmp_path):
  (tmp_path / 'a.jsonl').write_text(json.dumps({'inputs': 'a', 'targets': 'b'}))
  with raises(DataError):
    task_lookup.lookup(batches.DatasetConfig(f'mlm:jsonl:{tmp_path}/a.jsonl', {}, 'train', 1))


def test_language_model_task_for_an_encoder_names_the_masked_task(open_data):
  with raises(DataError):
    open_data('python_source', converter='encoder_mlm', lengths={'inputs': 8, 'targets': 8})
  with raises(DataError):
    open_data(
      'python_source_span_corruption', converter='encoder_decoder', lengths=T5, vocab_size=256
    )


# --- pairs ---


@pytest.mark.slow
def test_text_pairs_of_tsv_by_hash_and_by_name(open_data, tmp_path):
  (tmp_path / 'pairs.tsv').write_text('\n'.join(f'q{i}\ta{i}' for i in range(300)) + '\n\n')
  lengths = {'inputs': 16, 'targets': 16}
  name = f'text_pairs:{tmp_path}/*.tsv'
  task = task_lookup.lookup(batches.DatasetConfig(name, lengths, 'train', 4))
  sizes = [
    len(list(task.get_dataset(lengths, split=split, shuffle=False)))
    for split in ('train', 'validation')
  ]
  assert sum(sizes) == 300 and 5 <= sizes[1] <= 30
  (tmp_path / 'pairs.tsv').rename(tmp_path / 'pairs.train.tsv')
  (tmp_path / 'pairs.dev.tsv').write_text('q\ta\n')
  opened = open_data(
    name, converter='encoder_decoder', lengths=lengths, split='validation', repeat=False, pack=False
  )
  (batch,) = list(opened.iterator)
  assert batch['decoder_target_tokens'][0, :2].tolist() == [ord('a') + 3, 1]
  assert batch['decoder_loss_weights'].sum() == 2


@pytest.mark.slow
def test_text_pairs_of_jsonl_and_of_both_forms(open_data, tmp_path):
  (tmp_path / 'train.jsonl').write_text(json.dumps({'inputs': 'q', 'targets': 'a'}))
  lengths = {'inputs': 16, 'targets': 16}
  assert (
    next(
      open_data(
        f'text_pairs:{tmp_path}', converter='encoder_decoder', lengths=lengths, pack=False
      ).iterator
    )['encoder_input_tokens'].max()
    == ord('q') + 3
  )
  (tmp_path / 'train.tsv').write_text('q\ta')
  with raises(DataError):
    task_lookup.lookup(batches.DatasetConfig(f'text_pairs:{tmp_path}', lengths, 'train', 1))


@pytest.mark.parametrize('line', ['only one', 'a\tb\tc', 'a\t'])
def test_line_that_is_not_a_pair_is_named(open_data, tmp_path, line):
  (tmp_path / 'train.tsv').write_text('q\ta\n' * 40 + line)
  with raises(DataError):
    list(
      open_data(
        f'text_pairs:{tmp_path}',
        converter='encoder_decoder',
        repeat=False,
        pack=False,
        lengths={'inputs': 16, 'targets': 16},
      ).iterator
    )
