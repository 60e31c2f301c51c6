"""Training steps traced and lowered for absent GPUs, by the installed jax and Tokamax.

Every case of attention, model family and file of gin_configs/parallel, with two rows or more on
each GPU. This needs neither a GPU nor its compiler: simulated devices stand for eight GPUs.
`make test-versions` runs all cases on each Python, with the newest jax and Tokamax that setup.py
allows there.
"""

import contextlib
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AxisType, Mesh, PartitionSpec

from t5x_gpu.config import gin_loader
from t5x_gpu.layers.backends.choose import (
  AttentionNeed,
  attention_by,
  choose,
  hardware,
  listed_choices,
)
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.partitioning.axis_rules import AxisRules, use_rules
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.gpu_targets import find_target, kernels_for
from t5x_gpu.tools.planning.prediction import PlanConfig
from t5x_gpu.training.program import build_program
from tests.layers.backends import test_attention_backends

pytestmark = pytest.mark.filterwarnings('ignore::DeprecationWarning')  # Tokamax's kernels, with jax

GIN = pathlib.Path(__file__).parent.parent / 'gin_configs'
ROWS_PER_GPU, LENGTH = 2, 256
ATTENTION = test_attention_backends.CASES
RULES = AxisRules(activations={'heads': ('model',), 'kv_heads': ('model',)})
GPUS = ('h100', 'b200', 'a100-80')
# A file of each family, and its layout on each of these GPUs: every family and every layout are
# lowered for every GPU. mt5 and byt5 differ from t5_1_1 in their vocabulary alone.
MODELS = {
  'bert_base': ('dp', 'fsdp', 'zero1'),
  'decoder_base': ('3d', 'dp', 'fsdp'),
  'decoder_moe_demo': ('fsdp', 'ep', 'dp'),
  'encoder_decoder_demo': ('cp', 'hsdp', 'dp'),
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
  program = build_program(config, topology=topology, devices=jax.devices())
  with listed_choices() as choices:
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
  text = traced.lower(lowering_platforms=('cuda',)).as_text()
  return text, [choice.name for choice in choices]


@pytest.mark.versions
@pytest.mark.quick_cases('mixtral_8x7b-fsdp-b200', 'mixtral_8x7b-ep-h100')
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
  assert_has_kernels(text, choices)


@pytest.mark.versions
@pytest.mark.slow
@pytest.mark.parametrize('name', GPUS)
@pytest.mark.parametrize('case', ATTENTION.values(), ids=ATTENTION)
def test_every_case_of_attention_lowers(case, name, gpu):
  rows, heads, size = ROWS_PER_GPU * 8, test_attention_backends.HEADS, 64
  mesh_shape = {'fsdp': 8, 'model': 1}
  mesh = Mesh(np.reshape(jax.devices(), (8, 1)), (*mesh_shape,), axis_types=(AxisType.Auto,) * 2)
  kv_segments = case.segments if case.kv_segments is None else case.kv_segments
  infos = [
    np.tile(x, (rows // len(x), 1))
    for x in (case.segments, case.segments if case.prefix is None else case.prefix, kv_segments)
  ]
  need = AttentionNeed(
    'bfloat16', size, softcap=case.softcap is not None, relative_bias=case.has_bias
  )

  def info(segments, prefix=None):
    return TokenInfo(jnp.arange(segments.shape[1]), segments, prefix)

  def gradients(query, key, value, table, segments, prefix, kv_segments):
    with use_rules(RULES, mesh_shape, manual_axes=('fsdp',)):
      attention = attention_by(
        backend,
        case.kind,
        info(segments, None if case.prefix is None else prefix),
        None if case.kv_segments is None else info(kv_segments),
      )

      def out(query, key, value, table):
        bias = attention.bias(table) if case.has_bias else None
        window = None if case.window is None else jnp.int32(case.window)
        return attention(query, key, value, bias, window).astype(jnp.float32).sum()

      table = jax.lax.pcast(table, 'fsdp', to='varying')
      return jax.grad(out, (0, 1, 2))(query, key, value, table)

  split = PartitionSpec('fsdp')
  mapped = jax.shard_map(
    gradients,
    in_specs=(split, split, split, PartitionSpec(), split, split, split),
    out_specs=split,
    axis_names={'fsdp'},
  )
  q_shape = (rows, case.segments.shape[1], heads, size)
  kv_shape = (rows, kv_segments.shape[1], case.kv_heads, size)
  query, key, value = (
    jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (q_shape, kv_shape, kv_shape)
  )
  with gpu(name), jax.set_mesh(mesh):
    backend = choose('auto', need, hardware()).name
    traced = jax.jit(mapped).trace(query, key, value, jnp.zeros((heads, 8)), *infos)
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
  assert_has_kernels(text, [backend])


def assert_has_kernels(text, backends):
  """Fails unless the program has kernels of Mosaic and Triton where backends are theirs."""
  for kernel, call in (('mosaic', '@mosaic_gpu'), ('triton', '__gpu$xla.gpu.triton')):
    assert (call in text) == any(kernel in backend for backend in backends), (backends, kernel)


def test_every_layout_and_family_is_lowered_for_every_gpu():
  layouts = {path.stem for path in (GIN / 'parallel').glob('*.gin')}
  for of_gpu in zip(*MODELS.values()):
    assert set(of_gpu) == layouts
  families = {re.split(r'[_0-9]', name)[0] for name in MODELS} | {'mt', 'byt'}
  for path in (GIN / 'models').glob('*.gin'):
    assert re.split(r'[_0-9]', path.stem)[0] in families, f'no model like {path.name} is lowered'
