"""Training steps traced and lowered for absent GPUs, by the installed jax and Tokamax.

Every model family and every file of gin_configs/parallel, with two rows or more on each GPU. This
needs neither a GPU nor its compiler: simulated devices stand for eight GPUs. `make test-versions`
runs all cases on each Python, with the newest jax and Tokamax that setup.py allows there.
"""

import contextlib
import pathlib
import re

import jax
import pytest
from jax.sharding import AbstractDevice

from t5x_gpu.config import gin_loader
from t5x_gpu.layers.backends.choose import listed_choices
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.xla.deviceless import kernels_for
from t5x_gpu.runtime.xla.gpu_targets import find_target
from t5x_gpu.training.program import program_of_run

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')  # Tokamax's kernels, with jax

GIN = pathlib.Path(__file__).parent.parent / 'gin_configs'
ROWS_PER_GPU, LENGTH = 2, 256
GPUS = ('h100', 'b200', 'a100-80')
# A file of each family, and its layout on each of these GPUs: every family and every layout are
# lowered for every GPU. mt5 and byt5 differ from t5_1_1 in their vocabulary alone.
MODELS = {
  'bert_base': ('dp', 'fsdp', 'zero1'),
  'decoder_base': ('3d', 'dp', 'fsdp'),
  'decoder_moe_demo': ('fsdp', 'ep', 'dp'),
  'encoder_decoder_demo': ('cp', 'hsdp', 'tp_sp'),
  'encoder_small': ('tp', 'dp', 'tp'),
  'gemma2_2b': ('fsdp', '3d', 'tp_sp'),
  'gemma3_1b': ('hsdp', 'pp', 'cp'),
  'gpt2_small': ('zero1', 'fsdp', 'hsdp'),
  'llama3_8b': ('fsdp', 'tp', 'tp_sp'),
  'mistral_7b': ('cp', 'zero1', 'fsdp'),
  'mixtral_8x7b': ('ep', 'fsdp', 'ep'),
  'olmo2_1b': ('tp_sp', 'cp', '3d'),
  'phi3_mini': ('dp', 'tp_sp', 'fsdp'),
  'phi4': ('pp', 'fsdp', 'hsdp'),
  'qwen2_5_0_5b': ('hsdp', 'dp', 'cp'),
  'qwen3_0_6b': ('cp', 'hsdp', 'dp'),
  'qwen3_moe_30b_a3b': ('fsdp', 'ep', 'fsdp'),
  'smollm3_3b': ('dp', 'fsdp', 'pp'),
  't5_small': ('fsdp', 'tp', 'dp'),
  't5_1_1_small': ('fsdp', 'fsdp', 'fsdp'),
  'umt5_small': ('fsdp', 'dp', 'zero1'),
}


@pytest.fixture
def gpu(monkeypatch):
  """Returns a context in which simulated devices are taken for GPUs of a kind."""

  @contextlib.contextmanager
  def entered(name):
    target = find_target(name)
    device = AbstractDevice(target.device_kind, target.num_cores, 'gpu')
    mesh_of = jax.sharding.Mesh.abstract_mesh.__get__
    with monkeypatch.context() as inside, kernels_for(target):
      of_gpus = property(lambda mesh: mesh_of(mesh).update(abstract_device=device))
      inside.setattr(jax.sharding.Mesh, 'abstract_mesh', of_gpus)
      yield

  return entered


def lowered(model, layout):
  """Returns the step of a model as text, with the names of its attention backends."""
  features = ['inputs', 'targets']
  if model.startswith(('bert', 'encoder')) and model != 'encoder_decoder_demo':
    features = ['inputs']
  elif 't5' not in model and model != 'encoder_decoder_demo':
    features = ['targets']
  loaded = gin_loader.load(
    [
      str(GIN / f'{name}.gin')
      for name in (f'models/{model}', f'parallel/{layout}', 'runs/pretrain')
    ],
    bindings=[
      "MODEL_DIR = 'unused'",
      "MIXTURE_OR_TASK_NAME = 'unused'",
      'TRAIN_STEPS = 100',
      f'BATCH_SIZE = {ROWS_PER_GPU * 8}',
      f'TASK_FEATURE_LENGTHS = {dict.fromkeys(features, LENGTH)}',
      "DTYPE = 'bfloat16'",
      f'PACK = {"inputs" not in features or len(features) == 2}',
    ],
    search_paths=[],
  )
  config = gin_loader.configured(loaded, PlanConfig)
  topology = Topology(2, 4) if layout == 'hsdp' else Topology(1, 8)
  program = program_of_run(config, topology=topology, devices=jax.devices())
  with listed_choices() as choices:
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  return text, [choice.name for choice in choices]


@pytest.mark.quick_cases('llama3_8b-fsdp-h100', 'mixtral_8x7b-fsdp-b200', 'mixtral_8x7b-ep-h100')
@pytest.mark.parametrize(
  ('model', 'layout', 'name'),
  [
    pytest.param(model, layout, name, id=f'{model}-{layout}-{name}')
    for model, layouts in MODELS.items()
    for layout, name in zip(layouts, GPUS, strict=True)
  ],
)
def test_the_step_of_every_family_and_layout_lowers(model, layout, name, gpu):
  with gpu(name):
    text, choices = lowered(model, layout)
  assert choices
  for kernel, call in (('mosaic', '@mosaic_gpu'), ('triton', '__gpu$xla.gpu.triton')):
    assert (call in text) == any(kernel in choice for choice in choices), (choices, kernel)


def test_every_layout_and_family_is_lowered_for_every_gpu():
  layouts = {path.stem for path in (GIN / 'parallel').glob('*.gin')}
  for of_gpu in zip(*MODELS.values()):
    assert set(of_gpu) == layouts
  families = {re.split(r'[_0-9]', name)[0] for name in MODELS} | {'mt', 'byt'}
  for path in (GIN / 'models').glob('*.gin'):
    assert re.split(r'[_0-9]', path.stem)[0] in families, f'no model like {path.name} is lowered'
