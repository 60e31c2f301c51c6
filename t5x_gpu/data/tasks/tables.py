"""Tasks from files with columns, without any Python.

  jsonl:PATTERN              a JSON object per line: 'text', 'inputs' and 'targets', 'messages', or
                             'chosen' and 'rejected'
  csv:PATTERN, tsv:PATTERN   a header, then a row per example; tsv has no quoting
  parquet:PATTERN            a row per example
  tfrecord:PATTERN           tf.train.Examples with one text per feature
  arrayrecord:PATTERN        the same, or a UTF-8 text per record
  hf_dataset:FOLDER          the output of Hugging Face's `save_to_disk`, or a folder of data files
  text_pairs:PATTERN         .tsv with inputs, a tab and targets per line, or .jsonl with these keys

The columns are `text`, or `inputs` and `targets`, or chosen: csv:PATTERN#text=body.
"""

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, labelled, line_formats
from t5x_gpu.data.sources.column_formats import ARROW, PARQUET, of_records
from t5x_gpu.data.sources.conversations import (
  CHOSEN,
  CONVERSATIONS,
  MESSAGES,
  REJECTED,
  RecordForm,
  conversation_key,
  preferences,
)
from t5x_gpu.data.sources.discovery import unreadable
from t5x_gpu.data.sources.readers import ARRAYRECORD, TFRECORD, BlockReader
from t5x_gpu.data.sources.rows import NAME, FileForm, feature_columns, pattern_and_columns
from t5x_gpu.data.sources.seqio_sources import file_source
from t5x_gpu.data.tasks import builtin, chat, preference
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError, first_line, listed, task_error
from t5x_gpu.storage.files import is_missing
from t5x_gpu.storage.json_schema import read_json
from t5x_gpu.storage.user_paths import user_path

FORMS = {
  'jsonl': line_formats.JSON_LINES,
  'csv': line_formats.CSV,
  'tsv': line_formats.TSV,
  'parquet': PARQUET,
  'tfrecord': TFRECORD,
  'arrayrecord': ARRAYRECORD,
}
# Form -> function that makes the form with conversations or preferences.
_RECORDS: Mapping[str, Callable[[RecordForm], FileForm]] = {
  'jsonl': line_formats.record_lines,
  'parquet': functools.partial(of_records, PARQUET),
  'arrow': functools.partial(of_records, ARROW),
}
# Files that `save_to_disk` writes into a dataset's folder and into the folders of its splits.
_DATASET, _SPLITS = 'state.json', 'dataset_dict.json'
_CACHED = 'cache-'  # name prefix of files with cached results of `map`, which are not data
log = logging.getLogger(__name__)
# Extension of data files of Hugging Face datasets -> form.
_HUGGINGFACE_FORMS = {
  '.arrow': ARROW,
  '.parquet': PARQUET,
  '.jsonl': line_formats.JSON_LINES,
  '.jsonl.gz': line_formats.JSON_LINES,
  '.jsonl.zst': line_formats.JSON_LINES,
  '.csv': line_formats.CSV,
}


def _task(
  name: str,
  form: FileForm,
  files: Sequence[str],
  *,
  by_split: Optional[Mapping[str, Sequence[str]]],
  chosen: Optional[Mapping[str, str]],
) -> seqio.Task:
  by_split = None if by_split is None or set(by_split) == {'train'} else by_split
  options = dict(by_split=by_split, chosen=chosen is not None)
  keys = _pairs(name, form, files, chosen)
  if keys is not None:
    key, others = keys[CHOSEN], {k: column for k, column in keys.items() if k != CHOSEN}
    records = _RECORDS[form.name](preferences(**others))
    options.update(preprocessor=preference.Preferences, form=records, key=key)
    return chat.templated_task(name, files, **options)
  key = _messages(name, form, files, chosen)
  if key is not None:
    records = _RECORDS[form.name](CONVERSATIONS)
    options.update(preprocessor=chat.Conversations, form=records, key=key)
    return chat.templated_task(name, files, **options)
  if chosen and form is line_formats.JSON_LINES:  # the first record may be damaged
    columns = dict(chosen)
  else:
    names, judged = _first_columns(name, form, files)
    columns = feature_columns(names, chosen=chosen, where=judged)
  reader = BlockReader(form, columns=columns, num_files=len(files), chosen=chosen is not None)
  return builtin.task_for(columns)(name, file_source(files, by_split, reader=reader))


def _pairs(
  name: str, form: FileForm, files: Sequence[str], chosen: Optional[Mapping[str, str]]
) -> Optional[Mapping[str, str]]:
  """Returns the keys of chosen and rejected answers if the files hold preferences, else None."""
  if chosen is not None:
    if CHOSEN not in chosen:
      return None
    _check_records(form, f'#chosen={chosen[CHOSEN]}', 'preferences')
    return chosen
  if form.name not in _RECORDS:
    return None
  names, _ = _first_columns(name, form, files)
  others = conversation_key(names) or {'text', 'targets'}.intersection(names)
  return (
    {CHOSEN: CHOSEN, REJECTED: REJECTED} if {CHOSEN, REJECTED} <= {*names} and not others else None
  )


def _check_records(form: FileForm, chosen: str, kind: str) -> None:
  if form.name not in _RECORDS:
    raise task_error(
      f'{chosen}: {form.name} files hold texts; {kind} are read from {", ".join(_RECORDS)}.',
      fix='Write them as JSON lines: jsonl:PATTERN.',
    )


def _messages(
  name: str, form: FileForm, files: Sequence[str], chosen: Optional[Mapping[str, str]]
) -> Optional[str]:
  """Returns the key of the messages if the files hold conversations, else None.

  Raises:
    DataError: the files also hold texts, or the form supports only texts, not conversations.
  """
  if chosen is not None:
    key = chosen.get(MESSAGES)
    if key is not None:
      _check_records(form, f'#messages={key}', 'conversations')
    return key
  if form.name not in _RECORDS:
    return None
  names, path = _first_columns(name, form, files)
  key = conversation_key(names)
  texts = [column for column in ('text', 'targets') if column in names]
  if key is not None and texts:
    if form is not line_formats.JSON_LINES:  # a table may have further columns
      return None
    raise task_error(
      f'The first object of {path} has {texts[0]!r} and {key!r}: a text and a conversation.',
      fix=f'Choose after the pattern: #messages={key}, or #text={texts[0]}.',
    )
  return key


def _first_columns(name: str, form: FileForm, files: Sequence[str]) -> tuple[list[str], str]:
  """Returns the columns of the first file with a row, and the file."""
  damaged: Optional[DataError] = None
  for path in files:
    try:
      names = list(form.columns(path))
    except DataError as e:
      if name != 'hf_dataset' or form is not line_formats.JSON_LINES:
        raise
      damaged, names = damaged or e, []  # another file may show the columns
    except Exception as e:  # pyarrow and array_record raise different errors
      if isinstance(e, OSError) and not is_missing(e):
        raise unreadable(path, e) from e
      raise task_error(
        f'{path} cannot be read as {form.name}: {first_line(e)[:200]}',
        fix=f'Get the file again, or point {name}: at files of that form.',
      ) from e
    if names:
      return names, path
  rows = 'a JSON object per line' if form is line_formats.JSON_LINES else 'rows'
  more = f', and neither have {len(files) - 1} other files' if len(files) > 1 else ''
  raise damaged or DataError(
    f'{files[0]} has no rows{more}.', fix=f'Point {name}: at files with {rows}.', parameters=NAME
  )


def _from_files(name: str, spelled: str) -> seqio.Task:
  pattern, chosen = pattern_and_columns(spelled)
  files = discovery.matching_files(pattern)
  by_split = labelled.clear_splits(files) if name == 'jsonl' else labelled.files_by_split(files)
  return _task(name, FORMS[name], files, by_split=by_split, chosen=chosen)


def _saved_last(files: Sequence[str]) -> list[str]:
  """Returns `files` without leftovers of an earlier `save_to_disk` into the same folder.

  Raises:
    DataError: a file of the dataset is missing, or the list of its files is damaged.
  """
  current: dict[str, set[str]] = {}  # folder -> names of the files or folders in it
  for path in files:
    folder, name = os.path.split(path)
    if name not in (_DATASET, _SPLITS):
      continue
    try:
      about = read_json(path, dict)
      names = about.get('splits') if name == _SPLITS else about.get('_data_files')
      if names is None:  # the file belongs to another program
        continue
      names = set(names) if name == _SPLITS else {entry['filename'] for entry in names}
      gone = sorted(x for x in names if not os.path.exists(os.path.join(folder, x)))
    except (ValueError, TypeError, KeyError, OSError) as e:
      if isinstance(e, OSError) and not is_missing(e):
        raise unreadable(path, e) from e
      raise _not_saved(f'{path} does not list the files of the dataset: {e!r}.') from e
    if gone:
      raise _not_saved(f'{path} lists {gone[0]!r}, which does not exist.')
    if folder in current:
      raise _not_saved(f'{folder} has {_DATASET} and {_SPLITS}: two datasets are saved in it.')
    current[folder] = names

  def is_current(path: str) -> bool:
    return all(
      os.path.relpath(path, folder).split(os.sep)[0] in names
      for folder, names in current.items()
      if path.startswith(os.path.join(folder, ''))
    )

  kept = [path for path in files if is_current(path)]
  others = [path for path in files if path not in kept and path.endswith('.arrow')]
  if earlier := [path for path in others if not os.path.basename(path).startswith(_CACHED)]:
    log.warning(
      'skipped %d files of an earlier save_to_disk, which %s and %s do not list: %s',
      len(earlier),
      _DATASET,
      _SPLITS,
      ', '.join(listed(earlier, 3)),
    )
  return kept


def _not_saved(what: str) -> DataError:
  return task_error(what, fix='Save the dataset again with `save_to_disk`, into a new folder.')


def hf_dataset(spelled: str) -> seqio.Task:
  """Returns a task over a folder of a Hugging Face dataset; folder or file names name the split.

  Raises:
    DataError: the folder does not exist, has no data files, or has files of several forms.
  """
  folder, chosen = pattern_and_columns(spelled)
  files = _saved_last(discovery.matching_files(folder))
  root = user_path(folder)
  by_form: dict[str, list[str]] = {}
  for path in files:
    base = os.path.basename(path).lower()
    ending = next((e for e in _HUGGINGFACE_FORMS if base.endswith(e)), None)
    if ending and not base.startswith(_CACHED):
      by_form.setdefault(ending, []).append(path)
  if len(by_form) != 1:
    raise task_error(
      f'{folder!r} has '
      + (
        ' and '.join(f'{len(f)} {e} files' for e, f in by_form.items())
        or f'no data file among its {len(files)} files'
      )
      + '.',
      fix='Give a folder that `save_to_disk` wrote, or one with data files of one form: '
      + ', '.join(_HUGGINGFACE_FORMS)
      + '.',
    )
  ((ending, found),) = by_form.items()
  by_folder: dict[str, list[str]] = {}
  for path in found:
    inner = os.path.relpath(os.path.abspath(path), root).split(os.sep)
    by_folder.setdefault(inner[0] if len(inner) > 1 else '', []).append(path)
  named = {
    split: paths
    for name, paths in by_folder.items()
    for split in (labelled.files_by_split([name]) or {})
  }
  by_split = named if len(named) == len(by_folder) else labelled.files_by_split(found)
  return _task('hf_dataset', _HUGGINGFACE_FORMS[ending], found, by_split=by_split, chosen=chosen)


def text_pairs(pattern: str) -> seqio.Task:
  """Returns a supervised task from .tsv or .jsonl files.

  The words train, dev, test in the file names determine the split; without them, a hash does.

  Raises:
    DataError: no file matches, or files have both forms or neither. Lines that are not pairs raise
      when they are read, naming file:line.
  """
  files = discovery.matching_files(pattern)
  forms = sorted({os.path.splitext(path)[1] for path in files})
  if forms not in (['.tsv'], ['.jsonl']):
    found = ', '.join(form or 'without one' for form in forms)
    raise task_error(
      f'text_pairs reads .tsv files or .jsonl files; {pattern!r} matches '
      f'{len(files)} of the form {found}.',
      fix='Narrow the pattern to files of one form, such as text_pairs:FOLDER/*.tsv.',
    )
  reader = BlockReader(
    line_formats.JSON_LINES if forms == ['.jsonl'] else line_formats.PAIRS,
    num_files=len(files),
    columns={name: name for name in ('inputs', 'targets')},
  )
  source = file_source(files, labelled.files_by_split(files), reader=reader)
  return builtin.supervised_task('text_pairs', source)


PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  **{name: functools.partial(_from_files, name) for name in FORMS},
  'hf_dataset': hf_dataset,
  'text_pairs': text_pairs,
}
