"""Configures where a run sends its metrics: `LOGGERS` in gin files.

Keys and passwords are not settings: W&B and MLflow read them from the environment
(docs/monitor.md).
"""

import dataclasses
import importlib.util
import re
from collections.abc import Sequence
from typing import Optional

from t5x_gpu.errors import ConfigError, did_you_mean

TERMINAL, JSON_LINES, TENSORBOARD = 'terminal', 'jsonl', 'tensorboard'
WANDB, MLFLOW = 'wandb', 'mlflow'
# Logger -> file or folder that it writes in MODEL_DIR.
FILES = {JSON_LINES: 'metrics.jsonl', TENSORBOARD: 'tensorboard/', WANDB: 'wandb/'}
DEFAULT = (TERMINAL, JSON_LINES, TENSORBOARD)
# Logger -> the module that it needs and the extra of setup.py that installs it.
EXTRAS = {WANDB: ('wandb', 'wandb'), MLFLOW: ('mlflow', 'mlflow')}
NAMES = (*DEFAULT, *EXTRAS)
_PASSWORD = re.compile(r'://[^/\s]*@')


@dataclasses.dataclass(frozen=True)
class LoggingConfig:
  """Which loggers a run has, and its name in them.

  Attributes:
    loggers: any of 'terminal', 'jsonl', 'tensorboard', 'wandb', 'mlflow'.
    project: W&B project, MLflow experiment.
    run_name: name of the run; None for the last folder of MODEL_DIR.
    wandb_entity: user or team; None for your default.
    wandb_mode: 'online' or 'offline'; None for WANDB_MODE of the environment, else online.
    mlflow_tracking_uri: server or store; None for MLFLOW_TRACKING_URI of the environment.
  """

  loggers: Sequence[str] = DEFAULT
  project: str = 't5x_gpu'
  run_name: Optional[str] = None
  wandb_entity: Optional[str] = None
  wandb_mode: Optional[str] = None
  mlflow_tracking_uri: Optional[str] = None

  def __post_init__(self) -> None:
    if isinstance(self.loggers, str):
      raise ConfigError(
        f'LoggingConfig.loggers = {self.loggers!r} is text.',
        fix=f'Give a tuple: LOGGERS = ({self.loggers!r},)',
        parameters=('LoggingConfig.loggers',),
      )
    unknown = [name for name in self.loggers if name not in NAMES]
    if unknown:
      raise ConfigError(
        f'{unknown[0]!r} is not a logger.{did_you_mean(str(unknown[0]), NAMES)}',
        fix=f'LOGGERS may have: {", ".join(NAMES)}.',
        parameters=('LoggingConfig.loggers',),
        docs='monitor.md#loggers',
      )
    if self.wandb_mode not in (None, 'online', 'offline'):
      raise ConfigError(
        f'LoggingConfig.wandb_mode = {self.wandb_mode!r} is unknown.',
        fix="Set it to 'online' or 'offline', or to None for WANDB_MODE of the environment.",
        parameters=('LoggingConfig.wandb_mode',),
      )
    if self.mlflow_tracking_uri and _PASSWORD.search(self.mlflow_tracking_uri):
      # The error does not show the URI: configurations are printed and uploaded.
      raise ConfigError(
        'LoggingConfig.mlflow_tracking_uri contains a user name or password.',
        fix='Remove it from the URI, and set the environment variables MLFLOW_TRACKING_USERNAME '
        'and MLFLOW_TRACKING_PASSWORD.',
        parameters=('LoggingConfig.mlflow_tracking_uri',),
      )

  def has(self, name: str) -> bool:
    """Returns whether a logger is chosen."""
    return name in self.loggers

  @property
  def files(self) -> list[str]:
    """Files and folders that the loggers write in MODEL_DIR."""
    return [path for name, path in FILES.items() if self.has(name)]

  def check_installed(self) -> None:
    """Raises ConfigError if a logger needs a package that is not installed."""
    for name, (module, extra) in EXTRAS.items():
      if self.has(name) and importlib.util.find_spec(module) is None:
        raise ConfigError(
          f'The logger {name!r} needs the package {module}, which is not installed.',
          fix=f"Run: pip install 't5x_gpu[{extra}]', or remove {name!r} from LOGGERS.",
          parameters=('LoggingConfig.loggers',),
          docs='monitor.md#loggers',
        )
