"""The config.json files as published are read, and describe the models of gin_configs/models.

Only the keys: token ids and versions that every family has are left out.
"""

import math
import pathlib

import pytest

from t5x_gpu.conversion.hf.config_json import from_hf
from t5x_gpu.conversion.model_spec import differences
from t5x_gpu.convert import model_of_gin

MODELS = pathlib.Path(__file__).parents[3] / 'gin_configs' / 'models'


def config(model_type, architecture, sizes, **others):
  """Returns a config.json.

  Args:
    model_type, architecture: keys of these names.
    sizes: hidden, MLP, layers, heads, key and value heads, vocabulary.
    **others: the other keys.
  """
  names = (
    'hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads '
    'vocab_size'
  )
  return {
    'architectures': [architecture],
    'model_type': model_type,
    'attention_dropout': 0.0,
    'initializer_range': 0.02,
    'torch_dtype': 'bfloat16',
    'use_cache': True,
    **dict(zip(names.split(), sizes, strict=True)),
    **others,
  }


_MISTRAL = dict(hidden_act='silu', rms_norm_eps=1e-5, tie_word_embeddings=False)
_QWEN = dict(
  hidden_act='silu',
  max_window_layers=28,
  rms_norm_eps=1e-6,
  rope_theta=1000000.0,
  use_mrope=False,
  use_sliding_window=False,
)
_GEMMA = dict(
  attention_bias=False,
  attn_logit_softcapping=None,
  cache_implementation='hybrid',
  final_logit_softcapping=None,
  head_dim=256,
  hidden_activation='gelu_pytorch_tanh',
  max_position_embeddings=32768,
  query_pre_attn_scalar=256,
  rms_norm_eps=1e-6,
  rope_local_base_freq=10000,
  rope_scaling=None,
  rope_theta=1000000,
  sliding_window=512,
)
_OLMO = dict(
  attention_bias=False,
  hidden_act='silu',
  max_position_embeddings=4096,
  rms_norm_eps=1e-6,
  rope_scaling=None,
  rope_theta=500000,
  tie_word_embeddings=False,
)
_PHI = dict(
  attention_bias=False,
  embd_pdrop=0.0,
  hidden_act='silu',
  resid_pdrop=0.0,
  rms_norm_eps=1e-5,
  rope_scaling=None,
  tie_word_embeddings=False,
)
_EXPERTS = dict(hidden_act='silu', output_router_logits=False, tie_word_embeddings=False)
_KINDS = ['sliding_attention'] * 5 + ['full_attention']
CONFIGS = {
  'mistral_7b': config(
    'mistral',
    'MistralForCausalLM',
    (4096, 14336, 32, 32, 8, 32000),
    max_position_embeddings=32768,
    rope_theta=10000.0,
    sliding_window=4096,
    **_MISTRAL,
  ),
  'mistral_7b_v0_3': config(
    'mistral',
    'MistralForCausalLM',
    (4096, 14336, 32, 32, 8, 32768),
    max_position_embeddings=32768,
    rope_theta=1000000.0,
    sliding_window=None,
    **_MISTRAL,
  ),
  'qwen2_5_0_5b': config(
    'qwen2',
    'Qwen2ForCausalLM',
    (896, 4864, 24, 14, 2, 151936),
    max_position_embeddings=32768,
    sliding_window=32768,
    tie_word_embeddings=True,
    **_QWEN,
  ),
  'qwen2_5_7b': config(
    'qwen2',
    'Qwen2ForCausalLM',
    (3584, 18944, 28, 28, 4, 152064),
    max_position_embeddings=131072,
    sliding_window=131072,
    tie_word_embeddings=False,
    **_QWEN,
  ),
  'gemma3_270m': config(
    'gemma3_text',
    'Gemma3ForCausalLM',
    (640, 2048, 18, 4, 1, 262144),
    _sliding_window_pattern=6,
    layer_types=_KINDS * 3,
    use_bidirectional_attention=False,
    **_GEMMA,
  ),
  'gemma3_1b': config(
    'gemma3_text',
    'Gemma3ForCausalLM',
    (1152, 6912, 26, 4, 1, 262144),
    sliding_window_pattern=6,
    **_GEMMA,
  ),
  'smollm3_3b': config(
    'smollm3',
    'SmolLM3ForCausalLM',
    (2048, 11008, 36, 16, 4, 128256),
    attention_bias=False,
    hidden_act='silu',
    layer_types=['full_attention'] * 36,
    max_position_embeddings=65536,
    max_window_layers=28,
    mlp_bias=False,
    no_rope_layer_interval=4,
    no_rope_layers=[1, 1, 1, 0] * 9,
    pretraining_tp=2,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=5000000.0,
    sliding_window=None,
    use_sliding_window=False,
  ),
  'olmo2_1b': config('olmo2', 'Olmo2ForCausalLM', (2048, 8192, 16, 16, 16, 100352), **_OLMO),
  'olmo2_7b': config('olmo2', 'Olmo2ForCausalLM', (4096, 11008, 32, 32, 32, 100352), **_OLMO),
  'phi3_mini': config(
    'phi3',
    'Phi3ForCausalLM',
    (3072, 8192, 32, 32, 32, 32064),
    auto_map={'AutoConfig': 'configuration_phi3.Phi3Config'},
    max_position_embeddings=4096,
    original_max_position_embeddings=4096,
    rope_theta=10000.0,
    sliding_window=2047,
    **_PHI,
  ),
  'phi4': config(
    'phi3',
    'Phi3ForCausalLM',
    (5120, 17920, 40, 40, 10, 100352),
    max_position_embeddings=16384,
    original_max_position_embeddings=16384,
    rope_theta=250000,
    sliding_window=None,
    **_PHI,
  ),
  'mixtral_8x7b': config(
    'mixtral',
    'MixtralForCausalLM',
    (4096, 14336, 32, 32, 8, 32000),
    max_position_embeddings=32768,
    num_experts_per_tok=2,
    num_local_experts=8,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    **_EXPERTS,
  ),
  'qwen3_moe_30b_a3b': config(
    'qwen3_moe',
    'Qwen3MoeForCausalLM',
    (2048, 6144, 48, 32, 4, 151936),
    attention_bias=False,
    decoder_sparse_step=1,
    head_dim=128,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_experts=128,
    num_experts_per_tok=8,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    use_sliding_window=False,
    **_EXPERTS,
  ),
}


# Of UMT5 and its relatives: nothing but the tensors shows whether logits are tied.
_T5 = dict(
  d_kv=64,
  decoder_start_token_id=0,
  dropout_rate=0.1,
  eos_token_id=1,
  initializer_factor=1.0,
  is_encoder_decoder=True,
  layer_norm_epsilon=1e-6,
  output_past=True,
  pad_token_id=0,
  relative_attention_max_distance=128,
  relative_attention_num_buckets=32,
  tie_word_embeddings=False,
  tokenizer_class='T5Tokenizer',
  use_cache=True,
)


@pytest.mark.parametrize(
  'name, others',
  [
    (
      'umt5_small',
      dict(
        architectures=['UMT5ForConditionalGeneration'],
        model_type='umt5',
        vocab_size=256384,
        num_heads=6,
        d_ff=1024,
        feed_forward_proj='gated-gelu',
        dense_act_fn='gelu_new',
        is_gated_act=True,
        scalable_attention=True,
        classifier_dropout=0.0,
      ),
    ),
    (
      't5_1_1_small',  # Flan-T5
      dict(
        architectures=['T5ForConditionalGeneration'],
        model_type='t5',
        vocab_size=32128,
        num_heads=6,
        d_ff=1024,
        feed_forward_proj='gated-gelu',
        n_positions=512,
        task_specific_params={'summarization': {'num_beams': 4}},
      ),
    ),
  ],
)
def test_published_configs_of_text_to_text_models_are_read(name, others):
  config = {**_T5, 'd_model': 512, 'num_layers': 8, 'num_decoder_layers': 8, **others}
  model = from_hf(config, has_tensor=lambda tensor: True)
  assert differences(model, model_of_gin([MODELS / f'{name}.gin'])) == []


@pytest.mark.parametrize('name', CONFIGS)
def test_a_published_config_describes_the_model_of_its_gin_file(name):
  model = from_hf(CONFIGS[name], has_tensor=lambda tensor: False)
  assert differences(model, model_of_gin([MODELS / f'{name}.gin'])) == []


def test_the_published_config_of_ul2_is_read():
  config = {
    **_T5,
    'architectures': ['T5ForConditionalGeneration'],
    'model_type': 't5',
    'vocab_size': 32128,
    'd_model': 4096,
    'd_ff': 16384,
    'd_kv': 256,
    'num_heads': 16,
    'num_layers': 32,
    'num_decoder_layers': 32,
    'feed_forward_proj': 'gated-silu',
  }
  read = from_hf(config, has_tensor=lambda tensor: True)
  assert read.config.mlp_activations == ('silu', 'linear')
  sizes = map(math.prod, read.abstract_shapes().values())
  assert sum(sizes) == 19_459_613_696 + 32128 * 4096  # 19.5B (Tay et al. 2022) and the logits
