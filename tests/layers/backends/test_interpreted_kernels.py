"""Tokamax's Triton kernels, interpreted by Pallas on the CPU, equal plain JAX in float32.

Cases, inputs and bands are the same as in tests/gpu. Mosaic's kernels cannot be interpreted: see
docs/decisions.md.
"""

import threading

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas

from benchmarks.gpu import tuning
from t5x_gpu.layers.backends.choose import hardware
from t5x_gpu.layers.backends.tokamax_internals import kernel
from t5x_gpu.layers.grouped_matmul import kernel_for
from t5x_gpu.tools.planning.gpu_targets import find_target, kernels_for
from tests.gpu.helpers_numerics import assert_close
from tests.gpu.test_attention_numerics import BAND, CASES, attend, exact, served_by
from tests.gpu.test_grouped_matmul import CASES as GROUPS
from tests.gpu.test_grouped_matmul import by_group, by_row

pytestmark = [
  pytest.mark.slow,
  pytest.mark.filterwarnings('ignore::DeprecationWarning'),  # Tokamax's kernels, with jax
]


@pytest.fixture
def interpreted(monkeypatch):
  """Lets Tokamax choose its kernels for an A100, and Pallas interpret them."""
  kernel('triton')
  call, number = pallas.pallas_call, pallas.program_id
  inside = threading.local()  # Tokamax tunes in several threads

  def program_id(axis):
    numbers = getattr(inside, 'numbers', None)
    if numbers is None:
      return number(axis)
    if axis >= len(numbers):
      raise ValueError('Tokamax asks until there is no further axis.')
    return numbers[axis]

  def pallas_call(kernel, *args, grid_spec, **options):
    def with_numbers(*refs):
      # The interpreter knows the number of a program outside of loops only.
      inside.numbers = [number(axis) for axis in range(len(grid_spec.grid))]
      try:
        return kernel(*refs)
      finally:
        inside.numbers = None

    interpreted = call(with_numbers, *args, grid_spec=grid_spec, interpret=True, **options)
    # It hands booleans to loops as integers, which their own lowering then refuses.
    return lambda *arrays: interpreted(
      *jax.tree.map(lambda x: x.astype(jnp.int8) if x.dtype == bool else x, arrays)
    )

  monkeypatch.setattr(pallas, 'pallas_call', pallas_call)
  monkeypatch.setattr(pallas, 'program_id', program_id)
  with kernels_for(find_target('a100-80')):
    yield


# Past the end of a row the interpreter reads other rows.
@pytest.mark.parametrize('name', [name for name in CASES if not name.startswith('odd_length')])
def test_triton_equals_dense_attention_in_float32(interpreted, name):
  case = CASES[name]
  make = served_by('tokamax triton', case)
  assert_close(attend(case, make, jnp.bfloat16), exact(case), BAND)


def test_the_block_sizes_of_triton_are_tuned(interpreted, tmp_path, monkeypatch):
  monkeypatch.setattr(tuning, 'ATTENTION', (2048,))
  forward, backward = tuning.measure_attention(folder=tmp_path, small=True)
  assert forward['tried'] > 30 > forward['failed'] and backward['tried'] > backward['failed']
  assert 'block_q=' in forward['config'] and 'block_m1=' in backward['config']
  assert list(tuning.measure_attention(folder=tmp_path, small=True)) == []
  assert tuning.load(tmp_path).startswith('2 kernels')


@pytest.mark.parametrize('name', GROUPS)
def test_triton_multiplies_groups_of_rows(interpreted, name):
  assert kernel_for(hardware(), jnp.bfloat16, (64, 128))[0] == 'triton'
  assert_close(by_group(GROUPS[name]), by_row(GROUPS[name]), BAND)
