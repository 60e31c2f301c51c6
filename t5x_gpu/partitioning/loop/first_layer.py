"""The gradients of the first layer, summed over devices after all other gradients.

The backward pass ends with the embeddings, whose table is often the largest array of a model. If
the first layer's gradients were sent before the table's gradient, no matmul would be left to hide
the table's collective. But the matmuls for the gradients of kernels can wait: nothing else needs
their results. So the loop over layers (layer_loop.py) returns the first layer's gradients
unreduced, through ports; all others are sent while they are computed; the first layer's come last.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from t5x_gpu.partitioning import fsdp, quantized
from t5x_gpu.partitioning.axis_rules import varying


def with_ports(
  make: Callable[[Any], Any], parts: Any, first_stack: Any, *, axes: tuple[str, ...]
) -> Any:
  """Returns `make(parts)`, where parameters of the first stack have a port (`fsdp.Split.first`).

  Args:
    make: parts -> parameters for a model, whose backward pass reduces their gradients.
    parts: the differentiated parts.
    first_stack: tree of bools: whether a parameter belongs to the layers that run first.
    axes: all manual mesh axes.
  """
  leaves, treedef = jax.tree.flatten(parts)
  splits = jax.tree.leaves(make(parts), is_leaf=fsdp.is_split)
  chosen = [i for i, first in enumerate(jax.tree.leaves(first_stack)) if first]
  at_end = quantized.are_summed_at_end([splits[i] for i in chosen])
  layers = {
    i: jax.tree.map(lambda x: x[0], splits[i])
    for i, late in zip(chosen, at_end, strict=True)
    if fsdp.is_split(splits[i]) and splits[i].dims.ahead and not late
  }
  ports = {i: _port(layer, axes) for i, layer in layers.items()}
  earlier = {i: layer.earlier for i, layer in layers.items()}
  dims = tuple((i, layer.dims) for i, layer in layers.items())
  leaves, ports = _open(dims, leaves, ports, earlier)
  made, made_tree = jax.tree.flatten(
    make(jax.tree.unflatten(treedef, leaves)), is_leaf=fsdp.is_split
  )
  made = [x.replace(first=ports[i]) if i in ports else x for i, x in enumerate(made)]
  return jax.tree.unflatten(made_tree, made)


def _port(layer: fsdp.Split, axes: tuple[str, ...]) -> jax.Array:
  """Returns zeros with the shape of the whole parameter of a layer."""
  whole = jax.eval_shape(lambda x: fsdp.whole(x, jnp.float32), layer)
  return varying(jnp.zeros(whole.shape, jnp.float32), axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _open(dims: Any, parts: Any, ports: Any, earlier: Any) -> Any:
  """Returns `parts` and `ports`, whose gradients arrive together; only the ports' are not reduced.

  Args:
    dims: (place in `parts`, how it is split) of each parameter with a port.
    parts: list of the differentiated parts.
    ports: place -> port.
    earlier: place -> gradient of earlier microbatches of the first layer, or None.
  """
  del dims, earlier
  return parts, ports


def _forward(dims: Any, parts: Any, ports: Any, earlier: Any) -> Any:
  return (parts, ports), earlier


def _backward(dims: Any, earlier: Any, gradients: Any) -> Any:
  parts, ports = gradients
  # The barrier starts the first layer's collectives after the others are done. Where marks allow,
  # users of the other gradients wait too; otherwise XLA delays a large one to the end of the step.
  marks = jax.typeof(next(iter(ports.values()))).manual_axis_type if ports else None
  same = [i for i, x in enumerate(parts) if jax.typeof(x).manual_axis_type == marks]
  ports, late, _ = jax.lax.optimization_barrier((ports, [parts[i] for i in same], parts))
  for i, x in zip(same, late, strict=True):
    parts[i] = x
  for i, of_leaf in dims:
    first = fsdp.reduced(ports[i], of_leaf, earlier[i])
    parts[i] = jax.lax.dynamic_update_index_in_dim(parts[i], first, 0, 0)
  return parts, None, None


_open.defvjp(_forward, _backward)
