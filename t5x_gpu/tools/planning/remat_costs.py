"""The cost of each remat policy in a run: temporaries of a step, and additional matrix products.

    costs = remat_costs(config, build)
    print(remat_text(costs, current="minimal"))

FLOPs are counted in the program that XLA splits for simulated devices. Temporaries come from that
program compiled for the CPU, or for a GPU that this machine does not need.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Optional

from t5x_gpu.compiled.collectives import flops_per_device, partitioned
from t5x_gpu.errors import ModelError
from t5x_gpu.models.config import REMAT_POLICIES
from t5x_gpu.models.dpo import DpoModel
from t5x_gpu.models.lora import LoraModel
from t5x_gpu.models.model import Model, config_of
from t5x_gpu.runtime.main_log import silent
from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.terminal.console import mib, table
from t5x_gpu.tools.planning.gpu_compile import compile_step
from t5x_gpu.tools.planning.gpu_targets import DescribedGpus
from t5x_gpu.training.program import Program
from t5x_gpu.training.train_step import StepConfig

# From the least to the most recomputation.
ORDER = ('none', 'dots', 'minimal', 'offload', 'attention', 'full')
assert set(ORDER) == set(REMAT_POLICIES)


@dataclasses.dataclass(frozen=True)
class RematCost:
  """The cost of one policy, per device and step.

  Attributes:
    policy: value of TransformerConfig.remat_policy.
    temporary_bytes: activations, gradients, logits and workspaces at their peak.
    host_bytes: activations in host memory; None on the CPU, where 'offload' moves nothing.
    flops: FLOPs of matrix products.
  """

  policy: str
  temporary_bytes: int
  host_bytes: Optional[int]
  flops: int


def remat_costs(
  config: StepConfig,
  build: Callable[[StepConfig], Program],
  *,
  gpus: Optional[DescribedGpus] = None,
) -> list[RematCost]:
  """Returns the cost of every policy, in the order of `ORDER`.

  Args:
    config: configuration of the run.
    build: makes the program for simulated devices.
    gpus: GPUs for which temporaries are compiled; None for the simulated devices.
  Raises:
    ModelError: the model has no remat_policy.
  """
  costs = []
  for policy in ORDER:
    changed = dataclasses.replace(config, model=with_config(config.model, remat_policy=policy))
    with silent():  # would print kernel choices for simulated devices
      program = build(changed)
      lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
    hlo, compiled = partitioned(lowered)
    if gpus is None:
      temporary, host = compiled.memory_analysis().temp_size_in_bytes, None
    else:
      memory = compile_step(changed, gpus).memory
      temporary, host = memory.temporary_bytes, memory.host_bytes
    costs.append(RematCost(policy, temporary, host, flops_per_device(hlo)))
  return costs


def with_config(model: Model, **changes: object) -> Model:
  """Returns `model` with other values in its TransformerConfig.

  Raises:
    ModelError: the model has no TransformerConfig.
  """
  if isinstance(model, (LoraModel, DpoModel)):
    return dataclasses.replace(model, model=with_config(model.model, **changes))
  config = config_of(model)
  if config is None or not dataclasses.is_dataclass(model):
    raise ModelError(
      f'{type(model).__name__} has no remat_policy to compare: it is not a dataclass with a '
      '`config` of type TransformerConfig.',
      fix='Use --show sharding.',
      docs='plan.md#remat',
    )
  return dataclasses.replace(model, config=dataclasses.replace(config, **changes))


def remat_text(costs: Sequence[RematCost], *, current: str, gpu: Optional[str] = None) -> str:
  """Returns the table of `costs`.

  Args:
    costs: costs of all policies.
    current: policy of the run, which is marked.
    gpu: name of the GPU for which temporaries were compiled; None for the CPU.
  """
  base = next(cost.flops for cost in costs if cost.policy == 'none')
  rows = [('remat_policy', 'temporaries MiB/device', 'in host memory MiB', 'matrix products', '')]
  rows += [
    (
      cost.policy,
      mib(cost.temporary_bytes),
      '-' if cost.host_bytes is None else mib(cost.host_bytes),
      f'+{cost.flops / base - 1:.1%}',
      'this run' if cost.policy == current else '',
    )
    for cost in costs
  ]
  where = (
    "Temporaries as compiled for the CPU, where 'offload' keeps on the device what a GPU moves to "
    'host memory: --gpu shows a GPU.'
    if gpu is None
    else f'Temporaries as compiled for {gpu}.'
  )
  return '\n'.join(
    [
      'What each TransformerConfig.remat_policy costs, per device and step',
      table(rows, right=(1, 2, 3)),
      f'{where} Matrix products relative to none.',
    ]
  )


def remat_json(costs: Sequence[RematCost], *, current: str) -> JsonObject:
  """Returns the contents of `remat_text` for JSON."""
  return {'current': current, 'policies': [dataclasses.asdict(cost) for cost in costs]}
