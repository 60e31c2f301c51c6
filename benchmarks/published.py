"""Predicts steps that others have timed; writes results/published.json.

    python -m benchmarks.published        # with the extra [plan]; no GPU, ten minutes
    python -m benchmarks.published --dry_run        # by formula alone, seconds; prints only

Each run is another trainer's, with other kernels; ours has the same model, batch and number of
GPUs, and the `remat_policy` closest to theirs. Nothing runs.
"""

import argparse
import dataclasses
import json
import pathlib

import jax

from t5x_gpu.runtime.topology import Topology
from t5x_gpu.tools.planning.assumptions import Assumptions
from t5x_gpu.tools.planning.gpu_targets import find_target
from t5x_gpu.tools.planning.prediction import Planner, Prediction
from tests.aot.cases import Case

OUT = pathlib.Path(__file__).parent / 'results' / 'published.json'
NUM_DEVICES = 256  # the largest run's
TOKENS, TFLOPS = 'tokens/s per GPU', 'TFLOP/s'
FP8 = "PRECISION = 'fp8'"
DOTS, MINIMAL, ATTENTION = (f'REMAT_POLICY = {p!r}' for p in ('dots', 'minimal', 'attention'))
OVERLAP = 'Partitioner.overlap_layers = True'
LLAMA2_7B = (
  'TransformerConfig.vocab_size = 32000',
  'TransformerConfig.num_kv_heads = 32',
  'TransformerConfig.mlp_dim = 11008',
)
GPT_5B = (
  'DROPOUT_RATE = 0.0',
  'VOCAB_SIZE = 51200',
  'TransformerConfig.num_layers = 24',
  'TransformerConfig.embed_dim = 4096',
  'TransformerConfig.num_heads = 32',
  'TransformerConfig.head_dim = 128',
  'TransformerConfig.mlp_dim = 16384',
  'TransformerConfig.num_positions = 2048',
  'TransformerConfig.query_pre_attn_scalar = 128.0',
)
# On one GPU the fastest: dots, and no loop over its 48 layers.
GPT2_XL = ('DROPOUT_RATE = 0.0', DOTS, 'TransformerConfig.scan_unroll = 48')


@dataclasses.dataclass(frozen=True)
class Run:
  """A run that others have timed.

  Attributes:
    name: what they ran.
    measured: what they report, in `unit`.
    ours: our step of the same size.
    is_blind: whether it was predicted before any default was chosen by it.
    unit: TOKENS or TFLOPS.
  """

  name: str
  measured: float
  ours: Case
  is_blind: bool = False
  unit: str = TOKENS


def _case(model: str, layout: str, rows: int, length: int, *bindings: str, **gpus) -> Case:
  return Case(model=model, layout=layout, batch=(rows, length), bindings=bindings, **gpus)


_RECORD = _case(
  'llama3_8b',
  'fsdp',
  128,
  8192,
  FP8,
  OVERLAP,
  'NUM_MICROBATCHES = 16',
  "Partitioner.accumulate_by = 'microbatch'",
  'TransformerConfig.loss_chunks = 2',
)
_RECORD_70B = _case(
  'llama3_70b',
  'fsdp',
  128,
  8192,
  FP8,
  ATTENTION,
  OVERLAP,
  'NUM_MICROBATCHES = 2',
  "Partitioner.accumulate_by = 'microbatch'",
  'TransformerConfig.loss_chunks = 2',
  hosts=8,
)
RUNS = (
  Run('Llama-2 7B, MaxText', 11361, _case('llama3_8b', 'fsdp', 16, 4096, *LLAMA2_7B, DOTS)),
  Run(
    'GPT-2 XL, PyTorch',
    479,
    _case('gpt2_xl', 'dp', 16, 1024, *GPT2_XL, gpus_per_host=1),
    unit=TFLOPS,
  ),
  Run(
    'GPT-2 XL, FP8, Transformer Engine',
    638,
    _case('gpt2_xl', 'dp', 16, 1024, *GPT2_XL, FP8, gpus_per_host=1),
    unit=TFLOPS,
  ),
  Run(
    'GPT 5B, A100, Rosetta-Pax',
    5750,
    _case('gpt2_xl', 'fsdp', 2048, 2048, *GPT_5B, DOTS, gpu='a100-80', hosts=32),
  ),
  Run(
    'GPT 5B, H100, Rosetta-Pax',
    13258,
    _case('gpt2_xl', 'fsdp', 2048, 2048, *GPT_5B, DOTS, hosts=32),
  ),
  Run(
    'Llama-3.1 8B, H200, FP8, torchtitan',
    10938,
    _case('llama3_1_8b', 'fsdp', 64, 8192, FP8, DOTS, gpu='h200', hosts=4),
  ),
  Run(
    'Llama-2 7B, AXLearn', 9204, _case('llama3_8b', 'hsdp', 1024, 4096, *LLAMA2_7B, DOTS, hosts=32)
  ),
  Run('Llama-3.1 8B, 500 W, torchtitan', 6667, _case('llama3_1_8b', 'fsdp', 16, 8192, MINIMAL)),
  Run('Llama-3 8B, FP8, Megatron-Bridge', 14451, _RECORD, is_blind=True),
  Run('Llama-3 70B, FP8, Megatron-Bridge', 1602, _RECORD_70B, is_blind=True),
)


def predicted(run: Run, *, dry_run: bool) -> Prediction:
  """Returns the prediction for `run` with the default assumptions."""
  case = run.ours
  topology = Topology(case.hosts, case.gpus_per_host)
  planner = Planner(find_target(case.gpu), Assumptions(), devices=jax.devices())
  return (planner.by_formula if dry_run else planner.exactly)(case.config(), topology)


def row(run: Run, prediction: Prediction) -> dict[str, object]:
  """Returns the figures of a prediction, and the measured one."""
  rate = prediction.tokens_per_second / prediction.num_gpus
  if run.unit == TFLOPS:
    rate = prediction.flops_per_gpu / 1e12
  return {
    'published': run.measured,
    'unit': run.unit,
    'predicted': round(rate),
    'ratio': round(rate / run.measured, 2),
    'step_seconds': prediction.seconds_per_step,
    'fits': prediction.memory.fits,
    'is_blind': run.is_blind,
  }


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--only', default='', help='text in the name of the runs to predict')
  parser.add_argument('--dry_run', action='store_true', help='by formula alone; writes nothing')
  flags = parser.parse_args()
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', NUM_DEVICES)
  found = json.loads(OUT.read_text())['runs'] if OUT.exists() else {}
  for run in RUNS:
    if flags.only not in run.name:
      continue
    found[run.name] = row(run, predicted(run, dry_run=flags.dry_run))
    print(f'{run.name:40s}', *found[run.name].values(), flush=True)
    if not flags.dry_run:
      content = {'command': 'python -m benchmarks.published', 'jax': jax.__version__, 'runs': found}
      OUT.write_text(json.dumps(content, indent=2) + '\n')


if __name__ == '__main__':
  main()
