"""Shows what training steps need, move and send on H100s; writes results/compiled_memory.json.

    python -m benchmarks.compiled_memory        # with the extra [plan]; no GPU, some minutes

Compiles the training step for GPUs that are absent, as `python -m t5x_gpu.plan --gpu=h100` does:
AdamW in float32, the XLA preset 'default'; decoders on packed rows of 4096 tokens. Nothing runs.
"""

import argparse
import json
import pathlib
import time
from typing import Any

import jax

from t5x_gpu.tools.planning.sharding import gpu_json
from tests.aot.cases import Case

OUT = pathlib.Path(__file__).parent / 'results' / 'compiled_memory.json'
MICROBATCHES = 'NUM_MICROBATCHES = 8'
FP8 = "PRECISION = 'fp8'"
BERT = "HEAD = 'mlm'", "TASK_FEATURE_LENGTHS = {'inputs': 512, 'targets': 512}"
T5 = ("DTYPE = 'bfloat16'",)


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
      ('bert_large', (128, 512), BERT),
      ('t5_1_1_large', (64, 512), T5),
    )
    for remat, label in (((), ''), (("REMAT_POLICY = 'dots'",), 'dots'))
  ),
)


def line(name: str, figures: dict[str, Any]) -> str:
  """Returns one row of a Markdown table."""
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
  gigabytes = [round(moved[part] / 1e9) for part in ('other_bytes', 'matmul_bytes')]
  return (
    f'| {name} | {gib[0]:.1f} + {gib[1]:.1f} = {sum(gib):.1f} | {gigabytes[0]} + {gigabytes[1]} | '
    f'{kernels} | {sent} |'
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='only cases with this in their name')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # before jax starts its backend
  rows = json.loads(args.out.read_text())['rows'] if args.out.exists() else {}
  for case in CASES:
    if args.only in case.name:
      start = time.monotonic()
      rows[case.name] = {
        'batch': case.batch,
        'bindings': case.bindings,
        **gpu_json(case.compiled()),
        'seconds': round(time.monotonic() - start),
      }
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
