"""Our decoder is T5X's: the same parameters and batches give the same losses, on any mesh."""

import json
import pathlib
import tarfile
import tempfile

import jax
import numpy as np
import pytest
from flax import serialization, traverse_util

from t5x_gpu.conversion.conversion import params_of_files
from t5x_gpu.conversion.t5x_files import T5xCheckpoint
from t5x_gpu.conversion.t5x_names import t5x_model, t5x_moments
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import rsqrt
from t5x_gpu.training.state import TrainState, new_state
from tests.conversion.t5x_params import arrays_of_file, params_from_t5x
from tests.helpers_programs import build_with
from tests.parity.tolerances import REFERENCE_LOSS, REFERENCE_MOMENTS

FIXTURE = pathlib.Path(__file__).parent / 'fixtures' / 't5x_decoder_only'


def build(num_devices: int, partitioner: Partitioner, **options) -> Program:
  config = TransformerConfig(
    vocab_size=384,
    num_layers=2,
    embed_dim=128,
    num_heads=8,
    head_dim=16,
    mlp_dim=512,
    logits_via_embedding=True,
    relative_bias='shared',
  )
  return build_with(
    model=DecoderOnlyModel(config, z_loss=1e-4),
    optimizer=Adafactor(),
    learning_rate=rsqrt(1.0, warmup_steps=10_000),
    partitioner=partitioner,
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'targets': 64},
    batch_size=8,
    pack=True,
    loss_normalizing_factor=1.0,
    **options,
  )


def trained(program: Program) -> tuple[list[float], TrainState]:
  """Returns the loss per target token of the twenty steps, from T5X's initial parameters, and the
  state after them.
  """
  params = params_from_t5x(arrays_of_file(FIXTURE / 'init_params.npz'))
  state = new_state(params, Adafactor(), program.names.params)
  state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
  batches = arrays_of_file(FIXTURE / 'batches.npz')
  out = []
  for i in range(20):
    batch = program.layout.put_batch({name: batches[name][i] for name in batches})
    state, sums = program.train_step(state, batch)
    out.append(float(sums['loss'][0] / sums['loss'][1]))
  return out, state


def compare_moments(state: TrainState) -> None:
  """Compares the second moments with T5X's saved ones after the same steps."""
  flat = arrays_of_file(FIXTURE / 'init_params.npz')
  with tempfile.TemporaryDirectory() as folder:
    with tarfile.open(FIXTURE / 'checkpoint_orbax.tar.xz') as archive:
      archive.extractall(folder, filter='data')
    model = t5x_model({name: value.shape for name, value in flat.items()})
    moments = t5x_moments(model, T5xCheckpoint(f'{folder}/checkpoint_orbax'))
    want = params_of_files(moments.weights)
  got = serialization.to_state_dict(state.opt_state)
  for name, value in traverse_util.flatten_dict(want, sep='/').items():
    ours = np.asarray(traverse_util.flatten_dict(got, sep='/')[name])
    np.testing.assert_allclose(
      ours, value, rtol=0, atol=REFERENCE_MOMENTS * value.max(), err_msg=name
    )


@pytest.mark.parametrize(
  'num_devices, partitioner',
  [
    (1, Partitioner()),
    *(
      pytest.param(8, partitioner, marks=pytest.mark.slow)
      for partitioner in (
        Partitioner(),
        Partitioner(data=1, fsdp=8),
        Partitioner(num_partitions=8),
        Partitioner(data=2, fsdp=2, num_partitions=2),
      )
    ),
  ],
  ids=['one_device', 'data8', 'fsdp8', 'model8', 'data2_fsdp2_model2'],
)
def test_losses_of_twenty_adafactor_steps_equal_t5x(num_devices, partitioner):
  want = json.loads((FIXTURE / 'loss_per_target_token.json').read_text())
  got, state = trained(build(num_devices, partitioner))
  np.testing.assert_allclose(got, list(want.values()), rtol=REFERENCE_LOSS)
  if num_devices == 1:
    compare_moments(state)
