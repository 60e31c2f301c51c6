"""`open_recorder`: the measurements of a live run and their destinations."""

import os

import jax

from t5x_gpu.metrics import reduce
from t5x_gpu.metrics.monitor import Monitor
from t5x_gpu.metrics.recorder import Recorder
from t5x_gpu.metrics.speed import model_speed
from t5x_gpu.run.live import LiveRun
from t5x_gpu.runtime import distributed
from t5x_gpu.runtime.cluster.coordination import coordination_store
from t5x_gpu.runtime.health.gpu_sensors import GpuSensors, own_uuids
from t5x_gpu.runtime.health.rank_reports import RankReports
from t5x_gpu.runtime.watchdog import Watchdog


def open_recorder(live: LiveRun, watchdog: Watchdog) -> Recorder:
  """Returns the recorder of a run; it notifies `watchdog` and checks the numbers of each step."""
  run, program = live.plan.run, live.plan.program
  devices = list(program.layout.mesh.devices.flat)
  on_gpus = devices[0].platform == 'gpu'

  def step_done(step: int, sums: reduce.Sums) -> None:
    watchdog.step_done(step)
    live.check_step(step, sums)
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
