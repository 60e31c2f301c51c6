"""Gin files of T5X through the commands: `train` runs them, `config from_t5x` translates them."""

import json
import os
import pathlib
import tarfile

import pytest

from t5x_gpu import config_tools, eval, infer, train
from t5x_gpu.errors import ConfigError
from tests.helpers_train import compiled_kept_in, run_here
from tests.messages import raises

FILES = pathlib.Path(__file__).parent / 'config' / 't5x' / 'files'
WRITTEN_BY_T5X = pathlib.Path(__file__).parent / 'parity/fixtures/t5x_encoder_decoder'
SEARCH = f'--gin_search_paths={FILES}'
TASKS = """
import seqio
import tensorflow as tf


def rows(split, shuffle_files, seed=None):
  numbers = tf.data.Dataset.range({'train': 64, 'validation': 3}[split])
  return numbers.map(lambda i: {
    'inputs': tf.strings.join(['count ', tf.strings.as_string(i)]),
    'targets': tf.strings.as_string(i),
  })


def exact(targets, predictions):
  return {'exact': sum(map(str.__eq__, targets, predictions)) / len(targets)}


_FEATURE = seqio.Feature(seqio.ByteVocabulary())
seqio.TaskRegistry.add(
  't5x_dialect_counting',
  source=seqio.FunctionDataSource(rows, splits=('train', 'validation')),
  preprocessors=[seqio.preprocessors.tokenize, seqio.preprocessors.append_eos],
  output_features={'inputs': _FEATURE, 'targets': _FEATURE},
  metric_fns=[exact],
)
"""
SMALL = [
  '--gin.T5Config.num_encoder_layers=1',
  '--gin.T5Config.num_decoder_layers=1',
  '--gin.T5Config.mlp_dim=32',
]


@pytest.mark.tf
def test_run_of_a_t5x_file_trains_evaluates_and_continues_from_its_own_configuration(
  tmp_path, monkeypatch
):
  (tmp_path / 't5x_dialect_tasks.py').write_text(TASKS)
  monkeypatch.syspath_prepend(str(tmp_path))
  model_dir = tmp_path / 'run'
  flags = [
    f'--gin_file={FILES / "evaluated.gin"}',
    SEARCH,
    *SMALL,
    f'--gin.MODEL_DIR={model_dir}',
    '--gin.MIXTURE_OR_TASK_NAME=t5x_dialect_counting',
    '--gin.MIXTURE_OR_TASK_MODULE=t5x_dialect_tasks',
    '--gin.TRAIN_STEPS=3',
  ]
  with compiled_kept_in(tmp_path / 'compiled'):
    result = run_here(lambda: train.main(flags), num_devices=1)
  assert not result.code, result.err
  assert "T5X's gin files are translated" in result.out + result.err
  written = [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]
  assert any('infer_eval/t5x_dialect_counting/exact' in json.dumps(line) for line in written)
  config = (model_dir / 'config.gin').read_text()
  assert 't5x.' not in config and '__main__' not in config
  assert 'runs/pretrain.gin' in (model_dir / 'config_origins.txt').read_text()

  again = [f'--gin_file={model_dir / "config.gin"}', '--gin.TRAIN_STEPS=4']
  with compiled_kept_in(tmp_path / 'compiled'):
    result = run_here(lambda: train.main(again), num_devices=1)
  assert not result.code, result.err
  assert 'step 4/4' in result.out + result.err


def test_translation_lists_every_value_and_writes_our_file(tmp_path, capsys):
  output = tmp_path / 'ours.gin'
  argv = ['from_t5x', str(FILES / 'adamw_chain.gin'), SEARCH, f'--output={output}']
  config_tools.main(argv)
  out = capsys.readouterr().out
  assert 'clip.max_delta = 1.0 -> optax.clip.max_delta' in out
  assert 'nothing uses' in out
  assert 'optimizers.Optax:' in output.read_text()
  result = run_here(lambda: config_tools.main(argv))
  assert result.code == 1 and 'exists' in result.err


def test_a_value_that_names_nothing_of_the_files_is_an_error_of_the_translation(tmp_path):
  argv = ['from_t5x', str(FILES / 'adamw_chain.gin'), SEARCH, f'--output={tmp_path / "ours.gin"}']
  with raises(ConfigError):
    config_tools.main([*argv, '--gin.TRAIN_STEP=5'])
  assert not list(tmp_path.iterdir())


def test_refused_values_are_an_error_of_both_commands(tmp_path):
  file = str(FILES / 'unknown_names.gin')
  for command in (
    lambda: config_tools.main(['from_t5x', file, SEARCH, f'--output={tmp_path / "ours.gin"}']),
    lambda: train.main([f'--gin_file={file}', SEARCH, f'--gin.MODEL_DIR={tmp_path / "run"}']),
  ):
    result = run_here(command)
    assert result.code == 1
    assert 'unknown_names.gin:12: train.trainer_cls' in result.err
    assert 'docs/from_t5x.md' in result.err
  assert not list(tmp_path.iterdir())


@pytest.fixture
def counting(tmp_path, monkeypatch):
  """Flags that name the task and T5X's checkpoint of step 20."""
  (tmp_path / 't5x_dialect_tasks.py').write_text(TASKS)
  monkeypatch.syspath_prepend(str(tmp_path))
  with tarfile.open(WRITTEN_BY_T5X / 'checkpoint_orbax.tar.xz') as archive:
    archive.extractall(tmp_path, filter='data')
  return [
    SEARCH,
    '--gin.MIXTURE_OR_TASK_NAME=t5x_dialect_counting',
    '--gin.MIXTURE_OR_TASK_MODULE=t5x_dialect_tasks',
    f'--gin.CHECKPOINT_PATH={tmp_path / "checkpoint_orbax"}',
  ]


@pytest.mark.tf
def test_t5xs_eval_and_infer_files_run_on_a_checkpoint_of_t5x_which_is_converted_once(
  tmp_path, counting
):
  results = tmp_path / 'results'
  evaluates = [
    f'--gin_file={FILES / "evaluation.gin"}',
    *counting,
    f'--gin.EVAL_OUTPUT_DIR={results}',
    '--gin.predict_batch_with_aux.num_decodes=1',
  ]
  dry = run_here(lambda: eval.main([*evaluates, '--dry_run']), num_devices=1)
  assert 'would be converted first' in dry.out and not results.exists()
  result = run_here(lambda: eval.main(evaluates), num_devices=1)
  assert not result.code, result.err
  assert 'It is converted once' in result.out and "T5X's gin files are translated" in result.out
  [metrics] = map(json.loads, (results / 'eval' / 'validation.jsonl').read_text().splitlines())
  assert metrics['step'] == 20 and 'infer_eval/t5x_dialect_counting/exact' in metrics
  dry = run_here(lambda: eval.main([*evaluates, '--dry_run']), num_devices=1)
  assert 'would evaluate last of steps [20]' in dry.out, dry.err

  predicts = [
    f'--gin_file={FILES / "predictions.gin"}',
    *counting,
    f'--gin.INFER_OUTPUT_DIR={results}',
    '--gin.infer.num_shards=2',
  ]
  result = run_here(lambda: infer.main([*predicts, '--shard_id=0']), num_devices=1)
  assert not result.code, result.err
  assert 'converted once' not in result.err
  file = results / 't5x_dialect_counting-predict.jsonl-00000-of-00002'
  found = [json.loads(line) for line in file.read_text().splitlines()]
  assert [(line['number'], line['targets']) for line in found] == [(0, '0'), (2, '2')]

  for file in (tmp_path / 'checkpoint_orbax').rglob('*'):  # as if T5X had written it again
    os.utime(file, (1, 1))
  dry = run_here(lambda: eval.main([*evaluates, '--dry_run']), num_devices=1)
  assert 'would be converted first' in dry.out, dry.err


@pytest.mark.tf
@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint_of_t5x_with_its_step_and_moments(tmp_path, counting):
  flags = run_flags(tmp_path, counting)
  dry = run_here(lambda: train.main([*flags, '--dry_run']), num_devices=1)
  assert 'the run would convert it' in dry.out and not (tmp_path / 'run').exists()
  result = run_here(lambda: train.main(flags), num_devices=1)
  assert not result.code, result.err
  assert 'step 21/21' in result.out and 'moments read back: bit-identical' in result.out


@pytest.mark.tf
def test_dry_run_finds_that_a_checkpoint_of_t5x_does_not_fit(tmp_path, counting):
  flags = [*run_flags(tmp_path, counting), '--dry_run', '--gin.T5Config.mlp_dim=8']
  result = run_here(lambda: train.main(flags), num_devices=1)
  assert result.code == 1 and 'checkpoint_orbax cannot be converted' in result.err
  assert not (tmp_path / 'run').exists()


def run_flags(tmp_path, counting):
  """Returns flags of a run from T5X's checkpoint to step 21."""
  return [
    f'--gin_file={FILES / "t5_from_scratch.gin"}',
    *counting[:-1],
    f'--gin.MODEL_DIR={tmp_path / "run"}',
    f'--gin.RestoreCheckpointConfig.path={tmp_path / "checkpoint_orbax"}',
    '--gin.TRAIN_STEPS=21',
    '--gin.BATCH_SIZE=4',
    '--gin.USE_CACHED_TASKS=False',
  ]


def test_files_of_another_command_name_it(tmp_path):
  for main, file, command in (
    (train.main, 'evaluation', 't5x_gpu.eval'),
    (eval.main, 'predictions', 't5x_gpu.infer'),
    (infer.main, 'evaluation', 't5x_gpu.eval'),
  ):
    result = run_here(lambda: main([f'--gin_file={FILES / file}.gin', SEARCH]))
    assert result.code == 1 and f'Run python -m {command} --gin_file=' in result.err
