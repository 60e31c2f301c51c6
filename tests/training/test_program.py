"""Notes of a program on settings that others make void."""

import dataclasses

import jax
import pytest

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with

CONFIG = TransformerConfig(
  vocab_size=64, num_layers=4, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32
)
T5_LENGTHS = {'inputs': 8, 'targets': 8}
OVERLAP = dict(overlap_layers=True)


def program(
  partitioner=(), model=(), *, num_devices=4, num_hosts=1, num_microbatches=1, t5=False, length=8
):
  config = dataclasses.replace(CONFIG, **dict(model))
  return build_with(
    model=EncoderDecoderModel(config) if t5 else DecoderOnlyModel(config),
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    pack=False,
    partitioner=Partitioner(**dict(partitioner)),
    topology=Topology(num_hosts, num_devices // num_hosts),
    devices=jax.devices()[:num_devices],
    task_feature_lengths=T5_LENGTHS if t5 else {'targets': length},
    batch_size=16,
    num_microbatches=num_microbatches,
  )


@pytest.mark.parametrize(
  'partitioner, options, said',
  [
    (dict(zero_stage=1), {}, 'Partitioner.zero_stage = 1 has no effect: the mesh has one device'),
    (dict(sequence_parallel=True), {}, 'one device along model'),
    (dict(context_attention='gather'), {}, "= 'gather' has no effect: the mesh has one device"),
    (dict(pipeline_schedule='gpipe'), {}, 'one device along stage'),
    (dict(num_pipeline_microbatches=4), {}, 'one device along stage'),
    (dict(pipeline_repeats=2), {}, 'one device along stage'),
    (
      dict(fsdp=4, **OVERLAP),
      dict(num_microbatches=2, model=dict(remat_policy='full')),
      "overlap_layers = True has no effect: with accumulate_by = 'layer'",
    ),
    (
      dict(stage=2, pipeline_schedule='circular', pipeline_repeats=2, **OVERLAP),
      {},
      'a stage has 2 blocks of layers',
    ),
    (dict(stage=2, pipeline_schedule='gpipe', **OVERLAP), dict(t5=True), '2 blocks of layers'),
    ({}, dict(model=dict(router_z_loss=1e-3)), 'router_z_loss = 0.001 has no effect: num_experts'),
    ({}, dict(model=dict(remat_policy='full', full_remat_layers=1)), "remat_policy = 'full' has"),
    (
      dict(fsdp=2),
      dict(model=dict(remat_policy='attention', full_remat_layers=1), num_microbatches=2),
      "full_remat_layers = 1 has no effect: Partitioner.accumulate_by = 'layer'",
    ),
    ({}, dict(model=dict(qk_norm_kind='all_heads')), 'has no effect: qk_norm = False'),
  ],
)
def test_a_setting_without_effect_is_noted(partitioner, options, said):
  (note,) = program(partitioner, **options).layout.notes
  assert said in note and 'has no effect' in note


@pytest.mark.parametrize(
  'partitioner, options',
  [
    (dict(fsdp=4, zero_stage=1, **OVERLAP), dict(num_microbatches=2)),
    (dict(fsdp=4, accumulate_by='microbatch', **OVERLAP), dict(num_microbatches=2)),
    (dict(fsdp=2, num_partitions=2, sequence_parallel=True), {}),
    (dict(stage=2, num_pipeline_microbatches=2, pipeline_schedule='gpipe', **OVERLAP), {}),
    ({}, dict(model=dict(num_experts=2, router_z_loss=1e-3))),
    ({}, dict(model=dict(qk_norm=True, qk_norm_kind='all_heads'))),
    # As in the files of gin_configs/parallel, which a user may try on one device.
    (dict(zero_stage=1, sequence_parallel=True, **OVERLAP), dict(num_devices=1)),
    ({}, dict(num_microbatches=2)),
  ],
)
def test_settings_with_an_effect_and_defaults_are_not_noted(partitioner, options):
  assert program(partitioner, **options).layout.notes == ()


INSIDE = dict(ici_mesh_shape={'fsdp': 2})


@pytest.mark.parametrize(
  'tokens, partitioner, num_hosts, said',
  [
    (2048, dict(fsdp=4), 1, False),
    (4096, dict(fsdp=4), 1, True),
    (4096, dict(dcn_mesh_shape={'data': 2}, **INSIDE), 2, True),
    (4096, dict(dcn_mesh_shape={'fsdp': 2}, **INSIDE), 2, False),
  ],
)
def test_large_microbatches_inside_a_host_name_the_other_order(
  tokens, partitioner, num_hosts, said
):
  options = dict(num_hosts=num_hosts, num_microbatches=2, length=tokens // 2)
  (note,) = program(partitioner, **options).layout.notes
  assert 'computes each layer again' in note
  assert (f'{tokens:,} tokens per microbatch and device' in note) == said


def test_a_pipeline_overlaps_layers_in_the_last_microbatch_too():
  of = program(dict(stage=2, fsdp=2, **OVERLAP), num_microbatches=2)
  assert of.layout.region.sums_in_last_tick and of.layout.notes == ()
