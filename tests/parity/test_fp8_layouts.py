"""Every layout trains in FP8 as one device does, with float32 around the FP8 matmuls.

A scale is a power of two, so a device that knows only its own rows rounds as one device that has
all of them; gradients then agree to MESH_GRADIENT. On another CPU, a sum in another order may move
a value to the next 8-bit number, which later matmuls amplify for that token. The band is half of
what the rounding of one product does to its gradient (tests/layers/test_fp8.py).
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.training.program import build_program
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK, KeepGradients
from tests.parity.test_layouts import BATCH, CASES, FAMILIES, LENGTH, LENGTHS, MODELS, Case

FP8_GRADIENT = 0.03
# Rounding to E5M2 moves values by 5.2% in the mean square (tests/layers/test_fp8.py).
E5M2_ROUNDING = 0.052
FAST = ('fsdp_model_remat',)  # with accumulation by layer, the loop, and rematerialisation
LAYERS = {'modern_tp_shared_kv_heads': 1, 'modern_gather_shared_kv_heads': 1}


def first_step(case: Case, num_devices: int, *, with_params=lambda params: params, **change):
  """Returns (loss, path -> gradient); `change` is of the model's config."""
  change = dict(case.config, dtype='fp8_float32') | change
  if case.model in FAMILIES:
    model = FAMILIES[case.model]()
    model = dataclasses.replace(model, config=dataclasses.replace(model.config, **change))
  else:
    model = DecoderOnlyModel(dataclasses.replace(MODELS[case.model], **change))
  program = build_program(
    model=model,
    optimizer=KeepGradients(),
    schedule=constant(1.0),
    partitioner=Partitioner(**case.partitioner),
    topology=Topology(case.num_hosts, num_devices // case.num_hosts),
    devices=jax.devices()[:num_devices],
    task_feature_lengths=LENGTHS.get(case.model, {'targets': LENGTH}),
    batch_size=BATCH,
    pack='classifier' not in case.model,
    seed=0,
    num_microbatches=case.num_microbatches,
  )
  [batch] = uneven_batches(program.spec, seed=1, num_batches=1)
  batch = program.layout.put_batch(batch)
  state = program.init.lower().compile(compiler_options=QUICK)()
  step = program.train_step.lower(program.abstract_state, batch).compile(compiler_options=QUICK)
  state, sums = step(state.replace(params=with_params(state.params)), batch)
  grads, _ = jax.tree_util.tree_flatten_with_path(program.in_model_order(state).opt_state)
  return float(sums['loss'][0] / sums['loss'][1]), {
    jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(x) for path, x in grads
  }


@functools.cache
def cancellation(model: str) -> float:
  """Returns how much larger the key gradients of the copies of a head are than their sum."""
  count = MODELS[model].num_heads // MODELS[model].num_kv_heads

  def with_copies(params):
    block = dict(params['layers']['self_attention'])
    for name in ('key', 'value'):
      block[name] = {
        leaf: jax.numpy.repeat(x[..., ::count, :], count, axis=-2)
        for leaf, x in block[name].items()
      }
    return {**params, 'layers': {**params['layers'], 'self_attention': block}}

  options = dict(num_layers=1, dtype='float32', dropout_rate=0.0)
  wide = dict(options, num_kv_heads=MODELS[model].num_heads)
  _, grads = first_step(Case({}, model), 1, with_params=with_copies, **wide)
  key = grads['layers/self_attention/key/kernel']
  key = key.reshape(*key.shape[:2], -1, count, key.shape[-1])
  return np.sqrt(np.sum(key**2)) / np.linalg.norm(key.sum(-2))


@functools.cache
def one_device(model: str, num_layers: int):
  return first_step(Case({}, model), 1, num_layers=num_layers)


def band_of(name: str) -> float:
  """Returns how far gradients may be from those of one device.

  With fewer key and value heads than devices, each device rounds the gradient of its own copy of a
  head, and one device that of their sum. Both errors add up: 5.2% of the sum, and 5.2% of the
  copies, which are larger than the sum where they cancel. Half as much again for chance.
  """
  if name not in LAYERS:
    return FP8_GRADIENT
  return 1.5 * E5M2_ROUNDING * np.hypot(1.0, cancellation(CASES[name].model))


@pytest.mark.parametrize(
  'name', [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_first_step_in_fp8_equals_one_device(name):
  case, num_layers = CASES[name], LAYERS.get(name, 2 if name in FAST else 4)
  loss, grads = first_step(case, 8, num_layers=num_layers)
  want_loss, want = one_device(case.model, num_layers)
  band = band_of(name)
  np.testing.assert_allclose(loss, want_loss, rtol=band)
  for path, array in want.items():
    if path.endswith('key/bias'):
      continue  # shifts all logits of a query alike: its gradient is nothing but rounding
    error = np.linalg.norm(grads[path] - array) / np.linalg.norm(array)
    assert error < band, f'{path}: {error:.1e}'
