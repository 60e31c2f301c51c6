"""Arrays of a checkpoint are read in pieces."""

import jax.numpy as jnp
import numpy as np

from t5x_gpu import checkpoint_tools
from t5x_gpu.checkpoint import arrays
from t5x_gpu.checkpoint.store import StateReader
from tests.checkpoint.test_checkpointer import new_state, opened, save


def test_a_run_s_shards_become_chunks_that_can_be_read_in_pieces(tmp_path, monkeypatch):
  monkeypatch.setattr(arrays, 'CHUNK_BYTES', 4096)
  state = new_state(1, rows=512)  # 16 KiB
  prime = jnp.zeros((4099, 2))  # cut by Orbax, it would be rows of 8 bytes
  state = state.replace(params={**state.params, 'prime': prime})
  with opened(tmp_path) as checkpointer:
    save(checkpointer, 1, state)
    checkpointer.wait()
  reader = StateReader(tmp_path)
  assert reader.chunk_bytes('params/dense/kernel') == 4096
  assert reader.chunk_shape('params/prime') == (4099, 2)
  np.testing.assert_array_equal(
    reader.read_at('params/dense/kernel', ()), state.params['dense']['kernel']
  )
  assert checkpoint_tools.main(['verify', str(tmp_path)]) == 0
