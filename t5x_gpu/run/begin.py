"""The first lines of a run, and its configuration in its folder."""

import os
import time
from collections.abc import Sequence

import jax

from t5x_gpu.config import report
from t5x_gpu.config.gin_files import GinFiles
from t5x_gpu.config.gin_loader import LoadedConfig
from t5x_gpu.run.config import Run
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.health import checks as health
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.xla import program_cache
from t5x_gpu.runtime.xla.flags import Applied
from t5x_gpu.terminal import logging_setup


def begin(
  run: Run,
  loaded: LoadedConfig,
  cluster: ClusterInfo,
  xla: Applied,
  *,
  gin_files: Sequence[str],
  gin_search_paths: Sequence[str],
) -> None:
  """Sets up logging and the program cache; prints configuration, processes, XLA and health.

  Args:
    run, loaded: the configured run, and the configuration files that it was loaded from.
    cluster, xla: the processes, and the settings to compile with.
    gin_files, gin_search_paths: as on the command line.
  Raises:
    ConfigError: the processes have different configurations.
  """
  logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
  if distributed.is_main_process():
    report.print_changes(
      loaded.provenance,
      files=GinFiles(gin_search_paths),
      gin_files=gin_files,
      model_dir=run.model_dir,
    )
  program_cache.start(jax.default_backend(), environ=os.environ)
  log('\n'.join(_first_screen(run, cluster, xla, loaded)))
  health.log_problems()
  distributed.assert_equal_across_hosts(
    {setting.key: setting.value for setting in loaded.provenance.settings}, 'The configuration'
  )


def _first_screen(run: Run, cluster: ClusterInfo, xla: Applied, loaded: LoadedConfig) -> list[str]:
  """Returns lines about the run's processes, XLA and configuration."""
  ends = []
  if cluster.end_time is not None:
    at = time.strftime('%m-%d %H:%M:%S', time.localtime(cluster.end_time))
    before = run.checkpoint_cfg.stop_before_end_seconds
    ends = [f'time limit: the job ends at {at}; the run saves and exits {before:.0f} s before']
  return [
    str(cluster),
    *ends,
    *(f'WARNING: {warning}' for warning in cluster.warnings),
    xla.report(),
    *([distributed.members_table()] if distributed.members() else []),
    *(f'note: {note}' for note in loaded.notes),
  ]


def write_config(run: Run, loaded: LoadedConfig, folder: str) -> None:
  """Writes the configuration to the run's folder, and prints what changed since the last run."""
  changes = report.write(loaded.provenance, folder)
  log(f'where to look: {run.model_dir}: {", ".join([*run.logging_cfg.files, report.ORIGINS])}')
  if changes:
    log('Changed since the last run:\n' + '\n'.join(f'  {change}' for change in changes))
