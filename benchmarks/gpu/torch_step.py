"""The training step of PyTorch on the same card: the peer of step.py.

Parameters and AdamW in float32, autocast to bfloat16, gradients clipped to 1, torch.compile, fused
AdamW, scaled_dot_product_attention with cuDNN's kernel first.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.parts import Missing, Row
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import time_calls

# PyTorch is optional: without it these parts say so.
try:
  import torch
  from torch.nn.attention import SDPBackend, sdpa_kernel

  from benchmarks.gpu.torch_model import Model
except ImportError:
  torch = None


def measure(name: str, compiled: str, *, small: bool = False) -> Iterator[Row]:
  """Yields the result of one shape, with the most rows that fit.

  Args:
    name: of SHAPES.
    compiled: 'layers', each layer and the loss by themselves, or 'whole', the model as one graph.
    small: sizes for a CPU, not compiled.
  Raises:
    Missing: PyTorch is not installed, or sees no GPU.
  """
  device = device_of(small)
  shape = SHAPES[name].small() if small else SHAPES[name]
  for rows in shape.rows:
    try:
      yield _measure(shape, rows, device, compiled) | {'model': name, 'precision': 'bfloat16'}
      return
    except torch.OutOfMemoryError as e:
      too_large = str(e)
      print(f'{name}, {rows} rows: {too_large[:300]}', flush=True)
    torch.cuda.empty_cache()
  raise MemoryError(too_large)


def device_of(small: bool) -> str:
  """Returns 'cuda', or 'cpu' for tiny sizes; raises Missing without PyTorch or a GPU."""
  if torch is None:
    raise Missing('PyTorch is not installed')
  if small:
    return 'cpu'
  if not torch.cuda.is_available():
    raise Missing('the installed PyTorch sees no GPU')
  return 'cuda'


def wait(device: str) -> None:
  """Returns once the device has done all calls."""
  if device == 'cuda':
    torch.cuda.synchronize()


def _measure(shape: Shape, rows: int, device: str, compiled: str) -> Row:
  torch.manual_seed(0)
  on_gpu = device == 'cuda'
  model = Model(shape).to(device)
  num_params = sum(p.numel() for p in model.parameters())
  optimizer = torch.optim.AdamW(
    model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu
  )
  if on_gpu:
    _compile(model, compiled)
    torch.cuda.reset_peak_memory_stats()
  tokens = torch.randint(1, shape.config['vocab_size'], (4, rows, shape.length + 1), device=device)
  losses: list[Any] = []

  def call() -> None:
    batch = tokens[len(losses) % len(tokens)]
    with torch.autocast(device, torch.bfloat16), kernels_of_attention():
      loss = model(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(loss.detach())

  begin = time.perf_counter()
  call()
  wait(device)
  first_seconds = time.perf_counter() - begin
  timing = time_calls(call, lambda _: wait(device), samples=5, sample_seconds=1.0, small=not on_gpu)
  tokens_per_step = rows * shape.length
  return {
    'what': f'PyTorch {torch.__version__}',
    'compiled': compiled if on_gpu else 'no',
    'rows': rows,
    'length': shape.length,
    'num_params': num_params,
    **timing.row(),
    'compile_seconds': first_seconds,
    'tokens_per_second': tokens_per_step / timing.seconds,
    'peak_bytes': torch.cuda.max_memory_allocated() if on_gpu else None,
    'losses': [losses[0].item(), losses[-1].item()],
    'steps': len(losses),
  }


def _compile(model: Any, compiled: str) -> None:
  """Compiles `model` in place."""
  if compiled == 'whole':
    model.compile()
    return
  model.loss = torch.compile(model.loss)
  for layers in model.layers():
    for layer in layers:
      layer.compile()


def kernels_of_attention() -> contextlib.AbstractContextManager:
  """Returns a context in which attention prefers cuDNN's kernel, then FlashAttention's."""
  order = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
  ]
  return sdpa_kernel(order, set_priority=True)


def measure_ceilings(*, small: bool = False) -> Iterator[Row]:
  """Yields TFLOP/s of square products, as ceilings.py does, by PyTorch's libraries."""
  device = device_of(small)
  for n in (64,) if small else (4096, 8192, 16384):
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    yield _matmul(n, 'bfloat16', lambda: a @ b.T, device)
    if not small and torch.cuda.get_device_capability() >= (8, 9):
      c, d = (x.to(torch.float8_e4m3fn) for x in (a, b))
      one = torch.ones((), device=device)
      options = dict(scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)
      yield _matmul(n, 'fp8', lambda: torch._scaled_mm(c, d.T, **options), device)


def _matmul(n: int, dtype: str, call: Any, device: str) -> Row:
  timing = time_calls(call, lambda _: wait(device), small=device == 'cpu')
  return {
    'what': 'matmul',
    'precision': dtype,
    'size': n,
    **timing.row(),
    'tflops': 2 * n**3 / timing.seconds / 1e12,
  }
