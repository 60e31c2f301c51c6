"""Checks that the data is the same that a checkpoint was trained on; errors name the difference.

There are two checks, in this order. The first compares the facts that every iterator writes into
its state: task, files, vocabulary, lengths, seed, rates. The second compares the hash of the next
batch, which reveals changes that facts do not show: different code in a preprocessor, another
version of a library. source_files.py finds changed files.

`data_line` logs the guarantee about the order of the data, and its cost.
"""

import json
import re
from collections.abc import Callable

from t5x_gpu.errors import DataError
from t5x_gpu.storage.json_schema import Fields, Json, parse_json

LIBRARIES = 'libraries'
# Fact -> (description, the setting that a user changes); facts about a task or feature are named
# 'FACT of NAME'.
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
  'chat_template': ('the chat template', ''),
  'source': ('the data version', ''),
  'rows': ('the data version', ''),
}
_REST = {
  'feature_converter': 'Use the model of the checkpoint. For a classifier of an earlier version: '
  'EncoderModel.token_types = False.',
  'rates': 'Register the mixture with its earlier rates; for prepared:DIR set '
  'DatasetConfig.mixture_rates to them.',
  'vocabulary': 'Restore the earlier vocabulary: the same file, or VOCABULARY.',
  'chat_template': 'Restore the earlier chat template in the folder of the tokenizer: '
  'chat_template.jinja, or chat_template in tokenizer_config.json.',
  'source': 'Restore the earlier files.',
  'rows': 'Restore the earlier prepared folder.',
}
_PARAMETERS = {
  'rates': 'DatasetConfig.mixture_rates',
  'vocabulary': 'DatasetConfig.vocabulary',
  'chat_template': 'DatasetConfig.vocabulary',
}
_NAME = 'DatasetConfig.mixture_or_task_name'


def differences(saved: Json, now: Json, *, before: str = 'saved') -> list[str]:
  """Returns a line per fact that differs: `KEY: saved VALUE, now VALUE`; `before` is the word."""
  return [
    f'{key}: {before} {saved.get(key)!r}, now {now.get(key)!r}'
    for key in sorted(saved.keys() | now.keys())
    if saved.get(key) != now.get(key)
  ]


def check_same_data(saved: Json, now: Json, *, by_hash: Callable[[], Json] = dict) -> None:
  """Raises DataError, with the facts that differ, unless two fingerprints of data agree.

  Args:
    saved, now: fingerprints.
    by_hash: returns the facts about sources as if a hash assigned their splits; see
      `DocumentSource.fingerprint_by_hash`.
  """
  wrong = differences(saved, now)
  if not wrong:
    return
  for fact in now.values():
    check_numbering(saved, fact)
  for key, fact in by_hash().items():
    if saved.get(key) == fact != now.get(key):
      raise DataError(
        f'The checkpoint was trained by an earlier version of t5x_gpu, where a hash assigned the '
        f'texts of jsonl files to splits: its training also read the files that have validation or '
        f'test in their names. Now these names decide.\n  {key}: saved {fact!r}, now '
        f'{now.get(key)!r}',
        fix='Start a new run in another MODEL_DIR; RestoreConfig can load the parameters. The '
        'files are part of the data, so other names would not help. Or finish this run with '
        'version 0.2.',
        parameters=(_NAME,),
        docs='tasks.md#splits',
      )
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
    f'The data differs from the training data of the checkpoint.{parts}\n  ' + '\n  '.join(wrong),
    fix='\n'.join([*dict.fromkeys(fixes), 'Or start a new run in another MODEL_DIR.']),
    parameters=dict.fromkeys(parameters or [_NAME]),
    docs='data.md#the-same-data',
  )


# The fingerprint of a Hugging Face tokenizer.
_NUMBERED = re.compile(r'(huggingface:.*), (\d+) ids')


def check_numbering(saved: Json, vocabulary: object) -> None:
  """Raises DataError if a model was trained with another id for the token that has id 0.

  For encoders and encoder-decoders, versions up to 0.2 gave the token an id after the tokenizer's
  last id, because id 0 was padding.

  Args:
    saved: facts about the data in a manifest or data state.
    vocabulary: `vocabulary_fingerprint` of the tokenizer in this version.
  """
  now = _NUMBERED.fullmatch(vocabulary) if isinstance(vocabulary, str) else None
  for fact in saved.values():
    old = _NUMBERED.fullmatch(fact) if isinstance(fact, str) else None
    if now and old and old[1] == now[1] and int(old[2]) == int(now[2]) + 1:
      raise DataError(
        f'The checkpoint was trained by an earlier version of t5x_gpu, where id 0 was padding: the '
        f'token with id 0 of {now[1]} had id {now[2]}. This version uses the ids of the tokenizer.',
        fix='Use version 0.2 for this checkpoint, or train again.',
        parameters=('DatasetConfig.vocabulary',),
        docs='tasks.md#vocabularies',
      )


def resumed_step(state: bytes, schema: Fields, *, module: str, now: Json) -> int:
  """Returns 'batches_taken' of a JSON data state.

  Args:
    state: result of `get_state`: a JSON object with 'batches_taken' and 'data'.
    schema: schema of the object.
    module: name of the module that reads the state.
    now: the fingerprint of the open data.
  Raises:
    DataError: another module wrote the state, or the data differ.
  """
  try:
    saved = parse_json(state, schema)
  except ValueError as e:
    raise foreign_state(state, module=module, reason=str(e)) from e
  check_same_data(saved['data'], json.loads(json.dumps(now)))
  return saved['batches_taken']


def foreign_state(state: bytes, *, module: str, reason: str) -> DataError:
  """Returns the error for a data state that `module` did not write."""
  return DataError(
    f'This data state ({len(state)} bytes) was not written by {module}: {reason}. The checkpoint '
    'was trained on data that was read in another way (streaming, prepared or synthetic).',
    fix='Set MIXTURE_OR_TASK_NAME and DatasetConfig.module as in the run of the checkpoint, or '
    'start a new run in another MODEL_DIR; RestoreConfig can load the parameters.',
    parameters=(_NAME, 'DatasetConfig.module'),
  )


def check_next_batch(*, saved_hash: str, hash_now: str, saved: Json, now: Json) -> None:
  """Raises DataError unless the next batch equals the next batch of the interrupted run.

  Args:
    saved_hash, hash_now: `batch_hash` of the next batch, saved and current.
    saved, now: `BatchIterator.describe()`; the facts that identify the data already agree.
  """
  if saved_hash == hash_now:
    return
  libraries = differences(saved.get(LIBRARIES, {}), now.get(LIBRARIES, {}))
  rest = differences({**saved, LIBRARIES: None}, {**now, LIBRARIES: None})
  agree = [key for key in now if key in _PARTS and saved.get(key) == now[key]]
  found = [*(f'{line} (library)' for line in libraries), *rest]
  if found:
    text = 'Recorded facts that differ:\n  ' + '\n  '.join(found)
  else:
    text = (
      'All recorded facts agree. So the code of the task has changed (its preprocessors, its '
      'source); or, if MODEL_DIR has no source_files.json, text beyond the first 64 KiB of a file; '
      'or a text has token id 0, which versions up to 0.2 took for padding.'
    )
  raise DataError(
    f'The next batch differs from the batch that the checkpoint expects (hash {hash_now} instead '
    f'of {saved_hash}), although {", ".join(agree) or "all compared facts"} agree: '
    f'the data, its preprocessing or its libraries changed.\n  {text}',
    fix='Install the versions of that run, or restore its data and the code of its task; '
    'or start a new MODEL_DIR.',
    parameters=('MODEL_DIR', _NAME),
    docs='data.md#the-same-data',
  )


STREAMING = (
  'streaming: the global batch at step t depends on (data, seed, t) alone; every '
  'process reads the whole stream'
)


def data_line(described: Json, *, process_count: int) -> str:
  """Returns a line for the log, and a warning if every process reads the whole stream.

  Args:
    described: `BatchIterator.describe()`; without a 'guarantee' there is nothing to log.
    process_count: number of processes of the run.
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
      f'WARNING: each of the {process_count} processes reads and tokenizes all of the text{few}. '
      'If input_wait_fraction is above 0, prepare the data once; any number of files works: '
      'python -m t5x_gpu.prepare, then MIXTURE_OR_TASK_NAME = "prepared:DIR" (docs/data.md).'
    )
  return '\n'.join(lines)
