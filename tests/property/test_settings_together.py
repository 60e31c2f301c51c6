"""Settings that are legal alone: together they work, with finite numbers, or a UserError says why.

Draws have illegal pairs on purpose: more kv heads than heads, windows beyond the row, more chosen
experts than there are, an odd number of rotated features, buckets beyond the distance.
"""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from t5x_gpu.conversion.hf.config_json import from_hf, to_hf
from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.errors import CheckpointError, ModelError
from t5x_gpu.layers.positions import RotaryEmbedding, relative_position_buckets
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.axis_rules import split_names
from tests.conversion.hf_files import CONFIGS

LENGTH = 8
SIZES = {'vocab_size': 24, 'num_layers': 2, 'embed_dim': 8, 'mlp_dim': 8}


@pytest.mark.parametrize('bidirectional', [False, True])
def test_relative_buckets_grow_with_the_distance_or_are_refused(bidirectional):
  refused = 0
  for num_buckets in range(1, 40):
    for max_distance in range(1, 40):
      try:
        rows = relative_position_buckets(
          64, 64, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance
        )
      except ModelError as e:
        assert '_relpos_' in e.what and e.fix and e.docs
        refused += 1
        continue
      before = rows[63, ::-1]  # keys at the distances 0, 1, ...
      assert (np.diff(before) >= 0).all() and before[0] == 0
      half = num_buckets // 2 if bidirectional else num_buckets
      # Exact ones first; the last one is reached by the distances beyond the largest.
      exact = half // 2
      np.testing.assert_array_equal(before[: exact + 1], np.arange(exact + 1))
      assert before[-1] == half - 1 and rows.max() < num_buckets
  assert 0 < refused < 1000


@pytest.mark.parametrize(
  'buckets, distance, makes',
  [
    (32, 16, DecoderOnlyModel),
    (32, 8, EncoderModel),
    (32, 16, EncoderDecoderModel),
    (1, 128, DecoderOnlyModel),
    (3, 128, EncoderModel),
    (2, 1, DecoderOnlyModel),
  ],
)
def test_impossible_buckets_are_refused_when_the_model_is_made(buckets, distance, makes):
  sizes = {**SIZES, 'num_heads': 2, 'head_dim': 4}
  with pytest.raises(ModelError, match='_relpos_') as e:
    makes(TransformerConfig(**sizes, num_relpos_buckets=buckets, max_relpos_distance=distance))
  assert 'TransformerConfig.' in str(e.value) or 'must be' in e.value.what
  makes(TransformerConfig(**sizes, num_relpos_buckets=4, max_relpos_distance=3))
  makes(
    TransformerConfig(**sizes, relative_bias='none', num_relpos_buckets=1, rope=RotaryEmbedding())
  )


def test_a_negative_width_of_a_head_is_refused():
  with pytest.raises(ModelError) as e:
    EncoderModel(TransformerConfig(**SIZES, num_heads=2, head_dim=4), head_mlp_dim=-1)
  assert e.value.parameters == ('EncoderModel.head_mlp_dim',) and e.value.fix


@pytest.mark.parametrize('buckets, distance', [(32, 16), (32, 8), (1, 128), (3, 128)])
def test_impossible_buckets_of_a_config_json_are_refused(buckets, distance):
  config = {
    **CONFIGS['t5'],
    'relative_attention_num_buckets': buckets,
    'relative_attention_max_distance': distance,
  }
  with pytest.raises(CheckpointError, match='_relpos_'):
    from_hf(config, has_tensor=lambda name: False)


@st.composite
def ropes(draw):
  scaling = draw(st.sampled_from(('none', 'linear', 'llama3', 'yarn', 'longrope', 'dynamic')))
  factors = tuple([1.0] * draw(st.integers(0, 3)))
  return {
    'theta': draw(st.sampled_from((1.0, 10.0, 1e4))),
    'scaling': scaling,
    'factor': draw(st.sampled_from((0.5, 1.0, 4.0))),
    'low_freq_factor': draw(st.sampled_from((1.0, 4.0))),
    'original_length': draw(st.sampled_from((1, 4, 8, 64))),
    'fraction': draw(st.sampled_from((0.2, 0.5, 0.75, 1.0))),
    'beta_slow': draw(st.sampled_from((1.0, 32.0))),
    'short_factors': factors,
    'long_factors': factors + tuple([2.0] * draw(st.integers(0, 1))),
    'attention_factor': draw(st.sampled_from((None, None, 1.5))),
  }


small = st.integers(0, 4)
CHOICES = {
  'num_heads': st.integers(1, 4),
  'head_dim': st.integers(1, 6),
  'num_kv_heads': st.one_of(st.none(), small),
  'relative_bias': st.sampled_from(('none', 'shared', 'per_layer')),
  'num_relpos_buckets': st.sampled_from((1, 2, 3, 4, 8, 32)),
  'max_relpos_distance': st.sampled_from((1, 2, 4, 8, 16, 17, 128)),
  'windows': st.lists(st.integers(0, 12), max_size=3).map(tuple),
  'num_positions': st.sampled_from((0, 0, 4, 8, 64)),
  'max_length': st.sampled_from((0, 0, 4, 8, 64)),
  'num_token_types': small,
  'mlp_activations': st.lists(st.sampled_from(('gelu', 'relu', 'linear')), max_size=3).map(tuple),
  'mlp_bias': st.booleans(),
  'attention_bias': st.sampled_from(('none', 'qkv', 'all')),
  'qk_norm': st.booleans(),
  'qk_norm_kind': st.sampled_from(('head', 'head_plus_one', 'all_heads')),
  'norm': st.sampled_from(('rms', 'layer', 'rms_plus_one')),
  'norm_position': st.sampled_from(('pre', 'post', 'sandwich', 'output')),
  'logits_via_embedding': st.booleans(),
  'attention_softcap': st.sampled_from((None, 1.0)),
  'logits_softcap': st.sampled_from((None, 0.0, 1.0)),
  'dropout_rate': st.sampled_from((0.0, 0.5, 1.0)),
  'mlp_dropout': st.sampled_from((None, 0.0, 1.0)),
  'num_experts': small,
  'num_experts_per_token': small,
  'expert_capacity_factor': st.sampled_from((None, 0.01, 2.0)),
  'router_balance_loss': st.sampled_from((0.0, 0.01)),
  'loss_chunks': st.sampled_from((None, 0, 3, 64)),
  'scan_unroll': st.sampled_from((1, 5)),
  'dtype': st.sampled_from(('float32', 'bfloat16', 'fp8')),
  'fp8_scaling': st.sampled_from(('current', 'current', 'delayed', 'mxfp8')),
  'fp8_logits': st.booleans(),
  'remat_policy': st.sampled_from(('none', 'full', 'dots')),
}
OPTIONS = {
  DecoderOnlyModel: {'z_loss': st.sampled_from((0.0, 1e-4))},
  EncoderDecoderModel: {'num_encoder_layers': st.sampled_from((None, -1, 0, 1, 3))},
  EncoderModel: {
    'head_type': st.sampled_from(
      ('classification', 'regression', 'embedding', 'mlm', 'token_classification')
    ),
    'num_classes': st.integers(0, 3),
    'head_mlp_dim': st.integers(-1, 2),
    'label_smoothing': st.sampled_from((0.0, 0.1)),
    'class_names': st.sampled_from(((), ('a', 'b'), ('O', 'B-a', 'I-a'))),
    'problem_type': st.sampled_from(('single_label_classification', 'multi_label_classification')),
    'token_types': st.sampled_from((None, False, True)),
  },
}


@st.composite
def models(draw):
  """Returns (class, arguments, fields, rope): most fields stay at their defaults."""
  fields = draw(st.fixed_dictionaries({}, optional=CHOICES))
  for name in ('num_heads', 'head_dim'):
    fields.setdefault(name, 4)
  makes = draw(st.sampled_from(tuple(OPTIONS)))
  options = draw(st.fixed_dictionaries({}, optional=OPTIONS[makes]))
  return makes, options, fields, draw(st.one_of(st.none(), ropes()))


def check(drawn, *, compute=False):
  """Works, with the loss and its gradient traced or computed, or is refused by a UserError."""
  makes, options, fields, rope = drawn
  try:
    if rope is not None:
      fields = {**fields, 'rope': RotaryEmbedding(**rope)}
    model = makes(TransformerConfig(**SIZES, **fields), **options)
    lengths = {'inputs': LENGTH, 'targets': LENGTH}
    if makes is DecoderOnlyModel or (makes is EncoderModel and model.head_type != 'mlm'):
      lengths.pop('inputs' if makes is DecoderOnlyModel else 'targets')
    spec = model.batch_spec(lengths, batch_size=2, pack=False)
    batch = {name: jnp.ones(shape, spec.dtypes[name]) for name, shape in spec.shapes.items()}
    for name in batch.keys() & {'encoder_input_tokens', 'decoder_input_tokens'}:
      batch[name] = jnp.arange(2 * LENGTH, dtype=jnp.int32).reshape(2, LENGTH)
    batch['rows'] = jnp.arange(2)
  except ModelError as e:
    assert e.what and e.fix
    return
  problem = export_problem(model)
  assert problem is None or '\n' not in problem.what

  def init():
    return split_names(model.init(jax.random.key(0), spec))[0]

  def loss(params):
    sums = model.loss(params, batch, dropout_key=jax.random.key(1))
    return sums['loss'][0]

  try:
    value = jax.eval_shape(jax.value_and_grad(loss), jax.eval_shape(init))[0]
  except ModelError as e:  # of a row that is longer than the model takes, before anything compiles
    assert e.what and e.fix
    return
  assert value.shape == ()
  if compute:
    value, gradients = jax.jit(lambda: jax.value_and_grad(loss)(init()))()
    for path, x in jax.tree.leaves_with_path((value, gradients)):
      assert np.isfinite(np.asarray(x, np.float32)).all(), jax.tree_util.keystr(path)
    jax.clear_caches()  # many programs reach the limit of memory mappings


OF_A_DRAW = dict(deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@settings(max_examples=12, **OF_A_DRAW)
@given(models())
def test_settings_work_together_or_are_refused(drawn):
  check(drawn)


@pytest.mark.slow
@settings(max_examples=150, **OF_A_DRAW)
@given(models())
def test_many_settings_work_together_or_are_refused(drawn):
  check(drawn)


# A smaller failing draw would cost a compile per try.
COMPUTED = dict(**OF_A_DRAW, phases=[Phase.generate])


@settings(max_examples=4, **COMPUTED)
@given(models())
def test_numbers_of_settings_together_are_finite(drawn):
  check(drawn, compute=True)


@pytest.mark.slow
@settings(max_examples=60, **COMPUTED)
@given(models())
def test_numbers_of_many_settings_together_are_finite(drawn):
  check(drawn, compute=True)


@pytest.mark.parametrize('family', ['t5', 'gpt2', 'llama', 'mixtral', 'phi3', 'gemma3_text'])
def test_numbers_of_a_config_json_work_together_or_are_refused(family):
  config = CONFIGS[family]
  numbers = [k for k, v in config.items() if isinstance(v, (int, float)) and v is not True]
  outcomes = set()
  for name in numbers:
    for value in (0, 1, 3, 7, 1000):
      try:
        model = from_hf({**config, name: value}, has_tensor=lambda name: family != 't5')
        to_hf(model, family=family)
        outcomes.add('works')
      except CheckpointError as e:
        assert e.what and e.fix
        outcomes.add('refused')
  assert outcomes == {'works', 'refused'}
