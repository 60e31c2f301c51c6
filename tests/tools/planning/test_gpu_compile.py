"""Matrix kernels of compiled GPU programs, and the traffic that they hide."""

import textwrap

import pytest

from t5x_gpu.compiled.kernels import count_kernels
from t5x_gpu.errors import ConfigError
from t5x_gpu.tools.planning import gpu_targets
from t5x_gpu.tools.planning.gpu_compile import overlaps, schedule
from tests.messages import raises

SHAPE = {'data': 2, 'fsdp': 2, 'model': 2}
GEMM = 'custom-call(%x, %x), custom_call_target="__cublas$lt$matmul"'


def program(*lines: str, computations: str = '') -> str:
  """Returns a scheduled module whose entry computes `lines` from %x of 128 bytes."""
  return '\n'.join(
    [
      'HloModule jit_step, is_scheduled=true, num_partitions=8\n',
      textwrap.dedent(computations),
      'ENTRY %main (x: bf16[8,8]) -> bf16[8,8] {',
      '  %x = bf16[8,8]{1,0} parameter(0)',
      *(f'  {line}' for line in lines),
      '}\n',
    ]
  )


def gather(number: int = 0) -> str:
  return (
    f'%ag.{number} = (bf16[8,8]{{1,0}}, bf16[16,8]{{1,0}}) all-gather-start(%x), '
    'replica_groups=[4,2]<=[4,2]T(1,0), dimensions={0}'
  )


def gathered(number: int = 0) -> str:
  return f'%ag.{number}.done = bf16[16,8]{{1,0}} all-gather-done(%ag.{number})'


def gemm(name: str = 'y') -> str:
  return f'%{name} = bf16[8,8]{{1,0}} {GEMM}'


OTHER = '%add = bf16[8,8]{1,0} add(%x, %x)'


@pytest.mark.parametrize(
  'lines, kernels_during',
  [
    ((gather(), gemm(), gathered()), 1),
    ((gather(), gemm(), gemm('z'), gathered()), 2),
    ((gather(), OTHER, gathered()), 0),
    ((gemm(), gather(), gathered(), gemm('z')), 0),
    (('%s = bf16[16,8]{1,0} all-gather(%x), replica_groups=[4,2]<=[4,2]T(1,0)', gemm()), 0),
  ],
)
def test_a_collective_is_hidden_by_matrix_kernels_between_its_start_and_its_done(
  lines, kernels_during
):
  (found,) = schedule(program(*lines), SHAPE)
  assert found.kernels_during == kernels_during
  (row,) = overlaps(program(*lines), SHAPE)
  assert (row.kind, row.axes, row.num_bytes) == ('all-gather', ('fsdp',), 128)
  assert row.share == (1 if kernels_during else 0)


def test_the_share_is_of_bytes_per_kind_and_axes_and_counts_iterations():
  loops = """
    %body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {
      %p = (s32[], bf16[8,8]{1,0}) parameter(0)
      %x = bf16[8,8]{1,0} get-tuple-element(%p), index=1
      GATHER
      GEMM
      DONE
      ROOT %t = (s32[], bf16[8,8]{1,0}) tuple(%p#0, %y)
    }
  """
  for line, text in (('GATHER', gather(1)), ('GEMM', gemm()), ('DONE', gathered(1))):
    loops = loops.replace(line, text)
  reduced = (
    '%ar = f32[64]{0} all-reduce-start(%x), replica_groups={{0,4},{1,5},{2,6},{3,7}}',
    '%loop = (s32[], bf16[8,8]{1,0}) while(%x), condition=%none, body=%body, '
    'backend_config={"known_trip_count":{"n":"3"}}',
    '%ar.done = f32[64]{0} all-reduce-done(%ar)',
  )
  rows = overlaps(program(gather(), gathered(), *reduced, computations=loops), SHAPE)
  assert [(r.kind, r.axes, r.num_bytes, r.hidden_bytes) for r in rows] == [
    ('all-gather', ('fsdp',), 4 * 128, 3 * 128),  # in the loop; the one before it has nothing
    ('all-reduce', ('data',), 256, 256),  # the loop multiplies
  ]
  without = loops.replace(GEMM, 'add(%x, %x)')
  rows = overlaps(program(*reduced, computations=without), SHAPE)
  assert [r.hidden_bytes for r in rows] == [0, 0]


FUSED = """
  %inner (a: f8e4m3fn[8,8], b: f8e4m3fn[8,8]) -> f32[8,8] {
    %a = f8e4m3fn[8,8]{1,0} parameter(0)
    %b = f8e4m3fn[8,8]{1,0} parameter(1)
    ROOT %dot = f32[8,8]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  }

  %gemm_fusion (a: bf16[8,8]) -> f32[8,8] {
    %a = bf16[8,8]{1,0} parameter(0)
    %c = TYPE[8,8]{1,0} convert(%a)
    ROOT %dot = f32[8,8]{1,0} dot(%c, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  }

  %nested (a: f8e4m3fn[8,8]) -> f32[8,8] {
    %a = f8e4m3fn[8,8]{1,0} parameter(0)
    ROOT %f = f32[8,8]{1,0} fusion(%a, %a), kind=kCustom, calls=%inner
  }

  %softmax (a: bf16[8,8]) -> bf16[8,8] {
    %a = bf16[8,8]{1,0} parameter(0)
    ROOT %e = bf16[8,8]{1,0} exponential(%a)
  }
"""


def test_kernels_are_distinguished_by_target_and_by_operand_type():
  def fusion(name: str, called: str) -> str:
    return (
      f'%{name} = f32[8,8]{{1,0}} fusion(%x), kind=kCustom, calls=%{called}, '
      'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'
    )

  def call(name: str, target: str) -> str:
    return f'%{name} = bf16[8,8]{{1,0}} custom-call(%x), custom_call_target="{target}"'

  found = count_kernels(
    program(
      gemm(),
      call('a', '__cublas$gemm'),
      call('b', '__cublas$lt$matmul$f8'),
      call('c', 'mosaic_gpu_v2'),
      call('d', '__gpu$xla.gpu.triton'),
      call('e', '__cudnn$fmhaSoftmaxBackward'),
      call('f', 'Sharding'),
      fusion('g', 'gemm_fusion'),
      fusion('h', 'nested'),
      fusion('i', 'softmax'),
      computations=FUSED.replace('TYPE', 'bf16'),
    )
  )
  assert {kind: number.calls for kind, number in found.items()} == {
    'fp8_gemm': 2,
    'gemm': 3,
    'mosaic': 1,
    'triton': 1,
    'cudnn': 1,
  }


def test_kernels_in_loops_run_as_often_as_the_loop():
  body = f"""
    %body (p: (s32[], bf16[8,8])) -> (s32[], bf16[8,8]) {{
      %p = (s32[], bf16[8,8]{{1,0}}) parameter(0)
      %x = bf16[8,8]{{1,0}} get-tuple-element(%p), index=1
      {gemm()}
      ROOT %t = (s32[], bf16[8,8]{{1,0}}) tuple(%p#0, %y)
    }}
  """
  loop = (
    '%loop = (s32[], bf16[8,8]{1,0}) while(%x), condition=%none, body=%body, '
    'backend_config={"known_trip_count":{"n":"32"}}'
  )
  found = count_kernels(program(gemm(), loop, computations=body))['gemm']
  assert (found.calls, found.runs) == (2, 33)


# ---- GPUs that can be compiled for --------------------------------------------------------------


def test_a_gpu_that_is_not_in_the_table_is_refused_with_those_that_are():
  assert gpu_targets.find_target('A100').name == 'a100-80'
  assert gpu_targets.find_target('NVIDIA H200').name == 'h200'
  with raises(ConfigError):
    gpu_targets.find_target('h10')


def test_only_hopper_and_later_multiply_eight_bit_floats():
  assert {t.name for t in gpu_targets.TARGETS.values() if t.has_fp8} == {
    'h100',
    'h200',
    'b200',
    'gb200',
  }
