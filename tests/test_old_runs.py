"""Files written by commit 30213db, before version 0.2.0: its runs continue, its data is read."""

import importlib
import json
import pathlib
import shutil

import pytest

from t5x_gpu import checkpoint_tools, infer, prepare, train
from t5x_gpu.data.sources.readers import BlockReader
from t5x_gpu.metrics.writers import read_json_lines
from tests.helpers_train import TINY_GIN, Project, run_here

OLD = pathlib.Path(__file__).parent / 'golden' / 'from_30213db'
# Losses were computed on another machine, with other vector instructions.
RELATIVE = 1e-4


@pytest.fixture
def old(tmp_path, monkeypatch) -> pathlib.Path:
  """A copy of the old folder; its gin files name paths relative to it."""
  folder = tmp_path / 'old'
  shutil.copytree(OLD, folder)
  monkeypatch.chdir(folder)
  return folder


@pytest.mark.parametrize(
  'data', ['prepared', pytest.param('streaming', marks=[pytest.mark.tf, pytest.mark.slow])]
)
def test_config_of_an_old_run_continues_it_with_the_same_losses(old, data):
  shutil.copy(f'{data}_run/config.gin', 'again.gin')
  result = run_here(lambda: train.main(['--gin_file=again.gin']))
  assert result.code == 0, result.err
  assert 'checkpoint_4' in result.out
  expected = json.loads((old / f'{data}_losses.json').read_text())
  lines = read_json_lines(old / f'{data}_run' / 'metrics.jsonl')
  losses = {str(line['step']): line['train/loss'] for line in lines if 'train/loss' in line}
  assert losses == pytest.approx(expected, rel=RELATIVE)
  assert (old / f'{data}_run' / 'checkpoint_8').is_dir()


def test_old_checkpoint_verifies_and_generates(old):
  result = run_here(lambda: checkpoint_tools.main(['verify', 'prepared_run']))
  assert result.code == 0, result.err
  (old / 'prompts.txt').write_text('a training step\n')
  result = run_here(lambda: infer.main(['--checkpoint=prepared_run', '--prompts=prompts.txt']))
  assert result.code == 0, result.err


@pytest.mark.tf
def test_prepare_finds_an_old_folder_finished(old):
  before = (old / 'tokens/train/index.json').read_bytes()
  result = run_here(
    lambda: prepare.main(['--gin_file=streaming.gin', '--output=tokens', '--shards=2'])
  )
  assert result.code == 0, result.err
  assert (old / 'tokens/train/index.json').read_bytes() == before


ADAFACTOR = """
from t5x_gpu.training import adafactor
OPTIMIZER = @adafactor.Adafactor()
"""


def test_a_run_of_adafactor_before_its_setting_continues_by_itself(tmp_path):
  project = Project(tmp_path, gin=TINY_GIN + ADAFACTOR)
  layers = """--gin.adafactor.Adafactor.layers='joined_heads'"""  # the moments of 0.2
  result = project.run(layers, num_devices=1, TRAIN_STEPS=2, SAVE_PERIOD=2)
  assert result.code == 0, result.err
  result = project.run(num_devices=1, TRAIN_STEPS=4, SAVE_PERIOD=4)
  assert result.code == 0, result.err
  assert "Adafactor.layers = 'joined_heads', to match the second moments" in result.out
  assert f'Continuing from {project.model_dir}/checkpoint_2.' in result.out
  again = {'TRAIN_STEPS': 4, 'MODEL_DIR': tmp_path / 'at_once'}
  at_once = project.run(layers, num_devices=1, **again)
  assert at_once.code == 0, at_once.err
  assert project.metrics() == project.metrics(model_dir=tmp_path / 'at_once')


def test_data_modules_of_users_find_the_reader_in_its_former_place():
  former = importlib.import_module('t5x_gpu.data.sources.block_reader')
  assert former.BlockReader is BlockReader
