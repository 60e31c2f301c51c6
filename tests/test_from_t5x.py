"""Gin files of T5X through the commands: `train` runs them, `config from_t5x` translates them."""

import json
import pathlib

import pytest

from t5x_gpu import config_tools, train
from tests.helpers_train import run_here

FILES = pathlib.Path(__file__).parent / 'config' / 't5x' / 'files'
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
  result = run_here(lambda: train.main(flags), num_devices=1)
  assert not result.code, result.err
  assert "T5X's gin files are translated" in result.out + result.err
  written = [json.loads(line) for line in (model_dir / 'metrics.jsonl').read_text().splitlines()]
  assert any('infer_eval/t5x_dialect_counting/exact' in json.dumps(line) for line in written)
  config = (model_dir / 'config.gin').read_text()
  assert 't5x.' not in config and '__main__' not in config
  assert 'runs/pretrain.gin' in (model_dir / 'config_origins.txt').read_text()

  again = [f'--gin_file={model_dir / "config.gin"}', '--gin.TRAIN_STEPS=4']
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
