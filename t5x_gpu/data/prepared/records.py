"""One row of a batch as the bytes of a record, and back. Reading needs numpy alone.

A record holds the features of a row in the order of the names in `index.json`, each as

    1 byte    the kind of its numbers: B, H, I for unsigned integers of 1, 2, 4 bytes, i for signed
              ones of 4 (labels may be negative); the smallest that holds them all
    numbers   little-endian, as many as the feature has positions; one for a label

Segment ids and weights take one byte each, positions and most vocabularies two. ArrayRecord
compresses every record for itself (zstd), so that any of them can be read without its neighbours:
input tokens, which repeat the targets one further on, then cost next to nothing.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from t5x_gpu.errors import DataError

_KINDS = {kind: np.dtype(f'<{kind}') for kind in 'BHIi'}
# Options of ArrayRecord: a record per compressed group, to be read alone. Measured on rows of 1024
# tokens (8 kB): zstd:1 makes 1.6 kB and reads in 19 us, no compression 8.3 kB in 13 us.
WRITER_OPTIONS = 'group_size:1,zstd:1'
READER_OPTIONS = 'readahead_buffer_size:0'


def encode_row(row: Mapping[str, np.ndarray], *, names: Sequence[str]) -> bytes:
  """Returns the record of one row.

  Args:
    row: feature -> [length], or a number.
    names: features in the order of the record.
  Raises:
    DataError: a number that 32 bits do not hold.
  """
  parts = []
  for name in names:
    x = np.asarray(row[name])
    low, high = int(x.min()), int(x.max())
    kind = next((k for k, dtype in _KINDS.items()
                 if np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max), None)
    if kind is None:
      raise DataError(f'{name!r} has numbers from {low:,} to {high:,}, which 32 bits do not hold.',
                      fix='Mend the task: token ids and labels are small whole numbers.')
    parts += [kind.encode(), x.astype(_KINDS[kind]).tobytes()]
  return b''.join(parts)


def decode_into(record: bytes, arrays: Mapping[str, np.ndarray], row: int) -> None:
  """Writes a record into row `row` of `arrays`, whose order is that of the record.

  Args:
    record: of `encode_row`.
    arrays: feature -> [batch, length] or [batch].
    row: which.
  Raises:
    ValueError: bytes that are no record of these features and lengths.
  """
  offset = 0
  for name, array in arrays.items():
    dtype = _KINDS.get(chr(record[offset])) if offset < len(record) else None
    if dtype is None:
      raise ValueError(f'feature {name!r} is missing, or of an unknown kind')
    count = array.shape[1] if array.ndim > 1 else 1
    numbers = np.frombuffer(record, dtype, count, offset + 1)
    array[row] = numbers if array.ndim > 1 else numbers[0]
    offset += 1 + count * dtype.itemsize
  if offset != len(record):
    raise ValueError(f'it has {len(record)} bytes, its features {offset}')
