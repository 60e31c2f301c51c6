"""Every attention backend on this device equals dense attention in float32, gradients included."""

import dataclasses
import functools
from typing import Optional

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.layers.backends.choose import attention_by
from t5x_gpu.layers.backends.dense import DenseAttention
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.backends.serves import BACKENDS, AttentionNeed, hardware, lacks
from t5x_gpu.layers.masks import TokenInfo
from t5x_gpu.layers.positions import RelativeBuckets
from tests.gpu.helpers_numerics import ON_GPU, assert_close, error

# Libraries may warn about the jax of a GPU machine; that says nothing about numbers.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings('default')]

BATCH, LENGTH, HEADS, HEAD_DIM = (2, 512, 8, 64) if ON_GPU else (2, 64, 4, 8)
# Dense attention in bfloat16 is 2.5e-3 away; kernels may also round the softmax.
BAND = 1e-2


@dataclasses.dataclass(frozen=True)
class Case:
  """What attention has to do.

  Attributes:
    causal, softcap, kv_heads, window: as in TransformerConfig.
    ends: where the documents of a row end, in 64ths of the row; the rest is padding.
    has_bias: T5's relative bias.
  """

  causal: bool = True
  ends: tuple[int, ...] = (64,)
  softcap: Optional[float] = None
  kv_heads: int = HEADS
  window: Optional[int] = None
  has_bias: bool = False


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
}


def segments(case: Case) -> np.ndarray:
  """Returns segment ids [BATCH, LENGTH]; the rows of a batch differ by one position."""
  rows = []
  for shift in range(BATCH):
    ends = [end * LENGTH // 64 - (shift if end < 64 else 0) for end in case.ends]
    position = np.arange(LENGTH)
    segment = np.searchsorted(ends, position, side='right') + 1
    rows.append(np.where(position < ends[-1], segment, 0))
  return np.stack(rows).astype(np.int32)


def inputs(case: Case):
  """Returns (query, key, value, table, gradient of the output); values that bfloat16 can hold."""
  keys = jax.random.split(jax.random.key(0), 5)
  heads = (HEADS, case.kv_heads, case.kv_heads, HEADS)
  q, k, v, dout = (
    jax.random.normal(key, (BATCH, LENGTH, count, HEAD_DIM), jnp.bfloat16)
    for key, count in zip(keys, heads)
  )
  table = jax.random.normal(keys[4], (HEADS, RelativeBuckets.num_buckets), jnp.bfloat16)
  is_token = (segments(case) > 0)[..., None, None]
  return q * HEAD_DIM**-0.5, k, v, table.astype(jnp.float32), jnp.where(is_token, dout, 0)


def attend(case: Case, make, dtype):
  """Returns the output, 0 on padding, and the gradients of query, key, value and table."""
  q, k, v, table, dout = inputs(case)
  info = TokenInfo(jnp.arange(LENGTH), jnp.asarray(segments(case)))
  window = None if case.window is None else jnp.int32(case.window)

  def run(q, k, v, table):
    attention = make(kind_of(case), info)
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


def dense(kind: AttentionKind, info: TokenInfo) -> DenseAttention:
  return DenseAttention(info, info, kind.mask(info, info), kind, whole_rows=True)


def exact(case: Case):
  with jax.default_matmul_precision('highest'):
    return attend(case, dense, jnp.float32)


def served_by(backend: str, case: Case):
  """Returns (kind, info) -> attention; skips where the backend does not serve the case here."""
  need = AttentionNeed(
    'bfloat16', HEAD_DIM, softcap=case.softcap is not None, relative_bias=case.has_bias
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
  q, k, v, _, _ = inputs(case)
  ids = segments(case)
  positions = jnp.arange(LENGTH)
  packed = make(kind_of(case), TokenInfo(positions, jnp.asarray(ids)))(q, k, v, None)
  for document in np.unique(ids[0]):
    at = np.flatnonzero(ids[0] == document)
    alone = TokenInfo(positions[: len(at)], jnp.ones((1, len(at)), jnp.int32))
    with jax.default_matmul_precision('highest'):
      own = dense(kind_of(case), alone)(*(x[:1, at].astype(jnp.float32) for x in (q, k, v)), None)
    assert error(packed[:1, at], own) <= BAND, f'document {document}'
