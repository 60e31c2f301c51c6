"""One layer of the loop over layers, on flat arrays: its residuals and its backward pass."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun


class LayerStep:
  """A layer on flat arrays, and its backward pass. Traced at the first call only.

  Some of the arrays that JAX's backward pass needs are inputs, such as weights. Only the others,
  and the layer's input, must be stored.

  Attributes:
    trained: per weight: whether it is differentiated.
    differentiated: per array of `shared`: whether it is differentiated.
  """

  def __init__(
    self,
    function: Callable[..., Any],
    *,
    trained: Sequence[bool],
    differentiated: Sequence[bool],
    **remat: Any,
  ):
    self._function, self._remat, self._traced = function, remat, None
    self.trained, self.differentiated = trained, differentiated

  def forward(
    self, weights: list[Any], carry: Any, shared: list[jax.Array], number: jax.Array
  ) -> tuple[Any, list[jax.Array]]:
    """Returns (carry, arrays to be stored for the backward pass)."""
    inputs = (weights, shared, number, carry)
    if self._traced is None:
      self._trace(inputs)
    results = self._traced(*jax.tree.leaves(inputs))
    outputs, needed = results[: self._output.num_leaves], results[self._output.num_leaves :]
    stored = [x for x, source in zip(needed, self._sources, strict=True) if source is None]
    return jax.tree.unflatten(self._output, outputs), stored

  def backward(
    self, weights: list[Any], shared: list[jax.Array], number: jax.Array, stored: Any, gradient: Any
  ) -> tuple[list[Any], Any, list[jax.Array]]:
    """Returns the gradients of (trained weights, carry, differentiated arrays of `shared`)."""
    fixed, stored = jax.tree.leaves((weights, shared, number)), iter(stored)
    needed = [next(stored) if i is None else fixed[i] for i in self._sources]
    return jax.tree.unflatten(self._pull, needed)(gradient)

  def _trace(self, inputs: Any) -> None:
    def forward(weights: Any, shared: Any, number: Any, carry: Any) -> Any:
      def layer(trained: Any, carry: Any, differentiated: Any) -> Any:
        whole = merged(self.trained, trained, weights)
        return self._function(
          whole, carry, merged(self.differentiated, differentiated, shared), number
        )

      output, pull = jax.vjp(
        jax.checkpoint(layer, **self._remat),
        chosen(self.trained, weights),
        carry,
        chosen(self.differentiated, shared),
      )
      self._output, self._pull = jax.tree.structure(output), jax.tree.structure(pull)
      return jax.tree.leaves(output) + jax.tree.leaves(pull)

    closed = jax.make_jaxpr(forward)(*inputs)
    fixed = closed.jaxpr.invars[: len(jax.tree.leaves(inputs[:3]))]
    needed = closed.jaxpr.outvars[self._output.num_leaves :]
    self._sources = [next((i for i, x in enumerate(fixed) if x is need), None) for need in needed]
    self._traced = jaxpr_as_fun(closed)


def chosen(which: Sequence[bool], items: Sequence[Any]) -> list[Any]:
  """Returns the `items` that `which` marks."""
  return [item for item, chosen in zip(items, which, strict=True) if chosen]


def merged(which: Sequence[bool], chosen: Sequence[Any], others: Sequence[Any]) -> list[Any]:
  """Returns `others` with the marked members replaced, in turn, by the members of `chosen`."""
  chosen = iter(chosen)
  return [next(chosen) if marked else x for marked, x in zip(which, others, strict=True)]
