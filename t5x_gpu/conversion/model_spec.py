"""A model as plain fields: the form shared by config.json and gin model files.

Converters compare, build and write models through it, without gin.
"""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import flax.traverse_util
import jax

from t5x_gpu.config import gin_loader
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import DROPOUT_PLACES, TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.model import Model, Params
from t5x_gpu.models.transformer import TransformerLayer
from t5x_gpu.partitioning.axis_rules import split_names

MODELS = {
  'decoder_only': DecoderOnlyModel,
  'encoder': EncoderModel,
  'encoder_decoder': EncoderDecoderModel,
}
# Settings of a run that config.json lacks or that do not affect logits.
RUN_FIELDS = (
  'attention',
  'dropout_rate',
  'dtype',
  'remat_policy',
  'full_remat_layers',
  'scan_unroll',
  'init_stddev',
  'embedding_stddev',
  'max_length',
  'loss_chunks',
  'router_balance_loss',
  'router_z_loss',
  'fp8_scaling',
  'fp8_history',
  'fp8_margin',
  'fp8_logits',
  *DROPOUT_PLACES,
)
LOSS_OPTIONS = ('z_loss', 'label_smoothing', 'temperature')
# Other model arguments that affect parameters or logits, with their defaults.
OPTIONS = {
  kind: {
    f.name: f.default
    for f in dataclasses.fields(cls)
    if f.name not in ('config', 'layer', *LOSS_OPTIONS)
  }
  for kind, cls in MODELS.items()
}


@dataclasses.dataclass(frozen=True)
class ModelFields:
  """The arguments of a model.

  Attributes:
    kind: a key of `MODELS`: the module of models/ that defines the model.
    config: its TransformerConfig.
    options: arguments listed in `OPTIONS` that differ from their defaults.
  """

  kind: str
  config: TransformerConfig
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  def build(self) -> Model:
    """Returns the model."""
    return MODELS[self.kind](self.config, **self.options)

  def parameter(self, field: str) -> str:
    """Returns the gin parameter, or macro, that sets a field named by `differences`."""
    if field == 'kind':
      return 'MODEL'
    options = [MODELS[kind] for kind in (self.kind, *MODELS) if field in OPTIONS[kind]]
    return f'{(*options, TransformerConfig)[0].__name__}.{field}'

  def abstract_params(self) -> Params:
    """Returns the tree of shapes of its parameters."""
    params = jax.eval_shape(lambda: self.build().init(jax.random.key(0), None))
    return split_names(params)[0]

  def abstract_shapes(self) -> dict[str, tuple[int, ...]]:
    """Returns '/'-joined path -> shape of its parameters."""
    flat = flax.traverse_util.flatten_dict(self.abstract_params(), sep='/')
    return {name: tuple(a.shape) for name, a in flat.items()}

  def sizes(self) -> dict[str, int]:
    """Returns axis -> size, for all axes in name tables."""
    c, options = self.config, self.options
    encoder_layers = options.get('num_encoder_layers')
    regresses = options.get('head_type') == 'regression'
    return {
      'vocab': c.vocab_size,
      'embed': c.embed_dim,
      'embed_out': c.embed_dim,
      'heads': c.num_heads,
      'kv_heads': c.kv_heads,
      'kv': c.head_dim,
      'mlp': c.mlp_dim,
      'layers': c.num_layers,
      'decoder_layers': c.num_layers,
      'encoder_layers': c.num_layers if encoder_layers is None else encoder_layers,
      'buckets': c.num_relpos_buckets,
      'positions': c.num_positions,
      'types': c.num_token_types,
      'classes': 1 if regresses else options.get('num_classes', 0),
      'qkv': 3,
      'experts': c.num_experts,
      'branches': len(c.mlp_activations),
    }


def describe(model: Model) -> ModelFields:
  """Returns the fields of a model from models/; raises CheckpointError for other models."""
  for kind, cls in MODELS.items():
    if type(model) is cls:
      name, module = (getattr(model.layer, a, '') for a in ('__qualname__', '__module__'))
      if (name, module) != (TransformerLayer.__qualname__, TransformerLayer.__module__):
        raise CheckpointError(
          f'{cls.__name__}.layer = {name or repr(model.layer)}: models with custom layers cannot '
          'be converted.',
          fix=f'Remove {cls.__name__}.layer if the checkpoint was trained with TransformerLayer. '
          'Otherwise use the checkpoint with the gin file of its run.',
          docs='convert.md#families',
          parameters=(f'{cls.__name__}.layer',),
        )
      return ModelFields(kind, model.config, {name: getattr(model, name) for name in OPTIONS[kind]})
  raise CheckpointError(
    f'{type(model).__name__} cannot be converted to or from other formats.',
    fix=f'Supported models: {", ".join(c.__name__ for c in MODELS.values())}.',
    docs='convert.md#families',
  )


def differences(a: ModelFields, b: ModelFields) -> list[tuple[str, object, object]]:
  """Returns (field, value in a, value in b) for each field that differs; ignores run settings."""
  ours, theirs = _comparable(a), _comparable(b)
  return [
    (name, ours.get(name), theirs.get(name))
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]


def _comparable(model: ModelFields) -> dict[str, object]:
  """Returns the fields that affect logits, normalized so that equal models have equal fields."""
  c = model.config
  values = {f.name: getattr(c, f.name) for f in dataclasses.fields(c) if f.name not in RUN_FIELDS}
  values['num_kv_heads'] = c.kv_heads
  values['windows'] = tuple(c.windows[i % len(c.windows)] for i in range(c.num_layers))
  ropes = c.rope_of_layers
  ropes = tuple(ropes[i % len(ropes)] for i in range(c.num_layers))
  values['rope'] = ropes[0] if len(set(ropes)) == 1 else ropes
  del values['ropes']
  if not c.qk_norm:
    del values['qk_norm_kind']
  if c.relative_bias == 'none':
    del values['num_relpos_buckets'], values['max_relpos_distance']
  if model.kind == 'encoder':  # heads of encoders use neither setting
    del values['logits_via_embedding'], values['scale_tied_logits']
  elif not c.logits_via_embedding:
    del values['scale_tied_logits']
  values['normalize_gates'] = c.gates_add_up
  if not c.num_experts:
    for name in ('num_experts_per_token', 'expert_capacity_factor', 'normalize_gates'):
      del values[name]
  options = {**OPTIONS[model.kind], **model.options}
  if model.kind == 'encoder_decoder' and options.get('num_encoder_layers') is None:
    options['num_encoder_layers'] = c.num_layers
  if options.get('head_type') == 'mlm':
    options = {'head_type': 'mlm'}
  if options.get('head_type') == 'token_classification':
    options = {name: options[name] for name in ('head_type', 'num_classes', 'head_mlp_dim')}
  if options.get('head_type') == 'embedding':  # config.json lacks the other options
    options = {'head_type': 'embedding'}
  if options.get('head_type') == 'regression':
    options = {name: options[name] for name in ('head_type', 'pooling', 'head_mlp_dim')}
  options.pop('class_names', None)
  if options.get('head_type') != 'embedding':
    options.pop('normalize', None)
  return {**values, **options, 'kind': model.kind}


def gin_text(model: ModelFields, *, title: str) -> str:
  """Returns a gin model file, to include like a file of gin_configs/models/.

  Args:
    model: the model to describe.
    title: text of the first comment.
  """
  cls, c = MODELS[model.kind].__name__, model.config
  macros = {
    'attention': 'ATTENTION',
    'dropout_rate': 'DROPOUT_RATE',
    'dtype': 'PRECISION',
    'remat_policy': 'REMAT_POLICY',
  }
  lines = [f'# {line}' for line in title.splitlines()]
  lines += [
    'from __gin__ import dynamic_registration',
    *(['from t5x_gpu.layers import positions'] if any(c.rope_of_layers) else []),
    'from t5x_gpu.models import config',
    f'from t5x_gpu.models import {model.kind}',
    '',
    f'MODEL = @{model.kind}.{cls}()',
    *(f'{macro} = {getattr(c, name)!r}' for name, macro in macros.items()),
    '',
    f'{model.kind}.{cls}:',
    '  config = @config.TransformerConfig()',
    *(f'  {name} = {value!r}' for name, value in model.options.items() if value is not None),
    '',
    'config.TransformerConfig:',
  ]
  kinds = [rope for rope in dict.fromkeys(c.rope_of_layers) if rope]
  # Settings without a default, the sizes, come first.
  for field in sorted(dataclasses.fields(c), key=lambda f: f.default is not dataclasses.MISSING):
    value = getattr(c, field.name)
    if field.name in macros:
      lines.append(f'  {field.name} = %{macros[field.name]}')
    elif field.name == 'rope':
      lines += ['  rope = @positions.RotaryEmbedding()'] if value else []
    elif field.name == 'ropes':
      names = [rope and f'@rope{kinds.index(rope)}/positions.RotaryEmbedding()' for rope in value]
      lines += [f'  ropes = ({", ".join(map(str, names))},)'] if value else []
    elif value != field.default:
      lines.append(f'  {field.name} = {value!r}')
  for i, rope in enumerate(kinds):
    scope = f'rope{i}/' if c.ropes else ''
    changed = [
      (f.name, getattr(rope, f.name))
      for f in dataclasses.fields(rope)
      if getattr(rope, f.name) != f.default or f.name == 'theta'
    ]
    lines += ['', f'{scope}positions.RotaryEmbedding:', *(f'  {k} = {v!r}' for k, v in changed)]
  return '\n'.join(lines) + '\n'


# Entry point for gin_loader; its only argument is the model.
_ENTRY = f'{__name__}.{describe.__name__}'
_ENTRY_GIN = """from __gin__ import dynamic_registration
from t5x_gpu.conversion import model_spec as model_fields

model_fields.describe.model = %MODEL
"""


def read_model(
  files: Sequence[str | os.PathLike], *, as_data: bool = False, **options: Any
) -> Model:
  """Returns the model of gin model files, which only set MODEL.

  Args:
    files: paths of the gin files.
    as_data: read `files` without running any code that they name.
    **options: further arguments of `gin_loader.load`.
  """
  names = list(map(os.fspath, files))
  with tempfile.TemporaryDirectory() as folder:
    entry = pathlib.Path(folder) / 'entry.gin'
    entry.write_text(_ENTRY_GIN, 'utf-8')
    loaded = gin_loader.load(
      [*names, entry],
      entry=_ENTRY,
      read_as_data=dict.fromkeys(names if as_data else (), ('MODEL',)),
      **options,
    )
    return loaded.arguments(_ENTRY)['model']
