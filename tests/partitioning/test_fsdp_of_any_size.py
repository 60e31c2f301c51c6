"""FSDP over numbers of devices that do not divide the model trains as one device does.

`embed` is 16, `mlp` 32, `heads` 4 and `vocab` 64: 3, 5, 6 and 7 divide none of them.
"""

import pytest

from tests.parity.test_layouts import (
  CHUNKS,
  Case,
  assert_first_gradients_of_one_device,
  assert_trains_as_one_device,
)


def case(fsdp: int, *others: str, batch_size: int = 0, **options) -> Case:
  """Returns a case of `fsdp` devices, times 2 for each of `others`: 'stage' or 'model'."""
  sizes = {'num_partitions' if axis == 'model' else axis: 2 for axis in others}
  return Case(
    dict(fsdp=fsdp, **sizes, **options.pop('partitioner', {})),
    num_devices=fsdp * 2 ** len(others),
    batch_size=batch_size or 4 * fsdp,
    **options,
  )


CASES = {
  'fsdp3_zero2_by_layer': case(3, partitioner=dict(zero_stage=2), num_microbatches=2),
  'fsdp3_model2_by_layer': case(3, 'model', config=CHUNKS, num_microbatches=2),
  'fsdp3_model2_zero1': case(3, 'model', partitioner=dict(zero_stage=1), num_microbatches=2),
  'fsdp3_model2_zero2': case(3, 'model', partitioner=dict(zero_stage=2)),
  'fsdp3_modern_model2': case(3, 'model', model='modern'),
  'fsdp5_by_microbatch': case(5, partitioner=dict(accumulate_by='microbatch'), num_microbatches=2),
  'fsdp5_remat': case(5, config=dict(remat_policy='full')),
  'fsdp6': case(6, config=CHUNKS),
  'fsdp7_zero1': case(7, partitioner=dict(zero_stage=1)),
  'fsdp3_stage2': case(3, 'stage'),
}


def test_the_first_gradients_of_padded_arrays_are_those_of_one_device():
  assert_first_gradients_of_one_device(CASES['fsdp3_model2_by_layer'])


@pytest.mark.slow
@pytest.mark.parametrize('name', CASES)
def test_fsdp_of_any_size_trains_as_one_device(name):
  assert_trains_as_one_device(CASES[name])
