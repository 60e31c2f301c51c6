"""Tasks from files with columns, with no Python at all.

  csv:PATTERN, tsv:PATTERN   a header, then a row per example; tsv has no quoting
  parquet:PATTERN            a row per example
  hdf5:PATTERN               datasets of strings, one per column
  tfrecord:PATTERN           tf.train.Examples with one text per feature
  arrayrecord:PATTERN        the same, or a UTF-8 text per record
  hf_dataset:FOLDER          what Hugging Face's `save_to_disk` wrote, or a folder of its data files

The columns are `text`, or `inputs` and `targets`, or chosen: csv:PATTERN#text=body.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Optional

from t5x_gpu.data.sources import discovery, labelled_tables, line_formats, seqio_sources
from t5x_gpu.data.sources.block_reader import BlockReader
from t5x_gpu.data.sources.column_formats import ARRAYRECORD, ARROW, HDF5, PARQUET
from t5x_gpu.data.sources.rows import NAME, FileForm, feature_columns, pattern_and_columns
from t5x_gpu.data.tasks import builtin as tasks
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError, first_line

FORMS = {
  'csv': line_formats.CSV,
  'tsv': line_formats.TSV,
  'parquet': PARQUET,
  'hdf5': HDF5,
  'tfrecord': line_formats.TFRECORD,
  'arrayrecord': ARRAYRECORD,
}
# What the data files of Hugging Face's datasets are called -> their form.
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
  names, judged = [], files[0]
  for judged in files:  # by the first that has a row
    try:
      names = list(form.columns(judged))
    except DataError:
      raise
    except Exception as e:  # h5py, pyarrow, array_record: each has its own
      raise DataError(
        f'{judged} cannot be read as {form.name}: {first_line(e)[:200]}',
        fix=f'Point {name}: at files of that form.',
        parameters=NAME,
      ) from e
    if names:
      break
  columns = feature_columns(names, chosen=chosen, where=judged)
  reader = BlockReader(form, columns=columns, num_files=len(files), chosen=chosen is not None)
  make = tasks.text_task if set(columns) == {'targets'} else tasks.supervised_task
  if by_split is None or set(by_split) == {'train'}:
    return make(name, seqio_sources.HashSplitSource(files, reader=reader))
  return make(
    name, seqio_sources.DocumentSource(lambda: by_split, reader=reader, splits=tuple(by_split))
  )


def _maker(name: str) -> Callable[[str], seqio.Task]:
  def make(spelled: str) -> seqio.Task:
    pattern, chosen = pattern_and_columns(spelled)
    files = discovery.matching_files(pattern)
    by_split = labelled_tables.files_by_split(files)
    return _task(name, FORMS[name], files, by_split=by_split, chosen=chosen)

  return make


def hf_dataset(spelled: str) -> seqio.Task:
  """Returns a task over a folder of a Hugging Face dataset; folders or file names say the split.

  Raises:
    DataError: no such folder, no data files in it, or files of several forms.
  """
  folder, chosen = pattern_and_columns(spelled)
  files = discovery.matching_files(folder)
  root = os.path.abspath(os.path.expanduser(folder))
  by_form: dict[str, list[str]] = {}
  for path in files:
    base = os.path.basename(path)
    ending = next((e for e in _HUGGINGFACE_FORMS if base.endswith(e)), None)
    if ending and not base.startswith('cache-'):  # results of `map`, not the data
      by_form.setdefault(ending, []).append(path)
  if len(by_form) != 1:
    raise DataError(
      f'{folder!r} has '
      + (
        ' and '.join(f'{len(f)} {e} files' for e, f in by_form.items())
        or f'no data file among its {len(files)} files'
      )
      + '.',
      fix='Give a folder that `save_to_disk` wrote, or one with data files of one form: '
      + ', '.join(_HUGGINGFACE_FORMS)
      + '.',
      parameters=NAME,
    )
  ((ending, found),) = by_form.items()
  by_folder: dict[str, list[str]] = {}
  for path in found:
    inner = os.path.relpath(os.path.abspath(path), root).split(os.sep)
    by_folder.setdefault(inner[0] if len(inner) > 1 else '', []).append(path)
  named = {
    split: paths
    for name, paths in by_folder.items()
    for split in (labelled_tables.files_by_split([name]) or {})
  }
  by_split = named if len(named) == len(by_folder) else labelled_tables.files_by_split(found)
  return _task('hf_dataset', _HUGGINGFACE_FORMS[ending], found, by_split=by_split, chosen=chosen)


PATTERN_TASKS: Mapping[str, Callable[[str], seqio.Task]] = {
  **{name: _maker(name) for name in FORMS},
  'hf_dataset': hf_dataset,
}
