"""Sharding by names cannot fail silently."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from t5x_gpu.errors import MeshError, ShapeError
from t5x_gpu.partitioning.axis_rules import (
  AxisNames,
  AxisRules,
  partition_spec,
  shard,
  split_names,
  use_rules,
  with_axes,
)
from t5x_gpu.partitioning.mesh import build_mesh
from t5x_gpu.partitioning.mesh_sizes import resolve_mesh_sizes
from t5x_gpu.runtime.topology import Topology
from tests.messages import raises

TABLE = {'batch': ('data', 'fsdp'), 'heads': ('model',), 'mlp': ('model',)}
MESH = {'data': 2, 'fsdp': 2, 'model': 2}


def spec(names, shape, table=TABLE):
  return partition_spec(names, shape, table=table, mesh_shape=MESH)


def test_names_become_mesh_axes_and_unlisted_names_are_not_split():
  assert spec(('batch', 'length', 'heads'), (8, 5, 4)) == P(('data', 'fsdp'), None, 'model')


def test_mesh_axes_of_size_one_split_nothing():
  assert partition_spec(('heads',), (3,), table=TABLE, mesh_shape={'model': 1}) == P(None)


def test_an_unknown_name_is_an_error_with_a_suggestion():
  with raises(ShapeError):
    spec(('batch', 'mpl'), (8, 4))


def test_two_dimensions_on_one_mesh_axis_are_an_error():
  with raises(MeshError):
    spec(('heads', 'mlp'), (4, 4))


def test_a_size_that_does_not_divide_is_an_error_with_its_rule():
  with raises(MeshError):
    spec(('batch',), (7,))


def test_a_wrong_number_of_names_is_an_error_with_and_without_a_mesh():
  with raises(ShapeError):
    spec(('batch',), (8, 4))
  with raises(ShapeError):
    shard(jnp.zeros((2, 2)), 'batch')


def test_rules_add_up_per_name():
  total = AxisRules(activations={'batch': ('data',)}) + AxisRules(
    parameters={'embed': ('fsdp',)}, activations={'batch': ('fsdp',)}
  )
  assert total.activations == {'batch': ('data', 'fsdp')}
  assert total.parameters == {'embed': ('fsdp',)}


def test_shard_puts_a_constraint_into_the_program_under_a_partitioner():
  topology = Topology(1, 8)
  sizes = resolve_mesh_sizes(topology, num_partitions=2, fsdp=2)
  mesh = build_mesh(sizes, topology, jax.devices())
  rules = AxisRules(activations=TABLE)

  def f(x):
    with use_rules(rules, mesh.shape):
      return shard(x * 2, 'batch', 'heads')

  with jax.set_mesh(mesh):
    out = jax.jit(f)(jnp.ones((8, 4)))
  assert out.sharding.shard_shape(out.shape) == (2, 2)


class Bare(nn.Module):
  @nn.compact
  def __call__(self, x):
    return x @ self.param('kernel', nn.initializers.ones, (3, 4))


def test_a_parameter_without_names_is_an_error_that_lists_it():
  boxed = Bare().init(jax.random.key(0), jnp.ones((1, 3)))['params']
  with raises(ShapeError):
    split_names(boxed)


def test_scanned_layers_get_a_layers_axis():
  boxed = jax.eval_shape(lambda: Square().init(jax.random.key(0), jnp.ones((1, 3))))['params']
  _, names = split_names(boxed)
  assert names['stack']['kernel'] == AxisNames(('layers', 'embed', 'embed'))


class SquareLayer(nn.Module):
  @nn.compact
  def __call__(self, x):
    init = with_axes(nn.initializers.ones, ('embed', 'embed'))
    return x @ self.param('kernel', init, (3, 3)), None


class Square(nn.Module):
  @nn.compact
  def __call__(self, x):
    stack = nn.scan(
      SquareLayer,
      variable_axes={'params': 0},
      split_rngs={'params': True},
      length=2,
      metadata_params={nn.PARTITION_NAME: 'layers'},
    )
    return stack(name='stack')(x)[0]
