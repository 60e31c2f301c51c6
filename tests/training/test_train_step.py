"""The step's answer does not depend on accumulation, mesh or padding."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError, MeshError, ModelError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.model import REQUIRED, Model
from t5x_gpu.partitioning.axis_rules import with_axes
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.schedules import constant
from tests.helpers_parity import OPTIMIZER, assert_same_steps, recorded
from tests.helpers_programs import build_with, program_of
from tests.messages import raises

CONFIG = dict(vocab_size=64, num_layers=2, embed_dim=16, num_heads=8, head_dim=4, mlp_dim=32)


class Partly(Model):
  """A custom model: the required members of a model, and the named optional ones."""

  def __init__(self, inner, members):
    for name in (*REQUIRED, 'loss', *members):
      setattr(self, name, getattr(inner, name))


class WithLoss(DecoderOnlyModel):
  """A model that overrides `loss`: two passes with different dropout, as in R-Drop."""

  def loss(self, params, batch, *, dropout_key=None):
    keys = [None if dropout_key is None else jax.random.fold_in(dropout_key, i) for i in range(2)]
    passes = [super(WithLoss, self).loss(params, batch, dropout_key=key) for key in keys]
    return jax.tree.map(lambda a, b: (a + b) / 2, *passes)


class Looped(DecoderOnlyModel):
  """A model that runs its layers twice."""

  def run_layers(self, params, x, batch, **options):
    for _ in range(2):
      x = super().run_layers(params, x, batch, **options)
    return x


class LoopedByJax(DecoderOnlyModel):
  """The same in a loop of JAX, which traces it once."""

  def run_layers(self, params, x, batch, **options):
    run = super().run_layers
    return jax.lax.fori_loop(0, 2, lambda _, x: run(params, x, batch, **options), x)


def build(
  num_devices=1,
  partitioner=Partitioner(),
  *,
  dropout_rate=0.0,
  optimizer=AdamW(),
  config=None,
  members=None,
  kind=DecoderOnlyModel,
  **options,
):
  config = {**CONFIG, 'dropout_rate': dropout_rate, **(config or {})}
  model = kind(TransformerConfig(**config), z_loss=1e-3)
  return build_with(
    model=model if members is None else Partly(model, members),
    optimizer=optimizer,
    learning_rate=constant(1e-2),
    partitioner=partitioner,
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'targets': 16},
    batch_size=16,
    pack=True,
    **options,
  )


def batches(count=3, seed=0):
  """Batches with very uneven padding: a mean of means would be another number."""
  rng = np.random.default_rng(seed)
  for _ in range(count):
    targets = rng.integers(1, 64, (16, 16)).astype(np.int32)
    targets[np.arange(16)[None] >= rng.integers(1, 17, 16)[:, None]] = 0
    targets[:4] = 0
    real = (targets > 0).astype(np.int32)
    yield {
      'decoder_target_tokens': targets,
      'decoder_loss_weights': real,
      'decoder_input_tokens': np.pad(targets, ((0, 0), (1, 0)))[:, :-1],
      'decoder_segment_ids': real,
      'decoder_positions': np.arange(16, dtype=np.int32) * real,
    }


def run(program):
  """Returns (losses, gradient norms, final parameters) of three steps."""
  state, losses, norms = program.init(), [], []
  for batch in batches():
    state, sums = program.train_step(state, program.layout.put_batch(batch))
    losses.append(float(sums['loss'][0] / sums['loss'][1]))
    norms.append(float(sums['grad_norm'][0]))
  return losses, norms, jax.device_get(state.params)


@pytest.fixture(scope='module')
def reference():
  return recorded(build(optimizer=OPTIMIZER))


@pytest.fixture(scope='module')
def reference_with_dropout():
  return recorded(build(optimizer=OPTIMIZER, dropout_rate=0.3))


@pytest.mark.slow
@pytest.mark.parametrize(
  'num_microbatches', [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 16))]
)
def test_accumulation_equals_the_full_batch(reference, num_microbatches):
  split = build(optimizer=OPTIMIZER, num_microbatches=num_microbatches)
  assert_same_steps(recorded(split), reference)


MESHES = {
  'data8': Partitioner(),
  'fsdp8': Partitioner(data=1, fsdp=8),
  'model8': Partitioner(num_partitions=8),
  'data2_fsdp2_model2': Partitioner(data=2, fsdp=2, num_partitions=2),
  'ici_dcn': Partitioner(ici_mesh_shape={'fsdp': 4, 'model': 2}),
}


# More layouts, and every gradient, in tests/parity/test_layouts.py.
@pytest.mark.parametrize(
  'mesh',
  [name if name == 'ici_dcn' else pytest.param(name, marks=pytest.mark.slow) for name in MESHES],
)
def test_every_mesh_equals_one_device_with_dropout_on(reference_with_dropout, mesh):
  spread = build(8, MESHES[mesh], optimizer=OPTIMIZER, dropout_rate=0.3)
  assert_same_steps(recorded(spread), reference_with_dropout)


@pytest.mark.slow  # tests/parity/test_layouts.py accumulates on a mesh, too
def test_accumulation_on_a_mesh_equals_the_full_batch_on_one_device(reference):
  mesh = MESHES['data2_fsdp2_model2']
  both = build(8, mesh, optimizer=OPTIMIZER, num_microbatches=4)
  assert_same_steps(recorded(both), reference)


@pytest.mark.slow
def test_initial_parameters_are_bit_identical_on_every_mesh():
  want = jax.device_get(build().init().params)
  for mesh in MESHES.values():
    got = jax.device_get(build(8, mesh).init().params)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.fixture(scope='module')
def plain():
  """A program that several tests take states from: initialization compiles as long as a step."""
  return build()


def test_average_per_sequence_is_the_mean_of_each_rows_mean_loss(plain):
  averaged = build(loss_normalizing_factor='AVERAGE_PER_SEQUENCE')
  params, batch = plain.init().params, next(batches())
  losses = []
  for row in range(16):
    own = np.where(np.arange(16)[:, None] == row, batch['decoder_loss_weights'], 0)
    sums = plain.eval_step(params, plain.layout.put_batch({**batch, 'decoder_loss_weights': own}))
    if float(sums['loss'][1]):
      losses.append(float(sums['loss'][0] / sums['loss'][1]))
  assert len(losses) == 12  # four rows are padding
  sums = averaged.eval_step(params, averaged.layout.put_batch(batch))
  assert float(sums['loss'][1]) == pytest.approx(12)
  assert float(sums['loss'][0]) == pytest.approx(sum(losses), rel=1e-5)
  _, trained = averaged.train_step(plain.init(), averaged.layout.put_batch(batch))
  assert float(trained['loss'][0]) == pytest.approx(sum(losses), rel=1e-5)


def test_gradients_are_divided_as_the_normalizer_says(plain):
  def norm(factor):
    program = build(loss_normalizing_factor=factor)
    _, sums = program.train_step(plain.init(), program.layout.put_batch(next(batches())))
    return float(sums['grad_norm'][0])

  total = norm(1.0)
  real = int(next(batches())['decoder_loss_weights'].sum())
  assert norm('NUM_TOTAL_TARGET_TOKENS') == pytest.approx(total / (16 * 16), rel=1e-5)
  assert norm('NUM_REAL_TARGET_TOKENS') == pytest.approx(total / real, rel=1e-5)


@pytest.mark.slow
def test_average_per_sequence_on_a_mesh_with_accumulation_equals_one_device():
  options = dict(optimizer=OPTIMIZER, loss_normalizing_factor='AVERAGE_PER_SEQUENCE')
  mesh = Partitioner(data=1, fsdp=2, context=2, num_partitions=2)
  split = build(8, mesh, num_microbatches=4, **options)
  assert_same_steps(recorded(split), recorded(build(**options)))


@pytest.mark.parametrize('name', ['AVERAGE_PER_SEQUENCES', 'num_total_target_tokens'])
def test_unknown_normalizer_is_refused_with_the_nearest_one(name):
  with raises(ConfigError):
    build(loss_normalizing_factor=name)


class PlainGradientDescent:
  """A custom optimizer without state; the step is learning rate x gradient."""

  def init(self, params, names):
    return ()

  def state_names(self, params, names):
    return ()

  def update(self, grads, state, params, *, names, learning_rate, step):
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), state


def test_gradients_are_clipped_to_the_global_norm_and_the_unclipped_norm_is_reported():
  program = build(max_grad_norm=1e-1, optimizer=PlainGradientDescent())
  state = program.init()
  before = jax.device_get(state.params)
  state, sums = program.train_step(state, program.layout.put_batch(next(batches())))
  moved = jax.tree.map(lambda a, b: ((a - b) ** 2).sum(), before, jax.device_get(state.params))
  np.testing.assert_allclose(np.sqrt(sum(jax.tree.leaves(moved))), 1e-2 * 1e-1, rtol=1e-3)
  assert float(sums['grad_norm'][0]) > 1.0


def test_an_all_padding_batch_changes_nothing_and_stays_finite():
  program = build(optimizer=Adafactor())
  state = program.init()
  before = jax.device_get(state.params)
  empty = {name: np.zeros_like(x) for name, x in next(batches()).items()}
  state, sums = program.train_step(state, program.layout.put_batch(empty))
  assert all(np.isfinite(float(s)) for s, _ in sums.values())
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)


@pytest.mark.slow
def test_bfloat16_keeps_parameters_and_optimizer_state_in_float32():
  program = build(config={'dtype': 'bfloat16'})
  dtypes = {str(x.dtype) for x in jax.tree.leaves(program.abstract_state)}
  assert dtypes == {'float32', 'int32'}
  losses, _, _ = run(program)
  np.testing.assert_allclose(losses, run(build())[0], rtol=5e-3)


def test_optimizer_state_is_split_like_its_parameters():
  program = build(8, Partitioner(data=1, fsdp=4, num_partitions=2), optimizer=AdamW())
  wi = program.abstract_state.params['layers']['mlp']['wi_0']['kernel']
  assert wi.sharding.shard_shape(wi.shape) == (2, 4, 16)
  moments = program.abstract_state.opt_state[0].mu['layers']['mlp']['wi_0']['kernel']
  assert moments.sharding == wi.sharding


def test_a_batch_that_does_not_divide_into_microbatches_is_refused_with_the_rule():
  with raises(ConfigError) as e:
    build(num_microbatches=3)
  assert len(e.value.problems) == 1


def test_everything_that_does_not_fit_the_mesh_comes_in_one_error():
  with raises(MeshError):
    build(
      8, Partitioner(num_partitions=4), config={'num_heads': 6, 'mlp_dim': 30, 'vocab_size': 63}
    )


@pytest.mark.slow
def test_learning_rate_scales_with_the_parts_of_the_batch_and_is_what_is_logged():
  program = build(8, Partitioner(data=2, fsdp=2, num_partitions=2), learning_rate_scaling='linear')
  assert program.learning_rate_factor == 4
  _, sums = program.train_step(program.init(), program.layout.put_batch(next(batches())))
  np.testing.assert_allclose(float(sums['learning_rate'][0]), 4 * 1e-2)


@pytest.mark.parametrize(
  'partitioner, parts',
  [
    (Partitioner(stage=2), ()),
    (Partitioner(fsdp=2), ()),
    (Partitioner(fsdp=2), ('embed', 'run_layers')),
  ],
)
def test_a_model_without_parts_is_refused_where_they_are_needed(partitioner, parts):
  with raises(ModelError):
    build(8, partitioner, members=parts, num_microbatches=2)


def test_accumulation_by_layer_works_without_a_config_or_optional_members(reference):
  parts = ('embed', 'run_layers', 'head')
  mesh = Partitioner(data=1, fsdp=2)
  by_layer = build(2, mesh, members=parts, optimizer=OPTIMIZER, num_microbatches=2)
  assert_same_steps(recorded(by_layer), reference)


@pytest.mark.parametrize('partitioner', [Partitioner(stage=2), Partitioner(fsdp=2)])
def test_a_custom_loss_is_refused_where_the_three_parts_would_replace_it(partitioner):
  with raises(ModelError):
    build(8, partitioner, kind=WithLoss, num_microbatches=2)


@pytest.mark.parametrize(
  'num_devices, partitioner',
  [
    (1, Partitioner()),
    pytest.param(
      2,
      Partitioner(data=1, fsdp=2, accumulate_by='microbatch', overlap_layers=True),
      marks=pytest.mark.slow,
    ),
  ],
)
def test_a_loss_that_runs_the_layers_twice_accumulates(num_devices, partitioner):
  """Gradients of earlier microbatches would be added in each pass over the layers."""
  options = dict(kind=WithLoss, optimizer=OPTIMIZER, dropout_rate=0.3)
  split = build(num_devices, partitioner, num_microbatches=4, **options)
  assert_same_steps(recorded(split), recorded(build(**options)))


@pytest.mark.parametrize('kind', [Looped, LoopedByJax])
def test_a_model_that_runs_its_layers_twice_is_refused(kind):
  program = build(kind=kind)
  with raises(ModelError):
    program.train_step(program.init(), program.layout.put_batch(next(batches())))


class Layer(nn.Module):
  """A user's layer, which returns `make(x, caches)`."""

  make: object
  config: object = None

  @nn.compact
  def __call__(self, x, shared, dropout_rng, number=0, caches=None):
    scale = self.param('scale', with_axes(nn.initializers.ones, ('embed',)), x.shape[-1:], x.dtype)
    return self.make(x * scale, caches)


@pytest.mark.parametrize(
  'make',
  [
    lambda x, caches: x,
    lambda x, caches: (x, caches),
    lambda x, caches: (x[..., :8], caches, None),
    lambda x, caches: (x.astype(jnp.int32), caches, None),
    lambda x, caches: (x, x, None),
    lambda x, caches: (x, caches, jnp.float32(0)),
  ],
  ids=['x', 'pair', 'shape', 'dtype', 'caches', 'router losses'],
)
def test_a_layer_whose_result_does_not_fit_the_next_layer_is_refused(make):
  @dataclasses.dataclass(frozen=True)
  class Model(DecoderOnlyModel):
    layer: object = lambda config: Layer(make)

  program = program_of(Model(TransformerConfig(**CONFIG)), {'targets': 16})
  with raises(ModelError):
    program.train_step.trace(program.abstract_state, program.abstract_batch)


class FlaxLayer(nn.Module):
  """A user's layer: a module of Flax, named like a module of TransformerLayer."""

  config: TransformerConfig

  @nn.compact
  def __call__(self, x, shared, dropout_rng, number=0, caches=None):
    init = with_axes(nn.initializers.lecun_normal(), ('embed', 'mlp'))
    y = nn.Dense(x.shape[-1], use_bias=False, dtype=x.dtype, kernel_init=init, name='wo')(x)
    return x + y, caches, None


def test_accumulation_by_layer_works_with_modules_of_flax():
  model = DecoderOnlyModel(TransformerConfig(**CONFIG, dtype='bfloat16'), layer=FlaxLayer)
  program = program_of(model, {'targets': 16}, num_microbatches=2, fsdp=2)
  program.train_step.trace(program.abstract_state, program.abstract_batch)


@pytest.mark.parametrize('wrong', ['loss', 'optimizer', 'schedule'])
def test_what_the_code_of_users_returns_is_checked_before_anything_compiles(wrong):
  class Model(DecoderOnlyModel):
    def head(self, *args, **kwargs):
      sums = super().head(*args, **kwargs)
      return sums['loss'] if wrong == 'loss' else sums

  class Optimizer(AdamW):
    def update(self, grads, state, params, **kwargs):
      updated = super().update(grads, state, params, **kwargs)
      return updated[0] if wrong == 'optimizer' else updated

  def factory(step):
    return constant(1e-2)

  program = build_with(
    model=Model(TransformerConfig(**CONFIG)),
    optimizer=Optimizer(),
    learning_rate=factory if wrong == 'schedule' else constant(1e-2),
    partitioner=Partitioner(),
    topology=Topology(1, 1),
    devices=jax.devices()[:1],
    task_feature_lengths={'targets': 16},
    batch_size=16,
    pack=True,
  )
  with raises(ModelError if wrong == 'loss' else ConfigError):
    program.train_step.trace(program.abstract_state, program.abstract_batch)
