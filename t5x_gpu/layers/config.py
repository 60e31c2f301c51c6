"""Settings that all layers share: number formats, norms, initial values, dropout.

Each kind of layer takes one group of settings, which extends `LayerConfig` and stands next to the
layer (`AttentionConfig`, `MlpConfig`, `MoeConfig`). TransformerConfig extends all groups, so it is
itself the argument of its layers.
"""

import dataclasses
import re
from typing import Optional

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike

from t5x_gpu.errors import did_you_mean
from t5x_gpu.layers.dense import Initializer

NORMS = ('rms', 'rms_plus_one', 'layer')


@dataclasses.dataclass(frozen=True)
class Precision:
  """The number formats of a model's computation.

  Attributes:
    dtype: dtype of activations and matmuls; reductions, softmax and norm statistics are float32.
    fp8: whether matmuls of a layer's kernels multiply 8-bit operands (layers/fp8.py).
  """

  dtype: DTypeLike
  fp8: bool = False


PRECISIONS: dict[str, Precision] = {
  'float32': Precision(jnp.float32),
  'bfloat16': Precision(jnp.bfloat16),
  'fp8': Precision(jnp.bfloat16, fp8=True),
  # FP8 without the rounding of bfloat16, for comparisons in `parity`.
  'fp8_float32': Precision(jnp.float32, fp8=True),
}

# Precision -> the same precision without the rounding of bfloat16; 'float32' for others.
IN_FLOAT32 = dict.fromkeys(('fp8', 'fp8_float32'), 'fp8_float32')


# Why NVFP4 is refused (docs/decisions.md).
WITHOUT_FP4 = (
  "training with it needs stochastic rounding and Hadamard transforms, which JAX's matmuls lack; "
  'the gradients of these are in bfloat16.'
)


def precision_hint(value: object) -> str:
  """Returns a list of precisions for users, and the precision that `value` probably means."""
  names = [name for name in PRECISIONS if name != 'fp8_float32']
  spelled = str(value).lower()
  if 'fp4' in spelled:
    return f'{", ".join(names)}. NVFP4 is not supported: {WITHOUT_FP4}'
  if spelled.startswith('mx'):
    return f"{', '.join(names)}. MXFP8 is 'fp8' with TransformerConfig.fp8_scaling = 'mxfp8'."
  is_8_bits = re.search(r'^f(p|loat)?_?8|e[45]m[23]', spelled)
  return ', '.join(names) + '.' + did_you_mean('fp8' if is_8_bits else value, names)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
  """Settings that all layers share.

  Attributes:
    dtype: precision of the computation, 'float32', 'bfloat16' or 'fp8' (docs/precision.md);
      parameters and softmax are float32.
    norm: 'rms'; 'rms_plus_one', which multiplies by 1 + scale (Gemma); 'layer', with a bias.
    norm_epsilon: epsilon of all norms.
    init_stddev: standard deviation of the initial values of all kernels and tables; None for T5's
      initializers.
    dropout_rate: default of all dropout rates ('attention_dropout', ...).
  """

  dtype: str = 'float32'
  norm: str = 'rms'
  norm_epsilon: float = 1e-6
  init_stddev: Optional[float] = None
  dropout_rate: float = 0.0

  @property
  def compute_dtype(self) -> DTypeLike:
    return PRECISIONS[self.dtype].dtype

  @property
  def fp8(self) -> bool:
    """Whether the matmuls of the layers are in FP8."""
    return PRECISIONS[self.dtype].fp8

  @property
  def kernel_init(self) -> Optional[Initializer]:
    """Initializer of all kernels; None for T5's initializers, which differ by kernel."""
    return None if self.init_stddev is None else nn.initializers.normal(self.init_stddev)

  def dropout(self, place: str) -> float:
    """Returns the dropout rate of a place: the field `PLACE_dropout`, or else `dropout_rate`."""
    rate = getattr(self, f'{place}_dropout')
    return self.dropout_rate if rate is None else rate
