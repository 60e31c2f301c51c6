"""A step in FP8 without an FP8 GEMM is an error, not a slow run."""

import pytest

from t5x_gpu.analysis.fp8_use import check_fp8_gemms, fp8_line
from t5x_gpu.errors import ModelError

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
  with pytest.raises(ModelError, match='none of the 1 matmuls of the compiled step is in FP8'):
    check_fp8_gemms(STEP.replace('OPERAND', 'bf16'))


def test_on_a_cpu_the_line_says_that_fp8_is_emulated():
  assert 'emulated' in fp8_line(None, 'cpu')
