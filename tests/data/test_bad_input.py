"""Every data mistake is a DataError with a remedy, before anything compiles."""

import subprocess
import sys
import time

import pytest

from t5x_gpu.data import batches, data_module, features
from t5x_gpu.errors import ConfigError, DataError
from tests.messages import raises

pytestmark = pytest.mark.tf


def refused(open_data, *args, error=DataError, **kwargs):
  with raises(error) as e:
    open_data(*args, **kwargs)
  assert e.value.fix, 'no remedy'
  return str(e.value)


def test_unknown_task_lists_ours_first_and_suggests(open_data):
  refused(open_data, 'python_sorce')


def test_task_module_that_is_not_there(open_data):
  refused(open_data, 'x', mixture_or_task_module='no_such.tasks', error=ConfigError)


def test_task_module_that_needs_something_missing(open_data, tmp_path, monkeypatch):
  (tmp_path / 'needy_tasks.py').write_text('import not_installed_here\n')
  monkeypatch.syspath_prepend(str(tmp_path))
  refused(open_data, 'x', mixture_or_task_module='needy_tasks', error=ConfigError)


def test_tasks_of_t5s_package_say_how_to_install_it(open_data):
  refused(open_data, 'x', mixture_or_task_module='t5.data.mixtures', error=ConfigError)


@pytest.mark.parametrize('kind', ['text_files', 'text_lines', 'jsonl'])
def test_pattern_that_matches_nothing_lists_the_files_found(open_data, text_folder, kind):
  refused(open_data, f'{kind}:{text_folder}/*.json')


def test_empty_files(open_data, tmp_path):
  (tmp_path / 'a.txt').touch()
  refused(open_data, f'text_files:{tmp_path}/a.txt')


@pytest.mark.quick_cases('False')
@pytest.mark.parametrize('repeat', [True, False])
def test_split_without_an_example_does_not_hang(open_data, tmp_path, repeat):
  (tmp_path / 'a.txt').write_text('\n'.join(['the same'] * 50))
  splits = {'train', 'validation'}
  full = {split for split in splits if not _is_empty(open_data, tmp_path, split, repeat)}
  assert len(full) == 1  # One text, one hash: all of it goes to one split.


def _is_empty(open_data, tmp_path, split, repeat):
  try:
    open_data(f'text_lines:{tmp_path}/a.txt', split=split, repeat=repeat)
    return False
  except DataError as e:
    assert f"has no example in split '{split}' (its splits: 'train', 'validation')" in str(e)
    return True


def test_unknown_split(open_data):
  refused(open_data, 'python_source', split='trian')


def test_task_without_the_feature_that_the_model_takes(open_data):
  refused(
    open_data, 'python_source', converter='encoder_decoder', lengths={'inputs': 8, 'targets': 8}
  )


def test_lengths_and_batch_size_are_checked_by_every_module(open_data):
  for module in ('t5x_gpu.data.seqio_batches', 't5x_gpu.data.synthetic'):
    good = {'targets': 8}
    spec = features.batch_spec(
      'lm', task_feature_lengths=good, batch_size=1, pack=True, vocab_size=384
    )
    for lengths, batch_size in [({'targets': 0}, 1), (good, 0)]:
      config = batches.DatasetConfig('python_source', lengths, 'train', batch_size, module=module)
      with raises(DataError):
        data_module.open_batches(config, spec=spec, feature_converter='lm')


def test_vocabulary_larger_than_the_models_names_both(open_data):
  refused(open_data, 'python_source', vocab_size=100)


@pytest.mark.parametrize('name', ['sentencepiece:/no/such.model', 'bytes'])
def test_vocabulary_that_is_not_there(open_data, name):
  refused(open_data, 'python_source', vocabulary=name)


def test_a_removed_source_names_its_replacements(open_data):
  refused(open_data, 'hdf5:texts/*.h5')


def test_broken_sentencepiece_file(open_data, tmp_path):
  (tmp_path / 'm.model').write_text('not a model')
  refused(open_data, 'python_source', vocabulary=f'sentencepiece:{tmp_path}/m.model')


@pytest.mark.parametrize(
  'first', ['{"text": "a"', '["a"]', '{"text": "a"', '{"body": "a"}', '\n', '\n']
)
def test_jsonl_with_a_broken_first_line(open_data, tmp_path, first):
  (tmp_path / 'a.jsonl').write_text(first + '\n')
  refused(open_data, f'jsonl:{tmp_path}/a.jsonl')


def test_jsonl_with_a_later_broken_line_names_file_and_line(open_data, tmp_path):
  lines = [f'{{"text": "document {i} of many"}}' for i in range(2000)]
  lines[1500] = '{"text": 5}'
  (tmp_path / 'a.jsonl').write_text('\n'.join(lines))
  with raises(DataError):
    list(open_data(f'jsonl:{tmp_path}/a.jsonl', repeat=False).iterator)


@pytest.mark.slow
def test_data_opens_silently_and_exits_at_once(text_folder):
  code = f"""
import time
from t5x_gpu.data import batches, data_module, features
lengths = {{'targets': 32}}
config = batches.DatasetConfig('text_files:{text_folder}', lengths, 'train', 2)
spec = features.batch_spec('lm', task_feature_lengths=lengths, batch_size=2, pack=True,
                           vocab_size=384)
iterator = data_module.open_batches(config, spec=spec, feature_converter='lm')
next(iterator)
print(time.time())
"""
  done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert done.stderr == ''
  assert time.time() - float(done.stdout) < 30  # tf.data's threads may hang for ever
