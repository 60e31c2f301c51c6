"""Predictions of a run and of variants of it, for one kind of GPU.

planner = Planner(gpu, Assumptions(), devices=simulated_devices(64))
planner.by_formula(config, Topology(8, 8)).seconds_per_step
planner.exactly(config, Topology(8, 8)).memory.fits            # compiles
"""

import dataclasses
import itertools
from collections.abc import Sequence

from t5x_gpu.analysis.collectives import partitioned_hlo
from t5x_gpu.analysis.gpu_compile import compile_step
from t5x_gpu.models.model import uses_fp8
from t5x_gpu.models.precision import check_devices
from t5x_gpu.planning.assumptions import Assumptions
from t5x_gpu.planning.prediction import PlanConfig, Prediction, predict
from t5x_gpu.planning.progress import doing
from t5x_gpu.runtime.cluster.topology import Device, Topology
from t5x_gpu.runtime.main_log import silent
from t5x_gpu.runtime.xla.deviceless import can_compile, described_gpus
from t5x_gpu.runtime.xla.gpu_targets import GpuTarget
from t5x_gpu.training.program import Program, program_of_run


@dataclasses.dataclass(frozen=True)
class Planner:
  """Predicts runs.

  Attributes:
    gpu: the kind of GPU.
    assumed: efficiencies and links.
    devices: simulated devices, as many as the largest topology has.
  """

  gpu: GpuTarget
  assumed: Assumptions
  devices: Sequence[Device]

  @property
  def compiles(self) -> bool:
    """Whether `exactly` compiles for the GPU; else it splits the step for simulated devices."""
    return can_compile()

  @silent()  # it would name kernels of simulated devices
  def program(self, config: PlanConfig, topology: Topology) -> Program:
    """Returns the run on simulated devices.

    Raises:
      MeshError, ConfigError, ShapeError, ModelError: sizes that contradict each other, or a model
        in FP8 for a GPU without it (simulated devices emulate it).
    """
    check_devices(uses_fp8(config.model), [self.gpu])
    devices = list(self.devices[: topology.num_devices])
    return program_of_run(config, topology=topology, devices=devices)

  def by_formula(self, config: PlanConfig, topology: Topology) -> Prediction:
    """Returns a prediction from formulas alone; errors as `program`.

    Formulas only read sizes, so the topology may have more GPUs than there are simulated devices.
    """
    enough = itertools.islice(itertools.cycle(self.devices), topology.num_devices)
    program = dataclasses.replace(self, devices=list(enough)).program(config, topology)
    return predict(program, config, gpu=self.gpu, assumed=self.assumed)

  def exactly(self, config: PlanConfig, topology: Topology, *, what: str = '') -> Prediction:
    """Returns a prediction from the compiled step, and shows that it compiles.

    Args:
      config, topology: the run.
      what: words for the progress line, after 'compiling'.
    Raises:
      MeshError, ConfigError, ShapeError, ModelError: as `program`.
    """
    number, step = topology.num_devices, what or 'the step'
    doing_what = f'splitting {step} over {number} simulated devices'
    if self.compiles:
      doing_what = f'compiling {step} for {number} x {self.gpu.device_kind}'
    with doing(doing_what):
      return self.silently(config, topology)

  @silent()
  def silently(self, config: PlanConfig, topology: Topology) -> Prediction:
    """Returns the result of `exactly`, without showing progress."""
    of_plan = dict(gpu=self.gpu, assumed=self.assumed)
    if not self.compiles:
      program = self.program(config, topology)
      lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
      return predict(program, config, **of_plan, partitioned=partitioned_hlo(lowered))
    gpus = described_gpus(
      self.gpu.name, num_hosts=topology.num_hosts, gpus_per_host=topology.devices_per_host
    )
    step = compile_step(config, gpus)
    return predict(step.program, config, **of_plan, compiled=step)
