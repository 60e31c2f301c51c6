"""One conversion: the request, and the comparison of logits at its end."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.checkpoint.convert import logits_check
from t5x_gpu.checkpoint.convert.hf.folder import HfModel
from t5x_gpu.checkpoint.convert.model_spec import ModelFields
from t5x_gpu.checkpoint.convert.tensor_copy import ForeignWeights
from t5x_gpu.checkpoint.convert.vocabulary import RunText
from t5x_gpu.checkpoint.model_dir import ModelDir
from t5x_gpu.checkpoint.storage.chunks import Shape
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.terminal.console import Console

CHECKS = ('auto', 'transformers', 'own', 'tensors')

# Takes a batch; returns its logits and the name of the reference.
Reference = Callable[[Mapping[str, Any]], tuple[Any, str]]


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
  tolerance: float = logits_check.TOLERANCE
  lora: Optional[LoraModel] = None
  vocabulary: Optional[str] = None
  read_text: Callable[[Mapping[str, Any]], Optional[RunText]] = lambda manifest: None


def check_logits(
  request: ConversionRequest,
  console: Console,
  model: ModelFields,
  shapes: Mapping[str, Shape],
  *,
  reference: Reference,
  ours: Callable[[], Any],
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
  logits_check.check_memory(shapes)
  for batch in logits_check.random_batches(model):
    expected, against = reference(batch)
    got = logits_check.our_logits(model, ours(), batch)
    agreement = logits_check.compare(
      model, got, expected, batch, against=against, tolerance=request.tolerance
    )
    console.say(f'check: {agreement}')


def own_reference(model: ModelFields, weights: ForeignWeights) -> Reference:
  """Returns a reference that loads the foreign tensors into the t5x_gpu model."""
  return lambda batch: (
    logits_check.our_logits(model, logits_check.params_of_files(weights), batch),
    "our own model with the other files' tensors",
  )


def hf_reference(request: ConversionRequest, hf: HfModel) -> Reference:
  """Returns the reference for a Hugging Face model: transformers, if installed."""
  if request.check == 'transformers' or (
    request.check == 'auto' and logits_check.has_transformers()
  ):
    return lambda batch: logits_check.transformers_logits(hf.folder, hf.model, batch)
  return own_reference(hf.model, hf.weights)
