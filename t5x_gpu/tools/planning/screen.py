"""A prediction as text and JSON: the first screen, the sentence on the bottleneck, the tables."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

from t5x_gpu.storage.json_schema import JsonObject
from t5x_gpu.terminal.console import count, duration, mib, seconds, show, table
from t5x_gpu.tools.planning.devices import GPUS_PER_HOST
from t5x_gpu.tools.planning.formulas.step_memory import (
  FRAGMENTATION,
  GRADIENTS,
  LAYER,
  LOSS,
  PARAMETERS,
  STACK,
  WEIGHTS,
  MemoryUse,
)
from t5x_gpu.tools.planning.formulas.step_time import NETWORK, StepTime
from t5x_gpu.tools.planning.formulas.work import (
  ATTENTION,
  MODEL,
  OPTIMIZER,
  STORED,
  WEIGHTS_AND_GRADIENTS,
)
from t5x_gpu.tools.planning.prediction import (
  COMPILED,
  FORMULA,
  MICROBATCHES,
  PIPELINE,
  REMAT,
  Prediction,
)

# Below this share of the step, no cost is worth removing, except the matrix products' own time.
_WORTH = 0.05


@dataclasses.dataclass(frozen=True)
class Cost:
  """A part of the step that a change could remove.

  Attributes:
    what: the cost in words, as the subject of a sentence.
    seconds: seconds per step.
    remedy: change that would reduce it.
  """

  what: str
  seconds: float
  remedy: str


_REMEDIES = {
  'data': 'more tokens per GPU and step, or fewer replicas, make it a smaller share',
  'fsdp': 'more tokens per GPU and step',
  'model': 'fewer NUM_PARTITIONS, with Partitioner.fsdp in its place',
  'context': 'fewer Partitioner.context, if the rows fit',
  'expert': 'fewer Partitioner.expert, with Partitioner.fsdp in its place',
  'stage': 'fewer stages, or several blocks per stage (circular)',
}
_RECOMPUTATION = {
  REMAT: "a remat_policy that stores more ('attention', 'minimal', 'dots'), where memory is left",
  PIPELINE: 'a layout without pipeline stages, which recompute layers with every remat_policy',
  MICROBATCHES: 'fewer NUM_MICROBATCHES, or '
  "Partitioner.accumulate_by = 'microbatch', which gathers parameters for each microbatch",
}


def costs(prediction: Prediction) -> list[Cost]:
  """Returns the costs of a step besides its necessary work, largest first."""
  return sorted(_costs(prediction), key=lambda cost: -cost.seconds)


def bottleneck_sentence(prediction: Prediction) -> str:
  """Returns a sentence on what limits the step and what removing it would save."""
  total = prediction.seconds_per_step
  found = costs(prediction)
  if found and found[0].seconds >= _WORTH * total:
    worst = found[0]
    rest = total - worst.seconds
    faster = f' ({total / rest:.2f}x as fast)' if rest > 0 else ''
    return (
      f'{worst.what} takes {seconds(worst.seconds)}, {worst.seconds / total:.0%} of the step: '
      f'without it, {seconds(rest)} per step{faster}. To reduce it: {worst.remedy}.'
    )
  gemms, attention = (
    sum(part.seconds for part in prediction.time.parts if kind in part.kind)
    for kind in ('gemm', 'attention')
  )
  largest, needed = f'Matrix products take {gemms / total:.0%}', _faster_dtype(prediction)
  if attention > gemms:
    largest, needed = f'Attention takes {attention / total:.0%}', 'shorter rows, '
  return (
    f'{largest} of the step, and nothing else that a setting could remove takes {_WORTH:.0%}: '
    f'a faster step needs {needed}a faster GPU or more of them.'
  )


def _faster_dtype(prediction: Prediction) -> str:
  """Returns the precision that would be faster on this GPU, to begin a list with, or ''."""
  if any(part.part == MODEL for part in prediction.time.parts):
    return ''  # a custom model has its own precision
  if prediction.dtype == 'float32':
    return 'bfloat16, '
  return 'FP8, ' if prediction.dtype == 'bfloat16' and prediction.gpu.has_fp8 else ''


def _costs(prediction: Prediction) -> Iterator[Cost]:
  time = prediction.time
  by_axes: dict[tuple[tuple[str, ...], str], float] = {}
  for c in time.collectives:
    key = c.axes, c.link
    by_axes[key] = by_axes.get(key, 0.0) + c.exposed_seconds
  for (axes, link), exposed in by_axes.items():
    remedy = _REMEDIES[axes[0]]
    if axes[0] == 'fsdp' and link == NETWORK and prediction.num_gpus > prediction.num_hosts:
      remedy += ', or fsdp inside a host with data across hosts (hsdp.gin)'
    yield Cost(f'Waiting for collectives over {" and ".join(axes)} ({link})', exposed, remedy)
  if time.bubble_seconds:
    yield Cost(
      'The bubble of the pipeline',
      time.bubble_seconds,
      'more Partitioner.num_pipeline_microbatches, or fewer stages',
    )
  again = sum(part.recomputed_seconds for part in time.parts)
  if again:
    yield Cost(
      'Computing layers again in the backward pass',
      again,
      _RECOMPUTATION[prediction.recomputes_for],
    )
  attention = [p for p in time.parts if p.part == ATTENTION and p.bound == 'memory']
  if attention:
    slow = next(choice for choice in prediction.attention if choice.no_kernel)
    yield Cost(
      f'Attention without a kernel, whose logits go through memory ({slow.no_kernel}),',
      attention[0].seconds,
      slow.remedy,
    )
  moved = [p for p in time.parts if p.bound == 'memory' and p.part != ATTENTION]
  update = sum(p.seconds for p in moved if p.part in (OPTIMIZER, WEIGHTS_AND_GRADIENTS))
  if update:
    yield Cost(
      'Reading and writing weights, gradients and optimizer state',
      update,
      'more tokens per step, or splitting them over more GPUs (Partitioner.fsdp)',
    )
  stacks = sum(p.seconds for p in moved if p.part == STORED)
  if stacks:
    yield Cost(
      'Copying what layers store into and out of the stacks of their loop',
      stacks,
      'a remat_policy that stores less, or, where memory is left, no loop '
      '(TransformerConfig.scan_unroll = all layers), which takes longer to compile',
    )
  launch = sum(p.launch_seconds for p in time.parts)
  if launch:
    yield Cost(
      'Starting kernels that are too small for this GPU',
      launch,
      'more tokens per GPU and pass, or fewer GPUs',
    )


NOT_AT_PEAK = 'not at the peak'
# Freed before the moment of peak memory, or not allocated yet.
OFTEN_ABSENT = (GRADIENTS, LAYER, WEIGHTS, LOSS)
NO_TRAFFIC = 'nothing: one GPU, or all GPUs do the same work'
CAVEATS = {
  COMPILED: '',
  FORMULA: 'Nothing was compiled: memory, bytes and overlap are formulas (docs/plan.md#checks).',
  'partitioned': 'The CUDA plugin of JAX is not installed, so nothing was compiled for the GPU: '
  "bytes come from XLA's partitioner, memory and overlap from formulas. For XLA's own figures: "
  "pip install 't5x_gpu[plan]'.",
}


def first_screen(p: Prediction) -> str:
  """Returns whether the run fits, how fast it is, when it ends, and what limits it."""
  mesh = ' x '.join(f'{axis} {size}' for axis, size in p.mesh.items()) or 'one device'
  lines = [
    f'{p.num_params:,} parameters on {p.num_gpus} x {p.gpu.device_kind} '
    f'({p.num_hosts} host{"s" * (p.num_hosts > 1)}): {mesh}',
    fits_line(p.memory),
    f'{seconds(p.seconds_per_step)} per step, {p.tokens_per_second:,.0f} tokens/s '
    f'({p.tokens_per_second / p.num_gpus:,.0f} per GPU), {p.flops_per_gpu / 1e12:,.0f} TFLOP/s per '
    f'GPU, MFU {_percent(p.mfu)} of {p.dtype}',
    f'{p.total_steps:,} steps of {p.tokens_per_step:,} tokens: {count(p.total_tokens)} tokens in '
    f'{duration(p.days)}, {gpu_hours(p)} GPU hours',
    bottleneck_sentence(p),
  ]
  return '\n'.join([*lines, *caveats(p)])


def caveats(p: Prediction) -> list[str]:
  """Returns caveats about the figures: their sources and omissions."""
  return [*filter(None, [CAVEATS[p.source], gpu_caveat(p)])]


def gpu_caveat(p: Prediction) -> str:
  """Returns the limits of a plan's model for this kind of GPU, or ''."""
  domain, each = p.gpu.nvlink_domain, p.num_gpus // p.num_hosts
  if domain <= max(each, GPUS_PER_HOST):
    return ''
  return (
    f'{p.gpu.device_kind}: hosts of {each} with NVLink inside are assumed (--gpus_per_host). '
    f'NVLink between the hosts of a rack of {domain} (NVL{domain}) is not modelled.'
  )


def fits_line(memory: MemoryUse) -> str:
  """Returns a line: whether a step fits, memory needed and available, memory left or missing."""
  verdict = 'FITS' if memory.fits else 'DOES NOT FIT'
  return (
    f'{verdict}: needs {show(memory.needed_bytes)} per GPU, has {show(memory.pool_bytes)}: '
    f'{left(memory)} (XLA manages {memory.pool_bytes / memory.gpu_bytes:.0%} of '
    f'{show(memory.gpu_bytes)}; NCCL, cuBLAS and CUDA get the rest)'
  )


def left(memory: MemoryUse) -> str:
  """Returns '25.70 GiB to spare' or '48.29 GiB too much'."""
  return f'{show(abs(memory.left_bytes))} {"to spare" if memory.fits else "too much"}'


def tables(p: Prediction) -> str:
  """Returns parameters, memory, time and traffic by part, the checkpoint, the assumptions."""
  return '\n\n'.join(
    [
      'Parameters\n' + table(parameter_rows(p), right=(1, 2)),
      'Memory per GPU\n' + table(memory_rows(p.memory), right=(1,)),
      'Time per step on a GPU\n'
      + table(time_rows(p.time), right=(2, 3, 4, 5))
      + elementwise_text(p),
      'What a GPU sends per step\n'
      + (table(traffic_rows(p), right=(3, 4, 5, 7)) if p.time.collectives else NO_TRAFFIC),
      f'A checkpoint has {show(p.checkpoint.num_bytes)}; writing one takes '
      f'{p.checkpoint.seconds:,.0f} s at {p.assumed.save_gigabytes:g} GB/s per host, while the run '
      'continues.',
      'Assumptions (--gin.Assumptions.NAME=VALUE)\n' + table(assumption_rows(p)),
    ]
  )


def parameter_rows(p: Prediction) -> list[tuple[str, ...]]:
  """Returns a header, and the parts of the model, largest first."""
  rows = [('part', 'parameters', 'share')]
  return rows + [(n, f'{v:,}', f'{v / p.num_params:.0%}') for n, v in p.params_by_part.items()]


def memory_rows(memory: MemoryUse) -> list[tuple[str, ...]]:
  """Returns a header, and the components by formula next to XLA's allocation."""
  compiled = memory.compiled
  compiled_cells = {}
  if compiled is not None:
    compiled_cells = {
      PARAMETERS: f'{_mib(compiled.argument_bytes)} parameters, optimizer state and batch',
      GRADIENTS: f'{_mib(compiled.temporary_bytes)} temporaries: everything below',
    }
  order = [*(n for n in memory.components if n != FRAGMENTATION)]
  rows = [('component', 'MiB by formula', 'MiB as compiled')]
  for name in order:
    size = memory.components[name]
    if size or name != STACK:
      absent = not size and name in OFTEN_ABSENT
      rows.append((name, NOT_AT_PEAK if absent else _mib(size), compiled_cells.get(name, '')))
  if compiled:
    rows.append(("kernels' workspaces", '', f'{_mib(compiled.workspace_bytes)} of the temporaries'))
  total = _mib(compiled.total_bytes) if compiled else 'not compiled'
  rows.append(('total at the peak', _mib(memory.formula_bytes), total))
  rows.append(('reserve for fragmentation', _mib(memory.components[FRAGMENTATION]), ''))
  outside = memory.gpu_bytes - memory.pool_bytes
  return [*rows, ("outside XLA's pool: NCCL, cuBLAS, CUDA", _mib(outside), 'not in the total')]


def time_rows(time: StepTime) -> list[tuple[str, ...]]:
  """Returns table rows: header, computation by part, exposed communication, total."""
  total = time.seconds
  rows = [('part', 'kernels', 'ms', 'share', 'TFLOP', 'GB', 'bound by')]
  for part in time.parts:
    again = part.recomputed_seconds / part.seconds if part.seconds else 0
    rows.append(
      (
        part.part,
        part.kind,
        _ms(part.seconds),
        f'{part.seconds / total:.0%}',
        f'{part.flops / 1e12:,.2f}' if part.flops else '',
        f'{part.num_bytes / 1e9:,.2f}',
        part.bound + (f', {again:.0%} recomputed' if again else ''),
      )
    )
  waits = time.exposed_seconds
  rows.append(('waiting for collectives', '', _ms(waits), f'{waits / total:.0%}', '', '', ''))
  if time.bubble_seconds:
    share = f'{time.bubble_seconds / total:.0%}'
    rows.append(('pipeline bubble', '', _ms(time.bubble_seconds), share, '', '', ''))
  flops, num_bytes = (
    f'{math.fsum(getattr(part, name) for part in time.parts) / size:,.2f}'
    for name, size in (('flops', 1e12), ('num_bytes', 1e9))
  )
  return [*rows, ('step', '', _ms(total), '100%', flops, num_bytes, '')]


def elementwise_text(p: Prediction) -> str:
  """Returns what elementwise kernels read and write by part, as compiled; '' if it was not."""
  if p.elementwise_bytes is None:
    return ''
  compiled, formula = (
    f'{show(num_bytes, GB=".1f")} ({seconds(_moving(p, num_bytes))})'
    for num_bytes in (p.elementwise_bytes, p.formula_elementwise_bytes)
  )
  return (
    f'\n\nReading and writing outside of matrix kernels: {compiled} as compiled, which the times '
    f'above follow; {formula} by formula\n' + table(elementwise_rows(p), right=(1, 2, 3))
  )


def elementwise_rows(p: Prediction) -> list[tuple[str, ...]]:
  """Returns a header, and bytes and largest kernels of each part of the model, as compiled."""
  rows = [('part', 'GB by formula', 'GB as compiled', 'ms', 'largest kernels')]
  for part in p.elementwise_kernels:
    largest = (
      f'{row.place} {row.result}: {show(row.num_bytes, GB=",.2f")} '
      f'({seconds(_moving(p, row.num_bytes))})'
      for row in part.largest
    )
    sizes = (f'{size / 1e9:,.2f}' for size in (part.formula_bytes, part.num_bytes))
    rows.append((part.part, *sizes, _ms(_moving(p, part.num_bytes)), '; '.join(largest)))
  return rows


def _moving(p: Prediction, num_bytes: float) -> float:
  """Returns the seconds in which a GPU reads and writes `num_bytes`."""
  return num_bytes / (p.gpu.memory_bandwidth * p.assumed.memory_efficiency)


def traffic_rows(p: Prediction) -> list[tuple[str, ...]]:
  """Returns a header and the collectives: bytes by formula and compiled, link, time, hidden share.

  The hidden share refers to time. It may be smaller than the hidden share of the bytes in XLA's
  schedule, because the matrix kernels may be too short to hide all collectives behind them.
  """
  by_formula = {(s.kind, s.axes): s.num_bytes for s in p.formula_sent}
  rows = [('kind', 'mesh axis', 'link', 'MiB', 'MiB by formula', 'ms', 'hidden', 'ms exposed')]
  for c in sorted(p.time.collectives, key=lambda c: -c.num_bytes):
    if c.num_bytes < 2**10 and (c.kind, c.axes) not in by_formula:
      continue
    formula = by_formula.get((c.kind, c.axes))
    rows.append(
      (
        c.kind,
        '+'.join(c.axes),
        c.link,
        _mib(c.num_bytes),
        '-' if formula is None else _mib(formula),
        _ms(c.seconds),
        f'{1 - c.exposed_seconds / c.seconds:.0%}' + ('' if c.from_schedule else ' (assumed)'),
        _ms(c.exposed_seconds),
      )
    )
  return rows


def assumption_rows(p: Prediction) -> list[tuple[str, ...]]:
  """Returns a header, and every assumption with its value and source."""
  effective = p.assumed.effective(p.gpu).items()
  return [
    ('name', 'value', 'source of the value'),
    *((name, _assumed(e.value, p.mesh), e.source) for name, e in effective),
  ]


def _assumed(value: float | Mapping[str, float], mesh: Mapping[str, int]) -> str:
  if isinstance(value, Mapping):
    return ', '.join(f'{axis} {share:.3g}' for axis, share in value.items() if axis in mesh) or '-'
  return f'{value:.3g}' if value < 1000 else f'{value:,.0f}'


def gpu_hours(p: Prediction) -> str:
  """Returns the GPU hours of all steps."""
  hours = p.days * 24 * p.num_gpus
  return f'{hours:,.0f}' if hours >= 10 else f'{hours:.2g}'


def _percent(share: object) -> str:
  return 'unknown' if share is None else f'{share:.1%}'


def _mib(num_bytes: float) -> str:
  return mib(num_bytes, digits=1)


def _ms(value: float) -> str:
  return f'{value * 1e3:,.2f}'


def prediction_json(p: Prediction) -> JsonObject:
  """Returns all values of a prediction; seconds, bytes, FLOPs, and shares of 1."""
  memory, time = p.memory, p.time
  return {
    'gpu': p.gpu.name,
    'num_gpus': p.num_gpus,
    'num_hosts': p.num_hosts,
    'mesh': dict(p.mesh),
    'num_params': p.num_params,
    'params_by_part': dict(p.params_by_part),
    'recomputes_for': p.recomputes_for,
    'dtype': p.dtype,
    'source': p.source,
    'fits': memory.fits,
    'left_bytes': memory.left_bytes,
    'seconds_per_step': p.seconds_per_step,
    'tokens_per_step': p.tokens_per_step,
    'tokens_per_second': p.tokens_per_second,
    'model_flops_per_step': p.model_flops_per_step,
    'flops_per_gpu': p.flops_per_gpu,
    'peak_flops': p.peak_flops,
    'elementwise_bytes': p.elementwise_bytes,
    'formula_elementwise_bytes': p.formula_elementwise_bytes,
    'elementwise_kernels': [dataclasses.asdict(part) for part in p.elementwise_kernels],
    'mfu': p.mfu,
    'total_steps': p.total_steps,
    'total_tokens': p.total_tokens,
    'days': p.days,
    'bottleneck': bottleneck_sentence(p),
    'costs': [dataclasses.asdict(cost) for cost in costs(p)],
    'memory': {
      'components': dict(memory.components),
      'formula_bytes': memory.formula_bytes,
      'compiled': memory.compiled and dataclasses.asdict(memory.compiled),
      'needed_bytes': memory.needed_bytes,
      'pool_bytes': memory.pool_bytes,
      'gpu_bytes': memory.gpu_bytes,
    },
    'time': {
      'parts': [dataclasses.asdict(part) for part in time.parts],
      'collectives': [dataclasses.asdict(c) for c in time.collectives],
      'bubble_fraction': time.bubble_fraction,
      'bubble_seconds': time.bubble_seconds,
    },
    'sent_by_formula': [dataclasses.asdict(s) for s in p.formula_sent],
    'checkpoint': dataclasses.asdict(p.checkpoint),
    'assumptions': {
      name: effective._asdict() for name, effective in p.assumed.effective(p.gpu).items()
    },
  }
