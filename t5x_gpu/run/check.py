"""`check`: all checks that need neither data nor a compile; `plan_run`: where the run starts."""

import contextlib
import dataclasses
import os
from typing import Optional

import jax

from t5x_gpu.checkpoint.initialize import Origin, RestoreConfig, choose_origin
from t5x_gpu.checkpoint.local.tier import LocalTier, NoLocalTier, open_local_tier
from t5x_gpu.checkpoint.manifest import differences, moments_differ
from t5x_gpu.checkpoint.model_dir import (
  CheckpointMetadata,
  ModelDir,
  check_names_are_free,
  check_room,
  newest_complete,
  shared_model_dir,
)
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.checkpoint.retention import EVALUATIONS
from t5x_gpu.conversion.to_ours import converted_once
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.data_module import import_modules, quiet_imports
from t5x_gpu.errors import CheckpointError, ConfigError, UserError
from t5x_gpu.metrics.writers import METRICS, Record, parse_line
from t5x_gpu.models.model import config_of
from t5x_gpu.partitioning.array_layout import parameter_table, state_layouts
from t5x_gpu.run.config import Run
from t5x_gpu.runtime import distributed, progress
from t5x_gpu.runtime.cluster.generations import FEWER_HOSTS_VARIABLE
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.topology import Device, discover
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.storage.json_schema import Json
from t5x_gpu.storage.paths import as_path
from t5x_gpu.training.adafactor import LAYERS, Adafactor
from t5x_gpu.training.memory import RunMemory, check_memory, tree_bytes
from t5x_gpu.training.program import Program, build_program, host_counts, size_line


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckedRun:
  """A run that passed `check`; nothing has been compiled yet.

  Attributes:
    run: its settings.
    model_dir: its folder, the same path on every host.
    program: the model on its mesh.
    memory: memory that a step needs, and memory of the devices.
    local: keeps the local checkpoints.
  """

  run: Run
  model_dir: ModelDir
  program: Program
  memory: RunMemory
  local: LocalTier | NoLocalTier


def check(run: Run, *, dry_run: bool = False) -> CheckedRun:
  """Returns the run with its program; prints the mesh and the model. Saves nothing.

  All processes must call `check`.

  Args:
    run: its settings.
    dry_run: leave no new MODEL_DIR behind; print the table of parameters as well.
  Raises:
    ConfigError, MeshError, ModelError, ShapeError: settings that contradict each other.
    OutOfMemoryError: the run cannot fit.
    CheckpointError: MODEL_DIR or the folder of local checkpoints cannot be used.
  """
  model_dir = shared_model_dir(run.model_dir, dry_run=dry_run)
  run.check_settings()
  topology, devices = discover()
  if os.environ.get(FEWER_HOSTS_VARIABLE):
    run = dataclasses.replace(run, partitioner=run.partitioner.on_fewer_hosts())
    log(f"mesh: hosts were lost. data = {run.partitioner.data}, uneven_batch = 'fill'.")
  program = build_program(run, topology=topology, devices=devices)
  run, program = _with_moments_of(model_dir, run, program, devices)
  log(_introduction(run, program, with_parameters=dry_run))
  _report_host_counts(program)
  return CheckedRun(
    run=run,
    model_dir=model_dir,
    program=program,
    memory=check_memory(program),
    local=open_local_tier(run.checkpoint_cfg, model_dir, program.abstract_saved),
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedRun(CheckedRun):
  """A checked run and its starting point: a checkpoint, or new parameters.

  Attributes:
    origin: source of the parameters if the run has no checkpoint.
    saved: the checkpoint whose whole state the run takes, its own or another run's; None otherwise.
    lacks_evaluation: whether a stop signal ended the evaluation of `saved`, and no start has
      repeated it.
  """

  origin: Origin
  saved: Optional[CheckpointMetadata]
  lacks_evaluation: bool

  @property
  def source(self) -> str:
    """Folder of the checkpoint that the run starts from: `model_dir`, or another run's."""
    return self.origin.path or str(self.model_dir.path)

  @property
  def continues_data(self) -> bool:
    """Whether the data continue where `saved` left them."""
    return self.saved is not None and self.origin.takes_data

  @property
  def is_done(self) -> bool:
    has_all_steps = self.saved is not None and self.saved.step >= self.run.total_steps
    return has_all_steps and not self.lacks_evaluation

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


def plan_run(
  checked: CheckedRun, *, watchdog: Watchdog, promoted: Optional[CheckpointMetadata] = None
) -> PlannedRun:
  """Returns the run with the checkpoint that it starts from; prints where that is.

  All processes must call it, with MODEL_DIR locked unless the run is a dry one.

  Args:
    checked: the run.
    watchdog: its deadline covers the conversion of a T5X checkpoint.
    promoted: the local checkpoint that `promote_local` made, or would make, an ordinary one.
  Raises:
    CheckpointError: MODEL_DIR cannot be written or holds another model's checkpoints; or the
      checkpoint to start from is missing.
    ConfigError: the checkpoint to start from has all steps of the run.
  """
  run, program, model_dir = checked.run, checked.program, checked.model_dir
  saved = newest_complete(model_dir, target=program.abstract_saved)
  saved = promoted or saved
  start, of_t5x = run.initialize_from, False
  if start is not None and saved is None:
    path = as_path(start.path, parameter='RestoreConfig.path')
    with watchdog.phase('convert'):
      found = converted_once(
        path,
        model_dir.path,
        run.model,
        dry_run=not model_dir.is_locked,
        on_progress=watchdog.progress,
      )
    start, of_t5x = dataclasses.replace(start, path=str(found or path)), found is None
  with distributed.errors_together():
    if of_t5x:
      origin = Origin(text=f'{path} is a T5X checkpoint, which fits; the run would convert it.')
    else:
      origin = choose_origin(start, program, saved=saved)
    _check_steps_left(origin, run.total_steps)
    start_from = saved or origin.saved
    if distributed.is_main_process():
      start_step = start_from.step if start_from else 0
      check_names_are_free(model_dir.path, after=start_step, until=run.total_steps)
      if start_step < run.total_steps:
        check_room(model_dir.path, tree_bytes(program.abstract_saved))
  distributed.assert_equal_across_hosts(
    origin.record or (saved and saved.step),
    f'The latest checkpoint in {model_dir.path}',
    fix='Set MODEL_DIR to one folder of a file system that all processes share.',
    error=CheckpointError,
  )
  log(origin.text)
  plan = PlannedRun(
    **vars(checked),
    origin=origin,
    saved=start_from,
    lacks_evaluation=_lacks_evaluation(saved, run, model_dir),
  )
  if not plan.is_done:  # in the main thread, before `open_data` uses them in another
    opened, texts = _datasets(run)
    import_modules(*opened, texts=texts)
  return plan


def _lacks_evaluation(saved: Optional[CheckpointMetadata], run: Run, model_dir: ModelDir) -> bool:
  """Returns `PlannedRun.lacks_evaluation`; the same on all processes."""
  if saved is None or saved.manifest.get('metrics') != {} or not run.repeats_evaluation(saved.step):
    return False
  metrics, groups = model_dir.path / METRICS, tuple(f'{group}/' for group in EVALUATIONS)
  records: list[Optional[Record]] = []
  with distributed.errors_together():
    if distributed.is_main_process() and metrics.is_file():
      records = [parse_line(line) for line in metrics.read_bytes().splitlines()]
  return not distributed.broadcast_json(
    any(
      record is not None
      and record['step'] == saved.step
      and any(name.startswith(groups) for name in record)
      for record in records
    )
  )


def _check_steps_left(origin: Origin, total_steps: int) -> None:
  """Raises ConfigError if another run's checkpoint, whose steps count, has all of them."""
  if origin.saved is not None and origin.saved.step >= total_steps:
    step = origin.saved.step
    raise ConfigError(
      f'TRAIN_STEPS = {total_steps} leaves nothing to train: the run starts from {origin.path}, '
      f'which is at step {step}.',
      fix=f"TRAIN_STEPS counts the checkpoint's steps: set it to {step} + the steps to train.",
      parameters=('train.total_steps', 'RestoreConfig.path'),
      docs='finetune.md#what-a-run-starts-from',
    )


def modules_to_share(run: Run) -> list[str]:
  """Returns the large modules of its data that the fork server can import for all processes."""
  opened, texts = _datasets(run)
  return quiet_imports(*opened, texts=texts)


def _datasets(run: Run) -> tuple[tuple[Optional[DatasetConfig], ...], ...]:
  """Returns the datasets whose batches the run opens, and the datasets whose text it uses."""
  opened = (run.train_dataset_cfg, run.train_eval_dataset_cfg, run.infer_eval_dataset_cfg)
  return opened, (run.train_dataset_cfg if run.sample_cfg else None, run.infer_eval_dataset_cfg)


def _with_moments_of(
  model_dir: ModelDir, run: Run, program: Program, devices: list[Device]
) -> tuple[Run, Program]:
  """Returns run and program with the Adafactor.layers of the checkpoint that the run continues.

  A run that sets Adafactor.layers keeps its value. Versions before 0.3 did not have the setting and
  stored other moments.

  Args:
    model_dir: folder of the run.
    run, program: the run and its program with the default of Adafactor.layers.
    devices: devices of the mesh.
  """
  if not isinstance(run.optimizer, Adafactor) or run.optimizer.layers is not None:
    return run, program
  manifest = _continued(model_dir, run.initialize_from)
  if manifest is None or not moments_differ(manifest, program.abstract_saved):
    return run, program
  for layers in LAYERS:
    changed = dataclasses.replace(run, optimizer=dataclasses.replace(run.optimizer, layers=layers))
    found = build_program(changed, topology=program.layout.topology, devices=devices)
    if not differences(manifest, found.abstract_saved):
      version = manifest['versions'].get('t5x_gpu', 'unknown')
      log(
        f'optimizer: Adafactor.layers = {layers!r}, to match the second moments in the checkpoint '
        f'(t5x_gpu {version})'
      )
      return changed, found
  return run, program


def _continued(model_dir: ModelDir, start: Optional[RestoreConfig]) -> Optional[Json]:
  """Returns the manifest of the checkpoint whose optimizer state the run takes, or None."""
  with contextlib.suppress(OSError, ValueError, UserError):  # restoring reports the error
    if model_dir.steps:
      return model_dir.manifest(model_dir.steps[-1])
    if start is not None and start.mode in ('resume', 'new_data'):
      return ParamsReader(ModelDir(as_path(start.path)), step=start.step).manifest
  return None


def _report_host_counts(program: Program) -> None:
  """Reports to `launch` on how many hosts the run could continue, if `launch` asks for it."""
  if progress.HOST_COUNTS_VARIABLE in os.environ:
    hosts = jax.process_count() // int(os.environ['LOCAL_WORLD_SIZE'])
    if hosts == program.layout.topology.num_hosts:  # else they are not the hosts of the mesh
      progress.write_host_counts(os.environ, host_counts(program))


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
  if not run.model.sees_order:
    lines.append(
      "WARNING: relative_bias = 'none', and neither rope, ropes nor num_positions is set: this "
      'model does not see the order of its tokens.'
    )
  return '\n'.join(lines)
