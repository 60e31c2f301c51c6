"""Every layout trains as one device does: losses, every gradient, both optimizers, evaluation.

With everything on that could depend on the topology: dropout, packed rows, uneven padding and loss
weights, accumulation and rematerialisation on some.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import numpy as np
import pytest

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import ConfigError
from t5x_gpu.evaluation.evaluator import check_eval_batch
from t5x_gpu.layers import grouped_matmul
from t5x_gpu.layers.backends.choose import Hardware
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.parity.paired_run import RecordedRun, Recording
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import OPTIMIZED, QUICK
from tests.helpers_parity import assert_same_evaluation, assert_same_steps, recorded
from tests.helpers_programs import build_with
from tests.messages import raises
from tests.parity.tolerances import MESH_GRADIENT

STEPS = 3
BATCH, LENGTH = 16, 16
LENGTHS = {
  't5': {'inputs': 24, 'targets': LENGTH},
  'tied_t5': {'inputs': LENGTH, 'targets': 24},
  'classifier': {'inputs': LENGTH},
  'mean_classifier': {'inputs': LENGTH},
  'flat_classifier': {'inputs': LENGTH},
  'mlm': {'inputs': LENGTH, 'targets': LENGTH},
}
DENSE = TransformerConfig(
  vocab_size=64, num_layers=4, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32, dropout_rate=0.1
)
MODELS = {
  'dense': DENSE,
  'tied': dataclasses.replace(DENSE, logits_via_embedding=True, relative_bias='per_layer'),
  'moe': dataclasses.replace(DENSE, num_experts=4),
  'charged_moe': dataclasses.replace(
    DENSE, num_experts=4, expert_capacity_factor=None, router_balance_loss=0.1, router_z_loss=0.01
  ),
  'dropless': dataclasses.replace(
    DENSE,
    relative_bias='none',
    rope=RotaryEmbedding(),
    num_kv_heads=2,
    qk_norm=True,
    query_pre_attn_scalar=4.0,
    mlp_activations=('silu', 'linear'),
    num_experts=8,
    num_experts_per_token=3,
    expert_capacity_factor=None,
    normalize_gates=False,
  ),
  'modern': dataclasses.replace(
    DENSE,
    relative_bias='none',
    rope=RotaryEmbedding(),
    num_kv_heads=2,
    qk_norm=True,
    query_pre_attn_scalar=4.0,
    attention_softcap=5.0,
    logits_softcap=5.0,
    windows=(6, 0),
    norm='rms_plus_one',
    norm_position='sandwich',
    attention_bias='qkv',
    mlp_activations=('silu', 'linear'),
  ),
  'by_layer': dataclasses.replace(
    DENSE,
    relative_bias='none',
    ropes=(
      RotaryEmbedding(
        10.0,
        fraction=0.5,
        scaling='longrope',
        short_factors=(1.0,),
        long_factors=(3.0,),
        original_length=5,
        factor=4.0,
      ),
      None,
      RotaryEmbedding(100.0, fraction=0.5, scaling='yarn', factor=4.0, original_length=8),
    ),
    num_kv_heads=2,
    qk_norm=True,
    qk_norm_kind='all_heads',
    query_pre_attn_scalar=4.0,
    windows=(6, 0, 3),
    norm_position='output',
    mlp_activations=('silu', 'linear'),
  ),
  'gpt2': dataclasses.replace(
    DENSE,
    relative_bias='none',
    num_positions=LENGTH,
    norm='layer',
    attention_bias='all',
    mlp_bias=True,
    mlp_activations=('gelu',),
    query_pre_attn_scalar=4.0,
    logits_via_embedding=True,
    scale_tied_logits=False,
  ),
  'bert': dataclasses.replace(
    DENSE,
    relative_bias='none',
    num_positions=LENGTH,
    num_token_types=2,
    norm='layer',
    norm_position='post',
    embedding_norm=True,
    attention_bias='all',
    mlp_bias=True,
    mlp_activations=('gelu_exact',),
    query_pre_attn_scalar=4.0,
  ),
}
FAMILIES = {
  'classifier': lambda **options: EncoderModel(MODELS['bert'], num_classes=5, **options),
  'mean_classifier': lambda **options: EncoderModel(
    DENSE, num_classes=5, pooling='mean', **options
  ),
  'flat_classifier': lambda **options: EncoderModel(
    dataclasses.replace(DENSE, relative_bias='none', max_length=LENGTH),
    num_classes=5,
    pooling='flatten',
    head_mlp_dim=8,
    **options,
  ),
  'mlm': lambda **options: EncoderModel(MODELS['bert'], head_type='mlm', **options),
  't5': lambda **options: EncoderDecoderModel(DENSE, num_encoder_layers=2, **options),
  'tied_t5': lambda **options: EncoderDecoderModel(MODELS['tied'], **options),
}


@dataclasses.dataclass(frozen=True)
class Case:
  """A layout of eight devices.

  Attributes:
    partitioner: arguments of Partitioner.
    model: of MODELS.
    config: what differs from it and may not change the answer.
    num_microbatches: gradient accumulation.
    num_hosts: that share the devices.
    num_devices, batch_size: of the layout.
  """

  partitioner: Mapping[str, Any]
  model: str = 'dense'
  config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  num_microbatches: int = 1
  num_hosts: int = 1
  num_devices: int = 8
  batch_size: int = BATCH


# The loss without stored logits, in chunks of which the last one is padded.
CHUNKS = dict(loss_chunks=3)
_GPIPE = dict(pipeline_schedule='gpipe')
_OVERLAP = dict(overlap_layers=True)  # as in hsdp.gin
# Pairs, in few cases: two parallelisms, a parallelism and a model, a parallelism and a choice of
# remat, loss chunks, attention or accumulation. tests/property/test_layouts.py draws others.
CASES = {
  'dp_overlap_2_microbatches': Case(_OVERLAP, num_microbatches=2),
  'zero1_overlap_2_microbatches': Case(
    dict(fsdp=4, zero_stage=1, **_OVERLAP), model='tied', config=CHUNKS, num_microbatches=2
  ),
  'zero1_model_3_microbatches': Case(
    dict(fsdp=2, num_partitions=4, zero_stage=1, sequence_parallel=True),
    model='by_layer',
    num_microbatches=3,
    batch_size=24,
  ),
  'zero2_overlap': Case(dict(fsdp=4, zero_stage=2, **_OVERLAP), config=CHUNKS),
  'fsdp_overlap_unrolled': Case(
    dict(fsdp=4, **_OVERLAP), config=dict(remat_policy='full', scan_unroll=4)
  ),
  'zero2_remat': Case(
    dict(fsdp=4, zero_stage=2), config=dict(remat_policy='full', **CHUNKS), num_microbatches=2
  ),
  'fsdp': Case(dict(fsdp=8), config=CHUNKS),
  'fsdp_by_microbatch': Case(dict(fsdp=4, accumulate_by='microbatch'), num_microbatches=2),
  't5_ring_two_policies': Case(
    dict(context=2, fsdp=2, **_OVERLAP),
    model='t5',
    config=dict(remat_policy='attention', full_remat_layers=1),
  ),
  'ring_by_layer_attention': Case(
    dict(context=2, fsdp=2), config=dict(remat_policy='attention'), num_microbatches=2
  ),
  'hsdp_minimal': Case(
    dict(ici_mesh_shape={'fsdp': 4}, dcn_mesh_shape={'data': 2}, **_OVERLAP),
    num_hosts=2,
    config=dict(remat_policy='minimal', **CHUNKS),
    model='tied',
  ),
  'pp_zero1_overlap': Case(dict(stage=2, fsdp=2, zero_stage=1, **_OVERLAP), config=CHUNKS),
  'modern_gather_shared_kv_heads': Case(
    dict(context=2, num_partitions=4, fsdp=1, context_attention='gather'),
    model='modern',
    config=CHUNKS,
    num_microbatches=2,
  ),
  'modern_pp_fsdp_model': Case(
    dict(stage=2, fsdp=2, num_partitions=2, **_GPIPE, **_OVERLAP), model='modern'
  ),
  'by_layer_tp_shared_kv_heads': Case(dict(num_partitions=4), model='by_layer'),
  'by_layer_pp_fsdp_offload': Case(
    dict(stage=2, fsdp=2), model='by_layer', config=dict(remat_policy='offload')
  ),
  'by_layer_ring_model': Case(
    dict(context=2, num_partitions=2, sequence_parallel=True, **_OVERLAP), model='by_layer'
  ),
  'gpt2_fsdp_model': Case(
    dict(fsdp=2, num_partitions=2, sequence_parallel=True), model='gpt2', num_microbatches=2
  ),
  'gpt2_context_stage': Case(dict(context=2, stage=2), model='gpt2'),
  'charged_moe_fsdp_by_layer': Case(
    dict(expert=2, fsdp=2), model='charged_moe', config=CHUNKS, num_microbatches=2
  ),
  'charged_moe_context_stage': Case(dict(expert=2, context=2, stage=2), model='charged_moe'),
  # Three rows per device: sequence parallelism splits positions; in the other layouts, rows.
  'charged_moe_model': Case(
    dict(expert=2, num_partitions=2, sequence_parallel=True), model='charged_moe', batch_size=12
  ),
  'dropless_fsdp_model': Case(dict(expert=2, fsdp=2, num_partitions=2), model='dropless'),
  'classifier_fsdp_model': Case(
    dict(fsdp=2, num_partitions=2, sequence_parallel=True), model='classifier', num_microbatches=2
  ),
  'classifier_context_stage': Case(dict(context=2, stage=2), model='mean_classifier'),
  'flat_classifier_fsdp_context_model': Case(
    dict(fsdp=2, context=2, num_partitions=2, sequence_parallel=True), model='flat_classifier'
  ),
  'mlm_ring_model': Case(dict(context=2, num_partitions=2), model='mlm', config=CHUNKS),
  't5_fsdp_by_layer': Case(dict(fsdp=4), model='t5', num_microbatches=2),
  't5_zero2_by_layer': Case(
    dict(fsdp=2, zero_stage=2, num_partitions=2, **_OVERLAP),
    model='tied_t5',
    config=dict(remat_policy='offload', **CHUNKS),
    num_microbatches=2,
  ),
  't5_fsdp_stage': Case(
    dict(stage=2, fsdp=4, **_GPIPE), model='tied_t5', config=CHUNKS, num_microbatches=2
  ),
  't5_data_stage_model': Case(
    dict(stage=2, num_partitions=2, sequence_parallel=True, **_GPIPE), model='t5'
  ),
  't5_gather_stage': Case(
    dict(stage=2, context=2, context_attention='gather', **_GPIPE), model='t5'
  ),
  't5_circular': Case(
    dict(
      stage=2, fsdp=2, pipeline_schedule='circular', pipeline_repeats=2, num_pipeline_microbatches=2
    ),
    model='tied_t5',
  ),
  'chunked_fsdp_model_remat': Case(
    dict(data=2, fsdp=2, num_partitions=2, sequence_parallel=True),
    config=dict(attention='chunked', remat_policy='full'),
    num_microbatches=2,
  ),
  'data_stage_model': Case(
    dict(stage=2, num_partitions=2, sequence_parallel=True, **_OVERLAP),
    model='tied',
    config=dict(remat_policy='dots', **CHUNKS),
  ),
  'fsdp_context_model': Case(
    dict(fsdp=2, context=2, num_partitions=2, sequence_parallel=True, **_OVERLAP),
    config=dict(remat_policy='offload', **CHUNKS),
  ),
  'fsdp_circular': Case(dict(stage=2, fsdp=2, pipeline_schedule='circular', pipeline_repeats=2)),
  'expert_fsdp': Case(
    dict(data=1, expert=2, fsdp=4, **_OVERLAP), model='moe', config=dict(remat_policy='dots')
  ),
  'expert_model_by_layer': Case(dict(expert=2, num_partitions=2), model='moe', num_microbatches=2),
  'tokamax_fsdp_model_remat': Case(
    dict(data=2, fsdp=2, num_partitions=2), config=dict(attention='tokamax', remat_policy='full')
  ),
  'tokamax_modern_ring_model': Case(
    dict(context=2, num_partitions=2),
    model='modern',
    config=dict(attention='tokamax', remat_policy='dots'),
  ),
  'tokamax_t5_ring': Case(dict(context=2, fsdp=2), model='t5', config=dict(attention='tokamax')),
  'tokamax_context_stage': Case(dict(context=2, stage=2), config=dict(attention='tokamax')),
  'tokamax_modern_shared_kv_heads': Case(
    dict(fsdp=2, num_partitions=4), model='modern', config=dict(attention='tokamax')
  ),
  'tokamax_classifier_model': Case(
    dict(fsdp=2, num_partitions=2), model='classifier', config=dict(attention='tokamax')
  ),
  'chunked_t5_model': Case(
    dict(fsdp=2, num_partitions=2), model='t5', config=dict(attention='chunked')
  ),
}


class BothState(flax.struct.PyTreeNode):
  """State of `Both`."""

  adamw: Any
  adafactor: Any
  adafactor_params: Any


@dataclasses.dataclass(frozen=True)
class Both:
  """AdamW moves the parameters, Adafactor a copy of them, with the same gradients.

  One compiled step tests both.
  """

  adamw: AdamW = AdamW(weight_decay=0.1)
  adafactor: Adafactor = Adafactor(min_dim_size_to_factor=16)

  def init(self, params, names):
    return BothState(self.adamw.init(params, names), self.adafactor.init(params, names), params)

  def state_names(self, params, names):
    return BothState(
      self.adamw.state_names(params, names), self.adafactor.state_names(params, names), names
    )

  def update(self, grads, state, params, *, names, **step):
    params, adamw = self.adamw.update(grads, state.adamw, params, names=names, **step)
    copy, adafactor = self.adafactor.update(
      grads, state.adafactor, state.adafactor_params, names=names, **step
    )
    return params, BothState(adamw, adafactor, copy)


def build(case: Case, num_devices: int, optimizer: Any = Both()) -> Program:
  if case.model in FAMILIES:
    model = FAMILIES[case.model](z_loss=1e-3)
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **case.config))
  else:
    model = DecoderOnlyModel(dataclasses.replace(MODELS[case.model], **case.config), z_loss=1e-3)
  lengths = LENGTHS.get(case.model, {'targets': LENGTH})
  return build_with(
    model=model,
    optimizer=Recording(optimizer),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**case.partitioner),
    topology=Topology(case.num_hosts, num_devices // case.num_hosts),
    devices=jax.devices()[:num_devices],
    task_feature_lengths=lengths,
    batch_size=case.batch_size,
    pack='classifier' not in case.model,
    num_microbatches=case.num_microbatches,
  )


@functools.cache
def one_device(model: str, batch_size: int, optimizer: Any, **config: Any) -> RecordedRun:
  return recorded(build(Case({}, model, config=config, batch_size=batch_size), 1, optimizer))


# Gradients of one step are in `make test`: of every axis but `model`
# (tests/partitioning/test_fsdp_of_any_size.py) and `context`
# (tests/layers/backends/test_context_attention.py).
FAST = ('t5_fsdp_by_layer', 'data_stage_model', 'expert_fsdp')
# Compiled as users compile: every axis, ZeRO and rematerialisation.
AS_USERS = (*FAST, 'zero2_remat', 'fsdp_context_model')


@pytest.mark.parametrize('name', FAST)
def test_the_first_gradients_of_a_layout_are_those_of_one_device(name):
  assert_first_gradients_of_one_device(CASES[name])


def assert_first_gradients_of_one_device(case: Case) -> None:
  # Random numbers are two thirds of the program.
  alone = dict(dropout_rate=0.0)
  case = dataclasses.replace(case, config={**case.config, **alone})
  mesh = recorded(build(case, case.num_devices, AdamW()))
  assert_same_steps(mesh, one_device(case.model, case.batch_size, AdamW(), **alone))


# Of kernels' nested regions, whose marks differ between versions of jax.
ON_EACH_VERSION = ('tokamax_fsdp_model_remat', 'tokamax_t5_ring')


@pytest.mark.slow
@pytest.mark.parametrize(
  'name', [pytest.param(n, marks=[pytest.mark.versions] * (n in ON_EACH_VERSION)) for n in CASES]
)
def test_layout_trains_as_one_device(name):
  assert_trains_as_one_device(CASES[name], options=OPTIMIZED if name in AS_USERS else QUICK)


@pytest.mark.versions
@pytest.mark.slow
def test_dropless_experts_train_as_one_device_by_the_way_of_gpus(monkeypatch):
  """In a nested region without marks; a loop takes the place of kernels, as for B200."""
  case = CASES['dropless_fsdp_model']
  one_device(case.model, case.batch_size, Both())
  monkeypatch.setattr(grouped_matmul, 'hardware', lambda: Hardware('gpu', 'a GPU', 10.0))
  assert_trains_as_one_device(case)


def assert_trains_as_one_device(case: Case, options: Mapping[str, Any] = QUICK) -> None:
  mesh = recorded(build(case, case.num_devices), options)
  # Kernels differ in the padding of an encoder, which reaches tokens without keys there.
  by_kernel = case.model == 't5' and case.config.get('attention') == 'tokamax'
  config = {'attention': 'tokamax'} if by_kernel else {}
  one = one_device(case.model, case.batch_size, Both(), **config)
  assert_same_steps(mesh, one, num_steps=STEPS)
  assert_same_evaluation(mesh.program, one.program)


@pytest.mark.slow
def test_evaluation_of_an_encoder_decoder_in_a_pipeline_takes_odd_batches():
  lengths = {'inputs': 8, 'targets': 6}
  pipeline, alone = (
    build_with(
      model=FAMILIES['t5'](),
      optimizer=AdamW(),
      learning_rate=constant(1e-2),
      pack=False,
      partitioner=partitioner,
      topology=Topology(1, count),
      devices=jax.devices()[:count],
      task_feature_lengths=lengths,
      batch_size=8,
    )
    for count, partitioner in ((2, Partitioner(stage=2, **_GPIPE)), (1, Partitioner()))
  )
  params = pipeline.init().params
  spec = FAMILIES['t5']().batch_spec(lengths, batch_size=5, pack=False)
  [batch] = uneven_batches(spec, seed=1, num_batches=1)
  assert pipeline.layout.pipeline.for_rows(5).num_microbatches == 5, '1 is fewer than the stages'
  got = pipeline.eval_step(params, pipeline.layout.put_batch(batch))
  want = alone.eval_step(jax.device_get(params), alone.layout.put_batch(batch))
  for name, pair in want.items():
    np.testing.assert_allclose(got[name], pair, rtol=MESH_GRADIENT, err_msg=name)
  with raises(ConfigError):
    check_eval_batch(1, pipeline)


@pytest.mark.slow
def test_an_encoder_decoder_has_the_same_loss_by_ranges_of_keys():
  """Of tokens whose segment has encoder tokens; others average padding, which no token reads."""
  dense, ranges = (
    build(Case({}, 't5', config=dict(attention=name)), 1) for name in ('dense', 'tokamax')
  )
  [batch] = uneven_batches(dense.spec, seed=1, num_batches=1)
  segments, weights = batch['decoder_segment_ids'], batch['decoder_loss_weights'].copy()
  for row, (theirs, ours) in enumerate(zip(batch['encoder_segment_ids'], segments)):
    weights[row][~np.isin(ours, theirs)] = 0
  assert 0 < weights.sum() < batch['decoder_loss_weights'].sum()
  batch = {**batch, 'decoder_loss_weights': weights}
  params = dense.init().params
  want, got = (
    program.eval_step(params, program.layout.put_batch(batch)) for program in (dense, ranges)
  )
  np.testing.assert_allclose(got['loss'], want['loss'], rtol=MESH_GRADIENT)
