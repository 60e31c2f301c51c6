"""A file of a local checkpoint returns what was written, or raises an error."""

import os

import ml_dtypes
import numpy as np
import pytest

from t5x_gpu.checkpoint.arrays import HostSums
from t5x_gpu.checkpoint.local.file_format import checksum, open_local_file, write_local_file
from tests.helpers_disk import small_disk

FACTS = {'run': 'ab', 'step': 7}
RANDOM = np.random.default_rng(0)
WHOLE = RANDOM.normal(size=(6, 8)).astype(np.float32)
# (name, shape of the array, start, values): two boxes of one array, a scalar, other widths.
PARTS = [
  ('params/kernel', (6, 8), (0, 0), WHOLE[:, :4]),
  ('params/kernel', (6, 8), (0, 4), WHOLE[:, 4:]),
  ('step', (), (), np.int32(7).reshape(())),
  ('params/narrow', (3,), (0,), np.array([1.5, np.nan, -0.0], ml_dtypes.bfloat16)),
  ('params/bytes', (5,), (2,), np.array([1, 2], np.uint8)),
  ('params/nothing', (0, 4), (0, 0), np.zeros((0, 4), np.float32)),
  ('params/flags', (3,), (0,), np.array([True, False, True])),
]


@pytest.fixture
def path(tmp_path):
  path = tmp_path / 'step_7.process_0'
  write_local_file(path, facts=FACTS, parts=PARTS)
  return path


def read_all(path):
  file = open_local_file(path)
  return [file.read(part, shape) for part, (_, shape, _, _) in zip(file.parts, PARTS)]


def test_every_bit_comes_back_with_its_place_and_dtype(path):
  file = open_local_file(path)
  assert file.facts == FACTS and [p.name for p in file.parts] == [name for name, *_ in PARTS]
  assert [p.start for p in file.parts] == [start for _, _, start, _ in PARTS]
  for got, (*_, want) in zip(read_all(path), PARTS):
    assert got.dtype == want.dtype and got.shape == want.shape
    assert got.tobytes() == want.tobytes()
  assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_file_is_for_its_user_alone_and_that_of_another_user_is_not_used(path, monkeypatch):
  assert path.stat().st_mode & 0o777 == 0o600
  monkeypatch.setattr(os, 'geteuid', lambda: path.stat().st_uid + 1)
  with pytest.raises(ValueError, match='another user'):
    open_local_file(path)


def test_checksums_of_boxes_add_up_to_the_arrays():
  whole = HostSums(WHOLE.shape)
  whole.add(WHOLE)
  texts = [checksum(values, start, shape) for _, shape, start, values in PARTS[:2]]
  added = [sum(int(t[i : i + 8], 16) for t in texts) % 2**32 for i in (0, 8)]
  assert f'{added[0]:08x}{added[1]:08x}' == str(whole)


def test_a_file_cut_at_any_length_is_refused(path):
  content = path.read_bytes()
  end = open_local_file(path)
  end = end.data_start + max(p.offset + p.num_bytes for p in end.parts)
  for length in {0, 1, 19, 20, 60, end // 2, end - 1}:
    path.write_bytes(content[:length])
    with pytest.raises(ValueError, match='truncated|damaged'):
      open_local_file(path)


def test_a_flipped_bit_is_found_wherever_it_is(path):
  content, file = bytearray(path.read_bytes()), open_local_file(path)
  places = [
    5,
    10,
    18,
    40,
    *(file.data_start + p.offset + p.num_bytes // 2 for p in file.parts if p.num_bytes),
  ]
  for place in places:
    content[place] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(ValueError, match='damaged|not have the values that were saved'):
      read_all(path)
    content[place] ^= 0x10
  path.write_bytes(content)
  read_all(path)


def test_a_full_disk_leaves_nothing_and_the_file_before_it(tmp_path):
  with small_disk(tmp_path / 'disk', size='1m') as folder:
    path = folder / 'step_7.process_0'
    write_local_file(path, facts=FACTS, parts=PARTS)
    large = [('params/kernel', (2**19,), (0,), np.zeros(2**19, np.float32))]
    with pytest.raises(OSError, match='No space left'):
      write_local_file(path, facts=FACTS, parts=large)
    assert [p.name for p in folder.iterdir()] == [path.name]
    assert len(read_all(path)) == len(PARTS)
