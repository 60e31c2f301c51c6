"""The parts of the benchmark, the most important first; each runs in a separate process."""

import dataclasses
from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]

# (length, packed), the sizes that most runs use first.
ATTENTION = (2048, 8192, 32768, 4096, 16384)


class Missing(Exception):
  """A part needs something that this machine or this version does not have."""


@dataclasses.dataclass(frozen=True)
class Part:
  """One process.

  Attributes:
    name: in flags and results.
    limit_seconds: after which it is killed; the rows that it wrote stay.
    function: 'module:function' of benchmarks/gpu, which yields rows.
    options: its arguments.
    is_our_step: whether to set up XLA as a training run does and pass the result as `xla`, and the
      file of earlier results, which calibrate its plan, as `results`.
  """

  name: str
  limit_seconds: int
  function: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_our_step: bool = False


def _ours(shape: str, precision: str = 'bfloat16') -> Part:
  options = {'name': shape, 'precision': precision}
  short = {'bfloat16': 'bf16', 'fp8': 'fp8'}[precision]
  return Part(f'{shape}_{short}', 150, 'step:measure', options, is_our_step=True)


def _torch(shape: str, compiled: str = 'layers') -> Part:
  suffix = '' if compiled == 'layers' else f'_{compiled}'
  return Part(
    f'{shape}_torch{suffix}', 150, 'torch_step:measure', {'name': shape, 'compiled': compiled}
  )


PARTS = (
  Part('ceilings', 60, 'ceilings:measure'),
  Part('ceilings_torch', 60, 'torch_step:measure_ceilings'),
  _ours('decoder_1.3b_2048'),
  _torch('decoder_1.3b_2048'),
  _ours('decoder_1.3b_2048', 'fp8'),
  _ours('decoder_1.3b_8192'),
  _torch('decoder_1.3b_8192'),
  _ours('decoder_1.3b_8192', 'fp8'),
  *(Part(f'attention_{n}', 100, 'attention:measure', {'length': n}) for n in ATTENTION),
  Part('attention_torch', 100, 'torch_parts:measure_attention'),
  Part('loss', 100, 'loss:measure'),
  Part('loss_torch', 100, 'torch_parts:measure_loss'),
  *(
    make(shape)
    for shape in ('decoder_134m', 'gpt2_xl', 'bert_large', 't5_large')
    for make in (_ours, _torch)
  ),
  _torch('decoder_1.3b_2048', 'whole'),
  _torch('gpt2_xl', 'whole'),
)
