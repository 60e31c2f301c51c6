"""T5X's parameters as ours: T5 with encoder and decoder, or a decoder alone, scanned or not.

T5X joins heads and their features in one dimension. Without scan each layer has parameters of its
own, `layers_0`, `layers_1`; with scan they are stacked, on dimension 1 unless its user chose 0.

T5X's checkpoints, read in slices: the legacy format, and Orbax's with or without OCDBT.

Legacy: a msgpack file `checkpoint` with small arrays and, for each large one, where its zarr files
lie beside it. TensorStore reads both; no TensorFlow, T5X or pickle is involved.
"""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any, Optional

import flax.serialization
import flax.traverse_util
import numpy as np
import tensorstore as ts

from t5x_gpu.checkpoint.arrays.params_files import tree_problems
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.name_table import Rule, Shape, Table
from t5x_gpu.checkpoint.model_dir import check_only_files
from t5x_gpu.checkpoint.schemas import ARRAY_METADATA
from t5x_gpu.config.json_schema import parse_json, read_bytes, read_json
from t5x_gpu.errors import CheckpointError, first_line
from t5x_gpu.models.config import TransformerConfig

_SCANNED = re.compile(r'(encoder|decoder)/(?!layers_\d)(\w+)/pre_mlp_layer_norm/scale')
_NUMBERED = re.compile(r'(encoder|decoder)/layers_(\d+)/pre_mlp_layer_norm/scale')
# The bias of each layer; versions of T5X name it differently.
_PER_LAYER_BIAS = ('relpos_bias', 'relative_posemb')


@dataclasses.dataclass(frozen=True)
class T5xLayers:
  """How the layers of one stack are kept.

  Attributes:
    prefix: 'decoder/layers_{}' or, scanned, 'decoder/layers'.
    scan_axis: dimension of the layers, None where each has its own parameters.
    num_layers: of the stack.
    bias: name of the relative bias that each layer has, or None.
  """

  prefix: str
  scan_axis: Optional[int]
  num_layers: int
  bias: Optional[str]

  def shape(self, shapes: Mapping[str, Shape], path: str) -> Shape:
    """Returns the shape of one layer's parameter, () if there is none."""
    shape = list(shapes.get(f'{self.prefix.format(0)}/{path}', ()))
    if shape and self.scan_axis is not None:
      del shape[self.scan_axis]
    return tuple(shape)


def t5x_layers(shapes: Mapping[str, Shape]) -> dict[str, T5xLayers]:
  """Returns 'encoder' and 'decoder', as far as there are layers of them."""
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
      # As many layers as features: the shape does not tell, and 1 is what T5X does by itself.
      axis = 0 if shape[0] != embed and shape[1] == embed else 1
      num_layers = shape[axis]
    else:
      continue
    bias = next(
      (b for b in _PER_LAYER_BIAS if f'{prefix.format(0)}/{b}/rel_embedding' in shapes), None
    )
    out[stack] = T5xLayers(prefix, axis, num_layers, bias)
  return out


def t5x_model(shapes: Mapping[str, Shape]) -> ModelFields:
  """Returns the model that has these parameters; a gated MLP is taken for GELU, as in T5.1.1.

  Raises:
    CheckpointError: it is no T5, or does not tell its number of heads.
  """
  layers = t5x_layers(shapes)
  table = shapes.get('token_embedder/embedding', shapes.get('decoder/token_embedder/embedding'))
  if 'decoder' not in layers or table is None:
    raise CheckpointError(
      'The parameters are not those of a T5 or of a decoder of T5X: '
      f'{", ".join(sorted(shapes)[:4])}, ...',
      fix='Give a checkpoint of t5x/examples/t5, scalable_t5 or decoder_only.',
    )
  decoder = layers['decoder']
  bias = shapes.get('decoder/relpos_bias/rel_embedding')
  if decoder.bias:
    bias = decoder.shape(shapes, f'{decoder.bias}/rel_embedding')
  if not bias:
    raise CheckpointError(
      'The parameters have no relative position bias, which would tell the number of heads.',
      fix='Name the model file that belongs to them: --gin_file=model.gin.',
    )
  heads, buckets = bias
  gated = bool(decoder.shape(shapes, 'mlp/wi_0/kernel'))
  wi = decoder.shape(shapes, 'mlp/wi_0/kernel' if gated else 'mlp/wi/kernel')
  joined = decoder.shape(shapes, 'self_attention/query/kernel')
  if len(wi) != 2 or len(joined) != 2 or joined[1] % heads:
    raise CheckpointError(
      f'Layers of this shape are not converted: self_attention/query/kernel '
      f'{list(joined)}, mlp/wi {list(wi)}, {heads} heads.',
      fix='Give a checkpoint of t5x/examples/t5, scalable_t5 or decoder_only.',
    )
  config = TransformerConfig(
    vocab_size=table[0],
    embed_dim=table[1],
    num_layers=decoder.num_layers,
    num_heads=heads,
    head_dim=joined[1] // heads,
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
  """Returns the table of `model` for a checkpoint that keeps its layers as `shapes` says."""
  c, layers = model.config, t5x_layers(shapes)
  with_encoder = model.kind == 'encoder_decoder'
  if with_encoder:
    rules = [Rule('token_embedder/embedding', 'token_embedder/embedding', 'vocab embed')]
    stacks = {'encoder': 'encoder/', 'decoder': 'decoder/'}
  else:
    rules = [Rule('token_embedder/embedding', 'decoder/token_embedder/embedding', 'vocab embed')]
    stacks = {'decoder': ''}
  for stack, ours in stacks.items():
    kept = layers.get(stack, T5xLayers(f'{stack}/layers_{{}}', None, c.num_layers, None))
    rules += [
      *_layer_rules(
        c,
        kept,
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
  return Table(rules, model.sizes())


def _layer_rules(
  c: TransformerConfig, kept: T5xLayers, ours: str, *, is_encoder: bool, has_cross: bool, axis: str
) -> list[Rule]:
  def rule(path: str, theirs: str, axes: str) -> Rule:
    before, _, after = axes.partition(' -> ')
    if kept.scan_axis is not None:
      dims = before.split()
      dims.insert(kept.scan_axis, axis)
      axes = f'{" ".join(dims)} -> {axis} {after or before}'
    return Rule(f'{ours}/{path}', f'{kept.prefix}/{theirs}', axes, stack=axis)

  def attention(path: str, theirs: str) -> list[Rule]:
    return [
      *(
        rule(f'{path}/{name}/kernel', f'{theirs}/{name}/kernel', 'embed heads.kv -> embed heads kv')
        for name in ('query', 'key', 'value')
      ),
      rule(f'{path}/out/kernel', f'{theirs}/out/kernel', 'heads.kv embed -> heads kv embed'),
    ]

  norm = 'pre_attention_layer_norm' if is_encoder else 'pre_self_attention_layer_norm'
  wi = (
    ('wi',)
    if len(c.mlp_activations) == 1
    else tuple(f'wi_{i}' for i in range(len(c.mlp_activations)))
  )
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
        f'{kept.bias or _PER_LAYER_BIAS[0]}/rel_embedding',
        'heads buckets',
      )
    )
  return rules


def from_t5x(flat: Mapping[str, np.ndarray], abstract_params: Any) -> Any:
  """Returns T5X's parameters, all in memory, as a tree like `abstract_params`.

  Args:
    flat: 'decoder/layers_0/mlp/wi_0/kernel' -> array, as T5X names them.
    abstract_params: our tree of shapes.
  Raises:
    CheckpointError: parameters that are missing, left over or of another size.
  """
  shapes = {name: value.shape for name, value in flat.items()}
  table = t5x_table(t5x_model(shapes), shapes)
  want = {
    name: a.shape for name, a in flax.traverse_util.flatten_dict(abstract_params, sep='/').items()
  }
  problems = tree_problems(
    table.their_shapes, shapes, wanted_by='the model', had_by='the checkpoint'
  ) or tree_problems(want, table.our_shapes, wanted_by='the model', had_by='the checkpoint')
  if problems:
    raise CheckpointError(
      'The T5X parameters are not those of this model:\n  ' + '\n  '.join(problems),
      fix='Choose the model file with the same sizes, relative_bias and logits_via_embedding.',
    )
  ours = {name: np.empty(shape, np.float32) for name, shape in want.items()}
  for name in table.uses:
    for piece in table.pieces(name):
      for path, value in table.to_ours(name, flat[name][piece.start : piece.stop]).items():
        ours[path][piece.slices[path]] = value
  return flax.traverse_util.unflatten_dict(ours, sep='/')


_BROKEN_FIX = 'Copy the checkpoint again.'
# What msgpack, NumPy and TensorStore raise for damaged files. RecursionError is a RuntimeError.
_BROKEN = (
  ValueError,
  LookupError,
  TypeError,
  AttributeError,
  OSError,
  RuntimeError,
  ArithmeticError,
  MemoryError,
)


class T5xCheckpoint:
  """The parameters of a checkpoint of T5X; see `name_tables.Tensors`.

  Args:
    folder: `checkpoint_<step>`, or its parent, of which the latest is taken.
  Attributes:
    path: folder of the checkpoint.
    step: updates done.
    shapes, dtypes: 'decoder/layers_0/mlp/wi_0/kernel' -> what it says.
  Raises:
    CheckpointError: no such checkpoint, or it cannot be read.
  """

  def __init__(self, folder: str | os.PathLike):
    self.path = _checkpoint_folder(pathlib.Path(folder).absolute())
    self._context = ts.Context({'cache_pool': {'total_bytes_limit': 0}})
    # Path of the parameter -> the array itself, or TensorStore's spec of it.
    self._arrays: Mapping[str, np.ndarray | dict[str, Any]]
    try:
      check_only_files(self.path)
      if (self.path / 'checkpoint').is_file():
        self.step, self._arrays = _read_legacy(self.path)
      else:
        self.step, self._arrays = _read_orbax(self.path, self._context)
      opened = {name: self._open(name) for name in self._arrays}
      self.shapes = {name: tuple(a.shape) for name, a in opened.items()}
      self.dtypes = {
        name: np.dtype(a.dtype if isinstance(a, np.ndarray) else a.dtype.numpy_dtype)
        for name, a in opened.items()
      }
    except _BROKEN as e:
      raise CheckpointError(
        f'{self.path} cannot be read as a checkpoint of T5X '
        f'({type(e).__name__}: {first_line(e)[:300]}).',
        fix=_BROKEN_FIX,
      ) from e

  @functools.cache  # noqa: B019 - a reader lives as long as its command
  def _open(self, name: str) -> Any:
    array = self._arrays[name]
    if isinstance(array, np.ndarray):
      return array
    return ts.open(array, open=True, read=True, context=self._context).result()

  def read(self, name: str, start: int = 0, stop: Optional[int] = None) -> np.ndarray:
    """Returns rows `start` to `stop` of a parameter, in its own dtype."""
    array = self._open(name)
    rows = array[start : array.shape[0] if stop is None else stop]
    if isinstance(array, np.ndarray):
      return rows
    try:
      return rows.read().result()
    except _BROKEN as e:
      raise CheckpointError(
        f'{name} of {self.path} cannot be read: {first_line(e)[:300]}', fix=_BROKEN_FIX
      ) from e


def is_t5x(folder: pathlib.Path) -> bool:
  """Returns whether `folder`, or a checkpoint_<step> in it, looks like a checkpoint of T5X."""
  return _latest(folder) is not None


def _latest(folder: pathlib.Path) -> Optional[pathlib.Path]:
  steps = {
    int(m[1]): p
    for p in folder.glob('checkpoint_*')
    if (m := re.fullmatch(r'checkpoint_(\d+)', p.name)) and _kind(p)
  }
  return folder if _kind(folder) else steps[max(steps)] if steps else None


def _kind(folder: pathlib.Path) -> str:
  if (folder / 'checkpoint').is_file():
    return 'legacy'
  state = _orbax_state(folder)
  return 'orbax' if state and not (folder / 'manifest').exists() else ''  # with it, it is ours


def _orbax_state(folder: pathlib.Path) -> Optional[pathlib.Path]:
  for state in (folder / 'state', folder):
    if (state / 'manifest.ocdbt').is_file() or next(state.glob('target.*/.zarray'), None):
      return state
  return None


def _checkpoint_folder(folder: pathlib.Path) -> pathlib.Path:
  found = _latest(folder) if folder.is_dir() else None
  if found is None:
    raise CheckpointError(
      f'{folder} holds no checkpoint of T5X.',
      fix='Give checkpoint_<step>, which has a file `checkpoint` (legacy) or a folder `state` '
      '(Orbax) in it, or the folder above.',
    )
  return found


def _read_legacy(folder: pathlib.Path) -> tuple[int, dict[str, Any]]:
  tree = flax.serialization.msgpack_restore((folder / 'checkpoint').read_bytes())
  optimizer = tree['optimizer']
  flat = flax.traverse_util.flatten_dict(
    optimizer['target'], sep='/', is_leaf=lambda _, value: 'driver' in value
  )
  arrays = {}
  for name, value in flat.items():
    if isinstance(value, dict):  # wherever the checkpoint was written, its arrays lie beside it
      last = value['kvstore']['path'].rstrip('/').split('/')[-1]
      if last == '..':
        raise ValueError(f'{name} lies outside of the folder')
      if not (folder / last / '.zarray').is_file():
        raise FileNotFoundError(f'{last}/.zarray is missing')
      read_json(folder / last / '.zarray', ARRAY_METADATA['.zarray'])
      arrays[name] = {'driver': 'zarr', 'kvstore': f'file://{folder / last}/'}
    else:
      arrays[name] = np.asarray(value)
  return int(optimizer['state']['step']), arrays


def _read_orbax(folder: pathlib.Path, context: ts.Context) -> tuple[int, dict[str, Any]]:
  state = _orbax_state(folder)
  if (state / 'manifest.ocdbt').is_file():
    base: dict[str, Any] = {'driver': 'ocdbt', 'base': f'file://{state}/'}
    store = ts.KvStore.open(base, context=context).result()
    metadata = [key.decode() for key in store.list().result()]

    def content(name: str) -> bytes:
      return store.read(name).result().value

    def kvstore(name: str) -> Any:
      return {**base, 'path': f'{name}/'}
  else:
    metadata = [p.relative_to(state).as_posix() for p in state.glob('*/.zarray')]

    def content(name: str) -> bytes:
      return read_bytes(state / name)

    def kvstore(name: str) -> Any:
      return f'file://{state / name}/'

  drivers = {'.zarray': 'zarr', 'zarr.json': 'zarr3'}
  for key in metadata:
    if (name := key.rpartition('/')[2]) in ARRAY_METADATA:
      parse_json(content(key), ARRAY_METADATA[name])
  specs = {
    name: {'driver': drivers[file], 'kvstore': kvstore(name)}
    for name, _, file in (key.rpartition('/') for key in metadata)
    if file in drivers
  }
  targets = {
    name.removeprefix('target.').replace('.', '/'): spec
    for name, spec in specs.items()
    if name.startswith('target.')
  }
  if not targets:
    raise KeyError('no array is called target.*')
  step = next((spec for name, spec in specs.items() if name in ('state.step', 'step')), None)
  number = re.fullmatch(r'checkpoint_(\d+)', folder.name)
  if step is not None:
    return int(ts.open(step, context=context).result().read().result()), targets
  return int(number[1]) if number else 0, targets
