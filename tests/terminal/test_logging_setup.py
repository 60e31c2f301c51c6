"""What our log says and what it leaves out. Each case has its own process: logging is global."""

import os
import re
import subprocess
import sys
import textwrap

STAMP = r'\d\d-\d\d \d\d:\d\d:\d\d '


def _stderr(code, **env):
  """Returns what `code` wrote to stderr after `logging_setup` was imported."""
  environment = {
    k: v
    for k, v in os.environ.items()
    if k not in ('T5X_GPU_VERBOSE', 'TF_CPP_MIN_LOG_LEVEL', 'GRPC_VERBOSITY')
  }
  result = subprocess.run(
    [
      sys.executable,
      '-c',
      'import logging, os, sys, warnings\n'
      'from t5x_gpu.terminal import logging_setup\n' + textwrap.dedent(code),
    ],
    env={**environment, **env},
    text=True,
    capture_output=True,
    check=True,
  )
  return result.stderr


def test_our_info_and_their_warnings_are_shown_their_info_is_not():
  err = _stderr("""
      logging_setup.setup()
      logging.getLogger('t5x_gpu.partitioning.mesh').info('mesh: data=%d', 2)
      logging.getLogger('__main__').info('from main')
      logging.getLogger('orbax.checkpoint').info('noise')
      logging.getLogger('jax._src.xla_bridge').info('noise')
      logging.getLogger('some_library').info('noise')
      logging.getLogger('orbax.checkpoint').warning('a real one')
  """)
  assert re.fullmatch(
    f'{STAMP}INFO mesh: data=2\n{STAMP}INFO from main\n{STAMP}WARNING a real one\n', err
  ), err


def test_verbose_shows_everything():
  err = _stderr(
    """
      logging_setup.setup()
      from absl import logging as absl_logging
      absl_logging.info('from absl')
      logging.getLogger('orbax.checkpoint').info('from orbax')
  """,
    T5X_GPU_VERBOSE='1',
  )
  assert re.fullmatch(f'{STAMP}INFO from absl\n{STAMP}INFO from orbax\n', err), err


def test_orbax_does_not_announce_a_stop_once_more():
  err = _stderr("""
      logging_setup.setup()
      from absl import logging as absl_logging
      absl_logging.warning(
        '[process=%s][thread=%s] Reached preemption sync point, step=%s', 0, 'a', 3
      )
  """)
  assert not err


def test_absl_adds_no_handler_and_no_preamble():
  err = _stderr("""
      from absl import logging as absl_logging
      absl_logging.use_absl_handler()
      logging_setup.setup()
      absl_logging.info('noise')
      absl_logging.warning('a real one')
  """)
  assert re.fullmatch(f'{STAMP}WARNING a real one\n', err), err


def test_several_processes_are_distinguished_and_info_appears_once():
  code = """
      logging_setup.setup({index}, process_count=8)
      logging.getLogger('t5x_gpu').info('mesh')
      logging.getLogger('t5x_gpu').warning('slow host')
  """
  assert re.fullmatch(
    f'{STAMP}\\[0/8\\] INFO mesh\n{STAMP}\\[0/8\\] WARNING slow host\n',
    _stderr(code.format(index=0)),
  )
  assert re.fullmatch(f'{STAMP}\\[3/8\\] WARNING slow host\n', _stderr(code.format(index=3)))


def test_python_warnings_are_one_log_line_each_and_come_once():
  err = _stderr("""
      logging_setup.setup()
      for _ in range(3):
        warnings.warn_explicit('parameter ignored', UserWarning, 'adafactor.py', 7, registry={})
  """)
  assert re.fullmatch(f'{STAMP}WARNING adafactor.py:7: UserWarning: parameter ignored\n', err), err


def test_second_setup_does_not_double_the_lines():
  err = _stderr("""
      logging.basicConfig()
      logging_setup.setup()
      logging_setup.setup()
      logging.getLogger('t5x_gpu').info('once')
  """)
  assert err.count('once') == 1


def test_exceptions_keep_their_traceback():
  err = _stderr("""
      logging_setup.setup()
      try:
        1 / 0
      except ZeroDivisionError:
        logging.getLogger('t5x_gpu').exception('failed')
  """)
  assert 'ERROR failed\nTraceback' in err and 'ZeroDivisionError' in err


def test_lines_follow_a_replaced_stderr():
  err = _stderr("""
      import io
      logging_setup.setup()
      old, sys.stderr = sys.stderr, io.StringIO()
      logging.getLogger('t5x_gpu').info('woven in')
      text, sys.stderr = sys.stderr.getvalue(), old
      assert 'woven in' in text, text
  """)
  assert err == ''


def test_environment_is_quiet_unless_the_user_has_set_it():
  show = 'logging_setup.quiet_environment(); sys.stderr.write(os.environ.get({!r}, "unset"))'
  name = 'TF_CPP_MIN_LOG_LEVEL'
  assert _stderr(show.format(name)) == '1'
  assert _stderr(show.format(name), TF_CPP_MIN_LOG_LEVEL='0') == '0'
  assert _stderr(show.format(name), T5X_GPU_VERBOSE='1') == 'unset'
  assert _stderr(show.format(name), T5X_GPU_VERBOSE='0') == '1'


def test_module_does_not_import_jax():
  _stderr('assert not {"jax", "tensorflow"} & set(sys.modules)')


def test_an_orbax_checkpoint_is_saved_in_silence(tmp_path):
  err = _stderr(f"""
      logging_setup.quiet_environment()
      logging_setup.setup()
      import jax.numpy as jnp
      import orbax.checkpoint as ocp
      with ocp.CheckpointManager({str(tmp_path / 'c')!r}) as manager:
        manager.save(1, args=ocp.args.StandardSave({{'a': jnp.ones(4)}}))
        manager.wait_until_finished()
        manager.restore(1, args=ocp.args.StandardRestore({{'a': jnp.ones(4)}}))
  """)
  assert err == ''
