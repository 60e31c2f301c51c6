"""Everything that relies on private parts of Tokamax (0.0.12), and the public API that is missing.

No issue of openxla/tokamax is known to us. jax-ml/jax#32484 asked for the statistics of the softmax
from `jax.nn.dot_product_attention`, and was closed.
"""

import contextlib
import contextvars
import functools
import importlib
import importlib.metadata
import importlib.util
import logging
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, Optional

import jax

from t5x_gpu.errors import ConfigError
from t5x_gpu.runtime.main_log import log_once

_ATTENTION = 'tokamax._src.ops.attention'
# Tokamax's types of an operation and a mask; Tokamax is imported late, and may be missing.
Kernel = Any
Mask = Any


def library(module: str = 'tokamax') -> types.ModuleType:
  """Returns a module of Tokamax, imported only when needed, because it takes seconds.

  Missing: an import that defines no absl flags, and one warning for all untuned kernels.

  Raises:
    ConfigError: this version of Tokamax does not work on this version of JAX.
  """
  version = importlib.metadata.version('tokamax')
  numbers = tuple(map(int, re.findall(r'\d+', version)[:3]))
  if jax.__version_info__ >= (0, 11) and numbers < (0, 0, 13):
    raise ConfigError(
      f'tokamax {version}, which has the attention kernels, does not work on jax '
      f'{jax.__version__}: jax 0.11 and newer need tokamax 0.0.13 or newer.',
      fix="Run pip install --upgrade 'tokamax>=0.0.13,!=0.0.15,<0.1'.",
      docs='attention.md#versions',
    )
  return _library(module)


@functools.cache
def _library(module: str) -> types.ModuleType:
  from absl import flags

  if not flags.FLAGS.is_parsed():  # otherwise absl would read the flags of our command line
    flags.FLAGS.mark_as_parsed()
  logging.getLogger('absl').addFilter(_is_news)
  return importlib.import_module(module)


def kernel(name: str) -> Kernel:
  """Returns the operation 'mosaic_gpu' or 'triton', which has `bind`, `vjp` and `replace`.

  Missing: `tokamax.dot_product_attention` that returns maximum and sum of each softmax, and a
  public function for its gradients.
  """
  return library(f'{_ATTENTION}.api').IMPLEMENTATIONS[name]


def plain_attention(vjp: Callable[..., dict[str, jax.Array]]) -> Kernel:
  """Returns the operation that defines attention in plain JAX, with `vjp` as its gradients.

  Missing: as for `kernel`.
  """
  return library(f'{_ATTENTION}.base').DotProductAttention(vjp=vjp)


def range_mask(start: jax.Array, end: Optional[jax.Array], *, is_causal: bool) -> Mask:
  """Returns a mask that lets each query attend to keys from `start` to before `end`.

  Missing: ranges that differ by query in `tokamax.dot_product_attention`.

  Args:
    start, end: int32 [batch, q_length]; None for no end.
    is_causal: no query attends to a later key.
  """
  return library(f'{_ATTENTION}.base').Mask(
    k_start=start[:, None], k_end=None if end is None else end[:, None], is_causal=is_causal
  )


def has_ragged_dot(kernel: str) -> bool:
  """Returns whether the installed Tokamax has `ragged_dot` in Pallas, as 'mosaic' or 'triton'.

  Since Tokamax 0.0.15 the Triton kernel needs jax-triton, which cannot be lowered without a GPU;
  this kernel is untested here.
  """
  module = {'mosaic': 'pallas_mosaic_gpu', 'triton': 'pallas_triton'}[kernel]
  package = library('tokamax._src.ops.ragged_dot.api').__package__
  return importlib.util.find_spec(f'{package}.{module}') is not None


_untuned: contextvars.ContextVar[Optional[list[object]]] = contextvars.ContextVar(
  'untuned', default=None
)


@contextlib.contextmanager
def listed_untuned() -> Iterator[list[object]]:
  """Context that lists calls of kernels without tuned block sizes in all that is traced within it.

  Each is a `tokamax.BoundArguments` of shapes, and listed once. A call that an outer function has
  traced before is not traced again.

  Missing: `tokamax.autotuning.get_bound_args` of a lowered function, which fails with Tokamax
  0.0.12 on jax 0.10.2.
  """
  token = _untuned.set([])
  try:
    yield _untuned.get()
  finally:
    _untuned.reset(token)


def _is_news(record: logging.LogRecord) -> bool:
  if not record.msg.startswith('Autotuning cache miss'):
    return True
  untuned = _untuned.get()
  if untuned is not None:
    op, _, arguments = record.args
    adapter = library('tokamax._src.ops.op')._get_arg_spec_adapter(op)
    if not isinstance(arguments, str):  # JSON since Tokamax 0.0.13
      arguments = adapter.dump_json(dict(arguments))
    adapter = getattr(adapter, '_impl', adapter)  # wraps pydantic's since Tokamax 0.0.13
    call = library().BoundArguments(op, adapter.validate_json(arguments))
    if call not in untuned:
      untuned.append(call)
  # Logged once instead of once per kernel. Tokamax 0.0.17 has tuned entries only for B200 and TPUs.
  log_once(
    'Tokamax: no tuned block sizes for this GPU and these shapes; kernels use default block sizes'
  )
  return False
