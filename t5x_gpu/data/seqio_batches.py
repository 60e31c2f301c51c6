"""Batches from SeqIO Tasks and Mixtures through tf.data, resumable at any batch.

The global batch at step t is a function of (data, seed, t). Every process builds the whole global
stream and puts its share of the rows on its devices, so the order does not depend on the number of
hosts; but every host reads all of the text.
"""

import functools
import glob
from typing import Any, Optional

from t5x_gpu.data import features
from t5x_gpu.data.batches import BatchSpec, DatasetConfig, row_masks
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.streaming import class_prompts, task_classes, task_lookup, task_prompts
from t5x_gpu.data.streaming import evaluated_tasks as evaluated_tasks_lib
from t5x_gpu.data.streaming import preparation as preparation_lib
from t5x_gpu.data.streaming.batch_iterator import SeqioBatches
from t5x_gpu.data.streaming.feature_converters import feature_converter as make_converter
from t5x_gpu.data.streaming.feature_converters import gets_ids_plus_one, model_rows
from t5x_gpu.data.tasks import chat, preference
from t5x_gpu.data.tf_runtime import deterministic_options, seqio, tf
from t5x_gpu.data.vocabularies.vocabularies import (
  TextVocabulary,
  named_vocabulary,
  text_vocabulary,
  vocabulary_fingerprint,
)
from t5x_gpu.errors import DataError
from t5x_gpu.runtime.cluster.agreement import Facts

# The same on every machine: the saved state contains the results of parallel maps, and hosts with
# different numbers of cores must be able to restore it. 2 x 256 rows of packing are in flight.
_THREADS = 2
_PREFETCH_BATCHES = 2


def _fingerprint(
  task: task_lookup.TaskOrMixture, config: DatasetConfig, *, feature_converter: str, repeat: bool
) -> dict[str, Any]:
  subtasks = seqio.get_subtasks(task)
  facts = {
    'task': task_lookup.kind(config),
    **config.facts(feature_converter=feature_converter, repeat=repeat),
    'use_cached': config.use_cached,
  }
  for name, feature in sorted(task.output_features.items()):
    facts[f'vocabulary of {name}'] = vocabulary_fingerprint(feature.vocabulary)
  facts |= chat.template_facts(task) | preference.template_facts(task)
  if isinstance(task, seqio.Mixture):
    facts['rates'] = {subtask.name: float(task.get_rate(subtask)) for subtask in subtasks}
  for subtask in subtasks:
    if config.split in subtask.splits:
      facts[f'source of {subtask.name}'] = seqio_sources.source_fingerprint(
        subtask.source, split=config.split
      )
  return facts


def _sources_by_hash(task: task_lookup.TaskOrMixture) -> dict[str, Any]:
  return {
    f'source of {subtask.name}': subtask.source.fingerprint_by_hash()
    for subtask in seqio.get_subtasks(task)
    if isinstance(subtask.source, seqio_sources.DocumentSource)
  }


def _file_facts(task: task_lookup.TaskOrMixture, split: str) -> Facts:
  found = {}
  for subtask in seqio.get_subtasks(task):
    if split in subtask.splits:
      facts = seqio_sources.file_facts(subtask.source, split=split)
      found |= {f'{subtask.name}: {name}': fact for name, fact in facts.items()}
  return found


def _paths(task: task_lookup.TaskOrMixture, config: DatasetConfig) -> dict[str, list[str]]:
  """Returns task -> the files with its examples: SeqIO's cache, or the source."""
  found = {}
  for subtask in seqio.get_subtasks(task):
    if config.use_cached and subtask.cache_dir:
      prefix = seqio.utils.get_cached_tfrecord_prefix(subtask.cache_dir, config.split)
      found[subtask.name] = sorted(tf.io.gfile.glob(f'{glob.escape(prefix)}*'))
    elif config.split in subtask.splits:
      found[subtask.name] = seqio_sources.source_paths(subtask.source, split=config.split)
  return found


def _dataset(
  task: task_lookup.TaskOrMixture,
  config: DatasetConfig,
  *,
  converter: seqio.FeatureConverter,
  feature_converter: str,
  repeat: bool,
  spec: BatchSpec,
) -> tf.data.Dataset:
  # Preprocessors of user tasks may use random operations without a seed.
  tf.random.set_seed(config.seed)
  examples = task_lookup.examples(
    task, config, shuffle=config.shuffle, num_epochs=None if repeat else 1
  )
  rows = model_rows(
    examples,
    converter=converter,
    name=feature_converter,
    task_feature_lengths=config.task_feature_lengths,
    output_features=task.output_features,
    class_numbers=task_classes.class_numbers(task, spec.class_names),
    masks=row_masks(spec.shapes),
  )
  batches = rows.batch(config.batch_size, drop_remainder=repeat)
  return batches.prefetch(_PREFETCH_BATCHES).with_options(deterministic_options(_THREADS))


def open_batches(
  config: DatasetConfig, *, spec: BatchSpec, feature_converter: str, repeat: bool = True
) -> SeqioBatches:
  """Returns the batches of `config`. Reads the first batch, so that bad data is an error here.

  Args:
    config: what to open.
    spec: the batches that the model accepts, `features.batch_spec(...)`.
    feature_converter: a key of `features.LAYOUTS`.
    repeat: reshuffle and start over at the end of the data. Otherwise stop there, and pad the last
      batch with rows of loss weight 0.
  Raises:
    ConfigError: the feature converter is unknown, or a task module cannot be imported.
    DataError: the task cannot provide these batches.
  """
  features.check_batch_size(config.batch_size)
  if config.mixture_rates is not None:
    raise DataError(
      'DatasetConfig.mixture_rates works only for prepared:DIR; '
      f'{config.mixture_or_task_name!r} has the rates that it was registered with.',
      fix='Remove it, or prepare the mixture once (docs/data.md) and train on prepared:DIR.',
      parameters=('DatasetConfig.mixture_rates',),
    )
  features.check_lengths(feature_converter, task_feature_lengths=config.task_feature_lengths)
  features.check_pack(feature_converter, pack=config.pack)
  converter = make_converter(
    feature_converter, pack=config.pack, loss_on_targets_only=config.loss_on_targets_only
  )
  task = task_lookup.lookup(config)
  task_lookup.check(task, config, spec=spec, feature_converter=feature_converter)

  task_lookup.check_not_empty(task, config)
  batches = SeqioBatches(
    lambda: _dataset(
      task,
      config,
      converter=converter,
      feature_converter=feature_converter,
      repeat=repeat,
      spec=spec,
    ),
    name=config.mixture_or_task_name,
    spec=spec,
    fingerprint=_fingerprint(task, config, feature_converter=feature_converter, repeat=repeat),
    problem=functools.partial(task_lookup.reading_problem, task),
    pad_last=not repeat,
    file_facts=functools.partial(_file_facts, task, config.split),
    paths=functools.partial(_paths, task, config),
    class_names=task_classes.class_names(task, spec.class_names),
    pipeline=2 if gets_ids_plus_one(feature_converter, task.output_features) else 1,
    by_hash=functools.partial(_sources_by_hash, task),
  )
  try:
    batches.peek()
    batches.prepare_to_resume()
  except BaseException:
    batches.close()
    raise
  return batches


def vocabulary(config: DatasetConfig, *, feature_converter: str) -> TextVocabulary:
  """Returns the vocabulary of the task's targets, to encode prompts and decode samples.

  The targets of classification are not text, so its result is the vocabulary of the inputs. A
  config without a task names its vocabulary.
  """
  if not config.mixture_or_task_name:
    found = named_vocabulary(config.vocabulary)
  else:
    given = task_lookup.lookup(config).output_features
    found = given['targets' if 'targets' in given else 'inputs'].vocabulary
  return text_vocabulary(found)


def class_names(config: DatasetConfig) -> Optional[tuple[str, ...]]:
  """Returns the names of the classes of the task's labels in order, or None without labels."""
  return task_classes.class_names(task_lookup.lookup(config))


# See t5x_gpu.data.data_module.DataModule.
task_names = evaluated_tasks_lib.task_names
evaluated_tasks = evaluated_tasks_lib.open_tasks
prompt_text = task_prompts.prompt_text
class_text = class_prompts.class_text
preparation = preparation_lib.preparation
