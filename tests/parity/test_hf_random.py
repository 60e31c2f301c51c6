"""Random configurations of every family: logits are transformers', or the model is refused.

Each draw sets sizes and every option of the configuration class at random, impossible combinations
included.
"""

import collections
import copy
import re

import numpy as np
import pytest

torch = pytest.importorskip('torch')
transformers = pytest.importorskip('transformers')

from t5x_gpu.conversion import conversion
from t5x_gpu.conversion.hf.config_json import CONFIG_FAMILIES, from_hf
from t5x_gpu.conversion.hf.keys import NO_EFFECT
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.tensor_copy import ForeignWeights, Names
from t5x_gpu.errors import CheckpointError
from tests.conversion.hf_files import CONFIGS
from tests.parity.tolerances import HUGGING_FACE_LOGITS

NAMES = (
  't5',
  'umt5',
  'bert',
  'gpt2',
  'llama',
  'mistral',
  'qwen2',
  'qwen3',
  'gemma2',
  'gemma3_text',
  'smollm3',
  'olmo2',
  'phi3',
  'mixtral',
  'qwen3_moe',
)
DRAWS = 25  # of each family
_T5 = {
  'vocab_size': (61, 97),
  'd_model': (24, 36),
  'd_kv': (6, 10),
  'd_ff': (20, 33),
  'num_layers': (1, 2, 3),
  'num_decoder_layers': (None, 1, 2, 4),
  'num_heads': (3, 4),
  'relative_attention_num_buckets': (8, 16, 32),
  'relative_attention_max_distance': (20, 128),
  'layer_norm_epsilon': (1e-6, 1e-3),
  'feed_forward_proj': ('relu', 'gated-gelu', 'gated-silu', 'gelu', 'gated-relu'),
  'dropout_rate': (0.0, 0.1),
  'tie_word_embeddings': (True, False),
}
# Keys of the families that are not derived from Llama -> values.
OTHERS = {
  't5': {'architectures': (['T5ForConditionalGeneration'],), **_T5},
  'umt5': {'architectures': (['UMT5ForConditionalGeneration'],), **_T5},
  'bert': {
    'architectures': (
      ['BertForSequenceClassification'],
      ['BertForTokenClassification'],
      ['BertForMaskedLM'],
      ['BertModel'],
    ),
    'vocab_size': (61, 97),
    'hidden_size': (24, 36),
    'num_attention_heads': (3, 4),
    'num_hidden_layers': (1, 2, 3),
    'intermediate_size': (20, 33),
    'hidden_act': ('gelu', 'relu', 'gelu_new', 'silu'),
    'max_position_embeddings': (64, 150),
    'type_vocab_size': (1, 2, 3),
    'layer_norm_eps': (1e-12, 1e-3),
    'id2label': tuple({str(i): f'class {i}' for i in range(n)} for n in (1, 2, 5)),
    'problem_type': (
      None,
      None,
      'single_label_classification',
      'multi_label_classification',
      'regression',
    ),
  },
  'gpt2': {
    'architectures': (['GPT2LMHeadModel'],),
    'vocab_size': (61, 97),
    'n_embd': (24, 36),
    'n_head': (3, 4),
    'n_layer': (1, 2, 3),
    'n_inner': (None, 33),
    'n_positions': (64, 150),
    'activation_function': ('gelu_new', 'gelu', 'relu', 'silu'),
    'layer_norm_epsilon': (1e-5, 1e-3),
  },
}
_RARE_T5 = {
  'is_decoder': (True,),
  'decoder_start_token_id': (0, 3),
  'is_gated_act': (True, False),
  'scale_decoder_outputs': (True, False),
}
RARE = {
  't5': _RARE_T5,
  'umt5': {**_RARE_T5, 'scalable_attention': (True,)},
  'bert': {
    'num_labels': (1, 3),
    'is_decoder': (True,),
    'position_embedding_type': ('absolute', 'relative_key'),
    'tie_word_embeddings': (True, False),
  },
  'gpt2': {
    'scale_attn_by_inverse_layer_idx': (True, False),
    'scale_attn_weights': (True, False),
    'reorder_and_upcast_attn': (True,),
    'tie_word_embeddings': (True, False),
  },
}


class _Memory:
  """The tensors of a torch model, read like tensors in files."""

  def __init__(self, tensors):
    self._tensors = tensors
    self.shapes = {name: value.shape for name, value in tensors.items()}
    self.dtypes = {name: value.dtype for name, value in tensors.items()}

  def read(self, name, start=0, stop=None):
    return self._tensors[name][start:stop]


def _yarn(rng: np.random.Generator) -> dict:
  options = {
    'original_max_position_embeddings': 16,
    'beta_fast': rng.choice([2.0, 4.0, 32.0]),
    'beta_slow': rng.choice([0.5, 1.0]),
    'truncate': bool(rng.integers(2)),
    'attention_factor': 1.25,
    'mscale': 1.0,
    'mscale_all_dim': 0.5,
  }
  chosen = {key: value for key, value in options.items() if rng.random() < 0.5}
  return {'rope_type': 'yarn', 'factor': rng.choice([1.0, 4.0]), **chosen}


def _longrope(rng: np.random.Generator, config: dict) -> dict:
  head_dim = config['hidden_size'] // config['num_attention_heads']  # the supported value
  config.update(head_dim=head_dim, original_max_position_embeddings=16)
  factors = [rng.uniform(1, 8, head_dim // 2).tolist() for _ in range(2)]
  return {'type': 'longrope', 'short_factor': factors[0], 'long_factor': factors[1]}


def draw(name: str, rng: np.random.Generator) -> dict:
  """Returns a config.json of the family, which may be impossible."""

  def one_of(*values):
    return values[rng.integers(len(values))]

  if name in OTHERS:
    found = {key: one_of(*values) for key, values in OTHERS[name].items()}
    rare = {key: one_of(*values) for key, values in RARE[name].items() if rng.random() < 0.1}
    return with_others({'model_type': name, 'pad_token_id': 0, **found, **rare}, rng)
  heads, layers = one_of(3, 4, 6), one_of(1, 2, 3, 4)
  gemma = name.startswith('gemma')
  config = {
    'model_type': name,
    'architectures': CONFIGS[name]['architectures'],
    'pad_token_id': 0,
    'vocab_size': one_of(61, 97),
    'hidden_size': one_of(24, 36),
    'intermediate_size': one_of(20, 33),
    'num_hidden_layers': layers,
    'num_attention_heads': heads,
    'num_key_value_heads': one_of(1, heads, one_of(1, 3, heads // 2)),
    'head_dim': one_of(6, 10, 16),
    'tie_word_embeddings': one_of(True, False),
    'rms_norm_eps': one_of(1e-6, 1e-3),
    'rope_theta': one_of(10.0, 10000.0),
    'hidden_activation' if gemma else 'hidden_act': one_of('silu', 'gelu', 'gelu_pytorch_tanh'),
  }
  scaling = one_of(
    None,
    {'rope_type': 'linear', 'factor': 4.0},
    {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 16,
    },
    _yarn(rng),
    _yarn(rng),
    {'rope_type': 'dynamic', 'factor': 2.0},
  )
  if name == 'phi3':
    scaling = one_of(scaling, _longrope(rng, config))
  types = [one_of('full_attention', 'sliding_attention') for _ in range(layers)]
  options = {
    'max_position_embeddings': 64,
    'rope_scaling': scaling,
    'attention_bias': one_of(True, False),
    'mlp_bias': one_of(True, False),
    'sliding_window': one_of(None, 3, 7),
    'use_sliding_window': one_of(True, False),
    'max_window_layers': one_of(0, 1, 9),
    'layer_types': types,
    'partial_rotary_factor': one_of(0.5, 0.7, 1.0),
    'sliding_window_pattern': one_of(2, 3),
    'rope_local_base_freq': one_of(20.0, 10000.0),
    'no_rope_layers': [one_of(0, 1) for _ in range(layers)],
    'no_rope_layer_interval': one_of(1, 2, 3),
    'query_pre_attn_scalar': one_of(24, 10),
    'final_logit_softcapping': one_of(None, 3.0),
    'attn_logit_softcapping': one_of(None, 5.0),
    'attention_dropout': 0.1,
    'resid_pdrop': 0.1,
  }
  count = 'num_local_experts' if name == 'mixtral' else 'num_experts'
  other_count = 'num_experts' if name == 'mixtral' else 'num_local_experts'
  if name in ('mixtral', 'qwen3_moe'):
    options |= {
      count: one_of(1, 3, 5),
      other_count: one_of(3, 5),
      'num_experts_per_tok': one_of(1, 1, 2, 3),
      'moe_intermediate_size': one_of(7, 20),
      'norm_topk_prob': one_of(True, False),
      'decoder_sparse_step': one_of(1, 2),
      'mlp_only_layers': one_of(None, [], [0]),
      'router_aux_loss_coef': 0.1,
      'router_jitter_noise': 0.1,
    }
  rarely = {
    'layer_types': 0.2,
    count: 0.9,
    'num_experts_per_tok': 0.9,
    other_count: 0.1,
    'rope_scaling': 0.4,
    'partial_rotary_factor': 0.2,
    'mlp_bias': 0.3,
    'attn_logit_softcapping': 0.3,
  }
  likely = 0.8 if name in ('phi3', 'smollm3') else 0.5
  family = CONFIG_FAMILIES[name]
  for key, allowed in family.fixed.items():
    if key in options and rng.random() < 0.7:
      options[key] = allowed[0]
  chosen = {
    key: value
    for key, value in options.items()
    if rng.random() < (rarely.get(key, likely) if key in family.known else 0.005)
  }
  config |= chosen
  if rng.random() < 0.3:  # as transformers 5 writes it
    of_all = {'rope_theta': config.pop('rope_theta'), 'rope_type': 'default'}
    of_all |= config.pop('rope_scaling', None) or {}
    local = {'rope_theta': config.pop('rope_local_base_freq', 10.0), 'rope_type': 'default'}
    by_kind = {'full_attention': of_all, 'sliding_attention': local}
    config['rope_parameters'] = by_kind if name == 'gemma3_text' else of_all
  return with_others(config, rng)


# Keys that most files leave out -> a value, in any family that knows the key.
SELDOM = {
  'add_cross_attention': False,
  'attention_probs_dropout_prob': 0.2,
  'attn_pdrop': 0.2,
  'classifier_dropout': 0.2,
  'dense_act_fn': 'relu',
  'dtype': 'float32',
  'embd_pdrop': 0.2,
  'hidden_dropout_prob': 0.2,
  'initializer_range': 0.05,
  'n_ctx': 64,
  'original_max_position_embeddings': 16,
  'output_router_logits': True,
  'resid_pdrop': 0.2,
  'torch_dtype': 'float32',
}


def with_others(config: dict, rng: np.random.Generator) -> dict:
  """Returns `config` with some keys of its family that are seldom set."""
  family = CONFIG_FAMILIES[config['model_type']]
  others = dict(SELDOM)
  for key, allowed in family.fixed.items():  # transformers refuses null in some
    values = [value for value in allowed if value is not None] or [None]
    others[key] = values[rng.integers(len(values))]
  others |= {key: config[of] for key, of in family.repeats.items() if of in config}
  return config | {
    key: others[key]
    for key in sorted(family.known & others.keys() - config.keys())
    if rng.random() < 0.1
  }


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_every_key_with_an_effect_is_drawn(name):
  family = CONFIG_FAMILIES[name]
  drawn = {key for seed in range(400) for key in draw(name, np.random.default_rng((99, seed)))}
  assert family.known - family.no_effect - NO_EFFECT <= drawn


def their_model(config: dict, seed: int):
  """Returns transformers' model with random weights, norms and biases among them."""
  torch.manual_seed(seed)
  kind = type(transformers.AutoConfig.for_model(config['model_type']))
  made = kind.from_dict(copy.deepcopy(config))
  if 'num_experts_per_tok' in config:  # grouped ones need multiples of 16
    made._experts_implementation = 'eager'
  model = getattr(transformers, config['architectures'][0])._from_config(
    made, attn_implementation='eager'
  )
  if 't5' in config['model_type'] and not config['tie_word_embeddings']:
    model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
  with torch.no_grad():
    for parameter in model.parameters():
      parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.dim() == 1))
  return model.eval()


def tensors_of(config: dict, model) -> dict[str, np.ndarray]:
  """Returns the weights by their names in files, without copies and unsupported weights."""
  family = FAMILIES[config['model_type']]
  tensors = {name: value.numpy() for name, value in model.state_dict().items()}
  for pattern, new in family.renamed:
    tensors = {re.sub(pattern, new, name): value for name, value in tensors.items()}
  untied = config.get('tie_word_embeddings') is False
  copies = [name for name, _ in family.same if name != 'lm_head.weight' or not untied]
  return {
    name: value
    for name, value in tensors.items()
    if name not in copies and not any(re.fullmatch(p, name) for p in family.nothing)
  }


def compare(config: dict, seed: int) -> str:
  """Returns 'equal', or the reason for which the configuration is refused."""
  try:
    untied = config.get('tie_word_embeddings') is False
    fields = from_hf(config, has_tensor=lambda name: untied)
  except CheckpointError as e:
    assert e.fix
    return e.what
  try:
    theirs = their_model(config, seed)
  except ValueError as e:  # of a head that the architecture does not have
    assert 'problem_type' in str(e), e
    return 'refused by transformers'
  tensors = tensors_of(config, theirs)
  table = Table(FAMILIES[config['model_type']].rules_of(fields, tensors), fields.sizes())
  weights = ForeignWeights(table, _Memory(tensors), Names({name: name for name in table.uses}))
  if config['architectures'] != ['BertModel']:  # its pooler is not used
    assert table.their_shapes == {name: tuple(value.shape) for name, value in tensors.items()}
  params = conversion.params_of_files(weights)
  # Without a cache: transformers makes one by `layer_types`, even where the model ignores them.
  options = {'use_cache': False} if fields.kind == 'decoder_only' else {}
  for batch in conversion.random_batches(fields):
    index = conversion.counted(fields, batch)
    got = conversion.logits_of(fields.build(), params, batch)[index]
    want = conversion.torch_logits(theirs, fields, batch, **options)[index]
    np.testing.assert_allclose(got, want, rtol=HUGGING_FACE_LOGITS, atol=HUGGING_FACE_LOGITS)
  return 'equal'


@pytest.mark.slow
@pytest.mark.parametrize('name', NAMES)
def test_random_configurations_are_equal_or_refused(name):
  results = collections.Counter()
  for seed in range(DRAWS):
    config = draw(name, np.random.default_rng((NAMES.index(name), seed)))
    try:
      results[compare(config, seed)] += 1
    except Exception as e:
      raise AssertionError(f'draw {seed}: {config}') from e
  assert results['equal'] >= DRAWS // 6, results
