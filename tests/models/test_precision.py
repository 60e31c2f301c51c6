"""What each precision computes in which dtype, and what is refused."""

import dataclasses
import re
import types

import jax
import jax.numpy as jnp
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.models import precision
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=24, dtype='fp8'
)


def program(config, *, num_devices=1, **partitioner):
  return build_with(
    model=DecoderOnlyModel(config),
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'targets': 8},
    batch_size=4,
    pack=True,
  )


def products(config):
  """Returns (products of two 8-bit operands, all products) in the text of a training step."""
  p = program(config)
  lowered = p.train_step.lower(p.abstract_state, p.abstract_batch).as_text()
  dots = re.findall(r'stablehlo\.dot_general.* : \((tensor<\S+>), (tensor<\S+>)\)', lowered)
  return sum('f8E' in a and 'f8E' in b for a, b in dots), len(dots)


def test_every_matmul_of_a_layer_is_in_fp8_forward_and_backward():
  # Query, key, value, out, two branches of the MLP and its output; each forward, and the gradients
  # of both operands. The layers are a loop, so each is in the text once.
  fp8, every = products(CONFIG)
  assert fp8 == 7 * 3
  assert products(dataclasses.replace(CONFIG, dtype='bfloat16')) == (0, every)


@pytest.mark.quick_cases('2.0')
@pytest.mark.parametrize('factor', [None, 2.0])
def test_with_experts_attention_alone_is_in_fp8(factor):
  config = dataclasses.replace(
    CONFIG, num_experts=2, num_experts_per_token=1, expert_capacity_factor=factor
  )
  assert products(config)[0] == 4 * 3


@pytest.mark.quick_cases('True')
@pytest.mark.parametrize('tied', [False, True])
def test_logits_are_in_fp8_if_asked_for(tied):
  config = dataclasses.replace(CONFIG, fp8_logits=True, logits_via_embedding=tied)
  assert products(config)[0] == 7 * 3 + 3
  with raises(ModelError):
    dataclasses.replace(config, loss_chunks=0)


@pytest.mark.quick_cases('fp8-bf16')
@pytest.mark.parametrize(('dtype', 'sent'), [('fp8', 'bf16'), ('float32', 'f32')])
def test_a_pipeline_gathers_in_the_dtype_of_its_matmuls(dtype, sent):
  config = dataclasses.replace(CONFIG, dtype=dtype)
  p = program(config, num_devices=4, stage=2, fsdp=2, num_pipeline_microbatches=2)
  lowered = p.train_step.lower(p.abstract_state, p.abstract_batch).as_text()
  gathered = re.findall(r'all_gather.*-> tensor<(?:\d+x)*(\w+)>', lowered)
  assert gathered and set(gathered) == {sent}


def test_recomputed_layers_multiply_in_fp8_again():
  config = dataclasses.replace(CONFIG, remat_policy='full')
  # The last product of a layer is not needed again.
  assert products(config)[0] == 7 * 3 + 6


def test_fp8_adds_nothing_to_the_state_so_checkpoints_are_those_of_bfloat16():
  fp8, bfloat16 = (
    program(dataclasses.replace(CONFIG, dtype=dtype)).abstract_state
    for dtype in ('fp8', 'bfloat16')
  )
  assert jax.tree.structure(fp8) == jax.tree.structure(bfloat16)
  assert jax.tree.leaves(fp8) == jax.tree.leaves(bfloat16)


@pytest.mark.parametrize(
  'wrong', ['bf16', 'FP8', 'float23', 'float8', 'float8_e4m3fn', jnp.bfloat16]
)
def test_unknown_precision_suggests_the_closest_one(wrong):
  with raises(ModelError):
    dataclasses.replace(CONFIG, dtype=wrong)


@pytest.mark.parametrize(
  'change',
  [{'fp8_scaling': 'delayed'}, {'fp8_logits': True}, {'fp8_history': 16}, {'fp8_margin': 1}],
)
def test_settings_of_fp8_without_effect_are_refused(change):
  [name] = change
  with raises(ModelError):
    dataclasses.replace(CONFIG, dtype='bfloat16', **change)
  if name in ('fp8_history', 'fp8_margin'):
    with raises(ModelError):
      dataclasses.replace(CONFIG, **change)
  dataclasses.replace(CONFIG, **{'fp8_scaling': 'delayed', **change})


def test_every_matmul_of_a_layer_multiplies_blocks():
  # Simulated devices multiply float32. A product converts its operands: 32 values have a scale.
  p = program(dataclasses.replace(CONFIG, fp8_scaling='mxfp8'))
  lowered = p.train_step.lower(p.abstract_state, p.abstract_batch).as_text()
  assert len(re.findall(r'-> tensor<\d+x\d+x32xf8E4M3FN>', lowered)) == 7 * 3 * 2


def test_model_does_not_split_blocks():
  with raises(ModelError):
    program(dataclasses.replace(CONFIG, fp8_scaling='mxfp8'), num_devices=2, num_partitions=2)


@pytest.mark.parametrize(
  'change', [{'fp8_scaling': 'nvfp4'}, {'dtype': 'nvfp4'}, {'dtype': 'mxfp8'}]
)
def test_other_block_formats_name_the_reason_or_the_setting(change):
  with raises(ModelError):
    dataclasses.replace(CONFIG, **change)


def test_gpus_without_fp8_are_refused_with_those_that_have_it():
  def gpus(**kinds):
    return [
      types.SimpleNamespace(
        platform='gpu', device_kind=kind.replace('_', ' '), compute_capability=c
      )
      for kind, c in kinds.items()
    ]

  a100 = gpus(NVIDIA_A100='8.0', NVIDIA_H100='9.0')
  with raises(ModelError):
    precision.check_devices('current', a100)
  precision.check_devices(None, a100)
  h100 = gpus(NVIDIA_H100='9.0', NVIDIA_L40S='8.9', NVIDIA_B200='10.0')
  precision.check_devices('delayed', h100)
  with raises(ModelError):
    precision.check_devices('mxfp8', h100)
  precision.check_devices('mxfp8', gpus(NVIDIA_B200='10.0', NVIDIA_GeForce_RTX_5090='12.0'))
  precision.check_devices('mxfp8', jax.devices())
