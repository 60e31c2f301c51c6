"""Text from models: the tokens that their logits say, in any batch, on any mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.inference.generation import Generator, by_layer, padded_length, sample
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from tests.helpers_layouts import QUICK
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, head_dim=8, mlp_dim=32
)
LLAMA = dataclasses.replace(
  CONFIG,
  relative_bias='none',
  rope=RotaryEmbedding(),
  num_kv_heads=2,
  qk_norm=True,
  query_pre_attn_scalar=8.0,
  windows=(3, 0),
  attention_softcap=5.0,
  logits_softcap=9.0,
  init_stddev=0.3,
  mlp_activations=('silu', 'linear'),
)
GPT2 = dataclasses.replace(
  CONFIG,
  relative_bias='none',
  num_positions=24,
  norm='layer',
  attention_bias='all',
  mlp_bias=True,
  mlp_activations=('gelu',),
  query_pre_attn_scalar=8.0,
  init_stddev=0.3,
)
MODELS = {
  't5x_decoder': DecoderOnlyModel(CONFIG),
  'prefix_lm': DecoderOnlyModel(CONFIG, inputs_bidirectional_attention=True),
  'llama': DecoderOnlyModel(LLAMA),
  'llama_24': DecoderOnlyModel(dataclasses.replace(LLAMA, max_length=24)),
  'gpt2': DecoderOnlyModel(GPT2),
  'encoder_decoder': EncoderDecoderModel(CONFIG, num_encoder_layers=1),
  'experts': DecoderOnlyModel(
    dataclasses.replace(CONFIG, num_experts=4, expert_capacity_factor=None)
  ),
}
PROMPTS = [[3, 7, 5], [9, 9, 0, 2, 30, 11, 6], [8]]
NEW = 8


@functools.cache
def params_and_names(name):
  shapes, names = split_names(jax.eval_shape(lambda: MODELS[name].init(jax.random.key(0), None)))
  rng = np.random.default_rng(5)
  return jax.tree.map(lambda x: rng.normal(0, 0.4, x.shape).astype(np.float32), shapes), names


def make_generator(
  name, partitioner=Partitioner(), num_devices=1, *, layers_apart=False, **options
):
  model, (params, names) = MODELS[name], params_and_names(name)
  layout = partitioner.lay_out(
    Topology(1, num_devices),
    jax.devices()[:num_devices],
    logical_sizes={**model.logical_sizes(), 'batch': 8, 'length': 16},
  )
  params = jax.device_put(params, layout.shardings(params, names))
  if layers_apart:
    params = by_layer(model, params, layout=layout)
  options = {'max_decode_length': NEW, 'batch_size': 4, **options}
  return Generator(
    model, params, layout=layout, config=DecodingConfig(**options), compiler_options=QUICK
  )


@functools.cache
def greedy_generator(name):
  return make_generator(name)


def tokens_of(generator, prompts=PROMPTS, **options):
  return [[list(text.tokens) for text in texts] for texts in generator.generate(prompts, **options)]


@functools.cache
def all_logits(name):
  """Returns (encoder inputs, decoder inputs, prompt) [1, length] -> logits [1, length, vocab].

  The prompt is 1 where the encoder, or the prefix of the decoder, has a token.
  """

  def logits(params, inputs, tokens, prompt):
    batch = {'decoder_input_tokens': tokens, 'decoder_target_tokens': jnp.ones_like(tokens)}
    batch |= (
      {'encoder_input_tokens': inputs, 'encoder_segment_ids': prompt}
      if name == 'encoder_decoder'
      else {'decoder_causal_attention': prompt}
    )
    return MODELS[name].logits(params, batch)

  return jax.jit(logits, compiler_options=QUICK)


def uncached_logits(name, prompt, tokens, start=(0,)):
  """Returns [new, vocab]: logits of each of `tokens`, from rows without padding before them."""
  is_encoded, length = name == 'encoder_decoder', 16
  row = [*start, *([] if is_encoded else prompt), *tokens]
  before = len(row) - len(tokens)
  padded = lambda x: np.pad(np.asarray(x, np.int32), (0, length - len(x)))[None]
  logits = all_logits(name)(
    params_and_names(name)[0],
    padded(prompt),
    padded(row),
    padded([1] * (len(prompt) if is_encoded else before)),
  )
  return np.asarray(logits)[0, before - 1 : len(row) - 1]


def likeliest(logits):
  return (1 + np.argmax(logits[:, 1:], -1)).tolist()  # never padding


@pytest.mark.quick_cases('llama', 'gpt2', 'encoder_decoder')
@pytest.mark.parametrize('name', MODELS)
def test_greedy_text_is_that_of_full_passes_without_a_cache(name):
  written = tokens_of(greedy_generator(name))
  for prompt, [text] in zip(PROMPTS, written):
    assert text == likeliest(uncached_logits(name, prompt, text))
  assert len({token for [text] in written for token in text}) > 2


@pytest.mark.quick_cases('llama', 'gpt2', 'encoder_decoder')
@pytest.mark.parametrize('name', MODELS)
def test_scores_of_targets_are_those_of_the_text_that_was_written(name):
  generator = greedy_generator(name)
  written = [text for [text] in generator.generate(PROMPTS)]
  scores = generator.score(PROMPTS, [text.tokens for text in written])
  np.testing.assert_allclose(scores, [text.score for text in written], rtol=1e-4)
  changed = [[*text.tokens[:-1], text.tokens[-1] % 31 + 1] for text in written]
  assert (np.asarray(generator.score(PROMPTS, changed)) < np.asarray(scores)).all()


def test_text_is_the_same_alone_and_in_any_batch():
  generator = greedy_generator('llama')
  together = tokens_of(generator)
  assert [tokens_of(generator, [prompt])[0] for prompt in PROMPTS] == together
  assert tokens_of(generator, PROMPTS * 2) == together * 2  # two batches, the second not full
  long = PROMPTS + [list(range(1, 21))]  # pads all prompts to 32
  assert tokens_of(generator, long)[:3] == together


def test_id_0_stops_a_text_where_it_is_a_word_alone():
  with raises(ConfigError):
    make_generator('llama', stop_tokens=(0,))
  assert make_generator('llama', stop_tokens=(0,), zero_is_padding=False).config.stop_tokens == (0,)


@pytest.mark.quick_cases('options1')
@pytest.mark.parametrize(
  'options',
  [dict(temperature=1.0, num_decodes=2, top_k=20, top_p=0.95), dict(num_beams=3, num_decodes=3)],
)
def test_samples_and_beams_depend_on_the_prompt_and_its_number_alone(options):
  generator = make_generator('t5x_decoder', stop_tokens=(1, 2, 3, 4, 5), **options)
  together = tokens_of(generator)
  alone = [tokens_of(generator, [prompt], numbers=[i])[0] for i, prompt in enumerate(PROMPTS)]
  assert alone == together
  if 'temperature' in options:
    assert tokens_of(generator, PROMPTS[:1], numbers=[7])[0] != together[0]
    assert together[0][0] != together[0][1]
    other = dataclasses.replace(generator.config, seed=1)
    other = make_generator(
      't5x_decoder', **{k: v for k, v in dataclasses.asdict(other).items() if k != 'batch_size'}
    )
    assert tokens_of(other) != together


MESHES = {
  'data2_fsdp2_model2': dict(fsdp=2, num_partitions=2),
  'stage2': dict(stage=2, num_pipeline_microbatches=1),
  'context2_sequence_parallel': dict(context=2, num_partitions=2, sequence_parallel=True),
}
SEARCHES = {
  'greedy': dict(),
  'sample': dict(temperature=1.0, top_p=0.9, num_decodes=2),
  'beam': dict(num_beams=2, stop_tokens=(1, 2, 3, 4)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
  'name, mesh, search',
  [
    ('llama', 'data2_fsdp2_model2', 'sample'),
    ('encoder_decoder', 'data2_fsdp2_model2', 'beam'),
    ('llama', 'stage2', 'beam'),
    ('t5x_decoder', 'data2_fsdp2_model2', 'greedy'),
    ('gpt2', 'context2_sequence_parallel', 'sample'),
  ],
)
def test_text_on_eight_devices_is_that_of_one(name, mesh, search):
  eight = make_generator(name, Partitioner(**MESHES[mesh]), 8, **SEARCHES[search])
  assert eight.batch_size % eight._layout.batch_parts == 0
  one = make_generator(name, **SEARCHES[search])
  assert tokens_of(eight) == tokens_of(one)
  targets = [prompt[::-1] for prompt in PROMPTS]
  np.testing.assert_allclose(eight.score(PROMPTS, targets), one.score(PROMPTS, targets), rtol=1e-5)


@pytest.mark.slow
def test_experts_on_a_mesh_of_three_axes_write_what_one_device_writes():
  eight = make_generator('experts', Partitioner(expert=2, fsdp=2, num_partitions=2), 8)
  assert tokens_of(eight) == tokens_of(greedy_generator('experts'))


@pytest.mark.parametrize(
  'name, mesh',
  [
    ('llama', {}),
    pytest.param('encoder_decoder', dict(fsdp=2, num_partitions=2), marks=pytest.mark.slow),
  ],
)
def test_layers_one_by_one_write_what_a_stack_of_them_writes(name, mesh):
  generator = make_generator(name, Partitioner(**mesh), 8 if mesh else 1, layers_apart=True)
  assert tokens_of(generator) == tokens_of(greedy_generator(name))


def test_layers_one_by_one_take_the_place_of_the_stack():
  model, (params, names) = MODELS['llama'], params_and_names('llama')
  layout = greedy_generator('llama')._layout
  stacked = jax.device_put(params, layout.shardings(params, names))
  apart = by_layer(model, stacked, layout=layout)
  assert all(x.is_deleted() for x in jax.tree.leaves(stacked['layers']))
  for i, layer in enumerate(apart['layers']):
    jax.tree.map(
      lambda one, stack: np.testing.assert_array_equal(one, stack[i]), layer, params['layers']
    )
  assert len(apart['layers']) == 2 and apart['token_embedder'] is stacked['token_embedder']


def test_a_stop_token_ends_a_text_and_the_loop():
  written = tokens_of(greedy_generator('llama'))
  stop = written[0][0][2]
  generator = make_generator('llama', stop_tokens=(stop,))
  for [text], [whole] in zip(generator.generate(PROMPTS), written):
    end = whole.index(stop) + 1 if stop in whole else NEW
    assert list(text.tokens) == whole[:end]
    assert text.is_complete == (stop in whole)


def test_prompts_of_many_lengths_are_padded_to_a_few():
  assert sorted({padded_length(n) for n in range(1, 200)}) == [16, 32, 64, 128, 256]


@pytest.mark.quick_cases('gpt2-*')
@pytest.mark.parametrize('name, parameter', [('gpt2', 'num_positions'), ('llama_24', 'max_length')])
def test_prompts_that_do_not_fit_the_positions_are_refused(name, parameter):
  generator = make_generator(name)
  with raises(DataError) as error:
    generator.generate([[3], [3] * 17])
  assert f'TransformerConfig.{parameter}' in error.value.parameters
  with raises(DataError) as error:
    generator.generate([[3] * 24])
  assert len(generator.generate([[3] * 16])[0][0].tokens) == NEW  # just fits


@pytest.mark.parametrize('name', ['gpt2', 'llama_24'])
def test_without_a_start_token_a_scored_text_is_one_token_longer_than_the_model_reads(name):
  generator = make_generator(name, start_token=None)
  assert generator.score([[3] * 5, [3] * 24], [[4] * 20, [4]])[0] < 0  # the last is not read
  for prompt, target in (([3] * 5, [4] * 21), ([3] * 25, [4])):
    with raises(DataError):
      generator.score([prompt], [target])


def test_prompts_that_give_nothing_to_begin_with_are_refused():
  with raises(DataError):
    make_generator('gpt2', start_token=None).generate([[]])
  with raises(DataError):
    greedy_generator('encoder_decoder').generate([[]])
  assert len(greedy_generator('t5x_decoder').generate([[]])[0][0].tokens) == NEW
  with raises(ConfigError):
    make_generator('encoder_decoder', start_token=None)
  with raises(DataError):
    greedy_generator('t5x_decoder').score([[3]], [[]])


def test_ids_that_the_model_does_not_know_are_refused():
  with raises(DataError):
    greedy_generator('llama').generate([[3], [3, 32]])
  with raises(DataError):
    greedy_generator('llama').score([[3]], [[99]])
  with raises(ConfigError):
    make_generator('llama', stop_tokens=(1, 40))


def test_a_decoder_without_a_start_token_takes_its_prompt_as_it_is():
  generator = make_generator('llama', start_token=None)
  for prompt, [text] in zip(PROMPTS, generator.generate(PROMPTS)):
    assert list(text.tokens) == likeliest(uncached_logits('llama', prompt, text.tokens, start=()))
  [score] = generator.score([prompt], [text.tokens])
  np.testing.assert_allclose(score, text.score, rtol=1e-5)


@dataclasses.dataclass(frozen=True)
class AnyKeywords(EncoderDecoderModel):
  def start_decoding(self, params, prompts, lengths, **keywords):
    return super().start_decoding(params, prompts, lengths, **keywords)


@dataclasses.dataclass(frozen=True)
class WithoutSegments(EncoderDecoderModel):
  def start_decoding(self, params, prompts, lengths, *, slots, encoder_tokens):
    return super().start_decoding(
      params,
      prompts,
      lengths,
      slots=slots,
      encoder_tokens=encoder_tokens,
      encoder_segments=(encoder_tokens > 0).astype(jnp.int32),
    )


@pytest.mark.parametrize('kind', [AnyKeywords, WithoutSegments])
def test_models_of_users_get_the_encoder_tokens_and_segments_that_they_take(monkeypatch, kind):
  prompts = [[3, 7, 5]]
  want = tokens_of(greedy_generator('encoder_decoder'), prompts)
  monkeypatch.setitem(MODELS, 'encoder_decoder', kind(CONFIG, num_encoder_layers=1))
  assert tokens_of(make_generator('encoder_decoder'), prompts) == want


def test_an_encoder_does_not_write():
  with raises(ConfigError):
    Generator(EncoderModel(CONFIG, num_classes=2), None, layout=None, config=DecodingConfig())


def sample_from(name, **options):
  generator = greedy_generator(name)
  return sample(
    MODELS[name],
    params_and_names(name)[0],
    np.asarray(PROMPTS[0], np.int32),
    layout=generator._layout,
    length=12,
    **{'num_tokens': NEW, **options},
  ).tolist()


def test_a_sample_is_a_prompt_and_its_continuation():
  assert sample_from('llama', temperature=0) == [
    *PROMPTS[0],
    *tokens_of(greedy_generator('llama'))[0][0],
  ]
  assert (
    sample_from('encoder_decoder', temperature=0)
    == tokens_of(greedy_generator('encoder_decoder'))[0][0]
  )


def test_a_sample_that_does_not_fit_the_length_is_refused():
  with raises(ConfigError):
    sample_from('llama', num_tokens=10, temperature=0)
