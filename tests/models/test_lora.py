"""Adapters: nothing at first, alone trained, the same on every mesh, and as good as merged."""

import dataclasses
import math

import flax.traverse_util
import jax
import numpy as np
import pytest

from t5x_gpu.compiled.collectives import inventory, partitioned_hlo
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.partitioning.axis_rules import split_names
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_layouts import QUICK
from tests.helpers_programs import build_with
from tests.messages import raises
from tests.parity.tolerances import HUGGING_FACE_LOGITS

CONFIG = TransformerConfig(
  vocab_size=48, num_layers=4, embed_dim=16, num_heads=4, head_dim=8, mlp_dim=24, dropout_rate=0.1
)
GROUPED = dict(num_kv_heads=2, attention_bias='all', mlp_bias=True)
ALL = r'.*/kernel'
LENGTH, BATCH = 8, 16
LENGTHS = {
  'lm': {'targets': LENGTH},
  'encoder_classification': {'inputs': LENGTH},
  'encoder_mlm': {'inputs': LENGTH, 'targets': LENGTH},
  'encoder_decoder': {'inputs': LENGTH, 'targets': LENGTH},
}


def config(**changes) -> TransformerConfig:
  return dataclasses.replace(CONFIG, **changes)


def program(
  model,
  *,
  num_devices: int = 1,
  optimizer=AdamW(weight_decay=0.1),
  num_microbatches: int = 1,
  **partitioner,
) -> Program:
  return build_with(
    model=model,
    optimizer=optimizer,
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    batch_size=BATCH,
    pack=False,
    num_microbatches=num_microbatches,
    task_feature_lengths=LENGTHS[model.feature_converter({})],
  )


def batch(p: Program, seed: int = 0) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(seed)

  def feature(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if name.endswith(('weights', 'segment_ids')):
      return np.ones(shape, p.spec.dtypes[name])
    high = 3 if name == 'label' else CONFIG.vocab_size
    return rng.integers(0 if name == 'label' else 1, high, shape).astype(p.spec.dtypes[name])

  return {name: feature(name, shape) for name, shape in p.spec.shapes.items()}


def shapes(model):
  return jax.eval_shape(lambda: model.init(jax.random.key(0), None))


def flat(tree) -> dict[str, np.ndarray]:
  return {name: np.asarray(x) for name, x in flax.traverse_util.flatten_dict(tree, sep='/').items()}


def trained(model, steps: int = 2, **options) -> tuple[Program, dict, dict]:
  """Returns program, parameters after some steps, in the order of the model, and the losses."""
  p = program(model, **options)
  state, losses = p.init(), []
  step_of = p.train_step.lower(p.abstract_state, p.abstract_batch).compile(compiler_options=QUICK)
  for step in range(steps):
    state, sums = step_of(state, p.layout.put_batch(batch(p, step)))
    losses.append({name: float(total) / float(weight) for name, (total, weight) in sums.items()})
  return p, flat(p.in_saved_form(state).params), losses


FAMILIES = {
  'grouped_decoder': DecoderOnlyModel(config(**GROUPED)),
  'classifier': EncoderModel(config(mlp_activations=('gelu',)), num_classes=3),
  'mlm': EncoderModel(CONFIG, head_type='mlm'),
  'encoder_decoder': EncoderDecoderModel(CONFIG, num_encoder_layers=2),
}


@pytest.mark.parametrize(
  'family',
  [
    pytest.param(name, marks=pytest.mark.slow)
    if name in ('grouped_decoder', 'encoder_decoder', 'mlm', 'classifier')
    else name
    for name in FAMILIES
  ],
)
def test_adapters_start_as_the_identity_and_equal_their_merged_kernels(family):
  base = FAMILIES[family]
  model = LoraModel(base, rank=3, alpha=12.0, pattern=ALL)
  p = program(model)
  rows = p.layout.region.with_rows({n: jax.numpy.asarray(x) for n, x in batch(p).items()})

  @jax.jit
  def new() -> tuple:
    own, names = split_names(base.init(jax.random.key(0), p.spec))
    params, _ = split_names(model.init(jax.random.key(0), p.spec))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return (
      own,
      params,
      jax.tree_util.tree_map_with_path(
        lambda path, x: (
          0.3 * jax.random.normal(next(keys), x.shape) if path[-1].key == 'lora_b' else x
        ),
        params,
      ),
    )

  @jax.jit
  def computed(own, untrained, params) -> tuple:
    loss = lambda params: model.loss(params, rows)['loss'][0]
    return (
      base.logits(own, rows),
      model.logits(untrained, rows),
      model.logits(params, rows),
      base.logits(model.merged(params), rows),
      jax.grad(loss)(params),
    )

  own, untrained, params = new()
  first, unchanged, adapted, as_merged, grads = computed(own, untrained, params)
  np.testing.assert_array_equal(unchanged, first)
  largest = float(np.abs(adapted).max())
  assert np.abs(adapted - first).max() > 0.05 * largest
  # Sums in other orders, as another implementation's.
  np.testing.assert_allclose(as_merged, adapted, atol=HUGGING_FACE_LOGITS * largest)
  in_numpy = model.merged(jax.tree.map(np.asarray, params))
  assert jax.tree.structure(in_numpy) == jax.tree.structure(own)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), in_numpy, model.merged(params)
  )
  # Every factor has a part in it: none is left out by a layer.
  dead = [
    name
    for name, g in flat(grads).items()
    if name.endswith(('lora_a', 'lora_b')) and not np.abs(g).max() > 0
  ]
  assert not dead


@pytest.mark.parametrize(
  'optimizer', [AdamW(weight_decay=0.1), Adafactor()], ids=['adamw', 'adafactor']
)
def test_only_what_is_trained_has_optimizer_state(optimizer):
  model = LoraModel(FAMILIES['classifier'], rank=2, also_train=r'classifier/.*')
  p = program(model, optimizer=optimizer)
  sizes = {
    name: a.shape
    for name, a in flax.traverse_util.flatten_dict(p.abstract_state.params, sep='/').items()
  }
  trained = {
    'classifier/kernel',
    'classifier/bias',
    *(f'layers/self_attention/{m}/lora_{f}' for m in ('query', 'value') for f in 'ab'),
  }
  assert {name for name in sizes if model.is_trained(name)} == trained
  state, _ = jax.tree_util.tree_flatten_with_path(p.abstract_state.opt_state)
  of = {jax.tree_util.keystr(path, simple=True, separator='/') for path, x in state if x.ndim}
  assert of and all(any(name in path for name in trained) for path in of)
  assert p.num_trained == sum(math.prod(sizes[name]) for name in trained) < p.num_params


LAYOUTS = {
  'zero2_by_layer': dict(fsdp=4, zero_stage=2, num_microbatches=2),
  'fsdp_tp': dict(fsdp=4, num_partitions=2),
  'fsdp_by_layer': dict(fsdp=8, num_microbatches=2),
  'zero1_pp': dict(stage=2, pipeline_schedule='1f1b', fsdp=2, zero_stage=1),
  'fsdp_circular_tp': dict(
    stage=2, pipeline_schedule='circular', pipeline_repeats=2, fsdp=2, num_partitions=2
  ),
  'sp_cp': dict(context=2, num_partitions=4, sequence_parallel=True),
}


ADAPTED = LoraModel(
  FAMILIES['grouped_decoder'], rank=2, pattern=ALL, also_train=r'decoder_norm/scale'
)


@pytest.fixture(scope='module')
def one_device() -> tuple:
  return trained(ADAPTED)


@pytest.mark.slow
@pytest.mark.parametrize(
  'layout',
  [name if name == 'fsdp_tp' else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS],
)
def test_every_layout_trains_as_one_device(layout, one_device):
  p, want, want_losses = one_device
  start = flat(p.init().params)
  _, got, losses = trained(ADAPTED, num_devices=8, **LAYOUTS[layout])
  assert losses[-1] == pytest.approx(want_losses[-1], rel=2e-4)
  for name in want:
    np.testing.assert_allclose(got[name], want[name], atol=1e-4, err_msg=name)
    moved = np.abs(want[name] - start[name]).max()
    assert (moved > 5e-3) == ADAPTED.is_trained(name), name


@pytest.mark.slow
@pytest.mark.parametrize(
  'layout',
  [
    dict(fsdp=4, num_microbatches=2),
    dict(stage=2, pipeline_schedule='gpipe', fsdp=2, num_partitions=2),
  ],
  ids=str,
)
def test_adapters_of_one_stack_of_an_encoder_decoder_train_as_on_one_device(layout):
  model = LoraModel(FAMILIES['encoder_decoder'], rank=2, pattern=r'decoder/.*/(query|wo)/kernel')
  _, want, want_losses = trained(model)
  _, got, losses = trained(model, num_devices=8, **layout)
  assert losses[-1] == pytest.approx(want_losses[-1], rel=2e-4)
  for name in want:
    np.testing.assert_allclose(got[name], want[name], atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_no_gradient_of_a_frozen_kernel_is_computed():
  """A step has fewer FLOPs: 4 of 6 per weight, plus the FLOPs of the factors."""
  base = DecoderOnlyModel(config(dropout_rate=0.0, scan_unroll=4))

  def flops(model) -> float:
    p = program(model)
    return p.train_step.lower(p.abstract_state, p.abstract_batch).compile().cost_analysis()['flops']

  model = LoraModel(base, rank=1)
  ratio = flops(model) / flops(base)
  assert ratio < 0.85, ratio
  assert model.flops_per_token(LENGTH) < 0.75 * base.flops_per_token(LENGTH)


@pytest.mark.slow
def test_over_fsdp_gradients_of_factors_alone_travel():
  """Reduced are factors and single numbers; whole kernels are gathered, as any layer's."""
  p = program(
    LoraModel(DecoderOnlyModel(config(embed_dim=64, mlp_dim=256)), rank=2), num_devices=8, fsdp=8
  )
  found = inventory(
    partitioned_hlo(p.train_step.lower(p.abstract_state, p.abstract_batch)), p.layout.mesh.shape
  )
  reduced = [math.prod(c.shape) for c in found if c.kind in ('reduce-scatter', 'all-reduce')]
  assert reduced and max(reduced) <= 4 * 64 * 2  # a, of all layers
  assert max(math.prod(c.shape) for c in found if c.kind == 'all-gather') >= 64 * 256


@pytest.mark.slow
def test_updates_that_bfloat16_kernels_cannot_hold_count():
  base = DecoderOnlyModel(
    config(dtype='bfloat16', dropout_rate=0.0, num_layers=1, logits_via_embedding=False)
  )
  model = LoraModel(base, rank=1, alpha=1.0, pattern=r'logits_dense/projection/kernel')
  params, _ = split_names(model.init(jax.random.key(0), None))
  logits = params['logits_dense']['projection']
  logits['kernel'] = jax.numpy.ones_like(logits['kernel'])
  logits['lora_b'] = jax.numpy.full_like(logits['lora_b'], 1e-3)  # of a kernel of 1: below 2^-8
  tokens = jax.numpy.arange(1, 9)[None]
  rows = {'decoder_input_tokens': tokens, 'decoder_target_tokens': tokens}
  merged = model.merged(params)['logits_dense']['projection']['kernel'].astype('bfloat16')
  assert (merged == 1).all()
  moved = jax.jit(model.logits)(params, rows) - jax.jit(base.logits)(
    {**params, 'logits_dense': {'projection': {'kernel': logits['kernel']}}}, rows
  )
  assert np.abs(moved).max() > 1e-4


@pytest.mark.parametrize(
  'model',
  [
    dict(pattern=r'.*/quary/kernel'),
    dict(also_train=r'clasifier/.*'),
    dict(rank=0),
    dict(pattern='('),
  ],
)
def test_impossible_options_are_refused(model):
  with raises(ModelError) as e:
    shapes(LoraModel(FAMILIES['classifier'], **model))
  assert e.value.parameters


def test_experts_have_no_adapters():
  model = DecoderOnlyModel(config(num_experts=2))
  with raises(ModelError):
    shapes(LoraModel(model, pattern=ALL))
  shapes(LoraModel(model, pattern=r'.*attention/.*/kernel'))
