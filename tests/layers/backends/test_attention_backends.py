"""Every attention backend against dense attention in float32: outputs and all gradients."""

import dataclasses
import importlib.metadata
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from t5x_gpu.errors import ModelError
from t5x_gpu.layers.backends.choose import (
  SERVED_BY_ALL,
  AttentionNeed,
  Choice,
  Hardware,
  choose,
  listed_choices,
  make_attention,
  table,
)
from t5x_gpu.layers.backends.kinds import AttentionKind
from t5x_gpu.layers.backends.plain import ChunkedAttention, DenseAttention
from t5x_gpu.layers.backends.tokamax import tokamax_attention
from t5x_gpu.layers.masks import TokenInfo, key_ranges
from t5x_gpu.layers.positions import RelativeBuckets
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.transformer import attention_need
from t5x_gpu.partitioning.axis_rules import AxisRules, use_rules
from tests.helpers_train import Project
from tests.messages import raises

ROWS, LENGTH, HEADS, HEAD_DIM = 2, 48, 4, 16
PACKED = np.array([[1] * 11 + [2] * 30 + [3] * 3 + [0] * 4, [4] * 7 + [9] * 41])
PADDED = np.array([[1] * 29 + [0] * 19, [1] * 48])
PREFIX = np.array([[1] * 5 + [0] * 6 + [1] * 12 + [0] * 25, [1] * 3 + [0] * 4 + [1] * 41])


@dataclasses.dataclass(frozen=True)
class Case:
  """One call of attention; None for what it does not use."""

  segments: np.ndarray = dataclasses.field(default_factory=lambda: PADDED)
  kv_segments: np.ndarray | None = None
  prefix: np.ndarray | None = None
  window: int | None = None
  kv_heads: int = HEADS
  softcap: float | None = None
  causal: bool = True
  has_bias: bool = False

  @property
  def kind(self):
    return AttentionKind(
      self.causal, self.softcap, RelativeBuckets(8, 20, bidirectional=not self.causal)
    )

  def info(self):
    prefix = None if self.prefix is None else jnp.asarray(self.prefix)
    return TokenInfo(jnp.arange(self.segments.shape[1]), jnp.asarray(self.segments), prefix)

  def kv_info(self):
    if self.kv_segments is None:
      return None
    return TokenInfo(jnp.arange(self.kv_segments.shape[1]), jnp.asarray(self.kv_segments))


CASES = {
  'padding': Case(),
  'packing': Case(PACKED),
  'prefix': Case(PACKED, prefix=PREFIX),
  'window': Case(PACKED, window=6),
  'no window in this layer': Case(PACKED, window=0),
  'prefix and window': Case(PACKED, prefix=PREFIX, window=6),
  'softcap': Case(PACKED, softcap=2.0),
  'grouped heads': Case(PACKED, kv_heads=2),
  'relative bias': Case(PACKED, has_bias=True),
  'encoder': Case(PADDED, causal=False),
  'packed encoder with window': Case(PACKED, causal=False, window=6),
  'encoder with bias': Case(PACKED, causal=False, has_bias=True, kv_heads=1),
  'cross': Case(PADDED, np.array([[1] * 17 + [0] * 3, [1] * 20]), causal=False),
  'packed cross': Case(
    PACKED, np.array([[1] * 9 + [2] * 5 + [3] * 6, [4] * 2 + [9] * 18]), causal=False, kv_heads=2
  ),
  'cross without keys of a segment': Case(
    PACKED, np.array([[1] * 9 + [0] * 5 + [3] * 6, [4] * 20]), causal=False
  ),
  'odd length': Case(PACKED[:, :47], has_bias=True),
}


def dense(case):
  kv = case.kv_info() or case.info()
  return DenseAttention(
    case.info(), kv, case.kind.mask(case.info(), kv), case.kind, case.kv_segments is None
  )


def chunked(case):
  return ChunkedAttention(case.info(), case.kv_info() or case.info(), case.kind, block_length=16)


def tokamax(case, kernel='reference', multiple=1):
  return tokamax_attention(case.kind, case.info(), case.kv_info(), kernel=kernel, multiple=multiple)


def arrays(case, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(7), 5)
  kv_length = (case.segments if case.kv_segments is None else case.kv_segments).shape[1]
  q_shape = (ROWS, case.segments.shape[1], HEADS, HEAD_DIM)
  kv_shape = (ROWS, kv_length, case.kv_heads, HEAD_DIM)
  query, key, value, dout = (
    jax.random.normal(k, shape, dtype)
    for k, shape in zip(keys, (q_shape, kv_shape, kv_shape, q_shape))
  )
  table = jax.random.normal(keys[4], (HEADS, 8)) if case.has_bias else None
  return (query, key, value, table), dout * (case.segments > 0)[..., None, None]


def results(case, attention, dtype=jnp.float32):
  """Returns the output on tokens, and the gradients of queries, keys, values and bias table."""
  args, dout = arrays(case, dtype)

  def out(query, key, value, table):
    bias = None if table is None else attention.bias(table)
    window = None if case.window is None else jnp.int32(case.window)
    return attention(query, key, value, bias, window)

  @jax.jit
  def both(args, dout):
    got, pull = jax.vjp(out, *args)
    return got * (case.segments > 0)[..., None, None], *pull(dout)

  return dict(zip(('output', 'dquery', 'dkey', 'dvalue', 'dtable'), both(args, dout)))


def assert_same(got, want, *, rtol=2e-5, atol=2e-5):
  for name in want:
    if want[name] is not None:
      np.testing.assert_allclose(got[name], want[name], rtol=rtol, atol=atol, err_msg=name)


@pytest.mark.quick_cases(
  'padding', 'packing', 'softcap', 'encoder', '*window', 'cross*without*', 'relative*'
)
@pytest.mark.parametrize('name', CASES)
def test_chunked_equals_dense(name):
  assert_same(results(CASES[name], chunked(CASES[name])), results(CASES[name], dense(CASES[name])))


@pytest.mark.parametrize('name', CASES)
def test_ranges_of_keys_equal_masks(name):
  case = CASES[name]
  assert_same(results(case, tokamax(case)), results(case, dense(case)))


@pytest.mark.parametrize('make', [chunked, tokamax])
def test_gradients_have_the_dtype_of_what_they_belong_to(make):
  case = CASES['grouped heads']
  got = results(case, make(case), jnp.bfloat16)
  assert got.pop('dtable') is None
  for name in ('output', 'dquery', 'dkey', 'dvalue'):
    assert got[name].dtype == jnp.bfloat16, name
  got, want = jax.tree.map(np.float32, (got, results(case, dense(case), jnp.bfloat16)))
  for (
    name,
    array,
  ) in got.items():  # a value rounds to 2^-9 of it, and each path rounds several times
    assert np.linalg.norm(array - want[name]) < 2**-6 * np.linalg.norm(want[name]), name


def test_an_odd_length_is_padded_to_what_a_kernel_takes():
  case = CASES['odd length']
  assert_same(results(case, tokamax(case, multiple=32)), results(case, dense(case)))


@pytest.mark.parametrize('make', [dense, chunked, tokamax])
@pytest.mark.parametrize('causal', [True, False])
def test_a_packed_row_equals_its_documents_one_by_one(make, causal):
  case = Case(
    np.array([[1] * 16 + [2] * 16 + [3] * 16, [5] * 16 + [4] * 16 + [0] * 16]), causal=causal
  )
  alone = Case(np.ones((2, 16), int), causal=causal)
  (query, key, value, _), _ = arrays(case)
  packed = jax.jit(make(case).__call__)(query, key, value, None)
  document = jax.jit(make(alone).__call__)
  for at in (slice(0, 16), slice(16, 32)):
    part = document(query[:, at], key[:, at], value[:, at], None)
    np.testing.assert_allclose(packed[:, at], part, rtol=2e-5, atol=2e-5)


def test_a_row_whose_keys_are_not_one_range_is_nan_and_no_other_row():
  case = Case(np.array([[1] * 10 + [2] * 5 + [1] * 33, [1] * 48]))
  out = results(case, tokamax(case))['output']
  assert np.isnan(out[0]).all() and np.isfinite(out[1]).all()
  two_prefixes = np.zeros((1, 8), bool)
  two_prefixes[0, [0, 1, 5, 6]] = True
  info = TokenInfo(jnp.arange(8), jnp.ones((1, 8), jnp.int32), jnp.asarray(two_prefixes))
  assert np.isnan(key_ranges(AttentionKind().mask(info, info)).scale).all()


H100, H200 = (Hardware('gpu', f'NVIDIA {name}', 9.0) for name in ('H100 80GB HBM3', 'H200'))
A100 = Hardware('gpu', 'NVIDIA A100-SXM4-80GB', 8.0)
B200 = Hardware('gpu', 'NVIDIA B200', 10.0)
V100 = Hardware('gpu', 'Tesla V100-SXM2-16GB', 7.0)
CPU = Hardware('cpu', 'cpu')
BF16 = AttentionNeed('bfloat16', 128, q_length=4096, kv_length=4096, rows_and_heads=8)


@pytest.mark.parametrize(
  ('device', 'change', 'want'),
  [
    (H100, {}, 'tokamax mosaic_gpu'),
    (H200, {'softcap': True, 'head_dim': 256}, 'tokamax mosaic_gpu'),
    (H100, {'dtype': 'float32'}, 'chunked'),
    (H100, {'dtype': 'float32', 'q_length': 128, 'kv_length': 128}, 'dense'),
    (H100, {'relative_bias': True}, 'tokamax mosaic_gpu'),
    (H100, {'relative_bias': True, 'rows_and_heads': 128}, 'chunked'),
    (A100, {'q_length': 2**17, 'kv_length': 2**17, 'rows': 1}, 'chunked'),
    (H100, {'q_length': 2**17, 'kv_length': 2**17, 'rows': 1}, 'tokamax mosaic_gpu'),
    (H100, {'relative_bias': True, 'softcap': True}, 'chunked'),
    (A100, {}, 'tokamax triton'),
    (A100, {'softcap': True}, 'chunked'),
    (B200, {'head_dim': 64}, 'tokamax mosaic_gpu sm100'),
    (B200, {'head_dim': 64, 'relative_bias': True}, 'tokamax triton'),
    (B200, {}, 'tokamax triton'),
    (V100, {}, 'chunked'),
    (H100, {'context': 'ring'}, 'tokamax mosaic_gpu'),
    (A100, {'context': 'gather'}, 'tokamax triton'),
    (H100, {'context': 'ring', 'dtype': 'float32'}, 'chunked'),
    (CPU, {'context': 'ring', 'q_length': 64, 'kv_length': 64}, 'chunked'),
    (CPU, {}, 'chunked'),
    (CPU, {'q_length': 64, 'kv_length': 64}, 'dense'),
  ],
)
def test_auto_takes_the_kernel_of_the_device_or_says_why_not(device, change, want):
  choice = choose('auto', dataclasses.replace(BF16, **change), device)
  assert choice.name == want
  if device.platform == 'gpu' and not want.startswith('tokamax'):
    assert 'kernel' in choice.reason
  assert device.kind in str(choice)
  assert ('over context' in str(choice)) == ('context' in change)


def test_heads_that_model_splits_do_not_count_as_those_of_a_device():
  config = TransformerConfig(
    vocab_size=512,
    num_layers=24,
    embed_dim=1024,
    num_heads=128,
    head_dim=128,
    mlp_dim=65536,
    dtype='bfloat16',
  )  # T5-11B

  def chosen() -> Choice:
    need = attention_need(config)
    row = dict(q_length=512, kv_length=512, rows=17, rows_and_heads=17 * need.rows_and_heads)
    return choose('auto', dataclasses.replace(need, **row), H100)

  assert chosen().name == 'chunked' and '1.1 GiB of bias gradients' in chosen().reason
  with use_rules(AxisRules(activations={'heads': ('model',)}), {'model': 8}):
    assert chosen().name == 'tokamax mosaic_gpu'


@pytest.mark.parametrize(
  'device, change',
  [
    (A100, {'softcap': True}),
    (H100, {'head_dim': 320}),
    (H100, {'dtype': 'float32'}),
    (V100, {}),
    (CPU, {'softcap': True, 'relative_bias': True}),
  ],
)
def test_a_backend_asked_for_that_cannot_serve_is_refused(device, change):
  with raises(ModelError):
    choose('tokamax', dataclasses.replace(BF16, **change), device)


@pytest.mark.parametrize('asked', ['cudnn', 'flash', 'triton', 'tokamx', None])
def test_an_unknown_backend_is_refused_with_the_one_that_takes_its_place(asked):
  with raises(ModelError):
    TransformerConfig(
      vocab_size=32,
      num_layers=1,
      embed_dim=16,
      num_heads=2,
      head_dim=8,
      mlp_dim=24,
      attention=asked,
    )


def test_dense_attention_of_rows_split_over_context_is_refused():
  with raises(ModelError):
    choose('dense', dataclasses.replace(BF16, context='ring'), CPU)


HAS = {
  'packed rows': lambda case: case.segments.max() > 1,
  'padding': lambda case: case.segments.min() == 0,
  'prefixes': lambda case: case.prefix is not None,
  'sliding windows': lambda case: case.window,
  'grouped heads': lambda case: 1 < case.kv_heads < HEADS,
  'encoders': lambda case: not case.causal and case.kv_segments is None,
  'attention to an encoder': lambda case: case.kv_segments is not None,
  'odd lengths': lambda case: case.segments.shape[1] % 2 == 1,
}


def test_what_all_backends_serve_has_a_case_above():
  assert tuple(HAS) == SERVED_BY_ALL
  for what, has in HAS.items():
    assert any(has(case) for case in CASES.values()), what


def test_the_table_in_the_docs_is_current():
  page = pathlib.Path(__file__).parents[3] / 'docs' / 'attention.md'
  assert table() in page.read_text(encoding='utf-8')


def test_choices_are_listed_each_once_and_again_in_a_later_context():
  need = AttentionNeed(dtype='float32', head_dim=HEAD_DIM)
  for _ in range(2):  # the log has them the first time only
    with listed_choices() as found:
      for _ in range(2):
        make_attention(AttentionKind(), CASES['padding'].info(), need=need, request='auto')
    assert [str(choice) for choice in found] == [f'attention: dense (cpu, rows of {LENGTH})']


def test_an_old_tokamax_on_a_newer_jax_is_an_error_before_the_step_compiles(tmp_path, monkeypatch):
  version = importlib.metadata.version
  monkeypatch.setattr(
    importlib.metadata, 'version', lambda name: '0.0.12' if name == 'tokamax' else version(name)
  )
  monkeypatch.setattr(jax, '__version_info__', (0, 11, 2))
  result = Project(tmp_path).run('--dry_run', '--gin.TransformerConfig.attention="tokamax"')
  assert result.code == 1
  assert 'tokamax 0.0.12, which has the attention kernels, does not work on jax' in result.err
  assert "pip install --upgrade 'tokamax>=0.0.13" in result.err and '#versions' in result.err
