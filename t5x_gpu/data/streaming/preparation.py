"""Makes packed rows of SeqIO Tasks and Mixtures, part by part, for `prepare`.

A task is cut into a fixed number of parts, and each part is tokenized and packed separately. So the
rows depend on the number of parts, but not on the number of processes. With one part, they equal
the rows of the streaming path.
"""

import dataclasses
from collections.abc import Iterator
from typing import Optional

import numpy as np

from t5x_gpu.data import features
from t5x_gpu.data.batches import BatchSpec, DatasetConfig, row_masks, with_masks
from t5x_gpu.data.data_module import module_of
from t5x_gpu.data.prepared.index import Index, MixtureMember
from t5x_gpu.data.sources import seqio_sources
from t5x_gpu.data.sources.corrupt_records import RecordCounts
from t5x_gpu.data.streaming import task_lookup
from t5x_gpu.data.streaming.feature_converters import feature_converter as make_converter
from t5x_gpu.data.streaming.feature_converters import model_rows
from t5x_gpu.data.tasks import chat, preference
from t5x_gpu.data.tf_runtime import deterministic_options, seqio, tf
from t5x_gpu.data.vocabularies import vocabularies
from t5x_gpu.errors import DataError, first_line, task_error
from t5x_gpu.runtime.machine import versions
from t5x_gpu.storage.json_schema import JsonObject

PART_BYTES = 64 * 2**20  # source bytes per part, by default
_MIN_PARTS = 4
# If the source has fewer files than parts, every part reads the whole source.
_MAX_READINGS = 16
_PACKAGES = ('t5x_gpu', 'seqio', 'tensorflow', 'array-record')
_NAMED = ('byte', 'sentencepiece:', 'huggingface:', 'words:')


@dataclasses.dataclass(frozen=True)
class Preparation:
  """Makes the rows of a task or mixture.

  Attributes:
    config: the task or mixture; shuffle and seed determine the order in which examples are packed.
    converter_name: a key of `features.LAYOUTS`.
    lengths: model feature -> length, 0 for a number per row; in the order of the records.
    vocab_sizes: model feature -> exclusive bound of the model's ids.
    class_names: class names of the model, or empty.
  """

  config: DatasetConfig
  converter_name: str
  lengths: dict[str, int]
  vocab_sizes: dict[str, int]
  class_names: tuple[str, ...]
  _task: task_lookup.TaskOrMixture

  def _members(self) -> dict[str, seqio.Task]:
    """Returns name -> task for the tasks that have the split."""
    return {
      task_lookup.own_name(task.name): task
      for task in sorted(seqio.get_subtasks(self._task), key=lambda task: task.name)
      if self.config.split in task.splits
    }

  def plan(self, *, num_parts: Optional[int]) -> Index:
    """Returns the index without shards.

    Args:
      num_parts: number of parts of each task; None for one part per 64 MiB of source, at least 4.
    """
    config, members = self.config, {}
    for name, task in self._members().items():
      source = seqio_sources.source_fingerprint(task.source, split=config.split)
      source |= chat.template_facts(task) | preference.template_facts(task)
      rate = float(self._task.get_rate(task)) if isinstance(self._task, seqio.Mixture) else 1.0
      parts = num_parts or _num_parts(task, config.split, source)
      members[name] = MixtureMember(rate=rate, source=source, num_shards=parts, shards=())
    own = {name: feature.vocabulary for name, feature in self._task.output_features.items()}
    kind = features.layout(self.converter_name)
    variables = config.chat_template_variables
    return Index(
      source_config={
        'mixture_or_task_name': config.mixture_or_task_name,
        'mixture_or_task_module': config.mixture_or_task_module,
        'vocabulary': config.vocabulary,
        'use_cached': config.use_cached,
        'module': module_of(config),
        **({'chat_template_variables': dict(variables)} if variables else {}),
      },
      split=config.split,
      feature_converter=self.converter_name,
      task_feature_lengths=dict(config.task_feature_lengths),
      pack=config.pack,
      loss_on_targets_only=config.loss_on_targets_only,
      features=self.lengths,
      vocabularies={name: _about(own[name]) for name in kind.task_features},
      class_names=task_lookup.class_names(self._task, self.class_names),
      packing={'shuffle': config.shuffle, 'seed': config.seed if config.shuffle else None},
      members=members,
      versions=versions(_PACKAGES),
    )

  def rows(self, member: str, *, part: int, num_parts: int) -> Iterator[dict[str, np.ndarray]]:
    """Yields the rows of one part of a task.

    Args:
      member: name of the task.
      part, num_parts: index of the part, number of parts.
    Raises:
      DataError: text cannot be read, or ids exceed the model's.
    """
    config, task = self.config, self._members()[member]
    if (damage := seqio_sources.damage_of(task.source)) is not None:
      damage.begin_part()
    tf.random.set_seed(config.seed)  # as in streaming, for random operations without a seed
    converter = make_converter(
      self.converter_name, pack=config.pack, loss_on_targets_only=config.loss_on_targets_only
    )
    # All parts use the same seed: if a source cannot be cut, each part takes every n-th example.
    info = None if num_parts == 1 else seqio.ShardInfo(index=part, num_shards=num_parts)
    options = deterministic_options(1)  # the other cores work on other parts
    try:
      examples = task_lookup.examples(task, config, shuffle=config.shuffle, num_epochs=1, part=info)
      rows = model_rows(
        examples,
        converter=converter,
        name=self.converter_name,
        task_feature_lengths=config.task_feature_lengths,
        output_features=task.output_features,
        class_numbers=task_lookup.class_numbers(task, self.class_names),
        masks=row_masks(self.lengths),
      )
      for row in rows.with_options(options).as_numpy_iterator():
        self._check(row, member)
        row = with_masks(row, self.lengths)
        yield {name: row[name] for name in self.lengths}
    except (tf.errors.OpError, ValueError, AssertionError) as e:
      raise seqio_sources.reading_problem(task.source) or task_error(
        f'{member!r}, split {config.split!r}, cannot be read: {first_line(e)[:300]}',
        fix='Check the files and the preprocessors of the task.',
      ) from e

  def records(self, member: str, *, part: int, num_parts: int) -> RecordCounts:
    """Returns the number of records read for the part whose `rows` were made last.

    The counts of all parts add up: if every part reads all files, only the first part counts them.
    """
    source = self._members()[member].source
    damage = seqio_sources.damage_of(source)
    found = RecordCounts() if damage is None else damage.records
    if found.read and part > 0 and num_parts > len(source.list_shards(self.config.split)):
      return RecordCounts()
    return found

  def _check(self, row: JsonObject, member: str) -> None:
    for name, bound in self.vocab_sizes.items():
      low, high = int(np.min(row[name])), int(np.max(row[name]))
      if low < 0 or high >= bound:
        raise DataError(
          f'{member!r} has numbers from {low:,} to {high:,} in {name!r}; the model has 0 to '
          f'{bound - 1:,}.',
          fix="Set the model's vocab_size (num_classes for labels) higher, or correct the task.",
          parameters=('TransformerConfig.vocab_size', 'EncoderModel.num_classes'),
        )


def preparation(config: DatasetConfig, *, spec: BatchSpec, feature_converter: str) -> Preparation:
  """Returns the preparation of a task or mixture; see `data_module.open_preparation`."""
  features.check_lengths(feature_converter, task_feature_lengths=config.task_feature_lengths)
  features.check_pack(feature_converter, pack=config.pack)
  task = task_lookup.lookup(config)
  task_lookup.check(task, config, spec=spec, feature_converter=feature_converter)
  lengths = {name: shape[1] if len(shape) > 1 else 0 for name, shape in sorted(spec.shapes.items())}
  sizes = dict(spec.vocab_sizes)
  return Preparation(config, feature_converter, lengths, sizes, spec.class_names, task)


def _num_parts(task: seqio.Task, split: str, source: JsonObject) -> int:
  size = source.get('bytes')
  if size is None and isinstance(task.source, seqio.TfdsDataSource):
    info = seqio_sources.tfds_builder(task.source, split).info.splits
    size = info[split].num_bytes if split in info else None
  parts = max(_MIN_PARTS, -(-(size or 0) // PART_BYTES))
  if task.source.supports_arbitrary_sharding:
    return parts
  return min(parts, max(_MAX_READINGS, len(task.source.list_shards(split))))


def _about(vocabulary: seqio.Vocabulary) -> JsonObject:
  name = vocabularies.vocabulary_name(vocabulary)
  return {
    'name': name,
    'by_name': name.startswith(_NAMED),
    'size': vocabulary.vocab_size,
    'fingerprint': vocabularies.vocabulary_fingerprint(vocabulary),
  }
