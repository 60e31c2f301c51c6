"""Attention by the kernels of Tokamax (OpenXLA): Mosaic on Hopper and Blackwell, Triton on others.

A kernel gets one range of keys per query instead of a mask array: packing, padding, prefixes and
windows cost no memory. Its result equals dense attention, except on padding, which does not affect
any token. Source: Dao 2023 (FlashAttention-2), Shah et al. 2024 (FlashAttention-3).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Optional

import flax.struct
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from t5x_gpu.layers.backends import tokamax_internals
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.masks import KeyRanges, TokenInfo, key_ranges, longer, padded
from t5x_gpu.partitioning.axis_rules import on_each_device
from t5x_gpu.partitioning.ring_attention import RESULTS

_Names = tuple[Optional[str], ...]
_QUERY = ('batch', None, 'heads', 'kv')
_KEY = ('batch', None, 'kv_heads', 'kv')
_BIAS = (None, 'heads', None, None)
_RANGE = ('batch', None)
_RESIDUAL = ('batch', 'heads', None)


@flax.struct.dataclass
class TokamaxAttention:
  """Attention over whole rows by one kernel.

  Attributes:
    q, kv: positions and segments of queries and keys, possibly padded beyond the length of a call.
    ranges: keys that each query attends to, without a window.
    kind: attention of the stack.
    kernel: 'mosaic_gpu', 'triton', or 'reference': Tokamax's definition in plain JAX.
    whole_rows: queries and keys have the same positions 0, 1, 2, ...
  """

  q: TokenInfo
  kv: TokenInfo
  ranges: KeyRanges
  kind: AttentionKind = flax.struct.field(pytree_node=False)
  kernel: str = flax.struct.field(pytree_node=False)
  whole_rows: bool = flax.struct.field(pytree_node=False)

  def bias(self, table: jax.Array) -> jax.Array:
    return self.kind.bias(table, self.q, self.kv, whole_rows=self.whole_rows)

  def __call__(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[jax.Array],
    window: Optional[jax.Array] = None,
  ) -> jax.Array:
    ranges = self.ranges if window is None else self.ranges.in_window(window)
    causal = self.kind.causal and self.whole_rows and self.q.prefix is None
    call = KernelCall(self.kernel, causal, self.kind.softcap)
    q_length, kv_length = self.q.segments.shape[-1], self.kv.segments.shape[-1]
    # For rows whose masks are not ranges, the result is wrong: `scale` makes their loss NaN.
    scale = ranges.scale[:, :, None, None].astype(query.dtype)
    out = attend(
      call,
      longer(query, q_length) * scale,
      longer(key, kv_length),
      longer(value, kv_length),
      bias,
      ranges.start,
      None if causal else ranges.end,
    )
    return out[:, : query.shape[1]]


def tokamax_attention(
  kind: AttentionKind,
  info: TokenInfo,
  kv_info: Optional[TokenInfo] = None,
  *,
  kernel: str,
  multiple: int = 1,
) -> TokamaxAttention:
  """Returns attention for a batch, computed by a Tokamax kernel.

  Args:
    kind, info, kv_info: as in `make_attention`.
    kernel: as in TokamaxAttention.
    multiple: rows are padded to a multiple of this length.
  """

  def whole(info: TokenInfo) -> TokenInfo:
    return padded(info, -(-info.segments.shape[-1] // multiple) * multiple)

  q, kv = whole(info), whole(info if kv_info is None else kv_info)
  num_others = None if kv_info is None else kv_info.segments.shape[-1]
  ranges = key_ranges(kind.mask(q, kv), num_others=num_others)
  return TokamaxAttention(q, kv, ranges, kind, kernel, whole_rows=kv_info is None)


@dataclasses.dataclass(frozen=True)
class KernelCall:
  """The forward and backward kernels of attention, and their static arguments.

  Tokamax's custom_vjp loses the marks of arrays that vary over manual axes, so JAX refuses its
  gradients. Here both kernels are called separately, and `on_each_device` marks their results.
  Neither method may be differentiated.

  Attributes:
    kernel: as in TokamaxAttention.
    causal: no query attends to a later key, so that ranges have no end.
    softcap: cap on the logits, or None.
  """

  kernel: str
  causal: bool
  softcap: Optional[float]

  def forward(
    self,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: Optional[jax.Array],
    start: jax.Array,
    end: Optional[jax.Array],
  ) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the output, and maxima and sums of the softmaxes, float32 [batch, heads, q_length].

    Args:
      query, key, value: as in Attention, without a scale of the logits.
      bias: [1, heads, q_length, kv_length] or None.
      start, end: int32 [batch, q_length], the keys of each query; no end if `causal`.
    """
    op = _kernel(self.kernel).replace(vjp=None)

    def kernel(query, key, value, bias, start, end):
      out, (row_max, row_sum) = op(
        query, key, value, return_residuals=True, **self._options(bias, start, end)
      )
      return out, row_max, row_sum

    names = (_QUERY, _RESIDUAL, _RESIDUAL)
    return on_each_device(kernel, _names(bias, end), names)(query, key, value, bias, start, end)

  def backward(
    self, saved: Sequence[Optional[jax.Array]], dout: jax.Array
  ) -> tuple[jax.Array, jax.Array, jax.Array, Optional[jax.Array]]:
    """Returns the gradients of query, key, value and bias.

    Args:
      saved: arguments and results of `forward`.
      dout: gradient of the output.
    """
    op, bias, end = _kernel(self.kernel), saved[3], saved[5]

    def kernel(query, key, value, bias, start, end, out, row_max, row_sum, dout):
      bound = op.bind(query, key, value, **self._options(bias, start, end))
      options = {name: x for name, x in bound.kwargs.items() if name != 'return_residuals'}
      grads = op.vjp((row_max, row_sum), out, dout, *bound.args, **options)
      return tuple(grads[name] for name in ('q', 'k', 'v', *(() if bias is None else ('bias',))))

    bias_names = () if bias is None else (_BIAS,)
    dquery, dkey, dvalue, *dbias = on_each_device(
      kernel,
      (*_names(bias, end), _QUERY, _RESIDUAL, _RESIDUAL, _QUERY),
      (_QUERY, _KEY, _KEY, *bias_names),
    )(*saved, dout)
    return dquery, dkey, dvalue, *(dbias or [None])

  def _options(
    self, bias: Optional[jax.Array], start: jax.Array, end: Optional[jax.Array]
  ) -> dict[str, object]:
    mask = tokamax_internals.range_mask(start, end, is_causal=self.causal)
    return dict(bias=bias, mask=mask, logits_scale=1.0, logits_soft_cap=self.softcap)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
  call: KernelCall,
  query: jax.Array,
  key: jax.Array,
  value: jax.Array,
  bias: Optional[jax.Array],
  start: jax.Array,
  end: Optional[jax.Array],
) -> jax.Array:
  """Returns the output of `call.forward`; differentiable in all arguments except the ranges."""
  return _forward(call, query, key, value, bias, start, end)[0]


def _forward(call: KernelCall, *args):
  """Returns (output, residuals for the backward pass)."""
  results = checkpoint_name(call.forward(*args), RESULTS)
  return results[0], (*args, *results)


def _backward(call: KernelCall, saved, dout):
  """Returns the gradients of all arguments except the ranges."""
  return *call.backward(saved, dout), None, None


attend.defvjp(_forward, _backward)


def _names(bias: Optional[jax.Array], end: Optional[jax.Array]) -> tuple[Optional[_Names], ...]:
  return (
    _QUERY,
    _KEY,
    _KEY,
    None if bias is None else _BIAS,
    _RANGE,
    None if end is None else _RANGE,
  )


def _kernel(name: str) -> tokamax_internals.Kernel:
  if name == 'reference':
    return tokamax_internals.plain_attention(_reference_gradients)
  return tokamax_internals.kernel(name)


def _reference_gradients(statistics, out, dout, query, key, value, *, bias, mask, **options):
  """Returns the gradients by formula: Tokamax's definition lacks the marks for autodiff."""
  row_max, row_sum = (x[..., None] for x in statistics)
  by_head = lambda x: jnp.repeat(x, query.shape[2] // x.shape[2], axis=2)  # noqa: E731
  by_kv_head = lambda x: x.reshape(*key.shape[:3], -1, x.shape[-1]).sum(3)  # noqa: E731
  logits = jnp.einsum('bqhd,bkhd->bhqk', query, by_head(key))
  logits = logits if bias is None else logits + bias
  cap = options['logits_soft_cap']
  capped = logits if cap is None else cap * jnp.tanh(logits / cap)
  weights = jnp.exp(capped - row_max) / row_sum
  weights = jnp.where(mask.as_array(query.shape[1], key.shape[1]), weights, 0.0)
  dweights = jnp.einsum('bqhd,bkhd->bhqk', dout, by_head(value))
  dlogits = weights * (dweights - jnp.einsum('bqhd,bqhd->bhq', dout, out)[..., None])
  if cap is not None:
    dlogits = dlogits * (1 - (capped / cap) ** 2)
  of_key = by_kv_head(jnp.einsum('bhqk,bqhd->bkhd', dlogits, query))
  of_value = by_kv_head(jnp.einsum('bhqk,bqhd->bkhd', weights, dout))
  return {
    'q': jnp.einsum('bhqk,bkhd->bqhd', dlogits, by_head(key)).astype(query.dtype),
    'k': of_key.astype(key.dtype),
    'v': of_value.astype(value.dtype),
    'bias': dlogits.sum(0, keepdims=True),
  }
