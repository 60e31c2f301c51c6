"""Hyperparameters of a transformer, checked when they are set."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Optional

from t5x_gpu.errors import ModelError, Problem, bad_setting, did_you_mean
from t5x_gpu.layers.attention import BIASES, FEATURE_NORMS, AttentionConfig
from t5x_gpu.layers.backends import choose
from t5x_gpu.layers.config import NORMS, PRECISIONS, WITHOUT_FP4, precision_hint
from t5x_gpu.layers.mlp import activation
from t5x_gpu.layers.moe import MoeConfig
from t5x_gpu.layers.positions import RotaryEmbedding, bucket_problem
from t5x_gpu.models.remat import POLICIES

RELATIVE_BIAS = ('none', 'shared', 'per_layer')
NORM_POSITIONS = ('pre', 'post', 'sandwich', 'output')
# 'current': the scale of a tensor follows from its largest value. 'delayed': from the largest value
# of earlier steps, which is known before the tensor is computed. 'mxfp8': current, for 32 values.
SCALINGS = ('current', 'delayed', 'mxfp8')
REMAT_POLICIES = tuple(POLICIES)


def _scaling_hint(value: object) -> str:
  text = f'{", ".join(SCALINGS)}.'
  if 'fp4' in str(value).lower():
    return f'{text} NVFP4 is not supported: {WITHOUT_FP4}'
  return text + did_you_mean(value, SCALINGS)


DROPOUT_PLACES = (
  'embedding_dropout',
  'attention_dropout',
  'mlp_dropout',
  'residual_dropout',
  'output_dropout',
  'classifier_dropout',
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig(AttentionConfig, MoeConfig):
  """Settings of one stack of layers; the defaults are T5.1.1's.

  Settings of the layers are in the groups that this class extends: `AttentionConfig`
  (layers/attention.py), `MlpConfig` (layers/mlp.py), `MoeConfig` (layers/moe.py), and `LayerConfig`
  for all of them (layers/config.py). The settings of the whole stack are here.

  Attributes:
    vocab_size: number of token ids, at least the vocabulary's size; a multiple of 128 suits GPUs.
    num_layers: number of layers of the stack.
    embed_dim: features of the residual stream.
    norm_position: 'pre'; 'post', after each residual sum (BERT); 'sandwich', before and after
      each block (Gemma-2); 'output', only after each block, before the sum (OLMo-2).

    attention: backend of the attention: 'auto' chooses the best one that devices and sizes allow;
      or 'dense', 'chunked', 'tokamax' (docs/attention.md). The result is the same.
    attention_softcap: cap on attention logits, cap * tanh(logits / cap) (Gemma-2); None for no cap.
    windows: tokens in layer i attend to windows[i % len(windows)] positions, including their own;
      0 for all.

    relative_bias: 'shared' (one for all layers: current T5X), 'per_layer', or 'none'.
    num_relpos_buckets, max_relpos_distance: buckets and largest distance of the relative bias.
    rope: rotary positions, or None.
    ropes: rotary positions that differ by layer, in place of `rope`: layer i has
      ropes[i % len(ropes)], None without rotation (Gemma-3, SmolLM-3); () for `rope`.
    num_positions: rows of a learned position table (GPT-2, BERT), which limits the length; 0 for no
      table.
    max_length: longest row that a model without a position table was trained on; 0 for any length.

    num_token_types: rows of a learned table of token types (BERT), encoders only; 0 for no table.
    embedding_stddev: standard deviation of the initial tables of tokens, positions and token types;
      None for init_stddev, or else 1.
    embedding_norm: whether a norm follows the embeddings (BERT).
    scale_embedding: multiply embeddings by sqrt(embed_dim) (Gemma).

    logits_via_embedding: tie the output projection to the token table (logits / sqrt(embed_dim)).
    scale_tied_logits: divide tied logits by sqrt(embed_dim) (T5).
    logits_softcap: as attention_softcap, on vocabulary logits.
    loss_chunks: number of chunks of the length in which logits and loss are computed, one at a
      time, so that memory never holds all logits. None chooses chunks of 256 MiB of logits, or of
      1024 tokens if that is more, and does not split small logits; 0 stores all logits.
    router_balance_loss: coefficient of the loss that spreads tokens over experts (0.01 is usual).
    router_z_loss: coefficient of log(Z)^2 of the router's logits (1e-3 is usual).

    embedding_dropout, residual_dropout, output_dropout, classifier_dropout: dropout rates of
      embeddings, block outputs, the last output and the classifier's input; None for dropout_rate.

    remat_policy: activations that a layer stores for the backward pass, which recomputes the rest:
      'none' stores everything, 'dots' all matmul outputs, 'minimal' outputs of matmuls with
      weights, 'offload' the same in host memory, 'attention' only the input and attention's output,
      'full' only the input (models/remat.py).
    full_remat_layers: number of first layers of each stack that store only their input, regardless
      of remat_policy: for a policy that almost fits. In a pipeline, each block has its share.
    scan_unroll: layers per iteration of the scan over layers; more costs compile time. None for all
      layers on a GPU, where a loop would copy every stored activation, unless there are more than
      32; on several GPUs, and where microbatches add gradients in place, only with remat_policy =
      'none'. 1 elsewhere and in pipelines. Parameters are always stacked [layers, ...].

    fp8_scaling: source of the scales of FP8 operands: 'current' values, or 'delayed': the largest
      values of the last fp8_history steps, which are part of the state; or 'mxfp8': the current
      ones of every 32 values, on Blackwell (docs/precision.md).
    fp8_history: number of steps; with more steps, an outlier affects the scales for longer.
    fp8_margin: with 'delayed', scales leave room for values 2^fp8_margin times as large.
    fp8_logits: whether the loss, too, multiplies 8-bit operands if `dtype` is 'fp8'.
  """

  vocab_size: int
  num_layers: int
  embed_dim: int
  norm_position: str = 'pre'

  attention: str = 'auto'
  attention_softcap: Optional[float] = None
  windows: tuple[int, ...] = (0,)

  relative_bias: str = 'shared'
  num_relpos_buckets: int = 32
  max_relpos_distance: int = 128
  rope: Optional[RotaryEmbedding] = None
  ropes: tuple[Optional[RotaryEmbedding], ...] = ()
  num_positions: int = 0
  max_length: int = 0

  num_token_types: int = 0
  embedding_stddev: Optional[float] = None
  embedding_norm: bool = False
  scale_embedding: bool = False

  logits_via_embedding: bool = False
  scale_tied_logits: bool = True
  logits_softcap: Optional[float] = None
  loss_chunks: Optional[int] = None
  router_balance_loss: float = 0.0
  router_z_loss: float = 0.0

  embedding_dropout: Optional[float] = None
  residual_dropout: Optional[float] = None
  output_dropout: Optional[float] = None
  classifier_dropout: Optional[float] = None

  remat_policy: str = 'none'
  full_remat_layers: int = 0
  scan_unroll: Optional[int] = None

  fp8_scaling: str = 'current'
  fp8_history: int = 1024
  fp8_margin: int = 0
  fp8_logits: bool = False

  def __post_init__(self) -> None:
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    object.__setattr__(self, 'windows', tuple(self.windows))
    object.__setattr__(self, 'ropes', tuple(self.ropes))
    for name in self.mlp_activations:
      activation(name)
    problems = [*self._bad_numbers(), *self._bad_choices(), *self._contradictions()]
    self._refuse(problems)

  @property
  def sees_order(self) -> bool:
    """Whether the model has positions of any kind."""
    return self.relative_bias != 'none' or any(self.rope_of_layers) or self.num_positions > 0

  def _refuse(self, problems: Sequence[Problem]) -> None:
    if problems:
      raise ModelError(
        'The model cannot be built',
        problems=problems,
        fix='Set them in the model file or with --gin.TransformerConfig.NAME=VALUE.',
        docs='models.md#settings',
      )

  def check_stack(self, *, causal: bool) -> None:
    """Raises ModelError for settings that a decoder (`causal`), or else an encoder, cannot have."""
    problem = self._bucket_problem(causal=causal)
    problems = [] if problem is None else [problem]
    if causal and self.num_token_types:
      problems.append(bad_setting(self, 'num_token_types', 'is for encoders: set it to 0.'))
    self._refuse(problems)

  def _bucket_problem(self, *, causal: bool) -> Optional[Problem]:
    if self.relative_bias == 'none':
      return None
    return bucket_problem(
      bidirectional=not causal,
      num_buckets=self.num_relpos_buckets,
      max_distance=self.max_relpos_distance,
    )

  def _bad_numbers(self) -> Iterator[Problem]:
    """Yields problems with numbers out of range."""
    optional = (
      'query_pre_attn_scalar',
      'attention_softcap',
      'logits_softcap',
      'init_stddev',
      'embedding_stddev',
    )
    given = [name for name in optional if getattr(self, name) is not None]
    none, at_least_0 = 'must be at least 1, or 0 for none.', 'must be at least 0.'
    for is_bad, text, parameters in (
      (
        lambda value: value < 1,
        'must be at least 1.',
        (
          'vocab_size',
          'num_layers',
          'embed_dim',
          'num_heads',
          'head_dim',
          'mlp_dim',
          'num_relpos_buckets',
          'max_relpos_distance',
          'fp8_history',
          *(() if self.scan_unroll is None else ('scan_unroll',)),
        ),
      ),
      (lambda value: not value > 0.0, 'must be above 0.', (*given, 'norm_epsilon')),
      (lambda value: value < 0, none, ('num_positions', 'num_token_types', 'max_length')),
      (lambda value: value < 0, 'must be at least 1, or 0 for a dense MLP.', ('num_experts',)),
      (
        lambda value: value < 0,
        at_least_0,
        ('router_balance_loss', 'router_z_loss', 'fp8_margin', 'full_remat_layers'),
      ),
      (
        lambda value: value is not None and not 0.0 <= value < 1.0,
        'must be at least 0 and below 1.',
        ('dropout_rate', *DROPOUT_PLACES),
      ),
      (
        lambda value: value is not None and value <= 0.0,
        'must be above 0; 1 to 2 is usual, None drops no token.',
        ('expert_capacity_factor',),
      ),
      (
        lambda value: value is not None and value < 0,
        'must be at least 1, 0 to store all logits, or None to choose.',
        ('loss_chunks',),
      ),
    ):
      yield from (
        bad_setting(self, name, text) for name in parameters if is_bad(getattr(self, name))
      )
    if not self.windows or any(
      isinstance(w, bool) or not isinstance(w, int) or w < 0 for w in self.windows
    ):
      yield bad_setting(
        self, 'windows', 'must be sizes of at least 1, or 0 for no window, as in (4096, 0).'
      )

  def _bad_choices(self) -> Iterator[Problem]:
    """Yields problems with unknown names."""
    hints = {'dtype': precision_hint, 'fp8_scaling': _scaling_hint, 'attention': choose.hint}
    for parameter, allowed in (
      ('relative_bias', RELATIVE_BIAS),
      ('remat_policy', REMAT_POLICIES),
      ('dtype', tuple(PRECISIONS)),
      ('fp8_scaling', SCALINGS),
      ('norm', NORMS),
      ('norm_position', NORM_POSITIONS),
      ('attention_bias', BIASES),
      ('qk_norm_kind', FEATURE_NORMS),
      ('attention', choose.REQUESTS),
    ):
      value = getattr(self, parameter)
      if not isinstance(value, str) or value not in allowed:
        if parameter in hints:
          hint = hints[parameter](value)
        else:
          hint = f'{", ".join(allowed)}.{did_you_mean(value, allowed)}'
        yield bad_setting(self, parameter, f'is not one of {hint}')

  def _contradictions(self) -> Iterator[Problem]:
    """Yields problems with values that exclude each other."""
    if self.max_length > 0 and self.num_positions > 0:
      yield bad_setting(
        self,
        'max_length',
        f'has no effect with num_positions = {self.num_positions}, which already limits the '
        'length: leave it out.',
      )
    if self.num_heads >= 1 and not (1 <= self.kv_heads and self.num_heads % self.kv_heads == 0):
      yield bad_setting(
        self,
        'num_kv_heads',
        f'does not divide num_heads = {self.num_heads}: set it to a number that does.',
      )
    buckets = [self._bucket_problem(causal=causal) for causal in (True, False)]
    if None not in buckets:  # `check_stack` knows whether the stack is causal
      yield from buckets
    if not self.mlp_activations:
      yield bad_setting(self, 'mlp_activations', "has no activation: ('relu',) is a plain MLP.")
    yield from self._unused_fp8_settings()
    if self.fp8_logits and self.loss_chunks == 0:
      yield bad_setting(
        self,
        'fp8_logits',
        'needs a loss that does not store logits: set loss_chunks = None, or 1 or more.',
      )
    if self.rope is not None and self.ropes:
      yield bad_setting(self, 'ropes', 'replaces rope, which is set too: leave one of them out.')
    yield from self._rope_problems()
    if self.num_experts > 0 and self.mlp_bias:
      yield bad_setting(self, 'mlp_bias', 'is not supported with experts.')
    if self.num_experts > 0 and not 1 <= self.num_experts_per_token <= self.num_experts:
      yield bad_setting(
        self, 'num_experts_per_token', f'must be from 1 to num_experts = {self.num_experts}.'
      )

  def _unused_fp8_settings(self) -> Iterator[Problem]:
    """Yields problems with FP8 settings that have no effect."""
    fp8 = self.dtype not in PRECISIONS or self.fp8
    for field in dataclasses.fields(self):
      if not field.name.startswith('fp8_') or getattr(self, field.name) == field.default:
        continue
      if not fp8:
        used, value, needed = 'dtype', self.dtype, 'fp8'
      elif field.name in ('fp8_history', 'fp8_margin') and self.fp8_scaling != 'delayed':
        used, value, needed = 'fp8_scaling', self.fp8_scaling, 'delayed'
      else:
        continue
      yield bad_setting(
        self,
        field.name,
        f'has no effect with {used} = {value!r}: set {used} = {needed!r}, or leave it out.',
      )

  def _rope_problems(self) -> Iterator[Problem]:
    """Yields problems with rotary positions that do not fit the heads, each other or the length."""
    some = list(dict.fromkeys(rope for rope in self.rope_of_layers if rope is not None))
    if any(rope.rotated(self.head_dim) % 2 or rope.rotated(self.head_dim) < 2 for rope in some):
      yield bad_setting(
        self, 'head_dim', 'must be even for rotary positions, which rotate pairs of features.'
      )
    if len({rope.fraction for rope in some}) > 1:
      yield bad_setting(
        self, 'ropes', 'must rotate the same fraction of the features in all layers.'
      )
    if len({rope.original_length for rope in some if rope.depends_on_length}) > 1:
      yield bad_setting(
        self, 'ropes', "must have the same original_length in all layers with scaling = 'longrope'."
      )
    for rope in some:
      pairs, divisors = rope.rotated(self.head_dim) // 2, len(rope.short_factors)
      if rope.scaling == 'longrope' and divisors != pairs:
        yield bad_setting(
          self,
          'head_dim',
          f'has {pairs} rotated pairs of features, but short_factors and long_factors have '
          f'{divisors} numbers.',
        )
      if rope.scaling == 'dynamic' and not 1 <= (self.length_limit or 0) <= rope.original_length:
        yield bad_setting(
          self,
          'max_length',
          f'must be from 1 to original_length = {rope.original_length} of rotary positions with '
          "scaling = 'dynamic': in longer rows, keys would have different frequencies with and "
          'without a cache (docs/models.md#longer-contexts).',
        )

  @property
  def multiplies_logits_in_fp8(self) -> bool:
    return self.fp8 and self.fp8_logits

  @property
  def charges_routers(self) -> bool:
    """Whether the losses of expert routers are part of the loss."""
    return self.num_experts > 0 and (self.router_balance_loss > 0.0 or self.router_z_loss > 0.0)

  @property
  def rope_of_layers(self) -> tuple[Optional[RotaryEmbedding], ...]:
    """Rotary positions: layer i has rope_of_layers[i % len(rope_of_layers)]."""
    return self.ropes or (self.rope,)

  @property
  def rope_switch(self) -> Optional[int]:
    """Length of the longest example that uses short rotary factors; None without long factors."""
    lengths = [r.original_length for r in self.rope_of_layers if r and r.depends_on_length]
    return lengths[0] if lengths else None

  @property
  def length_limit(self) -> Optional[int]:
    """Maximum length of a row in tokens; None for any length."""
    return self.num_positions or self.max_length or None
