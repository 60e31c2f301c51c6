"""Models of every Hugging Face family have the gradients of one device under each layout."""

import functools

import jax
import pytest

from t5x_gpu.conversion.hf.config_json import from_hf
from t5x_gpu.errors import MeshError
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.parity.paired_run import RecordedRun
from t5x_gpu.training.schedules import constant
from tests.conversion.hf_files import VARIANTS
from tests.helpers_parity import OPTIMIZER, assert_same_steps, recorded
from tests.helpers_programs import build_with
from tests.messages import raises

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


def run(family: str, layout: str) -> RecordedRun:
  """Returns the steps of a family under a layout; 'one' is one device."""
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
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**LAYOUTS.get(layout, {})),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths={**inputs, **targets},
    batch_size=BATCH,
    pack=bool(targets),
  )
  return recorded(program)


@functools.lru_cache(maxsize=1)  # 85 programs in one process reach Linux's limit of mappings
def one_device(family: str) -> RecordedRun:
  return run(family, 'one')


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_family_has_the_gradients_of_one_device(family, layout):
  if (family, layout) in REFUSED:
    with raises(MeshError):
      run(family, layout)
    return
  assert_same_steps(run(family, layout), one_device(family))
