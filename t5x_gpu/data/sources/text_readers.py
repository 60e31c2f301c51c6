"""tf.data readers of plain text files; they refuse text that is not UTF-8."""

from collections.abc import Callable
from typing import Optional

from t5x_gpu.data.sources.line_formats import LINES_PER_SPAN
from t5x_gpu.data.sources.rows import not_utf8
from t5x_gpu.data.tf_runtime import tf
from t5x_gpu.errors import DataError

# Matches exactly the bytes that `bytes.decode` accepts: RE2 rejects surrogates and overlong forms.
_UTF8 = r'[\x{0}-\x{d7ff}\x{e000}-\x{10ffff}]*'


class Utf8Reader:
  """A reader for `DocumentSource` that refuses text that is not UTF-8.

  A tokenizer would silently turn such bytes into U+FFFD.

  Args:
    read: `read_spans` or `read_lines`.
  Attributes:
    problem: the DataError that stopped the reader; see `BlockReader`.
  """

  def __init__(self, read: Callable[..., tf.data.Dataset]):
    self._read = read
    self.problem: Optional[DataError] = None

  def __call__(self, path: tf.Tensor, file_number: tf.Tensor) -> tf.data.Dataset:
    def checked(text: tf.Tensor) -> tf.Tensor:
      return tf.cond(tf.strings.regex_full_match(text, _UTF8), lambda: text, refuse)

    def refuse() -> tf.Tensor:
      never = tf.numpy_function(self._refuse, [path], tf.string, stateful=False)
      return tf.ensure_shape(never, [])

    return self._read(path, file_number, checked=checked)

  def _refuse(self, path: bytes) -> bytes:
    """Raises DataError for the first line of the file that is not UTF-8."""
    name = path.decode('utf-8', 'surrogateescape')
    with open(name, 'rb') as f:
      for number, line in enumerate(f, 1):
        try:
          line.decode()
        except UnicodeDecodeError as e:
          self.problem = not_utf8(f'{name}:{number}', e)
          raise self.problem from e
    raise DataError(f'{name} changed while it was read.', fix='Start again.')


def _unchecked(text: tf.Tensor) -> tf.Tensor:
  return text


def read_spans(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': up to 64 lines of the file, 'document_end': whether they are its last}."""
  del file_number
  lines = tf.data.TextLineDataset(path).map(lambda line: line + '\n')
  spans = lines.batch(LINES_PER_SPAN).map(lambda some: checked(tf.strings.reduce_join(some)))
  nothing = tf.constant('')
  # Delayed by one: a span is the last if no span follows it.
  return (
    spans.concatenate(tf.data.Dataset.from_tensors(nothing))
    .scan(
      nothing,
      lambda span, following: (
        following,
        {'targets': span, 'document_end': tf.strings.length(following) == 0},
      ),
    )
    .skip(1)
  )


def read_lines(
  path: tf.Tensor, file_number: tf.Tensor, checked: Callable[[tf.Tensor], tf.Tensor] = _unchecked
) -> tf.data.Dataset:
  """Yields {'targets': line, 'document_end': True} for each line that is not blank."""
  del file_number
  lines = tf.data.TextLineDataset(path).filter(
    lambda line: tf.strings.length(tf.strings.strip(line)) > 0
  )
  return lines.map(lambda line: {'targets': checked(line), 'document_end': True})
