"""The job that `python -m t5x_gpu.infer` runs for a text classifier."""

from collections.abc import Callable, Collection
from typing import Any, Optional

from t5x_gpu.checkpoint.arrays.params_files import ParamsReader
from t5x_gpu.data.batches import CLASS_NAMES, DatasetConfig
from t5x_gpu.data.data_module import open_text
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.generated_text import InferJob, say
from t5x_gpu.models.inference.classify import Classifier, ClassifierConfig
from t5x_gpu.models.lora import without_adapters
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.layout import Layout


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
  """Returns the job of a model that classifies.

  Args:
    model: an EncoderModel that classifies, or its adapters.
    dataset: of the run that trained it; its files are not read.
    reader: of the checkpoint; its manifest has the names of the classes.
    layout: mesh and rules.
    read: returns the parameters on `layout`; None in a dry run.
    batch_size: texts per batch.
    score: whether --score was given; an error, as it needs a model that writes text.
    may_import: modules that the task may import besides ours; None for any.
  Raises:
    ConfigError: `score`, a model file that lacks the length of the texts, or a task that imports
      another module.
    DataError: the vocabulary does not exist, or has more ids than the model.
  """
  if score:
    raise ConfigError(
      '--score is for a model that writes text; this one classifies.',
      fix='Remove --score: each result has the probabilities of all classes.',
    )
  if 'inputs' not in dataset.task_feature_lengths:
    raise ConfigError(
      'A model file lacks the length of the texts of a classifier.',
      fix='Give the gin file of the run that trained it, with --gin_file.',
    )
  plain = without_adapters(model)
  text = open_text(
    dataset, 'class_text', model_vocab_size=plain.config.vocab_size, may_import=may_import
  )
  found = reader.manifest.get('data', {}).get(CLASS_NAMES)
  names = list(map(str, found)) if isinstance(found, list) else []
  names += [f'unused {i}' if names else str(i) for i in range(len(names), plain.num_classes)]
  say(
    '\n'.join(
      [
        layout.table(),
        f'parameters: {reader.path}',
        f'vocabulary: {text.name}, {text.size:,} ids',
        f'classes: {", ".join(names)}',
      ]
    )
  )
  config = ClassifierConfig(text.length, text.end_id, batch_size)
  return InferJob(
    Classifier(model, read(), layout=layout, config=config),
    text,
    str(reader.path),
    class_names=names[: plain.num_classes],
  )
