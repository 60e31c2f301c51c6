"""The decoder of bare_step.py in PyTorch, eager: the peer that users compare with.

Causal scaled_dot_product_attention, without the relative bias. Prints one JSON line.
"""

import json
import resource
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH, LENGTH, VOCAB, LAYERS, EMBED, HEADS, HEAD_DIM, MLP = 8, 256, 384, 8, 384, 6, 64, 1024
STEPS = 10


class Layer(nn.Module):
  def __init__(self):
    super().__init__()
    self.norm1, self.norm2 = nn.RMSNorm(EMBED), nn.RMSNorm(EMBED)
    self.qkv = nn.Linear(EMBED, 3 * HEADS * HEAD_DIM, bias=False)
    self.out = nn.Linear(HEADS * HEAD_DIM, EMBED, bias=False)
    self.wi = nn.Linear(EMBED, 2 * MLP, bias=False)
    self.wo = nn.Linear(MLP, EMBED, bias=False)

  def forward(self, x: torch.Tensor) -> torch.Tensor:
    """Returns [batch, length, embed]."""
    qkv = self.qkv(self.norm1(x)).view(BATCH, LENGTH, 3, HEADS, HEAD_DIM).permute(2, 0, 3, 1, 4)
    heads = F.scaled_dot_product_attention(*qkv, is_causal=True)
    x = x + self.out(heads.transpose(1, 2).reshape(BATCH, LENGTH, HEADS * HEAD_DIM))
    gate, hidden = self.wi(self.norm2(x)).chunk(2, -1)
    return x + self.wo(F.gelu(gate, approximate='tanh') * hidden)


def main() -> None:
  torch.manual_seed(0)
  embedding = nn.Embedding(VOCAB, EMBED)
  layers, norm = nn.Sequential(*(Layer() for _ in range(LAYERS))), nn.RMSNorm(EMBED)
  optimizer = torch.optim.AdamW(
    [p for m in (embedding, layers, norm) for p in m.parameters()], lr=1e-3
  )
  tokens = torch.randint(1, 259, (BATCH, LENGTH))
  inputs = F.pad(tokens, (1, 0))[:, :-1]
  seconds = []
  for i in range(STEPS + 2):
    if i == 2:
      cpu = time.process_time()
    begin = time.monotonic()
    logits = norm(layers(embedding(inputs))) @ embedding.weight.T
    F.cross_entropy(logits.view(-1, VOCAB), tokens.view(-1)).backward()
    optimizer.step()
    optimizer.zero_grad()
    seconds.append(time.monotonic() - begin)
  print(
    json.dumps(
      {
        'what': f'PyTorch {torch.__version__} step',
        'step_seconds': statistics.median(seconds[2:]),
        'cpu_seconds_per_step': (time.process_time() - cpu) / STEPS,
        'peak_rss_mib': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
      }
    )
  )


if __name__ == '__main__':
  main()
