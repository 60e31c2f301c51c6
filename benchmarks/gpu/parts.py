"""The parts of the benchmark, the most important first; each runs in a separate process."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Optional

Row = dict[str, Any]

# (length, packed), the sizes that most runs use first.
ATTENTION = (2048, 8192, 32768, 4096, 16384)


class Missing(Exception):
  """A part needs something that this machine or this version does not have."""


class Skipped(Exception):
  """A part measures nothing on this machine, however often it runs."""


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
    num_gpus: GPUs that XLA is set up for; None for all of the machine.
    tokamax: 'uses' for kernels of Tokamax with the block sizes that were tuned before, 'tunes' to
      tune them, into a folder that the function gets as `folder`; '' for other parts.
  """

  name: str
  limit_seconds: int
  function: str
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  is_our_step: bool = False
  num_gpus: Optional[int] = 1
  tokamax: str = ''


def _ours(shape: str, precision: str = 'bfloat16', *, limit_seconds: int = 150) -> Part:
  options = {'name': shape, 'precision': precision}
  short = {'bfloat16': 'bf16', 'fp8': 'fp8'}[precision]
  return Part(
    f'{shape}_{short}', limit_seconds, 'step:measure', options, is_our_step=True, tokamax='uses'
  )


def _on_all_gpus(shape: str) -> Part:
  options = {'name': shape}
  return Part(
    f'gpus_{shape}',
    400,
    'step:measure_gpus',
    options,
    is_our_step=True,
    num_gpus=None,
    tokamax='uses',
  )


def _options(
  shape: str, precision: str = 'bfloat16', *, kind: str = 'one', limit_seconds: int = 250
) -> Part:
  where = {'one': '', 'fsdp': 'gpus_'}.get(kind, f'{kind}_')
  short = {'bfloat16': 'bf16', 'fp8': 'fp8'}[precision]
  return Part(
    f'options_{where}{shape}_{short}',
    limit_seconds,
    'step:measure_options',
    {'name': shape, 'precision': precision, 'kind': kind},
    is_our_step=True,
    num_gpus=1 if kind == 'one' else None,
    tokamax='uses',
  )


def _traffic(name: str, *shapes: str, limit_seconds: int = 300) -> Part:
  return Part(
    f'traffic_{name}',
    limit_seconds,
    'step:measure_traffic',
    {'names': shapes or (name,)},
    is_our_step=True,
    num_gpus=None,
    tokamax='uses',
  )


def _tunes(name: str, *shapes: str) -> Part:
  shapes = shapes or (name,)
  return Part(f'tune_{name}', 250, 'tuning:measure_steps', {'names': shapes}, tokamax='tunes')


def _torch(shape: str, compiled: str = 'layers') -> Part:
  suffix = '' if compiled == 'layers' else f'_{compiled}'
  return Part(
    f'{shape}_torch{suffix}', 150, 'torch_step:measure', {'name': shape, 'compiled': compiled}
  )


PARTS = (
  Part('ceilings', 80, 'ceilings:measure'),
  Part('ceilings_torch', 60, 'torch_step:measure_ceilings'),
  _tunes('decoder_1.3b_2048'),
  _ours('decoder_1.3b_2048'),
  _torch('decoder_1.3b_2048'),
  _ours('decoder_1.3b_2048', 'fp8'),
  _tunes('decoder_1.3b_8192'),
  _ours('decoder_1.3b_8192'),
  _torch('decoder_1.3b_8192'),
  _ours('decoder_1.3b_8192', 'fp8'),
  _tunes('llama3_8b_4_layers'),
  _ours('llama3_8b_4_layers'),
  _torch('llama3_8b_4_layers'),
  _ours('llama3_8b_4_layers', 'fp8'),
  _tunes('1b', 'llama3_2_1b', 'qwen3_1_7b'),
  *(make(shape) for shape in ('llama3_2_1b', 'qwen3_1_7b') for make in (_ours, _torch)),
  _on_all_gpus('decoder_1.3b_2048'),
  _options('decoder_1.3b_2048'),
  _options('decoder_1.3b_2048', 'fp8'),
  _options('decoder_1.3b_2048', kind='fsdp'),
  _options('decoder_1.3b_2048', 'fp8', kind='fsdp'),
  _options('decoder_1.3b_2048', kind='pipeline', limit_seconds=200),
  _options('llama3_8b', kind='full', limit_seconds=400),
  Part('loops', 500, 'step:measure_loops', is_our_step=True, num_gpus=None, tokamax='uses'),
  _traffic('llama3_8b', limit_seconds=500),
  _traffic('1b', 'llama3_2_1b', 'qwen3_1_7b'),
  _tunes('gemma2_2b'),
  _traffic('gemma2_2b', limit_seconds=200),
  _traffic('models', 'gpt2_xl', 'bert_large', 't5_large', limit_seconds=400),
  Part('tune_attention', 250, 'tuning:measure_attention', tokamax='tunes'),
  *(
    Part(f'attention_{n}', 100, 'attention:measure', {'length': n}, tokamax='uses')
    for n in ATTENTION
  ),
  Part('attention_torch', 100, 'torch_parts:measure_attention'),
  Part('loss', 150, 'loss:measure'),
  Part('loss_torch', 100, 'torch_parts:measure_loss'),
  _tunes('models', 'decoder_134m', 'gpt2_xl', 'bert_large', 't5_large'),
  _ours('decoder_134m'),
  _torch('decoder_134m'),
  _ours('gpt2_xl', limit_seconds=250),  # 48 layers without a loop compile for a minute, twice
  _torch('gpt2_xl'),
  *(make(shape) for shape in ('bert_large', 't5_large') for make in (_ours, _torch)),
  _on_all_gpus('decoder_134m'),
  _torch('decoder_1.3b_2048', 'whole'),
  _torch('gpt2_xl', 'whole'),
)
