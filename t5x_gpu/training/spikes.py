"""Skipped steps: the compiled step decides, so all hosts agree.

A skipped step leaves parameters and optimizer state bit-exactly unchanged. The step counter still
advances, and so do the schedule and the data.
"""

import dataclasses
from collections.abc import Sequence
from typing import Optional

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from t5x_gpu.errors import ConfigError
from t5x_gpu.partitioning.trees import Gradients, Tree

WINDOW = 128  # gradient norms in the median
LEAST_NORMS = 16  # needed before the median is used


@dataclasses.dataclass(frozen=True)
class SpikeConfig:
  """What to do about spikes and values that are not finite.

  Attributes:
    skip_nonfinite: skip a step whose loss or gradient is not finite; the run stops otherwise.
    skip_above: skip a step whose gradient norm, before clipping, is more than this many times the
      median of the last 128 steps; None for never. It implies `skip_nonfinite`.
    most_in_a_row: the run stops after this many skipped steps in a row.
    group_depth: logs the gradient norm of each group of parameters. The first `group_depth` parts
      of a parameter's path name its group. None logs the global norm alone.
    most_dumps: how many batches of bad steps each start of the run writes to MODEL_DIR/spikes.
  """

  skip_nonfinite: bool = False
  skip_above: Optional[float] = None
  most_in_a_row: int = 10
  group_depth: Optional[int] = None
  most_dumps: int = 5

  def __post_init__(self) -> None:
    problems = {
      'skip_above': self.skip_above is not None and self.skip_above <= 1,
      'most_in_a_row': self.most_in_a_row < 1,
      'group_depth': self.group_depth is not None and self.group_depth < 1,
      'most_dumps': self.most_dumps < 0,
    }
    wrong = [name for name, is_wrong in problems.items() if is_wrong]
    if wrong:
      raise ConfigError(
        f'SpikeConfig.{wrong[0]} = {getattr(self, wrong[0])} is too small.',
        fix='Set skip_above to more than 1, most_in_a_row and group_depth to at least 1, and '
        'most_dumps to at least 0.',
        parameters=[f'SpikeConfig.{name}' for name in wrong],
        docs='monitor.md#spikes',
      )

  @property
  def skips(self) -> bool:
    """Whether steps may be skipped."""
    return self.skip_nonfinite or self.skip_above is not None

  def no_norms(self) -> Optional[jax.Array]:
    """Returns the history of gradient norms before the first step; None if the run has none."""
    return None if self.skip_above is None else jnp.full((WINDOW,), jnp.nan, jnp.float32)

  def abstract_norms(self, sharding: jax.sharding.Sharding) -> Optional[jax.ShapeDtypeStruct]:
    """Returns shape and sharding of the history; None if the run has none."""
    if self.skip_above is None:
      return None
    return jax.ShapeDtypeStruct((WINDOW,), jnp.float32, sharding=sharding)

  def norms_on(
    self, sharding: jax.sharding.Sharding, values: Sequence[float]
  ) -> Optional[jax.Array]:
    """Returns the history that ends with `values`, oldest first; None if the run has none."""
    if self.skip_above is None:
      return None
    kept = np.asarray(list(values)[-WINDOW:], np.float32)
    norms = np.concatenate([np.full(WINDOW - len(kept), np.nan, np.float32), kept])
    return jax.make_array_from_callback(norms.shape, sharding, lambda index: norms[index])

  def decide(
    self, loss: jax.Array, grad_norm: jax.Array, norms: Optional[jax.Array]
  ) -> tuple[jax.Array, Optional[jax.Array]]:
    """Returns (whether to skip the step, the new history, which excludes skipped steps)."""
    skip = ~(jnp.isfinite(loss) & jnp.isfinite(grad_norm))
    if norms is None:
      return skip, None
    known = jnp.sum(jnp.isfinite(norms)) >= LEAST_NORMS
    skip |= known & (grad_norm > self.skip_above * jnp.nanmedian(norms))
    longer = jnp.concatenate([norms[1:], grad_norm.astype(norms.dtype)[None]])
    return skip, jnp.where(skip, norms, longer)

  def chosen(
    self, old: Tree, new: Tree, *, loss: jax.Array, grad_norm: jax.Array, norms: Optional[jax.Array]
  ) -> tuple[Tree, Optional[jax.Array], dict[str, jax.Array]]:
    """Returns (tree `old` if the step is skipped, else `new`; the new history; metrics)."""
    if not self.skips:
      return new, norms, {}
    skip, norms = self.decide(loss, grad_norm, norms)
    return choose(skip, old, new), norms, {'skipped': skip.astype(jnp.float32)}


def known_norms(norms: Optional[jax.Array]) -> list[float]:
  """Returns the history as numbers, oldest first, for the manifest of a checkpoint."""
  values = np.asarray([] if norms is None else norms)
  return [float(value) for value in values[np.isfinite(values)]]


def choose(skip: jax.Array, old: Tree, new: Tree) -> Tree:
  """Returns the tree `old` if `skip`, else `new`."""
  return jax.tree.map(lambda a, b: jnp.where(skip, a, b), old, new)


def group_norms(grads: Gradients, depth: Optional[int]) -> dict[str, jax.Array]:
  """Returns 'grad_norm/layers/mlp' -> norm of all gradients below layers/mlp.

  Args:
    grads: tree of nested dictionaries.
    depth: parts of a path that name a group; None for no groups.
  """
  if depth is None:
    return {}
  squares: dict[str, jax.Array] = {}
  for path, grad in flax.traverse_util.flatten_dict(grads).items():
    group = '/'.join(path[:depth])
    squares[group] = squares.get(group, 0.0) + jnp.sum(jax.lax.square(grad))
  return {f'grad_norm/{group}': jnp.sqrt(square) for group, square in sorted(squares.items())}
