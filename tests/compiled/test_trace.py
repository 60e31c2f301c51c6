"""Where the time of a step goes, from traces whose answer is known."""

import pathlib

import jax
import pytest

from t5x_gpu.compiled.trace import (
  DeviceTime,
  Operation,
  ProgramOps,
  anatomy,
  length,
  read_trace,
  union,
  without,
)
from t5x_gpu.errors import ConfigError, DataError
from t5x_gpu.run.profile_config import ProfileConfig
from tests.messages import raises

# Two devices; the all-reduce sends 2 * 4 KiB * (2 - 1) / 2 = 4 KiB.
HLO = """HloModule jit_train_step, num_partitions=2

%fused (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %square = f32[8]{0} multiply(%q, %q)
}

%body (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %wide.3 = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(train_step)/mlp/mul" deduplicated_name="loop_multiply_fusion.2"}
  ROOT %tanh.1 = f32[8]{0} tanh(%p), metadata={op_name="jit(train_step)/mlp/tanh"}
}

%condition (p.1: f32[8]) -> pred[] {
  %p.1 = f32[8]{0} parameter(0)
  ROOT %done = pred[] constant(false)
}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8], g: f32[1024]) -> f32[1024] {
  %x = f32[8]{0} parameter(0)
  %g = f32[1024]{0} parameter(1)
  %while.1 = f32[8]{0} while(%x), condition=%condition, body=%body
  %all-reduce-start.1 = f32[1024]{0} all-reduce-start(%g), replica_groups={{0,1}}, to_apply=%add
  ROOT %all-reduce-done.1 = f32[1024]{0} all-reduce-done(%all-reduce-start.1)
}
"""  # noqa: E501


@pytest.fixture(scope='module')
def ops():
  return ProgramOps(HLO, {'data': 2})


def ms(device, name, start, end):
  return Operation(device, name, start * 1e6, end * 1e6)


def test_intervals():
  assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7), (5, 5)]) == [(0, 2), (3, 4)]
  assert without([(0, 10), (20, 30)], [(2, 3), (9, 21), (29, 40)]) == [(0, 2), (3, 9), (21, 29)]
  assert without([(0, 1)], []) == [(0, 1)] and length([(0, 2), (3, 4)]) == 3


def test_communication_is_exposed_where_nothing_else_runs(ops):
  # Each device computes for 60 ms and sends for 30 ms, 10 of them while it computes.
  operations = [
    o
    for device in (0, 1)
    for o in (
      ms(device, 'while.1', 0, 60),  # its body counts, not the loop
      ms(device, 'tanh.1', 0, 40),
      ms(device, 'tanh.1', 40, 60),
      ms(device, 'all-reduce-start.1', 50, 80),
    )
  ]
  found = anatomy(operations, ops, num_steps=2, seconds_per_step=0.05)
  assert found.device_time == DeviceTime(
    compute=pytest.approx(0.030),
    exposed_communication=pytest.approx(0.010),
    hidden_communication=pytest.approx(0.005),
    idle=pytest.approx(0.010),
  )
  first, second = found.operations
  assert (first.name, first.kind, first.op_name) == ('tanh.1', 'tanh', 'jit(train_step)/mlp/tanh')
  assert (first.seconds, first.share, first.runs) == pytest.approx((0.03, 0.6, 1.0))
  assert (second.kind, second.seconds) == ('all-reduce', pytest.approx(0.015))
  (collective,) = found.collectives
  assert (collective.kind, collective.axes) == ('all-reduce', ('data',))
  # One run in two steps.
  assert collective.bytes == pytest.approx(4096 / 2)
  assert collective.gb_per_second == pytest.approx(4096 / 0.030 / 1e9)


def test_kernels_without_an_instruction_are_known_by_their_name(ops):
  nccl = ops.find('ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)')
  assert (nccl.kind, nccl.is_collective) == ('all-gather', True)
  assert ops.find('reduce-scatter.7').is_collective
  assert ops.find('gemm_kernel').kind == 'kernel' and not ops.find('gemm_kernel').is_collective
  assert ops.find('while.1') is None


def test_a_generated_kernel_belongs_to_the_first_fusion_that_uses_it(ops):
  kernel = ops.find('loop_multiply_fusion_2')
  assert (kernel.kind, kernel.op_name) == ('fusion', 'jit(train_step)/mlp/mul')


# As XLA's GPU tracer (CUPTI) writes it: a plane per GPU, a line per stream, and lines that
# TensorBoard derives from them.
GPU_TRACE = """
planes {
  name: "/device:GPU:1"
  stat_metadata { key: 1 value { id: 1 name: "hlo_op" } }
  stat_metadata { key: 2 value { id: 2 name: "hlo_module" } }
  stat_metadata { key: 3 value { id: 3 name: "jit_train_step" } }
  stat_metadata { key: 4 value { id: 4 name: "fusion.3" } }
  stat_metadata { key: 5 value { id: 5 name: "jit_other" } }
  stat_metadata { key: 6 value { id: 6 name: "command_buffer_117" } }
  event_metadata { key: 1 value { id: 1 name: "loop_fusion_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "ncclDevKernel_AllReduce_Sum_f32_RING_LL" } }
  lines {
    name: "Stream #14(Compute)" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 7000000
      stats { metadata_id: 1 ref_value: 4 } stats { metadata_id: 2 ref_value: 3 } }
    events { metadata_id: 1 offset_ps: 20000000 duration_ps: 7000000
      stats { metadata_id: 1 ref_value: 4 } stats { metadata_id: 2 ref_value: 5 } }
  }
  lines {
    name: "Stream #22(Compute)" timestamp_ns: 1000
    events { metadata_id: 2 offset_ps: 9000000 duration_ps: 1000000 }
    events { metadata_id: 1 offset_ps: 11000000 duration_ps: 1000000
      stats { metadata_id: 1 ref_value: 6 } stats { metadata_id: 2 ref_value: 3 } }
  }
  lines {
    name: "XLA Ops" timestamp_ns: 1000
    events { metadata_id: 1 offset_ps: 5000000 duration_ps: 7000000 }
  }
}
"""


def test_a_trace_of_a_gpu_has_the_kernels_of_its_streams(tmp_path):
  data = jax.profiler.ProfileData.text_proto_to_serialized_xspace(GPU_TRACE)
  (tmp_path / 'host.xplane.pb').write_bytes(data)
  assert read_trace(tmp_path, module='jit_train_step') == [
    Operation(1, 'fusion.3', pytest.approx(6000), pytest.approx(13000)),
    Operation(1, 'ncclDevKernel_AllReduce_Sum_f32_RING_LL', 10000, 11000),
    Operation(1, 'loop_fusion_kernel', 12000, 13000),  # in a CUDA graph
  ]


def test_a_missing_or_damaged_trace_is_an_error(tmp_path):
  with raises(DataError):
    read_trace(tmp_path)
  pathlib.Path(tmp_path / 'x.xplane.pb').write_bytes(b'\xff\xfe not a trace')
  with raises(DataError):
    read_trace(tmp_path)


@pytest.mark.parametrize(
  'settings',
  [
    dict(steps=(3, 2)),
    dict(steps=5),
    dict(steps=(0, 2)),
    dict(steps=(1, 1000)),
    dict(steps=(1.0, 2)),
    dict(period=3),
    dict(num_steps=0),
    dict(slow_factor=1.0),
  ],
)
def test_wrong_settings_are_errors(settings):
  with raises(ConfigError) as error:
    ProfileConfig(**settings)
  assert error.value.parameters


def test_a_range_after_the_end_is_an_error():
  ProfileConfig(steps=(3, 4)).check_total(3)
  with raises(ConfigError):
    ProfileConfig(steps=(3, 4)).check_total(2)
