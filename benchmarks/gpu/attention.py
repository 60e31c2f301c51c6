"""Attention alone: each backend, whole and packed rows, forward and with its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu.parts import Row
from benchmarks.gpu.timing import time_calls
from t5x_gpu.layers.backends.choose import AttentionNeed, attention_by, choose, hardware, that_serve
from t5x_gpu.layers.backends.kinds import Attention, AttentionKind
from t5x_gpu.layers.backends.tokamax_internals import listed_untuned
from t5x_gpu.layers.masks import TokenInfo

TOKENS, HEADS, HEAD_DIM = 32768, 16, 128
DOCUMENTS = 4  # in a packed row

Function = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
Make = Callable[[AttentionKind, TokenInfo], Attention | Callable[..., jax.Array]]

NEED = AttentionNeed(dtype='bfloat16', head_dim=HEAD_DIM)


def backends() -> dict[str, Make]:
  """Returns name -> (kind, info) -> attention, of all backends that run on this device."""
  return {name: functools.partial(attention_by, name) for name in that_serve(NEED, hardware())}


CUDNN = 'jax.nn, cuDNN'


def _cudnn(kind: AttentionKind, info: TokenInfo) -> Callable[..., jax.Array]:
  """Returns cuDNN's kernel as JAX calls it: whole rows only."""

  def attention(q: jax.Array, k: jax.Array, v: jax.Array, bias: None) -> jax.Array:
    return jax.nn.dot_product_attention(
      q, k, v, scale=1.0, is_causal=kind.causal, implementation='cudnn'
    )

  return attention


def shape_of(length: int, *, small: bool = False) -> tuple[int, int, int, int]:
  """Returns [rows, length, heads, features] of queries, keys and values."""
  if small:
    return 2, 32, 2, 16
  return TOKENS // length, length, HEADS, HEAD_DIM


def measure(length: int, *, small: bool = False) -> Iterator[Row]:
  """Yields the times of each backend on rows of `length`, TOKENS in all."""
  shape = shape_of(length, small=small)
  _, length, heads, _ = shape
  rows = dict(rows=shape[0], rows_and_heads=shape[0] * heads)
  need = dataclasses.replace(NEED, q_length=length, kv_length=length, **rows)
  auto = choose('auto', need, hardware())
  for packed in (False, True):
    peers = {} if packed or hardware().platform != 'gpu' else {CUDNN: _cudnn}
    for name, make in {**backends(), **peers}.items():
      row = {'backend': name, 'length': length, 'packed': packed, 'shape': shape}
      row['auto'] = name == auto.name
      row['no_kernel'] = auto.no_kernel if row['auto'] else ''
      try:
        yield row | _time(make, shape, packed, small)
      except Exception as e:  # a kernel that does not serve this size costs its own row only
        yield row | {'error': f'{type(e).__name__}: {e}'.splitlines()[0][:200]}


@dataclasses.dataclass(frozen=True)
class Call:
  """Attention, forward or with its gradients.

  Attributes:
    name: 'forward' or 'backward'.
    function, arguments: what is timed.
    factor: FLOPs relative to the forward pass.
  """

  name: str
  function: Callable[..., Any]
  arguments: Sequence[Any]
  factor: float


def calls(make: Make, shape: Sequence[int], segments: np.ndarray) -> Sequence[Call]:
  """Returns the calls that are timed, in bfloat16.

  Args:
    make: of `backends`.
    shape: [rows, length, heads, features].
    segments: [length], of every row.
  """
  batch, length, _, head_dim = shape
  keys = jax.random.split(jax.random.key(0), 4)
  operands = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
  info = TokenInfo(
    jnp.arange(length), jnp.broadcast_to(jnp.asarray(segments, jnp.int32), (batch, length))
  )

  def forward(q: jax.Array, k: jax.Array, v: jax.Array, info: TokenInfo) -> jax.Array:
    return make(AttentionKind(), info)(q * head_dim**-0.5, k, v, None)

  def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array, info: TokenInfo) -> Any:
    out, pullback = jax.vjp(lambda *qkv: forward(*qkv, info), q, k, v)
    return out, pullback(dout)

  return (
    Call('forward', forward, (*operands[:3], info), 1.0),
    Call('backward', both, (*operands, info), 3.5),  # seven matmuls, two of them forward
  )


def segments_of(length: int, *, packed: bool) -> np.ndarray:
  """Returns the segments of a row, [length]."""
  return np.arange(length) * (DOCUMENTS if packed else 1) // length + 1


def _time(make: Make, shape: Sequence[int], packed: bool, small: bool) -> Row:
  batch, length, heads, head_dim = shape
  segments = segments_of(length, packed=packed)
  _, counts = np.unique(segments, return_counts=True)
  pairs = batch * int((counts * (counts + 1) // 2).sum())
  flops = 4 * pairs * heads * head_dim
  result: Row = {'pairs': pairs}
  with listed_untuned() as untuned:
    for call in calls(make, shape, segments):
      compiled = jax.jit(call.function).lower(*call.arguments).compile()
      memory = compiled.memory_analysis()
      timing = time_calls(
        functools.partial(compiled, *call.arguments), jax.block_until_ready, small=small
      )
      result[call.name] = {
        **timing.row(),
        'tflops': call.factor * flops / timing.seconds / 1e12,
        'temporary_bytes': memory.temp_size_in_bytes if memory else None,
      }
  return {**result, 'untuned_kernels': len(untuned)}
