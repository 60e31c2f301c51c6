"""The kernels of a traced step next to a plan: whose bytes, FLOPs and seconds are whose."""

import pytest

from benchmarks.gpu.kernels import traced
from t5x_gpu.compiled.trace import Operation
from t5x_gpu.tools.planning.gpu_targets import find_target

# Two equal fusions share the kernel that has the name of the first.
STEP = """HloModule jit_train_step, is_scheduled=true

%fused (p: bf16[1024,1024]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  ROOT %n = bf16[1024,1024]{1,0} negate(%p)
}

%gemm (a: bf16[1024,512], b: bf16[512,256]) -> f32[1024,256] {
  %a = bf16[1024,512]{1,0} parameter(0)
  %b = bf16[512,256]{1,0} parameter(1)
  ROOT %d = f32[1024,256]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[1024,1024], a: bf16[1024,512], b: bf16[512,256]) -> bf16[1024,1024] {
  %x = bf16[1024,1024]{1,0} parameter(0)
  %a.1 = bf16[1024,512]{1,0} parameter(1)
  %b.1 = bf16[512,256]{1,0} parameter(2)
  %loop_fusion = bf16[1024,1024]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %loop_fusion.1 = bf16[1024,1024]{1,0} fusion(%loop_fusion), kind=kLoop, calls=%fused, SHARED
  %gemm_fusion = f32[1024,256]{1,0} fusion(%a.1, %b.1), kind=kCustom, calls=%gemm
  %library = (f32[1024,256]{1,0}, s8[4096]{0}) custom-call(%a.1, %b.1), custom_call_target=PRODUCT
  %heads = bf16[1024,1024]{1,0} custom-call(%loop_fusion.1), custom_call_target="mosaic_gpu_v2"
  %all-reduce-start = bf16[1024,1024]{1,0} all-reduce-start(%heads), replica_groups={{0,1}}
  %all-reduce-done = bf16[1024,1024]{1,0} all-reduce-done(%all-reduce-start)
  ROOT %copy = bf16[1024,1024]{1,0} copy(%all-reduce-done)
}
"""
STEP = STEP.replace('SHARED', 'metadata={deduplicated_name="loop_fusion"}').replace(
  'PRODUCT',
  '"__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
  '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}',
)
MESH = {'fsdp': 2}
MICROSECOND = 1000  # of a trace
NAMES = ('loop_fusion', 'loop_fusion.1', 'gemm_fusion', 'library', 'heads')


def operations(*names):
  """Returns operations of 20, 19, 18 ... microseconds, one after the other."""
  at, found = 0.0, []
  for i, name in enumerate(names):
    found.append(Operation(0, name, at, at + (20 - i) * MICROSECOND))
    at = found[-1].end_ns
  return found


@pytest.fixture
def h100():
  return find_target('h100')


def test_a_kernel_that_several_fusions_share_counts_the_bytes_of_the_one_that_ran(h100):
  rows = traced(STEP, operations(*NAMES), h100, MESH)['slowest_kernels']
  first, second, *_ = rows
  assert [r['kernel_seconds'] for r in (first, second)] == pytest.approx([20e-6, 19e-6])
  assert first['num_bytes'] == second['num_bytes'] == 2 * 2 * 1024**2
  assert first['least_seconds'] == pytest.approx(4 * 1024**2 / h100.memory_bandwidth)
  # Where no instruction has the name, it is the kernel's.
  renamed = STEP.replace('%loop_fusion ', '%loop_fusion.2 ').replace('(%loop_fusion)', '(%x)')
  [row] = traced(renamed, operations('loop_fusion'), h100, MESH)['slowest_kernels']
  assert (row['runs'], row['num_bytes']) == (1, second['num_bytes'])


def test_a_matmul_is_expected_to_take_its_flops_and_any_other_kernel_its_bytes(h100):
  rows = traced(STEP, operations(*NAMES), h100, MESH)['slowest_kernels']
  negated, _, triton, library, _ = rows
  assert negated['plan_seconds'] == pytest.approx(4e-6)  # launching it takes longer
  matmul = 2 * 1024 * 512 * 256
  assert triton['plan_seconds'] == library['plan_seconds'] == pytest.approx(4e-6)
  large = STEP.replace('1024', '65536').replace('512', '8192').replace('256', '4096')
  _, _, triton, library, heads = traced(large, operations(*NAMES), h100, MESH)['slowest_kernels']
  flops = matmul * 64 * 16 * 16
  assert triton['plan_seconds'] == pytest.approx(flops / (0.66 * h100.peak_flops('bfloat16')))
  assert library['plan_seconds'] == triton['plan_seconds']
  assert library['least_seconds'] is None and heads['plan_seconds'] is None
  on_another_card = traced(STEP, operations(*NAMES), None, MESH)['slowest_kernels']
  assert {row['plan_seconds'] for row in on_another_card} == {None}


def test_seconds_are_added_up_by_kind_and_collectives_count_where_nothing_else_runs(h100):
  ran = operations(*NAMES, 'all-reduce-start', 'copy', 'nvjet_sm90_tst')
  overlap = Operation(0, 'all-reduce-start', 0.0, 5.0 * MICROSECOND)
  found = traced(STEP, [overlap, *ran], h100, MESH)
  assert len(found['slowest_kernels']) == len(NAMES) + 2
  assert found['seconds_by_kind'] == pytest.approx(
    {
      'memory': 20e-6 + 19e-6 + 14e-6,
      'gemm': 18e-6 + 17e-6,
      'attention': 16e-6,
      'waiting': 15e-6,
      'unknown': 13e-6,
    }
  )


def test_another_device_does_not_count(h100):
  ran = operations(*NAMES)
  both = ran + [Operation(1, o.name, o.start_ns + 1, o.end_ns + 1) for o in ran]
  assert traced(STEP, both, h100, MESH) == traced(STEP, ran, h100, MESH)


def test_an_empty_trace_has_no_kernels(h100):
  assert traced(STEP, [], h100, MESH) == {'slowest_kernels': [], 'seconds_by_kind': {}}
