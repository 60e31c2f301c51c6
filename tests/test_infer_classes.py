"""A classifier from own files: trained, evaluated, and asked for the classes of new texts."""

import json
import re
import shutil

import pytest

from t5x_gpu import eval, infer
from t5x_gpu.config import gin_loader
from t5x_gpu.metrics.writers import read_json_lines
from tests.helpers_train import Project, compiled_kept_in, run_here

pytestmark = pytest.mark.tf
GIN = """from __gin__ import dynamic_registration
from t5x_gpu import train as train_script
from t5x_gpu.data import batches
from t5x_gpu.models import config
include 'gin_configs/models/encoder_demo.gin'
include 'gin_configs/parallel/dp.gin'
include 'gin_configs/runs/pretrain.gin'
config.TransformerConfig:
  vocab_size = 264
  num_layers = 1
  embed_dim = 16
  num_heads = 2
  head_dim = 8
  mlp_dim = 32
  num_token_types = 2
  scan_unroll = 1
MIXTURE_OR_TASK_NAME = 'classification:csv:%s/*.csv#text=a,text2=b,label=same'
MODEL_DIR = 'model'
NUM_CLASSES = 2
TASK_FEATURE_LENGTHS = {'inputs': 12}
PACK = False
BATCH_SIZE = 8
EVAL_STEPS = 4
EVAL_PERIOD = 60
LEARNING_RATE = 3e-2
LOG_PERIOD = 20
SAVE_PERIOD = 60
TRAIN_STEPS = 60
WARMUP_STEPS = 5
"""


@pytest.fixture(name='project', scope='module')
def _project(tmp_path_factory):
  """A run that learned from pairs whether the second text is the letter q."""
  folder = tmp_path_factory.mktemp('classes')
  data = folder / 'data'
  data.mkdir()
  for name, begin in (('train', 0), ('dev', 3)):
    pairs = [(chr(97 + (begin + i) % 13), 'q' if i % 2 else chr(97 + i % 13)) for i in range(32)]
    (data / f'{name}.csv').write_text(
      'a,b,same\n' + ''.join(f'{a},{b},{"yes" if b == "q" else "no"}\n' for a, b in pairs)
    )
  made = Project(folder, gin=GIN % data)
  result = made.run(num_devices=1)
  assert result.code == 0, result.err
  return made


def call(main, project, *flags):
  with compiled_kept_in(project._compiled):
    return run_here(lambda: main(list(flags)), num_devices=1)


def test_it_learns_and_is_evaluated(project):
  assert project.metrics('eval/accuracy')[60] > 0.9
  result = call(eval.main, project, *project.argv())
  assert result.code == 0, result.err
  (record,) = read_json_lines(project.model_dir / 'eval' / 'validation.jsonl')
  assert record['eval/accuracy'] == pytest.approx(project.metrics('eval/accuracy')[60])


def test_prompts_get_classes_without_the_files_of_the_task(project, tmp_path):
  prompts, out = tmp_path / 'p.jsonl', tmp_path / 'out.jsonl'
  prompts.write_text(
    '{"inputs": "d", "text2": "q", "id": 7}\n{"inputs": "d", "text2": "c"}\n'
    '{"inputs": "' + 'd' * 99 + '", "text2": "q"}\n'
  )
  data = project.folder / 'data'
  data.rename(project.folder / 'elsewhere')
  try:
    result = call(
      infer.main,
      project,
      f'--checkpoint={project.model_dir}',
      f'--prompts={prompts}',
      f'--output={out}',
    )
  finally:
    (project.folder / 'elsewhere').rename(data)
  assert result.code == 0, result.err
  found = [json.loads(line) for line in out.read_text().splitlines()]
  assert [r['label'] for r in found] == ['yes', 'no', 'yes'] and found[0]['id'] == 7
  for record in found:
    assert set(record['probabilities']) == {'yes', 'no'}
    assert sum(record['probabilities'].values()) == pytest.approx(1, abs=1e-5)
    assert record['probability'] == record['probabilities'][record['label']]


def test_examples_of_the_task_get_the_classes_of_its_evaluation(project, tmp_path):
  out = tmp_path / 'out.jsonl'
  result = call(
    infer.main,
    project,
    f'--gin_file={project.gin_file}',
    f'--output={out}',
    f'--gin.MODEL_DIR={project.model_dir}',
    '--gin.DecodingConfig.batch_size=5',
  )
  assert result.code == 0, result.err
  found = [json.loads(line) for line in out.read_text().splitlines()]
  right = sum(r['label'] == r['targets'] for r in found) / len(found)
  assert len(found) == 32
  assert right == pytest.approx(project.metrics('eval/accuracy')[60])


def test_what_a_classifier_does_not_do_is_refused(project, tmp_path):
  prompts = tmp_path / 'p.jsonl'
  prompts.write_text('{"inputs": "d", "text2": 3}\n')
  for flag, says in (('--score', '--score is for a model that'), ('--dry_run', 'not a text')):
    result = call(
      infer.main, project, f'--checkpoint={project.model_dir}', f'--prompts={prompts}', flag
    )
    assert result.code == 1 and says in result.err and 'Traceback' not in result.err


def test_a_module_that_the_checkpoints_gin_file_names_is_not_imported(
  project, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  (tmp_path / 'evil.py').write_text("open('ran', 'w').close()\n")
  (tmp_path / 'p.txt').write_text('d\n')
  folder = tmp_path / 'stranger'
  shutil.copytree(project.model_dir, folder)
  text, count = re.subn(
    '^MIXTURE_OR_TASK_MODULE = .*',
    "MIXTURE_OR_TASK_MODULE = 'evil'",
    (folder / 'config.gin').read_text(),
    flags=re.MULTILINE,
  )
  assert count == 1
  (folder / 'config.gin').write_text(text)
  result = call(infer.main, project, f'--checkpoint={folder}', '--prompts=p.txt', '--dry_run')
  assert not (tmp_path / 'ran').exists()
  assert result.code == 1 and "DatasetConfig.mixture_or_task_module = 'evil'" in result.err


def test_types_that_the_model_has_are_in_its_batches(project):
  model = gin_loader.load([project.gin_file]).arguments()['model']
  spec = model.batch_spec({'inputs': 12}, batch_size=8, pack=False)
  assert spec.shapes['encoder_token_types'] == (8, 12)
