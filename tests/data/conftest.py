"""Small data for the tests, and a way to open it."""

import collections

import pytest

from t5x_gpu.data import batches, data_module, features

Opened = collections.namedtuple('Opened', 'spec iterator config')


@pytest.fixture(name='text_folder')
def _text_folder(tmp_path):
  """Seven files of 3 to 300 lines, 843 lines in all."""
  folder = tmp_path / 'text'
  folder.mkdir()
  number = 0
  for f, lines in enumerate([3, 40, 64, 100, 128, 208, 300]):
    text = []
    for _ in range(lines):
      number += 1
      text.append(f'line {number} ' + 'abcdefgh' * (number % 7))
    (folder / f'{f}.txt').write_text('\n'.join(text) + '\n')
  return folder


@pytest.fixture(name='open_data')
def _open_data():
  """Opens batches of `name` and closes them after the test."""
  opened = []

  def open_data(
    name,
    *,
    converter='lm',
    lengths=None,
    batch_size=4,
    vocab_size=384,
    repeat=True,
    split='train',
    num_classes=None,
    **kwargs,
  ):
    lengths = lengths or {'targets': 32}
    config = batches.DatasetConfig(name, lengths, split, batch_size, **kwargs)
    spec = features.batch_spec(
      converter,
      task_feature_lengths=lengths,
      batch_size=batch_size,
      pack=config.pack,
      vocab_size=vocab_size,
      num_classes=num_classes,
    )
    iterator = data_module.open_batches(
      config, spec=spec, feature_converter=converter, repeat=repeat
    )
    opened.append(iterator)
    return Opened(spec, iterator, config)

  yield open_data
  for iterator in opened:
    iterator.close()
