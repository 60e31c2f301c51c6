"""The record of the text that a run reads: a damaged one is a warning, a refused one an error."""

import errno
import os
import types

import pytest

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.sources.source_files import NAME, SourceFiles
from t5x_gpu.errors import AccessError, NoExamplesError
from t5x_gpu.run import data
from t5x_gpu.run.data import Evaluations, open_sources, warn_of_other_evaluation
from tests.helpers_disk import refused_to_python
from tests.messages import raises


def test_predictions_that_cannot_be_written_are_a_warning(tmp_path, caplog):
  def fails(outputs, number):
    raise KeyError('a word of the vocabulary')

  def task(name, texts):
    return types.SimpleNamespace(name=name, targets=(), texts=texts)

  tasks = types.SimpleNamespace(
    tasks=[
      task('raises', fails),
      task('not_json', lambda outputs, number: [{'targets': b'bytes'}]),
      task('good', lambda outputs, number: [{'targets': 'text'}]),
    ],
    outputs=[None] * 3,
    run=lambda params, show: {'infer_eval/good/exact': 1.0},
  )
  run = types.SimpleNamespace(num_predictions=3, infer_eval_period=1, total_steps=5)
  program = types.SimpleNamespace(in_saved_form=lambda state: state)
  evaluations = Evaluations(run, program, loss=None, each_task={}, tasks=tasks)
  state = types.SimpleNamespace(params=None)
  assert evaluations.run(1, state, folder=tmp_path) == {'infer_eval/good/exact': 1.0}
  assert [message.split(':')[0] for message in caplog.messages] == ['raises', 'not_json']
  assert (tmp_path / 'predictions' / 'good_1.jsonl').read_text() == '{"targets": "text"}\n'


def test_a_task_without_examples_is_left_out_of_the_losses_of_a_mixture(monkeypatch, caplog):
  def batches_for(model, dataset, *, repeat):
    if dataset.mixture_or_task_name == 'empty':
      raise NoExamplesError('It has no example.', fix='')
    return dataset.mixture_or_task_name

  monkeypatch.setattr(data, 'batches_for', batches_for)
  monkeypatch.setattr(data, 'open_task_names', lambda dataset: ('full', 'empty'))
  monkeypatch.setattr(data, 'Evaluator', lambda program, batches, num_batches: batches)
  monkeypatch.setattr(data, 'check_eval_batch', lambda size, program: None)
  monkeypatch.setattr(data, 'Evaluations', lambda *args, each_task, **rest: each_task)
  run = types.SimpleNamespace(
    model=None,
    train_eval_dataset_cfg=DatasetConfig('both', {'targets': 8}, 'validation', 4),
    infer_eval_dataset_cfg=None,
    eval_period=1,
    eval_steps=None,
    eval_each_task=True,
  )
  assert data.open_evaluations(run, None) == {'full': 'full'}
  assert caplog.messages == ['Not evaluated: It has no example.']


def test_the_rest_are_the_evaluations_that_are_not_due(tmp_path):
  loss = types.SimpleNamespace(
    run=lambda params, show: {'eval/loss': 1.0}, num_rows=2, batches=None
  )
  part = types.SimpleNamespace(
    run=lambda params, task, show: {f'eval/{task}/loss': 2.0}, num_rows=1
  )
  tasks = types.SimpleNamespace(
    tasks=[], outputs=[], run=lambda params, show: {'infer_eval/good/exact': 0.5}
  )
  run = types.SimpleNamespace(
    num_predictions=0, eval_period=2, infer_eval_period=None, total_steps=8
  )
  program = types.SimpleNamespace(in_saved_form=lambda state: state)
  evaluations = Evaluations(run, program, loss=loss, each_task={'part': part}, tasks=tasks)
  state = types.SimpleNamespace(params=None)
  losses = ['eval/loss', 'eval/part/loss']
  for step, due, rest in ((4, losses, ['infer_eval/good/exact']), (8, None, [])):
    found = list(evaluations.run(step, state, folder=tmp_path))
    assert found == (due or [*losses, 'infer_eval/good/exact'])
    assert list(evaluations.run(step, state, folder=tmp_path, rest=True)) == rest
  assert evaluations.evaluated == '2 rows, part 1 rows'


def test_evaluation_text_that_changes_during_a_run_is_one_warning_with_its_steps(tmp_path, caplog):
  path = tmp_path / 'validation.txt'
  path.write_text('text')
  evaluations = _of_text(path)
  state = types.SimpleNamespace(params=None)
  evaluations.run(2, state, folder=tmp_path)
  assert not caplog.messages
  path.write_text('another text')
  for step in (4, 6):
    evaluations.run(step, state, folder=tmp_path)
  [warning] = caplog.messages
  assert 'after the evaluation of step 2. From step 4 on' in warning
  assert f'{path}: 4 bytes at the start, 12 now' in warning
  for step, change in ((8, lambda: path.write_text('more')), (10, path.unlink)):
    change()
    evaluations.run(step, state, folder=tmp_path)
  assert 'after the evaluation of step 6' in caplog.messages[1]
  assert 'after the evaluation of step 8' in caplog.messages[2]


def test_evaluation_text_that_changed_between_two_starts_is_a_warning(tmp_path, caplog):
  path = tmp_path / 'validation.txt'

  def start():
    files = SourceFiles({})
    for evaluated in _of_text(path).source_files():
      files.add_evaluation(evaluated)
    warn_of_other_evaluation(files, tmp_path)
    with files.kept_in(tmp_path):
      pass

  path.write_text('text')
  start()
  start()
  assert not caplog.messages
  path.write_text('another text')
  start()
  [warning] = caplog.messages
  assert f'since the last start of this run:\n  {path}: 4 bytes then, 12 now' in warning
  start()
  assert len(caplog.messages) == 1, 'the record was not updated'


def _of_text(path):
  """Returns evaluations whose loss reads the file `path`."""
  loss = types.SimpleNamespace(
    run=lambda params, show: {'eval/loss': 1.0}, num_rows=2, batches=Data(path)
  )
  run = types.SimpleNamespace(
    num_predictions=0, eval_period=2, infer_eval_period=None, total_steps=8
  )
  return Evaluations(run, None, loss=loss, each_task={}, tasks=None)


class Data:
  """Data that reads one file."""

  def __init__(self, path):
    self.files = SourceFiles({'task': [str(path)]})

  def watched_files(self):
    return list(self.files._paths.values())

  def source_files(self):
    return self.files


@pytest.mark.parametrize(
  'replace',
  [
    os.mkfifo,
    os.mkdir,
    lambda path: os.symlink('/dev/zero', path),
    lambda path: os.symlink(path, path),
    lambda path: path.write_bytes(b'[' * 100_000),
  ],
  ids=['pipe', 'folder', 'device', 'loop', 'garbage'],
)
def test_a_record_of_the_text_that_cannot_be_read_is_a_warning(tmp_path, caplog, replace):
  (tmp_path / 'a.txt').write_text('text')
  replace(tmp_path / NAME)
  data = Data(tmp_path / 'a.txt')
  assert open_sources(data, tmp_path, resumed=True) is data.files
  [warning] = caplog.messages
  assert NAME in warning and 'a restart compares only' in warning


def test_a_record_of_the_text_that_cannot_be_opened_stops_the_run(tmp_path):
  (tmp_path / 'a.txt').write_text('text')
  data = Data(tmp_path / 'a.txt')
  (tmp_path / NAME).write_bytes(data.files.to_json())
  with refused_to_python(NAME, errno.EACCES), raises(AccessError):
    open_sources(data, tmp_path, resumed=True)
