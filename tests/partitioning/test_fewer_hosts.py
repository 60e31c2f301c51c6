"""Which numbers of hosts a run can continue on when it has lost some."""

from typing import Any

import jax
import pytest

from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program, host_counts
from t5x_gpu.training.schedules import constant
from tests.helpers_programs import build_with

MODEL = DecoderOnlyModel(
  TransformerConfig(vocab_size=64, num_layers=4, embed_dim=16, num_heads=8, head_dim=4, mlp_dim=32)
)


def program(partitioner: Partitioner) -> Program:
  """Returns the program on four hosts of two devices."""
  return build_with(
    model=MODEL,
    optimizer=AdamW(),
    learning_rate=constant(1e-2),
    pack=False,
    partitioner=partitioner,
    topology=Topology(4, 2),
    devices=jax.devices()[:8],
    task_feature_lengths={'targets': 16},
    batch_size=8,
  )


@pytest.mark.parametrize(
  'mesh, counts',
  [
    ({}, (1, 2, 3, 4)),  # on three hosts, eight rows and one of weight 0
    ({'data': 8}, (1, 2, 3, 4)),
    ({'num_partitions': 2}, (1, 2, 3, 4)),
    ({'num_partitions': 4}, (2, 4)),
    ({'fsdp': 4}, (2, 4)),
    ({'fsdp': 8}, (4,)),
    ({'data': 1, 'fsdp': -1}, (1, 2, 3, 4)),
    ({'stage': 4}, (2, 4)),
    ({'ici_mesh_shape': {'fsdp': 2}, 'dcn_mesh_shape': {'data': -1}}, (1, 2, 3, 4)),
    ({'ici_mesh_shape': {'fsdp': 2}, 'dcn_mesh_shape': {'data': 4}}, (4,)),
  ],
)
def test_whole_replicas_fall_away_and_groups_inside_stay_whole(mesh: dict[str, Any], counts):
  partitioner = Partitioner(**mesh)
  assert host_counts(program(partitioner)) == counts
  fewer = partitioner.on_fewer_hosts()
  for number in counts:
    sizes = fewer.mesh_sizes(Topology(number, 2)).total
    kept = {axis: size for axis, size in mesh.items() if axis in sizes and axis != 'data'}
    assert {axis: sizes[axis] for axis, size in kept.items() if size != -1} == {
      axis: size for axis, size in kept.items() if size != -1
    }
