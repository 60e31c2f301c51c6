"""Expert parallelism: the experts of a mixture-of-experts MLP are split.

What is split: `experts` of parameters over `expert`, and `batch` of activations, as over `data`.
What moves: in every layer with experts each token goes to the devices of its experts and back, one
all-to-all each way, forward and backward. All slots of the experts travel, also empty ones:
(n - 1) / n of batch x experts x capacity x embed values per all-to-all over n devices. Gradients of
experts are not reduced over `expert`. Under tensor parallelism each device of `model` sends the
same bytes. When: the experts do not fit on one GPU. Keep it inside a host: it communicates in
every layer.
Source: Lepikhin et al. 2020 (GShard); Fedus et al. 2021 (Switch Transformer).
"""

from collections.abc import Mapping

import jax

from t5x_gpu.errors import Problem
from t5x_gpu.partitioning.axis_rules import AxisRules, is_manual


def rules() -> AxisRules:
  """Returns the rules of expert parallelism."""
  return AxisRules(parameters={'experts': ('expert',)}, activations={'batch': ('expert',)})


def check(sizes: Mapping[str, int], mesh_shape: Mapping[str, int]) -> list[Problem]:
  """Returns problems with splitting the experts; [] if there are none.

  Args:
    sizes: array axis -> size; reads 'experts', absent or 0 for a model without experts.
    mesh_shape: mesh axis -> size.
  """
  ways, experts = mesh_shape.get('expert', 1), sizes.get('experts', 0)
  if ways == 1 or (experts > 0 and experts % ways == 0):
    return []
  parameters = ('TransformerConfig.num_experts', 'Partitioner.expert')
  if not experts:
    return [
      Problem(
        f'expert={ways} splits experts, but this model has none: its MLPs are dense.',
        'Set Partitioner.expert = 1 and use these devices for Partitioner.fsdp or '
        'Partitioner.data.',
        parameters,
      )
    ]
  return [
    Problem(
      f'experts = {experts} does not divide over expert={ways}: every expert is whole on one '
      'device.',
      f'Set Partitioner.expert to a number that divides {experts}.',
      parameters,
    )
  ]


def num_local(num_experts: int) -> int:
  """Returns the number of experts on this device."""
  return num_experts // jax.lax.axis_size('expert') if is_manual('expert') else num_experts


def to_experts(x: jax.Array) -> jax.Array:
  """Returns [rows of the group, local experts, ...] from [local rows, experts, ...].

  A group is the devices along `expert`. If that axis has size 1, `x` is returned unchanged.
  """
  if not is_manual('expert'):
    return x
  return jax.lax.all_to_all(x, 'expert', split_axis=1, concat_axis=0, tiled=True)


def from_experts(x: jax.Array) -> jax.Array:
  """Returns [local rows, experts, ...] from [rows of the group, local experts, ...]."""
  if not is_manual('expert'):
    return x
  return jax.lax.all_to_all(x, 'expert', split_axis=0, concat_axis=1, tiled=True)


def exchange(x: jax.Array) -> jax.Array:
  """Returns [devices * n, ...]: what the group's devices send to this device (all-to-all).

  Args:
    x: [devices * n, ...], a part for each device of the group.
  """
  return jax.lax.all_to_all(x, 'expert', split_axis=0, concat_axis=0, tiled=True)


def group_rows(rows: jax.Array) -> jax.Array:
  """Returns `rows` of all devices of the group, [rows of the group], in the order of `to_experts`.

  Args:
    rows: [local rows].
  """
  return jax.lax.all_gather(rows, 'expert', tiled=True) if is_manual('expert') else rows


def traffic_per_step(
  *,
  batch: int,
  num_experts: int,
  capacity: int,
  embed_dim: int,
  num_layers: int,
  expert: int,
  dtype_bytes: int,
  num_forwards: int = 1,
) -> dict[str, float]:
  """Returns collective -> bytes that a device sends over `expert` per training step.

  All other gradients are summed over `expert` as over `data`, once per step. With dropout, row
  numbers travel too, 4 bytes each.

  Args:
    batch: rows of one device per step, over all microbatches.
    num_experts, embed_dim: sizes of the model.
    capacity: tokens of a row that an expert has room for, from `layers.routing.capacity`. Dropless:
      length * min(k, n) / n, for n experts of a device.
    num_layers: layers of one device.
    expert: size of the axis.
    dtype_bytes: bytes per value of activations.
    num_forwards: 2 if the backward pass recomputes layers, else 1.
  """
  moved = batch * num_experts * capacity * embed_dim * dtype_bytes * (expert - 1) / expert
  return {'all-to-all': (2 * num_forwards + 2) * num_layers * moved}
