"""Encoder-decoders with a deep encoder, or with adapters, have the gradients of one device.

On meshes that take them layer by layer, with dropout and packed, uneven rows. Others are in
tests/parity/test_layouts.py.
"""

import functools

import jax
import pytest

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.partitioning.axis_rules import NamedParam
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.schedules import constant
from tests.helpers_parity import OPTIMIZER, assert_same_steps, recorded
from tests.helpers_programs import build_with

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=4, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32, dropout_rate=0.1
)


class StartedLora(LoraModel):
  """With second factors that are not 0, as after some steps: then all factors have gradients."""

  def _new_factors(self, key, kernel):
    first, second = super()._new_factors(key, kernel)
    value = jax.random.normal(jax.random.fold_in(key, 1), second.value.shape) * 0.1
    return first, NamedParam(value, second.names)


T5 = EncoderDecoderModel(CONFIG, num_encoder_layers=2)
MODELS = {
  'deep': EncoderDecoderModel(CONFIG, num_encoder_layers=8),
  'adapted': StartedLora(
    T5, rank=2, pattern=r'decoder/.*/(query|wo)/kernel', also_train='encoder/encoder_norm/scale'
  ),
}
GPIPE = dict(stage=2, pipeline_schedule='gpipe')
LAYOUTS = {
  'fsdp_stage_accumulated': ('deep', 4, 2, dict(fsdp=2, **GPIPE)),
  'fsdp_circular': (
    'deep',
    4,
    1,
    dict(
      fsdp=2, stage=2, pipeline_schedule='circular', pipeline_repeats=2, num_pipeline_microbatches=2
    ),
  ),
  'adapted_by_layer': ('adapted', 2, 2, dict(fsdp=2)),
  'adapted_stage': ('adapted', 4, 1, dict(fsdp=2, **GPIPE)),
}


def run(model, num_devices=1, num_microbatches=1, partitioner=None):
  program = build_with(
    model=MODELS[model],
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    pack=True,
    partitioner=Partitioner(**(partitioner or {})),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'inputs': 8, 'targets': 12},
    batch_size=16,
    num_microbatches=num_microbatches,
  )
  return recorded(program)


one_device = functools.cache(run)


# In `make test`: tests/parity/test_layouts.py and tests/partitioning/test_pipeline_stacks.py.
@pytest.mark.slow
@pytest.mark.parametrize('layout', LAYOUTS)
def test_gradients_of_every_layer_of_both_stacks_are_those_of_one_device(layout):
  model, *split = LAYOUTS[layout]
  assert_same_steps(run(model, *split), one_device(model))
