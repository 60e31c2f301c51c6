"""A plan of DPO counts the forward pass of the reference: FLOPs and bytes of the program."""

import collections
import dataclasses
import math

import pytest

from t5x_gpu.compiled.collectives import flops_per_device, inventory, partitioned_hlo
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.tools.planning.formulas.step_shape import step_shape
from t5x_gpu.tools.planning.formulas.traffic import compiled_traffic, formula_traffic
from t5x_gpu.tools.planning.formulas.work import step_work
from t5x_gpu.tools.planning.gpu_targets import find_target
from tests.helpers_programs import program_of

CONFIG = TransformerConfig(
  vocab_size=512,
  num_layers=2,
  embed_dim=128,
  num_heads=4,
  head_dim=32,
  mlp_dim=256,
  dropout_rate=0.0,
  relative_bias='none',
)
PLAIN = DecoderOnlyModel(CONFIG)


@pytest.mark.slow
@pytest.mark.parametrize(
  'mesh',
  [
    dict(fsdp=4),
    pytest.param(dict(num_partitions=4), marks=pytest.mark.slow),
    pytest.param(dict(num_partitions=4, sequence_parallel=True), marks=pytest.mark.slow),
    pytest.param(dict(context=4), marks=pytest.mark.slow),
  ],
  ids=str,
)
def test_flops_and_bytes_are_those_of_the_program(mesh):
  attention = 'auto' if 'context' in mesh else 'dense'
  model = DpoModel(DecoderOnlyModel(dataclasses.replace(CONFIG, attention=attention)))
  program = program_of(model, {'targets': 128}, **mesh)
  shape = step_shape(program, model, num_microbatches=1, gpu=find_target('h100'))
  hlo = partitioned_hlo(program.train_step.lower(program.abstract_state, program.abstract_batch))
  sums = []
  for sent in (
    formula_traffic(program, shape),
    compiled_traffic(
      [c for c in inventory(hlo, program.layout.mesh.shape) if math.prod(c.shape) > 1]
    ),
  ):
    sums.append(collections.Counter())
    for s in sent:
      sums[-1][s.axes] += s.num_bytes
  assert sums[0] == pytest.approx(sums[1], rel=0.02)
  if 'context' not in mesh:
    flops = math.fsum(w.flops for w in step_work(shape, program, model))
    assert flops == pytest.approx(flops_per_device(hlo), rel=0.05)


def test_adapters_are_not_trained_kernels():
  model = DpoModel(LoraModel(PLAIN, rank=2, pattern='.*/kernel'))
  program = program_of(model, {'targets': 16})
  shape = step_shape(program, model, num_microbatches=1, gpu=find_target('h100'))
  assert (shape.references, shape.trains_kernels) == (1, False)
  assert shape.stacks[0].causal and shape.stacks[0].num_layers == 2
