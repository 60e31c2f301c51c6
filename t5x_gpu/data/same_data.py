"""Is it the data that a checkpoint was trained on? If not: which part differs, and what to set.

Two questions, in this order. The facts of the data, which every iterator writes into its state:
task, files, vocabulary, lengths, seed, rates. Then the hash of the next batch, which sees what
facts cannot: the code of a preprocessor, a library. Changed files are found by source_files.py.

What the log says of the data of a run: what is guaranteed of its order, and what that costs.
"""

import importlib.metadata
from collections.abc import Iterable, Mapping
from typing import Any

from t5x_gpu.errors import DataError

LIBRARIES = 'libraries'
# Fact -> (what it is, what a user sets it by); facts of a task or feature end in ' of NAME'.
_PARTS = {
  'task': ('the mixture or task', 'MIXTURE_OR_TASK_NAME'),
  'split': ('the split', 'DatasetConfig.split'),
  'seed': ('the seed', 'RANDOM_SEED'),
  'shuffle': ('shuffling', 'SHUFFLE_TRAIN_EXAMPLES'),
  'pack': ('packing', 'PACK'),
  'batch_size': ('the batch size', 'BATCH_SIZE'),
  'task_feature_lengths': ('the lengths', 'TASK_FEATURE_LENGTHS'),
  'use_cached': ('the cache', 'USE_CACHED_TASKS'),
  'loss_on_targets_only': ('the objective', 'DatasetConfig.loss_on_targets_only'),
  'feature_converter': ('the objective', ''),
  'rates': ('the rates of the mixture', ''),
  'vocabulary': ('the tokenizer', ''),
  'source': ('the data version', ''),
  'rows': ('the data version', ''),
}
_REST = {
  'feature_converter': 'Take the model that the run had. For a classifier of an earlier version: '
  'EncoderModel.token_types = False.',
  'rates': 'Register the mixture with the rates that it had; for prepared:DIR set '
  'DatasetConfig.mixture_rates to them.',
  'vocabulary': 'Bring back the vocabulary that it had: the same file, or VOCABULARY.',
  'source': 'Bring back the files as they were.',
  'rows': 'Bring back the prepared folder as it was.',
}
_PARAMETERS = {'rates': 'DatasetConfig.mixture_rates', 'vocabulary': 'DatasetConfig.vocabulary'}
_NAME = 'DatasetConfig.mixture_or_task_name'


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
  """Returns a line per fact in which two descriptions of data differ."""
  return [
    f'{key}: saved {saved.get(key)!r}, now {now.get(key)!r}'
    for key in sorted(saved.keys() | now.keys())
    if saved.get(key) != now.get(key)
  ]


def check_same_data(saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
  """Raises DataError unless two fingerprints of data agree, with the facts in which they differ."""
  wrong = differences(saved, now)
  if not wrong:
    return
  kinds, fixes, parameters = [], [], []
  for key in sorted(saved.keys() | now.keys()):
    kind = key.partition(' of ')[0]
    if saved.get(key) == now.get(key) or kind not in _PARTS:
      continue
    what, knob = _PARTS[kind]
    kinds.append(what)
    fixes.append(_REST.get(kind) or f'Set {knob} = {saved.get(key)!r}.')
    parameters.append(_PARAMETERS.get(kind) or knob or _NAME)
  parts = f' What differs: {", ".join(dict.fromkeys(kinds))}.' if kinds else ''
  raise DataError(
    f'The data is not what the checkpoint was trained on.{parts}\n  ' + '\n  '.join(wrong),
    fix='\n'.join([*dict.fromkeys(fixes), 'Or start anew in another MODEL_DIR.']),
    parameters=dict.fromkeys(parameters or [_NAME]),
    docs='data.md#the-same-data',
  )


def check_next_batch(
  *, saved_hash: str, hash_now: str, saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
  """Raises DataError unless the next batch is the one that the checkpoint's run would have taken.

  Args:
    saved_hash, hash_now: `batch_hash` of the next batch, as it was saved and as it is.
    saved, now: `BatchIterator.describe()`; the facts that identify the data are known to agree.
  """
  if saved_hash == hash_now:
    return
  libraries = differences(saved.get(LIBRARIES, {}), now.get(LIBRARIES, {}))
  rest = differences({**saved, LIBRARIES: None}, {**now, LIBRARIES: None})
  agree = [key for key in now if key in _PARTS and saved.get(key) == now[key]]
  found = [*(f'{line} (library)' for line in libraries), *rest]
  if found:
    text = 'What differs of what is recorded:\n  ' + '\n  '.join(found)
  else:
    text = (
      'Nothing that is recorded differs. So the code of the task has changed (its '
      'preprocessors, its source); or, where MODEL_DIR has no source_files.json, text beyond '
      'the first 64 KiB of a file.'
    )
  raise DataError(
    f'The next batch is not the one that this run would have taken (hash {hash_now}, the '
    f'checkpoint says {saved_hash}), though {", ".join(agree) or "all that is compared"} agree: '
    f'the data, its preprocessing or its libraries changed.\n  {text}',
    fix='Install the versions that the run had, or bring back its data and the code of its task; '
    'or start a new MODEL_DIR.',
    parameters=('MODEL_DIR', _NAME),
    docs='data.md#the-same-data',
  )


def versions(packages: Iterable[str]) -> dict[str, str]:
  """Returns package -> version, of those that are installed."""
  found = {}
  for package in packages:
    try:
      found[package] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      continue
  return found


STREAMING = (
  'streaming: the global batch at step t depends on (data, seed, t) alone; every '
  'process reads the whole stream'
)


def data_line(described: Mapping[str, Any], *, process_count: int) -> str:
  """Returns a line for the log, and a warning where each process reads what all others read.

  Args:
    described: `BatchIterator.describe()`; a user's own may say nothing of a guarantee.
    process_count: of the run.
  """
  guarantee = described.get('guarantee')
  if not guarantee:
    return ''
  lines = [f'data: {guarantee}']
  if guarantee == STREAMING and process_count > 1:
    files = [
      source['files']
      for name, source in described.items()
      if name.startswith('source of ') and 'files' in source
    ]
    few = (
      f', in {min(files)} file(s) for {process_count} processes'
      if (files and min(files) < process_count)
      else ''
    )
    lines.append(
      f'WARNING: each of the {process_count} processes reads and tokenises all of the text{few}. '
      'Where input_wait_fraction shows, prepare it once, whatever the number of files: '
      'python -m t5x_gpu.prepare, then MIXTURE_OR_TASK_NAME = "prepared:DIR" (docs/data.md).'
    )
  return '\n'.join(lines)
