"""What hosts compare of their data: any source with files names them, wherever they lie."""

import dataclasses
import pathlib
import shutil

import pytest

from t5x_gpu.data import features, same_on_hosts
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.prepared import batches as batches_lib
from tests.helpers_prepared import prepare_here

pytestmark = pytest.mark.tf


def spec_of(config: DatasetConfig, converter: str, **options):
  return features.batch_spec(
    converter,
    task_feature_lengths=config.task_feature_lengths,
    batch_size=config.batch_size,
    pack=config.pack,
    vocab_size=384,
    **options,
  )


def facts(name: str, *, lengths=None, converter: str = 'lm', **options) -> dict:
  from t5x_gpu.data import seqio_batches

  config = DatasetConfig(name, lengths or {'targets': 32}, 'train', 2, pack=converter == 'lm')
  batches = seqio_batches.open_batches(
    config, spec=spec_of(config, converter, **options), feature_converter=converter
  )
  try:
    return {**same_on_hosts._files(batches), **same_on_hosts._described(batches)}
  finally:
    batches.close()


def differing(one: dict, two: dict) -> list[str]:
  assert one.keys() == two.keys()
  return sorted(name for name in one if one[name][0] != two[name][0])


@pytest.fixture
def hosts(tmp_path) -> list[pathlib.Path]:
  """The same files on two hosts."""
  first, second = tmp_path / 'one' / 'data', tmp_path / 'other' / 'deeper' / 'data'
  first.mkdir(parents=True)
  for i in range(3):
    (first / f'{i}.txt').write_text(f'line of {i}\n' * 8000)
  (first / 'rows.jsonl').write_text('{"text": "some text"}\n' * 2000)
  (first / 'train.csv').write_text('text,label\n' + 'a good piece,1\na bad piece,0\n' * 50)
  (first / 'test.csv').write_text('text,label\ngood film,1\n')
  shutil.copytree(first, second)
  return [first, second]


@pytest.mark.parametrize(
  'source, changed, options',
  [
    pytest.param('text_files:{}/*.txt', '1.txt', {}, marks=pytest.mark.slow),
    pytest.param('jsonl:{}/rows.jsonl', 'rows.jsonl', {}, marks=pytest.mark.slow),
    (
      'imdb_csv:{}/*.csv',
      'train.csv',
      dict(converter='encoder_classification', lengths={'inputs': 16}, num_classes=2),
    ),
  ],
)
def test_copies_agree_and_a_byte_at_the_end_of_one_is_named(hosts, source, changed, options):
  def of(folder: pathlib.Path) -> dict:
    found = facts(source.format(folder), **options)
    found.pop('mixture_or_task_name')  # the configuration, which is compared by itself
    return found

  one, two = (of(folder) for folder in hosts)
  assert differing(one, two) == []
  path = hosts[1] / changed
  before, last, after = path.read_bytes().rpartition(b'e')
  path.write_bytes(before + b'a' + after)
  assert last and path.stat().st_size == (hosts[0] / changed).stat().st_size
  two = of(hosts[1])
  (named,) = [name for name in differing(one, two) if name.endswith(changed)]
  assert str(path) in two[named][1]


@pytest.mark.slow
def test_prepared_rows_are_compared_by_the_digests_in_their_index(tmp_path):
  index = prepare_here('mixed', tmp_path, num_parts=1)
  config = DatasetConfig(f'prepared:{tmp_path}', {'targets': 32}, 'train', 2)
  batches = batches_lib.open_batches(config, spec=spec_of(config, 'lm'), feature_converter='lm')
  found = same_on_hosts._files(batches)
  same_on_hosts._described(batches)
  assert batches.rows_read == 0
  batches.close()
  name, member = next((n, m) for n, m in index.members.items() if m.rows)
  shard = dataclasses.replace(member.shards[0], sha256='of other bytes')
  member = dataclasses.replace(member, shards=(shard, *member.shards[1:]))
  other = dataclasses.replace(index, members={**index.members, name: member})
  files = batches_lib._file_facts(other, tmp_path / 'train')
  assert differing({n: found[n] for n in files}, files) == [shard.file]
  other = dataclasses.replace(index, split='another')
  assert differing(
    {n: found[n] for n in files}, batches_lib._file_facts(other, tmp_path / 'train')
  ) == ['index.json']


def test_examples_of_tasks_with_metrics_are_compared():
  class Task:
    name, inputs, targets = 'task', [[1, 2], [3]], [[4], [5]]

  value, shown = same_on_hosts._of_task(Task())
  assert shown == f'2 examples ({value})'
  other = Task()
  other.targets = [[4], [6]]
  assert same_on_hosts._of_task(other)[0] != value


def test_of_many_files_some_are_sampled_and_all_are_listed(tmp_path, monkeypatch):
  monkeypatch.setattr(same_on_hosts, '_SAMPLED_FILES', 3)
  one, two = tmp_path / 'one', tmp_path / 'two'
  for folder in (one, two):
    folder.mkdir()
    for number in range(8):
      (folder / f'{number}.txt').write_text('text')

  def found(folder):
    return same_on_hosts.file_facts(sorted(map(str, folder.iterdir())))

  assert len(found(one)) == 4 and differing(found(one), found(two)) == []
  (two / '8.txt').write_text('text')
  assert found(one)['names of all files'][0] != found(two)['names of all files'][0]
