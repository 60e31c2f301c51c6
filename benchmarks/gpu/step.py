"""Our training step: tokens/s, model TFLOP/s and memory of one shape on one GPU, or on several.

Everything is what `python -m t5x_gpu.train` uses: `build_program`, the compile options of the
preset, the memory check, the check for matmuls in FP8. Batches are synthetic, and only gin files
are left out. What a plan predicts for the same step on the same card is recorded with it.
"""

import dataclasses
import functools
import gzip
import math
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import jax

from benchmarks.gpu.kernels import traced
from benchmarks.gpu.parts import Missing, Row, Skipped
from benchmarks.gpu.planned import planned
from benchmarks.gpu.shapes import FILLS, LOOPS, SHAPES, TRAFFIC, Shape
from benchmarks.gpu.timing import time_calls
from t5x_gpu.compiled.kernels import count_kernels, fp8_lines
from t5x_gpu.compiled.trace import read_trace, trace_file
from t5x_gpu.compiled.traffic import kernel_traffic, traffic
from t5x_gpu.data.batches import DatasetConfig
from t5x_gpu.data.synthetic import SyntheticBatches
from t5x_gpu.errors import ModelError, OutOfMemoryError, first_line
from t5x_gpu.layers.backends.choose import Choice, listed_choices
from t5x_gpu.layers.backends.tokamax_internals import listed_untuned
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.partitioning.trees import Batch
from t5x_gpu.runtime.main_log import log
from t5x_gpu.runtime.topology import Topology
from t5x_gpu.runtime.xla.flags import Applied
from t5x_gpu.runtime.xla.presets import TABLE
from t5x_gpu.tools.planning.gpu_targets import target_of_kind
from t5x_gpu.tools.planning.prediction import PlanConfig
from t5x_gpu.training.memory import check_memory
from t5x_gpu.training.optimizers import AdamW
from t5x_gpu.training.program import Program, build_program, compile_options
from t5x_gpu.training.schedules import constant

PRECISIONS = ('bfloat16', 'fp8')


def model_of(shape: Shape, precision: str) -> Model:
  """Returns the model of `shape`.

  Raises:
    Missing: this version cannot compute in `precision`.
  """
  try:
    config = TransformerConfig(
      **shape.config,
      dtype=precision,
      rope=RotaryEmbedding() if shape.rope else None,
      remat_policy=shape.remat_policy,
      scan_unroll=shape.scan_unroll,
    )
  except ModelError as e:
    raise Missing(str(e).replace('\n', ' ')) from e
  if shape.family == 'decoder':
    return DecoderOnlyModel(config)
  if shape.family == 'encoder':
    return EncoderModel(config, head_type='mlm')
  return EncoderDecoderModel(config)


def run_of(
  model: Model, shape: Shape, rows: int, partitioner: Partitioner = Partitioner()
) -> PlanConfig:
  """Returns the run whose step is timed: AdamW, gradients clipped to 1."""
  lengths = {'targets': shape.length}
  if shape.family != 'decoder':
    lengths['inputs'] = shape.length
  data = DatasetConfig('synthetic', lengths, split='train', batch_size=rows, pack=False)
  return PlanConfig(
    model=model,
    train_dataset_cfg=data,
    partitioner=partitioner,
    optimizer=AdamW(weight_decay=0.1),
    learning_rate=constant(1e-4),
    max_grad_norm=1.0,
    total_steps=1,
  )


def program_of(run: PlanConfig, num_devices: int = 1) -> Program:
  """Returns the training step of `run` on the first devices."""
  topology = Topology(1, num_devices, device_word='device')
  return build_program(run, topology=topology, devices=jax.devices()[:num_devices])


def measure(
  name: str,
  precision: str,
  *,
  small: bool = False,
  xla: Optional[Applied] = None,
  results: Optional[pathlib.Path] = None,
  plan_for: Optional[str] = None,
) -> Iterator[Row]:
  """Yields the result of one shape, with the most rows that fit.

  Args:
    name: of SHAPES.
    precision: of PRECISIONS.
    small: sizes for a CPU.
    xla: settings of the process, whose compile options are used.
    results: file of earlier results, whose ceilings calibrate the plan; None for no calibration.
    plan_for: device kind of the plan; None for the first device's.
  Raises:
    Missing: this version cannot compute in `precision`.
    OutOfMemoryError: not even the fewest rows fit.
    ModelError: on a GPU, no matmul of a step in FP8 is in FP8.
  """
  shape = SHAPES[name].small() if small else SHAPES[name]
  options: Any = dict(small=small, xla=xla, results=results, plan_for=plan_for)
  timed = _largest(shape, model_of(shape, precision), shape.rows, **options)
  yield from _with_kernels(
    {'model': name, 'precision': precision}, timed, _folder(results, name, precision)
  )


def _folder(results: Optional[pathlib.Path], *words: object) -> Optional[pathlib.Path]:
  """Returns the folder for the program and the trace of a step; None if nothing is kept."""
  name = '_'.join(' '.join(map(str, words)).split())
  return results and results.parent / 'steps' / name


Options = dict[str, Any]


def _without_graphs(options: Options) -> Options:
  return options | {'xla_gpu_enable_command_buffer': ''}


# What only a card can judge: label -> the preset's compile options, changed.
OPTIONS: dict[str, Callable[[Options], Options]] = {
  'no Triton GEMMs': lambda options: options | {'xla_gpu_enable_triton_gemm': False},
  'no command buffers': _without_graphs,
  # jax 0.11 and later
  'dependent launches': lambda options: options | {'xla_gpu_enable_pdl_launch': True},
}
_PASSES, _DOUBLE_BUFFER = 'xla_disable_hlo_passes', 'loop-double-buffer-transformer'
# What 'max_overlap' adds for pipelines.
_OVERLAPPED_SENDS = {
  row.name: row.value for row in TABLE if row.presets == ('max_overlap',) and row.axes == ('stage',)
}


def _disabled(options: Options) -> list[str]:
  return [name for name in options.get(_PASSES, '').split(',') if name]


def _other_buffering(options: Options) -> Options:
  """Returns `options` with double buffering of loops off if it is on, else on."""
  passes = _disabled(options)
  others = [name for name in passes if name != _DOUBLE_BUFFER]
  if others == passes:
    others.append(_DOUBLE_BUFFER)
  return options | {_PASSES: ','.join(others)}


def _two_collectives(options: Options) -> Options:
  return options | {'xla_gpu_experimental_parallel_collective_overlap_limit': 2}


def _overlapped_sends(options: Options) -> Options:
  passes = dict.fromkeys([*_disabled(options), *_disabled(_OVERLAPPED_SENDS)])
  return options | _OVERLAPPED_SENDS | {_PASSES: ','.join(passes)}


OPTIONS_OF_SEVERAL: dict[str, Callable[[Options], Options]] = {
  'double buffering of loops switched': _other_buffering,
  'NCCL user buffers': lambda options: options | {'xla_gpu_enable_nccl_user_buffers': True},
  'two collectives at a time': _two_collectives,
}
OPTIONS_OF_A_PIPELINE: dict[str, Callable[[Options], Options]] = {
  'pipeline options of max_overlap': _overlapped_sends,
  'two collectives at a time': _two_collectives,
}


_XLA_SLOP = {'xla_gpu_memory_limit_slop_factor': 95}  # XLA's own default
OPTIONS_OF_A_FULL_GPU: dict[str, Callable[[Options], Options]] = {
  'slop factor of 95%': lambda options: options | _XLA_SLOP
}


def measure_options(
  name: str,
  precision: str,
  *,
  kind: str = 'one',
  small: bool = False,
  xla: Optional[Applied] = None,
  results: Optional[pathlib.Path] = None,
) -> Iterator[Row]:
  """Yields the results of one shape with the preset's options, then with one of them changed.

  An option that this XLA does not have costs only its own row.

  Args:
    name, precision, small, xla, results: as in `measure`.
    kind: 'one' GPU; 'fsdp' over all GPUs, with options about communication; 'pipeline' of all GPUs,
      with options about the sends between its stages; 'full', `fsdp` with 'dots' and the most rows
      of FILLS that fit, with options about memory.
  Raises:
    Skipped: another kind than 'one', on one GPU; 'pipeline' of an odd number of GPUs.
    Missing, OutOfMemoryError: as `measure`.
  """
  num_gpus = 1 if kind == 'one' else jax.local_device_count()
  if kind != 'one' and num_gpus < 2:
    raise Skipped('this machine has one GPU; these options are about several')
  shape = SHAPES[name]
  if kind == 'full':
    shape = dataclasses.replace(shape, rows=FILLS[name], remat_policy='dots')
  shape = shape.small() if small else shape
  model, rows = model_of(shape, precision), [number * num_gpus for number in shape.rows]
  num_heads = shape.config['num_heads']
  layout, partitioner, changes = '', Partitioner(), OPTIONS
  if kind == 'fsdp':
    layout, partitioner = 'fsdp', layouts(num_gpus, num_heads)['fsdp']
    changes = OPTIONS_OF_SEVERAL
  elif kind == 'pipeline':
    layout, partitioner = pipeline(num_gpus, num_heads)
    changes = OPTIONS_OF_A_PIPELINE
  elif kind == 'full':
    layout, partitioner = 'fsdp', layouts(num_gpus, num_heads)['fsdp']
    changes = OPTIONS_OF_A_FULL_GPU
  where: Any = (partitioner, num_gpus)
  settings: Any = dict(small=small, xla=xla, results=results)

  def folder(label: str) -> Optional[pathlib.Path]:
    return _folder(results, name, precision, num_gpus, layout, label)

  row: Row = {'model': name, 'precision': precision, 'gpus': num_gpus, 'layout': layout}
  preset = _largest(shape, model, rows, *where, **settings)
  row['preset_seconds'] = preset.row['seconds']
  yield from _with_kernels(row | {'options': 'as the preset'}, preset, folder('preset'))
  for label, change in changes.items():
    row['options'] = label
    try:
      timed = _largest(shape, model, [preset.row['rows']], *where, change=change, **settings)
    except Exception as e:
      yield row | _error(e)
      continue
    yield from _with_kernels(row, timed, folder(label))


def measure_gpus(
  name: str,
  *,
  small: bool = False,
  xla: Optional[Applied] = None,
  results: Optional[pathlib.Path] = None,
) -> Iterator[Row]:
  """Yields the results of one shape on one GPU, and on all GPUs of this machine in each layout.

  A layout gets as many rows per GPU as the single GPU, or fewer if they do not fit. One that fails
  costs only its own row.

  Args:
    name: of SHAPES, a decoder.
    small, xla, results: as in `measure`.
  Raises:
    Skipped: this machine has one GPU.
    OutOfMemoryError: not even the fewest rows fit on one GPU.
  """
  num_gpus = jax.local_device_count()
  if num_gpus < 2:
    raise Skipped('this machine has one GPU; several GPUs are compared with one of them')
  shape = SHAPES[name].small() if small else SHAPES[name]
  model = model_of(shape, 'bfloat16')
  options: Any = dict(small=small, xla=xla, results=results)
  row: Row = {'model': name, 'precision': 'bfloat16'}
  alone = _largest(shape, model, shape.rows, **options).row
  yield row | {'layout': '-', 'gpus': 1, **_scaling(alone, alone, 1)}
  rows = [n * num_gpus for n in shape.rows if n <= alone['rows']]
  for layout, partitioner in layouts(num_gpus, shape.config['num_heads']).items():
    row |= {'layout': layout, 'gpus': num_gpus}
    try:
      found = _largest(shape, model, rows, partitioner, num_gpus, **options).row
      yield row | _scaling(found, alone, num_gpus)
    except Exception as e:
      yield row | _error(e)


def measure_traffic(
  names: Sequence[str],
  *,
  small: bool = False,
  xla: Optional[Applied] = None,
  results: Optional[pathlib.Path] = None,
) -> Iterator[Row]:
  """Yields the results of the steps of TRAFFIC, in `fsdp` over all GPUs of this machine.

  A step gets as many rows per GPU as there, or fewer if they do not fit. One that fails costs only
  its own row.

  Args:
    names: of TRAFFIC.
    small, xla, results: as in `measure`.
  """
  num_gpus = jax.local_device_count()
  for name in names:
    per_gpu, variants = TRAFFIC[name]
    for remat_policy, precision in variants:
      shape = SHAPES[name].small() if small else SHAPES[name]
      shape = dataclasses.replace(shape, remat_policy=remat_policy, scan_unroll=None)
      rows = [n * num_gpus for n in dict.fromkeys(min(n, per_gpu) for n in shape.rows)]
      row: Row = {'model': name, 'precision': precision, 'remat_policy': remat_policy}
      row |= {'gpus': num_gpus, 'layout': 'fsdp' if num_gpus > 1 else ''}
      where = layouts(num_gpus, shape.config['num_heads'])['fsdp']
      try:
        model = model_of(shape, precision)
        timed = _largest(shape, model, rows, where, num_gpus, small=small, xla=xla, results=results)
      except Exception as e:
        yield row | _error(e)
        continue
      keep = _folder(results, name, precision, num_gpus, row['layout'], remat_policy)
      yield from _with_kernels(row, timed, keep)


def measure_loops(
  *, small: bool = False, xla: Optional[Applied] = None, results: Optional[pathlib.Path] = None
) -> Iterator[Row]:
  """Yields the results of the steps of LOOPS, with layers in a loop and without one.

  A step gets as many rows per GPU as there, or fewer if they do not fit. One that fails costs only
  its own row.

  Args:
    small, xla, results: as in `measure`.
  Raises:
    Skipped: this machine has one GPU.
  """
  num_gpus = jax.local_device_count()
  if num_gpus < 2:
    raise Skipped('this machine has one GPU, where layers run without a loop by default')
  for case in LOOPS:
    shape = dataclasses.replace(SHAPES[case.shape], remat_policy=case.remat_policy)
    shape = shape.small() if small else shape
    rows = [n * num_gpus for n in dict.fromkeys(min(n, case.rows) for n in shape.rows)]
    where = layouts(num_gpus, shape.config['num_heads'])['fsdp']
    for layers, unroll, milliseconds in zip(
      ('in a loop', 'without a loop'), (1, shape.config['num_layers']), case.compiled
    ):
      row: Row = {'model': case.shape, 'precision': case.precision, 'gpus': num_gpus}
      row |= {'remat_policy': case.remat_policy, 'layout': 'fsdp', 'layers': layers}
      row['compiled_for_h100_seconds'] = milliseconds / 1e3
      try:
        step = dataclasses.replace(shape, scan_unroll=unroll)
        model = model_of(step, case.precision)
        timed = _largest(step, model, rows, where, num_gpus, small=small, xla=xla, results=results)
      except Exception as e:
        yield row | _error(e)
        continue
      keep = _folder(results, case.shape, case.precision, num_gpus, case.remat_policy, layers)
      yield from _with_kernels(row, timed, keep)


def layouts(num_gpus: int, num_heads: int) -> dict[str, Partitioner]:
  """Returns name -> layout of all GPUs, as gin_configs/parallel has them; no pipelines."""
  found = {
    'dp': Partitioner(overlap_layers=True),
    'fsdp': Partitioner(data=1, fsdp=-1, overlap_layers=True),
  }
  parts = math.gcd(num_gpus, num_heads)  # `model` splits heads
  size = f'{parts}{_replicas(num_gpus // parts)}'
  if parts > 1:
    found[f'tp {size}'] = Partitioner(num_partitions=parts)
  found['zero1'] = Partitioner(data=1, fsdp=-1, zero_stage=1, overlap_layers=True)
  if parts > 1:
    found[f'tp_sp {size}'] = Partitioner(num_partitions=parts, sequence_parallel=True)
  if num_gpus >= 4 and num_gpus % 2 == 0:
    # Its replicas are halves of this host.
    found[f'hsdp {num_gpus // 2}{_replicas(2)}'] = Partitioner(data=2, fsdp=-1, overlap_layers=True)
  return found


def pipeline(num_gpus: int, num_heads: int) -> tuple[str, Partitioner]:
  """Returns the name and layout of two stages over all GPUs, with `model` in them where it fits.

  Raises:
    Skipped: an odd number of GPUs.
  """
  if num_gpus % 2:
    raise Skipped(f'{num_gpus} GPUs are not two equal stages')
  if num_gpus % 4 or num_heads % 2:
    return f'pp 2{_replicas(num_gpus // 2)}', Partitioner(stage=2)
  return f'3d 2 x tp 2{_replicas(num_gpus // 4)}', Partitioner(
    stage=2, num_partitions=2, sequence_parallel=True, overlap_layers=True
  )


def _replicas(number: int) -> str:
  return f' x dp {number}' if number > 1 else ''


def _scaling(row: Row, alone: Row, num_gpus: int) -> Row:
  """Returns `row` with tokens/s per GPU, and its share of what one GPU does alone."""
  per_gpu = row['tokens_per_second'] / num_gpus
  share = per_gpu / alone['tokens_per_second']
  return row | {'tokens_per_second_per_gpu': per_gpu, 'efficiency': share}


def _error(e: Exception) -> Row:
  """Returns the field of a row that could not be measured."""
  return {'error': f'{type(e).__name__}: {first_line(e)}'[:200]}


@dataclasses.dataclass(frozen=True)
class Timed:
  """A timed step.

  Attributes:
    row: its result.
    without_graphs: compiles it again without CUDA graphs, whose kernels do not name their
      instruction in a trace.
  """

  row: Row
  without_graphs: Callable[[], 'Compiled']


def _with_kernels(row: Row, timed: Timed, keep: Optional[pathlib.Path]) -> Iterator[Row]:
  """Yields `row` with what was timed, then adds the kernels of a traced step to it.

  So a part that is killed while it compiles the step for the trace has written the time.

  Args:
    keep: folder for the trace and the program; None for no trace.
  """
  row = row | timed.row
  yield row
  if keep is not None:
    row.update(_kernels(timed.without_graphs, keep))


def _largest(
  shape: Shape,
  model: Model,
  rows: Sequence[int],
  partitioner: Partitioner = Partitioner(),
  num_devices: int = 1,
  *,
  small: bool,
  xla: Optional[Applied],
  results: Optional[pathlib.Path],
  plan_for: Optional[str] = None,
  change: Callable[[Options], Options] = dict,
) -> Timed:
  """Returns the result with the first batch of `rows` that fits; raises as `measure`.

  Args:
    change: compile options of the preset -> the options to compile with.
  """
  kind = plan_for or jax.devices()[0].device_kind
  for batch_size in rows:
    run = run_of(model, shape, batch_size, partitioner)
    try:
      compiled = compile_step(run, xla, num_devices, change)
      plan = planned(compiled.program, run, compiled.step, device_kind=kind, results=results)
      timed = _timed(compiled, model, shape.length, small=small)
      without_graphs = functools.partial(
        compile_step, run, xla, num_devices, lambda options: _without_graphs(change(options))
      )
      return Timed({**compiled.row(), 'plan': plan, **timed}, without_graphs)
    except OutOfMemoryError as e:
      too_large = e.with_traceback(None)  # which holds the arrays of the step
      print(f'{batch_size} rows: {e}', flush=True)
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      too_large = e.with_traceback(None)  # which holds the arrays of the step
      print(f'{batch_size} rows: predicted to fit, but {str(e)[:300]}', flush=True)
  raise too_large


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A compiled training step.

  Attributes:
    program: program of the run.
    step: as jax compiled it.
    seconds: that it took.
    attention: the backends that the step uses, and why.
    predicted_bytes: memory predicted by the check at the start of a run; None if unknown.
    untuned_kernels: calls of Tokamax's kernels with default block sizes.
  """

  program: Program
  step: Any
  seconds: float
  attention: Sequence[Choice]
  predicted_bytes: Optional[int]
  untuned_kernels: int

  def row(self) -> Row:
    """Returns the fields of a result."""
    hlo = self.step.as_text()
    kernels = {kind: k.runs for kind, k in count_kernels(hlo).items()}
    return {
      'elementwise_bytes': traffic(kernel_traffic(hlo)).other_bytes,
      'what': 't5x_gpu',
      'num_params': self.program.num_params,
      'compile_seconds': self.seconds,
      'predicted_bytes': self.predicted_bytes,
      'attention': [dataclasses.asdict(choice) for choice in self.attention],
      'untuned_kernels': self.untuned_kernels,
      'kernels': {kind: runs for kind, runs in kernels.items() if runs},
      'fp8_gemms': kernels['fp8_gemm'],
      'gemms': kernels['fp8_gemm'] + kernels['gemm'],
    }


def compile_step(
  run: PlanConfig,
  xla: Optional[Applied],
  num_devices: int = 1,
  change: Callable[[Options], Options] = dict,
) -> Compiled:
  """Returns the compiled step of `run` on the first devices, after the checks of a training run.

  Raises:
    OutOfMemoryError: it does not fit.
    ModelError: as `fp8_lines`.
  """
  program = program_of(run, num_devices)
  memory = check_memory(program)
  begin = time.perf_counter()
  with listed_choices() as attention, listed_untuned() as untuned:
    lowered = program.train_step.lower(program.abstract_state, program.abstract_batch)
  options = change(compile_options(program, xla) or {})
  step = lowered.compile(compiler_options=options or None)
  seconds = time.perf_counter() - begin
  for line in fp8_lines(step, run.model, program.layout.mesh):
    log(line)
  need = memory.compiled(step).need
  predicted = need.total if need.is_compiled else None
  return Compiled(program, step, seconds, attention, predicted, len(untuned))


def _batches(program: Program, number: int) -> list[Batch]:
  batches = SyntheticBatches(program.spec, seed=0, num_batches=None)
  return [program.layout.put_batch(next(batches)) for _ in range(number)]


def _timed(compiled: Compiled, model: Model, length: int, *, small: bool) -> Row:
  """Returns time, memory and losses of a step on synthetic rows of `length`."""
  program, step = compiled.program, compiled.step
  ready = _batches(program, 4)
  state, losses = program.init(), []
  device = jax.devices()[0]
  jax.block_until_ready(state)
  before = peak_bytes(device)

  def call() -> Any:
    nonlocal state
    state, sums = step(state, ready[len(losses) % len(ready)])
    losses.append(sums['loss'])
    return state

  timing = time_calls(call, jax.block_until_ready, samples=5, sample_seconds=1.0, small=small)
  first, last = (float(loss / weight) for loss, weight in (losses[0], losses[-1]))
  rows = program.spec.batch_size
  tokens = rows * length
  flops = model.flops_per_token(length) * tokens
  return {
    'rows': rows,
    'length': length,
    **timing.row(),
    'tokens_per_second': tokens / timing.seconds,
    'flops': flops,
    'tflops': flops / timing.seconds / 1e12,
    'peak_bytes': peak_bytes(device),
    'peak_bytes_before_steps': before,
    'losses': [first, last],
    'steps': len(losses),
  }


def _kernels(compile_step: Callable[[], Compiled], keep: pathlib.Path) -> Row:
  """Returns `kernels.traced` of a step, or the error of a trace that failed.

  Args:
    compile_step: returns the step.
    keep: folder for the program and the trace, which other readers can open.
  """
  keep.mkdir(parents=True, exist_ok=True)
  try:
    compiled = compile_step()
    hlo = compiled.step.as_text()
    (keep / 'step.hlo.txt.gz').write_bytes(gzip.compress(hlo.encode()))
    [batch] = _batches(compiled.program, 1)
    state, _ = compiled.step(compiled.program.init(), batch)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder:
      with jax.profiler.trace(folder):
        jax.block_until_ready(compiled.step(state, batch))
      trace = trace_file(pathlib.Path(folder))
      (keep / 'step.xplane.pb.gz').write_bytes(gzip.compress(trace.read_bytes()))
      operations = read_trace(pathlib.Path(folder), module='jit_train_step')
    gpu = target_of_kind(jax.devices()[0].device_kind)
    found = traced(hlo, operations, gpu, compiled.program.layout.mesh.shape)
  except Exception as e:  # costs its own rows, not the measurement
    return {'slowest_kernels': _error(e)}
  return found


def peak_bytes(device: jax.Device) -> Optional[int]:
  """Returns the most bytes that were allocated on `device` at one time; None if unknown."""
  return (device.memory_stats() or {}).get('peak_bytes_in_use')
