"""Steps that are skipped: state untouched bit by bit, counted, their batches written."""

import functools
import json

import jax
import numpy as np
import pytest

from t5x_gpu.errors import ConfigError
from t5x_gpu.training.spikes import LEAST_NORMS, WINDOW, SpikeConfig, choose, group_norms
from tests.helpers_train import TINY_GIN, WATCHED_BATCHES, Project
from tests.messages import raises

# In batches of $SPIKES the weights say so, and the model makes the loss of each row NaN.
SPIKY = '''"""Batches of synthetic and a model whose loss the batches in $SPIKES spoil."""

import os

import jax.numpy as jnp

from t5x_gpu.data import synthetic as _inner
from t5x_gpu.models.decoder_only import DecoderOnlyModel

_MARK = 7


def before(number):
  pass


class SpikyModel(DecoderOnlyModel):

  def head(self, params, x, batch, **options):
    sums = super().head(params, x, batch, **options)
    spoilt = jnp.any(batch['decoder_loss_weights'] == _MARK)
    factor = jnp.where(spoilt, float(os.environ.get('FACTOR', 'nan')), 1.0)
    total, weight = sums['loss']
    return {**sums, 'loss': (total * factor, weight)}

''' + WATCHED_BATCHES.replace(
  '    return next(self._batches)\n',
  """    batch = dict(next(self._batches))
    if str(self._taken) in os.environ.get('SPIKES', '').split(','):
      weights = batch['decoder_loss_weights'].copy()
      weights[-int(os.environ.get('SPIKED_ROWS', 0)):] = _MARK  # 0: all rows
      batch['decoder_loss_weights'] = weights
    return batch
""",
)
MODEL = """
import spiky_data
MODEL = @spiky_data.SpikyModel()
spiky_data.SpikyModel.config = @config.TransformerConfig()
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
  (tmp_path / 'spiky_data.py').write_text(SPIKY)
  monkeypatch.syspath_prepend(tmp_path)
  return Project(tmp_path, gin=TINY_GIN.replace('DATA_MODULE =', MODEL + 'DATA_MODULE ='))


@functools.cache
def compiled(config):
  return jax.jit(config.decide)


def decide(config, loss, norm, norms):
  skip, after = compiled(config)(np.float32(loss), np.float32(norm), norms)
  return bool(skip), after if after is None else np.asarray(after)


@pytest.mark.parametrize('loss, norm', [(np.nan, 1.0), (1.0, np.inf), (np.inf, np.nan)])
def test_a_step_that_is_not_finite_is_skipped_and_leaves_the_history(loss, norm):
  config = SpikeConfig(skip_above=5.0)
  norms = config.norms_on(jax.sharding.SingleDeviceSharding(jax.devices()[0]), [1.0, 2.0])
  skip, after = decide(config, loss, norm, norms)
  assert skip and np.array_equal(after, norms, equal_nan=True)
  assert decide(SpikeConfig(skip_nonfinite=True), loss, norm, None) == (True, None)


def test_a_norm_is_compared_with_the_median_of_the_last_ones():
  config = SpikeConfig(skip_above=5.0)
  norms = np.asarray(config.no_norms())
  for number in range(LEAST_NORMS):  # too few to compare with
    skip, norms = decide(config, 1.0, 100.0 if number < 4 else 1.0, norms)
    assert not skip
  assert decide(config, 1.0, 5.01, norms)[0] and not decide(config, 1.0, 4.99, norms)[0]
  for _ in range(WINDOW):
    _, norms = decide(config, 1.0, 3.0, norms)
  assert not decide(config, 1.0, 14.9, norms)[0] and decide(config, 1.0, 15.1, norms)[0]


def test_the_old_state_is_chosen_bit_by_bit():
  bits = np.array([0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32)
  old = {'x': bits.view(np.float32)}
  new = {'x': np.full(3, np.nan, np.float32)}
  kept = jax.jit(choose)(np.bool_(True), old, new)['x']
  assert np.array_equal(np.asarray(kept).view(np.uint32), bits)


def test_norms_of_groups_add_up_to_the_global_norm():
  grads = {'layers': {'mlp': np.array([3.0]), 'attention': np.array([4.0])}, 'norm': np.ones(4)}
  assert group_norms(grads, 1) == {'grad_norm/layers': 5.0, 'grad_norm/norm': 2.0}
  assert group_norms(grads, 2) == {
    'grad_norm/layers/attention': 4.0,
    'grad_norm/layers/mlp': 3.0,
    'grad_norm/norm': 2.0,
  }


@pytest.mark.parametrize(
  'settings',
  [dict(skip_above=1.0), dict(most_in_a_row=0), dict(group_depth=0), dict(most_dumps=-1)],
)
def test_wrong_settings_are_errors(settings):
  with raises(ConfigError) as error:
    SpikeConfig(**settings)
  assert error.value.parameters


SKIP = '--gin.spikes.SpikeConfig.skip_nonfinite=True'


TWO_LAYERS = 'TransformerConfig.num_layers=2'
LAYOUTS = {
  'fsdp': ('fsdp',),
  'pp': ('pp', TWO_LAYERS),
  'dp': ('dp',),
  'tp': ('tp',),
  'zero1': ('zero1',),
  'gpipe': ('pp', TWO_LAYERS, "Partitioner.pipeline_schedule='gpipe'"),
  'circular': (
    'pp',
    'TransformerConfig.num_layers=4',
    "Partitioner.pipeline_schedule='circular'",
    'Partitioner.pipeline_repeats=2',
  ),
  'pp_3d': ('pp', TWO_LAYERS, 'Partitioner.fsdp=2', 'Partitioner.num_partitions=2'),
  'pp_cp': ('pp', TWO_LAYERS, 'Partitioner.context=2'),
}
QUICK = ('fsdp',)


@pytest.mark.parametrize(
  'layout', [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in LAYOUTS]
)
def test_a_skipped_step_changes_nothing_but_the_count(project, monkeypatch, layout):
  parallel, *settings = LAYOUTS[layout]
  text = project.gin_file.read_text()
  project.gin_file.write_text(text.replace('parallel/dp.gin', f'parallel/{parallel}.gin'))
  monkeypatch.setenv('SPIKES', '4')
  monkeypatch.setenv('SPIKED_ROWS', '1')  # all devices skip what one row of one of them spoils
  flags = [SKIP, '--gin.spikes.SpikeConfig.group_depth=1', '--gin.NUM_MICROBATCHES=2']
  flags += [f'--gin.{setting}' for setting in settings]
  result = project.run(*flags, DATA_MODULE='spiky_data', TRAIN_STEPS=6, BATCH_SIZE=16)
  assert result.code == 0, result.err
  norms = project.metrics('train/param_norm')
  assert norms[4] == norms[3] != norms[5]
  assert project.metrics('train/skipped') == {1: 0, 2: 0, 3: 0, 4: 1, 5: 0, 6: 0}
  assert project.metrics('train/skipped_steps')[6] == 1
  assert 4 not in project.metrics('train/loss') and 5 in project.metrics('train/loss')
  assert 'Step 4 is skipped: ' in result.err
  groups = {
    name: project.metrics(name)
    for line in (project.model_dir / 'metrics.jsonl').read_text().splitlines()
    for name in json.loads(line)
    if name.startswith('train/grad_norm/')
  }
  assert len(groups) > 1 and all(set(steps) == {1, 2, 3, 5, 6} for steps in groups.values())
  whole = project.metrics('train/grad_norm')
  for step, norm in whole.items():  # the parts of a norm
    assert norm**2 == pytest.approx(sum(part[step] ** 2 for part in groups.values()), rel=1e-4)
  folder = project.model_dir / 'spikes' / 'step_00000004'
  with np.load(folder / 'process_0.npz') as batch:
    weights = batch['decoder_loss_weights']
  assert (weights[-1] == 7).all() and (weights[:-1] != 7).all()
  text = (folder / 'process_0.txt').read_text()
  assert text.startswith('step 4: ') and len(text.splitlines()) > 8


@pytest.mark.slow
def test_too_many_skipped_steps_in_a_row_stop_the_run(project, monkeypatch):
  monkeypatch.setenv('SPIKES', '2,3')
  flags = (SKIP, '--gin.spikes.SpikeConfig.most_in_a_row=2')
  result = project.run(*flags, DATA_MODULE='spiky_data', TRAIN_STEPS=6)
  assert result.code == 1
  assert '2 steps up to step 3 were skipped in a row' in result.err


@pytest.mark.slow
def test_the_history_of_norms_survives_a_resume(project, monkeypatch):
  # Step 25 spikes: five steps after the resume, which alone would be too few to compare with.
  monkeypatch.setenv('FACTOR', '50')
  flags = ('--gin.spikes.SpikeConfig.skip_above=10', '--gin.schedules.cosine.total_steps=30')
  straight = project.folder / 'straight'
  for steps, spike, folder in ((30, 25, straight), (20, 0, None), (30, 5, None)):
    monkeypatch.setenv('SPIKES', str(spike))
    macros = dict(DATA_MODULE='spiky_data', TRAIN_STEPS=steps)
    result = project.run(*flags, **macros, **({'MODEL_DIR': folder} if folder else {}))
    assert result.code == 0, result.err
  for key in ('train/skipped', 'train/loss', 'train/grad_norm'):
    assert project.metrics(key) == project.metrics(key, model_dir=straight)
  skipped = project.metrics('train/skipped')
  assert [step for step, share in skipped.items() if share] == [25]
