"""Every attention backend on this device equals dense attention in float32, gradients included."""

import dataclasses
import functools
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.backends.choose import BACKENDS, AttentionNeed, attention_by, hardware, lacks
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.backends.plain import DenseAttention
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.positions import RelativeBuckets
from tests.gpu.helpers_numerics import ON_GPU, assert_close

# Libraries may warn about the jax of a GPU machine, which does not affect numbers.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings('default')]

BATCH, LENGTH, HEADS, HEAD_DIM = (2, 512, 8, 64) if ON_GPU else (2, 64, 4, 8)
ODD_LENGTH = 500 if ON_GPU else 61
# Dense attention in bfloat16 is 2.5e-3 away; kernels may also round the softmax.
BAND = 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
  """What attention has to do.

  Attributes:
    causal, softcap, kv_heads, window: as in TransformerConfig.
    ends: where the documents of a row end, in 64ths of the row; the rest is padding.
    has_bias: T5's relative bias.
    has_prefix: the first third of each document is seen from all of it.
    head_dim, length: of the queries.
    kv_ends: as `ends`, of an encoder's row of half the length; None for self-attention.
  """

  causal: bool = True
  ends: tuple[int, ...] = (64,)
  softcap: Optional[float] = None
  kv_heads: int = HEADS
  window: Optional[int] = None
  has_bias: bool = False
  has_prefix: bool = False
  head_dim: int = HEAD_DIM
  length: int = LENGTH
  kv_ends: Optional[tuple[int, ...]] = None


CASES = {
  'causal': Case(),
  'both_directions': Case(causal=False),
  'padded': Case(ends=(41,)),
  'padded_both_directions': Case(causal=False, ends=(41,)),
  'packed': Case(ends=(5, 24, 61)),
  'packed_both_directions': Case(causal=False, ends=(5, 24, 64)),
  'window': Case(window=LENGTH // 5),
  'packed_window': Case(ends=(5, 24, 61), window=LENGTH // 5),
  'softcap': Case(softcap=5.0),
  'grouped': Case(kv_heads=HEADS // 4),
  'one_kv_head_packed': Case(kv_heads=1, ends=(20, 64)),
  'bias': Case(has_bias=True),
  'bias_both_directions': Case(has_bias=True, causal=False),
  'bias_packed': Case(has_bias=True, ends=(20, 64)),
  'prefix': Case(has_prefix=True),
  'prefix_packed_window': Case(has_prefix=True, ends=(5, 24, 61), window=LENGTH // 5),
  'cross': Case(causal=False, ends=(50,), kv_ends=(41,)),
  'cross_packed_grouped': Case(
    causal=False, ends=(5, 24, 61), kv_ends=(20, 30, 64), kv_heads=HEADS // 4
  ),
  'odd_length': Case(length=ODD_LENGTH),
  'odd_length_packed_bias': Case(length=ODD_LENGTH, ends=(5, 24, 61), has_bias=True),
  'heads_twice_as_wide': Case(head_dim=2 * HEAD_DIM, ends=(5, 24, 61)),
  'heads_four_times_as_wide': Case(head_dim=4 * HEAD_DIM, ends=(5, 24, 61), kv_heads=HEADS // 4),
}


def segments(ends: tuple[int, ...], length: int) -> np.ndarray:
  """Returns segment ids [BATCH, length]; the rows of a batch differ by one position.

  Args:
    ends: as in Case.
    length: length of a row.
  """
  rows = []
  for shift in range(BATCH):
    last = [end * length // 64 - (shift if end < 64 else 0) for end in ends]
    position = np.arange(length)
    segment = np.searchsorted(last, position, side='right') + 1
    rows.append(np.where(position < last[-1], segment, 0))
  return np.stack(rows).astype(np.int32)


def infos(case: Case) -> tuple[TokenInfo, Optional[TokenInfo]]:
  """Returns positions and segments of the queries, and of the keys unless they are the same."""
  ids, prefix, others = segments(case.ends, case.length), None, None
  if case.has_prefix:
    starts = np.array([[np.flatnonzero(row == s)[0] for s in row] for row in ids])
    counts = np.array([[(row == s).sum() for s in row] for row in ids])
    prefix = jnp.asarray((np.arange(case.length) - starts < counts // 3) & (ids > 0))
  if case.kv_ends is not None:
    length = case.length // 2
    others = TokenInfo(jnp.arange(length), jnp.asarray(segments(case.kv_ends, length)))
  return TokenInfo(jnp.arange(case.length), jnp.asarray(ids), prefix), others


def inputs(case: Case):
  """Returns (query, key, value, table, gradient of the output); values that bfloat16 can hold."""
  keys = jax.random.split(jax.random.key(0), 5)
  heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
  kv_length = case.length if case.kv_ends is None else case.length // 2
  lengths = (case.length, kv_length, kv_length, case.length)
  q, k, v, dout = (
    jax.random.normal(key, (BATCH, length, count, case.head_dim), jnp.bfloat16)
    for key, count, length in zip(keys, heads, lengths)
  )
  table = jax.random.normal(keys[4], (HEADS, RelativeBuckets.num_buckets), jnp.bfloat16)
  is_token = (segments(case.ends, case.length) > 0)[..., None, None]
  return q * case.head_dim**-0.5, k, v, table.astype(jnp.float32), jnp.where(is_token, dout, 0)


def attend(case: Case, make, dtype):
  """Returns the output, 0 on padding, and the gradients of query, key, value and table."""
  q, k, v, table, dout = inputs(case)
  info, kv_info = infos(case)
  window = None if case.window is None else jnp.int32(case.window)

  def run(q, k, v, table):
    attention = make(kind_of(case), info, kv_info)
    bias = attention.bias(table) if case.has_bias else None
    out = attention(q, k, v, bias, window)
    return jnp.where((info.segments > 0)[..., None, None], out, 0)

  def both(q, k, v, table, dout):
    out, pullback = jax.vjp(run, q, k, v, table)
    return {'out': out, **dict(zip(('query', 'key', 'value', 'table'), pullback(dout)))}

  result = jax.jit(both)(*(x.astype(dtype) for x in (q, k, v)), table, dout.astype(dtype))
  if not case.has_bias:
    result.pop('table')
  return result


def kind_of(case: Case) -> AttentionKind:
  return AttentionKind(case.causal, case.softcap, RelativeBuckets(bidirectional=not case.causal))


def dense(
  kind: AttentionKind, info: TokenInfo, kv_info: Optional[TokenInfo] = None
) -> DenseAttention:
  kv = info if kv_info is None else kv_info
  return DenseAttention(info, kv, kind.mask(info, kv), kind, whole_rows=kv_info is None)


def exact(case: Case):
  with jax.default_matmul_precision('highest'):
    return attend(case, dense, jnp.float32)


def served_by(backend: str, case: Case):
  """Returns (kind, info, kv_info) -> attention; skips where a backend does not serve the case."""
  need = AttentionNeed(
    'bfloat16', case.head_dim, softcap=case.softcap is not None, relative_bias=case.has_bias
  )
  if missing := lacks(BACKENDS[backend], need, hardware()):
    pytest.skip('; '.join(missing))
  return functools.partial(attention_by, backend)


@pytest.mark.parametrize('name', CASES)
@pytest.mark.parametrize('backend', BACKENDS)
def test_a_backend_equals_dense_attention_in_float32(backend, name):
  case = CASES[name]
  make = served_by(backend, case)
  assert_close(attend(case, make, jnp.bfloat16), exact(case), BAND)


@pytest.mark.parametrize('backend', BACKENDS)
def test_a_packed_row_equals_its_documents_one_by_one(backend):
  case = Case(ends=(5, 24, 64))
  make = served_by(backend, case)
  got, (q, k, v, _, dout) = attend(case, make, jnp.bfloat16), inputs(case)
  [ids, *_] = segments(case.ends, case.length)

  def document(at):
    alone = TokenInfo(jnp.arange(len(at)), jnp.ones((1, len(at)), jnp.int32))
    attention = dense(kind_of(case), alone)
    own = [x[:1, at].astype(jnp.float32) for x in (q, k, v, dout)]
    out, pullback = jax.vjp(lambda q, k, v: attention(q, k, v, None), *own[:3])
    return dict(zip(('out', 'query', 'key', 'value'), (out, *pullback(own[3]))))

  for number in np.unique(ids):
    at = np.flatnonzero(ids == number)
    with jax.default_matmul_precision('highest'):
      assert_close({name: x[:1, at] for name, x in got.items()}, document(at), BAND)
