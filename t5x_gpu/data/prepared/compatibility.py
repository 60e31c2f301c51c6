"""Checks that prepared rows fit the model and the config of a run."""

import collections
import json
from collections.abc import Iterator

from t5x_gpu.data import features
from t5x_gpu.data.batches import PREPARED, BatchSpec, DatasetConfig, row_masks
from t5x_gpu.data.prepared.index import Index
from t5x_gpu.errors import DataError, Problem

_NAME = 'DatasetConfig.mixture_or_task_name'


def check_model(
  index: Index, config: DatasetConfig, *, spec: BatchSpec, feature_converter: str
) -> None:
  """Raises DataError, with all differences, unless the rows fit this model and config.

  Args:
    index: index of the prepared split.
    config: dataset config of the run.
    spec: the batches that the model accepts.
    feature_converter: the model's feature converter.
  """
  asked = {
    'feature_converter': feature_converter,
    'pack': config.pack,
    'task_feature_lengths': dict(config.task_feature_lengths),
    'loss_on_targets_only': config.loss_on_targets_only,
  }
  problems = [
    f'{name}: prepared with {getattr(index, name)!r}, the run has {value!r}.'
    for name, value in asked.items()
    if getattr(index, name) != value
  ]
  if spec.class_names and tuple(index.class_names or ()) != spec.class_names:
    problems.append(
      f'EncoderModel.class_names: prepared with {index.class_names}, the model has '
      f'{list(spec.class_names)}.'
    )
  problems += _text_problems(index, config, feature_converter=feature_converter)
  lengths = {name: shape[1] if len(shape) > 1 else 0 for name, shape in spec.shapes.items()}
  older = {name: length for name, length in lengths.items() if name not in row_masks(lengths)}
  if not problems and dict(index.features) not in (lengths, older):
    problems.append(
      f'features: prepared with {", ".join(index.features)}, the run has '
      f'{", ".join(spec.shapes)}, or other lengths.'
    )
  if not problems:
    sizes = _largest_ids(index, feature_converter)
    problems += [
      f'{name}: the rows have ids up to {size - 1:,}, the model has {spec.vocab_sizes[name]:,} ids.'
      for name, size in sizes.items()
      if size > spec.vocab_sizes.get(name, size)
    ]
  if problems:
    folder = config.mixture_or_task_name.removeprefix(PREPARED)
    raise DataError(
      f'{folder} was prepared for another model',
      problems=[Problem(problem) for problem in problems],
      fix='Prepare it for this model: python -m t5x_gpu.prepare --gin_file=MY.gin '
      '--output=OTHER_DIR'
      f"\n(with MIXTURE_OR_TASK_NAME = '{index.source_config['mixture_or_task_name']}'"
      '), or set the values that DIR was prepared with (VOCABULARY = None uses its vocabulary).',
      parameters=(
        _NAME,
        'DatasetConfig.task_feature_lengths',
        'DatasetConfig.pack',
        'DatasetConfig.vocabulary',
      ),
      docs='data.md',
    )


def _text_problems(index: Index, config: DatasetConfig, *, feature_converter: str) -> Iterator[str]:
  """Yields differences between the tokenization of the rows and the run's config."""
  variables = json.loads(json.dumps(config.chat_template_variables))
  prepared_with = index.source_config.get('chat_template_variables')
  if variables and variables != prepared_with:
    yield f'chat_template_variables: prepared with {prepared_with}, the run has {variables}.'
  names = {v['name'] for v in index.vocabularies.values() if v['name'] != 'classes'}
  if config.vocabulary is not None and config.vocabulary not in names:
    known = ', '.join(sorted(names))
    yield f'vocabulary: prepared with {known}, the run has {config.vocabulary!r}.'
  for parts in features.layout(feature_converter).tokens.values():
    for part in parts:
      if part not in index.vocabularies:
        yield f'vocabulary: prepared without a vocabulary for {part!r}.'


def _largest_ids(index: Index, feature_converter: str) -> dict[str, int]:
  """Returns model feature -> exclusive bound of its ids, in the rows and in the vocabulary."""
  bounds: dict[str, int] = collections.defaultdict(int)
  for member in index.members.values():
    for shard in member.shards:
      for name, value in shard.largest.items():
        bounds[name] = max(bounds[name], value + 1)
  kind = features.layout(feature_converter)
  for name, parts in kind.tokens.items():
    bounds[name] = max(bounds[name], *(index.vocabularies[part]['size'] for part in parts))
  if index.class_names:
    count = len(index.class_names) + (kind.classes == features.LABELS)
    bounds[kind.classes] = max(bounds[kind.classes], count)
  return dict(bounds)
