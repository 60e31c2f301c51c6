"""A prediction as text: the first screen, and the tables below it."""

import math
from collections.abc import Mapping

from t5x_gpu.planning import bottleneck
from t5x_gpu.planning.devices import GPUS_PER_HOST
from t5x_gpu.planning.formulas.memory import (
  FRAGMENTATION,
  GRADIENTS,
  LAYER,
  LOSS,
  PARAMETERS,
  STACK,
  WEIGHTS,
  MemoryUse,
)
from t5x_gpu.planning.formulas.step_time import StepTime
from t5x_gpu.planning.prediction import COMPILED, FORMULA, Prediction
from t5x_gpu.runtime.memory import show
from t5x_gpu.terminal.quantities import count, duration, seconds
from t5x_gpu.terminal.text_table import table

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
    bottleneck.sentence(p),
  ]
  return '\n'.join([*lines, *caveats(p)])


def caveats(p: Prediction) -> list[str]:
  """Returns caveats about the figures: their sources, and what they leave out."""
  return [*filter(None, [CAVEATS[p.source], gpu_caveat(p)])]


def gpu_caveat(p: Prediction) -> str:
  """Returns what a plan does not model for this kind of GPU, or ''."""
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


def fits_cell(memory: MemoryUse) -> str:
  """Returns 'yes' or 'no: 48.29 GiB too much', the cell of a table."""
  return 'yes' if memory.fits else f'no: {left(memory)}'


def tables(p: Prediction) -> str:
  """Returns parameters, memory, time and traffic by part, the checkpoint, the assumptions."""
  return '\n\n'.join(
    [
      'Parameters\n' + table(parameter_rows(p), right=(1, 2)),
      'Memory per GPU\n' + table(memory_rows(p.memory), right=(1,)),
      'Time per step on a GPU\n' + table(time_rows(p.time), right=(2, 3, 4, 5)),
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
  return f'{num_bytes / 2**20:,.1f}'


def _ms(value: float) -> str:
  return f'{value * 1e3:,.2f}'
