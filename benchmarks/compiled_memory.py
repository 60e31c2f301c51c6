"""Shows what training steps need, move and send on H100s; writes results/compiled_memory.json.

    python -m benchmarks.compiled_memory        # with the extra [plan]; no GPU, some minutes

Compiles the training step for GPUs that are absent, as `python -m t5x_gpu.plan --gpu=h100` does:
AdamW in float32, the XLA preset 'default'; decoders on packed rows of 4096 tokens. Nothing runs.
`--only loop:` compares `overlap_layers` with XLA's own pipelining of collectives, `--only 'by '`
accumulation by layer and by microbatch.
"""

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import pathlib
import time
from typing import Any

import jax

from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_compile import CompiledStep
from t5x_gpu.tools.planning.prediction import Prediction, predict
from t5x_gpu.tools.planning.sharding import gpu_json
from tests.aot.cases import BERT, T5, Case

OUT = pathlib.Path(__file__).parent / 'results' / 'compiled_memory.json'
MICROBATCHES = 'NUM_MICROBATCHES = 8'
FP8 = "PRECISION = 'fp8'"
# FLOP/s and bytes/s of an H100 at which docs/performance.md compares our steps with MaxText's.
RATES = {'gemm': 650e12, 'fp8_gemm': 1100e12, 'attention': 400e12, 'bytes': 2.9e12}


# How a loop over layers communicates ahead: label -> gin bindings.
LOOPS = {
  'loop: overlap_layers': (),
  **{
    label: ('Partitioner.overlap_layers = False', f'train.xla_preset = {preset!r}')
    for label, preset in (
      ('loop: O1', 'default'),
      ('loop: max_overlap', 'max_overlap'),
      ('loop: MaxText', 'none'),
    )
  },
}
# Label -> XLA_FLAGS. MaxText's are of its configs/gpu/a3/llama_2_7b/1vm.sh, for 8 H100.
FLAGS = {
  'loop: MaxText': (
    '--xla_gpu_enable_latency_hiding_scheduler=true',
    '--xla_gpu_enable_triton_gemm=false',
    '--xla_gpu_enable_command_buffer=',
    f'--xla_gpu_all_reduce_combine_threshold_bytes={2**27}',
    f'--xla_gpu_all_gather_combine_threshold_bytes={2**27}',
    f'--xla_gpu_reduce_scatter_combine_threshold_bytes={2**26}',
    '--xla_gpu_enable_pipelined_all_gather=true',
    '--xla_gpu_enable_pipelined_reduce_scatter=true',
    '--xla_gpu_enable_pipelined_all_reduce=true',
    '--xla_gpu_enable_while_loop_double_buffering=true',
    '--xla_disable_hlo_passes=rematerialization',
  )
}

# Runs with microbatches: model, layout, rows and length, hosts, microbatches, FP8 or not, and the
# remat policy that plan's search found for accumulation by microbatch.
ACCUMULATING = (
  ('llama3_8b', 'fsdp', (128, 8192), 1, 16, (), 'dots'),
  ('llama3_8b', 'fsdp', (128, 8192), 1, 16, (FP8,), 'dots'),
  ('llama3_8b', 'fsdp', (512, 4096), 8, 4, (), 'dots'),
  ('llama3_8b', 'fsdp', (256, 2048), 8, 4, (), 'minimal'),
  ('llama3_2_1b', 'fsdp', (128, 4096), 1, 4, (), 'dots'),
  ('llama3_2_1b', 'fsdp', (64, 2048), 1, 8, (), 'dots'),
  ('qwen3_1_7b', 'fsdp', (128, 4096), 1, 8, (), 'dots'),
  ('gpt2_xl', 'fsdp', (512, 1024), 1, 8, (), 'dots'),
  ('llama3_70b', 'fsdp', (256, 4096), 8, 4, (), 'full'),
)


# Schedule of a pipeline -> gin bindings.
PIPELINES = {'1f1b': (), 'circular': ('Partitioner.pipeline_repeats = 5',)}


def _decoder(
  layout: str, rows: int, *bindings: str, model: str = 'llama3_8b', remat: str = 'full', **more: Any
) -> Case:
  remat = f'REMAT_POLICY = {remat!r}'
  return Case(model=model, layout=layout, batch=(rows, 4096), bindings=(remat, *bindings), **more)


CASES = (
  _decoder('fsdp', 8),
  _decoder('fsdp', 8, remat='minimal', label='minimal'),
  _decoder('fsdp', 8, remat='dots', label='dots'),
  _decoder('fsdp', 8, FP8, label='fp8'),
  _decoder('fsdp', 32, model='llama3_2_1b'),
  _decoder('tp_sp', 8),
  _decoder('3d', 64, MICROBATCHES),
  _decoder('fsdp', 64, hosts=8),
  _decoder('hsdp', 64, hosts=8),
  _decoder('fsdp', 32, model='qwen3_1_7b'),
  _decoder('fsdp', 32, model='gemma2_2b'),
  *(
    Case(model=model, layout='fsdp', batch=batch, bindings=(*bindings, *remat), label=label)
    for model, batch, bindings in (
      ('gpt2_xl', (64, 1024), ()),
      ('bert_large', (128, 512), BERT),
      ('t5_1_1_large', (64, 512), T5),
    )
    for remat, label in (((), ''), (("REMAT_POLICY = 'dots'",), 'dots'))
  ),
  *(
    _decoder(layout, 32, *bindings, model='llama3_2_1b', label=label)
    for layout in ('tp', 'tp_sp')
    for label, bindings in (('', ()), ('max_overlap', ("train.xla_preset = 'max_overlap'",)))
  ),
  *(
    _decoder(layout, rows, *bindings, model=model, label=label, hosts=hosts)
    for model, layout, rows, hosts in (
      ('llama3_8b', 'fsdp', 8, 1),
      ('llama3_2_1b', 'fsdp', 32, 1),
      ('llama3_2_1b', 'hsdp', 256, 8),
    )
    for label, bindings in LOOPS.items()
  ),
  *(
    Case(
      model=model,
      layout=layout,
      batch=batch,
      hosts=hosts,
      bindings=(f'NUM_MICROBATCHES = {num_microbatches}', *precision, *bindings),
      label=' '.join((order, 'x'.join(map(str, batch)), *(('fp8',) if precision else ()))),
    )
    for model, layout, batch, hosts, num_microbatches, precision, remat in ACCUMULATING
    for order, bindings in (
      ('by layer', ()),
      ('by microbatch', ("Partitioner.accumulate_by = 'microbatch'", f'REMAT_POLICY = {remat!r}')),
    )
  ),
  *(
    Case(
      model='llama3_70b',
      layout='3d',
      batch=(128, 8192),
      hosts=8,
      bindings=(
        FP8,
        "REMAT_POLICY = 'full'",
        'NUM_PARTITIONS = 4',
        'Partitioner.stage = 8',
        'Partitioner.num_pipeline_microbatches = 64',
        f'Partitioner.pipeline_schedule = {schedule!r}',
        *bindings,
      ),
      label=f'tensor 4, 8 stages, {schedule} fp8',
    )
    for schedule, bindings in PIPELINES.items()
  ),
)


def figures(case: Case) -> dict[str, Any]:
  """Returns the compiled step of `case` in numbers.

  'step_seconds' is the prediction of `plan`, 'roofline_seconds' the sum over all kernels at RATES;
  'seconds' went by until the step was compiled.
  """
  jax.config.update('jax_platforms', 'cpu')  # before jax starts its backend
  start = time.monotonic()
  step = case.compiled()
  seconds = round(time.monotonic() - start)
  predicted = predict(
    step.program, case.config(), gpu=step.gpus.target, assumed=Assumptions(), compiled=step
  )
  return {
    **gpu_json(step),
    'step_seconds': predicted.seconds_per_step,
    'roofline_seconds': roofline_seconds(step, predicted),
    'seconds': seconds,
  }


def roofline_seconds(step: CompiledStep, predicted: Prediction) -> float:
  """Returns the seconds of all kernels at RATES, with every collective hidden.

  A matmul takes its FLOPs or its bytes, whichever is longer; attention its FLOPs by formula, with
  the seven matmuls of Tokamax's backward pass for five; any other kernel its bytes.
  """
  attention = 0.0
  for part in predicted.time.parts:
    if part.kind == 'attention':
      once = 1 - part.recomputed_seconds / part.seconds  # two matmuls forward, five backward
      attention += part.flops * (1 + once * 2 / 7)
  return attention / RATES['attention'] + sum(
    max(kernel.flops / RATES[kernel.kind or 'gemm'], kernel.num_bytes / RATES['bytes'])
    for kernel in step.kernel_traffic
    if kernel.kind in (None, 'gemm', 'fp8_gemm')
  )


def in_process(case: Case) -> dict[str, Any]:
  """Returns `figures` of a new process, because a process reads XLA_FLAGS once."""
  os.environ['XLA_FLAGS'] = ' '.join(FLAGS.get(case.label, ()))
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as process:
    return process.submit(figures, case).result()


def line(name: str, figures: dict[str, Any]) -> str:
  """Returns a row of a Markdown table.

  GiB of arguments, temporaries and outputs; GB that elementwise kernels (in brackets: kernels that
  only move data, and copies) and matmuls read and write; TFLOP of matmuls, and ms at RATES; matrix
  kernels; GB sent, and the hidden share.
  """
  gib = [figures[f'{part}_bytes'] / 2**30 for part in ('argument', 'temporary', 'output')]
  kernels = ', '.join(
    f'{kind} {number["runs"]}' for kind, number in figures['kernels'].items() if number['calls']
  )
  sent = ', '.join(
    f'{row} {n["bytes"] / 1e9:.1f} GB ({n["hidden_bytes"] / n["bytes"]:.0%})'
    for row, n in figures['sent'].items()
    if n['bytes'] >= 5e7
  )
  moved = figures['traffic']
  parts = ('other_bytes', 'moved_bytes', 'copied_bytes', 'matmul_bytes')
  elementwise, only_moves, copies, matmuls = (round(moved[part] / 1e9) for part in parts)
  return (
    f'| {name} | {gib[0]:.1f} + {gib[1]:.1f} = {sum(gib):.1f} | '
    f'{elementwise} ({only_moves}, {copies}) + {matmuls} | {moved["matmul_flops"] / 1e12:.1f}, '
    f'{1e3 * figures["roofline_seconds"]:.0f} ms | {kernels} | {sent} |'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='only cases with this in their name')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  rows = json.loads(args.out.read_text())['rows'] if args.out.exists() else {}
  for case in CASES:
    if args.only in case.name:
      run = {'batch': case.batch, 'bindings': case.bindings}
      rows[case.name] = {**run, **in_process(case)}
      print(line(case.name, rows[case.name]), flush=True)
      rows = {c.name: rows[c.name] for c in CASES if c.name in rows}
      text = {
        'command': 'python -m benchmarks.compiled_memory',
        'jax': jax.__version__,
        'rows': rows,
      }
      args.out.write_text(json.dumps(text, indent=1) + '\n')


if __name__ == '__main__':
  main()
