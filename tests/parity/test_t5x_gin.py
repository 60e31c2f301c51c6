"""Runs that gin files in T5X's dialect describe have T5X's losses, with nothing else set."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest

from t5x_gpu.config import gin_loader
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.program import build_program
from t5x_gpu.training.state import new_state
from t5x_gpu.training.train_step import StepConfig
from tests.conversion.t5x_params import arrays_of_file, params_from_t5x
from tests.parity.tolerances import REFERENCE_LOSS

FIXTURES = pathlib.Path(__file__).parent / 'fixtures'
FILES = pathlib.Path(__file__).parents[1] / 'config' / 't5x' / 'files'


# The curve of the other family is in `make test` without a gin file: test_t5x_encoder_decoder.py.
@pytest.mark.quick_cases('decoder_from_scratch-*-1')
@pytest.mark.parametrize('num_devices', [1, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
  'file, fixture',
  [('t5_from_scratch', 't5x_encoder_decoder'), ('decoder_from_scratch', 't5x_decoder_only')],
)
def test_losses_of_a_t5x_gin_file_equal_t5xs(file, fixture, num_devices):
  loaded = gin_loader.load(
    [f'{file}.gin'], bindings=['MODEL_DIR=unused'], search_paths=[str(FILES)]
  )
  config = gin_loader.configured(loaded, StepConfig)
  if num_devices > 1:
    config = dataclasses.replace(config, partitioner=Partitioner(data=2, fsdp=2, num_partitions=2))
  program = build_program(
    config, topology=Topology(1, num_devices), devices=jax.devices()[:num_devices]
  )
  params = params_from_t5x(arrays_of_file(FIXTURES / fixture / 'init_params.npz'))
  state = new_state(params, config.optimizer, program.names.params)
  state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
  batches, got = arrays_of_file(FIXTURES / fixture / 'batches.npz'), []
  for i in range(20):
    batch = program.layout.put_batch({name: batches[name][i] for name in batches})
    state, sums = program.train_step(state, batch)
    got.append(float(sums['loss'][0] / sums['loss'][1]))
  want = json.loads((FIXTURES / fixture / 'loss_per_target_token.json').read_text())
  np.testing.assert_allclose(got, list(want.values()), rtol=REFERENCE_LOSS)
