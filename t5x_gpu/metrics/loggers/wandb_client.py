"""Weights & Biases: https://docs.wandb.ai/ref/python."""

import importlib
import os
import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from t5x_gpu.metrics.loggers.logging_config import WANDB, LoggingConfig
from t5x_gpu.metrics.loggers.run_ids import RunIds

_STEP = 'step'
_INIT_SECONDS = 60.0


class WandbClient:
  """One run at W&B, with the configuration of this run and its files.

  A step that was logged before a crash and is repeated after it appears twice: W&B's step counter
  cannot go back, so the step is a metric.

  Args:
    config: project, and name of the run.
    ids: stores the id of the run.
    folder: MODEL_DIR; W&B writes to `wandb/` in it.
    run_name: name shown by W&B.
    settings: configuration values by name.
    files: files of `folder` to upload.
  """

  def __init__(
    self,
    config: LoggingConfig,
    ids: RunIds,
    *,
    folder: str | os.PathLike,
    run_name: str,
    settings: Mapping[str, Any],
    files: tuple[pathlib.Path, ...],
  ):
    wandb = importlib.import_module('wandb')
    run_id = ids.get(WANDB)
    if run_id is None:  # stored first, so that a run killed in `init` continues with the same id
      run_id = uuid.uuid4().hex[:12]
      ids.keep(WANDB, run_id)
    self._run = wandb.init(
      project=config.project,
      entity=config.wandb_entity,
      id=run_id,
      resume='allow',
      name=run_name,
      dir=os.fspath(folder),
      mode=config.wandb_mode,
      config=dict(settings),
      allow_val_change=True,
      settings=wandb.Settings(
        console='off',  # W&B would replace stdout, which may be a progress bar
        silent=True,
        init_timeout=_INIT_SECONDS,
        login_timeout=1,  # do not prompt for a key on a terminal
      ),
    )
    self._run.define_metric(_STEP)
    self._run.define_metric('*', step_metric=_STEP)
    for path in files:
      self._run.save(os.fspath(path), base_path=os.fspath(folder), policy='now')

  def log(self, step: int, values: Mapping[str, float]) -> None:
    self._run.log({_STEP: step, **values})

  def close(self, *, failed: bool) -> None:
    self._run.finish(exit_code=int(failed))
