"""Runs take profiles of themselves: at chosen steps, on SIGUSR2, and after a slow step."""

import json
import signal

import pytest

from tests.helpers_train import WATCHED_BATCHES, Project

# Batches that send this process a signal, or are slow, before one of them.
EVENTFUL = (
  '''"""Batches of synthetic; before number SIGNAL_AT a signal comes, before SLOW_AT a pause."""

import os
import signal
import time

from t5x_gpu.data import synthetic as _inner


def before(number):
  if number == int(os.environ.get('SIGNAL_AT', -1)):
    os.kill(os.getpid(), signal.SIGUSR2)
    deadline = time.monotonic() + 120
    while not os.path.exists(os.environ['WAIT_FOR']) and time.monotonic() < deadline:
      time.sleep(0.01)
  if number == int(os.environ.get('SLOW_AT', -1)):
    time.sleep(3)

'''
  + WATCHED_BATCHES
)


@pytest.fixture
def project(tmp_path, monkeypatch):
  (tmp_path / 'eventful_data.py').write_text(EVENTFUL)
  monkeypatch.syspath_prepend(tmp_path)
  return Project(tmp_path)


def profiles(project):
  """Returns the content of each anatomy.json by its folder."""
  found = sorted((project.model_dir / 'profiles').glob('*/anatomy.json'))
  return {path.parent.name: json.loads(path.read_text()) for path in found}


def check(anatomy, *, num_devices):
  parts, step = anatomy['parts'], anatomy['seconds_per_step']
  assert anatomy['version'] == 1 and anatomy['num_devices'] == num_devices
  on_device = [parts[name] for name in ('compute', 'exposed_communication', 'idle')]
  assert sum(on_device) == pytest.approx(step, rel=0.02) or parts['idle'] == 0.0
  assert parts['compute'] > 0 and parts['input_wait'] > 0
  assert anatomy['operations'][0]['seconds'] >= anatomy['operations'][1]['seconds'] > 0
  assert any('train_step' in operation['op_name'] for operation in anatomy['operations'])
  assert [rank['rank'] for rank in anatomy['ranks']] == [0]


@pytest.mark.slow
def test_profiles_at_chosen_steps_on_a_signal_and_by_period(project, monkeypatch):
  monkeypatch.setenv('SIGNAL_AT', '6')
  monkeypatch.setenv('WAIT_FOR', str(project.model_dir / 'profiles' / '3' / 'anatomy.json'))
  before = signal.getsignal(signal.SIGUSR2)
  result = project.run(
    '--gin.PROFILE_STEPS=(3, 4)',
    '--gin.profile_config.ProfileConfig.period=12',
    DATA_MODULE='eventful_data',
    TRAIN_STEPS=14,
    EVAL_PERIOD=10,
  )
  signal.signal(signal.SIGUSR2, before)
  assert result.code == 0, result.err
  found = profiles(project)
  assert set(found) == {'3', '7', '12'}
  reasons = {k: (v['reason'], v['first_step'], v['last_step']) for k, v in found.items()}
  assert reasons == {'3': ('PROFILE_STEPS', 3, 4), '7': ('SIGUSR2', 7, 9), '12': ('period', 12, 14)}
  for name, anatomy in found.items():  # means since the start; the first save and evaluation: 10
    assert all((anatomy['parts'][part] > 0) == (name == '12') for part in ('save', 'eval'))
  for anatomy in found.values():
    check(anatomy, num_devices=8)
    # Each device sends a share of 2 * 7 / 8 of the gradients, of float32.
    reduced = [c for c in anatomy['collectives'] if c['kind'] == 'all-reduce']
    assert reduced[0]['axes'] == ['data'] and reduced[0]['gb_per_second'] > 0
    assert sum(c['bytes'] for c in reduced) == pytest.approx(2 * 7 / 8 * 4 * 12_336, rel=0.01)
  for name in found:
    folder = project.model_dir / 'profiles' / name
    assert list(folder.rglob('*.xplane.pb')) and list(folder.rglob('*.trace.json.gz'))
  assert 'profile of steps 3-4 (PROFILE_STEPS)' in result.out
  assert 'all-reduce over data' in result.out
  fractions = project.metrics('anatomy/compute_fraction')
  assert fractions and all(0 < fraction < 1 for fraction in fractions.values())
  assert result.out.count('between steps, on average since the start: save') == 1  # of 12 to 14


@pytest.mark.slow
def test_a_slow_step_is_followed_by_one_profile(project, monkeypatch):
  monkeypatch.setenv('SLOW_AT', '204')
  result = project.run(
    '--gin.profile_config.ProfileConfig.slow_factor=20',
    DATA_MODULE='eventful_data',
    TRAIN_STEPS=210,
    LOG_PERIOD=50,
    num_devices=1,
  )
  assert result.code == 0, result.err
  (anatomy,) = profiles(project).values()
  assert anatomy['reason'] == 'slow step' and anatomy['first_step'] > 204
  check(anatomy, num_devices=1)
  assert anatomy['collectives'] == []


def test_steps_after_the_end_stop_the_run_before_it_compiles(project):
  result = project.run('--gin.PROFILE_STEPS=(30, 31)')
  assert result.code == 1
  assert 'PROFILE_STEPS = (30, 31) begins after the last step, TRAIN_STEPS = 20' in result.err
