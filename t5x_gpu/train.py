"""Train a model: `python -m t5x_gpu.train --gin_file=gin_configs/examples/demo.gin`.

Read this file first: `main` starts the process and reads the settings, `train_run` is the run, and
`take_steps` is its loop. The stages are modules of run/, in the order they run: config, check,
live (which opens data), finish.
"""

import argparse
import functools
import os
from typing import Any, Optional

import jax

from t5x_gpu import cli
from t5x_gpu.checkpoint.local.promotion import promote_local
from t5x_gpu.config import gin_loader
from t5x_gpu.config.gin_loader import LoadedConfig
from t5x_gpu.metrics.goodput import Goodput
from t5x_gpu.run import profiler as profiler_lib
from t5x_gpu.run.check import check, modules_to_share, plan_run
from t5x_gpu.run.config import Run, introduce, write_config
from t5x_gpu.run.data import open_data
from t5x_gpu.run.early_stopping import EarlyStop
from t5x_gpu.run.finish import export_line, finish
from t5x_gpu.run.live import LiveRun, check_cache, open_recorder, open_run, precompile, start_facts
from t5x_gpu.runtime import distributed, machine, preemption
from t5x_gpu.runtime.cluster import cluster as cluster_lib
from t5x_gpu.runtime.cluster import fork_server, interruptions
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.runtime.health import checks as health
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.runtime.xla import flags, programs
from t5x_gpu.terminal import logging_setup, streams
from t5x_gpu.training.state import TrainState


@functools.wraps(Run, assigned=(), updated=())  # gin and help() read the parameters off `Run`
def train(**settings: Any) -> int:
  """Trains a model. `Run` declares and describes the parameters, which gin files set.

  A parameter that T5X's `train` also has keeps its T5X name.
  """
  return train_run(Run(**settings))


def train_run(
  run: Run,
  *,
  watchdog: Optional[Watchdog] = None,
  xla: Optional[flags.Applied] = None,
  loaded: Optional[LoadedConfig] = None,
  dry_run: bool = False,
  only_compile: bool = False,
) -> int:
  """Trains until `run.total_steps`, from the latest checkpoint in `run.model_dir` if there is one.

  Args:
    run: settings of the run.
    watchdog: notified after every step; created if None.
    xla: settings to compile with; None for XLA's defaults.
    loaded: the configuration files of `run`, which are written to its folder once nothing can stop
      the run from starting; None to write none.
    dry_run: run all checks, print the plan, write nothing.
    only_compile: run all checks, compile into the cache, write nothing else.
  Returns:
    The exit code: 0; after a stop signal and a save 85, after Ctrl-C 130.
  """
  watchdog = watchdog or Watchdog(
    run.watchdog_cfg, process_index=jax.process_index(), process_count=jax.process_count()
  )
  if only_compile:
    check_cache()
  changes_nothing = dry_run or only_compile
  checked = check(run, dry_run=changes_nothing)
  log(export_line(run))
  with checked.model_dir as model_dir:
    if not changes_nothing:
      model_dir.lock(wait=True)  # until the run ends, no other run may write there
    promoted = promote_local(
      model_dir, checked.local, target=checked.program.abstract_saved, dry_run=changes_nothing
    )
    plan = plan_run(checked, watchdog=watchdog, promoted=promoted)
    run = plan.run
    if only_compile:
      log(precompile(plan, xla=xla))
      return 0
    if plan.is_done:
      log(plan.already_done_text())
      return 0
    if run.export_cfg is not None:
      run.export_cfg.check(run.model, run.model_dir)
    if dry_run:
      open_data(plan).check_same_on_hosts()
      log(plan.dry_run_text())
      return 0
    with Goodput(
      enabled=distributed.is_main_process(),
      age_seconds=machine.seconds_since_start(),
      now=interruptions.run_clock(os.environ),
    ) as goodput:
      if model_dir.steps and not model_dir.is_remote:
        # A failed restart counts too.
        goodput.open(model_dir.path, facts=interruptions.facts(os.environ))
      live, state = open_run(plan, xla=xla, goodput=goodput)
      model_dir.lock()  # checks that no other run took over meanwhile
      folder = live.checkpointer.files.folder
      streams.keep_in(folder, process_index=jax.process_index())
      if loaded is not None and distributed.is_main_process():
        write_config(run, loaded, str(folder))
      stop = preemption.StopRequest(before_end_seconds=run.checkpoint_cfg.stop_before_end_seconds)
      state, step = take_steps(live, state, stop=stop, watchdog=watchdog)
      log(goodput.summary())
      if stop.signal is not None and (step < run.total_steps or stop.interrupted):
        is_saved = step in live.checkpointer.steps()
        saved = f'saved {live.checkpointer.path(step)}' if is_saved else 'there is nothing to save'
        log(
          f'Stopped by {stop.signal.name} at step {step}; {saved}. The same command continues it.'
        )
        return stop.exit_code
      with goodput.phase('eval'):
        finish(live, state, step, watchdog)
      return 0


def take_steps(
  live: LiveRun, state: TrainState, *, stop: preemption.StopRequest, watchdog: Watchdog
) -> tuple[TrainState, int]:
  """Trains until the last step or until `stop`; returns the state and its step, which is saved.

  Raises:
    TrainingError: a step is not finite.
    CheckpointError: a checkpoint cannot be written.
    DataError: the training text has changed or cannot be read; the last good step is saved.
    Exception: an evaluation fails (the step is saved), or a custom data module.
  """
  run, data, checkpointer = live.plan.run, live.data, live.checkpointer
  recorder = open_recorder(live, watchdog)
  # Left in reverse order: while the checkpointer waits for its save, `stop` still handles signals;
  # `files` copies the last lines of the recorder.
  with (
    checkpointer.files as files,
    data.source_files.kept_in(files.folder),
    stop,
    recorder,
    profiler_lib.open_profiler(live, recorder) as profiler,
    checkpointer,
    live.plan.local,
  ):
    live.goodput.open(files.folder, first_step=live.first_step, facts=start_facts(live))
    log(live.goodput.interruption())
    step, problem, metrics = live.first_step, None, None
    evaluate = functools.partial(
      data.evaluations.run, folder=files.folder, show=stop.interrupting(recorder.show)
    )
    if run.run_eval_before_training or live.evaluates_first:
      with watchdog.phase('eval'), recorder.timer.pause('eval'):
        try:
          # An early stop ends with all evaluations.
          metrics = evaluate(
            step, state, all_parts=run.run_eval_before_training or run.early_stopping is not None
          )
        except preemption.Stopped:
          log(f'The evaluation after step {step} was interrupted; the next start repeats it.')
      if metrics:
        recorder.log(step, metrics, evaluated=data.evaluations.evaluated)
      recorder.timer.restart()  # the ETA expects no such pause again
    early_stop = EarlyStop(
      run.early_stopping, *run.eval_periods, folder=files.folder, first_step=step
    )
    last_step = step if stop.interrupted or early_stop.is_due(step) else run.total_steps
    for step in range(live.first_step + 1, last_step + 1):
      with profiler.step(step):
        with recorder.timer.input_wait():
          batch = live.next_batch()
        num_read = int(not isinstance(batch, Exception))
        if changed := data.watch.look(step, now=not num_read):
          recorder.finish()
          with watchdog.phase('save'):
            live.stop_at_changed_text(changed, step - 1, state, ago=num_read, stop=stop)
        with recorder.timer.dispatch():
          placed = live.put_batch(batch) if num_read else batch
        if isinstance(placed, Exception):
          with watchdog.phase('save'):
            live.check_all_failed(placed, f'batch/{step}')
            recorder.finish()
            live.stop_at_failed_data(placed, step - 1, state, ago=num_read)
        with recorder.timer.dispatch():
          state, sums = live.train_step(state, placed)
        recorder.dispatched(step, sums)
      is_last = is_end = step == run.total_steps
      is_last |= stop.reached()
      metrics = problem = None
      if data.evaluations.due(step):
        recorder.finish()
        with watchdog.phase('eval'), recorder.timer.pause('eval'):
          try:
            stop.interrupt()
            metrics = evaluate(step, state) or None
            if not is_last and early_stop.is_due(step, metrics):
              is_last = is_end = True
              metrics = {**(metrics or {}), **evaluate(step, state, rest=True)}
          except preemption.Stopped:
            again = '; the next start repeats it' if run.repeats_evaluation(step) else ''
            log(f'The evaluation after step {step} was interrupted{again}.')
            metrics, is_last, is_end = {}, True, step == run.total_steps
          except Exception as e:  # a metric, a batch or a device failed: save the step first
            live.report_failed_evaluation(e, step)
            problem, is_last = e, True
      if is_last or metrics or step == 1 or step % run.log_period == 0:
        recorder.log(step, metrics, evaluated=data.evaluations.evaluated)
      saver = live.saver_due(step, is_last=is_last)
      if saver is not None:
        recorder.finish()
        with watchdog.phase('save'), recorder.timer.pause(saver.pause):
          live.save(saver, step, state, metrics, is_end=is_end)
      if is_last:
        break
    with watchdog.phase('save'), live.goodput.phase('save'):
      checkpointer.wait()
    if problem is not None:
      raise problem
    live.goodput.ends('done' if stop.signal is None else stop.signal.name)
  return state, step


def main(argv: Optional[list[str]] = None) -> int:
  """Parses flags and gin files, then trains."""
  preemption.catch_early()  # stop signals,
  profiler_lib.catch_early()  # and the signal that asks for a profile
  args = cli.parse_args('python -m t5x_gpu.train', __doc__.splitlines()[0], argv, extra=_add_flags)
  if not args.dry_run:  # a dry run exists for its output
    streams.outlive()
  logging_setup.quiet_environment()
  loaded = args.load_with_classes()
  run = gin_loader.configured(loaded, Run)
  if fork_server.answers(lambda: modules_to_share(run)):
    return 0
  cluster = cluster_lib.detect_here(args.extra)
  preemption.expect_end(cluster.end_time)
  xla = distributed.start(cluster, run.distributed_cfg, xla_preset=run.xla_preset)
  # From here on this process uses devices, which may hang forever.
  with Watchdog(
    run.watchdog_cfg,
    process_index=cluster.process_index,
    process_count=cluster.process_count,
    store=coordination_store(),
  ) as watchdog:
    logging_setup.setup(process_index=jax.process_index(), process_count=jax.process_count())
    programs.start_cache(jax.default_backend(), num_devices=jax.device_count(), environ=os.environ)
    introduce(
      run, loaded, cluster, xla, gin_files=args.gin_files, gin_search_paths=args.gin_search_paths
    )
    health.log_problems()
    code = train_run(
      run,
      watchdog=watchdog,
      xla=xla,
      loaded=loaded,
      dry_run=args.dry_run,
      only_compile=args.extra.precompile,
    )
  if code == 0 and run.export_cfg is not None and not (args.dry_run or args.extra.precompile):
    code = run.export_cfg.write(run.model_dir)
  return code


def _add_flags(parser: argparse.ArgumentParser) -> None:
  parser.add_argument(
    '--precompile',
    action='store_true',
    help='compile the programs of the run into the cache, and exit without training',
  )
  cluster_lib.add_flags(parser)


if __name__ == '__main__':
  # Gin files import t5x_gpu.train; running `__main__` would create a second copy of the module.
  from t5x_gpu.train import main as main_

  cli.run_main(main_)
