"""Name tables for T5X's parameters and Adafactor state: encoder-decoder or decoder-only T5.

T5X's examples t5 and decoder_only join heads and their features in one dimension; scalable_t5 has
two dimensions. Without scan, each layer has separate parameters, `layers_0`, `layers_1`. With scan,
layers are stacked along dimension 1, or 0 if the user chose so.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import flax.traverse_util
import jax
import numpy as np

from t5x_gpu.checkpoint.manifest import describe_arrays
from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.conversion.name_table import Rule, Shape, Table
from t5x_gpu.conversion.t5x_files import T5xCheckpoint
from t5x_gpu.conversion.tensor_copy import ForeignWeights, Names
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.training.adafactor import (
  LAYERS,
  Adafactor,
  FactoredMoment,
  standard_logical_factor_rules,
)

Moments = Mapping[str, Any]  # nested dictionaries of FactoredMoment
_SCANNED = re.compile(r'(encoder|decoder)/(?!layers_\d)(\w+)/pre_mlp_layer_norm/scale')
_NUMBERED = re.compile(r'(encoder|decoder)/layers_(\d+)/pre_mlp_layer_norm/scale')
# Names of the relative bias of each layer in different versions of T5X.
_PER_LAYER_BIAS = ('relpos_bias', 'relative_posemb')


@dataclasses.dataclass(frozen=True)
class T5xLayers:
  """How a checkpoint stores the layers of one stack.

  Attributes:
    prefix: 'decoder/layers_{}' or, scanned, 'decoder/layers'.
    scan_axis: dimension that stacks the layers; None if each layer has separate parameters.
    num_layers: number of layers.
    bias: name of the relative bias of each layer, or None.
    joined: whether attention kernels join heads and features in one dimension.
  """

  prefix: str
  scan_axis: Optional[int]
  num_layers: int
  bias: Optional[str]
  joined: bool = True

  def __str__(self) -> str:
    scan = 'not scanned' if self.scan_axis is None else f'scanned along dimension {self.scan_axis}'
    heads = 'joined' if self.joined else 'in their own dimension'
    return f'{self.num_layers} layers, {scan}, heads {heads}'

  def shape(self, shapes: Mapping[str, Shape], path: str) -> Shape:
    """Returns the shape of one layer's parameter; () if it does not exist."""
    shape = list(shapes.get(f'{self.prefix.format(0)}/{path}', ()))
    if shape and self.scan_axis is not None:
      del shape[self.scan_axis]
    return tuple(shape)


def t5x_layers(shapes: Mapping[str, Shape]) -> dict[str, T5xLayers]:
  """Returns the layers of 'encoder' and 'decoder', if the checkpoint has them."""
  out: dict[str, T5xLayers] = {}
  embed = next((s[1] for n, s in shapes.items() if n.endswith('token_embedder/embedding')), None)
  for name, shape in shapes.items():
    numbered, scanned = _NUMBERED.fullmatch(name), _SCANNED.fullmatch(name)
    if numbered:
      stack, prefix, axis = numbered[1], f'{numbered[1]}/layers_{{}}', None
      num_layers = max(
        int(m[2]) + 1 for m in map(_NUMBERED.fullmatch, shapes) if m and m[1] == stack
      )
    elif scanned:
      stack, prefix = scanned[1], f'{scanned[1]}/{scanned[2]}'
      # If num_layers = embed_dim, the shape is ambiguous; T5X's default is 1.
      axis = 0 if shape[0] != embed and shape[1] == embed else 1
      num_layers = shape[axis]
    else:
      continue
    bias = next(
      (b for b in _PER_LAYER_BIAS if f'{prefix.format(0)}/{b}/rel_embedding' in shapes), None
    )
    query = 'attention' if stack == 'encoder' else 'self_attention'
    rank = len(shapes.get(f'{prefix.format(0)}/{query}/query/kernel', ())) - (axis is not None)
    out[stack] = T5xLayers(prefix, axis, num_layers, bias, joined=rank != 3)
  return out


def t5x_model(shapes: Mapping[str, Shape]) -> ModelFields:
  """Returns the model with these parameters; a gated MLP is assumed to use GELU, as in T5.1.1.

  Raises:
    CheckpointError: the model is not a T5, or the shapes do not determine the number of heads.
  """
  layers = t5x_layers(shapes)
  table = shapes.get('token_embedder/embedding', shapes.get('decoder/token_embedder/embedding'))
  if 'decoder' not in layers or table is None:
    raise CheckpointError(
      'The parameters do not belong to a T5 or a T5X decoder: '
      f'{", ".join(sorted(shapes)[:4])}, ...',
      fix='Give a checkpoint of t5x/examples/t5, scalable_t5 or decoder_only.',
    )
  decoder = layers['decoder']
  bias = shapes.get('decoder/relpos_bias/rel_embedding')
  if decoder.bias:
    bias = decoder.shape(shapes, f'{decoder.bias}/rel_embedding')
  query = decoder.shape(shapes, 'self_attention/query/kernel')
  if not bias:
    raise CheckpointError(
      'The parameters have no relative position bias, so the number of '
      f'{"heads" if decoder.joined else "its buckets"} is unknown.',
      fix='Name the model file that belongs to them: --gin_file=model.gin.',
    )
  heads, buckets = bias
  gated = bool(decoder.shape(shapes, 'mlp/wi_0/kernel'))
  wi = decoder.shape(shapes, 'mlp/wi_0/kernel' if gated else 'mlp/wi/kernel')
  fits = len(query) == 2 and query[1] % heads == 0 if decoder.joined else query[1] == heads
  if len(wi) != 2 or not fits:
    raise CheckpointError(
      f'Layers of this shape are not supported: self_attention/query/kernel '
      f'{list(query)}, mlp/wi {list(wi)}, {heads} heads.',
      fix='Give a checkpoint of t5x/examples/t5, scalable_t5 or decoder_only.',
    )
  config = TransformerConfig(
    vocab_size=table[0],
    embed_dim=table[1],
    num_layers=decoder.num_layers,
    num_heads=heads,
    head_dim=query[1] // heads if decoder.joined else query[2],
    mlp_dim=wi[1],
    mlp_activations=('gelu', 'linear') if gated else ('relu',),
    relative_bias='per_layer' if decoder.bias else 'shared',
    num_relpos_buckets=buckets,
    logits_via_embedding='decoder/logits_dense/kernel' not in shapes,
  )
  if 'encoder' in layers:
    return ModelFields(
      'encoder_decoder', config, {'num_encoder_layers': layers['encoder'].num_layers}
    )
  return ModelFields('decoder_only', config, {})


def t5x_table(model: ModelFields, shapes: Mapping[str, Shape]) -> Table:
  """Returns the table of `model` for a checkpoint with these parameter shapes."""
  return Table(t5x_rules(model, shapes), model.sizes())


def t5x_rules(model: ModelFields, shapes: Mapping[str, Shape]) -> list[Rule]:
  """Returns the rules of `t5x_table`."""
  c, layers = model.config, t5x_layers(shapes)
  with_encoder = model.kind == 'encoder_decoder'
  if with_encoder:
    rules = [Rule('token_embedder/embedding', 'token_embedder/embedding', 'vocab embed')]
    stacks = {'encoder': 'encoder/', 'decoder': 'decoder/'}
  else:
    rules = [Rule('token_embedder/embedding', 'decoder/token_embedder/embedding', 'vocab embed')]
    stacks = {'decoder': ''}
  for stack, ours in stacks.items():
    layout = layers.get(stack, T5xLayers(f'{stack}/layers_{{}}', None, c.num_layers, None))
    rules += [
      *_layer_rules(
        c,
        layout,
        f'{ours}layers',
        is_encoder=stack == 'encoder',
        has_cross=with_encoder and stack == 'decoder',
        axis=f'{stack}_layers',
      ),
      Rule(f'{ours}{stack}_norm/scale', f'{stack}/{stack}_norm/scale', 'embed'),
    ]
    if c.relative_bias == 'shared':
      rules.append(
        Rule(
          f'{ours}relpos_bias/rel_embedding', f'{stack}/relpos_bias/rel_embedding', 'heads buckets'
        )
      )
  if not c.logits_via_embedding:
    rules.append(
      Rule(
        f'{stacks["decoder"]}logits_dense/projection/kernel',
        'decoder/logits_dense/kernel',
        'embed vocab',
      )
    )
  return rules


def _layer_rules(
  c: TransformerConfig,
  layout: T5xLayers,
  ours: str,
  *,
  is_encoder: bool,
  has_cross: bool,
  axis: str,
) -> list[Rule]:
  def rule(path: str, theirs: str, axes: str) -> Rule:
    before, _, after = axes.partition(' -> ')
    if layout.scan_axis is not None:
      dims = before.split()
      dims.insert(layout.scan_axis, axis)
      axes = f'{" ".join(dims)} -> {axis} {after or before}'
    return Rule(f'{ours}/{path}', f'{layout.prefix}/{theirs}', axes, stack=axis)

  heads = 'heads.kv' if layout.joined else 'heads kv'

  def attention(path: str, theirs: str) -> list[Rule]:
    return [
      *(
        rule(f'{path}/{name}/kernel', f'{theirs}/{name}/kernel', f'embed {heads} -> embed heads kv')
        for name in ('query', 'key', 'value')
      ),
      rule(f'{path}/out/kernel', f'{theirs}/out/kernel', f'{heads} embed -> heads kv embed'),
    ]

  norm = 'pre_attention_layer_norm' if is_encoder else 'pre_self_attention_layer_norm'
  num_inputs = len(c.mlp_activations)
  wi = ('wi',) if num_inputs == 1 else tuple(f'wi_{i}' for i in range(num_inputs))
  rules = [
    rule('pre_self_attention_layer_norm/scale', f'{norm}/scale', 'embed'),
    *attention('self_attention', 'attention' if is_encoder else 'self_attention'),
    rule('pre_mlp_layer_norm/scale', 'pre_mlp_layer_norm/scale', 'embed'),
    *(rule(f'mlp/{name}/kernel', f'mlp/{name}/kernel', 'embed mlp') for name in wi),
    rule('mlp/wo/kernel', 'mlp/wo/kernel', 'mlp embed'),
  ]
  if has_cross:
    rules += [
      rule('pre_cross_attention_layer_norm/scale', 'pre_cross_attention_layer_norm/scale', 'embed'),
      *attention('cross_attention', 'encoder_decoder_attention'),
    ]
  if c.relative_bias == 'per_layer':
    rules.append(
      rule(
        'relpos_bias/rel_embedding',
        f'{layout.bias or _PER_LAYER_BIAS[0]}/rel_embedding',
        'heads buckets',
      )
    )
  return rules


# T5X's moments v_row, v_col, v and m become `row`, `column`, `full` and `momentum`. For a plain
# matrix, v_row is the moment that keeps the smaller dimension; t5x_gpu's Adafactor chooses by the
# names of the dimensions. Otherwise the name table works as for parameters.

ABSENT = (1,)  # the shape of a moment that a parameter does not have
_FIX = 'Continue from the parameters: train.initialize_from with RestoreConfig.mode = warm_start.'


@dataclasses.dataclass(frozen=True)
class T5xMoments:
  """The moments of a T5X checkpoint.

  Attributes:
    weights: T5X's arrays, with the table that maps them to 'layers/mlp/wo/kernel/row', ...
    settings: the Adafactor settings that give the same arrays; None if `min_dim_size_to_factor`
      was not 128.
  """

  weights: ForeignWeights
  settings: Optional[Mapping[str, object]]

  @property
  def shapes(self) -> Mapping[str, Shape]:
    """Returns path -> shape of the converted arrays."""
    return self.weights.table.our_shapes

  @property
  def opt_state(self) -> Moments:
    """Returns the tree of shapes of the converted optimizer state."""
    return _tree(self.shapes)

  def __str__(self) -> str:
    shapes = self.shapes
    factored = sum(name.endswith('/row') for name in shapes)
    count = factored + sum(name.endswith('/full') for name in shapes)
    momentum = _has_momentum(shapes)
    needs = (
      'Adafactor.min_dim_size_to_factor of the T5X run'
      if self.settings is None
      else ', '.join(f'Adafactor.{name} = {value!r}' for name, value in self.settings.items())
    )
    return (
      f'second moments of {count} parameters, {factored} of them factored'
      f'{", and momentum" if momentum else ""}. To continue: '
      f"RestoreConfig.mode = 'new_data', {needs}"
      f'{", Adafactor.beta1 of the T5X run" if momentum else ""}'
    )


def t5x_moments(model: ModelFields, checkpoint: T5xCheckpoint) -> T5xMoments:
  """Returns the moments of a checkpoint, for the optimizer state of `model`.

  Raises:
    CheckpointError: the checkpoint has no moments, or they do not match t5x_gpu's Adafactor.
  """
  arrays = checkpoint.moments()
  if not arrays.shapes:
    raise CheckpointError('the checkpoint has no optimizer state', fix=_FIX)
  of_params = t5x_rules(model, checkpoint.shapes)
  rules, names = [], {name: name for name in arrays.shapes}
  momentum = any(name.endswith('/m') and s != ABSENT for name, s in arrays.shapes.items())
  for rule in of_params:
    rules += _rules(rule, checkpoint.shapes, arrays.shapes, momentum=momentum)
  table = Table(rules, model.sizes())
  for name, shape in arrays.shapes.items():
    path, _, kind = name.rpartition('/')
    if path not in checkpoint.shapes or kind not in ('m', 'v', 'v_col', 'v_row'):
      raise CheckpointError(
        f'the optimizer is not Adafactor: it has an array {name} {list(shape)}', fix=_FIX
      )
    if name not in table.their_shapes and shape == ABSENT:
      del names[name]
  weights = ForeignWeights(table, arrays, Names(names))
  weights.check(what='the arrays of the optimizer do not match T5X', fix=_FIX)
  scanned = not any(rule.is_stacked for rule in of_params)
  return T5xMoments(weights, _settings(model, table.our_shapes, scanned=scanned))


def _rules(
  rule: Rule, params: Mapping[str, Shape], moments: Mapping[str, Shape], *, momentum: bool
) -> Sequence[Rule]:
  """Returns the rules for the moments, with `momentum` or without, of the parameter of `rule`."""
  first = rule.theirs.format(0) if rule.is_stacked else rule.theirs

  def whole(ours: str, theirs: str) -> Rule:
    return dataclasses.replace(rule, ours=f'{rule.ours}/{ours}', theirs=f'{rule.theirs}/{theirs}')

  more = [whole('momentum', 'm')] if momentum else []
  if moments.get(f'{first}/v_row', ABSENT) == ABSENT == moments.get(f'{first}/v_col', ABSENT):
    return [whole('full', 'v'), *more]
  rows, columns = _factored_dims(rule, params[first])

  def without(dims: Sequence[int], name: str) -> Rule:
    theirs = [d for i, d in enumerate(rule.their_axes) if i not in dims]
    kept = {axis for d in theirs for axis in d}
    before = ' '.join('.'.join(d) for d in theirs)
    after = ' '.join(axis for axis in rule.our_axes if axis in kept)
    dropped = [axis for i in dims for axis in rule.their_axes[i]]
    ours = 'column' if _keeps_columns(rule, kept, dropped) else 'row'
    return dataclasses.replace(
      rule, ours=f'{rule.ours}/{ours}', theirs=f'{rule.theirs}/{name}', axes=f'{before} -> {after}'
    )

  return [without(columns, 'v_row'), without(rows, 'v_col'), *more]


def _factored_dims(rule: Rule, shape: Shape) -> tuple[Sequence[int], Sequence[int]]:
  """Returns T5X's (row dimensions, column dimensions) of a factored parameter.

  Source: t5x/adafactor.py, `_parse_rule`, `_factored_dims`.
  """
  is_scanned = not rule.is_stacked and (rule.stack,) in rule.their_axes
  if len(rule.their_axes) <= 2 and not is_scanned:
    smaller, larger = (int(i) for i in np.argsort(shape, kind='stable'))
    return (smaller,), (larger,)
  roles = [_role(axes[0]) for axes in rule.their_axes]
  rows, columns = (
    [i for i, role in enumerate(roles) if role == wanted] for wanted in ('row', 'column')
  )
  return rows, columns


def _keeps_columns(rule: Rule, kept: set[str], dropped: Sequence[str]) -> bool:
  """Returns whether a moment that keeps these axes is `column` in t5x_gpu."""
  roles = {_role(axis) for axis in (*kept, *dropped)}
  if {'row', 'column'} <= roles:
    return 'column' in {_role(axis) for axis in kept}
  return rule.our_axes[0] in dropped  # without roles, t5x_gpu's row is the first dimension


def _role(axis: str) -> str:
  return standard_logical_factor_rules().get(axis, 'none')


def _tree(shapes: Mapping[str, Shape]) -> Moments:
  of: dict[str, dict[str, jax.ShapeDtypeStruct]] = {}
  for name, shape in shapes.items():
    path, _, kind = name.rpartition('/')
    of.setdefault(path, {})[kind] = jax.ShapeDtypeStruct(shape, np.float32)
  moments = {path: FactoredMoment(**parts) for path, parts in of.items()}
  return flax.traverse_util.unflatten_dict(moments, sep='/')


def _has_momentum(shapes: Mapping[str, Shape]) -> bool:
  return any(name.endswith('/momentum') for name in shapes)


def _settings(
  model: ModelFields, shapes: Mapping[str, Shape], *, scanned: bool
) -> Optional[Mapping[str, object]]:
  """Returns settings that give Adafactor these arrays, or None.

  Args:
    model: the model.
    shapes: path -> shape of the converted moments.
    scanned: whether T5X holds the layers in one array.
  """
  unfactored = {'factored': False, 'layers': 'scanned' if scanned else 'separate'}
  want = describe_arrays(_tree(shapes))
  params, names = split_names(jax.eval_shape(lambda: model.build().init(jax.random.key(0), None)))
  beta1 = 0.9 if _has_momentum(shapes) else None  # its value does not change the shapes
  for settings in (*({'layers': layers} for layers in LAYERS), unfactored):
    init = functools.partial(Adafactor(**settings, beta1=beta1).init, names=names)
    if describe_arrays(jax.eval_shape(init, params)) == want:
      return settings
  return None
