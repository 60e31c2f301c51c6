"""Presets of XLA, NCCL and memory settings: `TABLE`, `select` from it, and the table as text.

XLA options come in two forms, for a reason. A *compile option* is passed to `.compile()` of one
executable: an unknown name is a Python error instead of the end of the process, and the option is
in the key of the compilation cache. An *XLA flag* (in XLA_FLAGS) is for settings that XLA reads at
run time. Nothing here touches the machine or jax: `flags.py` merges the result with the user's
settings and with what the installed jaxlib knows. scripts/docs_tables.py makes docs/xla_flags.md.
"""

import dataclasses
import itertools
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Optional, Union

from t5x_gpu.errors import ConfigError, did_you_mean
from t5x_gpu.terminal.console import show
from t5x_gpu.terminal.flag_types import MIB

Value = Union[bool, int, float, str]

GENERATIONS = ('a100', 'h100', 'h200', 'b200')
_HOPPER_ON = ('h100', 'h200', 'b200')
_FAST = ('default', 'max_overlap')
_ALL = ('safe', 'default', 'max_overlap', 'deterministic')

ONE_LAYER = 'one layer'  # replaced by a number of bytes in `select`
LARGE_LAYER_BYTES = 100 * 2**20

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
    axes: applies only to meshes that split one of these axes; empty for any mesh.
    without_axes: mesh axes that must all have size 1.
    layers_ahead: True if it applies to loops over layers that communicate one layer ahead
      (partitioning/overlap.py), False if to other loops; None for both.
    large_layers: True if it applies to models whose layers have at least LARGE_LAYER_BYTES, False
      if to others; None for both.
    by_layer: whether it applies only to accumulation by layer.
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
  large_layers: Optional[bool] = None
  by_layer: bool = False
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
  XlaSetting(
    'compile_option',
    'xla_gpu_memory_limit_slop_factor',
    300,
    _FAST,
    'XLA counts what a loop carries twice. Where it counts more than 95% of its limit, it stops '
    'hiding collectives and computes kernels again, for 1 GiB or less. Llama-3 8B on 8 H100, 16 x '
    '8192 with `dots`, takes 66 of 71 GiB: with 95%, 49% of the gathered and 2% of the '
    'reduce-scattered bytes are hidden instead of 98 and 96%, and elementwise kernels move 20% '
    'more.',
    _XLA_PROTO,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_dot_merger_threshold_mb',
    0,
    ('default', 'max_overlap'),
    'XLA would merge the projections of queries, keys and values into one matmul and slice its '
    'result, and so with their float32 gradients: 8 GB per step of Llama-3 8B on 8 H100.',
    _XLA,
  ),
  XlaSetting(
    'compile_option',
    'xla_gpu_enable_dynamic_slice_fusion',
    False,
    ('default', 'max_overlap'),
    "XLA of jax 0.11 fuses a kernel with the copy of its result into a loop's stack, and runs the "
    'kernel once more for its other users: attention twice, 7.0 of 292 ms of a 1.3B decoder on an '
    'H200.',
    _XLA,
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
    'Llama-3.2 1B on 8 H100 hid 85% of the gathered bytes, 62% without (2026-11-23).',
    _TOOLBOX,
    generations=GENERATIONS,
    hosts='one',
    layers_ahead=True,
    several_gpus=True,
  ),
  *(
    XlaSetting(
      'compile_option',
      'xla_disable_hlo_passes',
      passes,
      ('default',),
      'The loop over layers communicates one layer ahead. O1 would move its collectives one layer '
      f'further: on 64 GPUs (hsdp) the sums of three layers then wait for the end. {buffers}',
      _XLA,
      layers_ahead=True,
      large_layers=large_layers,
      axes=axes,
      without_axes=('stage', 'context', 'expert', 'model', *without),
      several_gpus=True,
    )
    for large_layers, axes, without, passes, buffers in (
      (
        True,
        (),
        (),
        'collective-pipeliner-backward,collective-pipeliner-forward',
        'Double buffering stays on: without it, each iteration copies the gathered weights (26 GB '
        'per step of Llama-3 8B on 8 H100, in FP8 55 GB).',
      ),
      (
        False,
        (),
        ('fsdp',),
        'collective-pipeliner-backward,collective-pipeliner-forward',
        'Double buffering stays on: without it, GPT-2 XL in `dp` copies 18 GB per step.',
      ),
      (
        False,
        ('fsdp',),
        (),
        'collective-pipeliner-backward,collective-pipeliner-forward,loop-double-buffer-transformer',
        'With double buffering, XLA hides 32% instead of 92% of the gathers of a 134M decoder.',
      ),
    )
  ),
  *(
    XlaSetting(
      'compile_option',
      'xla_gpu_enable_while_loop_unrolling',
      'WHILE_LOOP_UNROLLING_DOUBLE_BUFFER',
      ('default',),
      f'{where}. O1 chooses by itself, and XLA then ends the process (hlo_alias_analysis.cc, jax '
      f'0.10.2) {crashes}.',
      _XLA_PROTO,
      several_gpus=True,
      **applies,
    )
    for where, crashes, applies in (
      (
        'Two ticks of a pipeline per iteration',
        'in `pp` with overlap_layers',
        {'axes': ('stage',)},
      ),
      (
        'Two layers per iteration',
        'in `hsdp` with four microbatches',
        {'axes': ('data',), 'without_axes': ('stage',), 'by_layer': True},
      ),
    )
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
  'xla_disable_hlo_passes=rematerialization': 'without effect under '
  'xla_gpu_memory_limit_slop_factor=300.',
}


PRESETS = {
  'safe': 'XLA with fewer custom kernels: to check whether a setting causes a bug',
  'default': 'overlaps communication with computation, as NVIDIA and the JAX authors advise',
  'max_overlap': 'default plus every further overlap that XLA offers: measure before you keep it',
  'deterministic': 'default without its optimizations; a program gives the same bits on every run',
  'none': 'sets nothing; your own XLA_FLAGS are still checked',
}
# A combined collective is as large as one layer, within these bounds. Below, latency dominates;
# above, no computation is left to overlap with it.
LEAST_COMBINED_BYTES = 128 * MIB  # across hosts
XLA_COMBINED_BYTES = 30 * MIB  # XLA's default, enough inside a host
MOST_COMBINED_BYTES = {
  'a100': 1024 * MIB,
  'h100': 1024 * MIB,
  'h200': 1024 * MIB,
  'b200': 2048 * MIB,
}


@dataclasses.dataclass(frozen=True)
class XlaPreset:
  """The settings of one preset on one kind of machine, grouped by how they are set.

  Attributes:
    name: name of the preset.
    generation: 'h200', '' for a GPU that the table does not know, None for no GPU.
    compile_options: for `lowered.compile(compiler_options=...)`, as jax 0.10 spells them; see
      `flags.compile_options`.
    xla_flags: name (without dashes) -> value, for the variable XLA_FLAGS.
    env: other environment variables.
    jax_config: values for `jax.config.update`.
    settings: rows of the table, for their reasons.
  """

  name: str
  generation: Optional[str]
  compile_options: Mapping[str, Value]
  xla_flags: Mapping[str, Value]
  env: Mapping[str, str]
  jax_config: Mapping[str, Value]
  settings: tuple[XlaSetting, ...]


def check_preset(name: str) -> None:
  """Raises ConfigError unless `name` is a preset."""
  if name not in PRESETS:
    raise ConfigError(
      f'{name!r} is not an XLA preset.{did_you_mean(name, PRESETS)}',
      fix='Presets:\n' + '\n'.join(f'  {k}: {v}' for k, v in PRESETS.items()),
      docs='xla_flags.md',
    )


def generation(device_kind: Optional[str]) -> Optional[str]:
  """Returns the table's name for a GPU, 'h100'; '' for an unknown kind, None for None.

  Args:
    device_kind: the driver's name ('NVIDIA H100 80GB HBM3'), or the table's name itself.
  """
  if device_kind is None:
    return None
  # Variants share the die of a GPU in the table, with less NVLink, memory or clock.
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
  layers_ahead: bool = False,
  by_layer: bool = False,
) -> XlaPreset:
  """Returns the settings of a preset for one kind of machine.

  Args:
    preset: one of `PRESETS`.
    gpu: device kind or generation; None for a machine without GPU, where nothing is set.
    num_hosts: hosts of the run.
    num_gpus: GPUs of the run, all hosts together; None for "several".
    mesh_axes: mesh axes larger than 1, if known.
    layer_bytes: size of one layer's gathered parameters; None for the smallest bound.
    layers_ahead: whether loops over layers communicate one layer ahead.
    by_layer: whether gradients accumulate layer by layer.
  Raises:
    ConfigError: no such preset.
  """
  check_preset(preset)
  kind = generation(gpu)
  rows = [
    row
    for row in TABLE
    if kind is not None
    and preset in row.presets
    and row.layers_ahead in (None, layers_ahead)
    and (by_layer or not row.by_layer)
    and row.large_layers in (None, (layer_bytes or 0) >= LARGE_LAYER_BYTES)
    and _applies(row, kind=kind, num_hosts=num_hosts, num_gpus=num_gpus, mesh_axes=mesh_axes)
  ]
  most = MOST_COMBINED_BYTES.get(kind or '', LEAST_COMBINED_BYTES)
  least = LEAST_COMBINED_BYTES if num_hosts > 1 else XLA_COMBINED_BYTES
  combined = min(max(layer_bytes or 0, least), most)
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
  row: XlaSetting, *, kind: str, num_hosts: int, num_gpus: Optional[int], mesh_axes: Collection[str]
) -> bool:
  several_gpus = num_hosts > 1 or num_gpus is None or num_gpus > 1
  return (
    (not row.generations or kind in row.generations)
    and row.hosts in ('any', 'several' if num_hosts > 1 else 'one')
    and (not row.axes or bool(set(row.axes) & set(mesh_axes)))
    and not set(row.without_axes) & set(mesh_axes)
    and (several_gpus or not row.several_gpus)
  )


KINDS = {
  'compile_option': 'Compile options: passed to `.compile()` of each program',
  'jax_config': 'jax.config',
  'xla_flag': 'XLA_FLAGS: read while programs run',
  'env': 'Environment variables',
}


def preset_table() -> str:
  """Returns the table for a terminal: a line per setting, with its reason below."""
  lines = [f'{name:14}{text}' for name, text in PRESETS.items()]
  for kind, title in KINDS.items():
    lines += ['', title]
    for names, row in settings_alike(kind):
      lines += [f'  {name}={shown_setting(row)}' for name in names]
      lines += [
        f'      {", ".join(row.presets)}; {where_set(row)}',
        f'      {row.reason}',
        f'      {row.source}',
      ]
  return '\n'.join(lines) + '\n'


def settings_alike(kind: str) -> Iterator[tuple[list[str], XlaSetting]]:
  """Yields the names of rows that are equal except for the name, and one of these rows."""
  rows = (row for row in TABLE if row.kind == kind)
  for _, group in itertools.groupby(rows, lambda row: dataclasses.replace(row, name='')):
    group = list(group)
    yield [row.name for row in group], group[0]


def shown_setting(row: XlaSetting) -> str:
  return row.value if row.value == ONE_LAYER else f'{row.value}' or "''"


def where_set(row: XlaSetting) -> str:
  parts = [', '.join(row.generations).upper() or 'every GPU']
  if row.hosts != 'any':
    parts.append(f'{row.hosts} host{"s" if row.hosts == "several" else ""}')
  elif row.several_gpus:
    parts.append('several GPUs')
  if row.axes:
    parts.append(f'mesh axis {" or ".join(row.axes)}')
  if row.without_axes:
    parts.append(f'without {" and ".join(row.without_axes)}')
  if row.layers_ahead is not None:
    parts.append('with overlap_layers' if row.layers_ahead else 'without overlap_layers')
  if row.large_layers is not None:
    size = f'{show(LARGE_LAYER_BYTES, MiB=".0f")} of parameters in bfloat16'
    parts.append(
      f'layers of at least {size}' if row.large_layers else f'layers of less than {size}'
    )
  if row.by_layer:
    parts.append('accumulation by layer')
  return ', '.join(parts)
