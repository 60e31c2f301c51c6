"""A run learns preferences, with a reference that never changes, and its model then writes text."""

import importlib
import json
import pathlib
import re
from typing import Optional

import numpy as np
import pytest

from t5x_gpu import convert, infer, train
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.partitioning.layer_stacks import REFERENCE
from tests.conversion.hf_files import CONFIGS, write_model
from tests.helpers_chat import CHATML, talk, write_tokenizer
from tests.helpers_pages import blocks
from tests.helpers_train import TINY_GIN, Project, run_here

pytestmark = pytest.mark.tf
DPO = """
from t5x_gpu.checkpoint import initialize
from t5x_gpu.models import lora
from t5x_gpu.models import dpo

train_script.train.model = @dpo.DpoModel()
dpo.DpoModel:
  model = %MODEL
  beta = 0.5
"""
SETTINGS = {
  'Z_LOSS': 0.0,
  'DATA_MODULE': "'t5x_gpu.data.seqio_batches'",
  'EVAL_PERIOD': 10,
  'BATCH_SIZE': 2,
  'TASK_FEATURE_LENGTHS': {'targets': 96},
}
IMPORT = '\nfrom t5x_gpu.checkpoint import initialize\n'
START = """
train_script.train.initialize_from = @initialize.RestoreConfig()
initialize.RestoreConfig.path = '%s'
"""
ADAPTERS = """
lora.LoraModel:
  model = %MODEL
  pattern = r'.*/kernel'
"""


def write_pairs(path: pathlib.Path, number: int = 60) -> pathlib.Path:
  pairs = [
    {'prompt': f'{i}, is it?', 'chosen': f' Yes, {i}.', 'rejected': ' No!' + '!' * (i % 5)}
    for i in range(number)
  ]
  path.write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  return path


@pytest.fixture(scope='module')
def base(tmp_path_factory) -> Project:
  """A run of two steps on random ids."""
  project = Project(tmp_path_factory.mktemp('base'), gin=TINY_GIN)
  result = project.run(TRAIN_STEPS=2, num_devices=1)
  assert result.code == 0, result.err
  return project


def preference_run(folder: pathlib.Path, base: Optional[Project], *, gin=DPO, **settings: object):
  """Returns the project and how a run of it on one device ended, which started from `base`."""
  start = '' if base is None else START % base.model_dir
  project = Project(folder, gin=TINY_GIN + gin + start)
  files = f"'jsonl:{write_pairs(folder / 'pairs.jsonl')}'"
  return project, project.run(
    num_devices=1, **{**SETTINGS, 'MIXTURE_OR_TASK_NAME': files, **settings}
  )


def parameters(path: pathlib.Path, step: int) -> dict[str, np.ndarray]:
  reader = ParamsReader(path, step=step)
  return {name: reader.read_at(name, ()) for name in reader.shapes}


@pytest.mark.slow
def test_margins_rise_from_zero(tmp_path):
  project, result = preference_run(tmp_path, None, TRAIN_STEPS=10)
  assert result.code == 0, result.err
  loss, margins = project.metrics(), project.metrics('train/rewards/margins')
  assert loss[1] == pytest.approx(np.log(2), abs=1e-5) and margins[1] == pytest.approx(0, abs=1e-4)
  assert loss[10] < 0.1 and margins[10] > 2
  assert project.metrics('train/rewards/accuracies')[10] == 1
  assert project.metrics('eval/rewards/margins')[10] > 2  # of the validation split


@pytest.mark.slow
def test_the_reference_is_what_the_run_started_from_also_after_a_resume(tmp_path, base):
  for steps in (10, 20):
    project, result = preference_run(tmp_path, base, TRAIN_STEPS=steps)
    assert result.code == 0, result.err
  assert project.metrics()[1] == pytest.approx(np.log(2), abs=1e-5)
  assert project.metrics('train/rewards/margins')[20] > 2
  before, after = parameters(base.model_dir, 2), parameters(project.model_dir, 20)
  for name, value in before.items():
    np.testing.assert_array_equal(after[f'{REFERENCE}/{name}'], value)
  assert any((after[name] != value).any() for name, value in before.items())
  assert len(after) == 2 * len(before)


@pytest.mark.slow
def test_adapters_work_without_a_copy_and_both_kinds_write_text_and_start_further_runs(
  tmp_path, base
):
  (tmp_path / 'a').mkdir()
  (tmp_path / 'b').mkdir()
  adapted = DPO.replace('model = %MODEL', 'model = @lora.LoraModel()') + ADAPTERS
  project, result = preference_run(tmp_path / 'a', base, TRAIN_STEPS=20, gin=adapted)
  assert result.code == 0, result.err
  margins, after = project.metrics('train/rewards/margins'), parameters(project.model_dir, 20)
  assert margins[1] == pytest.approx(0, abs=1e-5) and margins[20] > 0.5
  for name, value in parameters(base.model_dir, 2).items():
    np.testing.assert_array_equal(after[name], value)
  assert not any(name.startswith(REFERENCE) for name in after)

  first, result = preference_run(tmp_path / 'b', base, TRAIN_STEPS=4)
  assert result.code == 0, result.err
  trained = parameters(first.model_dir, 4)
  (tmp_path / 'c').mkdir()
  second, result = preference_run(tmp_path / 'c', first, TRAIN_STEPS=1, LEARNING_RATE=0.0)
  assert result.code == 0, result.err
  for name, value in parameters(second.model_dir, 1).items():
    np.testing.assert_array_equal(value, trained[name.removeprefix(f'{REFERENCE}/')])
  plain = Project(tmp_path / 'c', gin=TINY_GIN + IMPORT + START % first.model_dir)
  result = plain.run(TRAIN_STEPS=1, num_devices=1, MODEL_DIR=f"'{tmp_path}/plain'")
  assert result.code == 0, result.err
  for run in (project, first):
    (tmp_path / 'p.txt').write_text('7, is it?\n')
    flags = [f'--checkpoint={run.model_dir}', f'--prompts={tmp_path}/p.txt']
    flags += ['--gin.DecodingConfig.max_decode_length=4']
    result = run_here(lambda flags=flags: infer.main(flags), num_devices=1)
    assert result.code == 0, result.err
    assert json.loads(result.out)['inputs'] == '7, is it?'


@pytest.mark.slow
def test_preview_shows_which_text_is_which_and_what_has_a_loss(tmp_path):
  project = Project(tmp_path, gin=TINY_GIN + DPO)
  settings = {**SETTINGS, 'MIXTURE_OR_TASK_NAME': f"'jsonl:{write_pairs(tmp_path / 'a.jsonl', 4)}'"}
  command = importlib.import_module('t5x_gpu.data_tools')
  argv = ['preview', *project.argv(**settings), '--rows=1']
  result = run_here(lambda: command.main(argv))
  assert result.code == 0, result.err
  found = re.search(
    r'  \[1\] (\d+), is it\?\n   Yes, \1\.\S*\n  \[2\] \1, is it\?\n   No!', result.out
  )
  assert found, result.out


@pytest.mark.slow
def test_a_converted_model_learns_from_messages_and_is_converted_back(tmp_path, monkeypatch):
  pytest.importorskip('tokenizers')
  monkeypatch.chdir(tmp_path)
  write_model(tmp_path / 'hf', {**CONFIGS['llama'], 'vocab_size': 384})
  write_tokenizer(tmp_path / 'hf', CHATML, zero_is_a_word=True)
  pairs = [
    {
      'chosen': talk(f'What is {i}?', 'It is five!'),
      'rejected': talk(f'What is {i}?', 'It is a number, and none of the small ones.'),
    }
    for i in range(40)
  ]
  (tmp_path / 'pairs.jsonl').write_text(''.join(json.dumps(pair) + '\n' for pair in pairs))
  assert convert.main(['--from=hf', '--to=runs/llama', '--check=tensors']) == 0
  [chat] = blocks('finetune.md', 'gin')
  [dpo] = [x for x in blocks('finetune.md', 'text') if '@dpo.DpoModel' in x]
  (tmp_path / 'my_dpo.gin').write_text(chat + dpo)
  settings = {
    'MIXTURE_OR_TASK_NAME': "'jsonl:pairs.jsonl'",
    'TASK_FEATURE_LENGTHS': {'targets': 128},
    'BATCH_SIZE': 2,
    'TRAIN_STEPS': 6,
    'LEARNING_RATE': 1e-2,
    'WARMUP_STEPS': 1,
    'LOG_PERIOD': 1,
    'LOGGERS': "('jsonl',)",
  }
  argv = ['--gin_file=my_dpo.gin', *(f'--gin.{name}={value}' for name, value in settings.items())]
  result = run_here(lambda: train.main(argv), num_devices=1)
  assert result.code == 0, result.err
  lines = map(json.loads, pathlib.Path('runs/llama_chat/metrics.jsonl').read_text().splitlines())
  margins = [x['train/rewards/margins'] for x in lines if 'train/rewards/margins' in x]
  assert margins[0] == pytest.approx(0, abs=1e-3) and margins[-1] > 1
  argv = ['--from=runs/llama_chat', '--to=back', '--like=hf', '--check=own']
  assert convert.main(argv) == 0
  assert (tmp_path / 'back' / 'config.json').is_file()
