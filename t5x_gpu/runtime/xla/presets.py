"""The table of XLA, NCCL and memory settings: which, for which GPU, hosts and mesh axes, and why.

Nothing here touches the machine or jax: `select` is a pure function of the table. `xla_flags.py`
merges its result with what the user set and with what the installed jaxlib knows.

XLA options come in two forms, for a reason. A *compile option* goes to `.compile()` of one
executable: an unknown one is a Python error, not the end of the process, and it enters the key of
the compilation cache. An *XLA flag* (the variable XLA_FLAGS) is for what XLA reads while it runs.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Optional, Union

from t5x_gpu.errors import ConfigError, did_you_mean

Value = Union[bool, int, float, str]

PRESETS = {
  'safe': 'what XLA does by itself, with fewer kernels of its own: to tell a bug from a setting',
  'default': 'communication beside computation, as NVIDIA and the JAX authors advise',
  'max_overlap': 'default, and all further overlap that XLA offers: measure before you keep it',
  'deterministic': 'default without its optimisations; the same bits on every run of a program',
  'none': 'nothing of ours; your own XLA_FLAGS are still checked',
}
GENERATIONS = ('a100', 'h100', 'h200', 'b200')
_HOPPER_ON = ('h100', 'h200', 'b200')
_FAST = ('default', 'max_overlap')
_ALL = ('safe', 'default', 'max_overlap', 'deterministic')

MIB = 2**20
# A combined collective is as large as one layer, between these: below, latency counts; above, there
# is nothing left to hide it behind.
LEAST_COMBINED_BYTES = 128 * MIB
MOST_COMBINED_BYTES = {
  'a100': 1024 * MIB,
  'h100': 1024 * MIB,
  'h200': 1024 * MIB,
  'b200': 2048 * MIB,
}
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
class Setting:
  """One row.

  Attributes:
    kind: 'compile_option', 'xla_flag' (in XLA_FLAGS), 'env' or 'jax_config'.
    name: of the option, flag (without dashes), variable or jax.config value.
    value: what we set; compile options take Python bools and ints, enums by name.
    presets: those that have it.
    reason: one sentence, with the measured number if there is one.
    source: URL.
    generations: GPUs that it is for; empty for all, those that the table does not know included.
    hosts: 'any', 'one' or 'several'.
    axes: mesh axes of which at least one must be larger than 1; empty for any mesh.
    several_gpus: only where there is somebody to talk to.
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
  several_gpus: bool = False


def _overlap(name: str, value: Value, reason: str, source: str, **where) -> Setting:
  return Setting(
    'compile_option', name, value, ('max_overlap',), reason, source, several_gpus=True, **where
  )


_COMBINE = (
  'One collective per layer instead of one per 30 MiB. On 64 GPUs and with O1, 47 to 51% '
  'of the all-gathered bytes then have a matmul to hide behind, against 18 to 49%. Not '
  'within a host: 51% against 82% on 8 GPUs. Not without O1: none.'
)
_PIPELINE = 'Starts this collective one iteration of the layer loop early.'

TABLE: tuple[Setting, ...] = (
  Setting(
    'jax_config',
    'jax_optimization_level',
    'O1',
    _FAST,
    'Pipelined collectives, unrolled loops and the latency-hiding scheduler together. On 8 '
    'H100 82% of the all-gathered bytes then have a matmul to hide behind, against '
    '71%, and 84% of the reduce-scattered, against none; on 8 A100 53% and 76%, against '
    'none.',
    _TOOLBOX,
  ),
  Setting(
    'compile_option',
    'xla_gpu_enable_latency_hiding_scheduler',
    True,
    ('default', 'max_overlap', 'deterministic'),
    'Puts matmuls between start and end of a collective. Off by default on an A100, where '
    'no byte overlaps without it; the default on later GPUs, and part of O1.',
    _JAX_TIPS,
    several_gpus=True,
  ),
  *(
    Setting(
      'compile_option',
      f'xla_gpu_{kind}_combine_threshold_bytes',
      ONE_LAYER,
      ('default', 'max_overlap'),
      _COMBINE,
      _TOOLBOX,
      generations=GENERATIONS,
      hosts='several',
      several_gpus=True,
    )
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
  ),
  *(
    _overlap(f'xla_gpu_enable_pipelined_{kind}', True, _PIPELINE, _TOOLBOX)
    for kind in ('all_gather', 'reduce_scatter', 'all_reduce')
  ),
  _overlap(
    'xla_gpu_enable_while_loop_unrolling',
    'WHILE_LOOP_UNROLLING_DOUBLE_BUFFER',
    'Two layers per iteration, so that a collective of one meets the matmuls of the '
    'other without copies.',
    _XLA_PROTO,
  ),
  _overlap(
    'xla_gpu_threshold_for_windowed_einsum_mib',
    0,
    'Cuts a matmul with its all-gather or reduce-scatter into pieces that overlap, at any size.',
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
  Setting(
    'compile_option',
    'xla_gpu_enable_command_buffer',
    'FUSION,CUSTOM_CALL',
    _FAST,
    'Only fusions and library calls go into CUDA graphs: collectives inside of a graph do '
    'not overlap on this GPU.',
    _TOOLBOX,
    generations=('b200',),
  ),
  Setting(
    'compile_option',
    'xla_gpu_enable_command_buffer',
    '',
    ('safe',),
    'No CUDA graphs: a failing kernel is named, and a profile shows each.',
    _TOOLBOX,
  ),
  Setting(
    'compile_option',
    'xla_gpu_enable_triton_gemm',
    False,
    ('safe', 'deterministic'),
    'Matmuls by cuBLASLt only: faster to compile, and nothing to autotune but a library.',
    _TOOLBOX,
  ),
  Setting(
    'compile_option',
    'xla_gpu_deterministic_ops',
    True,
    ('deterministic',),
    'No kernels that add in the order of arrival, and no autotuning, whose choice may '
    'differ from run to run. Costs speed.',
    _XLA_PROTO,
  ),
  Setting(
    'xla_flag',
    'xla_gpu_first_collective_call_terminate_timeout_seconds',
    600,
    _ALL,
    'XLA ends the process when the GPUs of a process do not meet at their first collective '
    'within 40 s, which autotuning of a large program can take.',
    _XLA,
    several_gpus=True,
  ),
  Setting(
    'xla_flag',
    'xla_gpu_nccl_terminate_on_error',
    True,
    _ALL,
    'An NCCL error ends the process, so that the scheduler can act. Without it, jobs have '
    'waited for hours in the next collective.',
    _HANG,
    hosts='several',
  ),
  Setting(
    'env',
    'XLA_CLIENT_MEM_FRACTION',
    0.9,
    ('default', 'max_overlap', 'deterministic'),
    "Of the GPU's memory for XLA, against 0.75 by default. The rest is for CUDA, cuBLAS, "
    "cuDNN and NCCL's buffers.",
    _TOOLBOX,
    generations=GENERATIONS,
    hosts='one',
  ),
  Setting(
    'env',
    'XLA_CLIENT_MEM_FRACTION',
    0.85,
    ('default', 'max_overlap', 'deterministic'),
    'As on one host, with room for the network buffers of NCCL, which reports a lack of '
    'memory as "unhandled system error".',
    _NCCL_MEMORY,
    generations=GENERATIONS,
    hosts='several',
  ),
  Setting(
    'env',
    'CUDA_DEVICE_MAX_CONNECTIONS',
    '1',
    _FAST,
    'Kernels start in the order in which they were queued: a collective is not kept '
    'waiting by the matmul that should hide it. Not for Blackwell.',
    _TOOLBOX,
    generations=('h100', 'h200'),
    several_gpus=True,
  ),
  Setting(
    'env',
    'CUDA_DEVICE_MAX_CONNECTIONS',
    '1',
    _FAST,
    'As on Hopper, where parameters or activations travel in every layer.',
    _MEGATRON,
    generations=('a100',),
    axes=('fsdp', 'context', 'model'),
    several_gpus=True,
  ),
  Setting(
    'env',
    'NCCL_DEBUG',
    'WARN',
    _ALL,
    'NCCL says why it failed; it is silent by default. Nothing is printed when all is well.',
    _NCCL_LOGS,
    several_gpus=True,
  ),
  Setting(
    'env',
    'NCCL_ALGO',
    '^NVLS',
    ('deterministic',),
    'No sums inside of the NVLink switch, whose order is not ours to know.',
    _MEGATRON,
    generations=_HOPPER_ON,
    several_gpus=True,
  ),
)

# What others set and we leave alone, and why: part of the page, so that nobody has to guess.
LEFT_ALONE: Mapping[str, str] = {
  'NCCL_NVLS_ENABLE': 'NCCL finds out by itself whether the switch can add (and must not with '
  f'some cloud fabrics). See {_NCCL}',
  'NCCL_IB_*, NCCL_SOCKET_IFNAME, NCCL_NET, NCCL_PROTO': "they belong to a cluster's network, "
  'not to a model: set them in the job script.',
  'xla_gpu_enable_highest_priority_async_stream, combine_by_dim': 'already the default.',
  'xla_disable_hlo_passes=rematerialization': 'no effect on the programs measured here.',
  'xla_gpu_memory_limit_slop_factor': 'a remedy for programs that almost fit; not a default.',
}


@dataclasses.dataclass(frozen=True)
class XlaPreset:
  """What one preset sets on one kind of machine, by the way in which it is set.

  Attributes:
    name: of the preset.
    generation: 'h200', '' for a GPU that the table does not know, None for no GPU.
    compile_options: for `lowered.compile(compiler_options=...)`, in the spelling of jax 0.10; see
      `xla_flags.compile_options`.
    xla_flags: name (without dashes) -> value, for the variable XLA_FLAGS.
    env: further environment variables.
    jax_config: for `jax.config.update`.
    settings: the rows of the table, for their reasons.
  """

  name: str
  generation: Optional[str]
  compile_options: Mapping[str, Value]
  xla_flags: Mapping[str, Value]
  env: Mapping[str, str]
  jax_config: Mapping[str, Value]
  settings: tuple[Setting, ...]


def check_preset(name: str) -> None:
  """Raises ConfigError unless `name` is a preset."""
  if name not in PRESETS:
    raise ConfigError(
      f'{name!r} is not an XLA preset.{did_you_mean(name, PRESETS)}',
      fix='Presets:\n' + '\n'.join(f'  {k}: {v}' for k, v in PRESETS.items()),
      docs='xla_flags.md',
    )


def generation(device_kind: Optional[str]) -> Optional[str]:
  """Returns the row name of a GPU: 'h100', or '' for a kind without one; None for None.

  Args:
    device_kind: as the driver calls it ('NVIDIA H100 80GB HBM3'), or the row name itself.
  """
  if device_kind is None:
    return None
  # Relatives share the die of one in the table: less NVLink, memory or clock, the same behaviour.
  for pattern, name in (
    (r'A[18]00', 'a100'),
    (r'H[18]00|GH200|H20', 'h100'),
    (r'H200', 'h200'),
    (r'G?B[123]00', 'b200'),
  ):
    if re.search(rf'(?<![A-Z0-9])({pattern})(?![0-9])', device_kind, re.IGNORECASE):
      return name
  return ''


def select(
  preset: str = 'default',
  *,
  gpu: Optional[str] = None,
  num_hosts: int = 1,
  num_gpus: Optional[int] = None,
  mesh_axes: Collection[str] = (),
  layer_bytes: Optional[int] = None,
) -> XlaPreset:
  """Returns the settings of a preset for one kind of machine.

  Args:
    preset: one of `PRESETS`.
    gpu: device kind or generation; None for a machine without GPU, for which nothing is set.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, all hosts together; None for "several".
    mesh_axes: mesh axes larger than 1, as far as they are known.
    layer_bytes: of the parameters of one layer as they are gathered; None for the least size.
  Raises:
    ConfigError: no such preset.
  """
  check_preset(preset)
  kind = generation(gpu)
  rows = (
    []
    if kind is None
    else [
      row
      for row in TABLE
      if preset in row.presets
      and _applies(row, kind=kind, num_hosts=num_hosts, num_gpus=num_gpus, mesh_axes=mesh_axes)
    ]
  )
  most = MOST_COMBINED_BYTES.get(kind or '', LEAST_COMBINED_BYTES)
  combined = min(max(layer_bytes or 0, LEAST_COMBINED_BYTES), most)
  rows = [
    dataclasses.replace(row, value=combined) if row.value == ONE_LAYER else row for row in rows
  ]

  def of_kind(wanted: str) -> dict[str, Value]:
    return {row.name: row.value for row in rows if row.kind == wanted}

  return XlaPreset(
    name=preset,
    generation=kind,
    compile_options=of_kind('compile_option'),
    xla_flags=of_kind('xla_flag'),
    jax_config=of_kind('jax_config'),
    env={k: str(v) for k, v in of_kind('env').items()},
    settings=tuple(rows),
  )


def _applies(
  row: Setting, *, kind: str, num_hosts: int, num_gpus: Optional[int], mesh_axes: Collection[str]
) -> bool:
  several_gpus = num_hosts > 1 or num_gpus is None or num_gpus > 1
  return (
    (not row.generations or kind in row.generations)
    and row.hosts in ('any', 'several' if num_hosts > 1 else 'one')
    and (not row.axes or bool(set(row.axes) & set(mesh_axes)))
    and (several_gpus or not row.several_gpus)
  )
