"""T5X's Adafactor in NumPy and float64: one parameter in T5X's layout at a time.

Written from the rules of google-research/t5x, t5x/adafactor.py (`_parse_rule`, `_factored_dims`,
`set_param_axes`, `apply_param_gradient`).
"""

import dataclasses
from typing import Optional

import numpy as np

ROLES = {
  'vocab': 'column',
  'embed': 'row',
  'mlp': 'column',
  'heads': 'column',
  'kv': 'column',
  'joined_kv': 'column',
  'relpos_buckets': 'none',
  'layers': 'batch',
}


@dataclasses.dataclass(frozen=True)
class T5xParameter:
  """One parameter as T5X has it.

  Attributes:
    axes: T5X's names of its dimensions.
    shape: their sizes.
    beta1, weight_decay_rate, is_factored: as of T5X's Adafactor; the last is its `factored`.
  """

  axes: tuple[str, ...]
  shape: tuple[int, ...]
  beta1: Optional[float] = None
  weight_decay_rate: Optional[float] = None
  is_factored: bool = True

  def __post_init__(self):
    assert len(self.axes) == len(self.shape)

  @property
  def averaged(self):
    """The dimensions over which an update and the parameter have one root mean square."""
    batched = [name for name in self.axes if self.is_factored and ROLES[name] == 'batch']
    return tuple(i for i, name in enumerate(self.axes) if name not in batched)

  @property
  def factored(self):
    """(dimensions of the row, dimensions of the column), or None for a full second moment."""
    if not self.is_factored:
      return None
    if len(self.shape) <= 2 and len(self.averaged) == len(self.shape):  # the heuristic
      if len(self.shape) < 2:
        return None
      order = np.argsort(self.shape, kind='stable')
      return None if self.shape[order[-2]] < 128 else ((int(order[-2]),), (int(order[-1]),))
    rows, columns = (
      tuple(i for i, name in enumerate(self.axes) if ROLES[name] == role)
      for role in ('row', 'column')
    )
    return (rows, columns) if rows and columns else None

  def new_state(self):
    state = {name: np.zeros(1) for name in ('m', 'v', 'v_col', 'v_row')}
    if self.beta1 is not None:
      state['m'] = np.zeros(self.shape)
    if self.factored is None:
      return {**state, 'v': np.zeros(self.shape)}
    rows, columns = self.factored
    shape = np.asarray(self.shape)
    v_row, v_col = np.zeros(np.delete(shape, columns)), np.zeros(np.delete(shape, rows))
    return {**state, 'v_row': v_row, 'v_col': v_col}

  def update(self, param, grad, state, *, step, learning_rate):
    """Returns (new parameter, new state), float64; `step` counts from 0."""
    param, grad = param.astype(np.float64), grad.astype(np.float64)
    decay = 1 - (step + 1.0) ** -0.8
    square = grad**2 + 1e-30
    state = dict(state)
    if self.factored is None:
      state['v'] = decay * state['v'] + (1 - decay) * square
      update = grad / np.sqrt(state['v'])
    else:
      rows, columns = self.factored
      state['v_row'] = decay * state['v_row'] + (1 - decay) * square.mean(columns)
      state['v_col'] = decay * state['v_col'] + (1 - decay) * square.mean(rows)
      row = np.expand_dims(state['v_row'], columns)
      column = np.expand_dims(state['v_col'], rows)
      update = grad / np.sqrt(row / row.mean(rows, keepdims=True) * column)
    update = update / np.maximum(1.0, self._rms(update))
    subtrahend = learning_rate * np.maximum(self._rms(param), 1e-3) * update
    if self.beta1 is not None:
      subtrahend = state['m'] = self.beta1 * state['m'] + (1 - self.beta1) * subtrahend
    return (1 - (self.weight_decay_rate or 0.0)) * param - subtrahend, state

  def _rms(self, x):
    return np.sqrt((x**2).mean(self.averaged, keepdims=True))
