"""Reads and writes config.json of mixture-of-experts families: Mixtral, Qwen-3-MoE."""

import dataclasses

from t5x_gpu.checkpoint.convert.hf import layer_kinds, rotary
from t5x_gpu.checkpoint.convert.hf.keys import Json, Keys
from t5x_gpu.checkpoint.convert.hf.llama import Traits, family

_KEYS: Keys = {'num_experts_per_token': 'num_experts_per_tok'}
# transformers computes every expert that a token chooses, so no token is dropped.
_FIELDS = {'expert_capacity_factor': None}
# Used only in training; transformers adds the loss only with `output_router_logits`.
_TRAINING: Json = {'router_aux_loss_coef': 0.001, 'output_router_logits': False}

MIXTRAL = family(
  Traits(
    'mixtral',
    'MixtralForCausalLM',
    keys={**_KEYS, 'num_experts': 'num_local_experts'},
    fields={**_FIELDS, 'normalize_gates': True, 'attention_bias': 'none'},
    layers=layer_kinds.ONE_WINDOW,
    rotary=dataclasses.replace(rotary.ONE, defaults={'rope_theta': 1e6}),
  ),
  {
    **_TRAINING,
    'router_jitter_noise': 0.0,
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': 8,
    'max_position_embeddings': 131072,
    'rms_norm_eps': 1e-5,
    'sliding_window': None,
    'num_local_experts': 8,
    'num_experts_per_tok': 2,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'use_sliding_window', 'max_window_layers'}),
  other_names={'num_experts': 'num_local_experts'},
  attention_bias=(False,),
  mlp_bias=(False,),
)
QWEN3_MOE = family(
  Traits(
    'qwen3_moe',
    'Qwen3MoeForCausalLM',
    keys={
      **_KEYS,
      'num_experts': 'num_experts',
      'mlp_dim': 'moe_intermediate_size',
      'normalize_gates': 'norm_topk_prob',
    },
    fields={**_FIELDS, 'qk_norm': True},
    layers=layer_kinds.ONE_SWITCHED_WINDOW,
  ),
  {
    **_TRAINING,
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': 4,
    'max_position_embeddings': 32768,
    'use_sliding_window': False,
    'sliding_window': 4096,
    'moe_intermediate_size': 768,
    'num_experts': 128,
    'num_experts_per_tok': 8,
    'norm_topk_prob': False,
  },
  uses=frozenset({'layer_types'}),
  # `intermediate_size` is the MLP size of layers without experts
  no_effect=frozenset({'intermediate_size', 'max_window_layers'}),
  other_names={'num_local_experts': 'num_experts'},  # renamed in transformers 5
  decoder_sparse_step=(1,),
  mlp_only_layers=([], None),
  # Keys of published files that transformers ignores.
  qkv_bias=(False,),
  use_qk_norm=(True,),
  shared_expert_intermediate_size=(0, None),
)
