"""The data opens during the compile."""

import threading

import pytest

from t5x_gpu.run import live
from t5x_gpu.runtime import process_exit


def test_an_interrupted_compile_does_not_wait_for_the_data():
  opened = threading.Event()
  with pytest.raises(KeyboardInterrupt):
    with live._in_thread(opened.wait) as opening:
      raise KeyboardInterrupt
  assert not opening.done() and process_exit._left_behind.is_set()
  opened.set()
  assert opening.result()
