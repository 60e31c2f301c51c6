"""Name tables for T5X's parameters: encoder-decoder or decoder-only T5, scanned or not.

T5X's examples t5 and decoder_only join heads and their features in one dimension; scalable_t5 has
two dimensions. Without scan, each layer has separate parameters, `layers_0`, `layers_1`. With scan,
layers are stacked along dimension 1, or 0 if the user chose so.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Optional

from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Rule, Shape, Table
from t5x_gpu.errors import CheckpointError
from t5x_gpu.models.config import TransformerConfig

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
