"""A run starts from another run's checkpoint, whole or in part, and from converted parameters."""

import pathlib
import re

import numpy as np
import pytest

from t5x_gpu import convert, infer
from t5x_gpu.checkpoint.model_dir import read_metadata
from t5x_gpu.checkpoint.params_files import ParamsReader, ParamsWriter
from t5x_gpu.checkpoint.store import StateReader
from t5x_gpu.config import gin_loader
from t5x_gpu.conversion.model_spec import describe
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.lora import LoraModel, without_adapters
from tests.conversion.hf_files import CONFIGS, write_model
from tests.helpers_train import TINY_GIN, Project, listing

START = """
from t5x_gpu.checkpoint import initialize
train_script.train.initialize_from = @initialize.RestoreConfig()
initialize.RestoreConfig.path = '%s'
"""


@pytest.fixture(scope='module')
def base(tmp_path_factory) -> Project:
  """A run of four steps that has kept steps 2 and 4."""
  project = Project(tmp_path_factory.mktemp('base'), gin=TINY_GIN)
  result = project.run(TRAIN_STEPS=4, SAVE_PERIOD=2)
  assert result.code == 0, result.err
  return project


def started(folder: pathlib.Path, path: object, **settings: object) -> Project:
  """Returns a project whose runs start from `path`, with further settings of RestoreConfig."""
  lines = [f'initialize.RestoreConfig.{name} = {value!r}' for name, value in settings.items()]
  folder.mkdir(exist_ok=True)
  return Project(folder, gin=TINY_GIN + START % path + '\n'.join(lines) + '\n')


def parameters(path: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  reader = ParamsReader(path, step=step)
  return {name: reader.read_at(name, ()) for name in reader.shapes}


def origin(project: Project, step: int) -> dict:
  return read_metadata(project.model_dir, step).manifest['started_from']


@pytest.mark.slow
def test_resume_continues_as_the_other_run_did_and_leaves_it_alone(tmp_path, base):
  before = listing(base.model_dir)
  project = started(tmp_path, base.model_dir, mode='resume', step=2)
  result = project.run(TRAIN_STEPS=4, SAVE_PERIOD=10)
  assert result.code == 0, result.err
  assert f'Continuing from {base.model_dir}/checkpoint_2.' in result.out
  losses = base.metrics()
  assert project.metrics() == {step: losses[step] for step in (3, 4)}  # data, optimizer, schedule
  assert listing(base.model_dir) == before
  assert origin(project, 4) == {
    'checkpoint': f'{base.model_dir}/checkpoint_2',
    'step': 2,
    'mode': 'resume',
    'pattern': None,
    'assignment_map': [],
  }


@pytest.mark.slow
def test_new_data_keeps_optimizer_and_step_and_starts_the_data_again(tmp_path, base):
  project = started(tmp_path, base.model_dir, mode='new_data', step=2)
  result = project.run(TRAIN_STEPS=4, SAVE_PERIOD=10)
  assert result.code == 0, result.err
  assert sorted(project.metrics()) == [3, 4] and project.metrics() != base.metrics()
  got, after_two_steps = read_metadata(project.model_dir, 4), read_metadata(base.model_dir, 2)
  for field in ('next_batch_hash', 'data'):
    assert got.manifest[field] == after_two_steps.manifest[field]
  assert got.data_state == after_two_steps.data_state
  assert int(StateReader(project.model_dir).read_at('opt_state/0/count', ())) == 4
  assert origin(project, 4)['mode'] == 'new_data'


def test_a_checkpoint_with_all_steps_of_the_run_is_refused(tmp_path, base):
  project = started(tmp_path, base.model_dir, mode='new_data')
  result = project.run(TRAIN_STEPS=3)
  assert result.code == 1
  assert 'checkpoint_4, which is at step 4.' in result.err
  assert 'train.total_steps is set at --gin.TRAIN_STEPS' in result.err
  assert not project.model_dir.exists()


@pytest.mark.slow
def test_warm_start_takes_parameters_and_nothing_else(tmp_path, base):
  project = started(tmp_path, base.model_dir)
  result = project.run('--gin.LEARNING_RATE=0.0', TRAIN_STEPS=1)
  assert result.code == 0, result.err
  count = len(parameters(base.model_dir, 4))
  assert (
    f'Starting from {base.model_dir}/checkpoint_4 (warm_start): {count} of {count} parameters'
  ) in result.out
  assert 'untrained' not in result.err  # the first loss is better than guessing
  assert sorted(project.metrics()) == [1]
  want, got = parameters(base.model_dir, 4), parameters(project.model_dir, 1)
  for name in want:
    np.testing.assert_array_equal(got[name], want[name], err_msg=name)

  result = project.run('--gin.LEARNING_RATE=0.0', TRAIN_STEPS=2)  # its own checkpoint wins
  assert result.code == 0, result.err
  assert 'Ignoring RestoreConfig.path' in result.out and 'checkpoint_1 of MODEL_DIR' in result.out
  assert origin(project, 2)['mode'] == 'warm_start'


@pytest.mark.slow
def test_partial_takes_what_matches_on_any_mesh(tmp_path, base):
  layouts = """
from t5x_gpu.partitioning import partitioner
partitioner.Partitioner.fsdp = 2
partitioner.Partitioner.num_partitions = 2
"""
  project = started(tmp_path, base.model_dir, mode='partial', pattern=r'layers/.*|decoder_norm/.*')
  project.gin_file.write_text(project.gin_file.read_text() + layouts)
  dry = project.run('--dry_run', TRAIN_STEPS=1)
  assert dry.code == 0 and not project.model_dir.exists(), dry.err
  result = project.run('--gin.LEARNING_RATE=0.0', TRAIN_STEPS=1)
  assert result.code == 0, result.err
  want, got = parameters(base.model_dir, 4), parameters(project.model_dir, 1)
  same = {name for name in want if np.array_equal(want[name], got[name])}
  assert same == {n for n in want if n.startswith(('layers/', 'decoder_norm/'))}
  for name in want:
    row = next(
      line
      for line in dry.out.splitlines()
      if line.startswith(f'  {name} ') and line.endswith(('checkpoint', 'new'))
    )
    assert row.endswith('checkpoint' if name in same else 'new')


def test_checkpoints_with_parameters_only_start_a_run(tmp_path, base):
  values = parameters(base.model_dir, 4)
  shapes = {name: a.shape for name, a in values.items()}
  (tmp_path / 'converted').mkdir()
  with ParamsWriter(
    tmp_path / 'converted', step=7, shapes=shapes, chunks=shapes, about={}, compress=False
  ) as writer:
    for name, value in values.items():
      writer.write(name, (), value)
  (tmp_path / 'converted' / 'hf').mkdir()
  (tmp_path / 'converted' / 'hf' / 'tokenizer.json').write_text('{}')
  project = started(tmp_path, tmp_path / 'converted')
  result = project.run('--gin.LEARNING_RATE=0.0', TRAIN_STEPS=1)
  assert result.code == 0, result.err
  assert (project.model_dir / 'hf' / 'tokenizer.json').read_text() == '{}'
  got = parameters(project.model_dir, 1)
  for name in values:
    np.testing.assert_array_equal(got[name], values[name], err_msg=name)

  refused = project.run(
    "--gin.RestoreConfig.mode='resume'", TRAIN_STEPS=1, MODEL_DIR=tmp_path / 'other'
  )
  assert refused.code == 1 and 'parameters only' in refused.err
  assert "mode = 'warm_start'" in refused.err
  refused = project.run(TRAIN_STEPS=1, MODEL_DIR=tmp_path / 'converted')
  assert refused.code == 1 and 'RestoreConfig.path' in refused.err


LORA = """
from t5x_gpu.models import lora
train_script.train.model = @lora.LoraModel()
lora.LoraModel:
  model = %MODEL
  rank = 2
  pattern = r'layers/.*/kernel'
"""


@pytest.mark.slow
def test_adapters_are_trained_on_a_pretrained_model_saved_restored_and_merged(tmp_path, base):
  project = started(tmp_path, base.model_dir)
  with project.gin_file.open('a') as gin:
    gin.write(LORA + "VOCABULARY = 'byte'\n")
  result = project.run(TRAIN_STEPS=2)
  assert result.code == 0, result.err
  assert 'of them trained' in result.out and 'new' in result.out
  whole = started(tmp_path / 'whole', base.model_dir)
  assert whole.run(TRAIN_STEPS=1).code == 0
  assert project.metrics()[1] == pytest.approx(whole.metrics()[1], rel=1e-6)  # as without adapters
  pretrained, first = parameters(base.model_dir, 4), parameters(project.model_dir, 2)
  factors = first.keys() - pretrained.keys()
  assert factors and all('/lora_' in name for name in factors)
  for name, value in pretrained.items():
    np.testing.assert_array_equal(first[name], value, err_msg=name)
  assert any(np.abs(first[name]).max() > 0 for name in factors if name.endswith('lora_b'))

  result = project.run(TRAIN_STEPS=4)  # continues from its own checkpoint
  assert result.code == 0 and f'Continuing from {project.model_dir}/checkpoint_2.' in result.out
  uninterrupted = started(tmp_path / 'at_once', base.model_dir)
  uninterrupted.gin_file.write_text(uninterrupted.gin_file.read_text() + LORA)
  assert uninterrupted.run(TRAIN_STEPS=4).code == 0
  assert project.metrics() == uninterrupted.metrics()

  assert (
    convert.main([f'--from={project.model_dir}', f'--to={tmp_path / "merged"}', '--format=t5x_gpu'])
    == 0
  )
  (tmp_path / 'p.txt').write_text('import\n')
  # The merged folder carries the run's vocabulary.
  assert infer.main([f'--checkpoint={tmp_path / "merged"}', f'--prompts={tmp_path / "p.txt"}']) == 0
  plain = started(tmp_path / 'plain', tmp_path / 'merged')
  result = plain.run('--gin.LEARNING_RATE=0.0', TRAIN_STEPS=1)
  assert result.code == 0, result.err
  assert plain.metrics('eval/loss')[1] == pytest.approx(project.metrics('eval/loss')[4], rel=1e-5)


def test_the_examples_of_the_page_are_runs_from_a_converted_llama(tmp_path, monkeypatch):
  page = (pathlib.Path(__file__).parents[1] / 'docs' / 'finetune.md').read_text()
  plain, lora = (
    next(block for block in re.findall(r'```text\n(.*?)```', page, re.DOTALL) if word in block)
    for word in ("include 'runs/llama", 'lora.LoraModel')
  )
  monkeypatch.chdir(tmp_path)
  write_model(tmp_path / 'hf', {**CONFIGS['llama'], 'max_position_embeddings': 1024})
  pathlib.Path('hf/tokenizer.json').write_text('{"model": {"vocab": {"a": 1}}}')
  assert convert.main(['--from=hf', '--to=runs/llama', '--check=tensors']) == 0
  for text, kind in ((plain, DecoderOnlyModel), (plain + lora, LoraModel)):
    pathlib.Path('my_finetuning.gin').write_text(text)
    found = gin_loader.load(['my_finetuning.gin']).arguments()
    start, data, model = (found[name] for name in ('initialize_from', 'train_dataset_cfg', 'model'))
    assert type(model) is kind and start.mode == 'warm_start'
    assert describe(without_adapters(model)).abstract_shapes() == ParamsReader(start.path).shapes
    folder = data.vocabulary.removeprefix('huggingface:')
    assert (pathlib.Path(folder) / 'tokenizer.json').is_file()
    model.batch_spec(data.task_feature_lengths, batch_size=data.batch_size, pack=data.pack)
