"""docs/add_a_data_source.md, done word for word by a user with an empty folder."""

import re
import sys

import pytest

from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.data_module import open_batches
from tests.helpers_pages import blocks, run

PAGE = 'add_a_data_source.md'
FORTUNES = 400
READ, TRAIN = blocks(PAGE, 'sh')
SMALL = (
  '--gin.TransformerConfig.num_layers=1',
  '--gin.TransformerConfig.scan_unroll=1',
  '--gin.SampleConfig.num_tokens=4',
)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """A folder with the files of the page and a file of fortunes."""
  path = tmp_path_factory.mktemp('user')
  for name, text in zip(('my_data.py', 'my_batches.py'), blocks(PAGE, 'python'), strict=True):
    (path / name).write_text(text)
  for name, text in zip(('fortunes.gin', 'sums.gin'), blocks(PAGE, 'gin'), strict=True):
    (path / name).write_text(text)
  (path / 'fortunes').mkdir()
  texts = (f'Fortune {i} favors\nthe bold.' for i in range(FORTUNES))
  (path / 'fortunes/some.txt').write_text('\n%\n'.join(texts))
  return path


def open_page(name, folder, monkeypatch, **config):
  """Returns the batches of a data source of the page, opened in this process."""
  monkeypatch.chdir(folder)
  monkeypatch.syspath_prepend(str(folder))
  monkeypatch.delitem(sys.modules, name, raising=False)
  names = ('decoder_target_tokens', 'decoder_input_tokens', 'decoder_loss_weights')
  spec = BatchSpec(dict.fromkeys(names, (4, 64)), dict.fromkeys(names, 'int32'))
  config = DatasetConfig(
    task_feature_lengths={'targets': 64}, split='train', batch_size=4, pack=False, **config
  )
  return open_batches(config, spec=spec, feature_converter='lm'), spec


def texts_of(batch):
  return [
    bytes(int(i) - 3 for i in row if i > 2).decode() for row in batch['decoder_target_tokens']
  ]


@pytest.mark.tf
def test_the_reader_cuts_files_into_texts(folder, monkeypatch):
  batches, spec = open_page(
    'my_data',
    folder,
    monkeypatch,
    mixture_or_task_name='fortunes',
    mixture_or_task_module='my_data',
  )
  batch = next(batches)
  spec.check(batch)
  assert all(re.fullmatch(r'Fortune \d+ favors\nthe bold\.', text) for text in texts_of(batch))


def test_a_data_module_resumes_at_its_state(folder, monkeypatch):
  batches, spec = open_page(
    'my_batches', folder, monkeypatch, mixture_or_task_name='sums', module='my_batches'
  )
  spec.check(next(batches))
  state, expected = batches.get_state(), texts_of(next(batches))
  assert all(eval(text.replace('=', '==')) for text in expected)
  batches.set_state(state)
  assert texts_of(next(batches)) == expected


@pytest.mark.slow
@pytest.mark.tf
def test_the_commands_of_the_page_run(folder):
  preview, train = READ.splitlines()
  assert 'the bold.' in run(folder, preview)
  run(folder, train, *SMALL)
  assert (folder / 'runs/fortunes/checkpoint_4').is_dir()
  first, second = TRAIN.splitlines()
  run(folder, first, *SMALL[:2])
  assert 'checkpoint_4' in run(folder, second, *SMALL[:2])
  assert (folder / 'runs/sums/checkpoint_6').is_dir()
