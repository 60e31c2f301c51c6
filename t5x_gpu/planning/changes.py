"""Single changes to a run that save memory, as settings that a user would write."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Optional

from t5x_gpu.analysis.remat_costs import with_config
from t5x_gpu.errors import MeshError
from t5x_gpu.models.model import config_of
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.partitioning.mesh.mesh_sizes import SIZE_PARAMETERS
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.training.optimizers import AdamW

# Parameters of Partitioner that set the sizes of axes; some set the same size.
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
    """Classes of the settings: 'Partitioner', 'TransformerConfig', ..."""
    return {setting.split('.')[0] for setting in self.settings}

  @property
  def keeps_precision(self) -> bool:
    """Whether the change keeps every dtype, including the optimizer's moments."""
    return 'AdamW' not in self.kinds


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
      yield _joined(first, change)


def on_all_of(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields the run with the settings that save most memory, in layouts of all devices.

  The batch grows to the next size that the layout divides. The number of microbatches stays if it
  divides the rows of a device; else each microbatch has one row.

  Args:
    config: the run.
    topology: may have more or fewer devices than the run's.
  """
  [saving] = list(_remat(config))[-1:] or [Change((), config)]
  moments = [_joined(saving, change) for change in _moments(saving.config)]
  for first in (saving, *moments):
    for wanted in _partitioners(config.partitioner, topology):
      sizes = wanted.mesh_sizes(topology).total
      parts = math.prod(sizes[axis] for axis in wanted.rules().activations['batch'])
      rows = math.ceil(config.train_dataset_cfg.batch_size / parts)
      dataset = dataclasses.replace(config.train_dataset_cfg, batch_size=rows * parts)
      as_now = config.num_microbatches if rows % config.num_microbatches == 0 else 1
      for number in dict.fromkeys((as_now, rows)):
        settings = (*first.settings, *_differing(wanted, config.partitioner))
        if number != config.num_microbatches:
          settings += (f'train.num_microbatches = {number}',)
        if dataset != config.train_dataset_cfg:
          settings += (f'BATCH_SIZE = {dataset.batch_size}',)
        changed = dataclasses.replace(
          first.config, partitioner=wanted, num_microbatches=number, train_dataset_cfg=dataset
        )
        yield Change(settings, changed)


def _joined(first: Change, second: Change) -> Change:
  """Returns two changes as one; `second` was made from the run of `first`."""
  return Change((*first.settings, *second.settings), second.config)


def layout_settings(wanted: Partitioner, given: Partitioner) -> dict[str, Any]:
  """Returns the parameters that are not default in `wanted` or in `given`.

  A run keeps the settings of its own gin files, so parameters that return to their default are
  included.
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
  """Yields other layouts of all devices."""
  for wanted in _partitioners(config.partitioner, topology):
    settings = _differing(wanted, config.partitioner)
    if settings and topology.num_devices > 1:
      yield Change(settings, dataclasses.replace(config, partitioner=wanted))


def _partitioners(given: Partitioner, topology: Topology) -> Iterator[Partitioner]:
  """Yields layouts of all devices: fsdp, hsdp, fsdp with model, and fsdp in place of data.

  Parameters of `given` that neither split the run nor save memory stay.
  """
  hosts, each, total = topology.num_hosts, topology.devices_per_host, topology.num_devices
  options: list[dict[str, Any]] = [dict(data=1, fsdp=total)]
  if hosts > 1 and each > 1:
    options.append(dict(ici_mesh_shape={'fsdp': each}, dcn_mesh_shape={'data': hosts}))
  for model in (2, 4, 8):
    if model <= each and each % model == 0 and total > model:
      sizes = dict(data=1, fsdp=total // model, num_partitions=model)
      options.append(dict(sizes, sequence_parallel=True))
  if kept := _fsdp_for_data(given, topology):
    options.append(kept)
  whole = dict(_WHOLE, num_partitions=1 if given.num_partitions else None)
  for sizes in options:
    wanted = dataclasses.replace(given, **(whole | sizes))
    if _same_mesh(wanted, given, topology):  # written in another way
      wanted = dataclasses.replace(wanted, **{name: getattr(given, name) for name in SIZES})
    yield wanted


def _fsdp_for_data(given: Partitioner, topology: Topology) -> Optional[dict[str, Any]]:
  """Returns the sizes of `given` with `data` moved into fsdp; None if no other axis splits it."""
  by_host = given.ici_mesh_shape is not None or given.dcn_mesh_shape is not None
  try:
    moved = given if by_host else dataclasses.replace(given, data=1, fsdp=-1)
    sizes = dict(moved.mesh_sizes(topology).total)
  except MeshError:  # sizes for another number of devices
    return None
  fsdp = sizes.pop('data') * sizes.pop('fsdp')
  if set(sizes.values()) == {1}:
    return None
  kept = {SIZE_PARAMETERS[axis]: size for axis, size in sizes.items() if size > 1}
  return dict(kept, data=1, fsdp=fsdp, sequence_parallel=given.sequence_parallel)


def _same_mesh(one: Partitioner, other: Partitioner, topology: Topology) -> bool:
  try:
    return one.mesh_sizes(topology) == other.mesh_sizes(topology)
  except MeshError:  # sizes for another number of devices
    return False


def _differing(wanted: Partitioner, given: Partitioner) -> tuple[str, ...]:
  """Returns the settings that turn `given` into `wanted`."""
  return tuple(
    f'Partitioner.{name} = {value!r}'
    for name, value in layout_settings(wanted, given).items()
    if value != getattr(given, name)
  )


# Defaults of the parameters that `_partitioners` sets: a layout that splits nothing.
_WHOLE = {
  field.name: field.default
  for field in dataclasses.fields(Partitioner)
  if field.name in (*SIZES, 'zero_stage', 'sequence_parallel')
}


def _moments(config: PlanConfig) -> Iterator[Change]:
  if isinstance(config.optimizer, AdamW) and config.optimizer.mu_dtype == 'float32':
    smaller = dataclasses.replace(config.optimizer, mu_dtype='bfloat16', nu_dtype='bfloat16')
    settings = ("AdamW.mu_dtype = 'bfloat16'", "AdamW.nu_dtype = 'bfloat16'")
    yield Change(settings, dataclasses.replace(config, optimizer=smaller))
