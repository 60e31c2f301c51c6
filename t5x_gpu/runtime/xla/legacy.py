"""Flags of older T5X, JAX and XLA that old scripts still set, and their replacements.

Used only for flags that the installed jaxlib does not know.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Optional


@dataclasses.dataclass(frozen=True)
class Legacy:
  """What replaced a flag.

  Attributes:
    reason: a sentence for the user.
    now: value -> the flags with the same meaning today ('--name=value'); None if none is needed.
  """

  reason: str
  now: Optional[Callable[[str], Sequence[str]]] = None


def is_true(value: Optional[str]) -> bool:
  """Returns whether XLA reads a flag's value as true; a flag without a value is true."""
  return value is None or value.strip('"\'').lower() in ('', 'true', '1', 'on')


def _on(value: str) -> str:
  return 'true' if is_true(value) else 'false'


def _async(*kinds: str) -> Legacy:
  return Legacy(
    'collectives are asynchronous unless xla_gpu_disable_async_collectives lists them',
    lambda value: (
      () if is_true(value) else (f'--xla_gpu_disable_async_collectives={",".join(kinds)}',)
    ),
  )


_ALWAYS = Legacy('XLA always does this now, and the flag is gone')
_PIPELINED = ('all_gather', 'all_reduce', 'reduce_scatter')

LEGACY: dict[str, Legacy] = {
  # T5X, contrib/gpu/scripts_gpu/*.sh
  'xla_gpu_simplify_all_fp_conversions': Legacy(
    'xla_allow_excess_precision, which is on by default, replaced it'
  ),
  'xla_gpu_enable_async_collectives': _async('allreduce', 'allgather', 'reducescatter'),
  'xla_gpu_enable_async_all_reduce': _async('allreduce'),
  'xla_gpu_enable_async_all_gather': _async('allgather'),
  'xla_gpu_enable_async_reduce_scatter': _async('reducescatter'),
  'xla_gpu_enable_pipelined_collectives': Legacy(
    'there is one flag per kind of collective',
    lambda value: [f'--xla_gpu_enable_pipelined_{kind}={_on(value)}' for kind in _PIPELINED],
  ),
  **{
    f'xla_gpu_pipeline_{kind}': Legacy(
      'this jaxlib spells it xla_gpu_enable_pipelined_*',
      # 'default' means the same as no flag.
      lambda value, kind=kind: (
        () if value == 'default' else (f'--xla_gpu_enable_pipelined_{kind}={_on(value)}',)
      ),
    )
    for kind in _PIPELINED
  },
  'xla_gpu_graph_level': Legacy(
    'xla_gpu_enable_command_buffer replaced it; level 0 is the empty list',
    lambda value: ('--xla_gpu_enable_command_buffer=',) if value == '0' else (),
  ),
  'xla_gpu_enable_custom_fusions': Legacy(
    'xla_gpu_enable_dynamic_slice_fusion replaced it',
    lambda value: (f'--xla_gpu_enable_dynamic_slice_fusion={_on(value)}',),
  ),
  'xla_gpu_enable_address_computation_fusion': Legacy(
    'it is now called xla_gpu_enable_dynamic_slice_fusion',
    lambda value: (f'--xla_gpu_enable_dynamic_slice_fusion={_on(value)}',),
  ),
  'xla_gpu_cudnn_gemm_fusion': Legacy(
    'it is now called xla_gpu_cudnn_gemm_fusion_level, from 0 to 3',
    lambda value: (f'--xla_gpu_cudnn_gemm_fusion_level={int(is_true(value))}',),
  ),
  'xla_gpu_lhs_enable_gpu_async_tracker': _ALWAYS,
  'xla_gpu_enable_triton_softmax_fusion': _ALWAYS,
  'xla_gpu_all_reduce_contiguous': Legacy('XLA no longer has this option'),
  'xla_gpu_enable_nccl_per_stream_comms': Legacy('XLA no longer has this option'),
}
