"""The table of layouts that a checkpoint may be written and read under, and one tiny model for it.

Four layers, so that stages have something to hold, in one scanned stack; every other size is one
that eight devices divide; six do not.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from t5x_gpu.checkpoint.checkpointer import Checkpointer, RestoredState
from t5x_gpu.checkpoint.manifest import make_manifest
from t5x_gpu.checkpoint.retention import Keep
from t5x_gpu.data.batches import batch_hash
from t5x_gpu.data.synthetic import SyntheticBatches
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.run.data import resume_data
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program
from t5x_gpu.training.schedules import constant
from t5x_gpu.training.state import TrainState
from tests.helpers_layouts import QUICK
from tests.helpers_programs import build_with

CONFIG = TransformerConfig(
  vocab_size=264, num_layers=4, embed_dim=16, num_heads=8, head_dim=4, mlp_dim=32
)
BATCH, LENGTH = 24, 32
STEPS_BEFORE = 2


@dataclasses.dataclass(frozen=True)
class Split:
  """How a run is split.

  Attributes:
    num_devices: number of devices of the run.
    partitioner: arguments of Partitioner, as gin sets them.
  """

  num_devices: int
  partitioner: Mapping[str, Any] = dataclasses.field(default_factory=dict)

  @property
  def num_axes(self) -> int:
    """Returns the number of mesh axes over which the devices are spread."""
    given = [
      self.partitioner.get(name, 1) for name in ('fsdp', 'num_partitions', 'stage', 'context')
    ]
    rest = self.num_devices // int(np.prod(given))
    return sum(size > 1 for size in (*given, rest))


def _of(axis: str, count: int) -> Split:
  if axis == 'data':
    return Split(count)
  # Four layers are four stages at most; two replicas of them take eight devices.
  return Split(count, {axis: min(count, CONFIG.num_layers) if axis == 'stage' else count})


# alone, data_2, ..., context_8, and one under which layers lie in another order than in the model.
SPLITS = {
  'alone': Split(1),
  **{
    f'{"model" if axis == "num_partitions" else axis}_{count}': _of(axis, count)
    for axis in ('data', 'fsdp', 'num_partitions', 'stage', 'context')
    for count in (2, 4, 8)
  },
  # 6 divides none of the sizes: in memory, arrays are padded.
  'fsdp_6': Split(6, dict(fsdp=6)),
  'circular_2': Split(2, dict(stage=2, pipeline_schedule='circular', pipeline_repeats=2)),
}


@functools.cache
def program(name: str) -> Program:
  """Returns the program of a row of the table; nothing is compiled."""
  split = SPLITS[name]
  return build_with(
    model=DecoderOnlyModel(CONFIG),
    optimizer=AdamW(),
    learning_rate=constant(1e-3),
    partitioner=Partitioner(**split.partitioner),
    topology=Topology(1, split.num_devices),
    devices=jax.devices()[: split.num_devices],
    task_feature_lengths={'targets': LENGTH},
    batch_size=BATCH,
    pack=True,
  )


def data() -> SyntheticBatches:
  """Returns the batches of the run, from the first one on."""
  return SyntheticBatches(program('alone').spec, seed=0, num_batches=None)


@functools.cache
def forward(name: str) -> Any:
  """Returns a function of the loss; it compiles in a fifth of the time of a step."""
  p = program(name)
  return p.eval_step.lower(p.abstract_state.params, p.abstract_batch).compile(
    compiler_options=QUICK
  )


def put(name: str, batch: Any) -> Any:
  """Returns a batch on the devices of a row of the table."""
  return program(name).layout.put_batch(batch)


def loss_of(sums: Mapping[str, Any]) -> float:
  """Returns the mean from the sums of a step or of `forward`."""
  return float(sums['loss'][0] / sums['loss'][1])


@functools.cache
def state() -> TrainState:
  """Returns the state after `STEPS_BEFORE` steps, in host memory: random numbers, all different."""
  rng = np.random.default_rng(0)

  def draw(path: Any, like: Any) -> np.ndarray:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    if not np.issubdtype(like.dtype, np.floating):
      return np.full(like.shape, STEPS_BEFORE, like.dtype)
    if not name.startswith('params/'):  # first and second moments
      return (1e-4 * rng.random(like.shape)).astype(like.dtype)
    mean = 1.0 if name.endswith('scale') else 0.0
    return (mean + 0.1 * rng.standard_normal(like.shape)).astype(like.dtype)

  return jax.tree_util.tree_map_with_path(draw, program('alone').abstract_state)


def placed(name: str) -> TrainState:
  """Returns `state` as a run under this layout would have it."""
  p = program(name)

  def put_parts(x: np.ndarray, like: Any) -> jax.Array:
    return jax.make_array_from_callback(x.shape, like.sharding, lambda place: x[place])

  return p.in_run_form(jax.tree.map(put_parts, state(), p.abstract_saved))


def write(folder: os.PathLike, name: str) -> None:
  """Writes the checkpoint of a run under this layout as train.py does."""
  batches = data()
  for _ in range(STEPS_BEFORE):
    next(batches)
  of_run = program(name).in_saved_form(placed(name))
  with Checkpointer(str(folder), keep=Keep()) as checkpointer:
    checkpointer.save(
      STEPS_BEFORE,
      of_run,
      data_state=batches.get_state(),
      manifest=make_manifest(
        of_run,
        mesh_shape=program(name).layout.mesh.shape,
        data=batches.describe(),
        next_batch_hash=batch_hash(batches.peek()),
      ),
    )


def read(folder: os.PathLike, name: str) -> RestoredState:
  """Returns the latest checkpoint on the mesh of this layout."""
  with Checkpointer(str(folder)) as checkpointer:
    return checkpointer.restore_latest(program(name).abstract_saved)


def data_of(restored: RestoredState) -> SyntheticBatches:
  """Returns the batches of a run that continues; raises DataError if they differ from the run's."""
  batches = data()
  resume_data(batches, data_state=restored.data_state, manifest=restored.manifest)
  return batches
