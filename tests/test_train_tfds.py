"""Training on registries in the way of T5's, from datasets prepared in TFDS's format.

The tests of T5's own package need it: `make test-t5` installs it next to the project.
"""

import importlib.util
import pathlib

import pytest

from tests import t5_like_tasks
from tests.helpers_tfds import tfds_data_dir, write_glue
from tests.helpers_train import Project
from tests.test_eval import evaluate, records, tiny_gin

pytestmark = pytest.mark.tf
GIN = tiny_gin("""DATA_MODULE = 't5x_gpu.data.seqio_batches'
MIXTURE_OR_TASK_MODULE = 'tests.t5_like_tasks'
MIXTURE_OR_TASK_NAME = 'like_glue'
VOCABULARY = 'byte'
TASK_FEATURE_LENGTHS = {'inputs': 112, 'targets': 16}
PACK = False
TRAIN_STEPS = 4
SAVE_PERIOD = 4
EVAL_PERIOD = 4
WARMUP_STEPS = 1
train_script.train.infer_eval_dataset_cfg = @train_eval/batches.DatasetConfig()
train_script.train.infer_eval_period = 4
""")
T5_TASKS = [
  'cola',
  'sst2',
  'mrpc',
  'stsb',
  'qqp',
  'mnli',
  'qnli',
  'rte',
  'mnli_mismatched',
  'mnli_matched',
]
needs_t5 = pytest.mark.skipif(
  importlib.util.find_spec('t5') is None,
  reason="T5's package is not installed: it pins nightly builds of SeqIO and TFDS. make test-t5",
)


@pytest.mark.slow
def test_a_mixture_trains_and_is_judged_by_the_metrics_of_its_tasks(tmp_path):
  write_glue(tmp_path / 'tfds', ['cola', 'stsb'])
  project = Project(tmp_path, gin=GIN)
  with tfds_data_dir(tmp_path / 'tfds'):
    result = project.run(num_devices=1)
    assert result.code == 0, result.err
    assert set(project.metrics('infer_eval/like_cola/accuracy')) == {4}
    assert set(project.metrics('infer_eval/like_stsb/spearman_corrcoef')) == {4}
    labels, guesses = t5_like_tasks.seen['like_cola']
    assert labels == [0, 1] * 3 and set(guesses) <= {-1, 0, 1}
    assert t5_like_tasks.seen['like_stsb'][0] == [4.0, 5.0, 0.0, 1.0, 2.0, 3.0]
    result = evaluate(project)
  assert result.code == 0, result.err
  assert records(project)[4]['infer_eval/like_cola/accuracy'] == pytest.approx(
    project.metrics('infer_eval/like_cola/accuracy')[4]
  )


def test_a_mixture_without_its_data_stops_before_it_compiles(tmp_path):
  project = Project(tmp_path, gin=GIN)
  with tfds_data_dir(tmp_path / 'tfds'):
    result = project.run('--dry_run', num_devices=1)
  assert result.code == 1 and 'Traceback' not in result.err
  assert f'prepare_tfds glue/cola:1.0.0 glue/stsb:1.0.0 --data_dir={tmp_path}/tfds' in result.err


def run_t5(tmp_path, name):
  """Returns a finished run on a task of T5's registry, in a separate process."""
  project = Project(tmp_path, gin=GIN)
  package = str(pathlib.Path(importlib.util.find_spec('t5').origin).parents[1])
  script = (
    f'import sys; sys.path.append({package!r})\n'
    'from t5x_gpu import cli, train\ncli.run_main(train.main)'
  )
  with project.start(
    f'--tfds_data_dir={tmp_path}/tfds',
    script=script,
    MIXTURE_OR_TASK_MODULE='t5.data.mixtures',
    MIXTURE_OR_TASK_NAME=name,
    **{'TransformerConfig.vocab_size': 360},
  ) as run:  # bytes and 100 sentinels
    run.code = run.popen.wait(900)
  return project, run


@pytest.mark.slow
@needs_t5
@pytest.mark.parametrize(
  'name, metrics',
  [
    ('glue_cola_v002', ['glue_cola_v002/matthews_corrcoef']),
    ('glue_stsb_v002', ['glue_stsb_v002/pearson_corrcoef', 'glue_stsb_v002/spearman_corrcoef']),
    (
      'glue_v002_proportional',
      [
        'glue_cola_v002/matthews_corrcoef',
        'glue_mrpc_v002/f1',
        'glue_mrpc_v002/accuracy',
        'glue_stsb_v002/pearson_corrcoef',
        'glue_mnli_matched_v002/accuracy',
      ],
    ),
  ],
)
def test_t5s_own_tasks_train_with_t5s_own_metrics(tmp_path, name, metrics):
  write_glue(tmp_path / 'tfds', T5_TASKS)
  project, run = run_t5(tmp_path, name)
  assert run.code == 0, run.err
  for metric in metrics:
    assert set(project.metrics(f'infer_eval/{metric}')) == {4}


@pytest.mark.slow
@needs_t5
def test_t5s_own_mixture_names_the_data_to_prepare(tmp_path):
  _, run = run_t5(tmp_path, 'glue_v002_proportional')
  assert run.code == 1 and 'Traceback' not in run.err
  assert 'reads 10 TensorFlow datasets that are not prepared' in run.err
  assert f'--data_dir={tmp_path}/tfds --from_version=2.0.0' in run.err
