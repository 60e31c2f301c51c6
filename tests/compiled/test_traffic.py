"""Bytes that the kernels of a compiled program read and write."""

from t5x_gpu.compiled.traffic import Traffic, kernel_traffic, traffic
from t5x_gpu.tools.planning.sharding import ElementwiseRow, elementwise_rows

# Shortened from a step compiled for an H100 (jax 0.10.2): one loop, two iterations.
STEP = """HloModule jit_train_step, is_scheduled=true

%add (a: f32[8,16], b: f32[8,16]) -> f32[8,16] {
  %a = f32[8,16]{1,0} parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  ROOT %sum = f32[8,16]{1,0} add(%a, %b)
}

%one_layer (all: f32[4,8,16], i: s32[]) -> bf16[1,8,16] {
  %all = f32[4,8,16]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %part = f32[1,8,16]{2,1,0} dynamic-slice(%all, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  ROOT %narrow = bf16[1,8,16]{2,1,0} convert(%part)
}

%in_place (to: f32[4,8,16], x: f32[8,16], i: s32[]) -> f32[4,8,16] {
  %to = f32[4,8,16]{2,1,0} parameter(0)
  %x = f32[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,8,16]{2,1,0} bitcast(%x)
  ROOT %all = f32[4,8,16]{2,1,0} dynamic-update-slice(%to, %row, %i, %zero, %zero)
}

%body (state: (s32[], f32[8,16])) -> (s32[], f32[8,16]) {
  %state = (s32[], f32[8,16]) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8,16]{1,0} get-tuple-element(%state), index=1
  %sum = f32[8,16]{1,0} fusion(%x, %x), kind=kLoop, calls=%add
  %product = f32[8,16]{1,0} custom-call(%sum, %sum), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}
  %copy = f32[8,16]{1,0} copy(%product)
  ROOT %next = (s32[], f32[8,16]) tuple(%i, %copy)
}

%condition (state: (s32[], f32[8,16])) -> pred[] {
  %state = (s32[], f32[8,16]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (all: f32[4,8,16], x: f32[8,16], i: s32[]) -> f32[4,8,16] {
  %all = f32[4,8,16]{2,1,0} parameter(0)
  %x = f32[8,16]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %layer = bf16[1,8,16]{2,1,0} fusion(%all, %i), kind=kLoop, calls=%one_layer
  %state = (s32[], f32[8,16]) tuple(%i, %x)
  %loop = (s32[], f32[8,16]) while(%state), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %y = f32[8,16]{1,0} get-tuple-element(%loop), index=1
  %empty = f32[4,8,16]{2,1,0} custom-call(), custom_call_target="AllocateBuffer"
  ROOT %done = f32[4,8,16]{2,1,0} fusion(%empty, %y, %i), kind=kLoop, calls=%in_place
}
"""  # noqa: E501
ARRAY, NARROW, INDEX = 4 * 8 * 16, 2 * 8 * 16, 4


def test_slices_and_updates_in_place_touch_only_their_part_and_loops_count_each_iteration():
  added = 3 * ARRAY  # two operands, one result
  copied = 2 * ARRAY
  sliced = ARRAY + INDEX + NARROW
  updated = ARRAY + INDEX + ARRAY
  assert traffic(kernel_traffic(STEP)) == Traffic(
    kernels=2 * 3 + 2,
    matmul_flops=2 * (2 * 8 * 16 * 16),
    matmul_bytes=2 * 3 * ARRAY,
    other_bytes=2 * (added + copied) + sliced + updated,
    moved_bytes=2 * copied + sliced + updated,
    copied_bytes=2 * copied,
  )


def test_an_update_that_reads_its_own_part_does_not_read_the_whole_array():
  zero = '  %zero = s32[] constant(0)\n  %row ='
  row = '  %row = f32[1,8,16]{2,1,0} bitcast(%x)\n'
  adds = """  %new = f32[1,8,16]{2,1,0} bitcast(%x)
  %old = f32[1,8,16]{2,1,0} dynamic-slice(%to, %i, %zero, %zero), dynamic_slice_sizes={1,8,16}
  %row = f32[1,8,16]{2,1,0} add(%old, %new)
"""
  assert zero in STEP and row in STEP
  before, after = (traffic(kernel_traffic(hlo)) for hlo in (STEP, STEP.replace(row, adds)))
  assert after.other_bytes == before.other_bytes + ARRAY
  assert after.moved_bytes == before.moved_bytes - (ARRAY + INDEX + ARRAY), 'it adds'


def test_a_slice_whose_index_is_computed_only_moves_data():
  index = '  %zero = s32[] constant(0)\n'
  first = STEP.index(index, STEP.index('%one_layer'))
  computed = STEP[:first] + '  %next = s32[] add(%i, %i)\n' + STEP[first:]
  assert traffic(kernel_traffic(computed)) == traffic(kernel_traffic(STEP))


def test_a_fusion_on_another_stream_counts_as_the_same_fusion():
  fusion = '%layer = bf16[1,8,16]{2,1,0} fusion(%all, %i), kind=kLoop, calls=%one_layer'
  started = (
    '%layer-start = ((f32[4,8,16], s32[]), bf16[1,8,16]{2,1,0}, u32[]) fusion-start(%all, %i), '
    'kind=kLoop, calls=%one_layer\n'
    '  %layer = bf16[1,8,16]{2,1,0} fusion-done(%layer-start)'
  )
  assert fusion in STEP
  step = STEP.replace(fusion, started)
  assert traffic(kernel_traffic(step)) == traffic(kernel_traffic(STEP))
  [first] = [k for k in kernel_traffic(step) if k.instruction.name == 'layer-start']
  assert [str(array) for array in first.instruction.arrays] == ['bf16[1 x 8 x 16]']


def test_elementwise_kernels_are_ordered_by_their_bytes_and_named_by_their_place():
  path = 'jit(train_step)/transpose(jvp())/while/body/checkpoint/Layer/mlp/mul'
  called = 'kind=kLoop, calls=%add'
  named = STEP.replace(called, f'{called}, metadata={{op_name="{path}"}}')
  first, second, *others = elementwise_rows(kernel_traffic(named))
  assert first == ElementwiseRow('backward Layer/mlp/mul', 'f32[8 x 16]', 2, 2 * 3 * ARRAY)
  assert second == ElementwiseRow('copy', 'f32[8 x 16]', 2, 2 * 2 * ARRAY)
  assert len(others) == 2, 'no matmul'


def test_a_fusion_without_a_name_has_the_last_name_in_it():
  convert = 'convert(%part)'
  step = STEP.replace(convert, f'{convert}, metadata={{op_name="jit(train_step)/cast"}}')
  assert step != STEP
  names = {k.instruction.name: k.op_name for k in kernel_traffic(step)}
  assert names['layer'] == 'jit(train_step)/cast' and names['done'] == ''
