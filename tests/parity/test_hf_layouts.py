"""Models of every Hugging Face family have the gradients of one device under each layout."""

import functools

import jax
import numpy as np
import pytest

from t5x_gpu.conversion.hf.config_json import from_hf
from t5x_gpu.data.synthetic import uneven_batches
from t5x_gpu.errors import MeshError
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.schedules import constant
from tests.conversion.hf_files import VARIANTS
from tests.helpers_layouts import QUICK, KeepGradients
from tests.helpers_programs import build_with
from tests.parity.test_layouts import arrays
from tests.parity.tolerances import MESH_GRADIENT

pytestmark = pytest.mark.slow
FAMILIES = (
  't5',
  't5_1_1',
  'umt5',
  'bert_classification',
  'bert_mlm',
  'gpt2',
  'llama',
  'mistral',
  'qwen2',
  'qwen3',
  'gemma2',
  'gemma3_text',
  'smollm3',
  'olmo2',
  'phi3_longrope',
  'mixtral',
  'qwen3_moe',
)
LAYOUTS = {
  'fsdp': dict(data=2, fsdp=4),
  'fsdp_model': dict(data=2, fsdp=2, num_partitions=2),
  'context': dict(data=2, fsdp=2, context=2),
  'stage': dict(data=4, stage=2, pipeline_schedule='gpipe'),
}
# The sizes of these models do not divide.
REFUSED = (('mistral', 'fsdp_model'), ('smollm3', 'stage'))
BATCH, LENGTH = 16, 16


@functools.cache
def gradients(family: str, layout: str) -> dict[str, np.ndarray]:
  """Returns the loss and the gradients of the first step; 'one' is one device."""
  config = dict(VARIANTS[family])
  if 't5' in family:  # two stages; and rounding cannot switch a unit off, as with ReLU
    config |= {'num_layers': 2, 'num_decoder_layers': 2, 'feed_forward_proj': 'gated-gelu'}
  fields = from_hf(config, has_tensor=lambda name: False)
  model = fields.build()
  inputs = {} if fields.kind == 'decoder_only' else {'inputs': LENGTH}
  targets = {} if family == 'bert_classification' else {'targets': LENGTH}
  devices = 1 if layout == 'one' else 8
  program = build_with(
    model=model,
    optimizer=KeepGradients(),
    learning_rate=constant(1.0),
    partitioner=Partitioner(**LAYOUTS.get(layout, {})),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths={**inputs, **targets},
    batch_size=BATCH,
    pack=bool(targets),
  )
  [batch] = uneven_batches(program.spec, seed=1, num_batches=1)
  batch = program.layout.put_batch(batch)
  state = program.init.lower().compile(QUICK)()
  state, sums = program.train_step.lower(state, batch).compile(QUICK)(state, batch)
  loss = np.asarray(sums['loss'][0] / sums['loss'][1])
  return {'loss': loss, **arrays(program.in_model_order(state).opt_state)}


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_family_has_the_gradients_of_one_device(family, layout):
  if (family, layout) in REFUSED:
    with pytest.raises(MeshError, match='divide'):
      gradients(family, layout)
    return
  got, want = gradients(family, layout), gradients(family, 'one')
  for path, array in want.items():
    if path.endswith('key/bias'):  # nothing but rounding, where a softmax is all that reads it
      continue
    error = np.abs(got[path] - array).max() / np.abs(array).max()
    assert error < MESH_GRADIENT, f'{path}: {error:.1e}'
