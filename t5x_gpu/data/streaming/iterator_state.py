"""The position of a tf.data iterator as a few bytes, and back.

TensorFlow writes iterator checkpoints as two files; here they become one compressed string that
travels inside our own checkpoints.
"""

import os
import tempfile
import zlib

from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import first_line

_FILES = ('position.index', 'position.data-00000-of-00001')
_COMPRESSION = 3  # 6 is 2% smaller and takes 2.5 times as long.


def iterator_to_bytes(iterator: tf.data.Iterator) -> bytes:
  """Returns the position of `iterator`, buffers included."""
  with tempfile.TemporaryDirectory() as folder:
    tf.train.Checkpoint(iterator=iterator).write(os.path.join(folder, 'position'))
    parts = []
    for name in _FILES:
      with open(os.path.join(folder, name), 'rb') as f:
        data = f.read()
      parts += [len(data).to_bytes(8, 'big'), data]
  return zlib.compress(b''.join(parts), _COMPRESSION)


def bytes_to_iterator(state: bytes, iterator: tf.data.Iterator) -> None:
  """Moves a new `iterator` over the same dataset to where `state` was taken.

  Raises:
    ValueError: bytes that `iterator_to_bytes` has not written, or that this TensorFlow cannot read
      for this dataset.
  """
  try:
    data = zlib.decompress(state)
  except zlib.error as e:
    raise ValueError(f'damaged: {e}') from e
  with tempfile.TemporaryDirectory() as folder:
    for name in _FILES:
      size = int.from_bytes(data[:8], 'big')
      if len(data) < 8 + size:
        raise ValueError('cut short')
      with open(os.path.join(folder, name), 'wb') as f:
        f.write(data[8 : 8 + size])
      data = data[8 + size :]
    try:
      tf.train.Checkpoint(iterator=iterator).read(
        os.path.join(folder, 'position')
      ).assert_consumed()
    except (tf.errors.OpError, AssertionError) as e:
      raise ValueError(first_line(e)) from e
