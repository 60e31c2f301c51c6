"""Any legal mesh trains like one device: random axis sizes, model shapes and microbatches."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import build_program
from t5x_gpu.training.schedules import constant

from tests.parity.tolerances import MESH_GRADIENT, MESH_LOSS

BATCH, LENGTH = 16, 8
MODELS = {
    'heads': TransformerConfig(vocab_size=32, num_layers=2, embed_dim=8, num_heads=8, head_dim=2,
                               mlp_dim=16, dropout_rate=0.1),
    'tied': TransformerConfig(vocab_size=64, num_layers=1, embed_dim=16, num_heads=8, head_dim=4,
                              mlp_dim=8, logits_via_embedding=True, relative_bias='per_layer'),
}


@st.composite
def layouts(draw):
  """Draws sizes of data, fsdp and model whose product divides 8."""
  model = draw(st.sampled_from([1, 2, 4, 8]))
  fsdp = draw(st.sampled_from([n for n in (1, 2, 4, 8) if 8 % (model * n) == 0]))
  return model, fsdp


@functools.cache
def one_step(model_name, num_devices, num_partitions, fsdp, num_microbatches):
  """Returns (loss, gradient norm) of the first step."""
  program = build_program(
      model=DecoderOnlyModel(MODELS[model_name]), optimizer=AdamW(), schedule=constant(1e-2),
      partitioner=Partitioner(num_partitions=num_partitions, fsdp=fsdp),
      topology=Topology(1, num_devices), devices=jax.devices()[:num_devices],
      task_feature_lengths={'targets': LENGTH}, batch_size=BATCH, pack=False, seed=0,
      num_microbatches=num_microbatches)
  targets = np.random.default_rng(0).integers(0, 32, (BATCH, LENGTH)).astype(np.int32)
  batch = {'decoder_target_tokens': targets, 'decoder_loss_weights': (targets > 0).astype(np.int32),
           'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1]}
  _, sums = program.train_step(program.init(), program.layout.put_batch(batch))
  return float(sums['loss'][0] / sums['loss'][1]), float(sums['grad_norm'][0])


@hypothesis.settings(max_examples=6, deadline=None, derandomize=True)
@hypothesis.given(layout=layouts(), model=st.sampled_from(sorted(MODELS)))
def test_the_first_step_on_a_random_mesh_equals_one_device(layout, model):
  loss, norm = one_step(model, 8, *layout, 1)
  want_loss, want_norm = one_step(model, 1, 1, 1, 1)
  np.testing.assert_allclose(loss, want_loss, rtol=MESH_LOSS)
  np.testing.assert_allclose(norm, want_norm, rtol=10 * MESH_GRADIENT)
