"""A lazy batch reads the rows that are asked for, once, and is an array to everybody else."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from t5x_gpu.data.batches import BatchSpec, batch_hash
from t5x_gpu.data.prepared.batches import LazyBatch

SPEC = BatchSpec(
  shapes={'tokens': (8, 4), 'label': (8,)}, dtypes={'tokens': 'int32', 'label': 'int32'}
)
WHOLE = {
  'tokens': np.arange(32, dtype=np.int32).reshape(8, 4),
  'label': np.arange(8, dtype=np.int32),
}


@pytest.fixture(name='batch')
def _batch():
  read = []

  def read_rows(rows, arrays):
    read.extend(rows)
    for name, x in arrays.items():
      x[rows] = WHOLE[name][rows]

  batch = LazyBatch(SPEC, read=read_rows)
  return batch, read


def test_a_device_reads_its_rows_and_no_others(batch):
  batch, read = batch
  got = batch.features['tokens'][(slice(2, 4), slice(None))]
  np.testing.assert_array_equal(got, WHOLE['tokens'][2:4])
  assert read == [2, 3]
  assert batch.features['label'][(slice(2, 4),)].tolist() == [2, 3]
  assert read == [2, 3] and batch.asked == {2, 3}  # the other feature came with it


def test_devices_of_a_mesh_get_what_they_would_of_plain_arrays(batch):
  batch, read = batch
  devices = np.asarray(jax.devices()[:4])
  sharding = NamedSharding(Mesh(devices, ('data',)), PartitionSpec('data'))
  x = batch.features['tokens']
  got = jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
  np.testing.assert_array_equal(got, WHOLE['tokens'])
  assert sorted(read) == list(range(8))


def test_the_hash_is_that_of_plain_arrays_and_asks_for_no_row_by_itself(batch):
  batch, read = batch
  assert batch_hash(batch.features) == batch_hash(WHOLE)
  assert sorted(read) == list(range(8)) and not batch.asked
  SPEC.check(batch.features)


@pytest.mark.parametrize(
  'use',
  [
    lambda x: x + 1,
    lambda x: x.sum(axis=1),
    lambda x: x == 3,
    lambda x: np.where(x > 3, x, 0),
    lambda x: x[x > 3],
    lambda x: x[np.asarray([1, 5])],
    lambda x: x[3],
    lambda x: x[-1],
    lambda x: np.pad(x, 1),
    lambda x: x[:, ::-1],
    lambda x: list(x),
    lambda x: x.tolist(),
    lambda x: x[np.int64(2)],
    lambda x: x[5:1:-2],
    lambda x: np.concatenate([x, x]),
    lambda x: np.asarray(x, np.int64),
    lambda x: x[...],
  ],
)
def test_it_does_what_an_array_does(batch, use):
  np.testing.assert_array_equal(use(batch[0].features['tokens']), use(WHOLE['tokens']))
