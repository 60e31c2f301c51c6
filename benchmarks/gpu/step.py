"""Our training step: tokens/s, model TFLOP/s and memory of one shape on one GPU.

Everything is what `python -m t5x_gpu.train` uses: `build_program`, the compile options of the
preset, the memory check. Batches are synthetic, and only gin files are left out.
"""

import time
from collections.abc import Iterator
from typing import Any, Optional

import jax

from benchmarks.gpu.parts import Missing, Row
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.gpu.timing import time_calls
from t5x_gpu.analysis.kernels import count_kernels
from t5x_gpu.data.synthetic import SyntheticBatches
from t5x_gpu.errors import ModelError, OutOfMemoryError
from t5x_gpu.layers.positions import RotaryEmbedding
from t5x_gpu.models.config import TransformerConfig
from t5x_gpu.models.decoder_only import DecoderOnlyModel
from t5x_gpu.models.encoder import EncoderModel
from t5x_gpu.models.encoder_decoder import EncoderDecoderModel
from t5x_gpu.models.model import Model
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.cluster.topology import Topology
from t5x_gpu.runtime.xla.applied import Applied
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
    )
  except ModelError as e:
    raise Missing(str(e).replace('\n', ' ')) from e
  if shape.family == 'decoder':
    return DecoderOnlyModel(config)
  if shape.family == 'encoder':
    return EncoderModel(config, head_type='mlm')
  return EncoderDecoderModel(config)


def program_of(model: Model, shape: Shape, rows: int) -> Program:
  """Returns the training step of `model` on the first device: AdamW, gradients clipped to 1."""
  lengths = {'targets': shape.length}
  if shape.family != 'decoder':
    lengths['inputs'] = shape.length
  return build_program(
    model=model,
    optimizer=AdamW(weight_decay=0.1),
    schedule=constant(1e-4),
    partitioner=Partitioner(),
    topology=Topology(1, 1, device_word='device'),
    devices=jax.devices()[:1],
    task_feature_lengths=lengths,
    batch_size=rows,
    pack=False,
    seed=0,
    max_grad_norm=1.0,
  )


def measure(
  name: str, precision: str, *, small: bool = False, xla: Optional[Applied] = None
) -> Iterator[Row]:
  """Yields the result of one shape, with the most rows that fit.

  Args:
    name: of SHAPES.
    precision: of PRECISIONS.
    small: sizes for a CPU.
    xla: settings of the process, whose compile options are used.
  Raises:
    Missing: this version cannot compute in `precision`.
    OutOfMemoryError: not even the fewest rows fit.
  """
  shape = SHAPES[name].small() if small else SHAPES[name]
  model = model_of(shape, precision)
  for rows in shape.rows:
    try:
      yield _measure(model, shape, rows, xla, small) | {'model': name, 'precision': precision}
      return
    except OutOfMemoryError as e:
      too_large = e
      print(f'{name}, {rows} rows: {e}', flush=True)
    except jax.errors.JaxRuntimeError as e:
      if 'RESOURCE_EXHAUSTED' not in str(e):
        raise
      too_large = e
      print(f'{name}, {rows} rows: predicted to fit, but {str(e)[:300]}', flush=True)
  raise too_large


def _measure(model: Model, shape: Shape, rows: int, xla: Optional[Applied], small: bool) -> Row:
  program = program_of(model, shape, rows)
  memory = check_memory(program, model, num_microbatches=1)
  begin = time.perf_counter()
  step = program.train_step.lower(program.abstract_state, program.abstract_batch).compile(
    compiler_options=compile_options(program, xla)
  )
  compile_seconds = time.perf_counter() - begin
  memory = memory.compiled(step)
  kernels = {kind: k.runs for kind, k in count_kernels(step.as_text()).items() if k.runs}
  batches = SyntheticBatches(program.spec, seed=0, num_batches=None)
  ready = [program.layout.put_batch(next(batches)) for _ in range(4)]
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
  tokens = rows * shape.length
  return {
    'what': 't5x_gpu',
    'rows': rows,
    'length': shape.length,
    'num_params': program.num_params,
    **timing.row(),
    'compile_seconds': compile_seconds,
    'tokens_per_second': tokens / timing.seconds,
    'flops': model.flops_per_token(shape.length) * tokens,
    'tflops': model.flops_per_token(shape.length) * tokens / timing.seconds / 1e12,
    'predicted_bytes': memory.need.total if memory.need.is_compiled else None,
    'peak_bytes': peak_bytes(device),
    'peak_bytes_before_steps': before,
    'kernels': kernels,
    'losses': [first, last],
    'steps': len(losses),
  }


def peak_bytes(device: jax.Device) -> Optional[int]:
  """Returns the most bytes that were allocated on `device` at one time; None if unknown."""
  return (device.memory_stats() or {}).get('peak_bytes_in_use')
