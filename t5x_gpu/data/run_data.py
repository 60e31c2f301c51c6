"""The settings of a run that `prepare` and `data` read to open its data."""

import dataclasses
from typing import Any, Optional

from t5x_gpu.data.batches import DatasetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunDataConfig:
  """The data of a run, and the model, which determines the features.

  Attributes:
    model, train_dataset_cfg, train_eval_dataset_cfg: as in `run.config.Run`.
  """

  model: Any
  train_dataset_cfg: DatasetConfig
  train_eval_dataset_cfg: Optional[DatasetConfig] = None
