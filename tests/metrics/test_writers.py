"""Metrics files stay valid through kills, resumes and values that are not finite."""

import gc
import json
import math
import os
import signal
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.metrics import writers
from tests.helpers_disk import fill, small_disk
from tests.messages import raises


@pytest.fixture
def open_writer(tmp_path):
  """Opens writers on tmp_path/metrics.jsonl and closes them after the test."""
  opened = []

  def open_one(path=tmp_path / 'metrics.jsonl'):
    opened.append(writers.JsonLinesWriter(path))
    return opened[-1]

  yield open_one
  for writer in opened:
    writer.close()


def _steps(path):
  return [record['step'] for record in writers.read_json_lines(path)]


def test_each_write_is_one_json_object_with_step_first(tmp_path, open_writer):
  path = tmp_path / 'new' / 'metrics.jsonl'
  writer = open_writer(path)
  writer.write(10, {'train/loss': 5.5, 'train/accuracy': np.float32(0.25)})
  writer.write(20, {'train/loss': jnp.float32(4.5), 'train/tokens': np.int64(7)})
  text = path.read_text()  # before close: nothing waits in a buffer
  writer.close()
  assert text == (
    '{"step": 10, "train/loss": 5.5, "train/accuracy": 0.25}\n'
    '{"step": 20, "train/loss": 4.5, "train/tokens": 7}\n'
  )


def test_floats_come_back_bit_identical(tmp_path, open_writer):
  path = tmp_path / 'metrics.jsonl'
  value = float(np.float32(1) / np.float32(3))
  open_writer(path).write(1, {'train/loss': value})
  assert writers.read_json_lines(path)[0]['train/loss'] == value


@pytest.mark.parametrize('value', [math.nan, math.inf, -math.inf])
def test_nonfinite_values_are_valid_json_and_come_back(tmp_path, open_writer, value):
  path = tmp_path / 'metrics.jsonl'
  open_writer(path).write(1, {'train/loss': value, 'train/grad_norm': 1.0})

  def refuse(constant):
    raise AssertionError(f'{constant} is not JSON')

  record = json.loads(path.read_text(), parse_constant=refuse)
  assert record['train/loss'] is None and record['train/loss_nonfinite'] == str(value)
  back = writers.read_json_lines(path)[0]
  assert str(back['train/loss']) == str(value)
  assert back.keys() == {'step', 'train/loss', 'train/grad_norm'}


def test_truncate_after_drops_the_lines_of_an_earlier_attempt(tmp_path, open_writer):
  path = tmp_path / 'metrics.jsonl'
  writer = open_writer(path)
  for step in (10, 20, 20, 30, 40):
    writer.write(step, {'train/loss': 1.0})
  writer.truncate_after(20)
  writer.write(30, {'train/loss': 2.0})
  assert _steps(path) == [10, 20, 20, 30]
  assert writers.read_json_lines(path)[-1]['train/loss'] == 2.0
  assert os.listdir(tmp_path) == ['metrics.jsonl']


def test_truncate_after_the_last_step_leaves_the_file_alone(tmp_path, open_writer):
  path = tmp_path / 'metrics.jsonl'
  writer = open_writer(path)
  writer.write(10, {'train/loss': 1.0})
  inode = path.stat().st_ino
  writer.truncate_after(10)
  assert path.stat().st_ino == inode


def test_interrupted_truncation_keeps_the_old_file(tmp_path, open_writer, monkeypatch):
  path = tmp_path / 'metrics.jsonl'
  writer = open_writer(path)
  for step in (10, 20):
    writer.write(step, {'train/loss': 1.0})
  before = path.read_bytes()

  def killed(*_):
    raise KeyboardInterrupt

  monkeypatch.setattr(os, 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    writer.truncate_after(10)
  assert path.read_bytes() == before


def test_torn_last_line_is_removed_before_anything_is_appended(tmp_path, open_writer):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'{"step": 10, "train/loss": 1.0}\n{"step": 20, "train/lo')
  assert _steps(path) == [10]  # a reader may come first
  writer = open_writer(path)
  writer.write(20, {'train/loss': 2.0})
  assert [json.loads(line)['step'] for line in path.read_text().splitlines()] == [10, 20]


def test_whole_last_line_without_newline_is_kept(tmp_path, open_writer):
  path = tmp_path / 'metrics.jsonl'
  path.write_bytes(b'{"step": 10, "train/loss": 1.0}')
  open_writer(path).write(20, {})
  assert _steps(path) == [10, 20]


def test_kill_9_loses_at_most_the_line_in_flight(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  code = textwrap.dedent(f"""
      from t5x_gpu.metrics import writers
      writer = writers.JsonLinesWriter({str(path)!r})
      for step in range(10**9):
        writer.write(step, {{'train/loss': 1.0}})
        print(step, flush=True)
  """)
  process = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
  try:
    for line in process.stdout:
      if int(line) >= 200:
        break
  finally:
    process.send_signal(signal.SIGKILL)
    found = [200] + [int(line) for line in process.stdout if line.endswith('\n')]
    process.wait()
    process.stdout.close()
  steps = _steps(path)
  assert steps == list(range(len(steps))) and steps[-1] >= found[-1]


def test_a_folder_that_cannot_be_written_is_a_config_error(tmp_path):
  (tmp_path / 'file').write_text('')
  with raises(ConfigError):
    writers.JsonLinesWriter(tmp_path / 'file' / 'metrics.jsonl')


def test_lines_that_a_full_disk_does_not_take_wait_until_it_has_room(tmp_path, caplog):
  with small_disk(tmp_path / 'disk', size='64k') as disk:
    path = disk / 'metrics.jsonl'
    writer = writers.JsonLinesWriter(path)
    filler = fill(disk)
    for step in range(200):  # more than the last page of the file holds
      writer.write(step, {'train/loss': 1.0})
    assert len(_steps(path)) < 200
    assert [r.levelname for r in caplog.records] == ['WARNING']
    assert 'No space left on device' in caplog.text and 'Training continues' in caplog.text
    filler.unlink()
    writer.write(200, {'train/loss': 1.0})
    assert _steps(path) == list(range(201))
    assert 'can be written again.' in caplog.text
    writer.close()


def test_lines_beyond_the_memory_for_them_are_counted_and_reported(tmp_path, caplog, monkeypatch):
  monkeypatch.setattr(writers, '_MOST_WAITING_BYTES', 100)
  with small_disk(tmp_path / 'disk', size='64k') as disk:
    writer = writers.JsonLinesWriter(disk / 'metrics.jsonl')
    fill(disk)
    for step in range(400):
      writer.write(step, {'train/loss': 1.0})
    num_written = len(_steps(writer.path))
    writer.close()
    assert f'lacks the last {400 - num_written} lines' in caplog.text
    writer.close()


def test_reserved_names_are_refused():
  for name in ('step', 'train/loss_nonfinite'):
    with pytest.raises(ValueError, match='reserved'):
      writers.to_json_line(1, {name: 1.0})


def _tensorboard_events(folder):
  from tensorboardX.proto import event_pb2

  events = []
  for path in sorted(folder.glob('events.out.tfevents.*'), key=lambda p: p.stat().st_mtime_ns):
    data = path.read_bytes()
    while data:  # a record: length (8), crc (4), payload, crc (4)
      size = int.from_bytes(data[:8], 'little')
      events.append(event_pb2.Event.FromString(data[12 : 12 + size]))
      data = data[16 + size :]
  return events


def test_tensorboard_files_hold_the_scalars(tmp_path):
  writer = writers.TensorBoardWriter(tmp_path / 'tb')
  writer.write(10, {'train/loss': np.float32(2.5), 'eval/loss': 3})
  writer.close()
  writer.close()
  scalars = {
    v.tag: (e.step, v.simple_value)
    for e in _tensorboard_events(tmp_path / 'tb')
    for v in e.summary.value
  }
  assert scalars == {'train/loss': (10, 2.5), 'eval/loss': (10, 3.0)}


def test_tensorboard_resume_marks_later_steps_as_outdated(tmp_path):
  for attempt, step in enumerate((20, 11)):
    writer = writers.TensorBoardWriter(tmp_path)
    writer.truncate_after(10)
    writer.write(step, {'train/loss': float(attempt)})
    writer.close()
  starts = [e.step for e in _tensorboard_events(tmp_path) if e.session_log.status == 1]
  assert starts == [11]


def test_a_full_disk_costs_tensorboard_points_and_not_the_run(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(writers, '_RETRY_SECONDS', 0)
  with small_disk(tmp_path / 'disk', size='256k') as disk:
    writer = writers.TensorBoardWriter(disk / 'tensorboard')
    writer.write(1, {'train/loss': 1.0})
    writer.flush()
    filler = fill(disk)
    for _ in range(3):
      for key in range(2000):  # more than a buffer holds
        writer.write(3, {f'train/{key}': 1.0})
    assert [r.levelname for r in caplog.records] == ['WARNING']
    filler.unlink()
    writer.write(4, {'train/loss': 4.0})
    writer.close()
    writer.close()
    files = sorted((disk / 'tensorboard').iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert len(files) == 2 and all(path.stat().st_size for path in files)
    del writer
    gc.collect()  # lets go of the files


def test_tensorboard_imports_no_tensorflow(tmp_path):
  code = (
    'import sys\nfrom t5x_gpu.metrics import writers\n'
    'assert "tensorboardX" not in sys.modules\n'
    f'w = writers.TensorBoardWriter({str(tmp_path)!r})\n'
    'w.write(1, {"train/loss": 1.0})\nw.close()\n'
    'assert not {"tensorflow", "tensorboard"} & set(sys.modules)'
  )
  subprocess.run([sys.executable, '-c', code], check=True)


def test_missing_tensorboardx_names_the_pip_command(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with raises(ConfigError):
    writers.TensorBoardWriter(tmp_path)


def test_multi_writer_passes_everything_on(tmp_path):
  paths = [tmp_path / 'a.jsonl', tmp_path / 'b.jsonl']
  writer = writers.MultiWriter([writers.JsonLinesWriter(path) for path in paths])
  for step in (1, 2):
    writer.write(step, {'train/loss': 1.0})
  writer.truncate_after(1)
  writer.flush()
  writer.close()
  writer.close()
  assert paths[0].read_text() == paths[1].read_text() == '{"step": 1, "train/loss": 1.0}\n'
  writers.MultiWriter([]).truncate_after(0)


@pytest.mark.parametrize('name', ['infer_eval/task/f1_nonfinite', 'infer_eval/task/\ud800', 'step'])
def test_a_name_that_files_cannot_hold_is_refused(name):
  writers.check_names(['eval/loss', 'infer_eval/a b/ü: 1'])
  with raises(DataError):
    writers.check_names([name])
