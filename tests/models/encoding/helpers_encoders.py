"""The training program of a small encoder."""

import math
from typing import Any

import jax

from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program, build_program
from t5x_gpu.training.schedules import constant


def program_of(model: EncoderModel, *, num_microbatches: int = 1, **mesh: Any) -> Program:
  """Returns the program for a batch of 8 rows of 8 tokens, on the devices that `mesh` needs."""
  devices = math.prod(mesh.values())
  return build_program(
    model=model,
    optimizer=AdamW(),
    schedule=constant(1e-2),
    seed=0,
    pack=False,
    partitioner=Partitioner(**mesh),
    topology=Topology(1, devices),
    devices=jax.devices()[:devices],
    task_feature_lengths={'inputs': 8},
    batch_size=8,
    num_microbatches=num_microbatches,
  )
