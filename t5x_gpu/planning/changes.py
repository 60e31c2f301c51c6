"""Single changes to a run that save memory, as settings that a user would write."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from t5x_gpu.analysis.remat_costs import with_config
from t5x_gpu.models.model import config_of
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.partitioning.mesh.mesh_sizes import SIZE_PARAMETERS
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.training.optimizers import AdamW

# Parameters of Partitioner that give the sizes of the axes, some of them in several ways.
SIZES = (*SIZE_PARAMETERS.values(), 'model_parallel_submesh', 'ici_mesh_shape', 'dcn_mesh_shape')
_MICROBATCHES = (2, 4, 8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Change:
  """A run that differs from another one.

  Attributes:
    settings: what to write in gin, 'NAME = VALUE' each.
    config: the changed run.
  """

  settings: tuple[str, ...]
  config: PlanConfig

  @property
  def kinds(self) -> set[str]:
    """What the settings belong to: 'Partitioner', 'TransformerConfig', ..."""
    return {setting.split('.')[0] for setting in self.settings}


def single_changes(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields changes that may make a step smaller, each of one kind."""
  yield from _remat(config)
  yield from _microbatches(config)
  yield from _layouts(config, topology)
  yield from _moments(config)


def with_another(first: Change, topology: Topology) -> Iterator[Change]:
  """Yields `first` with a second change of another kind."""
  for change in single_changes(first.config, topology):
    if not first.kinds & change.kinds:
      yield Change((*first.settings, *change.settings), change.config)


def layout_settings(wanted: Partitioner, given: Partitioner) -> dict[str, Any]:
  """Returns the parameters that are not default in `wanted`, or not in `given`, which it replaces.

  A run keeps what its own gin files set, so those that become default again are among them.
  """
  return {
    field.name: getattr(wanted, field.name)
    for field in dataclasses.fields(Partitioner)
    if not getattr(wanted, field.name) == getattr(given, field.name) == field.default
  }


def _remat(config: PlanConfig) -> Iterator[Change]:
  model_config = config_of(config.model)
  if model_config is None:
    return
  for policy in BY_MEMORY[BY_MEMORY.index(model_config.remat_policy) + 1 :]:
    if policy == 'offload':  # the time of its transfers to the host is not modelled
      continue
    changed = dataclasses.replace(config, model=with_config(config.model, remat_policy=policy))
    yield Change((f'TransformerConfig.remat_policy = {policy!r}',), changed)


def _microbatches(config: PlanConfig) -> Iterator[Change]:
  for times in _MICROBATCHES:
    number = config.num_microbatches * times
    if config.train_dataset_cfg.batch_size % number == 0:
      changed = dataclasses.replace(config, num_microbatches=number)
      yield Change((f'train.num_microbatches = {number}',), changed)


def _layouts(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields layouts of all devices: fsdp, fsdp inside hosts (hsdp), fsdp with model."""
  hosts, each = topology.num_hosts, topology.devices_per_host
  total, given = topology.num_devices, config.partitioner
  options: list[dict[str, Any]] = []
  if total > 1:
    options.append(dict(data=1, fsdp=total))
  if hosts > 1 and each > 1:
    options.append(dict(ici_mesh_shape={'fsdp': each}, dcn_mesh_shape={'data': hosts}))
  for model in (2, 4, 8):
    if model <= each and each % model == 0 and total > model:
      sizes = dict(data=1, fsdp=total // model, num_partitions=model)
      options.append(dict(sizes, sequence_parallel=True))
  for changed in options:
    # What neither splits the run nor saves memory stays as the run has it.
    wanted = dataclasses.replace(given, **(_WHOLE | changed))
    if given.num_partitions is None and wanted.num_partitions == 1:
      wanted = dataclasses.replace(wanted, num_partitions=None)
    if wanted.mesh_sizes(topology) == given.mesh_sizes(topology):  # written in another way
      wanted = dataclasses.replace(wanted, **{name: getattr(given, name) for name in SIZES})
    settings = tuple(
      f'Partitioner.{name} = {value!r}'
      for name, value in layout_settings(wanted, given).items()
      if value != getattr(given, name)
    )
    if settings:
      yield Change(settings, dataclasses.replace(config, partitioner=wanted))


# A layout that splits nothing, in the parameters that `_layouts` decides.
_WHOLE = {
  field.name: field.default
  for field in dataclasses.fields(Partitioner)
  if field.name in (*SIZES, 'zero_stage', 'sequence_parallel')
} | {'num_partitions': 1}


def _moments(config: PlanConfig) -> Iterator[Change]:
  if isinstance(config.optimizer, AdamW) and config.optimizer.mu_dtype == 'float32':
    smaller = dataclasses.replace(config.optimizer, mu_dtype='bfloat16', nu_dtype='bfloat16')
    settings = ("AdamW.mu_dtype = 'bfloat16'", "AdamW.nu_dtype = 'bfloat16'")
    yield Change(settings, dataclasses.replace(config, optimizer=smaller))
