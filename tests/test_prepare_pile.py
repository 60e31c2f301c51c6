"""scripts/prepare_pile.py on small files of The Pile's form: what is kept, resumed, refused."""

import json
import pathlib
import subprocess
import sys

import pyarrow as pa
import pytest

from t5x_gpu.data import batches
from t5x_gpu.data.streaming import task_lookup

pytestmark = pytest.mark.tf
ROOT = pathlib.Path(__file__).parents[1]
SETS = ('Wikipedia (en)', 'ArXiv', 'Github')


def write_shard(path, num_documents, *, broken=None):
  """Writes two zstd frames, as the archives of The Pile have many."""
  lines = [
    json.dumps({'text': f'{path.stem} document {i} \u00e9', 'meta': {'pile_set_name': SETS[i % 3]}})
    + '\n'
    for i in range(num_documents)
  ]
  if broken is not None:
    lines[broken] = '{"text": "cut\n'
  frames = []
  for half in (lines[: num_documents // 2], lines[num_documents // 2 :]):
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, 'zstd') as f:
      f.write(''.join(half).encode())
    frames.append(sink.getvalue().to_pybytes())
  path.write_bytes(b''.join(frames))


@pytest.fixture(name='pile')
def _pile(tmp_path):
  folder = tmp_path / 'pile'
  folder.mkdir()
  for i in range(3):
    write_shard(folder / f'{i:02d}.jsonl.zst', 60)
  return folder


def prepare(*args):
  return subprocess.run(
    [sys.executable, ROOT / 'scripts' / 'prepare_pile.py', *map(str, args)],
    capture_output=True,
    text=True,
    cwd=ROOT,
    check=False,
  )


def documents(name):
  task = task_lookup.lookup(batches.DatasetConfig(name, {'targets': 8}, 'train', 1))
  return sorted(
    row['targets'].decode()
    for split in task.splits
    for row in task.source.get_dataset(split, shuffle=False).as_numpy_iterator()
  )


@pytest.mark.slow
def test_pile_shards_become_array_records_with_the_same_documents(pile, tmp_path):
  done = prepare('--output', tmp_path / 'out', '--workers', 2, f'{pile}/*.jsonl.zst')
  assert done.returncode == 0, done.stderr
  straight = documents(f'jsonl:{pile}/*.jsonl.zst')
  assert documents(f'arrayrecord:{tmp_path}/out/*.arrayrecord') == straight
  assert len(straight) == 180
  assert '60  ArXiv' in done.stdout and not list((tmp_path / 'out').glob('*.partial'))


@pytest.mark.slow
def test_pile_sets_are_kept_by_name_and_a_finished_shard_is_not_made_again(pile, tmp_path):
  command = (
    '--output',
    tmp_path / 'out',
    '--format',
    'tfrecord',
    '--sets',
    'ArXiv,Github',
    '--workers',
    1,
    pile,
  )
  write_shard(pile / '02.jsonl.zst', 60, broken=30)
  first = prepare(*command)
  assert first.returncode == 1 and '02.jsonl.zst:31 is not a document' in first.stderr
  kept = {path: path.stat().st_mtime_ns for path in (tmp_path / 'out').glob('0[01]-*.tfrecord')}
  assert len(kept) == 2 and not list((tmp_path / 'out').glob('02*'))
  write_shard(pile / '02.jsonl.zst', 60)
  second = prepare(*command)
  assert second.returncode == 0 and '3 files, 2 done before' in second.stdout
  assert {path: path.stat().st_mtime_ns for path in kept} == kept
  found = documents(f'tfrecord:{tmp_path}/out/*.tfrecord')
  assert len(found) == 120 and not any('document 0 ' in text for text in found)
  other = prepare(*command[:-1], '--max_corrupt_fraction=0.5', pile)
  assert other.returncode == 1 and 'was begun with max_corrupt_fraction = 0.0' in other.stderr
