"""`LiveRun`: a run that can take and save steps. `open_run` compiles it and restores its state.

`open_recorder` opens the measurements, and `BadSteps` checks each finished step. `precompile` only
compiles the programs of a run into the cache, for later runs.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Optional, TypeVar

import jax
import numpy as np

from t5x_gpu.checkpoint.local.tier import LocalTier
from t5x_gpu.checkpoint.manifest import GRAD_NORMS, make_manifest
from t5x_gpu.checkpoint.remote_checkpointer import AnyCheckpointer, open_checkpointer
from t5x_gpu.checkpoint.run_files import carry_hf_folder
from t5x_gpu.compiled.kernels import fp8_lines
from t5x_gpu.data.batches import Batch, batch_hash, optional_method
from t5x_gpu.data.data_module import Vocabulary, spec_for
from t5x_gpu.errors import ConfigError, DataError, TrainingError, first_line, listed, task_error
from t5x_gpu.metrics import reduce
from t5x_gpu.metrics.goodput import Goodput
from t5x_gpu.metrics.monitor import Monitor, RankReports, model_speed
from t5x_gpu.metrics.recorder import Recorder
from t5x_gpu.metrics.writers import read_json_lines
from t5x_gpu.models.flops import step_tokens
from t5x_gpu.models.model import DeviceBatch, Model
from t5x_gpu.run.check import PlannedRun
from t5x_gpu.run.data import RunData, open_data, resume_data, text_vocabulary_of
from t5x_gpu.runtime import distributed, preemption, process_exit
from t5x_gpu.runtime.cluster import interruptions
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.runtime.distributed import is_main_process
from t5x_gpu.runtime.health.gpu_sensors import GpuSensors, own_uuids
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.preemption import StopRequest
from t5x_gpu.runtime.progress import ProgressFile
from t5x_gpu.runtime.watchdog import Watchdog
from t5x_gpu.runtime.xla import flags, programs
from t5x_gpu.runtime.xla.programs import compile_errors
from t5x_gpu.storage.json_schema import Json, JsonObject
from t5x_gpu.training.program import compile_options
from t5x_gpu.training.spikes import SpikeConfig, known_norms
from t5x_gpu.training.state import TrainState

_log = logging.getLogger(__name__)


_LISTED = 5  # files that have changed
# For other processes to fail as this one does: read the batch, or end their evaluation.
_SAME_BATCH_SECONDS, _SAME_EVALUATION_SECONDS = 5, 20
_T = TypeVar('_T')

CompiledStep = Callable[[TrainState, DeviceBatch], tuple[TrainState, reduce.DeviceSums]]


@dataclasses.dataclass(frozen=True)
class LiveRun:
  """A run that can take steps. It does not hold the state, which every step replaces.

  Attributes:
    plan: the checked run.
    train_step: the compiled step: (state, batch) -> (state, sums).
    data: batches of the next steps, and the evaluations.
    checkpointer: saves to MODEL_DIR.
    first_step: number of steps taken before the first state.
    started_from: where the run started, for its manifests; None for the seed.
    goodput: records where the time goes.
    bad_steps: checks each finished step, counts the skipped ones, writes their batches.
  """

  plan: PlannedRun
  train_step: CompiledStep
  data: RunData
  checkpointer: AnyCheckpointer
  first_step: int
  started_from: Optional[Json]
  goodput: Goodput
  bad_steps: 'BadSteps'

  @property
  def tokens_per_step(self) -> int:
    """Tokens of the global batch, padding included; inputs and targets."""
    return step_tokens(self.plan.run.model, self.plan.program.spec.shapes)

  @property
  def evaluates_first(self) -> bool:
    """Whether the evaluation after `first_step` is due: a stop signal had ended it."""
    return self.plan.lacks_evaluation and self.plan.saved.step == self.first_step

  def next_batch(self) -> Batch | Exception:
    """Returns the batch of the next step, or the reason why it cannot be read."""
    return _or_error(lambda: next(self.data.batches))

  def put_batch(self, batch: Batch) -> DeviceBatch | Exception:
    """Returns the batch on the devices, or the reason why its rows cannot be read.

    `bad_steps` remembers its rows.
    """
    self.bad_steps.read(batch)
    return _or_error(lambda: self.plan.program.put_batch(batch))

  def saver_due(self, step: int, *, is_last: bool) -> AnyCheckpointer | LocalTier | None:
    """Returns the saver to use after `step`; None for no checkpoint."""
    if is_last or self.plan.run.checkpoint_cfg.is_due(step):
      return self.checkpointer
    return self.plan.local.due(step)

  def save(
    self,
    saver: AnyCheckpointer | LocalTier,
    step: int,
    state: TrainState,
    metrics: Optional[Mapping[str, float]],
    *,
    is_end: bool = False,
  ) -> None:
    """Starts to write the checkpoint of `step`; returns once `state` may be overwritten.

    Args:
      saver: where to save.
      step, state, metrics: the step, its state and the metrics of its evaluations.
      is_end: the run is done, so that no next batch is needed.
    Raises:
      DataError: a source file has changed since the run began.
      Exception: the next batch cannot be read; the step is saved.
    """
    batches = self.data.batches
    found = _or_error(lambda: (batches.get_state(), batch_hash(batches.peek())))
    failure = found if isinstance(found, Exception) else None
    # Look after taking the state: if no file has changed by now, the state contains no changed
    # text.
    changed = distributed.broadcast_json(self.data.watch.look(step, now=True))
    failure = _failure_of_any(failure)
    if changed:
      self._raise_for_changed_text(changed, step, state, metrics=metrics, is_end=is_end)
    elif failure is None:
      data_state, next_hash = found
      self._save(saver, step, state, data_state, next_hash=next_hash, metrics=metrics)
    else:
      unsaved = self._save_before(failure, step, state, metrics=metrics)
      if not is_end:
        raise failure
      if unsaved is not None:
        raise unsaved

  def report_failed_evaluation(self, failure: Exception, step: int) -> None:
    """Logs why an evaluation has failed; the caller saves `step` and raises `failure`.

    Raises:
      Exception: `failure`, if it did not happen on all processes, which then cannot save together.
    """
    _log.error('The evaluation after step %d has failed: %s', step, first_line(failure))
    self.check_all_failed(failure, f'evaluation/{step}', seconds=_SAME_EVALUATION_SECONDS)

  def check_all_failed(
    self, failure: Exception, what: str, *, seconds: float = _SAME_BATCH_SECONDS
  ) -> None:
    """Raises `failure` unless all processes fail alike, and so can save together.

    A process without the failure waits in the next collective.

    Args:
      failure: the error of this process.
      what: the operation that has failed, and its step; the processes meet there only once.
      seconds: how long to wait for the other processes.
    """
    store = coordination_store()
    if store is not None:
      try:
        store.wait_for_all(f't5x_gpu/failed/{what}', seconds=seconds)
      except Exception:  # XLA raises no specific class
        raise failure from None

  def stop_at_failed_data(
    self, failure: Exception, step: int, state: TrainState, *, ago: int
  ) -> None:
    """Ends the run, on all processes, because the next batch cannot be read.

    Args:
      failure: the reason.
      step, state: the last step and its state, which is saved if its data position is known.
      ago: number of batches read since `step`.
    Raises:
      Exception: `failure`, or DataError if source files have changed.
    """
    changed = distributed.broadcast_json(self.data.watch.look(step + 1, now=True))
    if changed:
      self._raise_for_changed_text(changed, step, state, ago=ago)
    self._save_before(failure, step, state, ago=ago)
    raise failure

  def _save_before(
    self,
    failure: Exception,
    step: int,
    state: TrainState,
    *,
    ago: int = 0,
    metrics: Optional[Mapping[str, float]] = None,
  ) -> Optional[Exception]:
    """Saves the last step before a batch that cannot be read; logs where the run can continue.

    Returns the reason why it cannot be saved.
    """
    counted_state = optional_method(self.data.batches, 'counted_state')
    try:
      if counted_state is not None:
        data_state = counted_state(ago=ago)
      elif not ago:
        data_state = self.data.batches.get_state()
      else:
        return None  # the module cannot go back
      self._save_last(step, state, data_state, metrics=metrics)
    except Exception as e:  # a custom data module may raise anything
      _log.error('Step %d cannot be saved: %s', step, e)
      return e
    steps = self.checkpointer.steps()
    if distributed.is_main_process() and steps:
      _log.warning(
        'The batch of step %d cannot be read: %s. checkpoint_%d has all steps before it.',
        step + 1,
        first_line(failure).rstrip('.'),
        steps[-1],
      )
    return None

  def _save_last(
    self, step: int, state: TrainState, data_state: bytes, *, metrics: Optional[Mapping[str, float]]
  ) -> None:
    """Saves a step before an error of the data ends the run; waits for the commit."""
    checkpointer = self.checkpointer
    checkpointer.wait()
    if step > self.first_step and step not in checkpointer.steps():
      self._save(checkpointer, step, state, data_state, next_hash='', metrics=metrics)
      checkpointer.wait()

  def stop_at_changed_text(
    self, changed: list[str], step: int, state: TrainState, *, ago: int, stop: StopRequest
  ) -> None:
    """Ends the run because source files have changed.

    Args:
      changed: one line per changed file.
      step, state: the last step and its state.
      ago: number of batches read since `step`.
      stop: with several processes this is process 0, and all processes stop after a later step.
    Raises:
      DataError: this is the only process.
    """
    if distributed.process_count() == 1:
      self._raise_for_changed_text(changed, step, state, ago=ago)
    stop.request('The training text has changed: stopping within a few steps, without saving.')

  def _raise_for_changed_text(
    self,
    changed: list[str],
    step: int,
    state: TrainState,
    *,
    ago: int = 0,
    metrics: Optional[Mapping[str, float]] = None,
    is_end: bool = False,
  ) -> None:
    """Saves the state after `step` if all its text was read before the change; then raises.

    Args:
      changed: one line per changed file.
      step, state, metrics: the step to save, its state and its metrics.
      ago: number of batches read since `step`.
      is_end: the run is done.
    Raises:
      DataError: always, unless the run is done and the step is saved.
    """
    checkpointer = self.checkpointer
    checkpointer.wait()
    counted_state = optional_method(self.data.batches, 'counted_state')
    is_good = distributed.broadcast_json(self.data.watch.unchanged_at) >= step
    is_good = is_good and counted_state is not None
    if is_good:
      # Buffers may hold changed text, so the saved position is only the number of batches.
      self._save_last(step, state, counted_state(ago=ago), metrics=metrics)
    steps = checkpointer.steps()
    what = 'The training text has changed during the run:' + ''.join(
      f'\n  {line}' for line in listed(changed, _LISTED)
    )
    if is_good and is_end:
      if distributed.is_main_process():
        _log.warning('%s\nThe run had already read all of its text.', what)
      return
    raise task_error(
      what
      + (
        f'\ncheckpoint_{steps[-1]} was trained on the original text alone.'
        if steps
        else '\nNo checkpoint exists yet.'
      ),
      fix='Restore the original files with their modification times (cp -a, rsync -a), then run '
      'the same command: it continues from the last checkpoint.\nOr start a new run in another '
      'MODEL_DIR.',
      docs='data.md#changed-source-files',
    )

  def _save(
    self,
    saver: AnyCheckpointer | LocalTier,
    step: int,
    state: TrainState,
    data_state: bytes,
    *,
    next_hash: str,
    metrics: Optional[Mapping[str, float]],
  ) -> None:
    program = self.plan.program
    saved_state = program.in_saved_form(state)
    manifest = make_manifest(
      saved_state,
      mesh_shape=program.layout.mesh.shape,
      data=self.data.batches.describe(),
      next_batch_hash=next_hash,
      started_from=self.started_from,
      metrics=metrics,
      grad_norms=known_norms(state.grad_norms),
    )
    saver.save(step, saved_state, data_state=data_state, manifest=manifest)

  def check_step(self, step: int, sums: reduce.Sums) -> None:
    """Checks the numbers of a step that the devices have finished, and the save in progress.

    Raises:
      TrainingError: a number is not finite.
      CheckpointError: a background save failed.
    """
    self.checkpointer.raise_if_failed()
    bad = self.bad_steps.step_done(step, sums)
    if bad:
      self.checkpointer.wait()  # the save in progress has a good state
      steps = self.checkpointer.steps()
      saved = f'checkpoint_{steps[-1]} is intact.' if steps else 'No checkpoint exists yet.'
      raise TrainingError(
        f'Step {step}: {", ".join(bad)} is not finite. The run stops without saving this step; '
        f'{saved}',
        fix='Lower the learning rate, lengthen the warm-up, set train.max_grad_norm = 1.0 or '
        'z_loss = 1e-4, then start again.',
        parameters=('train.learning_rate', 'train.max_grad_norm'),
      )
    if step == 1 and not self.plan.origin.record:
      loss = reduce.means(sums).values.get('cross_entropy')
      check_first_loss(loss, self.plan.run.model)


def _or_error(read: Callable[[], _T]) -> _T | Exception:
  """Returns the result of `read`, or the error that it raises; custom data may raise any."""
  try:
    return read()
  except Exception as e:
    return e


def _failure_of_any(failure: Optional[Exception]) -> Optional[Exception]:
  """Returns `failure`, else a DataError if another process has one; all processes call it."""
  reasons = distributed.gather_json(first_line(failure) if failure else '')
  if failure is not None or not any(reasons):
    return failure
  process = next(i for i, reason in enumerate(reasons) if reason)
  return DataError(
    f'Process {process} cannot read the next batch: {reasons[process]}',
    fix=f'The whole error is in the log of process {process}.',
  )


def open_run(
  plan: PlannedRun, *, xla: Optional[flags.Applied], goodput: Goodput
) -> tuple[LiveRun, TrainState]:
  """Returns the run and the state of its next step; opens the data while XLA compiles.

  The state comes from MODEL_DIR's latest checkpoint, else from another run, else it is fresh.

  Args:
    plan: the checked run.
    xla: settings to compile with; None for XLA's defaults.
    goodput: records where the time goes.
  Raises:
    OutOfMemoryError: the compiled step does not fit.
    CheckpointError: no checkpoint can be read.
    ConfigError, DataError: as `open_data`.
  """
  with goodput.phase('compile'):
    train_step, fresh, data = _compile_and_open(plan, xla)
  checkpointer = open_checkpointer(plan.model_dir, keep=plan.run.checkpoint_cfg.kept)
  with goodput.phase('restore'):
    state, restored = plan.origin.first_state(checkpointer, plan.program, fresh, plan.local)
    first_step = int(state.step)
    if restored:
      state = plan.program.with_grad_norms(state, restored.manifest.get(GRAD_NORMS, ()))
      if plan.origin.takes_data and (not plan.saved or plan.saved.step != first_step):
        # The latest checkpoint, which `open_data` used, could not be read.
        resume_data(data.batches, data_state=restored.data_state, manifest=restored.manifest)
      log(f'Continuing from {restored.path}.')
      log(_changed_rate(plan, pathlib.Path(checkpointer.files.folder), first_step))
  if plan.origin.reader and plan.run.initialize_from.mode != 'partial' and is_main_process():
    carry_hf_folder(plan.origin.reader.path.parent, plan.model_dir.path)
  started_from = plan.origin.record_of(restored)
  bad_steps = BadSteps(
    plan.run.spike_cfg,
    folder=pathlib.Path(checkpointer.files.folder),
    first_step=first_step,
    vocabulary=functools.partial(text_vocabulary_of, plan.run),
  )
  live = LiveRun(plan, train_step, data, checkpointer, first_step, started_from, goodput, bad_steps)
  return live, state


def _compile_and_open(
  plan: PlannedRun, xla: Optional[flags.Applied]
) -> tuple[CompiledStep, Optional[TrainState], RunData]:
  """Returns the compiled step, a fresh state if no checkpoint exists, and the open data."""
  program = plan.program
  with _in_thread(functools.partial(open_data, plan)) as opening:
    traced = program.train_step.trace(program.abstract_state, program.abstract_batch)
    kind = program.layout.mesh.devices.flat[0].device_kind
    with compile_errors(kind):
      lowered = traced.lower()
    check_same_step(lowered)
    if opening.done():
      opening.result()  # errors of data that opens quickly are raised before the compile
    log('compiling the training step')
    with compile_errors(kind):
      train_step = lowered.compile(compiler_options=compile_options(program, xla))
    memory = plan.memory.compiled(train_step)
    fresh = None if plan.saved else program.init()  # also compiles, while the data opens
    data = opening.result()
  data.check_same_on_hosts()
  log(memory.line())
  log(programs.cache_line())
  for line in fp8_lines(train_step, plan.run.model, program.layout.mesh):
    log(line)
  return train_step, fresh, data


@contextlib.contextmanager
def _in_thread(work: Callable[[], RunData]) -> Iterator[concurrent.futures.Future[RunData]]:
  """Runs `work` concurrently with the block; a failed or interrupted block does not wait for it."""
  pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='open_data')
  future = pool.submit(work)
  try:
    yield future
  except BaseException:
    if not future.done():
      process_exit.abandon_threads()
    raise
  finally:
    pool.shutdown(wait=False)


def _changed_rate(plan: PlannedRun, folder: pathlib.Path, step: int) -> str:
  """Returns a warning with both learning rates if the schedule has changed since the last start."""
  path = folder / 'metrics.jsonl'
  if not is_main_process() or not path.is_file():
    return ''
  rates = {
    record['step']: record['train/learning_rate']
    for record in read_json_lines(path)
    if 'train/learning_rate' in record and record['step'] <= step
  }
  if not rates:
    return ''
  factor = plan.program.learning_rate_factor

  def rate(taken: int) -> float:
    return factor * float(plan.run.learning_rate(taken))

  *earlier, last = sorted(rates)
  first = earlier[-1] if earlier else last - 1
  # A record is the mean over the steps since the previous record.
  window = [rate(first), rate((first + last) // 2), rate(last - 1)]
  if 0.9 * min(window) <= rates[last] <= 1.1 * max(window):
    return ''
  return (
    f'WARNING: the learning rate was {rates[last]:.3g} at step {last} and is {rate(step):.3g} '
    f'from step {step + 1} on: the schedule has changed.'
  )


def check_same_step(lowered: jax.stages.Lowered) -> None:
  """Raises ConfigError on all processes, with the first difference, if their steps differ.

  Each process compiles its own training step. Comparing the lowered steps finds differences that
  digests of the code do not show: an environment variable, other GPUs, a module that reads a file
  of its host. Processes exchange digests only. This takes 0.04 s per megabyte of text; a model with
  its layers in a scan has less than one megabyte.
  """
  if distributed.process_count() > 1:
    distributed.assert_equal_across_hosts(
      comparable_text(lowered),
      'The lowered training step',
      fix='Compare the environment of the hosts (env | sort), their GPUs (nvidia-smi -L) and '
      'the files that your modules read. Code and versions are the same.',
    )


# May differ between processes with the same step: addresses, numbers of Python callbacks ...
_ADDRESSES = re.compile(r'0x[0-9a-f]{6,16}\b|(?<=index = )\d+(?= : ui64)|(?<=")\d{8,}(?=")')
# ... and compiled kernels (binary strings), which contain paths of source files.
_STRINGS = re.compile(r'"[^"\n]*"')


def comparable_text(lowered: jax.stages.Lowered) -> str:
  """Returns the lowered step as text, without parts that may differ between processes."""
  text = _ADDRESSES.sub('_', lowered.as_text())
  return _STRINGS.sub(lambda string: '"_"' if r'\00' in string[0] else string[0], text)


def open_recorder(live: LiveRun, watchdog: Watchdog) -> Recorder:
  """Returns the recorder of a run; it notifies `watchdog` and checks the numbers of each step."""
  run, program = live.plan.run, live.plan.program
  progress = ProgressFile(os.environ, first_step=live.first_step)
  devices = list(program.layout.mesh.devices.flat)
  on_gpus = devices[0].platform == 'gpu'

  def step_done(step: int, sums: reduce.Sums) -> None:
    watchdog.step_done(step)
    live.check_step(step, sums)
    progress.step_done(step)
    if run.spike_cfg.skips:
      recorder.add({'train/skipped_steps': live.bad_steps.num_skipped})

  recorder = Recorder(
    live.checkpointer.files.folder,
    total_steps=run.total_steps,
    first_step=live.first_step,
    tokens_per_step=live.tokens_per_step,
    is_main=distributed.is_main_process(),
    step_done=step_done,
    goodput=live.goodput,
    loggers=run.logging_cfg,
    run_name=os.path.basename(run.model_dir.rstrip('/')),
    monitor=Monitor(
      model_speed(run.model, program.spec.shapes, devices),
      local_devices=[d for d in devices if d.process_index == jax.process_index()],
      sensors=GpuSensors(own_uuids() if on_gpus else ()),
      ranks=RankReports(coordination_store(), rank=distributed.process_index()),
    ),
  )
  return recorder


def start_facts(live: LiveRun) -> JsonObject:
  """Returns facts about this start of the run, for the ledger."""
  devices = live.plan.program.layout.mesh.devices
  return {
    'total_steps': live.plan.run.total_steps,
    'tokens_per_step': live.tokens_per_step,
    'guess_loss': live.plan.run.model.guess_loss,
    'devices': devices.size,
    'device_kind': devices.flat[0].device_kind,
    'processes': distributed.process_count(),
    'host': socket.gethostname(),
    'job': os.environ.get('SLURM_JOB_ID', ''),
    'job_attempt': os.environ.get('SLURM_RESTART_COUNT', ''),
    'job_end': preemption.expected_end(),
    **interruptions.facts(os.environ),
  }


_SPIKES = 'spikes'
_KEPT = 3  # batches: one step is in flight, and the next batch may already be read


class BadSteps:
  """Checks each finished step.

  Args:
    config: how many steps may be skipped, and how many batches are written.
    folder: MODEL_DIR.
    first_step: number of steps taken before this process started.
    vocabulary: returns a vocabulary that decodes ids into text, or None if there is no text.
  """

  def __init__(
    self,
    config: SpikeConfig,
    *,
    folder: pathlib.Path,
    first_step: int,
    vocabulary: Callable[[], Optional[Vocabulary]],
  ):
    self._config, self._folder, self._vocabulary = config, folder, vocabulary
    self._batches: collections.deque[tuple[int, Batch]] = collections.deque(maxlen=_KEPT)
    self._last_read = first_step
    self._in_a_row = self._dumps = 0
    self.num_skipped = 0

  def read(self, batch: Batch) -> None:
    """Remembers the batch of the next step."""
    self._last_read += 1
    self._batches.append((self._last_read, batch))

  def step_done(self, step: int, sums: reduce.Sums) -> list[str]:
    """Returns the names of values that are not finite in a step that was not skipped.

    Raises:
      TrainingError: too many steps were skipped in a row.
    """
    bad = [
      name for name, (total, _) in sums.items() if np.size(total) == 1 and not math.isfinite(total)
    ]
    if not sums.get('skipped', (0.0, 1.0))[0]:
      self._in_a_row = 0
      if bad:
        self._dump(step, f'{", ".join(bad)} is not finite')
      return bad
    self.num_skipped += 1
    self._in_a_row += 1
    norm = sums['grad_norm'][0]
    reason = f'{", ".join(bad)} is not finite' if bad else f'the gradient norm is {norm:.4g}'
    _log.warning('Step %d is skipped: %s. %d since the start.', step, reason, self.num_skipped)
    self._dump(step, reason)
    if self._in_a_row >= self._config.most_in_a_row:
      raise TrainingError(
        f'{self._in_a_row} steps up to step {step} were skipped in a row: {reason}. Their batches '
        f'are in {self._folder / _SPIKES}.',
        fix='Lower the learning rate or lengthen the warm-up, then start again from the last '
        'checkpoint.',
        parameters=('SpikeConfig.most_in_a_row', 'SpikeConfig.skip_above', 'train.learning_rate'),
        docs='monitor.md#spikes',
      )
    return []

  def _dump(self, step: int, reason: str) -> None:
    """Writes this process's rows of the batch of `step`, as arrays and as text."""
    batch = dict(self._batches).get(step)
    if batch is None or self._dumps >= self._config.most_dumps:
      return
    self._dumps += 1
    folder = self._folder / _SPIKES / f'step_{step:08}'
    name = f'process_{distributed.process_index()}'
    try:
      folder.mkdir(parents=True, exist_ok=True)
      arrays = {key: np.asarray(value) for key, value in batch.items()}
      np.savez_compressed(folder / f'{name}.npz', **arrays)
      text = f'step {step}: {reason}\n{_rows_as_text(arrays, self._vocabulary())}'
      (folder / f'{name}.txt').write_text(text, encoding='utf-8')
    except Exception as e:  # a custom vocabulary may raise anything; it must not end the run
      _log.warning('The batch of step %d cannot be written: %s', step, first_line(e))


def _rows_as_text(arrays: Batch, vocabulary: Optional[Vocabulary]) -> str:
  """Returns each row of token features, decoded if there is a vocabulary."""
  lines = []
  for name, array in arrays.items():
    if not (name.endswith('tokens') and array.ndim == 2):
      continue
    for number, row in enumerate(array):
      ids = [int(i) for i in row]
      shown = ' '.join(map(str, ids)) if vocabulary is None else repr(vocabulary.decode(ids))
      lines.append(f'{name}[{number}]: {shown}')
  return '\n'.join(lines) + '\n'


def check_first_loss(loss: Optional[float], model: Model) -> None:
  """Warns if the first loss of a new model is far from the loss of guessing.

  Args:
    loss: None for a batch without target tokens or a model without this metric: no warning.
    model: computes the loss of guessing.
  """
  if loss is None:
    return
  expected = model.guess_loss
  if expected is None:
    return
  if not expected - 1.0 <= loss <= expected + 1.5:
    _log.warning(
      'The first loss is %.2f; an untrained model should be near %.2f, the loss of '
      'guessing. Check labels and initialization (tied embeddings start higher).',
      loss,
      expected,
    )


def check_cache() -> None:
  """Raises ConfigError if there is no folder for compiled programs."""
  if programs.cache_folder() is None:
    raise ConfigError(
      '--precompile needs a folder for compiled programs, and there is none: on several CPU '
      'devices it is off unless you set it.',
      fix='Set the environment variable JAX_COMPILATION_CACHE_DIR to a folder, and leave '
      'JAX_ENABLE_COMPILATION_CACHE unset.',
      docs='performance.md#start',
    )


def precompile(plan: PlannedRun, *, xla: Optional[flags.Applied]) -> str:
  """Compiles initialization, training step and evaluation; returns a summary for the log.

  Args:
    plan: the checked run.
    xla: settings to compile with, the same as the run's.
  Raises:
    OutOfMemoryError: the compiled step does not fit.
    ModelError: as `compile_errors` and `fp8_lines`.
  """
  program, done = plan.program, []

  def compiled(what: str, lowered: object, **options: object) -> object:
    started = time.monotonic()
    with compile_errors(program.layout.mesh.devices.flat[0].device_kind):
      result = lowered.compile(**options)
    done.append(f'  {what}: {time.monotonic() - started:.1f} s')
    return result

  compiled('initialization', program.init.lower())
  step = compiled(
    'training step',
    program.train_step.lower(program.abstract_state, program.abstract_batch),
    compiler_options=compile_options(program, xla),
  )
  memory = plan.memory.compiled(step)
  precision = fp8_lines(step, plan.run.model, program.layout.mesh)
  dataset = plan.run.train_eval_dataset_cfg
  if dataset is not None:
    spec = spec_for(plan.run.model, dataset)
    batch = program.abstract_of(spec.with_rows(program.layout.filled_rows(spec.batch_size)))
    compiled('evaluation', program.eval_step.lower(program.abstract_state.params, batch))
  lines = ['Compiled, without training:', *done, memory.line(), programs.cache_line(), *precision]
  return '\n'.join(lines)
