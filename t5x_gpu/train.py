"""Train a model: `python -m t5x_gpu.train --gin_file=gin_configs/examples/demo.gin`.

Read this file first: it is the only place where configuration, mesh, data, model, checkpoints and
metrics meet. `train`'s arguments are what a gin file sets; below it come set-up, then the loop.
"""

import concurrent.futures
import functools
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Optional

import jax
import numpy as np

from t5x_gpu import cli
from t5x_gpu.checkpoint.checkpointer import CheckpointConfig
from t5x_gpu.checkpoint.initialize import RestoreConfig, open_sources, plan_start, resume_data
from t5x_gpu.checkpoint.local.local_tier import LocalTier, open_local_tier
from t5x_gpu.checkpoint.local.promotion import check_with_local
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.model_dir import Saved
from t5x_gpu.checkpoint.remote_checkpointer import AnyCheckpointer, open_checkpointer
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.checkpoint.run_files import RunFiles
from t5x_gpu.checkpoint.storage.paths import as_path
from t5x_gpu.checkpoint.storage.shared_folder import shared_model_dir
from t5x_gpu.config import gin_loader, report
from t5x_gpu.config.gin_files import GinFiles
from t5x_gpu.data.batches import (
  BatchIterator,
  DatasetConfig,
  batch_hash,
  import_modules,
  open_class_names,
  open_vocabulary,
)
from t5x_gpu.data.same_data import data_line
from t5x_gpu.data.sources.source_files import SourceFiles
from t5x_gpu.errors import CheckpointError, TrainingError
from t5x_gpu.evaluation.evaluator import (
  LOSS,
  Evaluations,
  batches_for,
  loss_metrics,
  open_evaluations,
)
from t5x_gpu.metrics import reduce
from t5x_gpu.metrics.end_of_run import closing_text
from t5x_gpu.metrics.recorder import METRICS, TENSORBOARD, Recorder
from t5x_gpu.models.decoding import DecodingConfig, SampleConfig, check_sample
from t5x_gpu.models.inference.generation import sample
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime import distributed, preemption
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster import topology as topology_lib
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.runtime.health import checks as health
from t5x_gpu.runtime.watchdog import Watchdog, WatchdogConfig
from t5x_gpu.runtime.xla import flags as xla_flags
from t5x_gpu.terminal import logging_setup
from t5x_gpu.training.checks import check_first_loss, check_periods
from t5x_gpu.training.memory import Memory, check_memory
from t5x_gpu.training.program import Program, build_program, compile_options
from t5x_gpu.training.same_step import check_same_step
from t5x_gpu.training.schedules import Schedule
from t5x_gpu.training.summary import parameter_table, size_line
from t5x_gpu.training.train_state import TrainState

_log = logging.getLogger(__name__)


def train(
  *,
  model: Any,
  model_dir: str,
  train_dataset_cfg: DatasetConfig,
  partitioner: Partitioner,
  optimizer: Any,
  learning_rate: Schedule,
  checkpoint_cfg: CheckpointConfig,
  total_steps: int,
  log_period: int,
  train_eval_dataset_cfg: Optional[DatasetConfig] = None,
  eval_period: Optional[int] = None,
  eval_steps: int = 20,
  infer_eval_dataset_cfg: Optional[DatasetConfig] = None,
  infer_eval_period: Optional[int] = None,
  decoding_cfg: Optional[DecodingConfig] = None,
  random_seed: int = 0,
  num_microbatches: int = 1,
  max_grad_norm: Optional[float] = None,
  loss_normalizing_factor: Optional[float] = None,
  learning_rate_scaling: Optional[str] = None,
  sample_cfg: Optional[SampleConfig] = None,
  initialize_from: Optional[RestoreConfig] = None,
  distributed_cfg: distributed.DistributedConfig = distributed.DistributedConfig(),
  watchdog_cfg: WatchdogConfig = WatchdogConfig(),
  watchdog: Optional[Watchdog] = None,
  xla_preset: str = 'default',
  xla: Optional[xla_flags.Applied] = None,
  summarize_config_fn: Optional[Callable[[str], None]] = None,
  dry_run: bool = False,
) -> int:
  """Trains until `total_steps`, continuing from the latest checkpoint in `model_dir` if any.

  Args:
    model: a model of models/ (or yours with the same methods).
    model_dir: folder of checkpoints, metrics and the configuration.
    train_dataset_cfg: what to train on.
    partitioner: how to split the run over the devices.
    optimizer: of training/optimizers or training/adafactor.
    learning_rate: schedule, a function of the step.
    checkpoint_cfg: when to save, how many to keep.
    total_steps: updates in all, those of earlier runs included.
    log_period: steps between log lines.
    train_eval_dataset_cfg: what to measure the loss on; None for no evaluation.
    eval_period, eval_steps: steps between evaluations (None: one at the end), batches of each.
    infer_eval_dataset_cfg: tasks whose metrics to compute (docs/eval.md); None for none.
    infer_eval_period: steps between them; None for once, at the end.
    decoding_cfg: how predictions for metrics are written; None for the likeliest tokens.
    random_seed: of initialisation and dropout; the data order has DatasetConfig.seed.
    num_microbatches: parts of the batch computed one after the other, to save memory.
    max_grad_norm: global norm to which gradients are clipped.
    loss_normalizing_factor: see training/train_step.py; None for the loss per target token.
    learning_rate_scaling: 'linear' or 'sqrt' in the number of replicas; None for none.
    sample_cfg: text to continue at the end.
    initialize_from: what to start from while `model_dir` has no checkpoint; None for the seed.
    distributed_cfg: how long several processes wait for each other; `main` has used it by now.
    watchdog_cfg, watchdog: deadlines after which a run that hangs ends; what is told of steps.
    xla_preset: of XLA and NCCL settings (docs/xla_flags.md); `main` has applied it as `xla`.
    xla: what was applied, to compile with; None for XLA's defaults.
    summarize_config_fn: called with `model_dir` once nothing can stop the run from starting.
    dry_run: check all of that, print it, and leave without a trace.
  Returns:
    The exit code: 0; for a run that was stopped and saved itself 85, 130 after Ctrl-C.
  """
  watchdog = watchdog or Watchdog(
    watchdog_cfg, process_index=jax.process_index(), process_count=jax.process_count()
  )
  # ---- 1. Shapes, shardings and every check that needs no data -------------------------------
  model_dir = str(shared_model_dir(model_dir, dry_run=dry_run))
  check_periods(
    total_steps=total_steps,
    log_period=log_period,
    eval_period=eval_period,
    eval_steps=eval_steps,
    infer_eval_period=infer_eval_period,
  )
  checkpoint_cfg.check_best(
    total_steps,
    train_eval_dataset_cfg and eval_period,
    infer_eval_dataset_cfg and infer_eval_period,
  )
  program = _build(
    model=model,
    optimizer=optimizer,
    schedule=learning_rate,
    partitioner=partitioner,
    dataset=train_dataset_cfg,
    seed=random_seed,
    num_microbatches=num_microbatches,
    max_grad_norm=max_grad_norm,
    loss_normalizing_factor=loss_normalizing_factor,
    learning_rate_scaling=learning_rate_scaling,
  )
  memory = _introduce(program, model, learning_rate_scaling, num_microbatches, dry_run=dry_run)
  local = open_local_tier(checkpoint_cfg, model_dir, program.abstract_state)
  saved = check_with_local(model_dir, local, target=program.abstract_state, dry_run=dry_run)
  start = plan_start(initialize_from, program, model, saved=saved)
  distributed.assert_equal_across_hosts(
    start.origin or (saved and saved.step),
    f'The latest checkpoint in {model_dir}',
    fix='Set MODEL_DIR to one folder of a file system that all processes share.',
    error=CheckpointError,
  )
  _say(start.text)
  saved = saved or start.saved
  if saved and saved.step >= total_steps:
    _say(_nothing_to_do(start.path or model_dir, saved.step, total_steps))
    return 0

  # ---- 2. Open the data while XLA compiles ----------------------------------------------------
  import_modules(train_dataset_cfg, train_eval_dataset_cfg, infer_eval_dataset_cfg)
  open_data = functools.partial(
    _open_data,
    model,
    program,
    train_dataset_cfg,
    saved,
    sample_cfg,
    start.path or model_dir,
    loss=(train_eval_dataset_cfg, eval_steps, eval_period),
    keep=checkpoint_cfg.kept,
    total_steps=total_steps,
    tasks=(infer_eval_dataset_cfg, decoding_cfg, infer_eval_period),
  )
  if dry_run:
    _same_on_hosts(*open_data())
    _say(_dry_run_text(memory, saved))
    return 0
  train_step, fresh, (data, text, evaluations) = _compile_while(open_data, memory, xla, saved)

  # ---- 3. State: the latest checkpoint, else another run's, else a fresh one -------------------
  checkpointer = open_checkpointer(model_dir, keep=checkpoint_cfg.kept)
  state, restored = start.first_state(checkpointer, program, fresh, local)
  first_step = int(state.step)
  if restored:
    if not saved or saved.step != first_step:  # the latest one cannot be read
      resume_data(data, data_state=restored.data_state, manifest=restored.manifest)
    _say(f'Continuing from {restored.path}.')
  if summarize_config_fn is not None and jax.process_index() == 0:
    summarize_config_fn(str(checkpointer.files.folder))

  # ---- 4. The loop -----------------------------------------------------------------------------
  def step_done(step: int, sums: reduce.Sums) -> None:
    watchdog.step_done(step)
    _check_step(step, sums, checkpointer)
    if step == 1 and not start.origin:
      check_first_loss(reduce.means(sums).values.get('cross_entropy'), model)

  recorder = Recorder(
    checkpointer.files.folder,
    total_steps=total_steps,
    first_step=first_step,
    tokens_per_step=math.prod(next(iter(program.spec.shapes.values()))),
    is_main=jax.process_index() == 0,
    step_done=step_done,
  )
  stop = preemption.StopRequest(before_end_seconds=checkpoint_cfg.stop_before_end_seconds)
  with checkpointer.files as run, text.kept_in(run.folder), stop, recorder, checkpointer, local:
    for step in range(first_step + 1, total_steps + 1):
      with recorder.timer.input_wait():
        batch = next(data)
      state, sums = train_step(state, program.layout.put_batch(batch))
      recorder.dispatched(step, sums)
      is_last = stop.reached(step) or step == total_steps
      evaluation = None
      if evaluations.due(step):
        recorder.finish()
        with watchdog.phase('eval'), recorder.timer.pause('eval'):
          evaluation = evaluations.run(step, state, show=recorder.show)
      if is_last or evaluation or step == 1 or step % log_period == 0:
        recorder.log(step, evaluation)
      saver = checkpointer if is_last or step % checkpoint_cfg.period == 0 else local.due(step)
      if saver is not None:
        recorder.finish()
        with watchdog.phase('save'), recorder.timer.pause(saver.pause):
          _save(saver, step, program, state, data, start.origin_of(restored), evaluation)
      if is_last:
        break
    with watchdog.phase('save'):
      checkpointer.wait()

  # ---- 5. Leave: everything committed, and what to look at -------------------------------------
  if stop.signal is not None and step < total_steps:
    _say(
      f'Stopped by {stop.signal.name} at step {step}; saved {checkpointer.path(step)}. '
      'The same command continues it.'
    )
    return stop.exit_code
  if sample_cfg is not None:
    with watchdog.phase('eval'):
      _say(_sample_text(model, program, state, train_dataset_cfg, sample_cfg))
  if jax.process_index() == 0:
    _say(_closing(checkpointer.files, step, model, evaluations.confusion, train_dataset_cfg))
  return 0


def _introduce(
  program: Program, model: Any, scaling: Optional[str], num_microbatches: int, *, dry_run: bool
) -> Memory:
  """Prints the mesh and the model; returns what memory the run needs and has.

  Raises:
    OutOfMemoryError: it cannot fit.
  """
  rate = (
    []
    if scaling is None
    else [
      f'learning rate: x {program.learning_rate_factor:g} ({scaling} in '
      f'{program.layout.batch_parts} replicas)'
    ]
  )
  _say(
    '\n'.join(
      [
        *rate,
        program.layout.table(),
        *([parameter_table(program)] if dry_run else []),
        f'model: {type(model).__name__}, {size_line(program)}',
      ]
    )
  )
  return check_memory(program, model, num_microbatches=num_microbatches)


def _build(*, dataset: DatasetConfig, **options: Any) -> Program:
  topology, devices = topology_lib.discover()
  return build_program(
    topology=topology,
    devices=devices,
    pack=dataset.pack,
    task_feature_lengths=dataset.task_feature_lengths,
    batch_size=dataset.batch_size,
    **options,
  )


def _dry_run_text(memory: Memory, saved: Optional[Saved]) -> str:
  return f'{memory.line()}\nDry run: the run could start. Steps done: {saved.step if saved else 0}.'


def _compile_while(
  open_data: Callable[[], Any],
  memory: Memory,
  xla: Optional[xla_flags.Applied],
  saved: Optional[Saved],
) -> tuple[Callable[..., Any], Optional[TrainState], Any]:
  """Returns the compiled step, a fresh state unless `saved`, and what `open_data` returned.

  Raises:
    OutOfMemoryError: the compiled step does not fit.
  """
  program = memory.program
  with concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='open_data') as pool:
    opening = pool.submit(open_data)
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    check_same_step(lowered)
    if opening.done():
      opening.result()  # a mistake in the data is told before the compile, where it is quick
    train_step = lowered.compile(compiler_options=compile_options(program, xla))
    memory = memory.compiled(train_step)
    fresh = None if saved else program.init()  # compiles, too: better now than after the data
    opened = _same_on_hosts(*opening.result())
  _say(memory.line())
  return train_step, fresh, opened


def _same_on_hosts(
  data: BatchIterator, text: SourceFiles, evaluations: Evaluations
) -> tuple[BatchIterator, SourceFiles, Evaluations]:
  """Returns its arguments. Raises DataError, on all processes, if hosts read different data."""
  evaluations.check_same_on_hosts(data)
  return data, text, evaluations


def _open_data(
  model: Any,
  program: Program,
  train_cfg: DatasetConfig,
  saved: Optional[Saved],
  sample_cfg: Optional[SampleConfig],
  folder: str,
  keep: Keep,
  **evaluations: Any,
) -> tuple[BatchIterator, SourceFiles, Evaluations]:
  """Returns training data, checked and where `saved` left it, its files, and what evaluates."""
  if sample_cfg is not None:  # raises now rather than after the last step
    prompt = _vocabulary(model, train_cfg).encode(sample_cfg.prompt)
    check_sample(len(prompt), num_tokens=sample_cfg.num_tokens, length=_length(program))
  needs_loss = bool(keep.best) and keep.metric.startswith(LOSS)
  if needs_loss:
    keep.value_of(loss_metrics(program))  # a misspelt one is told now, too
  data = batches_for(model, train_cfg, repeat=True)
  _say(data_line(data.describe(), process_count=jax.process_count()))
  program.spec.check(data.peek())
  text = open_sources(data, as_path(folder), resumed=bool(saved))
  if saved:
    resume_data(data, data_state=saved.data_state, manifest=saved.manifest)
  return data, text, open_evaluations(model, program, loss_required=needs_loss, **evaluations)


def _save(
  saver: AnyCheckpointer | LocalTier,
  step: int,
  program: Program,
  state: TrainState,
  data: BatchIterator,
  started_from: Optional[Mapping[str, Any]],
  metrics: Optional[Mapping[str, float]],
) -> None:
  """Starts to write the checkpoint of `step`; returns once `state` may be overwritten."""
  data_state = data.get_state()
  saved_state = program.in_model_order(state)
  saver.save(
    step,
    saved_state,
    data_state=data_state,
    manifest=make_manifest(
      saved_state,
      mesh_shape=program.layout.mesh.shape,
      data=data.describe(),
      next_batch_hash=batch_hash(data.peek()),
      started_from=started_from,
      metrics=metrics,
    ),
  )


def _closing(
  files: RunFiles, step: int, model: Any, confusion: Optional[np.ndarray], dataset: DatasetConfig
) -> str:
  names = None if confusion is None else open_class_names(dataset)
  text = closing_text(
    files.folder,
    shown=str(files.model_dir),
    step=step,
    num_outcomes=model.num_outcomes,
    confusion=confusion,
    class_names=names,
  )
  files.push()
  return text


def _nothing_to_do(where: str, step: int, total_steps: int) -> str:
  return (
    f'{where} is already at step {step}; nothing to do up to TRAIN_STEPS = '
    f'{total_steps}. Set TRAIN_STEPS higher to train on.'
  )


def _check_step(
  step: int, sums: Mapping[str, tuple[float, float]], checkpointer: AnyCheckpointer
) -> None:
  """Raises TrainingError for a step that is not finite, CheckpointError for a save that failed."""
  checkpointer.check()
  bad = [name for name, (total, _) in sums.items() if not math.isfinite(total)]
  if bad:
    checkpointer.wait()  # what is on its way is good
    steps = checkpointer.steps()
    saved = f'checkpoint_{steps[-1]} is intact.' if steps else 'No checkpoint exists yet.'
    raise TrainingError(
      f'Step {step}: {", ".join(bad)} is not finite. The run stops, nothing of this step is '
      f'saved; {saved}',
      fix='Lower the learning rate, lengthen the warm-up, set train.max_grad_norm = 1.0 or '
      'z_loss = 1e-4, then start again.',
      parameters=('train.learning_rate', 'train.max_grad_norm'),
    )


def _sample_text(
  model: Any, program: Program, state: TrainState, dataset: DatasetConfig, config: SampleConfig
) -> str:
  params = program.in_model_order(state).params
  vocabulary = _vocabulary(model, dataset)
  prompt = np.asarray(vocabulary.encode(config.prompt), np.int32)
  ids = sample(
    model,
    params,
    prompt,
    layout=program.layout,
    length=_length(program),
    num_tokens=config.num_tokens,
    temperature=config.temperature,
    zero_is_padding=vocabulary.moved_zero_id is None,
  )
  text = vocabulary.decode([int(i) for i in ids])
  return f'Sample (temperature {config.temperature}, prompt {config.prompt!r}):\n{text}\n'


def _vocabulary(model: Any, dataset: DatasetConfig) -> Any:
  return open_vocabulary(
    dataset, feature_converter=model.feature_converter(dataset.task_feature_lengths)
  )


def _length(program: Program) -> int:
  """Returns the positions of a row."""
  return next(iter(program.spec.shapes.values()))[1]


def _say(text: str) -> None:
  if jax.process_index() == 0 and text:
    print(f'{logging_setup.stamp(sys.stdout)}{text}', flush=True)


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files, then trains."""
  preemption.catch_early()
  args = cli.parse_args(
    'python -m t5x_gpu.train',
    __doc__.splitlines()[0],
    sys.argv[1:] if argv is None else argv,
    extra=cluster_lib.add_flags,
  )
  cluster = cluster_lib.detect_here(args.extra)
  preemption.expect_end(cluster.end_time)
  if args.tfds_data_dir:
    os.environ['TFDS_DATA_DIR'] = args.tfds_data_dir
  logging_setup.quiet_environment()
  loaded = gin_loader.load(
    args.gin_files, bindings=args.bindings, search_paths=args.gin_search_paths
  )
  arguments = loaded.arguments()
  xla = distributed.start(cluster, arguments)
  # From here on this process uses devices, which may never answer.
  with Watchdog(
    arguments.get('watchdog_cfg', WatchdogConfig()),
    process_index=cluster.process_index,
    process_count=cluster.process_count,
    store=coordination_store(),
  ) as watchdog:
    logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
    if jax.process_index() == 0:
      report.print_changes(
        loaded.provenance,
        files=GinFiles(args.gin_search_paths),
        model_dir=str(arguments['model_dir']),
      )
      members = [distributed.members_table()] if distributed.members() else []
      _say(
        '\n'.join(
          [
            str(cluster),
            *(f'WARNING: {warning}' for warning in cluster.warnings),
            xla.report(),
            *members,
            *(f'note: {note}' for note in loaded.notes),
          ]
        )
      )

    def write_config(folder: str) -> None:
      changes = report.write(loaded.provenance, folder)
      _say(f'where to look: {arguments["model_dir"]}: {METRICS}, {TENSORBOARD}/, {report.ORIGINS}')
      if changes:
        _say('Changed since the last run:\n' + '\n'.join(f'  {change}' for change in changes))

    health.log_problems()
    distributed.assert_equal_across_hosts(
      {setting.key: setting.value for setting in loaded.provenance.settings}, 'The configuration'
    )
    return train(
      **arguments,
      summarize_config_fn=write_config,
      dry_run=args.dry_run,
      watchdog=watchdog,
      xla=xla,
    )


if __name__ == '__main__':
  # Under its own name: gin files import t5x_gpu.train, and there must be one of it, not two.
  from t5x_gpu.train import main as main_

  cli.run_main(main_)
