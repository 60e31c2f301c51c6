"""Shows what a loop over layers costs on one GPU; writes results/layer_loop.json.

    python -m benchmarks.layer_loop        # with the extra [plan]; no GPU, ten minutes

Compiles training steps for one H200 with every number of layers per iteration
(`TransformerConfig.scan_unroll`) in docs/performance.md: what elementwise kernels read and
write, temporaries and CPU seconds of tracing and compilation. Nothing runs.
"""

import argparse
import dataclasses
import json
import pathlib
import time
from typing import Optional

import jax

from benchmarks.gpu.shapes import SHAPES
from benchmarks.gpu.step import model_of, run_of
from t5x_gpu.tools.planning.gpu_compile import compile_step
from t5x_gpu.tools.planning.gpu_targets import described_gpus
from t5x_gpu.tools.planning.sharding import gpu_json

OUT = pathlib.Path(__file__).parent / 'results' / 'layer_loop.json'


@dataclasses.dataclass(frozen=True)
class Case:
  """A shape of the GPU benchmark with a remat policy (None: its own) and layers per iteration."""

  shape: str
  unrolls: tuple[int, ...]
  remat_policy: Optional[str] = None
  precision: str = 'bfloat16'

  @property
  def name(self) -> str:
    policy = self.remat_policy or SHAPES[self.shape].remat_policy
    return f'{self.shape} {policy} {self.precision}'


CASES = (
  Case('decoder_1.3b_2048', (1, 4, 8, 24), 'dots'),
  Case('decoder_1.3b_2048', (1, 24), 'none'),
  Case('decoder_134m', (1, 12)),
  Case('t5_large', (1, 24)),
  Case('decoder_1.3b_2048', (1, 24), 'dots', 'fp8'),
  Case('decoder_1.3b_2048', (1, 24), 'none', 'fp8'),
  Case('gpt2_xl', (1, 48)),
)


def measure(case: Case, unroll: int) -> dict[str, float]:
  """Returns bytes and seconds of the step of `case` with `unroll` layers per iteration."""
  shape = SHAPES[case.shape]
  if case.remat_policy:
    shape = dataclasses.replace(shape, remat_policy=case.remat_policy)
  shape = dataclasses.replace(shape, scan_unroll=unroll)
  run = run_of(model_of(shape, case.precision), shape, shape.rows[0])
  start = time.process_time()
  compiled = compile_step(run, described_gpus('h200', gpus_per_host=1))
  figures = gpu_json(compiled)
  return {
    'layers_per_iteration': unroll,
    'elementwise_bytes': figures['traffic']['other_bytes'],
    'temporary_bytes': figures['temporary_bytes'],
    'compile_cpu_seconds': round(time.process_time() - start),
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--only', default='', help='only cases with this in their name')
  parser.add_argument('--out', type=pathlib.Path, default=OUT)
  args = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')  # before jax starts its backend
  known = json.loads(args.out.read_text())['rows'] if args.out.exists() else {}
  for case in CASES:
    if args.only in case.name:
      known[case.name] = [measure(case, unroll) for unroll in case.unrolls]
      for row in known[case.name]:
        print(case.name, json.dumps(row), flush=True)
  text = {
    'command': 'python -m benchmarks.layer_loop',
    'gpu': 'one H200',
    'jax': jax.__version__,
    'rows': {case.name: known[case.name] for case in CASES if case.name in known},
  }
  args.out.write_text(json.dumps(text, indent=1) + '\n')


if __name__ == '__main__':
  main()
