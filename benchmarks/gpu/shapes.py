"""The models that are timed, ours and PyTorch's: sizes, rows of a batch, length of a row."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

# Sheared-LLaMA 1.3B (Xia et al. 2023): 1,345,423,360 parameters.
_DECODER_1_3B = dict(
  vocab_size=32000,
  num_layers=24,
  embed_dim=2048,
  num_heads=16,
  head_dim=128,
  mlp_dim=5504,
  mlp_activations=('silu', 'linear'),
  query_pre_attn_scalar=128.0,
  relative_bias='none',
  norm_epsilon=1e-5,
  init_stddev=0.02,
)
# gin_configs/models/llama3_8b.gin, with other frequencies of the rotary positions. Its state takes
# more than one GPU has, so one GPU times four of the 32 layers.
_LLAMA3_8B = dict(
  vocab_size=128256,
  num_layers=32,
  embed_dim=4096,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  mlp_dim=14336,
  mlp_activations=('silu', 'linear'),
  query_pre_attn_scalar=128.0,
  relative_bias='none',
  norm_epsilon=1e-5,
  init_stddev=0.02,
)
# gin_configs/models/llama3_2_1b.gin, with other frequencies of the rotary positions.
_LLAMA3_2_1B = dict(
  vocab_size=128256,
  num_layers=16,
  embed_dim=2048,
  num_heads=32,
  num_kv_heads=8,
  head_dim=64,
  mlp_dim=8192,
  mlp_activations=('silu', 'linear'),
  query_pre_attn_scalar=64.0,
  relative_bias='none',
  norm_epsilon=1e-5,
  logits_via_embedding=True,
  scale_tied_logits=False,
  init_stddev=0.02,
)
# gin_configs/models/qwen3_1_7b.gin, with other frequencies of the rotary positions.
_QWEN3_1_7B = dict(
  vocab_size=151936,
  num_layers=28,
  embed_dim=2048,
  num_heads=16,
  num_kv_heads=8,
  head_dim=128,
  mlp_dim=6144,
  mlp_activations=('silu', 'linear'),
  query_pre_attn_scalar=128.0,
  qk_norm=True,
  relative_bias='none',
  logits_via_embedding=True,
  scale_tied_logits=False,
  init_stddev=0.02,
)
# gin_configs/models/gemma2_2b.gin.
_GEMMA2_2B = dict(
  vocab_size=256000,
  num_layers=26,
  embed_dim=2304,
  num_heads=8,
  num_kv_heads=4,
  head_dim=256,
  mlp_dim=9216,
  mlp_activations=('gelu', 'linear'),
  query_pre_attn_scalar=256.0,
  relative_bias='none',
  norm='rms_plus_one',
  norm_epsilon=1e-6,
  norm_position='sandwich',
  logits_via_embedding=True,
  scale_tied_logits=False,
  scale_embedding=True,
  attention_softcap=50.0,
  logits_softcap=30.0,
  windows=(4096, 0),
  init_stddev=0.02,
)
# gin_configs/models/decoder_base.gin, with rotary positions in place of a relative bias.
_DECODER_134M = dict(
  vocab_size=32128,
  num_layers=12,
  embed_dim=768,
  num_heads=12,
  head_dim=64,
  mlp_dim=2048,
  mlp_activations=('gelu', 'linear'),
  query_pre_attn_scalar=64.0,
  relative_bias='none',
)
# gin_configs/models/gpt2_xl.gin, its vocabulary padded to a multiple of 128.
_GPT2_XL = dict(
  vocab_size=50304,
  num_layers=48,
  embed_dim=1600,
  num_heads=25,
  head_dim=64,
  mlp_dim=6400,
  mlp_activations=('gelu',),
  mlp_bias=True,
  attention_bias='all',
  query_pre_attn_scalar=64.0,
  num_positions=1024,
  relative_bias='none',
  norm='layer',
  norm_epsilon=1e-5,
  logits_via_embedding=True,
  scale_tied_logits=False,
  init_stddev=0.02,
)
# gin_configs/models/bert_large.gin, its vocabulary padded to a multiple of 128.
_BERT_LARGE = dict(
  vocab_size=30592,
  num_layers=24,
  embed_dim=1024,
  num_heads=16,
  head_dim=64,
  mlp_dim=4096,
  mlp_activations=('gelu_exact',),
  mlp_bias=True,
  attention_bias='all',
  query_pre_attn_scalar=64.0,
  num_positions=512,
  num_token_types=2,
  relative_bias='none',
  norm='layer',
  norm_epsilon=1e-12,
  norm_position='post',
  embedding_norm=True,
  init_stddev=0.02,
)
# gin_configs/models/t5_1_1_large.gin.
_T5_LARGE = dict(
  vocab_size=32128,
  num_layers=24,
  embed_dim=1024,
  num_heads=16,
  head_dim=64,
  mlp_dim=2816,
  mlp_activations=('gelu', 'linear'),
  relative_bias='shared',
)
_SMALL = dict(vocab_size=128, num_layers=2, embed_dim=32, num_heads=2, head_dim=16, mlp_dim=64)


@dataclasses.dataclass(frozen=True)
class Shape:
  """A model and its batch.

  Attributes:
    family: 'decoder', 'encoder' (masked language model) or 'encoder_decoder'.
    config: arguments of TransformerConfig, without dropout.
    rope: rotary positions.
    rows: batch sizes, largest first; the first that fits into memory is timed.
    length: tokens of a row (of each of inputs and targets for 'encoder_decoder').
    remat_policy: of our step; PyTorch's stores everything.
    scan_unroll: of our step; None for the default.
  """

  family: str
  config: Mapping[str, Any]
  rows: tuple[int, ...]
  length: int
  rope: bool = False
  remat_policy: str = 'none'
  scan_unroll: Optional[int] = None

  def small(self) -> 'Shape':
    """Returns the same kind of model with sizes for a CPU."""
    length = min(self.length, 16)
    less = {'num_positions': 16, 'num_kv_heads': 1}
    config = {**self.config, **_SMALL, **{k: v for k, v in less.items() if self.config.get(k)}}
    unroll = self.scan_unroll and min(self.scan_unroll, _SMALL['num_layers'])
    return dataclasses.replace(self, config=config, rows=(2,), length=length, scan_unroll=unroll)


SHAPES = {
  'decoder_1.3b_2048': Shape('decoder', _DECODER_1_3B, (8, 4, 2), 2048, True),
  'decoder_1.3b_8192': Shape('decoder', _DECODER_1_3B, (2, 1), 8192, True),
  'llama3_8b_4_layers': Shape('decoder', {**_LLAMA3_8B, 'num_layers': 4}, (4, 2, 1), 4096, True),
  'llama3_8b': Shape('decoder', _LLAMA3_8B, (1,), 4096, True),
  'llama3_2_1b': Shape('decoder', _LLAMA3_2_1B, (4, 2, 1), 4096, True),
  'qwen3_1_7b': Shape('decoder', _QWEN3_1_7B, (4, 2, 1), 4096, True),
  'gemma2_2b': Shape('decoder', _GEMMA2_2B, (4, 2, 1), 4096, True),
  'decoder_134m': Shape('decoder', _DECODER_134M, (32, 16, 8), 1024, rope=True),
  # The default for 48 layers is a loop; without one the step is faster (benchmarks/published.py).
  'gpt2_xl': Shape('decoder', _GPT2_XL, (16, 8, 4), 1024, remat_policy='dots', scan_unroll=48),
  'bert_large': Shape('encoder', _BERT_LARGE, (64, 32, 16), 512),
  't5_large': Shape('encoder_decoder', _T5_LARGE, (16, 8, 4), 512),
}

# The steps of docs/performance.md#traffic: shape -> rows per GPU, and (remat_policy, precision).
TRAFFIC = {
  'llama3_8b': (
    1,
    (('full', 'bfloat16'), ('full', 'fp8'), ('minimal', 'bfloat16'), ('dots', 'bfloat16')),
  ),
  'llama3_2_1b': (4, (('full', 'bfloat16'),)),
  'qwen3_1_7b': (4, (('full', 'bfloat16'),)),
  'gemma2_2b': (4, (('full', 'bfloat16'),)),
  'gpt2_xl': (8, (('dots', 'bfloat16'),)),
  'bert_large': (16, (('none', 'bfloat16'), ('dots', 'bfloat16'))),
  't5_large': (8, (('none', 'bfloat16'), ('dots', 'bfloat16'))),
}


@dataclasses.dataclass(frozen=True)
class LoopCase:
  """A step in `fsdp` over all GPUs, with its layers in a loop and without one.

  Attributes:
    shape: of SHAPES.
    rows: per GPU.
    remat_policy, precision: of the step.
    compiled: as compiled for 8 H100 (docs/decisions.md, 2026-11-28), in a loop and without one:
      milliseconds by plan.
  """

  shape: str
  rows: int
  remat_policy: str
  precision: str
  compiled: tuple[float, float]


LOOPS = (
  LoopCase('llama3_2_1b', 4, 'none', 'bfloat16', (310, 271)),
  LoopCase('llama3_8b', 1, 'dots', 'fp8', (280, 269)),
)

# Rows per GPU of a step in `fsdp` with 'dots' that fills the memory: the first that fits. Each of
# 8 H100 holds four rows of Llama-3 8B.
FILLS = {'llama3_8b': (10, 8, 6, 4, 3, 2, 1)}
