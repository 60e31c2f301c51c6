"""How far a result may be from float32's, and the sizes of the inputs on a GPU and on a CPU."""

import os

import jax
import jax.numpy as jnp

# Asking jax would start its backends while tests are collected.
ON_GPU = os.environ.get('T5X_GPU_TEST_PLATFORM') == 'cuda'


def error(got: jax.Array, exact: jax.Array) -> float:
  """Returns |got - exact| / |exact|, both norms over all elements, in float32."""
  got, exact = (jnp.asarray(jax.device_get(x), jnp.float32) for x in (got, exact))
  return float(jnp.linalg.norm(got - exact) / jnp.maximum(jnp.linalg.norm(exact), 1e-30))


def errors(got, exact) -> dict[str, float]:
  """Returns path -> `error` of two trees of arrays."""
  flat, _ = jax.tree_util.tree_flatten_with_path(exact)
  paths = [jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in flat]
  pairs = zip(paths, jax.tree.leaves(got), (x for _, x in flat), strict=True)
  return {path: error(a, b) for path, a, b in pairs}


def assert_close(got, exact, band: float) -> None:
  """Fails unless the error of each array of the tree `got` is a number of at most `band`."""
  bad = {path: e for path, e in errors(got, exact).items() if not e <= band}
  assert not bad, f'relative errors above {band}: {bad}'
