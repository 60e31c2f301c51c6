"""Model FLOPs equal the time table's where nothing is skipped, padded or computed again."""

import dataclasses
import math

import jax
import pytest

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.flops import step_flops
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.formulas.step_shape import step_shape
from t5x_gpu.tools.planning.formulas.work import step_work
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with

CONFIG = TransformerConfig(
  vocab_size=512, num_layers=2, embed_dim=64, num_heads=4, head_dim=16, mlp_dim=128,
  relative_bias='none', attention='dense',
)  # fmt: skip
T5 = EncoderDecoderModel(CONFIG, num_encoder_layers=3)


@pytest.mark.parametrize(
  'model, lengths',
  [
    (T5, {'inputs': 512, 'targets': 114}),
    (T5, {'inputs': 64, 'targets': 64}),
    (
      EncoderDecoderModel(dataclasses.replace(CONFIG, num_kv_heads=2)),
      {'inputs': 8, 'targets': 96},
    ),
    (DecoderOnlyModel(CONFIG), {'targets': 64}),
  ],
  ids=['t5', 'equal lengths', 'grouped heads', 'decoder'],
)
def test_model_flops_are_those_that_dense_kernels_compute(model, lengths):
  program = build_with(
    model=model,
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(),
    devices=jax.devices()[:2],
    topology=Topology(1, 2),
    batch_size=8,
    task_feature_lengths=lengths,
    pack=False,
    num_microbatches=1,
  )
  shape = step_shape(program, model, num_microbatches=1, gpu=find_target('h100'))
  computed = 2 * math.fsum(w.flops for w in step_work(shape, program, model))
  assert step_flops(model, program.spec.shapes) == pytest.approx(computed, rel=1e-9)
