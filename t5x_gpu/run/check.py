"""`check`: all checks that need neither data nor a compile; `begin`: the first lines of a run."""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import jax

from t5x_gpu.checkpoint.initialize import RestoreConfig, Start, plan_start
from t5x_gpu.checkpoint.local.promotion import check_with_local
from t5x_gpu.checkpoint.local.tier import LocalTier, NoLocalTier, open_local_tier
from t5x_gpu.checkpoint.manifest import differences, moments_differ
from t5x_gpu.checkpoint.model_dir import ModelDir, Saved, shared_model_dir
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.config import report
from t5x_gpu.config.gin_loader import LoadedConfig
from t5x_gpu.config.gin_text import GinFiles
from t5x_gpu.conversion.to_hf import export_problem
from t5x_gpu.data.data_module import import_modules
from t5x_gpu.errors import CheckpointError, ConfigError, UserError
from t5x_gpu.models.model import config_of
from t5x_gpu.partitioning.array_layout import parameter_table, state_layouts
from t5x_gpu.run.config import Run
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime import topology as topology_lib
from t5x_gpu.runtime.cluster.cluster import ClusterInfo
from t5x_gpu.runtime.health import checks
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.xla import programs
from t5x_gpu.runtime.xla.flags import Applied
from t5x_gpu.storage.paths import as_path
from t5x_gpu.terminal import logging_setup
from t5x_gpu.training.adafactor import LAYERS, Adafactor
from t5x_gpu.training.memory import RunMemory, check_memory
from t5x_gpu.training.program import Program, build_program, size_line


def check_periods(**periods: Optional[int]) -> None:
  """Raises ConfigError for a period below 1; None is allowed."""
  wrong = [name for name, value in periods.items() if value is not None and value < 1]
  if wrong:
    raise ConfigError(
      ', '.join(f'train.{name} = {periods[name]}' for name in wrong) + ': must be at least 1.',
      fix='Give a number of steps.',
      parameters=[f'train.{name}' for name in wrong],
    )


@dataclasses.dataclass(frozen=True)
class CheckedRun:
  """A run that passed `check`; nothing has been compiled yet.

  Attributes:
    run: its settings.
    model_dir: its folder, the same path on every host; locked, except in a dry run.
    program: the model on its mesh.
    memory: memory that a step needs, and memory of the devices.
    local: keeps the local checkpoints.
    start: origin of the parameters if the run has no checkpoint.
    saved: the checkpoint to continue from; None for a new run.
  """

  run: Run
  model_dir: ModelDir
  program: Program
  memory: RunMemory
  local: LocalTier | NoLocalTier
  start: Start
  saved: Optional[Saved]

  @property
  def source(self) -> str:
    """Folder of the checkpoint that the run starts from: `model_dir`, or another run's."""
    return self.start.path or str(self.model_dir.path)

  @property
  def continues_data(self) -> bool:
    """Returns whether the data continue where `saved` left them."""
    return self.saved is not None and self.start.takes_data

  @property
  def is_done(self) -> bool:
    return self.saved is not None and self.saved.step >= self.run.total_steps

  def already_done_text(self) -> str:
    return (
      f'{self.source} is already at step {self.saved.step}; nothing to do up to TRAIN_STEPS = '
      f'{self.run.total_steps}. Set TRAIN_STEPS higher to continue.'
    )

  def dry_run_text(self) -> str:
    """Returns the last lines of a dry run; prints the choices of attention, as a run does."""
    self.program.train_step.trace(self.program.abstract_state, self.program.abstract_batch)
    config = config_of(self.run.model)
    precision = '' if config is None else f'precision: {config.dtype}\n'
    steps = self.saved.step if self.saved else 0
    return f'{precision}{self.memory.line()}\nDry run: the run could start. Steps done: {steps}.'


def check(run: Run, *, dry_run: bool = False) -> CheckedRun:
  """Returns the run with its program and its starting point; prints the mesh and the model.

  All processes must call `check`. The caller releases the `model_dir` of the result.

  Args:
    run: its settings.
    dry_run: write nothing to MODEL_DIR; print the table of parameters as well.
  Raises:
    ConfigError, MeshError, ModelError, ShapeError: settings that contradict each other.
    OutOfMemoryError: the run cannot fit.
    CheckpointError: MODEL_DIR cannot be written or holds another model's checkpoints; or the
      checkpoint to start from is missing.
  """
  model_dir = shared_model_dir(run.model_dir, dry_run=dry_run)
  check_periods(
    total_steps=run.total_steps,
    log_period=run.log_period,
    eval_period=run.eval_period,
    eval_steps=run.eval_steps,
    infer_eval_period=run.infer_eval_period,
  )
  run.logging_cfg.check_installed()
  run.profile_cfg.check_total(run.total_steps)
  run.checkpoint_cfg.check_best(
    run.total_steps,
    run.train_eval_dataset_cfg and run.eval_period,
    run.infer_eval_dataset_cfg and run.infer_eval_period,
  )
  topology, devices = topology_lib.discover()
  program = build_program(run, topology=topology, devices=devices)
  run, program = _with_moments_of(
    model_dir, run, program, lambda run: build_program(run, topology=topology, devices=devices)
  )
  log(_introduction(run, program, with_parameters=dry_run))
  memory = check_memory(program, run.model, num_microbatches=run.num_microbatches)
  local = open_local_tier(run.checkpoint_cfg, model_dir, program.abstract_saved)
  with model_dir.released_on_error():
    saved = check_with_local(model_dir, local, target=program.abstract_saved, dry_run=dry_run)
    with distributed.errors_together():
      start = plan_start(run.initialize_from, program, run.model, saved=saved)
    distributed.assert_equal_across_hosts(
      start.origin or (saved and saved.step),
      f'The latest checkpoint in {model_dir.path}',
      fix='Set MODEL_DIR to one folder of a file system that all processes share.',
      error=CheckpointError,
    )
    log(start.text)
    plan = CheckedRun(run, model_dir, program, memory, local, start, saved or start.saved)
    if not plan.is_done:  # in the main thread, before `open_data` uses them in another
      import_modules(
        run.train_dataset_cfg,
        run.train_eval_dataset_cfg,
        run.infer_eval_dataset_cfg,
        texts=(run.train_dataset_cfg if run.sample_cfg else None, run.infer_eval_dataset_cfg),
      )
  return plan


def _with_moments_of(
  model_dir: ModelDir, run: Run, program: Program, build: Callable[[Run], Program]
) -> tuple[Run, Program]:
  """Returns run and program with the Adafactor.layers of the checkpoint that the run continues.

  A run that sets Adafactor.layers keeps its value. Versions before 0.3 did not have the setting and
  stored other moments.

  Args:
    model_dir: folder of the run.
    run, program: the run and its program with the default of Adafactor.layers.
    build: run -> program.
  """
  if not isinstance(run.optimizer, Adafactor) or run.optimizer.layers is not None:
    return run, program
  manifest = _continued(model_dir, run.initialize_from)
  if manifest is None or not moments_differ(manifest, program.abstract_saved):
    return run, program
  for layers in LAYERS:
    changed = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, layers=layers))
    found = build(changed)
    if not differences(manifest, found.abstract_saved):
      version = manifest['versions'].get('t5x_gpu', 'unknown')
      log(
        f'optimizer: Adafactor.layers = {layers!r}, as the checkpoint of t5x_gpu {version} has its '
        'second moments'
      )
      return changed, found
  return run, program


def _continued(model_dir: ModelDir, start: Optional[RestoreConfig]) -> Optional[Mapping[str, Any]]:
  """Returns the manifest of the checkpoint whose optimizer state the run takes, or None."""
  with contextlib.suppress(OSError, ValueError, UserError):  # restoring reports the error
    if model_dir.steps:
      return model_dir.manifest(model_dir.steps[-1])
    if start is not None and start.mode in ('resume', 'new_data'):
      return ParamsReader(ModelDir(as_path(start.path)), step=start.step).manifest
  return None


def _introduction(run: Run, program: Program, *, with_parameters: bool) -> str:
  """Returns the mesh, the model and its size as text."""
  lines = []
  if run.learning_rate_scaling is not None:
    lines.append(
      f'learning rate: x {program.learning_rate_factor:g} ({run.learning_rate_scaling} in '
      f'{program.layout.batch_parts} replicas)'
    )
  lines.append(program.layout.table())
  if with_parameters:
    lines.append(parameter_table(*state_layouts(program.abstract_state, program.names)))
  lines.append(f'model: {type(run.model).__name__}, {size_line(program)}')
  if (config := config_of(run.model)) is not None and not config.sees_order:
    lines.append(
      "WARNING: relative_bias = 'none', and neither rope, ropes nor num_positions is set: this "
      'model does not see the order of its tokens.'
    )
  if problem := export_problem(run.model):
    lines.append(f'export: not possible to Hugging Face (docs/convert.md#families): {problem}')
  return '\n'.join(lines)


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
  programs.start_cache(jax.default_backend(), environ=os.environ)
  log('\n'.join(_first_screen(run, cluster, xla, loaded)))
  checks.log_problems()
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
