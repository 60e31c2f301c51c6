"""The files that a run leaves in MODEL_DIR, and its output; the output of a dry run."""

import json
import shutil
import struct
import sys

import pytest

from t5x_gpu import train
from t5x_gpu.metrics.writers import read_json_lines
from t5x_gpu.runtime.main_log import log_once
from tests.helpers_train import TINY_GIN, Project, compiled_kept_in, listing, run_here
from tests.reporting.pages import Page

PROMISED = (
  'train/loss',
  'train/accuracy',
  'train/grad_norm',
  'train/learning_rate',
  'train/step_seconds',
  'train/tokens_per_second',
  'train/input_wait_fraction',
)


@pytest.fixture(scope='module')
def finished(tmp_path_factory):
  """Nine steps, logged and saved every second one, evaluated every third."""
  project = Project(tmp_path_factory.mktemp('finished'))
  project.result = project.run(TRAIN_STEPS=9, SAVE_PERIOD=2, EVAL_PERIOD=3, LOG_PERIOD=2)
  assert project.result.code == 0, project.result.err
  return project


def test_metrics_have_the_promised_keys(finished):
  records = read_json_lines(finished.model_dir / 'metrics.jsonl')
  assert [r['step'] for r in records] == [1, 2, 3, 4, 6, 8, 9]  # one object per step
  for record in records:
    assert set(PROMISED) <= record.keys()
  assert [r['step'] for r in records if 'eval/loss' in r] == [3, 6, 9]


def test_the_last_step_is_saved_and_the_last_three_checkpoints_stay(finished):
  assert finished.steps() == [6, 8, 9]


def test_named_steps_are_saved_as_well(tmp_path):
  project = Project(tmp_path)
  steps = {'CheckpointConfig.checkpoint_steps': (2, 3)}
  assert project.run(TRAIN_STEPS=5, SAVE_PERIOD=100, num_devices=1, **steps).code == 0
  assert project.steps() == [2, 3, 5]


def test_a_checkpoint_holds_the_evaluation_of_its_step_if_there_was_one(finished):
  records = read_json_lines(finished.model_dir / 'metrics.jsonl')
  measured = {r['step']: r['eval/loss'] for r in records if 'eval/loss' in r}
  saved = {
    step: json.loads((finished.model_dir / f'checkpoint_{step}/manifest/metadata').read_text())[
      'metrics'
    ]
    for step in (6, 8, 9)
  }
  assert saved[8] is None
  assert {step: saved[step]['eval/loss'] for step in (6, 9)} == {
    step: measured[step] for step in (6, 9)
  }


def test_nothing_unexpected_is_left_in_model_dir(finished):
  names = sorted(p.name for p in finished.model_dir.iterdir())
  assert names == [
    'checkpoint_6',
    'checkpoint_8',
    'checkpoint_9',
    'config.gin',
    'config_origins.txt',
    'goodput.jsonl',
    'metrics.jsonl',
    'report.html',
    'tensorboard',
  ]


def test_the_report_of_a_finished_run_is_complete(finished):
  page = Page((finished.model_dir / 'report.html').read_text('utf-8'))
  page.check()
  assert 'done · 9 of 9 steps' in page.text and 'Dashed line: loss of guessing' in page.text
  assert 'Loss' in page.headings and 'Goodput' in page.headings


def test_tensorboard_events_hold_the_numbers_of_the_metrics_file(finished):
  event_pb2 = pytest.importorskip('tensorboardX.proto.event_pb2')
  found = {}
  for path in (finished.model_dir / 'tensorboard').iterdir():
    content = path.read_bytes()
    while content:  # length, its checksum, the event, its checksum
      (length,) = struct.unpack('<Q', content[:8])
      event = event_pb2.Event.FromString(content[12 : 12 + length])
      found.update({(event.step, v.tag): v.simple_value for v in event.summary.value})
      content = content[16 + length :]
  records = read_json_lines(finished.model_dir / 'metrics.jsonl')
  wanted = {(r['step'], k): v for r in records for k, v in r.items() if k != 'step'}
  assert found.keys() == wanted.keys()
  assert found == {key: pytest.approx(value, rel=1e-6) for key, value in wanted.items()}


@pytest.mark.slow
def test_the_saved_config_gives_the_same_run(finished, tmp_path):
  model_dir = tmp_path / 'again'
  with compiled_kept_in(tmp_path.parent / 'compiled'):
    result = run_here(
      lambda: train.main(
        [f'--gin_file={finished.model_dir}/config.gin', f'--gin.MODEL_DIR={model_dir}']
      )
    )
  assert result.code == 0, result.err
  assert finished.metrics(model_dir=model_dir) == finished.metrics()
  assert finished.metrics('eval/loss', model_dir=model_dir) == finished.metrics('eval/loss')


def test_the_origin_of_each_value_is_saved(finished):
  origins = (finished.model_dir / 'config_origins.txt').read_text()
  for line in ('TRAIN_STEPS = 9', 'CheckpointConfig.period = 2 (%SAVE_PERIOD)', 'AdamW.b1 = 0.9'):
    assert line in origins
  assert f'overrides 20 ({finished.gin_file}:' in origins


def test_the_compile_is_announced(finished):
  out = finished.result.out
  assert out.index('compiling the training step') < out.index('memory: ') < out.index('step 1/9')


def test_the_end_names_the_next_commands(finished):
  for part in (
    'Done at step 9',
    'report.html',
    '--gin.TRAIN_STEPS=18',
    'tensorboard --logdir',
    'grep BATCH_SIZE',
  ):
    assert part in finished.result.out


@pytest.mark.slow
def test_further_training_continues_and_lists_the_changes(finished, tmp_path):
  result = finished.run(TRAIN_STEPS=10, SAVE_PERIOD=2, EVAL_PERIOD=3, LOG_PERIOD=2)
  assert result.code == 0, result.err
  assert 'TRAIN_STEPS: 9 -> 10' in result.out
  assert finished.steps() == [8, 9, 10]
  assert list(finished.metrics()) == [1, 2, 3, 4, 6, 8, 9, 10]
  assert '9' in (finished.model_dir / 'config_1.gin').read_text()


@pytest.mark.slow
def test_a_corrupt_latest_checkpoint_is_named_kept_and_trained_past(tmp_path):
  project = Project(tmp_path)
  assert project.run(TRAIN_STEPS=6, SAVE_PERIOD=3).code == 0
  want = project.metrics()
  data = max(
    (project.model_dir / 'checkpoint_6/state').rglob('d/*'), key=lambda p: p.stat().st_size
  )
  data.write_bytes(data.read_bytes()[:50])
  before = listing(project.model_dir / 'checkpoint_6')
  result = project.run('--dry_run', TRAIN_STEPS=6, SAVE_PERIOD=3)
  assert result.code == 0 and 'Steps done: 3' in result.out, result.err

  result = project.run(TRAIN_STEPS=6, SAVE_PERIOD=3)
  assert result.code == 0, result.err
  for part in (
    'checkpoint_6 cannot be read',
    'Continuing from checkpoint_3',
    'corrupt_checkpoint_6',
  ):
    assert part in result.err
  assert 'Traceback' not in result.err
  assert listing(project.model_dir / 'corrupt_checkpoint_6') == before
  assert project.steps() == [3, 6]
  assert project.metrics() == want


@pytest.mark.slow
def test_only_corrupt_checkpoints_end_the_run_and_stay_as_they_are(tmp_path):
  project = Project(tmp_path)
  assert project.run(TRAIN_STEPS=6, SAVE_PERIOD=3).code == 0
  for step in (3, 6):
    (project.model_dir / f'checkpoint_{step}/state/_METADATA').write_text('{')
  before = listing(project.model_dir)
  result = project.run(TRAIN_STEPS=9, SAVE_PERIOD=3)
  assert result.code == 1
  assert 'CheckpointError: None of the 2 checkpoints' in result.err
  assert 'Traceback' not in result.err
  assert listing(project.model_dir) == before


def test_a_dry_run_of_the_134m_decoder_prints_its_size_mesh_and_layout_and_creates_nothing(
  tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  log_once.cache_clear()
  result = run_here(
    lambda: train.main(
      [
        '--gin_file=gin_configs/examples/tiny_gpu_single.gin',
        '--gin.MODEL_DIR=runs/tiny',
        '--gin.DatasetConfig.module=t5x_gpu.data.synthetic',
        '--dry_run',
      ]
    ),
    num_devices=1,
  )
  assert result.code == 0, result.err
  for part in (
    '134,307,072 parameters',
    'axis   size  splits',
    'token_embedder/embedding',
    '32128 x 768',
    'attention: chunked (cpu, rows of ',
    'precision: bfloat16',
    'Dry run: the run could start. Steps done: 0.',
  ):
    assert part in result.out
  assert 'WARNING' not in result.out + result.err
  assert not list(tmp_path.iterdir())


def test_only_a_run_without_positions_warns_that_its_model_does_not_see_the_order(tmp_path):
  project = Project(tmp_path)
  warning = 'does not see the order of its tokens'
  assert warning not in project.run('--dry_run').out
  blind = project.run('--dry_run', **{'TransformerConfig.relative_bias': 'none'})
  assert warning in blind.out, blind.err


def test_a_dry_run_names_the_checkpoint_it_would_continue_from(finished):
  before = listing(finished.model_dir)
  result = finished.run('--dry_run', TRAIN_STEPS=30)
  assert result.code == 0, result.err
  assert f'the run could start. Steps done: {finished.steps()[-1]}.' in result.out
  assert listing(finished.model_dir) == before


# A user's own model, in a module next to the gin file.
OWN_MODEL = """
import dataclasses

from t5x_gpu.models import decoder_only


@dataclasses.dataclass(frozen=True)
class Own(decoder_only.DecoderOnlyModel):
  loss_alone: bool = False

  def loss(self, params, batch, *, dropout_key=None):
    sums = super().loss(params, batch, dropout_key=dropout_key)
    if self.loss_alone:
      return {'loss': sums['loss']}
    total, weight = sums['cross_entropy']
    return {**sums, 'cross_entropy': (2 * total, weight)}
"""


@pytest.mark.slow
@pytest.mark.parametrize('loss_alone', [False, True])
def test_a_first_loss_far_from_guessing_is_warned_of_where_it_is_known(
  tmp_path, monkeypatch, loss_alone
):
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(sys.modules, 'own_model', raising=False)
  (tmp_path / 'own_model.py').write_text(OWN_MODEL)
  project = Project(
    tmp_path,
    gin=TINY_GIN
    + (
      'import own_model\nfrom t5x_gpu.models import config\n'
      'train_script.train.model = @own_model.Own()\n'
      'own_model.Own.config = @config.TransformerConfig()\n'
      f'own_model.Own.loss_alone = {loss_alone}\n'
    ),
  )
  result = project.run(TRAIN_STEPS=2)
  assert result.code == 0, result.err
  assert ('near 5.58, the loss of guessing' in result.err) != loss_alone


@pytest.mark.slow
def test_evaluation_has_a_separate_batch_size_if_set(tmp_path):
  project = Project(tmp_path)
  result = project.run(TRAIN_STEPS=2, **{'train/DatasetConfig.batch_size': 24})
  assert result.code == 0, result.err
  alike = project.metrics('eval/loss', model_dir=project.model_dir)
  result = project.run(
    TRAIN_STEPS=2,
    MODEL_DIR=tmp_path / 'other',
    **{
      'train/DatasetConfig.batch_size': 24,
      'train_eval/DatasetConfig.batch_size': 16,
      'train_eval/DatasetConfig.task_feature_lengths': "{'targets': 16}",
      'train_eval/DatasetConfig.pack': False,
    },
  )
  assert result.code == 0, result.err
  other = project.metrics('eval/loss', model_dir=tmp_path / 'other')
  assert list(other) == list(alike) == [2] and other != alike
  assert other[2] == pytest.approx(alike[2], abs=0.3)  # random ids: both near ln(264)


@pytest.mark.slow
def test_a_tilde_in_model_dir_is_the_home(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('HOME', str(tmp_path / 'home'))
  project = Project(tmp_path)
  assert project.run(TRAIN_STEPS=1, MODEL_DIR='~/run').code == 0
  assert (tmp_path / 'home/run/config.gin').exists() and not (tmp_path / '~').exists()


def test_an_untrained_model_is_not_warned_of(finished):
  assert 'The first loss' not in finished.result.err


def test_manifests_hold_what_an_error_message_needs(finished):
  manifest = json.loads((finished.model_dir / 'checkpoint_8/manifest/metadata').read_text())
  assert manifest['arrays']['params/token_embedder/embedding'] == [[264, 16], 'float32']
  assert manifest['data']['seed'] == 0 and len(manifest['next_batch_hash']) == 16


SPY_ON_LAZY_IMPORTS = """
import sys
import threading

from etils import epy

lazy_imports = epy.lazy_imports
def spy(**kwargs):
  print('lazy imports in', threading.current_thread().name)
  return lazy_imports(**kwargs)
epy.lazy_imports = spy

from t5x_gpu import train
sys.exit(train.main())
"""


@pytest.mark.slow
def test_builtin_import_is_replaced_only_while_no_other_thread_imports(tmp_path):
  """TensorFlow Datasets replaces it: JAX, tracing in the main thread, would get no class."""
  project = Project(tmp_path)
  with project.start(
    '--dry_run',
    script=SPY_ON_LAZY_IMPORTS,
    TASK_FEATURE_LENGTHS={'targets': 32},
    DATA_MODULE="'t5x_gpu.data.seqio_batches'",
  ) as run:
    assert run.finish() == 0, run.err
  lines = [line for line in run.out.splitlines() if line.startswith('lazy imports in')]
  assert set(lines) == {'lazy imports in MainThread'} and 'the run could start' in run.out


def test_a_run_that_continues_with_another_schedule_says_both_learning_rates(tmp_path):
  project = Project(tmp_path)
  first = project.run(TRAIN_STEPS=4, WARMUP_STEPS=1, SAVE_PERIOD=2, num_devices=1)
  assert 'Its schedule changes the learning rate from 0.0025 to 0.0061' in first.out
  shutil.rmtree(project.model_dir / 'checkpoint_4')
  again = project.run(TRAIN_STEPS=4, WARMUP_STEPS=1, SAVE_PERIOD=2, num_devices=1)
  assert again.code == 0 and 'the learning rate was' not in again.out
  longer = project.run(TRAIN_STEPS=8, WARMUP_STEPS=1, num_devices=1)
  assert 'WARNING: the learning rate was 0.0025 at step 4 and is 0.00611 from step 5' in longer.out
