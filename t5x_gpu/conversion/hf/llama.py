"""Reads and writes config.json of Llama and the families derived from it, with experts or without.

A `Traits` lists how a family differs from Llama. One reader and one writer serve all families.
"""

import dataclasses
from collections.abc import Mapping
from typing import Optional

from t5x_gpu.conversion.hf import rotary
from t5x_gpu.conversion.hf.keys import (
  ALL_SEE_ALL,
  INIT_STDDEV,
  ONE_SWITCHED_WINDOW,
  ONE_WINDOW,
  ConfigFamily,
  HasTensor,
  Keys,
  LayerKinds,
  activation,
  dtype,
  every_second_layer,
  head_dim,
  kinds_by_type,
  kinds_by_window_pattern,
  kinds_from_max_window_layers,
  read_dropout,
  read_keys,
  shortest_period,
  their_activation,
  used,
  windows_without_rope,
  write_dropout,
  write_keys,
)
from t5x_gpu.conversion.hf.rotary import Rotary
from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.storage.json_schema import Json, JsonObject, JsonValue

_LLAMA: Keys = {
  'vocab_size': 'vocab_size',
  'embed_dim': 'hidden_size',
  'num_layers': 'num_hidden_layers',
  'num_heads': 'num_attention_heads',
  'mlp_dim': 'intermediate_size',
  'norm_epsilon': 'rms_norm_eps',
}
_DROPOUT: Keys = {'attention_dropout': 'attention_dropout'}
_WINDOW_KEYS = frozenset({'sliding_window', 'use_sliding_window', 'max_window_layers'})
_DEFAULTS: Json = {
  'attention_dropout': 0.0,
  'rms_norm_eps': 1e-6,
  'initializer_range': INIT_STDDEV,
  'tie_word_embeddings': False,
}

# The last two keys are in files of Phi-4 and SmolLM-2; transformers ignores them.
_FIXED: Mapping[str, tuple[JsonValue, ...]] = {
  'is_decoder': (False, True),
  'pruned_heads': ({}, None),
  'lm_head_bias': (False,),
  'rope_interleaved': (False,),
}


@dataclasses.dataclass(frozen=True)
class Traits:
  """How a family differs from Llama.

  Attributes:
    name: its `model_type`.
    architecture: its class in transformers.
    keys: further fields of TransformerConfig -> keys of config.json.
    fields: TransformerConfig fields with the same value in every model of the family. If
      'attention_bias' is not among them, it is read from config.json.
    layers: which layers have a window.
    rotary: how rotary positions are stored.
    activation: the key of the MLP's activation.
    dropout: dropout fields -> keys of config.json.
  """

  name: str
  architecture: str
  keys: Keys = dataclasses.field(default_factory=dict)
  fields: Json = dataclasses.field(default_factory=dict)
  layers: LayerKinds = ALL_SEE_ALL
  rotary: Rotary = rotary.ONE
  activation: str = 'hidden_act'
  dropout: Keys = dataclasses.field(default_factory=lambda: _DROPOUT)

  def read(self, config: Json, has_tensor: HasTensor) -> ModelFields:
    del has_tensor
    windows = self.layers.read(config)
    ropes = shortest_period(self.rotary.read(config, windows))
    if (key := self.keys.get('num_experts')) and not config[key]:
      raise CheckpointError(
        f'config.json says {key} = {config[key]}, but the layers of this family have experts.',
        fix='Use the config.json that came with the weights.',
        docs='convert.md#families',
      )
    fields = {
      'norm': 'rms',
      'query_pre_attn_scalar': head_dim(config),
      **({} if 'attention_bias' in self.fields else _read_bias(config)),
      **self.fields,
      **read_keys(config, {**_LLAMA, **self.keys}),
      **read_dropout(config, self.dropout),
    }
    c = TransformerConfig(
      num_kv_heads=config['num_key_value_heads'] or config['num_attention_heads'],
      head_dim=head_dim(config),
      mlp_activations=(activation(config[self.activation]), 'linear'),
      relative_bias='none',
      **({'rope': ropes[0]} if len(ropes) == 1 else {'ropes': ropes}),
      windows=shortest_period(windows),
      scale_tied_logits=False,
      logits_via_embedding=config['tie_word_embeddings'],
      init_stddev=config['initializer_range'],
      dtype=dtype(config),
      max_length=config['max_position_embeddings'] or 0,
      **fields,
    )
    return ModelFields('decoder_only', c)

  def write(self, model: ModelFields) -> JsonObject:
    c = dataclasses.replace(model.config, normalize_gates=model.config.gates_add_up)
    act = their_activation(c)
    windows, ropes = (
      [values[i % len(values)] for i in range(c.num_layers)]
      for values in (c.windows, c.rope_of_layers)
    )
    return {
      'architectures': [self.architecture],
      'model_type': self.name,
      **write_keys(c, {**_LLAMA, **self.keys}),
      'num_key_value_heads': c.kv_heads,
      'head_dim': c.head_dim,
      **({} if 'attention_bias' in self.fields else {'attention_bias': c.attention_bias == 'all'}),
      'tie_word_embeddings': c.logits_via_embedding,
      'initializer_range': c.init_stddev or INIT_STDDEV,
      self.activation: 'gelu_pytorch_tanh' if act == 'gelu_new' else act,
      **self.rotary.write(ropes, windows),
      **self.layers.write(windows),
      **write_dropout(c, self.dropout),
      **({'max_position_embeddings': c.max_length} if c.max_length else {}),
    }


def _read_bias(config: Json) -> dict[str, str]:
  return {'attention_bias': 'all' if config['attention_bias'] else 'none'}


def family(
  traits: Traits,
  defaults: Json,
  *,
  uses: frozenset[str] = frozenset(),
  no_effect: frozenset[str] = frozenset(),
  other_names: Optional[Keys] = None,
  repeats: Optional[Keys] = None,
  **fixed: tuple[JsonValue, ...],
) -> ConfigFamily:
  """Returns the family of `traits`; the other arguments are as in ConfigFamily."""
  own_bias = {} if 'attention_bias' in traits.fields else {'attention_bias': False}
  partial = {'partial_rotary_factor': (1.0,)}
  if 'partial_rotary_factor' in traits.rotary.defaults:
    partial = {}
  return ConfigFamily(
    (traits.architecture,),
    traits.read,
    traits.write,
    used({**_LLAMA, **traits.keys}, *traits.rotary.keys, *uses),
    {**_DEFAULTS, **traits.rotary.defaults, **own_bias, traits.activation: 'silu', **defaults},
    _FIXED | partial | fixed,
    no_effect | {'id2label', 'problem_type', 'add_cross_attention'},
    other_names or {},
    repeats or {},
  )


LLAMA = family(
  Traits('llama', 'LlamaForCausalLM', keys={'mlp_bias': 'mlp_bias'}),
  {
    'mlp_bias': False,
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': None,  # num_attention_heads
    'max_position_embeddings': 2048,
  },
  # transformers ignores windows of a Llama
  no_effect=_WINDOW_KEYS | {'layer_types', 'pretraining_tp'},
  activation=('swiglu',),  # Falcon-3 repeats `hidden_act` under this name
)
MISTRAL = family(
  Traits('mistral', 'MistralForCausalLM', fields={'attention_bias': 'none'}, layers=ONE_WINDOW),
  {
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': 8,
    'max_position_embeddings': 131072,
    'sliding_window': 4096,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'use_sliding_window', 'max_window_layers'}),
  attention_bias=(False,),
  mlp_bias=(False,),
)
_QWEN: Json = {
  'num_key_value_heads': 32,
  'max_position_embeddings': 32768,
  'use_sliding_window': False,
  'sliding_window': 4096,
  'max_window_layers': 28,
}
_QWEN_LAYERS = kinds_by_type(default=kinds_from_max_window_layers, switched=True)
QWEN2 = family(
  Traits('qwen2', 'Qwen2ForCausalLM', fields={'attention_bias': 'qkv'}, layers=_QWEN_LAYERS),
  {'head_dim': None, **_QWEN},  # hidden_size / num_attention_heads
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'attention_bias'}),  # queries, keys and values always have a bias
  use_mrope=(False,),
  mlp_bias=(False,),
)
QWEN3 = family(
  Traits('qwen3', 'Qwen3ForCausalLM', fields={'qk_norm': True}, layers=_QWEN_LAYERS),
  {'head_dim': 128, **_QWEN},
  uses=frozenset({'layer_types'}),
)
_GEMMA_KEYS: Keys = {
  'query_pre_attn_scalar': 'query_pre_attn_scalar',
  'attention_softcap': 'attn_logit_softcapping',
  'logits_softcap': 'final_logit_softcapping',
}
_GEMMA_FIELDS = {'norm': 'rms_plus_one', 'norm_position': 'sandwich', 'scale_embedding': True}
_GEMMA: Json = {
  'hidden_activation': 'gelu_pytorch_tanh',
  'head_dim': 256,
  'num_key_value_heads': 4,
  'query_pre_attn_scalar': 256,
  'sliding_window': 4096,
  'tie_word_embeddings': True,
}
GEMMA2 = family(
  Traits(
    'gemma2',
    'Gemma2ForCausalLM',
    keys=_GEMMA_KEYS,
    fields=_GEMMA_FIELDS,
    layers=kinds_by_type(default=every_second_layer),
    activation='hidden_activation',
  ),
  {
    **_GEMMA,
    'attn_logit_softcapping': 50.0,
    'final_logit_softcapping': 30.0,
    'max_position_embeddings': 8192,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'hidden_act', 'use_sliding_window'}),
  repeats={'sliding_window_size': 'sliding_window'},
  use_bidirectional_attention=(None, False),
)
GEMMA3 = family(
  Traits(
    'gemma3_text',
    'Gemma3ForCausalLM',
    keys={k: v for k, v in _GEMMA_KEYS.items() if k != 'attention_softcap'},
    fields={**_GEMMA_FIELDS, 'qk_norm': True, 'qk_norm_kind': 'head_plus_one'},
    layers=kinds_by_type(default=kinds_by_window_pattern),
    rotary=rotary.LOCAL_AND_GLOBAL,
    activation='hidden_activation',
  ),
  {
    **_GEMMA,
    'final_logit_softcapping': None,
    'max_position_embeddings': 131072,
    'sliding_window_pattern': 6,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'hidden_act', 'use_sliding_window', '_sliding_window_pattern'}),
  use_bidirectional_attention=(None, False),
  attn_logit_softcapping=(None,),  # transformers ignores it
)
SMOLLM3 = family(
  Traits(
    'smollm3',
    'SmolLM3ForCausalLM',
    keys={'mlp_bias': 'mlp_bias'},
    layers=kinds_by_type(default=windows_without_rope, switched=True),
    rotary=rotary.IN_SOME_LAYERS,
  ),
  {
    'mlp_bias': False,
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': 4,
    'max_position_embeddings': 32768,
    'use_sliding_window': False,
    'sliding_window': None,
    'tie_word_embeddings': True,
  },
  uses=frozenset({'layer_types'}),
  no_effect=frozenset({'max_window_layers', 'pretraining_tp'}),
)
OLMO2 = family(
  Traits(
    'olmo2',
    'Olmo2ForCausalLM',
    fields={'norm_position': 'output', 'qk_norm': True, 'qk_norm_kind': 'all_heads'},
  ),
  {
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': None,  # num_attention_heads
    'max_position_embeddings': 2048,
    'rms_norm_eps': 1e-5,
  },
  no_effect=_WINDOW_KEYS | {'layer_types'},  # transformers ignores windows of an OLMo-2
)
PHI3 = family(
  Traits(
    'phi3',
    'Phi3ForCausalLM',
    fields={'attention_bias': 'none'},
    layers=ONE_WINDOW,
    rotary=rotary.PARTIAL,
    dropout={**_DROPOUT, 'residual_dropout': 'resid_pdrop'},
  ),
  {
    'head_dim': None,  # hidden_size / num_attention_heads
    'num_key_value_heads': None,  # num_attention_heads
    'max_position_embeddings': 4096,
    'rms_norm_eps': 1e-5,
    'sliding_window': None,
    'resid_pdrop': 0.0,
  },
  uses=frozenset({'layer_types'}),
  # transformers does not drop embeddings, and has its own code for the model
  no_effect=frozenset({'auto_map', 'embd_pdrop', 'use_sliding_window'}),
  attention_bias=(False,),
  mlp_bias=(False,),
  # every layer attends to all positions, without further position scaling
  full_attn_mod=(1,),
  interpolate_factor=(1,),
)


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
    layers=ONE_WINDOW,
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
    layers=ONE_SWITCHED_WINDOW,
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
