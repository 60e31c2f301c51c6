"""The jobs that `python -m t5x_gpu.infer` runs: `open_job` opens the job of any model.

A generative model continues prompts or scores targets. An encoder predicts classes, tags, a number
or an embedding; each has its form of a result, an `Outcome`.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Optional

import jax
import numpy as np

from t5x_gpu.checkpoint.params_files import ParamsReader, read_params
from t5x_gpu.checkpoint.run_files import not_applied
from t5x_gpu.data import entities
from t5x_gpu.data.batches import CLASS_NAMES, DatasetConfig
from t5x_gpu.data.data_module import Prompt, PromptText, open_text
from t5x_gpu.data.same_data import check_numbering
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.generated_text import NUMBER, InferJob, Outcome, say
from t5x_gpu.evaluation.infer_request import InferRequest
from t5x_gpu.metrics.scores import all_names
from t5x_gpu.models.decoding import check_writes_text, reads_inputs
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.inference.classify import Classifier, ClassifierConfig
from t5x_gpu.models.inference.generation import Generator, by_layer
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import Model, Params, encodes_texts
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.layout import Layout
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Device, Topology, discover
from t5x_gpu.storage.json_schema import Json, JsonObject
from t5x_gpu.training.memory import check_inference_memory


def open_job(
  request: InferRequest, *, score: bool = False, one_at_a_time: bool = False, dry_run: bool = False
) -> InferJob:
  """Returns the job, checked and with restored parameters.

  Args:
    request: the request.
    score: score given continuations.
    one_at_a_time: take one prompt per batch.
    dry_run: leave the parameters out.
  Raises:
    UserError: checkpoint, vocabulary or mesh are invalid.
  """
  if one_at_a_time:
    decoding = dataclasses.replace(request.decoding, batch_size=1)
    request = dataclasses.replace(request, decoding=decoding)
  if request.chat:
    _check_chats(request)
  if encodes_texts(request.model):
    return _open_class_job(request, score=score, dry_run=dry_run)
  return _open_text_job(request, score=score, dry_run=dry_run)


def _open_class_job(request: InferRequest, *, score: bool, dry_run: bool) -> InferJob:
  model = request.model
  reader = ParamsReader(request.checkpoint, step=request.step, step_setting='--step')
  layout = _layout(request.partitioner, model, *discover())

  def read() -> Optional[Params]:
    shapes = _abstract_params(model, layout)
    check_inference_memory(shapes, layout)
    return None if dry_run else read_params(reader.checkpoint, shapes)

  return open_class_job(
    model,
    request.dataset,
    reader=reader,
    layout=layout,
    score=score,
    may_import=request.may_import,
    batch_size=request.decoding.batch_size,
    read=read,
  )


def _open_text_job(request: InferRequest, *, score: bool, dry_run: bool) -> InferJob:
  model, dataset = request.model, request.dataset
  check_writes_text(model)
  text = open_prompt_text(request)
  reader = ParamsReader(request.checkpoint, step=request.step, step_setting='--step')
  check_numbering(reader.manifest.get('data', {}), getattr(text, 'fingerprint', None))
  changes, notes = decoding_changes(request, text, reader.manifest)
  notes = [f'parameters: {reader.path}', *notes]
  layout = _layout(request.partitioner, model, *discover())
  say('\n'.join([layout.table(), *notes]))
  decoding = dataclasses.replace(request.decoding, **changes)
  generator = Generator(without_adapters(model), None, layout=layout, config=decoding)
  shapes = _abstract_params(model, layout)
  check_inference_memory(shapes, layout, generator=None if score else generator)
  if not dry_run:
    generator = generator.with_params(_params(request, reader, layout, shapes))
  lengths = dataset.task_feature_lengths
  train_length = lengths.get('inputs') if reads_inputs(model) else sum(lengths.values())
  return InferJob(generator, text, str(reader.path), train_length or None)


@dataclasses.dataclass(frozen=True)
class ClassOutcome:
  """The classes of a text: one class, or all classes with a probability of 0.5 or more.

  Attributes:
    names: names of the classes.
    multi_label: whether a text may have any number of classes.
  """

  names: Sequence[str]
  multi_label: bool = False

  @property
  def fields(self) -> Sequence[str]:
    one = ('labels',) if self.multi_label else ('label', 'probability')
    return (NUMBER, *one, 'probabilities')

  def shown(self, found: Sequence[float]) -> str:
    labels = self._labels(self._by_probability(found))
    return ', '.join(f'{name} ({p:.4f})' for name, p in labels.items()) or 'no class'

  def result(self, prompt: Prompt, found: Sequence[float]) -> JsonObject:
    all_of_them = self._by_probability(found)
    labels = self._labels(all_of_them)
    result = {} if prompt.targets is None else {'targets': prompt.targets}
    if self.multi_label:
      return {**result, 'labels': list(labels), 'probabilities': all_of_them}
    [(label, probability)] = labels.items()
    return {**result, 'label': label, 'probability': probability, 'probabilities': all_of_them}

  def _by_probability(self, found: Sequence[float]) -> dict[str, float]:
    return dict(sorted(zip(self.names, found), key=lambda pair: -pair[1]))

  def _labels(self, probabilities: Mapping[str, float]) -> dict[str, float]:
    if self.multi_label:
      return {name: p for name, p in probabilities.items() if p >= 0.5}
    return dict(itertools.islice(probabilities.items(), 1))


@dataclasses.dataclass(frozen=True)
class TagOutcome:
  """A tag for each word of a text, words separated by white space, and the entities they form.

  Attributes:
    names: names of the tags.
  """

  names: Sequence[str]
  fields = (NUMBER, 'words', 'tags', 'entities')

  def shown(self, found: Sequence[Optional[Sequence[float]]]) -> str:
    return ' '.join(map(str, self._tags(found)))

  def result(self, prompt: Prompt, found: Sequence[Optional[Sequence[float]]]) -> JsonObject:
    words, tags = prompt.inputs.split(), self._tags(found)
    result = {} if prompt.targets is None else {'targets': prompt.targets}
    result |= {'words': words, 'tags': tags}
    if entities.entity_kinds(self.names):
      result['entities'] = [
        {
          'type': entity.kind,
          'text': ' '.join(words[entity.start : entity.stop]),
          'start': entity.start,
          'stop': entity.stop,
        }
        for entity in entities.entities_of([tag or entities.OUTSIDE for tag in tags])
      ]
    return result

  def _tags(self, found: Sequence[Optional[Sequence[float]]]) -> list[Optional[str]]:
    """Returns the most probable tag of each word; None for a word beyond the end of the row."""
    return [None if p is None else self.names[int(np.argmax(p))] for p in found]


@dataclasses.dataclass(frozen=True)
class NumberOutcome:
  """The number that a regression predicts for a text."""

  fields = (NUMBER, 'value')

  def shown(self, found: Sequence[float]) -> str:
    return f'{found[0]:.4f}'

  def result(self, prompt: Prompt, found: Sequence[float]) -> JsonObject:
    result = {} if prompt.targets is None else {'targets': prompt.targets}
    return {**result, 'value': found[0]}


@dataclasses.dataclass(frozen=True)
class VectorOutcome:
  """The embedding of a text."""

  fields = (NUMBER, 'vector')

  def shown(self, found: Sequence[float]) -> str:
    return ' '.join(f'{x:.4f}' for x in found)

  def result(self, prompt: Prompt, found: Sequence[float]) -> JsonObject:
    del prompt
    return {'vector': list(found)}


def open_class_job(
  model: Model,
  dataset: DatasetConfig,
  *,
  reader: ParamsReader,
  layout: Layout,
  read: Callable[[], Optional[Params]],
  batch_size: int,
  score: bool,
  may_import: Optional[Collection[str]],
) -> InferJob:
  """Returns the job of a model that predicts classes, tags, numbers or vectors.

  Args:
    model: an EncoderModel that classifies, or its adapters.
    dataset: dataset of the run that trained the model; its files are not read.
    reader: reader of the checkpoint, whose manifest has the class names.
    layout: mesh and rules.
    read: returns the parameters on `layout`; None in a dry run.
    batch_size: number of texts per batch.
    score: whether --score was given, which is an error: it needs a generative model.
    may_import: modules that the task may import in addition to t5x_gpu's; None for any.
  Raises:
    ConfigError: `score` is set, the maximum length is unknown (neither a run nor a table of
      positions defines it), or the task imports another module.
    DataError: the vocabulary does not exist, or has more ids than the model.
  """
  if score:
    raise ConfigError(
      '--score is for a model that writes text; this one is an encoder.',
      fix='Remove --score: each result already has all scores of its text.',
    )
  plain = without_adapters(model)
  length = _length(plain, dataset)
  dataset = dataclasses.replace(dataset, task_feature_lengths={'inputs': length})
  text = open_text(
    dataset,
    'class_text',
    model_vocab_size=plain.config.vocab_size,
    of_words=plain.tags,
    may_import=may_import,
  )
  check_numbering(reader.manifest.get('data', {}), getattr(text, 'fingerprint', None))
  found = reader.manifest.get('data', {}).get(CLASS_NAMES)
  names = list(map(str, found)) if isinstance(found, list) else []
  names = names or list(plain.class_names)
  names = list(all_names(names, plain.num_classes))
  say(
    '\n'.join(
      [
        layout.table(),
        f'parameters: {reader.path}',
        f'vocabulary: {text.name}, {text.size:,} ids',
        *([f'classes: {", ".join(names)}'] if plain.has_classes else []),
      ]
    )
  )
  kind, outcome = _outcome(plain, names)
  config = ClassifierConfig(text.length, batch_size, kind)
  return InferJob(
    Classifier(model, read(), layout=layout, config=config), text, str(reader.path), outcome=outcome
  )


def _length(model: EncoderModel, dataset: DatasetConfig) -> int:
  """Returns the maximum number of tokens of a text."""
  length = dataset.task_feature_lengths.get('inputs')
  if length is not None:  # in training, two texts to embed share a row
    return max(length // 2, 3) if model.embeds else length
  if not model.config.num_positions:
    raise ConfigError(
      'The maximum length of texts is unknown: the encoder has no table of positions, and a '
      'model file has no length.',
      fix='Give the gin file of the run that trained it, with --gin_file.',
    )
  return model.config.num_positions


def _outcome(model: EncoderModel, names: Sequence[str]) -> tuple[str, Outcome]:
  """Returns the name and the Outcome of an EncoderModel's predictions."""
  if model.embeds:
    return 'vectors', VectorOutcome()
  if model.regresses:
    return 'numbers', NumberOutcome()
  if model.tags:
    return 'tags', TagOutcome(names)
  return 'labels' if model.multi_label else 'classes', ClassOutcome(names, model.multi_label)


def has_inputs(request: InferRequest) -> bool:
  return reads_inputs(request.model) or 'inputs' in request.dataset.task_feature_lengths


def open_prompt_text(request: InferRequest) -> PromptText:
  """Returns text <-> ids of a generative model. Raises ConfigError, DataError."""
  return open_text(
    request.dataset,
    'prompt_text',
    feature_converter=request.model.feature_converter({'inputs': 1, 'targets': 1}),
    model_vocab_size=request.model.num_outcomes,
    has_inputs=has_inputs(request),
    may_import=request.may_import,
  )


def _check_chats(request: InferRequest) -> None:
  """Raises ConfigError unless the model is decoder-only and trained without separate inputs."""
  kind = 'an encoder' if encodes_texts(request.model) else ''
  if not kind and reads_inputs(request.model):
    kind = 'an encoder-decoder'
  elif not kind and 'inputs' in request.dataset.task_feature_lengths:
    kind = "a model that was trained on 'inputs' and 'targets'"
  if kind:
    raise ConfigError(
      f'--chat needs a decoder-only model of conversations; this is {kind}.', fix='Remove --chat.'
    )


def decoding_changes(
  request: InferRequest, text: PromptText, manifest: Json
) -> tuple[JsonObject, list[str]]:
  """Returns changes to the decoding from vocabulary and checkpoint, and lines for the log.

  Args:
    request: request of `infer`.
    text: text <-> ids of the run or model.
    manifest: manifest of the checkpoint.
  """
  decoding = request.decoding
  ends = dict.fromkeys([*([] if text.eos_id is None else [text.eos_id]), *request.ends])
  ending = f'; ids that end a text: {", ".join(map(str, ends))}' if ends else ''
  notes = [f'vocabulary: {text.name}, {text.size:,} ids{ending}']
  if request.ignored:
    notes.append(f'note: {not_applied(request.ignored)}')
  changes = {
    'stop_tokens': tuple(dict.fromkeys([*decoding.stop_tokens, *ends])),
    'zero_is_padding': decoding.zero_is_padding and not text.zero_is_a_word,
  }
  if request.chat:
    changes['stop_tokens'] = tuple(dict.fromkeys([*changes['stop_tokens'], *text.chat_ends()]))
    if not request.sets_start_token:  # the template writes the first token
      changes['start_token'] = None
    answers = ', '.join(map(str, text.chat_ends())) or 'the same'
    notes.append(f'--chat: the chat template writes the prompts; ids that end an answer: {answers}')
    return changes, notes
  is_from_hf = manifest.get('converted_from', {}).get('format') == 'hf'
  if is_from_hf and not (request.sets_start_token or has_inputs(request) or request.is_run):
    changes['start_token'] = text.start_id
    starts = 'no token' if text.start_id is None else f'token {text.start_id}'
    notes.append(
      f'DecodingConfig.start_token = {text.start_id}: the model is converted from Hugging Face; '
      f'its tokenizer puts {starts} in front of a text'
    )
  return changes, notes


def _params(request: InferRequest, reader: ParamsReader, layout: Layout, shapes: Params) -> Params:
  """Returns the model's parameters by layer, with adapters merged; `shapes` are their shapes."""
  model = request.model
  params = read_params(reader.checkpoint, shapes)
  plain = without_adapters(model)
  if plain is not model:
    shardings = jax.tree.map(lambda a: a.sharding, _abstract_params(plain, layout))
    params = layout.jit(model.merged, out_shardings=shardings)(params)
  return by_layer(plain, params, layout=layout)


def _layout(
  partitioner: Partitioner, model: Model, topology: Topology, devices: list[Device]
) -> Layout:
  """Returns the layout for inference, without checking training's batch size and length."""
  partitioner = dataclasses.replace(
    partitioner,
    sequence_parallel=False,
    pipeline_schedule='gpipe',
    pipeline_repeats=1,
    num_pipeline_microbatches=1,
  )
  sizes = partitioner.mesh_sizes(topology).total
  parts = math.prod(sizes[axis] for axis in partitioner.rules().activations['batch'])
  return partitioner.lay_out(
    topology,
    devices,
    logical_sizes={**model.logical_sizes(), 'batch': parts, 'length': 2 * sizes['context']},
  ).for_decoding


def _abstract_params(model: Model, layout: Layout) -> Params:
  lengths = {'inputs': 2} if encodes_texts(model) else {'inputs': 1, 'targets': 1}
  spec = model.batch_spec(lengths, batch_size=1, pack=False)
  shapes, names = split_names(jax.eval_shape(lambda: model.init(jax.random.key(0), spec)))
  return jax.tree.map(
    lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
    shapes,
    layout.shardings(shapes, names),
  )
