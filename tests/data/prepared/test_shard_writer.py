"""Records hold rows exactly, in few bytes."""

import numpy as np
import pytest

from t5x_gpu.data.prepared.shard_writer import decode_into, encode_row
from t5x_gpu.errors import DataError
from tests.messages import raises


@pytest.mark.parametrize(
  'largest, size', [(0, 1), (255, 1), (256, 2), (65535, 2), (65536, 4), (2**31 - 1, 4)]
)
def test_a_row_comes_back_and_takes_the_bytes_of_its_largest_number(largest, size):
  row = {'tokens': np.arange(16, dtype=np.int32), 'label': np.int32(3)}
  row['tokens'][5] = largest
  record = encode_row(row, names=('tokens', 'label'))
  arrays = {'tokens': np.zeros((2, 16), np.int32), 'label': np.zeros(2, np.int32)}
  decode_into(record, arrays, 1)
  assert len(record) == 1 + 16 * max(size, 1) + 2
  np.testing.assert_array_equal(arrays['tokens'], [np.zeros(16), row['tokens']])
  assert arrays['label'].tolist() == [0, 3]


def test_negative_labels_come_back():
  arrays = {'label': np.zeros(1, np.int32)}
  decode_into(encode_row({'label': np.int32(-1)}, names=('label',)), arrays, 0)
  assert arrays['label'].tolist() == [-1]


def test_numbers_that_32_bits_do_not_hold_are_refused():
  with raises(DataError):
    encode_row({'tokens': np.asarray([1, 2**40])}, names=('tokens',))


@pytest.mark.parametrize(
  'damage', [lambda r: r[:-1], lambda r: r + b'x', lambda r: b'?' + r[1:], lambda r: b'']
)
def test_bytes_that_are_not_a_record_are_refused(damage):
  record = encode_row({'tokens': np.arange(8)}, names=('tokens',))
  with pytest.raises(ValueError):
    decode_into(damage(record), {'tokens': np.zeros((1, 8), np.int32)}, 0)
