"""Attention and the loss alone by PyTorch on the same card: peers of attention.py and loss.py."""

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.attention import HEAD_DIM, HEADS, TOKENS
from benchmarks.gpu.loss import EMBED, VOCABULARIES
from benchmarks.gpu.loss import TOKENS as LOSS_TOKENS
from benchmarks.gpu.parts import ATTENTION, Row
from benchmarks.gpu.timing import time_calls
from benchmarks.gpu.torch_step import device_of, kernels_of_attention, wait

try:
  import torch
except ImportError:
  torch = None


def measure_attention(*, small: bool = False) -> Iterator[Row]:
  """Yields the times of scaled_dot_product_attention on whole rows, TOKENS in all.

  Raises:
    Missing: PyTorch is not installed, or sees no GPU.
  """
  device = device_of(small)
  tokens, heads, head_dim = (64, 2, 16) if small else (TOKENS, HEADS, HEAD_DIM)
  for length in (32,) if small else ATTENTION:
    shape = (tokens // length, heads, length, head_dim)
    q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    for x in (q, k, v):
      x.requires_grad_()

    def forward(q: Any = q, k: Any = k, v: Any = v) -> Any:
      with kernels_of_attention():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def both(q: Any = q, k: Any = k, v: Any = v, dout: Any = dout) -> Any:
      return torch.autograd.grad(forward(q, k, v), (q, k, v), dout)

    flops = 4 * tokens * (length + 1) // 2 * heads * head_dim
    row = {'backend': 'PyTorch SDPA', 'length': length, 'packed': False, 'shape': shape}
    for name, call, factor in (('forward', forward, 1.0), ('backward', both, 3.5)):
      with torch.set_grad_enabled(name == 'backward'):
        timing = time_calls(call, lambda _: wait(device), small=small)
      row[name] = {**timing.row(), 'tflops': factor * flops / timing.seconds / 1e12}
    yield row


def measure_loss(*, small: bool = False) -> Iterator[Row]:
  """Yields the time of cross_entropy with its gradients, from the last norm.

  Raises:
    Missing: as in `measure_attention`.
  """
  device = device_of(small)
  tokens, embed = (32, 32) if small else (LOSS_TOKENS, EMBED)

  def loss(x: Any, kernel: Any, targets: Any) -> Any:
    logits = (x @ kernel.to(x.dtype)).float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction='sum')

  compiled = loss if small else torch.compile(loss, dynamic=False)
  for vocab in (64,) if small else VOCABULARIES:
    x = torch.randn(tokens, embed, device=device, dtype=torch.bfloat16, requires_grad=True)
    kernel = (torch.randn(embed, vocab, device=device) * embed**-0.5).requires_grad_()
    targets = torch.randint(0, vocab, (tokens,), device=device)

    def call(x: Any = x, kernel: Any = kernel, targets: Any = targets) -> Any:
      return torch.autograd.grad(compiled(x, kernel, targets), (x, kernel))

    row = {'what': 'PyTorch', 'vocab_size': vocab, 'tokens': tokens, 'embed_dim': embed}
    try:
      timing = time_calls(call, lambda _: wait(device), small=small)
    except torch.OutOfMemoryError:
      yield row | {'error': 'out of memory'}
      continue
    yield row | {
      **timing.row(),
      'tflops': 6 * tokens * embed * vocab / timing.seconds / 1e12,
      'loss': compiled(x, kernel, targets).item() / tokens,
    }
