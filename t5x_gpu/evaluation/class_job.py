"""The job that `python -m t5x_gpu.infer` runs for a text classifier."""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Optional

import numpy as np

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader
from t5x_gpu.data import entities
from t5x_gpu.data.batches import CLASS_NAMES, DatasetConfig
from t5x_gpu.data.data_module import open_text
from t5x_gpu.data.prompts import Prompt
from t5x_gpu.data.same_data import check_numbering
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.generated_text import InferJob, Outcome, say
from t5x_gpu.evaluation.result_lines import NUMBER
from t5x_gpu.metrics.classification import all_names
from t5x_gpu.models.inference.classify import Classifier, ClassifierConfig
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.layout import Layout


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

  def result(self, prompt: Prompt, found: Sequence[float]) -> dict[str, Any]:
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

  def result(self, prompt: Prompt, found: Sequence[Optional[Sequence[float]]]) -> dict[str, Any]:
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

  def result(self, prompt: Prompt, found: Sequence[float]) -> dict[str, Any]:
    result = {} if prompt.targets is None else {'targets': prompt.targets}
    return {**result, 'value': found[0]}


@dataclasses.dataclass(frozen=True)
class VectorOutcome:
  """The embedding of a text."""

  fields = (NUMBER, 'vector')

  def shown(self, found: Sequence[float]) -> str:
    return ' '.join(f'{x:.4f}' for x in found)

  def result(self, prompt: Prompt, found: Sequence[float]) -> dict[str, Any]:
    del prompt
    return {'vector': list(found)}


def open_class_job(
  model: Model,
  dataset: DatasetConfig,
  *,
  reader: ParamsReader,
  layout: Layout,
  read: Callable[[], Any],
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


def _length(model: Any, dataset: DatasetConfig) -> int:
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


def _outcome(model: Any, names: Sequence[str]) -> tuple[str, Outcome]:
  """Returns the name and the Outcome of an EncoderModel's predictions."""
  if model.embeds:
    return 'vectors', VectorOutcome()
  if model.regresses:
    return 'numbers', NumberOutcome()
  if model.tags:
    return 'tags', TagOutcome(names)
  return 'labels' if model.multi_label else 'classes', ClassOutcome(names, model.multi_label)
