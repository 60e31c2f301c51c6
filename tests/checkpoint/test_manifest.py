"""A manifest names the arrays that differ, parameters first."""

import jax
import numpy as np

from t5x_gpu.checkpoint.manifest import differences, make_manifest


def manifest(tree):
  return make_manifest(tree, mesh_shape={'data': 1}, data={}, next_batch_hash='')


def arrays(**shapes):
  return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def test_equal_trees_do_not_differ_whatever_their_values_and_mesh():
  tree = {'params': arrays(a=(2, 3)), 'opt_state': arrays(mu=(2, 3))}
  assert differences(manifest(tree), tree) == []
  abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
  assert differences(manifest(tree), abstract) == []


def test_shape_dtype_missing_and_left_over_are_distinguished():
  old = {'params': arrays(a=(2, 3), old_name=(4,), c=(1,))}
  new = {'params': {**arrays(a=(2, 5), old_names=(4,)), 'c': np.zeros(1, np.int32)}}
  assert differences(manifest(old), new) == [
    'params/a: float32[2, 3] in the checkpoint, float32[2, 5] in the model.',
    'params/c: float32[1] in the checkpoint, int32[1] in the model.',
    "params/old_names float32[4]: not in the checkpoint. Did you mean 'params/old_name'?",
    'params/old_name float32[4]: in the checkpoint, not in the model.',
  ]


def test_other_parameters_are_listed_and_their_optimizer_state_is_counted():
  old, new = (
    {
      'params': arrays(**{f'p{i}': (n,) for i in range(9)}),
      'opt_state': arrays(**{f'p{i}': (n,) for i in range(9)}),
    }
    for n in (2, 3)
  )
  lines = differences(manifest(old), new)
  assert lines[0].startswith('params/p0: ') and len(lines) == 7
  assert lines[-2:] == ['and 4 more', '9 arrays of the optimizer state differ as well.']


def test_another_optimizer_of_the_same_model_is_called_that():
  old = {'params': arrays(a=(2,)), 'opt_state': arrays(mu=(2,))}
  new = {'params': arrays(a=(2,)), 'opt_state': arrays(row_mean=(2,))}
  assert differences(manifest(old), new) == [
    'The parameters are the same, the optimizer state is not:',
    'opt_state/row_mean float32[2]: not in the checkpoint.',
    'opt_state/mu float32[2]: in the checkpoint, not in the model.',
  ]
