"""The result of `flags.prepare_environment`: the settings in force, and how a run prints them."""

import dataclasses
from typing import Optional

from t5x_gpu.runtime.xla.table import Value, XlaSetting


@dataclasses.dataclass(frozen=True)
class Applied:
  """The settings that were set or dropped, with reasons.

  Attributes:
    preset: name of the preset.
    gpu: device kind, None without GPU.
    generation: 'h200', '' for a GPU that the table does not know, None without GPU.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, None if unknown.
    compile_options: for `lowered.compile(compiler_options=...)`, in the installed jax's spelling.
    xla_flags: all flags in XLA_FLAGS now, one each.
    env: other variables that were set.
    jax_config: values of jax.config that were set.
    dropped: flag or option -> why it is not used.
    kept: names of settings for which the user's value replaces the preset's.
    user_flags: names that the user set in XLA_FLAGS.
    warnings: sentences for the log.
    settings: rows of the table that apply.
    reason: how the GPU was found, or why there is none.
    jaxlib: 'jaxlib 0.10.2'.
  """

  preset: str
  gpu: Optional[str]
  generation: Optional[str]
  num_hosts: int
  num_gpus: Optional[int]
  compile_options: dict[str, Value]
  xla_flags: tuple[str, ...]
  env: dict[str, str]
  jax_config: dict[str, Value]
  dropped: dict[str, str]
  kept: tuple[str, ...]
  user_flags: tuple[str, ...]
  warnings: tuple[str, ...]
  settings: tuple[XlaSetting, ...]
  reason: str
  jaxlib: str

  @property
  def line(self) -> str:
    """One line for the log: `xla preset: ` and `summary`."""
    return f'xla preset: {self.summary}'

  @property
  def summary(self) -> str:
    """One line: `h200 single-host (default), ..., 1 flag dropped: not in jaxlib`."""
    if self.generation is None:
      text = f'nothing to set, no GPU ({self.reason})'
    else:
      hosts = 'single-host' if self.num_hosts == 1 else f'{self.num_hosts} hosts'
      text = (
        f'{self.generation or self.gpu} {hosts} ({self.preset}), '
        f'{_count(len(self.compile_options), "compile option")}, '
        f'{_count(len(self.xla_flags), "flag")}, '
        f'{_count(len(self.env) + len(self.jax_config), "variable")}'
      )
    if self.kept:
      text += f', {_count(len(self.kept), "setting")} of the user kept'
    if self.dropped:
      reasons = list(dict.fromkeys(self.dropped.values()))
      text += f', {_count(len(self.dropped), "flag")} dropped: ' + (
        reasons[0] if len(reasons) == 1 else 'see below'
      )
    return text

  def report(self) -> str:
    """Returns the line, followed by the warnings."""
    return '\n'.join([self.line, *(f'  {warning}' for warning in self.warnings)])


def _count(number: int, noun: str) -> str:
  return f'{number} {noun}{"" if number == 1 else "s"}'
