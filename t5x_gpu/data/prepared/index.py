"""index.json of a prepared split: format of the rows, files, and digests of the files.

DIR/train/index.json                              written last: without it the split is unfinished
DIR/train/TASK/00003-of-00016.arrayrecord         packed rows, see shard_writer.py
DIR/train/.unfinished/                            while `prepare` works on it

`read_index` reads it; `check_shards` compares the shards with its digests.
"""

import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Optional, TypedDict

from t5x_gpu.data.sources.corrupt_records import RecordCounts
from t5x_gpu.data.sources.discovery import sample_digest, sha256_of
from t5x_gpu.errors import DataError, NoExamplesError, Problem, listed, task_error
from t5x_gpu.storage.files import access_error, is_missing
from t5x_gpu.storage.json_schema import (
  Also,
  Fields,
  Json,
  JsonObject,
  MapOf,
  Nullable,
  Number,
  Text,
  Whole,
  parse_json,
  read_bytes,
  schema_of,
)
from t5x_gpu.storage.user_paths import expanded_path

FORMAT = 1
INDEX, UNFINISHED = 'index.json', '.unfinished'
_NAME = 'DatasetConfig.mixture_or_task_name'


def _shard_problem(shard: Json) -> str:
  """Returns why the entry of a shard is invalid; '' if it is valid."""
  file = pathlib.PurePosixPath(shard['file'])
  if file.is_absolute() or '..' in file.parts or '\0' in shard['file']:
    return 'its file is outside the folder'
  if shard['rows'] and not shard['file']:
    return 'it has rows but no file'
  if shard['rows'] > shard['bytes']:
    return f'it has {shard["rows"]:,} rows in {shard["bytes"]:,} bytes'
  return (
    ''
    if all(re.fullmatch('[0-9]{1,2}', exponent) for exponent in shard['lengths'])
    else 'a key of its length histogram is not an exponent'
  )


Digest = Annotated[str, Text('[0-9a-f]{64}|')]


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file of rows.

  Attributes:
    file: path below the folder of the split; '' for a shard without rows, which has no file.
    rows, tokens, bytes: number of rows, tokens (without padding) and bytes.
    sha256: sha256 of the whole file.
    sample: sha256 of a few blocks of the file, quick to check.
    largest: feature -> largest number in the feature.
    lengths: histogram of the lengths of packed examples: exponent e -> number of examples with
      2**(e-1) < length <= 2**e.
    records, damaged: number of source records read, and number of damaged records skipped; 0 if
      they are not counted, or if another shard counts them.
  """

  file: str
  rows: int
  tokens: int
  bytes: int
  sha256: Digest
  sample: Digest
  largest: Mapping[str, int]
  lengths: Mapping[str, int]
  records: int = 0
  damaged: int = 0


SHARD = Also(schema_of(Shard), _shard_problem)


@dataclasses.dataclass(frozen=True)
class MixtureMember:
  """One task of the split.

  Attributes:
    rate: its share in the mixture, not normalized.
    source: facts that identify the source data.
    num_shards: number of shards of the finished split.
    shards: the shards written so far.
  """

  rate: Annotated[float, Number(0, 1e18)]
  source: Json
  num_shards: int
  shards: Sequence[Annotated[Shard, SHARD]]

  @property
  def rows(self) -> int:
    return sum(shard.rows for shard in self.shards)

  @property
  def tokens(self) -> int:
    return sum(shard.tokens for shard in self.shards)

  @property
  def lengths(self) -> collections.Counter[int]:
    """Histogram of the lengths of packed examples; see `Shard.lengths`."""
    found: collections.Counter[int] = collections.Counter()
    for shard in self.shards:
      found.update({int(e): number for e, number in shard.lengths.items()})
    return found

  @property
  def records(self) -> RecordCounts:
    """Number of source records read, and of damaged records."""
    return RecordCounts(
      sum(shard.records for shard in self.shards), sum(shard.damaged for shard in self.shards)
    )


class VocabularyFacts(TypedDict):
  """A vocabulary; by_name: whether DatasetConfig.vocabulary accepts the name."""

  name: str
  fingerprint: Any
  size: int
  by_name: bool


class Packing(TypedDict):
  """The order in which examples were packed."""

  shuffle: bool
  seed: Annotated[Optional[int], Nullable(Whole(-(2**62)))]


def _modules_problem(found: object) -> str:
  names = found if isinstance(found, list) else [found or '']
  return '' if all(isinstance(name, str) for name in names) else 'it is not the name of a module'


_SOURCE_CONFIG = Fields(
  {'mixture_or_task_name': str, 'vocabulary': Nullable(str), 'module': str},
  optional={
    'mixture_or_task_module': Also(object, _modules_problem),
    'use_cached': bool,
    'chat_template_variables': dict,
  },
  others=False,
)
_VOCABULARIES = Also(
  MapOf(schema_of(VocabularyFacts)), lambda found: '' if found else 'it is empty'
)


@dataclasses.dataclass(frozen=True)
class Index:
  """Content of a prepared split. All fields except the members' shards are known in advance.

  Attributes:
    source_config: fields of the DatasetConfig that select the text; 'made_from' in the file.
    split, feature_converter, task_feature_lengths, pack, loss_on_targets_only: as in training.
    features: model feature -> its length, 0 for a number per row; in the order of the records.
    vocabularies: task feature -> its vocabulary.
    class_names: class names of the labels, or None.
    packing: the order in which examples were packed.
    members: task -> its shards.
    versions: package -> version that made the rows.
    format: version of this file and of the records.
  """

  source_config: Annotated[Json, _SOURCE_CONFIG]
  split: str
  feature_converter: str
  task_feature_lengths: Mapping[str, int]
  pack: bool
  loss_on_targets_only: bool
  features: Mapping[str, int]
  vocabularies: Annotated[Mapping[str, VocabularyFacts], _VOCABULARIES]
  class_names: Optional[Sequence[str]]
  packing: Packing
  members: Mapping[str, MixtureMember]
  versions: Mapping[str, str]
  format: Annotated[int, Whole(FORMAT, FORMAT)] = FORMAT

  @property
  def rows(self) -> int:
    return sum(member.rows for member in self.members.values())

  @property
  def tokens(self) -> int:
    return sum(member.tokens for member in self.members.values())

  @property
  def tokens_per_row(self) -> int:
    """Number of positions of a row, padding included."""
    return sum(length for name, length in self.features.items() if name in self.counted)

  @property
  def counted(self) -> tuple[str, ...]:
    """The features that hold tokens: the inputs of an encoder, the targets of a decoder."""
    return counted_features(self.features)

  @property
  def padding(self) -> float:
    """Share of padding among the positions."""
    return 1 - self.tokens / max(1, self.rows * self.tokens_per_row)

  def _facts(self) -> JsonObject:
    return {_IN_FILE.get(name, name): x for name, x in dataclasses.asdict(self).items()}

  def to_json(self) -> str:
    return json.dumps(self._facts(), indent=1)

  def plan(self) -> JsonObject:
    """Returns the fields that determine the rows: all except shards, names and paths."""
    facts = json.loads(json.dumps(self._facts()))
    for member in facts['members'].values():
      del member['shards']
    facts.pop('made_from')
    facts['versions'].pop('t5x_gpu', None)
    facts['vocabularies'] = {k: v['fingerprint'] for k, v in facts['vocabularies'].items()}
    return facts


_IN_FILE = {'source_config': 'made_from'}
_FIELDS = schema_of(Index)
_SCHEMA = Fields(  # a file has all fields
  {_IN_FILE.get(name, name): x for name, x in (_FIELDS.required | _FIELDS.optional).items()},
  others=False,
)


def counted_features(names: Iterable[str]) -> tuple[str, ...]:
  """Returns the model features among `names` that hold tokens, so that each token counts once."""
  names = set(names)
  return tuple(name for name in ('encoder_input_tokens', 'decoder_target_tokens') if name in names)


def from_json(text: str | bytes) -> Index:
  """Returns the index in `text`. Raises ValueError if `text` is not an index."""
  values = parse_json(text, _SCHEMA)
  members = {}
  for name, member in values.pop('members').items():
    shards = tuple(Shard(**shard) for shard in member.pop('shards'))
    members[name] = MixtureMember(**member, shards=shards)
  return Index(source_config=values.pop('made_from'), **values, members=members)


def unopened(e: OSError, path: pathlib.Path) -> DataError:
  """Returns the error for a file of prepared rows that cannot be opened or read now."""
  error = access_error(e, path)
  return task_error(error.what, fix=error.fix, docs='data.md')


def read_index(folder: str | os.PathLike, *, split: str) -> Index:
  """Returns the index of a split in `folder`, the DIR of `prepare`.

  Raises:
    DataError: the folder or split does not exist, the split is unfinished, or its index has another
      format.
  """
  folder = expanded_path(folder)
  path = folder / split / INDEX
  output = shlex.quote(str(folder))
  fix = f'python -m t5x_gpu.prepare --gin_file=MY.gin --split={split} --output={output}'
  try:
    index = from_json(read_bytes(path))
    if index.split != split:
      raise ValueError(f'it belongs to split {index.split!r}')
    return index
  except ValueError as e:
    raise task_error(
      f'{path} cannot be read as an index of prepared rows: {e}.',
      fix=f'Remove {folder / split} and prepare again: {fix}',
      docs='data.md',
    ) from e
  except OSError as e:
    if not is_missing(e):
      raise unopened(e, path) from e
    if (folder / split / UNFINISHED).is_dir():
      done = len(list((folder / split / UNFINISHED).glob('*/*.json')))
      raise task_error(
        f'Split {split!r} in {folder} is not finished: it has {done} complete shards so far.',
        fix=f'Continue: {fix}',
        docs='data.md',
      ) from e
    splits = sorted(p.parent.name for p in folder.glob(f'*/{INDEX}'))
    have = (
      f'it has {", ".join(map(repr, splits))}'
      if splits
      else ('nothing is prepared there' if folder.is_dir() else 'there is no such folder')
    )
    raise NoExamplesError(
      f'{folder} (working directory: {os.getcwd()}) has no prepared split {split!r}: {have}.',
      fix=f'Prepare it: {fix}'
      + (
        '\nA run that does not evaluate sets train.train_eval_dataset_cfg = None.'
        if splits and split != 'train'
        else ''
      ),
      parameters=(_NAME, 'DatasetConfig.split'),
      docs='data.md',
    ) from e


_SAMPLED_SHARDS = 32  # number of shards whose samples are compared when training opens the data
_THREADS = 16


def shard_problem(
  folder: pathlib.Path, shard: Shard, *, content: Optional[str]
) -> Optional[Problem]:
  """Returns how a shard has changed; None if it is unchanged.

  Args:
    folder: folder of the split.
    shard: its entry in the index.
    content: what to compare in addition to the size: None, 'sample' (a few blocks) or 'all'.
  Raises:
    DataError: the shard cannot be opened; its rows may be intact.
  """
  if not shard.rows:
    return None
  path = folder / shard.file
  try:
    size = path.stat().st_size
    if size != shard.bytes:
      cut = 'truncated' if size < shard.bytes else 'changed'
      return Problem(f'{path} is {cut}: it has {size:,} bytes, the index says {shard.bytes:,}.')
    if content == 'sample' and sample_digest(path) != shard.sample:
      return Problem(f'{path} has changed: the sha256 of sampled blocks differs from the index.')
    if content == 'all' and sha256_of(path) != shard.sha256:
      return Problem(f'{path} has changed: its sha256 differs from the index.')
  except FileNotFoundError:
    return Problem(f'{path} is missing.')
  except OSError as e:
    if not is_missing(e):
      raise unopened(e, path) from e
    return Problem(f'{path} cannot be read: {e.strerror or e}.')
  return None


def check_shards(
  folder: str | os.PathLike, index: Index, *, content: Optional[str] = 'sample'
) -> None:
  """Raises DataError if shards differ from the index.

  Args:
    folder: DIR of `prepare`.
    index: index of the split.
    content: 'sample' compares sizes, and some blocks of at most 32 shards; 'all' compares every
      byte.
  """
  split = expanded_path(folder) / index.split
  shards = [shard for member in index.members.values() for shard in member.shards if shard.rows]
  step = max(1, len(shards) // _SAMPLED_SHARDS)

  def problem(number: int) -> Optional[Problem]:
    what = None if content == 'sample' and number % step else content
    return shard_problem(split, shards[number], content=what)

  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    problems = list(filter(None, pool.map(problem, range(len(shards)))))
  if problems:
    raise task_error(
      f'{len(problems)} of {len(shards)} shards of the prepared data have changed:\n  '
      + '\n  '.join(listed([problem.what for problem in problems], 5)),
      fix='Copy them again from where they were prepared, or run the same command python -m '
      't5x_gpu.prepare again: it rebuilds the shards that changed.',
      docs='data.md',
    )
