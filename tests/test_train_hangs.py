"""Devices that never answer, in real processes: the watchdog ends the run, and so does Ctrl-C."""

import re
import signal

import pytest

from t5x_gpu.runtime.watchdog import EXIT_STUCK
from tests.helpers_train import TINY_GIN, Project

# A driver that hangs when JAX looks for devices: JAX imports all of `jax_plugins` for that.
HANGING_PLUGIN = """
import pathlib
import time

def initialize():
  pathlib.Path('held').touch()
  while True:
    try:
      time.sleep(600)
    except KeyboardInterrupt:
      pass
"""
# A model whose first parameters never come: a callback on the device waits for ever.
HANGING_MODEL = """
import ctypes
import dataclasses
import pathlib

import jax

from t5x_gpu.models import decoder_only


def _never(x):
  pathlib.Path('held').touch()
  mutex, lock = ctypes.create_string_buffer(64), ctypes.CDLL(None).pthread_mutex_lock
  return lock(mutex) or lock(mutex)


@dataclasses.dataclass(frozen=True)
class Hanging(decoder_only.DecoderOnlyModel):

  def init(self, key, spec):
    params = super().init(key, spec)
    wait = lambda x: jax.pure_callback(_never, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return jax.tree.map(wait, params)
"""
HANGING_GIN = (
  TINY_GIN.replace(
    'from t5x_gpu.models import config\n',
    (
      'from t5x_gpu.models import config\nfrom t5x_gpu.models import decoder_only\n'
      'from t5x_gpu.runtime import watchdog\nimport hanging\n'
    ),
  )
  + """
train_script.train.model = @hanging.Hanging()
hanging.Hanging.config = @config.TransformerConfig()
train_script.train.watchdog_cfg = @watchdog.WatchdogConfig()
"""
)


@pytest.fixture
def project(tmp_path, warm):
  (tmp_path / 'hanging.py').write_text(HANGING_MODEL)
  return Project(tmp_path, gin=HANGING_GIN, warm=warm)


@pytest.mark.slow
def test_the_watchdog_covers_the_search_for_devices(tmp_path):
  plugin = tmp_path / 'jax_plugins' / 'hanging'
  plugin.mkdir(parents=True)
  (plugin / '__init__.py').write_text(HANGING_PLUGIN)
  (tmp_path / 'hanging.py').write_text(HANGING_MODEL)
  project = Project(tmp_path, gin=HANGING_GIN)  # JAX looks for plugins when it is imported
  with project.start(**{'WatchdogConfig.compile_seconds': 4}) as run:
    assert run.finish() == EXIT_STUCK, run.err
  assert re.search(r"in phase 'set-up' for \d+ s; its deadline is 4 s", run.err), run.err
  assert 'jax_plugins/hanging/__init__.py' in run.err


@pytest.mark.slow
def test_the_watchdog_covers_the_wait_for_the_first_state(project):
  with project.start(**{'WatchdogConfig.compile_seconds': 10}) as run:
    assert run.finish() == EXIT_STUCK, run.err
  assert re.search(r"in phase 'set-up' for \d+ s; its deadline is 10 s", run.err), run.err
  assert ' in train_run\n' in run.err  # where the main thread is


def test_two_ctrl_cs_end_a_run_that_waits_for_its_first_state(project):
  # A shell starts what it runs in the background with SIGINT ignored, the tests maybe.
  script = (
    'import signal; signal.signal(signal.SIGINT, signal.default_int_handler); '
    'from t5x_gpu import cli, train; cli.run_main(train.main)'
  )
  with project.start(script=script) as run:
    run.wait_for(run.held)
    run.popen.send_signal(signal.SIGINT)
    run.wait_for(lambda: 'Press Ctrl-C again to exit immediately.' in run.err)
    run.popen.send_signal(signal.SIGINT)
    assert run.finish() == 130
  assert not project.steps()
