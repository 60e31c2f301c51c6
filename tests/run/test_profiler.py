"""When a run profiles itself: real traces of a small step, on a clock that the test moves."""

import json

import jax
import jax.numpy as jnp

from t5x_gpu.metrics.goodput import Goodput
from t5x_gpu.metrics.monitor import ModelSpeed
from t5x_gpu.metrics.recorder import Recorder
from t5x_gpu.metrics.throughput import StepTimer
from t5x_gpu.run.profile_config import ProfileConfig
from t5x_gpu.run.profiler import Profiler, ProfileReader


def train_step(x):
  return x @ x


class KeepingRecorder(Recorder):
  """Also keeps what a profile adds to the next record."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.added = {}

  def add(self, values):
    self.added |= values
    super().add(values)


def train(folder, config, *, seconds, save_seconds=0.0):
  """Trains one step per item of `seconds`; returns the profiles, and the metrics of the last.

  Args:
    folder: for the traces.
    config: when to take them.
    seconds: how long each step takes.
    save_seconds: how long the save takes that follows a step.
  """
  x = jnp.ones((64, 64))
  step_function = jax.jit(train_step).lower(x).compile()
  now = [0.0]
  reader = ProfileReader(
    step_text=step_function.as_text,
    mesh_shape={},
    speed=ModelSpeed(tokens=1.0, flops=1.0, peak_flops=None, dtype='float32'),
    device=jax.devices()[0],
    num_devices=1,
    shown='profiles',
    store=None,
  )
  recorder = KeepingRecorder(
    folder,
    total_steps=len(seconds),
    first_step=0,
    tokens_per_step=1,
    is_main=False,
    step_done=lambda step, sums: None,
    goodput=Goodput(enabled=False),
  )
  recorder.timer = StepTimer(len(seconds), tokens_per_step=1, clock=lambda: now[0])
  profiler = Profiler(
    config,
    recorder=recorder,
    folder=folder,
    reader=reader,
    ends_before=lambda step: False,
    first_step=0,
  )
  with profiler:
    for step, length in enumerate(seconds, 1):
      with profiler.step(step):
        jax.block_until_ready(step_function(x))
        now[0] += length
        recorder.timer.step_done()
        with recorder.timer.pause('save'):
          now[0] += save_seconds
  found = [json.loads(path.read_text()) for path in folder.glob('*/anatomy.json')]
  return found, recorder.added


def traced(folder, config, *, seconds):
  """Returns why there are traces, by first step."""
  found, _ = train(folder, config, seconds=seconds)
  return {content['first_step']: content['reason'] for content in found}


def test_by_default_a_step_1_5_times_slower_than_the_last_200_is_followed_by_one_trace(tmp_path):
  steps = [*[1.0] * 199, 1.4, 1.6, 1.0, 1.0, 1.0, 9.0, 1.0]
  assert traced(tmp_path, ProfileConfig(), seconds=steps) == {202: 'slow step'}
  assert traced(tmp_path / 'b', ProfileConfig(), seconds=steps[:200]) == {}


def test_a_period_traces_every_so_many_steps(tmp_path):
  config = ProfileConfig(period=4, num_steps=2, slow_factor=None)
  assert traced(tmp_path, config, seconds=[1.0] * 10) == {4: 'period', 8: 'period'}


def test_a_save_is_between_steps_in_the_file_the_text_and_the_metrics(tmp_path, capsys):
  config = ProfileConfig(period=4, num_steps=2, slow_factor=None)
  (profile,), metrics = train(tmp_path, config, seconds=[2.0] * 6, save_seconds=0.5)
  assert profile['seconds_per_step'] == 2.0 and profile['parts']['save'] == 0.5
  assert metrics['anatomy/save_fraction'] == 0.25 and 'anatomy/eval_fraction' not in metrics
  text = capsys.readouterr().out
  assert '\n  between steps, on average since the start: save 25.0% of a step\n' in text
  _, metrics = train(tmp_path / 'b', config, seconds=[2.0] * 6)
  assert 'anatomy/compute_fraction' in metrics and 'anatomy/save_fraction' not in metrics
