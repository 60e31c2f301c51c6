"""Elementwise kernels by part of the model."""

import pytest

from t5x_gpu.compiled.hlo_text import Array, Instruction
from t5x_gpu.compiled.traffic import KernelTraffic
from t5x_gpu.tools.planning.formulas import work as parts
from t5x_gpu.tools.planning.formulas.work import Work
from t5x_gpu.tools.planning.kernel_parts import kernels_by_part

LAYERS = 'jit(train_step)/shard_map/jvp()/while/body'
BACKWARD = 'jit(train_step)/shard_map/transpose(jvp())/while/body'
LAYER = f'{BACKWARD}/closed_call/checkpoint/TransformerLayer'


def kernel(name, dtype='bf16', *, opcode='fusion', num_bytes=100, kind=None):
  instruction = Instruction('kernel', opcode, (Array(dtype, (8, 16)),), (), '')
  return KernelTraffic(instruction, name, kind, 2, num_bytes)


def part_of(found, *known, dtype='bfloat16'):
  work = [Work(part=part, kind='memory', num_bytes=1.0) for part in known]
  (part,) = (row.part for row in kernels_by_part([found], work, dtype=dtype) if row.num_bytes)
  return part


# Names of steps compiled for an H100 (jax 0.10.2).
@pytest.mark.parametrize(
  'name, dtype, part',
  [
    (f'{LAYER}/mlp/mul', 'bf16', parts.ELEMENTWISE),
    (f'{LAYER}/pre_mlp_layer_norm/reduce_sum', 'f32', parts.ELEMENTWISE),
    (f'{LAYER}/self_attention/out/dot_general', 'f32', parts.WEIGHTS_AND_GRADIENTS),
    ('jit(train_step)/shard_map/jvp(RMSNorm)/mul', 'bf16', parts.ELEMENTWISE),
    ('jit(train_step)/shard_map/jvp(loss)/while/body/reduce', 'f32', parts.LOGITS),
    ('jit(train_step)/transpose(jvp(loss))/TokenLogits/mul', 'f32', parts.LOGITS),
    ('jit(train_step)/sub', 'f32', parts.OPTIMIZER),
    (f'{LAYERS}/jit(dynamic_update_index_in_dim)/dynamic_update_slice', 'bf16', parts.STORED),
    (f'{BACKWARD}/closed_call/dynamic_update_slice', 'f32', parts.WEIGHTS_AND_GRADIENTS),
    (f'{LAYERS}/closed_call/convert_element_type', 'bf16', parts.WEIGHTS_AND_GRADIENTS),
    (f'{BACKWARD}/closed_call/add', 'bf16', parts.ELEMENTWISE),
    ('jit(train_step)/shard_map/transpose(jvp())/scatter-add', 'f32', parts.EMBEDDING),
    ('jit(train_step)/shard_map/jvp(Embedding)/gather', 'bf16', parts.EMBEDDING),
  ],
)
def test_a_kernel_belongs_to_what_it_computes(name, dtype, part):
  assert part_of(kernel(name, dtype), parts.STORED) == part


def test_conversions_to_fp8_are_a_part_of_a_step_in_fp8_only():
  for found in (kernel(f'{LAYER}/mlp/wo/reduce_max'), kernel(f'{LAYER}/mlp/mul', 'f8e5m2')):
    assert part_of(found, parts.CONVERSIONS, dtype='fp8') == parts.CONVERSIONS
  assert part_of(kernel(f'{LAYER}/moe/reduce_max')) == parts.ELEMENTWISE


def test_attention_without_a_kernel_is_a_part():
  found = kernel(f'{LAYER}/self_attention/while/body/sub')
  assert part_of(found, parts.ATTENTION) == parts.ATTENTION
  assert part_of(found) == parts.ELEMENTWISE


def test_a_kernel_without_a_name_is_known_by_its_dtype():
  assert part_of(kernel('', 'f32', opcode='copy'), parts.STORED) == parts.WEIGHTS_AND_GRADIENTS
  assert part_of(kernel('', opcode='copy'), parts.STORED) == parts.STORED


def test_a_model_in_float32_stores_activations_in_float32():
  name = f'{LAYERS}/jit(dynamic_update_index_in_dim)/dynamic_update_slice'
  assert part_of(kernel(name, 'f32'), parts.STORED, dtype='float32') == parts.STORED


def test_the_two_largest_kernels_of_a_part_are_named_and_all_bytes_count():
  names = {'mul': 300, 'add': 200, 'sub': 100}
  kernels = [kernel(f'{LAYER}/mlp/{name}', num_bytes=size) for name, size in names.items()]
  kernels.append(kernel(f'{LAYER}/mlp/dot', num_bytes=900, kind='gemm'))
  work = [
    Work(part=parts.ELEMENTWISE, kind='memory', num_bytes=500.0),
    Work(part=parts.OPTIMIZER, kind='memory', num_bytes=50.0),
  ]
  layers, optimizer = kernels_by_part(kernels, work, dtype='bfloat16')
  assert (layers.part, layers.formula_bytes, layers.num_bytes) == (parts.ELEMENTWISE, 500, 600)
  assert [(row.place, row.num_bytes) for row in layers.largest] == [
    ('backward TransformerLayer/mlp/mul', 300),
    ('backward TransformerLayer/mlp/add', 200),
  ]
  assert (optimizer.formula_bytes, optimizer.num_bytes, optimizer.largest) == (50, 0, ())
