"""The gradients of one step of a small model on eight devices, for comparisons between layouts."""

import jax
import numpy as np

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK, KeepGradients
from tests.helpers_programs import build_with


def program(model, num_microbatches=1, **partitioner):
  """Returns a program on eight devices, whose optimizer keeps the gradients."""
  lengths = {'targets': 16}
  if isinstance(model, EncoderDecoderModel):
    lengths['inputs'] = 16
  return build_with(
    model=model,
    optimizer=KeepGradients(),
    learning_rate=constant(1.0),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, 8),
    devices=jax.devices()[:8],
    task_feature_lengths=lengths,
    num_microbatches=num_microbatches,
    batch_size=16,
    pack=True,
  )


def gradients(p) -> dict[str, np.ndarray]:
  """Returns path -> gradient of the first step."""
  [batch] = uneven_batches(p.spec, seed=1, num_batches=1)
  batch = p.layout.put_batch(batch)
  state = p.init.lower().compile(compiler_options=QUICK)()
  step = p.train_step.lower(p.abstract_state, batch).compile(compiler_options=QUICK)
  grads, _ = jax.tree_util.tree_flatten_with_path(step(state, batch)[0].opt_state)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x) for path, x in grads
  }
