"""Shared by the readers of all families: tables of keys, activations, and sizes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.models.config import TransformerConfig

# transformers' names -> t5x_gpu's. transformers' 'gelu' is exact; t5x_gpu's is the tanh
# approximation.
ACTIVATIONS = {
  'relu': 'relu',
  'silu': 'silu',
  'swish': 'silu',
  'gelu': 'gelu_exact',
  'gelu_new': 'gelu',
  'gelu_pytorch_tanh': 'gelu',
  'gelu_fast': 'gelu',
}
THEIR_ACTIVATIONS = {'relu': 'relu', 'silu': 'silu', 'gelu_exact': 'gelu', 'gelu': 'gelu_new'}
INIT_STDDEV = 0.02  # the default of initializer_range

Json = Mapping[str, Any]
HasTensor = Callable[[str], bool]
Keys = Mapping[str, str]  # field of TransformerConfig -> key of config.json


@dataclasses.dataclass(frozen=True)
class ConfigFamily:
  """How to read and write the config.json of a family.

  Attributes:
    architectures: supported architectures; errors suggest the first.
    read: (config.json, has_tensor) -> the model. `has_tensor(name)` returns whether the files hold
      a tensor that is not a copy of another.
    write: the model -> the keys that describe it.
    used: keys that `read` reads, in addition to `fixed` and `defaults`.
    defaults: key -> transformers' value if the key is missing. A null is not missing.
    fixed: key -> the supported values, if the key is present.
    no_effect: further keys that do not affect this family's logits.
    other_names: alias -> the key of `used` or `defaults` that means the same.
    repeats: key that transformers ignores -> the key whose value it repeats; a different value is
      refused.
  """

  architectures: tuple[str, ...]
  read: Callable[[Json, HasTensor], ModelFields]
  write: Callable[[ModelFields], dict[str, Any]]
  used: frozenset[str]
  defaults: Mapping[str, Any]
  fixed: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
  no_effect: frozenset[str] = frozenset()
  other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  repeats: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def known(self) -> frozenset[str]:
    """Keys of config.json that have a meaning here; all others are refused."""
    others = (self.defaults, self.fixed, self.other_names, self.repeats, NO_EFFECT)
    return self.used | self.no_effect | {key for keys in others for key in keys}


# Keys that do not affect the logits of any family: names and versions, transformers' output
# options, token ids and settings of generation (read from generation_config.json and the
# tokenizer), initialization of new weights, and leftovers of other programs: trainers,
# transformers.js, sentence-transformers (a cross-encoder applies its activation after the logits).
NO_EFFECT = frozenset(
  """
  _name_or_path _commit_hash _attn_implementation_autoset attn_implementation transformers_version
  finetuning_task tokenizer_class task_specific_params label2id prefix unsloth_version unsloth_fixed
  return_dict output_attentions output_hidden_states output_past torchscript use_bfloat16
  tf_legacy_loss use_cache cache_implementation gradient_checkpointing chunk_size_feed_forward
  is_encoder_decoder tie_encoder_decoder cross_attention_hidden_size
  bos_token_id eos_token_id pad_token_id sep_token_id forced_bos_token_id forced_eos_token_id
  max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty
  temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
  encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
  return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens
  begin_suppress_tokens initializer_factor quantization_config
  _num_labels is_llama_config neftune_noise_alpha total_flos xla_device language name
  transformers.js_config sentence_transformers sbert_ce_default_activation_function
  """.split()
)
# Read in every family.
_COMMON = frozenset({'architectures', 'model_type', 'dtype', 'torch_dtype'})


def used(keys: 'Keys', *more: str) -> frozenset[str]:
  """Returns the config.json keys of `keys`, `more`, and the keys that every family reads."""
  return _COMMON | {*keys.values(), *more}


def read_keys(config: Json, keys: Keys) -> dict[str, Any]:
  """Returns TransformerConfig fields; raises KeyError for a missing key."""
  return {field: config[key] for field, key in keys.items()}


def write_keys(c: TransformerConfig, keys: Keys) -> dict[str, Any]:
  """Returns the keys of config.json for the same fields."""
  return {key: getattr(c, field) for field, key in keys.items()}


def read_dropout(config: Json, keys: Keys, **others: float) -> dict[str, float]:
  """Returns the dropout fields of TransformerConfig.

  Args:
    config: config.json.
    keys: field -> key of config.json, for 'dropout_rate' and for the other rates of the family.
    others: field -> rate, for rates without a key in the family.
  """
  rates = {field: config[key] for field, key in keys.items()}
  rate = rates.pop('dropout_rate', 0.0)
  own = {field: r for field, r in rates.items() if r not in (None, rate)}
  return {'dropout_rate': rate, **own, **others}


def write_dropout(c: TransformerConfig, keys: Keys) -> dict[str, float]:
  """Returns the config.json keys for the dropout rates.

  A key with the same name as its field is left out unless the field is set.
  """
  return {
    key: c.dropout_rate if field == 'dropout_rate' else c.dropout(field.removesuffix('_dropout'))
    for field, key in keys.items()
    if field != key or getattr(c, field) is not None
  }


def activation(name: str) -> str:
  """Returns t5x_gpu's name of an activation; raises CheckpointError for unknown names."""
  if name not in ACTIVATIONS:
    raise CheckpointError(
      f'config.json says activation {name!r}.{did_you_mean(name, ACTIVATIONS)}',
      fix=f'Supported activations: {", ".join(ACTIVATIONS)}.',
      docs='convert.md#families',
    )
  return ACTIVATIONS[name]


def their_activation(c: TransformerConfig) -> str:
  return THEIR_ACTIVATIONS.get(c.mlp_activations[0], c.mlp_activations[0])


def dtype(config: Json) -> str:
  name = config.get('dtype', config.get('torch_dtype'))
  return 'bfloat16' if name in ('bfloat16', 'float16') else 'float32'


def head_dim(config: Json) -> int:
  return config.get('head_dim') or divided(config, 'hidden_size', 'num_attention_heads')


def divided(config: Json, size: str, parts: str) -> int:
  """Returns `size` / `parts`; raises CheckpointError if that is not a whole number."""
  if not config[parts] or config[size] % config[parts]:
    raise CheckpointError(
      f'config.json says {size} = {config[size]}, which {parts} = {config[parts]} does not divide.',
      fix='Use the config.json that came with the weights.',
    )
  return config[size] // config[parts]
