"""Converts Hugging Face's config.json into the fields of t5x_gpu models, and back.

`from_hf` reads one. `to_hf` writes one and reads it back: a field that the family does not have is
an error, never left out silently.
"""

import functools
from typing import Optional

from t5x_gpu.conversion.hf import rotary
from t5x_gpu.conversion.hf.families import BERT, GPT2, T5, UMT5
from t5x_gpu.conversion.hf.keys import ConfigFamily, HasTensor
from t5x_gpu.conversion.hf.llama import (
  GEMMA2,
  GEMMA3,
  LLAMA,
  MISTRAL,
  MIXTRAL,
  OLMO2,
  PHI3,
  QWEN2,
  QWEN3,
  QWEN3_MOE,
  SMOLLM3,
)
from t5x_gpu.conversion.model_spec import ModelFields, differences
from t5x_gpu.errors import CheckpointError, ModelError, did_you_mean
from t5x_gpu.models.config import DROPOUT_PLACES
from t5x_gpu.models.encoder import SINGLE_LABEL
from t5x_gpu.storage.json_schema import Json, JsonObject

CONFIG_FAMILIES: dict[str, ConfigFamily] = {
  't5': T5,
  'umt5': UMT5,
  'bert': BERT,
  'gpt2': GPT2,
  'llama': LLAMA,
  'mistral': MISTRAL,
  'qwen2': QWEN2,
  'qwen3': QWEN3,
  'gemma2': GEMMA2,
  'gemma3_text': GEMMA3,
  'smollm3': SMOLLM3,
  'olmo2': OLMO2,
  'phi3': PHI3,
  'mixtral': MIXTRAL,
  'qwen3_moe': QWEN3_MOE,
}
# Popular models that are refused: the reason, and what to do instead.
_EXPERTS = 'Supported families with experts: mixtral and qwen3_moe.'
_ENCODERS = 'Supported encoders: bert, which includes many models for embeddings and retrieval.'
_TEXT_TO_TEXT = 'Supported encoder-decoders: t5 (T5, T5.1.1, Flan-T5, UL2, ByT5), mt5 and umt5.'
_REFUSED = {
  'gemma3': (
    'a Gemma-3 that also reads images',
    'Use a checkpoint of the text model alone: gemma3_text (Gemma-3 270M and 1B are).',
  ),
  **dict.fromkeys(
    ('qwen2_moe', 'qwen3_next', 'deepseek_v3'), ('a model with shared experts', _EXPERTS)
  ),
  'gpt_oss': ('a model with attention sinks and MXFP4 experts', _EXPERTS),
  **dict.fromkeys(
    ('roberta', 'xlm-roberta', 'camembert'), ('an encoder whose positions begin at 2', _ENCODERS)
  ),
  'modernbert': ('an encoder whose first layer has no norm before attention', _ENCODERS),
  **dict.fromkeys(('deberta', 'deberta-v2'), ('an encoder with disentangled attention', _ENCODERS)),
  'longt5': ('a T5 with local or transient-global attention', _TEXT_TO_TEXT),
  't5gemma': ('an encoder-decoder whose encoder attends in windows to both sides', _TEXT_TO_TEXT),
}
# Keys of settings that differ by layer. They are written together: none is kept from `like`.
_LAYER_KEYS = (*rotary.READ, 'rope_local_base_freq', 'layer_types', 'sliding_window')
LAYERS = ('num_layers', 'num_decoder_layers', 'num_hidden_layers', 'n_layer')
_MAX_INT = 2**31
# Required types of keys, unless absent or null.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
  'a whole number from 0': (
    (int,),
    (
      'vocab_size d_model d_kv d_ff num_layers num_decoder_layers num_heads '
      'relative_attention_num_buckets relative_attention_max_distance hidden_size '
      'num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size '
      'max_position_embeddings type_vocab_size num_labels n_embd n_layer n_head n_inner '
      'n_positions n_ctx sliding_window max_window_layers sliding_window_pattern '
      'no_rope_layer_interval num_local_experts num_experts num_experts_per_tok '
      'moe_intermediate_size decoder_sparse_step'
    ),
  ),
  'a number': (
    (int, float),
    (
      'layer_norm_epsilon layer_norm_eps rms_norm_eps dropout_rate hidden_dropout_prob '
      'resid_pdrop attention_dropout attn_pdrop embd_pdrop attention_probs_dropout_prob '
      'classifier_dropout initializer_range query_pre_attn_scalar '
      'attn_logit_softcapping final_logit_softcapping rope_theta rope_local_base_freq '
      'partial_rotary_factor router_aux_loss_coef router_jitter_noise'
    ),
  ),
  'true or false': (
    (bool,),
    (
      'tie_word_embeddings scale_decoder_outputs mlp_bias attention_bias use_sliding_window '
      'norm_topk_prob output_router_logits'
    ),
  ),
  'text': ((str,), 'feed_forward_proj hidden_act hidden_activation activation_function'),
  'a list': ((list,), 'no_rope_layers mlp_only_layers'),
  'a list of text': ((list,), 'architectures layer_types'),
  'an object': ((dict,), 'rope_scaling rope_parameters id2label'),
}
_NOT_EXECUTED = 'Its auto_map names Python code in the folder, which is never executed here.'
_error = functools.partial(CheckpointError, docs='convert.md#families')
_mismatch = functools.partial(
  CheckpointError, fix='Use the config.json that came with the weights.'
)


def family_of(config: Json) -> str:
  """Returns the family of a config.json, a key of `hf.names.FAMILIES`.

  Raises:
    CheckpointError: the model is not supported, or values have the wrong type.
  """
  wrong = [
    f'{key} = {config[key]!r} (must be {kind})'
    for kind, (types, keys) in _TYPES.items()
    for key in keys.split()
    if config.get(key) is not None
    and not (
      isinstance(config[key], types)
      and (bool in types or not isinstance(config[key], bool))
      and (types != (int,) or 0 <= config[key] <= _MAX_INT)
      and (kind != 'a list of text' or all(isinstance(x, str) for x in config[key]))
    )
  ]
  if wrong:
    raise CheckpointError(
      f'config.json says {"; ".join(wrong)}.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#refused',
    )
  if quantised := config.get('quantization_config'):
    method = quantised.get('quant_method') if isinstance(quantised, dict) else quantised
    raise CheckpointError(
      f'config.json has quantization_config (quant_method = {method!r}): these are quantised '
      'weights.',
      fix='Convert the original model in float32, bfloat16 or float16.',
      docs='convert.md#refused',
    )
  model_type = config.get('model_type')
  if model_type is None:
    names = {*(config.get('architectures') or [])}
    likely = [f for f, c in CONFIG_FAMILIES.items() if names & {*c.architectures}] or ['...']
    raise _mismatch(
      'config.json has no model_type.', fix=f'Add it to config.json: "model_type": "{likely[0]}".'
    )
  family = 't5' if model_type == 'mt5' else str(model_type)
  if family in _REFUSED:
    raise _error(
      f'config.json says model_type = {model_type!r}: {_REFUSED[family][0]}, which is not '
      'supported.',
      fix=_REFUSED[family][1],
    )
  if family not in CONFIG_FAMILIES:
    raise _error(
      f'config.json says model_type = {model_type!r}, which is not supported.'
      + did_you_mean(family, CONFIG_FAMILIES)
      + (f' {_NOT_EXECUTED}' if 'auto_map' in config else ''),
      fix=f'Families: {", ".join(CONFIG_FAMILIES)} (t5 is T5, T5.1.1, mT5 and ByT5).',
    )
  known = CONFIG_FAMILIES[family].architectures
  architectures = config.get('architectures') or []
  if not set(architectures) & set(known):
    raise _error(
      f'config.json says architectures = {architectures}; supported for {model_type}: '
      f'{", ".join(known)}.',
      fix='Use a checkpoint with that head, or save one with transformers: '
      f'{known[0]}.from_pretrained(FOLDER).save_pretrained(OTHER_FOLDER).',
    )
  return family


def with_defaults(config: Json) -> JsonObject:
  """Returns `config` with transformers' defaults of the family for missing keys.

  Raises:
    CheckpointError: two keys that mean the same have different values.
  """
  reader = CONFIG_FAMILIES[family_of(config)]
  mt5 = {'feed_forward_proj': 'gated-gelu'} if config['model_type'] == 'mt5' else {}
  same = {reader.other_names[key]: key for key in reader.other_names.keys() & config.keys()}
  for key, other in same.items():
    if config.get(key, config[other]) != config[other]:
      raise _mismatch(
        f'config.json says {key} = {config[key]!r} and {other} = {config[other]!r}, two names of '
        'the same setting.'
      )
  return {**reader.defaults, **mt5, **config, **{key: config[k] for key, k in same.items()}}


def training_differences(config: Json, model: ModelFields) -> list[str]:
  """Returns sentences on how training `model` here differs from training with transformers.

  Args:
    config: config.json of the model.
    model: the model.
  """
  c, notes = model.config, []
  if 'auto_map' in config:
    notes.append('auto_map names Python code in the folder. It is not executed: the model is ours')
  if c.dropout_rate or any(getattr(c, place) for place in DROPOUT_PLACES):
    notes.append(
      'dropout has the rates and places of config.json, but the masks of T5: all positions of a '
      'row share one, and attention drops value vectors. transformers draws a mask for each number'
    )
  if c.num_experts:
    config = with_defaults(config)
    coefficient, used = config['router_aux_loss_coef'], config['output_router_logits']
    if coefficient:
      notes.append(
        f'router_aux_loss_coef = {coefficient:g} of config.json is ignored. transformers '
        f'adds that loss only with output_router_logits = true (here {str(used).lower()}), and '
        'counts the choices of all layers and rows together. Ours counts each layer and row alone: '
        'TransformerConfig.router_balance_loss = '
        f'{coefficient * c.num_experts_per_token / c.num_layers:.2g} has about the same weight'
      )
    if config.get('router_jitter_noise'):
      notes.append(
        f'router_jitter_noise = {config["router_jitter_noise"]:g} is not applied: routers here '
        'have no noise'
      )
  return notes


def from_hf(config: Json, *, has_tensor: HasTensor) -> ModelFields:
  """Returns the model that a config.json describes.

  Args:
    config: parsed config.json.
    has_tensor: (name) -> whether the files hold a tensor that is not a copy of another. For T5,
      nothing else shows whether logits are tied.
  Raises:
    CheckpointError: unknown family, missing keys, or values that t5x_gpu does not support.
  """
  family = family_of(config)
  reader = CONFIG_FAMILIES[family]
  unknown = [f'{key} = {value!r}' for key, value in config.items() if key not in reader.known]
  if unknown:
    raise CheckpointError(
      f'config.json of this {family} model has unknown keys: {", ".join(unknown)}.'
      + (f' {_NOT_EXECUTED}' if 'auto_map' in config else ''),
      fix='Remove the keys that do not affect the logits; the comparison of logits shows whether '
      'you are right. A model whose logits depend on one of them cannot be converted.',
      docs='convert.md#keys',
    )
  config = with_defaults(config)
  wrong = [
    f'{key} = {config[key]!r} (must be {" or ".join(map(repr, allowed))})'
    for key, allowed in reader.fixed.items()
    if config.get(key, allowed[0]) not in allowed
  ]
  wrong += [
    f'{key} = {config[key]!r} (must be {config.get(other)!r}, as {other})'
    for key, other in reader.repeats.items()
    if config.get(key, config.get(other)) != config.get(other)
  ]
  if wrong:
    raise _error(
      f'config.json of this {family} model says {"; ".join(wrong)}.',
      fix='Such a model cannot be converted.',
    )
  try:
    model = reader.read(config, has_tensor)
    model.build()  # checks the settings of its stacks
    return model
  except KeyError as e:
    raise _mismatch(f'config.json of this {family} model has no {e}.') from e
  except ModelError as e:
    raise _mismatch(f'config.json describes an impossible {family} model: {e.what}') from e
  except (TypeError, ValueError, ArithmeticError, IndexError) as e:  # null, or 0, where not allowed
    raise _mismatch(f'config.json of this {family} model has an invalid value: {e}.') from e


def to_hf(model: ModelFields, *, family: str, like: Optional[Json] = None) -> JsonObject:
  """Returns a config.json for `model`.

  Args:
    model: the model to describe.
    family: a key of `hf.names.FAMILIES`.
    like: a config.json of the same family; its other keys (token ids, label names) are kept.
  Raises:
    CheckpointError: lists all fields of the model that the family does not have.
  """
  # transformers' default pad_token_id may lie outside the token table.
  config = dict(like or {'pad_token_id': None})
  others = (*CONFIG_FAMILIES[family].other_names, *CONFIG_FAMILIES[family].repeats)
  for key in (*_LAYER_KEYS, 'original_max_position_embeddings', *others):
    config.pop(key, None)
  written = CONFIG_FAMILIES[family].write(model)
  if written['model_type'] != family:
    raise _error(
      f'This is a {written["model_type"]} model, and --family={family}.',
      fix=f'Set --family={written["model_type"]}, or leave it out.',
    )
  if 'id2label' in written:
    for key in ('num_labels', '_num_labels'):
      config.pop(key, None)
    if config.get('problem_type') != SINGLE_LABEL or 'problem_type' in written:
      config.pop('problem_type', None)
  if config.get('model_type') == 'mt5' and family == 't5':
    written.update(model_type='mt5', architectures=['MT5ForConditionalGeneration'])
  same_count = len(written.get('id2label', ())) == len(config.get('id2label') or ())
  if same_count and not model.options.get('class_names'):
    written = {key: value for key, value in written.items() if key not in ('id2label', 'label2id')}
  config.update(written)
  has_own_logits = not model.config.logits_via_embedding
  problems = differences(from_hf(config, has_tensor=lambda name: has_own_logits), model)
  if problems:
    raise _error(
      f'The {family} family of Hugging Face cannot describe this model:\n  '
      + '\n  '.join(
        f'{name} = {ours!r}, where {family} has {theirs!r}' for name, theirs, ours in problems
      ),
      fix=f'Set --family to the family of the model: {", ".join(CONFIG_FAMILIES)}. '
      'Other models cannot be converted.',
      parameters=[model.parameter(name) for name, _, _ in problems],
    )
  return config


def guess_family(model: ModelFields) -> str:
  """Returns the family that is most similar to `model`."""
  c = model.config
  if model.kind != 'decoder_only':
    text_to_text = 'umt5' if c.relative_bias == 'per_layer' else 't5'
    return 'bert' if model.kind == 'encoder' else text_to_text
  if c.norm == 'layer':
    return 'gpt2'
  if c.num_experts:
    return 'qwen3_moe' if c.qk_norm else 'mixtral'
  if c.norm_position == 'sandwich':
    return 'gemma3_text' if c.qk_norm else 'gemma2'
  if c.norm_position == 'output':
    return 'olmo2'
  if None in c.rope_of_layers:
    return 'smollm3'
  if any(rope.fraction != 1.0 for rope in c.rope_of_layers if rope):
    return 'phi3'
  if c.qk_norm:
    return 'qwen3'
  if c.attention_bias == 'qkv':
    return 'qwen2'
  return 'mistral' if any(c.windows) else 'llama'
