"""The loop that communicates one layer ahead, and sums the first layer last: the same gradients."""

import collections
import dataclasses

import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from tests.helpers_parity import assert_same_steps, program_on_mesh, recorded

CONFIG = TransformerConfig(
  vocab_size=64, num_layers=3, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32
)
HSDP = dict(data=2, fsdp=4)
MODELS = {
  # A bias that all layers share gets a gradient from each of them.
  'none': DecoderOnlyModel(CONFIG),
  'full': DecoderOnlyModel(dataclasses.replace(CONFIG, remat_policy='full')),
  'lora': LoraModel(DecoderOnlyModel(CONFIG), rank=2),
  'one_layer': DecoderOnlyModel(dataclasses.replace(CONFIG, num_layers=1)),
  'bfloat16': DecoderOnlyModel(dataclasses.replace(CONFIG, dtype='bfloat16')),
  'fp8': DecoderOnlyModel(dataclasses.replace(CONFIG, dtype='fp8_float32')),
  # Kernels are rounded before the ticks of a pipeline.
  'stages_in_fp8': DecoderOnlyModel(dataclasses.replace(CONFIG, num_layers=4, dtype='fp8')),
  'stages': DecoderOnlyModel(dataclasses.replace(CONFIG, num_layers=4, dtype='bfloat16')),
  # No loop, so that XLA drops the stacks of what layers keep; as on GPUs without remat.
  'none_unrolled': DecoderOnlyModel(dataclasses.replace(CONFIG, scan_unroll=3)),
  'unrolled': DecoderOnlyModel(dataclasses.replace(CONFIG, scan_unroll=3, remat_policy='dots')),
  # Two policies, the second for the last layer alone, which runs after the loop; and without loops.
  'two_policies': DecoderOnlyModel(
    dataclasses.replace(CONFIG, remat_policy='dots', full_remat_layers=2)
  ),
  'two_policies_unrolled': DecoderOnlyModel(
    dataclasses.replace(CONFIG, remat_policy='attention', full_remat_layers=1, scan_unroll=3)
  ),
  # Stacks in host memory.
  'offload': DecoderOnlyModel(dataclasses.replace(CONFIG, remat_policy='offload')),
  # The encoder's first layer comes last; the decoder's is summed with the others.
  'encoder_decoder': EncoderDecoderModel(CONFIG),
  # Rows of the token table are looked up in parts, and the logits gather it.
  'tied': DecoderOnlyModel(dataclasses.replace(CONFIG, vocab_size=1024, logits_via_embedding=True)),
}


@pytest.mark.parametrize(
  ('name', 'mesh'),
  [
    ('none', HSDP),
    ('stages', dict(stage=2, data=4)),
    ('none_unrolled', HSDP),
    ('unrolled', HSDP),
    ('offload', HSDP),
    ('two_policies', HSDP),
    *(
      pytest.param(name, mesh, marks=pytest.mark.slow)
      for name, mesh in [
        ('full', HSDP),
        ('two_policies', dict(num_microbatches=2, accumulate_by='microbatch', **HSDP)),
        ('two_policies', dict(num_microbatches=2, data=8)),
        ('two_policies_unrolled', HSDP),
        ('lora', dict(fsdp=8)),
        ('one_layer', dict(fsdp=8)),
        ('bfloat16', dict(data=8)),
        ('fp8', HSDP),
        ('encoder_decoder', dict(fsdp=8)),
        ('tied', HSDP),
        ('stages_in_fp8', dict(stage=2, num_partitions=2, sequence_parallel=True)),
        # Gradients of the first microbatch reach the first layer through its port.
        ('none', dict(num_microbatches=2, accumulate_by='microbatch', **HSDP)),
        # Kernels are in 8 bits before the loop over microbatches.
        ('fp8', dict(num_microbatches=2, accumulate_by='microbatch', **HSDP)),
        ('fp8', dict(num_microbatches=2, fsdp=8, zero_stage=1)),
      ]
    ),
  ],
)
def test_gradients_are_those_of_a_plain_loop(name, mesh):
  plain = recorded(program_on_mesh(MODELS[name], overlap_layers=False, **mesh))
  ahead = recorded(program_on_mesh(MODELS[name], overlap_layers=True, **mesh))
  assert_same_steps(ahead, plain)


@pytest.mark.slow
def test_the_loop_sends_the_same_gradients_and_gathers_the_last_layer_once():
  sent = {}
  for ahead in (False, True):
    p = program_on_mesh(MODELS['none'], overlap_layers=ahead, **HSDP)
    hlo = partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch))
    sent[ahead] = collections.Counter()
    for c in inventory(hlo, p.layout.mesh.shape):
      sent[ahead][c.kind, c.axes] += c.bytes_per_call
  gathers = ('all-gather', ('fsdp',))
  reductions = {kind for kind in sent[False] if kind != gathers}
  assert {kind: sent[True][kind] for kind in reductions} == {
    kind: sent[False][kind] for kind in reductions
  }
  assert sent[True][gathers] < sent[False][gathers]
