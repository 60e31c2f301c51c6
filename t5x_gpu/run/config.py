"""`Run`: the typed settings of a training run; `EvalConfig`: the settings that `eval` reads.

A run has settings of every folder below this one, from the mesh to checkpoints and evaluation. Only
commands import this folder. Commands that need fewer settings read a base class (StepConfig), or
single settings: `LoadedConfig.arguments(only=...)`.
"""

import dataclasses
from typing import Optional

from t5x_gpu.checkpoint.checkpointer import CheckpointConfig
from t5x_gpu.checkpoint.initialize import RestoreConfig
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.metrics.logging_config import LoggingConfig
from t5x_gpu.models.decoding import DecodingConfig, SampleConfig
from t5x_gpu.run.profile_config import ProfileConfig
from t5x_gpu.runtime.watchdog import WatchdogConfig
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run(EvalConfig):
  """A training run; gin files set each attribute as `train.NAME`.

  Attributes:
    checkpoint_cfg: when to save, how many checkpoints to keep.
    log_period: steps between log lines.
    eval_period: steps between evaluations of the loss; None for one at the end.
    eval_steps: batches of each evaluation.
    infer_eval_period: steps between evaluations of tasks; None for one at the end.
    sample_cfg: text to continue at the end; None for none.
    initialize_from: checkpoint to start from while `model_dir` has none; None for the seed.
    watchdog_cfg: deadlines that end a run that hangs.
    logging_cfg: where metrics go.
    profile_cfg: when the run takes profiles of itself.
  """

  checkpoint_cfg: CheckpointConfig
  log_period: int
  eval_period: Optional[int] = None
  eval_steps: int = 20
  infer_eval_period: Optional[int] = None
  sample_cfg: Optional[SampleConfig] = None
  initialize_from: Optional[RestoreConfig] = None
  watchdog_cfg: WatchdogConfig = WatchdogConfig()
  logging_cfg: LoggingConfig = LoggingConfig()
  profile_cfg: ProfileConfig = ProfileConfig()
