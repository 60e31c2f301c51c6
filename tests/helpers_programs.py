"""The training program of a small model."""

import math
from collections.abc import Mapping
from typing import Any

import jax

from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.schedules import constant


def program_of(
  model: Model, task_feature_lengths: Mapping[str, int], *, num_microbatches: int = 1, **mesh: Any
) -> Program:
  """Returns the program for a batch of 8 rows, on the devices that `mesh` needs."""
  devices = math.prod(size for size in mesh.values() if size is not True)
  return build_program(
    model=model,
    optimizer=AdamW(),
    schedule=constant(1e-2),
    seed=0,
    pack=False,
    partitioner=Partitioner(**mesh),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths=task_feature_lengths,
    batch_size=8,
    num_microbatches=num_microbatches,
  )
