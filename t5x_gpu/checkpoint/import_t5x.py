"""T5X's parameter trees, told apart by name, as ours."""

import re
from collections.abc import Mapping
from typing import Any

import flax.traverse_util
import numpy as np

from t5x_gpu.errors import CheckpointError

_LAYER = re.compile(r'(?P<stack>encoder|decoder)/layers_(?P<index>\d+)/(?P<rest>.+)')
# T5X joins heads and their features, and calls the kernel of separate logits `logits_dense/kernel`.
_RENAMED = {'decoder/token_embedder/embedding': 'token_embedder/embedding',
            'decoder/logits_dense/kernel': 'logits_dense/projection/kernel'}


def from_t5x(flat: Mapping[str, np.ndarray], abstract_params: Any) -> Any:
  """Returns T5X's decoder-only parameters as a tree like `abstract_params`.

  Args:
    flat: 'decoder/layers_0/mlp/wi_0/kernel' -> array, as T5X names them.
    abstract_params: our tree of shapes; layers stacked, heads apart from their features.
  Raises:
    CheckpointError: parameters that are missing, left over or of another size.
  """
  stacked: dict[str, dict[int, np.ndarray]] = {}
  ours: dict[str, np.ndarray] = {}
  for name, value in flat.items():
    layer = _LAYER.fullmatch(name)
    if layer:
      stacked.setdefault(f'layers/{layer["rest"]}', {})[int(layer['index'])] = value
    else:
      ours[_RENAMED.get(name, name.removeprefix('decoder/'))] = value
  for name, by_index in stacked.items():
    ours[name] = np.stack([by_index[i] for i in sorted(by_index)])
  want = flax.traverse_util.flatten_dict(abstract_params, sep='/')
  problems = [f'missing: {n}' for n in sorted(want.keys() - ours.keys())]
  problems += [f'left over: {n}' for n in sorted(ours.keys() - want.keys())]
  problems += [f'{n}: {ours[n].shape} does not fill {want[n].shape}'
               for n in sorted(ours.keys() & want.keys()) if ours[n].size != np.prod(want[n].shape)]
  if problems:
    raise CheckpointError('The T5X parameters are not those of this model:\n  '
                          + '\n  '.join(problems),
                          fix='Choose the model file with the same sizes, relative_bias and '
                              'logits_via_embedding.')
  return flax.traverse_util.unflatten_dict(
      {n: ours[n].reshape(want[n].shape) for n in want}, sep='/')
