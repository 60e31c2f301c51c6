"""Hyper-parameters of a transformer, checked when they are set."""

import dataclasses
import logging
from typing import Any

import jax.numpy as jnp

from t5x_gpu.errors import ModelError, all_problems, did_you_mean
from t5x_gpu.layers.mlp import activation

_log = logging.getLogger(__name__)
RELATIVE_BIAS = ('none', 'shared', 'per_layer')
REMAT_POLICIES = ('none', 'minimal', 'full')
DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
  """Sizes and choices of one stack of layers.

  Attributes:
    vocab_size: token ids, at least the vocabulary's size; a multiple of 128 suits GPUs.
    num_layers: layers of the stack.
    embed_dim: features of the residual stream.
    num_heads: attention heads.
    head_dim: features of one head; heads x head_dim need not be embed_dim.
    mlp_dim: hidden features of the MLP, or of each expert.
    mlp_activations: ('gelu', 'linear') for a gated GELU (T5.1.1), ('relu',) for a plain MLP.
    dropout_rate: on embeddings, attention weights, MLP features and block outputs.
    dtype: 'float32' or 'bfloat16', of the computation; parameters and softmax are float32.
    logits_via_embedding: tie the output projection to the token table (logits / sqrt(embed_dim)).
    relative_bias: 'shared' (one for all layers: today's T5X), 'per_layer', or 'none'.
    num_relpos_buckets, max_relpos_distance: of the relative bias.
    remat_policy: what to recompute in the backward pass: 'none' stores everything, 'minimal' keeps
      matmul outputs, 'full' keeps only layer inputs.
    scan_unroll: layers unrolled per iteration of the scan over layers; more compile time, fewer
      loop overheads. Parameters are stacked [layers, ...] whatever its value.
    num_experts: experts in place of each MLP (a mixture of experts); 0 for one dense MLP.
    num_experts_per_token: how many of them each token uses.
    expert_capacity_factor: room for the tokens of a row in each expert; 1 is just enough if they
      are spread evenly. Where there is none left, tokens pass by on the residual.
  """
  vocab_size: int
  num_layers: int
  embed_dim: int
  num_heads: int
  head_dim: int
  mlp_dim: int
  mlp_activations: tuple[str, ...] = ('gelu', 'linear')
  dropout_rate: float = 0.0
  dtype: str = 'float32'
  logits_via_embedding: bool = False
  relative_bias: str = 'shared'
  num_relpos_buckets: int = 32
  max_relpos_distance: int = 128
  remat_policy: str = 'none'
  scan_unroll: int = 1
  num_experts: int = 0
  num_experts_per_token: int = 2
  expert_capacity_factor: float = 2.0

  def __post_init__(self) -> None:
    object.__setattr__(self, 'mlp_activations', tuple(self.mlp_activations))
    for name in self.mlp_activations:
      activation(name)
    problems, parameters = [], []

    def refuse(parameter: str, text: str) -> None:
      problems.append(f'{parameter} = {getattr(self, parameter)!r} {text}')
      parameters.append(f'TransformerConfig.{parameter}')

    for parameter in ('vocab_size', 'num_layers', 'embed_dim', 'num_heads', 'head_dim', 'mlp_dim',
                      'num_relpos_buckets', 'max_relpos_distance', 'scan_unroll'):
      if getattr(self, parameter) < 1:
        refuse(parameter, 'must be at least 1.')
    if self.num_experts < 0:
      refuse('num_experts', 'must be at least 1, or 0 for a dense MLP.')
    if self.num_experts > 0 and not 1 <= self.num_experts_per_token <= self.num_experts:
      refuse('num_experts_per_token', f'must be from 1 to num_experts = {self.num_experts}.')
    if self.expert_capacity_factor <= 0.0:
      refuse('expert_capacity_factor', 'must be above 0; 1 to 2 is usual.')
    if not 0.0 <= self.dropout_rate < 1.0:
      refuse('dropout_rate', 'must be at least 0 and below 1.')
    for parameter, allowed in (('relative_bias', RELATIVE_BIAS), ('remat_policy', REMAT_POLICIES),
                               ('dtype', tuple(DTYPES))):
      value = getattr(self, parameter)
      if value not in allowed:
        refuse(parameter, f'is not one of {", ".join(allowed)}.{did_you_mean(value, allowed)}')
    if self.relative_bias == 'none':
      _log.warning("relative_bias = 'none': nothing tells this model where a token stands.")
    if problems:
      raise ModelError(all_problems(problems, title='The model cannot be built'),
                       fix='Set them in the model file or with --gin.TransformerConfig.NAME=VALUE.',
                       parameters=parameters)

  @property
  def compute_dtype(self) -> Any:
    return DTYPES[self.dtype]
