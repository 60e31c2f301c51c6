"""Keys of config.json: each is used, known to have no effect, or refused; defaults are theirs."""

import dataclasses
import math
import pathlib

import pytest

from scripts.docs_tables import keys_table
from t5x_gpu.conversion.hf import rotary
from t5x_gpu.conversion.hf.config_json import CONFIG_FAMILIES, from_hf, to_hf, training_differences
from t5x_gpu.errors import CheckpointError, ModelError
from t5x_gpu.layers.positions import RotaryEmbedding
from tests.conversion.hf_files import CONFIGS, VARIANTS, untied
from tests.messages import raises

PAGE = pathlib.Path(__file__).parents[3] / 'docs' / 'convert.md'
CLASSES = {
  't5': 'T5Config',
  'umt5': 'UMT5Config',
  'bert': 'BertConfig',
  'gpt2': 'GPT2Config',
  'llama': 'LlamaConfig',
  'mistral': 'MistralConfig',
  'qwen2': 'Qwen2Config',
  'qwen3': 'Qwen3Config',
  'gemma2': 'Gemma2Config',
  'gemma3_text': 'Gemma3TextConfig',
  'smollm3': 'SmolLM3Config',
  'olmo2': 'Olmo2Config',
  'phi3': 'Phi3Config',
  'mixtral': 'MixtralConfig',
  'qwen3_moe': 'Qwen3MoeConfig',
}
# Our defaults whose keys are older names of an attribute.
OTHER_NAMES = {'n_ctx': 'n_positions', 'sliding_window_pattern': '_sliding_window_pattern'}


def model_of(config):
  return from_hf(config, has_tensor=lambda name: untied(config))


@pytest.mark.parametrize('family', CLASSES)
def test_keys_and_defaults_are_those_of_the_installed_transformers(family):
  transformers = pytest.importorskip('transformers')
  with_windows = (
    {'use_sliding_window': True} if family in ('qwen2', 'qwen3', 'qwen3_moe') else {}
  )  # else it is reset
  theirs = getattr(transformers, CLASSES[family])(**with_windows)
  known = CONFIG_FAMILIES[family]
  assert set(theirs.to_dict()) <= known.known, 'transformers has new keys: read or refuse them'
  for key, value in known.defaults.items():
    if key in ('rope_theta', 'rope_local_base_freq', 'partial_rotary_factor'):
      kind = 'sliding_attention' if 'local' in key else 'full_attention'
      rope, name = theirs.rope_parameters, 'rope_theta' if 'local' in key else key
      assert rope.get(kind, rope)[name] == value
    elif (key, value) == ('head_dim', None):
      default = theirs.hidden_size // theirs.num_attention_heads
      assert getattr(theirs, 'head_dim', None) in (None, default)
    elif value is not None and key not in with_windows:  # a null stands for another key
      assert getattr(theirs, OTHER_NAMES.get(key, key)) == value, key


def test_keys_of_rotary_positions_are_those_of_the_installed_transformers():
  utils = pytest.importorskip('transformers.modeling_rope_utils')
  known = {*rotary.KEYS_OF_ALL, *(key for keys in rotary.KEYS_OF_KIND.values() for key in keys)}
  only_of_images = {'mrope_section'}
  assert utils.RopeParameters.__annotations__.keys() | {'type'} == known | only_of_images
  assert utils.ROPE_INIT_FUNCTIONS.keys() - rotary.KEYS_OF_KIND.keys() == {'proportional'}


def test_every_family_is_compared():
  assert CLASSES.keys() == CONFIG_FAMILIES.keys()


@pytest.mark.parametrize('name', CONFIGS)
def test_an_unknown_key_is_refused_by_name(name):
  with raises(CheckpointError):
    model_of({**CONFIGS[name], 'num_nextn_predict_layers': 1})


# Keys of published files that change nothing, and values with which they would.
HARMLESS = [
  ('gemma2', 'sliding_window_size', 8, 9),
  ('gpt2', '_num_labels', 1, None),
  ('bert_tags', '_num_labels', 3, 2),
  ('bert_classification', '_num_labels', 3, 5),
  ('phi3', 'full_attn_mod', 1, 2),
  ('phi3', 'interpolate_factor', 1, 4),
  ('phi3', 'lm_head_bias', False, True),
  ('llama', 'rope_interleaved', False, True),
  ('llama', 'is_llama_config', True, None),
  ('llama', 'transformers.js_config', {'dtype': 'q4'}, None),
  ('llama', 'activation', 'swiglu', 'gelu'),
  ('llama', 'quantization_config', None, {'quant_method': 'gptq', 'bits': 4}),
  ('bert_regression', 'sbert_ce_default_activation_function', 'torch.nn.Identity', None),
  ('bert_embedding', 'sentence_transformers', {'version': '4.1.0'}, None),
  ('t5', 'xla_device', True, None),
]


@pytest.mark.parametrize('name, key, value, other', HARMLESS)
def test_harmless_keys_of_published_files_are_read_and_their_values_checked(
  name, key, value, other
):
  config = VARIANTS[name]
  assert model_of({**config, key: value}) == model_of(config)
  if other is not None:
    with raises(CheckpointError):
      model_of({**config, key: other})


def test_quantised_weights_are_called_so():
  with raises(CheckpointError):
    model_of({**CONFIGS['qwen3'], 'quantization_config': {'quant_method': 'fp8'}})


def test_old_names_of_rotary_positions_are_read():
  config = VARIANTS['phi3_longrope']
  old = {**config, 'rope_scaling': {**config['rope_scaling'], 'type': 'su'}}
  assert model_of(old) == model_of(config)
  yarn = VARIANTS['llama_yarn']
  old = {**yarn, 'rope_scaling': {**yarn['rope_scaling'], 'finetuned': True}}
  assert model_of(old) == model_of(yarn)
  with raises(CheckpointError):
    model_of({**yarn, 'rope_scaling': {**yarn['rope_scaling'], 'finetuned': False}})


LLAMA3 = CONFIGS['llama']['rope_scaling']


@pytest.mark.parametrize(
  'name, change',
  [
    ('llama', {'rope_parameters': {'rope_theta': 1e4}}),
    ('llama', {'rope_scaling': {'sliding_attention': dict(LLAMA3)}}),
    ('llama', {'rope_scaling': {'type': 'linear', 'factor': 2.0, 'partial_rotary_factor': 0.5}}),
    ('qwen3', {'partial_rotary_factor': 0.5}),
    ('qwen3', {'mlp_bias': True}),
    ('gemma2', {'mlp_bias': True}),
    ('t5', {'dense_act_fn': 'gelu_new'}),
    ('t5_1_1', {'is_gated_act': False}),
    ('t5', {'decoder_start_token_id': 3}),
    ('bert_classification', {'problem_type': 'regression'}),
    ('bert_classification', {'num_labels': 1, 'problem_type': 'multi_label_classification'}),
    ('llama', {'pruned_heads': {'0': [1]}}),
    ('mistral', {'attention_bias': True}),
    ('mistral', {'mlp_bias': True}),
    ('mistral', {'layer_types': ['full_attention'] * 2}),
    ('qwen2', {'use_mrope': True}),
    ('qwen2', {'mlp_bias': True}),
    ('qwen2', {'layer_types': ['sliding_attention'] * 2}),
    ('qwen2', {'layer_types': ['full_attention'] * 3}),
    ('qwen3', {'layer_types': ['chunked_attention'] * 2}),
    ('gemma2', {'sliding_window': None}),
    ('gemma3_text', {'attn_logit_softcapping': 5.0}),
    ('gemma3_text', {'use_bidirectional_attention': True}),
    ('gemma3_text', {'rope_parameters': {'rope_theta': 1e4}}),
    ('gemma3_text', {'rope_scaling': {'type': 'linear', 'factor': 8.0}}),
    ('gemma3_text', {'rope_scaling': {'rope_type': 'yarn', 'factor': 8.0, 'truncate': False}}),
    ('gemma3_text', {'rope_scaling': {'rope_type': 'proportional'}}),
    ('gemma3_text', {'original_max_position_embeddings': 64}),
    ('gemma3_text', {'model_type': 'gemma3'}),
    ('smollm3', {'no_rope_layers': [1, 0]}),
    ('smollm3', {'layer_types': ['sliding_attention'] * 3}),
    ('olmo2', {'mlp_bias': True}),
    ('phi3', {'rope_scaling': {'type': 'longrope', 'short_factor': [1.0], 'long_factor': [2.0]}}),
    ('phi3', {'rope_scaling': {'rope_type': 'yarn', 'factor': 2.0}}),
    ('phi3', {'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}),
    ('mixtral', {'num_local_experts': 0}),
    ('mixtral', {'num_experts': 5}),
    ('mixtral', {'num_experts_per_tok': 5}),
    ('mixtral', {'n_shared_experts': 1}),
    ('qwen3_moe', {'num_local_experts': 4}),
    ('qwen3_moe', {'decoder_sparse_step': 2}),
    ('qwen3_moe', {'mlp_only_layers': [1]}),
    ('qwen3_moe', {'shared_expert_intermediate_size': 8}),
    ('qwen3_moe', {'layer_types': ['sliding_attention'] * 2}),
    ('qwen3_moe', {'model_type': 'qwen2_moe'}),
    ('mixtral', {'model_type': 'gpt_oss'}),
    ('bert_mlm', {'model_type': 'xlm-roberta'}),
    ('bert_mlm', {'model_type': 'modernbert'}),
    ('bert_mlm', {'model_type': 'deberta-v2'}),
    ('t5', {'model_type': 'longt5'}),
    ('t5', {'model_type': 't5gemma'}),
    ('llama', {'auto_map': {'AutoModel': 'a.B'}}),
    ('llama', {'model_type': 'new', 'auto_map': {}}),
    ('umt5', {'model_type': None}),
    ('llama', {'quantization_config': {'bits': 4}}),
  ],
)
def test_what_hugging_face_would_read_otherwise_is_refused(name, change):
  with raises(CheckpointError) as e:
    model_of({**CONFIGS[name], **change})
  assert e.value.fix


def test_missing_keys_have_the_defaults_of_their_family():
  config = {k: v for k, v in CONFIGS['gemma2'].items() if 'softcapping' not in k}
  c = model_of(config).config
  assert (c.attention_softcap, c.logits_softcap) == (50.0, 30.0)
  without = model_of({**config, 'attn_logit_softcapping': None, 'final_logit_softcapping': None})
  assert (without.config.attention_softcap, without.config.logits_softcap) == (None, None)
  assert model_of({**CONFIGS['mt5'], 'num_decoder_layers': None}).config.num_layers == 2
  relu = {k: v for k, v in CONFIGS['mt5'].items() if k != 'feed_forward_proj'}
  assert model_of(relu).config.mlp_activations == ('gelu', 'linear')


def test_a_number_outside_of_the_rotary_parameters_comes_first_as_in_transformers():
  change = {'original_max_position_embeddings': 64}
  assert model_of({**CONFIGS['llama'], **change}).config.rope.original_length == 64
  inner = {k: v for k, v in LLAMA3.items() if k != 'original_max_position_embeddings'}
  config = {**CONFIGS['llama'], 'rope_scaling': inner}
  assert model_of(config).config.rope.original_length == 128  # max_position_embeddings


def test_keys_of_scalings_that_are_missing_or_null_are_those_of_transformers():
  yarn = {'rope_type': 'yarn', 'factor': None, 'original_max_position_embeddings': 32}
  config = {**CONFIGS['llama'], 'rope_scaling': {**yarn, 'beta_fast': None, 'mscale': 1.0}}
  rope = model_of(config).config.rope  # max_position_embeddings = 128
  assert (rope.factor, rope.beta_fast, rope.beta_slow, rope.truncate) == (4.0, 32.0, 1.0, True)
  assert rope.attention_factor is None
  both = {**config['rope_scaling'], 'mscale_all_dim': 0.5}
  deepseek = model_of({**config, 'rope_scaling': both}).config.rope
  assert deepseek.amplitude == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))
  written = to_hf(model_of({**config, 'rope_scaling': both}), family='llama')
  assert model_of(written).config.rope == deepseek
  long = {'type': 'longrope', 'short_factor': [1.0] * 4, 'long_factor': [2.0] * 4}
  phi = {**CONFIGS['phi3'], 'max_position_embeddings': 131072, 'rope_scaling': long}
  rope = model_of(phi).config.rope
  assert (rope.original_length, rope.factor, rope.fraction) == (4096, 32.0, 0.5)
  assert rope.amplitude == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_dynamic_positions_limit_the_rows():
  scaling = {'type': 'dynamic', 'factor': 2.0}
  model = model_of({**CONFIGS['llama'], 'rope_scaling': scaling})
  assert model.config.rope.original_length == model.config.length_limit == 128
  with raises(ModelError):
    dataclasses.replace(model.config, max_length=129)


def test_windows_that_transformers_ignores_are_ignored():
  change = {'sliding_window': 8, 'use_sliding_window': True, 'max_window_layers': 0}
  assert model_of({**CONFIGS['llama'], **change}).config.windows == (0,)
  assert model_of({**CONFIGS['mistral'], **change, 'use_sliding_window': False}).config.windows == (
    8,
  )
  assert model_of({**CONFIGS['mistral'], 'sliding_window': None}).config.windows == (0,)
  without = {k: v for k, v in CONFIGS['mistral'].items() if k != 'sliding_window'}
  assert model_of(without).config.windows == (4096,)


def test_layers_have_the_windows_and_positions_of_their_kind():
  c = model_of(CONFIGS['gemma3_text']).config
  local, full = RotaryEmbedding(20.0), RotaryEmbedding(500.0, scaling='linear', factor=8.0)
  assert c.windows == (8, 8, 0) and c.ropes == (local, local, full) and c.rope is None
  new = {k: v for k, v in CONFIGS['gemma3_text'].items() if not k.startswith('rope')}
  new['rope_parameters'] = {
    'full_attention': {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 500.0},
    'sliding_attention': {'rope_type': 'default', 'rope_theta': 20.0},
  }
  assert model_of(new).config == c
  old = {k: v for k, v in CONFIGS['gemma3_text'].items() if 'rope' not in k and 'pattern' not in k}
  assert model_of({**old, 'num_hidden_layers': 6}).config.ropes[4:] == (
    RotaryEmbedding(1e4),
    RotaryEmbedding(1e6),
  )
  c = model_of(CONFIGS['smollm3']).config
  assert c.ropes == (RotaryEmbedding(5000.0), None) and c.windows == (0,)
  regular = {**CONFIGS['smollm3'], 'no_rope_layers': None, 'num_hidden_layers': 8}
  assert model_of(regular).config.ropes == (RotaryEmbedding(5000.0),) * 3 + (None,)
  windows = {'use_sliding_window': True, 'sliding_window': 4, 'no_rope_layer_interval': 2}
  c = model_of({**regular, **windows}).config
  assert (c.ropes, c.windows) == ((RotaryEmbedding(5000.0), None), (0, 4))


@pytest.mark.parametrize('name', ['gemma2', 'mistral', 'qwen2', 'qwen3'])
def test_biases_that_the_family_lacks_are_not_exported(name):
  model = model_of(CONFIGS[name])
  biased = dataclasses.replace(model, config=dataclasses.replace(model.config, mlp_bias=True))
  with raises(CheckpointError):
    to_hf(biased, family=name)


def test_experts_have_one_count_under_both_names_and_keep_training_apart():
  config = CONFIGS['qwen3_moe']
  new = {k: v for k, v in config.items() if k != 'num_experts'} | {'num_local_experts': 5}
  assert model_of(new) == model_of(config)
  assert 'num_local_experts' not in to_hf(model_of(new), family='qwen3_moe', like=new)
  without = {k: v for k, v in config.items() if k != 'norm_topk_prob'}
  assert not model_of(without).config.gates_add_up
  assert model_of({**CONFIGS['mixtral'], 'num_experts_per_tok': 1}).config.gates_add_up
  [note] = training_differences(CONFIGS['mixtral'], model_of(CONFIGS['mixtral']))
  # 0.02 x 2 experts per token / 2 layers
  assert 'router_aux_loss_coef = 0.02' in note and 'router_balance_loss = 0.02 ' in note
  noisy = {**CONFIGS['mixtral'], 'router_jitter_noise': 0.1, 'router_aux_loss_coef': 0.0}
  assert 'router_jitter_noise = 0.1' in ''.join(training_differences(noisy, model_of(noisy)))
  trained = dataclasses.replace(
    model_of(CONFIGS['mixtral']).config, router_balance_loss=0.1, loss_chunks=2
  )
  model = dataclasses.replace(model_of(CONFIGS['mixtral']), config=trained)
  assert to_hf(model, family='mixtral')['num_local_experts'] == 4
  full = dataclasses.replace(trained, expert_capacity_factor=2.0)
  with raises(CheckpointError):
    to_hf(dataclasses.replace(model, config=full), family='mixtral')


PLACES = ('embedding', 'attention', 'mlp', 'residual', 'output', 'classifier')


@pytest.mark.parametrize(
  'family, rates, want',
  [
    ('llama', {'attention_dropout': 0.25}, (0, 0.25, 0, 0, 0, 0)),
    ('gemma2', {'attention_dropout': 0.25}, (0, 0.25, 0, 0, 0, 0)),
    ('qwen3', {}, (0, 0, 0, 0, 0, 0)),
    ('gpt2', {'resid_pdrop': 0.1, 'attn_pdrop': 0.0, 'embd_pdrop': 0.2}, (0.2, 0, 0, 0.1, 0, 0.1)),
    (
      'bert_classification',
      {'hidden_dropout_prob': 0.1, 'attention_probs_dropout_prob': 0.2, 'classifier_dropout': 0.3},
      (0.1, 0.2, 0, 0.1, 0.1, 0.3),
    ),
    (
      'bert_classification',
      {'hidden_dropout_prob': 0.3, 'classifier_dropout': None},
      (0.3, 0.1, 0, 0.3, 0.3, 0.3),
    ),
    ('t5', {'dropout_rate': 0.2}, (0.2,) * 6),
  ],
)
def test_each_family_drops_at_its_own_places(family, rates, want):
  others = {k: v for k, v in CONFIGS[family].items() if not k.endswith(('dropout_prob', 'pdrop'))}
  model = model_of({**others, **rates})
  assert tuple(model.config.dropout(place) for place in PLACES) == want
  written = to_hf(model, family=CONFIGS[family]['model_type'])
  assert {key: written[key] for key, rate in rates.items() if rate is not None} == {
    key: rate for key, rate in rates.items() if rate is not None
  }
  notes = training_differences({**others, **rates}, model)
  assert bool(notes) == any(want) and all('masks of T5' in note for note in notes)


def test_one_label_of_bert_is_a_regression():
  config = {k: v for k, v in VARIANTS['bert_regression'].items() if k != 'problem_type'}
  model = model_of(config)  # as transformers reads it
  assert model == model_of(VARIANTS['bert_regression'])
  assert model.build().regresses
  assert to_hf(model, family='bert')['problem_type'] == 'regression'


def test_a_tagger_has_no_problem_type():
  model = model_of({**VARIANTS['bert_tags'], 'problem_type': 'regression'})
  assert model.build().tags


@pytest.mark.parametrize('like', ['bert_regression', 'bert_multi_label', 'bert_classification'])
@pytest.mark.parametrize('name', ['bert_regression', 'bert_multi_label', 'bert_classification'])
def test_a_config_json_of_another_head_leaves_no_trace(name, like):
  written = to_hf(model_of(VARIANTS[name]), family='bert', like=VARIANTS[like])
  assert written.get('problem_type') == VARIANTS[name].get('problem_type')
  assert len(written['id2label']) == len(VARIANTS[name]['id2label'])


def test_a_family_is_not_written_as_its_relative():
  with raises(CheckpointError):
    to_hf(model_of(CONFIGS['umt5']), family='t5')


def test_class_names_of_bert_are_kept():
  names = ('bad', 'so', 'good')
  model = model_of(VARIANTS['bert_multi_label'])
  assert model.build().multi_label and model.options['class_names'] == names
  written = to_hf(model, family='bert')
  assert written['problem_type'] == 'multi_label_classification'
  assert written['id2label'] == {'0': 'bad', '1': 'so', '2': 'good'}
  unnamed = {**CONFIGS['bert_classification'], 'id2label': {'0': 'LABEL_0', '1': 'LABEL_1'}}
  assert 'class_names' not in model_of(unnamed).options
  # A model without names keeps the names in the config.json of `like`.
  plain = dataclasses.replace(model, options={**model.options, 'class_names': ()})
  like = to_hf(plain, family='bert', like=VARIANTS['bert_multi_label'])
  assert like['id2label'] == written['id2label']


def test_the_page_lists_the_keys_of_every_family():
  assert keys_table() in PAGE.read_text('utf-8'), (
    'docs/convert.md is out of date: put the output of python scripts/docs_tables.py keys into '
    'its section Keys'
  )
