"""One conversion: the request, and the comparison of logits at its end.

`check_logits` compares the logits of two models on random tokens, to check that they have the same
weights. The reference is `transformers` if it is installed. Otherwise it is the t5x_gpu model with
the foreign tensors, which shows that the files hold the same weights, but not that Hugging Face
computes the same logits.
"""

import dataclasses
import importlib
import importlib.util
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import flax.traverse_util
import jax
import numpy as np

from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.params_files import ParamsReader, num_bytes
from t5x_gpu.conversion.hf.folder import HfModel
from t5x_gpu.conversion.model_spec import ModelFields
from t5x_gpu.conversion.tensor_copy import ForeignWeights
from t5x_gpu.conversion.tokenizer import RunText
from t5x_gpu.errors import CheckpointError
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import Model, Params
from t5x_gpu.partitioning.layer_stacks import is_reference
from t5x_gpu.partitioning.trees import Shape
from t5x_gpu.runtime.machine import available_memory
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.terminal.console import Console, show

Batch = Mapping[str, np.ndarray]  # feature name -> [rows, length]
Torch = Any  # a model or tensor of torch, which may not be installed
TOLERANCE = 1e-4  # relative to the largest logit; absolute if that is below 1
ROWS, LENGTH = 2, 48
LONGEST_TABLE = 2048  # positions; a row fills a learned table up to this size
# In both models, sliding windows and the length limit of short rotary factors are cut to this size,
# so that short rows are longer than both.
WINDOW = 16
_COPIES_IN_MEMORY = 3.0  # of the parameters; measured: 2.1 to 2.8
_AUTO_CLASSES = {
  'decoder_only': 'AutoModelForCausalLM',
  'encoder_decoder': 'AutoModelForSeq2SeqLM',
  'classification': 'AutoModelForSequenceClassification',
  'regression': 'AutoModelForSequenceClassification',
  'token_classification': 'AutoModelForTokenClassification',
  'embedding': 'AutoModel',
  'mlm': 'AutoModelForMaskedLM',
}


@dataclasses.dataclass(frozen=True)
class Agreement:
  """The difference between two sets of logits.

  Attributes:
    against: name of the reference.
    num_logits: number of logits compared.
    largest: largest absolute value in the reference.
    difference: largest absolute difference.
  """

  against: str
  num_logits: int
  largest: float
  difference: float

  @property
  def relative(self) -> float:
    return self.difference / max(self.largest, 1.0)

  def __str__(self) -> str:
    return (
      f'{self.num_logits:,} logits of random tokens, ours against {self.against}: largest '
      f'difference {self.difference:.1e}, largest logit {self.largest:.3g}'
    )


def random_batches(model: ModelFields) -> list[dict[str, np.ndarray]]:
  """Returns batches whose logits depend on all settings in config.json."""
  switch = model.config.rope_switch
  short = [] if switch is None else [random_batch(model, length=min(switch, WINDOW))]
  return [random_batch(model), *short]


def random_batch(
  model: ModelFields, *, seed: int = 0, length: Optional[int] = None
) -> dict[str, np.ndarray]:
  """Returns a batch of random tokens for `model`, one of them id 0; the second row ends in padding.

  Rows have `length` tokens; by default they are longer than `WINDOW`, as long as a learned table of
  positions, and longer than the largest distance of a relative bias.
  """
  c = model.config
  distance = c.max_relpos_distance + WINDOW if c.relative_bias != 'none' else 0
  longest = max(LENGTH, min(max(c.num_positions, distance), LONGEST_TABLE))
  length = length or min(longest, c.length_limit or LENGTH)
  rng = np.random.default_rng(seed)

  def tokens(length: int, kept: int) -> tuple[np.ndarray, np.ndarray]:
    out = rng.integers(min(2, c.vocab_size - 1), c.vocab_size, (ROWS, length)).astype(np.int32)
    out[1, kept:] = 0
    out[0, length // 2] = 0  # a token like any other
    segments = np.ones_like(out)
    segments[1, kept:] = 0
    return out, segments

  targets, segments = tokens(length, length - length // 3)
  if model.kind == 'encoder':
    batch = {'encoder_input_tokens': targets, 'encoder_segment_ids': segments}
    if c.num_token_types > 1:
      batch['encoder_token_types'] = rng.integers(0, c.num_token_types, targets.shape, np.int32)
    return batch
  batch = {
    'decoder_target_tokens': targets,
    'decoder_input_tokens': tokens(length, length)[0],
    'decoder_segment_ids': segments,
  }
  if model.kind == 'encoder_decoder':
    inputs = tokens(length + 5, length // 2)
    batch['encoder_input_tokens'], batch['encoder_segment_ids'] = inputs
  return batch


def our_logits(model: ModelFields, params: Params, batch: Batch) -> np.ndarray:
  """Returns the logits of `batch` with the `checked` model, on this machine's CPU."""
  return logits_of(for_the_check(model).build(), params, batch)


def for_the_check(model: ModelFields) -> ModelFields:
  """Returns the model whose logits are compared: float32, windows and `rope_switch` cut short."""
  c = model.config
  config = dataclasses.replace(
    c,
    dtype='float32',
    windows=tuple(min(window, WINDOW) for window in c.windows),
    rope=_cut(c.rope),
    ropes=tuple(map(_cut, c.ropes)),
  )
  return dataclasses.replace(model, config=config)


def _cut(rope: Optional[RotaryEmbedding]) -> Optional[RotaryEmbedding]:
  if rope is None or not rope.depends_on_length:
    return rope
  return dataclasses.replace(rope, original_length=min(rope.original_length, WINDOW))


def logits_of(model: Model, params: Params, batch: Batch) -> np.ndarray:
  """Returns the logits of `batch` in the dtype of `model` (one of models/), on this CPU."""
  with jax.default_device(_cpu()):
    return np.asarray(jax.jit(model.logits)(params, dict(batch)))


def counted(model: ModelFields, batch: Batch) -> np.ndarray | slice:
  """Returns an index that selects the logits to compare, without those at padding."""
  if model.kind == 'encoder':
    if model.options['head_type'] in ('classification', 'regression'):
      return slice(None)
    if model.options['head_type'] == 'embedding':
      return np.s_[:, :1]  # the vector of the first text
    return batch['encoder_segment_ids'] > 0
  return batch['decoder_segment_ids'] > 0


def compare_logits(
  model: ModelFields,
  ours: np.ndarray,
  other: np.ndarray,
  batch: Batch,
  *,
  against: str,
  tolerance: float = TOLERANCE,
) -> Agreement:
  """Returns the difference of two sets of logits; raises CheckpointError beyond `tolerance`."""
  index = counted(model, batch)
  ours, other = ours[index], other[index]
  agreement = Agreement(
    against, ours.size, float(np.max(np.abs(other))), float(np.max(np.abs(ours - other)))
  )
  if not agreement.relative <= tolerance:  # NaN fails
    raise CheckpointError(
      f'The conversion is wrong: {agreement} (relative tolerance {tolerance:g}).',
      fix='The new folder was removed. If config.json belongs to the weights, please report this.',
      docs='convert.md#the-check',
    )
  return agreement


def params_of_files(weights: ForeignWeights) -> Params:
  """Returns the t5x_gpu parameter tree from foreign files, on the CPU."""
  ours = {path: np.empty(shape, np.float32) for path, shape in weights.table.our_shapes.items()}
  for path, place, value, _ in weights.our_pieces():
    ours[path][place] = value
  # One parameter at a time, so that memory never holds a second copy of all of them.
  return flax.traverse_util.unflatten_dict(
    {path: jax.device_put(ours.pop(path), _cpu()) for path in list(ours)}, sep='/'
  )


def params_of_checkpoint(reader: ParamsReader) -> Params:
  """Returns the parameter tree of a t5x_gpu checkpoint, on the CPU."""
  return flax.traverse_util.unflatten_dict(
    {
      path: jax.device_put(reader.read_at(path, ()), _cpu())
      for path in reader.shapes
      if not is_reference(path)
    },
    sep='/',
  )


def _cpu() -> jax.Device:
  return jax.local_devices(backend='cpu')[0]


def has_transformers() -> bool:
  """Returns whether transformers and torch are installed; imports neither."""
  return all(importlib.util.find_spec(name) for name in ('transformers', 'torch'))


def transformers_logits(
  folder: str | os.PathLike, model: ModelFields, batch: Batch
) -> tuple[np.ndarray, str]:
  """Returns the logits that transformers computes with the model in `folder`, and its version.

  Windows and the switch of rotary factors are cut short, as in `our_logits`.
  """
  torch, transformers = map(importlib.import_module, ('torch', 'transformers'))
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  kind = model.options['head_type'] if model.kind == 'encoder' else model.kind
  auto = getattr(transformers, _AUTO_CLASSES[kind])
  config = transformers.AutoConfig.from_pretrained(
    pathlib.Path(folder), local_files_only=True, trust_remote_code=False
  )
  if getattr(config, 'sliding_window', None):
    config.sliding_window = min(config.sliding_window, WINDOW)
  if model.config.rope_switch is not None:
    rope, switch = config.rope_parameters, model.config.rope_switch
    rope['factor'] = rope.get('factor') or config.max_position_embeddings / switch  # before the cut
    rope['original_max_position_embeddings'] = min(switch, WINDOW)
    config.original_max_position_embeddings = min(switch, WINDOW)
  if model.config.num_experts:  # its grouped matmuls need sizes in multiples of 16 bytes
    config._experts_implementation = 'eager'
  theirs = auto.from_pretrained(
    pathlib.Path(folder),
    config=config,
    local_files_only=True,
    use_safetensors=True,
    trust_remote_code=False,
    attn_implementation='eager',
    dtype=torch.float32,
  ).eval()
  return torch_logits(theirs, model, batch), f'transformers {transformers.__version__}'


def torch_logits(theirs: Torch, model: ModelFields, batch: Batch, **options: bool) -> np.ndarray:
  """Returns the logits of a model of transformers, or vectors [rows, 1, embed] of an embedding.

  Args:
    theirs: the transformers model, in evaluation mode.
    model: the same model in t5x_gpu.
    batch: result of `random_batch`.
    **options: options of the model call.
  """
  torch = importlib.import_module('torch')

  def tensor(name: str) -> Torch:
    return torch.from_numpy(np.asarray(batch[name], np.int64))

  if model.kind == 'decoder_only':
    given = {'input_ids': tensor('decoder_input_tokens')}
  else:
    given = {
      'input_ids': tensor('encoder_input_tokens'),
      'attention_mask': tensor('encoder_segment_ids'),
    }
    if 'encoder_token_types' in batch:
      given['token_type_ids'] = tensor('encoder_token_types')
    if model.kind == 'encoder_decoder':
      given['decoder_input_ids'] = tensor('decoder_input_tokens')
  with torch.no_grad():
    found = theirs(**given, **options)
  if model.options.get('head_type') == 'embedding':
    return _embeddings(model, found.last_hidden_state.numpy(), batch)
  return found.logits.numpy()


def _embeddings(model: ModelFields, states: np.ndarray, batch: Batch) -> np.ndarray:
  """Returns vectors [rows, 1, embed] of the output [rows, length, embed] of the last layer."""
  built, kept = model.build(), (batch['encoder_segment_ids'] > 0)[..., None]
  vectors = (states * kept).sum(1, keepdims=True) / kept.sum(1, keepdims=True)
  if built.pooling == 'first_token':
    vectors = states[:, :1]
  return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) if built.normalize else vectors


def check_memory(shapes: Mapping[str, Shape]) -> None:
  """Raises CheckpointError if a comparison of logits does not fit into memory."""
  need, available = _COPIES_IN_MEMORY * num_bytes(shapes), available_memory()
  if available is not None and need > available:
    raise CheckpointError(
      f'Comparing logits needs the model in memory: about {show(need, GiB=".1f")}, but only '
      f'{show(available, GiB=".1f")} are free.',
      fix='Convert on a machine with more memory. --check=tensors needs little memory: it reads '
      'every tensor back and compares it bit for bit, but compares no logits.',
      docs='convert.md#the-check',
    )


CHECKS = ('auto', 'transformers', 'own', 'tensors')

# Takes a batch; returns its logits and the name of the reference.
Reference = Callable[[Batch], tuple[np.ndarray, str]]


@dataclasses.dataclass(frozen=True)
class ConversionRequest:
  """What to convert, and how.

  Attributes:
    source: folder to convert.
    model_dir: `source`, open; used only if `source` is a t5x_gpu checkpoint.
    target: new folder; must not exist, or be empty.
    read_gin: (a gin model file) -> its model.
    model: the model according to the user's gin file; None to derive it from the source.
    family: Hugging Face family; None to take it from the source or guess it.
    like: a Hugging Face or converted model whose names, dtypes, tokenizer and config.json the new
      model takes; None to take the ones stored in the source.
    step: step of the t5x_gpu checkpoint; None for the latest.
    dtype: dtype of the new tensors, a key of `FLOATS`; None for the dtypes of `like`, or float32.
    drop: patterns of Hugging Face tensors to leave out.
    max_file_bytes: maximum size of a safetensors file.
    check: one of `CHECKS`; 'transformers' only if it is installed.
    tolerance: largest difference of logits, relative to the largest logit.
    lora: the model with adapters, if `source` has adapters; `model` is then the wrapped model.
    vocabulary: DatasetConfig.vocabulary of the run; None if its gin file does not set it.
    read_text: (manifest of the checkpoint) -> how `infer` reads and ends texts, to be written for
      Hugging Face; None for a model whose files already contain it. Raises UserError.
  """

  source: pathlib.Path
  model_dir: ModelDir
  target: pathlib.Path
  read_gin: Callable[[pathlib.Path], ModelFields]
  model: Optional[ModelFields] = None
  family: Optional[str] = None
  like: Optional[pathlib.Path] = None
  step: Optional[int] = None
  dtype: Optional[str] = None
  drop: Sequence[str] = ()
  max_file_bytes: int = 5 * 10**9
  check: str = 'auto'
  tolerance: float = TOLERANCE
  lora: Optional[LoraModel] = None
  vocabulary: Optional[str] = None
  read_text: Callable[[Json], Optional[RunText]] = lambda manifest: None


def check_logits(
  request: ConversionRequest,
  console: Console,
  model: ModelFields,
  shapes: Mapping[str, Shape],
  *,
  reference: Reference,
  ours: Callable[[], Params],
) -> None:
  """Compares logits; raises CheckpointError if they differ or do not fit into memory.

  Args:
    request, console: request and console of the conversion.
    model: the converted model.
    shapes: shapes of its parameters.
    reference: computes the logits to compare with.
    ours: returns the t5x_gpu parameters.
  """
  if request.check == 'tensors':
    console.say('check: logits were NOT compared (--check=tensors)')
    return
  check_memory(shapes)
  for batch in random_batches(model):
    expected, against = reference(batch)
    got = our_logits(model, ours(), batch)
    agreement = compare_logits(
      model, got, expected, batch, against=against, tolerance=request.tolerance
    )
    console.say(f'check: {agreement}')


def own_reference(model: ModelFields, weights: ForeignWeights) -> Reference:
  """Returns a reference that loads the foreign tensors into the t5x_gpu model."""
  return lambda batch: (
    our_logits(model, params_of_files(weights), batch),
    "our own model with the other files' tensors",
  )


def hf_reference(request: ConversionRequest, hf: HfModel) -> Reference:
  """Returns the reference for a Hugging Face model: transformers, if installed."""
  if request.check == 'transformers' or (request.check == 'auto' and has_transformers()):
    return lambda batch: transformers_logits(hf.folder, hf.model, batch)
  return own_reference(hf.model, hf.weights)
