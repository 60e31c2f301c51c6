"""T5X's own checkpoints and curves: imported, they give its logits; trained, its losses."""

import json
import pathlib
import tarfile

import jax
import numpy as np
import pytest

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import read_params
from t5x_gpu.conversion.t5x_names import t5x_model
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.schedules import rsqrt
from t5x_gpu.training.state import new_state
from tests.conversion.t5x_params import arrays_of_file, params_from_t5x
from tests.helpers_programs import build_with
from tests.parity.tolerances import REFERENCE_LOGITS, REFERENCE_LOSS

FIXTURES = pathlib.Path(__file__).parent / 'fixtures'
FIXTURE = FIXTURES / 't5x_encoder_decoder'
OPTIMIZER = Adafactor(layers='joined_heads')  # the layers of t5x/examples/t5, with sides of 64


def build(num_devices=1, partitioner=Partitioner()):
  flat = arrays_of_file(FIXTURE / 'init_params.npz')
  model = t5x_model({name: value.shape for name, value in flat.items()})
  return flat, build_with(
    model=EncoderDecoderModel(model.config, z_loss=1e-4, **model.options),
    optimizer=OPTIMIZER,
    learning_rate=rsqrt(1.0, warmup_steps=10_000),
    partitioner=partitioner,
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'inputs': 64, 'targets': 48},
    batch_size=8,
    pack=True,
    loss_normalizing_factor=1.0,
  )


@pytest.mark.parametrize(
  'num_devices, partitioner',
  [
    (1, Partitioner()),
    pytest.param(8, Partitioner(data=2, fsdp=2, num_partitions=2), marks=pytest.mark.slow),
  ],
  ids=['one_device', 'data2_fsdp2_model2'],
)
def test_losses_of_twenty_adafactor_steps_equal_t5x(num_devices, partitioner):
  flat, program = build(num_devices, partitioner)
  params = params_from_t5x(flat)
  state = new_state(params, OPTIMIZER, program.names.params)
  state = jax.tree.map(lambda x, a: jax.device_put(x, a.sharding), state, program.abstract_state)
  batches, got = arrays_of_file(FIXTURE / 'batches.npz'), []
  for i in range(20):
    batch = program.layout.put_batch({name: batches[name][i] for name in batches})
    state, sums = program.train_step(state, batch)
    got.append(float(sums['loss'][0] / sums['loss'][1]))
  want = json.loads((FIXTURE / 'loss_per_target_token.json').read_text())
  np.testing.assert_allclose(got, list(want.values()), rtol=REFERENCE_LOSS)


@pytest.mark.parametrize(
  'name, kind',
  [('decoder_only', 'orbax'), ('encoder_decoder', 'orbax'), ('encoder_decoder', 'legacy')],
)
def test_logits_of_imported_checkpoints_equal_t5x(name, kind, tmp_path):
  fixture = FIXTURES / f't5x_{name}'
  with tarfile.open(fixture / f'checkpoint_{kind}.tar.xz') as archive:
    archive.extractall(tmp_path, filter='data')
  convert.main(
    [f'--from={tmp_path / f"checkpoint_{kind}"}', f'--to={tmp_path / "ours"}', '--check=tensors']
  )
  fields = convert.model_of_gin([tmp_path / 'ours' / 'model.gin'])
  sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  params = read_params(
    tmp_path / 'ours',
    jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), fields.abstract_params()
    ),
  )
  batches = arrays_of_file(fixture / 'batches.npz')
  batch = {feature: batches[feature][0][:4] for feature in batches}
  got = jax.jit(fields.build().logits)(params, batch)
  want = arrays_of_file(fixture / 'logits_batch0_rows4_step20.npz')['logits']
  targets = batch['decoder_target_tokens'] > 0
  np.testing.assert_allclose(
    np.asarray(got)[targets], want[targets], atol=REFERENCE_LOGITS, rtol=REFERENCE_LOGITS
  )
