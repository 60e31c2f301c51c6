"""The models of shapes.py in PyTorch: the same parameters, the same matrix products.

Weights start at a normal distribution with deviation 0.02. T5's relative bias is an additive mask,
which PyTorch serves with its memory-efficient attention; without it cuDNN's comes first.
"""

import math
from typing import Any, Optional

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu.shapes import Shape

ACTIVATIONS = {
  'linear': lambda x: x,
  'gelu': lambda x: F.gelu(x, approximate='tanh'),
  'gelu_exact': F.gelu,
  'silu': F.silu,
}


class Config:
  """Sizes of a stack, with the names and defaults of TransformerConfig."""

  num_positions = num_token_types = num_kv_heads = 0
  mlp_bias = embedding_norm = logits_via_embedding = qk_norm = False
  scale_tied_logits = True
  attention_bias, norm, norm_position = 'none', 'rms', 'pre'
  norm_epsilon = 1e-6
  relative_bias = 'none'
  query_pre_attn_scalar = 1.0
  num_relpos_buckets, max_relpos_distance = 32, 128

  def __init__(self, shape: Shape):
    self.__dict__.update(shape.config)
    self.rope, self.length = shape.rope, shape.length

  def make_norm(self, features: Optional[int] = None) -> nn.Module:
    make = nn.RMSNorm if self.norm == 'rms' else nn.LayerNorm
    return make(features or self.embed_dim, eps=self.norm_epsilon)


class Attention(nn.Module):
  """Multi-head attention; keys and values come from `kv_input` if it is given."""

  def __init__(self, c: Config):
    super().__init__()
    self.c, width, bias = c, c.num_heads * c.head_dim, c.attention_bias == 'all'
    kv_width = (c.num_kv_heads or c.num_heads) * c.head_dim
    self.widths = (width, kv_width, kv_width)
    self.q = nn.Linear(c.embed_dim, width, bias=bias)
    self.kv = nn.Linear(c.embed_dim, 2 * kv_width, bias=bias)
    self.out = nn.Linear(width, c.embed_dim, bias=bias)
    self.qk_norms = nn.ModuleList(c.make_norm(c.head_dim) for _ in range(2 * c.qk_norm))

  def forward(
    self,
    x: torch.Tensor,
    rotation: Optional[tuple[torch.Tensor, torch.Tensor]],
    bias: Optional[torch.Tensor],
    causal: bool,
    kv_input: Optional[torch.Tensor] = None,
  ) -> torch.Tensor:
    """Returns [batch, length, embed]."""
    if kv_input is None:  # one product for queries, keys and values
      weight = torch.cat([self.q.weight, self.kv.weight])
      b = None if self.q.bias is None else torch.cat([self.q.bias, self.kv.bias])
      q, k, v = F.linear(x, weight, b).split(self.widths, -1)
    else:
      q, (k, v) = self.q(x), self.kv(kv_input).chunk(2, -1)
    q, k, v = (a.unflatten(-1, (-1, self.c.head_dim)).transpose(1, 2) for a in (q, k, v))
    if self.qk_norms:
      q, k = (norm(a).to(v.dtype) for norm, a in zip(self.qk_norms, (q, k)))
    if rotation is not None:
      q, k = rotate(q, rotation), rotate(k, rotation)
    if bias is not None:
      bias = bias.to(q.dtype)
    heads = F.scaled_dot_product_attention(
      q,
      k,
      v,
      attn_mask=bias,
      is_causal=causal and bias is None,
      scale=self.c.query_pre_attn_scalar**-0.5,
      enable_gqa=q.shape[1] != k.shape[1],
    )
    return self.out(heads.transpose(1, 2).flatten(2))


class Layer(nn.Module):
  """Attention, attention to an encoder if there is one, MLP."""

  def __init__(self, c: Config, cross: bool):
    super().__init__()
    self.c = c
    self.attention, self.cross = Attention(c), Attention(c) if cross else None
    gates = len(c.mlp_activations)
    self.wi = nn.Linear(c.embed_dim, gates * c.mlp_dim, bias=c.mlp_bias)
    self.wo = nn.Linear(c.mlp_dim, c.embed_dim, bias=c.mlp_bias)
    self.norms = nn.ModuleList(c.make_norm() for _ in range(2 + cross))

  def forward(
    self,
    x: torch.Tensor,
    rotation: Any,
    bias: Optional[torch.Tensor],
    causal: bool,
    encoded: Optional[torch.Tensor] = None,
  ) -> torch.Tensor:
    """Returns [batch, length, embed]."""
    x = self.block(x, 0, lambda y: self.attention(y, rotation, bias, causal))
    if self.cross is not None:
      x = self.block(x, 2, lambda y: self.cross(y, None, None, False, encoded))
    return self.block(x, 1, self.mlp)

  def block(self, x: torch.Tensor, norm: int, function: Any) -> torch.Tensor:
    if self.c.norm_position == 'post':
      return self.norms[norm](x + function(x))
    return x + function(self.norms[norm](x))

  def mlp(self, x: torch.Tensor) -> torch.Tensor:
    names = self.c.mlp_activations
    hidden = [
      ACTIVATIONS[name](part) for name, part in zip(names, self.wi(x).chunk(len(names), -1))
    ]
    return self.wo(math.prod(hidden[1:], start=hidden[0]))


class Stack(nn.Module):
  """Layers, the relative bias that they share, and a last norm unless norms follow the sums."""

  def __init__(self, c: Config, *, causal: bool, cross: bool = False):
    super().__init__()
    self.c, self.causal = c, causal
    self.layers = nn.ModuleList(Layer(c, cross) for _ in range(c.num_layers))
    self.norm = c.make_norm() if c.norm_position == 'pre' else None
    if c.rope:
      for name, table in zip(('cos', 'sin'), rotary_tables(c.length, c.head_dim)):
        self.register_buffer(name, table, persistent=False)
    self.has_bias = c.relative_bias == 'shared'
    if self.has_bias:
      self.table = nn.Embedding(c.num_relpos_buckets, c.num_heads)
      self.register_buffer('buckets', relative_buckets(c, causal), persistent=False)

  def forward(self, x: torch.Tensor, encoded: Optional[torch.Tensor] = None) -> torch.Tensor:
    """Returns [batch, length, embed]."""
    rotation = (self.cos, self.sin) if self.c.rope else None
    bias = None
    if self.has_bias:
      bias = self.table(self.buckets).permute(2, 0, 1)[None]
      if self.causal:
        later = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
        bias = bias.masked_fill(later, float('-inf'))
    for layer in self.layers:
      x = layer(x, rotation, bias, self.causal, encoded)
    return x if self.norm is None else self.norm(x)


class Model(nn.Module):
  """A decoder, an encoder with a masked language modelling head, or an encoder-decoder."""

  def __init__(self, shape: Shape):
    super().__init__()
    self.c = c = Config(shape)
    self.family = shape.family
    self.tokens = nn.Embedding(c.vocab_size, c.embed_dim)
    self.positions = nn.Embedding(c.num_positions, c.embed_dim) if c.num_positions else None
    self.types = nn.Embedding(c.num_token_types, c.embed_dim) if c.num_token_types else None
    self.embedding_norm = c.make_norm() if c.embedding_norm else None
    self.encoder = None if shape.family == 'decoder' else Stack(c, causal=False)
    self.decoder = None
    if shape.family != 'encoder':
      self.decoder = Stack(c, causal=True, cross=shape.family == 'encoder_decoder')
    if shape.family == 'encoder':
      self.head = nn.Linear(c.embed_dim, c.embed_dim)
      self.head_norm = c.make_norm()
      self.logits_bias = nn.Parameter(torch.zeros(c.vocab_size))
    elif not c.logits_via_embedding:
      self.logits = nn.Linear(c.embed_dim, c.vocab_size, bias=False)
    for parameter in self.parameters():
      if parameter.ndim > 1:
        nn.init.normal_(parameter, std=0.02)

  def layers(self) -> list[nn.ModuleList]:
    return [stack.layers for stack in (self.encoder, self.decoder) if stack is not None]

  def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Returns the mean loss of [batch, length] token ids.

    Args:
      inputs: inputs of the encoder, or of a decoder without an encoder.
      targets: targets of the logits; the decoder of an encoder-decoder reads them, shifted.
    """
    x = self.embed(inputs)
    if self.encoder is not None:
      x = self.encoder(x)
    if self.family == 'encoder_decoder':
      x = self.decoder(self.embed(F.pad(targets, (1, 0))[:, :-1]), x)
    elif self.decoder is not None:
      x = self.decoder(x)
    return self.loss(x, targets)

  def embed(self, tokens: torch.Tensor) -> torch.Tensor:
    x = self.tokens(tokens)
    if self.positions is not None:
      x = x + self.positions.weight[: tokens.shape[1]]
    if self.types is not None:
      x = x + self.types.weight[0]
    return x if self.embedding_norm is None else self.embedding_norm(x)

  def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    c = self.c
    if self.family == 'encoder':
      x = self.head_norm(F.gelu(self.head(x)))
      logits = F.linear(x, self.tokens.weight, self.logits_bias)
    elif c.logits_via_embedding:
      logits = F.linear(x * c.embed_dim**-0.5 if c.scale_tied_logits else x, self.tokens.weight)
    else:
      logits = self.logits(x)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def rotary_tables(length: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
  """Returns cosine and sine [length, head_dim / 2]."""
  frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
  angles = torch.arange(length)[:, None] * frequencies
  return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
  """Returns `x` [batch, heads, length, head_dim] with rotary positions, in its dtype."""
  cos, sin = rotation
  a, b = x.float().chunk(2, -1)
  return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def relative_buckets(c: Config, causal: bool) -> torch.Tensor:
  """Returns bucket numbers [length, length] of T5's relative bias."""
  distance = torch.arange(c.length)[:, None] - torch.arange(c.length)[None, :]
  count = c.num_relpos_buckets if causal else c.num_relpos_buckets // 2
  offset = 0 if causal else (distance < 0) * count
  distance = distance.clamp(min=0) if causal else distance.abs()
  exact = count // 2
  far = torch.log(distance.clamp(min=1) / exact) / math.log(c.max_relpos_distance / exact)
  far = (exact + (far * (count - exact)).long()).clamp(max=count - 1)
  return offset + torch.where(distance < exact, distance, far)
