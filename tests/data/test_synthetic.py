"""Synthetic batches keep the whole contract: shapes, determinism, peek, state."""

import numpy as np
import pytest

from t5x_gpu.data import batches, data_module, features, synthetic
from t5x_gpu.errors import DataError
from tests.messages import raises


def open_synthetic(converter='lm', *, repeat=True, pack=True, seed=0, lengths=None, **kwargs):
  kind = features.layout(converter)
  names, pack = kind.task_features, pack and kind.packed is not None
  lengths = lengths or dict.fromkeys(names, 16)
  config = batches.DatasetConfig(
    'random', lengths, 'train', 4, seed=seed, pack=pack, module='t5x_gpu.data.synthetic', **kwargs
  )
  spec = features.batch_spec(
    converter,
    task_feature_lengths=lengths,
    batch_size=4,
    pack=pack,
    vocab_size=50,
    num_classes=3 if kind.label else None,
  )
  return spec, data_module.open_batches(
    config, spec=spec, feature_converter=converter, repeat=repeat
  )


@pytest.mark.parametrize('converter', list(features.LAYOUTS))
@pytest.mark.parametrize('pack', [True, False])
def test_batches_have_the_shapes_of_their_spec(converter, pack):
  spec, iterator = open_synthetic(converter, pack=pack)
  batch = next(iterator)
  spec.check(batch)
  for name, bound in spec.vocab_sizes.items():
    assert 0 <= batch[name].min() and batch[name].max() < bound


def test_inputs_are_targets_shifted_within_each_segment():
  _, iterator = open_synthetic()
  batch = next(iterator)
  starts = batch['decoder_positions'] == 0
  assert (batch['decoder_input_tokens'][starts] == 0).all()
  assert (
    batch['decoder_input_tokens'][:, 1:][~starts[:, 1:]]
    == batch['decoder_target_tokens'][:, :-1][~starts[:, 1:]]
  ).all()
  assert (np.diff(batch['decoder_segment_ids'][0]) == starts[0, 1:]).all()


def test_prefix_reaches_one_further_than_the_positions_without_loss():
  _, iterator = open_synthetic('prefix_lm', pack=False, lengths={'inputs': 4, 'targets': 4})
  batch = next(iterator)
  assert batch['decoder_loss_weights'][0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
  assert batch['decoder_causal_attention'][0].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]


def test_masked_rows_hide_what_has_a_weight_and_nothing_else():
  spec, iterator = open_synthetic('encoder_mlm', lengths={'inputs': 512, 'targets': 512})
  batch = next(iterator)
  hidden = batch['encoder_loss_weights'] == 1
  assert (
    batch['encoder_input_tokens'][hidden] == spec.vocab_sizes['encoder_input_tokens'] - 1
  ).all()
  assert (batch['encoder_input_tokens'] == batch['encoder_target_tokens'])[~hidden].all()
  assert 0.1 < hidden.mean() < 0.2


def test_labels_are_of_all_classes_and_weigh_1():
  _, iterator = open_synthetic('encoder_classification')
  labels = np.concatenate([next(iterator)['label'] for _ in range(20)])
  assert set(labels) == {0, 1, 2}
  assert (next(iterator)['label_weights'] == 1).all()


@pytest.mark.parametrize('converter', list(features.LAYOUTS))
def test_uneven_batches_have_an_empty_row_without_weight_and_others_of_several(converter):
  spec, _ = open_synthetic(converter)
  seen = set()
  for batch in synthetic.uneven_batches(spec, seed=0, num_batches=3):
    spec.check(batch)
    assert not any(x[-1].any() for x in batch.values())
    # Tags have no weights; 0 marks a token without a tag.
    weights = next(
      (x for n, x in batch.items() if n.endswith('_weights')), batch.get('encoder_labels')
    )
    seen |= set(weights[weights > 0].tolist())
    if converter == 'encoder_classification':
      assert (batch['encoder_input_tokens'].any(1) == (weights > 0)).all()
  assert len(seen) > 1


def test_same_seed_same_batches_other_seed_others():
  hashes = [[batches.batch_hash(next(open_synthetic(seed=seed)[1]))] for seed in (0, 0, 1)]
  assert hashes[0] == hashes[1] != hashes[2]
  _, iterator = open_synthetic()
  assert batches.batch_hash(next(iterator)) != batches.batch_hash(next(iterator))


def test_state_continues_after_peek():
  _, iterator = open_synthetic()
  next(iterator)
  iterator.peek()
  state = iterator.get_state()
  want = [batches.batch_hash(next(iterator)) for _ in range(3)]
  _, other = open_synthetic()
  other.set_state(state)
  assert [batches.batch_hash(next(other)) for _ in range(3)] == want


def test_state_of_other_data_is_refused_naming_the_difference():
  state = open_synthetic(seed=1)[1].get_state()
  with raises(DataError):
    open_synthetic()[1].set_state(state)
  with raises(DataError):
    open_synthetic()[1].set_state(b'junk')


def test_evaluation_ends():
  _, iterator = open_synthetic(repeat=False)
  assert 1 <= len(list(iterator)) < 100
