"""Models of Hugging Face on disk, made without its libraries: small, random, of every family."""

import json
import pathlib
from collections.abc import Container, Mapping
from typing import Any, Optional

import numpy as np

from t5x_gpu.conversion.hf.config_json import family_of, from_hf
from t5x_gpu.conversion.hf.names import FAMILIES
from t5x_gpu.conversion.name_table import Table
from t5x_gpu.conversion.safetensors_io import SafetensorsWriter, make_headers
from t5x_gpu.conversion.tensor_copy import FLOATS

VOCAB = 96
_T5 = {
  'vocab_size': VOCAB,
  'd_model': 32,
  'd_kv': 8,
  'd_ff': 48,
  'num_layers': 2,
  'num_decoder_layers': 3,
  'num_heads': 4,
  'decoder_start_token_id': 0,
  'pad_token_id': 0,
}
_BERT = {
  'model_type': 'bert',
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'intermediate_size': 48,
  'hidden_act': 'gelu',
  'max_position_embeddings': 64,
  'type_vocab_size': 2,
  'layer_norm_eps': 1e-12,
  'pad_token_id': 0,
}
_LLAMA = {
  'vocab_size': VOCAB,
  'hidden_size': 32,
  'num_hidden_layers': 2,
  'num_attention_heads': 4,
  'num_key_value_heads': 2,
  'head_dim': 16,
  'intermediate_size': 48,
  'hidden_act': 'silu',
  'rms_norm_eps': 1e-5,
  'tie_word_embeddings': False,
}

# What config.json says, as transformers 4 writes it: 5 reads both, and writes its own.
CONFIGS: dict[str, dict[str, Any]] = {
  't5': {
    **_T5,
    'model_type': 't5',
    'architectures': ['T5ForConditionalGeneration'],
    'feed_forward_proj': 'relu',
  },
  't5_1_1': {
    **_T5,
    'model_type': 't5',
    'architectures': ['T5ForConditionalGeneration'],
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'mt5': {
    **_T5,
    'model_type': 'mt5',
    'architectures': ['MT5ForConditionalGeneration'],
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'umt5': {
    **_T5,
    'model_type': 'umt5',
    'architectures': ['UMT5ForConditionalGeneration'],
    'feed_forward_proj': 'gated-gelu',
    'tie_word_embeddings': False,
  },
  'bert_classification': {
    **_BERT,
    'architectures': ['BertForSequenceClassification'],
    'id2label': {'0': 'bad', '1': 'so', '2': 'good'},
    'label2id': {'bad': 0, 'so': 1, 'good': 2},
  },
  'bert_mlm': {**_BERT, 'architectures': ['BertForMaskedLM']},
  'gpt2': {
    'model_type': 'gpt2',
    'architectures': ['GPT2LMHeadModel'],
    'vocab_size': VOCAB,
    'n_embd': 32,
    'n_layer': 2,
    'n_head': 4,
    'n_positions': 64,
    'eos_token_id': 1,
    'bos_token_id': 1,
  },
  'llama': {
    **_LLAMA,
    'model_type': 'llama',
    'architectures': ['LlamaForCausalLM'],
    'rope_theta': 500000.0,
    'max_position_embeddings': 128,
    'rope_scaling': {
      'rope_type': 'llama3',
      'factor': 8.0,
      'low_freq_factor': 1.0,
      'high_freq_factor': 4.0,
      'original_max_position_embeddings': 16,
    },
  },
  'gemma2': {
    **_LLAMA,
    'model_type': 'gemma2',
    'architectures': ['Gemma2ForCausalLM'],
    'hidden_activation': 'gelu_pytorch_tanh',
    'num_hidden_layers': 4,
    'sliding_window': 8,
    'query_pre_attn_scalar': 24,
    'attn_logit_softcapping': 5.0,
    'final_logit_softcapping': 3.0,
    'tie_word_embeddings': True,
  },
  'gemma3_text': {
    **_LLAMA,
    'model_type': 'gemma3_text',
    'architectures': ['Gemma3ForCausalLM'],
    'hidden_activation': 'gelu_pytorch_tanh',
    'num_hidden_layers': 4,
    'num_key_value_heads': 1,
    'sliding_window': 8,
    'sliding_window_pattern': 3,
    'query_pre_attn_scalar': 24,
    'rope_theta': 500.0,
    'rope_local_base_freq': 20.0,
    'rope_scaling': {'rope_type': 'linear', 'factor': 8.0},
    'tie_word_embeddings': True,
  },
  'smollm3': {
    **_LLAMA,
    'model_type': 'smollm3',
    'architectures': ['SmolLM3ForCausalLM'],
    'num_hidden_layers': 3,
    'no_rope_layers': [1, 0, 1],
    'pad_token_id': 0,
    'rope_theta': 5000.0,
  },
  'olmo2': {
    **_LLAMA,
    'model_type': 'olmo2',
    'architectures': ['Olmo2ForCausalLM'],
    'rms_norm_eps': 1e-6,
  },
  'phi3': {
    **_LLAMA,
    'model_type': 'phi3',
    'architectures': ['Phi3ForCausalLM'],
    'partial_rotary_factor': 0.5,
    'pad_token_id': 0,
  },
  'mistral': {
    **{k: v for k, v in _LLAMA.items() if k != 'head_dim'},
    'model_type': 'mistral',
    'architectures': ['MistralForCausalLM'],
    'hidden_size': 36,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'sliding_window': 8,
  },
  'qwen2': {
    **{k: v for k, v in _LLAMA.items() if k != 'head_dim'},
    'model_type': 'qwen2',
    'architectures': ['Qwen2ForCausalLM'],
    'num_key_value_heads': 1,
    'use_sliding_window': False,
    'sliding_window': 8,
    'max_window_layers': 1,
    'rope_theta': 1e6,
    'use_mrope': False,
  },
  'qwen3': {
    **_LLAMA,
    'model_type': 'qwen3',
    'architectures': ['Qwen3ForCausalLM'],
    'tie_word_embeddings': True,
    'rope_theta': 1e6,
  },
  'mixtral': {
    **{k: v for k, v in _LLAMA.items() if k != 'head_dim'},
    'model_type': 'mixtral',
    'architectures': ['MixtralForCausalLM'],
    'num_local_experts': 4,
    'num_experts_per_tok': 2,
    'sliding_window': None,
    'output_router_logits': False,
    'router_aux_loss_coef': 0.02,
  },
  'qwen3_moe': {
    **_LLAMA,
    'model_type': 'qwen3_moe',
    'architectures': ['Qwen3MoeForCausalLM'],
    'num_key_value_heads': 1,
    'intermediate_size': 40,
    'moe_intermediate_size': 24,
    'num_experts': 5,
    'num_experts_per_tok': 3,
    'norm_topk_prob': True,
    'decoder_sparse_step': 1,
    'mlp_only_layers': [],
    'use_sliding_window': False,
    'sliding_window': None,
    'rope_theta': 1e6,
  },
}


# Awkward ones too: odd vocabularies, heads of other sizes than hidden / heads, every option.
VARIANTS = {
  **CONFIGS,
  'gpt2_wide': {**CONFIGS['gpt2'], 'n_inner': 40, 'activation_function': 'gelu'},
  'llama_biased': {
    **CONFIGS['llama'],
    'attention_bias': True,
    'mlp_bias': True,
    'tie_word_embeddings': True,
    'rope_scaling': {'rope_type': 'linear', 'factor': 4.0},
  },
  'qwen3_windows': {
    **CONFIGS['qwen3'],
    'num_hidden_layers': 3,
    'use_sliding_window': True,
    'sliding_window': 6,
    'max_window_layers': 1,
    'attention_bias': True,
  },
  'mistral_without_windows': {
    **CONFIGS['mistral'],
    'vocab_size': 97,
    'head_dim': 10,
    'sliding_window': None,
    'tie_word_embeddings': True,
  },
  'qwen2_windows': {
    **CONFIGS['qwen2'],
    'vocab_size': 97,
    'head_dim': 10,
    'num_hidden_layers': 3,
    'use_sliding_window': True,
    'tie_word_embeddings': True,
  },
  'gemma3_without_kinds': {
    **CONFIGS['gemma3_text'],
    'vocab_size': 97,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
    'head_dim': 10,
    'final_logit_softcapping': 3.0,
    'attention_bias': True,
    'layer_types': ['full_attention'] * 4,
    'tie_word_embeddings': False,
  },
  'smollm3_windows': {
    **CONFIGS['smollm3'],
    'vocab_size': 97,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'head_dim': 10,
    'num_hidden_layers': 4,
    'no_rope_layers': None,
    'no_rope_layer_interval': 2,
    'use_sliding_window': True,
    'sliding_window': 6,
    'attention_bias': True,
    'mlp_bias': True,
    'tie_word_embeddings': True,
  },
  'olmo2_biased': {
    **CONFIGS['olmo2'],
    'vocab_size': 97,
    'num_attention_heads': 3,
    'num_key_value_heads': 3,
    'head_dim': 10,
    'hidden_size': 30,
    'attention_bias': True,
    'tie_word_embeddings': True,
  },
  'phi3_windows': {
    **CONFIGS['phi3'],
    'vocab_size': 97,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'head_dim': 10,
    'partial_rotary_factor': 1.0,
    'sliding_window': 6,
    'tie_word_embeddings': True,
  },
  'llama_yarn': {
    **CONFIGS['llama'],
    'rope_theta': 500.0,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 4.0,
      'original_max_position_embeddings': 16,
      'beta_fast': 4.0,
      'mscale': 1.0,
      'mscale_all_dim': 0.5,
      'truncate': False,
    },
  },
  'llama_dynamic': {**CONFIGS['llama'], 'rope_scaling': {'type': 'dynamic', 'factor': 2.0}},
  'gemma3_yarn': {
    **CONFIGS['gemma3_text'],
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 8.0,
      'original_max_position_embeddings': 16,
      'beta_slow': 0.25,
      'beta_fast': 2.0,
    },
  },
  'smollm3_yarn': {
    **CONFIGS['smollm3'],
    'rope_theta': 500.0,
    'rope_scaling': {
      'rope_type': 'yarn',
      'factor': 4.0,
      'original_max_position_embeddings': 16,
      'beta_fast': 4.0,
      'attention_factor': 1.25,
    },
  },
  'phi3_longrope': {
    **CONFIGS['phi3'],
    'head_dim': 8,
    'max_position_embeddings': 48,
    'original_max_position_embeddings': 12,
    'rope_scaling': {'type': 'longrope', 'short_factor': [1.0, 1.25], 'long_factor': [2.0, 6.5]},
  },
  'mixtral_windows': {
    **CONFIGS['mixtral'],
    'vocab_size': 97,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'head_dim': 10,
    'num_local_experts': 3,
    'num_experts_per_tok': 1,
    'sliding_window': 6,
    'tie_word_embeddings': True,
  },
  'qwen3_moe_windows': {
    **{k: v for k, v in CONFIGS['qwen3_moe'].items() if k not in ('head_dim', 'num_experts')},
    'vocab_size': 97,
    'hidden_size': 36,
    'num_attention_heads': 6,
    'num_key_value_heads': 3,
    'num_local_experts': 6,
    'norm_topk_prob': False,
    'use_sliding_window': True,
    'sliding_window': 6,
    'attention_bias': True,
    'tie_word_embeddings': True,
  },
  'bert_relu': {**CONFIGS['bert_classification'], 'hidden_act': 'relu'},
  'bert_tags': {
    **CONFIGS['bert_classification'],
    'architectures': ['BertForTokenClassification'],
    'id2label': {'0': 'O', '1': 'B-PER', '2': 'I-PER'},
    'label2id': {'O': 0, 'B-PER': 1, 'I-PER': 2},
  },
  'bert_embedding': {**CONFIGS['bert_mlm'], 'architectures': ['BertModel']},
  'bert_multi_label': {
    **CONFIGS['bert_classification'],
    'problem_type': 'multi_label_classification',
  },
  'bert_regression': {
    **CONFIGS['bert_classification'],
    'problem_type': 'regression',
    'id2label': {'0': 'LABEL_0'},
    'label2id': {'LABEL_0': 0},
  },
  'umt5_tied': {
    **{k: v for k, v in CONFIGS['umt5'].items() if k != 'tie_word_embeddings'},
    'feed_forward_proj': 'relu',
    'd_kv': 6,
  },
  't5_silu': {**CONFIGS['t5_1_1'], 'feed_forward_proj': 'gated-silu'},
}


def untied(config: Mapping[str, Any]) -> bool:
  """Whether the files have an output layer of their own."""
  return config.get('tie_word_embeddings') is False


def table_of(config: Mapping[str, Any], *, names: Container[str] = ()) -> Table:
  """Returns the table of a model in files with tensors of these names."""
  model = from_hf(config, has_tensor=lambda name: untied(config))
  return Table(FAMILIES[family_of(config)].rules_of(model, names), model.sizes())


def random_tensors(
  config: Mapping[str, Any], *, dtype: str = 'float32', seed: int = 0, names: Container[str] = ()
) -> dict[str, np.ndarray]:
  """Returns every tensor of the model, none of them zero or one throughout."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(FLOATS[dtype])
    for name, shape in table_of(config, names=names).their_shapes.items()
  }


def write_model(
  folder: pathlib.Path,
  config: Mapping[str, Any],
  tensors: Optional[Mapping[str, np.ndarray]] = None,
  *,
  max_file_bytes: int = 10**9,
  **options: Any,
) -> dict[str, np.ndarray]:
  """Writes config.json and the weights, random unless given; returns the tensors."""
  folder.mkdir(parents=True, exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config, indent=1))
  tensors = dict(tensors or random_tensors(config, **options))
  writer = SafetensorsWriter(
    folder,
    make_headers(
      [(name, value.dtype, value.shape) for name, value in tensors.items()],
      max_file_bytes=max_file_bytes,
    ),
  )
  for name, value in tensors.items():
    writer.write(name, 0, value)
  return tensors


def files_of(folder: pathlib.Path) -> dict[str, bytes]:
  """Returns every file of a folder, by its path in it."""
  return {
    p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob('*') if p.is_file()
  }
