"""`Run`: the typed settings of a training run; `EvalConfig`: the settings that `eval` reads.

`introduce` prints what a run knows before it checks anything; `write_config` records its settings.

A run has settings of every folder below this one, from the mesh to checkpoints and evaluation. Only
commands import this folder. Commands that need fewer settings read a base class (StepConfig), or
single settings: `LoadedConfig.arguments(only=...)`.
"""

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Optional

from t5x_gpu.checkpoint.checkpointer import CheckpointConfig
from t5x_gpu.checkpoint.initialize import RestoreConfig
from t5x_gpu.config import report
from t5x_gpu.config.gin_loader import LoadedConfig
from t5x_gpu.config.gin_text import GinFiles
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.errors import ConfigError
from t5x_gpu.metrics.logging_config import JSON_LINES, LoggingConfig
from t5x_gpu.models.decoding import DecodingConfig, SampleConfig
from t5x_gpu.run.early_stopping import EarlyStopping
from t5x_gpu.run.export import ExportConfig
from t5x_gpu.run.profile_config import ProfileConfig
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.watchdog import WatchdogConfig
from t5x_gpu.runtime.xla.flags import Applied
from t5x_gpu.training.train_step import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig(StepConfig):
  """Settings of `eval`: the model, its checkpoints and the data to evaluate on.

  Attributes:
    model_dir: folder of checkpoints, metrics and the configuration.
    total_steps: updates in all, including the updates of earlier starts.
    train_eval_dataset_cfg: data for the evaluation loss; None for no evaluation.
    infer_eval_dataset_cfg: tasks whose metrics are computed (docs/eval.md); None for none.
    decoding_cfg: how to decode predictions for metrics; None for greedy decoding.
  """

  model_dir: str
  total_steps: int
  train_eval_dataset_cfg: Optional[DatasetConfig] = None
  infer_eval_dataset_cfg: Optional[DatasetConfig] = None
  decoding_cfg: Optional[DecodingConfig] = None

  def __post_init__(self) -> None:
    for name in ('train', 'train_eval'):
      dataset = getattr(self, f'{name}_dataset_cfg')
      if dataset is not None and dataset.task_feature_lengths is None:
        raise ConfigError(
          f'{name}/DatasetConfig.task_feature_lengths = None: rows of a batch have fixed lengths.',
          fix="Set lengths, as in {'inputs': 512, 'targets': 128}. None is for "
          'train.infer_eval_dataset_cfg, whose examples are read one by one.',
          parameters=(f'{name}/DatasetConfig.task_feature_lengths',),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(EvalConfig):
  """A training run; gin files set each attribute as `train.NAME`.

  Attributes:
    checkpoint_cfg: when to save, how many checkpoints to keep.
    log_period: steps between log lines.
    eval_period: steps between evaluations of the loss; None for one at the end.
    eval_steps: batches of each evaluation.
    eval_each_task: also evaluate the loss of each task of a mixture, eval/TASK/loss, on
      eval_steps batches per task.
    infer_eval_period: steps between evaluations of tasks; None for one at the end.
    num_predictions: examples of each evaluated task whose texts every evaluation writes to
      MODEL_DIR/predictions; None for all.
    run_eval_before_training: also evaluate, loss and tasks, before the first step of every start.
    early_stopping: when the run ends before its last step; None for never.
    sample_cfg: text to continue at the end; None for none.
    export_cfg: where the model goes at the end, for Hugging Face; None for nowhere.
    initialize_from: checkpoint to start from while `model_dir` has none; None for the seed.
    watchdog_cfg: deadlines that end a run that hangs.
    logging_cfg: where metrics go.
    profile_cfg: when the run takes profiles of itself.
  """

  checkpoint_cfg: CheckpointConfig
  log_period: int
  eval_period: Optional[int] = None
  eval_steps: int = 20
  eval_each_task: bool = False
  infer_eval_period: Optional[int] = None
  num_predictions: Optional[int] = 0
  run_eval_before_training: bool = False
  early_stopping: Optional[EarlyStopping] = None
  sample_cfg: Optional[SampleConfig] = None
  export_cfg: Optional[ExportConfig] = None
  initialize_from: Optional[RestoreConfig] = None
  watchdog_cfg: WatchdogConfig = WatchdogConfig()
  logging_cfg: LoggingConfig = LoggingConfig()
  profile_cfg: ProfileConfig = ProfileConfig()

  @property
  def eval_periods(self) -> tuple[Optional[int], Optional[int]]:
    """Steps between evaluations of each kind in `EVALUATIONS`; None if it never runs."""
    return (
      self.train_eval_dataset_cfg and self.eval_period,
      self.infer_eval_dataset_cfg and self.infer_eval_period,
    )

  def repeats_evaluation(self, step: int) -> bool:
    """Returns whether the start after an interrupted evaluation of `step` repeats it.

    Without metrics.jsonl, it would not know that a start has repeated it.
    """
    datasets = (self.train_eval_dataset_cfg, self.infer_eval_dataset_cfg)
    return self.logging_cfg.has(JSON_LINES) and any(
      dataset is not None and (step == self.total_steps or bool(period) and step % period == 0)
      for dataset, period in zip(datasets, self.eval_periods, strict=True)
    )

  def notes(self) -> Iterator[str]:
    """Yields notes on settings of evaluations that the run does not have."""
    defaults = {field.name: field.default for field in dataclasses.fields(self)}
    for datasets, names in _OF_EVALUATIONS:
      if any(getattr(self, dataset) is not None for dataset in datasets):
        continue
      without = ' and '.join(f'train.{dataset} = None' for dataset in datasets)
      for name in names:
        if (value := getattr(self, name)) != defaults[name]:
          yield f'train.{name} = {value} has no effect: {without}'

  def check_settings(self) -> None:
    """Raises ConfigError or CheckpointError for settings that contradict each other."""
    self._check_numbers()
    self.logging_cfg.check_installed()
    self.profile_cfg.check_total(self.total_steps)
    self.checkpoint_cfg.check_best(self.total_steps, *self.eval_periods)
    if self.early_stopping is not None:
      self.early_stopping.check_evaluated(*self.eval_periods)

  def _check_numbers(self) -> None:
    """Raises ConfigError for steps or batches below 1, or examples below 0."""
    names = ('total_steps', 'log_period', 'eval_period', 'eval_steps', 'infer_eval_period')
    wrong = {name: n for name in names if (n := getattr(self, name)) is not None and n < 1}
    if (self.num_predictions or 0) < 0:
      raise ConfigError(
        f'train.num_predictions = {self.num_predictions}: must be at least 0.',
        fix='Give a number of examples, or None for all.',
        parameters=['train.num_predictions'],
      )
    if wrong:
      raise ConfigError(
        ', '.join(f'train.{name} = {n}' for name, n in wrong.items()) + ': must be at least 1.',
        fix='Give a number of steps.',
        parameters=[f'train.{name}' for name in wrong],
      )


# Datasets, and the settings that have no effect without one of them.
_OF_EVALUATIONS = (
  (('train_eval_dataset_cfg',), ('eval_period', 'eval_steps', 'eval_each_task')),
  (('infer_eval_dataset_cfg',), ('infer_eval_period', 'num_predictions')),
  (('train_eval_dataset_cfg', 'infer_eval_dataset_cfg'), ('run_eval_before_training',)),
)


def introduce(
  run: Run,
  loaded: LoadedConfig,
  cluster: ClusterInfo,
  xla: Applied,
  *,
  gin_files: Sequence[str],
  gin_search_paths: Sequence[str],
) -> None:
  """Prints the configuration, the processes and the XLA settings, on process 0.

  Args:
    run, loaded: the configured run, and the configuration files that it was loaded from.
    cluster, xla: the processes, and the settings to compile with.
    gin_files, gin_search_paths: as on the command line.
  Raises:
    ConfigError: the processes have different configurations.
  """
  if distributed.is_main_process():
    report.print_changes(
      loaded.provenance,
      files=GinFiles(gin_search_paths),
      gin_files=gin_files,
      model_dir=run.model_dir,
    )
  ends = []
  if cluster.end_time is not None:
    at = time.strftime('%m-%d %H:%M:%S', time.localtime(cluster.end_time))
    before = run.checkpoint_cfg.stop_before_end_seconds
    ends = [f'time limit: the job ends at {at}; the run saves and exits {before:.0f} s before']
  lines = [
    str(cluster),
    *ends,
    *(f'WARNING: {warning}' for warning in cluster.warnings),
    xla.report(),
    *([distributed.members_table()] if distributed.members() else []),
    *(f'note: {note}' for note in (*loaded.notes, *run.notes())),
  ]
  log('\n'.join(lines))
  distributed.assert_equal_across_hosts(
    {setting.key: setting.value for setting in loaded.provenance.settings}, 'The configuration'
  )


def write_config(run: Run, loaded: LoadedConfig, folder: str) -> None:
  """Writes the configuration to the run's folder, and prints what changed since the last run."""
  changes = report.write(loaded.provenance, folder)
  log(f'where to look: {run.model_dir}: {", ".join([*run.logging_cfg.files, report.ORIGINS])}')
  if changes:
    log('Changed since the last run:\n' + '\n'.join(f'  {change}' for change in changes))
