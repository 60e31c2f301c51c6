"""Single changes to a run that save memory, as settings that a user would write."""

import dataclasses
from collections.abc import Iterator

from t5x_gpu.analysis.remat_costs import with_config
from t5x_gpu.models.model import config_of
from t5x_gpu.models.remat import BY_MEMORY
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.planning.prediction import PlanConfig
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.training.optimizers import AdamW

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


def single_changes(config: PlanConfig, topology: Topology) -> Iterator[Change]:
  """Yields changes that may make a step smaller, each of one kind."""
  yield from _remat(config)
  yield from _microbatches(config)
  yield from _layouts(config, topology)
  yield from _moments(config)


def with_another(first: Change, topology: Topology) -> Iterator[Change]:
  """Yields `first` with a second change of another kind."""
  names = {setting.split(' = ')[0] for setting in first.settings}
  for change in single_changes(first.config, topology):
    if not names & {setting.split(' = ')[0] for setting in change.settings}:
      yield Change((*first.settings, *change.settings), change.config)


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
  given = config.partitioner
  total = topology.num_devices
  options: list[tuple[str, dict[str, object]]] = []
  if total > 1:
    options.append(('fsdp', dict(data=1, fsdp=total)))
  if hosts > 1 and each > 1:
    shapes = dict(ici_mesh_shape={'fsdp': each}, dcn_mesh_shape={'data': hosts})
    options.append(('hsdp', shapes))
  for model in (2, 4, 8):
    if model <= each and each % model == 0 and total > model:
      options.append(('tp', dict(data=1, fsdp=total // model, num_partitions=model)))
  for kind, sizes in options:
    of_layout = dict(sizes)
    if kind == 'tp':
      of_layout['sequence_parallel'] = True
    partitioner = Partitioner(**of_layout)
    if partitioner != given:
      settings = tuple(f'Partitioner.{name} = {value!r}' for name, value in of_layout.items())
      yield Change(settings, dataclasses.replace(config, partitioner=partitioner))


def _moments(config: PlanConfig) -> Iterator[Change]:
  if isinstance(config.optimizer, AdamW) and config.optimizer.mu_dtype == 'float32':
    smaller = dataclasses.replace(config.optimizer, mu_dtype='bfloat16', nu_dtype='bfloat16')
    settings = ("AdamW.mu_dtype = 'bfloat16'", "AdamW.nu_dtype = 'bfloat16'")
    yield Change(settings, dataclasses.replace(config, optimizer=smaller))
