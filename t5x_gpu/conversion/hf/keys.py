"""Shared by the readers of all families: tables of keys, activations, sizes, and windows of layers.

A `ConfigFamily` reads and writes one config.json. A `LayerKinds` reads and writes the windows of
sliding-window attention: Mistral has one window for all layers; Qwen and Gemma name a kind for each
layer in `layer_types`, or follow the pattern of their family.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Optional, TypeVar

from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.errors import CheckpointError, did_you_mean
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.storage.json_schema import Json, JsonObject, JsonValue

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
  write: Callable[[ModelFields], JsonObject]
  used: frozenset[str]
  defaults: Json
  fixed: Mapping[str, tuple[JsonValue, ...]] = dataclasses.field(default_factory=dict)
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


def read_keys(config: Json, keys: Keys) -> JsonObject:
  """Returns TransformerConfig fields; raises KeyError for a missing key."""
  return {field: config[key] for field, key in keys.items()}


def write_keys(c: TransformerConfig, keys: Keys) -> JsonObject:
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


FULL, SLIDING = 'full_attention', 'sliding_attention'
T = TypeVar('T')


@dataclasses.dataclass(frozen=True)
class LayerKinds:
  """How a family stores the windows of its layers.

  Attributes:
    read: (config.json) -> the window of each layer, 0 for none.
    write: (window of each layer) -> the keys of config.json.
  """

  read: Callable[[Json], Sequence[int]]
  write: Callable[[Sequence[int]], JsonObject]


def shortest_period(values: Sequence[T]) -> tuple[T, ...]:
  """Returns the shortest tuple whose repetition gives `values`; () if `values` is empty."""
  sizes = range(1, len(values) + 1)
  n = next((n for n in sizes if all(v == values[i % n] for i, v in enumerate(values))), 0)
  return tuple(values[:n])


def kind_of_each(
  config: Json, *, default: Callable[[Json], Sequence[str]], window: Optional[int]
) -> Sequence[str]:
  """Returns `layer_types`, or the result of `default` if config.json has no `layer_types`.

  Raises:
    CheckpointError: a kind is not supported, the number of kinds is not the number of layers, or
      layers have a window but config.json does not set its size.
  """
  given, layers = config.get('layer_types'), config['num_hidden_layers']
  kinds = default(config) if given is None else given
  unknown = sorted(set(kinds) - {FULL, SLIDING})
  problem = None
  if unknown:
    problem = f'of {", ".join(unknown)}, which our models do not have'
  elif len(kinds) != layers:
    problem = f'of {len(kinds)} layers, but num_hidden_layers = {layers}'
  elif SLIDING in kinds and not window:
    problem = (
      f'of {SLIDING}, but no window (sliding_window = {config.get("sliding_window")}, '
      f'use_sliding_window = {config.get("use_sliding_window")})'
    )
  if problem:
    raise CheckpointError(
      f'config.json has layer_types {problem}.',
      fix=f'It must name {FULL} or {SLIDING} for each layer.',
      docs='convert.md#families',
    )
  return kinds


def kinds_by_type(
  *, default: Callable[[Json], Sequence[str]], switched: bool = False
) -> LayerKinds:
  """Returns windows for the layers of kind 'sliding_attention'.

  Args:
    default: (config.json) -> the kind of each layer if `layer_types` is missing.
    switched: whether windows count only if `use_sliding_window` is true.
  """

  def read(config: Json) -> Sequence[int]:
    window = config['sliding_window'] if config.get('use_sliding_window') or not switched else None
    kinds = kind_of_each(config, default=default, window=window)
    return [window if kind == SLIDING else 0 for kind in kinds]

  def write(windows: Sequence[int]) -> JsonObject:
    return {
      **({'sliding_window': max(windows)} if any(windows) else {}),
      **({'use_sliding_window': any(windows)} if switched else {}),
      'layer_types': [SLIDING if window else FULL for window in windows],
    }

  return LayerKinds(read, write)


def every_second_layer(config: Json) -> Sequence[str]:
  """Returns the kinds of Gemma-2's layers: every second layer attends to all positions."""
  return kinds_by_window_pattern({**config, 'sliding_window_pattern': 2})


def kinds_by_window_pattern(config: Json) -> Sequence[str]:
  """Returns the kinds of Gemma-3's layers: every n-th layer attends to all positions."""
  n, layers = config['sliding_window_pattern'], config['num_hidden_layers']
  return [SLIDING if (i + 1) % n else FULL for i in range(layers)]


def windows_without_rope(config: Json) -> Sequence[str]:
  """Returns the kinds of SmolLM-3's layers: layers without rotary positions have the window."""
  uses = config['use_sliding_window'] and config['sliding_window'] is not None
  return [SLIDING if uses and not has_rope else FULL for has_rope in layers_with_rope(config)]


def layers_with_rope(config: Json) -> Sequence[bool]:
  """Returns whether each layer of a SmolLM-3 has rotary positions."""
  layers, given = config['num_hidden_layers'], config.get('no_rope_layers')
  if given is None:
    interval = config['no_rope_layer_interval']
    return [(i + 1) % interval != 0 for i in range(layers)]
  if len(given) != layers:
    raise CheckpointError(
      f'config.json has no_rope_layers for {len(given)} layers, but num_hidden_layers = {layers}.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  return [bool(value) for value in given]


def kinds_from_max_window_layers(config: Json) -> Sequence[str]:
  """Returns the kinds of Qwen's layers: the first `max_window_layers` attend to all positions."""
  uses = config['use_sliding_window'] and config['sliding_window'] is not None
  return [
    SLIDING if uses and i >= config['max_window_layers'] else FULL
    for i in range(config['num_hidden_layers'])
  ]


def _of_every_layer(config: Json) -> Sequence[int]:
  """Returns the same window for all layers; transformers ignores `layer_types`."""
  window, layers = config['sliding_window'] or 0, config['num_hidden_layers']
  if config['sliding_window'] == 0:
    raise CheckpointError(
      'config.json says sliding_window = 0: no layer could attend to any token.',
      fix='Use null for no window.',
      docs='convert.md#families',
    )
  types = config.get('layer_types')
  if types is not None and list(types) != [SLIDING if window else FULL] * layers:
    raise CheckpointError(
      f'config.json has sliding_window = {config["sliding_window"]}, which applies to every '
      f'layer of this family, but layer_types lists other kinds: {types}.',
      fix='Use the config.json that came with the weights.',
      docs='convert.md#families',
    )
  return [window] * layers


ALL_SEE_ALL = LayerKinds(lambda config: [0] * config['num_hidden_layers'], lambda windows: {})
ONE_WINDOW = LayerKinds(
  _of_every_layer, lambda windows: {'sliding_window': max(windows) if any(windows) else None}
)
# The same window for all layers if `use_sliding_window` is true; otherwise no window.
ONE_SWITCHED_WINDOW = LayerKinds(
  lambda config: _of_every_layer(
    config if config['use_sliding_window'] else {**config, 'sliding_window': None}
  ),
  lambda windows: {**ONE_WINDOW.write(windows), 'use_sliding_window': any(windows)},
)
