"""A run that cannot start from a source names arrays, shapes and the fix before it compiles."""

import dataclasses
import errno
import pathlib

import jax
import numpy as np
import pytest

from t5x_gpu.checkpoint.checkpointer import Checkpointer
from t5x_gpu.checkpoint.initialize import Origin, RestoreConfig, choose_origin
from t5x_gpu.checkpoint.model_dir import CheckpointMetadata
from t5x_gpu.checkpoint.params_files import ParamsWriter
from t5x_gpu.errors import AccessError, CheckpointError, ConfigError
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from tests.helpers_disk import refused_to_python
from tests.helpers_programs import build_with
from tests.messages import raises

CONFIG = TransformerConfig(
  vocab_size=32, num_layers=4, embed_dim=16, num_heads=4, head_dim=4, mlp_dim=32
)
MODEL = DecoderOnlyModel(CONFIG)


def program(model: object = MODEL, *, num_devices: int = 1, **partitioner: object) -> Program:
  return build_with(
    model=model,
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    partitioner=Partitioner(**partitioner),
    topology=Topology(1, num_devices),
    devices=jax.devices()[:num_devices],
    task_feature_lengths={'targets': 8},
    batch_size=8,
    pack=False,
  )


@pytest.fixture(scope='module')
def values() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  flat, _ = jax.tree_util.tree_flatten_with_path(program().abstract_state.params)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): rng.normal(size=a.shape).astype(
      np.float32
    )
    for path, a in flat
  }


def write(folder: pathlib.Path, values: dict[str, np.ndarray]) -> str:
  """Returns `folder`, with checkpoint_3 of parameters alone."""
  folder.mkdir()
  shapes = {name: a.shape for name, a in values.items()}
  with ParamsWriter(
    folder, step=3, shapes=shapes, chunks=shapes, about={}, compress=False
  ) as writer:
    for name, value in values.items():
      writer.write(name, (), value)
  return str(folder)


def started(start: Origin, p: Program, tmp_path: pathlib.Path) -> dict[str, np.ndarray]:
  """Returns the first parameters of a run."""
  with Checkpointer(str(tmp_path / 'run')) as checkpointer:
    state, restored = start.first_state(checkpointer, p, None)
  assert restored is None and int(state.step) == 0
  state = p.in_saved_form(state)
  flat, _ = jax.tree_util.tree_flatten_with_path(state.params)
  return {jax.tree_util.keystr(path, simple=True, separator='/'): np.asarray(a) for path, a in flat}


def refused(config: RestoreConfig, p: Program) -> None:
  with raises(CheckpointError) as e:
    choose_origin(config, p, saved=None)
  assert all('RestoreConfig.' in name for name in e.value.parameters)


@pytest.mark.parametrize(
  'partitioner',
  [
    {},
    pytest.param(dict(fsdp=4, num_partitions=2), marks=pytest.mark.slow),
    pytest.param(
      dict(stage=2, pipeline_schedule='circular', pipeline_repeats=2, fsdp=2),
      marks=pytest.mark.slow,
    ),
  ],
  ids=['dp', 'fsdp_tp', 'circular'],
)
def test_every_layout_starts_from_the_same_values(tmp_path, values, partitioner):
  path, p = write(tmp_path / 'base', values), program(num_devices=8, **partitioner)
  want = jax.tree.map(lambda a: a.sharding, p.abstract_state.params)
  start = choose_origin(RestoreConfig(path), p, saved=None)
  got = started(start, p, tmp_path)
  for name, value in values.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
  state = start._filled(p.init(), p)
  assert jax.tree.map(lambda a: a.sharding, state.params) == want


def test_assignment_map_reads_under_other_names(tmp_path, values):
  path = write(
    tmp_path / 'base',
    {
      f'encoder/{name}' if name.startswith('layers/') else name: value
      for name, value in values.items()
    },
  )
  config = RestoreConfig(path, assignment_map=((r'layers/(.*)', r'encoder/layers/\1'),))
  start = choose_origin(config, program(), saved=None)
  got = started(start, program(), tmp_path)
  for name, value in values.items():
    np.testing.assert_array_equal(got[name], value, err_msg=name)
  assert start.record['assignment_map'] == [[r'layers/(.*)', r'encoder/layers/\1']]


def test_every_copy_of_a_parameter_is_checked(tmp_path, values, monkeypatch):
  path, p = write(tmp_path / 'base', values), program()
  start = choose_origin(RestoreConfig(path), p, saved=None)
  query, key = (f'layers/self_attention/{name}/kernel' for name in ('query', 'key'))
  start = dataclasses.replace(start, taken={**start.taken, key: query})
  start._filled(p.init(), p)
  for copy in (0, 1):
    asked, read = [], Origin._read

    def damaged(self, source, like):
      asked.append(source)
      is_copy = source == query and asked.count(query) == copy + 1
      return read(self, source, like) + is_copy

    with monkeypatch.context() as context, raises(CheckpointError):
      context.setattr(Origin, '_read', damaged)
      start._filled(p.init(), p)


def test_the_runs_own_checkpoint_wins_even_if_the_other_is_gone(tmp_path):
  saved = CheckpointMetadata(5, b'', {})
  start = choose_origin(RestoreConfig(str(tmp_path / 'gone')), program(), saved=saved)
  assert start.record is None and 'checkpoint_5' in start.text


def test_missing_left_over_and_changed_parameters_are_listed_with_the_closest_names(
  tmp_path, values
):
  other = dict(values)
  other['layers/mlp/wi_zero/kernel'] = other.pop('layers/mlp/wi_0/kernel')
  other['token_embedder/embedding'] = np.zeros((48, 16), np.float32)
  path = write(tmp_path / 'base', other)
  refused(RestoreConfig(path), program())
  pattern = '(decoder_norm|logits_dense|relpos_bias)/.*'  # as the message says
  start = choose_origin(RestoreConfig(path, 'partial', pattern), program(), saved=None)
  assert set(start.taken) == {
    'decoder_norm/scale',
    'logits_dense/projection/kernel',
    'relpos_bias/rel_embedding',
  }

  refused(RestoreConfig(path, 'partial', r'layers/mlp/.*'), program())


def test_patterns_that_match_nothing_are_refused_with_what_there_is(tmp_path, values):
  path = write(tmp_path / 'base', values)
  refused(RestoreConfig(path, 'partial', r'layer/mlp/wo/kernel'), program())
  refused(RestoreConfig(path, assignment_map=((r'decoder/.*', 'x'),)), program())


def test_frozen_parameters_that_start_from_chance_are_named(tmp_path, values, caplog):
  model = LoraModel(MODEL, rank=2)
  p = program(model)
  choose_origin(None, p, saved=None)
  assert 'parameters are frozen, but come from no checkpoint: decoder_norm/scale' in (
    ' '.join(caplog.messages)
  )
  caplog.clear()
  path = write(tmp_path / 'base', values)
  start = choose_origin(RestoreConfig(path), p, saved=None)
  assert not caplog.messages and set(start.taken) == set(values)
  assert start.text.splitlines()[-1].split() == [
    'layers/self_attention/value/lora_b',
    *'4 x 2 x 4 x 4 new'.split(),
  ]


def test_resume_needs_a_whole_state_of_the_same_model(tmp_path, values):
  path = write(tmp_path / 'base', values)
  refused(RestoreConfig(path, 'resume'), program())


@pytest.mark.parametrize(
  'files, step',
  [((), None), (('config.json',), None), ((), 9)],
  ids=['empty', 'hugging_face', 'step'],
)
def test_folders_without_such_a_checkpoint_are_refused(tmp_path, values, files, step):
  path = write(tmp_path / 'base', values) if step else str(tmp_path)
  for file in files:
    (tmp_path / file).touch()
  refused(RestoreConfig(path, step=step), program())


def test_a_path_that_does_not_exist_is_refused(tmp_path):
  refused(RestoreConfig(str(tmp_path / 't5_base/checkpoint_1000000')), program())


def test_a_source_that_cannot_be_read_is_replaced_by_a_setting_of_this_run(tmp_path, values):
  """`--step` is a flag of other commands."""
  config, p = RestoreConfig(write(tmp_path / 'other', values)), program()
  with refused_to_python('checkpoint_3/data', errno.EMFILE), raises(AccessError):
    choose_origin(config, p, saved=None)
  (tmp_path / 'other' / 'checkpoint_3' / 'data' / 'metadata').write_bytes(b'{')
  refused(config, p)


@pytest.mark.parametrize(
  'settings',
  [
    dict(mode='warmstart'),
    dict(mode='partial'),
    dict(pattern='layers/.*'),
    dict(mode='partial', pattern='layers/('),
    dict(mode='resume', assignment_map=(('a', 'b'),)),
  ],
)
def test_settings_that_contradict_each_other_are_refused(settings):
  with raises(ConfigError) as e:
    RestoreConfig('base', **settings)
  assert e.value.parameters
