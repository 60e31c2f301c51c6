"""t5x_gpu generates the same tokens as Hugging Face's `generate`.

Greedily, by beam search, and sampled with the same random numbers.

Random models, converted; prompts of different lengths in one batch; texts that stop and texts that
do not.
"""

import functools

import numpy as np
import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

import jax  # noqa: E402

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.conversion.conversion import params_of_checkpoint
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.inference.generation import Generator
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from tests.conversion.hf_files import VARIANTS, VOCAB, random_tensors, write_model
from tests.helpers_layouts import QUICK

NEW, BATCH, SEED = 12, 5, 4
LENGTHS = (9, 3, 14, 1, 6)
PROMPTS = [np.random.default_rng(i).integers(2, VOCAB, n).tolist() for i, n in enumerate(LENGTHS)]
FAMILIES = [
  pytest.param(
    name, marks=[] if name in ('t5_1_1', 'gpt2', 'llama', 'phi3_longrope') else pytest.mark.slow
  )
  for name in (
    't5',
    't5_1_1',
    'umt5',
    'gpt2',
    'llama',
    'gemma2',
    'qwen3',
    'mistral',
    'qwen2',
    'gemma3_text',
    'smollm3',
    'olmo2',
    'phi3',
    'phi3_longrope',  # some prompts are longer than its switch, some texts cross it
    'mixtral',
    'qwen3_moe',
  )
]


@pytest.fixture(scope='module')
def both(tmp_path_factory):
  """Returns get(name) -> (their model, our model, our parameters), made once."""

  @functools.cache
  def get(name):
    folder = tmp_path_factory.mktemp(name)
    config = dict(VARIANTS[name])
    if 't5' in name:  # their cache has as many layers as the encoder
      config['num_decoder_layers'] = config['num_layers']
    tensors = random_tensors(config, seed=3)
    if name == 't5':  # tied and scaled, its logits are small: all texts would be one token
      tensors['shared.weight'] *= 8
    for bias in (tensor for key, tensor in tensors.items() if name == 'qwen2' and 'bias' in key):
      bias -= 1  # else values are much alike, and so are all texts
    write_model(folder / 'theirs', config, tensors)
    auto = transformers.AutoModelForSeq2SeqLM if 't5' in name else transformers.AutoModelForCausalLM
    theirs = auto.from_pretrained(folder / 'theirs', attn_implementation='eager').eval()
    theirs.generation_config = transformers.GenerationConfig(
      decoder_start_token_id=0 if 't5' in name else None
    )
    convert.main([f'--from={folder / "theirs"}', f'--to={folder / "ours"}', '--check=tensors'])
    ours = convert.model_of_gin([folder / 'ours' / 'model.gin']).build()
    return theirs, ours, params_of_checkpoint(ParamsReader(folder / 'ours'))

  return get


class Gumbel(transformers.LogitsProcessor):
  """Adds the noise whose largest sum `jax.random.categorical` takes: greedy search then samples."""

  def __init__(self, numbers, first):
    self._numbers, self._first = numbers, first

  def __call__(self, input_ids, scores):
    step = input_ids.shape[1] - self._first
    for row, number in enumerate(self._numbers):
      key = jax.random.key(SEED)
      for part in (number, 0, step):  # prompt, decode, token
        key = jax.random.fold_in(key, part)
      scores[row] += torch.from_numpy(np.array(jax.random.gumbel(key, scores.shape[1:])))
    return scores


def their_texts(
  model, *, is_encoder_decoder, stops, num, prompts=PROMPTS, numbers=range(BATCH), **options
):
  """Returns [prompt][decode] -> (tokens up to a stop, score or None)."""
  if getattr(model.config, 'rope_parameters', {}).get('rope_type') == 'longrope' and prompts[1:]:
    # Their factors depend on the longest text of a batch, ours on each text.
    alone = dict(is_encoder_decoder=False, stops=stops, num=num, **options)
    return [
      their_texts(model, prompts=[prompt], numbers=[number], **alone)[0]
      for number, prompt in zip(numbers, prompts)
    ]
  width = max(map(len, prompts))
  if 'sampling' in options:
    processors = [*options.pop('sampling'), Gumbel(numbers, 1 if is_encoder_decoder else width)]
    options['logits_processor'] = transformers.LogitsProcessorList(processors)
  tokens, mask = np.zeros((2, len(prompts), width), np.int64)
  for row, prompt in enumerate(prompts):
    place = slice(0, len(prompt)) if is_encoder_decoder else slice(width - len(prompt), width)
    tokens[row, place], mask[row, place] = prompt, 1
  with torch.no_grad():
    out = model.generate(
      torch.from_numpy(tokens),
      attention_mask=torch.from_numpy(mask),
      do_sample=False,
      max_new_tokens=NEW,
      eos_token_id=list(stops) or None,
      pad_token_id=0,
      suppress_tokens=[0],
      num_return_sequences=num,
      return_dict_in_generate=True,
      output_scores=True,
      **options,
    )
  new = out.sequences[:, 1 if is_encoder_decoder else width :].numpy()
  scores = getattr(out, 'sequences_scores', None)
  scores = [None] * len(new) if scores is None else scores.tolist()

  def text(row):
    end = next((i + 1 for i, token in enumerate(row) if token in stops), len(row))
    return row[:end].tolist()

  flat = [(text(row), score) for row, score in zip(new, scores)]
  return [flat[i : i + num] for i in range(0, len(flat), num)]


def our_texts(model, params, *, name, stops, **options):
  layout = Partitioner().lay_out(
    Topology(1, 1), jax.devices()[:1], logical_sizes={**model.logical_sizes(), 'batch': BATCH}
  )
  config = DecodingConfig(
    max_decode_length=NEW,
    stop_tokens=stops,
    batch_size=BATCH,
    start_token=0 if 't5' in name else None,
    **options,
  )
  return Generator(model, params, layout=layout, config=config, compiler_options=QUICK).generate(
    PROMPTS
  )


def check(both, name, *, num, theirs, ours):
  their_model, model, params = both(name)
  search = functools.partial(
    their_texts, their_model, is_encoder_decoder='t5' in name, num=num, **theirs
  )
  whole = [texts[0][0] for texts in search(stops=())]
  stops = (whole[0][3], whole[1][6])
  want = search(stops=stops)
  got = our_texts(model, params, name=name, stops=stops, **ours)
  for texts, wanted in zip(got, want, strict=True):
    assert [list(text.tokens) for text in texts] == [tokens for tokens, _ in wanted]
    if num > 1:
      np.testing.assert_allclose([text.score for text in texts], [s for _, s in wanted], rtol=1e-4)
  lengths = {len(tokens) for texts in want for tokens, _ in texts}
  assert len(lengths) > 1 or theirs.get('length_penalty')  # some stop; with it, fewer


@pytest.mark.quick_cases('gpt2', 'phi3_longrope')
@pytest.mark.parametrize('name', FAMILIES)
def test_greedy_text_equals_hugging_face(name, both):
  check(both, name, num=1, theirs={}, ours={})


@pytest.mark.quick_cases('gpt2', 't5_1_1')
@pytest.mark.parametrize('name', FAMILIES)
def test_texts_and_scores_of_a_beam_search_equal_hugging_face(name, both):
  check_beam_search(both, name, penalty=1.0)


@pytest.mark.slow  # of the scores alone, so two models are enough
@pytest.mark.parametrize('name', ['gpt2', 't5_1_1'])
def test_scores_without_a_length_penalty_equal_hugging_face(name, both):
  check_beam_search(both, name, penalty=0.0)


def check_beam_search(both, name, *, penalty):
  check(
    both,
    name,
    num=3,
    theirs=dict(num_beams=3, length_penalty=penalty),
    ours=dict(num_beams=3, num_decodes=3, length_penalty=penalty, beam_rule='huggingface'),
  )


# From the logits alone, which the greedy texts of all families compare.
@pytest.mark.quick_cases('gpt2')
@pytest.mark.parametrize('name', ['gpt2', 't5_1_1', 'phi3_longrope'])
def test_sampled_text_equals_hugging_face_for_the_same_random_numbers(name, both):
  filters = [
    transformers.TemperatureLogitsWarper(1.5),
    transformers.TopKLogitsWarper(40),
    transformers.TopPLogitsWarper(0.9),
  ]
  ours = dict(temperature=1.5, top_k=40, top_p=0.9, seed=SEED)
  check(both, name, num=1, theirs=dict(sampling=filters), ours=ours)
