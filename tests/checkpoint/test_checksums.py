"""Checksums depend only on the values, not on sharding, order of parts, or program."""

import json
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from t5x_gpu.checkpoint import arrays
from t5x_gpu.checkpoint.arrays import HostSums, checksums_of, device_sums, sums, to_text
from t5x_gpu.checkpoint.params_files import ParamsReader, ParamsWriter, read_params
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.errors import CheckpointError
from tests.checkpoint.test_checkpointer import abstract, folder_with, new_state, opened, save
from tests.messages import raises

DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16, np.int32, np.int8, np.uint16, np.bool_)
SHAPES = ((), (1,), (7,), (0, 3), (3, 4, 5), (2, 40_000))


def values(shape, dtype, seed: int = 0) -> np.ndarray:
  return (100 * np.random.default_rng(seed).normal(size=shape)).astype(dtype)


def on_host(array: np.ndarray, **options) -> str:
  whole = HostSums(array.shape, **options)
  whole.add(array)
  return str(whole)


@pytest.mark.parametrize('dtype', DTYPES)
def test_numpy_and_the_device_agree(dtype):
  for shape in SHAPES if dtype == np.float32 else SHAPES[3:5]:
    x = values(shape, dtype)
    assert on_host(x) == to_text(device_sums(x)), shape


def test_64_bit_elements_agree_and_both_halves_count():
  x = values((3, 5), np.float64)
  with jax.enable_x64(True):
    assert on_host(x) == to_text(device_sums(jnp.asarray(x)))
  bits = x.view(np.uint64).copy()
  bits[1, 2] ^= np.uint64(1) << np.uint64(45)
  assert on_host(bits.view(np.float64)) != on_host(x)


@pytest.mark.parametrize(
  'spec, mesh',
  [
    ((None, None), (8, 1)),
    (('a', None), (8, 1)),
    ((None, 'a'), (8, 1)),
    (('a', 'b'), (4, 2)),
    (('b', 'a'), (2, 4)),
    ((('a', 'b'), None), (2, 4)),
  ],
)
def test_every_sharding_has_the_same_sums(spec, mesh):
  x = values((16, 24), np.float32)
  sharding = jax.NamedSharding(jax.make_mesh(mesh, ('a', 'b')), jax.P(*spec))
  assert to_text(device_sums(jax.device_put(x, sharding))) == on_host(x)


def test_a_state_has_the_same_checksums_on_devices_and_on_the_host(monkeypatch):
  mesh = jax.make_mesh((8,), ('a',))
  tree = {
    'split': jax.device_put(values((16, 4), np.float32), jax.NamedSharding(mesh, jax.P('a'))),
    'whole': jax.device_put(values((5,), np.float32), jax.NamedSharding(mesh, jax.P())),
    'of_numpy': values((3, 2), np.float32),
  }
  on_the_host = checksums_of(tree)
  monkeypatch.setattr(arrays, 'HOST_BYTES', 0)
  assert checksums_of(tree) == on_the_host
  assert on_the_host['split'] == on_host(values((16, 4), np.float32))


def test_parts_in_any_order_and_shape_add_up():
  x, rng = values((6, 50, 8), np.float32), random.Random(0)
  parts = [
    (slice(i, i + 3), slice(j, j + 20), slice(k, k + 4))
    for i in (0, 3)
    for j in (0, 20, 40)
    for k in (0, 4)
  ]
  rng.shuffle(parts)
  first, second = HostSums(x.shape), None
  for n, place in enumerate(parts):
    if n == 5:
      second = HostSums(x.shape, start=str(first))  # as a reshard that was killed continues
    (second or first).add_at(place, x[place])
  assert str(second) == on_host(x)
  layers = HostSums(x.shape)
  for i in range(6):
    layers.add_at((i,), x[i])
  assert str(layers) == on_host(x)


def test_checksums_distinguish_elements_beyond_one_word_of_index():
  x = values((4, 6, 8), np.float32)  # with 2^6 in place of 2^32: two words of index
  few = {'most_columns': 64}
  assert arrays.split_dims(x.shape, **few) == 1
  assert on_host(x, **few) == to_text(sums(jnp.asarray(x), **few)) != on_host(x)
  parts = HostSums(x.shape, **few)
  for i in range(4):
    for place in ((i, slice(0, 5)), (i, slice(5, 6))):
      parts.add_at(place, x[place])
  assert str(parts) == on_host(x, **few)
  assert on_host(x[[1, 0, 2, 3]], **few) != on_host(x, **few)


def test_places_beyond_2_to_the_32_differ_and_follow_the_definition():
  shape = (3, 2**31)  # never in memory: parts of it are
  part = values((1, 5), np.float32)
  at = {}
  for place in ((0, 0), (1, 0), (2, 0), (0, 2**31 - 5), (1, 2**31 - 5)):
    at[place] = HostSums(shape)
    at[place].add(part, place)
  assert arrays.split_dims(shape) == 1
  assert len({str(s) for s in at.values()}) == len(at)


def test_any_changed_bit_and_any_exchange_of_elements_is_seen():
  x = values((64,), np.float32)
  want, bits = on_host(x), x.view(np.uint32)
  seen = {want}
  for i in range(64):
    for bit in range(32):
      changed = bits.copy()
      changed[i] ^= np.uint32(1 << bit)
      seen.add(on_host(changed.view(np.float32)))
  assert len(seen) == 64 * 32 + 1
  for i in range(63):
    signs, exchanged = x.copy(), x.copy()
    signs[[i, i + 1]] *= -1  # a plain sum of products would not see these
    exchanged[[i, i + 1]] = exchanged[[i + 1, i]]
    assert on_host(signs) != want != on_host(exchanged)


# ---- In checkpoints ----------------------------------------------------------------------------


def manifest_of(folder, step):
  return json.loads((folder / f'checkpoint_{step}/manifest/metadata').read_text())


def flip_a_bit(checkpoint, *, value: bytes) -> None:
  """Changes the first bit of `value` in the one file that has it as it is."""
  found = [(p, p.read_bytes()) for p in (checkpoint / 'state').rglob('d/*')]
  ((path, data),) = [(p, d) for p, d in found if d.count(value) == 1]
  i = data.index(value)
  path.write_bytes(data[:i] + bytes([data[i] ^ 0x40]) + data[i + 1 :])


def test_saved_checksums_are_those_of_the_state(tmp_path):
  folder = folder_with(tmp_path, 3)
  assert manifest_of(folder, 3)['checksums']['arrays'] == checksums_of(new_state(3, seed=3))


def test_a_bit_that_changed_in_a_file_sets_the_checkpoint_aside_by_name(tmp_path, caplog):
  bits = np.random.default_rng(0).integers(-(2**31), 2**31, (64, 8)).astype(np.int32)
  state = new_state().replace(params={'dense': {'kernel': jnp.asarray(bits)}})
  with opened(tmp_path, keep=Keep()) as checkpointer:
    for step in (10, 20):
      save(checkpointer, step, state.replace(step=jnp.int32(step)))
    checkpointer.wait()
  # What no compression shortens is stored as it is: Orbax reads these files without complaint.
  flip_a_bit(tmp_path / 'checkpoint_20', value=bits[30:34].tobytes())
  with opened(tmp_path) as checkpointer:
    assert int(checkpointer.restore_latest(abstract(state)).state.step) == 10
    assert checkpointer.steps() == [10]
  assert 'params/dense/kernel does not have the values that were saved' in caplog.text
  assert (tmp_path / 'corrupt_checkpoint_20').is_dir()


def test_a_checkpoint_without_checksums_restores_with_a_note(tmp_path, caplog):
  folder = folder_with(tmp_path, 10)
  manifest = manifest_of(folder, 10)
  del manifest['checksums'], manifest['seal']
  (folder / 'checkpoint_10/manifest/metadata').write_text(json.dumps(manifest))
  with opened(folder) as checkpointer, caplog.at_level('INFO'):
    assert int(checkpointer.restore_latest(abstract(new_state())).state.step) == 10
  assert 'checkpoint_10 has no checksums' in caplog.text


def test_of_a_large_state_a_sample_is_checked_which_the_step_chooses(monkeypatch):
  monkeypatch.setattr(arrays, 'SMALL_BYTES', 100)
  tree = {f'p{i}': jnp.full((16,), i, jnp.float32) for i in range(12)}
  wrong = dict.fromkeys(checksums_of(tree), '0' * 16)
  manifest = {'arrays': {n: [[16], 'float32'] for n in tree}, **arrays.checksums_entry(wrong)}
  named = set()
  for step in range(40):
    with pytest.raises(ValueError, match=f'so have {arrays.SAMPLED - 1} more') as e:
      arrays.check_restored(tree, manifest, step=step)
    named.add(str(e.value).split()[0])
  assert len(named) > 6
  arrays.check_restored(tree, {**manifest, **arrays.checksums_entry(checksums_of(tree))}, step=1)


def test_parameters_that_are_read_alone_are_checked(tmp_path):
  kernel = values((64, 32), np.float32)
  with ParamsWriter(
    tmp_path,
    step=3,
    shapes={'dense/kernel': (64, 32)},
    chunks={'dense/kernel': (16, 32)},
    about={},
    compress=False,
  ) as writer:
    for i in range(0, 64, 8):
      writer.write('dense/kernel', (slice(i, i + 8),), kernel[i : i + 8])
  want = {'dense': {'kernel': jax.ShapeDtypeStruct((64, 32), jnp.float32)}}
  assert ParamsReader(tmp_path).manifest['checksums']['arrays'] == {
    'step': to_text(device_sums(jnp.int32(3))),
    'params/dense/kernel': to_text(device_sums(jnp.asarray(kernel))),
  }
  np.testing.assert_array_equal(read_params(tmp_path, want)['dense']['kernel'], kernel)
  flip_a_bit(tmp_path / 'checkpoint_3', value=kernel[20].tobytes())
  with raises(CheckpointError):
    read_params(tmp_path, want)
