"""T5X's optimizer state becomes ours: a run continues an imported checkpoint as T5X would."""

import flax.serialization
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from t5x_gpu import convert
from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.initialize import RestoreConfig, choose_origin
from t5x_gpu.checkpoint.model_dir import check_same_model
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.conversion.t5x_names import t5x_model, t5x_moments
from t5x_gpu.errors import CheckpointError
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.adafactor import Adafactor
from t5x_gpu.training.schedules import constant
from tests.conversion.t5x_params import ArraysInMemory, params_from_t5x
from tests.conversion.test_t5x import initial, stacked, with_heads_apart
from tests.helpers_programs import build_with
from tests.messages import raises
from tests.training.t5x_adafactor import T5xParameter
from tests.training.test_adafactor_t5x import TOLERANCE, drawn

LEARNING_RATE = 0.1
STEP = 7  # of the checkpoint
AXES = {
  'query/kernel': 'embed heads kv',
  'key/kernel': 'embed heads kv',
  'value/kernel': 'embed heads kv',
  'out/kernel': 'heads kv embed',
  'wi_0/kernel': 'embed mlp',
  'wi_1/kernel': 'embed mlp',
  'wo/kernel': 'mlp embed',
  'norm/scale': 'embed',
  'rel_embedding': 'heads relpos_buckets',
  'token_embedder/embedding': 'vocab embed',
  'logits_dense/kernel': 'embed vocab',
}


def of_t5x(flat, *, joined, scan_axis, beta1=None):
  """Returns path -> T5xParameter of T5X's parameters."""
  out = {}
  for path, value in flat.items():
    axes = next(a for end, a in AXES.items() if path.endswith(end)).split()
    if joined and 'kv' in axes:
      axes.remove('heads')
      axes[axes.index('kv')] = 'joined_kv'
    if scan_axis is not None and '/layers/' in path:
      axes.insert(scan_axis, 'layers')
    out[path] = T5xParameter(tuple(axes), value.shape, beta1)
  return out


def updated(parameters, values, states, grads, *, step):
  """Returns T5X's next (values, states)."""
  pairs = {
    path: p.update(values[path], grads[path], states[path], step=step, learning_rate=LEARNING_RATE)
    for path, p in parameters.items()
  }
  return {k: v for k, (v, _) in pairs.items()}, {k: s for k, (_, s) in pairs.items()}


def float32(flat):
  return {path: np.asarray(value, np.float32) for path, value in flat.items()}


def write(folder, kind, values, states):
  """Writes what T5X writes after STEP steps."""
  folder.mkdir(parents=True)
  target = flax.traverse_util.unflatten_dict(float32(values), sep='/')
  param_states = flax.traverse_util.unflatten_dict(
    {path: float32(state) for path, state in states.items()}, sep='/'
  )
  state = {'step': np.int32(STEP), 'param_states': param_states}
  if kind == 'legacy':
    tree = {'version': 3, 'optimizer': {'state': state, 'target': target}}
    (folder / 'checkpoint').write_bytes(flax.serialization.msgpack_serialize(tree))
  else:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
      checkpointer.save(folder / 'state', {'target': target, 'state': state})


def program_of(model, optimizer):
  return build_with(
    model=model,
    optimizer=optimizer,
    learning_rate=constant(LEARNING_RATE),
    partitioner=Partitioner(),
    topology=Topology(1, 1),
    devices=jax.devices()[:1],
    task_feature_lengths={'inputs': 8, 'targets': 8},
    batch_size=8,
    pack=False,
  )


def first_state(folder, model, program, model_dir):
  """Returns the first state of a run that starts from `folder` with new data."""
  start = choose_origin(RestoreConfig(str(folder), 'new_data'), program, saved=None)
  assert not start.takes_data
  with Checkpointer(str(model_dir)) as checkpointer:
    return start.first_state(checkpointer, program, None)[0]


@pytest.mark.quick_cases('decoder_only-scanned-*')
@pytest.mark.parametrize(
  'name, layers, joined, scan_axis, kind, beta1',
  [
    ('encoder_decoder', 'scanned', False, 1, 'orbax', None),
    ('encoder_decoder', 'scanned', True, 0, 'legacy', None),
    ('encoder_decoder', 'separate', False, None, 'legacy', 0.9),
    ('encoder_decoder', 'joined_heads', True, None, 'orbax', None),
    ('decoder_only', 'scanned', True, None, 'legacy', 0.9),  # sides of 128: no difference
  ],
)
def test_a_run_continues_an_imported_checkpoint_as_t5x(
  name, layers, joined, scan_axis, kind, beta1, tmp_path, capsys
):
  values = initial(name)
  if not joined:
    values = with_heads_apart(values, 4)
  if scan_axis is not None:
    values = stacked(values, scan_axis)
  parameters = of_t5x(values, joined=joined, scan_axis=scan_axis, beta1=beta1)
  rng = np.random.default_rng(0)

  def some_grads():
    return {path: drawn(rng, p.shape) for path, p in parameters.items()}

  states = {path: p.new_state() for path, p in parameters.items()}
  for step in (STEP - 2, STEP - 1):
    values, states = updated(parameters, values, states, some_grads(), step=step)
  write(tmp_path / f'checkpoint_{STEP}', kind, values, states)
  convert.main([f'--from={tmp_path}', f'--to={tmp_path / "ours"}', '--check=tensors'])
  out = ' '.join(capsys.readouterr().out.split())
  factored = sum(p.factored is not None for p in parameters.values())
  assert f'Adafactor.layers = {layers!r}' in out and 'moments read back: bit-identical' in out
  assert ('and momentum' in out) == (beta1 is not None)
  assert (factored > 0) == (layers != 'joined_heads')

  model = convert.model_of_gin([tmp_path / 'ours' / 'model.gin']).build()
  optimizer = Adafactor(layers=layers, beta1=beta1)
  program = program_of(model, optimizer)
  state, names = (
    first_state(tmp_path / 'ours', model, program, tmp_path / 'run'),
    program.names.params,
  )
  assert int(state.step) == STEP
  update = jax.jit(
    lambda g, s, p, i: optimizer.update(
      g, s, p, names=names, learning_rate=jnp.float32(LEARNING_RATE), step=i
    )
  )
  params, moments = state.params, state.opt_state
  for step in (STEP, STEP + 1):
    grads = some_grads()
    values, states = updated(parameters, values, states, grads, step=step)
    params, moments = update(params_from_t5x(grads), moments, params, jnp.int32(step))
    jax.tree.map(
      lambda got, want: np.testing.assert_allclose(
        got, want, rtol=0, atol=TOLERANCE * np.abs(want).max()
      ),
      params,
      params_from_t5x(float32(values)),
    )


def test_an_imported_checkpoint_has_no_data_to_resume_and_needs_its_setting(tmp_path):
  values = initial('encoder_decoder')
  parameters = of_t5x(values, joined=True, scan_axis=None)
  states = {path: p.new_state() for path, p in parameters.items()}
  write(tmp_path / f'checkpoint_{STEP}', 'legacy', values, states)
  ours = tmp_path / 'ours'
  convert.main([f'--from={tmp_path}', f'--to={ours}', '--check=tensors'])
  model = convert.model_of_gin([ours / 'model.gin']).build()
  program = program_of(model, Adafactor(layers='joined_heads'))
  with raises(CheckpointError):
    choose_origin(RestoreConfig(str(ours), 'resume'), program, saved=None)
  with raises(CheckpointError):
    check_same_model(ours, STEP, ParamsReader(ours).manifest, target=program.abstract_saved)
  with raises(CheckpointError):
    choose_origin(RestoreConfig(str(ours), 'new_data'), program_of(model, Adafactor()), saved=None)


class InMemory(ArraysInMemory):
  """A checkpoint of T5X; see `T5xCheckpoint`."""

  def __init__(self, values, moments):
    super().__init__(values)
    self._moments = moments

  def moments(self):
    return ArraysInMemory(self._moments)


@pytest.mark.parametrize(
  'change',
  [
    lambda m: {},
    lambda m: {f'0/mu/{n}': v for n, v in m.items()},
    lambda m: {**m, 'decoder/decoder_norm/scale/m': np.zeros(128, np.float32)},
    lambda m: {n: v for n, v in m.items() if n != 'decoder/layers_1/mlp/wo/kernel/v_row'},
    lambda m: {**m, 'decoder/decoder_norm/scale/v': np.zeros(64, np.float32)},
  ],
  ids=['none', 'adam', 'momentum', 'missing', 'shape'],
)
def test_what_cannot_be_taken_is_named(change):
  values = initial('decoder_only')
  moments = {
    f'{path}/{kind}': np.asarray(value, np.float32)
    for path, p in of_t5x(values, joined=True, scan_axis=None).items()
    for kind, value in p.new_state().items()
  }
  model = t5x_model({path: v.shape for path, v in values.items()})
  taken = t5x_moments(model, InMemory(values, moments))
  assert taken.settings == {'layers': 'scanned'}  # no side is under 128
  with raises(CheckpointError):
    t5x_moments(model, InMemory(values, change(moments)))


def test_an_unfactored_state_names_its_settings():
  values = initial('decoder_only')
  moments = {
    f'{path}/{kind}': np.zeros(value.shape if kind == 'v' else 1, np.float32)
    for path, value in values.items()
    for kind in ('m', 'v', 'v_col', 'v_row')
  }
  model = t5x_model({path: v.shape for path, v in values.items()})
  settings = t5x_moments(model, InMemory(values, moments)).settings
  assert settings == {'factored': False, 'layers': 'separate'}
