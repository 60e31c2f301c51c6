"""parity says ok where the two runs are the same, and names the place where they are not."""

import dataclasses
import json
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu import parity
from t5x_gpu.data.batches import BatchSpec, DatasetConfig
from t5x_gpu.data.synthetic import MAX_WEIGHT, uneven_batches
from t5x_gpu.errors import ConfigError, MeshError, OutOfMemoryError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.transformer import TransformerLayer
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.hardware import Limit, RunLimits
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training import memory
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import bytes_per_device
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.train_step import StepConfig
from tests.helpers_train import REPOSITORY, TINY_GIN, compiled_kept_in, run_here
from tests.messages import raises

ROWS = DatasetConfig('no_such_task', {'targets': 8}, 'train', batch_size=8)
# A user's own model file: four residual layers of two modules, and mistakes to switch on that only
# a mesh of several devices makes. `shift` cancels in the softmax: its gradient is rounding alone.
USER_MODEL = """
import dataclasses

import jax
import jax.numpy as jnp

from t5x_gpu.models.losses import cross_entropy
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.axis_rules import NamedParam, shard

VOCAB, EMBED, HIDDEN, LAYERS = 32, 16, 32, 4
SHAPES = {
    'token_embedder': {'embedding': ((VOCAB, EMBED), ('vocab', 'embed'))},
    'layers': {
        'mix': {'kernel': ((LAYERS, EMBED, EMBED), ('layers', None, 'embed'))},
        'mlp': {'wi': ((LAYERS, EMBED, HIDDEN), ('layers', 'embed', 'mlp')),
                'wo': ((LAYERS, HIDDEN, EMBED), ('layers', 'mlp', 'embed'))}},
    'head': {'kernel': ((EMBED, VOCAB), ('embed', 'vocab')), 'shift': ((1,), (None,))},
}


def on_a_mesh():
  return jax.sharding.get_abstract_mesh().size > 1


@jax.custom_vjp
def half_gradient(x):
  return x


half_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / 2,))


@dataclasses.dataclass(frozen=True)
class UserModel(Model):
  mistake: str = ''
  dtype: str = 'bfloat16'

  def has(self, mistake):
    return self.mistake == mistake and on_a_mesh()

  num_outcomes = VOCAB

  def feature_converter(self, task_feature_lengths):
    return 'lm'

  def init(self, rng, spec):
    def draw(shape_and_names):
      shape, names = shape_and_names
      key = jax.random.fold_in(rng, sum(shape))
      scale = 0.0 if shape == (1,) else shape[-2] ** -0.5
      return NamedParam(scale * jax.random.normal(key, shape), names)
    return jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))

  def embed(self, params, batch, *, dropout_key=None):
    x = params['token_embedder']['embedding'].astype(self.dtype)[batch['decoder_input_tokens']]
    return x * 1.001 if self.has('embedding') else x

  def run_layers(self, params, x, batch, *, dropout_key=None, first_layer=0):
    layers = params['layers']
    for i in range(layers['mix']['kernel'].shape[0]):
      number = first_layer + i
      mix, wi, wo = (w[i].astype(self.dtype) for w in (
          layers['mix']['kernel'], layers['mlp']['wi'], layers['mlp']['wo']))
      if self.has('gradient'):
        mix = jnp.where(number == 1, half_gradient(mix), mix)
      if self.has('weight'):
        wo = wo * jnp.where(number == 2, 1.001, 1)
      if self.has('backward'):
        x = jnp.where(number == 1, half_gradient(x), x)
      x = shard(x + jnp.tanh(x @ mix), 'batch', 'length', 'embed')
      h = shard(jnp.tanh(x @ wi), 'batch', 'length', 'mlp') @ wo
      x = shard(x + h, 'batch', 'length', 'embed')
    return x

  def head(self, params, x, batch, *, dropout_key=None):
    head = params['head']
    logits = (x @ head['kernel'].astype(self.dtype)).astype(jnp.float32) + head['shift']
    logits = logits * 1.001 if self.has('head') else logits
    return cross_entropy(logits, batch['decoder_target_tokens'], batch['decoder_loss_weights'])
"""
USER_GIN = """
from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
import a_users_model

include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'

MODEL = @a_users_model.UserModel()
MODEL_DIR = 'model'
TRAIN_STEPS = 10
BATCH_SIZE = 8
MIXTURE_OR_TASK_NAME = 'no_such_task'
TASK_FEATURE_LENGTHS = {'targets': 8}
"""
TINY = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32, dropout_rate=0.0
)
TINY_FLAGS = ('--gin.TransformerConfig.num_layers=2', "--gin.TASK_FEATURE_LENGTHS={'targets': 16}")


@pytest.fixture(scope='module', autouse=True)
def compiled(tmp_path_factory):
  """One device's step is the same in many of these tests, and is compiled once."""
  with compiled_kept_in(tmp_path_factory.mktemp('compiled')):
    yield


@pytest.fixture(scope='module')
def user_model():
  module = types.ModuleType('a_users_model')
  sys.modules[module.__name__] = module  # dataclasses look there
  exec(USER_MODEL, module.__dict__)
  yield module.UserModel
  del sys.modules[module.__name__]


def report_of(
  model, *, partitioner=Partitioner(), num_devices=8, steps=2, optimizer=None, **options
):
  config = StepConfig(
    model=model,
    optimizer=optimizer or AdamW(weight_decay=0.1),
    partitioner=partitioner,
    max_grad_norm=0.1,
    **{'learning_rate': constant(1e-2), 'train_dataset_cfg': ROWS, **options},
  )
  programs = parity.build(
    config, topology=Topology(1, num_devices), devices=jax.devices()[:num_devices]
  )
  return parity.parity(programs, num_steps=steps)


@pytest.mark.slow
@pytest.mark.parametrize(
  'flags',
  [
    ('--gin.Partitioner.data=1', '--gin.Partitioner.fsdp=4', '--gin.Partitioner.context=2'),
    pytest.param(
      (
        '--gin.NUM_PARTITIONS=2',
        '--gin.OPTIMIZER=@adafactor.Adafactor()',
        '--hosts=2',
        '--gin.DROPOUT_RATE=0.1',
        '--gin.NUM_MICROBATCHES=2',
      ),
      marks=pytest.mark.slow,
    ),
  ],
  ids=['fsdp4-context2-adamw', 'data4-model2-adafactor-dropout-accumulation'],
)
def test_a_shipped_model_trains_on_a_mesh_as_on_one_device(flags, tmp_path):
  gin_file, out = tmp_path / 'tiny.gin', tmp_path / 'out.json'
  gin_file.write_text(
    'from t5x_gpu.training import adafactor\n'.join(
      TINY_GIN.partition('from t5x_gpu.data import batches\n')[::2]
    ).replace(
      'from t5x_gpu.models import config',
      'from t5x_gpu.data import batches\nfrom t5x_gpu.models import config',
      1,
    )
  )
  result = run_here(
    lambda: parity.main([f'--gin_file={gin_file}', *TINY_FLAGS, *flags, f'--json={out}'])
  )
  assert result.code == 0, result.out + result.err
  assert result.out.splitlines()[-1].startswith('parity: ok, worst ')
  found = json.loads(out.read_text())
  assert found['ok'] and len(found['steps']) == 3 and found['rounding'] == []
  for step in found['steps']:
    assert step['mesh']['loss'] != found['steps'][step['step'] % 3]['mesh']['loss']
    assert [row['name'] for row in step['layers']] == ['embed', 'layers/0', 'layers/1', 'head']
    assert all(0 <= row[of] < 1e-5 for row in step['layers'] for of in ('output', 'gradient'))
    for kind in ('gradient', 'update', 'optimizer_state'):
      assert 0 <= max(max(by_layer) for by_layer in step[kind].values()) < 1e-5
  assert len(found['steps'][0]['gradient']['layers/mlp/wo/kernel']) == 2, 'one number per layer'


@pytest.mark.slow
@pytest.mark.parametrize(
  'model, lengths',
  [
    (EncoderModel(TINY, head_type='regression', pooling='mean'), {'inputs': 8}),
    (DpoModel(DecoderOnlyModel(TINY)), {'targets': 16}),
    (DpoModel(LoraModel(DecoderOnlyModel(TINY), rank=2, pattern=r'.*/kernel')), {'targets': 16}),
  ],
  ids=['regression', 'dpo', 'dpo_lora'],
)
def test_a_model_without_the_loss_of_tokens_trains_on_a_mesh_as_on_one_device(model, lengths):
  rows = dataclasses.replace(ROWS, task_feature_lengths=lengths, pack='targets' in lengths)
  mesh = Partitioner(num_partitions=2, fsdp=2)
  report = report_of(model, partitioner=mesh, train_dataset_cfg=rows)
  assert report.failure is None, report.failure
  assert report.worst[0] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
  'partitioner',
  [pytest.param(Partitioner(), marks=pytest.mark.slow), Partitioner(num_partitions=2)],
  ids=['data8', 'data4-model2'],
)
def test_a_gradient_of_rounding_alone_is_not_a_failure(user_model, partitioner):
  report = report_of(user_model(), partitioner=partitioner)
  assert report.failure is None, report.failure
  assert report.worst[0] < 1e-5
  shift = next(d for d in report.steps[0].gradient if d.leaf.name() == 'head/shift')
  assert shift.worst > 1e-5, 'the test needs a gradient that cancels'
  assert report.rounding == ('gradient of head/shift',)
  assert report.sentence().endswith('; 1 more within rounding')


@pytest.mark.quick_cases('weight-*')
@pytest.mark.parametrize(
  'mistake, what, error, how',
  [
    ('embedding', 'output of embed', 1e-3, 'look at the embedding.'),
    (
      'weight',
      'output of layers/2',
      None,
      'the output of layers/1, agrees. Of its parameters, the gradient of layers/2/mlp/',
    ),
    ('head', 'loss of the head', None, 'The outputs of all layers agree: look at head and loss.'),
    (
      'backward',
      'gradient of the output of layers/0',
      0.5,
      'agree, and the gradients as far back as layers/1: its backward pass differs.',
    ),
    (
      'gradient',
      'gradient of layers/1/mix/kernel',
      0.5,
      'The outputs of all layers and their gradients agree',
    ),
  ],
)
def test_a_mistake_of_the_model_is_named_by_layer_or_parameter(
  user_model, mistake, what, error, how
):
  report = report_of(user_model(mistake=mistake), steps=1)
  assert (report.failure.step, report.failure.what) == (1, what)
  assert how in report.failure.how
  if error is None:
    assert 1e-4 < report.failure.error < 1e-2
  else:
    assert report.failure.error == pytest.approx(error, rel=0.2)
  assert report.sentence().startswith(f'parity: FAILED at step 1: first divergence: {what}, ')


@pytest.mark.slow
def test_layers_are_compared_in_the_order_of_the_model():
  """Stages of a circular pipeline hold them in another."""
  config = TransformerConfig(
    vocab_size=32, num_layers=4, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32, dropout_rate=0.1
  )
  report = report_of(
    DecoderOnlyModel(config),
    steps=1,
    partitioner=Partitioner(
      stage=2, pipeline_schedule='circular', pipeline_repeats=2, num_pipeline_microbatches=2
    ),
  )
  assert report.failure is None, report.failure
  assert [d.name for d in report.steps[0].layers] == [
    'embed',
    'layers/0',
    'layers/1',
    'layers/2',
    'layers/3',
    'head',
  ]
  assert all(d.output < 1e-5 and d.gradient < 1e-5 for d in report.steps[0].layers)


class Mistaken(TransformerLayer):
  """Whose second layer, of the decoder, gets 0.1% more on a mesh."""

  def __call__(self, x, shared, dropout_rng, number=0, caches=None):
    if shared.cross_attention is not None and jax.sharding.get_abstract_mesh().size > 1:
      x = x * jnp.where(number == 1, 1.001, 1)
    return super().__call__(x, shared, dropout_rng, number, caches)


OF_BOTH = TransformerConfig(
  vocab_size=32, num_layers=2, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=32
)
PAIRS = DatasetConfig('no_such_task', {'inputs': 8, 'targets': 6}, 'train', batch_size=16)


@pytest.mark.parametrize(
  'partitioner, options',
  [
    pytest.param(Partitioner(), {'num_devices': 2}, marks=pytest.mark.slow),
    pytest.param(
      Partitioner(stage=2, pipeline_schedule='gpipe', num_pipeline_microbatches=2),
      {'num_devices': 2},
      marks=pytest.mark.slow,
    ),
    pytest.param(Partitioner(fsdp=4), {'num_microbatches': 2}, marks=pytest.mark.slow),
  ],
  ids=['data2', 'stage2', 'data2-fsdp4-accumulation'],
)
def test_a_mistake_of_an_encoder_decoder_is_named_by_stack_and_layer(partitioner, options):
  report = report_of(
    EncoderDecoderModel(OF_BOTH, layer=Mistaken),
    partitioner=partitioner,
    train_dataset_cfg=PAIRS,
    steps=1,
    **options,
  )
  layers = {d.name: d for d in report.steps[0].layers}
  assert list(layers) == [
    'embed',
    'encoder/layers/0',
    'encoder/layers/1',
    'decoder/layers/0',
    'decoder/layers/1',
    'head',
  ]
  assert all(layers[name].output < 1e-5 for name in list(layers)[:4])
  assert report.failure.what == 'output of decoder/layers/1'
  assert 1e-4 < report.failure.error < 1e-2
  assert 'the output of decoder/layers/0, agrees. Of its parameters, the gradient of ' in (
    report.failure.how
  )
  assert 'decoder/layers/1/' in report.failure.how.partition('Of its parameters')[2]


@pytest.mark.slow
def test_both_stacks_are_compared_in_the_order_of_the_model():
  """Stages of a circular pipeline hold the layers of each in another."""
  model = EncoderDecoderModel(dataclasses.replace(OF_BOTH, num_layers=4, dropout_rate=0.1))
  report = report_of(
    model,
    steps=1,
    train_dataset_cfg=PAIRS,
    partitioner=Partitioner(
      stage=2, pipeline_schedule='circular', pipeline_repeats=2, num_pipeline_microbatches=2
    ),
  )
  assert report.failure is None, report.failure
  assert [d.name for d in report.steps[0].layers[1:-1]] == [
    f'{stack}/layers/{i}' for stack in ('encoder', 'decoder') for i in range(4)
  ]
  assert all(d.output < 1e-5 and d.gradient < 1e-5 for d in report.steps[0].layers)


@pytest.mark.slow
def test_of_a_model_that_is_one_function_the_worst_gradient_is_named(user_model):
  class OneFunction(user_model):
    embed = run_layers = property()  # hasattr() says no

    def loss(self, params, batch, **dropout):
      model = user_model(self.mistake, self.dtype)
      return model.loss(params, batch)

  report = report_of(OneFunction(mistake='weight'), steps=1)
  assert report.steps[0].layers == []
  assert report.failure.what.startswith('gradient of ')
  assert 'cannot be run layer by layer (embed, run_layers, head)' in report.failure.how


@pytest.mark.slow
def test_an_optimizer_that_updates_otherwise_on_a_mesh_is_named(user_model):
  class Mistaken(AdamW):
    """Makes the update of one parameter 0.1% too large on a mesh."""

    def update(self, grads, state, params, **kwargs):
      new, state = super().update(grads, state, params, **kwargs)
      if jax.sharding.get_abstract_mesh().size > 1:
        old, wrong = params['layers']['mix']['kernel'], new['layers']['mix']
        wrong['kernel'] = old + (wrong['kernel'] - old) * jnp.array([1, 1, 1, 1.001]).reshape(
          4, 1, 1
        )
      return new, state

  report = report_of(user_model(), optimizer=Mistaken())
  assert report.failure.what == 'update of layers/3/mix/kernel'
  assert report.failure.error == pytest.approx(1e-3, rel=0.1)


@pytest.mark.slow
def test_a_learning_rate_that_depends_on_the_mesh_is_named(user_model):
  def schedule(step):
    return 1e-2 * (8 if jax.sharding.get_abstract_mesh().size > 1 else 1) + 0 * step

  report = report_of(user_model(), learning_rate=schedule)
  assert (report.failure.what, report.failure.error) == ('learning_rate', pytest.approx(7))


@pytest.mark.slow
def test_the_command_fails_on_a_users_model_file(tmp_path):
  (tmp_path / 'a_users_model.py').write_text(USER_MODEL)
  (tmp_path / 'my.gin').write_text(USER_GIN)
  environment = {k: v for k, v in os.environ.items() if k not in ('XLA_FLAGS', 'JAX_PLATFORMS')}
  done = subprocess.run(
    [
      sys.executable,
      '-m',
      't5x_gpu.parity',
      '--gin_file=my.gin',
      '--devices=4',
      '--steps=1',
      '--gin.UserModel.mistake=weight',
    ],
    cwd=tmp_path,
    capture_output=True,
    text=True,
    timeout=300,
    env={**environment, 'PYTHONPATH': str(REPOSITORY)},
  )
  assert done.returncode == 1, done.stdout + done.stderr
  assert done.stderr == ''
  assert 'data      4' in done.stdout and 'in float32' in done.stdout
  assert done.stdout.splitlines()[-1].startswith(
    'parity: FAILED at step 1: first divergence: output of layers/2, '
  )
  rows = done.stdout.partition('gradient of it\n')[2].split('\n\n')[0].splitlines()
  assert [row.split('  ')[0] for row in rows] == [
    'embed',
    'layers/0',
    'layers/1',
    'layers/2',
    'layers/3',
    'head (loss)',
  ]


def test_a_dry_run_compiles_nothing(tmp_path, capsys):
  gin_file = tmp_path / 'tiny.gin'
  gin_file.write_text(TINY_GIN)
  assert parity.main([f'--gin_file={gin_file}', '--dry_run', '--devices=4', '--hosts=2']) == 0
  printed = capsys.readouterr().out
  assert 'mesh: 2 hosts x 2 CPU devices' in printed and 'parity:' not in printed
  assert 'relative tolerance 1e-05' in printed


@pytest.mark.slow
def test_fp8_with_fsdp_accumulation_and_remat_is_within_its_band(tmp_path):
  gin_file, out = tmp_path / 'tiny.gin', tmp_path / 'out.json'
  gin_file.write_text(TINY_GIN)
  layout = ('--gin.Partitioner.fsdp=4', '--gin.NUM_MICROBATCHES=2', '--gin.BATCH_SIZE=16')
  model = ('--gin.PRECISION=fp8', "--gin.TransformerConfig.remat_policy='full'")
  flags = [f'--gin_file={gin_file}', *TINY_FLAGS, *layout, *model, '--steps=1', f'--json={out}']
  result = run_here(lambda: parity.main(flags))
  assert result.code == 0, result.out + result.err
  assert 'in FP8 and float32' in result.out and 'relative tolerance 0.0625' in result.out
  [step] = json.loads(out.read_text())['steps']
  errors = [row[of] for row in step['layers'] for of in ('output', 'gradient')]
  assert max(errors) < parity.FP8_TOLERANCE
  # A run in bfloat16 around the products would be further away than float32 is.
  assert np.median(errors) < 1e-5, errors


def test_gradients_sent_in_bfloat16_have_their_own_tolerance(tmp_path, capsys):
  gin_file = tmp_path / 'tiny.gin'
  gin_file.write_text(TINY_GIN)
  binding = "--gin.Partitioner.gradient_dtype='bfloat16'"
  assert parity.main([f'--gin_file={gin_file}', binding, '--dry_run']) == 0
  assert 'relative tolerance 0.03125' in capsys.readouterr().out


@pytest.mark.parametrize(
  'flags, error',
  [
    (['--steps=0'], ConfigError),
    (['--tolerance=nan'], ConfigError),
    (['--hosts=3'], ConfigError),
    (['--devices=0'], ConfigError),
    (['--devices=16'], MeshError),
    (['--real'], MeshError),
  ],
)
def test_what_cannot_be_compared_is_refused(flags, error, monkeypatch):
  monkeypatch.setenv('XLA_FLAGS', os.environ['XLA_FLAGS'])  # put back afterwards
  with raises(error):
    parity.main(['--gin_file=gin_configs/examples/demo.gin', *flags])


def test_float32_reaches_every_dtype_of_a_model():
  config = TransformerConfig(
    vocab_size=8, num_layers=1, embed_dim=8, num_heads=1, head_dim=8, mlp_dim=8, dtype='bfloat16'
  )
  model, found = parity.in_float32(DecoderOnlyModel(config))
  assert found and model.config.dtype == 'float32'
  assert parity.in_float32(object())[1] is False


def test_uneven_batches_have_ragged_rows_and_unequal_weights():
  spec = BatchSpec(
    shapes=dict.fromkeys(
      ('decoder_target_tokens', 'decoder_input_tokens', 'decoder_loss_weights'), (8, 16)
    ),
    dtypes=dict.fromkeys(
      ('decoder_target_tokens', 'decoder_input_tokens', 'decoder_loss_weights'), 'int32'
    ),
    vocab_sizes={'decoder_target_tokens': 9},
  )
  first, second = uneven_batches(spec, seed=3, num_batches=2)
  for batch in (first, second):
    spec.check(batch)
    real = batch['decoder_target_tokens'] > 0
    lengths = real.sum(1)
    assert lengths[-1] == 0 and len(set(lengths)) > 3
    assert (real == (np.arange(16) < lengths[:, None])).all(), 'padding comes after the tokens'
    assert (batch['decoder_loss_weights'][~real] == 0).all()
    assert set(batch['decoder_loss_weights'][real]) == set(range(1, MAX_WEIGHT + 1))
  assert (first['decoder_target_tokens'] != second['decoder_target_tokens']).any()
  again = uneven_batches(spec, seed=3, num_batches=2)[1]
  assert all((again[name] == x).all() for name, x in second.items())


@pytest.mark.process  # platform.processor() may call uname
@pytest.mark.parametrize('flags', [(), ('--dry_run',)], ids=str)
def test_a_model_larger_than_the_memory_is_refused_before_it_compiles(flags):
  argv = ['--gin_file=gin_configs/examples/demo.gin', f'--gin.TransformerConfig.mlp_dim={2**36}']
  result = run_here(lambda: parity.main([*argv, *flags]))
  assert result.code == 1 and 'Traceback' not in result.err
  assert 'OutOfMemoryError: A step on 8 CPU devices needs ' in result.err
  assert 'Compare a smaller model' in result.err and 'num_microbatches' not in result.err


@pytest.mark.slow
def test_the_one_device_that_a_mesh_is_compared_with_needs_memory_too(monkeypatch):
  """Split over the mesh the state fits; whole it does not."""
  config = StepConfig(
    model=DecoderOnlyModel(
      TransformerConfig(
        vocab_size=64, num_layers=1, embed_dim=16, num_heads=2, head_dim=8, mlp_dim=2**16
      )
    ),
    optimizer=AdamW(),
    partitioner=Partitioner(data=1, fsdp=8),
    train_dataset_cfg=ROWS,
    learning_rate=constant(1e-2),
  )
  programs = parity.build(config, topology=Topology(1, 8, 'CPU device'), devices=jax.devices())
  mesh, one = (bytes_per_device(program.abstract_state) for program in programs)
  limit = RunLimits(Limit((mesh + one) // 2, 'a test'), None, 1)
  monkeypatch.setattr(memory, 'run_limits', lambda *args, **kwargs: limit)
  with raises(OutOfMemoryError):
    parity.check_memory_of_both(programs)
