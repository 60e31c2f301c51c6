"""Matrix kernels in the text of a compiled program."""

from t5x_gpu.compiled.kernels import count_kernels, workspace_bytes

# Shortened from a step compiled for an H100 (jax 0.10.2): the second call needs more.
STEP = """HloModule jit_train_step, is_scheduled=true

ENTRY %main (x: bf16[64,32], w: bf16[32,48]) -> f32[64,48] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,48]{1,0} parameter(1)
  %small = (f32[64,48]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
  %large = (f32[64,48]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul"
  %kernel = (s8[8388608]{0}, f32[64,48]{1,0}) custom-call(%x, %w), custom_call_target="mosaic_gpu_v2"
  ROOT %sum = f32[64,48]{1,0} get-tuple-element(%large), index=0
}
"""  # noqa: E501


def test_the_largest_workspace_of_a_library_counts():
  assert workspace_bytes(STEP) == 4 * 2**20
  assert workspace_bytes(STEP.replace('custom-call', 'other')) == 0


def test_calls_are_counted_by_their_target():
  counts = count_kernels(STEP)
  assert counts['gemm'].calls == 2 and counts['mosaic'].calls == 1 and not counts['cudnn'].calls
