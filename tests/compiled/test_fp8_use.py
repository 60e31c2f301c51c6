"""A step in FP8 without an FP8 GEMM is an error, not a slow run."""

import dataclasses
import re
import types

import jax
import numpy as np

from t5x_gpu.compiled.kernels import check_fp8_gemms, fp8_lines
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.gpu_compile import compile_step
from t5x_gpu.tools.planning.gpu_targets import TARGETS, DescribedGpus
from tests.aot.cases import Case
from tests.messages import raises

# Shortened from the step of Llama-3 8B for an H100 (jax 0.10.2): a GEMM in a Triton fusion.
STEP = """HloModule jit_train_step, is_scheduled=true

%gemm_computation (parameter_0: OPERAND[64,32], parameter_1: OPERAND[32,48]) -> bf16[64,48] {
  %parameter_0 = OPERAND[64,32]{1,0} parameter(0)
  %parameter_1 = OPERAND[32,48]{1,0} parameter(1)
  ROOT %dot.1 = bf16[64,48]{1,0} dot(%parameter_0, %parameter_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: OPERAND[64,32], w: OPERAND[32,48]) -> bf16[64,48] {
  %x = OPERAND[64,32]{1,0} parameter(0)
  %w = OPERAND[32,48]{1,0} parameter(1)
  ROOT %gemm_fusion_dot.1 = bf16[64,48]{1,0} fusion(%x, %w), kind=kCustom, calls=%gemm_computation, backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}
}
"""  # noqa: E501


def test_the_line_counts_the_matmuls_in_fp8():
  assert check_fp8_gemms(STEP.replace('OPERAND', 'f8e4m3fn')).endswith('1 of 1 matmuls of a step')


def test_a_step_without_fp8_is_an_error():
  with raises(ModelError):
    check_fp8_gemms(STEP.replace('OPERAND', 'bf16'))


def test_kernels_of_mxfp8_are_counted_and_a_jax_without_them_is_named(monkeypatch):
  call = 'custom-call(%parameter_0, %parameter_1), custom_call_target="__cudnn$blockScaledDot"'
  blocks = re.sub(r' dot\(.*', f' {call}', STEP.replace('OPERAND', 'f8e4m3fn'))
  assert check_fp8_gemms(blocks, 'mxfp8').endswith('1 of 1 matmuls of a step')
  monkeypatch.setattr(jax, '__version__', '0.12.0')
  with raises(ModelError):
    check_fp8_gemms(STEP.replace('OPERAND', 'bf16'), 'mxfp8')


def test_the_line_names_emulated_products_and_those_not_in_fp8():
  config = TransformerConfig(
    vocab_size=32,
    num_layers=1,
    embed_dim=16,
    num_heads=2,
    head_dim=8,
    mlp_dim=24,
    dtype='fp8',
    num_experts=4,
    fp8_scaling='delayed',
    fp8_history=16,
  )
  mesh = jax.sharding.Mesh(jax.devices()[:1], 'data')
  [line] = fp8_lines(None, DecoderOnlyModel(config), mesh)
  for text in ('emulated', 'experts are in bfloat16', 'scales from the last 16 steps'):
    assert text in line
  blocks = dataclasses.replace(config, fp8_scaling='mxfp8', fp8_history=1024)
  assert 'every 32 values' in fp8_lines(None, DecoderOnlyModel(blocks), mesh)[0]
  config = dataclasses.replace(config, dtype='bfloat16', fp8_scaling='current', fp8_history=1024)
  assert fp8_lines(None, DecoderOnlyModel(config), mesh) == []


def test_a_step_that_runs_on_a_gpu_is_refused_without_fp8_matmuls():
  """Devices and program stand in for a GPU's; the check reads nothing else of them."""
  model = DecoderOnlyModel(
    TransformerConfig(
      vocab_size=32, num_layers=1, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=24, dtype='fp8'
    )
  )
  mesh = types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform='gpu')]))

  def compiled(operand):
    return types.SimpleNamespace(as_text=lambda: STEP.replace('OPERAND', operand))

  assert fp8_lines(compiled('f8e4m3fn'), model, mesh) == [
    'precision: fp8, in 1 of 1 matmuls of a step'
  ]
  with raises(ModelError):
    fp8_lines(compiled('bf16'), model, mesh)


def test_a_described_gpu_without_fp8_is_refused_before_anything_compiles():
  config = Case(
    model='decoder_demo', layout='dp', batch=(8, 32), bindings=("PRECISION = 'fp8'",)
  ).config()
  gpus = DescribedGpus(TARGETS['a100-80'], Topology(1, 1), tuple(jax.devices()[:1]))
  with raises(ModelError):
    compile_step(config, gpus)
