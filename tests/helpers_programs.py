"""The training program of a small model, from settings given one by one."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW, Optimizer
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.train_step import StepConfig


def build_with(
  *,
  topology: Topology,
  devices: Sequence[Any],
  task_feature_lengths: Mapping[str, int],
  batch_size: int,
  pack: bool,
  **settings: Any,
) -> Program:
  """Returns the program of a run with these sizes of the batch and `settings` of the step."""
  dataset = DatasetConfig('', task_feature_lengths, 'train', batch_size, pack=pack)
  config = StepConfig(train_dataset_cfg=dataset, **settings)
  return build_program(config, topology=topology, devices=devices)


def program_of(
  model: Model,
  task_feature_lengths: Mapping[str, int],
  *,
  optimizer: Optimizer = AdamW(),
  num_microbatches: int = 1,
  **mesh: Any,
) -> Program:
  """Returns the program for a batch of 8 rows, on the devices that `mesh` needs."""
  devices = math.prod(size for size in mesh.values() if size is not True)
  return build_with(
    model=model,
    optimizer=optimizer,
    learning_rate=constant(1e-2),
    pack=False,
    partitioner=Partitioner(**mesh),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths=task_feature_lengths,
    batch_size=8,
    num_microbatches=num_microbatches,
  )
