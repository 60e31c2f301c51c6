"""The results as markdown tables, with the card, the versions and the commands."""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Optional

from benchmarks.gpu.parts import PARTS, Row
from benchmarks.gpu.shapes import SHAPES

GIB = 2**30


def line(name: str, result: Row) -> str:
  """Returns what happened to one part, for the terminal."""
  reason = f': {result["reason"]}' if result['reason'] else ''
  return f'{name}: {result["status"]}, {len(result["rows"])} rows, {result["seconds"]} s{reason}'


def table(results: Mapping[str, Row]) -> str:
  """Returns all tables; parts that did not finish are listed with the reason."""
  steps = _rows(results, *SHAPES)
  traced = [*steps, *_rows(results, 'traffic', 'loops'), *_presets(results)]
  blocks = [
    _head(results),
    _table(CEILINGS, _rows(results, 'ceilings')),
    _table(STEPS, _with_shares(steps, ceilings(results))),
    _table(PLANNED, [row for row in steps if 'plan' in row]),
    _table(TRAFFIC, _rows(results, 'traffic')),
    _table(LOOPS, _rows(results, 'loops')),
    _table(KINDS, [k for row in traced for k in _kinds(row)]),
    _table(KERNELS, [k for row in traced for k in _slowest(row)]),
    _table(OPTIONS, _rows(results, 'options')),
    _table(ATTENTION, _rows(results, 'attention')),
    _table(LOSSES, _rows(results, 'loss')),
    _table(SCALING, _rows(results, 'gpus')),
    _table(TUNED, _rows(results, 'tune')),
    _list('Skipped', results, ('skipped',)),
    _list('Not finished', results, ('missing', 'failed', 'killed', 'no GPU')),
  ]
  return '\n\n'.join(block for block in blocks if block)


def ceilings(results: Mapping[str, Row]) -> dict[str, float]:
  """Returns precision -> the highest TFLOP/s that any library reached in a matrix product."""
  best: dict[str, float] = {}
  for row in _rows(results, 'ceilings'):
    if row['what'] == 'matmul' and row.get('is_fp8_gemm', True) is not False:
      best[row['precision']] = max(best.get(row['precision'], 0.0), row['tflops'])
  return best


def _rows(results: Mapping[str, Row], *prefixes: str) -> list[Row]:
  """Returns the rows of the parts whose names begin so, in the order of PARTS."""
  return [
    {**row, 'part': part.name}
    for part in PARTS
    if part.name.startswith(prefixes)
    for row in results.get(part.name, {}).get('rows', [])
  ]


def _head(results: Mapping[str, Row]) -> str:
  """Returns card, versions and commit, one line for each set that differs."""
  seen: dict[str, list[str]] = {}
  for name, result in results.items():
    m = result['machine']
    versions = ', '.join(f'{k} {v}' for k, v in m['versions'].items() if v)
    where = 'tiny sizes on the CPU, to try the code: not results' if result['small'] else m['card']
    text = f'{where}, driver {m["driver"]}, Python {m["python"]}, {versions}, commit {m["commit"]}'
    seen.setdefault(text, []).append(name)
  if len(seen) == 1:
    return f'{next(iter(seen))}. Command: `scripts/bench_gpu.sh`.'
  return '\n'.join(f'- {", ".join(names)}: {text}' for text, names in seen.items())


def _with_shares(rows: list[Row], ceiling: Mapping[str, float]) -> list[Row]:
  """Returns rows of steps with model TFLOP/s (PyTorch's counted as ours) and share.

  Args:
    rows: of steps.
    ceiling: precision -> TFLOP/s.
  """
  per_row = {r['model']: r['flops'] / r['rows'] for r in rows if 'flops' in r}
  result = []
  for row in rows:
    if row['model'] in per_row:
      tflops = per_row[row['model']] * row['rows'] / row['seconds'] / 1e12
      row = {**row, 'tflops': tflops}
      if row['precision'] in ceiling:
        row['ceiling_share'] = tflops / ceiling[row['precision']]
    result.append(row)
  return result


def _list(title: str, results: Mapping[str, Row], statuses: Collection[str]) -> str:
  found = [line(name, result) for name, result in results.items() if result['status'] in statuses]
  return f'{title}:\n\n' + '\n'.join(f'- {text}' for text in found) if found else ''


def _table(columns: Mapping[str, Any], rows: list[Row]) -> str:
  if not rows:
    return ''
  return '\n'.join(
    [f'| {" | ".join(columns)} |', '|' + '---|' * len(columns)]
    + [f'| {" | ".join(map(str, _cells(columns, row)))} |' for row in rows]
  )


def _or_dash(cell: Callable[[Row], str]) -> Callable[[Row], str]:
  """Returns a cell that shows '-' where a plan or a measured value is not known."""

  def shown(row: Row) -> str:
    try:
      return cell(row)
    except (KeyError, TypeError):
      return '-'

  return shown


def _cells(columns: Mapping[str, Any], row: Row) -> Iterator[str]:
  for column in columns.values():
    try:
      yield column(row)
    except (KeyError, TypeError):  # the row does not have it
      yield ''


def _milliseconds(row: Row) -> str:
  spread = (row['slowest_seconds'] - row['fastest_seconds']) / row['seconds']
  return f'{row["seconds"] * 1e3:.3g} ({spread:.0%})'


def _gib(num_bytes: Optional[int]) -> str:
  return '' if num_bytes is None else f'{num_bytes / GIB:.2f}'


def _attention(row: Row) -> str:
  """Returns the backends of a step and why they were chosen; those without a kernel are marked."""
  return '; '.join(
    f'{"**NO KERNEL** " if c["no_kernel"] else ""}{c["name"]} ({c["reason"]})'
    for c in row['attention']
  )


def _note(row: Row) -> str:
  return row.get('error', '') or (f'**NO KERNEL**: {w}' if (w := row.get('no_kernel')) else '')


def _peak(row: Row) -> Optional[int]:
  """Returns the peak of a step; None if something before the step needed more, or is unknown."""
  peak, before = row['peak_bytes'], row.get('peak_bytes_before_steps', 0)
  return peak if peak is not None and peak > before else None


def _plan_of(row: Row) -> str:
  """Returns the GPU of a plan, and its attention where the step had another; or why it failed."""
  plan = row['plan']
  if 'error' in plan:
    return plan['error']
  same = set(plan['attention']) == {choice['name'] for choice in row['attention']}
  return plan['gpu'] if same else f'{plan["gpu"]} with {", ".join(sorted(set(plan["attention"])))}'


def _presets(results: Mapping[str, Row]) -> list[Row]:
  """Returns the steps on several GPUs whose kernels were traced, with the preset's options."""
  rows = _rows(results, 'options')
  return [row for row in rows if row['gpus'] > 1 and row['options'] == 'as the preset']


def _slowest(row: Row) -> list[Row]:
  """Returns a row for each of the kernels of a step that took longest."""
  found = row.get('slowest_kernels', [])
  return [{**row, **kernel} for kernel in ([found] if isinstance(found, dict) else found)]


def _kinds(row: Row) -> list[Row]:
  """Returns a row for each kind of kernel of a step, measured or planned."""
  plan = row.get('plan') or {}
  measured, planned = row.get('seconds_by_kind', {}), plan.get('seconds_by_kind', {})
  if not measured:
    return []
  return [
    {**row, 'kind': words, 'measured': measured.get(kind), 'planned': planned.get(kind)}
    for kind, words in KIND_WORDS.items()
    if kind in measured or kind in planned
  ]


def _traced_step(row: Row) -> str:
  words = (row['model'], *map(row.get, ('remat_policy', 'precision', 'layout', 'layers')))
  return ' '.join(filter(None, words))


def _ratio(predicted: Any, measured: Any) -> str:
  return f'{predicted / measured:.2f}'


CEILINGS = {
  'ceiling': lambda r: f'{r["what"]} {r.get("precision", "")}'.strip(),
  'size': lambda r: r.get('size', r.get('bytes')),
  'library': lambda r: 'PyTorch' if r['part'].endswith('torch') else 'XLA',
  'ms (spread)': _milliseconds,
  'TFLOP/s': lambda r: f'{r["tflops"]:.0f}',
  'GB/s': lambda r: f'{r["gigabytes_per_second"]:.0f}',
}
STEPS = {
  'step': lambda r: r['model'],
  'by': lambda r: r['what'] + (f', {r["compiled"]}' if 'compiled' in r else ''),
  'precision': lambda r: r['precision'],
  'batch': lambda r: f'{r["rows"]} x {r["length"]}',
  'ms (spread)': _milliseconds,
  'tokens/s': lambda r: f'{r["tokens_per_second"]:,.0f}',
  'TFLOP/s': lambda r: f'{r["tflops"]:.3g}',
  'of the ceiling': lambda r: f'{r["ceiling_share"]:.0%}',
  'attention': _attention,
  'FP8 GEMMs': lambda r: f'{r["fp8_gemms"]} of {r["gemms"]}' if r['precision'] == 'fp8' else '',
  'untuned kernels': lambda r: r['untuned_kernels'],
  'compile s': lambda r: f'{r["compile_seconds"]:.0f}',
  'kernels': lambda r: ', '.join(f'{kind} {runs}' for kind, runs in r['kernels'].items()),
  'peak GiB': lambda r: _gib(_peak(r)),
  'predicted GiB': lambda r: _gib(r['predicted_bytes']),
}
# Predicted against measured; a ratio is predicted / measured.
PLANNED = {
  'predicted against measured': lambda r: r['model'],
  'precision': lambda r: r['precision'],
  'batch': lambda r: f'{r["rows"]} x {r["length"]}',
  'plan of': _or_dash(_plan_of),
  'measured ms': lambda r: f'{r["seconds"] * 1e3:.3g}',
  'plan ms': _or_dash(lambda r: f'{r["plan"]["seconds"] * 1e3:.3g}'),
  'time ratio': _or_dash(lambda r: _ratio(r['plan']['seconds'], r['seconds'])),
  'calibrated ms': _or_dash(lambda r: f'{r["plan"]["calibrated_seconds"] * 1e3:.3g}'),
  'calibrated ratio': _or_dash(lambda r: _ratio(r['plan']['calibrated_seconds'], r['seconds'])),
  'peak GiB': _or_dash(lambda r: f'{_peak(r) / GIB:.3g}'),
  'by formula GiB': _or_dash(lambda r: f'{r["plan"]["formula_bytes"] / GIB:.3g}'),
  'formula ratio': _or_dash(lambda r: _ratio(r['plan']['formula_bytes'], _peak(r))),
  'as compiled GiB': _or_dash(lambda r: f'{r["plan"]["compiled_bytes"] / GIB:.3g}'),
  'compiled ratio': _or_dash(lambda r: _ratio(r['plan']['compiled_bytes'], _peak(r))),
}
# The steps of docs/performance.md#traffic.
TRAFFIC = {
  'traffic of': lambda r: r['model'],
  'remat': lambda r: r['remat_policy'],
  'precision': lambda r: r['precision'],
  'layout': lambda r: r['layout'] or '-',
  'GPUs': lambda r: r['gpus'],
  'batch': lambda r: f'{r["rows"]} x {r["length"]}',
  'ms (spread)': _milliseconds,
  'tokens/s per GPU': lambda r: f'{r["tokens_per_second"] / r["gpus"]:,.0f}',
  'TFLOP/s per GPU': lambda r: f'{r["tflops"] / r["gpus"]:.3g}',
  'plan ms': _or_dash(lambda r: f'{r["plan"]["seconds"] * 1e3:.3g}'),
  'time ratio': _or_dash(lambda r: _ratio(r['plan']['seconds'], r['seconds'])),
  'elementwise GB': lambda r: f'{r["elementwise_bytes"] / 1e9:.1f}',
  'kernels': lambda r: ', '.join(f'{kind} {runs}' for kind, runs in r['kernels'].items()),
  'untuned kernels': lambda r: r['untuned_kernels'],
  'compile s': lambda r: f'{r["compile_seconds"]:.0f}',
  'peak GiB': lambda r: _gib(_peak(r)),
  'as compiled GiB': _or_dash(lambda r: f'{r["plan"]["compiled_bytes"] / GIB:.3g}'),
  'note': _note,
}
# The steps of shapes.LOOPS.
LOOPS = {
  'layers': lambda r: r['layers'],
  **{('step' if name == 'traffic of' else name): cell for name, cell in TRAFFIC.items()},
}
LOOPS['8 H100, as compiled, ms'] = lambda r: f'{r["compiled_for_h100_seconds"] * 1e3:.0f}'
# Kinds of kernels, as in kernels.py.
KIND_WORDS = {
  'gemm': 'matmuls',
  'fp8_gemm': 'matmuls in FP8',
  'attention': 'attention',
  'memory': 'reading and writing',
  'waiting': 'waiting for collectives',
  'unknown': 'without an instruction',
}
# The kernels of a traced step by kind, next to what the plan expects of them.
KINDS = {
  'kernels of': _traced_step,
  'kind': lambda r: r['kind'],
  'measured ms': _or_dash(lambda r: f'{r["measured"] * 1e3:.3g}'),
  'plan ms': _or_dash(lambda r: f'{r["planned"] * 1e3:.3g}'),
  'time ratio': _or_dash(lambda r: _ratio(r['planned'], r['measured'])),
}
# The kernels that took longest in a traced step, next to what the plan expects of them, and to the
# time of their bytes.
KERNELS = {
  'slowest kernels of': _traced_step,
  'kernel': lambda r: r['place'],
  'result': lambda r: r['result'],
  'per step': lambda r: f'{r["runs"]:,}',
  'measured ms': lambda r: f'{r["kernel_seconds"] * 1e3:.3g}',
  'of the step': lambda r: f'{r["kernel_seconds"] / r["seconds"]:.1%}',
  'GB': _or_dash(lambda r: f'{r["num_bytes"] / 1e9:.2f}'),
  'least ms for the bytes': _or_dash(lambda r: f'{r["least_seconds"] * 1e3:.3g}'),
  'plan ms': _or_dash(lambda r: f'{r["plan_seconds"] * 1e3:.3g}'),
  'time ratio': _or_dash(lambda r: _ratio(r['plan_seconds'], r['kernel_seconds'])),
  'note': _note,
}
# XLA's options, one change to the preset each.
OPTIONS = {
  'options': lambda r: r['options'],
  'step': lambda r: r['model'],
  'precision': lambda r: r['precision'],
  'layout': lambda r: r['layout'] or '-',
  'GPUs': lambda r: r['gpus'],
  'batch': lambda r: f'{r["rows"]} x {r["length"]}',
  'ms (spread)': _milliseconds,
  'against the preset': lambda r: f'{r["seconds"] / r["preset_seconds"] - 1:+.1%}',
  'plan ms': _or_dash(lambda r: f'{r["plan"]["seconds"] * 1e3:.3g}'),
  'elementwise GB': lambda r: f'{r["elementwise_bytes"] / 1e9:.1f}',
  'kernels': lambda r: ', '.join(f'{kind} {runs}' for kind, runs in r['kernels'].items()),
  'compile s': lambda r: f'{r["compile_seconds"]:.0f}',
  'peak GiB': lambda r: _gib(_peak(r)),
  'note': _note,
}
ATTENTION = {
  'attention': lambda r: r['backend'] + (' (auto)' if r.get('auto') else ''),
  'length': lambda r: r['length'],
  'rows': lambda r: 'packed' if r['packed'] else 'whole',
  'forward ms (spread)': lambda r: _milliseconds(r['forward']),
  'TFLOP/s': lambda r: f'{r["forward"]["tflops"]:.3g}',
  'with backward ms (spread)': lambda r: _milliseconds(r['backward']),
  'TFLOP/s ': lambda r: f'{r["backward"]["tflops"]:.3g}',
  'untuned kernels': lambda r: r['untuned_kernels'],
  'note': _note,
}
LOSSES = {
  'loss': lambda r: r['what'],
  'vocabulary': lambda r: r['vocab_size'],
  'tokens': lambda r: r['tokens'],
  'chunks': lambda r: f'{r["chunks"]}{" (auto)" if r.get("auto") else ""}',
  'ms (spread)': _milliseconds,
  'TFLOP/s': lambda r: f'{r["tflops"]:.3g}',
  'temporary GiB': lambda r: _gib(r['temporary_bytes']),
  'note': _note,
}
# The efficiency is tokens/s per GPU, as a share of one GPU's.
SCALING = {
  'on several GPUs': lambda r: r['model'],
  'layout': lambda r: r['layout'],
  'GPUs': lambda r: r['gpus'],
  'batch': lambda r: f'{r["rows"]} x {r["length"]}',
  'ms (spread)': _milliseconds,
  'tokens/s': lambda r: f'{r["tokens_per_second"]:,.0f}',
  'tokens/s per GPU': lambda r: f'{r["tokens_per_second_per_gpu"]:,.0f}',
  'efficiency': lambda r: f'{r["efficiency"]:.0%}',
  'plan ms': _or_dash(lambda r: f'{r["plan"]["seconds"] * 1e3:.3g}'),
  'untuned kernels': lambda r: r['untuned_kernels'],
  'compile s': lambda r: f'{r["compile_seconds"]:.0f}',
  'note': _note,
}
TUNED = {
  'tuned kernel': lambda r: r['kernel'],
  'for': lambda r: r['for'],
  'arguments': lambda r: r['arguments'],
  'block sizes tried (failed)': lambda r: f'{r["tried"]} ({r["failed"]})',
  'default ms': _or_dash(lambda r: f'{r["default_seconds"] * 1e3:.3g}'),
  'tuned ms': lambda r: f'{r["seconds"] * 1e3:.3g}',
  'block sizes': lambda r: r['config'],
  'note': _note,
}
