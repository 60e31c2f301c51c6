"""index.json of a prepared split: what the rows are, where they lie, and how to know them again.

DIR/train/index.json                              written last: without it nothing is there
DIR/train/TASK/00003-of-00016.arrayrecord         packed rows, see records.py
DIR/train/.unfinished/                            while `prepare` is at work
"""

import concurrent.futures
import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Optional

from t5x_gpu.config.json_schema import (
  Also,
  Fields,
  ListOf,
  MapOf,
  Nullable,
  Number,
  Text,
  Whole,
  parse_json,
  read_bytes,
)
from t5x_gpu.data.sources.corrupt_records import Records
from t5x_gpu.errors import DataError, NoExamplesError

FORMAT = 1
INDEX, UNFINISHED = 'index.json', '.unfinished'
_NAME = 'DatasetConfig.mixture_or_task_name'
_BLOCK = 4096
_BLOCKS = 16  # of a shard that its sample covers
_SAMPLED_SHARDS = 32  # whose samples are looked at when training opens the data
_THREADS = 16


def _shard_problem(shard: Mapping[str, Any]) -> str:
  """Returns what is wrong with where a shard says that its file is; '' if nothing is."""
  file = pathlib.PurePosixPath(shard['file'])
  if file.is_absolute() or '..' in file.parts or '\0' in shard['file']:
    return 'its file is outside of the folder'
  if shard['rows'] and not shard['file']:
    return 'it has rows and no file'
  if shard['rows'] > shard['bytes']:
    return f'it has {shard["rows"]:,} rows in {shard["bytes"]:,} bytes'
  return (
    ''
    if all(re.fullmatch('[0-9]{1,2}', e) for e in shard['lengths'])
    else ('its histogram of lengths has keys that are no exponents')
  )


_DIGEST = Text('[0-9a-f]{64}|')
SHARD = Also(
  Fields(
    {
      'file': str,
      'rows': Whole(),
      'tokens': Whole(),
      'bytes': Whole(),
      'sha256': _DIGEST,
      'sample': _DIGEST,
      'largest': MapOf(Whole()),
      'lengths': MapOf(Whole()),
    },
    optional={'records': Whole(), 'damaged': Whole()},
    others=False,
  ),
  _shard_problem,
)
# What is in index.json; the classes below have the same fields.
_SCHEMA = Fields(
  {
    'format': Whole(FORMAT, FORMAT),
    'made_from': Fields(
      {'mixture_or_task_name': str, 'vocabulary': Nullable(str), 'module': str},
      optional={'mixture_or_task_module': Nullable(str), 'use_cached': bool},
      others=False,
    ),
    'split': str,
    'feature_converter': str,
    'task_feature_lengths': MapOf(Whole()),
    'pack': bool,
    'loss_on_targets_only': bool,
    'features': MapOf(Whole()),
    'vocabularies': Also(
      MapOf(Fields({'name': str, 'fingerprint': object, 'size': Whole(), 'by_name': bool})),
      lambda found: '' if found else 'there is none',
    ),
    'class_names': Nullable(ListOf(str)),
    'packing': Fields({'shuffle': bool, 'seed': Nullable(Whole(-(2**62)))}),
    'members': MapOf(
      Fields(
        {'rate': Number(0, 1e18), 'source': dict, 'num_shards': Whole(), 'shards': ListOf(SHARD)},
        others=False,
      )
    ),
    'versions': MapOf(str),
  },
  others=False,
)


@dataclasses.dataclass(frozen=True)
class Shard:
  """One file of rows.

  Attributes:
    file: path below the folder of the split; '' for a shard without rows, which has no file.
    rows, tokens, bytes: numbers; tokens are those that are no padding.
    sha256: of the whole file.
    sample: sha256 of a few blocks of it, which is quick to check.
    largest: feature -> largest number in it.
    lengths: histogram of the lengths of packed examples: exponent e -> how many have
      2**(e-1) < length <= 2**e.
    records, damaged: of the source that were read for it, and left out as they are damaged; 0 where
      they are not counted, or where another shard was made of the same.
  """

  file: str
  rows: int
  tokens: int
  bytes: int
  sha256: str
  sample: str
  largest: Mapping[str, int]
  lengths: Mapping[str, int]
  records: int = 0
  damaged: int = 0


@dataclasses.dataclass(frozen=True)
class Member:
  """One task: of a mixture, or the only one.

  Attributes:
    rate: its share in the mixture, not normalised.
    source: what identifies the data that it was made from.
    num_shards: how many there are when all are done.
    shards: those that are.
  """

  rate: float
  source: Mapping[str, Any]
  num_shards: int
  shards: tuple[Shard, ...] = ()

  @property
  def rows(self) -> int:
    return sum(shard.rows for shard in self.shards)

  @property
  def tokens(self) -> int:
    return sum(shard.tokens for shard in self.shards)

  @property
  def records(self) -> Records:
    """Records of the source that were read, and that are damaged and left out."""
    return Records(
      sum(shard.records for shard in self.shards), sum(shard.damaged for shard in self.shards)
    )


@dataclasses.dataclass(frozen=True)
class Index:
  """What a prepared split holds. Everything but the members' shards is known beforehand.

  Attributes:
    made_from: the fields of the DatasetConfig that say what the text is.
    split, feature_converter, task_feature_lengths, pack, loss_on_targets_only: as in training.
    features: model feature -> its length, 0 for a number per row; in the order of the records.
    vocabularies: task feature -> {'name', 'fingerprint', 'size', 'by_name'}; the last says whether
      DatasetConfig.vocabulary takes the name.
    class_names: of labels, if they have names.
    packing: {'seed', 'shuffle'}: the order in which examples were packed.
    members: task -> its rows.
    versions: package -> version that made it.
    format: of this file and of the records.
  """

  made_from: Mapping[str, Any]
  split: str
  feature_converter: str
  task_feature_lengths: Mapping[str, int]
  pack: bool
  loss_on_targets_only: bool
  features: Mapping[str, int]
  vocabularies: Mapping[str, Mapping[str, Any]]
  class_names: Optional[Sequence[str]]
  packing: Mapping[str, Any]
  members: Mapping[str, Member]
  versions: Mapping[str, str]
  format: int = FORMAT

  @property
  def rows(self) -> int:
    return sum(member.rows for member in self.members.values())

  @property
  def tokens(self) -> int:
    return sum(member.tokens for member in self.members.values())

  @property
  def tokens_per_row(self) -> int:
    """Positions of a row, those of padding included."""
    return sum(length for name, length in self.features.items() if name in self.counted)

  @property
  def counted(self) -> tuple[str, ...]:
    """The features whose numbers are the tokens: what an encoder reads, what a decoder tells."""
    return counted_features(self.features)

  @property
  def padding(self) -> float:
    """Share of the positions that are padding."""
    return 1 - self.tokens / max(1, self.rows * self.tokens_per_row)

  def to_json(self) -> str:
    return json.dumps(dataclasses.asdict(self), indent=1)

  def plan(self) -> dict[str, Any]:
    """Returns what determines the rows: all but the shards, and the names and places of things."""
    facts = json.loads(json.dumps(dataclasses.asdict(self)))
    for member in facts['members'].values():
      del member['shards']
    facts.pop('made_from')
    facts['versions'].pop('t5x_gpu', None)
    facts['vocabularies'] = {k: v['fingerprint'] for k, v in facts['vocabularies'].items()}
    return facts


def counted_features(names: Iterable[str]) -> tuple[str, ...]:
  """Returns those of the model features `names` that hold tokens, each token once."""
  names = set(names)
  return tuple(name for name in ('encoder_input_tokens', 'decoder_target_tokens') if name in names)


def from_json(text: str | bytes) -> Index:
  """Returns the index. Raises ValueError for anything else."""
  values = parse_json(text, _SCHEMA)
  members = {}
  for name, member in values.pop('members').items():
    shards = tuple(Shard(**shard) for shard in member.pop('shards'))
    members[name] = Member(**member, shards=shards)
  return Index(**values, members=members)


def read_index(folder: str | os.PathLike, *, split: str) -> Index:
  """Returns the index of a split under `folder`, the DIR of `prepare`.

  Raises:
    DataError: no such folder or split, one that is not finished, or no index of this format.
  """
  folder = pathlib.Path(folder).expanduser()
  path = folder / split / INDEX
  fix = f'python -m t5x_gpu.prepare --gin_file=MY.gin --split={split} --output={folder}'
  try:
    index = from_json(read_bytes(path))
    if index.split != split:
      raise ValueError(f'it is of split {index.split!r}')
    return index
  except ValueError as e:
    raise DataError(
      f'{path} cannot be read as an index of prepared rows: {e}.',
      fix=f'Remove {folder / split} and prepare again: {fix}',
      parameters=(_NAME,),
      docs='data.md',
    ) from e
  except OSError as e:
    if (folder / split / UNFINISHED).is_dir():
      done = len(list((folder / split / UNFINISHED).glob('*/*.json')))
      raise DataError(
        f'Split {split!r} in {folder} is not finished: {done} shards are.',
        fix=f'Go on with it: {fix}',
        parameters=(_NAME,),
        docs='data.md',
      ) from e
    splits = sorted(p.parent.name for p in folder.glob(f'*/{INDEX}'))
    have = (
      f'it has {", ".join(map(repr, splits))}'
      if splits
      else ('nothing is prepared there' if folder.is_dir() else 'there is no such folder')
    )
    raise NoExamplesError(
      f'{folder} (looked from {os.getcwd()}) has no prepared split {split!r}: {have}.',
      fix=f'Prepare it: {fix}'
      + (
        '\nA run that does not evaluate sets train.train_eval_dataset_cfg = None.'
        if splits and split != 'train'
        else ''
      ),
      parameters=(_NAME, 'DatasetConfig.split'),
      docs='data.md',
    ) from e


def file_digests(path: str | os.PathLike) -> tuple[str, str]:
  """Returns (sha256 of a file, sha256 of a sample of its blocks)."""
  with open(path, 'rb') as f:
    return hashlib.file_digest(f, 'sha256').hexdigest(), sample_digest(path)


def sample_digest(path: str | os.PathLike, *, num_blocks: int = _BLOCKS) -> str:
  """Returns the sha256 of evenly spaced blocks of a file, the first and the last among them."""
  size, digest = os.path.getsize(path), hashlib.sha256()
  starts = {max(0, size - _BLOCK) * i // (num_blocks - 1) for i in range(num_blocks)}
  with open(path, 'rb') as f:
    for start in sorted(starts):
      f.seek(start)
      digest.update(f.read(_BLOCK))
  return digest.hexdigest()


def shard_problem(folder: pathlib.Path, shard: Shard, *, content: Optional[str]) -> str:
  """Returns what is wrong with a shard, '' if nothing is.

  Args:
    folder: of the split.
    shard: as the index has it.
    content: None to look at the size alone, 'sample' at a few blocks, 'all' at every byte.
  """
  if not shard.rows:
    return ''
  path = folder / shard.file
  try:
    size = path.stat().st_size
    if size != shard.bytes:
      cut = 'cut off' if size < shard.bytes else 'changed'
      return f'{path} is {cut}: it has {size:,} bytes, the index says {shard.bytes:,}.'
    if content == 'sample' and sample_digest(path) != shard.sample:
      return f'{path} has changed: the sha256 of a sample of it is not that of the index.'
    if content == 'all' and file_digests(path)[0] != shard.sha256:
      return f'{path} has changed: its sha256 is not that of the index.'
  except FileNotFoundError:
    return f'{path} is missing.'
  except OSError as e:
    return f'{path} cannot be read: {e.strerror or e}.'
  return ''


def check_shards(
  folder: str | os.PathLike, index: Index, *, content: Optional[str] = 'sample'
) -> None:
  """Raises DataError unless the shards are those of the index.

  Args:
    folder: DIR of `prepare`.
    index: of the split.
    content: 'sample' looks at sizes, and at some blocks of 32 shards at most; 'all' at every byte.
  """
  split = pathlib.Path(folder).expanduser() / index.split
  shards = [shard for member in index.members.values() for shard in member.shards if shard.rows]
  step = max(1, len(shards) // _SAMPLED_SHARDS)
  looks = [None if content == 'sample' and i % step else content for i in range(len(shards))]
  with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
    problems = [
      p
      for p in pool.map(
        lambda shard, look: shard_problem(split, shard, content=look), shards, looks
      )
      if p
    ]
  if problems:
    more = f'\n  ... and {len(problems) - 5} more.' if len(problems) > 5 else ''
    raise DataError(
      f'{len(problems)} of {len(shards)} shards of the prepared data are not what they were:\n  '
      + '\n  '.join(problems[:5])
      + more,
      fix='Copy them again from where they were prepared, or run the same '
      'python -m t5x_gpu.prepare again: it makes anew what is not as it was.',
      parameters=(_NAME,),
      docs='data.md',
    )
