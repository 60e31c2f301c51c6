"""`ExportConfig`: a run that has taken its last step writes its model for Hugging Face, too.

`python -m t5x_gpu.convert` exports the model in a separate process, on the CPU, after the run's
processes have left their group: converting a large model takes longer than their deadlines.
"""

import dataclasses
import pathlib
import shlex
import subprocess
import sys
from typing import Optional

import jax

from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.errors import ConfigError
from t5x_gpu.models.model import Model
from t5x_gpu.runtime.main_log import log
from t5x_gpu.storage.paths import local_path
from t5x_gpu.storage.user_paths import expanded_path


@dataclasses.dataclass(frozen=True)
class ExportConfig:
  """Where the finished model goes.

  Attributes:
    to: new folder for the Hugging Face model.
    like: folder of the Hugging Face model whose names, dtypes, config.json and tokenizer the new
      one has; None for names and settings of its family.
  """

  to: str
  like: Optional[str] = None

  def check(self, model: Model, model_dir: str) -> None:
    """Raises ConfigError if the model of a run in `model_dir` cannot be exported at its end."""
    local_path(model_dir, what='ExportConfig: MODEL_DIR')
    if problem := export_problem(model):
      raise ConfigError(
        f'ExportConfig: {problem.what}',
        fix=problem.fix or 'Remove train.export_cfg.',
        parameters=('train.export_cfg',),
        docs='convert.md#families',
      )
    if self.exported:
      raise ConfigError(
        f'ExportConfig.to: {self.folder} exists.',
        fix='Name a new folder.',
        parameters=('ExportConfig.to',),
      )
    if self.like is not None and not (expanded_path(self.like) / 'config.json').is_file():
      raise ConfigError(
        f'ExportConfig.like: {self.like} has no config.json.',
        fix='Name the folder of a Hugging Face model, or None.',
        parameters=('ExportConfig.like',),
      )

  @property
  def folder(self) -> pathlib.Path:
    """`to` as an absolute path."""
    return local_path(self.to, what='ExportConfig.to')

  @property
  def exported(self) -> bool:
    """Whether the folder exists; it appears once it is complete."""
    return self.folder.exists()

  def write(self, model_dir: str) -> int:
    """Exports the last checkpoint in `model_dir`, unless it has been; returns an exit code.

    All processes call it. Process 0 converts after all have left the group.
    """
    is_main = jax.process_index() == 0
    if jax.process_count() > 1:
      jax.distributed.shutdown()
    if not is_main:
      return 0
    if self.exported:
      log(f'export: {self.folder} exists and is left as it is')
      return 0
    command = ['-m', 't5x_gpu.convert', f'--from={model_dir}', f'--to={self.to}']
    command += [f'--like={self.like}'] if self.like else []
    log(f'export: python {shlex.join(command)}')
    code = subprocess.run([sys.executable, *command], check=False).returncode
    if code:
      log(f'export: it ended with code {code}; the run itself is complete')
    return min(abs(code), 1)
