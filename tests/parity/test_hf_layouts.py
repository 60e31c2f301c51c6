"""Models of every Hugging Face family have the gradients of one device under each layout."""

import functools
from typing import Any

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
# Each family meets each axis once; tests/parity/test_layouts.py has their combinations.
LAYOUTS = {
  'fsdp_context_model': dict(fsdp=2, context=2, num_partitions=2),
  'data_stage': dict(stage=2, pipeline_schedule='gpipe'),
}
# Without the axes that do not divide the sizes of these models.
REFUSED = {
  ('mistral', 'fsdp_context_model'): dict(num_partitions=1),
  ('smollm3', 'data_stage'): dict(stage=1),
}
BATCH, LENGTH = 16, 16


def run(family: str, **partitioner: Any) -> RecordedRun:
  """Returns the steps of a family under a layout; without `partitioner`, on one device."""
  config = dict(VARIANTS[family])
  if 't5' in family:  # two stages; and rounding cannot switch a unit off, as with ReLU
    config |= {'num_layers': 2, 'num_decoder_layers': 2, 'feed_forward_proj': 'gated-gelu'}
  fields = from_hf(config, has_tensor=lambda name: False)
  model = fields.build()
  inputs = {} if fields.kind == 'decoder_only' else {'inputs': LENGTH}
  targets = {} if family == 'bert_classification' else {'targets': LENGTH}
  devices = 8 if partitioner else 1
  program = build_with(
    model=model,
    optimizer=OPTIMIZER,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths={**inputs, **targets},
    batch_size=BATCH,
    pack=bool(targets),
  )
  return recorded(program)


@functools.lru_cache(maxsize=1)  # the programs of all families would stay in memory
def one_device(family: str) -> RecordedRun:
  return run(family)


@pytest.mark.parametrize('layout', LAYOUTS)
@pytest.mark.parametrize('family', FAMILIES)
def test_a_family_has_the_gradients_of_one_device(family, layout):
  partitioner = LAYOUTS[layout]
  if (family, layout) in REFUSED:
    with raises(MeshError):
      run(family, **partitioner)
    partitioner = partitioner | REFUSED[family, layout]
  assert_same_steps(run(family, **partitioner), one_device(family))
