"""The table of XLA, NCCL and memory settings: for which GPU, hosts and mesh axes, and why.

XLA options come in two forms, for a reason. A *compile option* is passed to `.compile()` of one
executable: an unknown name is a Python error instead of the end of the process, and the option is
in the key of the compilation cache. An *XLA flag* (in XLA_FLAGS) is for settings that XLA reads at
run time.
"""

import dataclasses
from collections.abc import Mapping
from typing import Optional, Union

Value = Union[bool, int, float, str]

GENERATIONS = ('a100', 'h100', 'h200', 'b200')
_HOPPER_ON = ('h100', 'h200', 'b200')
_FAST = ('default', 'max_overlap')
_ALL = ('safe', 'default', 'max_overlap', 'deterministic')

ONE_LAYER = 'one layer'  # replaced by a number of bytes in `select`

_TOOLBOX = 'https://github.com/NVIDIA/JAX-Toolbox/blob/main/docs/GPU_performance.md'
_JAX_TIPS = 'https://docs.jax.dev/en/latest/gpu_performance_tips.html'
_XLA = 'https://github.com/openxla/xla/blob/main/xla/debug_options_flags.cc'
_XLA_PROTO = 'https://github.com/openxla/xla/blob/main/xla/xla.proto'
_NCCL = 'https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html'
_NCCL_LOGS = (
  'https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/logging.html'
)
_MEGATRON = 'https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/training/arguments.py'
_NCCL_MEMORY = 'https://github.com/jax-ml/jax/issues/4950'
_HANG = 'https://github.com/jax-ml/jax/issues/19307'


@dataclasses.dataclass(frozen=True)
class XlaSetting:
  """One row.

  Attributes:
    kind: 'compile_option', 'xla_flag' (in XLA_FLAGS), 'env' or 'jax_config'.
    name: name of the option, flag (without dashes), variable or jax.config value.
    value: value to set; compile options take Python bools and ints, enums by name.
    presets: presets that include the setting.
    reason: one sentence, with the measured number if there is one.
    source: URL.
    generations: GPUs to which it applies; empty for all GPUs, also unknown ones.
    hosts: 'any', 'one' or 'several'.
    axes: mesh axes, at least one of which must be larger than 1; empty for any mesh.
    without_axes: mesh axes that must all have size 1.
    layers_ahead: True if it applies to loops over layers that communicate one layer ahead
      (partitioning/loop/layer_loop.py), False if to other loops; None for both.
    several_gpus: whether it applies only to runs on more than one GPU.
  """

  kind: str
  name: str
  value: Value
  presets: tuple[str, ...]
  reason: str
  source: str
  generations: tuple[str, ...] = ()
  hosts: str = 'any'
  axes: tuple[str, ...] = ()
  without_axes: tuple[str, ...] = ()
  layers_ahead: Optional[bool] = None
  several_gpus: bool = False


def _overlap(name: str, value: Value, reason: str, source: str, **where) -> XlaSetting:
  return XlaSetting(
    'compile_option', name, value, ('max_overlap',), reason, source, several_gpus=True, **where
  )


_COMBINE = (
  'One collective per layer instead of one per 30 MiB. On 64 GPUs with O1, matmuls then hide '
  '47 to 51% of the all-gathered bytes (18 to 49% without). Worse within a host: 51% instead of '
  '82% on 8 GPUs. No effect without O1.'
)
_PIPELINE = 'Starts this collective one iteration of the layer loop early.'

TABLE: tuple[XlaSetting, ...] = (
  XlaSetting(
    'jax_config',
    'jax_optimization_level',
    'O1',
    _FAST,
    'Pipelined collectives, unrolled loops and the latency-hiding scheduler together. On 8 '
    'H100 matmuls then hide 82% of the all-gathered bytes (71% without), and 84% of the '
    'reduce-scattered bytes (none without); on 8 A100 53% and 76% (none without).',
    _TOOLBOX,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_latency_hiding_scheduler',
    True,
    ('default', 'max_overlap', 'deterministic'),
    'Schedules matmuls between the start and end of a collective. Off by default on an A100, where '
    'nothing overlaps without it; on by default on later GPUs, and part of O1.',
    _JAX_TIPS,
    several_gpus=True,
  ),
  *(
    XlaSetting(
      'compile_option',
      f'xla_gpu_{kind}_combine_threshold_bytes',
      ONE_LAYER,
      ('default', 'max_overlap'),
      _COMBINE,
      _TOOLBOX,
      generations=GENERATIONS,
      hosts='several',
      # With overlap_layers, XLA's default already combines exactly one layer.
      layers_ahead=False if kind == 'reduce_scatter' else None,
      several_gpus=True,
    )
    for kind in ('all_gather', 'all_reduce', 'reduce_scatter')
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_all_gather_combine_threshold_bytes',
    ONE_LAYER,
    ('default', 'max_overlap'),
    'One gather per layer: a loop that gathers one layer ahead then hides it behind a whole layer. '
    'Llama-3.2 1B on 8 H100 hides 85% of the gathered bytes (62% without).',
    _TOOLBOX,
    generations=GENERATIONS,
    hosts='one',
    layers_ahead=True,
    several_gpus=True,
  ),
  XlaSetting(
    'compile_option',
    'xla_disable_hlo_passes',
    'collective-pipeliner-backward,collective-pipeliner-forward,loop-double-buffer-transformer',
    ('default',),
    'The loop over layers communicates one layer ahead. O1 would move its collectives one layer '
    'further, and unroll it: on 64 GPUs (hsdp) the sums of three layers then wait for the end.',
    _XLA,
    layers_ahead=True,
    without_axes=('stage', 'context', 'expert', 'model'),
    several_gpus=True,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_while_loop_unrolling',
    'WHILE_LOOP_UNROLLING_DOUBLE_BUFFER',
    ('default',),
    'Two ticks of a pipeline per iteration. O1 chooses by itself, and XLA then ends the process '
    '(hlo_alias_analysis.cc:168, jax 0.10.2) in `pp` with overlap_layers.',
    _XLA_PROTO,
    axes=('stage',),
    several_gpus=True,
  ),
  *(
    _overlap(f'xla_gpu_enable_pipelined_{kind}', True, _PIPELINE, _TOOLBOX)
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
  ),
  _overlap(
    'xla_gpu_enable_while_loop_unrolling',
    'WHILE_LOOP_UNROLLING_DOUBLE_BUFFER',
    'Two layers per iteration, so that the collectives of one overlap the matmuls of the '
    'other without copies.',
    _XLA_PROTO,
  ),
  _overlap(
    'xla_gpu_threshold_for_windowed_einsum_mib',
    0,
    'Splits a matmul and its all-gather or reduce-scatter into pieces that overlap, at any size.',
    _TOOLBOX,
    axes=('model',),
  ),
  _overlap(
    'xla_gpu_multi_streamed_windowed_einsum',
    True,
    'Runs the pieces of such a matmul on several streams.',
    _TOOLBOX,
    axes=('model',),
  ),
  _overlap(
    'xla_gpu_experimental_pipeline_parallelism_opt_level',
    'PIPELINE_PARALLELISM_OPT_LEVEL_ENABLE',
    'Sends activations to the next stage while this one computes.',
    _JAX_TIPS,
    axes=('stage',),
  ),
  _overlap(
    'xla_disable_hlo_passes',
    'collective-permute-motion',
    'This pass undoes the overlap of the sends between stages.',
    _JAX_TIPS,
    axes=('stage',),
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_command_buffer',
    'FUSION,CUSTOM_CALL',
    _FAST,
    'Only fusions and library calls go into CUDA graphs: collectives inside a graph do '
    'not overlap on this GPU.',
    _TOOLBOX,
    generations=('b200',),
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_command_buffer',
    '',
    ('safe',),
    'No CUDA graphs: errors name the failing kernel, and profiles show each kernel.',
    _TOOLBOX,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_triton_gemm',
    False,
    ('safe', 'deterministic'),
    'Matmuls by cuBLASLt only: compiles faster, and only one library to autotune.',
    _TOOLBOX,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_deterministic_ops',
    True,
    ('deterministic',),
    'No kernels that add in order of arrival, and no autotuning, whose choice may '
    'differ from run to run. Slower.',
    _XLA_PROTO,
  ),
  XlaSetting(
    'xla_flag',
    'xla_gpu_first_collective_call_terminate_timeout_seconds',
    600,
    _ALL,
    'XLA ends the process when its GPUs do not reach their first collective '
    'within 40 s. Autotuning a large program can take that long.',
    _XLA,
    several_gpus=True,
  ),
  XlaSetting(
    'xla_flag',
    'xla_gpu_nccl_terminate_on_error',
    True,
    _ALL,
    'An NCCL error ends the process, so that the scheduler can act. Without it, jobs have '
    'hung for hours in the next collective.',
    _HANG,
    hosts='several',
  ),
  XlaSetting(
    'env',
    'XLA_CLIENT_MEM_FRACTION',
    0.9,
    ('default', 'max_overlap', 'deterministic'),
    "XLA's share of the GPU's memory; the default is 0.75. The rest is for CUDA, cuBLAS, "
    "cuDNN and NCCL's buffers.",
    _TOOLBOX,
    generations=GENERATIONS,
    hosts='one',
  ),
  XlaSetting(
    'env',
    'XLA_CLIENT_MEM_FRACTION',
    0.85,
    ('default', 'max_overlap', 'deterministic'),
    "As on one host, with room for NCCL's network buffers. NCCL reports too little "
    'memory as "unhandled system error".',
    _NCCL_MEMORY,
    generations=GENERATIONS,
    hosts='several',
  ),
  XlaSetting(
    'env',
    'CUDA_DEVICE_MAX_CONNECTIONS',
    '1',
    _FAST,
    'Kernels start in the order in which they were queued, so the matmul that should hide a '
    'collective does not delay it. Not for Blackwell.',
    _TOOLBOX,
    generations=('h100', 'h200'),
    several_gpus=True,
  ),
  XlaSetting(
    'env',
    'CUDA_DEVICE_MAX_CONNECTIONS',
    '1',
    _FAST,
    'As on Hopper, if every layer communicates parameters or activations.',
    _MEGATRON,
    generations=('a100',),
    axes=('fsdp', 'context', 'model'),
    several_gpus=True,
  ),
  XlaSetting(
    'env',
    'NCCL_DEBUG',
    'WARN',
    _ALL,
    'NCCL prints why it failed; by default it is silent. Prints nothing when all is well.',
    _NCCL_LOGS,
    several_gpus=True,
  ),
  XlaSetting(
    'env',
    'NCCL_ALGO',
    '^NVLS',
    ('deterministic',),
    'No sums inside the NVLink switch, whose order is unknown.',
    _MEGATRON,
    generations=_HOPPER_ON,
    several_gpus=True,
  ),
)

# Settings that other projects use and t5x_gpu leaves alone, with the reason; shown on the page.
LEFT_ALONE: Mapping[str, str] = {
  'NCCL_NVLS_ENABLE': 'NCCL detects whether the switch can add (with some cloud fabrics it must '
  f'not). See {_NCCL}',
  'NCCL_IB_*, NCCL_SOCKET_IFNAME, NCCL_NET, NCCL_PROTO': "they depend on a cluster's network, "
  'not on a model: set them in the job script.',
  'xla_gpu_enable_highest_priority_async_stream, combine_by_dim': 'already the default.',
  'xla_disable_hlo_passes=rematerialization': 'no effect on the programs measured here.',
  'xla_gpu_memory_limit_slop_factor': 'for programs that almost fit; not a default.',
}
